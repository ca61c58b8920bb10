"""Host side of the warp-specialised product: from tensors (or a Problem) to compile-time switches and a launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from registry.plugins.gluon_matmul_ws.kernel import matmul_ws
from registry.toolbox.counters import zeroes
from registry.toolbox.launch import Launcher
from registry.toolbox.outputs import allocator

GL = {
    "float16": gl.float16,
    "bfloat16": gl.bfloat16,
    "float32": gl.float32,
    "float8_e4m3fn": gl.float8e4nv,
    "float8_e5m2": gl.float8e5,
    "int8": gl.int8,
    "int32": gl.int32,
}
SHORT = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int8": "i8",
    "int32": "i32",
}


FLAGS = 256  # counters that a launch may have without making its own


class Switches:
    """Compile-time switches of one kernel: hashable, and equal where all are equal."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)
        self._key = tuple(sorted((name, str(value)) for name, value in values.items()))

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._key == self._key

    def __repr__(self) -> str:
        return "Switches(" + ", ".join(f"{name}={value}" for name, value in self._key) + ")"


def item(dtype: str) -> int:
    return GL[dtype].primitive_bitwidth // 8


def split_n(width: int) -> tuple[int, int]:
    """BN as one or two powers of two: 192 -> (128, 64)."""
    first = 1 << (width.bit_length() - 1)
    return first, width - first


def split_k(config: Mapping[str, Any]) -> int:
    """Ranges of K that a tile is cut into; configs from before there were any have one."""
    return config.get("SPLIT_K", 1)


def _at_once(config: Mapping[str, Any]) -> int:
    """Partial sums in flight while they are added up: as many as leave registers for the accumulators."""
    most = max(1, 128 * 64 // (config["BLOCK_M"] * config["BLOCK_N"] // 2))
    return max(d for d in range(1, most + 1) if split_k(config) % d == 0)


def switches(
    dtype: str,
    out_dtype: str,
    config: Mapping[str, Any],
    *,
    a_t: bool,
    b_t: bool,
    tma_store: bool,
    bias: bool,
    scaled: bool,
    activation: str,
) -> Switches:
    parts = 2 if config["MODE"] == "coop" else 1
    n0, n1 = split_n(config["BLOCK_N"])
    split, fp8 = config["SPLIT"], dtype.startswith("float8")
    return Switches(
        PARTS=parts,
        GM=config["BLOCK_M"] // parts,
        N0=n0,
        N1=n1,
        BK=config["BLOCK_K"],
        STAGES=config["STAGES"],
        STORES=config["STORES"],
        EN=min(128 // item(out_dtype), n1 or n0 // split),
        GROUP=config["GROUP"],
        SPLIT=split,
        SPLIT_K=split_k(config),
        AT_ONCE=_at_once(config),
        REGS=240,
        ITEM=item(dtype),
        PDL=config.get("PDL", True),
        A_T=a_t,
        B_T=b_t,
        TMA_STORE=tma_store,
        EXACT=fp8 * (1 if n1 else 2),
        ROUND=dtype == "float32",
        BIAS=bias,
        SCALED=scaled,
        ACT=activation,
        ACC=gl.int32 if dtype == "int8" else gl.float32,
    )


def blocks_of(cfg: Switches) -> dict[str, tuple[int, int]]:
    """The (rows, columns) of each descriptor's block."""
    b = (lambda n: (n, cfg.BK)) if cfg.B_T else (lambda n: (cfg.BK, n))
    return {
        "a": (cfg.BK, cfg.GM) if cfg.A_T else (cfg.GM, cfg.BK),
        "b0": b(cfg.N0),
        "b1": b(cfg.N1 or cfg.N0 // cfg.SPLIT),
        "c": (cfg.GM, cfg.EN),
    }


def layout(block: tuple[int, int], dtype: str) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([1, *block], GL[dtype])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _strides(t: torch.Tensor) -> tuple[int, int, int]:
    return (0, *t.stride()) if t.dim() == 2 else tuple(t.stride())


def _descriptor(t: torch.Tensor, turned: bool, block: tuple[int, int], dtype: str) -> TensorDescriptor:
    """[batch, rows, columns], columns contiguous; a broadcast batch has one entry. Strides of extents of 1 are free."""
    z, outer, inner = _strides(t)
    rows, columns = t.shape[-2:]
    if turned:
        rows, columns, outer = columns, rows, inner
    unit = 16 // t.element_size()
    outer = outer if rows > 1 else -(-columns // unit) * unit
    entries = t.shape[0] if t.dim() == 3 and z else 1
    z = z if entries > 1 else -(-rows * outer // unit) * unit
    return TensorDescriptor(t, [entries, rows, columns], [z, outer, 1], [1, *block], layout(block, dtype))


def turned(shape, strides) -> bool:
    """Whether an operand is contiguous along its second-last dimension rather than its last."""
    return strides[-1] != 1 and (strides[-2] == 1 or shape[-2] == 1) and shape[-1] != 1


def tma_can_store(shape, strides, base: int, size: int) -> bool:
    """Unit inner stride, everything else a multiple of 16 bytes, the row too: TMA stores whole units of 16 bytes, so
    a row that ends inside one would be written past its end."""
    if strides[-1] != 1 or base % 16 or shape[-1] * size % 16:
        return False
    return all(extent == 1 or stride * size % 16 == 0 for extent, stride in zip(shape[:-1], strides[:-1], strict=True))


def workspace(cfg: Switches, tiles: int) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """A function that makes the partial sums of a launch, and the counters of those who wrote them, two for each tile,
    which it leaves at zero."""
    kind = torch.int32 if cfg.ACC is gl.int32 else torch.float32
    new_partial = allocator((tiles * cfg.SPLIT_K * cfg.PARTS * cfg.GM * (cfg.N0 + cfg.N1),), kind)

    def buffers(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if 2 * tiles > FLAGS:
            return new_partial(a), torch.zeros(2 * tiles, device=a.device, dtype=torch.int32)
        return new_partial(a), zeroes(a.get_device(), FLAGS).take()

    return buffers


def arguments(a, b, out, config, bias, activation, scale_a, scale_b) -> tuple[tuple, tuple[int], int]:
    """Kernel arguments, grid, number of tiles."""
    (m, k), n = a.shape[-2:], b.shape[-1]
    z = a.shape[0] if a.dim() == 3 else 1
    kind, out_kind = _name(a.dtype), _name(out.dtype)
    a_t, b_t = turned(a.shape, a.stride()), turned(b.shape, b.stride())
    scaled = scale_a is not None or scale_b is not None
    if scaled and (scale_a is None or scale_b is None):
        one = torch.ones((), device=a.device)
        scale_a, scale_b = (one if s is None else s for s in (scale_a, scale_b))
    store = tma_can_store(out.shape, out.stride(), out.data_ptr(), out.element_size())
    cfg = switches(
        kind,
        out_kind,
        config,
        a_t=a_t,
        b_t=b_t,
        tma_store=store,
        bias=bias is not None,
        scaled=scaled,
        activation=activation or "",
    )
    block = blocks_of(cfg)
    a_desc = _descriptor(a, a_t, block["a"], kind)
    b0, b1 = (_descriptor(b, b_t, block[x], kind) for x in ("b0", "b1"))
    c_desc = _descriptor(out, False, block["c"], out_kind) if store else a_desc
    tiles_m, tiles_n = triton.cdiv(m, cfg.PARTS * cfg.GM), triton.cdiv(n, cfg.N0 + cfg.N1)
    tiles = tiles_m * tiles_n * z
    count = _sm_count(a.device)
    grid = min(tiles * cfg.SPLIT * cfg.SPLIT_K, count)
    whole = tiles // count * count if cfg.SPLIT > 1 else tiles  # tiles of the complete rounds
    sa = (0, 0) if not scaled or scale_a.dim() == 0 else (0, *scale_a.stride())[-2:]
    sb = 0 if not scaled or scale_b.dim() == 0 else scale_b.stride(-1)
    bias = bias if bias is None or bias.stride(-1) == 1 else bias.contiguous()
    free = (out, out, out)
    pointers = (
        (bias if bias is not None else out, scale_a, scale_b)
        if scaled
        else (bias if bias is not None else out, *free[1:])
    )
    args = (
        a_desc,
        b0,
        b1,
        c_desc,
        out,
        *pointers,
        *(workspace(cfg, tiles)(a) if cfg.SPLIT_K > 1 else free[:2]),
        m,
        n,
        triton.cdiv(k, cfg.BK),
        tiles,
        whole,
        tiles_m,
        tiles_n,
        int(a_desc.shape[0] > 1),
        int(b0.shape[0] > 1),
        *_strides(out),
        *sa,
        sb,
        cfg,
    )
    return args, (grid,), tiles


_sms: dict[Any, int] = {}


def _sm_count(device: torch.device) -> int:
    if device not in _sms:
        _sms[device] = torch.cuda.get_device_properties(device).multi_processor_count
    return _sms[device]


def _new_out(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
    usual = torch.int32 if a.dtype == torch.int8 else torch.bfloat16 if a.element_size() == 1 else a.dtype
    return torch.empty((*a.shape[:-1], b.shape[-1]), device=a.device, dtype=out_dtype or usual)


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    config: Mapping[str, Any],
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """act((a @ b) * scale_a * scale_b + bias) for 2-D or 3-D operands."""
    out = _new_out(a, b, out_dtype) if out is None else out
    args, grid, _ = arguments(a, b, out, config, bias, activation, scale_a, scale_b)
    matmul_ws[grid](*args, num_warps=4, launch_pdl=args[-1].PDL)
    return out


def prepare(problem: Any, config: Mapping[str, Any]) -> Any:
    """`matmul` with its host work done once, at the first call: later ones only fill in addresses."""
    bound: Any = None
    buffers: Any = None
    stores = False
    new_out = allocator((*problem.operands[0].shape[:-1], problem.n), getattr(torch, problem.out_dtype))

    def launch(a, b, *, bias=None, out_dtype=None, scale_a=None, scale_b=None, out=None):
        nonlocal bound, buffers, stores
        out = new_out(a) if out is None else out
        bias = bias if bias is None or bias.stride(-1) == 1 else bias.contiguous()
        if bound is None:
            (*args, cfg), grid, tiles = arguments(a, b, out, config, bias, problem.activation, scale_a, scale_b)
            stores = cfg.TMA_STORE
            buffers = workspace(cfg, tiles) if cfg.SPLIT_K > 1 else None
            launcher = Launcher(matmul_ws, constants={"cfg": cfg}, options={"num_warps": 4, "launch_pdl": cfg.PDL})
            bound = launcher.bind(dict(zip(matmul_ws.arg_names, args, strict=False)), grid, device=a.device)
        bound(
            a,
            b,
            b,
            out if stores else a,
            out,
            out if bias is None else bias,
            out if scale_a is None else scale_a,
            out if scale_b is None else scale_b,
            *((out, out) if buffers is None else buffers(a)),
        )
        return out

    return launch
