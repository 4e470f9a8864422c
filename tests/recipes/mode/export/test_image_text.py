"""An export of a model of images and captions: its processor gives the tokens and pixels of training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from PIL import Image
from support import composed_config, execute, resolved

import lightning_recipes as lr
from recipes.build import build
from recipes.data.draws import rng_at
from recipes.data.shapes import PICTURE_SEEDS, choose_unseen, draw_picture, write_caption

NUMBER = 3
SMALL = ["recipe=clip_scenes", "global_batch_size=8", "trainer.max_steps=2", "warmup_steps=0", "eval_samples=8"]
SMALL += ["eval_every=2", "save_every=2", "data.num_scenes=64", "callbacks=[]", "trainer.accelerator=cpu"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip") / "run"
    assert execute(*SMALL, f"hydra.run.dir={folder}") == 0
    assert execute("mode=export", f"resume={folder}") == 0
    return folder


def test_the_processor_gives_the_tokens_the_pixels_and_the_scores_of_training(run: Path) -> None:
    source: Any = build(resolved(composed_config(*SMALL), run.parent / "unused")).data.source
    ours: Any = lr.load(run)
    source.prepare(ours.tokenizer)
    pairs = [source.val()[index] for index in range(NUMBER)]
    scenes = choose_unseen(NUMBER)
    size = source.transform.pixels.eval_size
    pictures = [draw_picture(scene, rng_at(PICTURE_SEEDS["val"], place), size) for place, scene in enumerate(scenes)]

    processor: Any = hf.AutoProcessor.from_pretrained(run / "export")
    captions = [*map(write_caption, scenes)]
    given = processor(
        text=captions, images=[*map(Image.fromarray, pictures)], padding="max_length", return_tensors="pt"
    )
    tokens, images = (torch.stack([pair[name] for pair in pairs]) for name in ("tokens", "inputs"))
    assert torch.equal(given.input_ids, tokens)
    torch.testing.assert_close(given.pixel_values, images, rtol=0, atol=1e-6)

    theirs = hf.AutoModel.from_pretrained(run / "export").eval()
    with torch.no_grad():
        found = theirs(**given).logits_per_image
        of_images, of_captions, log_scale, _ = ours(images, tokens, torch.stack([pair["is_token"] for pair in pairs]))
    normalized = [torch.nn.functional.normalize(each, dim=-1) for each in (of_images, of_captions)]
    expected = log_scale.exp() * normalized[0] @ normalized[1].T
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_tokenizer_cuts_and_pads_as_in_training(run: Path) -> None:
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(run / "export")
    length = json.loads((run / "export" / "export.json").read_text())["inputs"]["max_seq_len"]
    long, short = tokenizer(["red circle " * 60, "red"], padding=True, truncation=True).input_ids
    assert len(long) == len(short) == length
    assert long[-1] == short[-1] == tokenizer.eos_token_id, "a text that is cut has its end, and the padding is it"
