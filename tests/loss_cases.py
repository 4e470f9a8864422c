"""A loss of two denominators, tasks that look at all ranks, images with every kind of targets, and a small model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from support import MaskedImages
from torch import Tensor, nn

from recipes.loss import Batch, Term
from recipes.loss.cross_entropy import CrossEntropy
from recipes.loss.image_text import Features, Pairs
from recipes.model.flops import Flops
from recipes.model.init import constant_, named_parameters, normal_
from recipes.numerics.loss import IGNORE_INDEX
from recipes.task.contrastive import Contrastive
from recipes.task.image_text import ImageText
from recipes.task.language_modeling import LanguageModeling

NUM_OUTPUTS = 5
NUM_FEATURES = 8


class TwoCounts(CrossEntropy):
    """Cross-entropy per target, plus a squared log-sum-exp per target that is an even token.

    That square is logged without weight as `even_square`.
    """

    measures: ClassVar[Mapping[str, str]] = {"even_square": "num_even"}

    def __init__(self) -> None:
        super().__init__()
        self.count_names = ("num_targets", "num_even")

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return super().counts(batch) | {"num_even": is_even(batch["targets"]).sum()}

    def counts_of_sample(self, num_targets: int | None) -> None:
        return None

    def __call__(self, outputs: Any, batch: Batch) -> list[Term]:
        squares = outputs[..., : self.num_outputs].float().logsumexp(dim=-1).square()  # [B, T]
        even = (squares * is_even(batch["targets"])).sum()
        measured = Term(even.detach(), per="num_even", weight=0.0, logged_as="even_square")
        return [*super().__call__(outputs, batch), Term(even, per="num_even", weight=0.05), measured]


class Centered(CrossEntropy):
    """Cross-entropy plus the square by which each log-sum-exp differs from its mean over the global batch."""

    def __call__(self, outputs: Any, batch: Batch) -> list[Term]:
        terms = super().__call__(outputs, batch)
        if "center" not in batch:  # validation has no optimizer steps
            return terms
        norms = outputs[..., : self.num_outputs].float().logsumexp(dim=-1)  # [B, T]
        squares = (norms - batch["center"]).square() * (batch["targets"] != IGNORE_INDEX)
        return [*terms, Term(squares.sum(), weight=0.5)]


class Centering(LanguageModeling):
    """Computes the center of the global batch before each optimizer step."""

    def before_window(self, micro_batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        sums = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for batch in micro_batches:
                own = self.own_tokens(batch)
                outputs = self.outputs(own)
                if self._pipeline is None or self._pipeline.has_last:
                    carries = own["targets"] != IGNORE_INDEX  # [B, T]
                    norms = self._without_padding(outputs).double().logsumexp(dim=-1)  # [B, T]
                    sums += torch.stack([(norms * carries).sum(), carries.double().sum()])
        total, number = self.engine.sum_over_token_ranks(sums).unbind()
        return [batch | {"center": (total / number).float()} for batch in micro_batches]


class Contrasting(LanguageModeling):
    """Trains the halves of a sample to be closer to each other than to the halves of all other samples (InfoNCE).

    A rank compares its own samples with those of all ranks.
    """

    def terms(self, batch: dict[str, Any]) -> list[Term]:
        halves = self.outputs(batch)[..., :NUM_FEATURES].float().unflatten(1, (2, -1)).mean(dim=2)  # [B, 2, F]
        own = F.normalize(halves, dim=-1)
        every = self.engine.gather_over_data_ranks(own)  # [N B, 2, F]
        return [Term(self.contrast(own, every, first=self.engine.data_rank * len(own)))]

    def contrast(self, own: Tensor, every: Tensor, *, first: int) -> Tensor:
        """Return the sum of the loss over samples, of which the first is number `first` of all."""
        places = torch.arange(first, first + len(own))  # [B]
        one, other = own.unbind(1), every.unbind(1)[::-1]
        sums = [F.cross_entropy(x @ y.T / 0.2, places, reduction="sum") for x, y in zip(one, other, strict=True)]
        return sums[0] + sums[1]


class ContrastingEverywhere(Contrasting):
    """Every rank computes the whole loss from all samples, which is then as many times in the objective."""

    def contrast(self, own: Tensor, every: Tensor, *, first: int) -> Tensor:
        return super().contrast(every, every, first=0) / self.engine.data_size


class ContrastingOnFirst(Contrasting):
    """The first rank computes the whole loss from all samples; the others join the backward pass."""

    def contrast(self, own: Tensor, every: Tensor, *, first: int) -> Tensor:
        whole = super().contrast(every, every, first=0)
        return whole if self.engine.data_rank == 0 else 0.0 * whole


def is_even(targets: Tensor) -> Tensor:
    """Return which targets are even tokens, few of them in some samples and none in others."""
    return (targets != IGNORE_INDEX) & (targets % 2 == 0)


class MaskedNumbers(MaskedImages):
    """Random images with 5 labels, probabilities or values each, of which an uneven part is unknown."""

    target_kind: ClassVar[str] = "{targets}"  # floats of classes would be probabilities of mixed images

    def __init__(self, *, num_samples: int, targets: str) -> None:
        super().__init__(num_samples=num_samples)
        self.fingerprint = targets
        generator = torch.Generator().manual_seed(1)
        values = torch.randn(num_samples, NUM_OUTPUTS, generator=generator)  # [N, V]
        drawn = torch.rand(num_samples, NUM_OUTPUTS, generator=generator)
        if targets == "probabilities":
            self.numbers = values.softmax(dim=1)
            self.numbers[::3] = torch.nan
        else:
            self.numbers = (values > 0).float() if targets == "labels" else values
            self.numbers[drawn < torch.linspace(0, 0.8, num_samples)[:, None]] = torch.nan

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.images[index], "targets": self.numbers[index]}


class UndeclaredLabels(MaskedImages):
    """Random images with three labels each, of a source that does not say so."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.images[index], "targets": (self.images[index].flatten()[:3] > 0).float()}


class TwoViews(MaskedImages):
    """Random images beside themselves with noise, every third of which is not compared."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image = self.images[index]
        return {"inputs": torch.stack([image, image + self.images[index - 1]]), "targets": self.classes[index]}


class Pixels(nn.Module):
    """Images [B, C, 8, 8] -> [B, V] by two blocks, in which samples do not depend on each other."""

    input_kind: ClassVar[str] = "images"
    pretrained = None

    def __init__(self, *, num_classes: int, in_channels: int = 1) -> None:
        super().__init__()
        self.stem = nn.Linear(64 * in_channels, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.head = nn.Linear(32, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.stem(images.flatten(1))  # [B, W]
        for block in self.blocks:
            hidden = hidden + block(hidden.relu())
        outputs: Tensor = self.head(hidden)  # [B, V]
        return outputs

    def flops_per_sample(self, image_size: int) -> Flops:
        num_weights = sum(parameter.numel() for parameter in self.parameters() if parameter.ndim == 2)
        return Flops(palm=6.0 * num_weights, causal=6.0 * num_weights)

    def init_weights(self, seed: int) -> None:
        for name, parameter in named_parameters(self):
            normal_(parameter, name=name, seed=seed, std=0.1)

    def init_buffers(self) -> None: ...


class Drawing(nn.Module):
    """Images [B, 1, 8, 8] -> [B, V] through a batch norm and dropout."""

    input_kind: ClassVar[str] = "images"
    pretrained = None

    def __init__(self, *, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.stem, self.norm, self.dropout = nn.Linear(64, 12), nn.BatchNorm1d(12), nn.Dropout(0.5)
        self.head = nn.Linear(12, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.dropout(self.norm(self.stem(images.flatten(1)))))
        return outputs

    def init_weights(self, seed: int) -> None:
        for name, parameter in named_parameters(self):
            if name == "norm.weight":
                constant_(parameter, 1.0)
            else:
                normal_(parameter, name=name, seed=seed, std=0.3)
        self.init_buffers()

    def init_buffers(self) -> None:
        self.norm.reset_running_stats()


class ContrastingAtOnce(Contrastive):
    """Also computes the gradient of the whole batch in one graph, from the same random numbers."""

    def before_window(self, micro_batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        state = torch.get_rng_state()
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        projections = torch.cat([self.outputs(batch) for batch in micro_batches])
        carries = torch.cat([self.loss.carries(batch) for batch in micro_batches])
        losses = self.loss.compare(projections, projections, first=0, carries=carries)[:, 0]
        at_once = torch.autograd.grad(losses.sum() / (2 * carries.sum()), [*self.model.parameters()])
        with torch.no_grad():
            for buffer, values in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(values)
        torch.set_rng_state(state)
        self.at_once = at_once
        return super().before_window(micro_batches)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.differences = [
            (weight.grad - whole).abs().max().item() / whole.abs().max().item()
            for weight, whole in zip(self.model.parameters(), self.at_once, strict=True)
            if weight.grad is not None and whole.abs().max() > 1e-6  # a bias before a batch norm has none
        ]


class Captioned(MaskedImages):
    """Random images with captions of random tokens, some of them repeated and every third pair filling up."""

    sample_kind: ClassVar[str] = "images_and_text"

    def __init__(self, *, num_samples: int) -> None:
        super().__init__(num_samples=num_samples)
        generator = torch.Generator().manual_seed(2)
        self.number = torch.arange(num_samples) % (num_samples - 7)  # [N], the last ones have the captions of the first
        tokens = torch.randint(1, 16, (num_samples, 6), generator=generator)
        self.tokens = tokens[self.number]  # [N, T]
        self.lengths = torch.randint(2, 7, (num_samples,), generator=generator)[self.number]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "inputs": self.images[index],
            "tokens": self.tokens[index],
            "is_token": torch.arange(6) < self.lengths[index],
            "caption": self.number[index],
            "image": torch.tensor(index),
            "targets": torch.where(self.classes[index] == IGNORE_INDEX, IGNORE_INDEX, 0),
        }


def write_published(folder: Path, *, kind: str) -> Path:
    """Write the config.json of a CLIP or SigLIP model of transformers that reads these images and captions."""
    from transformers import AutoConfig

    ids = {"vocab_size": 257, "bos_token_id": 1, "eos_token_id": 3, "pad_token_id": 3}  # as many as there are bytes
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text, images = {**ids, **sizes, "max_position_embeddings": 6}, {"image_size": 8, "patch_size": 4, "num_channels": 1}
    config = AutoConfig.for_model(kind, text_config=text, vision_config={**sizes, **images}, projection_dim=8)
    config.save_pretrained(folder)
    return folder


class TwoEncoders(nn.Module):
    """Images [B, 1, 8, 8] and tokens [B, T] -> features, through dropout; a scale is soon at its limit."""

    input_kind: ClassVar[str] = "images_and_text"
    pretrained = None
    vocab_size, max_seq_len = 16, 6

    def __init__(self, *, num_classes: int, in_channels: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.images = Pixels(num_classes=num_classes, in_channels=in_channels)
        self.embedding = nn.Embedding(16, 32)
        self.text = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.out = nn.Linear(32, num_classes)
        self.dropout = nn.Dropout(dropout)
        self.logit_scale = nn.Parameter(torch.empty(1))
        self.logit_bias = nn.Parameter(torch.empty(1))

    def forward(self, images: Tensor, tokens: Tensor, is_token: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        hidden = (self.embedding(tokens) * is_token[..., None]).sum(dim=1)  # [B, W]
        for block in self.text:
            hidden = hidden + block(self.dropout(hidden.relu()))
        return self.images(images), self.out(hidden), self.logit_scale * 1.0, self.logit_bias * 1.0

    def named_blocks(self) -> dict[str, Any]:
        return {"images.blocks": self.images.blocks, "text": self.text}

    def bounds(self) -> dict[str, tuple[float, float]]:
        return {"logit_scale": (0.995, 1.005)}

    def init_weights(self, seed: int) -> None:
        for name, parameter in named_parameters(self):
            if name.startswith("logit"):
                constant_(parameter, 1.0 if name == "logit_scale" else -1.0)
            else:
                normal_(parameter, name=name, seed=seed, std=0.1)

    def init_buffers(self) -> None: ...


class PairsAtOnce(ImageText):
    """Also computes the gradient of the whole batch in one graph, with the dropout masks of the micro-batches."""

    def before_window(self, micro_batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        state = torch.get_rng_state()
        features = [self.outputs(batch) for batch in micro_batches]
        joined = Features(
            torch.cat([each.images for each in features]),
            torch.cat([each.captions for each in features]),
            features[0].log_scale,
            features[0].bias,
        )
        pairs = [self.loss.pairs(batch) for batch in micro_batches]
        every = Pairs(*(torch.cat(parts) for parts in zip(*pairs, strict=True)))
        mean = self.loss.compare(joined, joined, every, first=0)[:, 0].sum() / every.carries.sum()
        self.at_once = dict(
            zip(
                [name for name, _ in self.model.named_parameters()],
                torch.autograd.grad(mean, [*self.model.parameters()], allow_unused=True),
                strict=True,
            )
        )
        torch.set_rng_state(state)
        return super().before_window(micro_batches)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        whole = {name: gradient for name, gradient in self.at_once.items() if gradient is not None}
        self.differences = {
            name: (parameter.grad - whole[name]).abs().max().item() / whole[name].abs().max().item()
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None and name in whole and whole[name].abs().max() > 1e-6
        }
