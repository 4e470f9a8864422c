"""Healthy trainings of many kinds, small enough for 20,000 steps in half a minute: none needs a response to a spike.

Each is a LightningModule that draws its own batches, so that it trains in a Trainer as well as in a plain loop
(`record`), which is faster and yields loss and gradient norm of every step.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, OneCycleLR

_PIXELS, _CLASSES = 64, 10


class HealthyRun(LightningModule):
    """One kind of training: a network, its batches and its optimizer.

    Args:
        num_steps: Of the run; schedules and changes of the data are placed relative to it.
        seed: Of weights and batches.
        batch_size: Samples a step.
    """

    batch_size = 32
    learning_rate = 1e-3

    def __init__(self, num_steps: int, seed: int, batch_size: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.num_steps = num_steps
        self.batch_size = batch_size or self.batch_size
        self.random = torch.Generator().manual_seed(seed)
        self.step_number = 0
        self.setup_run()

    def setup_run(self) -> None:
        """Create network and data."""
        pixels, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(pixels / 16, dtype=torch.float32)  # [1797, 64], 0 to 1
        self.labels = torch.tensor(labels)  # [1797]
        norm = nn.BatchNorm1d(64) if self.batch_size > 4 else nn.LayerNorm(64)
        self.net = nn.Sequential(nn.Linear(_PIXELS, 64), norm, nn.ReLU(), nn.Linear(64, _CLASSES))

    @property
    def progress(self) -> float:
        """Fraction of the run that is over."""
        return self.step_number / self.num_steps

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of the next batch, which the module draws itself."""
        loss = self.loss()
        self.step_number += 1
        return loss

    def loss(self) -> Tensor:
        """Return the loss of a new batch."""
        images, labels = self.draw()
        return F.cross_entropy(self.net(images), labels)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Return images [B, 64] and labels [B]."""
        index = torch.randint(len(self.images), (self.batch_size,), generator=self.random)
        return self.images[index], self.labels[index]

    def normal(self, *shape: int) -> Tensor:
        """Return standard normal numbers from the generator of the run."""
        return torch.randn(shape, generator=self.random)

    def configure_optimizers(self) -> Any:
        """Return Adam; kinds with a schedule override it."""
        return Adam(self.parameters(), self.learning_rate, fused=True)


class WeightDecay(HealthyRun):
    """SGD with momentum and weight decay: plateaus, no vanishing loss."""

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, fused=True)


class WarmRestarts(HealthyRun):
    """The learning rate returns to its maximum at the end of each cosine, and the loss rises."""

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), 0.2, momentum=0.9, fused=True)
        return _per_step(optimizer, CosineAnnealingWarmRestarts(optimizer, self.num_steps // 31, T_mult=2))


class OneCycle(HealthyRun):
    """The learning rate rises 25-fold in the first third, and the loss with it."""

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), 0.01, momentum=0.9, fused=True)
        return _per_step(optimizer, OneCycleLR(optimizer, max_lr=0.5, total_steps=self.num_steps + 1))


class Augmentation(HealthyRun):
    """Noise, shifts and erased pixels are switched on at half time: the loss jumps and stays higher."""

    def draw(self) -> tuple[Tensor, Tensor]:
        images, labels = super().draw()
        if self.progress >= 0.5:
            shift = int(torch.randint(-1, 2, (), generator=self.random))
            kept = torch.rand(images.shape, generator=self.random) > 0.2
            images = images.view(-1, 8, 8).roll(shift, dims=2).flatten(1)
            images = (images + 0.3 * self.normal(*images.shape)) * kept
        return images, labels


class FineTuning(HealthyRun):
    """Fine-tuning of weights that are good already, on inverted images, with a warm-up of the learning rate."""

    def setup_run(self) -> None:
        super().setup_run()
        optimizer = Adam(self.net.parameters(), 1e-3)
        for _ in range(200):
            optimizer.zero_grad()
            HealthyRun.loss(self).backward()
            optimizer.step()
        self.images = 0.7 * self.images + 0.3 * (1 - self.images)

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), 5e-4, fused=True)
        return _per_step(optimizer, LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 500)))


class NewClasses(HealthyRun):
    """A class is added at every tenth of the run: its samples are confidently taken for others at first."""

    def setup_run(self) -> None:
        super().setup_run()
        self.all_images, self.all_labels = self.images, self.labels

    def draw(self) -> tuple[Tensor, Tensor]:
        known = self.all_labels <= 1 + int(self.progress * 10)
        self.images, self.labels = self.all_images[known], self.all_labels[known]
        return super().draw()


class NoisyLabels(HealthyRun):
    """A tenth of the labels is wrong and small batches are memorised: a few samples carry the loss."""

    batch_size = 4

    def setup_run(self) -> None:
        super().setup_run()
        wrong = torch.rand(len(self.labels), generator=self.random) < 0.1
        self.labels = torch.where(wrong, torch.randint(_CLASSES, self.labels.shape, generator=self.random), self.labels)


class RareClass(HealthyRun):
    """One class in a hundred has a hundred times the weight: one batch in four has most of the loss."""

    def loss(self) -> Tensor:
        images, labels = self.draw()
        is_rare = (labels == 9) & (torch.rand(labels.shape, generator=self.random) < 0.1)
        kept = is_rare | (labels != 9)
        losses = F.cross_entropy(self.net(images), labels, reduction="none")  # [B]
        return (losses * torch.where(is_rare, 100.0, 1.0) * kept).mean()


class VariationalAutoencoder(HealthyRun):
    """The weight of the KL term grows from 0 to 4 in a twentieth of the run: the loss rises with it."""

    def setup_run(self) -> None:
        super().setup_run()
        self.net = nn.Sequential(nn.Linear(_PIXELS, 64), nn.ReLU(), nn.Linear(64, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, _PIXELS))

    def loss(self) -> Tensor:
        images, _ = self.draw()
        mean, log_variance = self.net(images).chunk(2, dim=1)  # [B, 8] each
        latent = mean + self.normal(*mean.shape) * (log_variance / 2).exp()
        rebuilt = F.binary_cross_entropy_with_logits(self.decoder(latent), images, reduction="sum")
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
        weight = 4 * min(1.0, max(0.0, (self.progress - 0.3) / 0.05))
        return (rebuilt + weight * divergence) / len(images)


class Adversarial(HealthyRun):
    """A GAN of one optimizer, by reversed gradients: neither loss falls for long."""

    def setup_run(self) -> None:
        self.net = _mlp(4, 32, 2)
        self.critic = _mlp(2, 32, 1)

    def loss(self) -> Tensor:
        corner = torch.randint(8, (self.batch_size,), generator=self.random) * (math.pi / 4)
        real = torch.stack([corner.cos(), corner.sin()], dim=1) + 0.05 * self.normal(self.batch_size, 2)
        fake = self.net(self.normal(self.batch_size, 4))
        fake.register_hook(lambda gradient: -gradient)
        return F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake)).mean()


class PolicyGradient(HealthyRun):
    """REINFORCE on a bandit whose best arm and whose rewards change: a loss of either sign, without a trend."""

    def setup_run(self) -> None:
        self.net = _mlp(4, 32, 8)
        self.baseline = 0.0

    def loss(self) -> Tensor:
        state = self.normal(self.batch_size, 4)
        policy = torch.distributions.Categorical(logits=self.net(state))
        arm = torch.multinomial(policy.probs, 1, generator=self.random)[:, 0]
        season = int(self.progress * 20)
        reward = (1 + season) * ((arm + season) % 8 == (state[:, 0] > 0).long()).float()
        advantage = reward - self.baseline
        self.baseline += 0.01 * float(advantage.mean())
        return -(policy.log_prob(arm) * advantage).mean() - 0.05 * policy.entropy().mean()


class QLearning(HealthyRun):
    """Temporal differences towards a copy that is renewed every 500 steps, with returns that grow from nothing."""

    def setup_run(self) -> None:
        self.net, self.target = _mlp(4, 32, 4), _mlp(4, 32, 4)
        self.target.requires_grad_(False)

    def loss(self) -> Tensor:
        if self.step_number % 500 == 0:
            self.target.load_state_dict(self.net.state_dict())
        state = self.normal(self.batch_size, 4)
        action = torch.randint(4, (self.batch_size, 1), generator=self.random)
        following = state.roll(1, dims=1) + 0.1 * action
        reward = (following[:, 0] > 1.5).float() + 0.02 * self.normal(self.batch_size)
        goal = reward + 0.97 * self.target(following).max(dim=1).values
        return F.mse_loss(self.net(state).gather(1, action)[:, 0], goal)


class ExactRegression(HealthyRun):
    """A function without noise: the loss falls to 1e-6, where Adam makes it jump by factors of a hundred."""

    def setup_run(self) -> None:
        self.net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def loss(self) -> Tensor:
        x = 6 * torch.rand(self.batch_size, 1, generator=self.random) - 3  # [B, 1]
        return F.mse_loss(self.net(x), torch.sin(2 * x))


class LearnedVariance(HealthyRun):
    """A Gaussian likelihood whose variance is learned: the loss crosses zero and goes on falling."""

    def setup_run(self) -> None:
        self.net = _mlp(1, 64, 2)

    def loss(self) -> Tensor:
        x = 6 * torch.rand(self.batch_size, 1, generator=self.random) - 3  # [B, 1]
        y = torch.sin(2 * x) + 0.02 * (1 + x.abs()) * self.normal(self.batch_size, 1)
        mean, log_variance = self.net(x).chunk(2, dim=1)
        return F.gaussian_nll_loss(mean, y, log_variance.exp())


class Contrastive(HealthyRun):
    """InfoNCE between two noisy views, with a learned temperature."""

    batch_size = 64

    def setup_run(self) -> None:
        super().setup_run()
        self.net = _mlp(_PIXELS, 64, 16)
        self.log_temperature = nn.Parameter(torch.tensor(-1.0))

    def loss(self) -> Tensor:
        images, _ = self.draw()
        views = [F.normalize(self.net(images + 0.2 * self.normal(*images.shape)), dim=1) for _ in range(2)]
        scores = views[0] @ views[1].T / self.log_temperature.exp().clamp(min=0.01)  # [B, B]
        return F.cross_entropy(scores, torch.arange(len(images)))


class MultiTask(HealthyRun):
    """Each batch belongs to one of three tasks, of losses a hundredfold apart; the third comes in 3 % of them."""

    def setup_run(self) -> None:
        super().setup_run()
        self.net = nn.Sequential(nn.Linear(_PIXELS, 64), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(64, size) for size in (_CLASSES, _PIXELS, 1))

    def loss(self) -> Tensor:
        images, labels = self.draw()
        drawn = float(torch.rand((), generator=self.random))
        features = self.net(images)
        if drawn < 0.8:
            return F.cross_entropy(self.heads[0](features), labels)
        if drawn < 0.97:
            return F.mse_loss(self.heads[1](features), images)
        return F.mse_loss(self.heads[2](features)[:, 0], labels.float())


class VerySmallData(HealthyRun):
    """Sixteen samples, memorized."""

    batch_size = 4

    def setup_run(self) -> None:
        super().setup_run()
        self.images, self.labels = self.images[:16], self.labels[:16]


class Denoising(HealthyRun):
    """A diffusion model: the noise level of each sample decides its loss, whose tail is heavy."""

    def setup_run(self) -> None:
        super().setup_run()
        self.net = _mlp(_PIXELS + 1, 128, _PIXELS)

    def loss(self) -> Tensor:
        images, _ = self.draw()
        level = torch.rand(len(images), 1, generator=self.random)  # [B, 1], 0 is clean
        noise = self.normal(*images.shape)
        noisy = (1 - level) * images + level * noise
        guess = self.net(torch.cat([noisy, level], dim=1))
        return ((guess - noise) ** 2 / (level + 0.01)).mean()


class Recurrent(HealthyRun):
    """An LSTM that adds numbers in sequences whose length grows in four stages."""

    def setup_run(self) -> None:
        self.net = nn.LSTM(2, 24, batch_first=True)
        self.head = nn.Linear(24, 1)

    def loss(self) -> Tensor:
        length = 4 * (1 + int(self.progress * 4))
        values = torch.rand(self.batch_size, length, generator=self.random)  # [B, T]
        counts = (torch.rand(self.batch_size, length, generator=self.random) < 0.3).float()
        hidden, _ = self.net(torch.stack([values, counts], dim=2))
        return F.mse_loss(self.head(hidden)[..., 0], (values * counts).cumsum(dim=1))


KINDS: dict[str, Callable[[int, int], HealthyRun]] = {
    "classification, batches of 2": lambda steps, seed: HealthyRun(steps, seed, 2),
    "classification, batches of 8": lambda steps, seed: HealthyRun(steps, seed, 8),
    "classification, batches of 256": lambda steps, seed: HealthyRun(steps, seed, 256),
    "SGD with weight decay": WeightDecay,
    "warm restarts": WarmRestarts,
    "one cycle": OneCycle,
    "augmentation switched on": Augmentation,
    "fine-tuning": FineTuning,
    "a class added ten times": NewClasses,
    "noisy labels, batches of 4": NoisyLabels,
    "a rare class of weight 100": RareClass,
    "VAE, KL warm-up": VariationalAutoencoder,
    "GAN, reversed gradients": Adversarial,
    "policy gradient, changing rewards": PolicyGradient,
    "Q-learning, renewed target": QLearning,
    "regression to zero": ExactRegression,
    "learned variance, negative loss": LearnedVariance,
    "contrastive": Contrastive,
    "three tasks by turns": MultiTask,
    "sixteen samples": VerySmallData,
    "diffusion": Denoising,
    "LSTM, growing sequences": Recurrent,
}


def record(kind: str, *, num_steps: int, seed: int) -> Iterator[tuple[float, float, float]]:
    """Train in a plain loop, clipped nowhere; yield loss, gradient norm and learning rate of every step."""
    module = KINDS[kind](num_steps, seed)
    configured = module.configure_optimizers()
    optimizers, schedules = configured if isinstance(configured, tuple) else ([configured], [])
    optimizer: Optimizer = optimizers[0]
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for step in itertools.count():
        if step == num_steps:
            return
        optimizer.zero_grad()
        loss = module.training_step(None, step)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        for schedule in schedules:
            schedule["scheduler"].step()
        yield float(loss.detach()), float(norm), rate


def _mlp(size_in: int, hidden: int, size_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(size_in, hidden),
        nn.LayerNorm(hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, size_out),
    )


def _per_step(optimizer: Optimizer, schedule: Any) -> tuple[list[Optimizer], list[dict[str, Any]]]:
    return [optimizer], [{"scheduler": schedule, "interval": "step"}]
