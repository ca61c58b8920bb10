"""Matrix product in plain Triton over tensor descriptors: TMA loads and stores, persistent, NVIDIA sm90 and newer.

Tile facts.  One program per SM walks BM x BN tiles of C in groups of GROUP row tiles (neighbours share A and B in L2).
Blocks of BK arrive by TMA into `num_stages` buffers, read along whichever dimension of an operand is contiguous; what
lies outside a matrix arrives as zeros, so no ragged size needs a mask.  A batch is a third dimension of the
descriptors; a broadcast one has a single entry.

Schedule.  One loop over tiles with a pipelined loop over K inside; the compiler keeps a wgmma in flight and issues the
next TMA loads.  C leaves by TMA where its rows are 16-byte multiples, else by masked stores.
TMA's rules.  Base and every stride but the unit one must be multiples of 16 bytes (`tma_reasons`).

Measured facts (H200, ratios to cuBLAS of the same run).  bf16, M >= 512: 0.96 by geometric mean, least 0.77 (1.2 rounds
over the chip); fp8 0.68 (the exact sum); tf32 (nt) 0.38, for B goes back to shared memory; ieee is not
claimed: its FMA products spill (in triton 3.6 all but nn, in 3.9 all).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from registry import Design, Reason, Requires, Variant, hookimpl
from registry.toolbox.arithmetic import activate, to_tf32
from registry.toolbox.launch import Launcher
from registry.toolbox.outputs import allocator

_INT_ARGS = ["M", "N", "K", "tiles", "scz", "scm", "scn", "s_am", "s_bn"]


@triton.jit
def _epilogue(
    acc,
    bias_ptr,
    sa_ptr,
    sb_ptr,
    rm,
    rn,
    M,
    N,
    s_am,
    s_bn,
    kind: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    ACT: tl.constexpr,
):
    if kind != tl.int32:  # all in fp32, rounded once; integers stay integers
        acc = acc.to(tl.float32)
    if SCALED:
        sa = tl.load(sa_ptr + rm * s_am, mask=rm < M, other=0.0)
        sb = tl.load(sb_ptr + rn * s_bn, mask=rn < N, other=0.0)
        acc = acc * sa[:, None] * sb[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + rn, mask=rn < N, other=0.0).to(acc.dtype)[None, :]
    return activate(acc, ACT).to(kind)


@triton.jit(do_not_specialize=_INT_ARGS)
def _matmul_tma(
    a_desc,
    b_desc,
    c_desc,
    c_ptr,
    bias_ptr,
    sa_ptr,
    sb_ptr,
    M,
    N,
    K,
    tiles,
    scz,
    scm,
    scn,
    s_am,
    s_bn,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    A_T: tl.constexpr,
    B_T: tl.constexpr,
    A_BATCHED: tl.constexpr,
    B_BATCHED: tl.constexpr,
    C_BATCHED: tl.constexpr,
    TMA_STORE: tl.constexpr,
    PRECISION: tl.constexpr,
    IMPRECISE: tl.constexpr,
    ACC: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    ACT: tl.constexpr,
    FLATTEN: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    blocks = tl.cdiv(K, BK)
    if PDL:  # what came before overlapped the previous kernel's tail
        gdc_wait()
        gdc_launch_dependents()
    for number in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        # --- which tile
        z = number // (tiles_m * tiles_n)
        tile = number % (tiles_m * tiles_n)
        first = (tile // (GROUP * tiles_n)) * GROUP
        rows = min(tiles_m - first, GROUP)
        m0 = (first + (tile % (GROUP * tiles_n)) % rows) * BM
        n0 = (tile % (GROUP * tiles_n)) // rows * BN

        # --- the pipelined loop
        acc = tl.zeros((BM, BN), dtype=ACC)
        for block in range(blocks):
            k0 = block * BK
            if A_BATCHED:
                if A_T:
                    a = a_desc.load([z, k0, m0]).reshape(BK, BM).T
                else:
                    a = a_desc.load([z, m0, k0]).reshape(BM, BK)
            elif A_T:
                a = a_desc.load([k0, m0]).T
            else:
                a = a_desc.load([m0, k0])
            if B_BATCHED:
                if B_T:
                    b = b_desc.load([z, n0, k0]).reshape(BN, BK).T
                else:
                    b = b_desc.load([z, k0, n0]).reshape(BK, BN)
            elif B_T:
                b = b_desc.load([n0, k0]).T
            else:
                b = b_desc.load([k0, n0])
            if PRECISION == "tf32":
                a, b = to_tf32(a), to_tf32(b)
            acc = tl.dot(a, b, acc, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE, out_dtype=ACC)

        # --- epilogue
        rm = m0 + tl.arange(0, BM)
        rn = n0 + tl.arange(0, BN)
        kind: tl.constexpr = c_ptr.dtype.element_ty
        c = _epilogue(acc, bias_ptr, sa_ptr, sb_ptr, rm, rn, M, N, s_am, s_bn, kind, BIAS, SCALED, ACT)
        if TMA_STORE:
            if C_BATCHED:
                c_desc.store([z, m0, n0], c.reshape(1, BM, BN))
            else:
                c_desc.store([m0, n0], c)
        else:
            at = c_ptr + z.to(tl.int64) * scz + rm.to(tl.int64)[:, None] * scm + rn.to(tl.int64)[None, :] * scn
            tl.store(at, c, mask=(rm < M)[:, None] & (rn < N)[None, :])


# ---------------------------------------------------------------- host side
_ITEM = {"float16": 2, "bfloat16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "int32": 4}
_SHORT = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int8": "i8",
    "int32": "i32",
}


def _turned(shape, strides) -> bool:
    """Whether an operand is contiguous along its second-last dimension rather than its last."""
    return shape[-1] != 1 and strides[-1] != 1


def _batched(shape, strides) -> bool:
    return len(shape) == 3 and shape[0] > 1 and strides[0] != 0


def _storable(shape, strides, base: int, item: int) -> bool:
    """Whether TMA can store C: unit inner stride, everything else a multiple of 16 bytes, the row too: TMA stores whole
    units of 16 bytes, so a row that ends inside one would be written past its end."""
    if shape[-1] * item % 16:
        return False
    outer = all(extent == 1 or stride * item % 16 == 0 for extent, stride in zip(shape[:-1], strides[:-1], strict=True))
    return strides[-1] == 1 and base % 16 == 0 and outer


def _descriptor(t: torch.Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """[rows, columns] or [batch, rows, columns], columns contiguous. Strides of extents of 1 are free."""
    shape, strides = list(t.shape[-2:]), list(t.stride()[-2:])
    if _turned(t.shape, t.stride()):
        shape, strides = shape[::-1], strides[::-1]
    unit = 16 // t.element_size()
    strides = [strides[0] if shape[0] > 1 else -(-shape[1] // unit) * unit, 1]
    if _batched(t.shape, t.stride()):
        return TensorDescriptor(t, [t.shape[0], *shape], [t.stride(0), *strides], [1, *block])
    return TensorDescriptor(t, shape, strides, list(block))


def _fp32_precision() -> str:
    """torch's own switch: torch.set_float32_matmul_precision / torch.backends.cuda.matmul.allow_tf32."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _constants(config, dtype, *, a, b, c, bias, scaled, activation, precision, pdl) -> dict[str, Any]:
    """a, b: (turned, batched); c: (TMA can store, batched)."""
    return {
        "BM": config["BLOCK_M"],
        "BN": config["BLOCK_N"],
        "BK": config["BLOCK_K"],
        "GROUP": config["GROUP"],
        "FLATTEN": config["FLATTEN"],
        "A_T": a[0],
        "A_BATCHED": a[1],
        "B_T": b[0],
        "B_BATCHED": b[1],
        "TMA_STORE": c[0],
        "C_BATCHED": c[1],
        "PRECISION": precision,
        "IMPRECISE": min(config["BLOCK_K"], 128) if dtype.startswith("float8") else 0,
        "ACC": tl.int32 if dtype == "int8" else tl.float32,
        "BIAS": bias,
        "SCALED": scaled,
        "ACT": activation or "",
        "PDL": pdl,
    }


def _options(config, pdl: bool) -> dict[str, Any]:
    pdl_option = {"launch_pdl": True} if pdl else {}
    return {"num_warps": config["num_warps"], "num_stages": config["num_stages"], **pdl_option}


_sms: dict[Any, int] = {}


def _sm_count(device: torch.device) -> int:
    if device not in _sms:
        _sms[device] = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return _sms[device]


def _new_out(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
    usual = torch.int32 if a.dtype == torch.int8 else torch.bfloat16 if a.element_size() == 1 else a.dtype
    return torch.empty((*a.shape[:-1], b.shape[-1]), device=a.device, dtype=out_dtype or usual)


def _arguments(
    a, b, out, config, bias, activation, scale_a, scale_b, precision=None
) -> tuple[dict[str, Any], dict[str, Any], tuple[int]]:
    """Runtime arguments, compile-time constants, grid."""
    (m, k), n = a.shape[-2:], b.shape[-1]
    z = a.shape[0] if a.dim() == 3 else 1
    bm, bn, bk = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    turned = [_turned(t.shape, t.stride()) for t in (a, b)]
    batched = [_batched(t.shape, t.stride()) for t in (a, b, out)]
    store = _storable(out.shape, out.stride(), out.data_ptr(), out.element_size())
    a_desc = _descriptor(a, (bk, bm) if turned[0] else (bm, bk))
    scaled = scale_a is not None
    steps = (scale_a.stride(0), scale_b.stride(0)) if scaled and scale_a.dim() else (0, 0)
    tiles = triton.cdiv(m, bm) * triton.cdiv(n, bn) * z
    scz, scm, scn = (0, *out.stride())[-3:]
    constants = _constants(
        config,
        str(a.dtype)[6:],
        a=(turned[0], batched[0]),
        b=(turned[1], batched[1]),
        c=(store, batched[2]),
        bias=bias is not None,
        scaled=scaled,
        activation=activation,
        precision=precision or (_fp32_precision() if a.dtype == torch.float32 else "tf32"),
        pdl=a.is_cuda,
    )
    values = (
        a_desc,
        _descriptor(b, (bn, bk) if turned[1] else (bk, bn)),
        _descriptor(out, (bm, bn)) if store else a_desc,
        out,
        bias if bias is not None else out,
        scale_a if scaled else out,
        scale_b if scaled else out,
        m,
        n,
        k,
        tiles,
        scz,
        scm,
        scn,
        *steps,
    )
    return dict(zip(_matmul_tma.arg_names, values, strict=False)), constants, (min(tiles, _sm_count(a.device)),)


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
    bias = bias if bias is None or bias.stride(-1) == 1 else bias.contiguous()
    values, constants, grid = _arguments(a, b, out, config, bias, activation, scale_a, scale_b)
    _matmul_tma[grid](**values, **constants, **_options(config, a.is_cuda))
    return out


def prepare(problem: Any, config: Mapping[str, Any]) -> Any:
    """`matmul` with its host work done once, at the first call: later ones only fill in addresses."""
    bound = None
    stores = False
    precision = "ieee" if problem.ieee else "tf32"
    new_out = allocator((*problem.operands[0].shape[:-1], problem.n), getattr(torch, problem.out_dtype))

    def launch(a, b, *, bias=None, out_dtype=None, scale_a=None, scale_b=None, out=None):
        nonlocal bound, stores
        out = new_out(a) if out is None else out
        bias = bias if bias is None or bias.stride(-1) == 1 else bias.contiguous()
        if bound is None:
            values, constants, grid = _arguments(
                a, b, out, config, bias, problem.activation, scale_a, scale_b, precision
            )
            stores = constants["TMA_STORE"]
            launcher = Launcher(_matmul_tma, constants=constants, options=_options(config, a.is_cuda))
            bound = launcher.bind(values, grid, device=a.device)
        bound(
            a,
            b,
            out if stores else a,
            out,
            out if bias is None else bias,
            out if scale_a is None else scale_a,
            out if scale_b is None else scale_b,
        )
        return out

    return launch


# ---------------------------------------------------------------- what it can run
def tma_reasons(problem) -> Iterable[Reason]:
    """TMA addresses rows that start on 16 bytes, of an operand with one contiguous dimension."""
    for fact in problem.operands:
        if fact.base_alignment % 16:
            yield Reason(
                "alignment",
                "base_alignment",
                f"{fact.base_alignment} bytes",
                "multiples of 16 bytes",
                f"call .clone() on {fact.name}: its storage offset breaks the alignment",
                fact.name,
            )
        turned = _turned(fact.shape, fact.strides)
        inner = len(fact.shape) - (2 if turned else 1)
        if turned and fact.strides[-2] != 1 and fact.shape[-2] != 1:
            yield Reason(
                "stride",
                "unit_inner_stride",
                fact.strides[-2:],
                "stride 1 in one matrix dimension",
                f"call .contiguous() on {fact.name}",
                fact.name,
            )
        for dim, (extent, stride) in enumerate(zip(fact.shape, fact.strides, strict=True)):
            if dim != inner and extent > 1 and stride * fact.itemsize % 16:
                yield Reason(
                    "alignment",
                    "stride_alignment",
                    f"{stride * fact.itemsize} bytes",
                    "multiples of 16 bytes",
                    f"pad {fact.name}: its stride of {stride * fact.itemsize} bytes in dimension {dim} is no "
                    "multiple of 16",
                    fact.name,
                )


def _rule(problem, config) -> Iterable[Reason]:
    yield from tma_reasons(problem)
    if (
        problem.dtype == "int8"
        and problem.out_dtype == "int32"
        and (problem.scaling or problem.activation not in ("", "relu"))
    ):
        yield Reason(
            "out_dtype", "out_dtype", "int32", "a floating dtype with this epilogue", "out_dtype=torch.bfloat16"
        )
    if problem.dtype != "int8" and problem.out_dtype == "int32":
        yield Reason("out_dtype", "out_dtype", "int32", "int8 operands", "out_dtype=torch.float32")


def _shared_memory(problem, config) -> int:
    """Buffers, their barriers, the staging of C (which reuses nothing in a flattened loop), a row of bias or scales."""
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    stage = (m + n) * config["BLOCK_K"] * _ITEM[problem.dtype]
    row = 4 * n if problem.bias or problem.scaling else 0
    ring = config["num_stages"] * (stage + 16)
    if problem.dtype == "float32" and not problem.ieee:  # a stage less, but B is put back after it was rounded
        ring += n * config["BLOCK_K"] * 4 - stage
    return ring + 16 + m * n * _ITEM[problem.out_dtype] + row


def _registers(problem, config) -> int:
    """The accumulators plus 48 per thread for addresses and the epilogue."""
    return config["BLOCK_M"] * config["BLOCK_N"] + config["num_warps"] * 32 * 48


def _config(m, n, k, warps, stages, group=8, flatten=True) -> dict[str, Any]:
    return {
        "BLOCK_M": m,
        "BLOCK_N": n,
        "BLOCK_K": k,
        "GROUP": group,
        "FLATTEN": flatten,
        "num_warps": warps,
        "num_stages": stages,
    }


def configs(problem) -> list[dict[str, Any]]:
    """Best first: the largest tile that still fills the chip."""
    bk = 128 // _ITEM[problem.dtype]
    busy = problem.activation or problem.n * _ITEM[problem.out_dtype] % 16  # an epilogue that would spill
    exact = problem.dtype.startswith("float8") or problem.dtype == "float32"  # two sets of accumulators
    wide = [] if exact or busy else [_config(128, 256, bk, 8, 3)]
    found = [*wide, _config(128, 128, bk, 8, 4), _config(64, 128, bk, 4, 4), _config(64, 64, bk, 4, 5)]
    if problem.m <= 64:
        found = found[-2:]
    elif triton.cdiv(problem.m, 128) * triton.cdiv(problem.n, 256) * problem.batch < problem.target.sm_count // 2:
        found = found[len(wide) :] + wide
    return found


def design_of(config) -> Design:
    return Design(
        warp_groups=max(config["num_warps"] // 4, 1),
        pipeline_stages=config["num_stages"],
        persistent=True,
        tile=(config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]),
    )


def builds(problem, config) -> list[Any]:
    """The one kernel that this config launches, for a fresh dense output."""
    from registry.toolbox.builds import Build

    facts = {f.name: f for f in problem.operands}
    bm, bn, bk = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    a, b = ((_turned(facts[x].shape, facts[x].strides), _batched(facts[x].shape, facts[x].strides)) for x in "ab")
    out_kind, item = _SHORT[problem.out_dtype], _ITEM[problem.out_dtype]
    c = (problem.n * item % 16 == 0, problem.batch > 1)

    def described(block, kind, batched):
        return f"tensordesc<{_SHORT[kind]}[{', '.join(map(str, (1, *block) if batched else block))}]>"

    a_type = described((bk, bm) if a[0] else (bm, bk), problem.dtype, a[1])
    scale = f"*{'fp32' if problem.scaling else out_kind}"
    signature = {
        "a_desc": a_type,
        "b_desc": described((bn, bk) if b[0] else (bk, bn), problem.dtype, b[1]),
        "c_desc": described((bm, bn), problem.out_dtype, c[1]) if c[0] else a_type,
        "c_ptr": f"*{out_kind}",
        "bias_ptr": f"*{out_kind}",
        "sa_ptr": scale,
        "sb_ptr": scale,
    }
    signature |= dict.fromkeys(_INT_ARGS, "i32")
    constants = _constants(
        config,
        problem.dtype,
        a=a,
        b=b,
        c=c,
        bias=problem.bias,
        scaled=bool(problem.scaling),
        activation=problem.activation,
        precision="ieee" if problem.ieee else "tf32",
        pdl=True,
    )
    aligned = dict.fromkeys(("c_ptr", "bias_ptr", "sa_ptr", "sb_ptr"), 16)
    return [Build(_matmul_tma, signature, constants, aligned, _options(config, True))]


@hookimpl
def registry_variants() -> list[Variant]:
    requires = Requires(
        arch=("sm90+",),
        dtypes=("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8"),
        layouts=("nn", "nt", "tn", "tt"),
        unit_inner_stride=False,
        batched=True,
        bias=True,
        out=True,
        deterministic=True,
        out_dtypes=("float16", "bfloat16", "float32", "int32"),
        activations=("relu", "gelu", "silu"),
        scaling=("scalar", "rowwise"),
        toolchain={"triton": ">=3.6,<4"},
        shared_memory=_shared_memory,
        registers=_registers,
        rule=_rule,
    )
    return [
        Variant(
            "triton_matmul_tma",
            op="matmul",
            run=matmul,
            requires=requires,
            configs=configs,
            builds=builds,
            prepare=prepare,
            design_of=design_of,
            summary="tensor descriptors, persistent, pipelined TMA loads",
            design=Design(warp_groups=2, pipeline_stages=3, tile=(128, 256, 64), persistent=True),
        )
    ]
