"""What the processes of a test session share: answers found once, and a Python that has imported torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import forked
import pytest
import shared


def test_a_question_is_answered_once(tmp_path, monkeypatch):
    monkeypatch.setenv(shared.FOLDER, str(tmp_path))
    asked = []

    def answer():
        asked.append(1)
        return b"42" * 999

    assert shared.once("what is it?", answer) == shared.once("what is it?", answer) == b"42" * 999
    assert len(asked) == 1
    assert shared.once("and this?", lambda: b"other") == b"other"
    monkeypatch.delenv(shared.FOLDER)
    assert shared.once("what is it?", answer) and len(asked) == 2, "a script is no session"


def test_a_session_knows_nothing_of_what_its_user_has_tuned():
    environment = {"REGISTRY_TABLES": "mine", "REGISTRY_CACHE": "mine"}
    end = shared.begin(environment)
    try:
        found = {name: value for name, value in environment.items() if name.startswith("REGISTRY_")}
        assert found == {"REGISTRY_CACHE": os.path.join(environment[shared.FOLDER], "registry")}
        assert os.environ["REGISTRY_CACHE"] == os.path.join(os.environ[shared.FOLDER], "registry"), "so is this one"
    finally:
        end()


# --- forked.py ------------------------------------------------------------------------------------------------------

pytestmark = [
    pytest.mark.usefixtures("quick_python"),
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="copies are made on Linux alone"),
]
SAYS = """
import json, os, sys
loaded = sorted({"torch", "registry"} & {*sys.modules})
print(json.dumps([__name__, sys.argv, sys.path[:2], os.getcwd(), os.environ.get("MINE"), loaded]))
sys.exit(3)
"""


def test_a_copy_is_what_a_python_of_its_own_would_be(tmp_path):
    """But for torch, which is there already; nothing of ours is."""
    (tmp_path / "says.py").write_text(SAYS)
    environment = {**os.environ, "MINE": "1", "PYTHONPATH": str(tmp_path)}
    for form in (["-c", SAYS], ["-m", "says"], [str(tmp_path / "says.py")]):
        answers = []
        for python in (sys.executable, forked.REAL):
            command = [python, *form, "an", "argument"]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (3, "")
            answers.append(json.loads(done.stdout))
        assert answers[0][-1] == ["torch"] and answers[1][-1] == []
        assert answers[0][:-1] == answers[1][:-1]


def test_failures_and_open_files_are_those_of_a_process():
    reading, writing = os.pipe()
    ends = f"import os; os.write({writing}, b'here'); 1/0"
    done = subprocess.run([sys.executable, "-c", ends], capture_output=True, text=True, pass_fds=[writing], check=False)
    os.close(writing)
    assert os.read(reading, 9) == b"here" and os.read(reading, 9) == b"", "closed where the copy ends"
    os.close(reading)
    assert done.returncode == 1 and done.stderr.endswith("ZeroDivisionError: division by zero\n")
    killed = subprocess.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], check=False)
    assert killed.returncode == -9


def test_what_ends_the_executable_ends_the_copy_and_what_it_started():
    sleeps = "import os, subprocess, time; print(os.getpid(), subprocess.Popen(['sleep', '99']).pid, flush=True)"
    with subprocess.Popen([sys.executable, "-c", f"{sleeps}; time.sleep(99)"], stdout=subprocess.PIPE) as one:
        pids = [int(pid) for pid in one.stdout.readline().split()]
        one.kill()
    until = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") and "Z" not in state(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}") and "Z" not in state(pid)]


def state(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_without_a_session_or_a_way_to_reach_it_it_is_an_ordinary_python(tmp_path, monkeypatch):
    shim = tmp_path / "python"
    shim.write_text(forked.shim(str(tmp_path / "nobody")))
    shim.chmod(0o755)
    done = subprocess.run([shim, "-c", "import sys; print('torch' in sys.modules)"], capture_output=True, text=True)
    assert done.stdout == "False\n"
    assert subprocess.run([sys.executable, "-V"], capture_output=True).returncode == 0, "an option of Python's own"
    monkeypatch.delenv(shared.FOLDER)
    assert forked.python() == forked.REAL
