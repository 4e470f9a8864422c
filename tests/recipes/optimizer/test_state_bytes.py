"""The bytes of state per parameter that the guide names are those of the optimizers."""

import re

import pytest
import torch
from support import ROOT, composed_config
from torch import nn
from torch._subclasses import FakeTensorMode

import recipes.plan.fake_rank  # noqa: F401  # a kernel of SGD that allocates nothing
from recipes.config.instantiate import make, make_optimizer

PAGE = ROOT / "docs/guides/optimizers.md"
MODELS = ("gpt2", "llama_1b")


def _documented() -> dict[str, tuple[str, ...]]:
    """Return the last two columns of the table by option."""
    section = PAGE.read_text().partition("## Bytes of state per parameter")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| `")]
    options = [(re.findall(r"`(\w+)`", row[0]), tuple(cell.strip() for cell in row[-2:])) for row in rows]
    return {name: cells for names, cells in options for name in names if name != "optimizer"}


def _make_model(option: str) -> nn.Module:
    model: nn.Module = make(composed_config(f"model={option}")["model"])
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    return model


@pytest.mark.parametrize("option", ["adamw", "adam", "adamw_8bit", "schedule_free", "muon", "lion", "sgd", "adafactor"])
def test_the_table_names_the_bytes_of_a_step(option: str) -> None:
    found, construct = [], make_optimizer(composed_config(f"optimizer={option}"))
    for name in MODELS:
        with FakeTensorMode():  # no storage
            model = _make_model(name)
            optimizer = construct(model)
            optimizer.step()
        kept = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        num_bytes = sum(value.numel() * value.element_size() for value in kept)
        found.append(f"{num_bytes / sum(parameter.numel() for parameter in model.parameters()):.2f}")
    assert _documented()[option] == tuple(found)


def test_every_option_is_in_the_table() -> None:
    options = {path.stem for path in (ROOT / "conf/optimizer").glob("*.yaml")}
    assert _documented().keys() == {*options}
