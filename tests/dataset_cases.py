"""Datasets, a model and a loss as somebody who has never seen this project writes them."""

import csv
import random
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from recipes.loss import TargetLoss
from recipes.model.init import named_parameters, normal_


class Truncated(nn.Linear):
    """A layer on images of digits whose constructor draws within bounds, as those of many models do."""

    def __init__(self, *, num_classes: int) -> None:
        super().__init__(64, num_classes)
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.flatten(1))

    def init_weights(self, seed: int) -> None:
        nn.init.trunc_normal_(self.weight, std=0.02, generator=torch.Generator().manual_seed(seed))


class DigitPairs(Dataset[Any]):
    """The digits of one split of `data=digits` as pairs of an array and a number."""

    def __init__(self, *, split: str) -> None:
        from recipes.data.digits import Digits

        digits = Digits(random_crop_padding=0, random_horizontal_flip=False)
        digits.prepare()
        images = digits.train() if split == "train" else digits.val()
        self._images: Any = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Any:
        sample = self._images[index]
        return sample["inputs"].numpy(), int(sample["targets"])


class Rows(Dataset[Any]):
    """Rows of eight numbers and their sum, as dicts with a text."""

    def __init__(self, *, seed: int, num_rows: int = 37) -> None:
        self._rows = np.random.default_rng(seed).standard_normal((num_rows, 8))  # float64

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return {"x": self._rows[index], "y": [self._rows[index].sum()], "weight": 2.0, "file": "rows.csv"}


class Incomplete(Dataset[Any]):
    """Rows without the column that is read."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        row: dict[str, float] = {"area": 1.0}
        return row["area"], row["price"]


class Ragged(Incomplete):
    """Samples in which torch raises, not the code of the dataset."""

    def __getitem__(self, index: int) -> Any:
        return torch.stack([torch.zeros(2), torch.zeros(3)]), index


class Failing(Incomplete):
    """Rows that cannot be read, by a mistake in the code that reads them."""

    def __init__(self, size: Any) -> None:
        self._size = len(size)


class Labelled(Rows):
    """Nine rows with one of three classes, or with three labels."""

    def __init__(self, *, kind: str) -> None:
        super().__init__(seed=4, num_rows=9)
        self._kind = kind

    def __getitem__(self, index: int) -> Any:
        labels = [float(index % 3 == place) for place in range(3)]
        return self._rows[index], index % 3 if self._kind == "classes" else labels


class OfFile(Dataset[Any]):
    """Rows of a CSV, eight numbers and the name of a class, which a file of new rows does not have."""

    def __init__(self, *, path: str) -> None:
        with open(path, newline="", encoding="utf-8") as file:
            self._rows = list(csv.DictReader(file))
        if "label" in self._rows[0]:
            self.classes = ["low", "middle", "high"]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        row = self._rows[index]
        sample: dict[str, Any] = {"inputs": torch.tensor([float(row[f"x{place}"]) for place in range(8)])}
        return sample | ({"targets": self.classes.index(row["label"])} if "label" in row else {})


class Drawn(Rows):
    """Rows with noise from all three global generators."""

    def __getitem__(self, index: int) -> Any:
        noise = random.random() + np.random.rand() + torch.rand(()).item()
        return self._rows[index] + noise, index


class Remembering(Rows):
    """Rows with noise from a generator of its own, which goes on from sample to sample."""

    def __init__(self, *, seed: int) -> None:
        super().__init__(seed=seed)
        self._rng = np.random.default_rng(seed)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index] + self._rng.random(), index


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.zeros(8), 0


class NoLength(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(8), 0


class Whatever(Dataset[Any]):
    """Five copies of what it is given."""

    def __init__(self, sample: Any = None, *, length: int = 5) -> None:
        self._sample, self._length = sample, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._sample


class Perceptron(nn.Module):
    input_kind: ClassVar[str] = "tensors"

    def __init__(self, *, num_inputs: int = 8, num_outputs: int = 1, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(num_inputs, width), nn.Linear(width, num_outputs)

    def forward(self, rows: Tensor) -> Tensor:
        """[B, num_inputs] -> [B, num_outputs]"""
        outputs: Tensor = self.down(torch.relu(self.up(rows)))
        return outputs

    def init_weights(self, seed: int) -> None:
        for name, parameter in named_parameters(self):
            normal_(parameter, name=name, seed=seed, std=0.3)

    def init_buffers(self) -> None: ...


class OfFourInputs(Perceptron):
    def __init__(self) -> None:
        super().__init__(num_inputs=4)


class OfTwoTensors(Perceptron):
    def forward(self, rows: Tensor, weights: Tensor) -> Tensor:
        return super().forward(rows) * weights


class ReadingValues(Perceptron):
    def forward(self, rows: Tensor) -> Tensor:
        size = int(rows.sum().item()) * 0 + len(rows)  # without storage, neither is there to be read
        return super().forward(rows.reshape(size, -1))


class OfThreeClasses(Perceptron):
    def __init__(self, *, num_classes: int = 3, width: int = 16) -> None:
        super().__init__(num_outputs=num_classes, width=width)


class OfComputedClasses(OfThreeClasses):
    def __init__(self, *, num_classes: int = len("abc"), width: int = 16) -> None:
        super().__init__(num_classes=num_classes, width=width)


class Cubed(TargetLoss):
    """Mean cubed error, which takes no setting of `loss=mse` or `loss=cross_entropy`."""

    target_kinds: ClassVar[tuple[str, ...]] = ("values",)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.where(targets.isnan(), 0.0, (outputs.float() - targets).abs() ** 3)


class ClassesAlone(TargetLoss):
    """Squared distance of the probabilities of classes, Brier's score, which says only that it reads classes."""

    target_kinds: ClassVar[tuple[str, ...]] = ("classes",)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        carries = self.has_loss(targets)
        one_hot = nn.functional.one_hot(targets.clamp(min=0), outputs.shape[-1])
        return torch.where(carries, (outputs.float().softmax(dim=-1) - one_hot).square().sum(dim=-1), 0.0)


class Unknown(ClassesAlone):
    """The same, of which nobody says what it reads."""

    target_kinds: ClassVar[tuple[str, ...]] = ()


class Absolute(TargetLoss):
    """Absolute error of numbers, or of class numbers, which offers no predictions to metrics."""

    target_kinds: ClassVar[tuple[str, ...]] = ("values", "classes")

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.float() - targets).abs()


class WithoutLosses(TargetLoss):
    """A loss that lacks its only method."""


class Likelihood(TargetLoss):
    """Negative log-likelihood of a normal distribution: two outputs, mean and log-variance, for each number."""

    target_kinds: ClassVar[tuple[str, ...]] = ("values",)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean, log_variance = outputs.float().unbind(dim=-1)
        return 0.5 * (log_variance + (targets.reshape(mean.shape) - mean) ** 2 / log_variance.exp())


class Colored(Dataset[Any]):
    """Color images of five classes."""

    def __init__(self, *, num_images: int = 16) -> None:
        self._images = np.random.default_rng(0).random((num_images, 3, 16, 16), dtype=np.float32)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Any:
        return self._images[index], index % 5
