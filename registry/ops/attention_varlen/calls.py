"""What every kernel of attention_varlen says the same way on its host side: operands and outputs."""

from __future__ import annotations

from functools import partial

from registry.ops.attention_varlen.problem import VarlenBackwardProblem, VarlenProblem
from registry.ops.op import problem_of_call
from registry.toolbox.call import Call, Interface, Operands
from registry.toolbox.launch import StandIn


def out_of(given: Operands) -> StandIn:
    """The output [T, Hq, Dv]: the one that was given, or a dense one."""
    q = given["q"]
    return given.get("out", StandIn((*q.shape[:2], given["v"].shape[-1]), q.dtype, name="out"))


def row_sums(q: StandIn, name: str = "lse") -> StandIn:
    """float32 [Hq, T]: an LSE, or what else there is one of for each row."""
    return StandIn((q.shape[1], q.shape[0]), "float32", name=name)


def sink_call(problem: VarlenBackwardProblem, given: Operands, delta: StandIn) -> Call:
    """What leaves the gradient of the sinks, from rowsum(O * dO) - dlse, or rowsum(P * dP) - dlse, of each row."""
    from registry.ops.attention_varlen.sink_pass import sink_pass

    sinks = given["sinks"]
    dsinks = StandIn(sinks.shape, sinks.dtype, name="dsinks")
    pointers = {"lse_ptr": given["lse"], "delta_ptr": delta, "sinks_ptr": sinks, "dsinks_ptr": dsinks}
    arguments = {**pointers, "total_q": problem.total_q}
    return Call(sink_pass, (problem.heads_q,), arguments, {"BLOCK": 1024}, {"num_warps": 4})


def _forward_operands(problem: VarlenProblem) -> dict[str, StandIn]:
    """Operands as the Problem alone tells them: those of a call may have other strides and alignments."""
    found = {fact.name: StandIn.of(fact) for fact in problem.operands}
    batch, heads = problem.batch, problem.heads_q
    shapes: dict[str, tuple[int, ...]] = {"cu_seqlens_q": (batch + 1,)}
    if problem.kv_layout == "packed":
        shapes["cu_seqlens_k"] = (batch + 1,)
    else:
        shapes["seqused_k"] = (batch,)
    if problem.kv_layout == "paged":
        shapes["block_table"] = (batch, -(-problem.max_seqlen_k // problem.page_size))
    for name, shape in shapes.items():
        found[name] = StandIn(shape, "int32", name=name)
    if problem.sinks:
        found["sinks"] = StandIn((heads,), "float32", name="sinks")
    if problem.alibi:
        found["alibi_slopes"] = StandIn((heads,), "float32", name="alibi_slopes")
    if problem.kv_scale:
        scales = {"tensor": (1,), "head": (problem.heads_kv,), "token": found["k"].shape[:-1]}
        for name in ("k_scale", "v_scale"):
            found[name] = StandIn(scales[problem.kv_scale], "float32", name=name)
    return found


def _backward_operands(problem: VarlenBackwardProblem) -> dict[str, StandIn]:
    found = _forward_operands(problem)
    dense = StandIn((*found["q"].shape[:2], problem.head_dim_v), problem.dtype)
    for name in ("out", "grad_out"):
        found.setdefault(name, StandIn(dense.shape, dense.dtype, name=name))
    found["lse"] = row_sums(found["q"])
    if problem.grad_lse:
        found["grad_lse"] = row_sums(found["q"], "grad_lse")
    return found


# What is given besides q, k and v has strides that no Problem tells, so a launch is bound when it is first called.
FORWARD = Interface(
    tensors=("q", "k", "v"),
    optional=(
        "cu_seqlens_q",
        "cu_seqlens_k",
        "seqused_k",
        "block_table",
        "sinks",
        "alibi_slopes",
        "k_scale",
        "v_scale",
        "out",
    ),
    results=("out", "lse"),
    ignored=("schedule",),
    scale=True,
    operands=_forward_operands,
    problem_of=partial(problem_of_call, "attention_varlen"),
    late=lambda problem: True,
)
BACKWARD = Interface(
    tensors=("grad_out", "q", "k", "v", "out", "lse"),
    optional=("cu_seqlens_q", "cu_seqlens_k", "sinks", "alibi_slopes", "grad_lse"),
    results=("dq", "dk", "dv", "dsinks"),
    scale=True,
    operands=_backward_operands,
    problem_of=partial(problem_of_call, "attention_varlen_backward"),
    late=lambda problem: True,
)
