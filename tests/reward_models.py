"""A small reward model in a folder, as `mode=export` writes that of a run: of bytes, with scores that differ."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes.model.gpt2 import GPT2
from recipes.model.score import attach_score, compute_rewards
from recipes.model.weights import initialize
from recipes.model.weights.hf_reward import export_reward_model
from recipes.tokenizer import Tokenizer
from recipes.tokenizer.bytes import Bytes

END = 256
_SCALE = 50.0  # of the score: that of random weights hardly depends on the text


def make_reward_model(folder: Path, *, tokenizer: Tokenizer | None = None, seed: int = 3) -> tuple[nn.Module, Path]:
    """Return a reward model, and the folder that it was exported to."""
    own: Any = Bytes()
    tokenizer = tokenizer or own.make(None)
    tokenizer.save(folder / "tokenizer")
    model: Any = GPT2(vocab_size=257, max_seq_len=24, num_layers=2, num_heads=2, hidden_size=32, dropout=0.0)
    attach_score(model)
    initialize(model, seed)
    with torch.no_grad():
        model.score.weight.mul_(_SCALE)
    export_reward_model(model.eval(), folder / "export", tokenizer_folder=folder / "tokenizer", published=None)
    return model, folder / "export"


@torch.no_grad()
def score(model: nn.Module, tokens: list[int]) -> float:
    """Return what a reward run computes for a text: that of its last token."""
    rewards: Tensor = compute_rewards(model, torch.tensor([tokens]), torch.tensor([len(tokens) - 1]))
    return rewards.item()
