"""Memory that is zero before a launch and that the launch leaves at zero: counters and flags between thread blocks.

A kernel whose blocks draw from a counter, or tell each other that they are done, needs zeroes to start from. Zeroing
them before each launch would cost a launch of its own; a kernel that ends by putting them back needs that only once, if
no two launches that could overlap ever share them. That is what this file sees to::

    from registry.toolbox.counters import zeroes

    row = zeroes(q.get_device(), WIDTH).take()  # per launch: int32, WIDTH of them
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch

from registry.toolbox.lasting import lasting_zeros

__all__ = ["ZeroRows", "graphs_are_gone", "zeroed", "zeroes"]


class ZeroRows:
    """Rows of int32 zeroes on one device; each launch takes one that no launch which could overlap with it has.

    Launches on one stream never overlap: a stream has rows of its own and takes them in turn, which also covers a
    driver that gives the handle of a destroyed stream to a new one. A launch captured into a CUDA graph may be replayed
    on any stream, beside anything but itself: it takes a row that nobody else is ever given, or, when those are used up
    (or none was made before the capture), one in the graph's own memory that the graph zeroes at each replay, which
    costs 2 us there: as much as a short kernel.
    """

    PER_STREAM, STREAMS = 64, 16
    FOR_CAPTURES = 16 << 20
    """Bytes of rows: 131,072 of the narrowest, 4,096 of the widest."""

    def __init__(self, device: int, width: int) -> None:
        self._device, self._width = device, width
        self._streams: dict[int, tuple[list[torch.Tensor], Iterator[int]]] = {}
        self._reserve: torch.Tensor | None = None
        self._left: Iterator[torch.Tensor] = iter(())
        """Rows for streams to come."""
        self._captured = itertools.count()

    def take(self) -> torch.Tensor:
        """The row of the next launch on the current stream."""
        if torch.cuda.is_current_stream_capturing():
            if self._reserve is not None and (i := next(self._captured)) < len(self._reserve):
                return self._reserve[i]
            return self._zeros(1)[0]
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        mine = self._streams.get(stream)
        if mine is None:
            if self._reserve is None:
                self._reserve = self._lasting(self.FOR_CAPTURES // (4 * self._width))
            while (own := next(self._left, None)) is None:
                self._left = iter(self._lasting(self.STREAMS * self.PER_STREAM).split(self.PER_STREAM))
            mine = self._streams[stream] = list(own.unbind()), itertools.count()  # next() is safe between threads
        rows, turn = mine
        return rows[next(turn) % self.PER_STREAM]

    def begin_again(self) -> None:
        """Captured launches get the rows of those before."""
        if self._reserve is not None:
            self._reserve.zero_()
        self._captured = itertools.count()

    def _lasting(self, count: int) -> torch.Tensor:
        return lasting_zeros(count, self._width, device=self._device)

    def _zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, self._width, device=self._device, dtype=torch.int32)


_MADE: list[ZeroRows] = []


@functools.cache
def zeroes(device: int, width: int) -> ZeroRows:
    """The rows of `width` of one device."""
    _MADE.append(ZeroRows(device, width))
    return _MADE[-1]


def graphs_are_gone() -> None:
    """To be said where many graphs are captured, timed and dropped, as in a sweep: no graph of this process runs again,
    and none is running."""
    for rows in _MADE:
        rows.begin_again()


WIDTHS = (32, 256, 512, 1024)  # a cache line, and as many as the tiles or blocks of a kernel on one chip


def zeroed(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that gives a launch at least `count` zeroes on its tensor's device; beyond `WIDTHS`, fresh ones."""
    width = next((width for width in WIDTHS if count <= width), None)

    def counters(like: torch.Tensor) -> torch.Tensor:
        if width is None or not like.is_cuda:
            return torch.zeros(count, device=like.device, dtype=torch.int32)
        return zeroes(like.get_device(), width).take()

    return counters
