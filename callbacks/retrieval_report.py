"""Write what some captions and images of a validation find to retrieval_<split>.json.

Shapes: C channels, H x W pixels.
"""

import json
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from .class_report import encode_image
from .files import tolerating, write_atomically
from .lightning_packages import Callback
from .logged_step import completed_steps, output_folder
from .protocols import SupportsRetrieval


class RetrievalReport(Callback):
    """Writes the nearest images of some captions, and the nearest captions of some images, after each validation.

    Useful for seeing what a model confuses: a recall of 40 % is good if the nearest caption describes the image as
    well. Rank 0 writes `retrieval_<split>.json`, which the report shows: the images with their cosine, and which of
    them belongs to the caption. The module is a `SupportsRetrieval`; of any other, nothing is written.

    Args:
        split: Part of the data that is validated on, for the name of the file.

    Example:
        >>> report = RetrievalReport()
        >>> report.split
        'val'
    """

    only_shows: ClassVar[bool] = True  # neither what is trained nor what is measured depends on it

    def __init__(self, *, split: str = "val") -> None:
        super().__init__()
        self.split = split

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero or not isinstance(pl_module, SupportsRetrieval):
            return
        found = pl_module.recipes_retrieved()
        if found is None:
            return
        step = completed_steps(trainer) or None  # a checkpoint that is only evaluated has taken none here
        path = output_folder(trainer) / f"retrieval_{self.split}.json"
        with tolerating(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps({"step": step} | _encode_pixels(found)) + "\n")


def _encode_pixels(value: Any) -> Any:
    """Return a record with a PNG in base64 in place of each [C, H, W] uint8."""
    if isinstance(value, dict):
        return {key: encode_image(each) if key == "pixels" else _encode_pixels(each) for key, each in value.items()}
    return [_encode_pixels(each) for each in value] if isinstance(value, list) else value
