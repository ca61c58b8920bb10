"""Where programs are trained and shipped: sharded parameters under selective checkpointing, compiled packages."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import registry

pytestmark = pytest.mark.usefixtures("quick_python")


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + self.out(registry.attention(q, k, v, causal=True).transpose(1, 2).flatten(2))


class Net(torch.nn.Module):
    """Layer 1 is not checkpointed, which keeps plans of the same shapes warm."""

    def __init__(self, selective: bool) -> None:
        super().__init__()
        self.layers, self.selective = torch.nn.ModuleList(Layer() for _ in range(3)), selective

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if self.selective and i != 1:
                contexts = functools.partial(create_selective_checkpoint_contexts, keep_attention)
                x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
            else:
                x = layer(x)
        return x


def keep_attention(context, op, *args, **kwargs):
    wanted = op is torch.ops.registry.attention.default
    return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE


def train(world: int, store: str, rank: int) -> None:
    """Three steps with sharded parameters give the gradients of the plain model."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    torch.manual_seed(0)
    plain = Net(False)
    sharded = copy.deepcopy(plain)
    sharded.selective = True
    for layer in sharded.layers:
        fully_shard(layer)
    fully_shard(sharded)
    for _ in range(3):
        x = torch.randn(2, 5, 16)
        for model in (plain, sharded):
            model.zero_grad()
            model(x).square().mean().backward()
        for mine, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [1, 2])
def test_fsdp_with_selective_checkpointing(world, tmp_path):
    command = [sys.executable, __file__, str(world), str(tmp_path / "store")]
    running = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(world)]
    said = [one.communicate(timeout=300)[1] for one in running]
    assert [one.returncode for one in running] == [0] * world, said


class Program(torch.nn.Module):
    def forward(self, q, k, v):
        mixed = registry.attention(q, k, v, causal=True, window=(7, 0))
        return registry.matmul(mixed.flatten(0, 2), torch.ones(8, 8)).view_as(q)


class Attending(torch.nn.Module):
    def forward(self, q, k, v):
        return registry.attention(q, k, v, causal=True, window=(7, 0))


PACKAGED = Program if Version(torch.__version__) >= Version("2.12") else Attending
"""A package of an older torch reads dtypes among arguments wrongly: https://github.com/pytorch/pytorch/issues/169157."""


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_leaves_the_choice_to_whoever_runs_it(strict):
    """A graph of torch.compile settles it, and is traced again where somebody records or asks; a program is not."""
    given = tuple(torch.randn(1, 2, 16, 8) for _ in range(3))
    program = torch.export.export(Program(), given, strict=strict)
    asked = [node.args[-1] for node in program.graph.nodes if "registry" in str(node.target)]
    assert asked == [None, None]


LOADED = """
import sys, torch, registry
given, expected = torch.load(sys.argv[2])
program = torch._inductor.aoti_load_package(sys.argv[1])
with registry.record() as ran:
    for inputs, outputs in zip(given, expected):
        torch.testing.assert_close(program(*inputs), outputs)
assert set(ran.counts) == set(sys.argv[3:]), ran.counts
"""


@pytest.mark.slow(16, together="inductor")
def test_a_compiled_package_runs_where_only_registry_was_imported(tmp_path):
    given = [tuple(torch.randn(1, 2, length, 8) for _ in range(3)) for length in (16, 40)]
    length = torch.export.Dim("length", min=2, max=512)
    exported = torch.export.export(PACKAGED(), given[0], dynamic_shapes=({2: length},) * 3)
    once = {"aot_inductor.precompile_headers": False}  # one program: they take longer than all of it
    path = str(tmp_path / "program.pt2")
    package = torch._inductor.aoti_compile_and_package(exported, package_path=path, inductor_configs=once)
    torch.save((given, [PACKAGED()(*inputs) for inputs in given]), tmp_path / "tensors.pt")
    ops = ["attention", "matmul"] if PACKAGED is Program else ["attention"]
    command = [sys.executable, "-c", LOADED, package, str(tmp_path / "tensors.pt"), *ops]
    unpacked_here = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=unpacked_here, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    train(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
