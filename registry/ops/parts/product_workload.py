"""What shapes of matrix products for the tuner have alike: operands, the dtype of the result, and how near it comes."""

from __future__ import annotations

import torch

from registry.ops.parts.judging import TOLERANCE
from registry.ops.parts.products import default_out_dtype
from registry.ops.parts.workload import Workload
from registry.ops.tensors import dtype_name


class ProductWorkload(Workload):
    out_dtype: torch.dtype | None
    """As the call asks for it; None: the op's choice."""

    def operand(self, name: str, shape: tuple[int, ...], letter: str, dtype: torch.dtype) -> torch.Tensor:
        """One matrix, or one for each of what stands before its dimensions; "t": transposed in memory."""
        found = self.recorded(name, dtype)
        if found is not None:
            return found
        made = self.random(shape if letter == "n" else (*shape[:-2], shape[-1], shape[-2]), dtype)
        return made if letter == "n" else made.transpose(-1, -2)

    @property
    def result_dtype(self) -> torch.dtype:
        return self.out_dtype or default_out_dtype(self.tensors["a"].dtype)

    def tolerance(self) -> float:
        found, result = super().tolerance(), TOLERANCE[dtype_name(self.result_dtype)]
        return result if self.tensors["a"].dtype.itemsize == 1 else max(found, result)
