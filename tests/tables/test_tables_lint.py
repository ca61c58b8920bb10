"""What `kreg tables lint` finds in tables that load."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from brew_tables import ERRATUM, load, table, unreachable_by

from registry.tables import Layer, TableSet
from registry.tables.lint import Known, lint
from registry.tables.match import Span, compile_condition

EVIDENCE = "device: NVIDIA H200, tflops: 498, run: h200/0007, date: 2026-11-20, torch: 2.11.0, triton: 3.6.0"
KNOWN = Known(
    variants={"a": "brew", "b": "brew", "elsewhere": "brew", "back": "brew_backward"},
    config_complaint=lambda table, rule, use: None if use.config == {"BLOCK": 64} else ("error", "not BLOCK: 64"),
    runs_on=lambda variant, arch: variant != "elsewhere",
    stale=lambda rule: [("stale-evidence", "measured long ago")] if rule.evidence.torch == "2.10.0" else [],
    arch_of={"NVIDIA H200": "sm90", "NVIDIA B200": "sm100"}.get,
)


def rule(use: str = "[a]", when: str = "", evidence: str = EVIDENCE) -> str:
    return f"{{use: {use}, when: {{{when}}}, evidence: {{{evidence}}}}}"


def codes(tables: TableSet) -> list[tuple[str, int, str]]:
    return [(finding.code, finding.line, finding.path) for finding in lint(tables, KNOWN)]


@pytest.mark.parametrize(
    ("expected", "rules"),
    [
        (None, [rule()]),
        (None, [rule("[{variant: a, config: {BLOCK: 64}}, {variant: a}, b]")]),
        (None, [rule(evidence=EVIDENCE + ", runner_up: {variant: b, tflops: 457}")]),
        (("unknown-variant", 4, "$.rules[0].use[1]"), [rule("[a, bb]")]),
        (("unknown-variant", 4, "$.rules[0].use[0]"), [rule("[back]")]),
        (("unknown-config", 4, "$.rules[0].use[0]"), [rule("[{variant: a, config: {BLOCK: 65}}]")]),
        (("never-runs", 4, "$.rules[0].use[1]"), [rule("[a, elsewhere]")]),
        (("duplicate-use", 4, "$.rules[0].use[1]"), [rule("[a, a]")]),
        (("missing-evidence", 4, "$.rules[0]"), ["use: [a]"]),
        (("stale-evidence", 4, "$.rules[0].evidence"), [rule(evidence=EVIDENCE.replace("2.11.0", "2.10.0"))]),
        (("foreign-evidence", 4, "$.rules[0].evidence.device"), [rule(evidence=EVIDENCE.replace("H200", "B200"))]),
        (
            ("slower-than-runner-up", 4, "$.rules[0].evidence.runner_up"),
            [rule(evidence=EVIDENCE + ", runner_up: {variant: b, tflops: 499}")],
        ),
        (("unreachable-rule", 5, "$.rules[1]"), [rule(), rule(when="cups: 8")]),
    ],
)
def test_lint(tmp_path: Path, expected: tuple[str, int, str] | None, rules: list[str]) -> None:
    assert codes(load(tmp_path, table(*rules))) == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("device", "found"),
    [("NVIDIA H200", []), ("NVIDIA H2000", ["unknown-device"]), ("NVIDIA B200", ["foreign-device"])],
)
def test_the_device_of_a_table_is_one_that_is_known(tmp_path: Path, device: str, found: list[str]) -> None:
    tables = load(tmp_path, f"device: {device}\n" + table(rule()))
    findings = lint(tables, dataclasses.replace(KNOWN, devices=("H200", "B200")))
    assert [finding.code for finding in findings] == found
    assert all(finding.path == "$.device" and device in finding.message for finding in findings)


def test_a_device_that_was_measured_needs_no_listing(tmp_path: Path) -> None:
    own = EVIDENCE.replace("NVIDIA H200", "NVIDIA H999 80GB")
    assert codes(load(tmp_path, "device: H999\n" + table(rule(evidence=own)))) == []


UNREACHABLE = [
    (["cups: 8..16"], "cups: 9"),
    (["cups: 8.."], "cups: [8, 16, '100..']"),
    (["cups: [1..4, 5..8]"], "cups: 2..7"),
    (["cups: ..4", "cups: 5.."], ""),
    (["cups: ..4, hot: true", "cups: 5..8, hot: true"], "cups: 2..7, hot: true, bean: arabica"),
    (["hot: true", "hot: false"], "cups: 3"),
    (["dtype: float16", "dtype: bfloat16"], ""),
    (["bean: [arabica, robusta]"], "bean: robusta, cups: 4"),
    (["cups: 0 mod 8"], "cups: 0 mod 8, hot: true"),
    (["arch: sm80+"], "arch: [sm90, sm100+]"),
    (["hot: [true, false]"], ""),
    (["arch: any"], "cups: 1"),
]
REACHABLE = [
    (["cups: 8..16"], "cups: 8..17"),
    (["cups: 8..16"], ""),
    (["cups: ..4", "cups: 6.."], ""),
    (["strength: ..4", "strength: 5.."], ""),
    (["cups: ..4, hot: true", "cups: 5.."], ""),
    (["hot: true"], ""),
    (["bean: arabica", "bean: robusta"], ""),
    (["cups: 0 mod 8"], "cups: 16"),
    (["cups: 16"], "cups: 0 mod 8"),
    (["arch: sm90"], "arch: sm90+"),
    (["cups: 1, bean: arabica"], "cups: 1"),
]


@pytest.mark.parametrize(
    ("earlier", "last", "dead"), [(*c, True) for c in UNREACHABLE] + [(*c, False) for c in REACHABLE]
)
def test_rules_that_nothing_reaches(tmp_path: Path, earlier: list[str], last: str, dead: bool) -> None:
    text = table(*(f"{{use: [a], when: {{{when}}}}}" for when in [*earlier, last]), arch="any")
    found = [finding.path for finding in lint(load(tmp_path, text), KNOWN) if finding.code == "unreachable-rule"]
    assert found == ([f"$.rules[{len(earlier)}]"] if dead else [])


def test_unreachable_never_claims_too_much() -> None:
    """Held against brute force over every pair of rules drawn from a small set of conditions."""
    values = [1, 3, "2..", "..2", "1..3", [1, "3.."], "1 mod 2", ["0 mod 2", 3]]
    numbers = [compile_condition("cups", "int", value) for value in values]
    flags = [compile_condition("hot", "bool", value) for value in (True, False, [True, False])]
    rules = [(n,) for n in numbers] + [(f,) for f in flags] + [(n, f) for n in numbers for f in flags] + [()]
    points = [{"cups": cups, "hot": hot} for cups in range(12) for hot in (True, False)]
    taken = {r: {i for i, facts in enumerate(points) if all(c.matches(facts[c.name]) for c in r)} for r in rules}
    for one in rules:
        for two in rules[::5]:
            for last in rules:
                if unreachable_by(last, [one, two]):
                    assert taken[last] <= taken[one] | taken[two]


def test_neighbouring_integers_join_but_fractions_do_not() -> None:
    assert compile_condition("x", "int", ["1..4", 5]).spans == (Span(1, 5),)
    assert compile_condition("x", "float", ["1..4", 5]).spans == (Span(1, 4), Span(5, 5))


def test_lint_reports_contained_errors_errata_and_file_names(tmp_path: Path) -> None:
    tables = load(tmp_path, table("use: [a]", "use: [a"), layer=Layer.PLUGIN, contain={Layer.PLUGIN})
    (finding,) = lint(tables, KNOWN)
    assert (finding.severity, finding.code) == ("error", "malformed")
    assert str(finding).startswith(f"{finding.file}:{finding.line}: {finding.path}: error: is not YAML")
    assert codes(load(tmp_path, ERRATUM)) == [("unknown-variant", 2, "$.errata[0]")]
    shipped = load(tmp_path, table(rule()), layer=Layer.SHIPPED)
    assert codes(shipped) == [("misnamed-file", 1, "$")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# Tea\n\n## Too cold\n", []),
        ("## Too *cold*!\n", []),
        ("# Tea\n\n```sh\n# too cold\n```\n", ["unknown-page"]),
        ("too cold\n", ["unknown-page"]),
        (None, ["unknown-page"]),
    ],
)
def test_the_page_of_an_erratum_must_be_there(tmp_path: Path, text: str | None, found: list[str]) -> None:
    own = ERRATUM.replace("https://example.org/1", "docs/tea.md#too-cold").replace("hasty", "a")
    tables = load(tmp_path, own)
    (tmp_path / "docs").mkdir()
    if text is not None:
        (tmp_path / "docs" / "tea.md").write_text(text)
    assert [f.code for f in lint(tables, dataclasses.replace(KNOWN, root=tmp_path))] == found
    assert codes(tables) == [], "an installed package has no docs to look into"


TWICE = ERRATUM.replace("hasty", "a")


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (("", ""), ["duplicate-erratum"]),
        (("[sm90, sm100+]", "[sm100+, sm90]"), ["duplicate-erratum"]),
        ((">=2.11,<2.14", "<2.14,>=2.11"), ["duplicate-erratum"]),
        (("lukewarm", "not warm"), ["duplicate-erratum"]),
        (("..7", "..6"), []),
        (("<2.14", "<2.15"), []),
        (("example.org/1", "example.org/2"), []),
        (("variant: a", "variant: b"), []),
        (("sm100+", "sm100"), []),
    ],
)
def test_an_erratum_that_stands_twice_is_said_with_the_place_of_the_first(
    tmp_path: Path, changed: tuple[str, str], found: list[str]
) -> None:
    tables = load(tmp_path, TWICE, TWICE.replace(*changed))
    findings = lint(tables, KNOWN)
    assert [finding.code for finding in findings] == found
    for finding in findings:
        assert (finding.severity, finding.file) == ("warning", tables.errata[1].file)
        assert f"{tables.errata[0].file}:2" in finding.message


def test_a_match_carries_its_evidence(tmp_path: Path) -> None:
    (match,) = load(tmp_path, table(rule())).match("brew", {}, "sm90")
    assert match.evidence == {
        "device": "NVIDIA H200",
        "tflops": 498.0,
        "run": "h200/0007",
        "date": "2026-11-20",
        "torch": "2.11.0",
        "triton": "3.6.0",
    }
