"""A check in a subprocess of its own: what it leaves, how it fails, and when it is left out."""

import os
import sys
import time
from pathlib import Path

import pytest
from gpu_checks import isolate
from gpu_checks.check import Check, Settings
from gpu_checks.isolate import ROOT, hide_paths, run_checks

PASSES = """
from pathlib import Path
(Path(FOLDER) / "outcome.json").write_text('{"verdict": "pass", "headline": "fine", "figures": {"a": 1}}')
"""


def _run(folder: Path, scripts: dict[str, str], *, limit_seconds: float = 60.0, total_seconds: float = 600.0):
    settings = Settings(accelerator="gpu", is_tiny=True, num_gpus=1, memory_gib=None, folder=folder)
    checks = [Check(name=name, passes_if="", function="", limit_seconds=limit_seconds) for name in scripts]

    def command(check: Check, settings: Settings) -> list[str]:
        return [sys.executable, "-c", f"FOLDER = {str(settings.folder)!r}\n{scripts[check.name]}"]

    return {
        check.name: outcome
        for check, outcome in run_checks(checks, settings, total_seconds=total_seconds, command=command)
    }


def test_a_failure_is_recorded_with_its_last_lines_and_the_next_check_runs(tmp_path: Path) -> None:
    scripts = {
        "raises": f"print('first')\nraise OSError({str(ROOT / 'train.py')!r})",
        "dies": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "writes, then nothing": "print('forgot')",
        "passes": PASSES,
    }
    found = _run(tmp_path, scripts)
    assert [outcome.verdict for outcome in found.values()] == ["fail", "fail", "fail", "pass"]
    assert found["raises"].note.startswith("exit code 1; its last lines: first\nTraceback")
    assert found["raises"].note.endswith("OSError: ./train.py"), "results are published: no path of this machine"
    assert found["dies"].note.startswith("SIGKILL;")
    assert found["writes, then nothing"].note == "exit code 0; its last lines: forgot"
    assert (found["passes"].headline, found["passes"].figures) == ("fine", {"a": 1})
    assert found["passes"].seconds > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dies", "raises", "writes_then_nothing"]


def test_a_check_that_hangs_is_killed_with_all_it_has_started(tmp_path: Path) -> None:
    script = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
    began = time.monotonic()
    found = _run(tmp_path, {"hangs": script}, limit_seconds=2.0)["hangs"]
    assert time.monotonic() - began < 60
    assert found.verdict == "fail"
    assert found.note.startswith("ended after its 2 s; its last lines: ")
    child = int(found.note.split()[-1])
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "State:\tZ" in Path(f"/proc/{child}/status").read_text():
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        pytest.fail("what the check had started was still running")


def test_what_does_not_fit_into_the_time_of_all_is_left_out_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolate, "_LEAST_SECONDS", 0.5)
    found = _run(tmp_path, {"long": "import time; time.sleep(600)", "next": PASSES}, total_seconds=1.0)
    assert [outcome.verdict for outcome in found.values()] == ["skipped", "skipped"]
    assert found["long"].note == "left out: ended after 1 s, when the 1 s of all were used up"
    assert found["next"].note == "left out: the 1 s of all checks are used up"


def test_paths_of_this_machine_are_hidden() -> None:
    text = hide_paths(f"{ROOT}/a.py {sys.prefix}/b.py /scratch/c {Path.home()}/d", Path("/scratch"))
    assert text == "./a.py <environment>/b.py <folder>/c ~/d"
