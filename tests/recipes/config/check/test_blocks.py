"""Sharding goes block by block: a model without `blocks` is refused by name, read from its source."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import composed_config

from recipes.config.check import check_config
from recipes.config.check.blocks import lacks_blocks

SOURCE = """
from torch import nn
from {package}.bases import Far, Plain

class Bare(nn.Module):
    input_kind = "tokens"
    def __init__(self) -> None:
        self.layers = nn.ModuleList()

class Assigned(nn.Module):
    def __init__(self) -> None:
        self.blocks = nn.ModuleList()

class Annotated(nn.Module):
    def __init__(self) -> None:
        self.blocks: nn.ModuleList = nn.ModuleList()

class Property(nn.Module):
    @property
    def blocks(self) -> nn.ModuleList: ...

class Child(Assigned): ...
class Grandchild(Bare): ...
class FromAfar(Far): ...
class PlainFromAfar(Plain): ...
class Unreadable(nn.Transformer): ...

def factory() -> nn.Module: ...
"""
BASES = """
from torch import nn

class Far(nn.Module):
    def __init__(self) -> None:
        self.blocks = nn.ModuleList()

class Plain(nn.Module): ...
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package of models; its name is new to every test, since sources are read once."""
    name = f"models_{abs(hash(str(tmp_path)))}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    (tmp_path / name / "nets.py").write_text(SOURCE.format(package=name))
    (tmp_path / name / "bases.py").write_text(BASES)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    assert name not in sys.modules, "read, not imported"


def test_blocks_are_found_in_a_class_and_its_bases(package: str) -> None:
    names = (
        *("Bare", "Assigned", "Annotated", "Property", "Child", "Grandchild"),
        *("FromAfar", "PlainFromAfar", "Unreadable", "factory"),
    )
    lacking = [name for name in names if lacks_blocks(f"{package}.nets.{name}")]
    assert lacking == ["Bare", "Grandchild", "PlainFromAfar"]


@pytest.mark.parametrize("target", ["gpt2.GPT2", "llama.Llama", "resnet18.ResNet18"])
def test_our_models_have_blocks(target: str) -> None:
    assert not lacks_blocks(f"recipes.model.{target}")


@pytest.mark.parametrize(
    ("strategy", "shards"),
    [
        *[("fsdp", True), ("hsdp", True), ("deepspeed_stage_3", True)],
        *[("single", False), ("ddp", False), ("deepspeed_stage_2", False)],
    ],
)
def test_a_model_without_blocks_trains_where_nothing_is_sharded_by_block(
    strategy: str, shards: bool, package: str, tmp_path: Path
) -> None:
    config = composed_config(f"strategy={strategy}")
    config["model"] = {"_target_": f"{package}.nets.Bare"}
    mistake = (
        f"strategy={strategy}: it shards by block, and {package}.nets.Bare assigns no self.blocks;"
        " type strategy=ddp"
    )
    found = [str(mistake) for mistake in check_config(config, {}, [], tmp_path)]
    assert found == ([mistake] if shards else [])
