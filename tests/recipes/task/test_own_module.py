"""A LightningModule of one's own: its own Trainer's losses bit for bit, also after a resume anywhere."""

import re
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import own_modules
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from matplotlib import pyplot
from support import execute, read_metrics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipes.checkpoint.manifest import read_manifest
from recipes.config import compose_and_check
from recipes.run_folder import EVENTS_FILE, read_events, read_summary
from recipes.runtime.exit_codes import ExitCode

MODULE, LOADERS = "task.module._target_=own_modules.Classifier", "data.module._target_=own_modules.Rows"
OWN = ("task=lightning", "data=lightning", "trainer.gradient_clip_val=null", "eval_every=10", "save_every=7")


def own(*overrides: str, module: str = "Classifier", data: str = "{_target_: own_modules.Rows}") -> list[str]:
    return [*OWN, f"task.module={{_target_: own_modules.{module}}}", f"data.module={data}", *overrides]


def run(folder: Path, *overrides: str) -> None:
    assert execute(*overrides, f"hydra.run.dir={folder}") == 0


class Recorder(lightning.Callback):
    """Keeps what a script's own Trainer computes: the loss of each batch, and what is logged."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def train_in_a_script(module: type[Any], steps: int, data: Any = own_modules.Rows, **trainer: Any) -> list[Any]:
    lightning.seed_everything(1234, verbose=False)
    loaders = data() if data is not None else None
    recorder = Recorder()
    settings = {"val_check_interval": 10, "check_val_every_n_epoch": None, "max_epochs": -1, "logger": False} | trainer
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    own_trainer = lightning.Trainer(max_steps=steps, accelerator="cpu", callbacks=[recorder], **quiet, **settings)
    own_trainer.fit(module(), loaders)
    return recorder.rows


def get_column(folder: Path, name: str) -> dict[int, float]:
    return {int(row["step"]): row[name] for row in read_metrics(folder) if row.get(name) is not None}


def to_float32(values: Any) -> list[float]:
    return torch.tensor([float(f"{value:.9g}") for value in values], dtype=torch.float32).tolist()


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return to_float32(row["train_loss"] for row in train_in_a_script(own_modules.Classifier, 30))


def test_the_losses_are_those_of_its_own_trainer_bit_for_bit(tmp_path: Path, expected: list[float]) -> None:
    run(tmp_path, *own("trainer.max_steps=30"))
    logged, returned = get_column(tmp_path, "train_loss"), get_column(tmp_path, "train/loss")
    assert to_float32(logged.values()) == to_float32(returned.values()) == expected
    assert [*logged] == [*range(1, 31)]
    assert [*get_column(tmp_path, "val_loss")] == [10, 20, 30]
    assert get_column(tmp_path, "epochs") == {13: 1.0, 26: 2.0, 30: 3.0}
    printed = re.findall(r"step +(\d+)/30  loss (\S+)", (tmp_path / "train.log").read_text())
    assert [(int(step), float(loss)) for step, loss in printed] == [
        (step, round(loss, 4)) for step, loss in returned.items()
    ]


@pytest.mark.parametrize("stop", [9, 13, 20, 26])
def test_a_run_goes_on_within_an_epoch_and_at_its_end_as_if_it_had_not_stopped(
    tmp_path: Path, stop: int, expected: list[float]
) -> None:
    run(tmp_path, *own(f"trainer.max_steps={stop}"))
    run(tmp_path, *own("trainer.max_steps=30", "resume=auto"))
    losses = get_column(tmp_path, "train/loss")
    assert [*losses] == [*range(1, 31)]
    assert to_float32(losses.values()) == expected


def test_a_validation_that_draws_moves_the_generators_of_training_as_under_its_own_trainer(tmp_path: Path) -> None:
    own_logger = TensorBoardLogger(str(tmp_path / "own"))
    rows = train_in_a_script(own_modules.Sampling, 24, logger=own_logger)
    run(tmp_path, *own("trainer.max_steps=14", module="Sampling"))  # it ends with a validation that the script has not
    run(tmp_path, *own("trainer.max_steps=24", "resume=auto", module="Sampling"))
    assert to_float32(get_column(tmp_path, "train/loss").values()) == to_float32(row["train_loss"] for row in rows)
    assert not pyplot.get_fignums()  # figures that no logger keeps are closed, as TensorBoard closes them


def test_what_a_module_draws_reaches_the_logger_beside_metrics_csv(tmp_path: Path) -> None:
    run(tmp_path, *own("trainer.max_steps=20", "logger=tensorboard", module="Sampling"))
    files = EventAccumulator(str(tmp_path / "tensorboard"))
    files.Reload()
    assert [image.step for image in files.Images("sample")] == [10, 20]
    for name in ("epoch_begun", "begun_by_each"):  # without a step: in the newest row
        assert [point.step for point in files.Scalars(name)] == [*get_column(tmp_path, name)] == [13]
    assert "note/text_summary" in files.Tags()["tensors"]
    assert "keeps nothing of" not in (tmp_path / "train.log").read_text()


@pytest.mark.parametrize("stop", [9, 20])  # after a batch, after a validation
def test_a_checkpoint_has_what_the_last_hooks_of_the_module_do(tmp_path: Path, stop: int) -> None:
    rows = train_in_a_script(own_modules.Taught, 30)
    run(tmp_path, *own(f"trainer.max_steps={stop}", module="Taught"))
    run(tmp_path, *own("trainer.max_steps=30", "resume=auto", module="Taught"))
    assert to_float32(get_column(tmp_path, "train/loss").values()) == to_float32(row["train_loss"] for row in rows)
    assert [*get_column(tmp_path, "teacher_norm")] == [*range(1, 31)]


def test_objects_that_a_module_adds_to_a_checkpoint_are_made_again(tmp_path: Path) -> None:
    run(tmp_path, *own("trainer.max_steps=5", module="Keeping"))
    run(tmp_path, *own("trainer.max_steps=10", "resume=auto", module="Keeping"))
    assert [*get_column(tmp_path, "num_batches").values()] == [float(number) for number in range(1, 11)]
    log = (tmp_path / "train.log").read_text()
    assert log.count("No checkpoint has 'scale'") == 2  # once a run


@pytest.mark.parametrize(("stop", "in_batch"), [(13, False), (13, True), (26, True)])
def test_a_run_stopped_in_the_validation_of_an_epoch_goes_on_as_if_it_had_not_stopped(
    tmp_path: Path, stop: int, in_batch: bool
) -> None:
    by_epoch = ("eval_every=auto", "trainer.max_epochs=3", "checkpoint.keep_best=0")
    run(tmp_path / "whole", *own(*by_epoch))
    stopped = f"task.module={{_target_: own_modules.Interrupted, stop_at: {stop}, in_batch: {in_batch}}}"
    assert execute(*own(*by_epoch, stopped), f"hydra.run.dir={tmp_path}") == ExitCode.PREEMPTED
    run(tmp_path, *own(*by_epoch, "resume=auto", module="Interrupted"))
    for name in ("train/loss", "lr", "val_loss"):
        assert get_column(tmp_path, name) == get_column(tmp_path / "whole", name), name
    assert "epoch 3/3  step 39/39" in (tmp_path / "train.log").read_text()


@pytest.mark.parametrize(
    ("stop", "monitor", "interval", "frequency"),
    [
        (37, "val_loss", "epoch", 1),  # after the last validation of an epoch, before its end
        (26, "val_loss", "epoch", 2),  # at its end
        (26, "train_loss_epoch", "epoch", 1),
        (10, "train_loss", "step", 5),  # with a validation
        (23, "train_loss", "step", 5),
    ],
)
def test_reduce_lr_on_plateau_makes_the_steps_of_a_run_that_has_not_stopped(
    tmp_path: Path, stop: int, monitor: str, interval: str, frequency: int
) -> None:
    settings: dict[str, Any] = {"monitor": monitor, "interval": interval, "frequency": frequency}
    rows = train_in_a_script(lambda: own_modules.Plateau(**settings), 60)
    described = ", ".join(f"{name}: {value}" for name, value in settings.items())
    module = f"task.module={{_target_: own_modules.Plateau, {described}}}"
    run(tmp_path, *own(f"trainer.max_steps={stop}", module))
    run(tmp_path, *own("trainer.max_steps=60", "resume=auto", module))
    rates = [*get_column(tmp_path, "lr").values()]
    assert len({*rates}) > 1
    losses = get_column(tmp_path, "train/loss").values()
    assert to_float32(losses) == to_float32(row["train_loss_step"] for row in rows)
    begun = get_column(tmp_path, "epoch_begun")
    assert [*begun.values()] == [float(epoch) for epoch in range(len(begun))]


def test_accumulation_and_clipping_give_the_losses_of_its_own_trainer(tmp_path: Path) -> None:
    by_epoch = {"val_check_interval": 1.0, "check_val_every_n_epoch": 1}
    rows = train_in_a_script(own_modules.Classifier, 20, accumulate_grad_batches=2, **by_epoch)
    run(tmp_path, *own("trainer.max_steps=20", "trainer.accumulate_grad_batches=2", "eval_every=auto"))
    logged = [*get_column(tmp_path, "train_loss").values()]
    # an epoch has 13 batches, so its seventh step is of one
    ends = [number for number in range(len(rows)) if number % 13 % 2 or number % 13 == 12]
    found = [rows[number]["train_loss"] for number in ends]
    assert to_float32(logged) == to_float32(found)
    # by default a validation is at the end of each epoch, and at that of the run
    assert [*get_column(tmp_path, "val_loss")] == [7, 14, 20]
    means = [
        rows[end]["train_loss"] if end % 13 == 12 else (rows[end - 1]["train_loss"] + rows[end]["train_loss"]) / 2
        for end in ends
    ]
    # sums of float32 in another order
    assert [*get_column(tmp_path, "train/loss").values()] == pytest.approx(means, rel=1e-6)
    clipped = train_in_a_script(own_modules.Classifier, 20, gradient_clip_val=0.3)
    run(tmp_path / "clipped", *own("trainer.max_steps=20", "trainer.gradient_clip_val=0.3"))
    found = [*get_column(tmp_path / "clipped", "train_loss").values()]
    # ours adds the squares of the norm in float64
    assert found == pytest.approx([row["train_loss"] for row in clipped], rel=2e-6)


def test_validations_are_counted_in_optimizer_steps_whatever_an_epoch_leaves_over(tmp_path: Path) -> None:
    run(tmp_path, *own("trainer.max_steps=17", "trainer.accumulate_grad_batches=2", "eval_every=5"))
    assert [*get_column(tmp_path, "val_loss")] == [5, 10, 15, 17]
    run(tmp_path / "second", *own("trainer.max_steps=30", "eval_every=2epochs"))
    assert [*get_column(tmp_path / "second", "val_loss")] == [26, 30]


def test_a_row_has_the_learning_rate_of_each_group_that_its_step_was_made_with(tmp_path: Path) -> None:
    run(tmp_path, *own("trainer.max_steps=9", module="Grouped"))
    module = own_modules.Grouped()
    configured: Any = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    for step in range(1, 10):
        rates = [group["lr"] for group in optimizer.param_groups]
        for name, rate in zip(("lr", "lr/head", "lr/group_1"), (rates[0], rates[0], rates[1]), strict=True):
            assert get_column(tmp_path, name)[step] == pytest.approx(rate, rel=1e-8), (name, step)
        optimizer.step()
        scheduler.step()


def test_a_plateau_of_a_metric_of_validation_needs_no_setting(tmp_path: Path) -> None:
    run(tmp_path, *own("trainer.max_epochs=2", "eval_every=auto", module="Plateau"))
    assert [*get_column(tmp_path, "val_loss")] == [13, 26]


def test_a_plateau_of_a_metric_that_nothing_validates_is_refused_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = own(
        "trainer.max_epochs=2", "eval_every=auto", module="Plateau", data="{_target_: own_modules.TrainingOnly}"
    )
    assert execute(*words, f"hydra.run.dir={tmp_path}") == ExitCode.INVALID_CONFIG
    assert "ReduceLROnPlateau follows it, and nothing is validated" in "".join(capsys.readouterr())
    assert not (tmp_path / "metrics.csv").exists()


def test_two_optimizers_of_a_module_step_and_resume_as_under_its_own_trainer(tmp_path: Path) -> None:
    rows = train_in_a_script(own_modules.Adversaries, 40)
    module = {"module": "Adversaries"}
    run(tmp_path, *own("trainer.max_steps=18", **module))
    run(tmp_path, *own("trainer.max_steps=40", "resume=auto", **module))
    for name in ("generator_loss", "discriminator_loss"):
        found = get_column(tmp_path, name)
        assert [*found] == [*range(2, 41, 2)]
        assert to_float32(found.values()) == to_float32(row[name] for row in rows)


def test_a_module_may_have_its_loaders_itself(tmp_path: Path) -> None:
    rows = train_in_a_script(own_modules.WithLoaders, 12, None)
    run(tmp_path, *own("trainer.max_steps=6", module="WithLoaders", data="null"))
    run(tmp_path, *own("trainer.max_steps=12", "resume=auto", module="WithLoaders", data="null"))
    found = get_column(tmp_path, "train/loss")
    assert [*found] == [*range(1, 13)]
    assert to_float32(found.values()) == to_float32(row["train_loss"] for row in rows)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_gives_the_losses_of_its_own_trainer(tmp_path: Path, precision: str) -> None:
    # with the argument `precision`, Lightning takes float16 on GPUs only; its plugin runs on a CPU as well
    own_precision = {"plugins": [MixedPrecision(precision, "cpu")]}  # type: ignore[arg-type]  # a literal
    rows = train_in_a_script(own_modules.Classifier, 8, **own_precision)
    run(tmp_path, *own("trainer.max_steps=8", f"precision={precision}"))
    assert to_float32(get_column(tmp_path, "train/loss").values()) == to_float32(row["train_loss"] for row in rows)


def test_a_module_takes_tuples_of_the_data_of_recipes_and_resumes_exactly(tmp_path: Path) -> None:
    module = "task.module={_target_: own_modules.Classifier, num_inputs: 64}"
    digits = ("task=lightning", module, "data=digits", "task.batch=[inputs, targets]", "save_every=5", "eval_every=10")
    run(tmp_path / "whole", *digits, "trainer.max_steps=12")
    run(tmp_path / "resumed", *digits, "trainer.max_steps=5")
    run(tmp_path / "resumed", *digits, "trainer.max_steps=12", "resume=auto")
    whole, resumed = (get_column(tmp_path / name, "train/loss") for name in ("whole", "resumed"))
    assert whole == resumed
    assert len(whole) == 12


def test_a_spike_is_rolled_back_and_later_batches_are_trained_on(tmp_path: Path) -> None:
    spike = "task.module={_target_: own_modules.Classifier, spike_at: 24}"
    rollback = ("callbacks.loss_spike.action=rollback", "callbacks.loss_spike.warmup_steps=10")
    run(tmp_path, *own("trainer.max_steps=30", spike, *rollback, "callbacks.loss_spike.max_skips=0"))
    kinds = [event["event"] for event in read_events(tmp_path / EVENTS_FILE)]
    assert kinds.count("rollback") == 1
    losses = get_column(tmp_path, "train/loss")
    assert max(losses.values()) < 5
    assert [*losses] == [*range(1, 31)]


def test_the_best_checkpoint_is_by_the_one_loss_that_validation_logs(tmp_path: Path) -> None:
    run(tmp_path, *own("trainer.max_steps=30", "save_every=10"))
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step_0000030.ckpt"


def test_the_summary_has_the_loss_of_validation_and_what_ended_the_run(tmp_path: Path) -> None:
    run(tmp_path, *by_epoch("trainer.max_epochs=2", module="Measured, losses: [3, 1, 2]"))
    run(tmp_path, *by_epoch("trainer.max_epochs=3", "resume=auto", module="Measured, losses: [3, 1, 2]"))
    summary = read_summary(tmp_path) or {}
    assert (summary["val_loss"], summary["best_val_loss"]) == (2.0, 1.0)
    assert summary["ended_by"] == "trainer.max_epochs"
    assert "val loss 2.0000" in (tmp_path / "train.log").read_text().splitlines()[-1]
    run(tmp_path, *by_epoch("trainer.max_epochs=3", "resume=auto", module="Measured, losses: [3, 1, 2]"))
    assert "to go on: a larger trainer.max_epochs" in (tmp_path / "train.log").read_text()


def test_what_a_recipe_decides_is_said_at_the_start_unless_it_is_typed(tmp_path: Path) -> None:
    module = "task.module={_target_: own_modules.Classifier}"
    run(tmp_path, "task=lightning", module, "data.module={_target_: own_modules.Rows}", "trainer.max_epochs=1")
    assert "not typed, but of the recipe: trainer.gradient_clip_val=1\n" in (tmp_path / "train.log").read_text()
    run(tmp_path / "typed", *own("trainer.max_steps=2"))
    assert "not typed" not in (tmp_path / "typed/train.log").read_text()


def list_saved(folder: Path) -> list[int]:
    return [event["step"] for event in read_events(folder / EVENTS_FILE) if event["event"] == "checkpoint"]


def by_epoch(*overrides: str, module: str = "Classifier", data: str = "{_target_: own_modules.Rows}") -> list[str]:
    overrides = ("eval_every=auto", "trainer.max_epochs=4", *overrides)
    return own("save_every=auto", *overrides, module=module, data=data)


def test_a_checkpoint_follows_each_validation_that_is_the_best_and_the_end(tmp_path: Path) -> None:
    run(tmp_path, *by_epoch(module="Measured, losses: [3, 1, 2, 2]"))
    assert list_saved(tmp_path) == [13, 26, 52]
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step_0000026.ckpt"
    assert (tmp_path / "checkpoints" / "last").resolve().name == "step_0000052.ckpt"


def test_a_checkpoint_that_is_not_the_best_follows_a_minute_after_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.checkpoint.saver._AUTO_SECONDS", 0.0)
    run(tmp_path, *by_epoch(module="Measured, losses: [3, 1, 2, 2]"))
    assert list_saved(tmp_path) == [13, 26, 39, 52]
    run(tmp_path / "unvalidated", *by_epoch(data="{_target_: own_modules.TrainingOnly}"))
    assert list_saved(tmp_path / "unvalidated") == [13, 26, 39, 52]


def test_a_resume_with_another_learning_rate_says_that_the_one_of_the_checkpoint_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    run(folder, *own("trainer.max_steps=7"))
    run(folder, *own("trainer.max_steps=9", "resume=auto"))
    assert "goes on with the settings of the checkpoint" not in capsys.readouterr().out
    run(folder, *own("trainer.max_steps=12", "resume=auto", "+task.module.lr=1e-3"))
    assert "now: initial_lr 0.01 -> 0.001, lr 0.01 -> 0.001." in capsys.readouterr().out
    assert get_column(folder, "lr")[12] == pytest.approx(1e-2)


def test_a_resumed_run_knows_the_best_of_the_run_before(tmp_path: Path) -> None:
    run(tmp_path / "whole", *by_epoch(module="Measured, losses: [3, 1, 2, 0]"))
    run(tmp_path, *by_epoch("trainer.max_epochs=2", module="Measured, losses: [3, 1, 2, 0]"))
    run(tmp_path, *by_epoch("resume=auto", module="Measured, losses: [3, 1, 2, 0]"))
    assert list_saved(tmp_path) == [13, 26, 52]
    assert get_column(tmp_path, "train/loss") == get_column(tmp_path / "whole", "train/loss")


def test_checkpoints_are_counted_in_epochs(tmp_path: Path) -> None:
    run(tmp_path, *by_epoch("save_every=2epochs", "trainer.max_epochs=5"))
    assert list_saved(tmp_path) == [26, 52, 65]


def test_an_epoch_that_ends_within_a_window_is_saved_with_the_next_step(tmp_path: Path) -> None:
    run(tmp_path, *own("save_every=1epochs", "eval_every=auto", "trainer.max_steps=12", module="ByHand"))
    assert list_saved(tmp_path) == [7, 12]


def test_of_two_validation_loaders_a_typed_loss_chooses_the_best(tmp_path: Path) -> None:
    data = "{_target_: own_modules.TwoSets}"
    one, two = "val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"
    run(tmp_path / "two", *by_epoch("trainer.max_epochs=1", module="OnTwoSets", data=data))
    line = "No checkpoint is the best: validation logs 2 losses; to rank them: checkpoint.monitor="
    assert f"{line}{one} or checkpoint.monitor={two}\n" in (tmp_path / "two/train.log").read_text()
    run(tmp_path / "none", *by_epoch("trainer.max_epochs=1", module="OnTwoSets, logs_loss: false", data=data))
    assert "logs no losses; to rank them: checkpoint.monitor=val_rows/data" in (tmp_path / "none/train.log").read_text()
    run(tmp_path, *by_epoch(f"checkpoint.monitor={two}", module="OnTwoSets", data=data))
    best = read_manifest((tmp_path / "checkpoints/best").resolve())
    assert best is not None
    assert best.metrics[two] == pytest.approx(min(get_column(tmp_path, two).values()), rel=1e-6)


def test_a_name_that_two_validation_loaders_share_ends_the_run_with_those_of_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = by_epoch(
        "checkpoint.monitor=val_loss/dataloader_idx_2", module="OnTwoSets", data="{_target_: own_modules.TwoSets}"
    )
    assert execute(*overrides, f"hydra.run.dir={tmp_path}") == ExitCode.INVALID_CONFIG
    assert "type: checkpoint.monitor=val_loss/dataloader_idx_1, or" in capsys.readouterr().out


def test_rows_are_of_steps_whatever_a_module_logs_by_batch_or_by_epoch(tmp_path: Path, expected: list[float]) -> None:
    run(tmp_path, *own("trainer.max_steps=14", module="Habitual"))
    run(tmp_path, *own("trainer.max_steps=30", "resume=auto", module="Habitual"))
    losses = get_column(tmp_path, "train/loss")
    assert to_float32(losses.values()) == expected
    assert [*losses] == [*range(1, 31)]
    assert [int(row["step"]) for row in read_metrics(tmp_path)] == [*range(1, 31)]
    assert [*get_column(tmp_path, "val_loss_epoch")] == [10, 14, 20, 30]  # the first run ended at 14
    assert [*get_column(tmp_path, "epochs_done")] == [*get_column(tmp_path, "train/loss_epoch")] == [13, 14, 26, 30]
    assert read_summary(tmp_path)["train_loss"] == pytest.approx(losses[30], rel=1e-8)
    log = (tmp_path / "train.log").read_text()
    assert log.count("keeps nothing of add_scalar") == 2  # once a run
    assert "The best checkpoint is the one with the lowest val_loss_epoch" in log
    # a step without a validation of its own is not ranked by an earlier one
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step_0000030.ckpt"


def test_a_module_may_be_given_its_network_and_functions_that_make_its_optimizer(tmp_path: Path) -> None:
    net = "net: {_target_: own_modules.Classifier, dropout: 0.2}"
    optimizer = "optimizer: {_target_: torch.optim.Adam, _partial_: true, lr: 0.01}"
    scheduler = "scheduler: {_target_: torch.optim.lr_scheduler.StepLR, _partial_: true, step_size: 1}"
    module = f"task.module={{_target_: own_modules.Composed, {net}, {optimizer}, {scheduler}}}"
    run(tmp_path, *own("trainer.max_steps=10", module), "checkpoint.monitor=val/acc_best", "checkpoint.mode=max")
    run(tmp_path, *own("trainer.max_steps=20", module, "resume=auto"))
    assert len(get_column(tmp_path, "train/loss")) == 20
    assert [*get_column(tmp_path, "val/acc_best")] == [10, 20]


def test_a_module_that_imports_pytorch_lightning_is_trained_as_one_of_lightning(
    tmp_path: Path, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "pytorch_lightning"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.syspath_prepend(tmp_path)
    source = Path(own_modules.__file__).read_text()
    (tmp_path / "of_the_other.py").write_text(source.replace("lightning.pytorch as", "pytorch_lightning as"))
    module, data = "task.module={_target_: of_the_other.Classifier}", "{_target_: of_the_other.Rows}"
    run(tmp_path / "run", *own("trainer.max_steps=30", module, data=data))
    assert to_float32(get_column(tmp_path / "run", "train/loss").values()) == expected
    mistakes = compose_and_check(["model._target_=of_the_other.Classifier", "data=digits", "model=resnet18"])[1]
    assert any("Classifier is a LightningModule" in str(mistake) for mistake in mistakes), mistakes


REFUSED = {
    "an optimizer": (["optimizer=muon"], "the module has its own"),
    "a batch size": (["global_batch_size=8"], "the loaders of data.module decide what a batch is"),
    "a mode": (["mode=plan"], "a LightningModule keeps to itself"),
    "tensor parallelism": (["strategy=fsdp", "trainer.devices=2", "tensor_parallel_size=2"], "only models of ours"),
    "ZeRO-3": (["strategy=deepspeed_stage_3"], "constructs its weights and its optimizer itself"),
    "bfloat16 weights": (["precision=bf16-true"], "no storage yet"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_before_the_run(name: str) -> None:
    overrides, reason = REFUSED[name]
    mistakes = compose_and_check(own(*overrides))[1]
    assert any(reason in str(mistake) for mistake in mistakes), mistakes


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("model._target_=own_modules.Classifier", "task=lightning 'task.module={_target_: own_modules.Classifier, …}'"),
        ("task._target_=own_modules.Classifier", "task=lightning 'task.module={_target_: own_modules.Classifier, …}'"),
        ("data._target_=own_modules.Rows", "data=lightning 'data.module={_target_: own_modules.Rows, …}'"),
    ],
)
def test_a_class_of_lightning_in_another_place_is_answered_with_the_command(override: str, fix: str) -> None:
    mistakes = compose_and_check([override, "data=digits", "model=resnet18"])[1]
    assert fix in [mistake.fix for mistake in mistakes], mistakes


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("lr=1e-2", "task.module.lr=1e-2"),
        ("batch_size=8", "data.module.batch_size=8"),
        ("task.module=own_modules.Classifier", "'task.module={_target_: own_modules.Classifier}'"),
        (
            "module=own_modules.Classifier",
            "model._target_=own_modules.Classifier, or of Lightning"
            " task=lightning 'task.module={_target_: own_modules.Classifier}'",
        ),
        (
            "data=own_modules.Rows",
            "data._target_=own_modules.Rows, or of Lightning data=lightning 'data.module={_target_: own_modules.Rows}'",
        ),
        (
            "task.module={_target_: own_project.model.Net}",
            "task.module._target_=own_project.models.Net",
        ),
        ("eval_every=half", "eval_every=<optimizer steps>, or eval_every=1epochs"),
    ],
)
def test_a_word_for_a_class_or_setting_of_the_module_is_answered_with_the_command(
    override: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_project").mkdir()
    (tmp_path / "own_project/models.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    typed = [*own(*([] if override.startswith("task.module") else [MODULE]))]
    typed = [word for word in typed if not (override.startswith("task.module") and word.startswith("task.module"))]
    if override.startswith("data="):
        typed = ["task=lightning", MODULE]
    _, mistakes = compose_and_check([*typed, override])
    assert fix in [mistake.fix for mistake in mistakes]


@pytest.mark.parametrize(
    ("optimizer", "typed", "fix"),
    [
        ("torch.optim.Adam, _partial_: true, lr: 0.01", "lr=0.1", "task.module.optimizer.lr=0.1"),
        ("torch.optim.Adam, _partial_: true", "learning_rate=0.1", "task.module.optimizer.lr=0.1"),
        ("torch.optim.Adam, _partial_: true", "wd=0.1", "task.module.optimizer.weight_decay=0.1"),
    ],
)
def test_a_word_for_a_setting_in_the_module_is_answered_with_where_it_is(optimizer: str, typed: str, fix: str) -> None:
    module = (
        f"{{_target_: own_modules.Composed, net: {{_target_: torch.nn.Linear}}, optimizer: {{_target_: {optimizer}}}}}"
    )
    _, mistakes = compose_and_check([*OWN, f"task.module={module}", "data.module=null", typed])
    assert fix in [mistake.fix for mistake in mistakes]


def test_no_setting_in_a_section_that_the_module_does_not_take_is_dropped() -> None:
    typed = [*OWN, "task.module._target_=own_modules.Classifier", "data.module=null", "+task.module.optimizer.lr=0.1"]
    [mistake] = compose_and_check(typed)[1]
    assert str(mistake).startswith("task.module.optimizer=…: Classifier has no argument 'optimizer'; type ")


def test_an_interval_in_epochs_needs_loaders_with_epochs() -> None:
    for name in ("eval_every", "save_every"):
        _, mistakes = compose_and_check([f"{name}=2epochs"])
        assert [mistake.fix for mistake in mistakes] == [f"{name}=100, in optimizer steps"]
        _, mistakes = compose_and_check(by_epoch(f"{name}=often"))
        assert [mistake.fix for mistake in mistakes] == [f"{name}=<optimizer steps>, or {name}=1epochs"]


def test_auto_is_a_number_of_steps_for_a_stream() -> None:
    def save_every(*overrides: str) -> object:
        resolved, mistakes = compose_and_check([*overrides])
        assert not mistakes
        assert resolved is not None
        return resolved.save_every

    assert save_every() == 100
    assert save_every("task=lightning", MODULE, "data=digits", "task.batch=[inputs, targets]", "eval_every=50") == 50
    assert save_every("task=lightning", MODULE, LOADERS) == "auto"
    assert save_every("save_every=null") is None


def test_a_loss_that_validation_does_not_log_ends_the_run_with_the_nearest_that_it_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = own("trainer.max_epochs=1", "eval_every=auto", "checkpoint.monitor=valloss")
    assert execute(*overrides, f"hydra.run.dir={tmp_path}") == ExitCode.INVALID_CONFIG
    printed = capsys.readouterr().out
    assert "The run has ended after its first validation." in printed
    assert "nothing was built" not in printed
    assert "type: checkpoint.monitor=val_loss, or checkpoint.keep_best=0" in printed


def test_a_batch_may_hold_no_tensor(tmp_path: Path) -> None:
    run(tmp_path, *own("trainer.max_steps=4", module="Reader", data="{_target_: own_modules.Words}"))
    assert [*get_column(tmp_path, "train/loss")] == [1, 2, 3, 4]


def test_a_tensor_that_no_checkpoint_would_hold_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = own("trainer.max_steps=2", f"hydra.run.dir={tmp_path}", module="WithStrayTensor")
    assert execute(*overrides) == ExitCode.INVALID_CONFIG
    assert "no checkpoint would hold them" in " ".join(capsys.readouterr().out.split())


def test_a_run_in_epochs_has_the_schedules_of_its_own_trainer_and_resumes(tmp_path: Path) -> None:
    length = {"max_epochs": 3, "val_check_interval": 1000}
    rows = train_in_a_script(own_modules.Annealed, -1, accumulate_grad_batches=2, **length)
    annealed = own("trainer.max_epochs=3", "trainer.accumulate_grad_batches=2", "eval_every=500", module="Annealed")
    stopped = "task.module={_target_: own_modules.Annealed, stop_at: 16}"
    assert execute(*annealed, stopped, f"hydra.run.dir={tmp_path}") == ExitCode.PREEMPTED
    run(tmp_path, *annealed, "resume=auto")
    losses = get_column(tmp_path, "train_loss")
    # an epoch has 13 batches, so its seventh step is of one
    ends = [number for number in range(len(rows)) if number % 13 % 2 or number % 13 == 12]
    assert [*losses] == [*range(1, 22)]
    assert to_float32(losses.values()) == to_float32(rows[number]["train_loss"] for number in ends)
    run(tmp_path, *annealed, "resume=auto")
    assert "Nothing to do" in (tmp_path / "train.log").read_text()


def test_a_rollback_in_the_last_epoch_begins_another_one(tmp_path: Path) -> None:
    spike = "task.module={_target_: own_modules.Classifier, spike_at: 24}"
    rollback = ("callbacks.loss_spike.action=rollback", "callbacks.loss_spike.warmup_steps=10")
    run(tmp_path, *own("trainer.max_epochs=2", spike, *rollback, "callbacks.loss_spike.max_skips=0"))
    assert [event["event"] for event in read_events(tmp_path / EVENTS_FILE)].count("rollback") == 1
    assert [*get_column(tmp_path, "train/loss")] == [*range(1, 27)]


@pytest.mark.parametrize(
    ("module", "reason"), [("Adversaries", "how many steps it makes in a batch"), ("OfStream", "do not say how many")]
)
def test_epochs_that_cannot_be_counted_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], module: str, reason: str
) -> None:
    data = "null" if module == "OfStream" else "{_target_: own_modules.Rows}"
    overrides = own("trainer.max_epochs=3", f"hydra.run.dir={tmp_path}", module=module, data=data)
    assert execute(*overrides) == ExitCode.INVALID_CONFIG
    assert reason in " ".join(capsys.readouterr().out.split())


def test_a_callback_of_the_module_by_which_its_optimizer_grows_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = own("trainer.max_steps=2", f"hydra.run.dir={tmp_path}", module="Unfreezing")
    assert execute(*overrides) == ExitCode.INVALID_CONFIG
    assert "it adds parameters to the optimizer during the run" in " ".join(capsys.readouterr().out.split())


def test_a_module_of_lightning_1_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = own("trainer.max_steps=2", f"hydra.run.dir={tmp_path}", module="OfLightning1")
    assert execute(*overrides) == ExitCode.INVALID_CONFIG
    assert "no training_epoch_end and no optimizer_idx of training_step" in " ".join(capsys.readouterr().out.split())


def test_a_file_that_cannot_be_imported_is_named_with_its_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "half_installed.py").write_text("import a_package_that_is_missing\n\nclass Net: ...\n")
    wrong = "task.module={_target_: half_installed.Net}"
    assert execute(*own("trainer.max_steps=2", wrong), f"hydra.run.dir={tmp_path / 'run'}") == ExitCode.INVALID_CONFIG
    shown = " ".join(capsys.readouterr().out.split())
    assert "importing it raises ModuleNotFoundError: No module named 'a_package_that_is_missing'" in shown


def test_another_class_is_named_with_what_to_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [text for text in own() if not text.startswith("task.module")]
    wrong = "task.module={_target_: own_modules.Rows}"
    assert execute(*arguments, wrong, f"hydra.run.dir={tmp_path}") == ExitCode.INVALID_CONFIG
    assert "it is not a LightningModule" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("module", "data", "said"),
    [
        (
            "Classifier",
            "null",
            "1. data.module=null Classifier has no train_dataloader() type: 'data.module={_target_:",
        ),
        ("Classifier", "{_target_: own_modules.WithoutLoaders}", "WithoutLoaders has no train_dataloader()"),
        ("{_target_: own_modules.Plateau, monitor: val_mae}", "{_target_: own_modules.Rows}", "Plateau: val_mae"),
        ("Classifier", "{_target_: own_modules.Rows}", "callbacks.early_stop.monitor=val/loss"),
    ],
)
def test_missing_loaders_and_metrics_are_answered_without_a_traceback(
    module: str, data: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = own("trainer.max_epochs=1", "eval_every=auto", data=data, module="Classifier" if "{" in module else module)
    changed = [f"task.module={module}"] if "{" in module else ["callbacks.early_stop.patience=1"]
    assert execute(*typed, *changed, f"hydra.run.dir={tmp_path}") == ExitCode.INVALID_CONFIG
    printed = " ".join(capsys.readouterr().out.split())
    assert said in printed
    assert "Traceback" not in printed
    if "Rows" in data:
        assert "nothing was built" not in printed
        assert "logged so far: " in printed
    if "Plateau" in said:
        assert "type: eval_every=1epochs for a metric of validation" in printed


def test_a_validation_without_loaders_is_said_to_be_none(tmp_path: Path) -> None:
    run(tmp_path, *own("trainer.max_steps=3", "eval_every=auto", data="{_target_: own_modules.TrainingOnly}"))
    assert "No validation: TrainingOnly has no val_dataloader()" in (tmp_path / "train.log").read_text()
    assert get_column(tmp_path, "val_loss") == {}
