"""The grouped_mm question: its fields, and how each is judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from registry.contract.problem import OperandFact, Problem, alike, derived_flag, fact, query
from registry.contract.target import Target
from registry.errors import InvalidArgument
from registry.ops.grouped_mm.arguments import DTYPES, FLOATS, FORMS, MOST_GROUPS
from registry.ops.grouped_mm.likeness import SAME_KERNEL, coordinates
from registry.ops.parts.products import (
    ACTIVATIONS,
    FP8_NAMES,
    LAYOUTS,
    alignment,
    check_activation,
    contiguous_rows,
    layout_letter,
    made_up,
    named_out_dtype,
    pitch_of,
    same_dtype,
)
from registry.ops.tensors import check_sizes, dtype_name, ieee_flag, known_dtype


def _form(problem: Any, claim: Any) -> str:
    return f"ask for one of the forms {', '.join(claim)}" if claim else "none: this variant claims no form"


@dataclass(frozen=True, kw_only=True)
class GroupedMmProblem(Problem):
    """Products of groups, for one call. The sizes of the groups are values, on the device: no Problem knows them."""

    op: ClassVar[str] = "grouped_mm"
    derived_kinds: ClassVar[Mapping[str, str]] = {"each": "int", "pitch": "int"}
    known_values: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "dtype": tuple(sorted(map(dtype_name, DTYPES))),
        "out_dtype": tuple(sorted(map(dtype_name, FLOATS))),
        "form": tuple(FORMS.values()),
        "layout": (*LAYOUTS, "strided"),
        "activation": ("", *ACTIVATIONS),
        "scaling": ("", "rowwise"),
    }

    groups: int = fact()
    m: int = fact()
    """Rows of the result, of all groups together where the groups are slices of rows, else of each."""
    n: int = fact()
    """Columns of the result."""
    k: int = fact()
    form: str = query("member", claim="forms", default="rows", fix=_form)
    out_dtype: str = query(same_dtype, claim="out_dtypes", unclaimed=())
    layout: str = query("member", claim="layouts", default="nn", fix=contiguous_rows)
    gather: bool = query(
        "flag", claim="gather", default=False, fix=lambda problem, claim: "pass a[rows] as a, without rows"
    )
    bias: bool = query("flag", claim="bias", default=False)
    activation: str = query("optional_member", claim="activations", default="")
    gated: bool = query("flag", claim="gated", default=False)
    scaling: str = query("optional_member", claim="scaling", default="")
    out: bool = query("flag", claim="out", default=False)
    ieee: bool = ieee_flag()
    promoted: bool = derived_flag("promoted", dtypes=FP8_NAMES)
    """float8: sums leave the tensor cores' own adders for float32 every 128 values of K at the latest."""
    operands: tuple[OperandFact, ...] = query(alignment, claim="base_alignment", default=())

    spread: ClassVar[str] = "even"
    """How the sizes of the groups differ: what a made-up call says and no recorded one can tell."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "promoted", self.dtype in FP8_NAMES)

    def result_shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        shape = (self.m, self.n) if self.form == "rows" else (self.groups, self.m, self.n)
        return {"out": (shape, self.out_dtype)}

    def likeness(self) -> dict[str, float]:
        facts = self.facts()
        for name in SAME_KERNEL:
            del facts[name]
        return {**alike(facts), **coordinates(self)}

    def derived_facts(self) -> dict[str, Any]:
        return {"each": self.each, "pitch": self.pitch}

    @property
    def each(self) -> int:
        """What a group has of the dimension that the groups share, on average."""
        shared = {"rows": self.m, "inner": self.k, "batch": self.m * self.groups}[self.form]
        return -(-shared // max(self.groups, 1))

    @property
    def pitch(self) -> int:
        return pitch_of(self.n, self.out_dtype, [one.stride_alignment for one in self.operands])

    @classmethod
    def of_shape(
        cls,
        target: Target,
        *,
        dtype: str = "bfloat16",
        form: str = "rows",
        e: int = 8,
        m: int = 1024,
        n: int = 1024,
        k: int = 1024,
        layout: str = "nt",
        out_dtype: str | None = None,
        gather: bool = False,
        bias: bool = False,
        activation: str = "",
        gated: bool = False,
        scaling: str = "",
        ieee: bool = False,
        deterministic: bool = False,
        spread: str = "even",
    ) -> GroupedMmProblem:
        """The problem of freshly allocated tensors of these sizes: what `kreg explain` and the tuner ask about."""
        torch_dtype = known_dtype("dtype", dtype, DTYPES)
        check_sizes(e=e, m=m, n=n, k=k)
        if e > MOST_GROUPS:
            raise InvalidArgument("e", e, f"at most {MOST_GROUPS}")
        for name, word, allowed in (("form", form, tuple(FORMS.values())), ("layout", layout, LAYOUTS)):
            if word not in allowed:
                raise InvalidArgument(name, repr(word), ", ".join(allowed))
        wide = 2 * n if gated else n
        of_a, of_b = (e,) * (form == "batch"), (e,) * (form != "inner")
        operands = (
            made_up("a", (*of_a, m, k), layout[0], torch_dtype),
            made_up("b", (*of_b, k, wide), layout[1], torch_dtype),
        )
        return cls(
            target=target,
            dtype=dtype,
            groups=e,
            m=m,
            n=n,
            k=k,
            form=form,
            layout="".join(map(layout_letter, operands)),
            gather=gather,
            bias=bias,
            out_dtype=named_out_dtype(out_dtype, torch_dtype, FLOATS),
            activation=check_activation(activation),
            gated=gated,
            scaling=scaling,
            ieee=ieee and dtype == "float32",
            deterministic=deterministic,
            operands=operands,
        )
