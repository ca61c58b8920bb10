"""Host side of the pointer product: memory facts of the operands, the kernel's arguments, and its launches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from registry.plugins.triton_matmul.kernel import matmul_tiles
from registry.toolbox.counters import zeroes
from registry.toolbox.launch import Launcher
from registry.toolbox.outputs import allocator

ITEM = {"float16": 2, "bfloat16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "int32": 4}
SHORT = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int8": "i8",
    "int32": "i32",
}


def _pow2(value: int, limit: int = 16) -> int:
    """The largest power of two up to `limit` that divides `value` (0 is divided by all)."""
    return math.gcd(value, limit)


def _run(extents, strides, unit, base, item) -> int:
    """Elements of one operand that are always aligned together: what its outer strides and base allow."""
    run = _pow2(max(base // item, 1))
    for extent, stride, name in zip(extents, strides, ("z", "outer", "inner"), strict=True):
        if extent > 1 and not (name == "inner" and unit):
            run = min(run, _pow2(stride))
    return run


def memory_facts(dims, a, b, c) -> dict[str, Any]:
    """Compile-time memory facts. dims = (m, n, k, batch); each operand is (strides [z, row, column], base, item)."""
    m, n, k, z = dims
    (azs, a_base, a_item), (bzs, b_base, b_item), (czs, c_base, c_item) = a, b, c
    a_unit = "k" if azs[2] == 1 or k == 1 else "m" if azs[1] == 1 or m == 1 else ""
    b_unit = "n" if bzs[2] == 1 or n == 1 else "k" if bzs[1] == 1 or k == 1 else ""
    c_unit = "n" if czs[2] == 1 or n == 1 else ""
    a_outer = (azs[0], azs[1], 1) if a_unit == "k" else (azs[0], azs[2], 1)
    b_outer = (bzs[0], bzs[1], 1) if b_unit == "n" else (bzs[0], bzs[2], 1)
    a_run = _run((z, m if a_unit == "k" else k, 1), a_outer, a_unit, a_base, a_item) if a_unit else 1
    b_run = _run((z, k if b_unit == "n" else n, 1), b_outer, b_unit, b_base, b_item) if b_unit else 1
    c_run = _run((z, m, 1), (czs[0], czs[1], 1), c_unit, c_base, c_item) if c_unit else 1
    longest = max(abs(s) for t in (azs, bzs, czs) for s in t[1:])
    return {
        "A_UNIT": a_unit,
        "B_UNIT": b_unit,
        "C_UNIT": c_unit,
        "A_RUN": a_run,
        "B_RUN": b_run,
        "C_RUN": c_run,
        "M_RUN": _pow2(m),
        "N_RUN": _pow2(n),
        "WIDE": longest >= 1 << 22,
    }


def _fp32_precision() -> str:
    """torch's own switch: torch.set_float32_matmul_precision / torch.backends.cuda.matmul.allow_tf32."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _at_once(config) -> int:
    """Partials in flight while they are added up: at most 64 registers of a thread."""
    each = config["BLOCK_M"] * config["BLOCK_N"] // (32 * config["num_warps"])
    return max(d for d in range(1, max(64 // max(each, 1), 1) + 1) if config["SPLIT"] % d == 0)


def constants_of(memory, config, dtype, dims, bias, scaled, activation, pdl, precision) -> dict[str, Any]:
    (m, n, k), bk = dims, config["BLOCK_K"]
    return {
        **memory,
        "BM": config["BLOCK_M"],
        "BN": config["BLOCK_N"],
        "BK": bk,
        "GROUP": config["GROUP"],
        "SPLIT": config["SPLIT"],
        "K_TAIL": k % bk != 0,
        "FEW_M": m < config["BLOCK_M"],
        "FEW_N": n < config["BLOCK_N"],
        "PRECISION": precision,
        "IMPRECISE": min(bk, 128) if dtype.startswith("float8") else 0,
        "ACC": tl.int32 if dtype == "int8" else tl.float32,
        "BIAS": bias,
        "SCALED": scaled,
        "ACT": activation or "",
        "PDL": pdl,
        "AT_ONCE": _at_once(config),
    }


def options_of(config, pdl: bool) -> dict[str, Any]:
    pdl_option = {"launch_pdl": True} if pdl else {}
    return {"num_warps": config["num_warps"], "num_stages": config["num_stages"], **pdl_option}


_newer: dict[Any, bool] = {}


def _has_pdl(device: torch.device) -> bool:
    """Programmatic dependent launch: sm90 and newer."""
    if device.type != "cuda":
        return False
    if device not in _newer:
        _newer[device] = torch.cuda.get_device_capability(device)[0] >= 9
    return _newer[device]


FLAGS = 256  # arrival counters that a launch may have without making its own


def _split_buffers(
    dtype: torch.dtype, tiles: int, config: Mapping[str, Any]
) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """A function that makes the partials of a launch, and one arrival counter per tile, which it leaves at zero."""
    kind = torch.int32 if dtype == torch.int8 else torch.float32
    new_part = allocator((tiles * config["SPLIT"] * config["BLOCK_M"] * config["BLOCK_N"],), kind)

    def buffers(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not a.is_cuda or tiles > FLAGS:
            return new_part(a), torch.zeros(tiles, device=a.device, dtype=torch.int32)
        return new_part(a), zeroes(a.get_device(), FLAGS).take()

    return buffers


def _align(t: torch.Tensor) -> int:
    return math.gcd(t.data_ptr(), 16) if t.data_ptr() else 16


def _zmn(t: torch.Tensor) -> tuple[int, int, int]:
    return (0, *t.stride()) if t.dim() == 2 else tuple(t.stride())


def _new_out(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
    usual = torch.int32 if a.dtype == torch.int8 else torch.bfloat16 if a.element_size() == 1 else a.dtype
    return torch.empty((*a.shape[:-1], b.shape[-1]), device=a.device, dtype=out_dtype or usual)


def _arguments(
    a, b, out, config, bias, activation, scale_a, scale_b, precision=None
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Runtime arguments (but the split-K buffers), compile-time constants, number of tiles."""
    (m, k), n = a.shape[-2:], b.shape[-1]
    z = a.shape[0] if a.dim() == 3 else 1
    memory = memory_facts((m, n, k, z), *((_zmn(t), _align(t), t.element_size()) for t in (a, b, out)))
    scaled = scale_a is not None
    sa = (0, *scale_a.stride())[-2:] if scaled and scale_a.dim() else (0, 0)
    sb = scale_b.stride(-1) if scaled and scale_b.dim() else 0
    values = (
        a,
        b,
        out,
        out if bias is None else bias,
        scale_a if scaled else out,
        scale_b if scaled else out,
        out,
        out,
        m,
        n,
        k,
        *_zmn(a),
        *_zmn(b),
        *_zmn(out),
        0 if bias is None else bias.stride(-1),
        *sa,
        sb,
    )
    constants = constants_of(
        memory,
        config,
        str(a.dtype)[6:],
        (m, n, k),
        bias is not None,
        scaled,
        activation,
        _has_pdl(a.device),
        precision or (_fp32_precision() if a.dtype == torch.float32 else "tf32"),
    )
    tiles = triton.cdiv(m, config["BLOCK_M"]) * triton.cdiv(n, config["BLOCK_N"]) * z
    return dict(zip(matmul_tiles.arg_names, values, strict=False)), constants, tiles


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
    """act((a @ b) * scale_a * scale_b + bias) for 2-D or 3-D operands of any strides."""
    out = _new_out(a, b, out_dtype) if out is None else out
    values, constants, tiles = _arguments(a, b, out, config, bias, activation, scale_a, scale_b)
    if config["SPLIT"] > 1:
        values["part_ptr"], values["count_ptr"] = _split_buffers(a.dtype, tiles, config)(a)
    matmul_tiles[(tiles * config["SPLIT"],)](**values, **constants, **options_of(config, constants["PDL"]))
    return out


def prepare(problem: Any, config: Mapping[str, Any]) -> Any:
    """`matmul` with its host work done once, at the first call: later ones only fill in addresses."""
    bound: Any = None
    buffers: Any = None
    precision = "ieee" if problem.ieee else "tf32"
    new_out = allocator((*problem.operands[0].shape[:-1], problem.n), getattr(torch, problem.out_dtype))

    def launch(a, b, *, bias=None, out_dtype=None, scale_a=None, scale_b=None, out=None):
        nonlocal bound, buffers
        out = new_out(a) if out is None else out
        if bound is None:
            values, constants, tiles = _arguments(
                a, b, out, config, bias, problem.activation, scale_a, scale_b, precision
            )
            if config["SPLIT"] > 1:
                buffers = _split_buffers(a.dtype, tiles, config)
                values["part_ptr"], values["count_ptr"] = buffers(a)
            launcher = Launcher(matmul_tiles, constants=constants, options=options_of(config, constants["PDL"]))
            bound = launcher.bind(values, (tiles * config["SPLIT"],), device=a.device)
        bound(
            a,
            b,
            out,
            out if bias is None else bias,
            out if scale_a is None else scale_a,
            out if scale_b is None else scale_b,
            *((out, out) if buffers is None else buffers(a)),
        )
        return out

    return launch
