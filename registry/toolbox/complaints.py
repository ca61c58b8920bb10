"""What kernels complain of without anybody waiting for them: a word of device memory for each kind of wrong operand.

An operand's values live on the device, and a host that checked them would have to wait. So a kernel that meets a length
or an index that cannot be right goes on with the nearest one that can (nothing is read or written out of bounds), and
leaves a bit in a word that stays. `registry.check()` waits for the device, and raises for what it finds::

    LENGTHS = Complaint("attention_varlen: lengths", ("cu_seqlens_q is not ...", "seqused_k exceeds ..."))
    arguments = {"word_ptr": LENGTHS.argument, ...}    # of a Call: int32 [1], the same for the life of the process
    ...
    tl.atomic_or(word, 1 << which, mask=wrong)

The word outlives all launches, so a CUDA graph that was captured with it complains when it is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from registry.errors import CaptureError, DeviceComplaint
from registry.forks import new_lock
from registry.toolbox.capturing import capturing
from registry.toolbox.lasting import lasting_zeros
from registry.toolbox.operands import Kept

__all__ = ["Complaint", "check"]

_complaints: list[Complaint] = []
_lock = new_lock()


class Complaint:
    """A kind of thing that kernels find wrong: up to 31 sentences, one for each bit of its word."""

    def __init__(self, about: str, sentences: Sequence[str]) -> None:
        if not 0 < len(sentences) < 32:
            raise ValueError(f"sentences: got {len(sentences)}; allowed: 1 to 31, one a bit")
        self.about, self.sentences = about, tuple(sentences)
        self._words: dict[torch.device, torch.Tensor] = {}
        self.argument = Kept((1,), "int32", "complaints", lambda like: self.word(like.device))
        """Its word, as a host side gives it to a kernel."""
        _complaints.append(self)

    def word(self, device: torch.device) -> torch.Tensor:
        """int32 [1] on that device, zero until a kernel sets bits in it."""
        found = self._words.get(device)
        if found is None:
            if device.type == "cuda" and capturing():
                raise CaptureError(f"{self.about}: looked at for the first time inside a capture; do it once before")
            with _lock:
                found = self._words.get(device)
                if found is None:
                    found = self._words[device] = lasting_zeros(1, device=device)
        return found

    def taken(self) -> list[str]:
        """The sentences that were set since this was last asked, by device; waits for the devices."""
        found = []
        for device, word in list(self._words.items()):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            bits = int(word.item())
            if bits:
                word.zero_()
                found += [f"{self.about} on {device}: {s}" for i, s in enumerate(self.sentences) if bits >> i & 1]
        return found


def check() -> None:
    """Wait for the devices and raise DeviceComplaint for what kernels found wrong since the last check.

    Lengths and indices in device memory are not read by the host: kernels hold them to their bounds, and say so here.
    """
    found = [sentence for complaint in list(_complaints) for sentence in complaint.taken()]
    if found:
        raise DeviceComplaint(found)
