"""One process compiles at a time, and a build that was killed is noticed: real processes, torch's own lock."""

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support import ROOT
from torch.utils.file_baton import FileBaton

from recipes.strategy.deepspeed import compiled_op
from recipes.strategy.deepspeed.compiled_op import load_op

# as torch's `load`: compile and release, or wait for whoever compiles; a log of what each process did
BUILDER = """
import logging, os, sys, time
from pathlib import Path
from torch.utils.file_baton import FileBaton

class Builder:
    name = "toy"

    def __init__(self, folder, seconds):
        self.folder, self.seconds = Path(folder), float(seconds)

    def load(self):
        baton = FileBaton(str(self.folder / "lock"))
        if not baton.try_acquire():
            baton.wait()
        else:
            if not (self.folder / "toy.so").exists():
                (self.folder / "compiling").touch()
                time.sleep(self.seconds)
                (self.folder / "toy.so").write_text("compiled")
                with (self.folder / "compiled_by").open("a") as file:
                    file.write(f"{os.getpid()}\\n")
            baton.release()
        return (self.folder / "toy.so").read_text()
"""
PROCESS = (
    BUILDER
    + """
from recipes.strategy.deepspeed.compiled_op import load_op
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
print(load_op(Builder(*sys.argv[1:])))
"""
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the build folder of an operator named `toy`."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "toy").mkdir()
    return tmp_path / "toy"


def start(folder: Path, *, seconds: float) -> "subprocess.Popen[str]":
    # `-c`: a script written here again would be empty for a process that starts at that moment
    command = [sys.executable, "-c", PROCESS, str(folder), str(seconds)]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)


def make_builder(folder: Path, *, seconds: float = 0.0) -> object:
    names: dict[str, type] = {}
    exec(BUILDER, names)
    return names["Builder"](folder, seconds)


def wait_until(path: Path) -> None:
    ends = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_three_processes_compile_once_and_say_so(folder: Path) -> None:
    processes = [start(folder, seconds=0.5) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert [output.splitlines()[-1] for output in outputs] == ["compiled"] * 3
    [pid] = (folder / "compiled_by").read_text().split()
    compiling = [
        process.pid for process, output in zip(processes, outputs, strict=True) if "DeepSpeed compiles" in output
    ]
    assert compiling == [int(pid)]


def test_a_build_that_was_killed_is_compiled_again_at_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    killed = start(folder, seconds=60)
    wait_until(folder / "compiling")
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert (folder / "lock").exists(), "torch's lock outlives its holder"
    with caplog.at_level(logging.INFO, "lightning_recipes"):
        assert load_op(make_builder(folder)) == "compiled"
    assert f"process {killed.pid} on " in caplog.messages[0]
    assert f"was killed while it compiled toy: {folder / 'lock'} is removed" in caplog.messages[0]
    assert caplog.messages[1].startswith("DeepSpeed compiles toy, once for this environment")
    assert not (folder / "lock").exists()


def test_a_lock_that_no_process_holds_is_removed_in_the_end(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_op, "_UNHELD_SECONDS", 0.3)
    (folder / "lock").touch()  # of a program that took no lock of ours
    with caplog.at_level(logging.INFO, "lightning_recipes"):
        assert load_op(make_builder(folder)) == "compiled"
    assert caplog.messages[:2] == [
        f"Waiting for the program that compiles toy: it will remove {folder / 'lock'}",
        f"No process of this machine has held {folder / 'lock'} for 0 s: it is removed",
    ]


def test_a_program_that_is_compiling_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_op, "_UNHELD_SECONDS", 0.2)
    baton = FileBaton(str(folder / "lock"))
    assert baton.try_acquire()
    found = []
    thread = threading.Thread(target=lambda: found.append(load_op(make_builder(folder))))
    thread.start()
    thread.join(timeout=1.5)
    assert thread.is_alive(), "its holder lives"
    baton.release()
    thread.join(timeout=60)
    assert found == ["compiled"]


def test_without_file_locks_a_named_process_is_not_taken_for_dead(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_op, "_UNHELD_SECONDS", 0.3)

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(compiled_op.fcntl, "lockf", no_locks)
    (folder / "recipes.lock").write_text("process 1 on here")
    (folder / "lock").touch()
    assert load_op(make_builder(folder)) == "compiled"
    assert "is not locked: No locks available" in caplog.text
    assert "was killed" not in caplog.text


def test_a_failed_build_names_no_dead_process(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        name = "toy"

        def load(self) -> None:
            raise RuntimeError("Error building extension 'toy'")

    with pytest.raises(RuntimeError, match="Error building"):
        load_op(Broken())
    assert (folder / "recipes.lock").read_text() == ""
    assert load_op(make_builder(folder)) == "compiled"
    assert "killed" not in caplog.text
