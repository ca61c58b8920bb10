"""`kreg` given what is none: one line that says so, exit status 2, no traceback; and hostile text on a terminal."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import warnings

import forked
import pytest
from made_up import math_run
from ran import install_plugin
from tuning_rows import MACHINE

from registry import notices
from registry.cli import FINDING, OK, USAGE, main
from registry.cli._page import Page, print_json
from registry.ops.parts.cases import Case, from_file
from registry.tuning.extra import load_plugins
from registry.tuning.journal import FORMAT, Journal, holds_other

pytestmark = pytest.mark.usefixtures("quick_python")

TUNE = ["tune", "attention", "--device", "cpu", "--grid", "tiny"]


def test_a_gpu_that_is_not_there_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["tune", "attention", "--device", "cuda"]) == USAGE
    err = capsys.readouterr().err
    assert "--device: got cuda" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "at least one shape of attention"),
        (b'{"op": "matmul", "shape": {"m": 64}}\n', "at least one shape of attention"),
        (b"\xff\xfe", "the byte 0xff"),
        (b'{"op": ' + b"[" * 100_000, "shapes.txt:1: got"),
    ],
)
def test_a_file_that_holds_no_shapes_is_one_line(capsys, tmp_path, content, said):
    (tmp_path / "shapes.txt").write_bytes(content)
    assert main(["tune", "attention", "--device", "cpu", "--shapes", str(tmp_path / "shapes.txt")]) == USAGE
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_a_schema_that_is_no_text_is_not_current_and_is_written_anew(capsys, tmp_path):
    (tmp_path / "table.schema.json").write_bytes(b"\xff\xfe{}")
    assert main(["schema", "--check", str(tmp_path)]) == FINDING
    assert main(["schema", "--write", str(tmp_path)]) == OK == main(["schema", "--check", str(tmp_path)])
    assert "table.schema.json is not current" in capsys.readouterr().out.replace("\n", " ")


def test_a_file_of_shapes_may_begin_with_a_byte_order_mark(tmp_path):
    """As editors of Windows write them."""
    (tmp_path / "shapes.txt").write_bytes(b"\xef\xbb\xbfs=64,d=32\r\n")
    assert from_file("attention", tmp_path / "shapes.txt") == [Case.parse("attention", "s=64,d=32")]


@pytest.mark.parametrize(
    ("op", "shape", "word"),
    [
        ("attention", "b=0", "b"),
        ("attention", "s=99999999999999999999,d=64", "s"),
        ("attention", "s=1e3", "s"),
        ("attention", "causal=5", "causal"),
        ("attention_varlen", "kv=x", "kv"),
        ("attention_varlen", "kv=paged,page=0", "page"),
        ("grouped_mm", "e=-1", "e"),
        ("grouped_mm", "form=x", "form"),
        ("matmul", "layout=xx", "layout"),
        ("matmul", "m=3,n=4,k=5,m=7", "m"),
    ],
)
def test_a_shape_that_is_none_is_one_line(capsys, tmp_path, op, shape, word):
    (tmp_path / "shapes.txt").write_text(shape)
    for command in (
        ["tune", op, "--device", "cpu", "--shapes", str(tmp_path / "shapes.txt"), "--dry-run"],
        ["warm", op, shape, "--device", "H100"],
    ):
        assert main(command) == USAGE
        err = capsys.readouterr().err
        assert f"{word}: got" in err and "allowed" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("shape", "said"), [("m=3,n=4,k=5,m=7", "two values of m"), ("m=3,ieee,ieee=false", "two values of ieee")]
)
def test_explain_takes_each_size_once_and_none_that_there_cannot_be(capsys, shape, said):
    assert main(["explain", "matmul", "--device", "H100", "--shape", shape]) == USAGE
    err = capsys.readouterr().err
    assert f"--shape: got {said}" in err and err.count("\n") == 1
    assert main(["explain", "matmul", "--device", "H100", "--shape", "m=99999999999999999999,n=8,k=8"]) == USAGE
    assert "allowed: sizes of up to 1099511627776" in capsys.readouterr().err


@pytest.fixture
def raw(tmp_path):
    """Raw results of a sweep, such as nobody wants to lose."""
    path = tmp_path / "raw.jsonl"
    with Journal(path) as file:
        file.write("run", format=FORMAT, machine=MACHINE, mode="events")
    return path


def refused(capsys, path, arguments):
    """The one line that says why a command leaves a file alone."""
    before = path.read_bytes()
    assert main([str(one) for one in arguments]) == USAGE and path.read_bytes() == before
    err = capsys.readouterr().err
    assert "allowed" in err and err.count("\n") == 1
    return err


@pytest.mark.parametrize("measures", [["--fit-only"], ["--device", "cpu", "--grid", "tiny"]], ids=["fit", "sweep"])
def test_a_table_takes_no_place_of_raw_results(capsys, tmp_path, raw, measures):
    also, own = tmp_path / "also.measured.json", tmp_path / "own.measured.json"
    also.write_bytes(raw.read_bytes())
    own.symlink_to(raw)
    tune = ["tune", "attention", *measures, "--out", raw]
    assert "--table: got" in refused(capsys, raw, [*tune, "--table", tmp_path / "." / "raw.jsonl"])
    assert "own.yaml, whose measured shapes go to" in refused(capsys, raw, [*tune, "--table", tmp_path / "own.yaml"])
    err = refused(capsys, also, [*tune, "--also", also, "--table", tmp_path / "also.yaml"])
    assert "a file of --also" in err
    err = refused(capsys, also, ["tune", "attention", "--recorded", also, "--table", also])
    assert "a file of --recorded" in err


@pytest.mark.parametrize("content", ["op: attention\narch: cpu\nrules:\n- use: [torch_cpu]\n", "[1]\n\n{}\n"])
def test_a_sweep_is_added_to_no_file_of_something_else(capsys, tmp_path, content):
    path = tmp_path / "attention.cpu.yaml"
    path.write_text(content)
    for more in ([], ["--fit-only"]):
        assert "--out: got" in refused(capsys, path, [*TUNE, "--out", path, *more])


def test_a_sweep_is_added_to_raw_results_and_to_empty_files(tmp_path, raw):
    for content, other in ((b"", False), (b"\n", False), (b"half a li\n" + raw.read_bytes(), False), (b"half", True)):
        raw.write_bytes(content)
        assert holds_other(raw) == other
    assert not holds_other(tmp_path / "not there")


def test_a_page_takes_no_place_of_raw_results(capsys, tmp_path, raw, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "folder" / "other.jsonl"
    other.parent.mkdir()
    other.write_bytes(raw.read_bytes())
    assert "a file of RESULTS" in refused(capsys, raw, ["report", "raw.jsonl", "-o", raw])
    assert "a file of --against" in refused(capsys, raw, ["report", other, "--against", "raw.jsonl", "-o", raw])
    assert "a file of RESULTS" in refused(capsys, other, ["report", "folder", "-o", other])
    assert main(["report", "folder", "-o", "folder/page.html"]) == FINDING  # there is nothing to show


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["inspect", "acme.kernel", "--shape", "m=4", "--bogus=x"], "--bogus"),
        (["inspect", "triton_matmul", "--window", "4"], "--window"),
        (["profile", "acme.kernel", "--bogus", "x"], "--bogus"),
    ],
)
def test_an_option_that_there_is_not_is_named_before_a_variant_that_there_is_not(capsys, arguments, option):
    assert main(arguments) == USAGE
    err = capsys.readouterr().err
    assert f"No such option '{option}'" in err and "known:" not in err and err.count("\n") == 1


@pytest.mark.parametrize("more", [[], ["--window", "-1,4"], ["--shape", "m=4"], ["--help"]])
def test_a_variant_that_there_is_not_is_named(capsys, more):
    assert main(["inspect", "acme.kernel", *more]) == USAGE
    assert "no variant 'acme.kernel'" in capsys.readouterr().err


@pytest.mark.parametrize("body", ["raise SystemExit(5)", "def registry_variants():\n    return 1 / 0"])
def test_a_plugin_file_that_fails_is_one_line(capsys, tmp_path, body):
    (tmp_path / "bad.py").write_text(body)
    assert main([*TUNE, "--plugin", str(tmp_path / "bad.py")]) == USAGE
    err = capsys.readouterr().err
    assert "bad.py" in err and err.count("\n") == 1


@pytest.mark.parametrize("mark", ["", "from registry import hookimpl\n@hookimpl\n"], ids=["plain", "marked"])
def test_a_plugin_file_that_would_not_load_once_installed_says_so(tmp_path, mark):
    (tmp_path / "unmarked.py").write_text(f"{mark}def registry_variants():\n    return []\n")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert load_plugins([str(tmp_path / "unmarked.py")]) == []
    texts = [str(one.message) for one in said if "hookimpl" in str(one.message)]
    assert len(texts) == (not mark)
    assert all("unmarked.py: registry_variants is not marked with @registry.hookimpl" in text for text in texts)


def test_a_plugin_file_that_declares_no_variants_says_so_once(tmp_path):
    """Whoever loads it: kreg, the kit, pytest. It is no error, for a file of peers declares those that are here."""
    (tmp_path / "empty.py").write_text(
        "from registry import hookimpl\n@hookimpl\ndef registry_variants():\n    return []\n"
    )
    (tmp_path / "shapes.txt").write_text("m=16,n=16,k=16,dtype=float32\n")
    arguments = [
        "tune",
        "matmul",
        "--device",
        "cpu",
        "--shapes",
        str(tmp_path / "shapes.txt"),
        "--only",
        "torch_matmul",
    ]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert main([*arguments, "--plugin", str(tmp_path / "empty.py"), "--dry-run"]) == OK
    (text,) = [str(one.message) for one in said if one.category is RuntimeWarning]
    assert text.startswith(f"{tmp_path / 'empty.py'}: registry_variants() gives no variants")


@pytest.mark.parametrize("command", [["list"], ["list", "--json"], ["--help"], []])
def test_a_reader_who_has_seen_enough_is_no_error(command):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [forked.REAL if command == ["list"] else sys.executable, "-m", "registry.cli", *command],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (OK, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a disk that is always full")
def test_output_that_has_no_room_names_no_file():
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "registry.cli", "schema"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (USAGE, "kreg: No space left on device\n")


def test_names_that_the_encoding_of_the_output_lacks_are_spelled_out(monkeypatch):
    """A table of such a name ended every command in a UnicodeEncodeError."""
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii", write_through=True))
    Page().row("für", "für_uns.yaml")
    print_json({"file": "für_uns.yaml"})
    page, _, answer = out.getvalue().decode().partition("\n")
    assert page == r"  f\xfcr  f\xfcr_uns.yaml" and json.loads(answer) == {"file": "für_uns.yaml"}


def test_a_terminal_of_no_columns_is_written_to(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    Page().line("picked torch_matmul")
    assert capsys.readouterr().out == "picked torch_matmul\n"


def test_control_characters_never_reach_the_terminal(capsys):
    hostile = "\x1b[31mred\x9b2J\u202e\r"
    page = Page()
    page.row(hostile, hostile)
    page.line(hostile)
    print_json({"evidence": hostile})
    notices.notice(hostile)
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable() and "red" in out
    assert all(text.isprintable() for text in notices.counts())
    print_json({"evidence": hostile})
    assert json.loads(capsys.readouterr().out) == {"evidence": hostile}


@pytest.mark.parametrize("arguments", [[*TUNE, "--dry-run"], ["warm", "attention", "s=64", "--device", "H100"]])
def test_workers_take_nothing_from_the_working_directory(tmp_path, arguments):
    (tmp_path / "registry").mkdir()
    (tmp_path / "registry" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    script = "import sys; sys.path[:] = [p for p in sys.path if p]; from registry.cli import main; sys.exit(main())"
    environment = {
        **os.environ,
        "REGISTRY_CACHE": str(tmp_path / "cache"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }
    command = [sys.executable, "-c", script, *arguments, *(["--jobs", "2"] if "warm" in arguments else [])]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "the wrong one" not in done.stdout + done.stderr and done.returncode == OK, done.stderr


@pytest.fixture
def talkative(declare):
    """A variant whose every function prints."""

    def says(answer):
        def function(*args, **kwargs):
            print("hello from a plugin")
            return answer(*args, **kwargs)

        return function

    loud = {"rule": says(lambda p, c: []), "shared_memory": says(lambda p, c: 0), "registers": says(lambda p, c: 0)}
    declare("test.loud", run=says(math_run), configs=says(lambda problem: [{"B": 1}]), arch=("cpu",), **loud)


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", "attention", "--device", "cpu", "--dtype", "float32"],
        ["explain", "attention", "--device", "cpu", "--dtype", "float32", "--variant", "test.loud"],
        ["list"],
        ["doctor"],
        ["schema"],
        ["tables", "lint", "MINE"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_what_plugins_print_is_no_part_of_the_json(capsys, tmp_path, monkeypatch, talkative, arguments):
    monkeypatch.setenv("REGISTRY_CACHE", str(tmp_path / "cache"))
    mine = tmp_path / "mine.yaml"
    mine.write_text("op: attention\narch: cpu\nrules: [{use: [{variant: test.loud, config: {B: 2}}]}]\n")
    main([str(mine) if one == "MINE" else one for one in [*arguments, "--json"]])
    out, err = capsys.readouterr()
    json.loads(out)
    assert "hello" not in out
    assert ("hello" in err) == (arguments[0] in ("explain", "tables")), "they are asked, and what they say is not lost"


LOUD_PLUGIN = """
import os, sys
os.write(1, b"hello from a C library")
os.system("echo hello from a child")
sys.__stdout__.write("hello past redirections")
from registry import hookimpl
@hookimpl
def registry_variants():
    return []
"""


def test_what_plugins_print_past_python_is_no_part_of_the_json(tmp_path):
    install_plugin(tmp_path, "loud_plugin", LOUD_PLUGIN)
    done = subprocess.run(
        [sys.executable, "-m", "registry.cli", "list", "--json"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == OK and json.loads(done.stdout)
    assert [done.stderr.count(f"hello {words}") for words in ("from a C", "from a child", "past")] == [1, 1, 1]


@pytest.mark.parametrize("part", ["rule", "shared_memory", "configs"])
@pytest.mark.parametrize("error", [SystemExit(0), ValueError("no"), RecursionError()], ids=repr)
def test_a_declaration_that_raises_ends_no_command(capsys, declare, part, error):
    def fail(*args):
        raise error

    declare("test.bad", arch=("any",), **{part: fail})
    explain = ["explain", "attention", "--device", "cpu", "--dtype", "float32"]
    for command in (explain, [*explain, "--variant", "test.bad"], ["list"], ["doctor"]):
        assert main([*command, "--json"]) in (OK, FINDING)
        json.loads(capsys.readouterr().out)
