"""Write which classes are taken for which, and the worst mistakes, to classes_<split>.json.

Shapes: B samples of a batch, C channels, H x W pixels.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from .files import tolerating, write_atomically
from .lightning_packages import Callback
from .logged_step import completed_steps, output_folder
from .ranks import gather_by_samples
from .report.images import encode_png

NO_CLASS = -100  # target of a sample that only fills up a batch
_COLUMNS = frozenset({"predicted", "target", "loss"})
_MOST_PAIRS = 2500  # of different classes
_LARGEST = 96  # pixels of a side of a written image


class _Mistake(NamedTuple):
    """A sample of another class than predicted.

    Attributes:
        loss: Its loss.
        target: Its class.
        predicted: The class that it is taken for.
        image: [C, h, w] uint8, scaled to its own range; None: the inputs are no images.
    """

    loss: float
    target: int
    predicted: int
    image: Tensor | None


class ClassReport(Callback):
    """Counts the classes and their predictions in every validation, and keeps the mistakes with the largest losses.

    Useful for seeing which classes are mixed up, and for finding wrong labels, which are among the worst mistakes. Rank
    0 writes `classes_<split>.json`: the `samples` of each class over all ranks and how many of them are `right`; the
    2,500 most frequent `pairs` of a class and another prediction with their number, which are all pairs of 50 classes;
    and `mistakes` with their images. The report shows the accuracy of each class, the confusion matrix and the images.
    The memory is that of the samples, not of a matrix: 16 bytes each.

    A module takes part by returning a dict from `validation_step`: `predicted` and `target`, [B] class numbers, with
    -100 for samples that do not count, and their `loss`, [B]. Images are `batch["inputs"]`, or the first of a tuple.

    Args:
        num_mistakes: How many mistakes are kept, with their images.
        split: Part of the data that is validated on, for the name of the file.

    Attributes:
        class_names: Names of the classes; None: those of `trainer.datamodule.class_names`, if it has any.

    Raises:
        ValueError: An argument is outside its range.

    Example:
        >>> report = ClassReport(num_mistakes=24)
        >>> trainer = Trainer(callbacks=[report], accelerator="cpu", logger=False)
        >>> report.split
        'val'
    """

    only_shows: ClassVar[bool] = True  # neither what is trained nor what is measured depends on it

    def __init__(self, *, num_mistakes: Annotated[int, ">= 0"] = 24, split: str = "val") -> None:
        super().__init__()
        if num_mistakes < 0:
            raise ValueError(f"num_mistakes is {num_mistakes}; it is 0 or more; set num_mistakes=24")
        self.num_mistakes = num_mistakes
        self.split = split
        self.class_names: Sequence[str] | None = None
        self._pairs: list[Tensor] = []  # [2, B] int64 each, target and prediction
        self._mistakes: list[_Mistake] = []

    @override
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pairs, self._mistakes = [], []

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        is_of_classes = isinstance(outputs, Mapping) and outputs.keys() >= _COLUMNS
        if not is_of_classes or dataloader_idx or trainer.sanity_checking:
            return
        target, predicted = outputs["target"], outputs["predicted"]  # [B] each
        counts = target != NO_CLASS
        self._pairs.append(torch.stack([target, predicted])[:, counts].cpu())
        if not self.num_mistakes:
            return
        losses = outputs["loss"].float().masked_fill(~counts | (target == predicted), -torch.inf)  # [B]
        largest = losses.topk(min(self.num_mistakes, len(losses)))
        inputs = batch["inputs"] if isinstance(batch, Mapping) else batch[0]
        smallest_kept = self._mistakes[-1].loss if len(self._mistakes) == self.num_mistakes else -torch.inf
        for loss, row in zip(largest.values.tolist(), largest.indices.tolist(), strict=True):
            if loss > smallest_kept:
                self._mistakes.append(_Mistake(loss, int(target[row]), int(predicted[row]), _get_image(inputs[row])))
        self._mistakes = self._keep_worst(self._mistakes)

    def _keep_worst(self, mistakes: Sequence[_Mistake]) -> list[_Mistake]:
        return sorted(mistakes, key=lambda mistake: -mistake.loss)[: self.num_mistakes]

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._pairs:  # on no rank: each has a batch, if only of padding
            return
        own = torch.cat(self._pairs, dim=1)  # [2, n]
        pairs, counts = own.unique(dim=1, return_counts=True)  # [2, P], [P]
        found = gather_by_samples((pairs, counts, self._mistakes), trainer)
        self._pairs, self._mistakes = [], []
        every, weights = torch.cat([pairs for pairs, _, _ in found], dim=1), torch.cat([each for _, each, _ in found])
        if not trainer.is_global_zero or not len(weights):
            return
        pairs, places = every.unique(dim=1, return_inverse=True)
        totals = torch.zeros(pairs.shape[1], dtype=torch.int64).index_add_(0, places, weights)  # [P]
        num_classes, is_right = int(pairs.max()) + 1, pairs[0] == pairs[1]
        samples, right = torch.zeros(2, num_classes, dtype=torch.int64)  # [V] each
        samples.index_add_(0, pairs[0], totals)
        right.index_add_(0, pairs[0], totals * is_right)
        wrong = torch.cat([pairs, totals[None]])[:, ~is_right]  # [3, P]
        wrong = wrong[:, wrong[2].argsort(descending=True, stable=True)[:_MOST_PAIRS]]
        mistakes = self._keep_worst([mistake for _, _, of_rank in found for mistake in of_rank])
        names = self.class_names or getattr(getattr(trainer, "datamodule", None), "class_names", None)
        record = {
            "step": completed_steps(trainer) or None,  # a checkpoint that is only evaluated has taken none here
            "class_names": None if names is None else [*map(str, names)],
            "samples": samples.tolist(),
            "right": right.tolist(),
            "pairs": wrong.T.tolist(),
            "mistakes": [
                {
                    "loss": mistake.loss,
                    "target": mistake.target,
                    "predicted": mistake.predicted,
                    "image": None if mistake.image is None else encode_image(mistake.image),
                }
                for mistake in mistakes
            ],
        }
        path = output_folder(trainer) / f"classes_{self.split}.json"
        with tolerating(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(record) + "\n")


def _get_image(sample: Tensor) -> Tensor | None:
    """Return an image [C, H, W] as [C, h, w] uint8, of at most 96 pixels a side, scaled to its own range."""
    if sample.ndim != 3 or len(sample) not in (1, 3):
        return None
    image = _shrink(sample.detach().float())
    low, high = image.amin(), image.amax()
    return (255 * (image - low) / (high - low).clamp(min=1e-12)).round().to(torch.uint8).cpu()


def _shrink(image: Tensor) -> Tensor:
    """Return an image [C, H, W] float with at most 96 pixels a side."""
    factor = _LARGEST / max(image.shape[1:])
    if factor >= 1:
        return image
    size = [max(round(factor * side), 1) for side in image.shape[1:]]
    return F.interpolate(image[None], size=size, mode="bilinear", antialias=True)[0]


def encode_image(image: Tensor) -> str:
    """Return an image [C, H, W] uint8, of at most 96 pixels a side, as base64 of a PNG."""
    pixels = _shrink(image.float()).round().to(torch.uint8)  # [C, h, w]
    rows = pixels.permute(1, 2, 0).flatten(1)  # [h, w C]
    return encode_png([bytes(row) for row in rows.tolist()], num_channels=len(pixels))
