"""Build a resolved run: instantiate the nodes of its config. Weights are created later.

Read `build` first: it creates every component of a run. The config keys are documented in conf/config.yaml.
"""

import functools
import glob
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from hydra.errors import InstantiationException
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import Callback, ProgressBar
from lightning.pytorch.loggers import Logger
from torchmetrics import Metric

from recipes.checkpoint.checkpoint_io import FolderCheckpointIO
from recipes.checkpoint.ending import MAX_STEPS, MAX_TIME, Endings
from recipes.checkpoint.resume import find_checkpoint, get_fallbacks, names_checkpoint
from recipes.checkpoint.saver import CheckpointSaver
from recipes.checkpoint.start_from import FrozenBase, SourceRun, Weights, read_base, read_start
from recipes.config.check.doubts import find_doubts
from recipes.config.check.types import to_setting
from recipes.config.compose import Config, freeze
from recipes.config.instantiate import PARTIAL, TARGET, make, make_model, make_optimizer
from recipes.config.own_code import describe_own_code, find_edits
from recipes.config.resolved import ResolvedRun
from recipes.config.resume import find_tokenizer, is_other_data, list_saved_parts
from recipes.config.signature import find_signature
from recipes.config.start_from import read_source_adapter
from recipes.config.traits import find_pretrained, read_free_at_resume, read_settings_of_weights
from recipes.data.datamodule import StreamDataModule
from recipes.engine import get_engine
from recipes.errors import ConfigError
from recipes.lightning_internals import (
    disable_signal_handling,
    set_rank,
    skip_empty_hooks,
    take_over_rows,
    validate_every,
)
from recipes.logger.any_logger import AnyLogger
from recipes.logger.csv import NoLogger, RowWriter, offer_all_loggers
from recipes.logger.summary import SummaryWriter
from recipes.loss import Loss
from recipes.metrics import check_metric
from recipes.model.decoder import choose_attention_kernel
from recipes.model.documents import choose_document_kernel
from recipes.numerics.accumulation import Accumulation
from recipes.precision import Precision, set_float32_products
from recipes.run_folder import CONFIG_FILE, TOKENIZER_FOLDER, find_run_folder, read_config
from recipes.runtime.allocator import keep_freed_memory
from recipes.runtime.console import LOGGER
from recipes.runtime.devices import get_devices
from recipes.runtime.meeting import meet
from recipes.runtime.own_code import name_own_code
from recipes.runtime.world import Ranks, global_rank
from recipes.task.base import CompilationLog, TrainingTask
from recipes.task.frozen import FrozenModel
from recipes.task.one_lightning import import_as_one
from recipes.task.own_loaders import check_loaders, end_after, record_epochs
from recipes.task.own_module import Adopted, leave_optimization_to_module

SINGLE_DEVICE = {"_target_": "recipes.strategy.single.SingleDevice", "_partial_": True}
_SHARE_OF_GRACE = 0.75  # of the time until the run is killed, to wait for data; the rest is for the last save


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that has been built but not started.

    Attributes:
        name: Name shown in the logger and the report.
        folder: Folder for everything the run writes.
        task: Model, loss, optimizer.
        data: Training stream and validation split.
        trainer: Lightning Trainer with strategy, callbacks and loggers.
        precision: Data types of weights, matmuls and gradient reduction.
        accumulation: Global batch and micro-batches.
        checkpoint: Checkpoint to resume from; None: start from step 0.
        tokenizer_folder: Tokenizer of the run that `checkpoint` belongs to; without a checkpoint, of this run.
        published: Folder or hub name of the model that its weights or its architecture came from.
        model_node: Config node of the model, without adapter, or of a LightningModule of one's own.
        data_names: Options of its data, or where that was published.
        target_kind: Kind of its targets, such as `classes`.
        overrides: Command-line overrides as typed.
        tags: User-defined labels.
        has_own_training: Whether `task` is a LightningModule of one's own, with none of the members of `TrainingTask`
            but those that saving and logging read, and `data` its data module, of one's own or ours; None: it has
            loaders itself.
        own_code: Hash of each definition in the files of one's own classes, by module and name.
        other_data: Data nodes whose text is trained on nowhere, `data` or `eval_data.<name>`.
        freeze: Writes the config into the folder.
        endings: Finds out why the run ends, and whether it has ended already.
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
    published: str | None = None
    model_node: Mapping[str, Any] = field(default_factory=dict)
    data_names: Sequence[str] = ()
    target_kind: str = ""
    has_own_training: bool = False
    own_code: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    other_data: Sequence[str] = ()
    freeze: Callable[[], None] = lambda: None
    endings: Endings = field(default_factory=lambda: Endings({}, {}))

    @property
    def base(self) -> str | None:
        """Folder, file or hub name of the published weights that it started from; None: there are none."""
        named = find_pretrained(self.model_node)
        return named if isinstance(named, str) and not self.has_own_training else None


def execute(resolved: ResolvedRun, *, check_room: Callable[[Any], None] | None = None) -> int:
    """Run the mode of a run and return the exit code.

    Args:
        resolved: The run.
        check_room: Called with the unsharded model of a run that trains, before its weights are allocated.
    """
    mode = resolved.make("mode")
    # modes that only read the folders of earlier runs, or vary the run before they build it, build nothing here
    if "resolved" in inspect.signature(mode).parameters:
        return int(mode(resolved))
    run = build(resolved)
    length = {} if resolved.epochs is None else {MAX_STEPS: f"{resolved.epochs}epochs"}
    run = replace(run, freeze=functools.partial(freeze, resolved.with_settings(length)))
    if check_room is not None and resolved.mode.trains:
        run.task.check_room = check_room
    cluster = getattr(run.trainer.strategy, "cluster_environment", None)
    if cluster is not None and resolved.ranks.world_size > 1:
        meet(resolved.ranks, address=cluster.main_address, port=cluster.main_port)
    exit_code: int = mode(run)
    return exit_code


def build(resolved: ResolvedRun) -> Run:
    """Instantiate every node of a checked run.

    Raises:
        ConfigError: The config does not fit the machine, the data or the checkpoint.
    """
    set_rank(global_rank())
    folder = resolved.run_folder
    checkpoint = find_checkpoint(resolved.resume, folder)
    other_data = _find_other_data(resolved, checkpoint)
    model = resolved.config["model"]
    # of a model that is put together, the text side is that of its language model
    published: str | None = model.get("pretrained") or model.get("name") or model.get("language")
    starts_from = None if checkpoint is not None else resolved.start_from
    if starts_from is not None and model.get("pretrained") is not None:
        resolved = resolved.with_settings({"model.pretrained": None})  # a reference to the name; the config is typed
    if checkpoint is not None:
        resolved = resolved.with_settings(list_saved_parts(resolved.config, checkpoint))
    config = resolved.config
    if resolved.mode.trains and global_rank() == 0:
        for doubt in find_doubts(resolved, is_continued=checkpoint is not None):
            LOGGER.warning(str(doubt))
    if checkpoint is not None and global_rank() == 0:
        trained_in = find_run_folder(checkpoint)
        for line in [*resolved.edits, *(find_edits(config, trained_in) if trained_in is not None else ())]:
            LOGGER.warning(line)
    lightning.seed_everything(resolved.seed, verbose=False)
    precision: Precision = make(config["precision"])
    set_float32_products(precision)
    choose_attention_kernel(config["attention"])
    choose_document_kernel(flex_attention=resolved.compile_mode is not None)
    accumulation = resolved.accumulation
    num_micro_batches = accumulation.num_micro_batches
    if resolved.mesh.pipeline > 1:  # the pipeline schedule takes all micro-batches of a step at once
        accumulation = accumulation.in_one()
    loss: Loss = make(config["loss"])
    loss.target_kind = resolved.target_kind
    saver: CheckpointSaver = make(config["checkpoint"] | {"save_every": resolved.save_every})
    if resolved.task.has_own_training:
        import_as_one()
    trainer = _build_trainer(resolved, precision, accumulation, saver)
    if isinstance(trainer.accelerator, CPUAccelerator):
        keep_freed_memory()
    get_engine(trainer).num_micro_batches = num_micro_batches
    if resolved.task.has_own_training:
        task, data = _adopt(resolved, precision, loss, accumulation, trainer)
        saver.chooses_metric = not any("checkpoint.monitor=" in override for override in resolved.overrides)
    else:
        data = _build_data(resolved, loss, accumulation, other_data)
        task = build_task(resolved, precision, loss)
        data.looks_ahead = task.looks_ahead
        _prepare_weights(task, resolved, checkpoint, starts_from, saver.checkpoint_io)
    return Run(
        name=resolved.name,
        folder=folder,
        task=task,
        data=data,
        trainer=trainer,
        precision=precision,
        accumulation=accumulation,
        checkpoint=checkpoint,
        tokenizer_folder=find_tokenizer(checkpoint) or folder / TOKENIZER_FOLDER,
        published=published,
        model_node=config["task"]["module"] if resolved.task.has_own_training else model,
        data_names=_name_data(resolved),
        target_kind=resolved.target_kind,
        has_own_training=resolved.task.has_own_training,
        overrides=resolved.overrides,
        tags=resolved.tags,
        own_code=describe_own_code(config),
        other_data=other_data,
        endings=saver.endings,
    )


def _build_data(
    resolved: ResolvedRun, loss: Loss, accumulation: Accumulation, other_data: Sequence[str]
) -> StreamDataModule:
    """Return the stream of training samples and the validation splits."""
    config = resolved.config
    data: StreamDataModule = make(config["loader"])(
        source=make(config["data"], data_section="data"),
        eval_sources={
            name: make(node, data_section=f"eval_data.{name}")
            for name, node in config["eval_data"].items()
            if node is not None
        },
        loss=loss,
        accumulation=accumulation,
        seed=resolved.seed,
        eval_samples=resolved.eval_samples if resolved.mode.takes_steps else None,
    )
    data.hold_out(name.removeprefix("eval_data.") for name in other_data if name != "data")
    return data


def _prepare_weights(
    task: TrainingTask,
    resolved: ResolvedRun,
    checkpoint: Path | None,
    starts_from: str | None,
    reader: FolderCheckpointIO,
) -> None:
    """Tell a task where its weights come from: its initialization, a checkpoint, or another run."""
    config = resolved.config
    task.awaits_checkpoint = checkpoint is not None  # every mode loads it
    free = read_free_at_resume(config["model"]) | {*resolved.task.unused_model_settings}
    settings = read_settings_of_weights(config["model"])
    task.model_settings = {key: value for key, value in settings.items() if key not in free}
    task.model_arguments = {key: value for key, value in config["model"].items() if key not in (TARGET, PARTIAL)}
    if starts_from is not None:
        weights: Weights = config["start_from_weights"]
        source = _find_source(resolved, starts_from, weights, reader, task.model_settings)
        task.first_weights = source
        task.find_start = lambda: source
    elif checkpoint is not None:
        task.find_start = functools.partial(_find_start, resolved, checkpoint, reader, task.model_settings)
        if resolved.adapter is not None:
            task.first_weights = _find_base(config, checkpoint, reader)
    if checkpoint is not None:
        task.setting_of_another_model, task.fix_of_another_model = _explain_another_model(config["model"], checkpoint)


def _adopt(
    resolved: ResolvedRun, precision: Precision, loss: Loss, accumulation: Accumulation, trainer: lightning.Trainer
) -> tuple[Any, Any]:
    """Return a LightningModule of one's own and its data: a data module of one's own, that of ours, or its loaders.

    They draw the numbers that they would draw in a script with the same seed: nothing else draws between them.
    """
    lightning.seed_everything(resolved.seed, verbose=False)
    data: Any
    if resolved.has_own_loaders:
        data = make(resolved.config["data"]).construct()
    else:
        data = _build_data(resolved, loss, accumulation, ())
    make_task = make(resolved.config["task"])
    task: Adopted = make_task(seed=resolved.seed, precision=precision, compile_mode=resolved.compile_mode).adopt()
    if resolved.has_own_loaders:
        if resolved.mode.trains:
            check_loaders(task, data)
        record_epochs(task if data is None else data)
    if resolved.epochs is not None:
        end_after(trainer, resolved.epochs)
    take_over_rows(trainer, loss="train/loss")
    if not task.automatic_optimization:
        leave_optimization_to_module(trainer, typed=resolved.overrides)
    elif resolved.has_own_loaders:
        validate_every(trainer, steps=resolved.eval_every, epochs=resolved.eval_epochs)
    return task, data


def _find_start(
    resolved: ResolvedRun, checkpoint: Path, reader: FolderCheckpointIO, model_settings: Mapping[str, Any]
) -> SourceRun | None:
    """Return the run that a resumed one took its first weights from; None: it started from none.

    Raises:
        ConfigError: It is not there.
    """
    step = read_start([checkpoint, *get_fallbacks(checkpoint)])
    if step is None:
        return None
    path, weights = step
    if not path.is_dir():
        raise ConfigError(
            f"resume={checkpoint}",
            f"the weights that the run started from are needed again, and {path} is not there",
            f"the same command with a copy of that checkpoint, or a link to one, at {path}",
        )
    return _find_source(resolved, str(path), weights, reader, model_settings)


def _find_source(
    resolved: ResolvedRun,
    starts_from: str,
    weights: Weights,
    reader: FolderCheckpointIO,
    model_settings: Mapping[str, Any],
) -> SourceRun:
    """Return the run that a new one takes its first weights from."""
    named = find_checkpoint(starts_from, resolved.run_folder, setting="start_from")
    assert named is not None, "a path names one, or is an error"
    folder = find_run_folder(named)
    adapter = None if folder is None else read_source_adapter(folder)
    is_merged = adapter is not None and resolved.adapter is None
    return SourceRun(
        named,
        weights=weights,
        falls_back=not names_checkpoint(starts_from),
        open_checkpoint=functools.partial(_open_checkpoint, reader),
        make_model=functools.partial(_make_without_storage, resolved.config),
        make_adapted=functools.partial(_make_without_storage, resolved.config | {"adapter": adapter})
        if is_merged
        else None,
        model_settings=model_settings,
    )


def _find_base(config: Config, checkpoint: Path, reader: FolderCheckpointIO) -> FrozenBase | None:
    """Return the weights beside the adapter of a run that started from another one; None of any other run."""
    record = read_base([checkpoint, *get_fallbacks(checkpoint)])
    if record is None:
        return None
    return FrozenBase(
        record,
        setting=f"resume={checkpoint}",
        open_checkpoint=functools.partial(_open_checkpoint, reader),
        make_model=functools.partial(_make_without_storage, config),
    )


def _open_checkpoint(reader: FolderCheckpointIO, path: Path, *, falls_back: bool) -> tuple[dict[str, Any], Path]:
    of_source = reader.for_source(falls_back=falls_back)
    state = of_source.load_checkpoint(path)
    assert of_source.loaded is not None, "it has just been loaded"
    return state, of_source.loaded


def _make_without_storage(config: Config) -> Any:
    with torch.device("meta"):
        return make_model(config)


def _explain_another_model(model: Config, checkpoint: Path) -> tuple[str, str]:
    """Return what was set and what to type if a checkpoint is of another model: the settings that differ."""
    run = find_run_folder(checkpoint)
    if run is None:
        typed = "the model= and model.… that it was trained with"
        return "resume=…", f"resume=… with {typed}, or the {CONFIG_FILE} of its run in {checkpoint.parents[1]}"
    before = read_config(run).get("model")
    before = before if isinstance(before, dict) else {}
    changed = {
        f"model.{key}": value for key, value in model.items() if key != "pretrained" and value != before.get(key)
    }
    if changed:
        typed = " ".join(f"{key}={to_setting(value)}" for key, value in changed.items())
        return (
            f"resume={run} {typed}",
            f"the same command without {' and '.join(changed)}, or resume=null to train another model",
        )
    return f"resume={run}", f"resume={run} with the {CONFIG_FILE} and the checkpoints that this run wrote itself"


def _find_other_data(resolved: ResolvedRun, checkpoint: Path | None) -> list[str]:
    """Return the data nodes that are trained on nowhere, so that all of each is validation data.

    `data`, where it is not that of the run that a checkpoint belongs to; and each node of `eval_data` whose text is not
    that of a source, unless the command says which part of it is for validation.
    """
    folder = None if checkpoint is None else find_run_folder(checkpoint)
    before = {} if folder is None else read_config(folder)
    known = before.get("data")
    earlier = known if isinstance(known, dict) else {}  # with resume=auto nobody has checked that file
    divides = any(re.match(r"\+*data\.val_(fraction|path)=", text) for text in resolved.typed)
    is_other = folder is not None and not divides and is_other_data(resolved.config["data"], earlier)
    other = ["data"] if is_other else []
    trained_on = {
        text for data in (resolved.config["data"], earlier) for node in _list_sources(data) for text in _locate(node)
    }
    for name, node in resolved.config["eval_data"].items():
        typed = re.compile(rf"\+*eval_data\b.*\b{re.escape(name)}\b.*\bval_fraction\b")
        is_divided = node is None or node.get("val_path") is not None or any(map(typed.match, resolved.overrides))
        if not is_divided and not any(
            _overlap(text, other_text) for text in _locate(node) for other_text in trained_on
        ):
            other.append(f"eval_data.{name}")
    return other


def _list_sources(data: Config) -> list[Config]:
    """Return the node of a data source, or those in it if it is a mixture."""
    sources = data.get("sources")
    return [node for node in (data, *(sources.values() if isinstance(sources, dict) else ())) if isinstance(node, dict)]


def _name_data(resolved: ResolvedRun) -> list[str]:
    """Return the names of the data, for whoever reads an export: no paths of this machine."""
    nodes = _list_sources(resolved.config["data"])
    sources = resolved.config["data"].get("sources")
    names = [resolved.choices.get("data", "data"), *(sources if isinstance(sources, dict) else ())]
    paths = [node.get("path") for node in nodes]
    return [path if isinstance(path, str) and "://" in path else name for name, path in zip(names, paths, strict=True)]


def _locate(node: Config) -> list[str]:
    """Return where the texts of a data source are; its constructor, if it has no path."""
    path = node.get("path")
    if not isinstance(path, str):
        return [str(node.get("_target_"))]
    if "://" in path:
        return [f"{path} {node.get('split')}"]
    path = os.path.expanduser(path)
    return [os.path.realpath(found) for found in glob.glob(path, recursive=True) or [path]]


def _overlap(one: str, other: str) -> bool:
    """Return whether two texts are the same, or one is in the folder of the other."""
    return one == other or one.startswith(other + os.sep) or other.startswith(one + os.sep)


def build_task(resolved: ResolvedRun, precision: Precision, loss: Loss) -> TrainingTask:
    """Return the task of a run, without its model."""
    config = resolved.config
    task: TrainingTask = make(config["task"])(
        # a function, not a model: the task calls it on the meta device once the Trainer has set up the ranks
        make_model=functools.partial(make_model, config),
        make_optimizer=make_optimizer(config),
        schedule=_make_schedule(config["scheduler"]),
        convert_model=precision.convert,
        activation_checkpoint=make(config["activation_checkpoint"]),
        compile_mode=resolved.compile_mode,
        loss=loss,
        scales_loss=precision.scales_loss,
        clipping=make(config["clipping"]),
        ema_decay=config["ema_decay"],
        seed=resolved.seed,
        metrics=_build_metrics(resolved, loss),
        frozen_models={name: _describe_frozen(name, config[name]) for name in resolved.task.frozen_sections},
    )
    return task


def _describe_frozen(section: str, node: Config) -> FrozenModel:
    """Return the model of a section such as `teacher`, without an adapter of the trained one."""
    return FrozenModel(section=section, make=functools.partial(make, node), settings=read_settings_of_weights(node))


def _make_schedule(node: Config) -> Callable[[int], float]:
    """Return the schedule of a node, bypassing Hydra's check on each call: 60 us, twice a step (1.3.8).

    Hydra checks one call here; later calls run the same function with the same settings.
    """
    checked = make(node)
    if not node.get(PARTIAL):  # an object of its own, called with the step
        return checked  # type: ignore[no-any-return]
    checked(0)
    constructor = checked.func  # Hydra's partial of the function itself
    return functools.partial(constructor.func, *constructor.args, **constructor.keywords | checked.keywords)


def _build_metrics(resolved: ResolvedRun, loss: Loss) -> dict[str, Metric]:
    """Return the validation metrics by name, each tried on what the loss offers it, with the model's outputs.

    Raises:
        ConfigError: A metric cannot be built, or rejects the inputs that validation passes to it.
    """
    config = resolved.config
    model = config["model"]
    num_outputs = model.get("vocab_size", model.get("num_classes"))
    metrics: dict[str, Metric] = {}
    for name, node in config["metrics"].items():
        if node is None:  # disabled by `metrics.f1=null`, as for a callback
            continue
        metric = _make_member(f"metrics.{name}", node)
        check_metric(name, metric, loss=loss, num_outputs=num_outputs, target_kind=resolved.target_kind)
        metrics[name] = metric
    return metrics


def _make_member(key: str, node: Config) -> Any:
    """Return a metric or callback, whose class may be of any package.

    Raises:
        ConfigError: The constructor of an installed package raises an exception, of whatever type.
        Exception: Code of somebody's own fails in it.
    """
    try:
        return make(node)
    except (ConfigError, OSError):
        raise
    except Exception as error:  # a constructor of another package raises what it likes
        if name_own_code(error) is not None:
            raise  # the report names its line
        if isinstance(error, InstantiationException) and key.startswith("callbacks."):
            raise  # the report names the argument
        reason = str(error.__cause__ or error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(key, f"{node['_target_']} says: {reason}", f"'~{key}'") from error


def _build_trainer(
    resolved: ResolvedRun, precision: Precision, accumulation: Accumulation, saver: CheckpointSaver
) -> lightning.Trainer:
    config, folder, ranks = resolved.config, resolved.run_folder, resolved.ranks
    devices = get_devices(config["trainer"], ranks)
    is_run = resolved.mode.trains
    # fall back from a damaged checkpoint to an older one, unless the user asked for that checkpoint
    saver.checkpoint_io.falls_back = not names_checkpoint(resolved.resume)
    callbacks, loggers = list[Callback](), list[Logger]()
    if is_run:
        loggers += [_make_logger(f"logger.{name}", node, folder) for name, node in config["logger"].items()]
        nodes = {f"callbacks.{name}": node for name, node in config["callbacks"].items() if node is not None}
        configured = {key: _make_member(key, node) for key, node in nodes.items()}
        limits = {key: config["trainer"].get(key.partition(".")[2]) for key in (MAX_STEPS, MAX_TIME)}
        if resolved.epochs is not None:
            limits[MAX_STEPS] = f"{resolved.epochs}epochs"
        saver.endings = Endings(limits | nodes, configured)
        if (grace_seconds := config["launcher"].get("signal_seconds")) is not None:
            saver.wait_seconds = _SHARE_OF_GRACE * grace_seconds
        # the order matters: callbacks fill the row of a step, it is logged, then the step is saved
        summary = SummaryWriter(
            run_folder=folder, monitor=config["checkpoint"]["monitor"], find_ending=saver.endings.find
        )
        callbacks = [summary, *configured.values(), CompilationLog(), RowWriter(), saver]
    elif resolved.task.has_own_training:
        loggers = [NoLogger(run_folder=folder, mode=resolved.mode.name)]
    # other modes run on one device, which can load the checkpoints of every strategy
    node = config["strategy"] if resolved.mode.takes_steps else SINGLE_DEVICE
    strategy = make(node)(devices=devices, precision=precision, checkpoint_io=saver.checkpoint_io, mesh=resolved.mesh)
    indices = list(dict.fromkeys(device.index for device in devices))
    if devices[0].type == "cuda" and len(indices) < len(devices):
        strategy.parallel_devices = devices  # every rank sees its GPU under the same index, and Trainer rejects repeats
    trainer = _make_trainer(
        config["trainer"],
        accelerator=devices[0].type,
        devices=indices if devices[0].type == "cuda" else len(devices),
        num_nodes=ranks.num_nodes,
        accumulate_grad_batches=accumulation.num_micro_batches,
        benchmark=resolved.tries_convolutions,
        strategy=strategy,
        plugins=_get_cluster(ranks),
        callbacks=callbacks,
        logger=loggers,
        max_epochs=-1,  # the stream is endless: trainer.max_steps ends the run
        min_epochs=0,  # with trainer.min_steps, Lightning would wait for the end of its first epoch (2.6.6)
        # in micro-batches, or as a fraction of an epoch
        val_check_interval=resolved.eval_every * accumulation.num_micro_batches
        if resolved.eval_epochs is None
        else 1.0,
        check_val_every_n_epoch=resolved.eval_epochs,
        log_every_n_steps=resolved.log_every,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        use_distributed_sampler=resolved.has_own_loaders,  # our data module already slices by rank
        enable_checkpointing=is_run,
        enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
        enable_model_summary=False,
    )
    disable_signal_handling(trainer)
    skip_empty_hooks(trainer)
    offer_all_loggers(trainer)
    return trainer


def _make_logger(key: str, node: Config, folder: Path) -> Logger:
    """Return a logger of the recipes, or one that passes everything to a logger of another package."""
    if "run_folder" in find_signature(node["_target_"]).parameters:
        logger: Logger = make(node)(run_folder=folder)
        return logger
    return AnyLogger(key=key, construct=make(node | {"_partial_": True}), run_folder=folder)


def _make_trainer(node: Config, **arguments: Any) -> lightning.Trainer:
    """Instantiate the Trainer.

    Raises:
        ConfigError: Lightning rejects an argument.
    """
    try:
        trainer: lightning.Trainer = make(node | {"_partial_": True})(**arguments)
    except (MisconfigurationException, TypeError, ValueError) as error:
        typed = ", ".join(f"trainer.{name}" for name in node if not name.startswith("_"))
        raise ConfigError(
            f"one of {typed}", " ".join(str(error).split()), "trainer.<setting>=<another value>"
        ) from error
    return trainer


def _get_cluster(ranks: Ranks) -> list[ClusterEnvironment]:
    """Return the cluster environment, which reads the variables of SLURM or torchrun; Lightning's own for one rank."""
    if ranks.started_by == "slurm":
        return [SLURMEnvironment(auto_requeue=False)]
    return [TorchElasticEnvironment()] if ranks.started_by else [LightningEnvironment()]
