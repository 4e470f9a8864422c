"""Generate text from a checkpoint. One forward pass per token, with a key-value cache."""

from typing import Annotated, Literal

from recipes.build import Run
from recipes.config.traits import declare_mode
from recipes.data.conversations.chat_template import prompt_for_answer
from recipes.errors import ConfigError
from recipes.generation import Sampling
from recipes.mode.load import load_task, load_tokenizer
from recipes.runtime import status
from recipes.runtime.console import LOGGER
from recipes.task.language_modeling import LanguageModeling
from recipes.tokenizer import Tokenizer


@declare_mode(needs_checkpoint=True, needs="generate")
def sample(
    run: Run,
    *,
    prompt: str,
    apply_chat_template: bool,
    max_new_tokens: Annotated[int, ">= 1"],
    num_samples: Annotated[int, ">= 1"],
    temperature: Annotated[float, ">= 0, <= 1000"],
    top_k: Annotated[int, ">= 1"] | None,
    top_p: Annotated[float, ">= 0.001, <= 1"] | None,
    min_p: Annotated[float, ">= 0, <= 1"] | None,
    stop: list[str],
    seed: Annotated[int, ">= 0"],
    weights: Literal["trained", "ema"],
) -> int:
    """Print the prompt and its continuation, `num_samples` times.

    Args:
        run: A run with a checkpoint of a language model.
        prompt: Text to continue, read as transformers reads it: after the tokens that the tokenizer puts before every
            text, with its special tokens recognized.
        apply_chat_template: Format the prompt as a user message, with the chat template that the run was trained with.
        max_new_tokens: Maximum number of tokens to generate; generation stops earlier at the end of a text or turn.
        num_samples: Number of texts; text i is sampled with `seed + i`.
        temperature: 0 always picks the most likely token; 1 samples from the model's distribution.
        top_k: Sample only from the k most likely tokens; None samples from all.
        top_p: Sample from the smallest set of tokens with at least this total probability; None samples from all.
        min_p: Sample only from tokens with at least this fraction of the largest probability; None samples from all.
        stop: Texts that end a sample, which are not part of it.
        seed: Sampling seed.
        weights: `trained`, or `ema` for their moving average.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: There is no checkpoint, no average in it, or the run's data was not text.
    """
    task, _ = load_task(run, weights)
    assert isinstance(task, LanguageModeling), "the config check admits only language models"
    task.tokenizer = tokenizer = load_tokenizer(run, "mode=sample")
    given = _ask(prompt, tokenizer) if apply_chat_template else prompt
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    seeds = range(seed, seed + num_samples)
    status.say("reading the prompt")
    texts = task.generate_texts(
        given,
        max_new_tokens,
        sampling=sampling,
        seeds=seeds,
        stop=stop,
        on_tokens=lambda tokens: status.say(f"token {len(tokens):,} of at most {max_new_tokens:,}"),
    )
    for number, text in enumerate(texts or ()):
        if num_samples > 1:
            LOGGER.info(f"--- {number + 1} of {num_samples}, seed {seed + number}")
        LOGGER.info(f"{prompt}\n{text}" if apply_chat_template else f"{prompt}{text}")
    return 0


def _ask(message: str, tokenizer: Tokenizer) -> list[int]:
    if tokenizer.chat_template is None:
        reason = "the run was not trained on conversations and has no template for them"
        raise ConfigError(
            "mode.apply_chat_template=true",
            reason,
            "mode.apply_chat_template=false, and a prompt in the format of the training data",
        )
    tokens, _ = prompt_for_answer(message, tokenizer)
    return tokens
