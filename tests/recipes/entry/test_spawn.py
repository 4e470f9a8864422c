"""`spawn_ranks` with small programs instead of ranks: exit codes, the failure that is named, signals, nothing left."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from started import living, marked
from support import ROOT

from recipes.config.resolved import ResolvedRun
from recipes.entry import spawn
from recipes.entry.spawn import ProcessExit, spawn_ranks
from recipes.runtime import signals
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.world import Ranks

# Reads its own program from the composed run, as a rank reads its config. It has these names: rank, folder, fail,
# mark (creates a file that shows where it is), wait_for (another rank's mark) and wait_forever.
FAKE_RANK = """
import json, os, signal, sys, time
from pathlib import Path

rank = int(os.environ["RANK"])
composed = json.loads(Path(os.environ["RECIPES_RANK_FILE"]).read_text())
folder = Path(composed["run_folder"])

def fail(exit_code, report, *, seconds=0.0, caused_by_peer=False):
    from recipes.runtime.failure import Failure, write_failure

    failure = Failure(exit_code=exit_code, message=report, report=report, time=1e9 + seconds,
        caused_by_peer=caused_by_peer)
    write_failure(failure, Path(os.environ["TORCHELASTIC_ERROR_FILE"]))

def mark(name):
    (folder / f"{name}_{rank}").touch()

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.005)

def wait_forever():
    while True:
        time.sleep(0.01)

exec(composed["config"]["programs"][rank])
"""
Spawn = Callable[..., ProcessExit]


@pytest.fixture
def no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if a process that a test started outlives it."""
    name = f"spawn_{time.time_ns()}"
    for variable, value in marked(name).items():
        monkeypatch.setenv(variable, value)
    yield
    ends = time.monotonic() + 5  # a rank that has just written its last mark is still exiting
    while (left := living(name)) and time.monotonic() < ends:
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Keep pytest alive if `spawn_ranks` does not handle a signal."""
    handlers = {number: signal.signal(number, lambda *_: None) for number in signals.SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_process_is_left: None,
    default_signals: None,
) -> Spawn:
    """Return a function that spawns one fake rank per program, with waits short enough for a test."""
    script = tmp_path / "fake_rank.py"
    script.write_text(FAKE_RANK)
    monkeypatch.setattr(spawn, "_RANK_COMMAND", (sys.executable, "-PS", str(script)))
    monkeypatch.setattr(spawn, "_FAILURE_GRACE_SECONDS", 0.5)
    monkeypatch.setattr(spawn, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(signals, "_SAME_REQUEST_SECONDS", 0.05)

    def run_programs(*programs: str) -> ProcessExit:
        config = {"programs": [textwrap.dedent(program) for program in programs]}
        composed = ResolvedRun(config=config, choices={}, run_folder=tmp_path, overrides=[])
        ranks = Ranks(per_node=len(programs), num_nodes=1, started_by=None)
        try:
            return spawn_ranks(composed, ranks)
        except (KeyboardInterrupt, signals.SecondSignalError) as error:
            pytest.fail(f"{error!r} was not handled")

    return run_programs


def when(condition: Callable[[], bool], *actions: Callable[[], Any]) -> threading.Thread:
    """Start a thread that waits for a condition, then acts, 0.1 s apart: longer than signals count as one request."""

    def wait_and_act() -> None:
        deadline = time.monotonic() + 10
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.005)
        for action in actions:
            action()
            time.sleep(0.1)

    thread = threading.Thread(target=wait_and_act, daemon=True)
    thread.start()
    return thread


def all_marked(folder: Path, name: str, num_ranks: int = 2) -> Callable[[], bool]:
    return lambda: all((folder / f"{name}_{rank}").exists() for rank in range(num_ranks))


def send(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


# --- what each rank gets


def test_every_rank_has_its_rank_and_the_same_rendezvous(
    run: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    monkeypatch.setattr(spawn, "num_cores", lambda: 12)
    write = """
    seen = {**os.environ, "group": os.getpgid(0) == os.getpid(), "overrides": composed["overrides"]}
    (folder / f"seen_{rank}.json").write_text(json.dumps(seen))
    """
    assert run(write, write, write) == ProcessExit(exit_code=0)
    seen = [json.loads((tmp_path / f"seen_{rank}.json").read_text()) for rank in range(3)]
    for name in ("RANK", "LOCAL_RANK"):
        assert [environ[name] for environ in seen] == ["0", "1", "2"]
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        assert [environ[name] for environ in seen] == ["3", "3", "3"]
    assert {environ["NODE_RANK"] for environ in seen} == {"0"}
    assert {environ["MASTER_ADDR"] for environ in seen} == {"127.0.0.1"}
    [port] = {environ["MASTER_PORT"] for environ in seen}
    assert 0 < int(port) < 65536
    assert len({environ["TORCHELASTIC_ERROR_FILE"] for environ in seen}) == 3
    [composed_file] = {environ["RECIPES_RANK_FILE"] for environ in seen}
    assert not Path(composed_file).exists(), "the folder of a run's ranks is temporary"
    assert {environ["OMP_NUM_THREADS"] for environ in seen} == {"4"}, "a third of the cores"
    assert {environ["PYTHONPATH"] for environ in seen} == {f"{ROOT}{os.pathsep}/of/the/user"}
    assert all(environ["group"] for environ in seen), "each leads a process group of its own"


def test_a_number_of_threads_set_by_the_user_is_kept(
    run: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    run("(folder / 'threads').write_text(os.environ['OMP_NUM_THREADS'])")
    assert (tmp_path / "threads").read_text() == "7"


def test_only_rank_0_prints_to_the_console(run: Spawn, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("print('hello')", "print('silent')") == ProcessExit(exit_code=0)
    assert capfd.readouterr().out == "hello\n"


# --- which failure is reported


def test_the_failure_that_came_first_is_reported(run: Spawn) -> None:
    result = run(
        "wait_for('failed_1'); fail(1, 'the later one', seconds=2); mark('failed'); sys.exit(1)",
        "fail(1, 'the first one', seconds=1); mark('failed'); wait_for('failed_0'); sys.exit(1)",
    )
    assert result == ProcessExit(exit_code=ExitCode.CRASHED, report="rank 1 of 2 failed:\nthe first one", crashed=True)


def test_ranks_that_lost_a_peer_are_not_reported_even_if_they_failed_before_it(run: Spawn) -> None:
    lost = "fail(1, 'connection closed by peer', seconds=1, caused_by_peer=True); mark('lost'); sys.exit(1)"
    result = run(
        lost,
        "wait_for('lost_0'); wait_for('lost_2'); time.sleep(0.2); fail(1, 'the cause', seconds=3); sys.exit(1)",
        lost,
    )
    assert result.report == "rank 1 of 3 failed:\nthe cause"


def test_if_all_ranks_have_only_lost_a_peer_one_of_them_is_reported(
    run: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawn, "_CAUSE_SECONDS", 0.1)
    lost = "fail(1, f'lost by {rank}', seconds=rank, caused_by_peer=True); sys.exit(1)"
    assert run(lost, lost).report == "rank 0 of 2 failed:\nlost by 0"


def test_a_rank_killed_by_a_signal_is_named_with_the_last_lines_that_it_printed(
    run: Spawn,
) -> None:
    killed = """
    for line in range(30):
        print("line", line, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    result = run("wait_forever()", killed)
    assert (result.exit_code, result.crashed) == (ExitCode.CRASHED, True)
    assert result.report is not None
    assert result.report.splitlines() == [
        "rank 1 of 2 was killed by SIGKILL:",
        *(f"line {line}" for line in range(10, 30)),
    ]


def test_a_rank_that_exits_without_a_report_is_named_with_its_exit_code(run: Spawn) -> None:
    assert run("sys.exit(9)", "wait_forever()").report == "rank 0 of 2 ended with exit code 9"


def test_the_stack_of_a_segmentation_fault_is_reported_without_the_list_of_modules(
    run: Spawn,
) -> None:
    crash = """
    stack = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).with_suffix(".stack")
    stack.write_text("Fatal Python error: Segmentation fault\\n  in step\\n\\nExtension modules: numpy")
    os.kill(os.getpid(), signal.SIGSEGV)
    """
    assert run("wait_forever()", crash).report == (
        "rank 1 of 2 was killed by SIGSEGV:\nFatal Python error: Segmentation fault\n  in step\n"
    )


# --- exit codes that pass through


@pytest.mark.parametrize("code", [2, 3, 71, 74, 75, 130, 143])
def test_an_exit_code_that_the_ranks_have_explained_is_that_of_the_run(run: Spawn, code: int) -> None:
    result = run(f"sys.exit({code})", f"time.sleep(0.1); mark('ended'); sys.exit({code})")
    assert result == ProcessExit(exit_code=code), "no report: the ranks have printed theirs"


def test_a_rank_with_such_a_code_leaves_the_others_time_to_end_with_theirs(run: Spawn, tmp_path: Path) -> None:
    slow = "time.sleep(0.3); mark('saved'); sys.exit(75)"
    assert run("sys.exit(75)", slow) == ProcessExit(exit_code=ExitCode.PREEMPTED)
    assert (tmp_path / "saved_1").exists()


def test_a_report_in_an_error_file_is_passed_on_with_its_code(run: Spawn) -> None:
    result = run(
        "fail(1, 'connection reset', caused_by_peer=True); sys.exit(1)",
        "fail(71, 'Out of memory: type this', seconds=1); sys.exit(71)",
    )
    assert result == ProcessExit(exit_code=71, report="Out of memory: type this")


def test_a_mistake_that_every_rank_finds_is_reported_once(run: Spawn) -> None:
    mistake = "fail(2, 'The config has 1 mistake'); sys.exit(2)"
    assert run(mistake, mistake) == ProcessExit(exit_code=2, report="The config has 1 mistake")


# --- no process is left


@pytest.mark.parametrize(
    "other",
    [
        "wait_forever()",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); mark('ready'); wait_forever()",
    ],
    ids=["ends at SIGTERM", "ignores SIGTERM"],
)
def test_ranks_that_still_run_are_ended(run: Spawn, other: str) -> None:
    wait = "wait_for('ready_0');" if "ready" in other else ""
    began = time.monotonic()
    result = run(other, f"{wait} fail(1, 'the disk is gone'); sys.exit(1)")
    assert result.report == "rank 1 of 2 failed:\nthe disk is gone"
    assert time.monotonic() - began < 3


def test_a_rank_that_hangs_after_its_error_is_killed_with_what_it_has_started(run: Spawn) -> None:
    hang = """
    import subprocess
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    fail(1, "the engine is dead")
    wait_forever()
    """
    assert run("wait_forever()", hang).report == "rank 1 of 2 failed:\nthe engine is dead"


# --- Ctrl-C and signals

PREEMPTIBLE = """
mark("ready")
number = os.read(0, 1)[0]
(folder / f"received_{rank}").write_text(signal.Signals(number).name)
sys.exit(75)
"""
STUBBORN = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
mark("ready")
wait_forever()
"""


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_a_signal_is_forwarded_to_every_rank_which_may_save_before_it_ends(
    run: Spawn, tmp_path: Path, number: signal.Signals
) -> None:
    when(all_marked(tmp_path, "ready"), send(number))
    assert run(PREEMPTIBLE, PREEMPTIBLE) == ProcessExit(exit_code=ExitCode.PREEMPTED)
    received = [(tmp_path / f"received_{rank}").read_text() for rank in range(2)]
    assert received == [number.name] * 2


@pytest.mark.parametrize(
    ("second", "exit_code", "report"),
    [
        (signal.SIGTERM, ExitCode.TERMINATED, "Terminated by a second signal"),
        (signal.SIGINT, ExitCode.INTERRUPTED, "Interrupted by a second Ctrl-C"),
    ],
)
def test_a_second_signal_ends_the_ranks_at_once(
    run: Spawn, tmp_path: Path, second: signal.Signals, exit_code: int, report: str
) -> None:
    when(all_marked(tmp_path, "ready"), send(signal.SIGUSR1), send(second))
    assert run(STUBBORN, STUBBORN) == ProcessExit(exit_code=exit_code, report=report)


def test_a_signal_that_comes_while_ranks_are_started_reaches_all_of_them(
    run: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = spawn._start

    def start_and_signal(rank: int, *args: Any) -> Any:
        process = start(rank, *args)
        if rank == 0:
            send(signal.SIGTERM)()
        return process

    monkeypatch.setattr(spawn, "_start", start_and_signal)
    assert run(PREEMPTIBLE, PREEMPTIBLE) == ProcessExit(exit_code=ExitCode.PREEMPTED)
    assert [(tmp_path / f"received_{rank}").read_text() for rank in range(2)] == ["SIGTERM"] * 2


def test_a_rank_starts_with_the_signals_blocked_until_it_listens(run: Spawn, tmp_path: Path) -> None:
    run("(folder / 'mask').write_text(str(signal.pthread_sigmask(signal.SIG_BLOCK, [])))")
    mask = (tmp_path / "mask").read_text()
    assert all(number.name in mask for number in signals.SIGNALS)
    assert not set(signals.SIGNALS) & signal.pthread_sigmask(signal.SIG_BLOCK, []), (
        "this process has them unblocked again"
    )


def test_a_dead_parent_closes_the_standard_input_of_its_ranks(run: Spawn, tmp_path: Path) -> None:
    """What `die_with_parent` waits for: the pipe has no other writer, such as the next rank."""
    killed_parent = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}]
import os, signal, threading, time
from pathlib import Path
from recipes.config.resolved import ResolvedRun
from recipes.entry import spawn
from recipes.runtime.world import Ranks

folder = Path({str(tmp_path)!r})
spawn._RANK_COMMAND = (sys.executable, "-PS", str(folder / "fake_rank.py"))
program = "mark('ready'); os.read(0, 1); mark('closed')"
composed = ResolvedRun(config={{"programs": [program] * 2}}, choices={{}}, run_folder=folder, overrides=[])

def kill_when_ready():
    while not all((folder / f"ready_{{rank}}").exists() for rank in range(2)):
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=kill_when_ready, daemon=True).start()
spawn.spawn_ranks(composed, Ranks(per_node=2, num_nodes=1, started_by=None))
"""
    parent = subprocess.run([sys.executable, "-c", killed_parent], check=False, timeout=30)
    assert parent.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while not all_marked(tmp_path, "closed")() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all_marked(tmp_path, "closed")()
