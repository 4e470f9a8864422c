"""Real signals to real runs: they save at once, and the same command resumes to the rows of an undisturbed run."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from signalled import computed, events, seconds_to_stop, stopped_step, summed_up
from started import Started
from support import ROOT, TINY

from recipes.runtime import signals

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
TWO_RANKS = ("strategy=fsdp", "trainer.devices=2", "micro_batch_size=2")
# 41 validation samples are 11 batches on one device, and from the signal on each takes 0.3 s: a run must not wait for
# these 2.4 s. It needs 0.25 s at most to agree on the step and milliseconds to save; the rest is for a busy machine
AT_ONCE_SECONDS = 1.5

Start = Callable[..., Started]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("preemption")


@pytest.fixture
def start(workplace: Path, text_folder: str) -> Iterator[Start]:
    """Return a function that starts runs with two micro-batches per step; what is left of them is killed."""
    started: list[Started] = []

    def start_run(
        name: str,
        *overrides: str,
        signals: Sequence[str] = (),
        launcher: Sequence[str] = (sys.executable,),
    ) -> Started:
        (workplace / name).mkdir(exist_ok=True)
        run = [*TINY, f"data.path={text_folder}", "trainer.accelerator=cpu", "trainer.max_steps=24"]
        run += ["warmup_steps=1", "save_every=6", "eval_every=8", "eval_samples=null"]
        run += [f"hydra.run.dir={name}", "resume=auto", "micro_batch_size=4"]
        run += ["+callbacks.signals._target_=signalled.SignalAt"]
        run += [f"+callbacks.signals.folder={name}"]
        run += [f"+callbacks.signals.signals=[{','.join(signals)}]", *overrides]
        command = [*launcher, str(ROOT / "train.py"), *run]
        started.append(Started(command, folder=workplace, paths=[ROOT / "tests"]))
        return started[-1]

    yield start_run
    for process in started:
        process.kill()


def assert_ends(run: Started, exit_code: int) -> str:
    output = run.end()
    assert run.process.returncode == exit_code, output
    assert "Traceback" not in output
    assert run.left() == []
    return output


@pytest.fixture
def undisturbed(start: Start, workplace: Path) -> Path:
    """Run two ranks that nothing stops, once for all tests."""
    folder = workplace / "undisturbed_ranks"
    if not (folder / "summary.json").exists():
        assert_ends(start(folder.name, *TWO_RANKS), 0)
    return folder


def has_validation(folder: Path, step: int) -> bool:
    [row] = [row for row in computed(folder) if row["step"] == str(step)]
    return bool(row.get("val/loss"))


def assert_equals(folder: Path, undisturbed: Path) -> None:
    assert computed(folder) == computed(undisturbed)
    assert summed_up(folder) == summed_up(undisturbed)


def test_a_run_stopped_in_a_step_in_a_validation_and_before_a_validation_gives_the_rows_of_one_never_stopped(
    start: Start, workplace: Path
) -> None:
    signals = ("window_3_SIGTERM_0", "validation_8_SIGUSR1_0", "step_16_SIGINT_0")
    folder = workplace / "alone"
    undisturbed = start("undisturbed_alone")

    output = assert_ends(start("alone", signals=signals), 75)
    assert stopped_step(folder, by="SIGTERM") == 4
    assert "Stopped by SIGTERM at step 4, saved" in output.splitlines()[-1]

    assert_ends(start("alone", signals=signals), 75)
    assert stopped_step(folder, by="SIGUSR1") == 8
    assert seconds_to_stop(folder, "validation_8_0") < AT_ONCE_SECONDS
    assert not has_validation(folder, 8)

    output = assert_ends(start("alone", signals=signals), 75)
    assert stopped_step(folder, by="SIGINT") == 16
    *_, pressed, ended = output.splitlines()
    assert pressed == "Ctrl-C: the step is finished and saved, then the run stops; Ctrl-C again ends it at once"
    resume = "resume=alone ++callbacks.signals._target_=signalled.SignalAt"  # of a class that no option names
    assert ended.startswith("Stopped by Ctrl-C at step 16, saved; to resume: PYTHONPATH=")
    assert ended.endswith(f" python train.py {resume}")
    assert has_validation(folder, 8)
    assert not has_validation(folder, 16)

    assert_ends(start("alone", signals=signals), 0)
    assert_ends(undisturbed, 0)
    assert_equals(folder, workplace / "undisturbed_alone")
    assert [event["step"] for event in events(folder, "resume")] == [4, 8, 16]


def test_a_step_saved_again_after_its_validation_resumes_with_the_same_dropout(start: Start, workplace: Path) -> None:
    overrides = ("model.dropout=0.2", "save_every=8", "eval_every=8")
    signals = ("validation_8_SIGTERM_0", "step_12_SIGKILL_0")
    folder = workplace / "dropout"
    undisturbed = start("undisturbed_dropout", *overrides)
    assert_ends(start("dropout", *overrides, signals=signals), 75)
    assert_ends(start("dropout", *overrides, signals=signals), -signal.SIGKILL)
    assert has_validation(folder, 8)
    assert_ends(start("dropout", *overrides, signals=signals), 0)
    assert_ends(undisturbed, 0)
    assert [event["step"] for event in events(folder, "resume")] == [8, 8]
    assert_equals(folder, workplace / "undisturbed_dropout")


def test_two_ranks_stop_after_the_same_step_whichever_is_signalled_and_resume_with_equal_rows(
    start: Start, workplace: Path, undisturbed: Path
) -> None:
    signals = ("batch_3_SIGTERM_all", "validation_8_SIGUSR1_1", "window_15_SIGINT_parent")
    folder = workplace / "ranks"

    # the parent and each rank at once, as SLURM does: one request
    assert_ends(start("ranks", *TWO_RANKS, signals=signals), 75)
    assert 4 <= stopped_step(folder, by="SIGTERM", num_ranks=2) < 8

    assert_ends(start("ranks", *TWO_RANKS, signals=signals), 75)
    assert stopped_step(folder, by="a signal to another rank", num_ranks=2) == 8
    assert seconds_to_stop(folder, "validation_8_1") < AT_ONCE_SECONDS
    assert not has_validation(folder, 8)

    assert_ends(start("ranks", *TWO_RANKS, signals=signals), 75)
    assert stopped_step(folder, by="SIGINT", num_ranks=2) == 16
    assert has_validation(folder, 8)
    assert not has_validation(folder, 16)

    assert_ends(start("ranks", *TWO_RANKS, signals=signals), 0)
    assert_equals(folder, undisturbed)


@pytest.mark.slow
@pytest.mark.fresh_python
def test_torchrun_forwards_its_signal_to_both_ranks_of_a_run_saved_by_time_and_the_same_command_resumes(
    start: Start, workplace: Path, undisturbed: Path
) -> None:
    # torchrun signals the whole process group, loader workers included
    overrides = (*TWO_RANKS, "trainer.devices=auto", "loader.num_workers=1")
    overrides += ("save_every=null", "save_every_minutes=0.02")
    overrides += ("+callbacks.signals.pause=0.08",)  # 16 steps take 2.5 s, in which the run is saved by time
    signals = ("batch_16_SIGTERM_parent",)
    folder = workplace / "torchrun"

    torchrun = start(folder.name, *overrides, signals=signals, launcher=TORCHRUN)
    output = torchrun.end()
    assert torchrun.process.returncode == 1, output  # torchrun's own
    assert torchrun.left() == []
    step = stopped_step(folder, by="SIGTERM", num_ranks=2)
    assert 17 <= step < 24
    saved = [event["step"] for event in events(folder, "checkpoint")]
    assert saved[-1] == step
    # at most one every 1.2 s and the one at the signal: no step of 0.15 s is saved for its number
    [began], [stopped] = events(folder, "start"), events(folder, "preempted")
    assert 2 <= len(saved) <= 1 + (stopped["time"] - began["time"]) / 1.2
    assert saved[0] < 16

    again = start(folder.name, *overrides, signals=signals, launcher=TORCHRUN)
    output = again.end()
    assert again.process.returncode == 0, output
    assert_equals(folder, undisturbed)


def test_a_second_signal_ends_a_long_step_and_a_run_that_saves_nothing_says_so(start: Start, workplace: Path) -> None:
    unsaved = start("unsaved", "save_every=null", signals=["step_3_SIGTERM_0"])
    again = start("again", signals=["step_3_SIGTERM_again"])
    interrupted = start("interrupted", "save_every=null", signals=["step_3_SIGINT_0"])
    output = assert_ends(unsaved, 143)
    assert output.splitlines()[-1] == "Stopped by SIGTERM at step 3; nothing was saved"
    assert events(workplace / "unsaved", "preempted")[-1]["saved"] is False
    assert not list((workplace / "unsaved").glob("checkpoints/*"))
    # SIGTERM twice at once, 1.2 s later SIGUSR1, in a step of a minute
    assert again.end() is not None
    assert again.process.returncode == 128 + signal.SIGUSR1
    assert assert_ends(interrupted, 130).splitlines()[-1] == "Stopped by Ctrl-C at step 3; nothing was saved"


# two micro-batches a step: after 6 the step is complete, after 7 it is not
@pytest.mark.parametrize(
    ("ranks", "num_batches", "seconds", "number", "exit_code", "line"),
    [
        # data that arrives in time completes the step
        ((), 7, 1, signal.SIGTERM, 75, "Stopped by SIGTERM at step 4, saved"),
        pytest.param(
            *(TWO_RANKS, 7, 1, signal.SIGTERM, 75, "Stopped by SIGTERM at step 4, saved"), marks=pytest.mark.slow
        ),
        ((), 6, 600, signal.SIGTERM, 75, "Stopped by SIGTERM at step 3, saved"),
        pytest.param(
            *((), 7, 600, signal.SIGTERM, 143, "Stopped by SIGTERM at step 3; nothing was saved"),
            marks=pytest.mark.slow,
        ),
        (
            TWO_RANKS,
            6,
            600,
            signal.SIGTERM,
            143,
            "Stopped by SIGTERM while waiting for the next batch of data, not",
        ),
        (
            TWO_RANKS,
            6,
            600,
            signal.SIGINT,
            130,
            "Stopped by Ctrl-C while waiting for the next batch of data, not",
        ),
    ],
)
def test_a_signal_ends_a_run_that_waits_for_data_after_saving_if_it_can(
    start: Start,
    workplace: Path,
    ranks: Sequence[str],
    num_batches: int,
    seconds: int,
    number: signal.Signals,
    exit_code: int,
    line: str,
) -> None:
    name = f"waits_{num_batches}_{seconds}_{len(ranks)}_{number.name}"
    no_data = [f"+callbacks.signals.no_data_after={num_batches}", f"+callbacks.signals.no_data_seconds={seconds}"]
    run = start(name, *ranks, *no_data)
    while not (workplace / name / "waits").exists() and run.process.poll() is None:
        time.sleep(0.01)
    run.process.send_signal(number)
    sent = time.monotonic()
    assert line in assert_ends(run, exit_code)
    # 2 s of waiting, 10 s of grace for the other rank; the rest is for a busy machine
    assert time.monotonic() - sent < 25
    if num_batches == 6 and exit_code == 75:
        assert_ends(start(name), 0)
        undisturbed = start(f"undisturbed_{name}")
        assert_ends(undisturbed, 0)
        assert_equals(workplace / name, workplace / f"undisturbed_{name}")


def test_a_signal_asks_for_a_stop_and_a_wait_is_given_up_only_after_its_limit() -> None:
    asked: list[float] = []

    def stop_waiting() -> None:
        raise signals.Preempted("SIGTERM", step=3, saved=True)

    with signals.listening():
        signals.set_handler(lambda: asked.append(time.monotonic()), stop_waiting=stop_waiting, wait_seconds=1.2)
        signals.mark_step()
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with signals.waiting("a slow batch", stops=True):
            time.sleep(0.4)
        assert len(asked) == 1
        began = time.monotonic()
        # longer after the first signal than what counts as one request: its own signal is no second one
        with pytest.raises(signals.Preempted), signals.waiting("a batch that never comes", stops=True):
            time.sleep(20)
        assert 1.2 <= time.monotonic() - began < 10
        assert len(asked) == 1


def test_a_wait_that_is_given_up_may_take_its_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that ended it is woken by its own signal, and must not end the process while frames are left."""
    ended: list[str] = []
    monkeypatch.setattr(signals, "_end", lambda line, exit_code: ended.append(line))

    def stop_waiting() -> None:
        raise signals.Preempted("SIGTERM", step=3, saved=True)

    def wait_and_leave_slowly() -> None:
        try:
            time.sleep(20)
        finally:
            time.sleep(0.5)

    with signals.listening():
        signals.set_handler(lambda: None, stop_waiting=stop_waiting, wait_seconds=0.2)
        signals.mark_step()
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(signals.Preempted), signals.waiting("a batch that never comes", stops=True):
            wait_and_leave_slowly()
    assert ended == []


WAITS = """
import hashlib, os, signal, sys, threading, time
from recipes.runtime import signals
from recipes.runtime.exit_codes import ExitCode

def compute(iterations):
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", iterations)

import logging
logging.basicConfig(level=logging.INFO, format="%(message)s")
case, seconds = sys.argv[1], float(sys.argv[2])
began = time.perf_counter()
compute(100_000)
per_second = 100_000 / (time.perf_counter() - began)  # of this processor
signals._START_SECONDS = signals._INTERRUPT_SECONDS = 0.3
number = signal.SIGINT if case.startswith("interrupt") else signal.SIGTERM
with signals.listening():
    if case != "interrupt_early":
        wait_seconds = 60 if case == "first_step" else 0.3
        signals.set_handler(lambda: None, wait_seconds=wait_seconds, announcement="it stops")
    threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
    if case == "interrupt_again":
        signals.mark_step()
    if case in ("interrupt_again", "interrupt_first_step"):
        threading.Timer(1.4, os.kill, (os.getpid(), number)).start()
    if case == "first_step":
        with signals.waiting("the next batch of data", stops=True):
            time.sleep(seconds)
    elif case == "end":
        signals.mark_step()
        with signals.waiting("the other ranks", exit_code=ExitCode.FINISHED, outcome="the run is finished"):
            time.sleep(seconds)
    else:  # one call that no handler interrupts, such as a backward pass
        try:
            compute(int(seconds * per_second))
        except KeyboardInterrupt:
            sys.exit(130)
        sys.exit(7)
"""


@pytest.mark.parametrize(
    ("case", "exit_code", "line"),
    [
        ("first_step", 75, "Stopped by SIGTERM before the first step; to start again: the same command"),
        ("end", 0, "Stopped by SIGTERM while waiting for the other ranks, the run is finished"),
        (
            "interrupt_first_step",
            130,
            "it stops\nStopped by Ctrl-C before the first step; to start again: the same command",
        ),
        ("interrupt_again", 130, "it stops\nInterrupted, not saved; to resume from the newest checkpoint: resume=auto"),
    ],
)
def test_a_process_that_cannot_react_ends_with_the_exit_code_of_what_it_had_done(
    case: str, exit_code: int, line: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WAITS, case, "30"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr.strip()) == (exit_code, line)


@pytest.mark.parametrize(("case", "exit_code", "line"), [("interrupt", 7, "it stops\n"), ("interrupt_early", 130, "")])
def test_one_ctrl_c_ends_no_long_operation_and_no_training_but_what_precedes_it(
    case: str, exit_code: int, line: str
) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", WAITS, case, "1.5"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (exit_code, line)
    assert time.monotonic() - began > 0.5  # the call was finished


def test_ctrl_c_in_a_program_that_goes_on_after_the_run_asks_once_and_then_raises() -> None:
    asked: list[float] = []
    with signals.listening(on_second="raise"):
        signals.set_handler(lambda: asked.append(time.monotonic()))
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # a terminal and a program between: one request
        assert len(asked) == 1
        time.sleep(0.3)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert len(asked) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("presses", "exit_code", "last_line"),
    [
        (["  3/24"], 75, "Stopped by Ctrl-C at step 4, saved; to resume: python train.py resume=typed_1"),
        (["  3/24", "Ctrl-C: "], 130, "Interrupted, not saved; to resume from the newest checkpoint: resume=auto"),
    ],
)
def test_ctrl_c_on_a_terminal_spares_the_loader_process_saves_and_the_second_one_ends_the_run(
    workplace: Path, text_folder: str, presses: Sequence[str], exit_code: int, last_line: str
) -> None:
    name = f"typed_{len(presses)}"
    run = [*TINY, f"data.path={text_folder}", "trainer.accelerator=cpu", "trainer.max_steps=24", "save_every=6"]
    run += [f"hydra.run.dir={name}", "loader.num_workers=1", "+callbacks.signals._target_=signalled.SignalAt"]
    run += [f"+callbacks.signals.folder={name}", "+callbacks.signals.signals=[]", "+callbacks.signals.pause=0.5"]
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(workplace)
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TERM": "xterm"}
        os.execve(sys.executable, [sys.executable, str(ROOT / "train.py"), *run], environ)
    shown, waits_for = "", [*presses]
    with contextlib.suppress(OSError):  # the other end is closed
        while chunk := os.read(terminal, 4096):
            shown += chunk.decode(errors="replace")
            if waits_for and waits_for[0] in shown:
                time.sleep(0.25)  # longer than what counts as one request
                os.write(terminal, b"\x03")
                waits_for.pop(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == exit_code, shown
    assert last_line in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is back"


@pytest.mark.fresh_python  # the imports are what is interrupted
def test_a_signal_before_training_ends_the_run(start: Start, workplace: Path) -> None:
    built = start("built", signals=["start_0_SIGTERM_0"])
    importing = start("importing")
    log = workplace / "importing" / "train.log"
    while not log.exists() and importing.process.poll() is None:
        time.sleep(0.01)
    time.sleep(0.3)  # of some two seconds of imports
    importing.process.send_signal(signal.SIGUSR1)
    signalled_at = time.monotonic()
    output = assert_ends(importing, 75)
    # the run ends without a save, the 24 steps or the remaining imports; the current import may finish
    assert time.monotonic() - signalled_at < 2
    assert output == "Stopped by SIGUSR1 before the first step; to start again: the same command\n"
    assert not (workplace / "importing" / "metrics.csv").exists()
    assert "before the first step" in assert_ends(built, 75)


@pytest.mark.fresh_python
@pytest.mark.parametrize("seconds", [0.0, 0.15, 0.5])
def test_a_signal_while_two_ranks_are_being_started_ends_them_as_preempted(
    start: Start, workplace: Path, seconds: float
) -> None:
    name = f"starting_{seconds}"
    run = start(name, *TWO_RANKS)
    while not (workplace / name / "train.log").exists() and run.process.poll() is None:
        time.sleep(0.01)
    time.sleep(seconds)
    run.process.send_signal(signal.SIGTERM)
    assert_ends(run, 75)
    assert not (workplace / name / "metrics.csv").exists()


def test_a_request_to_stop_is_over_with_the_run_that_it_stopped() -> None:
    with signals.listening():
        signals.set_handler(lambda: None)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.was_requested()
    assert not signals.was_requested()
