// A CUDA driver without a GPU: enough of libcuda for Triton to load a kernel and launch it. A launch is recorded, not run.
// Built and read by fake_cuda.py.
#include <stdint.h>
#include <string.h>

#include "cuda.h"

#define PARAMETERS 64
#define BYTES 128

typedef struct {
  uint64_t function, stream;
  uint32_t grid[3], threads, shared, cluster;
  uint8_t parameters[PARAMETERS][BYTES];
} Launch;

// Which bytes of which parameter to keep is the reader's knowledge: a driver learns it from the cubin.
uint32_t fake_sizes[PARAMETERS];
uint32_t fake_count;
Launch fake_launch;
uint64_t fake_launches, fake_encoded, fake_modules;

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  Launch *to = &fake_launch;
  to->function = (uint64_t)function;
  to->stream = (uint64_t)config->hStream;
  to->grid[0] = config->gridDimX;
  to->grid[1] = config->gridDimY;
  to->grid[2] = config->gridDimZ;
  to->threads = config->blockDimX;
  to->shared = config->sharedMemBytes;
  to->cluster = 1;
  for (uint32_t i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
      to->cluster = config->attrs[i].value.clusterDim.x;
  for (uint32_t i = 0; i < fake_count; ++i)
    memcpy(to->parameters[i], parameters[i], fake_sizes[i]);
  __atomic_add_fetch(&fake_launches, 1, __ATOMIC_SEQ_CST);
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  uint64_t *words = (uint64_t *)map;
  memset(map, 0, sizeof *map);
  words[0] = (uint64_t)address;
  words[1] = rank | (uint64_t)type << 8 | (uint64_t)swizzle << 16 | (uint64_t)fill << 24;
  for (uint32_t i = 0; i < rank; ++i) {
    words[2 + i] = dims[i];
    words[7 + i] = box[i];
    if (i + 1 < rank)
      words[12 + i] = strides[i];
  }
  __atomic_add_fetch(&fake_encoded, 1, __ATOMIC_SEQ_CST);
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)++fake_modules;
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)(4096 + (uint64_t)module);
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 232448 : 1;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "an error of the fake driver";
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return *context = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return *count = 1, CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS;
}
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) { return *n = 1, CUDA_SUCCESS; }
