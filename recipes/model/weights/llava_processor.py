"""Write what the `AutoProcessor` of transformers reads beside a LLaVA model: image tokens, templates and pixels.

A processor puts all tokens of an image in place of each image token of a text, as training does.
"""

import json
import logging
import math
from pathlib import Path
from typing import Any

import torch

from recipes.data.conversations.chat_template import find_template
from recipes.data.conversations.image_parts import TYPED, ImageTokens
from recipes.data.conversations.loss_mask import PromptTokenizer
from recipes.files import write_atomically
from recipes.model.llava import Llava
from recipes.tokenizer import GENERATION_FILE, Tokenizer
from recipes.transform.published import INTERPOLATIONS, Pixels

log = logging.getLogger("lightning_recipes")

PROCESSOR_FILE, PIXELS_FILE = "processor_config.json", "preprocessor_config.json"
# a template of texts, before which messages of parts become texts, as `join_parts` makes them
_JOINING = """{%- set joined = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- if message['content'] is string or message['content'] is not iterable -%}
{%- set joined.messages = joined.messages + [message] -%}
{%- else -%}
{%- set own = namespace(before=0, text='', after=0) -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'text' and part['text'] -%}
{%- if own.text -%}
{%- set own.text = own.text + 'IMAGE' * own.after + part['text'] -%}
{%- else -%}
{%- set own.before = own.after -%}
{%- set own.text = part['text'] -%}
{%- endif -%}
{%- set own.after = 0 -%}
{%- elif part['type'] != 'text' -%}
{%- set own.after = own.after + 1 -%}
{%- endif -%}
{%- endfor -%}
{%- set lines = ['IMAGE'] * own.before + ([own.text] if own.text else []) + ['IMAGE'] * own.after -%}
{%- set joined.messages = joined.messages + [dict(message, content=lines | join('\\n'))] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = joined.messages -%}
"""


class LlavaProcessorFiles:
    """The processor of a model.

    Args:
        model: The model.
        tokenizer: Tokenizer that it was trained with, which may have no token for images.
        pixels: What an image was made into.

    Attributes:
        tokenizer: The same with a token of exactly the id for images, and a chat template that takes parts.
    """

    def __init__(self, model: Llava, tokenizer: Tokenizer, pixels: Pixels) -> None:
        assert model.image_token_id is not None, "the check of the config has found it"
        assert model.image_seq_length is not None, "likewise"
        self._config, self._pixels = model.inner.config, pixels
        self._images = ImageTokens(model.image_token_id, model.image_seq_length)
        self._token = tokenizer.spell(self._images.id)
        if not self._token:
            self._token = TYPED if not tokenizer.knows(TYPED) else f"<image_{self._images.id}>"
            log.info("The exported tokenizer has %s as token %d, which stands for images", self._token, self._images.id)
        self.tokenizer = tokenizer.with_special_token(self._token, id=self._images.id)
        if tokenizer.chat_template is not None:
            self.tokenizer = self.tokenizer.with_chat_template(self._make_template(tokenizer))

    def _make_template(self, tokenizer: Tokenizer) -> str:
        template = find_template("auto", tokenizer)
        reads_parts = PromptTokenizer(tokenizer, template, images=self._images).reads_parts
        source = template.source.replace(TYPED, self._token)
        return source if reads_parts else _JOINING.replace("IMAGE", self._token) + source

    def write(self, folder: Path) -> None:
        """Write the files of the processor into an export that has all others, and read them back.

        Raises:
            OSError: transformers gives an image other tokens.
        """
        config, vision = self._config, self._config.vision_config
        settings = {
            "processor_class": "LlavaProcessor",
            "image_token": self._token,
            "patch_size": vision.patch_size,
            "num_additional_image_tokens": int(vision.model_type == "clip_vision_model"),
            "vision_feature_select_strategy": config.vision_feature_select_strategy,
        }
        _write(folder / PROCESSOR_FILE, settings)
        write_pixels(self._pixels, folder)
        # a token of an image is never generated, as in mode=sample
        generation = json.loads((folder / GENERATION_FILE).read_text(encoding="utf-8"))
        _write(folder / GENERATION_FILE, generation | {"suppress_tokens": [self._images.id]})
        self._check(folder)

    def _check(self, folder: Path) -> None:
        from transformers import AutoProcessor

        processor: Any = AutoProcessor.from_pretrained(str(folder), trust_remote_code=False)
        size = self._pixels.eval_size
        image = torch.zeros(3, size, size, dtype=torch.uint8)
        found = processor(text=self._token, images=[image], return_tensors="pt").input_ids[0].tolist()
        number = found.count(self._images.id)
        if number != self._images.length:
            what = f"transformers gives an image {number} tokens, not {self._images.length}"
            raise OSError(f"{folder / PROCESSOR_FILE}: {what}")


def write_pixels(pixels: Pixels, folder: Path) -> None:
    """Write what an image processor of transformers reads."""
    _write(folder / PIXELS_FILE, describe_pixels(pixels))


def describe_pixels(pixels: Pixels) -> dict[str, Any]:
    """Return the settings of an image processor of transformers that makes of an image what a validation sees."""
    size = pixels.eval_size
    shorter = math.floor(size / pixels.eval_crop)
    is_square = pixels.crop_mode == "squash"
    return {
        "image_processor_type": "SiglipImageProcessor" if is_square and shorter == size else "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": shorter, "width": shorter} if is_square else {"shortest_edge": shorter},
        "resample": next(number for number, name in INTERPOLATIONS.items() if name == pixels.interpolation),
        "do_center_crop": not is_square or shorter != size,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [*pixels.mean],
        "image_std": [*pixels.std],
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
