"""The learning step without a Trainer: loss, gradient scale, counters, rows and resume, against plain arithmetic."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.clipping.none import NoClipping
from recipes.errors import ConfigError
from recipes.loss import sum_by_count
from recipes.loss.cross_entropy import CrossEntropy
from recipes.mesh import Mesh
from recipes.metrics import Perplexity
from recipes.model.decoder import hide_padding
from recipes.parallel.groups import Groups
from recipes.task.language_modeling import LanguageModeling
from recipes.task.resumable import check_trained

VOCAB, SEQ_LEN = 11, 6


class Bigram(nn.Module):
    """Tokens [B, T] -> logits [B, T, padded V], one row of weights per token."""

    vocab_size = VOCAB

    def __init__(self, *, num_columns: int = VOCAB) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(VOCAB, num_columns, generator=generator)  # [V, padded V]
        self.table = nn.Embedding(VOCAB, num_columns, _weight=weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return hide_padding(self.table(tokens), vocab_size=VOCAB)


def make_trainer(**more: Any) -> SimpleNamespace:
    """Return what a task reads of a Trainer; the sum over ranks is that of one rank."""
    group = {"lr": 0.1, "group_name": "decay"}
    trainer = SimpleNamespace(
        accumulate_grad_batches=1,
        global_step=0,
        max_steps=100,
        log_every_n_steps=1,
        should_stop=False,
        loggers=[],
        optimizers=[SimpleNamespace(param_groups=[group])],
        global_rank=0,
        world_size=1,
        strategy=make_strategy(),
    )
    vars(trainer).update(more)
    return trainer


def make_strategy(*, num_ranks: int = 1, **more: Any) -> SimpleNamespace:
    """Return what a task reads of a strategy whose ranks have different samples."""
    settings = {"guard": None, "pipeline": None, "sum_over_token_ranks": lambda value: value}
    ranks = {"data_size": num_ranks, "averaged_size": num_ranks, "mesh": Mesh(shard=num_ranks), "groups": Groups()}
    return SimpleNamespace(**ranks, **settings | more)


def make_task(trainer: SimpleNamespace, **more: Any) -> LanguageModeling:
    arguments: dict[str, Any] = {"loss": CrossEntropy(), "ema_decay": None, "metrics": {}} | more
    model = arguments.pop("model", None) or Bigram()
    arguments["loss"].num_outputs = VOCAB
    task = LanguageModeling(
        make_model=lambda: model,
        make_optimizer=torch.optim.SGD,
        schedule=lambda step: 1.0,
        convert_model=lambda model, shards_weights: None,
        activation_checkpoint=None,  # type: ignore[arg-type]
        compile_mode=None,
        scales_loss=False,
        clipping=NoClipping(),
        seed=0,
        **arguments,
    )
    task.model = model
    task.trainer = trainer  # type: ignore[assignment]
    return task


def make_batch(num_targets: list[int], *, seed: int = 0) -> dict[str, Any]:
    """Return a micro-batch whose sample i has `num_targets[i]` targets that carry loss."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (len(num_targets), SEQ_LEN + 1), generator=generator)  # [B, T + 1]
    targets = tokens[:, 1:].clone()  # [B, T]
    for row, count in zip(targets, num_targets, strict=True):
        row[count:] = -100
    return {"inputs": tokens[:, :-1], "targets": targets}


def window(*micro_batches: list[int]) -> list[dict[str, Any]]:
    """Return the micro-batches of one optimizer step, each with the targets of the global batch."""
    total = sum(sum(counts) for counts in micro_batches)
    return [
        make_batch(counts, seed=seed) | {"num_targets": total, "num_samples": len(counts)}
        for seed, counts in enumerate(micro_batches)
    ]


def mean_over_targets(model: nn.Module, batches: list[dict[str, Any]]) -> Tensor:
    """Return the reference: the mean loss over all targets of one large batch."""
    logits = torch.cat([model(batch["inputs"]).flatten(0, 1) for batch in batches])
    targets = torch.cat([batch["targets"].flatten() for batch in batches])
    return F.cross_entropy(logits, targets)


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 1), (1, 4), (2, 2), (4, 1)])
def test_loss_and_gradient_are_those_of_one_large_batch_however_it_is_split(world_size: int, accumulate: int) -> None:
    batches = window([6, 1], [2, 2], [0, 0], [3, 5])  # uneven, and one without any target
    model = Bigram()
    losses, gradient = [], torch.zeros_like(model.table.weight)
    for rank in range(world_size):
        trainer = make_trainer(accumulate_grad_batches=accumulate, strategy=make_strategy(num_ranks=world_size))
        task = make_task(trainer)
        micro_batches = batches[rank * accumulate : (rank + 1) * accumulate]
        if world_size == accumulate == 1:
            micro_batches = [
                {key: torch.cat([batch[key] for batch in batches]) for key in ("inputs", "targets")}
                | {name: batches[0][name] for name in ("num_targets", "num_samples")}
            ]
        for batch in micro_batches:
            # Lightning divides by the accumulation
            (task.training_step(batch, 0) / accumulate).backward()
        losses.append(float(task.recipes_row["train/loss"]))
        # engines average over ranks
        gradient += task.model.table.weight.grad / world_size  # type: ignore[union-attr, operator]
    expected = mean_over_targets(model, batches)
    expected.backward()
    loss = expected.item()
    # float32 sums in another order
    assert sum(losses) == pytest.approx(loss, rel=1e-6)
    assert torch.allclose(gradient, model.table.weight.grad, rtol=1e-5, atol=1e-7)  # type: ignore[arg-type]


def test_label_smoothing_leaves_out_the_columns_that_pad_the_vocabulary() -> None:
    [batch] = window([6, 4])
    gradients, objectives = [], []
    for num_columns in (VOCAB, 16):
        model = Bigram(num_columns=num_columns)
        with torch.no_grad():
            model.table.weight[:, :VOCAB] = Bigram().table.weight
        task = make_task(make_trainer(), model=model, loss=CrossEntropy(label_smoothing=0.1, z_loss=1e-3))
        [objective] = sum_by_count(task.terms(batch)).values()
        objective.backward()
        objectives.append(objective.item())
        gradients.append(model.table.weight.grad)
    assert objectives[1] == pytest.approx(objectives[0], rel=1e-6)
    plain, padded = gradients
    assert plain is not None
    assert padded is not None
    assert torch.allclose(padded[:, :VOCAB], plain, rtol=1e-5, atol=1e-7)
    assert not padded[:, VOCAB:].any()


def test_the_logged_loss_is_without_regularizers() -> None:
    [batch] = window([6, 4])
    plain, smoothed = make_task(make_trainer()), make_task(make_trainer(), loss=CrossEntropy(label_smoothing=0.2))
    losses = [float(task.training_step(batch, 0)) for task in (plain, smoothed)]
    assert losses[0] != losses[1]
    assert float(plain.recipes_row["train/loss"]) == float(smoothed.recipes_row["train/loss"])


def test_samples_and_tokens_of_all_ranks_are_counted_at_the_end_of_a_window() -> None:
    task = make_task(make_trainer(accumulate_grad_batches=2, strategy=make_strategy(num_ranks=3)))
    first, second = window([6, 1], [2, 2])
    task.training_step(first, 0)
    assert (task.num_samples, task.num_tokens, task.recipes_row) == (0, 0, {})
    task.training_step(second, 1)
    assert (task.num_samples, task.num_tokens) == (12, 12 * SEQ_LEN)
    assert task.recipes_row["train/samples"] == 12
    assert task.recipes_row["train/tokens"] == 12 * SEQ_LEN


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([0.1, 0.1], {"lr": 0.1}),
        ([0.1, 0.2], {"lr": 0.1, "lr/decay": 0.1, "lr/no_decay": 0.2}),
    ],
)
def test_learning_rates_are_logged_by_group_where_they_differ(rates: list[float], expected: dict[str, float]) -> None:
    names = ("decay", "no_decay")
    groups = [{"lr": lr, "group_name": name} for lr, name in zip(rates, names, strict=True)]
    task = make_task(make_trainer(optimizers=[SimpleNamespace(param_groups=groups)]))
    task.training_step(window([6, 4])[0], 0)
    assert {name: value for name, value in task.recipes_row.items() if name.startswith("lr")} == expected


def counting(calls: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def sum_over_ranks(value: Tensor) -> Tensor:
        calls.append(value)
        return 2 * value  # two ranks with the same loss

    return sum_over_ranks


def test_a_step_that_is_not_logged_costs_no_collective() -> None:
    calls: list[Tensor] = []
    strategy = make_strategy(sum_over_token_ranks=counting(calls))
    task = make_task(make_trainer(log_every_n_steps=5, strategy=strategy))
    task.training_step(window([6, 4])[0], 0)
    assert (calls, task.recipes_row) == ([], {})


def test_a_guard_sees_the_loss_over_all_ranks_at_every_step() -> None:
    calls: list[Tensor] = []
    guard = SimpleNamespace(loss=None)
    strategy = make_strategy(guard=guard, sum_over_token_ranks=counting(calls))
    task = make_task(make_trainer(log_every_n_steps=5, strategy=strategy))
    [batch] = window([6, 4])
    task.training_step(batch, 0)
    expected = 2 * float(mean_over_targets(Bigram(), [batch]))
    assert float(guard.loss) == pytest.approx(expected, rel=1e-6)
    assert task.recipes_row == {}


def test_the_last_step_stops_the_run_and_is_logged_whatever_its_number() -> None:
    trainer = make_trainer(log_every_n_steps=5, global_step=6, max_steps=7)
    task = make_task(trainer)
    task.training_step(window([6, 4])[0], 0)
    assert trainer.should_stop
    assert "train/loss" in task.recipes_row


def test_validation_adds_up_losses_and_targets_of_uneven_batches() -> None:
    task = make_task(make_trainer(), metrics={"perplexity": Perplexity()})
    logged: dict[str, float] = {}
    task.log_dict = logged.update  # type: ignore[method-assign, assignment]
    task.on_validation_epoch_start()
    batches = [make_batch(counts, seed=seed) for seed, counts in enumerate(([6, 1], [2, 0], [0]))]
    for index, batch in enumerate(batches):
        task.validation_step(batch, index)
    task.on_validation_epoch_end()
    expected = float(mean_over_targets(task.model, batches))
    assert logged["val/loss"] == pytest.approx(expected, rel=1e-6)
    assert list(logged) == ["val/loss", "val/perplexity"]
    assert logged["val/perplexity"] == pytest.approx(2.718281828459045**expected, rel=1e-6)


def checkpoint_of(task: LanguageModeling, *, step: int, accumulate: int) -> dict[str, Any]:
    done = {"ready": step * accumulate, "completed": step * accumulate - 1}
    checkpoint: dict[str, Any] = {
        "global_step": step,
        "state_dict": task.state_dict(),
        "optimizer_states": [{"state": {}}],
        "loops": {"fit_loop": {"epoch_loop.batch_progress": {"total": dict(done), "current": dict(done)}}},
    }
    task.remember_hyperparameters(task.trainer.optimizers[0])
    task.on_save_checkpoint(checkpoint)
    return checkpoint | {"values": {}}  # as it is read: no rank kept anything beside tensors


def test_a_resumed_task_has_the_counters_and_counts_its_own_micro_batches() -> None:
    task = make_task(make_trainer(accumulate_grad_batches=2))
    for _ in range(3):
        for batch in window([6, 1], [2, 2]):
            task.training_step(batch, 0)
    checkpoint = checkpoint_of(task, step=3, accumulate=2)
    resumed = make_task(make_trainer(accumulate_grad_batches=4))
    resumed.on_load_checkpoint(checkpoint)
    assert (resumed.num_samples, resumed.num_tokens) == (12, 12 * SEQ_LEN)
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    # step 3 of 4 micro-batches each; the last one is not completed while the checkpoint is written
    assert progress["total"] == {"ready": 12, "completed": 11}


def test_a_checkpoint_of_another_model_or_optimizer_is_rejected() -> None:
    task = make_task(make_trainer())
    task.remember_optimizer(torch.optim.SGD(task.parameters(), lr=0.1))
    checkpoint = checkpoint_of(task, step=1, accumulate=1)
    other = make_task(make_trainer(), model=Bigram(num_columns=16))
    with pytest.raises(ConfigError, match=r"the checkpoint is of another model: model\.table"):
        other.on_load_checkpoint(checkpoint)
    resumed = make_task(make_trainer())
    resumed.on_load_checkpoint(checkpoint)
    with pytest.raises(ConfigError, match="the checkpoint holds the state of SGD"):
        resumed.remember_optimizer(torch.optim.AdamW(resumed.parameters(), lr=0.1))


def test_a_checkpoint_with_other_frozen_parameters_is_rejected_and_with_other_groups_is_not() -> None:
    task = make_task(make_trainer())
    names = [name for name, _ in task.named_parameters()]
    task.remember_optimizer(torch.optim.SGD(task.parameters(), lr=0.1))
    checkpoint = checkpoint_of(task, step=1, accumulate=1)
    with pytest.raises(ConfigError, match=rf"{names[0].removeprefix('model.')} was trained before and is frozen now"):
        check_trained([name for name in names if name != names[0]], checkpoint["parameters"])
    with pytest.raises(ConfigError, match="was frozen before and is trained now, as 1 more are that differ"):
        check_trained([*names, "model.a", "model.b"], names)
    check_trained([*reversed(names)], checkpoint["parameters"])  # in other groups
    check_trained(names, None)


def test_a_model_that_takes_no_positions_trains_on_no_packed_examples() -> None:
    source = SimpleNamespace(tokenizer=None, packs=True)
    task = make_task(make_trainer(datamodule=SimpleNamespace(source=source)))
    refused = "data.packing=true: Bigram takes no positions: packed examples would see"
    with pytest.raises(ConfigError, match=refused):
        task.setup("fit")
    source.packs, source.packs_batches = False, True
    with pytest.raises(ConfigError, match=refused):
        task.setup("fit")
    source.packs_batches = False
    task.setup("fit")
