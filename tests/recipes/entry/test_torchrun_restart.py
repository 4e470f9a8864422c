"""Workers that die under torchrun: it goes on from the last whole checkpoint, to the curve of a run left alone."""

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
    # each `<step>_<rank>_<what>` once, whoever resumes the run
    def __init__(self, folder, faults):
        self.folder = folder
        self.faults = [fault.split("_") for fault in faults]

    def on_train_batch_end(self, trainer, *_):
        for step, rank, what in self.faults:
            mine = rank in ("all", str(trainer.global_rank))
            mark = f"{self.folder}/{step}_{trainer.global_rank}_{what}"
            if not mine or trainer.global_step != int(step) or os.path.exists(mark):
                continue
            wait_for(f"{trainer.default_root_dir}/checkpoints/step_{(int(step) - 1) // 2 * 2:07d}.ckpt")
            open(mark, "w").close()
            if what == "killed":
                kill()
            if what == "killedsaving":  # the saver comes after this callback
                os.fsync = lambda _: kill()
            if what == "told":
                os.kill(os.getppid(), signal.SIGTERM)
                time.sleep(1)  # the agent hands it on within this step

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
    """Starts 12 steps saved every second one; whatever they leave is killed."""
    started: list[Started] = []

    def by(launcher: Sequence[str], name: str, *words: str, faults: Sequence[str] = ()) -> Started:
        (workplace / name).mkdir(exist_ok=True)
        run = [*TINY, f"data.path={text_folder}", "trainer.accelerator=cpu", "trainer.max_steps=12"]
        run += ["strategy=ddp", "warmup_steps=1", "save_every=2", "eval_every=4", f"name={name}"]
        run += ["+callbacks.fault._target_=fault.Fault", f"+callbacks.fault.folder={name}"]
        run += [f"+callbacks.fault.faults=[{','.join(faults)}]", *words]
        command = [*launcher, str(ROOT / "train.py"), *run]
        started.append(Started(command, folder=workplace, paths=[workplace, ROOT / "tests"]))
        return started[-1]

    yield by
    for one in started:
        one.kill()


@pytest.fixture
def undisturbed(start: Start, workplace: Path) -> Callable[[str], Path]:
    """Two ranks of a strategy that nobody kills, made once."""

    def of(strategy: str) -> Path:
        folder = workplace / f"undisturbed_{strategy}"
        if not (folder / "summary.json").exists():
            words = (f"strategy={strategy}", "trainer.devices=2", f"hydra.run.dir={folder}")
            run = start([sys.executable], folder.name, *words)
            said = run.end()
            assert run.process.returncode == 0, said
        return folder

    return of


def meets_by_c10d(name: str) -> list[list[str]]:
    """Two agents, one rank each, that find each other by a name."""
    words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    words += ["--rdzv-id", name]
    return [[*TORCHRUN, "--nnodes", "2", "--max-restarts", "3", *words] for _ in range(2)]


def meets_by_address() -> list[list[str]]:
    """Two agents, one rank each, of which the first is where both are told."""
    words = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    words += ["--nnodes", "2", "--max-restarts", "3"]
    return [[*TORCHRUN, *words, "--node-rank", str(node)] for node in range(2)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ended(agents: Sequence[Started], exit_code: int) -> str:
    """What they said; none of them, and no rank, is left."""
    said = "".join(agent.end(timeout=200.0) for agent in agents)
    assert [agent.process.returncode for agent in agents] == [exit_code] * len(agents), said
    assert [agent.left() for agent in agents] == [[]] * len(agents)
    return said


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


def test_two_agents_lose_rank_1_then_rank_0_and_give_the_rows_of_a_run_left_alone(
    start: Start, workplace: Path, undisturbed: Callable[[str], Path]
) -> None:
    faults = ("3_1_killed", "7_0_killed")
    agents = [start(agent, "lost", faults=faults) for agent in meets_by_c10d("lost")]
    said = ended(agents, 0)
    assert said.count("Started again by torchrun") == 2
    assert said.count("Finished: 12 steps") == 1
    folder = only_folder(workplace, "lost")
    assert folder.name == "torchelastic_lost"
    assert_equals(folder, undisturbed("ddp"), resumed_at=[2, 6])


def test_two_agents_without_a_name_go_on_in_one_folder_when_sharded_rank_0_dies_in_a_save(
    start: Start, workplace: Path, undisturbed: Callable[[str], Path]
) -> None:
    words, faults = ("strategy=fsdp",), ("6_0_killedsaving",)
    agents = [start(agent, "saving", *words, faults=faults) for agent in meets_by_address()]
    ended(agents, 0)
    # each start would name it by its own clock
    assert_equals(only_folder(workplace, "saving"), undisturbed("fsdp"), resumed_at=[4])


def test_one_agent_restarts_both_ranks_when_rank_1_dies_in_a_save(
    start: Start, workplace: Path, undisturbed: Callable[[str], Path]
) -> None:
    agent = (*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    ended([start(agent, "alone", faults=["6_1_killedsaving"])], 0)
    assert_equals(only_folder(workplace, "alone"), undisturbed("ddp"), resumed_at=[4])


def test_two_agents_that_are_told_to_stop_save_and_the_same_command_and_id_go_on(
    start: Start, workplace: Path, undisturbed: Callable[[str], Path]
) -> None:
    words, faults = ("resume=auto",), ("5_all_told",)
    agents = [start(agent, "told", *words, faults=faults) for agent in meets_by_c10d("told")]
    said = ended(agents, 1)  # torchrun's own
    assert "Started again" not in said  # told to stop is not restarted
    folder = only_folder(workplace, "told")
    [stopped] = events(folder, "preempted")
    assert (stopped["signal"], stopped["saved"]) == (signal.SIGTERM.name, True)
    again = [start(agent, "told", *words, faults=faults) for agent in meets_by_c10d("told")]
    ended(again, 0)
    assert only_folder(workplace, "told") == folder
    assert_equals(folder, undisturbed("ddp"), resumed_at=[stopped["step"]])
