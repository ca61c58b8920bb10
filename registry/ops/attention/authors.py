"""What the author of an attention kernel has to know."""

from __future__ import annotations

from registry.ops.parts.authors import SOFTCAPS, Contract

_MASKS = {
    "causal": "key `j` is seen by query `i` where `j <= i + keys - rows` (aligned bottom-right)",
    "window": "`None`, or `(left, right)`: query `i` sees keys from `i + keys - rows - left` to "
    "`i + keys - rows + right`; -1 is unlimited. Beside `causal=True` the right side is 0",
    "softcap": "0.0, or scores become `softcap * tanh(scaled score / softcap)`",
    "scale": "a positive float by which scores are multiplied; the op has made negative ones positive",
}
_MASK_NOTE = (
    "Masks are put as plainly as they can be: one that hides nothing at these lengths is not there, and a right side "
    "of 0 is `causal`. So a kernel never meets two spellings of one mask."
)
BY_OP = {
    "attention": Contract(
        returns="`(out, lse)`: `out` [B, H, S, Dv] in q's dtype, dense in the memory order of q "
        "(`registry.ops.attention.outputs.new_out`); `lse` float32 [B, H, S], contiguous, natural logarithm, or `None` "
        "where it was not asked for",
        arguments={
            "q": "[B, H, S, D]",
            "k": "[B, Hkv, T, D]; H is a multiple of Hkv: query head `h` reads head `h // (H // Hkv)`",
            "v": "[B, Hkv, T, Dv]; its strides are its own, and need not be k's",
            "return_lse": "whether the LSE is wanted",
            **_MASKS,
        },
        notes=(
            _MASK_NOTE,
            SOFTCAPS,
            "A row that sees no key gives zeros, and an LSE of -inf.",
            "Tensors come with the strides and the alignment that the claims allow, and nothing about the memory "
            "beyond them may be assumed: it holds NaN in the tests.",
            "`lse` of the Problem is what `return_lse` says; where gradients are followed it is always asked for.",
        ),
    ),
    "attention_backward": Contract(
        returns="`(dq, dk, dv)`, each of the dtype and shape of what it is the gradient of, dense, in its memory order",
        arguments={
            "grad_out": "[B, H, S, Dv] with a unit inner stride; the op copies those that autograd expands",
            "q": "as in the forward",
            "k": "as in the forward; dk is summed over the query heads that share it",
            "v": "as in the forward",
            "out": "what any forward returned: dense, in the order bhsd or bshd; by some of torch's in that of q",
            "lse": "float32 [B, H, S], contiguous, -inf where a row saw no key",
            "grad_lse": "`None`, or float32 [B, H, S]: the gradient of the LSE, which adds to dq and dk",
            "deterministic": "whether torch asks for the same bits on every run: "
            "`torch.use_deterministic_algorithms(True)`",
            **_MASKS,
        },
        notes=(
            _MASK_NOTE,
            SOFTCAPS,
            "A variant that claims no `deterministic` is not asked where torch wants it; one that claims it may still "
            "take a faster way where it is `False`.",
            "Gradients are dense even where an input was expanded: autograd sums them.",
            "The claim `lse` is needed here, for every call has one: a variant without it is refused everywhere.",
        ),
    ),
}
