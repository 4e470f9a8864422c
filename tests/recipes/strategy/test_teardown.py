"""The end of a run leaves weights and optimizer state where they are: a copy would need a node's host memory."""

import lightning.pytorch as lightning
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import Strategy
from torch import nn

from recipes.checkpoint.checkpoint_io import FolderCheckpointIO
from recipes.checkpoint.writer import CheckpointWriter
from recipes.precision import Precision
from recipes.strategy.ddp import DDP
from recipes.strategy.deepspeed.strategy import DeepSpeedZero
from recipes.strategy.fsdp import FSDP2Strategy
from recipes.strategy.single import SingleDevice

# stands for a GPU: what is copied from there to the host is an error
META, CPU = torch.device("meta"), torch.device("cpu")


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, device=META)


def make(name: str) -> Strategy:
    common = {
        "devices": [CPU],
        "precision": Precision(name="32-true"),
        "checkpoint_io": FolderCheckpointIO(
            writer=CheckpointWriter(async_save=False, after=lambda folder: None), verify_hashes=True
        ),
    }
    if name == "single":
        return SingleDevice(**common)  # type: ignore[arg-type]
    if name == "ddp":
        return DDP(**common)  # type: ignore[arg-type]
    if name == "fsdp":
        return FSDP2Strategy(
            **common,
            cpu_offload=False,
            gradient_sync="per_step",
            reshard_after_forward=True,
            reduce_dtype="float32",
            gather_for_generation="auto",
        )  # type: ignore[arg-type]
    pytest.importorskip("deepspeed")
    return DeepSpeedZero(
        **common,  # type: ignore[arg-type]
        stage=2,
        offload_optimizer=None,
        offload_parameters=None,
        nvme_path=None,
    )


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "deepspeed"])
def test_the_end_of_a_run_copies_nothing_to_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_SIZE", "1")
    strategy = make(name)
    module = Module()
    strategy.connect(module)
    strategy.accelerator = CPUAccelerator()
    if name != "single":
        strategy.cluster_environment = LightningEnvironment()  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(module.parameters())
    state = {"step": torch.zeros(()), "exp_avg": torch.zeros(2, 2, device=META)}
    optimizer.state[module.layer.weight] = state
    strategy.optimizers = [optimizer]
    strategy.teardown()
    assert state["exp_avg"].is_meta
    assert module.layer.weight.is_meta
    assert strategy.optimizers == [optimizer], "what reads the state after training finds it"
    assert "cpu" not in vars(module), "the module's own method is back"
