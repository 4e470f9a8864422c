"""The loss is a sum over targets; micro-batches of any size give the gradient of one large batch."""

from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from support import MaskedTokens, composed_config, read_metrics, resolved

from recipes.build import build
from recipes.data.order import ShuffledOrder
from recipes.model.gpt2 import GPT2
from recipes.model.weights import initialize
from recipes.numerics.loss import (
    IGNORE_INDEX,
    count_targets,
    cross_entropy_sum,
    mean_per_sample,
    regularizer_sum,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "max_seq_len": 16,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_size": 32,
}
SPLITS = [(8, 1), (4, 2), (2, 4), (1, 8)]  # micro-batch size, micro-batches per step


class KeepGradients(Callback):
    """Keeps the gradients of the first optimizer step, before clipping."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    def on_before_optimizer_step(self, trainer: lightning.Trainer, pl_module: Any, optimizer: Any) -> None:
        if not self.gradients:
            named = pl_module.model.named_parameters()
            self.gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}


def run_split(folder: Path, micro_batch_size: int) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """Train 3 steps on unevenly masked samples in micro-batches of one size."""
    config = composed_config(
        "global_batch_size=8",
        f"micro_batch_size={micro_batch_size}",
        "trainer.max_steps=3",
        "data=random_tokens",
        *(f"model.{key}={value}" for key, value in SHAPE.items()),
        "tokenizer=none",
        "save_every=null",
        "eval_every=3",
        "~callbacks.report",
        "~callbacks.sample_text",
        "~callbacks.progress",
    )
    config["data"] = {"_target_": "support.MaskedTokens"} | {
        "num_samples": 40,
        "seq_len": 16,
        "vocab_size": 64,
    }
    run = build(resolved(config, folder))
    keep = KeepGradients()
    run.trainer.callbacks.insert(0, keep)  # type: ignore[attr-defined]
    run.trainer.fit(run.task, datamodule=run.data)
    return keep.gradients, read_metrics(folder)


def one_large_batch() -> tuple[dict[str, torch.Tensor], float]:
    """Return gradient and loss of the first global batch in plain torch: the mean over its unmasked tokens."""
    source = MaskedTokens(num_samples=40, seq_len=16, vocab_size=64)
    samples = [source[ShuffledOrder(40, 1234)(position)] for position in range(8)]
    inputs = torch.stack([sample["inputs"] for sample in samples])  # [B, T]
    targets = torch.stack([sample["targets"] for sample in samples])  # [B, T]
    model = GPT2(**SHAPE, dropout=0.0)
    initialize(model, seed=1234)
    logits = model(inputs)  # [B, T, V]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    named = model.named_parameters()
    return {name: p.grad for name, p in named if p.grad is not None}, float(loss)


def test_any_number_of_micro_batches_gives_the_gradient_of_one_large_batch(tmp_path: Path) -> None:
    expected, loss = one_large_batch()
    rows = {}
    for micro_batch_size, count in SPLITS:
        folder = tmp_path / str(count)
        folder.mkdir()
        gradients, rows[count] = run_split(folder, micro_batch_size)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            # float32 sums of the same terms in another order: a few units in the last place of the largest
            scale = float(expected[name].abs().max())
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=2e-6 * scale + 1e-9)
        assert rows[count][0]["train/loss"] == pytest.approx(loss, rel=1e-6)
    for count in (2, 4, 8):
        for row, reference in zip(rows[count], rows[1], strict=True):
            for name in ("train/loss", "grad/norm", "lr", "train/tokens", "train/samples"):
                # looser: Adam's first steps divide tiny gradients by tiny norms, which amplifies rounding differences
                assert row[name] == pytest.approx(reference[name], rel=1e-4), (count, name)


def test_the_mean_of_micro_batch_means_differs() -> None:
    """Show that the test above would catch the bug that this design avoids."""
    source = MaskedTokens(num_samples=8, seq_len=16, vocab_size=64)
    logits = torch.randn(8, 16, 64, generator=torch.Generator().manual_seed(0))  # [B, T, V]
    targets = torch.stack([source[index]["targets"] for index in range(8)])  # [B, T]
    means = [F.cross_entropy(logits[i], targets[i]) for i in range(8)]
    exact = cross_entropy_sum(logits, targets) / count_targets(targets)
    assert abs(float(torch.stack(means).mean() - exact)) > 1e-2


def test_a_sum_over_no_targets_is_zero_with_a_gradient_of_zero() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)  # [B, T, V]
    loss = cross_entropy_sum(logits, torch.full((2, 3), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert logits.grad.abs().max().item() == 0.0


def test_ignored_targets_are_not_counted() -> None:
    assert count_targets(torch.tensor([0, 1, -100, 0])).item() == 3


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits = torch.zeros(1, 4096, 8, dtype=torch.bfloat16)  # [B, T, V]
    loss = cross_entropy_sum(logits, torch.zeros(1, 4096, dtype=torch.int64))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(4096 * 2.0794415, rel=1e-6)


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.1, 0.0), (0.0, 1e-2), (0.2, 1e-3)])
def test_the_regularizer_is_torchs_label_smoothing_plus_the_z_loss(smoothing: float, z_loss: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 5, 11)
    targets = torch.randint(11, (3, 5))
    targets[0, :3] = IGNORE_INDEX
    added = regularizer_sum(logits, targets, label_smoothing=smoothing, z_loss=z_loss)
    counted = targets.flatten() != IGNORE_INDEX
    smoothed = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), label_smoothing=smoothing, reduction="sum"
    )
    log_normalizers = logits.flatten(0, 1)[counted].logsumexp(dim=1)
    expected = smoothed + z_loss * log_normalizers.square().sum()
    # sums of 12 float32 numbers in another order
    torch.testing.assert_close(cross_entropy_sum(logits, targets) + added, expected)


def test_the_mean_of_a_sample_is_over_its_own_targets() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 4, 7), torch.randint(7, (2, 4))
    targets[1, 1:] = IGNORE_INDEX
    found = mean_per_sample(logits, targets)
    expected = [
        torch.nn.functional.cross_entropy(sample_logits, sample_targets)
        for sample_logits, sample_targets in zip(logits, targets, strict=True)
    ]
    torch.testing.assert_close(found, torch.stack(expected))
