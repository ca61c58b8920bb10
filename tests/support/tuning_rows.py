"""Raw results and rows of the cache, as they are when nothing is wrong with them."""

from __future__ import annotations

from registry.dispatch.catalog import catalog
from registry.dispatch.fingerprint import fingerprint_of
from registry.tuning import store

MACHINE = {"device": "Some GPU 3000", "arch": "sm90", "driver": "1.2", "torch": "2.11.0", "triton": "3.6.0"}
CASE = {
    "kind": "case",
    "case": "a",
    "op": "attention",
    "text": "s=4",
    "shape": {"s": 4},
    "facts": {"head_dim": 8, "dtype": "float32"},
    "flops": 1.0,
    "contestants": {"k": ["torch_cpu", {}, True, "f"]},
}
SAMPLE = {"kind": "sample", "case": "a", "key": "k", "round": 0, "ms": 1.0}
GOOD = [{"kind": "run", "format": 1, "machine": MACHINE, "mode": "events"}, CASE, SAMPLE]


def row(case="s=64", variant="torch_cpu", ms=1.0, **more):
    known = catalog.get().variants.get(variant)
    fields = {
        "op": "attention",
        "case": case,
        "shape": {},
        "facts": {"dtype": "float32"},
        "flops": 1e9,
        "variant": variant,
        "config": {},
        "first": True,
        "source": fingerprint_of(known) if known else "x",
        "machine": MACHINE,
        "mode": "events",
        "ms": ms,
    }
    return store.Row(**(fields | more))
