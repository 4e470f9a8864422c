"""Multilayer perceptron: shapes, initial weights, and what it learns of rows of numbers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import execute, read_metrics
from torch import Tensor

from recipes.model.mlp import MLP
from recipes.model.norm import SyncNorm
from recipes.model.weights import initialize

torch.set_num_threads(1)


def small(**changes: Any) -> MLP:
    settings = {"num_inputs": 5, "num_classes": 3, "hidden_sizes": [8, 6], "activation": "relu", "dropout": 0.0}
    with torch.device("meta"):
        model = MLP(**(settings | {"norm": "none"} | changes))
    model.to_empty(device="cpu")
    initialize(model, seed=0)
    return model


@pytest.mark.parametrize("norm", ["none", "layer", "batch", "sync"])
def test_first_loss_is_ln_of_the_classes(norm: str) -> None:
    rows = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
    outputs = small(norm=norm)(rows)
    assert outputs.shape == (16, 3)
    assert F.cross_entropy(outputs, torch.arange(16) % 3).item() == pytest.approx(math.log(3), abs=0.05)


def test_without_hidden_layers_it_is_a_linear_model() -> None:
    model, rows = small(hidden_sizes=[], norm="sync"), torch.randn(4, 5)
    assert torch.equal(model(rows), F.linear(rows, model.head.weight, model.head.bias))
    assert len(model.blocks) == 0


def test_hidden_layers_are_its_blocks_and_their_scale_is_kept() -> None:
    model = small(hidden_sizes=[512] * 8)
    x: Tensor = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    for block in list(model.blocks)[1:]:
        x = block(x)
    assert x.square().mean().item() == pytest.approx(1.0, rel=0.5)
    assert sum(isinstance(module, SyncNorm) for module in small(norm="sync").modules()) == 2


def test_a_run_learns_a_rule_that_is_not_linear_and_a_wrong_number_of_inputs_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = (
        *("model=mlp", "model.num_classes=2", "data=dataset"),
        *("data.train={_target_: own_rows.Rows, number: 512}", "data.val={_target_: own_rows.Rows, number: 128}"),
        *("trainer.accelerator=cpu", "trainer.max_steps=60", "warmup_steps=0", "global_batch_size=64"),
        *("optimizer.lr=1e-2", "callbacks=[]", "eval_every=60"),
    )
    assert execute(*common, "model.num_inputs=4", f"hydra.run.dir={tmp_path / 'mlp'}") == 0
    assert read_metrics(tmp_path / "mlp")[-1]["val/accuracy"] > 0.9
    # the control: the rule is a product of signs
    linear = (*common, "model.num_inputs=4", "model.hidden_sizes=[]", f"hydra.run.dir={tmp_path / 'linear'}")
    assert execute(*linear) == 0
    assert read_metrics(tmp_path / "linear")[-1]["val/accuracy"] < 0.7
    capsys.readouterr()
    assert execute(*common, "model.num_inputs=7", f"hydra.run.dir={tmp_path / 'wrong'}") == 2
    assert "type: model.num_inputs=4" in capsys.readouterr().out
