"""What kernels say of offsets and rows that lie: they clamp them, and `registry.check()` raises for it."""

from __future__ import annotations

from registry.toolbox.complaints import Complaint

OFFSETS = Complaint(
    "grouped_mm: offs and rows",
    ("offs does not rise from 0 to what the groups share", "rows names a row of a that is not there"),
)
BAD_OFFSETS, BAD_ROWS = 1, 2
"""The bits of `OFFSETS.word(device)`."""
