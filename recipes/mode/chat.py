"""Talk with a checkpoint in a terminal: several turns, each answer shown while it is generated."""

import sys
from collections.abc import Sequence
from typing import Annotated, Literal

from recipes.build import Run
from recipes.config.traits import declare_mode
from recipes.data.conversations.chat_template import prompt_for_answer
from recipes.data.conversations.conversation import Message
from recipes.data.conversations.image_prompt import find_image_prompts
from recipes.errors import ConfigError, escape_controls
from recipes.generation import Sampling
from recipes.mode.load import load_task, load_tokenizer
from recipes.mode.sample import list_images
from recipes.runtime import status
from recipes.runtime.console import LOGGER
from recipes.task.language_modeling import LanguageModeling
from recipes.tokenizer import Tokenizer

_NEW = "/new"
_HELP = f"Type a message. {_NEW} starts a new conversation, Ctrl-C ends an answer, Ctrl-D the chat"
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # the first bytes of a character


@declare_mode(needs_checkpoint=True, needs="generate", asks=True)
def chat(
    run: Run,
    *,
    system: str | None,
    image: str | list[str] | None,
    max_new_tokens: Annotated[int, ">= 1"],
    temperature: Annotated[float, ">= 0, <= 1000"],
    top_k: Annotated[int, ">= 1"] | None,
    top_p: Annotated[float, ">= 0.001, <= 1"] | None,
    min_p: Annotated[float, ">= 0, <= 1"] | None,
    seed: Annotated[int, ">= 0"],
    weights: Literal["trained", "ema"],
) -> int:
    """Read messages from the standard input, a line each, and print the answers, until the input ends.

    Args:
        run: A run with a checkpoint of a language model that was trained on conversations.
        system: Text of a system message before the first turn; None: none.
        image: File of an image, or several, which the first message of every conversation is about; None: none.
        max_new_tokens: Maximum number of tokens of an answer, which ends earlier at the end of a turn.
        temperature: 0 always picks the most likely token; 1 samples from the model's distribution.
        top_k: Sample only from the k most likely tokens; None samples from all.
        top_p: Sample from the smallest set of tokens with at least this total probability; None samples from all.
        min_p: Sample only from tokens with at least this fraction of the largest probability; None samples from all.
        seed: Sampling seed; answer i of the chat is sampled with `seed + i`.
        weights: `trained`, or `ema` for their moving average.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: There is no checkpoint, no average in it, the run was not trained on conversations, its chat
            template has no system message, or an image cannot be read.
    """
    task, _ = load_task(run, weights)
    assert isinstance(task, LanguageModeling), "the config check admits only language models"
    task.tokenizer = tokenizer = load_tokenizer(run, "mode=chat")
    if tokenizer.chat_template is None:
        reason = "the run was not trained on conversations and has no template for them"
        fix = "mode=sample, which continues a text, or mode=chat of a run on data=conversations data.format=alpaca"
        raise ConfigError(f"mode=chat resume={run.folder}", reason, fix)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    files, images = list_images(image), None
    prompts = find_image_prompts(run.data.source, tokenizer, typed="mode=chat") if task.reads_images else None
    if prompts is not None and files:
        images = prompts.read(files, setting="mode.image")

    def ask(conversation: Sequence[Message]) -> list[int]:
        return prompt_for_answer(conversation, tokenizer)[0] if prompts is None else prompts.ask(conversation)

    def say(message: str) -> Message:
        is_first = len(conversation) == len(first)
        content = message if prompts is None or not is_first else prompts.place_before(message, len(files))
        return {"role": "user", "content": content}

    conversation, num_answers = [*first], 0
    ask([*first, say("?")])  # a template may reject it: say so now
    status.end()
    LOGGER.info(_HELP)
    while (message := _read_message()) is not None:
        if message == _NEW:
            conversation = [*first]
            continue
        if not message:
            continue
        conversation.append(say(message))
        prompt = ask(conversation)
        window = int(task.model.max_seq_len)  # type: ignore[arg-type]  # of a language model
        if len(prompt) > window and images is not None:
            shown = f"the conversation has {len(prompt):,} tokens, and the model reads {window:,}, images among them"
            LOGGER.info(f"({shown}: {_NEW} starts another one)")
            conversation.pop()
            continue
        if len(prompt) > window:
            LOGGER.info(f"(the conversation has {len(prompt):,} tokens, and the model reads the last of {window:,})")
        answer = _Answer(prompt, tokenizer)
        try:
            task.generate_texts(
                prompt,
                max_new_tokens,
                sampling=sampling,
                seeds=[seed + num_answers],
                images=images,
                on_tokens=answer.show,
            )
        except KeyboardInterrupt:
            answer.write(" …")
        answer.write("\n")
        conversation.append({"role": "assistant", "content": answer.text})
        num_answers += 1
    return 0


def _read_message() -> str | None:
    """Return the next line that is typed; None at the end of the input or Ctrl-C."""
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None


class _Answer:
    """Shows an answer as it grows.

    Args:
        prompt: Tokens before it.
        tokenizer: Tokenizer of the run.

    Attributes:
        text: What has been generated.
    """

    def __init__(self, prompt: Sequence[int], tokenizer: Tokenizer) -> None:
        self.text = ""
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._num_shown = 0

    def show(self, tokens: Sequence[int]) -> None:
        """Print what the newest tokens add; a character whose bytes are not complete waits for the next one."""
        plain = [token for token in tokens if token not in self._tokenizer.special_ids]
        self.text = self._tokenizer.decode_continuation(self._prompt, plain)
        complete = self.text.rstrip(_UNFINISHED)
        self.write(escape_controls(complete[self._num_shown :]))
        self._num_shown = max(self._num_shown, len(complete))

    @staticmethod
    def write(text: str) -> None:
        """Print a part of a line at once."""
        sys.stdout.write(text)
        sys.stdout.flush()
