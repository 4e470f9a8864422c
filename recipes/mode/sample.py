"""Text from a checkpoint. One forward a token, with a key-value cache."""

from typing import Annotated, Literal

from recipes.build import Run
from recipes.errors import ConfigError
from recipes.mode.load import load_task, load_tokenizer
from recipes.runtime.console import LOGGER
from recipes.task.language_modeling import LanguageModeling


def sample(
    run: Run,
    *,
    prompt: str,
    num_tokens: Annotated[int, ">= 1"],
    num_samples: Annotated[int, ">= 1"],
    temperature: Annotated[float, ">= 0"],
    top_k: Annotated[int, ">= 1"] | None,
    top_p: Annotated[float, ">= 0.001, <= 1"] | None,
    seed: int,
    weights: Literal["trained", "ema"],
) -> int:
    """Print the prompt with its continuation, `num_samples` times.

    Args:
        run: With a checkpoint of a language model.
        prompt: Text to go on from.
        num_tokens: Tokens to add, at most; a text ends earlier at its end-of-text token.
        num_samples: Texts; the seed of each is one more than that of the last.
        temperature: 0 takes the likeliest token; 1 samples from the model's distribution.
        top_k: Only the k likeliest tokens may be taken; null: all.
        top_p: Only the likeliest tokens that together have this probability may be taken; null: all.
        seed: Of the sampling.
        weights: Those that were trained, or their average.
    """
    task, _ = load_task(run, weights)
    assert isinstance(task, LanguageModeling), "the config check lets only language models pass"
    task.tokenizer = load_tokenizer(run)
    if task.tokenizer is None:
        raise ConfigError(
            f"mode=sample resume={run.folder}", "that run's data was no text", "a run on text"
        )
    for number in range(num_samples):
        text = task.generate_text(
            prompt,
            num_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed + number,
        )
        if num_samples > 1:
            LOGGER.info(f"--- {number + 1} of {num_samples}, seed {seed + number}")
        LOGGER.info(f"{prompt}{text}")
    return 0
