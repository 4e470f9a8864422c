"""Check that a checkpoint matches the model and optimizer of this run, and adjust its micro-batch counters."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from recipes.checkpoint.saved_tensor import SavedTensor
from recipes.errors import ConfigError

_NEEDED = (
    "loops",
    "consumed",
    "strategy",
    "mesh",
    "loggers",
    "optimizer",
    "clipping",
    "base",
    "model_settings",
    "published_config",
)


@dataclass(frozen=True)
class Base:
    """Frozen weights beside an adapter, which no checkpoint holds.

    Attributes:
        name: Folder or hub name of the published model; else the seed they were drawn from.
        hash: Hash of the published tensors; None for weights from a seed.
        in_nf4: Whether they are held in 4 bits.
    """

    name: str
    hash: str | None
    in_nf4: bool

    @property
    def is_published(self) -> bool:
        """Whether they were read from files."""
        return self.hash is not None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of them."""
        return asdict(self)


def check_keys(checkpoint: Mapping[str, Any], data: object) -> None:
    """Check that a checkpoint has what a run goes on from: without some of it Lightning would begin again, silently.

    Args:
        checkpoint: Lightning checkpoint.
        data: Data module that goes on from it; None if nothing is trained.

    Raises:
        ValueError: Something is missing, no count, or of another step.
    """
    goes_on = () if data is None else ("callbacks", "lr_schedulers", type(data).__qualname__)
    missing = [key for key in (*_NEEDED, *goes_on) if key not in checkpoint]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")
    if goes_on and len(checkpoint["lr_schedulers"]) != 1:
        raise ValueError(
            f"it has the state of {len(checkpoint['lr_schedulers'])} schedules of the learning rate, not 1"
        )
    _check_counts(checkpoint)
    if goes_on:
        _check_steps(checkpoint)


def _check_counts(checkpoint: Mapping[str, Any]) -> None:
    """Check what Lightning and the task take over unread, and compute with in the first step."""
    counts = [(f"consumed {name}", checkpoint["consumed"][name]) for name in ("samples", "tokens")]
    schedules = checkpoint.get("lr_schedulers", [])
    counts += [("the step of the schedule", schedule["last_epoch"]) for schedule in schedules]
    for name, count in counts:
        if type(count) is not int or not 0 <= count < 2**62:
            raise ValueError(f"{name} is {str(count)[:40]}, not a count")


def _check_steps(checkpoint: Mapping[str, Any]) -> None:
    """Check that the schedule and Lightning's own count of steps, with which a run goes on, are at its step."""
    step, loop = checkpoint["global_step"], checkpoint["loops"]["fit_loop"]
    progress = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]
    counts = {"the optimizer": progress["completed"], "the schedule": checkpoint["lr_schedulers"][0]["last_epoch"]}
    for name, count in counts.items():
        if count != step:
            raise ValueError(f"{name} is at step {count}, and the run at step {step}")


def check_settings(own: Mapping[str, Any], saved: Mapping[str, Any], *, fix: str) -> None:
    """Check that the model has the settings that its weights were trained with: some change no shape.

    The config check compares what is typed with the run's config.yaml, and this what that file says.

    Args:
        own: Settings of this run's model.
        saved: Those in the checkpoint.
        fix: What to type if one differs.

    Raises:
        ConfigError: A setting differs.
    """
    for key, value in saved.items():
        if key in own and own[key] != value:
            reason = f"the weights of the checkpoint were trained with model.{key}={value}"
            raise ConfigError(f"resume=… with model.{key}={own[key]}", reason, fix)


def check_model(own: Mapping[str, torch.Size], saved: Mapping[str, SavedTensor], *, setting: str, fix: str) -> None:
    """Check that the names and shapes of a model's tensors match the checkpoint.

    Args:
        own: Shapes by name.
        saved: Tensors of the checkpoint by name.
        setting: What was set, for the error.
        fix: What to type if they do not.

    Raises:
        ConfigError: A tensor is missing, unknown, or has a different shape.
    """
    own_shapes = {name: tuple(shape) for name, shape in own.items()}
    saved_shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    for name in own_shapes | saved_shapes:
        if own_shapes.get(name) != saved_shapes.get(name):
            raise ConfigError(
                setting,
                f"the checkpoint is of another model: {name} is {_show(saved_shapes.get(name))} there"
                f" and {_show(own_shapes.get(name))} here",
                fix,
            )


def check_base(own: Base | None, saved: Mapping[str, Any] | None) -> None:
    """Check that an adapter's base weights are those it was trained on, in whichever folder they are now.

    Args:
        own: Frozen weights of this run; None without an adapter.
        saved: Those of the checkpoint, as `Base.state` returned them.

    Raises:
        ConfigError: The base weights differ.
    """
    before = None if saved is None else Base(**saved)
    if own is None or before is None or own.is_published != before.is_published or own.in_nf4 != before.in_nf4:
        if own == before:
            return
        raise ConfigError(
            "resume=… model.… adapter.…",
            f"the checkpoint is of {_describe_base(before)}, and this run of {_describe_base(own)}",
            "resume=… without settings of the model, its weights, the adapter and the seed",
        )
    if own.is_published and own.hash != before.hash:
        raise ConfigError(
            f"resume=… with the weights of {own.name}",
            f"they have other values than when the adapter was trained beside {before.name}",
            "resume=… model.pretrained=<folder with the weights as they were>",
        )
    if not own.is_published and own.name != before.name:
        raise ConfigError(
            f"resume=… seed={own.name}",
            f"the weights beside the adapter were drawn from seed={before.name}",
            f"resume=… seed={before.name}",
        )


def check_published_config(own: Mapping[str, Any], saved: Mapping[str, Any], name: str) -> None:
    """Check that the config.json of a published model describes the model that the weights were trained in.

    Args:
        own: Settings in the file now; empty for models whose settings are typed.
        saved: Settings when the checkpoint was saved. Those that only one version of transformers has are not compared.
        name: Folder or hub name.

    Raises:
        ConfigError: A setting differs.
    """
    for key in sorted(own.keys() & saved.keys()):
        if json.dumps(own[key], sort_keys=True) != json.dumps(saved[key], sort_keys=True):  # NaN equals itself
            raise ConfigError(
                f"resume=… with the config.json of {name}",
                f"it has {key}={own[key]}, and the weights were trained with {key}={saved[key]}",
                "resume=… model.name=<folder with config.json and weights as they were>",
            )


def _describe_base(base: Base | None) -> str:
    if base is None:
        return "a model without an adapter"
    weights = f"the weights of {base.name}" if base.is_published else f"weights drawn from seed={base.name}"
    return f"an adapter beside {weights}{' in NF4' if base.in_nf4 else ''}"


def _show(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))


def check_optimizer(name: str, saved_name: str | None) -> None:
    """Check that the optimizer matches the checkpoint: a different optimizer cannot use its state.

    Args:
        name: Optimizer class of this run.
        saved_name: Optimizer class in the checkpoint; None without a checkpoint.

    Raises:
        ConfigError: The classes differ.
    """
    if saved_name not in (None, name):
        raise ConfigError(
            f"optimizer={name.lower()}",
            f"the checkpoint holds the state of {saved_name}",
            "the same command without optimizer=, or resume=null to train with another one",
        )


def recount_micro_batches(checkpoint: dict[str, Any], num_micro_batches: int) -> None:
    """Rewrite Lightning's micro-batch counters for a different number of micro-batches per step.

    Args:
        checkpoint: Lightning checkpoint, changed in place.
        num_micro_batches: Micro-batches per optimizer step of this run.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    done = checkpoint["global_step"] * num_micro_batches
    for counts in (progress["total"], progress["current"]):
        # 1 if the checkpoint was written before its micro-batch was counted as completed, else 0
        uncounted = counts["ready"] - counts["completed"]
        counts |= dict.fromkeys(counts, done) | {"completed": done - uncounted}
