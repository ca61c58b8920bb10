"""A made-up op and its tables, for the tests of tables: they know only what they are told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from registry.tables import Field, Layer, TableSet, files_at, load_tables
from registry.tables.reach import Conditions, Taken

OPS = {
    "brew": dict(dtype=Field("str", ("float16", "bfloat16")), cups="int", strength="float", hot="bool", bean="str"),
    "brew_backward": {"cups": "int"},
}
ERRATUM = """errata:
- variant: hasty
  op: brew
  arch: [sm90, sm100+]
  when: {cups: "..7"}
  toolchain: {torch: ">=2.11,<2.14"}
  severity: wrong-result
  reason: lukewarm below eight cups
  link: https://example.org/1
"""


@dataclass(frozen=True)
class FakeTarget:
    arch: str = "sm90"
    torch: str = "2.13.0"
    triton: str = "3.6.0"
    cudnn: str = ""


def load(tmp_path: Path, *texts: str, layer: Layer = Layer.ENVIRONMENT, **options: object) -> TableSet:
    paths = []
    for index, text in enumerate(texts):
        paths.append(tmp_path / f"t{layer.name}{index}.yaml")
        paths[-1].write_text(text)
    return load_tables(files_at(paths, layer), OPS, **options)  # type: ignore[arg-type]


def table(*rules: str, op: str = "brew", arch: str = "sm90") -> str:
    return f"op: {op}\narch: {arch}\nrules:\n" + "".join(f"- {rule}\n" for rule in rules)


def picks(
    tables: TableSet, arch: str = "sm90", device: str | None = None, op: str = "brew", **facts: object
) -> list[str]:
    """The first candidate of each matching rule, highest layer first."""
    return [match.use[0].variant for match in tables.match(op, facts, arch, device)]


def unreachable_by(rule: Conditions, earlier: Iterable[Conditions]) -> bool:
    """Whether earlier rules take every problem of `rule`: one of them does, or several side by side in one key."""
    taken = Taken()
    for one in earlier:
        taken.add(one)
    return taken.all_of(rule)
