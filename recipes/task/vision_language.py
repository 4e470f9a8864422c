"""Next-token prediction over texts with images: the language model's task, whose rows hold images."""

import functools
from collections.abc import Hashable
from typing import Any, ClassVar

from typing_extensions import override

from recipes.model.flops import Flops
from recipes.task.base import Batch
from recipes.task.language_modeling import LanguageModeling


class VisionLanguage(LanguageModeling):
    """Trains a language model that reads images among its tokens. Arguments: see `TrainingTask`.

    A batch has the images of all rows one after the other, and as many tokens for each as the model makes features. A
    batch without images, as of texts alone, is read as well: the model then encodes an image that no token takes.
    """

    supports: ClassVar[frozenset[str]] = frozenset({"generate", "export", "reads_images"})

    @override
    def _run(self, batch: Batch, **options: Any) -> Any:
        return super()._run(batch, images=batch.get("images"), **options)

    @override
    def recipes_flops_key(self, batch: dict[str, Any]) -> Hashable:
        return super().recipes_flops_key(batch), self._count_images(batch)

    @override
    def recipes_flops(self, batch: dict[str, Any]) -> Flops | None:
        """Return the FLOPs of a micro-batch, those of tower and projector for its images included.

        An image of zeros in the place of none is padding, and takes none.
        """
        of_tokens, num_images = super().recipes_flops(batch), self._count_images(batch)
        if of_tokens is None or not num_images:
            return of_tokens
        return of_tokens.plus(num_images * self._flops_per_image)

    def _count_images(self, batch: dict[str, Any]) -> float:
        """Return the images of a micro-batch, the mean over the ranks where the data counts those of all."""
        if "num_read_images" in batch:
            return float(batch["num_read_images"] / self.data_size)
        return float(len(batch["images"])) if "images" in batch else 0.0

    @functools.cached_property
    def _flops_per_image(self) -> float:
        model: Any = self.meta_model()
        flops: float = model.flops_per_image()
        return flops
