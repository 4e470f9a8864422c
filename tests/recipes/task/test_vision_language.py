"""Training of vision-language models: what each stage changes, and rows with and without images in one batch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from support import composed_config, resolved
from vision_language_cases import make_parts, write_llava

import lightning_recipes as lr
from recipes.build import build
from recipes.config import compose_and_check
from recipes.config.check.doubts import find_random_base

PARTS = ("vision_tower", "multi_modal_projector", "language_model", "lm_head")
PARALLEL = ("tensor", "context", "pipeline")
FROZEN = {
    "projector": ["vision_tower", "language_model", "lm_head"],
    "language": ["vision_tower"],
    "all": [],
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write conversations with no image, one and two."""
    folder: Path = tmp_path_factory.mktemp("rows")
    generator, lines = torch.Generator().manual_seed(0), []
    for place in range(48):
        names = [f"{place}_{number}.png" for number in range(place % 3)]
        for name in names:
            pixels = torch.randint(256, (8, 8, 3), dtype=torch.uint8, generator=generator)
            Image.fromarray(pixels.numpy()).save(folder / name)
        asked = [*({"type": "image", "path": name} for name in names), {"type": "text", "text": f"Which, of {place}?"}]
        answer = {"role": "assistant", "content": f"{place % 5}"}
        lines.append(json.dumps({"messages": [{"role": "user", "content": asked}, answer]}))
    (folder / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    write_llava(folder / "llava", image_token=257, vocab_size=258, max_position_embeddings=128)
    return folder


def of_stage(rows: Path, folder: Path, *typed: str) -> list[str]:
    return [
        *("recipe=vlm_sft", f"model.name={rows / 'llava'}", "model.pretrained=null", "model.max_seq_len=128"),
        *("tokenizer=bytes", f"data.path={rows / 'rows.jsonl'}", "seq_len=128", "data.val_fraction=0.2"),
        *("global_batch_size=4", "trainer.max_steps=20", "eval_every=20", "save_every=20", "optimizer.lr=1e-3"),
        *("callbacks=[]", f"hydra.run.dir={folder}", "trainer.accelerator=cpu", "warmup_steps=0", *typed),
    ]


def get_weights(run: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in run.load().named_parameters()}


@pytest.mark.parametrize("train_on", ["answers", "all"])
def test_the_loss_is_that_of_transformers_with_labels_that_it_shifts(rows: Path, tmp_path: Path, train_on: str) -> None:
    """Labels that are not shifted let a model copy what it reads, and its loss falls to 0 (KempnerForge#154)."""
    typed = ["data.packing=false", f"data.train_on={train_on}", "trainer.max_steps=2", "eval_every=2", "save_every=2"]
    typed = of_stage(rows, tmp_path, *typed, "eval_samples=null")
    source = build(resolved(composed_config(*typed), tmp_path / "unused")).data.source
    trained = lr.compose(*typed).fit()
    source.prepare()
    model, total, number = trained.load().inner, 0.0, 0
    for row in map(source.val().__getitem__, range(len(source.val()))):
        labels = torch.cat([torch.tensor([-100]), row["targets"]])  # as transformers takes them, [T + 1]
        tokens = torch.cat([row["inputs"], row["targets"][-1:].clamp(min=0)])
        own = {"input_ids": tokens[None], "labels": labels[None]}
        images = {"pixel_values": row["images"]} if len(row["images"]) else {}
        counted = int((labels != -100).sum())
        with torch.no_grad():
            total += model(**own, **images).loss.item() * counted
        number += counted
    [logged] = [row["val/loss"] for row in trained.rows if "val/loss" in row]
    assert logged == pytest.approx(total / number, rel=1e-5)


@pytest.mark.parametrize("packing", [True, False])
def test_what_a_stage_freezes_stays_the_same_to_the_bit(rows: Path, tmp_path: Path, packing: bool) -> None:
    before, start = None, []
    for stage, frozen in FROZEN.items():
        typed = [f"freeze=[{','.join(frozen)}]", f"data.packing={str(packing).lower()}", *start]
        trained = lr.compose(*of_stage(rows, tmp_path / stage, *typed)).fit()
        after = get_weights(trained)
        if before is not None:
            same = {name: torch.equal(weight, before[name]) for name, weight in after.items()}
            # nobody reads the norm behind the last layer
            changed = {part for part in PARTS for name, is_same in same.items() if part in name and not is_same}
            assert changed == {*PARTS} - {*frozen}, stage
            whole = [name for name, is_same in same.items() if is_same and not any(part in name for part in frozen)]
            assert all("post_layernorm" in name for name in whole), whole
        before, start = after, [f"start_from={tmp_path / stage}"]


def test_the_first_stage_changes_the_projector_alone(rows: Path, tmp_path: Path) -> None:
    frozen = f"freeze=[{','.join(FROZEN['projector'])}]"
    runs = [
        lr.compose(*of_stage(rows, tmp_path / name, frozen, f"optimizer.lr={rate}")).fit()
        for name, rate in (("slow", 1e-3), ("fast", 2e-3))
    ]
    slow, fast = map(get_weights, runs)
    changed = {name for name, weight in fast.items() if not torch.equal(weight, slow[name])}
    assert changed == {name for name in fast if "multi_modal_projector" in name}


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        *((([f"{part}_parallel_size=2"]), "Llava: it does not declare how it is sharded") for part in PARALLEL),
        (["model.image_token_id=0"], "model.image_token_id=0: rows are padded with token 0"),
        (["seq_len=4"], "seq_len=4: an image takes 4 tokens, and a row with one has no room for text"),
        (["model.vision=clip_nano"], "the first is a whole model, and the other a part of one"),
        (["model.name=null"], "model.vision=null: a model is put together from a tower of images and a language"),
        (["model.name=llama_nano"], "a model of type llama is no LLaVA model"),
        (["model.vision_pretrained=x/y"], "a whole model has weights of all parts, and nothing would read it"),
        (["model.vision_feature_layer=-3"], "a whole model has the layer that its config.json names"),
        (
            [
                *("model.name=null", "model.vision=clip_nano", "model.language=llama_nano", "model.pretrained=x/z"),
                *("model.vision_pretrained=null", "model.language_pretrained=null"),
            ],
            "model.pretrained=x/z: a model that is put together has the weights of its parts",
        ),
        (["model.name=null", "model.vision=llama_nano", "model.language=llama_nano"], "no tower of CLIP or SigLIP"),
        (
            ["model.name=null", "model.vision=clip_nano", "model.language=llama_nano"],
            "model.vision_pretrained=clip_nano: it is a configuration that comes without weights",
        ),
    ],
)
def test_what_cannot_be_trained_is_a_mistake_of_the_config(
    rows: Path, tmp_path: Path, typed: list[str], said: str
) -> None:
    _, mistakes = compose_and_check([*of_stage(rows, tmp_path), "strategy=fsdp", "trainer.devices=2", *typed])
    assert said in "\n".join(map(str, mistakes))


def test_a_new_projector_is_trained_beside_an_adapter() -> None:
    """An adapter freezes all else, and a projector that the seed draws would never learn."""
    typed = ["recipe=vlm_scenes", "adapter=lora"]
    _, [mistake] = compose_and_check(typed)
    assert mistake.setting == "adapter=lora model.name=null"
    assert "adapter.modules_to_save=[multi_modal_projector]" in mistake.fix
    assert not compose_and_check([*typed, "adapter.modules_to_save=[multi_modal_projector]"])[1]


def test_a_language_model_with_weights_needs_its_own_tokenizer(tmp_path: Path) -> None:
    make_parts(tmp_path, vision="clip", language="llama", vocab_size=512)
    parts = [f"model.{part}={tmp_path / part}" for part in ("vision", "language")]
    typed = ["recipe=vlm_sft", *parts, "data=scene_captions", "model.max_seq_len=128", "seq_len=128"]
    _, mistakes = compose_and_check([*typed, "tokenizer=bpe"])
    said = f"model.language_pretrained={tmp_path / 'language'} tokenizer=bpe: published weights need the token ids"
    assert any(said in str(mistake) for mistake in mistakes), [*map(str, mistakes)]
    assert not compose_and_check([*typed, "tokenizer=bpe", "model.language_pretrained=null"])[1]
    for missing in ("llama_nano", str(tmp_path / "nowhere")):  # a true mistake, and none of its tokenizer beside it
        _, [mistake] = compose_and_check(["recipe=vlm_scenes", f"model.language_pretrained={missing}"])
        assert mistake.setting == f"model.language_pretrained={missing}"


def test_a_model_put_together_from_weights_does_not_begin_with_random_ones(rows: Path, tmp_path: Path) -> None:
    """It was warned of, and a preflight took the low first loss of a trained model for targets that leak."""
    make_parts(tmp_path, vision="clip", language="llama", vocab_size=512)
    typed = ["recipe=vlm_sft", *(f"model.{part}={tmp_path / part}" for part in ("vision", "language"))]
    typed += [f"data.path={rows / 'rows.jsonl'}", "model.max_seq_len=128", "seq_len=128"]
    published = ["tokenizer=huggingface", "tokenizer.name=x/y"]
    trained = resolved(composed_config(*typed, *published), tmp_path / "run")
    drawn = resolved(composed_config(*typed, "tokenizer=bytes", "model.language_pretrained=null"), tmp_path / "run")
    assert trained.model.pretrained == str(tmp_path / "language")
    assert [*find_random_base(trained)] == []
    assert drawn.model.pretrained is None
    assert len([*find_random_base(drawn)]) == 1


def test_a_model_of_tokens_alone_is_refused() -> None:
    _, mistakes = compose_and_check(["task=vision_language"])
    reason = "model=gpt2_nano task=vision_language: it reads tokens alone, and the rows of this task hold images"
    assert f"{reason}; type model=llava, or task=language_modeling" in map(str, mistakes)
