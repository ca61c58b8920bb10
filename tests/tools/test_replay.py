"""`make replay` calls two trees equal where they decide alike, and names the problem and both decisions where not."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="replays a commit: needs a git checkout"),
    pytest.mark.usefixtures("quick_python"),
]


def replay(base, tree, *arguments):
    command = [sys.executable, ROOT / "tools" / "replay.py", base, "--tree", tree, "--quick", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """HEAD as a folder, but for results: the working tree may hold anything."""
    folder = tmp_path_factory.mktemp("head")
    archive = subprocess.run(
        ["git", "archive", "HEAD", ":!benchmarks/results"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    return folder


@pytest.mark.slow(10)
def test_another_ranking_is_named_with_both_decisions_and_all_else_is_as_it_was(head, tmp_path):
    changed = tmp_path / "changed"
    shutil.copytree(head, changed)
    (table,) = changed.rglob("matmul.any.yaml")
    text = table.read_text(encoding="utf-8")
    ranking = re.search(r"- use: \[(\w+), (\w+)\]", text)
    table.write_text(text.replace(ranking[0], f"- use: [{ranking[2]}, {ranking[1]}]"), encoding="utf-8")
    done = replay("HEAD", changed, "--only", "decisions", "--keep", tmp_path / "kept")
    assert done.returncode == 1, done.stdout + done.stderr
    compared, differing = re.search(r"^decisions +(\d+) +(\d+)", done.stdout, re.MULTILINE).groups()
    assert int(compared) > 300 and 0 < int(differing) < 100
    named = re.findall(r"^decisions: (\w+) .* @ \S+", done.stdout, re.MULTILINE)
    assert set(named) == {"matmul"}
    assert f"old: {ranking[1]} {{" in done.stdout and f"new: {ranking[2]} {{" in done.stdout
    assert (tmp_path / "kept" / "report.json").exists()


def test_an_unknown_commit_is_an_error_of_one_line(head):
    done = replay("no-such-commit", head)
    assert done.returncode == 1 and done.stderr.startswith("replay: git archive") and "Traceback" not in done.stderr
