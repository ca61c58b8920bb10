"""Attention over sequences of differing lengths, and its gradients: two ops, one contract, which op.py states."""

from registry.ops.attention_varlen.backward import AttentionVarlenBackward, attention_varlen_backward
from registry.ops.attention_varlen.op import AttentionVarlen, attention_varlen

__all__ = ["AttentionVarlen", "AttentionVarlenBackward", "attention_varlen", "attention_varlen_backward"]
