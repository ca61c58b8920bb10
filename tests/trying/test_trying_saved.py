"""What was tried out, saved as tables."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tried_out import picked, qkv

import registry
from registry import notices, trying
from registry.dispatch.contenders import contenders
from registry.dispatch.scope import EMPTY
from registry.ops.parts.cases import Case
from registry.tables import reader


@pytest.mark.usefixtures("three")
def test_saved_tables_pin_it_in_other_processes(tmp_path, put_in_force):
    with registry.try_out() as found:
        registry.attention(*qkv())
        registry.attention(*qkv(300))
    (path,) = found.save(tmp_path / "saved")
    found.forget()
    assert path.name == "attention.cpu.yaml" and picked() == "test.a"
    put_in_force(path.parent)
    assert picked() == picked(*qkv(300)) == "test.b"
    assert picked(*qkv(8, torch.float32)) == "test.b" and picked(*qkv(9)) != "test.b"


@pytest.mark.usefixtures("three")
def test_saving_again_adds_and_spares_what_others_wrote(tmp_path, put_in_force):
    for length in (64, 300, 64):
        with registry.try_out() as found:
            registry.attention(*qkv(length))
        (path,) = found.save(tmp_path / "saved")
        found.forget()
    assert path.read_text().count("- when:") == 2
    put_in_force(path.parent)
    assert picked(*qkv(64)) == picked(*qkv(300)) == "test.b"
    hand = "op: attention\narch: cpu\nrules:\n- use: [torch_math]  # by hand\n"
    damaged = [
        trying.SAVED + text for text in ("rules: [", "rules:\n", "rules: [abc]\n", "rules: [{when: {}}]\n", "5\n")
    ]
    for text in (hand, *damaged, b"\xff"):
        (path.write_bytes if isinstance(text, bytes) else path.write_text)(text)
        before = path.read_bytes()
        with pytest.raises(registry.InvalidArgument, match="folder: got .* try_out did not save"):
            found.save(path.parent)
        assert path.read_bytes() == before
    for folder in (5, None, "", path):
        with pytest.raises(registry.InvalidArgument, match="folder: got"):
            found.save(folder)


SAVER = """
import sys
import torch, registry
from registry.dispatch.tried import Took, TriedOut
from registry.trying import TryOuts
for turn in range(6):
    q = torch.empty(1, 2, 16 * int(sys.argv[1]) + turn, 64)
    problem, found = registry.attention.problem_of(q, q, q)[0], TryOuts()
    found.found.append(TriedOut(problem, (Took("torch_math", {}, 1.0),)))
    found.save(sys.argv[2])
"""


@pytest.mark.usefixtures("quick_python")
def test_processes_save_at_once_and_nothing_is_lost(tmp_path):
    """As the workers of one server do."""
    saving = [subprocess.Popen([sys.executable, "-c", SAVER, str(n), str(tmp_path)]) for n in range(1, 4)]
    assert [process.wait() for process in saving] == [0, 0, 0]
    assert (tmp_path / "attention.cpu.yaml").read_text().count("- when:") == 18


@pytest.mark.parametrize("op", ["attention", "attention_backward", "attention_varlen"])
def test_a_window_is_not_saved_for_tables_take_any_for_it(op, tmp_path, put_in_force):
    size = "sq=77,sk=77" if "varlen" in op else "s=77"
    found = trying.TryOuts()
    for text in (f"{size},causal,softcap=5.0", f"{size},causal,softcap=30.0", f"{size},causal,window=32:0"):
        problem = Case.parse(op, f"b=2,hq=4,d=64,{text}").problem(registry.Target.named("H200"))
        last = contenders(problem, EMPTY, 4)[-1]
        timed = trying.Took(last.variant.name, dict(last.config), 0.5)
        found.found.append(trying.TriedOut(problem, (timed,)))
    (path,) = found.save(tmp_path)
    assert path.read_text().count("- when:") == 2, "a softcap is a number in tables, too"
    (said,) = [text for text in notices.counts() if text.startswith("not saved")]
    assert "no table tells its window from others" in said and "window=(32, 0)" in said
    put_in_force(tmp_path)
    chosen = [registry.ops.known.op_named(op).explain(one.problem).because for one in found.found]
    assert [path.name in because for because in chosen] == [True, True, False]
    found.found = found.found[-1:]
    assert found.save(tmp_path / "no table") == [] and not (tmp_path / "no table").exists()


@pytest.mark.usefixtures("three")
def test_what_was_found_last_is_saved(tmp_path):
    with registry.try_out(3) as found:
        registry.attention(*qkv())
    first = found.found[0]
    found.found.append(trying.TriedOut(first.problem, first.timed[::-1]))
    (path,) = found.save(tmp_path / "saved")
    assert path.read_text().count("- when:") == 1 and path.read_text().index("test.a") < path.read_text().index(
        "test.b"
    )


def test_a_table_takes_what_it_may_hold_and_the_newest_stay(tmp_path, monkeypatch, put_in_force):
    """A larger one could be read by nobody, and was no place to save to."""
    found, limit = trying.TryOuts(), 6000
    monkeypatch.setattr(reader, "MAX_BYTES", limit)
    for length in range(1, 41):
        problem = registry.attention.problem_of(*qkv(length))[0]
        found.found.append(trying.TriedOut(problem, (trying.Took("torch_math", {}, 1.0),)))
        if not length % 20:
            (path,) = found.save(tmp_path)
            found.found.clear()
    held = path.read_text().count("- when:")
    assert limit - path.stat().st_size < path.stat().st_size / held
    assert [text.partition(":")[0] for text in notices.counts()] == ["not saved, for a table holds no more"] * 2
    put_in_force(tmp_path)
    chosen = [registry.attention.explain(*qkv(length)).variant == "torch_math" for length in (41 - held, 40 - held, 40)]
    assert chosen == [True, False, True]


@pytest.mark.usefixtures("three")
def test_a_folder_below_the_home_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with registry.try_out() as found:
        registry.attention(*qkv())
    assert found.save("~/tables") == [tmp_path / "tables" / "attention.cpu.yaml"]


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        ("attention", "b=2,hq=4,hkv=2,s=77,d=64,causal,softcap=30.0"),
        ("attention_backward", "b=2,hq=4,s=77,d=64,causal"),
        ("attention_varlen", "b=2,hq=4,hkv=2,sq=1,sk=77,d=64,kv=paged,page=16"),
        ("matmul", "m=33,n=77,k=99,layout=nt,bias,activation=gelu"),
        ("grouped_mm", "e=4,m=33,n=128,k=64"),
    ],
)
def test_tables_of_every_op_can_be_read_again(op, shape, tmp_path, put_in_force):
    problem = Case.parse(op, shape).problem(registry.Target.named("H200"))
    rivals = contenders(problem, EMPTY, 4)
    assert len(rivals) > 1 and rivals[0].variant.name == registry.ops.known.op_named(op).explain(problem).variant
    last = rivals[-1]
    found = trying.TryOuts()
    timed = trying.Took(last.variant.name, dict(last.config), 0.5)
    found.found.append(trying.TriedOut(problem, (timed,)))
    found.save(tmp_path)
    put_in_force(tmp_path)
    decision = registry.ops.known.op_named(op).explain(problem)
    assert (decision.variant, decision.config) == (last.variant.name, last.config)
