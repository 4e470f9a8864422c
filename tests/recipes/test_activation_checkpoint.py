"""Recomputed blocks give the same gradients as stored ones, bit for bit, dropout included."""

from typing import Any

import pytest
import torch

from recipes.activation_checkpoint import ActivationCheckpoint
from recipes.model.gpt2 import GPT2
from recipes.model.weights import initialize

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "max_seq_len": 16,
    "num_layers": 3,
    "num_heads": 2,
    "hidden_size": 32,
    "dropout": 0.1,
}


def gradients(every_nth_block: int) -> tuple[dict[str, torch.Tensor], int]:
    model = GPT2(**SHAPE)
    ActivationCheckpoint(every_nth_block=every_nth_block).apply(model.blocks)
    initialize(model, seed=0)
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    for block in model.blocks:
        block.get_submodule("mlp").register_forward_hook(count)
    torch.manual_seed(1)
    model(torch.arange(32).reshape(2, 16)).float().logsumexp(-1).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, forwards


@pytest.mark.parametrize(("every_nth_block", "expected_forwards"), [(1, 6), (2, 5), (3, 4)])
def test_recomputed_blocks_give_the_same_gradients(every_nth_block: int, expected_forwards: int) -> None:
    stored, forwards = gradients(0)
    recomputed, more_forwards = gradients(every_nth_block)
    assert forwards == 3
    assert more_forwards == expected_forwards
    assert stored.keys() == recomputed.keys()
    assert all(torch.equal(stored[name], recomputed[name]) for name in stored)
