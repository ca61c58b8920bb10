"""What the fuzzers draw, made from what ops declare: cases, calls, table rows, and things that are no argument."""

from __future__ import annotations

import json
import math
import operator
from operator import itemgetter, methodcaller
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

import registry
from registry.dispatch import in_force
from registry.errors import RegistryError
from registry.ops.known import all_ops, op_named
from registry.ops.parts.cases import Case
from registry.ops.parts.judging import judge
from registry.ops.parts.workload import workload

REFUSALS = (RegistryError, NotImplementedError, TypeError)
"""What a call may raise: each says what is wrong with it."""
CALLED = [name for name in all_ops() if name in registry.__all__]
"""Ops that have a front door; others are steps of their derivatives."""
SIZES = st.integers(1, 40)


def cases(op: str) -> st.SearchStrategy[Case]:
    """Shapes of an op, each word of its kind, most of them left out; those that contradict each other are skipped."""
    kinds, known = op_named(op).problem_type.fact_kinds(), op_named(op).problem_type.known_values
    fields = {word: field for word, field in op_named(op).tuning.fields.items() if field in kinds}
    words = {word: _word(str(kinds[field]), known.get(field, ())) for word, field in fields.items()}
    sizes = {word: words[word] for word, field in fields.items() if str(kinds[field]) == "int"}
    others = st.sampled_from(sorted(set(words) - set(sizes))).flatmap(
        lambda word: st.fixed_dictionaries({word: words[word]})
    )
    drawn = st.tuples(
        st.fixed_dictionaries({}, optional=sizes), st.fixed_dictionaries({"dtype": words["dtype"]}), others
    )
    base = dict.fromkeys(sizes, 8)
    return drawn.map(lambda parts: _case(op, {**base, **parts[0], **parts[1], **parts[2]})).filter(bool)


def _word(kind: str, known: tuple[str, ...]) -> st.SearchStrategy[Any]:
    if known:
        return st.sampled_from([value for value in known if value])
    if kind == "int":
        return SIZES
    if kind == "float":
        return st.sampled_from([0.0, 0.5, 30.0])
    if kind == "bool":
        return st.booleans()
    return st.tuples(st.integers(0, 50), st.integers(0, 50))


def _case(op: str, shape: dict[str, Any]) -> Case | None:
    try:
        case = Case.of(op, **shape)
        workload(case, "meta")
        case.problem(registry.Target.named("cpu"))
    except (RegistryError, ValueError, KeyError, TypeError, RuntimeError):
        return None
    return case


def outcome(call: Any, *args: Any, **kwargs: Any) -> tuple[str, Any]:
    """What a call gives, or the refusal that it raises."""
    try:
        return "gave", call(*args, **kwargs)
    except REFUSALS as error:
        return type(error).__name__, str(error)


def same(one: Any, other: Any) -> bool:
    """Whether two outcomes are the same: tensors bit for bit, refusals word by word."""
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or (one.dtype, one.shape, one.device) != (
            other.dtype,
            other.shape,
            other.device,
        ):
            return False
        return one.is_meta or torch.equal(
            *(t.double().nan_to_num() if t.dtype.is_floating_point else t for t in (one, other))
        )
    return bool(one == other)


def close(got: Any, want: Any, tolerance: float = 2e-2) -> bool:
    """Whether results are those of the oracle, as far as a dtype of 8 bits of mantissa goes; and of its shape."""
    if isinstance(want, (tuple, list)):
        return len(got) == len(want) and all(map(close, got, want))
    if got.shape != want.shape:
        return False
    there = torch.isfinite(want.to(got.dtype))  # what is too large for a dtype is infinite in it
    if not torch.equal(torch.isfinite(got), there):
        return False
    got, want = got.detach().double()[there], want.detach().double()[there]
    return float((got - want).norm()) <= tolerance * max(float(want.norm()), math.sqrt(max(want.numel(), 1)) * 0.1)


def verdict(found: Any, returned: Any) -> Any:
    """What the op's own judge says of what a call of a workload returned."""
    named = returned if isinstance(returned, tuple) else (returned,)
    return judge(dict(zip(found.outputs, named, strict=False)), found.expected()[: len(named)])


HOSTILE = st.sampled_from(
    [
        *(None, True, -1, 0, 2**63, -(2**63), 10**400, 1.5, math.nan, math.inf, 1j),
        *("", "nonsense", "\x1b[31m", b"bytes", "cpu", object, torch.float64, torch.int8),
        *([], [2, 1], (1, 2, 3), (2**63, 2**63), {"a": 1}, {1}),
        *(np.ones((2, 3), np.float32), np.int64(3), np.bool_(True), torch.tensor(1.0), torch.tensor(True)),
    ]
)
TENSORS = st.sampled_from(
    [
        *(methodcaller(name) for name in ("to_sparse", "to_mkldnn", "flatten", "tolist", "bool", "double", "half")),
        *(methodcaller("to", kind) for kind in ("meta", torch.int8, torch.int64, torch.complex64, torch.float8_e4m3fn)),
        *(itemgetter(part) for part in (None, slice(0), (..., slice(0)), (..., slice(None, None, 2)))),
        *(methodcaller("transpose", -1, -2), methodcaller("flip", -1), operator.neg),
        lambda t: t.expand(2, *t.shape),
        lambda t: torch.tensor(1.0),
        lambda t: t.as_strided(t.shape, (0,) * t.dim()),
        lambda t: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]),
        lambda t: torch.nn.Parameter(t.float()),
        lambda t: t.numpy() if t.dtype is torch.float32 else None,
        lambda t: t * 1000,
        lambda t: t[: max(t.shape[0] // 2, 1)],
    ]
)


def conditions(op: str) -> st.SearchStrategy[dict[str, Any]]:
    """A `when` of a table of this op; about one value in four is none."""
    fields = in_force.op_fields()[op]
    whole = st.integers(0, 300)
    ranges = st.tuples(whole, whole).map(lambda pair: f"{min(pair)}..{max(pair)}")
    by_kind = {
        "int": st.one_of(
            whole, ranges, st.lists(st.one_of(whole, ranges), min_size=1, max_size=3), whole.map("{}..".format)
        ),
        "float": st.one_of(st.floats(0, 100), st.just("1.5..")),
        "bool": st.booleans(),
        "str": st.just("x"),
    }
    values = {
        name: st.one_of(
            *[st.sampled_from(field.values) if field.values else by_kind[field.kind]] * 3, HOSTILE.filter(_is_plain)
        )
        for name, field in fields.items()
    }
    return st.lists(st.sampled_from(sorted(values)), max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: values[name] for name in names})
    )


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def json_values() -> st.SearchStrategy[Any]:
    scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8))
    return st.recursive(
        scalars,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
        max_leaves=6,
    )
