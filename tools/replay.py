"""Do two versions of the tree decide alike, compile to the same machine code, and call as fast?

    python tools/replay.py HEAD                  # the working tree against a commit; `make replay BASE=HEAD`
    python tools/replay.py HEAD --quick          # a sample, in well under a minute
    python tools/replay.py HEAD --only decisions --keep /tmp/replay

Each version is laid out in a folder as a wheel would be and runs there in processes of its own, so the versions may
differ in where their files lie. Ends with status 0 where all of these hold:

decisions  `explain` answers the same for some thousand questions: problem, table row, config, every reason, every error
builds     each declared kernel build gives the compiler the same input: the module after Triton's first stage, inlined,
           without source locations and symbol names, and the options. The compiler knows nothing else, so equal input
           is equal machine code, at a thousandth of the cost. Where the input differs both sides are compiled, and the
           instructions and launch facts must be equal. Grids and arguments of the launch are not part of a build.
warm       no warm call got slower by more than the margin, in the median of rounds that alternate between the sides;
           measured again, up to three times, before it counts
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import difflib
import itertools
import json
import operator
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SNAPSHOT = Path(__file__).with_name("replay_snapshot.py")
SHOWN = 6  # differences that are printed; --keep keeps all
ATTEMPTS = 3
_SETTINGS = ("REGISTRY_", "KREG_", "TRITON_", "PYTHON", "TORCH")


@dataclass
class Comparison:
    """One line of the table, and what differs."""

    what: str
    compared: int = 0
    note: str = ""
    differing: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Side:
    """One version, laid out in a folder, with a place for what it writes."""

    name: str
    work: Path

    @property
    def folder(self) -> Path:
        return self.work / self.name / "tree"

    def answers(self, kind: str, label: str) -> Path:
        return self.work / f"{self.name}-{kind}{label}.json"

    def snapshot(self, kind: str, label: str, *arguments: str) -> Any:
        """What `replay_snapshot.py kind` says of this side. `label` tells apart runs of one kind."""
        out = self.answers(kind, label)
        with tempfile.TemporaryDirectory(dir=self.work / self.name) as scratch:
            # A script's own folder comes first on the path, PYTHONPATH next; the current folder is not on it.
            kept = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}
            environment = {
                **kept,
                "PYTHONPATH": str(self.folder),
                "PYTHONHASHSEED": "0",
                "REGISTRY_CACHE": f"{scratch}/registry",
                "TRITON_CACHE_DIR": f"{scratch}/triton",
                "CUDA_VISIBLE_DEVICES": "",  # a machine with a GPU answers as one without
            }
            command = [sys.executable, SNAPSHOT, kind, "--folder", self.folder, "--out", out, *arguments]
            done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"replay: {kind} of {self.name} failed\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return json.loads(out.read_text(encoding="utf-8"))


# --- two trees ----------------------------------------------------------------------------------------------------


def package_folders(tree: Path) -> dict[str, str]:
    """Package -> folder of the tree, from [tool.setuptools.package-dir]. Read by hand: Python 3.10 has no tomllib."""
    text = (tree / "pyproject.toml").read_text(encoding="utf-8")
    section = re.search(r"^\[tool\.setuptools\.package-dir\]\n(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    found = dict(re.findall(r'^"?([\w.]+)"? *= *"([^"]+)"', section[1], re.MULTILINE)) if section else {}
    return found or {"registry": "registry"}


def lay_out(tree: Path, files: list[str], target: Path) -> None:
    """Copy a tree's files (paths inside it) to where an installed package would have them."""
    places = [(file, *pair) for pair in package_folders(tree).items() for file in files]
    for file, package, folder in places:
        if file.startswith(f"{folder}/") and (tree / file).is_file():
            place = target / package.replace(".", "/") / file[len(folder) + 1 :]
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(tree / file, place)


def lay_out_working_tree(tree: Path, target: Path) -> None:
    """What git tracks or would track; a folder that is no checkout as it is."""
    if (tree / ".git").exists():
        listed = git("ls-files", "-z", "-co", "--exclude-standard", cwd=tree).decode().split("\0")
    else:
        listed = [str(path.relative_to(tree)) for path in tree.rglob("*") if "__pycache__" not in path.parts]
    lay_out(tree, sorted(set(listed)), target)


def lay_out_commit(commit: str, target: Path) -> None:
    with tempfile.TemporaryDirectory() as raw:
        archive = git("archive", "--format=tar", commit, ".", ":!benchmarks/results", cwd=ROOT)  # no package holds them
        subprocess.run(["tar", "-x", "-C", raw], input=archive, check=True)
        lay_out_working_tree(Path(raw), target)


def laid_out(base: str, tree: Path, work: Path) -> tuple[Side, Side]:
    """Both sides; the base is a commit, or a folder that holds a tree."""
    old, new = Side("old", work), Side("new", work)
    if Path(base).is_dir():
        lay_out_working_tree(Path(base), old.folder)
    else:
        lay_out_commit(base, old.folder)
    lay_out_working_tree(tree, new.folder)
    return old, new


def git(*arguments: str, cwd: Path) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"replay: git {' '.join(arguments)}: {done.stderr.decode().strip()}")
    return done.stdout


# --- comparing ----------------------------------------------------------------------------------------------------


def differing(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Keys of which the two sides say different things, or only one says anything."""
    return [key for key in {**old, **new} if old.get(key) != new.get(key) or (key in old) != (key in new)]


def compare_decisions(old: Side, new: Side, options: argparse.Namespace) -> Comparison:
    new.snapshot("questions", "", *options.sample)
    was, now = both(old, new, options.jobs, "decisions", "--questions", str(new.answers("questions", "")))
    changed = differing(was, now)
    report = Comparison("decisions", len({**was, **now}), f"{sum('raised' in it for it in was.values())} are refusals")
    report.differing = {key: answers(was.get(key), now.get(key)) for key in changed}
    return report


def answers(was: Any, now: Any) -> list[str]:
    """Both decisions, then the facts in which they differ."""
    lines = [f"old: {in_short(was)}", f"new: {in_short(now)}"]
    if was is not None and now is not None:
        old_facts, new_facts = dict(facts(was)), dict(facts(now))
        changed = differing(old_facts, new_facts)
        lines += [f"  {at}: {old_facts.get(at)!r} -> {new_facts.get(at)!r}" for at in changed[:6]]
        lines += [f"  and {len(changed) - 6} more facts"] if len(changed) > 6 else []
    return lines


def in_short(answer: Any) -> str:
    if isinstance(answer, dict) and "picked" in answer:
        return f"{answer['picked']} {answer['config']} by {answer['because']}"
    if isinstance(answer, dict) and "raised" in answer:
        return f"{answer['raised']}: {answer['text'].splitlines()[0] if answer['text'] else ''}"
    return "absent" if answer is None else "a variant"


def facts(data: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Nested JSON as (path, value)."""
    if not isinstance(data, (dict, list)):
        yield at, data
        return
    for name, value in data.items() if isinstance(data, dict) else enumerate(data):
        yield from facts(value, f"{at}.{name}" if at else str(name))


def compare_builds(
    old: Side,
    new: Side,
    options: argparse.Namespace,
    most: int | None = None,
    same: Callable[[str, str], bool] = operator.eq,
) -> Comparison:
    """Those of which the input differs are compiled, `most` of them where that is given; their machine code is to be
    the `same`."""
    was, now = both(old, new, options.jobs, "builds", *options.sample)
    unlike = differing(was, now)
    changed = unlike[:most]
    kernels, failed = ([len(it) for it in was.values() if isinstance(it, list) is well] for well in (True, False))
    report = Comparison("builds", sum(kernels), f"by the compiler's input alone; {len(failed)} configs cannot be built")
    if changed:
        keys = old.work / "keys.json"
        keys.write_text(json.dumps(changed), encoding="utf-8")
        was, now = both(old, new, options.jobs, "code", "--keys", str(keys), *options.sample)
        for key in changed:
            if (lines := code_difference(was.get(key), now.get(key), same)) is not None:
                report.differing[key] = lines
        report.note = f"the input of {len(unlike)} configs differs, {len(changed)} of them compiled on both sides"
    return report


def code_difference(was: Any, now: Any, same: Callable[[str, str], bool] = operator.eq) -> list[str] | None:
    """None where both compiled to the same kernels, else what to print."""
    if not isinstance(was, list) or not isinstance(now, list) or len(was) != len(now):
        texts = [f"{len(it)} kernels" if isinstance(it, list) else in_short(it) for it in (was, now)]
        return [f"old: {texts[0]}", f"new: {texts[1]}"]
    for a, b in zip(was, now, strict=True):
        if not same(a["machine code"], b["machine code"]):
            first = [
                difflib.unified_diff(a[part].splitlines(), b[part].splitlines(), "old", "new", n=0, lineterm="")
                for part in ("input", "machine code")
            ]
            return [line[:160] for lines in first for line, _ in zip(lines, range(6), strict=False)]
    return None


def compare_warm(old: Side, new: Side, options: argparse.Namespace) -> Comparison:
    """Medians of alternating rounds; a call that looks slower is given two more chances."""
    for attempt in range(1, ATTEMPTS + 1):
        rounds: dict[str, list[dict[str, float]]] = {old.name: [], new.name: []}
        for number in range(3 if options.quick else 7):
            for side in (old, new) if number % 2 == 0 else (new, old):
                rounds[side.name].append(side.snapshot("warm", f"-{attempt}-{number}", *options.sample))
        names = list(rounds[old.name][0])
        was, now = ({n: statistics.median(r[n] for r in rounds[side.name]) for n in names} for side in (old, new))
        report = Comparison("warm", len(names), f"medians of {len(rounds[old.name])} rounds, attempt {attempt}")
        for name in names:
            line = f"{name}: {was[name]:.3f} us -> {now[name]:.3f} us ({now[name] / was[name] - 1:+.1%})"
            print(f"  {line}", flush=True)
            if now[name] > was[name] * (1 + options.margin / 100):
                report.differing[name] = [line + f", allowed is +{options.margin:g}%"]
        if not report.differing:
            break
    return report


# --- running ------------------------------------------------------------------------------------------------------


def both(old: Side, new: Side, jobs: int, kind: str, *arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A snapshot of both sides, `jobs` processes at a time; builds are shared out among a side's processes."""
    shares = max(1, jobs // 2) if kind in ("builds", "code") else 1
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        running = [
            [pool.submit(side.snapshot, kind, f"-{n}", *arguments, "--share", f"{n}/{shares}") for n in range(shares)]
            for side in (old, new)
        ]
        was, now = (merged([part.result() for part in parts]) for parts in running)
    return was, now


def merged(shares: list[dict[str, Any]]) -> dict[str, Any]:
    """The answers in the order in which they were shared out."""
    turns = itertools.zip_longest(*(share.items() for share in shares))
    return dict(item for turn in turns for item in turn if item is not None)


COMPARISONS: dict[str, Callable[[Side, Side, argparse.Namespace], Comparison]] = {
    "decisions": compare_decisions,
    "builds": compare_builds,
    "warm": compare_warm,
}


def replay(options: argparse.Namespace, work: Path) -> int:
    old, new = laid_out(options.base, options.tree, work)
    reports = []
    for name in options.only or COMPARISONS:
        started = time.monotonic()
        reports.append(COMPARISONS[name](old, new, options))
        reports[-1].seconds = time.monotonic() - started
    print(f"\n{'':10} {'compared':>9} {'differing':>9} {'seconds':>8}")
    for report in reports:
        print(f"{report.what:10} {report.compared:9} {len(report.differing):9} {report.seconds:8.0f}  {report.note}")
    for report in reports:
        for key, lines in list(report.differing.items())[:SHOWN]:
            print("\n    ".join([f"\n{report.what}: {key}", *lines]))
        if len(report.differing) > SHOWN:
            print(f"\n{report.what}: and {len(report.differing) - SHOWN} more; --keep DIR keeps them all")
    (work / "report.json").write_text(json.dumps([vars(report) for report in reports], indent=1), encoding="utf-8")
    return 1 if any(report.differing for report in reports) else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="the old side: a commit, or a folder that holds a tree")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the new side (default: this working tree)")
    parser.add_argument("--quick", action="store_true", help="a sample of each comparison")
    parser.add_argument("--only", action="append", choices=sorted(COMPARISONS), help="may be given more than once")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default 2); warm calls run alone")
    parser.add_argument(
        "--margin", type=float, default=10.0, help="percent that a warm call may be slower (default 10)"
    )
    parser.add_argument("--keep", type=Path, help="keep both trees and all JSON in this folder")
    options = parser.parse_args(arguments)
    options.sample = ["--quick"] if options.quick else []
    with contextlib.ExitStack() as stack:
        if options.keep:
            work = options.keep.resolve()
            for side in ("old", "new"):
                shutil.rmtree(work / side, ignore_errors=True)
        else:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="replay-")))
        return replay(options, work)


if __name__ == "__main__":
    sys.exit(main())
