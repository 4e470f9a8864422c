"""Supervised learning on images or tensors: classes, labels or numbers, one loss per target."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate
from typing_extensions import override

from recipes.errors import ConfigError
from recipes.lightning_internals import get_data
from recipes.task.base import Batch, TrainingTask

_NUM_TRIED = 8  # samples, spread evenly, that are compared with the model before the first step


class Supervised(TrainingTask):
    """Trains a model of images or tensors, [B, …] -> outputs [B, V], which the loss compares with the targets.

    Classes, several labels or numbers: what the targets are is between data and loss. Arguments: see `TrainingTask`.
    """

    input_kind: ClassVar[tuple[str, ...]] = ("images", "tensors")
    has_fixed_shapes: ClassVar[bool] = True

    @override
    def outputs(self, batch: Batch) -> Any:
        return self.model(_last(batch["inputs"]))  # [B, V], compute dtype

    @override
    def predictions(self, batch: Batch) -> dict[str, Tensor]:
        outputs = self.outputs(batch)
        predictions = self.loss.to_predictions(self._without_padding(outputs), batch)
        return predictions | {"target": batch["targets"], "loss": self.loss.per_sample(outputs, batch)}

    @override
    def on_fit_start(self) -> None:
        """Try the loss of some samples on the host: a GPU would report a class that is out of range as a lost device.

        Raises:
            ConfigError: The model takes other images, or returns another number of outputs than the targets have; or
                the metrics cannot read them.
        """
        super().on_fit_start()
        data = get_data(self.trainer)
        if data is None:
            return
        dataset, model = data.source.train(), self.meta_model().eval()
        number = min(_NUM_TRIED, len(dataset))
        collate = getattr(data.source, "collate", None) or default_collate
        batch = collate([dataset[place * len(dataset) // number] for place in range(number)])
        inputs = batch["inputs"]
        channels = getattr(model, "in_channels", None)
        if channels is not None and inputs.ndim == 4 and inputs.shape[1] != channels:
            reason = f"the images of the data have {inputs.shape[1]} channels"
            raise ConfigError(f"model.in_channels={channels}", reason, f"model.in_channels={inputs.shape[1]}")
        try:
            outputs = model(inputs.to("meta"))
        except (RuntimeError, TypeError, ValueError):
            return  # it reads values, or the first step raises this again, with its traceback
        if isinstance(outputs, Tensor):
            made_up = torch.zeros(outputs.shape)
            self._try_loss(made_up, batch, model)
            self.val_metrics.try_outputs(self._without_padding(made_up), batch)

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
            name = f"{type(model).__module__}.{type(model).__name__}"
            reason = f"it returns {num_outputs} outputs, and samples of the data have {what} ({error})"
            is_setting = getattr(model, "num_classes", None) == num_outputs
            setting = f"model.num_classes={num_outputs}" if is_setting else f"model._target_={name}"
            fix = f"model.num_classes={needed}" if is_setting else f"the settings with which it returns {needed}"
            raise ConfigError(setting, reason, fix) from error


def _last(inputs: Tensor) -> Tensor:
    """Return images [B, C, H, W] in channels-last memory format, which is fastest for convolutions."""
    return inputs.contiguous(memory_format=torch.channels_last) if inputs.ndim == 4 else inputs
