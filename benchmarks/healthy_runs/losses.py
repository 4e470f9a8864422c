"""Losses other than that of classification: generative, contrastive, of reinforcement, regression, several tasks."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import CLASSES, PIXELS, HealthyRun, mlp


class VariationalAutoencoder(HealthyRun):
    """The weight of the KL term grows from 0 to 4 in a twentieth of the run: the loss rises with it."""

    def setup_run(self) -> None:
        super().setup_run()
        self.net = nn.Sequential(nn.Linear(PIXELS, 64), nn.ReLU(), nn.Linear(64, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, PIXELS))

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
        self.net = mlp(4, 32, 2)
        self.critic = mlp(2, 32, 1)

    def loss(self) -> Tensor:
        corner = torch.randint(8, (self.batch_size,), generator=self.random) * (math.pi / 4)
        real = torch.stack([corner.cos(), corner.sin()], dim=1) + 0.05 * self.normal(self.batch_size, 2)
        fake = self.net(self.normal(self.batch_size, 4))
        fake.register_hook(lambda gradient: -gradient)
        return F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake)).mean()


class Denoising(HealthyRun):
    """A diffusion model: the noise level of each sample decides its loss, whose tail is heavy."""

    def setup_run(self) -> None:
        super().setup_run()
        self.net = mlp(PIXELS + 1, 128, PIXELS)

    def loss(self) -> Tensor:
        images, _ = self.draw()
        level = torch.rand(len(images), 1, generator=self.random)  # [B, 1], 0 is clean
        noise = self.normal(*images.shape)
        noisy = (1 - level) * images + level * noise
        guess = self.net(torch.cat([noisy, level], dim=1))
        return ((guess - noise) ** 2 / (level + 0.01)).mean()


class Contrastive(HealthyRun):
    """InfoNCE between two noisy views, with a learned temperature."""

    batch_size = 64

    def setup_run(self) -> None:
        super().setup_run()
        self.net = mlp(PIXELS, 64, 16)
        self.log_temperature = nn.Parameter(torch.tensor(-1.0))

    def loss(self) -> Tensor:
        images, _ = self.draw()
        views = [F.normalize(self.net(images + 0.2 * self.normal(*images.shape)), dim=1) for _ in range(2)]
        scores = views[0] @ views[1].T / self.log_temperature.exp().clamp(min=0.01)  # [B, B]
        return F.cross_entropy(scores, torch.arange(len(images)))


class PolicyGradient(HealthyRun):
    """REINFORCE on a bandit whose best arm and whose rewards change: a loss of either sign, without a trend."""

    def setup_run(self) -> None:
        self.net = mlp(4, 32, 8)
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
        self.net, self.target = mlp(4, 32, 4), mlp(4, 32, 4)
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
        self.net = mlp(1, 64, 2)

    def loss(self) -> Tensor:
        x = 6 * torch.rand(self.batch_size, 1, generator=self.random) - 3  # [B, 1]
        y = torch.sin(2 * x) + 0.02 * (1 + x.abs()) * self.normal(self.batch_size, 1)
        mean, log_variance = self.net(x).chunk(2, dim=1)
        return F.gaussian_nll_loss(mean, y, log_variance.exp())


class MultiTask(HealthyRun):
    """Each batch belongs to one of three tasks, of losses a hundredfold apart; the third comes in 3 % of them."""

    def setup_run(self) -> None:
        super().setup_run()
        self.net = nn.Sequential(nn.Linear(PIXELS, 64), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(64, size) for size in (CLASSES, PIXELS, 1))

    def loss(self) -> Tensor:
        images, labels = self.draw()
        drawn = float(torch.rand((), generator=self.random))
        features = self.net(images)
        if drawn < 0.8:
            return F.cross_entropy(self.heads[0](features), labels)
        if drawn < 0.97:
            return F.mse_loss(self.heads[1](features), images)
        return F.mse_loss(self.heads[2](features)[:, 0], labels.float())


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


class SwitchedTerm(HealthyRun):
    """The weight of the loss grows from 1 to 50 at half time, as where a term is switched on."""

    def setup_run(self) -> None:
        self.net = mlp(1, 32, 1)

    def loss(self) -> Tensor:
        x = torch.rand(self.batch_size, 1, generator=self.random)  # [B, 1]
        weight = 50 if self.progress >= 0.5 else 1
        return weight * F.mse_loss(self.net(x), torch.sin(9 * x))


class GrowingReturns(HealthyRun):
    """A critic whose returns grow tenfold at every quarter of the run: its loss grows a hundredfold at once."""

    def setup_run(self) -> None:
        self.net = mlp(4, 32, 1)

    def loss(self) -> Tensor:
        state = self.normal(self.batch_size, 4)
        return F.mse_loss(self.net(state), 10 ** int(self.progress * 4) * state[:, :1])
