"""Rollouts: completions of prompts that a policy samples while it is trained, by an engine of conf/rollout."""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from torch import Tensor

from recipes.generation import Completion, Sampling
from recipes.model import LanguageModel


class Rollout(Protocol):
    """An engine that samples completions, and how they are sampled.

    Attributes:
        num_generations: Completions of each prompt.
        num_iterations: Optimizer steps that learn from the same completions.
        max_new_tokens: Most tokens of a completion, with the one that ends it.
        sampling: Temperature and what is left out.
    """

    num_generations: int
    num_iterations: int
    max_new_tokens: int
    sampling: Sampling

    def generate(
        self,
        model: LanguageModel,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        *,
        ends: Collection[int],
        agree: Callable[[Tensor], Tensor] | None,
        all_ended: Callable[[bool], bool] | None,
    ) -> list[Completion]:
        """Return a completion of each prompt.

        Args:
            model: The policy; where its forward pass is a collective, call on every rank with as many prompts.
            prompts: At least one token each; equal ones that follow each other may share their prefill.
            seeds: Seed of each completion, which alone decides what is drawn for it.
            ends: Stop tokens.
            agree: See `recipes.generation.generate`.
            all_ended: See `recipes.generation.generate`.
        """
