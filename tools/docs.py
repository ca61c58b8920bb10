"""Keeps the generated parts of the documentation current: `make docs`, or `python tools/docs.py [--check]`.

docs/variants.md is written from the declarations of the built-in variants; in docs/authors.md, the contract of each
op from what it declares. In README.md, each block that follows a line `<!-- $ command -->` is the output of that
command.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from registry.contract import describe
from registry.contract.declared import Handed
from registry.contract.variant import Variant
from registry.dispatch import in_force
from registry.dispatch.catalog import catalog
from registry.dispatch.discovery import BUILTIN_PACKAGE
from registry.errors import RegistryError
from registry.ops.known import all_ops
from registry.ops.op import Op
from registry.tables import load_tables, shipped_files

BLOCK = re.compile(
    r"(?P<head><!-- \$ (?P<command>[^\n]*?) -->\n+```[a-z]*\n)(?P<output>.*?)(?P<tail>^```$)", re.S | re.M
)
WIDTH = "80"
_INTRODUCTION = """\
# Variants

<!-- Generated from the declarations in plugins/ by `make docs`. Do not edit. -->

What each built-in variant may run, and how it is built. What a variant does not claim, it refuses; `kreg explain` says
why. Which of the legal ones runs is ranked by the tables in `dispatch_tables/`.

- **runs on**: `sm90` is exactly that architecture, `sm80+` that or any newer NVIDIA GPU.
- **features**: `gqa` fewer key/value than query heads, `cross_length` queries and keys of different lengths, `lse`
  returns the log-sum-exp, `ieee` float32 in full precision (others may use tf32),
  `promoted` float8 summed in float32 every 128 values of K.
- **memory**: the orders in which operands may lie, then the alignment of base addresses and of strides, in bytes.
"""

Cells = Callable[[Variant], str]
_COLUMNS: tuple[tuple[str, Cells], ...] = (
    ("variant", lambda v: f"`{v.name}`"),
    ("runs on", lambda v: ", ".join(v.requires.arch)),
    ("dtypes", lambda v: describe.dtypes_text(v.requires.dtypes)),
    ("sizes", lambda v: ", ".join(describe.sizes(v.requires))),
    ("features", lambda v: ", ".join(describe.features(v.requires))),
    ("memory", lambda v: ", ".join(describe.memory(v.requires))),
    ("limits", lambda v: ", ".join(describe.limits(v.requires))),
    ("design", lambda v: ", ".join(describe.design_traits(v.design))),
    ("what it is", lambda v: v.summary),
)


def variants_page() -> str:
    """docs/variants.md. The same on every machine: built-in variants and shipped errata only."""
    parts = [_INTRODUCTION]
    for name, op in sorted(all_ops().items()):
        built_in = [v for v in catalog.get().of(name).values() if v.origin.startswith(f"{BUILTIN_PACKAGE}.")]
        parts.append(f"## {name}\n\n{_sentence(op)}\n\n" + "\n".join(_table(built_in)) + "\n")
    parts.append(
        "## Known to be bad\n\nErrata make a variant illegal where it is known to fail.\n\n"
        + "\n".join(_errata())
        + "\n"
    )
    return "\n".join(parts)


CONTRACTS = re.compile(r"(<!-- contracts -->\n).*?(<!-- /contracts -->)", re.S)
_KINDS: Mapping[str, str] = {
    "flag": "`True`",
    "member": "a tuple of names",
    "optional_member": "a tuple of names",
    "pair": "`(lowest, highest)`",
    "range": "`(lowest, highest)`, and `{claim}_multiple`",
    "multiple": "a number that divides it",
    "closed": "`True`, or a tuple of values",
}


def with_contracts(text: str) -> str:
    """docs/authors.md with the contract of every op made anew."""
    made = "\n".join(line for name, op in sorted(all_ops().items()) for line in _contract(name, op))
    return CONTRACTS.sub(lambda place: f"{place[1]}\n{made}\n{place[2]}", text)


def _contract(name: str, op: Op) -> Iterator[str]:
    known, always = op.contract, Handed(op.tensors, *(_always(claims) for claims in (_fixed(op), op.call_arguments)))
    meaning: Mapping[str, str] = known.arguments if known is not None else {}
    earned: Mapping[str, str] = known.earned if known is not None else {}
    yield f"### {name}\n"
    yield f"`{op.summary}`\n"
    yield f"`run({', '.join((*always.tensors, '*', 'config', *always.fixed, *always.varying))}, ...)`\n"
    rows = [[f"`{tensor}`", "both, by position", "", meaning.get(tensor, "")] for tensor in op.tensors]
    for where, claims in (("run", _fixed(op)), ("both", op.call_arguments)):
        rows += [
            [f"`{word}`", where, earned.get(claim, f"`{claim}`") if claim else "", meaning.get(word, "")]
            for word, claim in claims.items()
        ]
    yield from _rows(["argument", "of", "earned by", "what it is"], rows)
    yield ""
    if known is not None:
        yield f"Returns {known.returns}.\n"
        yield from (f"- {note}" for note in known.notes)
        yield ""
    yield from _rows(["claim", "is", "for", "values"], list(_claims(op)))
    yield ""


def _fixed(op: Op) -> dict[str, str]:
    return {word: claim for word, (claim, _) in op.fixed_arguments.items()}


def _always(claims: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(word for word, claim in claims.items() if not claim)


def _claims(op: Op) -> Iterator[list[str]]:
    """Every claim that some field of the op's problems asks for."""
    seen = set()
    for field, how in op.problem_type.queries().items():
        if not how.claim or how.claim in seen:
            continue
        seen.add(how.claim)
        kind = _KINDS.get(str(how.rule)) or _of_its_own(how.claim, op.problem_type.claims())
        values = ", ".join(f"`{value}`" for value in op.problem_type.known_values.get(field, ()) if value)
        yield [f"`{how.claim}`", kind.format(claim=how.claim), f"`{field}`", values]


def _of_its_own(claim: str, unclaimed: Mapping[str, Any]) -> str:
    """What a claim is that a rule of its own judges, by what it is where nobody makes it."""
    if claim.endswith("_alignment"):
        return "1, 2, 4, 8 or 16 bytes"
    if unclaimed[claim] is None:
        return _KINDS["range" if f"{claim}_multiple" in unclaimed else "pair"]
    return _KINDS["flag" if unclaimed[claim] is False else "member"]


def refreshed(text: str) -> str:
    """The text with the output of every `<!-- $ command -->` block made anew."""
    return BLOCK.sub(lambda block: block["head"] + output_of(block["command"]) + block["tail"], text)


def output_of(command: str) -> str:
    """What a `kreg` command prints in a pipe of 80 columns, away from the tables and settings of this user."""
    program, *arguments = shlex.split(command)
    if program != "kreg":
        raise ValueError(f"only kreg commands can be shown, got {command!r}")
    with tempfile.TemporaryDirectory() as empty:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("REGISTRY_")}
        environment |= {"REGISTRY_CACHE": empty, "COLUMNS": WIDTH, "NO_COLOR": "1"}
        run = [sys.executable, "-m", "registry.cli", *arguments]
        return subprocess.run(run, env=environment, text=True, stdout=subprocess.PIPE, check=False).stdout


def pages(root: Path) -> Iterator[tuple[Path, str]]:
    """Every page with generated parts, and what it should hold."""
    yield root / "docs" / "variants.md", variants_page()
    authors = root / "docs" / "authors.md"
    yield authors, with_contracts(authors.read_text(encoding="utf-8"))
    readme = root / "README.md"
    yield readme, refreshed(readme.read_text(encoding="utf-8"))


def main(arguments: list[str]) -> int:
    """Write what is not current, or with --check only name it and return 1."""
    check = arguments == ["--check"]
    try:
        wanted = list(pages(Path.cwd()))
    except RegistryError as error:
        print(f"cannot write documentation: {error}")
        return 1
    stale = [(page, text) for page, text in wanted if not page.exists() or page.read_text(encoding="utf-8") != text]
    for page, text in stale:
        if not check:
            page.write_text(text, encoding="utf-8")
        print(f"{page.name} {'is not current: make docs' if check else 'written'}")
    return 1 if stale and check else 0


def _sentence(op: Op) -> str:
    doc = (type(op).__doc__ or "").strip().splitlines()
    return f"`{op.summary}`" if op.summary else (doc[0] if doc else "")


def _table(variants: list[Variant]) -> Iterator[str]:
    """A Markdown table; a column that is empty for every variant is left out."""
    columns = [(title, cells) for title, cells in _COLUMNS if any(cells(variant) for variant in variants)]
    yield from _rows(
        [title for title, _ in columns], [[cells(variant) for _, cells in columns] for variant in variants]
    )


def _errata() -> Iterator[str]:
    shipped = load_tables(shipped_files(), in_force.op_fields())
    rows = []
    for e in shipped.errata:
        link = e.link.removeprefix("docs/")  # from a page in docs/
        rows.append([f"`{e.variant}`", ", ".join(e.arch), _versions(e.toolchain), e.severity, f"[{e.reason}]({link})"])
    yield from _rows(["variant", "on", "with", "severity", "what happens"], rows)


def _versions(toolchain: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {spec}" for name, spec in sorted(toolchain.items()))


def _rows(titles: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield f"|{'|'.join(' --- ' for _ in titles)}|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
