"""Ranks that die under torchrun: the restart resumes from the last valid checkpoint, to the undisturbed curve."""

import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from signalled import computed, events, summed_up
from started import Started
from support import ROOT, TINY

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
FAULT = """
import os, signal, time
from lightning.pytorch import Callback

class Fault(Callback):
    # each `<step>_<rank>_<kind>` happens once, however often the run resumes
    def __init__(self, folder, faults):
        self.folder = folder
        self.faults = [fault.split("_") for fault in faults]

    def on_train_batch_end(self, trainer, *_):
        for step, rank, kind in self.faults:
            is_here = rank in ("all", str(trainer.global_rank))
            mark = f"{self.folder}/{step}_{trainer.global_rank}_{kind}"
            if not is_here or trainer.global_step != int(step) or os.path.exists(mark):
                continue
            wait_for(f"{trainer.default_root_dir}/checkpoints/step_{(int(step) - 1) // 2 * 2:07d}.ckpt")
            open(mark, "w").close()
            if kind == "killed":
                kill()
            if kind == "killedsaving":  # the saver runs after this callback
                os.fsync = lambda _: kill()
            if kind == "signalled":
                os.kill(os.getppid(), signal.SIGTERM)
                time.sleep(1)  # the agent forwards it within this step

def wait_for(checkpoint):
    while not os.path.exists(checkpoint):
        time.sleep(0.02)

def kill():
    os.kill(os.getpid(), signal.SIGKILL)
"""

Start = Callable[..., Started]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elastic")
    (folder / "fault.py").write_text(FAULT)
    return folder


@pytest.fixture
def start(workplace: Path, text_folder: str) -> Iterator[Start]:
    """Return a function that starts runs of 12 steps, saved every second one; what is left of them is killed."""
    started: list[Started] = []

    def start_by(launcher: Sequence[str], name: str, *overrides: str, faults: Sequence[str] = ()) -> Started:
        (workplace / name).mkdir(exist_ok=True)
        run = [*TINY, f"data.path={text_folder}", "trainer.accelerator=cpu", "trainer.max_steps=12"]
        run += ["strategy=ddp", "warmup_steps=1", "save_every=2", "eval_every=4", f"name={name}"]
        run += ["+callbacks.fault._target_=fault.Fault", f"+callbacks.fault.folder={name}"]
        run += [f"+callbacks.fault.faults=[{','.join(faults)}]", *overrides]
        command = [*launcher, str(ROOT / "train.py"), *run]
        started.append(Started(command, folder=workplace, paths=[workplace, ROOT / "tests"]))
        return started[-1]

    yield start_by
    for process in started:
        process.kill()


@pytest.fixture
def undisturbed(start: Start, workplace: Path) -> Callable[[str], Path]:
    """Return a function that runs two undisturbed ranks of a strategy, once per strategy."""

    def run_strategy(strategy: str) -> Path:
        folder = workplace / f"undisturbed_{strategy}"
        if not (folder / "summary.json").exists():
            overrides = (f"strategy={strategy}", "trainer.devices=2", f"hydra.run.dir={folder}")
            run = start([sys.executable], folder.name, *overrides)
            output = run.end()
            assert run.process.returncode == 0, output
        return folder

    return run_strategy


def agents_by_rendezvous_id(name: str) -> list[list[str]]:
    """Return the commands of two agents, one rank each, that rendezvous under an id."""
    options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    options += ["--rdzv-id", name]
    return [[*TORCHRUN, "--nnodes", "2", "--max-restarts", "3", *options] for _ in range(2)]


def agents_by_address() -> list[list[str]]:
    """Return the commands of two agents, one rank each, that rendezvous at the address of the first."""
    options = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    options += ["--nnodes", "2", "--max-restarts", "3"]
    return [[*TORCHRUN, *options, "--node-rank", str(node)] for node in range(2)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for_end(agents: Sequence[Started], exit_code: int) -> str:
    """Wait for the agents' end and return their output; check that no agent and no rank is left."""
    output = "".join(agent.end(timeout=200.0) for agent in agents)
    assert [agent.process.returncode for agent in agents] == [exit_code] * len(agents), output
    assert [agent.left() for agent in agents] == [[]] * len(agents)
    return output


def only_folder(workplace: Path, name: str) -> Path:
    [folder] = (workplace / "logs" / name).iterdir()
    return folder


def assert_equals(folder: Path, undisturbed: Path, *, resumed_at: Sequence[int]) -> None:
    assert [event["step"] for event in events(folder, "resume")] == resumed_at
    assert len(events(folder, "start")) == 1
    assert events(folder, "end")[-1]["status"] == "finished"
    assert [row["step"] for row in computed(folder)] == [str(step) for step in range(1, 13)]
    assert computed(folder) == computed(undisturbed)
    assert summed_up(folder) == summed_up(undisturbed)


@pytest.mark.slow
def test_two_agents_that_lose_rank_1_then_rank_0_give_the_rows_of_an_undisturbed_run(
    start: Start, workplace: Path, undisturbed: Callable[[str], Path]
) -> None:
    faults = ("3_1_killed", "7_0_killed")
    agents = [start(agent, "lost", faults=faults) for agent in agents_by_rendezvous_id("lost")]
    output = wait_for_end(agents, 0)
    assert output.count("Restarted by torchrun") == 2
    assert output.count("Finished: 12 steps") == 1
    folder = only_folder(workplace, "lost")
    assert folder.name == "torchelastic_lost"
    assert_equals(folder, undisturbed("ddp"), resumed_at=[2, 6])


@pytest.mark.slow
def test_two_agents_without_an_id_resume_in_one_folder_when_sharded_rank_0_dies_in_a_save(
    start: Start, workplace: Path, undisturbed: Callable[[str], Path]
) -> None:
    overrides, faults = ("strategy=fsdp",), ("6_0_killedsaving",)
    agents = [start(agent, "saving", *overrides, faults=faults) for agent in agents_by_address()]
    wait_for_end(agents, 0)
    # one folder, although its name comes from the clock
    assert_equals(only_folder(workplace, "saving"), undisturbed("fsdp"), resumed_at=[4])


def test_one_agent_restarts_both_ranks_when_rank_1_dies_in_a_save(
    start: Start, workplace: Path, undisturbed: Callable[[str], Path]
) -> None:
    agent = (*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    wait_for_end([start(agent, "alone", faults=["6_1_killedsaving"])], 0)
    assert_equals(only_folder(workplace, "alone"), undisturbed("ddp"), resumed_at=[4])


def test_two_signalled_agents_save_and_the_same_command_with_the_same_id_resumes(
    start: Start, workplace: Path, undisturbed: Callable[[str], Path]
) -> None:
    overrides, faults = ("resume=auto",), ("5_all_signalled",)
    agents = [start(agent, "signalled", *overrides, faults=faults) for agent in agents_by_rendezvous_id("signalled")]
    output = wait_for_end(agents, 1)  # torchrun's own
    assert "Restarted" not in output, "a run that stops at a signal is not restarted"
    folder = only_folder(workplace, "signalled")
    [stopped] = events(folder, "preempted")
    assert (stopped["signal"], stopped["saved"]) == (signal.SIGTERM.name, True)
    again = [start(agent, "signalled", *overrides, faults=faults) for agent in agents_by_rendezvous_id("signalled")]
    wait_for_end(again, 0)
    assert only_folder(workplace, "signalled") == folder
    assert_equals(folder, undisturbed("ddp"), resumed_at=[stopped["step"]])
