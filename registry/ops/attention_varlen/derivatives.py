"""Which derivatives there are, and what asking for another raises."""

from __future__ import annotations

from registry.ops.attention_varlen.problem import VarlenProblem
from registry.ops.tensors import no_derivative

INSTEAD = "first derivatives in reverse mode, or registry.attention_varlen.reference(...), which torch differentiates"


def differentiable(problem: VarlenProblem) -> bool:
    """Whether k and v are such as gradients can be given for: packed, and not quantised."""
    return problem.kv_layout == "packed" and not problem.kv_scale


def no_gradient_of_a_cache() -> NotImplementedError:
    """What differentiating attention over a cache raises."""
    return no_derivative("a derivative of attention_varlen over a cache", "packed k and v that are not quantised")


def no_second_derivative() -> NotImplementedError:
    """What differentiating the gradients raises."""
    return no_derivative("a second derivative of attention_varlen", INSTEAD)
