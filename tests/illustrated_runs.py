"""A run of a tiny LLaVA model on questions about images, for tests of what is done with one."""

import io
import json
from pathlib import Path

import numpy as np
from chats import CHATML, SPECIAL, make_backend
from support import execute
from tokenizers import AddedToken
from vision_language_cases import IMAGE_SIZE, write_llava

from recipes.tokenizer import NUM_BYTES, Tokenizer

IMAGE_ID = NUM_BYTES + len(SPECIAL)
VOCAB_SIZE = IMAGE_ID + 4
# as llava-hf/llava-1.5-7b-hf writes messages, with the end of an answer
OF_PARTS = (
    "{% for m in messages %}{{ m['role'].upper() + ': ' }}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] + ('</s>' if m['role'] == 'assistant' else ' ') }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)
SMALL = [
    *("recipe=vlm_sft", "model.pretrained=null", "model.max_seq_len=96", "seq_len=96", "trainer.max_steps=2"),
    *("global_batch_size=4", "eval_every=2", "save_every=2", "warmup_steps=1", "data.val_fraction=0.3"),
    *("callbacks.generation_eval.num_samples=4", "optimizer.lr=1e-2", "~callbacks.report", "data.packing=false"),
]


def write_image(path: Path, color: tuple[int, int, int]) -> None:
    """Write a PNG of one color, with a brighter corner."""
    from PIL import Image

    pixels = np.full((12, 10, 3), color, dtype=np.uint8)
    pixels[:4, :4] += 40
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    path.write_bytes(file.getvalue())


def publish(folder: Path, *, knows_image: bool, reads_parts: bool) -> Path:
    """Write a model, without weights, and its tokenizer.

    Args:
        folder: Folder to write.
        knows_image: Whether the tokenizer has a token `<image>`.
        reads_parts: Whether its chat template takes the parts of a message.
    """
    write_llava(folder, vocab_size=VOCAB_SIZE, max_position_embeddings=96)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"image_token_index": IMAGE_ID}))
    processor = {"crop_size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE}, "size": {"shortest_edge": IMAGE_SIZE}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor | {"resample": 3}))
    backend = make_backend()
    if knows_image:
        backend.add_tokens([AddedToken("<image>", normalized=False, special=True)])
    template = OF_PARTS if reads_parts else CHATML
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    Tokenizer(backend, end_of_text=NUM_BYTES + 1, settings=settings | {"chat_template": template}).save(folder)
    return folder


def publish_parts(folder: Path) -> list[str]:
    """Write a tower and a language model whose tokenizer has no token for images; return what names them."""
    from transformers import AutoConfig

    whole = publish(folder / "whole", knows_image=False, reads_parts=False)
    config = AutoConfig.from_pretrained(whole)
    config.vision_config.save_pretrained(folder / "vision")
    (whole / "preprocessor_config.json").rename(folder / "vision" / "preprocessor_config.json")
    (whole / "config.json").unlink()
    config.text_config.vocab_size = VOCAB_SIZE - 4  # the embedding ends with the tokenizer
    config.text_config.save_pretrained(whole)
    typed = [f"model.vision={folder / 'vision'}", f"model.language={whole}"]
    return [*typed, "model.vision_pretrained=null", "model.language_pretrained=null", "model.name=null"]


def write_questions(folder: Path) -> Path:
    """Write questions about images: the same text about each of them, one without an image, one with two."""
    rows = []
    for number in range(20):
        name, answer = f"{number}.png", ("red", "blue")[number % 2]
        write_image(folder / name, ((200, 0, 10 * number % 200), (0, 10 * number % 200, 200))[number % 2])
        images = [[name], [], [name, name]][0 if number % 5 else 1 + number // 5 % 2]
        asked = [{"type": "image", "path": each} for each in images] + [{"type": "text", "text": "color?"}]
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages, "answers": [f"{answer} {number}"] * 10})
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(folder: Path, *typed: str, is_of_parts: bool = False) -> Path:
    """Train two steps of a whole model, or one that is put together, and return the folder of the run."""
    folder.mkdir(parents=True, exist_ok=True)
    run = folder / "run"
    assert execute(*list_overrides(folder, is_of_parts=is_of_parts), *typed, f"hydra.run.dir={run}") == 0
    return run


def list_overrides(folder: Path, *, is_of_parts: bool) -> list[str]:
    """Return the overrides of a run, and write what they name.

    Args:
        folder: Folder to write.
        is_of_parts: Whether the model is put together from two.
    """
    named = [f"model.name={folder / 'published'}"]
    if is_of_parts:
        named = publish_parts(folder / "published")
    else:
        publish(folder / "published", knows_image=True, reads_parts=True)
    return [*SMALL, *named, f"data.path={write_questions(folder)}"]
