"""The user's own results: nothing lost to crashes, full disks, other processes; stale rows passed over one by one."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import tuning_rows
from tuning_rows import MACHINE, row

from registry.dispatch.catalog import catalog
from registry.dispatch.fingerprint import fingerprint_of
from registry.dispatch.staleness import other_versions, stale_code
from registry.tuning import journal, store

pytestmark = pytest.mark.usefixtures("quick_python", "cache")


def saved():
    (path,) = store.folder().glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_come_back_and_newer_ones_replace_older_ones():
    store.merge([row(ms=1.0), row("s=128", ms=2.0)])
    store.merge([row(ms=0.5)])
    loaded = store.load("attention", MACHINE)
    assert {r.case: r.ms for r in loaded.rows} == {"s=64": 0.5, "s=128": 2.0}
    assert not loaded.stale
    assert loaded.rows[0].machine == MACHINE


def test_what_a_failure_says_is_kept_and_is_nothing_elsewhere():
    failed = row("s=128", ms=None, failure="error", detail="ValueError: a plain mistake")
    store.merge([row(), failed])
    results = store.as_results(store.load("attention", MACHINE).rows, MACHINE)
    (entry,) = results.cases["s=128"].entries.values()
    assert entry.failure == {"why": "error", "detail": "ValueError: a plain mistake"}
    assert ["detail" in line for line in saved()] == [False, True], "versions before it read the others"
    assert [one.detail for one in store.rows_of(results) if one.failure] == [failed.detail]


@pytest.mark.parametrize("name", ["driver", "torch", "triton"])
def test_rows_of_other_versions_are_passed_over_one_by_one_and_kept(name):
    store.merge([row(), row("s=128", machine={**MACHINE, name: "0.1"})])
    loaded = store.load("attention", MACHINE)
    assert [r.case for r in loaded.rows] == ["s=64"]
    assert [str(s) for s in loaded.stale] == [f"torch_cpu on s=128: measured with {name} 0.1, here is {MACHINE[name]}"]
    assert len(saved()) == 2
    back = store.load("attention", {**MACHINE, name: "0.1"})
    assert [r.case for r in back.rows] == ["s=128"]


def test_rows_of_changed_or_absent_variants_are_passed_over():
    store.merge([row(), row("s=2", source="0" * 12), row("s=3", variant="gone.kernel")])
    why = {s.row.case: s.why for s in store.load("attention", MACHINE).stale}
    assert why == {
        "s=2": "the source of torch_cpu has changed since it was measured",
        "s=3": "gone.kernel is not installed",
    }


def test_a_device_has_its_own_file():
    store.merge([row(), row(machine={**MACHINE, "device": "Another GPU"})])
    assert sorted(p.name for p in store.folder().glob("*.jsonl")) == [
        "attention.another-gpu.jsonl",
        "attention.some-gpu-3000.jsonl",
    ]


def test_damaged_rows_are_named_and_do_not_hide_the_others():
    store.merge([row()])
    (path,) = store.folder().glob("*.jsonl")
    path.write_text('{"half a row\n' + path.read_text() + '{"op": 1}\n\xff\n')
    assert len(store.load("attention", MACHINE).rows) == 1
    assert len(store.damaged("attention", MACHINE["device"])) == 3


MERGER = """
import sys
sys.path.insert(0, {tests!r})
from tuning_rows import MACHINE
from registry.tuning import store
for turn in range(12):
    case = f"s={{sys.argv[1]}}{{turn:02}}"
    store.merge([store.Row("attention", case, {{}}, {{}}, 1.0, "torch_cpu", {{}}, True, "x", MACHINE, "events", 1.0)])
"""


def test_several_processes_merge_at_once_and_nothing_is_lost(cache):
    script = MERGER.format(tests=os.path.dirname(tuning_rows.__file__))
    running = [subprocess.Popen([sys.executable, "-c", script, str(n)]) for n in range(1, 4)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert len(saved()) == 36


def full_disk(monkeypatch, folder, named=""):
    """Lets writes of temporary files in one folder fail as on a full disk, of those that are named so."""
    real = os.fsync

    def fsync(file):
        path = os.readlink(f"/proc/self/fd/{file}")
        if path.startswith(str(folder)) and named in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file)

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_full_disk_loses_neither_old_nor_new_rows(cache, monkeypatch):
    store.merge([row(ms=1.0)])
    before = saved()
    with monkeypatch.context() as patch:
        full_disk(patch, cache)
        with pytest.raises(store.StoreError, match="No space left on device; the new rows are in") as caught:
            store.merge([row("s=128", ms=2.0)])
    assert saved() == before and not list(store.folder().glob("*.tmp")) and not list(store.folder().glob(".*.tmp"))
    rescued = str(caught.value).rpartition(" ")[2]
    with open(rescued) as file:
        assert [json.loads(line)["case"] for line in file] == ["s=128"]
    os.unlink(rescued)
    store.merge([row("s=128", ms=2.0)])
    assert len(saved()) == 2


def test_a_read_only_cache_says_so(cache, monkeypatch):
    real = os.open

    def refuse(path, *arguments, **more):
        if str(path).startswith(str(cache)):
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, *arguments, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(store.StoreError, match="Read-only file system; the new rows are in") as caught:
        store.merge([row()])
    os.unlink(str(caught.value).rpartition(" ")[2])
    with pytest.raises(store.StoreError, match="the table before it stays in force"):
        store.write_table("attention", "Some GPU", "op: attention\n", "{}")
    assert store.load("attention", MACHINE).rows == []


def test_tables_are_replaced_whole(cache, monkeypatch):
    path = store.write_table("attention", "Some GPU", "one\n", "{}")
    assert path == cache / "tables" / "attention.some-gpu.yaml" and path.read_text().startswith("one\n# With measured")
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    for fails in (".measured.json.", ".yaml."):
        with monkeypatch.context() as patch:
            full_disk(patch, cache, fails)
            with pytest.raises(store.StoreError, match="the table before it stays in force"):
                store.write_table("attention", "Some GPU", "two\n" * 1000, "{ }")
        assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before
    assert sorted(p.name for p in path.parent.iterdir()) == [
        ".attention.some-gpu.yaml.lock",
        "attention.some-gpu.measured.json",
        "attention.some-gpu.yaml",
    ]


def test_rows_become_results_that_the_fit_takes():
    from registry.tuning.evidence import picks_left_out
    from registry.tuning.fit import fit
    from registry.tuning.taking_part import Settings

    rows = [
        row("s=64", ms=1.0, spread=0.01),
        row("s=64", "torch_math", ms=2.0),
        row("s=64", "x.y", ms=None, failure="wrong"),
        row("s=128", ms=1.0),
        row("s=128", "torch_math", ms=2.0),
    ]
    results = store.as_results(rows, MACHINE)
    case, other = results.of("attention")
    assert {e.variant: e.ms for e in case.timed.values()} == {"torch_cpu": 1.0, "torch_math": 2.0}
    assert case.entries["x.y {}"].failure["why"] == "wrong"
    assert picks_left_out(fit([case, other], MACHINE, Settings()), Settings())[0][1].variant == "torch_cpu"


def test_versions_differ_by_their_public_part():
    assert not list(other_versions({"torch": "2.11.0+cpu", "driver": "1"}, {"torch": "2.11.0", "triton": "3.6.0"}))
    (why,) = other_versions({"torch": "2.11.0", "triton": "3.6.0"}, {"torch": "2.13.0", "triton": "3.6.0"})
    assert why == "measured with torch 2.11.0, here is 2.13.0"


def test_stale_rows_are_found_by_the_source_of_the_variant():
    known = catalog.get().variants
    assert stale_code("torch_cpu", fingerprint_of(known["torch_cpu"]), known) is None
    assert "changed" in stale_code("torch_cpu", "0" * 12, known)
    assert "not installed" in stale_code("gone.kernel", "0" * 12, known)


# --- the journal --------------------------------------------------------------------------------------------------


def write_case(file, fingerprint):
    about = {"case": "c", "op": "attention", "text": "s=1", "shape": {}, "facts": {}, "flops": 1.0}
    file.write("case", **about, contestants={"k": ["v", {}, True, fingerprint]})


def begun(path):
    with journal.Journal(path) as file:
        file.write("run", format=journal.FORMAT, machine=MACHINE, mode="events")
        write_case(file, "src")
        file.write("sample", case="c", key="k", round=0, ms=1.0)


def test_a_line_cut_off_by_a_crash_is_passed_over_and_the_next_begins_afresh(tmp_path):
    path = tmp_path / "r.jsonl"
    begun(path)
    with open(path, "a") as file:
        file.write('{"kind":"sample","case":"c","key":"k","rou')
    with journal.Journal(path) as file:
        file.write("sample", case="c", key="k", round=1, ms=3.0)
    results = journal.read(path)
    assert results.bad_lines == [4]
    (entry,) = results.cases["c"].entries.values()
    assert entry.ms == 2.0 and sorted(entry.samples) == [0, 1]


def test_a_full_disk_leaves_whole_lines_only(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    begun(path)
    before = path.read_bytes()
    real = os.write
    with journal.Journal(path) as file, monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda number, data: real(number, data[: len(data) // 2]))
        with pytest.raises(journal.ResultsError, match="No space left"):
            file.write("sample", case="c", key="k", round=1, ms=3.0)
    assert path.read_bytes() == before


def test_lines_that_make_no_sense_are_named(tmp_path):
    path = tmp_path / "r.jsonl"
    begun(path)
    with open(path, "a") as file:
        file.write('{"kind":"sample","case":"nowhere","key":"k","round":1}\n[1]\n')
    assert journal.read(path).bad_lines == [4, 5]


def test_measurements_of_changed_sources_begin_anew(tmp_path):
    path = tmp_path / "r.jsonl"
    begun(path)
    with journal.Journal(path) as file:
        file.write("failed", case="c", key="k", why="wrong")
        assert journal.read(path).cases["c"].entries["k"].failure
        write_case(file, "another")
    (entry,) = journal.read(path).cases["c"].entries.values()
    assert not entry.samples and entry.failure is None and entry.fingerprint == "another"


def test_a_source_hash_follows_the_source(tmp_path, monkeypatch):
    variants = catalog.get().variants
    assert fingerprint_of(variants["torch_cpu"]) == fingerprint_of(variants["torch_math"])  # one file
    assert fingerprint_of(variants["torch_cpu"]) != fingerprint_of(variants["torch_matmul"])
    folder = tmp_path / "acme_kernels"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .inner import run\n")
    (folder / "inner.py").write_text("def run(**_):\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import acme_kernels

    variant = replace(variants["torch_cpu"], name="acme.one", run=acme_kernels.run, origin="acme (acme_kernels)")
    before = fingerprint_of(variant)
    (folder / "inner.py").write_text("def run(**_):\n    return 2\n")
    assert len(before) == 12 and fingerprint_of(variant) != before


def test_a_source_hash_ignores_what_does_not_run(tmp_path, monkeypatch):
    """Comments, docstrings, notes after a constant and blank lines: a better explanation costs no measurement."""
    folder = tmp_path / "acme_notes"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    plain = 'LIMIT = "#1"\n\n\ndef run(**_):\n    text = """a\n    # b\n    """\n    return LIMIT + text\n'
    noted = (
        '"""What this is."""\n\nLIMIT = "#1"  # a limit\n"""Of what."""\n\n\n# -- the kernel\ndef run(**_):\n'
        '    """Runs\n    it."""\n\n    text = """a\n    # b\n    """\n    return LIMIT + text\n'
    )
    hashes = set()
    for source in (plain, noted, plain.replace("# b", "# c"), plain.replace("#1", "#2")):
        (folder / "kernel.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        import acme_notes.kernel

        variant = replace(catalog.get().variants["torch_cpu"], run=acme_notes.kernel.run, origin="acme (acme_notes)")
        hashes.add(fingerprint_of(variant))
        assert len(hashes) == (1 if source in (plain, noted) else len(hashes))
    assert len(hashes) == 3
