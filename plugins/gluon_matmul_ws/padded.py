"""`gluon_matmul_padded`: operands whose rows lie at odd distances, which the TMA unit cannot address, are copied to
distances that it can, and `gluon_matmul_ws` runs on the copies.

Tile facts.  One launch copies both operands, or the one that has to be: blocks of 64 x 64 elements, read in units as
wide as their distances allow (2 to 16 bytes).  Rows of a copy begin at multiples of 128 bytes where they are long
(other distances cost a tile's boxes a second line for each row), of 16 where they are short.  What lies between rows is
neither written nor read: tensor maps end where rows do.

Schedule.  The copies, then the product; each begins while the kernel before it ends (programmatic dependent launch).  C
is not copied: its tiles go through shared memory to masked stores, as `gluon_matmul_ws` does where TMA cannot store.

Measured facts (H200, torch 2.11, triton 3.6.0; 334 random products of odd sizes, chained graphs; over torch's kernel).
- Products that torch and `triton_matmul` take 200 us or more for: 3.66 by geometric mean (21, least 2.2); 50 to 200 us
  2.03, 20 to 50 us 1.49; below, the copies' launch costs 2 to 3 us: 1.19 and less, and `triton_matmul` is ahead.
- Copies as Triton lays them out (eight elements a lane, in loads and masked stores of two bytes each): 0.8 to 1.1 TB/s,
  8336 x 84 x 11476 385 us. Loads along rows, through shared memory, to stores of 16 bytes: 170 us, of which memory asks
  for 145 at 4 TB/s. What is left of a row after its last 16 bytes is written apart: a mask that may end inside of a
  unit makes all stores one element wide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import triton
import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from registry import Reason, Variant
from registry.ops.matmul.calls import MATMUL, VECTORS
from registry.plugins.gluon_matmul_ws import host
from registry.plugins.gluon_matmul_ws.tiles import candidates
from registry.toolbox import integers
from registry.toolbox.call import Call, Host, Operands
from registry.toolbox.designs import MOST_ALONG_Y
from registry.toolbox.hopper import after_previous_kernel
from registry.toolbox.launch import StandIn
from registry.toolbox.matrices import strides_of, turned

UNIT, LINE, LONG = 8, 64, 256
"""Elements of 16 bytes, which a tensor map wants distances to be multiples of; of 128 bytes; of a long row."""
SIDE = 64
"""Rows and columns of a block that is copied."""
_UNIT, _SIDE = gl.constexpr(UNIT), gl.constexpr(SIDE)


# ---------------------------------------------------------------- the copies
@gluon.constexpr_function
def _lanes(run):
    """Blocks in whose rows a lane has `run` elements side by side, and as many lanes as there is room for."""
    across = min(32, SIDE // run)
    return gl.BlockedLayout([1, run], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def _places(block, across, row, layout: gl.constexpr):
    """(row, column, element) of each element of a block, in a matrix whose rows are `row` elements apart."""
    down = block // across * _SIDE + gl.arange(0, _SIDE, layout=gl.SliceLayout(1, layout))[:, None]
    column = block % across * _SIDE + gl.arange(0, _SIDE, layout=gl.SliceLayout(0, layout))[None, :]
    return down, column, down.to(gl.int64) * row + column


@gluon.jit
def _copy_block(block, source, made, entries, rows, width, from_z, from_row, to_z, to_row, RUN: gl.constexpr):
    """Read RUN elements at a time, which divides the source's distances and widths; written 16 bytes at a time."""
    narrow: gl.constexpr = _lanes(RUN)
    wide: gl.constexpr = _lanes(_UNIT)
    z = gl.program_id(1).to(gl.int64)
    if z < entries:
        across = gl.cdiv(width, _SIDE)
        width = width // RUN * RUN
        row, column, at = _places(block, across, from_row // RUN * RUN, narrow)
        value = gl.load(source + z * (from_z // RUN * RUN) + at, (row < rows) & (column < width))
        whole = width // _UNIT * _UNIT
        made += z * (to_z // _UNIT * _UNIT)
        down, along, to = _places(block, across, to_row // _UNIT * _UNIT, wide)
        gl.store(made + to, gl.convert_layout(value, wide), (down < rows) & (along < whole))
        if block % across == across - 1:  # what is left of a row
            gl.store(
                made + row.to(gl.int64) * to_row + column, value, (row < rows) & (column >= whole) & (column < width)
            )


FACTS = ("entries", "rows", "width", "from_z", "from_row", "to_z", "to_row")


@gluon.jit(do_not_specialize=["blocks", *FACTS, *(f"{name}_2" for name in FACTS)])
def _copy(
    source,
    made,
    blocks,
    entries,
    rows,
    width,
    from_z,
    from_row,
    to_z,
    to_row,
    source_2,
    made_2,
    entries_2,
    rows_2,
    width_2,
    from_z_2,
    from_row_2,
    to_z_2,
    to_row_2,
    RUN: gl.constexpr,
    RUN_2: gl.constexpr,
):
    """The first `blocks` programs copy one operand, the others a second; the grid's other dimension counts matrices."""
    after_previous_kernel()
    block = gl.program_id(0)
    if block < blocks:
        _copy_block(block, source, made, entries, rows, width, from_z, from_row, to_z, to_row, RUN)
    else:
        block -= blocks
        _copy_block(block, source_2, made_2, entries_2, rows_2, width_2, from_z_2, from_row_2, to_z_2, to_row_2, RUN_2)


# ---------------------------------------------------------------- its host side
def _is_odd(operand: StandIn) -> bool:
    """Whether a tensor map cannot address it."""
    facts = list(zip(operand.shape, operand.strides, strict=True))
    del facts[-2 if turned(operand) else -1]
    return bool(operand.alignment % 16 or any(extent > 1 and stride % UNIT for extent, stride in facts))


def _copy_of(operand: StandIn) -> StandIn:
    """Where the copy of an operand lies, contiguous along the same dimension."""
    rows, width = operand.shape[-2:][:: -1 if turned(operand) else 1]
    unit = LINE if width >= LONG else UNIT
    pitch = -(-width // unit) * unit
    matrix = (pitch, 1)[:: -1 if turned(operand) else 1]
    batch = (pitch * rows if strides_of(operand)[0] else 0,)[: len(operand.shape) - 2]
    return StandIn(operand.shape, operand.dtype, (*batch, *matrix), name=f"copy_of_{operand.name}")


def _facts(operand: StandIn, copy: StandIn) -> dict[str, int]:
    """What the kernel wants to know of both."""
    order = -1 if turned(operand) else 1
    (from_z, *source), (to_z, *made) = strides_of(operand), strides_of(copy)
    rows, width = operand.shape[-2:][::order]
    entries = operand.shape[0] if from_z else 1
    return dict(zip(FACTS, (entries, rows, width, from_z, source[::order][0], to_z, made[::order][0]), strict=True))


def _copying(pairs: list[tuple[StandIn, StandIn]]) -> Call:
    """The launch that fills one copy, or two."""
    blocks, entries, runs, arguments = [], [], [], {}
    for suffix, (operand, copy) in zip(("", "_2"), pairs, strict=False):
        facts = _facts(operand, copy)
        blocks.append(triton.cdiv(facts["rows"], SIDE) * triton.cdiv(facts["width"], SIDE))
        entries.append(facts["entries"])
        runs.append(integers.gcd(facts["from_row"], facts["from_z"], facts["width"], UNIT))
        given = {"source": operand, "made": copy, **facts}
        arguments |= {name + suffix: value for name, value in given.items()}
    if len(pairs) == 1:
        runs.append(1)
        nothing = StandIn((1,), pairs[0][0].dtype)
        arguments |= {"source_2": nothing, "made_2": nothing, **{f"{name}_2": 0 for name in FACTS}}
    constants, options = dict(zip(("RUN", "RUN_2"), runs, strict=True)), {"num_warps": 4, "launch_pdl": True}
    return Call(_copy, (sum(blocks), max(entries)), {**arguments, "blocks": blocks[0]}, constants, options)


def call(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    pairs = [(one, _copy_of(one)) for one in (given["a"], given["b"]) if _is_odd(one)]
    *_, product = host.call(problem, config, {**given, **{one.name: copy for one, copy in pairs}}, scale)
    return [_copying(pairs), product]


HOST = Host(MATMUL, call, contiguous=VECTORS)


# ---------------------------------------------------------------- what it can run
def _of_copies(problem: Any) -> Any:
    """The problem that the copies pose."""
    made = {one.name: _copy_of(StandIn.of(one)) for one in problem.operands if _is_odd(StandIn.of(one))}
    operands = [
        dataclasses.replace(one, strides=made[one.name].strides, base_alignment=16) if one.name in made else one
        for one in problem.operands
    ]
    return dataclasses.replace(problem, operands=tuple(operands))


def configs(problem: Any) -> list[dict[str, Any]]:
    """Those of the product on the copies, best first."""
    return candidates(_of_copies(problem), 4)


def variant_of(product: Variant) -> Variant:
    """What the product claims of 16-bit operands, but for where they lie."""

    def rule(problem: Any, config: Any) -> Iterable[Reason]:
        if not any(_is_odd(StandIn.of(one)) for one in problem.operands if one.name in ("a", "b")):
            yield Reason("alignment", "operands", "multiples of 16 bytes", "others: kernels take these as they are")
        if problem.batch > MOST_ALONG_Y:
            yield Reason("range", "batch", problem.batch, f"at most {MOST_ALONG_Y}: the copy's grid ends there")
        yield from product.requires.rule(problem, config)

    requires = dataclasses.replace(
        product.requires,
        dtypes=("float16", "bfloat16"),
        promoted=False,
        out_dtypes=("float16", "bfloat16", "float32"),
        base_alignment=1,
        stride_alignment=1,
        rule=rule,
    )
    return HOST.variant(
        "gluon_matmul_padded",
        op="matmul",
        requires=requires,
        configs=configs,
        design=product.design,
        design_of=product.design_of,
        summary="a copy of what TMA cannot address, and `gluon_matmul_ws` on it",
    )
