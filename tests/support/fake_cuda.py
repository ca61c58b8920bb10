"""Launch real compiled kernels without a GPU: Triton's own driver over a libcuda that records what it is given."""

from __future__ import annotations

import contextlib
import ctypes
import re
import shutil
import struct
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

PARAMETERS, BYTES = 64, 128


class _Launch(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32),
        ("shared", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32),
        ("parameters", ctypes.c_uint8 * BYTES * PARAMETERS),
    ]


def _name_the_entry(backend: Any, source: str, metadata: dict[str, Any], *_: Any) -> str:
    """Of what make_ptx does what the rest of a launch hangs on."""
    (metadata["name"],) = re.findall(r"^define \w*\s?ptx_kernel void @(\w+)\(", source, re.M)
    return ""


class FakeCuda:
    """The recording driver. Tensors are CPU tensors; their addresses are what the kernel would get."""

    stream = 0
    device = 0
    devices = 1

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    @staticmethod
    def possible() -> bool:
        """Whether it can be built and would not stand in the way of a real driver."""
        header = Path(sysconfig.get_paths()["include"], "Python.h")
        return not torch.cuda.is_available() and shutil.which("gcc") is not None and header.exists()

    @classmethod
    def build(cls, folder: Path) -> FakeCuda:
        """Compile the driver and load it as the process's libcuda."""
        import triton

        include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
        target = folder / "libcuda.so.1"
        source = Path(__file__).with_name("fake_cuda.c")
        command = ["gcc", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{include}", source, "-o", target]
        subprocess.run(command, check=True)
        return cls(ctypes.CDLL(str(target), mode=ctypes.RTLD_GLOBAL))

    def _number(self, name: str) -> int:
        return int(ctypes.c_uint64.in_dll(self._library, name).value)

    @property
    def launches(self) -> int:
        return self._number("fake_launches")

    @property
    def encoded(self) -> int:
        """Tensor maps encoded so far."""
        return self._number("fake_encoded")

    def expect(self, *formats: str) -> None:
        """The kernel's parameters as struct formats ("Q" a pointer, "i", "f", "128s" a tensor map)."""
        self.formats = formats
        sizes = (ctypes.c_uint32 * PARAMETERS).in_dll(self._library, "fake_sizes")
        for i, one in enumerate(formats):
            sizes[i] = struct.calcsize(one)
        ctypes.c_uint32.in_dll(self._library, "fake_count").value = len(formats)

    @property
    def last(self) -> _Launch:
        return _Launch.in_dll(self._library, "fake_launch")

    @property
    def parameters(self) -> list[Any]:
        """What the last launch gave the kernel; a tensor map as its 16 words."""
        raw = [bytes(one) for one in self.last.parameters[: len(self.formats)]]
        values = [struct.unpack_from(how, data)[0] for how, data in zip(self.formats, raw, strict=True)]
        return [struct.unpack("16Q", one) if isinstance(one, bytes) else one for one in values]

    def element_types(self) -> list[int]:
        """The CUtensorMapDataType of each tensor map among `parameters`: 7 is FLOAT32, 11 TFLOAT32."""
        return [words[1] >> 8 & 255 for words in self.parameters if isinstance(words, tuple)]

    def boxes(self) -> list[tuple[int, ...]]:
        """The box of each tensor map among `parameters`, its contiguous dimension last."""
        maps = [words for words in self.parameters if isinstance(words, tuple)]
        return [words[7 : 7 + (words[1] & 255)][::-1] for words in maps]

    @contextlib.contextmanager
    def installed(self, monkeypatch: Any, folder: Path) -> Iterator[FakeCuda]:
        """Make Triton and torch see one (or `devices`) sm90 GPU behind this driver."""
        monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(folder))
        monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
        from triton._C.libtriton import llvm
        from triton.backends.nvidia import driver as nvidia
        from triton.backends.nvidia.compiler import CUDABackend
        from triton.runtime.driver import driver

        @contextlib.contextmanager
        def current(index: int) -> Iterator[None]:
            before, self.device = self.device, index
            try:
                yield
            finally:
                self.device = before

        # A launch needs what Triton finds out before it has LLVM write a program: nobody runs one here.
        monkeypatch.setattr(llvm, "optimize_module", lambda *_, **__: None)
        monkeypatch.setattr(CUDABackend, "make_ptx", _name_the_entry)
        monkeypatch.setattr(CUDABackend, "make_cubin", lambda *_: b"no machine code: this driver runs none")
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: self.stream, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: self.device, raising=False)
        monkeypatch.setattr(torch.cuda, "device", current)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: self.devices)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.device)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        nvidia.libcuda_dirs.cache_clear()
        nvidia.library_dirs.cache_clear()
        driver.set_active(nvidia.CudaDriver())
        try:
            yield self
        finally:
            driver._active = None
            nvidia.libcuda_dirs.cache_clear()
            nvidia.library_dirs.cache_clear()
