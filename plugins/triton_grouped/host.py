"""Host side of the grouped products: what is known of their memory, and the launch of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton

from registry.ops.grouped_mm.calls import GROUPED_MM, VECTORS, out_of
from registry.ops.grouped_mm.offsets import OFFSETS
from registry.toolbox.blocks import in_blocks
from registry.toolbox.call import Call, Host, Operands
from registry.toolbox.launch import StandIn
from registry.toolbox.matrices import strides_of, tma_can_store, turned


def aligned(operand: StandIn) -> bool:
    """Whether TMA can have it: base and strides, but the unit one, in multiples of 16 bytes, and rows apart."""
    unit = len(operand.shape) - (2 if turned(operand) else 1)
    outer = [(n, s) for dim, (n, s) in enumerate(zip(operand.shape, operand.strides, strict=True)) if dim != unit]
    item = operand.dtype.itemsize
    apart = all(n == 1 or stride for n, stride in zip(operand.shape[-2:], operand.strides[-2:], strict=True))
    return apart and operand.alignment % 16 == 0 and all(n == 1 or stride * item % 16 == 0 for n, stride in outer)


def wide(operand: StandIn, edge: int) -> bool:
    """Whether pointers may read it 16 bytes at a time, if the edge along which it is contiguous is at `edge`."""
    return aligned(operand) and edge * operand.dtype.itemsize % 16 == 0


def run(operand: StandIn, edge: int) -> int:
    """Elements that pointers may read at a time."""
    return 16 // operand.dtype.itemsize if wide(operand, edge) else 1


def divides(size: int, run: int) -> int:
    """What a kernel is told to divide a size along which it reads so many elements at a time, or none: where they lie
    side by side along the other one, the size is any."""
    return run if size % run == 0 else 1


def a_by_tma(problem: Any, a: StandIn, tma: bool) -> bool:
    """Boxes start at multiples of 16 bytes, groups of rows anywhere; and nothing is gathered by boxes."""
    return tma and not problem.gather and not (problem.form == "rows" and turned(a))


def call(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    """The launch of this config."""
    from registry.plugins.triton_grouped.inner import grouped_inner
    from registry.plugins.triton_grouped.kernel import grouped_rows

    a, b, out = given["a"], given["b"], out_of(problem, given)
    bm, bn, bk, tma = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"], config["TMA"]
    tf32 = problem.dtype == "float32" and not problem.ieee
    inner, gather = problem.form == "inner", problem.gather
    nothing = out  # in the place of what there is not
    ragged, a_tma = problem.form == "rows", a_by_tma(problem, a, tma)
    c_tma = tma and not ragged and tma_can_store(out)
    a_desc = in_blocks(a, bm, bk, tf32) if a_tma else nothing
    b_desc = in_blocks(b, bk, bn, tf32) if tma else nothing
    c_desc = in_blocks(out, bm, bn) if c_tma else nothing
    pdl = problem.target.sm >= 90
    arguments: dict[str, Any] = {
        "a_desc": a_desc,
        "b_desc": b_desc,
        "c_desc": c_desc,
        "a_ptr": a,
        "b_ptr": b,
        "c_ptr": out,
        "offs_ptr": given.get("offs", nothing),
        "word_ptr": OFFSETS.argument if "offs" in given else nothing,
        "E": problem.groups,
        "N": problem.n,
        **_strides("sa", a),
        **_strides("sb", b, "zkn"),
        **_strides("sc", out),
    }
    a_edge, b_edge = (problem.m, problem.k)[not turned(a)], (problem.n, problem.k)[turned(b)]
    constants = {
        "BM": bm,
        "BN": bn,
        "BK": bk,
        "GROUP": config["GROUP"],
        "EP": max(triton.next_power_of_2(problem.groups + 1), 16),
        "C_TMA": c_tma,
        "C_BATCHED": c_tma and len(c_desc.shape) == 3,
        "A_T": turned(a),
        "B_T": turned(b),
        "PRECISION": "ieee" if problem.ieee else "tf32",
        "IMPRECISE": min(bk, 128) if problem.dtype.startswith("float8") else 0,
        "PDL": pdl,
    }
    options = {
        "num_warps": config["num_warps"],
        "num_stages": config["num_stages"],
        **({"launch_pdl": True} if pdl else {}),
    }
    sms, columns = problem.target.sm_count or 4, triton.cdiv(problem.n, bn)
    if inner:
        del arguments["saz"], arguments["sbz"]
        arguments |= {"M": problem.m, "T": problem.k}
        a_run, b_run = run(a, a_edge), run(b, b_edge)
        constants |= {"TMA": tma, "ROUNDED": tma and tf32, "A_RUN": a_run, "B_RUN": b_run}
        constants |= {"M_RUN": divides(problem.m, a_run), "N_RUN": divides(problem.n, b_run)}
        grid = min(problem.groups * triton.cdiv(problem.m, bm) * columns, sms)
        return [_made(grouped_inner, grid, arguments, constants, options, {"ROUNDED": False})]
    vectors = {"rows": "rows_ptr", "bias": "bias_ptr", "scale_a": "sa_ptr", "scale_b": "sb_ptr"}
    arguments |= {parameter: given.get(name, nothing) for name, parameter in vectors.items()}
    arguments |= {"T": problem.m, "S": a.shape[-2], "K": problem.k, "s_bias": b.shape[-1], "s_sa": a.shape[-2]}
    b_run = run(b, b_edge) if not problem.gated or wide(b, problem.n) else 1
    constants |= {
        "RAGGED": ragged,
        "GATHER": gather,
        "GATED": problem.gated,
        "A_TMA": a_tma,
        "B_TMA": tma,
        "A_BATCHED": a_tma and len(a_desc.shape) == 3,
        "B_BATCHED": tma and len(b_desc.shape) == 3,
        "A_RUN": run(a, a_edge),
        "B_RUN": b_run,
        "N_RUN": divides(problem.n, b_run),
        "C_RUN": run(out, problem.n) if not turned(out) else 1,
        "WIDE": max(abs(stride) for one in (a, b, out) for stride in one.strides[-2:]) >= 1 << 22,
        "K_EVEN": problem.k % bk == 0,
        "A_ROUNDED": a_tma and tf32,
        "B_ROUNDED": tma and tf32,
        "BIAS": problem.bias,
        "SCALED": bool(problem.scaling),
        "ACT": problem.activation,
        "FLATTEN": config["FLATTEN"] and a_tma,
    }
    most = triton.cdiv(problem.m, bm) + problem.groups if ragged else triton.cdiv(problem.m, bm) * problem.groups
    unrounded = {"A_ROUNDED": False, "B_ROUNDED": False}
    return [_made(grouped_rows, min(most * columns, sms), arguments, constants, options, unrounded)]


def _strides(name: str, operand: StandIn, letters: str = "") -> dict[str, int]:
    letters = letters or {"sa": "zmk", "sc": "zmn"}[name]
    return {name + letter: stride for letter, stride in zip(letters, strides_of(operand), strict=True)}


def _made(kernel: Any, grid: int, arguments: Any, constants: Any, options: Any, unrounded: Any) -> Call:
    """Arguments in the kernel's order."""
    ordered = {name: arguments[name] for name in kernel.arg_names if name in arguments}
    return Call(kernel, (grid,), ordered, constants, options, if_plain_maps=unrounded)


HOST = Host(GROUPED_MM, call, contiguous=VECTORS)
