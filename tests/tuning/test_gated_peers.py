"""benchmarks/gated_peers.py without a GPU: each peer gives what a gated product is, of one group alone."""

import gated_peers
import pytest
import torch

import registry

PEERS = {variant.name: variant for variant in gated_peers.registry_variants()}


@pytest.fixture(autouse=True)
def registered():
    for variant in PEERS.values():
        registry.register(variant)
    yield
    for name in PEERS:
        registry.unregister(name)


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("activation", ["", "silu", "relu"])
def test_a_peer_gives_what_a_gated_product_is(name, activation):
    a, b = torch.randn(70, 24), torch.randn(1, 24, 12)
    given = {"offs": torch.tensor([70], dtype=torch.int32), "activation": activation or None, "gated": True}
    found = registry.grouped_mm(a, b, **given, variant=name)
    want = registry.grouped_mm.reference(a, b, **given)
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PEERS)
def test_several_groups_are_refused(name):
    ends = torch.tensor([30, 70], dtype=torch.int32)
    with pytest.raises(registry.IllegalVariant, match="groups: got 2"):
        registry.grouped_mm(torch.randn(70, 24), torch.randn(2, 24, 12), offs=ends, gated=True, variant=name)
