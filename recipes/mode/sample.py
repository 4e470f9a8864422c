"""Generate text from a checkpoint. One forward pass per token, with a key-value cache."""

from collections.abc import Sequence
from typing import Annotated, Literal

from torch import Tensor

from recipes.build import Run
from recipes.config.traits import declare_mode
from recipes.data.conversations.chat_template import prompt_for_answer
from recipes.data.conversations.image_prompt import find_image_prompts
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
    image: str | list[str] | None,
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
        image: File of an image, or several, which are where the prompt says `<image>`, or before it; None: none.
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
        ConfigError: There is no checkpoint, no average in it, the run's data was not text, or an image cannot be read.
    """
    task, _ = load_task(run, weights)
    assert isinstance(task, LanguageModeling), "the config check admits only language models"
    task.tokenizer = tokenizer = load_tokenizer(run, "mode=sample")
    if apply_chat_template:
        require_template(tokenizer)
    given, images = _read_prompt(run, task, prompt, list_images(image), is_message=apply_chat_template)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    seeds = range(seed, seed + num_samples)
    status.say("reading the prompt")
    texts = task.generate_texts(
        given,
        max_new_tokens,
        sampling=sampling,
        seeds=seeds,
        images=images,
        stop=stop,
        on_tokens=lambda tokens: status.say(f"token {len(tokens):,} of at most {max_new_tokens:,}"),
    )
    for number, text in enumerate(texts or ()):
        if num_samples > 1:
            LOGGER.info(f"--- {number + 1} of {num_samples}, seed {seed + number}")
        LOGGER.info(f"{prompt}\n{text}" if apply_chat_template else f"{prompt}{text}")
    return 0


def _read_prompt(
    run: Run, task: LanguageModeling, prompt: str, files: Sequence[str], *, is_message: bool
) -> tuple[str | list[int], Tensor | None]:
    """Return a prompt as text or tokens, and its images, [N, C, S, S]; None for none."""
    assert task.tokenizer is not None, "it was loaded"
    if not task.reads_images:
        return (prompt_for_answer(prompt, task.tokenizer)[0] if is_message else prompt), None
    prompts = find_image_prompts(run.data.source, task.tokenizer, typed="mode=sample")
    marked = prompts.place(prompt, len(files))
    images = prompts.read(files, setting="mode.image") if files else None
    return (prompts.ask([{"role": "user", "content": marked}]) if is_message else prompts.start(marked)), images


def list_images(image: str | list[str] | None) -> list[str]:
    """Return the files of `mode.image`."""
    return [image] if isinstance(image, str) else [*(image or ())]


def require_template(tokenizer: Tokenizer) -> None:
    """Check that a tokenizer has a chat template.

    Raises:
        ConfigError: It has none.
    """
    if tokenizer.chat_template is None:
        reason = "the run was not trained on conversations and has no template for them"
        raise ConfigError(
            "mode.apply_chat_template=true",
            reason,
            "mode.apply_chat_template=false, and a prompt in the format of the training data",
        )
