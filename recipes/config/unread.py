"""Find what is typed for nothing: settings that the chosen mode does not read. Imports no torch."""

from collections.abc import Sequence

from recipes.config.instantiate import TARGET
from recipes.config.resolved import ResolvedRun

_OF_TRAINING = (
    *("freeze", "optimizer", "scheduler", "lr_scaling", "warmup_steps", "clipping", "ema_decay"),
    *("label_smoothing", "z_loss", "loss.label_smoothing", "loss.z_loss"),
    *(
        "eval_every",
        "eval_samples",
        "save_every",
        "save_every_minutes",
        "log_every",
        "logger",
        "profile_steps",
        "sweep",
    ),
    *("trainer.max_steps", "trainer.min_steps", "trainer.max_epochs", "trainer.max_time"),
    *("trainer.gradient_clip_val", "trainer.gradient_clip_algorithm"),
    *("start_from", "start_from_weights"),
)
# of writing checkpoints; verify_hashes is of loading one
OF_SAVING = tuple(
    f"checkpoint.{name}"
    for name in ("keep_last", "keep_every", "keep_best", "monitor", "mode", "async_save", "on_save_error")
)
_OF_DATA = ("data", "eval_data", "loader", "micro_batch_size", "metrics")
# of a few steps without loggers, validation and checkpoints
_OF_RUNS = (
    *("logger", "save_every", "save_every_minutes", "eval_every", "eval_samples", "log_every", "profile_steps"),
    *("trainer.max_steps", "trainer.min_steps", *OF_SAVING),
)
# mode -> settings that it does not read
_UNREAD = {
    "evaluate": _OF_TRAINING,
    "test": _OF_TRAINING,
    "predict": _OF_TRAINING,
    "sample": (*_OF_TRAINING, *_OF_DATA, "loss"),
    "export": (*_OF_TRAINING, *_OF_DATA, "loss"),
    "lr_find": (*_OF_RUNS, "scheduler", "warmup_steps"),
    "batch_find": (*_OF_RUNS, "micro_batch_size", "trainer.accumulate_grad_batches"),
    "noise_scale": _OF_RUNS,
    "plan": ("logger", "profile_steps", "start_from", "start_from_weights"),
    "replay": tuple(key for key in _OF_TRAINING + _OF_DATA if not key.endswith(("label_smoothing", "z_loss"))),
}
# of documents, beside what is read of them: their split and their tokens
_UNREAD_WITHIN = {
    "prepare": tuple(f"data.{name}" for name in ("val_fraction", "tokenizer", "seq_len", "vocab_size", "num_processes"))
}
# mode without a run of its own -> what it reads beside its own settings
_READ = {
    "dashboard": ("dashboard",),
    "report": ("dashboard",),
    "diagnose": (),
    "convert_gguf": (),
    "prepare": ("data", "quality", "launcher", "ignore_slurm", "name"),
}


def list_unread(run: ResolvedRun) -> list[str]:
    """Return the overrides of this command line that have no effect in its mode.

    Not those beside `resume=auto`: they are the whole command of a run, with a mode. Nor those that name a class, which
    the folder of the run alone may not.

    Args:
        run: The run.
    """
    typed = [override for override in run.typed if TARGET not in override]
    keys = {override: override.lstrip("+~").partition("=")[0].partition("@")[0] for override in typed}
    mode = run.mode.name
    if mode in _UNREAD and run.resume != "auto":
        return [override for override, key in keys.items() if _is_of(key, _UNREAD[mode])]
    if mode in _READ:
        read = ("mode", "hydra", *_READ[mode])
        within = _UNREAD_WITHIN.get(mode, ())
        return [override for override, key in keys.items() if not _is_of(key, read) or _is_of(key, within)]
    return []


def _is_of(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)
