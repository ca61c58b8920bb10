"""`kreg tune`: measure every legal variant on this machine, and turn the measurements into a dispatch table."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from registry.cli import INTERRUPTED, OK, TERMINATED
from registry.cli._files import EXISTING, FILE, check_tune
from registry.cli._fit import fit
from registry.cli._page import Page, json_option, print_json
from registry.cli._plugins import plugin_option
from registry.cli._sweep import Duration, SweepView
from registry.errors import InvalidArgument
from registry.ops.known import all_ops

ENDED_BY = {"interrupted": INTERRUPTED, "terminated": TERMINATED}
"""What ends a sweep from outside, and the exit status that says so."""
GUIDED_DROP = 1.1
"""A guided sweep compares the best few: who is slower by this factor after one turn takes no further part."""


@click.command(
    "tune",
    help="Measure every legal variant and config of OP on this machine and make a table of the fastest. "
    "Without --out, the raw results and the table go to your cache and are in force from the next process on. "
    "Stopped at any time, the same command goes on where it was.",
)
@click.argument("op", type=click.Choice(sorted(all_ops())))
@click.option("--grid", metavar="NAME", help="A named grid, several joined by +, or all. [default: quick]")
@click.option("--shapes", type=EXISTING, help="A file of shapes: one a line, such as b=4,hq=16,s=4096,d=128,causal.")
@click.option("--recorded", type=EXISTING, help="Problems that registry.record() met, written by save_recorded.")
@click.option("--budget", type=Duration(), metavar="TIME", help="Stop after this time, such as 10m.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="[default: cuda where there is one]")
@click.option("--graph", is_flag=True, help="Time replays of CUDA graphs: no host between launches.")
@click.option("--only", multiple=True, metavar="NAME", help="Only these variants (patterns; repeatable).")
@click.option("--skip", multiple=True, metavar="NAME", help="Without these variants (patterns; repeatable).")
@plugin_option
@click.option("--max-configs", type=click.IntRange(1), help="At most so many configs of each variant.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Turns of each contestant.")
@click.option("--turn", type=float, default=25.0, show_default=True, metavar="MS", help="Milliseconds timed in a turn.")
@click.option(
    "--timeout", type=Duration(), default="30s", help="A kernel that is silent so long is killed. [default: 30s]"
)
@click.option(
    "--processes",
    type=click.IntRange(1),
    help="Compilers at once, then processes that fit trees. [default: all cores but two, then all; 12 at most]",
)
@click.option(
    "--guided",
    is_flag=True,
    help="Measure about a third of the contestants: those of which a model of the measurements so far, of what they "
    "declare to need and of the work per byte expects something.",
)
@click.option(
    "--refine",
    is_flag=True,
    help="Then measure half way between neighbouring shapes with different winners, until those are close together.",
)
@click.option(
    "--unsure",
    type=click.IntRange(1),
    metavar="N",
    help="Of these shapes measure the N of which the tables in force are least sure (give it many: random:1:3000).",
)
@click.option("--learn", multiple=True, type=EXISTING, metavar="RESULTS", help="With --guided: earlier raw results.")
@click.option(
    "--timelines", multiple=True, type=EXISTING, metavar="FIGURES", help="With --guided: from kreg profile --figures."
)
@click.option("--retry-failed", is_flag=True, help="Measure contestants again that failed before.")
@click.option("--out", type=FILE, help="Raw results go to this file, and your cache is left alone.")
@click.option("--table", "table_path", type=FILE, help="Write the table here. With --out: else it is printed.")
@click.option("--run", "run_name", metavar="NAME", help="What evidence calls the raw results. [default: from --out]")
@click.option("--per-device", is_flag=True, help="A table for this device instead of its architecture (with --table).")
@click.option("--fit-only", is_flag=True, help="Measure nothing: make the table from what --out holds.")
@click.option(
    "--also",
    multiple=True,
    type=EXISTING,
    metavar="RESULTS",
    help="With --out: fit the raw results of another device of the same architecture, too.",
)
@click.option(
    "--keep",
    is_flag=True,
    help="Fit again only kinds whose shapes, or the order of whose configs, are not those behind --table as it is; and "
    "of those the trees for configs only of variants of which that is so.",
)
@click.option("--keep-trees", is_flag=True, help="The same, but new shapes run what was the fastest, with no new fit.")
@click.option("--dry-run", is_flag=True, help="List shapes and contestants, and stop.")
@json_option
def command(op: str, **options: Any) -> int:
    check_tune(op, options)
    from registry.tuning.extra import load_plugins
    from registry.tuning.taking_part import Settings

    settings = Settings()
    load_plugins(options["plugins"])  # what is wrong with them is said here, before a worker falls over it
    if options["fit_only"]:
        return fit(op, options, settings, options["out"], None)
    from registry.tuning import worker
    from registry.tuning.answering import who_answers
    from registry.tuning.grids import select

    cases = select(op, grid_name=options["grid"], shapes=options["shapes"], recorded=options["recorded"])
    device = options["device"] or _best_device()
    if device == "cuda" and _best_device() != "cuda":
        raise InvalidArgument("--device", "cuda", "cpu: torch finds no GPU on this machine")
    if options["device"] is None and device == "cpu":
        click.echo("torch finds no GPU here: the CPU is measured. Grids are made for GPUs and may take long.", err=True)
    _refuse_unknown(op, (*options["only"], *options["skip"]))
    effort = _effort(options)
    guidance = _guidance(op, options)
    with worker.child(device, "graph" if options["graph"] else "events", options["plugins"]) as child:
        child.start()
        if options["unsure"] is not None or options["dry_run"]:
            asked = who_answers(cases, _selection(options), child, effort.check_timeout, SweepView().note)
            options["skip"] = asked[0].skip
        if options["unsure"] is not None:
            cases = _least_sure(cases, child, options)
        if options["dry_run"]:
            return _dry_run(cases, child, options)
        path = options["out"] or _journal_path(op, child.welcome["machine"], options["graph"])
        report = _measure(cases, path, child, effort, guidance, options)
    status = fit(op, options, settings, path, report)
    return ENDED_BY.get(report.stopped, status)


def _least_sure(cases: list[Any], child: Any, options: dict[str, Any]) -> list[Any]:
    from registry.tuning.machine import target_from
    from registry.tuning.unsure import least_sure

    return least_sure(cases, target_from(child.welcome["target"]), options["unsure"], _selection(options))


def _best_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _journal_path(op: str, machine: dict[str, Any], graph: bool) -> Path:
    """One file for each op, device and set of versions, so that nothing is mixed and a sweep can go on."""
    from registry.dispatch.in_force import cache_folder
    from registry.ops.parts.cases import digest
    from registry.tuning.machine import slug
    from registry.tuning.store import KEYED

    versions = digest([machine.get(name) for name in KEYED])[:6]
    return cache_folder() / "runs" / f"{op}.{slug(machine['device'])}.{versions}{'.graph' if graph else ''}.jsonl"


def _selection(options: dict[str, Any]) -> Any:
    from registry.tuning.contestants import Selection

    return Selection(options["only"], options["skip"], options["max_configs"])


def _refuse_unknown(op: str, patterns: Sequence[str]) -> None:
    """Raise for one that is no variant's name, as that of a plugin that failed."""
    import fnmatch

    from registry.dispatch.catalog import catalog

    for pattern in patterns:
        if not any(fnmatch.fnmatch(name, pattern) for name in catalog.get().of(op)):
            raise catalog.get().unknown(pattern, op)


def _dry_run(cases: list[Any], child: Any, options: dict[str, Any]) -> int:
    from registry.tuning.contestants import line_up
    from registry.tuning.machine import target_from

    target = target_from(child.welcome["target"])
    mode = "graph" if options["graph"] else "events"
    plans = [line_up(case, target, _selection(options), mode) for case in cases]
    if options["as_json"]:
        print_json(
            [{"shape": p.case.text, "contestants": list(map(str, p.contestants)), "illegal": p.illegal} for p in plans]
        )
        return OK
    page = Page()
    for planned in plans:
        page.title(planned.case.text)
        for contestant in planned.contestants:
            page.line(str(contestant), indent=2)
    page.line(f"{len(plans)} shapes, {sum(len(p.contestants) for p in plans)} contestants on {target.name}")
    return OK


def _effort(options: dict[str, Any]) -> Any:
    from registry.tuning.fit import check_number
    from registry.tuning.measure import Effort

    check_number("--turn", options["turn"], 1e-6, 1e9)
    return Effort(
        rounds=options["rounds"],
        settle_ms=min(Effort.settle_ms, max(options["turn"], 0.0)),
        measure_ms=options["turn"],
        budget_s=options["budget"],
        drop=GUIDED_DROP if options["guided"] else Effort.drop,
        turn_timeout=options["timeout"],
        check_timeout=4 * options["timeout"],
    )


def _guidance(op: str, options: dict[str, Any]) -> Any:
    if not options["guided"]:
        return None
    from registry.tuning import journal, observed
    from registry.tuning.guided import Guidance

    learnt: list[Any] = []
    for path in options["learn"]:
        cases = journal.read(path).of(op)
        if not any(case.timed for case in cases):
            allowed = f"raw results of kreg tune {op}"
            raise InvalidArgument("--learn", f"{path}, in which nothing of {op} was timed", allowed)
        learnt += cases
    return Guidance(
        learnt=tuple(learnt), observed=tuple(one for path in options["timelines"] for one in observed.read(path))
    )


def _measure(cases: list[Any], path: Path, child: Any, effort: Any, guidance: Any, options: dict[str, Any]) -> Any:
    from registry.tuning.journal import ResultsError
    from registry.tuning.measure import Sweep
    from registry.tuning.refine import refined

    def swept(cases: list[Any], effort: Any) -> Any:
        with SweepView() as view:
            sweep = Sweep(
                cases,
                path,
                child=child,
                mode="graph" if options["graph"] else "events",
                effort=effort,
                watcher=view,
                selection=_selection(options),
                plugins=options["plugins"],
                compile_processes=options["processes"],
                retry_failed=options["retry_failed"],
                guidance=guidance,
            )
            with _stoppable():
                try:
                    sweep.run()
                except _Stopped:
                    sweep.report.stopped = "terminated"
                except KeyboardInterrupt:
                    sweep.report.stopped = "interrupted"
                except ResultsError as error:  # another sweep's file, or another machine's: nothing was found here
                    raise click.ClickException(str(error)) from error
        options["skip"] = (*options["skip"], *sweep.report.silent)  # where --refine adds shapes, nobody waits again
        return sweep.report

    return refined(swept, cases, effort) if options["refine"] else swept(cases, effort)


class _Stopped(KeyboardInterrupt):
    """By SIGTERM."""


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Let `timeout` and a batch system end a sweep as Ctrl-C does: what was measured is kept and fitted."""

    def stop(number: int, frame: Any) -> None:
        raise _Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
