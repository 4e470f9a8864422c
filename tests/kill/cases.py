"""The runs that are killed: tiny, with dropout, clipping, warm-up, decay, accumulation and a data-loading worker."""

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support import TINY
from vision_language_cases import write_llava

from recipes.config import compose_and_check
from recipes.config.resolved import ResolvedRun

COMMON = (
    *TINY,
    "model.dropout=0.1",
    "trainer.accelerator=cpu",
    "trainer.gradient_clip_val=0.5",
    "warmup_steps=10",  # then cosine decay
    "save_every=3",
    "eval_every=7",
    "eval_samples=5",  # uneven on 2 ranks
    "resume=auto",
)
_RANKS = ("micro_batch_size=2", "trainer.devices=2", "loader.num_workers=1")  # accumulates 2
CASES: dict[str, tuple[str, ...]] = {
    "single": ("strategy=single", "micro_batch_size=4", "loader.num_workers=1"),
    "single 16-mixed": (
        "strategy=single",
        "micro_batch_size=4",
        "precision=16-mixed",  # emulated on a CPU, so the model is small
        "model.num_heads=1",
        "model.hidden_size=8",
        "model.max_seq_len=8",
        "+callbacks.overflow._target_=support.OverflowAt",  # so that the loss scale moves
        "+callbacks.overflow.step=40",
        "+callbacks.overflow.rank=0",
    ),
    "ddp": ("strategy=ddp", *_RANKS),
    "fsdp": ("strategy=fsdp", *_RANKS),
    "deepspeed_stage_2": ("strategy=deepspeed_stage_2", *_RANKS),
    "pp2 x tp2": (
        "strategy=fsdp",
        "pipeline_parallel_size=2",
        "tensor_parallel_size=2",
        "micro_batch_size=4",
        "trainer.devices=4",
    ),
}
_PREFERENCES = ("strategy=single", "micro_batch_size=4", "loader.num_workers=1", "log_every=1")
PREFERENCES: dict[str, tuple[str, ...]] = {
    "dpo": ("recipe=dpo", *_PREFERENCES),
    "dpo lora": ("recipe=dpo", "adapter=lora", "adapter.r=4", "optimizer.lr=1e-4", *_PREFERENCES),
    "kto": ("recipe=kto", *_PREFERENCES),
    "orpo": ("recipe=orpo", *_PREFERENCES),
    "simpo": ("recipe=simpo", *_PREFERENCES),
    "reward": ("recipe=reward_model", *_PREFERENCES),
}
_POLICY = ("rollout.num_generations=4", "rollout.max_new_tokens=6", "reward=mine", *_PREFERENCES)
_REUSED = ("rollout.num_iterations=3", "loss.epsilon=0.01")
POLICIES: dict[str, tuple[str, ...]] = {
    "grpo": ("recipe=grpo", *_POLICY),
    "grpo reused": ("recipe=grpo", *_POLICY, *_REUSED, "loss.beta=0.1"),
    "ppo": ("recipe=ppo", *_POLICY, *_REUSED, "loss.kl_target=0.5", "loss.kl_horizon=100"),
}
CASES |= PREFERENCES | POLICIES
STEPS = {
    "single": 250,
    "single 16-mixed": 300,
    "ddp": 150,
    "fsdp": 80,
    "deepspeed_stage_2": 60,
    "pp2 x tp2": 45,
    **dict.fromkeys((*PREFERENCES, *POLICIES), 120),
}
if "LONG_TESTS" not in os.environ:  # set by `make test-long` and `make kill-test`
    STEPS = {name: steps // 3 for name, steps in STEPS.items()}


# the ranks of DDP read a mixture: lines and noise, in other shares from the 20th step on
_MIXTURE = (
    "data=mixture",
    "+data@data.sources.lines=text_files",
    "+data@data.sources.noise=random_tokens",
    "tokenizer=bytes",  # random tokens set none
    "data.weights={lines: 0.7, noise: 0.3}",
    "data.stages=[{from: 156, weights: {lines: 0.4, noise: 0.6}}]",
)


# random crops and flips of images: the first epoch ends at step 45
IMAGES = (
    "model=resnet18",
    "model._target_=small_models.SmallClassifier",
    "data.random_crop_padding=2",
    "data.random_horizontal_flip=true",
    "~callbacks.report",
    "~callbacks.sample_text",
    "trainer.accelerator=cpu",
    "strategy=single",
    "global_batch_size=32",
    "micro_batch_size=16",
    "trainer.max_steps=100",  # 2.2 epochs
    "save_every=10",
    "eval_every=50",
    "log_every=1",
    "resume=auto",
)


# the same of images in files, as a library draws: crops, colors and rectangles
_FILES = ("data=image_folder", "transform=small_images", "transform.size=8", "transform.padding=2")
_FILES += ("transform.policy=trivialaugment", "transform.color_jitter=0.3", "transform.erase=0.2")


def get_image_files(folder: Path) -> list[str]:
    """Return the overrides of a run on image files, which are written once: three classes of 96 and 9 images."""
    from PIL import Image

    for split, number in (("train", 96), ("val", 9)):
        for label, name in enumerate(("ant", "bee", "cat")):
            for place in range(number):
                file = folder / "photos" / split / name / f"{place}.png"
                if not file.exists():
                    file.parent.mkdir(parents=True, exist_ok=True)
                    Image.frombytes("RGB", (8, 8), random.Random(f"{split}{label}{place}").randbytes(192)).save(file)
    kept = [override for override in IMAGES if not override.startswith("data.")]
    return [*kept, *_FILES, f"data.path={folder / 'photos'}", "model.in_channels=3"]


def get_illustrated(folder: Path) -> list[str]:
    """Return the overrides of a run of a vision-language model on rows with 0 to 2 images; dropout in the tower."""
    from PIL import Image

    rows: list[dict[str, Any]] = []
    (folder / "shown").mkdir(exist_ok=True)
    for place in range(300):
        names = [f"shown/{place}_{number}.png" for number in range(place % 3)]
        for number, name in enumerate(names):
            Image.frombytes("RGB", (8, 8), random.Random(place + 500 * number).randbytes(192)).save(folder / name)
        parts = [*({"type": "image", "path": name} for name in names), {"type": "text", "text": f"What is {place}?"}]
        rows.append(
            {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": f"{place % 7}."}]}
        )
    table = folder / "shown.jsonl"
    table.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    model = write_llava(folder / "llava", image_token=257, vocab_size=258, max_position_embeddings=128, dropout=0.1)
    kept = [each for each in IMAGES if not each.startswith(("data", "model", "~callbacks.sample_text"))]
    return [
        *("model=llava", f"model.name={model}", "model.pretrained=null", "model.max_seq_len=96", "tokenizer=bytes"),
        *("data=conversations", f"data.path={table}", "data.packing=false", "freeze=[multi_modal_projector]", *kept),
    ]


def get_captioned(folder: Path) -> list[str]:
    """Return the overrides of a run on images with two captions each, of which one is drawn; dropout in both passes."""
    from PIL import Image

    rows = []
    (folder / "pictures").mkdir(exist_ok=True)
    for place in range(300):
        file = folder / "pictures" / f"{place}.png"
        Image.frombytes("RGB", (8, 8), random.Random(place).randbytes(192)).save(file)
        rows.append({"image": str(file), "caption": [f"picture {place}", f"no {place % 40} of all"]})
    table = folder / "pictures.jsonl"
    table.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    kept = [each for each in IMAGES if not each.startswith(("data.", "model", "~callbacks.sample_text"))]
    return [
        *("model=dual_encoder", "model.image_name=vit_tiny_patch16_224", "model.image_size=8", "model.in_channels=3"),
        "model.image_arguments={patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2, proj_drop_rate: 0.1}",
        *("tokenizer=bytes", "model.vocab_size=257", "model.max_seq_len=16", "model.hidden_size=16"),
        *("model.num_layers=1", "model.num_heads=2", "model.projection_size=8", "model.dropout=0.1"),
        *("data=image_text", f"data.path={table}", "transform.scale=[0.5,1.0]", *kept),
    ]


# a hash: what is sampled once another way changes all that follows
_REWARD = """
import zlib


def score(prompts, completions, references, rows):
    return [zlib.crc32(text.encode()) % 100 / 100 for text in completions]
"""


def get_overrides(name: str, folder: Path, texts: Path) -> list[str]:
    """Return the overrides of a case: the same for every start."""
    common = [*COMMON, *CASES[name], f"trainer.max_steps={STEPS[name]}", f"hydra.run.dir={folder}"]
    if name in PREFERENCES:
        of_texts = ("data=text_files", "~callbacks.sample_text")
        kept = [override for override in common if override not in of_texts]
        # a cache of its own: kills hit the computation of the reference, too
        caches = [] if name == "reward" else [f"task.cache_dir={folder / 'cache'}"]
        return [*kept, *caches, f"data.path={_write_pairs(texts.parent / 'pairs.jsonl')}"]
    if name in POLICIES:
        rewards = texts.parent / "rewards.py"
        rewards.write_text(_REWARD)
        kept = [override for override in common if override not in ("data=text_files", "~callbacks.sample_text")]
        prompts = _write_pairs(texts.parent / "pairs.jsonl")
        return [*kept, f"data.path={prompts}", "data.fields={reference: chosen}", f"reward.mine.path={rewards}:score"]
    if name != "ddp":
        return [*common, f"data.path={texts}"]
    replaced = {override.partition("=")[0] for override in _MIXTURE}
    kept = [override for override in common if override.partition("=")[0] not in replaced]
    return [*kept, *_MIXTURE, f"data.sources.lines.path={texts}"]


def _write_pairs(path: Path) -> Path:
    """Write 300 pairs of answers of 1 to 9 letters, once."""
    if not path.exists():
        words = ["".join(chr(97 + (7 * row + 3 * place) % 26) for place in range(1 + row % 9)) for row in range(300)]
        rows = [{"prompt": f"{row}>", "chosen": word, "rejected": f"{word[::-1]}!"} for row, word in enumerate(words)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def compose(overrides: Sequence[str]) -> ResolvedRun:
    composed, mistakes = compose_and_check(overrides)
    assert composed is not None, [str(mistake) for mistake in mistakes]
    assert not mistakes, [str(mistake) for mistake in mistakes]
    return composed
