"""With all callbacks a run has the losses, the weights and the random states of the run without them, bit for bit."""

import random
from typing import Any

import numpy as np
import pytest
import third_party_modules as modules
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision

from callbacks import (
    BottleneckMonitor,
    EarlyStop,
    GradNormMonitor,
    HangMonitor,
    LossScaleMonitor,
    LossSpikeRollback,
    MemoryMonitor,
    OptimizerMonitor,
    ProgressLine,
    RunReport,
    SampleText,
    SpeedMonitor,
    StepProfiler,
)

Mixup = modules.Mixup


def lbfgs(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=lr, max_iter=3)


# name: the module and arguments of the Trainer
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (Mixup, {}),
    "accumulation": (Mixup, {"accumulate_grad_batches": 2}),
    "accumulation that does not divide": (Mixup, {"accumulate_grad_batches": 4}),
    "clipping by norm": (Mixup, {"gradient_clip_val": 0.1}),
    "clipping by value": (Mixup, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "bf16-mixed": (Mixup, {"precision": "bf16-mixed"}),
    "bf16-true": (Mixup, {"precision": "bf16-true"}),
    "64-true": (Mixup, {"precision": "64-true"}),
    "float16": (Mixup, {"loss_scale": 256.0}),
    "float16 that overflows": (Mixup, {"loss_scale": 2.0**20}),
    "SGD": (lambda: Mixup(torch.optim.SGD), {}),
    "LBFGS": (lambda: Mixup(lbfgs), {}),
    "LBFGS, clipped": (lambda: Mixup(lbfgs), {"gradient_clip_val": 0.1}),
    "a schedule": (lambda: Mixup(scheduler=True), {"callbacks": [LearningRateMonitor()]}),
    "epoch-only metrics": (lambda: Mixup(on_step=False, on_epoch=True), {"max_epochs": 2}),
    "metrics of both": (lambda: Mixup(on_step=True, on_epoch=True, prog_bar=True), {"max_epochs": 2}),
    "a stream": (modules.Streaming, {}),
    "ragged batches": (modules.Ragged, {"log_every_n_steps": 1}),
    "loader processes": (modules.Workers, {}),
    "dataloader_iter": (lambda: modules.FromIterator(batch_size=2), {}),
    "batches that are skipped": (modules.SkipsBatches, {}),
    "names that callbacks might look for": (modules.Owner, {}),
    "a limit of batches": (Mixup, {"limit_train_batches": 3, "max_epochs": 2}),
    "a limit of steps": (Mixup, {"max_steps": 4}),
    "overfit_batches": (Mixup, {"overfit_batches": 1, "max_epochs": 2}),
    "fast_dev_run": (Mixup, {"fast_dev_run": 3}),
    "validation within the epoch": (Mixup, {"limit_val_batches": 2, "val_check_interval": 2}),
    "a sanity check": (Mixup, {"limit_val_batches": 1, "num_sanity_val_steps": 1}),
    "validation at every second epoch": (
        Mixup,
        {"limit_val_batches": 1, "check_val_every_n_epoch": 2, "max_epochs": 2},
    ),
    "new loaders at each epoch": (Mixup, {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2}),
    "a row per step": (Mixup, {"log_every_n_steps": 1}),
    "no rows": (Mixup, {"log_every_n_steps": 0}),
    "no logger": (Mixup, {"logger": False}),
    "barebones": (Mixup, {"barebones": True}),
    "a profiler": (Mixup, {"profiler": "simple"}),
    "anomaly detection": (Mixup, {"detect_anomaly": True}),
    "deterministic": (Mixup, {"deterministic": True}),
    "checkpoints": (Mixup, {"enable_checkpointing": True, "max_epochs": 2}),
    "an autoencoder": (modules.Autoencoder, {}),
    "a GAN": (modules.Gan, {"log_every_n_steps": 1}),
    "a DQN": (modules.Dqn, {"max_epochs": 2}),
    "steps by hand": (modules.ByHand, {}),
    "a transformer": (modules.Transformer, {"max_epochs": 2}),
}


class Losses(Callback):
    """Remembers the loss of each backward pass."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self.values.append(float(loss.detach()))


def make_all(case: str) -> list[Callback]:
    # Lightning allows no bar in a barebones run; a refused step restores the buffers of its batch, which an overflow
    # without LossSpikeRollback does not
    left_out = {"barebones": ProgressLine, "float16 that overflows": LossSpikeRollback}.get(case)
    every: list[Callback] = [
        GradNormMonitor(per_block=True),
        SpeedMonitor(batch_size_fn=len),
        BottleneckMonitor(),
        MemoryMonitor(),
        StepProfiler(),
        LossScaleMonitor(),
        OptimizerMonitor(per_block=True),
        HangMonitor(),
        LossSpikeRollback(action="skip"),
        EarlyStop(monitor="val_loss", patience=None),
        ProgressLine(),
        SampleText(prompts=["a"], every_n_steps=2),
        RunReport(),
    ]
    return [each for each in every if type(each) is not left_out]


def run(case: str, make_trainer: Any, monitors: list[Callback]) -> dict[str, Any]:
    """Train from one seed; return everything that must not depend on callbacks."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    make_module, options = CASES[case]
    losses, module = Losses(), make_module()
    options = {"log_every_n_steps": 2, **options}
    if options.get("barebones"):
        off = ("logger", "enable_checkpointing", "enable_model_summary", "log_every_n_steps", "num_sanity_val_steps")
        options |= dict.fromkeys(off)
    if scale := options.pop("loss_scale", None):
        # as a plugin, since Lightning turns precision="16-mixed" into bfloat16 on a CPU
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))]
    options["callbacks"] = [*options.get("callbacks", []), losses, *monitors]
    trainer = make_trainer(**options)
    trainer.fit(module)
    assert losses.values
    return {
        "losses": losses.values,
        "steps": trainer.global_step,
        "weights": [value.tolist() for value in module.state_dict().values()],
        "gradients": repr([p.grad for p in module.parameters()]),  # as text, in which NaN equals NaN
        "attributes": [len(module.buffer), module.reward] if isinstance(module, modules.Dqn) else [],
        "torch": torch.get_rng_state().tolist(),
        "numpy": [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
        "python": random.getstate(),
        "module": sorted(vars(module)),
        "modes": [part.training for part in module.modules()],
    }


@pytest.mark.parametrize("case", CASES)
def test_callbacks_leave_no_trace_in_a_run(case: str, make_trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("callbacks.report.callback.write_report", lambda *_, **__: None)  # a second each
    without, having = (
        run(case, make_trainer, [*monitors, *([ModelCheckpoint()] if case == "checkpoints" else [])])
        for monitors in ([], make_all(case))
    )
    for name, value in without.items():
        assert having[name] == value, name


def test_nor_do_a_trace_a_report_and_several_loggers(make_trainer, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(monitors: list[Callback]) -> dict[str, Any]:
        loggers = [TensorBoardLogger(tmp_path, name="board"), CSVLogger(tmp_path, name="csv")]
        monkeypatch.setitem(CASES, "two loggers", (Mixup, {"logger": loggers, "limit_val_batches": 1}))
        return run("two loggers", make_trainer, monitors)

    without = make([])
    assert make([StepProfiler(steps=1, after=1), *make_all("two loggers")]) == without
    assert len([*tmp_path.rglob("report.html")]) == len([*tmp_path.rglob("operators.json")]) == 1
