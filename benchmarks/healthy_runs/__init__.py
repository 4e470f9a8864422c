"""Healthy trainings of many kinds, small enough for 20,000 steps in half a minute: none needs a response to a spike.

Each is a LightningModule that draws its own batches. `record` trains it in a plain loop, which is faster than a
Trainer and yields loss and gradient norm of every step.
"""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch.optim import Optimizer

from . import classification, losses
from .base import HealthyRun

KINDS: dict[str, Callable[[int, int], HealthyRun]] = {
    "classification, batches of 2": lambda steps, seed: HealthyRun(steps, seed, 2),
    "classification, batches of 8": lambda steps, seed: HealthyRun(steps, seed, 8),
    "classification, batches of 256": lambda steps, seed: HealthyRun(steps, seed, 256),
    "SGD with weight decay": classification.WeightDecay,
    "warm restarts": classification.WarmRestarts,
    "one cycle": classification.OneCycle,
    "augmentation switched on": classification.Augmentation,
    "fine-tuning": classification.FineTuning,
    "a class added ten times": classification.NewClasses,
    "noisy labels, batches of 4": classification.NoisyLabels,
    "a rare class of weight 100": classification.RareClass,
    "VAE, KL warm-up": losses.VariationalAutoencoder,
    "GAN, reversed gradients": losses.Adversarial,
    "policy gradient, changing rewards": losses.PolicyGradient,
    "Q-learning, renewed target": losses.QLearning,
    "regression to zero": losses.ExactRegression,
    "learned variance, negative loss": losses.LearnedVariance,
    "contrastive": losses.Contrastive,
    "three tasks by turns": losses.MultiTask,
    "sixteen samples": classification.VerySmallData,
    "diffusion": losses.Denoising,
    "LSTM, growing sequences": losses.Recurrent,
    "a term of weight 50 switched on": losses.SwitchedTerm,
    "returns growing tenfold": losses.GrowingReturns,
}
# the scale of the loss grows far beyond all before: a fault looks the same at that moment
GROWING = ("a term of weight 50 switched on", "returns growing tenfold")


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
