"""Generation with images: the tokens of transformers, with a cache and without it, however many images a prompt has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vision_language_cases import (
    IMAGE_SIZE,
    IMAGE_TOKEN,
    NUM_IMAGES,
    NUM_TOKENS,
    PROMPTS,
    images_of,
    model_of,
    tokens_of,
)

from recipes.generation import Sampling

torch.set_num_threads(1)


@pytest.mark.parametrize("vision", ["clip_vision_model", "siglip_vision_model"])
def test_greedy_tokens_are_those_of_transformers_for_rows_of_no_one_and_two_images(tmp_path: Path, vision: str) -> None:
    """Padded on one side, and their images on the other, prompts of several lengths would see others' (trl#5785)."""
    model, images = model_of(tmp_path, vision=vision), images_of(NUM_IMAGES)
    expected = []
    for prompt, of_prompt in zip(PROMPTS, images, strict=True):
        inputs = {"input_ids": torch.tensor([prompt])} | ({"pixel_values": of_prompt} if len(of_prompt) else {})
        settings: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
        settings["suppress_tokens"] = [IMAGE_TOKEN]  # which an untrained model generates, too
        out = model.inner.generate(**inputs, attention_mask=torch.ones(1, len(prompt)), pad_token_id=0, **settings)
        expected.append(out[0, len(prompt) :].tolist())
    assert tokens_of(model, PROMPTS, images) == expected
    assert tokens_of(model, PROMPTS, images, use_cache=False) == expected
    assert len({*map(tuple, expected)}) == len(PROMPTS)
    # other images, other tokens
    others = tokens_of(model, PROMPTS, [-each for each in images])
    assert [own == other for own, other in zip(expected, others, strict=True)] == [True, False, False, False]


@pytest.mark.parametrize("use_cache", [True, False])
def test_samples_of_a_prompt_have_its_images_and_the_tokens_of_each_alone(tmp_path: Path, use_cache: bool) -> None:
    model, images = model_of(tmp_path), images_of(NUM_IMAGES)
    options = {"sampling": Sampling(temperature=1.0), "use_cache": use_cache}
    together = tokens_of(model, PROMPTS, images, num_samples=2, seeds=range(8), **options)
    for row, tokens in enumerate(together):
        prompt = row // 2
        assert tokens == tokens_of(model, [PROMPTS[prompt]], [images[prompt]], seeds=[row], **options)[0]
    assert together[2] != together[3]


@pytest.mark.parametrize("use_cache", [True, False])
def test_rows_that_end_earlier_leave_the_others_their_images(tmp_path: Path, use_cache: bool) -> None:
    model, images = model_of(tmp_path), images_of(NUM_IMAGES)
    whole = tokens_of(model, PROMPTS, images)
    ends = [whole[0][2], whole[2][5]]
    cut = [[*row[: next((i for i, token in enumerate(row) if token in ends), len(row))]] for row in whole]
    assert len({*map(len, cut)}) > 1
    assert tokens_of(model, PROMPTS, images, ends=ends, use_cache=use_cache) == cut


def test_the_tower_runs_once_for_a_prompt_without_images_and_not_for_its_tokens(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    seen: list[tuple[int, ...]] = []
    model.inner.model.vision_tower.embeddings.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape))
    tokens_of(model, [[5, 6, 7]], None)
    assert seen == [(1, 3, IMAGE_SIZE, IMAGE_SIZE)], "every rank runs it: one may have an image"
    tokens_of(model, [[5, 6, 7]], images_of([0]))
    assert len(seen) == 2
    tokens_of(model, PROMPTS, images_of(NUM_IMAGES))
    assert seen[2:] == [(4, 3, IMAGE_SIZE, IMAGE_SIZE)]
