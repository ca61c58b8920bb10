"""What shapes of matrix products for the tuner have alike: the result's dtype, and how near it must come."""

from __future__ import annotations

import torch

from registry.ops.parts.judging import TOLERANCE
from registry.ops.parts.products import default_out_dtype
from registry.ops.parts.workload import Workload
from registry.ops.tensors import dtype_name


class ProductWorkload(Workload):
    out_dtype: torch.dtype | None
    """As the call asks for it; None: the op's choice."""

    @property
    def result_dtype(self) -> torch.dtype:
        return self.out_dtype or default_out_dtype(self.tensors["a"].dtype)

    def tolerance(self) -> float:
        found, result = super().tolerance(), TOLERANCE[dtype_name(self.result_dtype)]
        return result if self.tensors["a"].dtype.itemsize == 1 else max(found, result)
