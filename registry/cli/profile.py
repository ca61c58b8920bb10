"""`kreg profile`: a timeline of what each warp group of a kernel does, and its registers and shared memory by role."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from registry.cli import OK
from registry.cli._files import FILE, check_profile, trace_beside
from registry.cli._page import Page, json_option, print_json
from registry.cli._plugins import plugin_option
from registry.errors import InvalidArgument


@click.command(
    "profile",
    help="Record one launch of VARIANT on this machine's GPU and draw it: a page with a timeline of producer and "
    "consumers, time stalled per barrier, overlap of products and other work, registers and shared memory by role, and "
    "beside it a trace for ui.perfetto.dev. Kernels take part that mark their spans (registry.toolbox.scopes).",
)
@click.argument("variant")
@click.option("--shape", required=True, metavar="SHAPE", help="As kreg tune spells it: b=4,hq=16,s=4096,d=128,causal.")
@click.option("--config", metavar="K=V,..", help="One config, by the values that single it out. [default: first legal]")
@click.option("-o", "--out", type=FILE, help="The page. [default: VARIANT.html; with --json none]")
@click.option(
    "--spans", type=click.IntRange(16, 65536), default=256, show_default=True, help="Kept of each role: the last."
)
@click.option("--svg", type=FILE, help="Also one block's timeline as a picture.")
@click.option("--cycles", type=click.IntRange(100), default=12000, show_default=True, help="How much of it that shows.")
@click.option("--blocks", type=click.IntRange(1, 64), default=2, show_default=True, help="Thread blocks to draw.")
@click.option(
    "--from", "recorded", type=FILE, help="Draw this trace of Proton's instead of recording one; needs no GPU."
)
@click.option("--keep", type=FILE, metavar="FILE", help="Keep Proton's own trace of all blocks.")
@click.option(
    "--figures",
    "collected",
    type=FILE,
    metavar="FILE",
    help="Add the figures to this file, for kreg tune --guided --timelines.",
)
@click.option("--plan-only", is_flag=True, help="Registers and memory alone; needs no GPU.")
@plugin_option
@click.option("--device", metavar="NAME", help='Compile for this target where nothing is recorded. [default: "H100"]')
@json_option
def command(variant: str, shape: str, **options: Any) -> int:
    from registry.dispatch.catalog import catalog
    from registry.ops.parts.cases import Case
    from registry.profiling import figures, record, timeline
    from registry.profiling.lives import lives
    from registry.profiling.trace import read
    from registry.tuning.extra import load_plugins

    out = options["out"] or Path(f"{variant}.html")
    check_profile(options, out)
    load_plugins(options["plugins"])
    found = catalog.get().named(variant)
    case = Case.parse(found.op, shape)
    live = not (options["recorded"] or options["plan_only"])
    problem = case.problem(_target(options["device"], live))
    config = _config(found, problem, options["config"])
    anatomy = record.anatomy(found, problem, config)
    trace = None
    if options["recorded"]:
        trace = read(options["recorded"], anatomy.kernel)
    elif live:
        with _kept(options["keep"], out) as kept:
            record.record(found, case, config, anatomy, options["spans"], kept)
            trace = read(kept, anatomy.kernel)
    roles = figures.role_names(anatomy.roles)
    sums = figures.figures(trace, roles) if trace is not None else None
    steps = record.steps(found, problem, config, anatomy.kernel) if trace is not None else ()
    data = _data(variant, case, config, anatomy, roles, sums) | {"uses": _uses(anatomy, steps, trace, roles)}
    if options["collected"] and sums is not None:
        _collect(options["collected"], data)
    if options["out"] or not options["as_json"]:
        about = _about(variant, case, config, problem)
        text = timeline.page(about, trace, anatomy, roles, sums, options["blocks"], steps)
        _write(out, text, trace, roles, options["blocks"])
    if options["svg"] and trace is not None:
        _picture(options["svg"], trace, roles, options["cycles"], lives(anatomy, steps, trace, trace.blocks[0], roles))
    if options["as_json"]:
        print_json(data)
    else:
        _print(out, anatomy, roles, sums, trace, data["uses"])
    return OK


@contextlib.contextmanager
def _kept(asked: Path | None, out: Path) -> Iterator[Path]:
    """Where Proton's trace goes: to the file that was asked for, or for so long as it is read. Nobody else's file of
    that name is in the way of one in a folder of its own."""
    from registry.disk import make_folder

    place = (asked or out).absolute()
    make_folder(place.parent)
    if asked is not None:
        yield place
        return
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        yield Path(folder) / "proton.json"


def _target(device: str | None, live: bool) -> Any:
    import torch

    from registry.cli._problems import target_named
    from registry.contract.target import Target

    if live and torch.cuda.is_available():
        return Target.of(torch.device("cuda"))
    return target_named(device or "H100")


def _config(variant: Any, problem: Any, wanted: str | None) -> dict[str, Any]:
    from registry.cli._problems import matching
    from registry.contract.describe import config_text
    from registry.errors import IllegalVariant
    from registry.ops.parts.cases import parse_words

    reasons = variant.reasons(problem)
    if reasons:
        raise IllegalVariant(variant.name, problem, reasons)
    legal = variant.legal_configs(problem)
    fitting = matching(legal, parse_words(wanted) if wanted else {})
    if not fitting:
        raise InvalidArgument("--config", repr(wanted), "; ".join(config_text(config) for config in legal))
    return fitting[0]


def _about(variant: str, case: Any, config: dict[str, Any], problem: Any) -> dict[str, str]:
    from registry.contract.describe import config_text

    target = problem.target
    about = {"title": f"{variant}: {case.text}", "on": target.name, "triton": target.triton}
    return about | ({"config": config_text(config)} if config else {})


def _data(variant: str, case: Any, config: dict[str, Any], anatomy: Any, roles: Any, sums: Any) -> dict[str, Any]:
    from registry.profiling.timeline import buffers_data, figures_data, roles_data

    return {
        "variant": variant,
        "op": case.op,
        "shape": case.text,
        "config": config,
        "kernel": anatomy.kernel,
        "shared": anatomy.shared,
        "roles": roles_data(anatomy, roles),
        "buffers": buffers_data(anatomy, roles),
        "figures": figures_data(sums) if sums is not None else None,
    }


def _uses(anatomy: Any, steps: Any, trace: Any, roles: dict[int, str]) -> list[dict[str, Any]]:
    from registry.profiling.lives import uses
    from registry.profiling.timeline import uses_data

    return uses_data(uses(anatomy, steps, trace, roles)) if trace is not None else []


def _collect(path: Path, data: dict[str, Any]) -> None:
    """Add a recording to a file of them, in place of an older one of the same config and shape. Others may add theirs
    meanwhile."""
    import json

    from registry.disk import write_atomic
    from registry.tuning import observed
    from registry.tuning.store import locked

    same = ("variant", "op", "shape", "config")
    own = {name: value for name, value in data.items() if name not in ("buffers", "uses")}
    with locked(path):
        held = observed.rows(path, "--figures") if path.exists() else []
        held = [row for row in held if any(row.get(name) != data[name] for name in same)]
        lines = ",\n".join(json.dumps(row) for row in [*held, own])
        write_atomic(path, f'{{"timelines": [\n{lines}\n]}}\n')


def _write(out: Path, text: str, trace: Any, roles: dict[int, str], blocks: int) -> None:
    from registry.disk import write_atomic
    from registry.profiling.trace import perfetto

    write_atomic(out, text)
    if trace is not None:
        step = max(1, len(trace.blocks) // blocks)
        write_atomic(trace_beside(out), perfetto(trace, trace.blocks[::step][:blocks], roles))


def _picture(path: Path, trace: Any, roles: dict[int, str], cycles: int, memory: Any) -> None:
    from registry.disk import write_atomic
    from registry.profiling.timeline import chart, rows
    from registry.report import library

    shown = rows(trace, trace.blocks[0], roles, cycles, memory)
    spec = chart(shown, "What each role of a block does over time", zoom=False, width=860, cycles=cycles)
    write_atomic(path, library.svg({**spec, "background": "white"}, {"rows": shown}))


def _print(out: Path, anatomy: Any, roles: dict[int, str], sums: Any, trace: Any, uses: list[dict[str, Any]]) -> None:
    page = Page()
    page.title(f"{anatomy.kernel}: {anatomy.shared} bytes of shared memory, {anatomy.warps} warps")
    for role in anatomy.roles:
        registers = f"{role.registers} registers a thread" if role.registers else "registers as launched"
        page.line(
            f"{roles[role.first_warp]}: warps from {role.first_warp}, {role.warps} of them, {registers}", indent=2
        )
    if sums is not None:
        flying = "no product was recorded whole: ask for more --spans"
        if sums.any_in_flight is not None:
            flying = f"a product of some role is in flight {100 * sums.any_in_flight:.1f}% of the time"
        page.line(f"{sums.blocks} blocks; {flying}")
        for one in sums.roles:
            waits = ", ".join(
                f"{line.name} {100 * line.share:.1f}%" for line in one.lines if line.name.startswith("wait ")
            )
            covered = "" if one.covered is None else f"; {100 * one.covered:.1f}% of its own work beside a product"
            page.line(f"{one.role}: stalled {100 * one.stalled:.1f}% ({waits}){covered}", indent=2)
        for one in uses:
            slots = f" ({one['slots']} slots)" if one["slots"] > 1 else ""
            ahead, held = 100 * one["ahead"], 100 * one["held"]
            shares = f"ahead {ahead:.1f}%, held {held:.1f}%, free {max(0.0, 100 - ahead - held):.1f}%"
            page.line(
                f"{one['buffer']}{slots}: {shares}; {one['in_use']} of {one['bytes']} bytes in use on average", indent=2
            )
        if trace.damaged:
            page.line(f"{trace.damaged} damaged events were passed over", style="yellow")
    page.line(f"page: {out}")
    if trace is not None:
        page.line(f"trace for ui.perfetto.dev: {trace_beside(out)}")
