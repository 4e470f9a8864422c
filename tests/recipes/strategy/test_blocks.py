"""A model without `blocks` is rejected where a strategy shards block by block, and accepted by every other one."""

import pytest
import torch
from support import composed_config
from torch import nn

from recipes.errors import ConfigError
from recipes.model.gpt2 import GPT2
from recipes.model.llama import Llama
from recipes.model.resnet import ResNet18
from recipes.precision import Precision
from recipes.strategy import get_blocks
from recipes.strategy.fsdp import FSDP2Strategy, HSDPStrategy
from recipes.strategy.single import SingleDevice


class WithoutBlocks(nn.Module):
    """A model of someone else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])


class InheritedBlocks(WithoutBlocks):
    """Blocks by another name, found through a property."""

    @property
    def blocks(self) -> nn.ModuleList:
        return self.layers


def message(option: str) -> str:
    return f"strategy={option}: it shards block by block, and WithoutBlocks has no `blocks`; type strategy=ddp"


def test_blocks_are_an_attribute_or_a_property() -> None:
    assert len(list(get_blocks(InheritedBlocks(), "fsdp"))) == 1
    with pytest.raises(ConfigError) as raised:
        get_blocks(WithoutBlocks(), "deepspeed_stage_3")
    assert str(raised.value) == message("deepspeed_stage_3")


@pytest.mark.parametrize("name", ["gpt2_nano", "llama_nano", "resnet18"])
def test_the_models_of_this_project_have_blocks(name: str) -> None:
    config = composed_config(f"model={name}")["model"]
    model_class = {"GPT2": GPT2, "Llama": Llama, "ResNet18": ResNet18}[config.pop("_target_").rpartition(".")[2]]
    with torch.device("meta"):
        model: nn.Module = model_class(**config)
    assert list(get_blocks(model, "fsdp"))


@pytest.mark.parametrize(("option", "strategy"), [("fsdp", FSDP2Strategy), ("hsdp", HSDPStrategy)])
def test_fsdp_names_the_strategy_that_needs_no_blocks(option: str, strategy: type[FSDP2Strategy]) -> None:
    engine = strategy(
        devices=[torch.device("cpu")],
        precision=Precision(name="32-true"),
        cpu_offload=False,
        gradient_sync="per_step",
        reshard_after_forward=True,
        reduce_dtype="float32",
        gather_for_generation="auto",
    )
    with pytest.raises(ConfigError) as raised:
        engine.materialize(WithoutBlocks(), lambda model: None)
    assert str(raised.value) == message(option)


def test_a_model_without_blocks_is_placed_where_nothing_is_sharded() -> None:
    engine = SingleDevice(devices=[torch.device("cpu")], precision=Precision(name="32-true"))
    placed: list[nn.Module] = []
    model = WithoutBlocks()
    engine.materialize(model, placed.append)
    assert placed == [model]
