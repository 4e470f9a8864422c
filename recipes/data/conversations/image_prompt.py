"""Prompts that people type for a model that reads images: with the tokens that training had for such a text.

Shapes: N images of C channels and S pixels a side.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from recipes.data.conversations.chat_template import find_template
from recipes.data.conversations.conversation import Example, Message
from recipes.data.conversations.image_parts import MARK, join_parts, place_images
from recipes.data.conversations.loss_mask import PromptTokenizer
from recipes.data.conversations.rows import ImageReader
from recipes.errors import ConfigError
from recipes.tokenizer import Tokenizer

_PROMPT = "mode.prompt"


class ImagePrompts:
    """Turns prompts with images into tokens.

    Args:
        tokenizer: Tokenizer that the model was trained with.
        images: Reads images as training does.
    """

    def __init__(self, tokenizer: Tokenizer, images: ImageReader) -> None:
        self._tokenizer = tokenizer
        self._images = images

    @staticmethod
    def place(text: str, num_images: int) -> str:
        """Return a text with a mark where each image is: at every `<image>` in it, or in lines before it.

        Raises:
            ConfigError: It says `<image>` another number of times.
        """
        files: list[str] = [""] * num_images
        [marked], _ = place_images([text], [], files, first=0, place=_PROMPT)
        return marked

    @staticmethod
    def place_before(text: str, num_images: int) -> str:
        """Return a text with the marks of images in lines before it, whatever it says."""
        return join_parts([*[MARK] * num_images, text])

    def read(self, paths: Sequence[str], *, setting: str) -> Tensor:
        """Return the images in files, as a validation sees them, [N, C, S, S] float32.

        Raises:
            ConfigError: One cannot be read.
        """
        return self._images.stack([self._images.read_file(path, setting=setting) for path in paths])

    def start(self, text: str) -> list[int]:
        """Return the tokens of a text with marks, as of one that starts a sequence, special tokens among them."""
        tokens = self._images.tokens
        marked = self._tokenizer.with_mark(MARK, in_place_of=tokens.id)
        return tokens.expand(np.array(marked.encode_start(text, reads_special_tokens=True)), mark=marked.vocab_size - 1)

    def ask(self, messages: Sequence[Message]) -> list[int]:
        """Return the prompt tokens for the answer to a conversation with marks.

        Raises:
            ConfigError: The template rejects the conversation, or does not show its images.
        """
        template = find_template("auto", self._tokenizer)
        encode = PromptTokenizer(self._tokenizer, template, images=self._images.tokens)
        num_images = sum(str(message["content"]).count(MARK) for message in messages)
        example = Example(place=_PROMPT, prompt=[*messages], answer="", images=("",) * num_images)
        tokenized = encode(example)
        tokens: list[int] = tokenized.tokens[~tokenized.is_answer].tolist()
        return tokens


def find_image_prompts(source: Any, tokenizer: Tokenizer, *, typed: str) -> ImagePrompts:
    """Return what makes prompts for a model that was trained on a source of data.

    Raises:
        ConfigError: The source does not say what is made of an image.
    """
    reader: ImageReader | None = getattr(source, "image_reader", None)
    if reader is None:
        reason = "the data of the run does not say what is made of an image"
        raise ConfigError(typed, reason, "resume=<a run on data=conversations>")
    return ImagePrompts(tokenizer, reader)
