"""Attention and its gradients: two ops, one contract. See op.py for what is promised."""

from registry.ops.attention.backward import AttentionBackward, attention_backward
from registry.ops.attention.op import Attention, attention

__all__ = ["Attention", "AttentionBackward", "attention", "attention_backward"]
