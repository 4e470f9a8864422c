"""Renamed settings and options: an old name is rejected with the new one and the same value."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recipes.config.check.types import to_setting
from recipes.config.overrides import for_shell
from recipes.config.signature import find_signature
from recipes.config.traits import select
from recipes.errors import ConfigError

_LOSS_SPIKE = {
    "warm_up": "warmup_steps",
    "cool_down_steps": "cooldown_steps",
    "loss_score": "loss_threshold",
    "norm_score": "norm_threshold",
    "drift_score": "drift_threshold",
    "snapshots_in": "snapshot_storage",
    "lr_cut_steps": "lr_backoff_steps",
    "max_evidence": "max_dumps",
    "rewinds_data": "rewind_data",
}
# old key -> new key
RENAMED_SETTINGS = {
    "checkpoint.if_save_fails": "checkpoint.on_save_error",
    "strategy.reduce_every": "strategy.gradient_sync",
    "strategy.shard_size": "data_parallel_shard",
    "clipping.warm_up": "clipping.warmup_steps",
    "callbacks.early_stop.after": "callbacks.early_stop.patience",
    "callbacks.early_stop.metric": "callbacks.early_stop.monitor",
    **{f"callbacks.loss_spike.{old}": f"callbacks.loss_spike.{new}" for old, new in _LOSS_SPIKE.items()},
    "sweep.repeat_failed": "sweep.retry_failed",
    "sweep.skip_refused": "sweep.skip_invalid",
    "lr_scaling.reference_lr": "lr_scaling.base_lr",
    "lr_scaling.reference_batch_size": "lr_scaling.base_batch_size",
    "model.width": "model.hidden_size",
    "model.hidden_width": "model.ffn_hidden_size",
    "model.pad_vocab_to": "model.vocab_pad_multiple",
    "model.tie_head": "model.tie_embeddings",
}
# old key -> old value -> new value, where the values were renamed too
RENAMED_VALUES = {"strategy.reduce_every": {"window": "per_step", "micro_batch": "per_micro_batch"}}
# group -> old option -> new option
RENAMED_OPTIONS = {
    "checkpoint": {"folders": "default"},
    "optimizer": {"adamw_small": "adamw_nano"},
    "debug": {"fdr": "fast_dev_run"},
}


class RenamedError(ConfigError):
    """An old name is used; the fix is the new name with the same value."""


def answer_renamed_setting(override: str) -> RenamedError | None:
    """Return the error for an override of an old key, with or without `+` or `~`; None for any other."""
    marks = override[: len(override) - len(override.lstrip("+~"))]
    key, equals, value = override.removeprefix(marks).partition("=")
    if key not in RENAMED_SETTINGS:
        return None
    new = RENAMED_SETTINGS[key]
    if key in RENAMED_VALUES:  # all values of a sweep
        value = ",".join(RENAMED_VALUES[key].get(part, part) for part in value.split(","))
    fix = f"'~{new}'" if marks == "~" else f"{new}={value if equals else '<value>'}"
    return RenamedError(override, f"`{key}` is now `{new}`", fix)


def answer_renamed_option(override: str) -> RenamedError | None:
    """Return the error for an override that chooses an old option, alone or in a sweep; None for any other."""
    group, _, value = override.lstrip("+").partition("=")
    if group not in RENAMED_OPTIONS:
        return None
    renamed = RENAMED_OPTIONS[group]
    options = value.split(",")
    old = next((option for option in options if option in renamed), None)
    if old is None:
        return None
    now = ",".join(renamed.get(option, option) for option in options)
    return RenamedError(override, f"`{group}={old}` is now `{group}={renamed[old]}`", f"{group}={now}")


def check_renamed(config: Mapping[str, Any]) -> Iterator[RenamedError]:
    """Find old keys in a composed config: from a YAML file, or added with `+`.

    A key that the target of its section accepts is not an old one: a custom model may have a `width`.
    """
    for old in RENAMED_SETTINGS:
        section, _, key = old.rpartition(".")
        node = select(config, section) if section else config
        if isinstance(node, Mapping) and key in node and not accepts(node, key):
            error = answer_renamed_setting(f"{old}={to_setting(node[key])}")
            assert error is not None
            yield error


def accepts(node: Mapping[str, Any], key: str) -> bool:
    """Return whether the target of a config node takes an argument of this name."""
    signature = find_signature(node.get("_target_"))
    return signature.takes_any or key in signature.parameters


def drop_consequences(mistakes: Sequence[ConfigError], renamed: Sequence[RenamedError]) -> list[ConfigError]:
    """Drop the errors that an old key also causes: it is unknown, and the new key is missing."""
    unknown = {error.setting for error in renamed}
    missing = {f"no {RENAMED_SETTINGS[error.setting.partition('=')[0]]}" for error in renamed}
    return [mistake for mistake in mistakes if mistake.setting not in unknown | missing]


def restore_sweeps(mistakes: Sequence[ConfigError], typed: Mapping[str, str]) -> list[ConfigError]:
    """Return the errors of a sweep's first job, with all values of the sweep for a key that is another one.

    Args:
        mistakes: Errors found for the first job.
        typed: Sweep override by override of the first job.
    """
    restored: list[ConfigError] = []
    for mistake in mistakes:
        whole = typed.get(mistake.setting, "") if isinstance(mistake, RenamedError) else ""
        key, equals, value = mistake.fix.rpartition("=")
        if (
            not whole
            and equals
            and " " not in key
            and mistake.setting in typed
            and mistake.setting.endswith(f"={value}")
        ):
            whole, values = typed[mistake.setting], typed[mistake.setting].partition("=")[2]
            mistake = ConfigError(whole, mistake.reason, for_shell(f"{key}={values}"))
        restored.append(answer_renamed_setting(whole) or answer_renamed_option(whole) or mistake)
    return restored
