"""`kreg`: what it prints, in a pipe and at 80 columns, its JSON, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import forked
import pytest
import torch

import registry
from registry import Problem, Requires, Target, Variant, notices
from registry.cli import FINDING, OK, USAGE
from registry.cli._problems import DTYPE_ALIASES
from registry.contract.problem import PROBLEM_TYPES, fact, query
from registry.dispatch import in_force
from registry.dispatch.catalog import catalog
from registry.dispatch.quarantine import quarantine
from registry.ops.op import OPS, Op

FLAGSHIP = "explain attention --device H100 --dtype bf16 --shape b=4,hq=32,hkv=8,s=8192,d=128 --causal"
ATTENTION = {"b": 4, "hq": 32, "hkv": 8, "s": 8192, "d": 128, "causal": True}
MALFORMED = "op: attention\narch: sm90\nrules: 7\n"
UNKNOWN_VARIANT = "op: attention\narch: sm90\nrules:\n- use: [nobody_has_this]\n"


@pytest.fixture(autouse=True)
def columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def squeezed(text):
    return " ".join(text.split())


# --- explain ------------------------------------------------------------------------------------------------------


def test_explain_says_what_would_run_on_a_gpu_that_is_not_here(kreg):
    code, out, _ = kreg(*FLAGSHIP.split())
    problem = registry.attention.problem_type.of_shape(Target.named("H100"), **ATTENTION)
    decision = registry.attention.explain(problem)
    assert code == OK
    assert f"runs {decision.variant}" in squeezed(out)
    assert squeezed(f"because {decision.because}") in squeezed(out)
    for candidate in decision.candidates:
        assert candidate.variant in out
        for reason in candidate.reasons:
            assert squeezed(str(reason)) in squeezed(out), "every reason is there in full"
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out and "…" not in out


def test_explain_as_json_is_the_decision(kreg):
    code, out, _ = kreg(*FLAGSHIP.split(), "--json")
    problem = registry.attention.problem_type.of_shape(Target.named("H100"), **ATTENTION)
    found = json.loads(out)
    assert code == OK
    assert found.pop("notes") == list(notices.counts())
    assert found == json.loads(json.dumps(registry.attention.explain(problem).to_dict()))


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ("attention --window 256", {"window": [256, 256], "causal": False}),
        ("attention --window 256,0", {"window": [256, 0], "causal": True}),
        ("attention --window=-1,128", {"window": [-1, 128]}),
        ("attention --window none,128", {"window": [-1, 128]}),
        ("attention --softcap 30 --lse --deterministic", {"softcap": 30.0, "lse": True, "deterministic": True}),
        ("attention --layout bshd --dtype fp16", {"layout": "bshd", "dtype": "float16"}),
        ("attention --shape s=1,sk=4096,d=192,dv=128", {"seqlen_q": 1, "seqlen_k": 4096, "head_dim_v": 128}),
        ("attention_backward --shape d=64", {"head_dim": 64, "op": "attention_backward"}),
        (
            "attention --shape s=512,causal,window=255:0,softcap=2,dtype=fp16,layout=bshd",
            {"causal": True, "window": [255, 0], "softcap": 2.0, "dtype": "float16", "layout": "bshd"},
        ),
        ("attention --shape causal,s=512 --dtype fp32", {"causal": True, "dtype": "float32"}),
        ("grouped_mm --shape e=4,m=64,activation=silu,gated", {"groups": 4, "activation": "silu", "gated": True}),
        ("matmul --shape m=512,n=256,k=128,b=3 --layout nt", {"m": 512, "n": 256, "batch": 3, "layout": "nt"}),
        ("matmul --bias --activation gelu", {"bias": True, "activation": "gelu"}),
        ("matmul --dtype fp8 --dtype-b e5m2", {"dtype": "float8_e4m3fn", "dtype_b": "float8_e5m2"}),
        ("matmul --dtype fp8 --out-dtype fp16", {"dtype": "float8_e4m3fn", "out_dtype": "float16"}),
        ("matmul --dtype fp32 --ieee", {"ieee": True}),
    ],
)
def test_explain_takes_every_argument_of_the_problem(kreg, arguments, facts):
    code, out, err = kreg("explain", *arguments.split(), "--device", "cpu", "--json")
    assert code in (OK, FINDING), err
    problem = json.loads(out)["problem"]
    assert {name: problem[name] for name in facts} == facts


@pytest.mark.parametrize("alias", sorted(DTYPE_ALIASES))
def test_dtype_aliases_are_torch_dtypes(alias):
    import torch

    assert isinstance(getattr(torch, DTYPE_ALIASES[alias]), torch.dtype)


def test_a_variant_that_may_not_run_is_refused_with_every_reason(kreg):
    asked = ("explain", "attention", "--device", "RTX 3090", "--shape", "d=76", "--variant", "torch_flash")
    code, out, _ = kreg(*asked)
    assert code == FINDING
    assert "refused" in out and "pad head_dim 76 to 80" in squeezed(out)
    code, out, _ = kreg(*asked, "--json")
    assert code == FINDING
    found = json.loads(out)
    assert found["error"] == "IllegalVariant" and found["picked"] is None
    assert "pad head_dim 76 to 80" in [reason["fix"] for reason in found["reasons"]["torch_flash"]]


def test_nothing_legal_lists_every_variant(kreg):
    code, out, _ = kreg("explain", "attention", "--dtype", "fp8", "--device", "V100", "--json")
    assert code == FINDING
    assert set(json.loads(out)["reasons"]) == set(registry.attention.variants)
    code, out, _ = kreg("explain", "attention", "--dtype", "fp8", "--device", "V100")
    assert code == FINDING and "no variant can run this" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("explain attention --shape d=x", ["--shape", "'d=x'", "hkv"]),
        ("explain attention --shape depth=4", ["--shape", "'depth=4'", "hkv"]),
        ("explain attention --shape d=64,causl", ["--shape", "'causl'", "hkv", "causal", "window"]),
        ("explain attention --shape causal=maybe", ["--shape", "'causal=maybe'"]),
        ("explain attention --shape softcap=x", ["--shape", "'softcap=x'"]),
        ("explain attention --shape b=0", ["b:", "0", "positive"]),
        ("explain attention --shape hq=8,hkv=3", ["hkv", "3", "divisor"]),
        ("explain attention --device Z80", ["--device", "'Z80'", "H100"]),
        ("explain attention --dtype bf17", ["dtype", "'bf17'", "bfloat16"]),
        ("explain attention --layout sdhb", ["layout", "'sdhb'", "bhsd"]),
        ("explain attention --window 3,q", ["--window", "'3,q'", "integers"]),
        ("explain attention --window 1,2,3", ["window", "(1, 2, 3)", "(left, right)"]),
        ("explain attention --softcap nan", ["softcap", "nan", "0.0"]),
        ("explain attention --softcap warm", ["--softcap", "warm"]),
        ("explain attention --fast", ["--fast", "kreg explain attention --help"]),
        ("explain attention --variant nobody", ["'nobody'", "torch_math"]),
        ("explain matmul --layout xx", ["layout", "'xx'", "nn"]),
        ("explain matmul --activation tanh", ["activation", "'tanh'", "gelu"]),
        ("explain matmul --out-dtype half8", ["out_dtype", "'half8'", "int32"]),
        ("explain matmul --dtype-b half8", ["dtype_b", "'half8'", "int8"]),
        ("explain conv", ["op", "'conv'", "matmul"]),
        ("list --arch sm77", ["--arch", "'sm77'", "sm90"]),
        ("list --op conv", ["--op", "'conv'", "matmul"]),
        ("schema tablet", ["tablet", "errata"]),
        ("schema --check nowhere", ["'nowhere'", "folder"]),
        ("brew", ["command", "'brew'", "doctor"]),
        ("warm attention s=64 --device Z80", ["--device", "'Z80'", "H100"]),
        ("tune attention --device cpu --grid tiny --turn nan", ["--turn: got nan"]),
        ("tune attention --device cpu --grid tiny --turn -5", ["--turn: got -5"]),
        ("tune attention --device cpu --grid tiny --rounds 0", ["--rounds"]),
        ("tune attention --device cpu --grid tiny --budget -5", ["--budget"]),
        ("tune attention --device cpu --grid tiny --plugin /no/such.py", ["plugin: got /no/such.py"]),
        ("tune attention --device cpu --grid tiny --plugin no_such", ["plugin: got no_such"]),
    ],
)
def test_wrong_usage_is_one_clear_line(kreg, arguments, says):
    code, out, err = kreg(*arguments.split())
    assert code == USAGE and out == ""
    assert err.count("\n") == 1 and "Traceback" not in err
    for words in says:
        assert words in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to compile for")
def test_warm_without_a_gpu_asks_for_the_name_of_one(kreg):
    code, out, err = kreg("warm", "attention", "s=64,d=64")
    assert (code, out) == (USAGE, "") and "--device" in err and "H100" in err


@pytest.mark.parametrize("arguments", ["list --op matmul", "list --json", "list --op conv", "--version"])
def test_closed_streams_change_no_exit_code(arguments, tmp_path):
    """As under a supervisor: Python has no sys.stdout and sys.stderr then."""
    command = f"exec {forked.REAL} -m registry.cli {arguments} >&- 2>&-"
    environment = dict(os.environ) | {"REGISTRY_CACHE": str(tmp_path)}
    done = subprocess.run(["sh", "-c", command], env=environment, check=False)
    assert done.returncode == (USAGE if "conv" in arguments else OK)


def test_in_a_pipe_there_is_no_colour_and_the_exit_code_is_mains(tmp_path):
    """The installed entry point, for once in a process of its own."""
    environment = dict(os.environ) | {"TERM": "xterm-256color", "REGISTRY_CACHE": str(tmp_path)}
    arguments = "-m registry.cli explain attention --device A100 --variant torch_cpu"
    command = [forked.REAL, *arguments.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == FINDING and done.stderr == ""
    assert "\x1b" not in done.stdout and "arch: got sm80, allowed cpu" in done.stdout


# --- derived from declarations ------------------------------------------------------------------------------------


@pytest.fixture
def toy_op():
    """An op that the command line has never heard of."""

    @dataclass(frozen=True, kw_only=True)
    class ToyProblem(Problem):
        op: ClassVar[str] = "toy"
        rows: int = fact()
        spicy: bool = query("closed", claim="spicy", default=False)

        @classmethod
        def of_shape(cls, target: Target, *, dtype: str = "float32", rows: int = 1, spicy: bool = False) -> ToyProblem:
            return cls(target=target, dtype=dtype, rows=rows, spicy=spicy)

    class Toy(Op):
        name = "toy"
        summary = "plays"
        problem_type = ToyProblem

    Toy()
    yield
    del OPS["toy"], PROBLEM_TYPES["toy"]


def test_a_new_op_needs_no_change_here(kreg, toy_op, takes_back):
    requires = Requires(arch=("any",), dtypes=("float32",), spicy=True)
    registry.register(Variant("toy.plain", op="toy", run=lambda **_: None, requires=requires))
    code, out, _ = kreg("explain", "toy", "--help")
    assert code == OK and "--spicy" in out and "rows=1" in out
    code, out, _ = kreg("explain", "toy", "--shape", "rows=7", "--spicy", "--device", "cpu", "--json")
    assert code == OK
    assert json.loads(out)["picked"] == "toy.plain" and json.loads(out)["problem"]["rows"] == 7
    code, out, _ = kreg("list", "--op", "toy")
    assert "toy.plain" in out and "spicy" in out


# --- list ---------------------------------------------------------------------------------------------------------


def test_list_shows_every_variant_and_where_it_is_from(kreg):
    code, out, _ = kreg("list")
    assert code == OK
    for name, variant in registry.variants().items():
        assert name in out
        assert variant.origin in squeezed(out)
    wide = [line for line in out.splitlines() if len(line) > 80]
    assert all("/" in line for line in wide) and "\x1b" not in out  # a path is one word, however deep a checkout lies


def test_list_filters(kreg):
    _, out, _ = kreg("list", "--op", "attention", "--arch", "cpu", "--json")
    found = {entry["name"]: entry for entry in json.loads(out)}
    assert {"torch_cpu", "torch_math"} <= set(found) and "torch_flash" not in found and "torch_matmul" not in found
    _, out, _ = kreg("list", "--arch", "RTX 4090", "--json")
    assert "torch_flash" in [entry["name"] for entry in json.loads(out)]
    assert found["torch_cpu"]["requires"]["causal"] is True and found["torch_cpu"]["design"]["dsl"] == "aten"


# --- doctor -------------------------------------------------------------------------------------------------------


def test_doctor_of_a_sound_installation(kreg):
    code, out, _ = kreg("doctor", "--json")
    report = json.loads(out)
    assert {"python", "torch", "triton", "cuda", "driver"} <= set(report["versions"])
    assert "registry.plugins.torch_attention" in report["plugins"]["loaded"]
    assert "attention.any.yaml" in [table["file"] for table in report["tables"]["in_force"]]
    assert code == (FINDING if report["wrong"] else OK)
    assert report["wrong"] == [], "a fresh checkout has nothing wrong"


@pytest.mark.parametrize("below", ["", "/below"])
def test_doctor_warns_of_a_cache_that_cannot_be(kreg, monkeypatch, below):
    monkeypatch.setenv("REGISTRY_CACHE", f"/dev/null{below}")
    code, out, _ = kreg("doctor")
    assert code == OK
    assert "no cache /dev/null is no folder: nothing that is measured can be kept; REGISTRY_CACHE" in squeezed(out)
    monkeypatch.delenv("REGISTRY_CACHE")
    assert json.loads(kreg("doctor", "--json")[1])["unusable"] == []


def test_doctor_warns_of_variants_that_no_call_can_reach(kreg, declare):
    declare("test.unreached", dtypes=(), toolchain={"torch": ">=3,<2"})
    code, out, _ = kreg("doctor")
    report = json.loads(kreg("doctor", "--json")[1])
    why = "dtypes: none is claimed, and every call has a dtype; toolchain: no version of torch is >=3,<2"
    assert f"never runs test.unreached of registry.register: {why}" in squeezed(out)
    assert f"{len(report['tables']['findings']) + 1} warnings" in out
    (one,) = report["plugins"]["never_run"]
    assert code == OK and (one["variant"], one["why"]) == ("test.unreached", why)


def test_doctor_shows_what_is_wrong(kreg, monkeypatch):
    broken = catalog.get().with_failure("acme (acme_kernels)", ImportError("no module named tilelang"))
    monkeypatch.setattr(catalog, "_catalog", broken)
    monkeypatch.setenv("REGISTRY_SOMETHING", "of mine")
    problem = registry.attention.problem_type.of_shape(Target.named("H100"), **ATTENTION)
    quarantine.add("torch_flash", problem, RuntimeError("ptxas gave up"))
    code, out, _ = kreg("doctor")
    assert code == FINDING
    shown = squeezed(out)
    assert "FAILED acme (acme_kernels): ImportError: no module named tilelang" in shown
    assert "torch_flash for" in shown and "ptxas gave up" in shown
    assert "REGISTRY_SOMETHING=of mine" in shown
    assert "wrong: " in shown and "nothing is broken" not in shown
    assert max(map(len, out.splitlines())) <= 80
    _, out, _ = kreg("explain", "attention", "--device", "cpu")
    assert "plugin acme (acme_kernels) failed" in squeezed(out), "explain shows failed plugins, too"


def test_doctor_survives_a_broken_table(kreg, tmp_path, monkeypatch):
    (tmp_path / "bad.yaml").write_text(MALFORMED)
    with monkeypatch.context() as patch:
        patch.setenv("REGISTRY_TABLES", str(tmp_path))
        patch.setattr(in_force, "_loaded", False)
        code, out, _ = kreg("doctor", "--json")
    registry.reload_tables()
    assert code == FINDING and "bad.yaml:3" in json.loads(out)["tables"]["broken"][0]


def test_doctor_tells_once_what_many_rows_share(kreg, monkeypatch):
    from registry import doctor
    from registry.tables.lint import LintFinding

    stale = [
        LintFinding("warning", "attention.sm90.yaml", line, "$", "stale-evidence", "measured long ago")
        for line in (4, 9)
    ]
    monkeypatch.setattr(doctor, "lint_tables", lambda tables: stale)
    code, out, _ = kreg("doctor")
    assert "attention.sm90.yaml:4: measured long ago (and 1 more rows)" in squeezed(out)
    assert code == OK, "what is old is no finding"


# --- tables and schema --------------------------------------------------------------------------------------------


@pytest.mark.slow(15)
def test_lint_of_the_tables_in_force_finds_no_error(kreg):
    code, out, _ = kreg("tables", "lint", "--json")
    assert code == OK, out


@pytest.mark.parametrize(
    ("text", "severity", "strict_code"), [(MALFORMED, "error", 1), (UNKNOWN_VARIANT, "warning", 1)]
)
def test_lint_of_a_file(kreg, tmp_path, text, severity, strict_code):
    path = tmp_path / "attention.sm90.yaml"
    path.write_text(text)
    code, out, _ = kreg("tables", "lint", str(path), "--json")
    findings = json.loads(out)["findings"]
    assert code == (FINDING if severity == "error" else OK)
    assert severity in [finding["severity"] for finding in findings]
    assert all(finding["file"] == str(path) and finding["line"] for finding in findings)
    assert kreg("tables", "lint", str(tmp_path), "--strict")[0] == FINDING


def test_lint_says_where_a_file_is_named_after_another_op(kreg, tmp_path):
    path = tmp_path / "matmul.any.yaml"
    path.write_text("op: attention\narch: any\nrules:\n- use: [torch_cpu]\n")
    code, out, _ = kreg("tables", "lint", str(path), "--json")
    (finding,) = json.loads(out)["findings"]
    assert (code, finding["severity"], finding["code"]) == (OK, "warning", "misnamed-file")


def test_lint_of_a_shipped_file_by_its_path_holds_it_against_raw_results(kreg, monkeypatch):
    from registry.tuning import evidence

    monkeypatch.setattr(evidence, "verify", lambda table, folder: [f"{table.op} was not measured so"])
    folder = Path(__file__).parents[2] / "dispatch_tables"
    code, out, _ = kreg("tables", "lint", str(folder / "attention_varlen_backward.any.yaml"))
    assert code == FINDING and "attention_varlen_backward was not measured so" in squeezed(out)


def test_lint_of_a_file_that_is_not_there(kreg, tmp_path):
    code, out, _ = kreg("tables", "lint", str(tmp_path / "none.yaml"))
    assert code == FINDING and "no such file" in squeezed(out)


@pytest.mark.parametrize(("kind", "key"), [("table", "rules"), ("errata", "errata")])
def test_schema_prints_json_schema(kreg, kind, key):
    code, out, _ = kreg("schema", kind)
    assert code == OK
    assert key in out and json.loads(out)["$schema"].startswith("http://json-schema.org/draft-07")


def test_schema_files_are_written_and_checked(kreg, tmp_path):
    assert kreg("schema", "--check", str(tmp_path))[0] == FINDING
    code, out, _ = kreg("schema", "--write", str(tmp_path), "--json")
    assert code == OK and len(json.loads(out)["written"]) == 2
    assert kreg("schema", "--check", str(tmp_path))[0] == OK
    (tmp_path / "table.schema.json").write_text("{}")
    code, out, _ = kreg("schema", "--check", str(tmp_path), "--json")
    assert code == FINDING and json.loads(out)["stale"] == ["table.schema.json"]


# --- help ---------------------------------------------------------------------------------------------------------


def test_help_and_version_are_fine(kreg):
    assert kreg("--help")[0] == OK
    assert kreg("explain", "attention", "--help")[0] == OK
    code, out, _ = kreg("--version")
    assert code == OK and registry.version.__version__ in out
