"""Recipes with one planted fault each: data sources, models, optimizers and tasks for the preflight tests."""

import time
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.data.digits import Digits
from recipes.data.text_files import TextFiles
from recipes.model.gpt2 import GPT2
from recipes.model.resnet import ResNet18
from recipes.optimizer.adamw import adamw
from recipes.task.language_modeling import LanguageModeling


class Changed:
    """A dataset whose samples pass through a function of the index and the original dataset."""

    def __init__(self, dataset: Any, change: Any) -> None:
        self.dataset, self.change = dataset, change
        self.targets_per_sample = dataset.targets_per_sample
        self.tokens_per_sample = dataset.tokens_per_sample

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.change(self.dataset, index)


class _FaultyText(TextFiles):
    @staticmethod
    def change(dataset: Any, index: int) -> Any:
        raise NotImplementedError

    def train(self) -> Any:
        return Changed(super().train(), self.change)


class Unshifted(_FaultyText):
    @staticmethod
    def change(dataset: Any, index: int) -> Any:
        return {"inputs": dataset[index]["inputs"], "targets": dataset[index]["inputs"].clone()}


class Repeating(_FaultyText):
    @staticmethod
    def change(dataset: Any, index: int) -> Any:
        return dataset[index % 5]


class Slow(_FaultyText):
    @staticmethod
    def change(dataset: Any, index: int) -> Any:
        time.sleep(0.005)
        return dataset[index]


class OutOfRange(_FaultyText):
    @staticmethod
    def change(dataset: Any, index: int) -> Any:
        sample = dataset[index]
        return {"inputs": sample["inputs"], "targets": sample["targets"] + 200}


class Leaking(TextFiles):
    def val(self) -> Any:
        return self.train()


class ShuffledLabels(Digits):
    def train(self) -> Any:
        dataset = super().train()
        dataset.labels = dataset.labels[torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))]
        return dataset


class DrawsByItself(Digits):
    def train(self) -> Any:
        dataset: Any = super().train()
        drawn = dataset.sample
        dataset.sample = lambda index, rng: drawn(index, np.random.default_rng())
        return dataset


class FrozenLayer(GPT2):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.blocks[0].mlp.requires_grad_(False)


class UnusedLayer(GPT2):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.blocks[0].spare = nn.Linear(4, 4)


class SeesTheFuture(GPT2):
    def forward(self, tokens: Tensor, cache: Any = None) -> Tensor:
        logits = super().forward(tokens, cache)
        return logits + logits[..., :1].mean(dim=1, keepdim=True)


class SeesNeighbours(GPT2):
    def forward(self, tokens: Tensor, cache: Any = None) -> Tensor:
        logits = super().forward(tokens, cache)
        return logits + 0.5 * logits.mean(dim=0, keepdim=True).clamp(min=-9)


class LargeFirstWeights(GPT2):
    def init_weights(self, seed: int) -> None:
        super().init_weights(seed)
        with torch.no_grad():
            self.embedding.weight.mul_(50)


class DropoutInEvaluation(GPT2):
    def forward(self, tokens: Tensor, cache: Any = None) -> Tensor:
        return F.dropout(super().forward(tokens, cache), 0.1, training=True)


class CoarseInLowPrecision(GPT2):
    def forward(self, tokens: Tensor, cache: Any = None) -> Tensor:
        logits = super().forward(tokens, cache)
        return (logits * 2).round() / 2 + 0 * logits if torch.is_autocast_enabled("cpu") else logits


class ForgetsAtSave(GPT2):
    """Has state that training changes but checkpoints omit."""

    seen: Tensor

    def init_weights(self, seed: int) -> None:
        super().init_weights(seed)
        self.seen.zero_()

    def init_buffers(self) -> None:
        super().init_buffers()
        self.seen.zero_()

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, tokens: Tensor, cache: Any = None) -> Tensor:
        if self.training:
            self.seen += 1
        return super().forward(tokens, cache) * (1 + 0.5 * self.seen)


class NormOfTheBatch(ResNet18):
    """Batch norm that uses batch statistics even in evaluation."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.track_running_stats = False
                module.running_mean = module.running_var = None


def adamw_of_matrices(model: nn.Module, **arguments: Any) -> torch.optim.Optimizer:
    """Leave out norms and biases."""
    optimizer = adamw(model, **arguments)
    optimizer.param_groups[:] = optimizer.param_groups[:1]
    return optimizer


class UndividedAccumulation(LanguageModeling):
    input_kind: ClassVar[str] = "tokens"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.trainer.accumulate_grad_batches


class SmoothsOverPadding(LanguageModeling):
    input_kind: ClassVar[str] = "tokens"
    _head_loss = None  # all logits at once

    def outputs(self, batch: Any) -> Tensor:
        self.loss.num_outputs = None  # padding columns are classes like the others
        logits: Tensor = super().outputs(batch).clamp(min=-100)
        return logits
