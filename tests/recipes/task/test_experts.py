"""Biases of experts move once a step, never in one that is not taken, and return with a checkpoint or a rollback."""

from pathlib import Path
from typing import Any

import pytest
import torch
from faults import FaultAt
from lightning.pytorch.callbacks import Callback
from support import MaskedTokens, OverflowAt, composed_config, read_metrics, resolved
from torch import Tensor

from callbacks.loss_spike.snapshot import Snapshot
from callbacks.loss_spike.train_state import live_tensors
from recipes.build import build
from recipes.loss import logged_by_count, sum_by_count

RATE = 2.0**-6  # its multiples are exact
BASE = (
    *("data=random_tokens", "model=mixtral_nano", "model.vocab_size=64", "model.max_seq_len=16", "model.num_layers=2"),
    *("model.num_heads=2", "model.num_kv_heads=1", "model.hidden_size=32", "model.moe_intermediate_size=32"),
    *("model.num_experts=4", f"model.balance_rate={RATE}", "optimizer.lr=1e-2", "warmup_steps=1", "seed=7"),
    *("global_batch_size=8", "eval_samples=8", "eval_every=100", "save_every=null", "log_every=1"),
    *("trainer.accelerator=cpu", "trainer.devices=1", "trainer.max_steps=6"),
)


class Biases(Callback):
    """Copies the biases after every optimizer step, [steps][L, E], once all other callbacks have run."""

    def __init__(self) -> None:
        self.after: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step > len(self.after):
            self.after.append(biases_of(pl_module.model))


def biases_of(model: Any) -> Tensor:
    return torch.stack([block.mlp.router.bias.clone() for block in model.blocks])


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def train(folder: Path, *overrides: str, callbacks: tuple[Any, ...] = ()) -> tuple[list[Tensor], Any]:
    """Train; return the biases after every step, and the run."""
    folder.mkdir(exist_ok=True)
    callback_options = [] if any("callbacks=" in text for text in overrides) else ["callbacks=[grad_norm,loss_scale]"]
    config = composed_config(*BASE, *callback_options, *overrides)
    run = build(resolved(config, folder))
    run.data.source = MaskedTokens(num_samples=50, seq_len=16, vocab_size=64)
    biases = Biases()
    run.trainer.callbacks[:0] = list(callbacks)  # type: ignore[attr-defined]
    run.trainer.callbacks.append(biases)  # type: ignore[attr-defined]
    run.trainer.fit(run.task, datamodule=run.data, ckpt_path=run.checkpoint, weights_only=True)
    return biases.after, run


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Tensor]:
    return train(tmp_path_factory.mktemp("plain"))[0]


def test_biases_move_by_the_rate_once_a_step(plain: list[Tensor]) -> None:
    assert plain[0].shape == (2, 4)
    before = torch.zeros(2, 4)
    for after in plain:
        assert set((after - before).flatten().tolist()) <= {-RATE, 0.0, RATE}
        assert not torch.equal(after, before)
        before = after


@pytest.mark.parametrize(
    "overrides",
    [
        ["micro_batch_size=2"],
        ["activation_checkpoint=full"],
        ["activation_checkpoint=selective"],
        ["log_every=3"],
    ],
    ids=["four micro-batches", "recomputed", "selective", "rarely logged"],
)
def test_micro_batches_recomputation_and_logging_move_no_bias_twice(
    overrides: list[str], plain: list[Tensor], tmp_path: Path
) -> None:
    found, _ = train(tmp_path, *overrides)
    assert all(map(torch.equal, found, plain))


def test_without_a_rate_there_is_no_bias_and_no_column_of_terms(tmp_path: Path) -> None:
    found, _ = train(tmp_path, "model.balance_rate=0", "log_every=4", "trainer.max_steps=5")
    assert not found[-1].any()
    rows = [row for row in read_metrics(tmp_path) if "train/loss" in row]
    assert [row["step"] for row in rows] == [4, 5]
    for row in rows:
        assert row["moe/load_min"] < 1 < row["moe/load_max"]
        assert 1.3 < row["moe/router_entropy"] < 1.39  # ln 4 is 1.386
        assert "moe/load_balance_loss" not in row
        assert "moe/router_z_loss" not in row


def test_an_overflow_of_float16_moves_no_bias(tmp_path: Path) -> None:
    found, _ = train(tmp_path, "precision=16-mixed", "trainer.max_steps=4", callbacks=(OverflowAt(step=2, rank=0),))
    assert torch.equal(found[2], found[1])
    assert not torch.equal(found[3], found[2])
    assert [row["precision/overflow_steps"] for row in read_metrics(tmp_path)][:4] == [0, 0, 1, 1]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_the_guard_refuses_moves_no_bias(accumulate: int, tmp_path: Path) -> None:
    fault = FaultAt(kind="nan_batch", step=2)
    overrides = ["callbacks=[grad_norm,loss_scale,loss_spike]", f"micro_batch_size={8 // accumulate}"]
    found, _ = train(tmp_path, *overrides, "trainer.max_steps=4", callbacks=(fault,))
    assert fault.num_damaged == 1
    assert torch.equal(found[2], found[1])
    assert not torch.equal(found[3], found[2])


def test_a_resumed_run_has_the_biases_of_one_that_was_not_interrupted(plain: list[Tensor], tmp_path: Path) -> None:
    train(tmp_path / "first", "trainer.max_steps=6", "save_every=3")
    checkpoint = tmp_path / "first/checkpoints/step_0000003.ckpt"
    _, run = train(tmp_path / "second", f"resume={checkpoint}")
    assert run.trainer.global_step == 6
    assert torch.equal(biases_of(run.task.model), plain[-1])
    rows, others = (read_metrics(tmp_path / name) for name in ("first", "second"))
    for name in ("train/loss", "grad/norm", "moe/load_max", "moe/load_min", "moe/router_entropy"):
        assert rows[-1][name] == others[-1][name], name


def test_a_rollback_restores_the_biases(tmp_path: Path) -> None:
    class Back(Callback):
        """Takes a snapshot after the second step and restores it after the fourth."""

        def __init__(self) -> None:
            self.snapshot = Snapshot()
            self.restored = torch.empty(0)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                self.snapshot.take(live_tensors(trainer, writes_back=False))
            if trainer.global_step == 4:
                assert self.snapshot.restore(live_tensors(trainer, writes_back=True)) == []
                self.restored = biases_of(pl_module.model)

    back = Back()
    found, _ = train(tmp_path, "trainer.max_steps=4", callbacks=(back,))
    assert torch.equal(back.restored, found[1])


def test_terms_of_the_objective_are_means_over_targets_summed_over_layers(tmp_path: Path) -> None:
    _, run = train(tmp_path, "trainer.max_steps=1", "+model.router_aux_loss_coef=0.5", "+model.router_z_loss=0.25")
    task, generator = run.task.train(), torch.Generator().manual_seed(3)
    batch = {
        "inputs": torch.randint(64, (3, 16), generator=generator),
        "targets": torch.randint(64, (3, 16), generator=generator),
        "num_targets": torch.tensor(20),
    }
    batch["targets"][0, 4:] = batch["targets"][1] = -100  # 4, 0 and 16 targets
    objective, loss = sum_by_count(task.terms(batch)), logged_by_count(task.terms(batch))
    task.model(batch["inputs"])
    terms = task.model.take_routed().terms.sum(dim=0)  # [3, B]
    expected = (0.5 * terms[0] + 0.25 * terms[1]) @ torch.tensor([4.0, 0.0, 16.0])
    torch.testing.assert_close(objective["num_targets"] - loss["num_targets"], expected)
    with torch.no_grad():
        assert sum_by_count(task.terms(batch)) == logged_by_count(task.terms(batch))
