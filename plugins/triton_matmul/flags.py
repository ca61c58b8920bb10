"""Zeroes for the split products: each launch takes a row of flags, and leaves it at zero (see kernel.py)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch


class Flags:
    """For each launch a row of zeroes that no launch which could overlap with it uses.

    Launches on one stream never overlap: a stream has rows of its own, and takes them in turn, which also covers a
    driver that gives the handle of a destroyed stream to a new one. A launch captured into a CUDA graph may be replayed
    on any stream, beside anything but itself: it takes a row that nobody else is ever given, or, when those are used up
    (or none was made before the capture), one in the graph's own memory that the graph zeroes at each replay.
    """

    PER_STREAM = 64
    FOR_CAPTURES = 1 << 12

    def __init__(self, device: int, width: int) -> None:
        self._device, self._width = device, width
        self._streams: dict[int, tuple[list[torch.Tensor], Iterator[int]]] = {}
        self._reserve: torch.Tensor | None = None
        self._captured = itertools.count()

    def take(self) -> torch.Tensor:
        """A row for the next launch on the current stream."""
        if torch.cuda.is_current_stream_capturing():
            if self._reserve is not None and (i := next(self._captured)) < self.FOR_CAPTURES:
                return self._reserve[i]
            return self._zeros(1)[0]
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        mine = self._streams.get(stream)
        if mine is None:
            if self._reserve is None:
                self._reserve = self._zeros(self.FOR_CAPTURES)
                torch.cuda.synchronize(self._device)  # once per process: zero before any graph can run
            # Zeroed in stream order; counting with next() is safe between threads.
            mine = self._streams[stream] = list(self._zeros(self.PER_STREAM).unbind()), itertools.count()
        rows, turn = mine
        return rows[next(turn) % self.PER_STREAM]

    def _zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, self._width, device=self._device, dtype=torch.int32)


@functools.cache
def flags(device: int, width: int) -> Flags:
    """The flags of one device, rows of `width`."""
    return Flags(device, width)
