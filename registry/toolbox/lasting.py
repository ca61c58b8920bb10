"""Memory that a process keeps.

It is allocated on a thread of its own. What compiled graphs are made of (torch.compile's mode "reduce-overhead") warms
up with whatever the thread allocates in a pool of the graphs', who count what lives there and give the rest to others.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch


def lasting_zeros(*shape: int, device: torch.device | int | str) -> torch.Tensor:
    """int32 zeroes, which are there before any launch that is asked for later, on whatever stream. Not for use inside
    of a capture."""

    def made() -> torch.Tensor:
        found = torch.zeros(shape, dtype=torch.int32, device=device)
        if found.is_cuda:
            torch.cuda.synchronize(found.device)
        return found

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(made).result()
