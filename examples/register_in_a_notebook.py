"""A variant that lives for this session only: declare it, register it, hold it against the oracle, be refused by it."""

# %%
import torch

import registry
from registry import Requires, Variant


# %% The kernel: a matrix product by blocks of k. It claims two dimensions, float32 and nothing else.
def split_k(a, b, *, config):
    blocks = zip(a.split(config["BLOCK_K"], dim=1), b.split(config["BLOCK_K"], dim=0), strict=True)
    return sum(left @ right for left, right in blocks)


registry.register(
    Variant(
        "mine.split_k",
        op="matmul",
        run=split_k,
        requires=Requires(arch=("any",), dtypes=("float32",), layouts=("nn", "nt", "tn", "tt"), ieee=True),
        configs=[{"BLOCK_K": 64}],
    ),
    replace=True,  # so that this cell can be run again
)

# %% Ask for it by name: requested means ran.
a, b = torch.randn(96, 200), torch.randn(200, 32)
with registry.use("mine.split_k"), registry.record() as ran:
    product = registry.matmul(a, b)
torch.testing.assert_close(product, registry.matmul.reference(a, b).float(), rtol=1e-4, atol=1e-4)
print(ran.counts)

# %% What it does not claim, it refuses, and says why.
try:
    registry.matmul(a, b, bias=torch.zeros(32), variant="mine.split_k")
except registry.IllegalVariant as refusal:
    print(refusal)

# %% Prefer it where it is legal. A fallback is counted, and `explain` shows it.
with registry.prefer("mine.split_k"):
    print(registry.matmul.explain(a, b))
    print(registry.matmul.explain(a.bfloat16(), b.bfloat16()))
