"""Every malformed table gives one error that names file, line and path, and leaves the loaded tables as they were."""

from __future__ import annotations

import io
import os
import random
import time
from pathlib import Path

import pytest
import yaml

from registry.errors import RegistryError, TableError
from registry.tables import Layer, LayerFile, TableStore, environment_files, files_at, load_tables
from registry.tables.reader import MAX_BYTES, read_document

OPS = {"attention": {"dtype": "str", "head_dim": "int", "seqlen_q": "int", "causal": "bool", "softcap": "float"}}

HEAD = "op: attention\narch: sm90\nrules:\n"  # three lines: the first rule is line 4
GOOD = HEAD + "- when: {dtype: bfloat16, head_dim: 64}\n  use: [torch_flash]\n"


def when(text: str) -> str:
    return HEAD + f"- use: [torch_flash]\n  when: {{{text}}}\n"


def evidence(**changes: str) -> str:
    fields = {"device": "NVIDIA H200", "tflops": "498", "run": "h200/0007", "date": "2026-11-20", "torch": "2.11.0"}
    listed = ", ".join(f"{key}: {value}" for key, value in {**fields, **changes}.items())
    return HEAD + f"- use: [torch_flash]\n  evidence: {{{listed}}}\n"


def erratum(**changes: str) -> str:
    fields = dict(variant="torch_cudnn", op="attention", reason="wrong", link="https://example.org/1", severity="crash")
    listed = "".join(f"  {key}: {value}\n" for key, value in {**fields, **changes}.items() if value)
    return f"errata:\n-\n{listed}"


WHEN, USE, EVIDENCE, BAD = "$.rules[0].when", "$.rules[0].use[0]", "$.rules[0].evidence", "$.errata[0]"
BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n"

# name: (content, line, path, phrase)
MALFORMED: dict[str, tuple[str | bytes, int, str, str]] = {
    # not a file of ours at all
    "empty": ("", 1, "$", "the file is empty"),
    "only a comment": ("# nothing\n", 1, "$", "the file is empty"),
    "null": ("~\n", 1, "$", "the file is empty"),
    "list at the top": ("- op: attention\n", 1, "$", "expects a mapping at the top, got a list"),
    "text at the top": ("attention\n", 1, "$", "expects a mapping at the top, got text"),
    "number at the top": ("42\n", 1, "$", "expects a mapping at the top, got an integer"),
    "two documents": (GOOD + "---\n" + GOOD, 6, "$", "second document"),
    "huge": (GOOD + "#" * MAX_BYTES, 1, "$", "is larger than"),
    # encodings
    "latin-1": ("op: attention\narch: sm90 # für\n".encode("latin-1"), 2, "$", "is not UTF-8: byte 0xfc"),
    "UTF-16": (GOOD.encode("utf-16"), 1, "$", "is UTF-16"),
    "byte order mark": (b"\xef\xbb\xbf" + GOOD.encode(), 1, "$", "byte order mark"),
    "NUL": (GOOD + "\0", 6, "$", "control character"),
    "binary": (bytes(range(128, 256)), 1, "$", "is not UTF-8"),
    # broken YAML
    "unclosed bracket": (HEAD + "- use: [torch_flash\n", 5, "$.rules[0].use", "is not YAML"),
    "unclosed quote": (HEAD + '- use: ["torch_flash]\n', 5, "$.rules[0].use", "is not YAML"),
    "tab indentation": ("op: attention\narch: sm90\nrules:\n\t- use: [a]\n", 4, "$.rules", "cannot start any token"),
    "bad indentation": ("op: attention\n arch: sm90\n", 2, "$", "is not YAML"),
    "stray colon": ("op: attention: sm90\n", 1, "$", "is not YAML"),
    "template": ("op: {{ op }}\n", 1, "$.op", "each key must be a plain name"),
    # dangerous YAML
    "python object": ("op: !!python/object:os.system ls\n", 1, "$.op", "tag tag:yaml.org,2002:python/object:os.system"),
    "python call": ("op: !!python/object/apply:os.system [ls]\n", 1, "$.op", "is not allowed; tables are plain data"),
    "own tag": ("op: !secret attention\n", 1, "$.op", "the tag !secret is not allowed"),
    "binary tag": ("op: !!binary YXR0\n", 1, "$.op", "binary is not allowed"),
    "alias bomb": (BOMB, 1, "$.a", "anchors (&name) and aliases (*name) are not allowed"),
    "anchor": (HEAD + "- &first\n  use: [a]\n", 4, "$.rules[0]", "anchors (&name)"),
    "endless alias": ("op: &a [*a]\n", 1, "$.op", "anchors (&name)"),
    "merge key": (HEAD + "- use: [a]\n  <<: {when: {}}\n", 5, "$.rules[0].<<", "unknown key '<<'"),
    "too deep": ("op: " + "[" * 50 + "]" * 50 + "\n", 1, "$.op" + "[0]" * 16, "nested deeper than 16"),
    "absurdly deep": ("op: " + "[" * 100_000, 1, "$.op" + "[0]" * 16, "nested deeper than 16"),
    "absurd number": (when("head_dim: " + "9" * 5000), 5, WHEN + ".head_dim", "too many digits; allowed: 18"),
    # keys
    "duplicate key": ("op: attention\narch: sm90\nop: matmul\n", 3, "$.op", "'op' is here twice (first on line 1)"),
    "duplicate condition": (when("head_dim: 64, head_dim: 128"), 5, WHEN + ".head_dim", "is here twice"),
    "unknown key": (HEAD + "- use: [a]\nrule: []\n", 5, "$.rule", "unknown key 'rule'; did you mean 'rules'?"),
    "unknown rule key": (HEAD + "- use: [a]\n  wehn: {}\n", 5, "$.rules[0].wehn", "did you mean 'when'?"),
    "unknown candidate key": (
        HEAD + "- use:\n  - {variant: a, conf: {}}\n",
        5,
        USE + ".conf",
        "did you mean 'config'?",
    ),
    "unknown evidence key": (evidence(speed="3"), 5, EVIDENCE + ".speed", "unknown key 'speed'"),
    "number as key": ("1: attention\n", 1, "$.1", "unknown key '1'"),
    "list as key": ("[op]: attention\n", 1, "$", "each key must be a plain name"),
    "empty key": ("? \n: attention\n", 1, "$", "each key must be a plain name"),
    "no op": ("arch: sm90\nrules:\n- use: [a]\n", 1, "$", "the key 'op' is missing"),
    "no arch": ("op: attention\nrules:\n- use: [a]\n", 1, "$", "the key 'arch' is missing"),
    "no rules": ("op: attention\narch: sm90\n", 1, "$", "the key 'rules' is missing"),
    "no use": (HEAD + "- when: {causal: true}\n", 4, "$.rules[0]", "the key 'use' is missing"),
    # wrong types and names
    "op is a list": ("op: [attention]\narch: sm90\nrules: []\n", 1, "$.op", "expected text, got a list"),
    "op unknown": (GOOD.replace("attention", "atention"), 1, "$.op", "did you mean 'attention'?"),
    "op is a path": (GOOD.replace("attention", "../attention"), 1, "$.op", "got '../attention'"),
    "arch unknown": (GOOD.replace("sm90", "hopper"), 2, "$.arch", "'hopper' is not an architecture"),
    "arch is a pattern": (GOOD.replace("sm90", "sm90+"), 2, "$.arch", "'sm90+' is not an architecture"),
    "arch is a number": (GOOD.replace("sm90", "90"), 2, "$.arch", "expected text, got an integer; put it in quotes"),
    "device is a list": ("device: [H200]\n" + GOOD, 1, "$.device", "got a list"),
    "rules is a mapping": ("op: attention\narch: sm90\nrules: {use: [a]}\n", 3, "$.rules", "got a mapping"),
    "rules is empty": ("op: attention\narch: sm90\nrules: []\n", 3, "$.rules", "length >= 1"),
    "rule is text": (HEAD + "- torch_flash\n", 4, "$.rules[0]", "expected a mapping, got text"),
    "use is text": (HEAD + "- use: torch_flash\n", 4, "$.rules[0].use", "expected a list, got text"),
    "use is empty": (HEAD + "- use: []\n", 4, "$.rules[0].use", "length >= 1"),
    "variant is a number": (HEAD + "- use: [a, 3]\n", 4, "$.rules[0].use[1]", "got an integer"),
    "variant is a path": (HEAD + "- use: [../../etc/passwd]\n", 4, "$.rules[0].use[0]", "matching regex"),
    "config is a list": (HEAD + "- use: [{variant: a, config: [1]}]\n", 4, USE + ".config", "got a list"),
    "config value is a list": (
        HEAD + "- use:\n  - variant: a\n    config:\n      tile: [64, 64]\n",
        7,
        USE + ".config.tile",
        "got a list",
    ),
    "config value is a fraction": (
        HEAD + "- use: [{variant: a, config: {stages: 1.5}}]\n",
        4,
        USE + ".config.stages",
        "with a fraction",
    ),
    "config value of 19 digits": (
        HEAD + "- use: [{variant: a, config: {stages: " + "-1" + "0" * 18 + "}}]\n",
        4,
        USE + ".config.stages",
        "too many digits; allowed: 18",
    ),
    # conditions
    "when is a list": (HEAD + "- use: [a]\n  when: [causal]\n", 5, "$.rules[0].when", "expected a mapping, got a list"),
    "unknown fact": (when("headdim: 64"), 5, WHEN + ".headdim", "did you mean 'head_dim'?"),
    "null condition": (when("head_dim: "), 5, WHEN + ".head_dim", "expects an integer or a range"),
    "condition is a mapping": (when("head_dim: {min: 64}"), 5, WHEN + ".head_dim", "expects an integer"),
    "no alternatives": (when("dtype: []"), 5, WHEN + ".dtype", "the list of alternatives is empty"),
    "alternative of the wrong type": (when("dtype: [bfloat16, 16]"), 5, WHEN + ".dtype[1]", "expects a name, got 16"),
    "nested alternatives": (when("head_dim: [[64]]"), 5, WHEN + ".head_dim[0]", "expects an integer"),
    "range backwards": (when("seqlen_q: 9..3"), 5, WHEN + ".seqlen_q", "is empty: its low end is above"),
    "range of letters": (when("seqlen_q: a..b"), 5, WHEN + ".seqlen_q", "'a..b' is not a range"),
    "range without ends": (when("seqlen_q: '..'"), 5, WHEN + ".seqlen_q", "has no end"),
    "range with three dots": (when("seqlen_q: 1...3"), 5, WHEN + ".seqlen_q", "is not a range"),
    "range with a dash": (when("seqlen_q: 128-256"), 5, WHEN + ".seqlen_q", "is not a range"),
    "range of negatives": (when("seqlen_q: -5..3"), 5, WHEN + ".seqlen_q", "is not a range"),
    "range of fractions": (when("seqlen_q: 1.5..3"), 5, WHEN + ".seqlen_q", "is not a range"),
    "impossible remainder": (when("seqlen_q: 128 mod 64"), 5, WHEN + ".seqlen_q", "matches nothing"),
    "remainder of zero": (when("seqlen_q: 0 mod 0"), 5, WHEN + ".seqlen_q", "is not a range"),
    "negative": (when("head_dim: -64"), 5, WHEN + ".head_dim", "-64 is negative"),
    "fraction for an integer": (when("head_dim: 64.0"), 5, WHEN + ".head_dim", "expects an integer"),
    "octal": (when("head_dim: 0100"), 5, WHEN + ".head_dim", "'0100' is not a range"),
    "sexagesimal": (when("head_dim: '1:04'"), 5, WHEN + ".head_dim", "is not a range"),
    "true for an integer": (when("head_dim: true"), 5, WHEN + ".head_dim", "expects an integer"),
    "yes for true": (when("causal: yes"), 5, WHEN + ".causal", "expects true or false, got 'yes'"),
    "off for false": (when("causal: off"), 5, WHEN + ".causal", "expects true or false, got 'off'"),
    "one for true": (when("causal: 1"), 5, WHEN + ".causal", "expects true or false, got 1"),
    "infinite": (when("softcap: .inf"), 5, WHEN + ".softcap", ".inf is not a finite number"),
    "overflowing": (when("softcap: 1.0e999"), 5, WHEN + ".softcap", "1.0e999 is not a finite number"),
    "unknown arch in a condition": (when("arch: ampere"), 5, WHEN + ".arch", "'ampere' is not an architecture"),
    # evidence
    "evidence is text": (HEAD + "- use: [a]\n  evidence: trust me\n", 5, "$.rules[0].evidence", "got text"),
    "not a number": (evidence(tflops=".nan"), 5, EVIDENCE + ".tflops", ".nan is not a finite number"),
    "speed of nothing": (evidence(tflops="0"), 5, EVIDENCE + ".tflops", "expected a number > 0"),
    "speed as text": (evidence(tflops="fast"), 5, EVIDENCE + ".tflops", "expected a number, got text"),
    "date that is none": (evidence(date="2026-13-45"), 5, EVIDENCE + ".date", "invalid RFC3339"),
    "version as a number": (evidence(torch="2.10"), 5, EVIDENCE + ".torch", "got a number; put it in quotes"),
    "run outside": (evidence(run="../../secrets"), 5, EVIDENCE + ".run", "matching regex"),
    "run from the root": (evidence(run="/etc/passwd"), 5, EVIDENCE + ".run", "matching regex"),
    "half a runner-up": (evidence(runner_up="{variant: a}"), 5, EVIDENCE + ".runner_up", "'tflops' is missing"),
    # errata
    "errata is a mapping": ("errata: {variant: a}\n", 1, "$.errata", "got a mapping"),
    "erratum without a link": (erratum(link=""), 3, "$.errata[0]", "the key 'link' is missing"),
    "erratum with a bad link": (erratum(link="ftp://x"), 6, BAD + ".link", "matching regex"),
    "erratum with a page but no place": (erratum(link="docs/autows.md"), 6, BAD + ".link", "matching regex"),
    "erratum with a file elsewhere": (erratum(link="docs/../x.md#y"), 6, BAD + ".link", "matching regex"),
    "erratum of an unknown op": (erratum(op="conv"), 4, BAD + ".op", "unknown op 'conv'"),
    "erratum of an unknown fact": (erratum(when="{headdim: 64}"), 8, BAD + ".when.headdim", "did you mean 'head_dim'?"),
    "erratum with a bad range": (erratum(toolchain="{torch: new}"), 8, BAD + ".toolchain.torch", "not a version range"),
    "erratum with a range of thousands of digits": (
        erratum(toolchain="{torch: '>=" + "9" * 5000 + "'}"),
        8,
        BAD + ".toolchain.torch",
        "not a version range",
    ),
    "erratum of some tool": (
        erratum(toolchain="{numpy: '>1'}"),
        8,
        BAD + ".toolchain",
        "allowed: cuda, cudnn, driver, torch, triton",
    ),
    "erratum of unknown severity": (
        erratum(severity="bad"),
        7,
        BAD + ".severity",
        "invalid enum value 'bad'; allowed: compile-failure, crash",
    ),
    "erratum on an unknown arch": (erratum(arch="volta"), 8, BAD + ".arch", "'volta' is not an architecture"),
    "erratum on several": (erratum(arch="[sm90, volta]"), 8, BAD + ".arch[1]", "'volta' is not an architecture"),
    "erratum on a long arch": (erratum(arch="sm9" * 99), 8, BAD + ".arch", "is not an architecture; allowed: any"),
    "table and errata in one": (GOOD + "errata: []\n", 1, "$.op", "unknown key 'op'; known: errata"),
}


class InMemory:
    """A readable file that is only bytes."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def is_file(self) -> bool:
        return True

    def open(self, mode: str, /) -> io.BytesIO:
        return io.BytesIO(self._content)


@pytest.fixture
def store(tmp_path: Path) -> TableStore:
    good = tmp_path / "good.yaml"
    good.write_text(GOOD)
    store = TableStore()
    store.reload(files_at([good], Layer.ENVIRONMENT), OPS)
    return store


def fails(store: TableStore, *paths: Path) -> TableError:
    before = store.current
    with pytest.raises(TableError) as caught:
        store.reload(files_at(paths, Layer.ENVIRONMENT), OPS)
    assert store.current is before, "a failed load must change nothing"
    assert len(before.tables) == 1
    return caught.value


def test_there_are_enough() -> None:
    assert len(MALFORMED) >= 40


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_table(name: str, store: TableStore, tmp_path: Path) -> None:
    content, line, path, phrase = MALFORMED[name]
    bad = tmp_path / "bad.yaml"
    bad.write_bytes(content if isinstance(content, bytes) else content.encode())
    error = fails(store, tmp_path / "good.yaml", bad)
    assert isinstance(error, RegistryError)
    assert (error.file, error.line, error.path) == (str(bad), line, path)
    assert phrase in error.problem
    assert str(error) == f"{bad}:{line}: {path}: {error.problem}"
    assert "\n" not in str(error) and len(error.problem) < 250


@pytest.mark.parametrize("name", [name for name, (_, _, _, phrase) in MALFORMED.items() if "YAML" in phrase])
def test_syntax_errors_without_libyaml(name: str) -> None:
    content, line, _, phrase = MALFORMED[name]
    with pytest.raises(TableError) as caught:
        read_document(content.encode() if isinstance(content, str) else content, "bad.yaml", yaml.SafeLoader)
    assert phrase in caught.value.problem and abs(caught.value.line - line) <= 1


@pytest.mark.parametrize("loader", [yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)])
def test_both_yaml_parsers_read_the_same(loader: type) -> None:
    text = b"a: [1, 0.5, 'yes', yes, ~, true, 2026-11-20, 12:30, !!str 7, 1_000]\nb: |\n  text\n"
    document = read_document(text, "x.yaml", loader)
    assert document.data == {
        "a": [1, 0.5, "yes", "yes", None, True, "2026-11-20", "12:30", "7", "1_000"],
        "b": "text\n",
    }
    assert document.lines["b",] == 2


@pytest.mark.parametrize("number", [10**18 - 1, 1 - 10**18])
def test_integers_of_18_digits_are_read_with_and_without_a_sign(number: int) -> None:
    assert read_document(f"a: {number}\n".encode(), "x.yaml").data == {"a": number}


def test_no_input_is_slow() -> None:
    hostile = [
        b"[" * MAX_BYTES,
        b"{a: " * (MAX_BYTES // 4),
        b"- " * (MAX_BYTES // 2),
        b"? " * (MAX_BYTES // 2),
        b'"' + b"\\" * 999,
    ]
    began = time.perf_counter()
    for content in hostile:
        with pytest.raises(TableError):
            read_document(content, "hostile.yaml")
    assert time.perf_counter() - began < 5


def test_messages_stay_short_and_on_one_line() -> None:
    long = "x" * 10_000
    for text in (
        f"{long}: 1",
        '"a\\nb": 1',
        when(f"causal: {long}"),
        when(f"seqlen_q: {long}"),
        HEAD + f"- use: ['{long}']",
    ):
        with pytest.raises(TableError) as caught:
            load_tables([LayerFile("bad.yaml", Layer.PLUGIN, InMemory(text.encode()))], OPS)
        assert len(str(caught.value)) < 500 and str(caught.value).isprintable()


def test_damaged_tables_raise_nothing_but_table_errors() -> None:
    """Random damage to good files: each loads or gives a TableError that points into the file."""
    seeds = [
        evidence(runner_up="{variant: a, tflops: 1}") + "- " + GOOD[len(HEAD) + 2 :],
        erratum(when="{head_dim: 8..}"),
    ]
    bits = [*"[]{}:|>'\"\té", "- ", "\n", "  ", "&a ", "*a", "!!int ", "..", "null", "? ", "---\n"]
    chance = random.Random(0)
    failed = 0
    for _ in range(1500):
        text = chance.choice(seeds)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(text))
            text = text[:at] + chance.choice(bits) + text[at + chance.choice((0, 0, 1, 5)) :]
        try:
            load_tables([LayerFile("bad.yaml", Layer.PLUGIN, InMemory(text.encode()))], OPS)
        except TableError as error:
            failed += 1
            assert 1 <= error.line <= text.count("\n") + 2 and error.path.startswith("$"), text
    assert failed > 500


def test_files_that_are_no_files(store: TableStore, tmp_path: Path) -> None:
    missing = fails(store, tmp_path / "nowhere.yaml")
    assert (missing.line, missing.path, missing.problem) == (1, "$", "no such file, or a folder without *.yaml tables")
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    assert "no such file" in fails(store, pipe).problem
    (tmp_path / "folder").mkdir()
    assert "no such file" in fails(store, Path("~nobody-of-that-name/x.yaml")).problem
    assert "no such file" in fails(store, tmp_path / "good.yaml" / "x.yaml").problem
    too_long = fails(store, tmp_path / ("x" * 300)).problem
    assert "cannot be read" in too_long or "no such file" in too_long  # which: hangs on the Python
    assert "a folder without *.yaml tables" in fails(store, tmp_path / "folder").problem
    with pytest.raises(TableError, match="no such file"):
        load_tables(environment_files({"REGISTRY_TABLES": "/does/not/exist"}), OPS)


def test_a_folder_that_may_not_be_listed_is_no_empty_one(store: TableStore, tmp_path: Path, monkeypatch) -> None:
    """By what its listing says: a superuser, as whom tests may run, may list every folder."""
    (tmp_path / "folder").mkdir()

    def refuse(path: object) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    for name in ("listdir", "scandir"):  # which one pathlib asks hangs on the Python
        monkeypatch.setattr(os, name, refuse)
    error = fails(store, tmp_path / "folder")
    assert (error.file, error.problem) == (str(tmp_path / "folder"), "cannot be read: Permission denied")


def test_one_broken_file_spoils_the_load_whatever_its_place(store: TableStore, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("op: [")
    good = tmp_path / "good.yaml"
    for order in ([bad, good], [good, bad], [good, bad, good]):
        assert fails(store, *order).file == str(bad)


def test_broken_files_of_contained_layers_are_listed_instead(tmp_path: Path) -> None:
    bad, good = tmp_path / "bad.yaml", tmp_path / "good.yaml"
    bad.write_text("op: attention\nop: matmul\n")
    good.write_text(GOOD)
    files = [*files_at([bad], Layer.PLUGIN), *files_at([good], Layer.SHIPPED)]
    loaded = load_tables(files, OPS, contain={Layer.PLUGIN})
    assert [table.file for table in loaded.tables] == [str(good)]
    assert [(problem.file, problem.code) for problem in loaded.problems] == [(str(bad), "duplicate-key")]
