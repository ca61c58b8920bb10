"""An op is one object however it is copied, and its torch op is there as soon as `registry` is."""

from __future__ import annotations

import copy
import io
import pickle
import sys

import pytest
import torch
from ran import printed

import registry
from registry.ops.known import all_ops

pytestmark = pytest.mark.usefixtures("quick_python")


class Block(torch.nn.Module):
    """A module that holds an op as people do."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = registry.attention
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, q):
        return self.attn(q, q * self.weight, q, causal=True)


@pytest.mark.parametrize("op", all_ops().values(), ids=all_ops())
def test_copies_and_pickles_are_the_op(op):
    assert copy.copy(op) is op and copy.deepcopy(op) is op
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(op, protocol)) is op


def test_an_op_and_what_ran_are_printed_as_what_they_are():
    assert repr(registry.matmul).startswith("<op matmul: ")
    with registry.record() as ran:
        registry.matmul(torch.ones(2, 2), torch.ones(2, 2))
    assert repr(ran) == f"<Recorder {ran.counts}>"


def test_a_module_that_holds_an_op_can_be_copied_and_saved():
    block, q = Block(), torch.randn(1, 2, 5, 8)
    buffer = io.BytesIO()
    torch.save(block, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(block), torch.load(buffer, weights_only=False)):
        assert other.attn is registry.attention
        torch.testing.assert_close(other(q), block(q))


def test_a_program_is_loaded_by_a_process_that_only_imported_registry(tmp_path):
    q = torch.randn(1, 2, 5, 8)
    torch.export.save(torch.export.export(Block(), (q,)), tmp_path / "program.pt2")
    torch.save((q, Block()(q)), tmp_path / "tensors.pt")
    pickle_file = tmp_path / "op.pickle"
    pickle_file.write_bytes(pickle.dumps(registry.attention_varlen))
    program = f"""
import pickle, torch
op = pickle.load(open({str(pickle_file)!r}, "rb"))
import registry
assert op is registry.attention_varlen
for name in {sorted(all_ops())!r}:
    assert hasattr(torch.ops.registry, name), name
q, expected = torch.load({str(tmp_path / "tensors.pt")!r})
torch.testing.assert_close(torch.export.load({str(tmp_path / "program.pt2")!r}).module()(q), expected)
"""
    printed(sys.executable, "-c", program, timeout=120)
