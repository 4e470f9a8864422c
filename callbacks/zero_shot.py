"""Classify images by the names of their classes alone, after each validation of a model of images and captions.

Shapes: V classes, n images of this rank, F numbers of a feature.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from typing_extensions import override

from .lightning_packages import Callback
from .profiler_hooks import get_profiler
from .protocols import SupportsZeroShot
from .ranks import data_rank, data_size, gather_by_samples, num_ranks

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
NO_CLASS = -100  # of what only fills up a batch
_PLACE = "{}"  # of the name of a class in a template
_TOP = 5


class ZeroShot(Callback):
    """Logs after each validation how many images of a folder are nearest to the caption of their class.

    Useful for what retrieval does not say: whether a model can be used for a task that it was not trained for, and how
    it compares with published ones, whose accuracy on ImageNet is of this kind. A class is the mean of the normalized
    features of all its templates, normalized again, as in CLIP (arXiv:2103.00020, section 3.1.4). Logs
    `val/zero_shot_accuracy`, and with more than 5 classes `val/zero_shot_accuracy_top5`; an image that is as near to
    another class as to its own is an error. A validation takes one forward pass more for each image and each template
    of a class, divided over the ranks.

    The module is a `SupportsZeroShot`.

    Args:
        path: Folder with one folder of images per class; None: off.
        templates: Captions of a class, in which `{}` is its name.
        classes: Names of the classes, by folder; None: those of the folders, with blanks for `_`.

    Attributes:
        class_names: Of the folders in alphabetic order.

    Raises:
        ValueError: There is no such folder, it has fewer than two classes, a class has no image or no name, or a
            template has no `{}`.

    Example:
        >>> check = ZeroShot(path=None, templates=["a photo of a {}."])
        >>> check.templates
        ['a photo of a {}.']
    """

    validation_metrics: ClassVar[tuple[str, ...]] = ("zero_shot_accuracy", "zero_shot_accuracy_top5")
    validates_with: ClassVar[str] = "path"
    input_kind: ClassVar[str] = "images_and_text"

    def __init__(self, *, path: str | None, templates: Sequence[str], classes: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.templates = [*templates]
        if not self.templates:
            raise ValueError("templates is []; a class needs a caption; set templates=[<a text with {} in it>]")
        if lacking := [template for template in self.templates if _PLACE not in template]:
            reason = f"{lacking[0]!r} has no {_PLACE} for the name of a class, and would be the same for all"
            raise ValueError(f"templates is {self.templates}; {reason}; set templates=[<a text with {{}} in it>]")
        self.class_names: list[str] = []
        self._paths: list[Path] = []
        self._classes: list[int] = []
        if path is not None:
            self._list_images(Path(path).expanduser(), classes)

    def _list_images(self, root: Path, names: Mapping[str, str] | None) -> None:
        if not root.is_dir():
            what = "it is a file" if root.exists() else "there is no such folder"
            raise ValueError(f"path is {root}; {what}; set path=<a folder with one folder of images per class>")
        folders = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
        if len(folders) < 2:
            what = "it has no folder" if not folders else f"{folders[0]!r} is its only folder"
            reason = f"{what}, and one class cannot be taken for another"
            raise ValueError(f"path is {root}; {reason}; set path=<a folder with one folder of images per class>")
        if names is not None and (missing := [folder for folder in folders if folder not in names]):
            reason = f"it has no name for {missing[0]!r}, which is a folder of path"
            raise ValueError(f"classes is {dict(names)}; {reason}; set classes=<a name for each folder, or null>")
        for number, folder in enumerate(folders):
            found = sorted(_walk(root / folder))
            if not found:
                reason = f"no image is in its folder {folder!r}; images end with {', '.join(SUFFIXES)}"
                raise ValueError(f"path is {root}; {reason}; set path=<a folder with images in every folder>")
            self._paths += found
            self._classes += [number] * len(found)
            self.class_names.append(folder.replace("_", " ") if names is None else names[folder])

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._paths and not isinstance(pl_module, SupportsZeroShot):
            reason = f"{type(pl_module).__name__} does not compare images with captions"
            raise ValueError(f"path is set; {reason}: it has no recipes_encode_captions; set path=None")

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or not isinstance(pl_module, SupportsZeroShot) or not self._paths:
            return
        with get_profiler(trainer).profile("zero_shot"), isolate_rng():
            hits, hits_of_top, total = self._count_hits(trainer, pl_module)
        found = {"zero_shot_accuracy": hits / total}
        if len(self.class_names) > _TOP:
            found["zero_shot_accuracy_top5"] = hits_of_top / total
        for name, value in found.items():
            pl_module.log(f"val/{name}", value, rank_zero_only=False, sync_dist=False)

    def _count_hits(self, trainer: Trainer, module: SupportsZeroShot) -> tuple[int, int, int]:
        """Return the images of all ranks whose class is the nearest, or one of the 5 nearest, and all. Collective."""
        classes = self._encode_classes(trainer, module)  # [V, F]
        features, own = module.recipes_encode_images(self._paths, self._classes)  # [n, F], [n]
        counts = own != NO_CLASS  # [n]
        cosines = F.normalize(features[counts].double(), dim=-1) @ classes.T  # [n, V]
        of_own = cosines.gather(1, own[counts][:, None])  # [n, 1]
        ranks = (~(cosines < of_own)).sum(dim=1) - 1  # [n], 0 is the best; one that is as near counts, and so does NaN
        of_rank = (int((ranks < 1).sum()), int((ranks < _TOP).sum()), len(ranks))
        hits, hits_of_top, total = (sum(parts) for parts in zip(*gather_by_samples(of_rank, trainer), strict=True))
        return hits, hits_of_top, total

    def _encode_classes(self, trainer: Trainer, module: SupportsZeroShot) -> Tensor:
        """Return the normalized features of all classes, [V, F] float64: each rank encodes a part. Collective."""
        rank, size = (data_rank(trainer), data_size(trainer)) if num_ranks() > 1 else (0, 1)
        num_classes = len(self.class_names)
        per_rank = -(-num_classes // size)  # as many on every rank; those after the last class are not used
        numbers = [(rank + place * size) % num_classes for place in range(per_rank)]
        captions = [
            template.replace(_PLACE, self.class_names[number]) for number in numbers for template in self.templates
        ]
        encoded = module.recipes_encode_captions(captions).double()  # [classes of this rank x templates, F]
        each = F.normalize(encoded, dim=-1).unflatten(0, (per_rank, len(self.templates)))
        own = F.normalize(each.mean(dim=1), dim=-1)  # [classes of this rank, F]
        found = torch.stack(gather_by_samples(own.cpu(), trainer), dim=1)  # [per rank, ranks, F]
        return found.flatten(0, 1)[:num_classes].to(encoded.device)


def _walk(root: Path) -> Iterator[Path]:
    """Yield the images below a folder, hidden ones left out."""
    for folder, folders, files in os.walk(root, followlinks=True):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        for file in files:
            if file.lower().endswith(SUFFIXES) and not file.startswith("."):
                yield Path(folder, file)
