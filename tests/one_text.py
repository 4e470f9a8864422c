"""Generate one text, as most tests of models do."""

from typing import Any

from recipes.generation import Sampling
from recipes.generation import generate as generate_rows


def generate(
    model: Any,
    prompt: list[int],
    num_tokens: int,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    **options: Any,
) -> list[int]:
    """Return the new tokens of one row, whose window slides."""
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    [completion] = generate_rows(model, [prompt], num_tokens, sampling=sampling, seeds=[seed], slides=True, **options)
    return completion.tokens
