"""Sample completions with the trained model itself, on the ranks that train it."""

from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Annotated

from torch import Tensor

from recipes.generation import Completion, Sampling, generate
from recipes.model import LanguageModel


class LocalRollout:
    """Generates with the weights as they are, in batches, with a cache of keys and values.

    Args:
        num_generations: Completions of each prompt.
        num_iterations: Optimizer steps that learn from the same completions.
        max_new_tokens: Most tokens of a completion, with the one that ends it.
        temperature: Of the samples; the policy that is trained is the one at this temperature.
        top_p: Sample from the smallest set of tokens with this probability; None: all.
        top_k: Sample from the k most likely tokens; None: all.
        min_p: Sample from tokens with at least this fraction of the largest probability; None: all.
        rows_at_a_time: Completions that a rank generates at a time, which bounds the memory of the cache; None: all of
            its completions of a step.
    """

    def __init__(
        self,
        *,
        num_generations: Annotated[int, ">= 1"],
        num_iterations: Annotated[int, ">= 1"],
        max_new_tokens: Annotated[int, ">= 1"],
        temperature: Annotated[float, "> 0"],
        top_p: Annotated[float, "> 0, <= 1"] | None,
        top_k: Annotated[int, ">= 1"] | None,
        min_p: Annotated[float, ">= 0, <= 1"] | None,
        rows_at_a_time: Annotated[int, ">= 1"] | None,
    ) -> None:
        self.num_generations, self.num_iterations = num_generations, num_iterations
        self.max_new_tokens = max_new_tokens
        self.sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
        self._rows_at_a_time = rows_at_a_time

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
        """See `recipes.rollout.Rollout`."""
        found: list[Completion] = []
        size = self._rows_at_a_time or len(prompts)
        for start in range(0, len(prompts), size):
            part = prompts[start : start + size]
            runs = [len([*equal]) for _, equal in groupby(part)]  # prompts that follow each other
            num_samples = runs[0] if len(set(runs)) == 1 else 1
            found += generate(
                model,
                part[::num_samples],
                self.max_new_tokens,
                sampling=self.sampling,
                seeds=seeds[start : start + size],
                num_samples=num_samples,
                ends=ends,
                agree=agree,
                all_ended=all_ended,
            )
        return found
