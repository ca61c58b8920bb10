"""Variants with parts that are drawn from what works and what does not: they concern themselves alone."""

from __future__ import annotations

import pytest
import torch
from drawn import outcome, same
from hypothesis import given
from hypothesis import strategies as st
from made_up import math_run

import registry


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no words")


def raising(error):
    def function(*args, **kwargs):
        raise error

    return function


def answering(value):
    return lambda *args, **kwargs: value


ERRORS = st.sampled_from(
    [ValueError("no"), SystemExit(1), Unspeakable(), RecursionError(), MemoryError(), StopIteration()]
)
ODD = st.sampled_from([None, 1, "text", [1], [None], {}, [{}], [{"B": [1]}], float("nan"), torch.ones(2), 10**400])
CONFIGS = st.one_of(st.just([{"B": 1}, {"B": 2}]), ODD, ODD.map(answering), ERRORS.map(raising))
JUDGES = st.one_of(
    st.just(None), ODD.map(answering), ERRORS.map(raising), st.just(answering([])), st.just(answering(0))
)
CLAIMS = st.fixed_dictionaries(
    {},
    optional={
        "arch": st.sampled_from([("cpu",), ("any",), "cpu", (1,), ("sm",), None]),
        "dtypes": st.sampled_from([("float32",), ("float33",), "float32", (torch.float32,)]),
        "head_dim": st.sampled_from([(1, 512), (512, 1), 64, None, ("a", "b"), (1, 2, 3)]),
        "layouts": st.sampled_from([("bhsd",), "bhsd", (), None, 1]),
        "toolchain": st.sampled_from([{"torch": ">=1"}, {"torch": "x"}, {"nonsense": ">=1"}, {"torch": 1}, None]),
        "causal": st.sampled_from([True, "yes", 0]),
        "unknown": st.just(1),
        "rule": JUDGES,
        "shared_memory": JUDGES,
        "registers": JUDGES,
    },
)
DEFAULT = {"arch": ("cpu",), "dtypes": ("float32",), "head_dim": (1, 512), "layouts": ("bhsd",), "ieee": True}


@given(claims=CLAIMS, configs=CONFIGS, preferred=st.booleans(), forced=st.booleans(), causal=st.booleans())
def test_a_drawn_variant_concerns_itself_alone(claims, configs, preferred, forced, causal):
    q, k, v = torch.randn(3, 1, 2, 8, 16)
    want = registry.attention(q, k, v, causal=causal, variant="torch_math")
    try:
        requires = registry.Requires(**{**DEFAULT, **claims})
        registry.register(registry.Variant("fuzz.drawn", "attention", math_run, requires, configs=configs))
    except registry.DeclarationError:
        return
    try:
        with registry.prefer(["fuzz.drawn"] if preferred else []):
            explained = registry.attention.explain(q, k, v, causal=causal)
            assert str(explained) and explained.to_dict()
            with registry.record() as ran:
                got = registry.attention(q, k, v, causal=causal)
            assert ran.counts["attention"] == {explained.variant: 1}
            assert torch.allclose(got, want, atol=1e-4)
            assert same(got, registry.attention(q, k, v, causal=causal))
        if forced:
            found = outcome(registry.attention, q, k, v, causal=causal, variant="fuzz.drawn")
            assert found[0] in ("gave", "IllegalVariant")
    finally:
        registry.unregister("fuzz.drawn")


@pytest.mark.parametrize("answer", ["hook", "tables"])
@given(value=st.one_of(ODD, st.just([])), error=st.one_of(st.none(), ERRORS))
def test_a_drawn_plugin_is_contained(answer, value, error):
    from registry.dispatch import discovery

    hook = {"hook": "registry_variants", "tables": "registry_tables"}[answer]
    plugin = type(discovery)("fuzz_plugin")
    setattr(plugin, hook, registry.hookimpl(raising(error) if error is not None else lambda: value))
    getattr(plugin, hook).__name__ = hook
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discovery, "_loaders", lambda: [("fuzz", lambda: plugin)])
        found = discovery.discover()
    assert not found.variants
    assert (len(found.failures) == 1) == (
        error is not None or value != [] if not isinstance(value, torch.Tensor) else True
    )
