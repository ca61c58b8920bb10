"""`gluon_fa3_varlen_backward`: gluon_fa3_backward's method "sums" over sequences packed end to end.

list (tile_list.py)      the blocks of keys, those that the most queries may see first
before (sums.py)         delta, LSE, zeroes, for each block of queries
main (kernel.py)         five products
after (sums.py)          dQ from the order of the registers to rows
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from registry import Reason, Requires, Variant
from registry.ops.attention_varlen.calls import BACKWARD
from registry.plugins.gluon_fa3.backward import VARIANT as DENSE
from registry.plugins.gluon_fa3.backward import host as dense
from registry.plugins.gluon_fa3.backward import traits
from registry.plugins.gluon_fa3.backward.traits import GROUPS, KEYS, SumsTraits, sums_with
from registry.plugins.gluon_fa3.claims import CLAIMS
from registry.plugins.gluon_fa3.host import COUNTER_WORDS, LOG2E
from registry.plugins.gluon_fa3.traits import UNLIMITED, padded, window_bounds
from registry.plugins.gluon_fa3.varlen.configs import rows_rule
from registry.plugins.gluon_fa3.varlen.host import blocks_of, chunk_of, list_call, tensor_map
from registry.plugins.gluon_fa3.varlen.kernel import attention_packed_backward
from registry.plugins.gluon_fa3.varlen.sums import after_packed, before_packed
from registry.toolbox.call import Call, Host, Operands, PerCall, Zeroes
from registry.toolbox.launch import StandIn

FEW_STEPS = 64  # of the longest sequence's tiles: beyond, 128 columns do not gain
WIDEST = 128  # beyond, dK and dV of a group do not fit its registers: backward/sweep.py


def configs(problem: Any) -> list[dict[str, Any]]:
    """Those of dense tensors; at 64 columns those with two tiles in flight first."""
    made = traits.configs(problem)
    return sorted(made, key=lambda config: (config["order"], config["stages"])) if _wide(problem) == 64 else made


def traits_of(problem: Any, config: Mapping[str, Any]) -> SumsTraits:
    """The main kernel that `config` means for `problem`."""
    return sums_with(problem, config, mask=_mask(problem), packed=True, drawn=draws(problem, config))


def draws(problem: Any, config: Mapping[str, Any]) -> bool:
    """Whether a block of an SM draws tiles, as of dense tensors. With a cap or a left bound the steady loop spills."""
    steps = problem.max_seqlen_q * problem.heads_q // problem.heads_kv / config["BLOCK_M"]
    spills = bool(problem.softcap) or _mask(problem) == "band"
    return not spills and (_wide(problem) == 64 or steps <= FEW_STEPS)


def _wide(problem: Any) -> int:
    return max(padded(problem.head_dim), padded(problem.head_dim_v))


def _mask(problem: Any) -> str:
    """Keys past a sequence's end are always hidden."""
    left, _ = window_bounds(problem.causal, problem.window)
    return "band" if left < UNLIMITED else "from"


def rule(problem: Any, config: Mapping[str, Any]) -> Iterator[Reason]:
    """What a config cannot be, beyond its budgets, and what a tensor map cannot count."""
    yield from traits.rule(problem, config)
    yield from rows_rule(problem)


def call(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    t = traits_of(problem, config)
    q, k, v, out, grad_out = (given[name] for name in ("q", "k", "v", "out", "grad_out"))
    dq, dk, dv = (StandIn(x.shape, x.dtype, name=f"d{x.name}") for x in (q, k, v))
    row_blocks = blocks_of(problem.total_q, problem.batch, t.block_m)
    key_blocks = blocks_of(problem.total_k, problem.batch, t.block_n)
    blocks, group = problem.heads_q * row_blocks, problem.heads_q // problem.heads_kv
    stats = dense.statistics(blocks, t.block_m, t.folded)
    sums = StandIn((GROUPS * blocks, t.dq_columns // 4, 256), "float32", name="sums")
    turns = StandIn((GROUPS * blocks,), "int32", name="turns" if t.ordered else "")
    left, right = window_bounds(problem.causal, problem.window)
    last_first = not t.ordered and left < UNLIMITED <= right
    common = {"cu_q": given["cu_seqlens_q"], "batch": problem.batch, "total_q": problem.total_q}
    common["row_blocks"] = row_blocks
    listed = list_call(problem, given, t.block_n, t.block_m, of_keys=True, last_first=last_first)

    arguments = {
        "out_ptr": out,
        "do_ptr": grad_out,
        "lse_ptr": given["lse"],
        "dlse_ptr": given.get("grad_lse"),
        "stats_ptr": stats,
        "sums_ptr": sums,
        "turns_ptr": turns,
        **_strides("out", out),
        **_strides("do", grad_out),
        **common,
        "scale": PerCall("scale"),
    }
    constants = {
        "HEAD_DIM_V": problem.head_dim_v,
        "PADDED": t.head,
        "PADDED_V": t.head_v,
        "GRAD_LSE": problem.grad_lse,
        "TURNS": t.ordered,
        "FOLDED": t.folded,
        "BLOCK_M": t.block_m,
        "ROWS": dense.BEFORE_ROWS,
        "CHUNK": chunk_of(problem.batch),
    }
    grid = (blocks * (t.block_m // dense.BEFORE_ROWS),)
    before = Call(before_packed, grid, arguments, constants, dense.OPTIONS)

    head_bytes = max(group * problem.max_seqlen_q, 1) * (6 * t.head + 2 * t.head_v)
    section = dense.section_of(problem, -(-problem.max_seqlen_k // t.block_n), head_bytes, t.ordered)
    arguments = {
        "q_map": tensor_map(q, t.block_m, t.head),
        "k_map": tensor_map(k, t.block_n, t.head),
        "v_map": tensor_map(v, t.block_n, t.head_v),
        "do_map": tensor_map(grad_out, t.block_m, t.head_v),
        "stats_map": dense.block_map(stats, swizzle=t.folded),
        "dq_map": dense.block_map(sums),
        "dk_map": tensor_map(dk, KEYS, t.head),
        "dv_map": tensor_map(dv, KEYS, t.head_v),
        "turns": turns,
        "counter": Zeroes(COUNTER_WORDS) if t.drawn else StandIn((COUNTER_WORDS,), "int32"),
        "key_blocks": listed.arguments["row_blocks"],
        "left": left,
        "right": right,
        "heads_kv": problem.heads_kv,
        "group": group,
        "row_blocks": row_blocks,
        "section_heads": min(section, problem.heads_kv),
        "scale": PerCall("scale"),
        "scale_log2": PerCall("scale", 2 * LOG2E / problem.softcap if problem.softcap else LOG2E),
        "cap": problem.softcap * LOG2E,
    }
    tiles = key_blocks * problem.heads_kv
    grid = (min(tiles, problem.target.sm_count) if t.drawn else tiles,)
    main = Call(attention_packed_backward, grid, arguments, {"T": t}, dense.OPTIONS)

    arguments = {"sums_ptr": sums, "dq_ptr": dq, **_strides("dq", dq), **common, "scale": PerCall("scale")}
    constants = {"HEAD_DIM": problem.head_dim, "BLOCK_M": t.block_m, "COLUMNS": t.dq_columns}
    constants["CHUNK"] = chunk_of(problem.batch)
    return [listed, before, main, Call(after_packed, (GROUPS * blocks,), arguments, constants, dense.OPTIONS)]


def _strides(name: str, operand: StandIn) -> dict[str, int]:
    """A dimension of one element may carry any stride."""
    found = zip(("row", "head"), operand.shape[:2], operand.strides[:2], strict=True)
    return {f"{name}_{dim}": 0 if size == 1 else stride for dim, size, stride in found}


def shared_memory(problem: Any, config: Mapping[str, Any]) -> int:
    """Bytes of dynamic shared memory of one block."""
    return traits_of(problem, config).shared_memory


HOST = Host(BACKWARD, call, contiguous=("lse", "grad_lse"))
VARIANT = Variant(
    "gluon_fa3_varlen_backward",
    op="attention_varlen_backward",
    run=HOST.run,
    prepare=HOST.prepare,
    builds=HOST.builds,
    requires=Requires(
        **{**CLAIMS, "head_dim": (8, WIDEST), "head_dim_v": (8, WIDEST)},
        kv_layouts=("packed",),
        grad_lse=True,
        checks_lengths=True,
        shared_memory=shared_memory,
        registers=traits.registers,
        rule=rule,
    ),
    design=DENSE.design,
    configs=configs,
    design_of=DENSE.design_of,
    summary="gluon_fa3_backward over packed sequences, up to head dim 128",
)
