"""Check settings that are valid by themselves but do not work together."""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from recipes.config.check.strategy import check_adapter
from recipes.config.check.suggestions import list_options, read_option
from recipes.config.check.types import to_setting
from recipes.config.compose import CONF
from recipes.config.epochs import read_epochs
from recipes.config.published import read_size
from recipes.config.resolved import ResolvedRun
from recipes.config.signature import find_signature, read_signature
from recipes.config.traits import (
    find_setting_of_kind,
    list_data,
    read_sample_kind,
    read_target_kind,
    read_target_kinds,
    read_task,
    select,
)
from recipes.config.unread import OF_SAVING
from recipes.errors import ConfigError, type_setting
from recipes.foreign_file import missing_published
from recipes.run_folder import has_checkpoint
from recipes.shipped_models import is_shipped

# Trainer arguments controlled by a group or setting of this project: argument -> what to type instead
_CONTROLLED = {
    "strategy": "strategy=<option>",
    "precision": "precision=<option>",
    "logger": "logger=<option>",
    "callbacks": "callbacks=<option>",
    "plugins": "strategy=<option>",
    "default_root_dir": "hydra.run.dir=<folder>",
    "log_every_n_steps": "log_every=<optimizer steps>",
    "val_check_interval": "eval_every=<optimizer steps>",
    "check_val_every_n_epoch": "eval_every=<optimizer steps>, or with loaders of your own eval_every=1epochs",
    "max_epochs": "trainer.max_steps=3epochs, or trainer.max_steps=<optimizer steps>",
    "min_epochs": "trainer.min_steps=<optimizer steps>",
    "enable_checkpointing": "save_every=null for no checkpoints",
    "enable_progress_bar": "'~callbacks.progress' for no progress",
    "enable_model_summary": "mode=fit, which prints the number of parameters",
    "limit_val_batches": "eval_samples=<samples>",
    "limit_train_batches": "trainer.max_steps=<optimizer steps>",
    "limit_test_batches": "mode=test resume=<run folder>",
    "limit_predict_batches": "mode=predict resume=<run folder>",
    "overfit_batches": "debug=overfit, or loader.overfit_batches=<global batches>",
    "fast_dev_run": "debug=fast_dev_run",
    "barebones": "'~callbacks.report' '~callbacks.sample_text' save_every=null",
    "num_sanity_val_steps": "eval_every=<optimizer steps>",
}
# Trainer arguments without effect here -> why
_WITHOUT_EFFECT = {
    "enable_autolog_hparams": "config.yaml and the logger hold all settings of a run",
    "inference_mode": "a validation computes no gradients, whatever this says",
    "use_distributed_sampler": "the order of the samples is the same for every number of ranks",
    "reload_dataloaders_every_n_epochs": "training is a stream without epochs",
    "model_registry": "only Lightning's own checkpoints are uploaded there, and a run writes none",
}


# Trainer arguments of which only some values are supported
_OPTIONS: dict[str, tuple[str | bool | None, ...]] = {
    "accelerator": ("auto", "cpu", "gpu", "cuda"),
    "gradient_clip_algorithm": ("norm", "value", None),
    "deterministic": (False, True, "warn", None),
    "profiler": (None, "simple", "advanced", "pytorch", "xla"),
}
_READERS_OF_TEXT = ("sample_text", "generation_eval")  # callbacks that are silent without a tokenizer
# options of task for images -> the kinds of targets that they learn, and the loss that they set
_TASKS_OF_IMAGES = {
    "classification": (("classes", "probabilities"), "cross_entropy"),
    "multilabel": (("labels",), "bce"),
    "regression": (("values",), "mse"),
}
# by what `data=preferences` and `data=prompts` give
_LOSSES_OF_ANSWERS = {"pairs": "dpo", "answers": "kto", "completions": "grpo"}
_OFF = ("null", "false", "[]")
_THRESHOLDS = ("stopping_threshold", "divergence_threshold")
# settings that other settings alone make effective -> which ones, of which one must differ from these values; why
# nobody reads them otherwise; and what to type beside them
_READ_WITH: dict[str, tuple[tuple[str, ...], tuple[object, ...], str, str]] = {
    "pipeline_schedule": (
        ("pipeline_parallel_size",),
        (1,),
        "pipeline_parallel_size=1 has no stages to schedule",
        "strategy=fsdp pipeline_parallel_size=<stages>",
    ),
    "sequence_parallel": (
        ("tensor_parallel_size",),
        (1,),
        "tensor_parallel_size=1 has no ranks that share a sequence",
        "strategy=fsdp tensor_parallel_size=<ranks>",
    ),
    "trainer.gradient_clip_algorithm": (
        ("trainer.gradient_clip_val",),
        (None,),
        "no trainer.gradient_clip_val is set, so nothing is clipped",
        "trainer.gradient_clip_val=1.0",
    ),
    **{
        f"callbacks.early_stop.{name}": (
            tuple(f"callbacks.early_stop.{switch}" for switch in ("patience", *_THRESHOLDS)),
            (None,),
            "without a patience or a threshold callbacks.early_stop is off",
            "callbacks.early_stop.patience=<validations>",
        )
        for name in ("monitor", "mode", "min_delta", "check_finite", "strict")
    },
}
# settings that nobody reads but the settings that refer to them -> the setting below which it is otherwise
_READ_BY_REFERENCE = {
    "warmup_steps": "scheduler.warmup_steps",
    "profile_steps": "callbacks.step_profiler.steps",
    "label_smoothing": "loss.label_smoothing",
    "z_loss": "loss.z_loss",
    "loss_chunk_tokens": "loss.chunk_tokens",
}
# of Hydra's own settings, those that have an effect here
_OF_HYDRA = ("run.", "sweep.", "sweeper", "launcher", "searchpath", "mode", "help.", "hydra_help.", "job.name")
_INSTEAD_OF_HYDRA = {
    "hydra.job.chdir": "paths of a command are relative to the folder that it is typed in, and stay so",
    "hydra.output_subdir": "config.yaml in the run folder holds the config and the command",
    "hydra.verbose": "train.log in the run folder holds all lines",
    "hydra/job_logging": "train.log in the run folder holds all lines",
    "hydra/hydra_logging": "Hydra writes no lines here",
}
# options of sbatch that say how many ranks there are -> what it is the product of
_COUNTED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("nodes", "N"), ("nodes",)),
    **dict.fromkeys(("ntasks", "n", "gpus", "G"), ("nodes", "ranks of a node")),
    **dict.fromkeys(("ntasks-per-node", "tasks-per-node"), ("ranks of a node",)),
    **dict.fromkeys(("gpus-per-task", "ntasks-per-gpu"), ()),
}
_COUNTS = {"nodes": "trainer.num_nodes=<whole number>", "ranks of a node": "trainer.devices=<whole number>"}
_WANDB_MODES = ("online", "offline", "disabled", "dryrun", "run", "shared")  # dryrun and run: older names
_MAX_TIME = re.compile(r"\d+:\d\d:\d\d:\d\d")
_SBATCH_TIME = re.compile(r"(\d+-\d+|\d+)(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)


def check_compatibility(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check Trainer, vocabulary, published weights, shape of the model, schedule and mode against each other."""
    config = run.config
    yield from _trainer(config)
    yield from _check_min_steps(config["trainer"])
    yield from _check_job_time(config["launcher"])
    yield from _check_directives(run)
    yield from _check_wandb(config["logger"]) if run.mode.trains else ()
    yield from _vocabulary(config)
    yield from check_adapter(run)
    yield from check_published_model(config["model"])
    yield from _published_weights(run)
    if "tokenizer" in config["data"] and not config["data"]["tokenizer"]:
        yield ConfigError("tokenizer=none", "text needs a tokenizer", "tokenizer=bpe or tokenizer=bytes")
    yield from _optimizer(config["optimizer"])
    yield from _model_shape(config["model"])
    yield from _schedule(config, run.references)
    for interval in ("eval_every", "save_every"):
        yield from _interval(run, interval)
    if run.mode.needs == "export" and run.task.num_views > 1:
        reason = "a projection is of use to its loss alone"
        fix = "task=classification start_from=<that run>, and mode=export of the new one"
        yield ConfigError(f"mode=export task={run.choices.get('task', '…')}", reason, fix)
    elif run.mode.needs is not None and run.mode.needs not in run.task.supports:
        yield ConfigError(
            f"mode={run.mode.name}",
            "it is for language models only",
            "mode=evaluate resume=<run folder>",
        )


def _trainer(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    trainer = config["trainer"]
    for argument, fix in _CONTROLLED.items():
        if argument in trainer:
            if (CONF / argument / f"{trainer[argument]}.yaml").is_file():
                fix = f"{argument}={trainer[argument]}"
            yield ConfigError(f"trainer.{argument}={to_setting(trainer[argument])}", "another setting controls it", fix)
    for argument, reason in _WITHOUT_EFFECT.items():
        if argument in trainer:
            shown = f"trainer.{argument}={to_setting(trainer[argument])}"
            yield ConfigError(shown, reason, "the same command without it")
    for argument, options in _OPTIONS.items():
        if argument in trainer and trainer[argument] not in options:
            listed = " ".join(to_setting(option) for option in options if option is not None)
            yield ConfigError(
                f"trainer.{argument}={to_setting(trainer[argument])}",
                f"the options are {listed}",
                f"trainer.{argument}={to_setting(options[0])}",
            )
    max_time = trainer.get("max_time")
    if isinstance(max_time, int | float) or (isinstance(max_time, str) and not _MAX_TIME.fullmatch(max_time)):
        yield ConfigError(
            f"trainer.max_time={max_time}",
            "its format is days:hours:minutes:seconds",
            "trainer.max_time=00:08:00:00, which is 8 hours",
        )
    elif isinstance(max_time, str) and not any(map(int, max_time.split(":"))):
        yield ConfigError(
            f"trainer.max_time={max_time}",
            "the run would end before its first step",
            "trainer.max_time=00:08:00:00, which is 8 hours",
        )


def _check_wandb(logger: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Iterator[ConfigError]:
    """Reject what W&B itself rejects once the run has begun, which then goes on without it."""
    if not isinstance(logger.get("wandb"), Mapping):
        return
    mode, project = environ.get("WANDB_MODE"), logger["wandb"].get("project")
    if mode and mode not in _WANDB_MODES:
        near = (get_close_matches(mode, _WANDB_MODES[:3], 1) or ["offline"])[0]
        reason = f"the modes of W&B are {' '.join(_WANDB_MODES[:3])}"
        yield ConfigError(f"WANDB_MODE={mode}", reason, f"WANDB_MODE={near} before the command")
    setting = f"logger.wandb.project={project}"
    if project is None and (project := environ.get("WANDB_PROJECT")):
        setting = f"WANDB_PROJECT={project}"
    if isinstance(project, str) and (found := re.search(r"[/\\#?%:]", project)):
        team, slash, name = project.rpartition("/")
        entity = f"logger.wandb.entity={team} " if slash and re.fullmatch(r"[\w-]+", team) else ""
        fix = f"{entity}logger.wandb.project={re.sub(r'[^A-Za-z0-9_.-]', '_', name)}"
        yield ConfigError(setting, f"W&B takes no {found[0]} in a name", fix)


def _check_job_time(launcher: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Reject a time limit that sbatch would reject only after all jobs of a sweep have been checked."""
    limit = launcher.get("time")
    if isinstance(limit, str) and not _SBATCH_TIME.fullmatch(limit):
        yield ConfigError(
            f"launcher.time={limit}",
            "sbatch does not accept it as a time limit",
            "launcher.time=240 in minutes, or launcher.time=1-12:00:00 in days, hours, minutes and seconds",
        )
        return
    seconds, before = _read_seconds(limit), launcher.get("signal_seconds")
    if seconds is not None and isinstance(before, int) and before >= seconds:
        yield ConfigError(
            f"launcher.time={limit} launcher.signal_seconds={before}",
            f"the limit is {seconds} seconds: the job would be signalled and requeued at once, again and again",
            f"launcher.signal_seconds={max(seconds // 10, 1)}, or launcher.time={before // 60 + 10}",
        )


def _read_seconds(limit: object) -> int | None:
    """Return a time limit of sbatch in seconds; None if there is none."""
    if isinstance(limit, int):
        return limit * 60
    if not isinstance(limit, str) or not limit[:1].isdigit():
        return None
    days, dash, time = limit.rpartition("-")
    parts = [int(part) for part in time.split(":")]
    # 30 and 30:00 are minutes, 1:30:00 begins with hours; behind days, the first part is hours
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86_400 + sum(part * unit for part, unit in zip(parts, units, strict=False))


def _check_directives(run: ResolvedRun) -> Iterator[ConfigError]:
    """Reject options of sbatch that contradict the ranks that are checked, or that it does not read."""
    directives = run.config["launcher"].get("directives")
    devices = run.devices if run.strategy.needs_process_group else 1
    per_node = len(devices) if isinstance(devices, list) else devices
    for name, value in (directives if isinstance(directives, Mapping) else {}).items():
        shown, option = f"launcher.directives={{{name}: {value}}}", str(name).lstrip("-").replace("_", "-")
        if str(name).startswith("-"):
            fix = f"'launcher.directives={{{option}: {value}}}'"
            yield ConfigError(shown, "options of sbatch are named without their dashes here", fix)
        elif option in _COUNTED and isinstance(per_node, int):
            factors = {"nodes": run.num_nodes, "ranks of a node": per_node}
            expected = math.prod(factors[of] for of in _COUNTED[option])
            if str(value) != str(expected):
                wrong = _COUNTED[option] or ("nodes", "ranks of a node")
                fix = f"{' '.join(_COUNTS[of] for of in wrong)} without {name} among the directives"
                ranks = "1 rank" if per_node == 1 else f"{per_node} ranks"
                reason = f"trainer.num_nodes={run.num_nodes} with {ranks} a node makes it {expected}"
                yield ConfigError(shown, reason, fix)
        elif option == "array":
            yield ConfigError(shown, "a sweep is an array of its own", "-m and the values to try, and no array")


def _optimizer(optimizer: Mapping[str, Any]) -> Iterator[ConfigError]:
    if optimizer.get("nesterov") and optimizer.get("momentum") == 0:
        yield ConfigError(
            "optimizer.momentum=0 optimizer.nesterov=true",
            "Nesterov's method looks ahead along the momentum, and there is none",
            "optimizer.nesterov=false, or optimizer.momentum=0.9",
        )


def _check_min_steps(trainer: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Reject `min_steps` above `max_steps`: Lightning then skips the last checkpoint and validation."""
    least, most = trainer.get("min_steps"), trainer.get("max_steps")
    if isinstance(least, int) and isinstance(most, int) and least > most:
        yield ConfigError(
            f"trainer.min_steps={least} trainer.max_steps={most}",
            "the run would end before its last checkpoint and validation",
            f"trainer.max_steps={least}, or the same command without trainer.min_steps",
        )


def _published_weights(run: ResolvedRun) -> Iterator[ConfigError]:
    """Reject published weights that are missing, or have another tokenizer, whose token ids mean something else."""
    config, model = run.config, run.config["model"]
    key = "pretrained" if model.get("pretrained") is not None else "language_pretrained"
    pretrained, tokenizer = model.get(key), str(config["tokenizer"].get("_target_"))
    if pretrained is None or run.resume not in (None, "auto") or run.start_from is not None:
        return  # the weights of a checkpoint replace them
    is_folder = find_signature(model["_target_"]).constants.get("input_kind") in ("tokens", "images_and_text")
    missing = missing_published(pretrained, f"model.{key}") if is_folder else None
    has_own_ids = find_signature(tokenizer).constants.get("own_ids")
    if missing is not None and key != "pretrained":
        return  # the check of models with images names a missing part
    if missing is not None:
        # a model that is built by name has a check of its own, of its configuration
        has_own_check = pretrained == model.get("name") and not is_shipped(pretrained)
        if not has_own_check and not (run.resume and has_checkpoint(run.run_folder)):
            needs_ids = has_own_ids and not is_shipped(pretrained)
            beside = "; beside model.pretrained, tokenizer=huggingface tokenizer.name=<the same>" if needs_ids else ""
            yield ConfigError(missing.setting, missing.reason, f"{missing.fix}{beside}")
    elif has_own_ids:
        yield ConfigError(
            f"model.{key}={pretrained} tokenizer={tokenizer.split('.')[2]}",
            "published weights need the token ids of their own tokenizer",
            f"tokenizer=huggingface {type_setting('tokenizer.name', pretrained)}",
        )


def check_published_model(model: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check that a model to be built by name exists."""
    name = model.get("name")
    is_built_by_name = find_signature(model["_target_"]).constants.get("built_by_name")
    if not is_built_by_name or name is None or model.get("vocab_size") is not None:
        return
    try:
        read_size(name, "vocab_size")
    except ConfigError as mistake:
        yield mistake


def _vocabulary(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    model_size = config["model"].get("vocab_size")
    if model_size is None:
        return
    tokenizer_size = (config["tokenizer"] or {}).get("vocab_size")
    for section, node in (("tokenizer", config["tokenizer"] or {}), *list_data(config)):
        size = node.get("vocab_size")
        if size is None and "_target_" in node:
            size = read_signature(node["_target_"]).constants.get("vocab_size")
        limit = node.get("vocab_size")
        reads = tokenizer_size if section == "data" and node.get("tokenizer") else None
        if isinstance(limit, int) and isinstance(reads, int) and limit < min(reads, model_size):
            reason = f"its tokenizer has {reads} tokens"
            yield ConfigError(f"data.vocab_size={limit}", reason, f"data.vocab_size={model_size}")
        if isinstance(size, int) and size > model_size:
            is_set = node.get("vocab_size") is not None  # else it is of the class, and nobody has typed it
            yield ConfigError(
                f"{section}.vocab_size={size}" if is_set else f"model.vocab_size={model_size}",
                f"the model has model.vocab_size={model_size} tokens" if is_set else f"the {section} has {size} tokens",
                f"model.vocab_size={size}",
            )


def _model_shape(model: Mapping[str, Any]) -> Iterator[ConfigError]:
    heads, kv_heads = model.get("num_heads"), model.get("num_kv_heads")
    has_own_size = model.get("head_dim") or model.get("qk_nope_head_dim")
    hidden_size = None if has_own_size else model.get("hidden_size")  # else heads do not divide it
    if hidden_size and heads and hidden_size % heads:
        yield ConfigError(
            f"model.num_heads={heads}",
            f"model.hidden_size={hidden_size} is not divisible by {heads} heads",
            f"model.num_heads={_nearest_divisor(hidden_size, heads)}",
        )
    elif hidden_size and heads and kv_heads and (hidden_size // heads) % 2:
        yield ConfigError(
            f"model.num_heads={heads}",
            f"rotary embeddings rotate pairs, and model.hidden_size={hidden_size} makes heads of"
            f" {hidden_size // heads}",
            f"model.hidden_size={2 * heads * max(1, hidden_size // heads // 2)}",
        )
    if heads and kv_heads and heads % kv_heads:
        yield ConfigError(
            f"model.num_kv_heads={kv_heads}",
            f"model.num_heads={heads} is not divisible by {kv_heads} groups",
            f"model.num_kv_heads={_nearest_divisor(heads, kv_heads)}",
        )


def _interval(run: ResolvedRun, name: str) -> Iterator[ConfigError]:
    """Check that an interval in epochs has epochs: the data of the recipes is a stream."""
    typed = run.config[name]
    if not isinstance(typed, str) or typed == "auto":
        return
    if read_epochs(typed) is None:
        fix = f"{name}=<optimizer steps>" + (f", or {name}=1epochs" if run.has_own_loaders else "")
        yield ConfigError(f"{name}={typed}", "it takes a number of optimizer steps, auto, or whole epochs", fix)
    elif not run.has_own_loaders:
        reason = "the data of the recipes is a stream; only loaders of one's own have epochs"
        yield ConfigError(f"{name}={typed}", reason, f"{name}=100, in optimizer steps")


def _schedule(config: Mapping[str, Any], references: Mapping[str, str]) -> Iterator[ConfigError]:
    """Check that warmup and decay fit into the run; a run that ends during warmup is allowed."""
    scheduler, max_steps = config["scheduler"], config["trainer"]["max_steps"]
    own = "scheduler.warmup_steps"
    name = "warmup_steps" if references.get(own) == "warmup_steps" else own
    of_torch = scheduler.get("torch") if isinstance(scheduler.get("torch"), Mapping) else {}
    if str(of_torch.get("_target_")).endswith((".OneCycleLR", ".CyclicLR")) and of_torch.get("cycle_momentum", True):
        reason = "only the learning rate follows a schedule"
        fix = f"{'' if 'cycle_momentum' in of_torch else '+'}scheduler.torch.cycle_momentum=false"
        yield ConfigError("scheduler.torch.cycle_momentum=true", reason, fix)
    parts = of_torch.get("schedulers")
    if isinstance(parts, Sequence) and any(isinstance(part, Mapping) for part in parts):
        yield ConfigError(
            "scheduler.torch.schedulers=…",
            "these need the optimizer, which only code can give them",
            "scheduler.warmup_steps=<steps> with the scheduler after the warm-up, or"
            " 'scheduler.torch={_target_: <module.function>}', a function of yours that takes the optimizer",
        )
    for key in ("decay_steps", "cooldown_steps"):
        warmup, decay = scheduler.get("warmup_steps"), scheduler.get(key)
        if None not in (warmup, decay) and warmup + decay > max_steps > 0:
            yield ConfigError(
                f"{name}={warmup} scheduler.{key}={decay}",
                f"together they are longer than trainer.max_steps={max_steps}",
                f"{name}={max_steps // 10} scheduler.{key}={max_steps // 5}",
            )


def check_unread(run: ResolvedRun, overrides: Sequence[str]) -> Iterator[ConfigError]:
    """Check for typed settings that nobody reads beside the others; those of defaults do no harm.

    Args:
        run: Composed run whose nodes match their signatures.
        overrides: Overrides of this command line.
    """
    config = run.config
    for override in overrides:
        key, equals, _ = override.lstrip("+").partition("=")
        if equals and not key.startswith("~"):
            yield from _check_reader(run, key, override)
    typed = [override for override in overrides if not override.startswith("~")]
    reads_text = any("tokenizer" in node for _, node in list_data(config))
    prepares = run.mode.prepares_data
    lacks_sources = config["data"].get("sources") == {}
    yield from _unread_data_settings(config, typed, prepares=prepares)
    yield from _unread_of_saving(run, typed)
    for override in typed:
        key, _, value = override.lstrip("+").partition("=")
        if not reads_text and key.partition(".")[0] == "tokenizer" and value != "none":
            if lacks_sources:
                example = "+data@data.sources.code=stdlib_text 'data.weights={code: 1.0}'"
                yield ConfigError("data.sources={}", "a mixture needs sources", example)
                return
            yield ConfigError(override, "the data has no text, so it has no effect", f"the same command without {key}")
        if key.partition(".")[0] == "quality" and value != "none" and not prepares:
            reason = "only mode=prepare reads it, and writes a folder to train on: other modes take texts as they are"
            yield ConfigError(override, reason, f"mode=prepare data=documents mode.output=<folder> {override}")
        # the callback itself, not its settings: one command may serve several kinds of data
        chosen = re.split(r"[\[\],\s]+", value) if key == "callbacks" else [key.removeprefix("callbacks.")]
        silent = [name for name in _READERS_OF_TEXT if name in chosen and not reads_text and value not in _OFF]
        if silent and key.partition(".")[0] == "callbacks":
            verb = "needs" if len(silent) == 1 else "need"
            reason = f"{' and '.join(silent)} {verb} text and its tokenizer, and the data has none"
            yield ConfigError(override, reason, "the same command without it")
    exports = config["mode"].get("adapter", "merged")
    if exports != "merged" and run.adapter is None:
        yield ConfigError(f"mode.adapter={exports}", "the run has no adapter", "mode.adapter=merged")
    clipping = config["clipping"]
    sets_limit = find_signature(clipping["_target_"]).constants.get("sets_limit", True)
    if config["trainer"].get("gradient_clip_algorithm") == "value" and sets_limit:
        name = clipping["_target_"].rpartition(".")[2]
        yield ConfigError(
            f"trainer.gradient_clip_algorithm=value clipping._target_={clipping['_target_']}",
            f"{name} finds limits of the norm, which clipping by value does not read",
            "trainer.gradient_clip_algorithm=norm, or clipping=none",
        )
    window, warmup = clipping.get("window"), clipping.get("warmup_steps")
    if isinstance(window, int) and isinstance(warmup, int) and warmup > window:
        reason = f"the window of clipping.window={window} never holds that many norms"
        setting = f"clipping.window={window} clipping.warmup_steps={warmup}"
        yield ConfigError(setting, reason, f"clipping.window={warmup}")


def _unread_of_saving(run: ResolvedRun, typed: Sequence[str]) -> Iterator[ConfigError]:
    """Check for typed settings of checkpoints beside a typed null, without which the run would save them."""
    switches = [text for text in typed if re.fullmatch(r"\+*save_every(_minutes)?=(null|None|none)", text)]
    if run.saves or not switches or not run.mode.trains:
        return
    for override in typed:
        if override.lstrip("+").partition("=")[0] in OF_SAVING:
            off = " ".join(switches)
            fix = f"the same command without it, or save_every=<optimizer steps> instead of {off}"
            yield ConfigError(f"{override} {off}", "the run saves no checkpoint, so it has no effect", fix)


def _unread_data_settings(config: Mapping[str, Any], typed: Sequence[str], *, prepares: bool) -> Iterator[ConfigError]:
    """Check for typed settings of data sources that another one, or the mode, makes meaningless."""
    nodes = dict(list_data(config))
    for override in typed:
        key, _, value = override.lstrip("+").partition("=")
        place, _, name = key.rpartition(".")
        node = nodes.get(place, {})
        path, val_path = node.get("path"), node.get("val_path")
        reason = None
        if key == "seq_len" and value not in _OFF and not any("seq_len" in one for one in nodes.values()):
            reason = "the data has no text, so it has no effect"
        elif name == "val_fraction" and val_path is not None:
            reason = f"all of {place}.val_path={val_path} is for validation, so it has no effect"
        elif name == "domain_field" and place in nodes and value not in _OFF and not prepares:
            reason = "only mode=prepare reads it"
        elif name == "split" and place in nodes and not any(str(one).startswith("hf://") for one in (path, val_path)):
            reason = f"{place}.path={path} is of files, and only datasets at hf:// have splits"
        if reason is not None:
            others = f", or {place}.val_path=null" if name == "val_fraction" else ""
            yield ConfigError(override, reason, f"the same command without {key}{others}")


def _check_reader(run: ResolvedRun, key: str, override: str) -> Iterator[ConfigError]:
    """Yield the error in an override that sets what nobody reads."""
    config = run.config
    without = "the same command without it"
    if key in _READ_WITH:
        switches, off, reason, beside = _READ_WITH[key]
        if select(config, key) is not None and all(select(config, switch) in off for switch in switches):
            yield ConfigError(override, reason, f"{without}, or {beside} beside it")
    if key in _READ_BY_REFERENCE and select(config, key) and key not in run.references.values():
        own = _READ_BY_REFERENCE[key]
        section, _, name = own.rpartition(".")
        node = select(config, section)
        takes = isinstance(node, Mapping) and name in find_signature(node.get("_target_")).parameters
        reason = f"{own} has a value of its own" if takes else f"{section} takes none"
        fix = f"{own}={to_setting(config[key])}" if takes else without
        yield ConfigError(override, f"{reason}, and nothing else reads it", fix)
    if key.startswith("mode.answers.") and not _has_answers(config):
        yield ConfigError(override, "the data has no answers, which instructions and questions have", without)
    is_read = override.endswith("_logging=none") or re.split(r"[./]", key, maxsplit=1)[-1].startswith(_OF_HYDRA)
    if key.startswith(("hydra.", "hydra/")) and not is_read:
        yield ConfigError(override, _INSTEAD_OF_HYDRA.get(key, "it has no effect: Hydra starts no run here"), without)
    if key == "callbacks.throughput.peak_tflops" and select(config, "callbacks.throughput.measure_peak"):
        reason = "callbacks.throughput.measure_peak=true measures what a matmul reaches instead"
        yield ConfigError(
            f"{override} callbacks.throughput.measure_peak=true", reason, f"{override} alone, or without it"
        )
    if key == "strategy.gather_for_generation" and run.mesh.pipeline > 1:
        reason = "each pipeline stage generates with its own layers, and gathers none of the others"
        yield ConfigError(f"{override} pipeline_parallel_size={run.mesh.pipeline}", reason, without)
    is_synced = key == "trainer.sync_batchnorm" and config["trainer"].get("sync_batchnorm") and run.mode.takes_steps
    if is_synced and not run.strategy.needs_process_group:
        reason = "strategy=single has one rank, and nothing to synchronize"
        yield ConfigError(override, reason, f"{without}, or strategy=ddp")


def check_plan_settings(run: ResolvedRun, overrides: Sequence[str]) -> Iterator[ConfigError]:
    """Check for typed settings of a plan in a mode that plans nothing, whatever their values."""
    for override in overrides:
        key, equals, _ = override.lstrip("+").partition("=")
        is_read = run.mode.name in ("plan", "batch_find") or (key == "plan.memory_gib" and run.mode.takes_steps)
        if equals and key.startswith("plan.") and not is_read:
            fix = "the same command without it, or mode=plan beside it"
            yield ConfigError(override, "only mode=plan and mode=batch_find read it", fix)


def _has_answers(config: Mapping[str, Any]) -> bool:
    """Return whether some data holds questions with answers, or is of another package and may."""
    targets = [str(node.get("_target_")) for _, node in list_data(config)]
    return any(
        not target.startswith("recipes.data.") or find_signature(target).constants.get("has_answers", False)
        for target in targets
    )


def check_evaluator(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check the evaluator of a composed run."""
    evaluator = run.config.get("evaluator")
    if not evaluator:
        return
    name = str(evaluator["_target_"]).split(".")[-2]
    if not run.mode.takes_evaluator:
        reason = "only mode=evaluate reads it"
        yield ConfigError(f"evaluator={name}", reason, f"mode=evaluate evaluator={name} resume=<run folder>")
        return
    if "evaluate_tasks" not in run.task.supports:
        reason = "its tasks are for language models, and this run has another task"
        yield ConfigError(f"evaluator={name}", reason, "evaluator=none")
    if evaluator.get("tasks") == []:
        yield ConfigError("evaluator.tasks=[]", "there is nothing to evaluate on", "evaluator.tasks=[hellaswag]")


def _nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor closest to a number; the smaller one of a tie."""
    if wanted >= number:
        return number
    distances = range(wanted)
    return next(near for step in distances for near in (wanted - step, wanted + step) if number % near == 0)


def check_kinds(
    config: Mapping[str, Any], choices: Mapping[str, str], overrides: Sequence[str]
) -> Iterator[ConfigError]:
    """Check that model, data, task and metrics agree on the kind of a sample: tokens, images, or another one."""
    if not all(isinstance(config.get(group), dict) for group in ("task", "model", "data")):
        return
    kinds = {
        "model": find_signature(config["model"]["_target_"]).constants.get("input_kind"),
        "data": read_sample_kind(config["data"]),
    }
    task_kinds = read_task(config["task"]).input_kinds
    if None in kinds.values() or not task_kinds:
        return  # a target that cannot be read is reported by the check of nodes
    named = {group: f"{group}={_get_option(config, choices, group)}" for group in ("task", *kinds)}
    if kinds["model"] != kinds["data"]:
        typed = {override.partition("=")[0] for override in overrides}
        usual = ("gpt2_nano", "resnet50" if "image_size" in config["data"] else "resnet18")
        to_data = _find_option("model", "input_kind", kinds["data"], usual, overrides)
        usual = ("stdlib_text", "digits" if config["model"].get("in_channels") == 1 else "random_images")
        to_model = _find_option("data", "sample_kind", kinds["model"], usual, overrides)
        if any(key.startswith("model.") for key in typed):
            to_data += ", without the other settings of model"
        if (setting := find_setting_of_kind(config["data"], "sample_kind")) is not None:
            to_model = f"data.{setting}={kinds['model']}"  # with the data that was chosen
        both = {"data", "model"} <= typed and (kinds["model"] in task_kinds or "task" not in typed)
        fix = f"{to_data}, or {to_model}" if both else to_data if "data" in typed else to_model
        yield ConfigError(
            f"{named['model']} {named['data']}",
            f"the model takes {kinds['model']}, the data gives {kinds['data']}",
            fix,
        )
    # a model that fits neither the data nor the task is the only mistake, if both are typed
    fits_data = kinds["data"] == kinds["model"] or kinds["data"] not in task_kinds
    if kinds["model"] not in task_kinds and (fits_data or not _are_typed(overrides, "data", "task")):
        usual = ("language_modeling", "classification")
        fix = _find_option("task", "input_kind", kinds["model"], usual, overrides)
        yield ConfigError(
            f"{named['model']} {named['task']}",
            f"the model takes {kinds['model']}, the task {' or '.join(task_kinds)}",
            fix,
        )
    yield from _callbacks_of_other_tasks(config, task_kinds, named["task"])
    yield from _loss_of_other_targets(config, choices, overrides)
    yield from _metrics_of_another_task(choices, overrides)


def _are_typed(overrides: Sequence[str], *groups: str) -> bool:
    return {*groups} <= {override.partition("=")[0] for override in overrides}


def _callbacks_of_other_tasks(config: Mapping[str, Any], kinds: Sequence[str], task: str) -> Iterator[ConfigError]:
    """Check that callbacks which are switched on by a setting can read what the task reads."""
    for name, node in (config.get("callbacks") or {}).items():
        constants: Mapping[str, Any] = find_signature(str((node or {}).get("_target_"))).constants
        kind, switch = constants.get("input_kind"), constants.get("validates_with")
        if kind is None or switch is None or kind in kinds or node.get(switch) is None:
            continue
        setting = f"callbacks.{name}.{switch}"
        reason = f"it needs a task that reads {kind}, and this one reads {' or '.join(kinds)}"
        yield ConfigError(f"{setting}={to_setting(node[switch])} {task}", reason, f"{setting}=null, or recipe=clip")


def _loss_of_other_targets(
    config: Mapping[str, Any], choices: Mapping[str, str], overrides: Sequence[str]
) -> Iterator[ConfigError]:
    """Check that the loss reads the kind of targets that the data has."""
    read, kind = read_target_kinds(config["loss"]), read_target_kind(config["data"])
    if kind in ("classes", "probabilities") and config["model"].get("num_classes") == 1:
        yield ConfigError("model.num_classes=1", "with one class there is nothing to learn", "model.num_classes=2")
    if not read or kind in read:
        yield from _weights_of_other_classes(config)
        return
    task, fitting = next(
        ((name, loss) for name, (kinds, loss) in _TASKS_OF_IMAGES.items() if kind in kinds), (None, None)
    )
    setting = find_setting_of_kind(config["data"], "target_kind")
    takes_images = "images" in read_task(config["task"]).input_kinds
    fixes = [f"task={task}"] if takes_images and task not in (None, choices.get("task")) else []
    if not fixes or any(override.startswith("loss=") for override in overrides):  # which the task does not set then
        fixes.append(f"loss={fitting}" if fitting is not None else f"loss=<one that reads {kind}>")
    if kind in _LOSSES_OF_ANSWERS:  # of a task that reads no classes
        is_of_answers = choices.get("task") in (
            ("policy", "actor_critic") if kind == "completions" else ("preference", "reward")
        )
        fixes = [f"loss={_LOSSES_OF_ANSWERS[kind]}" if is_of_answers else f"recipe={_LOSSES_OF_ANSWERS[kind]}"]
    elif _LOSSES_OF_ANSWERS.keys() & {*read}:
        fixes = ["data=prompts" if "completions" in read else "data=preferences"]
    is_typed = any(override.startswith(f"data.{setting}=") for override in overrides)
    samples = "completions" in read
    can_be_other = (kind not in _LOSSES_OF_ANSWERS or read[0] in _LOSSES_OF_ANSWERS) and not samples
    if setting is not None and not is_typed and can_be_other:
        fixes = [f"data.{setting}={read[0]}"]
    loss, data = _get_option(config, choices, "loss"), _get_option(config, choices, "data")
    reason = f"the loss reads {' or '.join(read)}, the targets of the data are {kind}"
    if samples:
        reason = "it learns from completions that are sampled for prompts, and this data holds texts to learn from"
        fixes = ["data=prompts data.path=<rows with a prompt each>"]
    yield ConfigError(f"loss={loss} data={data}", reason, " ".join(fixes))


def _weights_of_other_classes(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check that a loss with a weight for each class or label has as many as the model has outputs, and not all 0."""
    model, loss = config["model"], config["loss"]
    number = model.get("vocab_size", model.get("num_classes"))
    for name in ("class_weights", "pos_weight"):
        weights = loss.get(name)
        if not isinstance(weights, list) or not isinstance(number, int):
            continue
        shown = f"loss.{name}={to_setting(weights)}"
        if len(weights) != number:
            reason = f"it has {len(weights)} weights, and the model has {number} outputs"
            yield ConfigError(shown, reason, f"+loss.{name}=<a list of {number} numbers>")
        elif not any(weights):
            yield ConfigError(shown, "with weights of 0 nothing is learned", f"+loss.{name} with a weight above 0")


def _find_option(group: str, attribute: str, kind: object, usual: Sequence[str], typed: Sequence[str]) -> str:
    """Return the override that chooses an option for samples of a kind, one of the usual ones if some is.

    Args:
        group: Config group.
        attribute: Class attribute that names the kind.
        kind: The kind.
        usual: Options to try first.
        typed: Overrides of this command line.
    """
    for option in (*usual, *list_options(group, typed)):
        node = read_option(group, option, typed)
        constant = find_signature(node.get("_target_")).constants.get(attribute)
        if (read_sample_kind(node) if group == "data" else constant) == kind:
            return f"{group}={option}"
        if isinstance(constant, tuple) and kind in constant:
            return f"{group}={option}"
    if group == "model":
        return f"model._target_=<module.Class>, of your own, with input_kind = {json.dumps(kind)}"
    return f"{group}=<an option for {kind}>"


def _metrics_of_another_task(choices: Mapping[str, str], typed: Sequence[str]) -> Iterator[ConfigError]:
    """Reject metrics named after a task other than the chosen one, unless its file chooses them."""
    task, metrics = choices.get("task"), choices.get("metrics")
    if task is None or metrics is None:
        return
    chosen = [entry for entry in read_option("task", task, typed).get("defaults", ()) if isinstance(entry, dict)]
    is_own = metrics == task or any(metrics in entry.values() for entry in chosen)
    if not is_own and (CONF / "task" / f"{metrics}.yaml").is_file():
        fits = (CONF / "metrics" / f"{task}.yaml").is_file()
        yield ConfigError(
            f"metrics={metrics} task={task}",
            f"they are computed from what task={metrics} predicts",
            f"metrics={task if fits else 'none'}",
        )


def _get_option(config: Mapping[str, Any], choices: Mapping[str, str], group: str) -> str:
    if group in choices:
        return choices[group]
    target = str(config[group]["_target_"])
    parts = target.split(".")
    return parts[2] if len(parts) > 2 else target  # `recipes.<group>.<module>.<name>`, or another package
