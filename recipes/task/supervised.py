"""Supervised learning on images or tensors: classes, labels or numbers, one loss per target."""

import inspect
import re
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate
from typing_extensions import override

from recipes.errors import ConfigError
from recipes.lightning_internals import get_data
from recipes.loss import NO_PREDICTIONS, SAY_PREDICTIONS
from recipes.numerics.loss import IGNORE_INDEX
from recipes.task.base import Batch, TrainingTask

# what torch says of sizes that do not fit, and of what it cannot do without values or on this device
_OF_SIZES = re.compile(r"\b(shapes?|sizes?|dim(ension)?s?|channels|elements)\b|input_size")
_OF_DEVICE = re.compile(r"\b(meta|cpu|cuda|device)\b", re.IGNORECASE)
_NUM_TRIED = 8  # samples, spread evenly, that are compared with the model before the first step


class Supervised(TrainingTask):
    """Trains a model of images or tensors, [B, …] -> outputs [B, V], which the loss compares with the targets.

    Classes, several labels or numbers: what the targets are is between data and loss.

    Args:
        channels_last: Whether images lie in memory with their channels last; None: on a GPU, where convolutions are
            fastest so.
        **settings: See `TrainingTask`.
    """

    input_kind: ClassVar[tuple[str, ...]] = ("images", "tensors")
    has_fixed_shapes: ClassVar[bool] = True

    def __init__(self, *, channels_last: bool | None, **settings: Any) -> None:
        super().__init__(**settings)
        self._channels_last = channels_last

    @override
    def outputs(self, batch: Batch) -> Any:
        return self.model(arrange(batch["inputs"], self._channels_last))  # [B, V], compute dtype

    @override
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor] | None:
        """Return the class, the prediction and the loss of each sample, [B], for callbacks; None without classes."""
        outputs = self._validate(batch, dataloader_idx)
        if self.loss.predicted != "classes" or outputs.ndim != 2:
            return None
        target, known = batch["targets"], self.loss.has_loss(batch["targets"])
        if target.is_floating_point():  # probabilities [B, V]
            target, known = target.argmax(dim=-1), known.all(dim=-1)
        predicted = self._without_padding(outputs).argmax(dim=-1)
        losses = self.loss.per_sample(outputs, batch)
        return {"predicted": predicted, "target": target.masked_fill(~known, IGNORE_INDEX), "loss": losses}

    @override
    def predictions(self, batch: Batch) -> dict[str, Tensor]:
        outputs = self.outputs(batch)
        real = self._without_padding(outputs)
        if "targets" not in batch:
            predictions = self.loss.to_predictions(real, {**batch, "targets": self._make_unknown(real)})
            if not predictions:
                raise ConfigError(f"loss._target_={_get_path(self.loss)}", NO_PREDICTIONS, SAY_PREDICTIONS)
            return predictions
        predictions = self.loss.to_predictions(real, batch)
        return predictions | {"target": batch["targets"], "loss": self.loss.per_sample(outputs, batch)}

    def _make_unknown(self, outputs: Tensor) -> Tensor:
        """Return targets without a loss of samples that have none, of the kind that the data has elsewhere."""
        if self.loss.target_kind == "classes":
            return torch.full(outputs.shape[:-1], IGNORE_INDEX, device=outputs.device)
        is_one = self.loss.target_kind == "values" and outputs.shape[-1] == 1
        return torch.full(outputs.shape[:-1] if is_one else outputs.shape, torch.nan, device=outputs.device)

    @override
    def on_fit_start(self) -> None:
        """Try the loss of some samples on the host: a GPU would report a class that is out of range as a lost device.

        Raises:
            ConfigError: The targets are not of the kind that the data says; the model takes other inputs, or returns
                another number of outputs than the targets have; or the metrics cannot read them.
        """
        super().on_fit_start()
        data = get_data(self.trainer)
        if data is None:
            return
        dataset, model = data.source.train(), self.meta_model().eval()
        number = min(_NUM_TRIED, len(dataset))
        collate = getattr(data.source, "collate", None) or default_collate
        batch = collate([dataset[place * len(dataset) // number] for place in range(number)])
        self._check_kind(data.source, batch["targets"])
        inputs = batch["inputs"]
        channels = getattr(model, "in_channels", None)
        if channels is not None and inputs.ndim == 4 and inputs.shape[1] != channels:
            reason = f"the images of the data have {inputs.shape[1]} channels"
            raise ConfigError(f"model.in_channels={channels}", reason, f"model.in_channels={inputs.shape[1]}")
        _check_forward(model)
        try:
            outputs = model(inputs.to("meta"))
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            said = str(error)
            is_of_sizes = type(error) is RuntimeError and _OF_SIZES.search(said) and not _OF_DEVICE.search(said)
            if is_of_sizes or (type(error) is AssertionError and inputs.ndim == 4):  # timm asserts sizes of images
                raise self._explain_sizes(model, inputs, said) from error
            return  # it reads values, or the first step raises this again, with its traceback
        if isinstance(outputs, Tensor):
            made_up = torch.zeros(outputs.shape)
            self._try_loss(made_up, batch, model)
            self.val_metrics.try_outputs(self._without_padding(made_up), batch)

    def _check_kind(self, source: Any, targets: Tensor) -> None:
        """Check the targets of a source that has classes, as one has that says nothing: here nothing is mixed yet.

        Raises:
            ConfigError: They are labels, which the loss would read as probabilities of classes.
        """
        reads_labels = "labels" in self.loss.target_kinds and self.loss.target_kind == "classes"
        if reads_labels and targets.is_floating_point():
            reason = f"its targets are {[*targets.shape[1:]]} numbers per sample, and classes are whole numbers"
            fix = 'target_kind = "labels" in that class'
            raise ConfigError(f"data._target_={_get_path(source)}", reason, fix)

    def _explain_sizes(self, model: nn.Module, inputs: Tensor, said: str) -> ConfigError:
        """Return the error of a model that takes other inputs, with the setting by which it takes these.

        Args:
            model: Without storage.
            inputs: Inputs [B, …] of a batch.
            said: What torch says of their sizes.
        """
        sizes = [*inputs.shape[1:]]
        said = said.partition("\n")[0].rstrip(".")
        reason = f"the inputs of a sample are [{', '.join(map(str, sizes))}], and torch says: {said}"
        numbers = {name: value for name, value in self.model_arguments.items() if value is None or type(value) is int}
        for name, value in numbers.items():
            for size in dict.fromkeys(sizes):
                if size != value and self._takes(type(model), {name: size}, inputs):
                    return ConfigError(
                        f"model.{name}={'null' if value is None else value}", reason, f"model.{name}={size}"
                    )
        shown = ", ".join(f"model.{name}=" for name in numbers)
        fix = f"its settings for such inputs, of {shown}" if shown else "a model for such inputs"
        return ConfigError(f"model._target_={_get_path(model)}", reason, fix)

    def _takes(self, model_class: Any, changed: dict[str, int], inputs: Tensor) -> bool:
        """Return whether a model with a changed setting takes these inputs."""
        try:
            with torch.device("meta"):
                model_class(**{**self.model_arguments, **changed}).eval()(inputs.to("meta"))
        except (AssertionError, RuntimeError, TypeError, ValueError):
            return False
        return True

    def _try_loss(self, outputs: Tensor, batch: Batch, model: nn.Module) -> None:
        try:
            with torch.compiler.set_stance("force_eager"):
                self.loss(outputs, batch)
        except (IndexError, RuntimeError, ValueError) as error:
            targets, num_outputs = batch["targets"], outputs.shape[-1]
            if targets.is_floating_point():
                needed, what = targets[0].numel(), f"{targets[0].numel()} targets"
            else:
                needed, what = int(targets.max()) + 1, f"the class {int(targets.max())}"
            if isinstance(error, ConfigError) and num_outputs == needed:
                raise  # the fault of the loss
            name = _get_path(model)
            reason = f"it returns {num_outputs} outputs, and samples of the data have {what} ({error})"
            is_setting = getattr(model, "num_classes", None) == num_outputs
            setting = f"model.num_classes={num_outputs}" if is_setting else f"model._target_={name}"
            fix = f"model.num_classes={needed}" if is_setting else f"the settings with which it returns {needed}"
            raise ConfigError(setting, reason, fix) from error


def _check_forward(model: nn.Module) -> None:
    """Check that a model can be called with the inputs alone.

    Raises:
        ConfigError: It takes nothing, or several tensors.
    """
    signature = inspect.signature(model.forward)
    try:
        signature.bind(None)
    except TypeError as error:
        reason = f"its forward{signature} is called with one tensor, the inputs of a batch: {error}"
        fix = "def forward(self, inputs) in that class, or a LightningModule with task=lightning, which calls it itself"
        raise ConfigError(f"model._target_={_get_path(model)}", reason, fix) from error


def _get_path(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def arrange(inputs: Tensor, channels_last: bool | None) -> Tensor:
    """Return images [B, C, H, W] with channels last in memory, or as they are; None: last on a GPU, which is faster."""
    is_last = inputs.is_cuda if channels_last is None else channels_last
    return inputs.contiguous(memory_format=torch.channels_last) if is_last and inputs.ndim == 4 else inputs
