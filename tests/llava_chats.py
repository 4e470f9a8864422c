"""Conversations about small images, a tokenizer that knows `<image>`, and a chat template of LLaVA's kind."""

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from chats import SPECIAL, make_backend
from tokenizers import AddedToken
from transformed_images import make_transform

from recipes.data.conversations.source import Conversations
from recipes.tokenizer import NUM_BYTES, Tokenizer

SIZE = 8  # pixels of a side
NUM_PATCHES = 4  # tokens of an image
IMAGE_ID = NUM_BYTES + len(SPECIAL)
# as llava-hf/llava-1.5-7b-hf writes messages
LLAVA = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'].upper() + ': ' }}{% endif %}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% if m['role'] != 'assistant' %}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}"
    "{% else %}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ part['text'] + ' ' }}{% endgeneration %}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
# as Qwen2-VL writes them: a text, or parts in their order
IN_ORDER = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class Llava:
    """Config of a tokenizer of bytes and turns, which knows `<image>` and puts `<s>` before every text."""

    def __init__(self, template: str | None = LLAVA) -> None:
        self._template = template

    def make(self, corpus: Any) -> Tokenizer:
        backend = make_backend()
        backend.add_tokens([AddedToken("<image>", normalized=False, special=True)])
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        settings |= {} if self._template is None else {"chat_template": self._template}
        return Tokenizer(backend, end_of_text=NUM_BYTES + 1, settings=settings)


def encode_image(seed: int, *, width: int = 12, height: int = 10) -> bytes:
    """Return a PNG of random pixels."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_images(folder: Path, number: int) -> list[str]:
    """Write images; return their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(number):
        (folder / f"{seed}.png").write_bytes(encode_image(seed))
    return [f"{seed}.png" for seed in range(number)]


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def ask(question: str, answer: str = "red", *, images: int = 0) -> list[dict[str, Any]]:
    """Return a conversation in parts, of which the first ones are images of the row."""
    asked = [{"type": "image"}] * images + [{"type": "text", "text": question}]
    answered = [{"type": "text", "text": answer}]
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]


def source_of(folder: Path, rows: Iterable[dict[str, Any]] | str, **settings: Any) -> Conversations:
    """Return a prepared source of rows, which are written into the folder; all of them are for validation, too."""
    path = rows if isinstance(rows, str) else write_rows(folder / "rows.jsonl", rows)
    known: dict[str, Any] = {
        "path": path,
        "format": None,
        "fields": {},
        "chat_template": "auto",
        "train_on": "answers",
        "packing": False,
        "val_path": path,
        "val_fraction": 0.1,
        "split": "train",
        "tokenizer": Llava(),
        "seq_len": 256,
        "image_folder": None,
        "image_token_id": IMAGE_ID,
        "image_seq_length": NUM_PATCHES,
        "transform": make_transform(size=SIZE, eval_crop=1.0),
        "cache_dir": str(folder / "cache"),
    }
    source = Conversations(**known | settings)
    source.prepare()
    return source
