"""Products of groups of rows, each with a matrix of its own. See op.py for what is promised."""

from registry.ops.grouped_mm.op import GroupedMm, grouped_mm

__all__ = ["GroupedMm", "grouped_mm"]
