"""torch's own attention kernels as variants: FlashAttention-2, cuDNN, memory-efficient, the CPU kernel, and plain math.

They are reached through the aten ops, which give the LSE and the alignment that `scaled_dot_product_attention` hides.
A file has kernels with their backward, and what they claim.
"""

from __future__ import annotations

from registry import Design, Requires, Variant, hookimpl
from registry.plugins.torch_attention import cudnn, efficient, flash, plain

KERNELS = (
    (
        "torch_flash",
        "FlashAttention-2 as built into torch",
        (flash.flash, flash.CLAIMS),
        (flash.flash_backward, {**flash.CLAIMS, **flash.BACKWARD}),
    ),
    (
        "torch_cudnn",
        "cuDNN's fused attention",
        (cudnn.cudnn, cudnn.CLAIMS),
        (cudnn.cudnn_backward, {**cudnn.CLAIMS, **cudnn.BACKWARD}),
    ),
    (
        "torch_efficient",
        "xFormers' memory-efficient attention as built into torch",
        (efficient.efficient, efficient.CLAIMS),
        (efficient.efficient_backward, {**efficient.CLAIMS, **efficient.BACKWARD}),
    ),
    ("torch_cpu", "torch's blocked CPU kernel", (plain.cpu, plain.CPU_CLAIMS), (plain.cpu_backward, plain.CPU_CLAIMS)),
    (
        "torch_math",
        "plain torch operations: does everything, stores all scores",
        (plain.math_attention, plain.MATH_CLAIMS),
        (plain.math_backward, {**plain.MATH_CLAIMS, **plain.MATH_BACKWARD}),
    ),
)
"""(name, summary, (the forward, what it claims), (the backward, what it claims))."""


@hookimpl
def registry_variants() -> list[Variant]:
    found = []
    for name, summary, (forward, claims), (backward, backward_claims) in KERNELS:
        design = Design(dsl="aten" if name in ("torch_cpu", "torch_math") else "cuda")
        found.append(
            Variant(
                name,
                op="attention",
                run=forward,
                requires=Requires(**claims, lse=True),
                design=design,
                traceable=name != "torch_math",  # its oracle is no graph of a few operations
                builds_each_size=name == "torch_cudnn",
                summary=summary,
            )
        )
        found.append(
            Variant(
                f"{name}_backward",
                op="attention_backward",
                run=backward,
                design=design,
                summary=f"{summary}: gradients",
                requires=Requires(**backward_claims, lse=True),
            )
        )
    return found
