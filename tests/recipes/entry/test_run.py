"""Several ranks as real processes: equal curves whatever starts them, one error when one fails, none left running."""

import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from started import Started
from support import ROOT, TINY, read_metrics

TRAIN = str(ROOT / "train.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
FAULT = """
import os, signal, time
from lightning.pytorch import Callback
from recipes.errors import ConfigError

class Fault(Callback):
    def __init__(self, kind):
        self.kind = kind

    def on_fit_start(self, trainer, *_):
        if self.kind == "mistake":
            raise ConfigError("model=odd", "it is odd", "model=even")

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step != 3:
            return
        if self.kind == "wait":
            open(f"at_step_3_{trainer.global_rank}", "w").close()
            while True:
                time.sleep(0.05)
        saved = trainer.default_root_dir + "/checkpoints/step_0000002.ckpt"
        while self.kind == "kill" and not os.path.exists(saved):
            time.sleep(0.05)
        if self.kind == "raise_while_busy" and trainer.global_rank == 0:
            time.sleep(3)  # torchrun ends this rank before it notices the lost peer
        if trainer.global_rank == 1 and self.kind.startswith("raise"):
            raise OSError("the disk is gone")
        if trainer.global_rank == 1 and self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
"""
# columns that differ from run to run
MEASURED = ("time/", "throughput/", "memory/")


Start = Callable[..., Started]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "fault.py").write_text(FAULT)
    return folder


@pytest.fixture
def start(workplace: Path, text_folder: str) -> Iterator[Start]:
    """Return a function that starts `train.py` by a launcher; what is left of it is killed after the test."""
    started: list[Started] = []

    def start_by(launcher: Sequence[str], *overrides: str, kind: str | None = None) -> Started:
        fault = ["+callbacks.fault._target_=fault.Fault", f"+callbacks.fault.kind={kind}"]
        run = [*TINY, f"data.path={text_folder}", "strategy=ddp", "trainer.max_steps=4"]
        run += ["trainer.accelerator=cpu", "warmup_steps=1", "save_every=2", "eval_every=4"]
        command = [*launcher, TRAIN, *run, *(fault if kind else []), *overrides]
        started.append(Started(command, folder=workplace, paths=[workplace, ROOT / "tests"]))
        return started[-1]

    yield start_by
    for process in started:
        process.kill()


def rows(folder: Path) -> list[dict[str, float]]:
    """Return the computed metrics of a run, to the last bit."""
    return [
        {name: value for name, value in row.items() if not name.startswith(MEASURED)} for row in read_metrics(folder)
    ]


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def at_step_3(workplace: Path, start: Start) -> Started:
    """Start a run and return it when both ranks wait after their third step."""
    marks = [workplace / f"at_step_3_{rank}" for rank in range(2)]
    for mark in marks:
        mark.unlink(missing_ok=True)
    folder = f"waits_{time.time_ns()}"
    run: Started = start([sys.executable], "trainer.devices=2", f"hydra.run.dir={folder}", kind="wait")
    assert wait_until(lambda: all(mark.exists() for mark in marks), 120)
    return run


def test_the_rows_are_equal_whether_train_py_or_torchrun_or_two_agents_start_the_ranks(
    start: Start, workplace: Path
) -> None:
    spawned = start([sys.executable], "trainer.devices=2", "hydra.run.dir=spawned")
    output = spawned.end()
    assert spawned.process.returncode == 0, output
    lines = output.splitlines()
    assert lines[0].startswith("starting 2 ranks: processes on the CPU, with ")
    assert lines[1].endswith("run folder spawned")
    assert lines[-1].startswith("Finished: 4 steps")
    assert (workplace / "spawned/train.log").read_text() == output, "one rank logs, and no noise"
    expected = rows(workplace / "spawned")
    assert [row["step"] for row in expected] == [1, 2, 3, 4]

    one_agent = [*TORCHRUN, "--nproc-per-node", "2"]
    torchrun = start(one_agent, "trainer.devices=auto", "hydra.run.dir=torchrun")
    output = torchrun.end()
    assert torchrun.process.returncode == 0, output
    assert output.count("Finished: 4 steps") == 1
    assert rows(workplace / "torchrun") == expected

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    two_agents = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1"]
    two_agents += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    agents = [
        start(
            [*two_agents, "--node-rank", str(node)],
            "trainer.devices=auto",
            "name=agents",  # the folder is then named by the clock
        )
        for node in range(2)
    ]
    output = "".join(agent.end() for agent in agents)
    assert [agent.process.returncode for agent in agents] == [0, 0], output
    assert output.count("Finished: 4 steps") == 1
    (folder,) = (workplace / "logs/agents").iterdir()
    assert rows(folder) == expected


def test_a_killed_rank_ends_the_run_with_one_error_that_names_it(start: Start, workplace: Path) -> None:
    run = start([sys.executable], "trainer.devices=2", "hydra.run.dir=killed", kind="kill")
    output = run.end()
    assert run.process.returncode == 1, output
    assert "Traceback" not in output
    assert output.splitlines()[-2:] == [
        "rank 1 of 2 was killed by SIGKILL",
        "The run crashed; run folder: killed, last valid checkpoint: step_0000002.ckpt",
    ]
    assert (workplace / "killed/train.log").read_text() == output
    assert run.left() == []


def test_an_exception_in_one_rank_prints_one_traceback(start: Start) -> None:
    run = start([sys.executable], "trainer.devices=2", "hydra.run.dir=raised", kind="raise")
    output = run.end()
    assert run.process.returncode == 1, output
    assert output.count("Traceback (most recent call last)") == 1
    assert "rank 1 of 2 failed:\n" in output
    assert "OSError: the disk is gone" in output
    assert "checkpoint: step_0000002.ckpt" in output.splitlines()[-1]


@pytest.mark.parametrize("kind", ["raise", "raise_while_busy"])
def test_torchrun_names_the_rank_that_failed_first(start: Start, kind: str) -> None:
    one_agent = [*TORCHRUN, "--nproc-per-node", "2"]
    torchrun = start(one_agent, "trainer.devices=auto", f"hydra.run.dir=torchrun_{kind}", kind=kind)
    output = torchrun.end()
    assert torchrun.process.returncode == 1
    # torchrun's own, and the one of the rank as the root cause
    assert output.count("Traceback (most recent call last)") == 2, output
    _, _, cause = output.partition("Root Cause")
    assert "rank      : 1" in cause
    assert "OSError: the disk is gone" in cause


def test_a_mistake_that_every_rank_finds_is_reported_once(start: Start) -> None:
    run = start([sys.executable], "trainer.devices=2", "hydra.run.dir=odd", kind="mistake")
    output = run.end()
    assert run.process.returncode == 2, output
    assert output.count("it is odd") == 1
    assert "Traceback" not in output


def test_a_killed_parent_leaves_no_rank_running(at_step_3: Started) -> None:
    assert len(at_step_3.left()) >= 2
    at_step_3.process.kill()
    assert wait_until(lambda: not at_step_3.left(), 10), at_step_3.left()


@pytest.mark.parametrize(
    ("numbers", "exit_code", "message"),
    [
        # the first one waits for the end of the step, which never comes
        ([signal.SIGINT, signal.SIGINT], 130, "Interrupted by a second Ctrl-C"),
        ([signal.SIGTERM, signal.SIGTERM], 143, "Terminated by a second signal"),
    ],
)
def test_a_second_signal_ends_the_ranks_and_leaves_none_running(
    at_step_3: Started, numbers: Sequence[signal.Signals], exit_code: int, message: str
) -> None:
    for number in numbers:
        at_step_3.process.send_signal(number)
        time.sleep(1.1)  # within a second they would be one request
    output = at_step_3.end(timeout=30)
    assert at_step_3.process.returncode == exit_code, output
    assert output.count(message) == 1
    assert "Traceback" not in output
    assert at_step_3.left() == []
