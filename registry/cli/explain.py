"""`kreg explain`: what a call would run on any device, why, and why not the others. Launches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from registry.cli import FINDING, OK
from registry.cli._main import Named
from registry.cli._page import Page, json_option, print_json
from registry.cli._plugins import plugin_option
from registry.cli._problems import problem_from, problem_options
from registry.contract.describe import config_text, problem_data, reason_data
from registry.dispatch.decision import Candidate, Decision, evidence_text
from registry.errors import IllegalVariant, NoLegalVariant
from registry.notices import shown_by_caller
from registry.ops.known import all_ops
from registry.ops.op import Op


class _Ops(Named):
    """One subcommand an op, with the options that its problems have."""

    kind = "op"

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(all_ops())

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        op = all_ops().get(name)
        return _command(op) if op else None


command = _Ops(
    name="explain", help="What a call would run on any device, why, and why not the others.", no_args_is_help=True
)


def _command(op: Op) -> click.Command:
    options = [*problem_options(op), click.Option(["--variant"], metavar="NAME", help="Ask for exactly this variant.")]
    made = click.Command(
        op.name, params=options, callback=lambda **values: explain(op, **values), help=op.summary or None
    )
    plugin_option(made)
    json_option(made)
    return made


def explain(op: Op, *, as_json: bool, variant: str | None, plugins: tuple[str, ...], **values: Any) -> int:
    """Print the decision for a problem; 1 if nothing, or not the variant that was asked for, may run it."""
    from registry.tuning.extra import load_plugins

    load_plugins(plugins)
    problem = problem_from(op, values)
    try:
        with shown_by_caller():
            decision = op.explain(problem, variant=variant)
    except (IllegalVariant, NoLegalVariant) as refusal:
        if as_json:
            print_json(_refusal_data(refusal) | {"notes": _notes()})
        else:
            _print_refusal(refusal)
        return FINDING
    if as_json:
        print_json(decision.to_dict() | {"notes": [*_notes(), *_gone(decision)]})
    else:
        _print_decision(decision)
    return OK


def _print_decision(decision: Decision) -> None:
    page = Page()
    page.title(decision.problem.summary())
    rows = [("runs", decision.variant), ("config", config_text(decision.config)), ("because", decision.because)]
    if decision.evidence:
        rows.append(("measured", evidence_text(decision.evidence)))
    if decision.nearest:
        rows.append(("nearest", decision.nearest if _is_none(decision.nearest) else f"measured {decision.nearest}"))
    if decision.fallback_from:
        rows.append(("instead of", ", ".join(decision.fallback_from)))
    page.rows([(label, text) for label, text in rows if text])
    refused = {c.variant: c.refused_configs for c in decision.candidates if c.legal and c.refused_configs}
    _print_reasons(page, "configs ruled out of what could run", refused)
    others = [candidate for candidate in decision.candidates if candidate.variant != decision.variant]
    legal = [candidate for candidate in others if candidate.legal]
    if legal:
        page.gap()
        page.title("could run, in this order" if legal[0].rank is not None else "could run")
        page.rows(_standing(decision, legal))
    _print_reasons(page, "cannot run", {c.variant: c.reasons for c in others if not c.legal})
    _print_notes(page, _gone(decision))


def _is_none(nearest: str) -> bool:
    return nearest.startswith("none")


def _standing(decision: Decision, legal: list[Candidate]) -> list[tuple[str, str]]:
    """Where each was said, and once for each rule how far its nearest measured shape is."""
    said, rows = {decision.because}, []
    for candidate in legal:
        text = candidate.because
        if candidate.nearest and candidate.because not in said:
            said.add(candidate.because)
            text += f"; nearest measured shape: {candidate.nearest}"
        rows.append((candidate.variant, text))
    return rows


def _print_reasons(page: Page, title: str, reasons: dict[str, Any]) -> None:
    if not reasons:
        return
    page.gap()
    page.title(title)
    for name, found in reasons.items():
        page.line(name, indent=2, style="red")
        for reason in found:
            page.line(str(reason), indent=6)


def _print_refusal(refusal: IllegalVariant | NoLegalVariant) -> None:
    page = Page()
    page.title(refusal.problem.summary())
    if isinstance(refusal, IllegalVariant):
        page.row("refused", f"{refusal.variant} was asked for and cannot run this", label_style="red")
        _print_reasons(page, "cannot run", {refusal.variant: refusal.reasons})
    else:
        page.row("refused", "no variant can run this", label_style="red")
        _print_reasons(page, "cannot run", dict(refusal.reasons))
    _print_notes(page)


def _refusal_data(refusal: IllegalVariant | NoLegalVariant) -> dict[str, Any]:
    all_reasons = refusal.reasons if isinstance(refusal, NoLegalVariant) else {refusal.variant: refusal.reasons}
    return {
        "problem": problem_data(refusal.problem),
        "picked": None,
        "error": type(refusal).__name__,
        "reasons": {name: [reason_data(reason) for reason in found] for name, found in all_reasons.items()},
    }


def _notes() -> list[str]:
    """What must not pass in silence: failed plugins, tables and rows left out."""
    from registry import notices
    from registry.dispatch.catalog import catalog

    failed = [f"plugin {failure.plugin} failed: {failure.error}" for failure in catalog.get().failures]
    return [*failed, *notices.counts()]


def _gone(decision: Decision) -> list[str]:
    """Measured configs near the problem that no variant which could run it declares any more."""
    from registry.tuning.declared import gone_nearby

    return gone_nearby(decision.problem, [one.variant for one in decision.candidates if one.legal])


def _print_notes(page: Page, more: Sequence[str] = ()) -> None:
    notes = [*_notes(), *more]
    if notes:
        page.gap()
        page.rows([("note", note) for note in notes])
