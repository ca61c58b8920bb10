"""Tables that load: matching, layers, errata, and the files that ship."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import forked
import pytest
import yaml
from brew_tables import ERRATUM, OPS, FakeTarget, load, picks, table
from races import in_threads

from registry import Target
from registry.dispatch import in_force
from registry.errors import TableError
from registry.tables import Layer, TableSet, TableStore, environment_files, files_at, load_tables, shipped_files
from registry.tables.lint import Known, lint
from registry.tables.match import arch_covers, same_device
from registry.testing.repeated import switching_often

pytestmark = pytest.mark.usefixtures("quick_python")

FOLDER = Path(__file__).parents[2] / "dispatch_tables"


# --- matching -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "takes", "refuses"),
    [
        ("cups: 8", [8], [7, 9, None]),
        ("cups: [8, 16]", [8, 16], [7, 9, 12, 17]),
        ('cups: "8.."', [8, 10**15], [7, 0]),
        ("cups: ..8", [0, 8], [9]),
        ("cups: 8..16", [8, 12, 16], [7, 17]),
        ("cups: 8 .. 16", [8, 16], [7, 17]),
        ('cups: [1, "4..6", "100.."]', [1, 4, 6, 100], [2, 7, 99]),
        ("cups: 64 mod 128", [64, 192, 1088], [0, 128, 65]),
        ("cups: [0 mod 8, 3]", [8, 3, 0], [4]),
        ("strength: 0", [0.0, 0], [0.1, None]),
        ("strength: 0.5..2", [0.5, 1, 2.0], [0.49, 2.1]),
        ("hot: true", [True, (128, 0), 30.0], [False, None, 0.0]),
        ("hot: false", [False, None, 0.0], [True, (128, 0)]),
        ("hot: [true, false]", [True, False, None], []),
        ("bean: arabica", ["arabica"], ["robusta", "", None]),
        ("bean: [arabica, robusta]", ["arabica", "robusta"], ["liberica"]),
        ('bean: "yes"', ["yes"], [True, "no"]),
        ("dtype: bfloat16", ["bfloat16"], ["float16"]),
    ],
)
def test_a_condition_takes_what_it_says(tmp_path: Path, when: str, takes: list[object], refuses: list[object]) -> None:
    tables = load(tmp_path, table(f"{{when: {{{when}}}, use: [picked]}}"))
    name = when.split(":")[0]
    for value in takes:
        assert picks(tables, **{name: value}) == ["picked"], value
    for value in refuses:
        assert picks(tables, **{name: value}) == [], value
    assert picks(tables) == [], "a fact that the problem does not have matches nothing"


def test_the_first_matching_rule_of_a_table_counts(tmp_path: Path) -> None:
    tables = load(
        tmp_path, table("{when: {cups: ..4, hot: true}, use: [a]}", "{when: {cups: ..4}, use: [b]}", "use: [c]")
    )
    assert picks(tables, cups=2, hot=True) == ["a"]
    assert picks(tables, cups=2, hot=False) == ["b"]
    assert picks(tables, cups=9, hot=True) == ["c"]
    assert picks(tables, op="brew_backward", cups=2) == []


def test_a_set_of_tables_says_which_facts_it_asks_about(tmp_path: Path) -> None:
    tables = load(tmp_path, table("{when: {cups: ..4, arch: sm90}, use: [a]}", "use: [b]", arch="any"), ERRATUM)
    assert tables.asked_about("brew") == {"cups", "arch"}
    assert tables.asked_about("brew_backward") == set()


def test_candidates_keep_their_order_and_configs(tmp_path: Path) -> None:
    text = table("use: [{variant: a, config: {BLOCK: 64, mode: fast, tma: true}}, b, {variant: acme.c}]")
    (match,) = load(tmp_path, text).match("brew", {}, "sm90")
    assert [(use.variant, use.config) for use in match.use] == [
        ("a", {"BLOCK": 64, "mode": "fast", "tma": True}),
        ("b", None),
        ("acme.c", None),
    ]
    assert re.search(r"\.yaml:4 rules\[0\]$", match.where)
    assert match.evidence is None


def test_arch_can_be_a_condition_of_an_any_table(tmp_path: Path) -> None:
    tables = load(
        tmp_path,
        table("{when: {arch: sm90+}, use: [new]}", "{when: {arch: cpu}, use: [cpu]}", "use: [old]", arch="any"),
    )
    assert [picks(tables, arch=arch) for arch in ("sm80", "sm90", "sm120", "cpu")] == [
        ["old"],
        ["new"],
        ["new"],
        ["cpu"],
    ]


@pytest.mark.parametrize(
    ("pattern", "takes", "refuses"),
    [
        ("any", ["cpu", "sm90", "sm80+"], []),
        ("cpu", ["cpu"], ["sm90", "any"]),
        ("sm90", ["sm90"], ["sm80", "sm100", "sm90+"]),
        ("sm80+", ["sm80", "sm86", "sm90", "sm100", "sm90+"], ["sm75", "cpu", "sm70+", "any"]),
    ],
)
def test_arch_patterns(pattern: str, takes: list[str], refuses: list[str]) -> None:
    assert all(arch_covers(pattern, arch) for arch in takes)
    assert not any(arch_covers(pattern, arch) for arch in refuses)


def test_device_names_compare_as_people_write_them() -> None:
    assert same_device("NVIDIA H200", "H200") and same_device("rtx-3090", "NVIDIA GeForce RTX 3090")
    assert same_device("NVIDIA H100 80GB HBM3", "H100") and same_device("NVIDIA_A100-SXM4-80GB", "a100")
    assert not same_device("H100", "H100 PCIe")
    assert not same_device("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA A100-SXM4-80GB MIG 1g.20gb")


@pytest.mark.parametrize("called", ["NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB", "Tesla T4", "NVIDIA L4"])
def test_a_table_by_a_drivers_name_is_that_of_the_named_target(tmp_path: Path, called: str) -> None:
    target = Target.named(called)
    tables = load(tmp_path, f"device: {called}\n" + table("use: [a]", arch=target.arch))
    for device in (called, target.name):
        assert [match.use[0].variant for match in tables.match("brew", {}, target.arch, device)] == ["a"]


# --- layers -------------------------------------------------------------------------------------------------------


def test_layers_are_asked_from_the_highest_down(tmp_path: Path) -> None:
    def one(layer: Layer, name: str, arch: str = "sm90", device: str = "") -> list[object]:
        path = tmp_path / f"{name}.yaml"
        path.write_text((f"device: {device}\n" if device else "") + table(f"use: [{name}]", arch=arch))
        return list(files_at([path], layer))

    files = [
        *one(Layer.SHIPPED, "shipped_any", "any"),
        *one(Layer.SHIPPED, "shipped_device", device="NVIDIA H200"),
        *one(Layer.SHIPPED, "shipped_arch"),
        *one(Layer.PLUGIN, "plugin_any", "any"),
        *one(Layer.TUNED, "tuned", device="NVIDIA H200"),
        *one(Layer.ENVIRONMENT, "environment"),
        *one(Layer.ENVIRONMENT, "environment_later"),
    ]
    for order in (files, [*files[4::-1], *files[5:]]):
        tables = load_tables(order, OPS)  # type: ignore[arg-type]
        assert picks(tables, device="NVIDIA H200") == [
            "environment",
            "environment_later",
            "tuned",
            "plugin_any",
            "shipped_device",
            "shipped_arch",
            "shipped_any",
        ]
        assert picks(tables, device="NVIDIA H100") == [
            "environment",
            "environment_later",
            "plugin_any",
            "shipped_arch",
            "shipped_any",
        ]
        assert picks(tables, arch="cpu") == ["plugin_any", "shipped_any"]


def test_registry_tables_lists_files_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "b.yaml").write_text(table("use: [b]"))
    (folder / "a.yml").write_text(table("use: [a]"))
    (folder / "notes.txt").write_text("not a table")
    (tmp_path / "c.yaml").write_text(table("use: [c]"))
    listed = os.pathsep.join([str(tmp_path / "c.yaml"), "", str(folder)])
    tables = load_tables(environment_files({"REGISTRY_TABLES": listed}), OPS)
    assert picks(tables) == ["c", "a", "b"]
    assert environment_files({}) == [] and environment_files({"REGISTRY_TABLES": ""}) == []


def test_rows_can_be_left_out_one_by_one(tmp_path: Path) -> None:
    text = table("{when: {cups: 1}, use: [gone]}", "use: [kept]")
    tables = load(tmp_path, text, skip=lambda table, rule: "stale" if rule.use[0].variant == "gone" else None)
    (match,) = tables.match("brew", {"cups": 1}, "sm90")
    assert match.use[0].variant == "kept" and match.rule.index == 1
    assert [(rule.index, why) for _, rule, why in tables.skipped] == [(0, "stale")]


def test_a_store_swaps_whole_sets(tmp_path: Path) -> None:
    """Readers during many reloads, every other one of which fails, only ever see a whole set."""
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(table("use: [a]"))
    bad.write_text(table("use: []"))
    store = TableStore()
    store.reload(files_at([good], Layer.TUNED), OPS)

    def reload() -> None:
        store.reload(files_at([good, good], Layer.TUNED), OPS)
        with pytest.raises(TableError):
            store.reload(files_at([good, bad], Layer.TUNED), OPS)

    def read(_: int) -> None:
        for _ in range(2000):
            assert tuple(picks(store.current)) in {("a",), ("a", "a")}

    with switching_often():
        in_threads(read, 4, meanwhile=reload)


# --- errata -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("applies", "op", "variant", "cups", "target"),
    [
        (True, "brew", "hasty", 4, FakeTarget()),
        (True, "brew", "hasty", 4, FakeTarget("sm120")),
        (True, "brew", "hasty", 4, FakeTarget(torch="2.13.0+cu130")),
        (True, "brew", "hasty", 4, FakeTarget(torch="2.13.0a0+git1234")),
        (False, "brew", "hasty", 8, FakeTarget()),
        (False, "brew", "steady", 4, FakeTarget()),
        (False, "brew_backward", "hasty", 4, FakeTarget()),
        (False, "brew", "hasty", 4, FakeTarget("sm80")),
        (False, "brew", "hasty", 4, FakeTarget("cpu")),
        (False, "brew", "hasty", 4, FakeTarget(torch="2.10.1")),
        (False, "brew", "hasty", 4, FakeTarget(torch="2.14.0")),
        (False, "brew", "hasty", 4, FakeTarget(torch="")),
        (False, "brew", "hasty", 4, FakeTarget(torch="unknown build")),
    ],
)
def test_errata(tmp_path: Path, applies: bool, op: str, variant: str, cups: int, target: FakeTarget) -> None:
    tables = load(tmp_path, ERRATUM)
    found = tables.errata_for(op, variant, {"cups": cups}, target)
    assert [e.link for e in found] == (["https://example.org/1"] if applies else [])
    assert [e.unaffected for e in found] == (["torch outside <2.14,>=2.11"] if applies else [])


def test_an_erratum_may_refer_to_our_own_pages(tmp_path: Path) -> None:
    public, own = load(tmp_path, ERRATUM, ERRATUM.replace("https://example.org/1", "docs/tea.md#too-cold")).errata
    assert public.page is None and public.reference == "https://example.org/1"
    assert own.page == ("docs/tea.md", "too-cold") and own.reference == "docs/tea.md#too-cold of kernel-registry"


def test_errata_of_all_layers_add_up(tmp_path: Path) -> None:
    tables = load(tmp_path, ERRATUM, ERRATUM.replace("example.org/1", "example.org/2"))
    assert len(tables.errata_for("brew", "hasty", {"cups": 1}, FakeTarget())) == 2


def test_a_debug_interpreter_finds_no_bad_free_after_errata(tmp_path: Path) -> None:
    """msgspec 0.22 frees the constraint of text in a union with a list as if it were another."""
    (tmp_path / "errata.yaml").write_text(ERRATUM.replace("[sm90, sm100+]", "sm90"))
    script = (
        "import sys; from pathlib import Path; from registry.tables.reader import read_document;"
        "from registry.tables.schema import ErrataFile, decode;"
        "print(decode(read_document(Path(sys.argv[1]).read_bytes(), 'errata.yaml'), ErrataFile).errata[0].arch)"
    )
    command = [forked.REAL, "-X", "dev", "-c", script, tmp_path / "errata.yaml"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr[-500:]) == (0, "sm90\n", "")


# --- what ships ---------------------------------------------------------------------------------------------------


def test_the_json_schemas_are_current() -> None:
    from registry.tables.schema import SCHEMAS, schema_text

    for name, kind in SCHEMAS.items():
        current = (FOLDER / name).read_text() == schema_text(kind)
        assert current, f"{name} is old: run python -m registry.tables.schema dispatch_tables"


class _WithoutDates(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:timestamp"]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def test_the_json_schemas_take_the_shipped_files_and_refuse_typing_mistakes() -> None:
    jsonschema = pytest.importorskip("jsonschema")

    for path in FOLDER.glob("*.yaml"):
        named = re.match(r"# yaml-language-server: \$schema=\./(\S+)\n", path.read_text())
        assert named, f"{path.name} names no schema in its first line"
        schema = json.loads((FOLDER / named[1]).read_text())
        jsonschema.Draft7Validator.check_schema(schema)
        # Editors read YAML 1.2, where an unquoted date is a string; PyYAML would make a date of it.
        data = yaml.load(path.read_text(), _WithoutDates)
        jsonschema.validate(data, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**data, "rule": []}, schema)


@pytest.fixture(scope="module")
def shipped() -> TableSet:
    return load_tables(shipped_files(), in_force.op_fields())


def test_shipped_tables_hold_no_error(shipped: TableSet) -> None:
    named = {use.variant: table.op for table in shipped.tables for rule in table.rules for use in rule.use}
    assert [str(finding) for finding in lint(shipped, Known(named)) if finding.severity == "error"] == []
    for op in ("attention", "attention_backward", "matmul"):
        for arch in ("cpu", "sm80", "sm90", "sm100", "sm120"):
            assert list(shipped.match(op, {}, arch)), f"{op} on {arch} has no ranking"


B200, H100 = FakeTarget("sm100", "2.13.0"), FakeTarget("sm90", "2.13.0")
TF32 = "https://github.com/triton-lang/triton/pull/11796"
KV_HEADS = "https://github.com/pytorch/pytorch/issues/193893"
HALF_TILE = "https://github.com/pytorch/pytorch/issues/196678"


@pytest.mark.parametrize(
    ("target", "variant", "facts", "link"),
    [
        (B200, "torch_cudnn", {"heads_kv": 4}, KV_HEADS),
        (B200, "torch_cudnn", {"heads_kv": 8}, None),
        (B200, "torch_flash", {"heads_kv": 4}, None),
        (H100, "torch_cudnn", {"heads_kv": 4}, None),
        (H100, "torch_cudnn_backward", {"seqlen_q": 704, "seqlen_k": 704, "causal": False}, HALF_TILE),
        (H100, "torch_cudnn_backward", {"seqlen_q": 704, "seqlen_k": 704, "causal": True}, None),
        (H100, "torch_cudnn_backward", {"seqlen_q": 704, "seqlen_k": 768, "causal": False}, None),
        (FakeTarget("sm90", "2.10.0"), "torch_cudnn_backward", {"seqlen_k": 704, "causal": False}, None),
        (H100, "triton_autows", {"dtype": "float32"}, TF32),
        (H100, "triton_autows", {"dtype": "bfloat16"}, None),
    ],
)
def test_shipped_errata(
    shipped: TableSet, target: FakeTarget, variant: str, facts: dict[str, object], link: str | None
) -> None:
    op = "attention_backward" if variant.endswith("_backward") else "attention"
    assert [e.link for e in shipped.errata_for(op, variant, facts, target)] == ([link] if link else [])
