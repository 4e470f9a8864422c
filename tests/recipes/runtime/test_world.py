"""What started how many ranks, from fake environments; contradictions to the config are mistakes."""

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.utilities.rank_zero import _get_rank
from support import ROOT, TINY, read_metrics, resolved, write_texts

from recipes.config import ranks
from recipes.errors import ConfigError
from recipes.runtime.world import RANK_FILE, Ranks, find_wrong_variables, global_rank, settle_ranks, started_by

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}
SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": "4"}
SPAWNED = TORCHRUN | {"RANK": "1", "WORLD_SIZE": "2", RANK_FILE: "composed.json"}


def config(
    *,
    devices: Any = "auto",
    num_nodes: int = 1,
    accelerator: str = "auto",
    strategy: str = "recipes.strategy.ddp.DDP",
    mode: str = "fit",
) -> dict[str, Any]:
    return {
        "strategy": {"_target_": strategy},
        "mode": {"_target_": f"recipes.mode.{mode}.{mode}"},
        "trainer": {"devices": devices, "num_nodes": num_nodes, "accelerator": accelerator},
    }


def ranks_of(config: dict[str, Any], environ: dict[str, str]) -> Ranks:
    return resolved(config)._find_ranks(environ)


SINGLE = "recipes.strategy.single.SingleDevice"


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "num_gpus", lambda: 2)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "num_gpus", lambda: 0)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("settings", "per_node"),
    [
        ({"devices": "auto"}, 2),
        ({"devices": -1}, 2),
        ({"devices": 1}, 1),
        ({"devices": [1]}, 1),
        ({"devices": [0, 1]}, 2),
        ({"devices": "auto", "accelerator": "cpu"}, 1),
        ({"devices": 5, "accelerator": "cpu"}, 5),
        ({"devices": "auto", "strategy": SINGLE}, 1),
        ({"devices": 1, "mode": "evaluate"}, 1),
        ({"devices": 2, "mode": "evaluate"}, 1),
    ],
)
def test_without_existing_ranks_the_config_and_the_gpus_set_their_number(
    settings: dict[str, Any], per_node: int
) -> None:
    found = ranks_of(config(**settings), {})
    assert found == Ranks(per_node=per_node, num_nodes=1, started_by=None)
    assert global_rank({}) == 0


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("devices", "per_node"), [("auto", 1), (-1, 1), (3, 3)])
def test_a_machine_without_gpus_has_one_rank_or_as_many_as_devices_are_set(devices: Any, per_node: int) -> None:
    assert ranks_of(config(devices=devices), {}).world_size == per_node


def test_the_number_of_existing_ranks_is_read_from_their_environment() -> None:
    found = ranks_of(config(), TORCHRUN)
    assert found == Ranks(per_node=2, num_nodes=2, started_by="torchrun")
    assert global_rank(TORCHRUN) == 3
    assert ranks_of(config(devices=2), SPAWNED | {"GROUP_WORLD_SIZE": "1"}).started_by == "spawn"
    assert global_rank(SPAWNED) == 1
    slurm = SLURM | {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}
    assert ranks_of(config(), slurm) == Ranks(per_node=2, num_nodes=3, started_by="slurm")
    assert global_rank(slurm) == 5
    older = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "SLURM_NTASKS_PER_NODE": "4"}
    assert ranks_of(config(), older) == Ranks(per_node=4, num_nodes=1, started_by="slurm")


def test_a_plain_command_in_a_batch_script_is_not_a_rank() -> None:
    batch = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert ranks_of(config(devices=1), batch) == Ranks(per_node=1, num_nodes=1, started_by=None)


def test_torchrun_under_srun_counts_as_torchrun() -> None:
    assert ranks_of(config(), SLURM | TORCHRUN).started_by == "torchrun"


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("settings", "environ", "mistake"),
    [
        (
            {"devices": 4},
            TORCHRUN,
            "trainer.devices=4 trainer.num_nodes=1: torchrun started 4 ranks on 2 nodes; type trainer.devices=auto",
        ),
        (
            {"devices": 2, "num_nodes": 3},
            TORCHRUN,
            "trainer.devices=2 trainer.num_nodes=3: torchrun started 4 ranks on 2 nodes;"
            " type trainer.devices=auto trainer.num_nodes=1",
        ),
        (
            {"strategy": SINGLE, "devices": 1},
            TORCHRUN,
            "strategy=single with WORLD_SIZE=4: each of these ranks would train the same run"
            " in the same folder; type strategy=ddp, or python train.py … without torchrun",
        ),
        (
            {"strategy": SINGLE, "devices": 1},
            SRUN,
            "strategy=single with WORLD_SIZE=4: each of these ranks would train the same run"
            " in the same folder; type strategy=ddp, or ignore_slurm=true",
        ),
        (
            {"mode": "evaluate"},
            TORCHRUN,
            "mode=evaluate with WORLD_SIZE=4: only training is split over ranks: each of these"
            " would repeat all of it; type python train.py … without torchrun or srun",
        ),
        (
            {},
            SLURM,
            "srun started 2 + 2 + 2 + 1 ranks: every node must have the same number of them; type"
            " torchrun --nproc-per-node <the same number on each node>, or srun --ntasks-per-node",
        ),
        (
            {"strategy": SINGLE, "devices": 2},
            {},
            "trainer.devices=2 trainer.num_nodes=1: strategy=single trains on one device;"
            " type strategy=ddp, or trainer.devices=1 trainer.num_nodes=1",
        ),
        (
            {"devices": 4},
            {},
            "trainer.devices=4: this machine has 2 GPUs; type trainer.devices=auto",
        ),
        (
            {"devices": [1, 2]},
            {},
            "trainer.devices=[1,2]: this machine has 2 GPUs (they count from 0); type trainer.devices=auto",
        ),
        (
            {"devices": 8, "num_nodes": 2, "accelerator": "cpu"},
            {},
            "trainer.num_nodes=2: a run on several machines must be started on each of them;"
            " type torchrun --nnodes 2 --nproc-per-node 8 train.py …",
        ),
    ],
)
def test_a_contradiction_is_a_mistake_with_its_fix(
    settings: dict[str, Any], environ: dict[str, str], mistake: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ranks_of(config(**settings), environ)
    assert str(caught.value) == mistake


# options of srun -> what it then sets
OWN_GPU = {
    "--gpus-per-task=1": {"SLURM_GPUS_PER_TASK": "1"},
    "--gpus-per-task=h100:1": {"SLURM_GPUS_PER_TASK": "h100:1"},
    "--gpus-per-task=1 (24.05)": {"SLURM_TRES_PER_TASK": "cpu=8,gres/gpu=1"},
    "--gpus-per-task=h100:1 (24.05)": {"SLURM_TRES_PER_TASK": "gres/gpu:h100=1"},
    "--ntasks-per-gpu=1": {"SLURM_NTASKS_PER_GPU": "1"},
}


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "num_gpus", lambda: 1)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("option", OWN_GPU)
def test_tasks_that_see_one_gpu_each_are_ranks(option: str) -> None:
    assert ranks_of(config(), SRUN | OWN_GPU[option]) == Ranks(per_node=4, num_nodes=1, started_by="slurm")


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    "environ", [{}, {"SLURM_GPUS_PER_TASK": "2"}, {"SLURM_TRES_PER_TASK": "cpu=1"}, {"SLURM_NTASKS_PER_GPU": "4"}]
)
def test_tasks_that_would_share_a_gpu_are_told_how_srun_gives_each_its_own(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ranks_of(config(), SRUN | environ)
    assert str(caught.value) == (
        "4 ranks per node: srun started them, and each of them sees 1 GPU;"
        " type srun --gpus-per-task=1, or --ntasks-per-node=1, or trainer.accelerator=cpu"
    )


@pytest.mark.usefixtures("one_gpu")
def test_torchrun_gives_no_rank_a_gpu_of_its_own() -> None:
    with pytest.raises(ConfigError, match="this machine has 1 GPU; type torchrun --nproc-per-node 1 train.py"):
        ranks_of(config(), TORCHRUN | OWN_GPU["--gpus-per-task=1"])


@pytest.mark.parametrize(
    ("environ", "setting"),
    [
        ({"WORLD_SIZE": ""}, "WORLD_SIZE="),
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE=abc"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0"),
        (TORCHRUN | {"RANK": "x"}, "RANK=x"),
        (TORCHRUN | {"RANK": "4"}, "RANK=4"),
        (TORCHRUN | {"RANK": "-1"}, "RANK=-1"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT=http"),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "two"}, "GROUP_WORLD_SIZE=two"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS=many"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": ""}, "SLURM_STEP_TASKS_PER_NODE="),
        (SLURM | {"SLURM_PROCID": "7"}, "SLURM_PROCID=7"),
        (SLURM | {"SLURM_LOCALID": "x"}, "SLURM_LOCALID=x"),
        (SLURM | {"SLURM_PROCID": ""}, "SLURM_PROCID="),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x99999999999)"}, "SLURM_STEP_TASKS_PER_NODE=2(x99999999999)"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}, "SLURM_STEP_TASKS_PER_NODE=2(x2),1"),
        ({"WORLD_SIZE": "9" * 5000}, f"WORLD_SIZE={'9' * 40}…"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999"),
        (TORCHRUN | {"WORLD_SIZE": "5"}, "WORLD_SIZE=5 LOCAL_WORLD_SIZE=2"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "WORLD_SIZE=4 LOCAL_WORLD_SIZE=8"),
        (SPAWNED, f"{RANK_FILE}=composed.json"),
    ],
)
def test_a_variable_left_from_something_else_is_named_before_anything_reads_it(
    environ: dict[str, str], setting: str
) -> None:
    wrong = find_wrong_variables(environ)
    assert setting in [mistake.setting for mistake in wrong]
    assert all(mistake.fix.startswith(("unset ", "ignore_slurm=true")) for mistake in wrong)


@pytest.mark.parametrize("address", ["", "a b", "tcp://node0"])
def test_a_rank_needs_a_host_to_meet_the_others_at(address: str) -> None:
    [mistake] = find_wrong_variables(TORCHRUN | {"MASTER_ADDR": address})
    assert mistake.setting == f"MASTER_ADDR={address}"
    assert mistake.fix == "export MASTER_ADDR=<the host of rank 0>"


def test_an_interface_that_the_machine_lacks_is_named_before_the_ranks_start() -> None:
    with pytest.raises(ConfigError, match="GLOO_SOCKET_IFNAME=nope: this machine has the network interfaces .*lo"):
        ranks_of(config(devices=2, accelerator="cpu"), {"GLOO_SOCKET_IFNAME": "nope"})
    assert ranks_of(config(devices=2, accelerator="cpu"), {"GLOO_SOCKET_IFNAME": "lo"}).per_node == 2
    assert ranks_of(config(strategy=SINGLE), {"GLOO_SOCKET_IFNAME": "nope"}).per_node == 1


@pytest.mark.parametrize("environ", [{}, {"LOCAL_RANK": "x"}, {"WORLD_SIZE": "1"}, TORCHRUN, SLURM, {"PMI_SIZE": "2"}])
def test_variables_of_a_launcher_and_those_that_nobody_reads_are_not_wrong(environ: dict[str, str]) -> None:
    assert find_wrong_variables(environ) == []


@pytest.mark.parametrize(
    "environ",
    [{"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, {"PMI_SIZE": "4"}, {"JSM_NAMESPACE_SIZE": "6"}],
)
def test_processes_of_an_mpi_launcher_do_not_train_and_may_do_anything_else(environ: dict[str, str]) -> None:
    name, size = next(iter(environ.items()))
    left = dict(environ)
    settle_ranks(left)
    for strategy in (SINGLE, "recipes.strategy.ddp.DDP"):
        with pytest.raises(ConfigError, match=f"{name}={size}: an MPI launcher starts no ranks of this project"):
            ranks_of(config(strategy=strategy), left)
    for mode in ("plan", "evaluate"):
        assert ranks_of(config(mode=mode), left).world_size == 1
    assert ranks_of(config(), TORCHRUN | environ).started_by == "torchrun"


def test_a_launcher_of_machines_is_told_the_torchrun_command_with_its_variables() -> None:
    pod = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "job-0", "MASTER_PORT": "23456"}
    environ = dict(pod)
    assert settle_ranks(environ) == []
    assert environ == pod
    with pytest.raises(ConfigError) as caught:
        ranks_of(config(), environ)
    assert str(caught.value) == (
        "WORLD_SIZE=2 without LOCAL_RANK, LOCAL_WORLD_SIZE: torchrun sets all of them for each rank, so it has not"
        " started this process; type torchrun --nnodes $WORLD_SIZE --node-rank $RANK --master-addr $MASTER_ADDR"
        " --master-port $MASTER_PORT --nproc-per-node <GPUs of a node> train.py …,"
        " or unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT if they are left over"
    )


def test_a_rank_that_this_project_starts_is_described_in_a_sentence() -> None:
    environ = SPAWNED | {"NODE_RANK": "9", "GROUP_RANK": "0"}
    [line] = settle_ranks(environ)
    assert line == "Ignored from the environment: NODE_RANK=9: this run started this process as rank 1"


# what a shell may hold that a launcher has left, and what torchrun, MPI and LSF set for the second of two processes
STALE = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "NODE_RANK": "1",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node7",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMI_RANK": "1",
    "PMIX_RANK": "1",
    "JSM_NAMESPACE_RANK": "1",
    "SLURM_PROCID": "1",
}
OF_THE_JOB = {"SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "HOME": "/home/me"}


@pytest.mark.parametrize("name", [*STALE, "all"])
def test_a_rank_left_in_the_environment_of_a_plain_process_is_removed_with_one_line(name: str) -> None:
    left = STALE if name == "all" else {name: STALE[name]}
    environ = OF_THE_JOB | left | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    settings = " ".join(f"{key}={left[key]}" for key in sorted(left))
    why = "no launcher has started this process as a rank"
    assert settle_ranks(environ) == [f"Ignored from the environment: {settings}: {why}"]
    assert environ == OF_THE_JOB
    assert settle_ranks(environ) == []


def test_the_variables_of_a_launcher_overrule_those_of_another_one() -> None:
    environ = TORCHRUN | {"RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMI_RANK": "1", "NODE_RANK": "9"}
    environ |= {"GROUP_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}
    [line] = settle_ranks(environ)
    assert line == (
        "Ignored from the environment: NODE_RANK=9 OMPI_COMM_WORLD_LOCAL_RANK=0:"
        " torchrun started this process as rank 1"
    )
    agreeing = {"RANK": "1", "PMI_RANK": "1", "GROUP_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}
    assert environ == TORCHRUN | agreeing

    task = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
    of_run = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "PMI_SIZE": "2"}  # as scripts set them
    environ = task | of_run | {"LOCAL_RANK": "0", "RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
    [line] = settle_ranks(environ)
    assert line == "Ignored from the environment: LOCAL_RANK=0 RANK=0: srun started this process as rank 1"
    assert environ == task | of_run | {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}


SHELL_OF_SRUN = {
    "SLURM_JOB_NAME": "bash",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "1",
    "PMI_SIZE": "2",
}


def test_a_command_in_an_interactive_shell_of_srun_is_not_a_rank() -> None:
    environ = SHELL_OF_SRUN | {"SLURM_PTY_PORT": "41000"}
    [line] = settle_ranks(environ)
    assert "interactive shell of srun" in line
    assert "ignore_slurm=true" in line
    assert environ == {"SLURM_JOB_NAME": "bash", "SLURM_NNODES": "1", "SLURM_PTY_PORT": "41000"}
    assert started_by(environ) is None


@pytest.mark.parametrize("name", ["bash", "interactive"])
def test_the_name_of_a_job_does_not_make_a_rank_an_interactive_shell(name: str) -> None:
    environ = SHELL_OF_SRUN | {"SLURM_JOB_NAME": name, "SLURM_TASK_PID": "1"}
    assert settle_ranks(environ) == []
    assert started_by(environ) == "slurm"


@pytest.mark.parametrize(
    ("command", "has_terminal", "is_rank"),
    [
        (["-i"], True, False),
        (["-l", "-i"], True, False),
        (["script.sh"], True, True),
        ([], False, True),
        (["-s"], False, True),
        (["-l", "-s"], False, True),
    ],
)
def test_a_shell_of_srun_is_interactive_if_it_has_a_terminal_and_no_script(
    command: list[str], has_terminal: bool, is_rank: bool, tmp_path: Path
) -> None:
    program = "import os\nfrom recipes.runtime.world import *\nsettle_ranks()\nprint(started_by())\n"
    line = f"{sys.executable} -c '{program}'\ntrue\n"  # the last command of a script may replace its shell
    (tmp_path / "script.sh").write_text(line)
    environ = os.environ | SHELL_OF_SRUN | {"PYTHONPATH": str(ROOT), "BASH_ENV": "", "ENV": ""}
    environ["SLURM_PTY_PORT"] = "41000"  # also inherited by what is started inside `srun --pty`
    terminal, slave = pty.openpty()
    os.write(terminal, f"{line}exit\n".encode())
    (tmp_path / "input").write_text(line)
    # as slurmd does: the process of the task knows its own number
    with (tmp_path / "input").open() as text:
        done = subprocess.run(
            ["sh", "-c", 'export SLURM_TASK_PID=$$; exec bash --norc --noprofile "$@"', "sh", *command],
            cwd=tmp_path,
            env=environ,
            stdin=slave if has_terminal else text,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    os.close(terminal)
    os.close(slave)
    assert done.stdout.split()[:1] == [str("slurm" if is_rank else None)], done.stderr


@pytest.mark.parametrize("name", STALE)
def test_lightning_reads_no_other_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, STALE[name])
    settle_ranks()
    assert _get_rank() in (None, 0)  # what `rank_zero_only.rank` becomes when Lightning is imported


def test_a_run_in_a_shell_full_of_ranks_logs_all_its_steps(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    settings = ["strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu", "trainer.max_steps=2", "log_every=1"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *TINY, *settings, f"data.path={texts}", "hydra.run.dir=run"],
        cwd=tmp_path,
        env=os.environ | SHELL_OF_SRUN | STALE | {"SLURM_PROCID": "0", "SLURM_PTY_PORT": "41000"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2]
    assert [line.partition(":")[0] for line in done.stderr.splitlines()[:2]] == [
        "This is an interactive shell of srun (SLURM_STEP_NUM_TASKS=2)",
        "Ignored from the environment",
    ]
