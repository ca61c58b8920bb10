"""Keep measurements where a variant's source changed and what runs did not.

    python tools/carry.py HEAD               # the working tree against a commit; `make carry BASE=HEAD`

A measurement holds for the source that it was made with, by its hash. For each variant whose hash differs between the
two sides, what was measured (benchmarks/results) is asked of both:

launches  of every measured shape and config: the grid, what the kernel is given by name, options and clusters. A number
          or None that only one side gives, which gives all that the other does, is none where the machine code is the
          same
builds    all of which the key is the same by which Triton finds what it compiled; of others so many that each config is
          there, and each type, constant and alignment that any of them is specialised on: the compiler's input as in
          tools/replay.py, the machine code where that differs

A variant that builds nothing is what it runs on the host: its plugin's code beside the hook that declares it, of a
plugin of one file that which the variant comes to.
Where all are equal, the tables carry the new hash, and each journal gets a line that says so (kind `carried`): what was
measured keeps the hash that it was measured with. Else it says what differs, changes nothing for that variant, and ends
with status 1.

What neither side can launch, a config of names that are no more, tells no difference, and goes along.

With `--where-alike` launches, and values of constants, may differ: what was measured of those keeps the old hash, and
is no measurement of today's source, nor is what other configs of the variant took on that shape; tables are fitted anew
then. Files of draws that no table is fitted to (judged_*) keep the rest, launch by launch. What a launch does on the
host besides (copies, choosing configs) is not compared: see `make replay`.

With `--where-loops-alike` machine code may differ outside of loops, and in where something lies in shared memory, and
one side may give a kernel more, whatever it is, and None for a null pointer: each of the innermost loops that
multiply is to have the same products and as many instructions, to 0.5% or one of 50. For a change of what a kernel sets
up, or of what comes before it and after.

With `--apart PATTERN` launches of which the text (variant, config, op and shape) has that regular expression keep the
old hash and are not compared: for a change that reached the loops of some, `--apart activation=gelu`.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import operator
import os
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from replay import ROOT, SHOWN, Side, both, compare_builds, in_short, laid_out

from registry.toolbox.sass import Loop, loops
from registry.tuning import journal
from registry.tuning.journal import CaseResults, Entry, Journal, Results

JUDGED = "judged_"
"""How files begin that no table is fitted to."""
MOST_COMPILED = 80
"""Of builds with other input, whose machine code takes long to make."""

LITTLE = 256
"""Bytes of shared memory, of which an SM has 228 KiB in portions of 1 KiB."""

FEW = 0.005
"""Of a loop's instructions, or one of 50, which may be others: two zeroes made by one instruction, say, or by two."""

LAUNCH = re.compile(r"(?P<grid>.*?) (?P<given>\{.*\}) (?P<options>\[[^\[\]]*\] cluster=\d+)")
"""As replay_snapshot.py has it in words."""
UNREAD = re.compile(r"None|-?[\d.]+(e[+-]?\d+)?")
NULL = re.compile(r"StandIn\(.*\bname=''.*\)")

Changed = Mapping[str, tuple[str, str]]
"""Variant -> its hash on the old side, and on the new."""
Row = list[Any]
"""[key, variant, case, config, target], as replay_snapshot.py takes it."""


def changed_sources(old: Side, new: Side) -> dict[str, tuple[str, str]]:
    was, now = old.snapshot("sources", ""), new.snapshot("sources", "")
    return {name: (was[name], now[name]) for name in was if name in now and was[name] != now[name]}


# --- what was measured --------------------------------------------------------------------------------------------


def journals(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.jsonl"))


def measured_rows(files: Iterable[Path], changed: Changed) -> list[Row]:
    """Each measured shape and config of the old sources once, those of a config side by side."""
    found: dict[str, Row] = {}
    for results in named_in(files, changed):
        for case, entry in _entries(results):
            if entry.variant in changed and entry.fingerprint == changed[entry.variant][0]:
                key = _row_key(entry, case)
                found[key] = [key, entry.variant, case.shape, entry.config, results.machine["device"]]
    return [found[key] for key in sorted(found)]


def named_in(files: Iterable[Path], changed: Changed) -> Iterator[Results]:
    """The journals that name an old source anywhere."""
    for file in files:
        text = file.read_text(encoding="utf-8")
        if any(old in text for old, _ in changed.values()):
            yield journal.read(file)


def _entries(results: Results) -> Iterator[tuple[CaseResults, Entry]]:
    return ((case, entry) for case in results.cases.values() for entry in case.entries.values())


def _row_key(entry: Entry, case: CaseResults) -> str:
    return f"{_key(entry.variant, entry.config)} {case.op} {case.text}"


def _without_config(key: str) -> str:
    """The variant, the op and the shape of a row's key."""
    return f"{key.split(' ', 1)[0]} {key.rpartition('} ')[2]}"


def _key(variant: str, config: Mapping[str, Any]) -> str:
    return f"{variant} {json.dumps(config, sort_keys=True)}"


def covering(rows: Iterable[Row], answers: Mapping[str, Any]) -> list[Row]:
    """Rows that show each feature of a build, then those of configs that are not among them."""
    seen: set[Any] = set()
    broad, others = [], []
    for row in rows:
        features = {(row[1], feature) for feature in answers[row[0]]["features"]}
        config = (row[1], json.dumps(row[3], sort_keys=True))
        if features - seen:
            broad.append(row)
        elif config not in seen:
            others.append(row)
        seen |= {*features, config}
    return broad + others


# --- comparing ----------------------------------------------------------------------------------------------------


def compare(
    old: Side,
    new: Side,
    rows: list[Row],
    jobs: int,
    apart: set[str] | None = None,
    same_code: Callable[[str, str], bool] = operator.eq,
    gone: set[str] | None = None,
    more: bool = False,
) -> dict[str, list[str]]:
    """Variant -> what differs, nothing where nothing does. Keys of rows that are launched in another way go to `apart`,
    where it is given, and count as no difference, as do those that neither side can launch: they go to `gone`."""
    found: dict[str, list[str]] = {row[1]: [] for row in rows}
    asked = old.work / "asked.json"
    asked.write_text(json.dumps(rows), encoding="utf-8")
    was, now = both(old, new, jobs, "launches", "--asked", str(asked))
    unknown = []
    for row in rows:
        before, after = was[row[0]], now[row[0]]
        if gone is not None and before.get("raised") and after.get("raised"):
            gone.add(row[0])
        elif not before.get("launches"):
            found[row[1]].append(f"{row[0]}: its launch cannot be seen ({in_short(before)})")
        elif apart is not None and not (
            same_launches(before["launches"], after.get("launches"), more) and constant(before, after)
        ):
            apart.add(row[0])
        elif not same_launches(before["launches"], after.get("launches"), more):
            found[row[1]] += [row[0], *unlike(before["launches"], after.get("launches") or [in_short(after)])]
        elif before["keys"] != after["keys"] or before["launches"] != after["launches"]:
            unknown.append(row)
    chosen = covering([row for row in unknown if not found[row[1]]], was)
    asked.write_text(json.dumps(chosen), encoding="utf-8")
    options = argparse.Namespace(jobs=jobs, sample=["--asked", str(asked)])
    report = compare_builds(old, new, options, MOST_COMPILED, same_code)
    others = f", {len(chosen)} of {len(unknown)} builds with another key compared: {report.note}" if unknown else ""
    print(f"{len(rows)} launches compared{others}")
    variant_of = {row[0]: row[1] for row in rows}
    for key, lines in report.differing.items():
        found[variant_of[key]] += [key, *lines]
    return found


def same_loops(old: str, new: str) -> bool:
    """What a launch takes from the compiler, but for some bytes of shared memory, and the innermost loops that
    multiply."""
    (was, *before), (now, *after) = old.split("\n"), new.split("\n")
    facts, others = json.loads(was), json.loads(now)
    apart = abs(int(facts.pop("shared") or 0) - int(others.pop("shared") or 0))
    found, others_found = _loops(before), _loops(after)
    return (
        apart <= LITTLE
        and facts == others
        and len(found) == len(others_found)
        and all(map(_same_loop, found, others_found))
    )


def _same_loop(old: Loop, new: Loop) -> bool:
    few = max(FEW * old.instructions, old.instructions >= 50)
    return old.tensor_core == new.tensor_core and abs(old.instructions - new.instructions) <= few


def _loops(code: Iterable[str]) -> list[Loop]:
    return [loop for loop in loops("\n".join(code)) if loop.tensor_core and loop.innermost]


def same_launches(old: list[str], new: list[str] | None, more: bool = False) -> bool:
    """But for numbers, or None, that one side gives a kernel beside all that the other does; or for any `more`."""
    return new is not None and len(old) == len(new) and all(map(_same_launch, old, new, itertools.repeat(more)))


def constant(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether builds have the same values of all that both sides name: what is new has no other."""
    was, now = ({one.partition("=")[0]: set() for one in side["features"]} for side in (old, new))
    for told, side in ((was, old), (now, new)):
        for one in side["features"]:
            name, _, value = one.partition("=")
            told[name].add(value)
    return all(was[name] == now[name] for name in was.keys() & now.keys())


def _same_launch(old: str, new: str, any_more: bool) -> bool:
    was, now = LAUNCH.fullmatch(old), LAUNCH.fullmatch(new)
    if old == new or was is None or now is None:
        return old == new
    fewer, more = sorted((ast.literal_eval(one["given"]) for one in (was, now)), key=len)
    if any_more:
        fewer, more = ({n: "None" if NULL.fullmatch(v) else v for n, v in given.items()} for given in (fewer, more))
    ends = [was[part] == now[part] for part in ("grid", "options")]
    rest = [] if any_more else [more[name] for name in more.keys() - fewer.keys()]
    same = all(name in more and more[name] == value for name, value in fewer.items())
    return all(ends) and same and all(map(UNREAD.fullmatch, rest))


def unlike(old: list[str], new: list[str]) -> list[str]:
    """The first launches that differ, from shortly before where they do."""
    was, now = next(pair for pair in itertools.zip_longest(old, new, fillvalue="none") if pair[0] != pair[1])
    at = max(0, len(os.path.commonprefix([was, now])) - 30)
    return [f"old: {was[at : at + 100]}", f"new: {now[at : at + 100]}"]


# --- carrying -----------------------------------------------------------------------------------------------------


def carried(
    results: Results, variant: str, hashes: tuple[str, str], apart: Collection[str] = (), alone: bool = False
) -> dict[str, Any] | None:
    """The line by which a journal carries the new hash of a variant, None where it holds nothing of the old one. But
    for rows apart, and what the variant's other configs took on the same shape, unless each stands `alone`: a fit
    compares them with each other."""
    old, new = hashes
    among = set() if alone else {_without_config(key) for key in apart}
    but: dict[str, list[str]] = {}
    count = 0
    for name, case in results.cases.items():
        for key, entry in case.entries.items():
            if entry.variant == variant and entry.fingerprint == old:
                row = _row_key(entry, case)
                if row in apart or (among and _without_config(row) in among):
                    but.setdefault(name, []).append(key)
                else:
                    count += 1
    return {"kind": "carried", "variant": variant, "from": old, "to": new, "but": but} if count else None


def carried_table(text: str, changed: Changed) -> str:
    for variant, (old, new) in changed.items():
        text = re.sub(rf"\b{variant}: (['\"]?){old}\1", f"{variant}: {in_yaml(new)}", text)
    return text


def in_yaml(source: str) -> str:
    """Quoted where YAML would read a number."""
    return f"'{source}'" if re.fullmatch(r"\d+(e\d+)?", source) else source


def put_apart(rows: list[Row], pattern: str | None) -> tuple[list[Row], set[str]]:
    """Rows without those whose text has this pattern, and their keys."""
    named = {row[0] for row in rows if pattern and re.search(pattern, row[0])}
    return [row for row in rows if row[0] not in named], named


def carry(
    sweeps: Iterable[Path], tables: Iterable[Path], changed: Changed, apart: Collection[str] = ()
) -> Iterator[Path]:
    """Give the files that name an old source the new one; those are given. Nothing that stands in a journal is changed:
    a line is added."""
    for results in named_in(sweeps, changed):
        alone = Path(results.path).name.startswith(JUDGED)
        found = [carried(results, variant, hashes, apart, alone) for variant, hashes in changed.items()]
        if any(found):
            with Journal(Path(results.path)) as file:
                for line in filter(None, found):
                    file.write(**line)
            yield Path(results.path)
    for table in tables:
        was = table.read_text(encoding="utf-8")
        now = carried_table(was, changed)
        if now != was:
            table.write_text(now, encoding="utf-8")
            yield table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="the old side: a commit, or a folder that holds a tree")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the new side, whose measurements are carried")
    parser.add_argument("--only", action="append", metavar="VARIANT", help="may be given more than once")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default 2)")
    parser.add_argument("--where-alike", action="store_true", help="leave out what is launched in another way")
    parser.add_argument("--where-loops-alike", action="store_true", help="outside of loops machine code may differ")
    parser.add_argument(
        "--apart", metavar="PATTERN", help="what was measured of launches with this in their text is left"
    )
    parser.add_argument("--dry-run", action="store_true", help="compare, and write nothing")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="carry-") as work:
        old, new = laid_out(options.base, options.tree, Path(work))
        changed = changed_sources(old, new)
        changed = {name: hashes for name, hashes in changed.items() if name in (options.only or changed)}
        rows = measured_rows(journals(options.tree / "benchmarks" / "results"), changed)
        rows, named = put_apart(rows, options.apart)
        apart: set[str] | None = set() if options.where_alike else None
        same_code = same_loops if options.where_loops_alike else operator.eq
        gone: set[str] = set()
        found = compare(old, new, rows, options.jobs, apart, same_code, gone, options.where_loops_alike) if rows else {}
    if apart is not None:
        print(f"{len(apart)} launches differ, and keep the old hash")
    if named:
        print(f"{len(named)} were not asked for, and keep the old hash")
    if gone:
        print(f"{len(gone)} are of configs that neither side can launch, and are taken along")
    for variant, lines in found.items():
        print("\n    ".join([f"{variant}: {'differs' if lines else 'the same'}", *lines[: 3 * SHOWN]]))
    same = {variant: changed[variant] for variant, lines in found.items() if not lines}
    files = journals(options.tree / "benchmarks" / "results"), sorted((options.tree / "dispatch_tables").glob("*.yaml"))
    for file in () if options.dry_run else carry(*files, same, named | (apart or set())):
        print(f"carried in {file.relative_to(options.tree)}")
    return 1 if len(same) < len(found) else 0


if __name__ == "__main__":
    sys.exit(main())
