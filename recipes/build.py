"""The only file that instantiates: config -> Run(task, data, trainer). No weights exist yet when it returns."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from hydra.utils import instantiate
from lightning.fabric.plugins.environments import (  # type: ignore[attr-defined]
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger

from recipes.checkpoint.resume import find_checkpoint, names_checkpoint
from recipes.checkpoint.saver import CheckpointSaver
from recipes.config.compose import Composed, Config, freeze
from recipes.config.ranks import get_ranks
from recipes.config.traits import trains
from recipes.data.datamodule import StreamDataModule
from recipes.errors import ConfigError
from recipes.lightning_internals import disable_signal_handling
from recipes.logger.writers import RowWriter, SummaryWriter
from recipes.numerics.accumulation import Accumulation, divide
from recipes.precision import Precision
from recipes.run_folder import TOKENIZER_FOLDER, find_run_folder
from recipes.runtime.world import Ranks
from recipes.task.base import TrainingTask

SINGLE = {"_target_": "recipes.strategy.single.SingleDevice", "_partial_": True}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, built and not begun.

    Attributes:
        checkpoint: Where it resumes from; None: from the beginning.
        tokenizer_folder: Where the run that `checkpoint` belongs to keeps its tokenizer; else this run.
        overrides: What was typed.
        tags: Typed words that say what it is.
        freeze: Writes the config into the folder.
    """

    name: str
    folder: Path
    task: TrainingTask
    data: StreamDataModule
    trainer: lightning.Trainer
    precision: Precision
    accumulation: Accumulation
    checkpoint: Path | None
    tokenizer_folder: Path
    overrides: list[str]
    tags: list[str]
    freeze: Callable[[], None] = lambda: None


def execute(composed: Composed) -> int:
    """Build a run and do what `mode=` says; its exit code. For a mode of `composed`, of runs that are over, none is."""
    mode = _make(composed.config["mode"])
    if "composed" in inspect.signature(mode).parameters:
        return int(mode(composed))
    run = build(composed.config, composed.run_folder, composed.overrides)
    run = replace(run, freeze=functools.partial(freeze, composed))
    exit_code: int = mode(run)
    return exit_code


def build(config: Config, folder: Path, overrides: list[str]) -> Run:
    """Instantiate every node of a checked config.

    Raises:
        ConfigError: The machine or a checkpoint cannot do what the config asks.
    """
    trained = trains(config)
    checkpoint = find_checkpoint(config["resume"], folder)
    if checkpoint is not None:
        config = _as_saved(config, checkpoint)
    lightning.seed_everything(config["seed"], verbose=False)
    precision: Precision = _make(config["precision"])
    ranks = get_ranks(config)
    devices = _devices(config["trainer"], ranks)
    accumulation = divide(
        global_batch_size=config["global_batch_size"],
        micro_batch_size=config["micro_batch_size"],
        num_devices=ranks.world_size,
        accumulate_grad_batches=config["trainer"]["accumulate_grad_batches"],
    )
    data: StreamDataModule = _make(config["loader"])(
        source=_make(config["data"]),
        accumulation=accumulation,
        seed=config["seed"],
        eval_samples=config["eval_samples"] if trained else None,
    )
    return Run(
        name=config["name"],
        folder=folder,
        task=_task(config, precision),
        data=data,
        trainer=_trainer(config, folder, ranks, devices, precision, accumulation, trained=trained),
        precision=precision,
        accumulation=accumulation,
        checkpoint=checkpoint,
        tokenizer_folder=_tokenizer_folder(checkpoint) or folder / TOKENIZER_FOLDER,
        overrides=overrides,
        tags=config["tags"],
    )


def _task(config: Config, precision: Precision) -> TrainingTask:
    task: TrainingTask = _make(config["task"])(
        make_model=functools.partial(_make, config["model"]),
        make_optimizer=_make(config["optimizer"]),
        schedule=_make(config["scheduler"]),
        activation_checkpoint=_make(config["activation_checkpoint"]),
        compile_blocks=config["compile"],
        fused_optimizer=not precision.scales_loss,
        clipping=_make(config["clipping"]),
        ema_decay=config["ema_decay"],
        label_smoothing=config["label_smoothing"],
        z_loss=config["z_loss"],
        seed=config["seed"],
    )
    return task


def _trainer(
    config: Config,
    folder: Path,
    ranks: Ranks,
    devices: list[torch.device],
    precision: Precision,
    accumulation: Accumulation,
    *,
    trained: bool,
) -> lightning.Trainer:
    saver: CheckpointSaver = _make(config["checkpoint"])
    saver.checkpoint_io.falls_back = not names_checkpoint(config["resume"])
    callbacks: list[Callback] = []
    loggers: list[Logger] = []
    if trained:
        loggers = [_make(node)(run_folder=folder) for node in config["logger"].values()]
        watching = [_make(node) for node in config["callbacks"].values() if node is not None]
        callbacks = [
            SummaryWriter(run_folder=folder),
            *watching,
            RowWriter(),
            saver,
        ]
    # what does not train runs on one device: it reads the checkpoint of any strategy
    node = config["strategy"] if trained else SINGLE
    strategy = _make(node)(devices=devices, precision=precision, checkpoint_io=saver.checkpoint_io)
    make_trainer = _make(config["trainer"] | {"_partial_": True})
    trainer: lightning.Trainer = make_trainer(
        accelerator=devices[0].type,
        devices=[d.index for d in devices] if devices[0].type == "cuda" else len(devices),
        num_nodes=ranks.num_nodes,
        accumulate_grad_batches=accumulation.num_micro_batches,
        strategy=strategy,
        plugins=_cluster(ranks),
        callbacks=callbacks,
        logger=loggers,
        max_epochs=-1,
        val_check_interval=config["eval_every"] * accumulation.num_micro_batches,
        check_val_every_n_epoch=None,
        log_every_n_steps=config["log_every"],
        num_sanity_val_steps=0,
        default_root_dir=folder,
        use_distributed_sampler=False,
        enable_checkpointing=trained,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    disable_signal_handling(trainer)
    return trainer


def _cluster(ranks: Ranks) -> list[ClusterEnvironment]:
    """How ranks that exist find each other; Lightning finds a single one by itself."""
    if ranks.started_by == "slurm":
        return [SLURMEnvironment(auto_requeue=False)]
    return [TorchElasticEnvironment()] if ranks.started_by else [LightningEnvironment()]


def _as_saved(config: Config, checkpoint: Path) -> Config:
    """Weights come from the checkpoint, not from a hub; text is cut by the tokenizer the run began with."""
    model, data = config["model"], config["data"]
    if model.get("pretrained") is not None:
        model = model | {"pretrained": None}
    saved = _tokenizer_folder(checkpoint)
    if saved is not None and data.get("tokenizer") is not None:
        target = "recipes.tokenizer.huggingface.HuggingFace"
        data = data | {"tokenizer": {"_target_": target, "name": str(saved)}}
    return config | {"model": model, "data": data}


def _tokenizer_folder(checkpoint: Path | None) -> Path | None:
    """The tokenizer beside a checkpoint, in the folder of its run."""
    run = find_run_folder(checkpoint) if checkpoint is not None else None
    folder = run / TOKENIZER_FOLDER if run is not None else None
    return folder if folder is not None and folder.is_dir() else None


def _devices(trainer: Config, ranks: Ranks) -> list[torch.device]:
    """The devices of this node's ranks: the GPUs that `trainer.devices` names, the first ones, or the CPU."""
    accelerator, wanted = trainer["accelerator"], trainer["devices"]
    has_gpu = torch.cuda.is_available()
    if accelerator in ("gpu", "cuda") and not has_gpu:
        raise ConfigError(
            f"trainer.accelerator={accelerator}",
            "torch sees no GPU on this machine",
            "trainer.accelerator=auto",
        )
    if not has_gpu or accelerator == "cpu":
        return [torch.device("cpu")] * ranks.per_node
    indices = wanted if isinstance(wanted, list) else range(ranks.per_node)
    return [torch.device("cuda", index) for index in indices][: ranks.per_node]


def _make(node: dict[str, Any]) -> Any:
    return instantiate(node, _convert_="all")
