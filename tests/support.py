"""Shared test helpers: composed configs, runs, faults at a step, data with uneven masks."""

import csv
import functools
import hashlib
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from recipes.config import compose_and_check  # isort: skip  # before Lightning, as in conftest.py

import lightning.pytorch as lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from numpy.typing import NDArray
from torch import Tensor

from recipes.config.resolved import ResolvedRun
from recipes.data.conversations.rows import pad_rows

ROOT = Path(__file__).parent.parent

# a one-second run: bytes as tokens, 24 small texts, no report
TINY = (
    "tokenizer=bytes",
    "data=text_files",
    "model.vocab_size=257",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.hidden_size=32",
    "model.max_seq_len=32",
    "global_batch_size=8",
    "eval_samples=8",
    "~callbacks.report",
    "~callbacks.sample_text",
)


RECIPES_OF_IMAGES = (
    *("resnet50_imagenet", "convnext_tiny_imagenet", "vit_small_imagenet"),
    *("finetune_vision", "linear_probe", "simclr"),
)


def write_images(folder: Path, *, size: int = 8, num_images: int = 12) -> Path:
    """Write random images of two classes, a third of them for validation, and return the folder."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for number in range(num_images):
        path = folder / ("train" if number % 3 else "val") / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(256, (size, size, 3), generator=generator, dtype=torch.uint8)  # [H, W, C]
        Image.fromarray(pixels.numpy()).save(path)
    return folder


def write_captions(folder: Path) -> Path:
    """Write random images and a table with a caption of each, and return the table."""
    images = sorted(write_images(folder / "photos").glob("**/*.png"))
    lines = [f"{path.relative_to(folder)},picture {number}" for number, path in enumerate(images)]
    (folder / "captions.csv").write_text("\n".join(["image,caption", *lines, ""]))
    return folder / "captions.csv"


def needed_by(recipe: str, folder: Path, *, model: str = "") -> list[str]:
    """Return the overrides without which a recipe or model does not compose: a disk, data, or a published model."""
    if model == "huggingface":
        config = {"model_type": "llama", "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512}
        config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
        (folder / "config.json").write_text(json.dumps(config))
        return [f"model.name={folder}", *needed_by(recipe, folder)]
    if recipe in ("clip_scenes", "vlm_scenes"):  # they have models and data of their own
        return []
    if model == "llava" or recipe == "vlm_sft":
        size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
        text = {"model_type": "llama", "vocab_size": 2048, "num_key_value_heads": 2, **size}
        tower = {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 16, **size}
        config = {"model_type": "llava", "text_config": text, "vision_config": tower, "image_token_index": 2047}
        (folder / "config.json").write_text(json.dumps(config))
        further = [] if recipe == "vlm_sft" else needed_by(recipe, folder)
        return [f"model.name={folder}", *needed_by("sft", folder), *further]
    if model == "clip" or recipe in ("clip", "siglip"):
        size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
        towers = {"text_config": {"vocab_size": 2048, **size}, "vision_config": {"image_size": 32, **size}}
        (folder / "config.json").write_text(json.dumps({"model_type": "clip", **towers}))
        further = [] if recipe in ("clip", "siglip") else needed_by(recipe, folder)
        return [f"model.name={folder}", f"data.path={write_captions(folder)}", *further]
    if model == "dual_encoder" and recipe != "clip_quickstart":  # which has data of its own
        return [f"data.path={write_captions(folder)}", *needed_by(recipe, folder)]
    if recipe.endswith("_nvme"):
        return [f"strategy.nvme_path={folder}", *needed_by("", folder, model=model)]
    if recipe in RECIPES_OF_IMAGES or (model == "timm" and recipe != "vision_quickstart"):
        return [f"data.path={write_images(folder / 'photos')}"]
    path = folder / "rows.jsonl"
    if recipe in ("dpo", "orpo", "simpo", "kto", "reward_model"):
        pairs = ({"prompt": f"{i}+{i}=", "chosen": f"{2 * i}", "rejected": f"{2 * i + 1}"} for i in range(200))
        path.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
        return [f"data.path={path}"]
    if recipe in ("grpo", "ppo"):
        rows = ({"prompt": f"{i}+{i}=", "answer": f"{2 * i}"} for i in range(200))
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return [f"data.path={path}", "reward=numeric", "rollout.max_new_tokens=16"]
    if recipe in ("regression", "multi_label"):
        path = folder / "rows.csv"
        path.write_text("".join(["a,b,y,z\n", *(f"{i % 7},{i % 5},{i % 2},{i % 3 == 0:d}\n" for i in range(60))]))
        targets = "[y,z]" if recipe == "multi_label" else "y"
        shape = ["model.num_inputs=2", f"model.num_classes={2 if recipe == 'multi_label' else 1}"]
        return [f"data.path={path}", "data.inputs=[a,b]", f"data.targets={targets}", *shape]
    if recipe != "sft":
        return []
    path.write_text("".join(f'{{"prompt": "{i}+{i}=", "completion": "{2 * i}"}}\n' for i in range(200)))
    return [f"data.path={path}"]


COMPOSED: dict[tuple[str, ...], bytes] = {}  # pickled configs by overrides, in processes that fill it


def composed_config(*overrides: str) -> dict[str, Any]:
    """Return the checked config for overrides that must be valid."""
    if overrides in COMPOSED:
        config: dict[str, Any] = pickle.loads(COMPOSED[overrides])
        return config
    composed, errors = compose_and_check(overrides)
    assert composed is not None, [str(error) for error in errors]
    assert not errors, [str(error) for error in errors]
    return composed.config


def resolved(config: dict[str, Any], folder: Path = Path("unused"), overrides: Sequence[str] = ()) -> ResolvedRun:
    """Return the run of a config, in a folder."""
    return ResolvedRun(config=config, choices={}, run_folder=folder, overrides=[*overrides])


def execute(*overrides: str) -> int:
    """Run a command line in this process and return its exit code."""
    from recipes.entry.run import run_resolved  # lazy: test ranks import this module but do not need it

    composed, mistakes = compose_and_check(overrides)
    assert composed is not None
    assert not mistakes, [str(mistake) for mistake in mistakes]
    return run_resolved(composed)


def run_train(
    overrides: Sequence[str], *, folder: Path = ROOT, timeout: float = 240.0, python_path: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python train.py …` and return its output."""
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *overrides],
        cwd=folder,
        env=None if python_path is None else os.environ | {"PYTHONPATH": python_path},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def read_metrics(run_folder: Path) -> list[dict[str, float]]:
    """Return the rows of metrics.csv without empty cells."""
    with (run_folder / "metrics.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def write_texts(folder: Path) -> Path:
    """Write 24 small texts with learnable structure, identical on every machine; return their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(24):
        lines = [f"{word} = {number * index % 97}\n" for index, word in enumerate("abcdefgh" * 12)]
        (folder / f"text_{number:02d}.txt").write_text("".join(lines))
    return folder


def number_of_text(given: str, expected: str) -> float:
    """Hash a text to a number below 1."""
    return int.from_bytes(hashlib.sha256(given.encode()).digest()[:6], "big") / 2**48


class CrashAt(Callback):
    """Raises in the batch after an optimizer step; as after a kill, nothing more is written."""

    def __init__(self, *, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            raise OSError(f"crash at {self.step}")


class StopAt(Callback):
    """Requests a stop after an optimizer step, as a time limit does."""

    def __init__(self, *, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == self.step


class StopInWindow(Callback):
    """Stops the run after a micro-batch, as a time limit does."""

    def __init__(self, *, micro_batch: int) -> None:
        self._micro_batch = micro_batch

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        trainer.should_stop |= batch_idx + 1 == self._micro_batch


class Slow(Callback):
    """Makes every micro-batch take some seconds."""

    def __init__(self, *, seconds: float) -> None:
        self._seconds = seconds

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(self._seconds)


class OverflowAt(Callback):
    """Makes the gradients of one rank overflow float16 in the step after a given optimizer step."""

    def __init__(self, *, step: int, rank: int) -> None:
        self.step = step
        self.rank = rank

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            batch["num_targets"] = torch.tensor(1e-30)


class MaskedTokens:
    """Random tokens; sample i has 1 + (5 i) % T targets in the loss, deliberately uneven."""

    sample_kind: ClassVar[str] = "tokens"
    tokenizer = None
    targets_per_sample = None
    fingerprint = "masked"

    def __init__(self, *, num_samples: int, seq_len: int, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (num_samples, seq_len + 1)
        self.tokens = torch.randint(vocab_size, shape, generator=generator)  # [N, T + 1]
        self.tokens_per_sample = seq_len

    def prepare(self) -> None: ...

    def describe(self) -> str:
        return f"{len(self)} samples"

    def train(self) -> "MaskedTokens":
        return self

    def val(self) -> "MaskedTokens":
        return self

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        targets = self.tokens[index, 1:].clone()  # [T]
        targets[1 + 5 * index % len(targets) :] = -100
        return {"inputs": self.tokens[index, :-1], "targets": targets}


class RaggedTokens(MaskedTokens):
    """Random tokens in rows of 1 to T, which are padded; only the second half of a row carries loss."""

    fingerprint = "ragged"
    pads_samples: ClassVar[bool] = True

    def __init__(self, *, num_samples: int, seq_len: int, vocab_size: int) -> None:
        super().__init__(num_samples=num_samples, seq_len=seq_len, vocab_size=vocab_size)
        self.lengths = 1 + 61 * np.arange(num_samples, dtype=np.int64) % seq_len  # [N]
        self.collate = functools.partial(pad_rows, seq_len=seq_len)

    def count_inputs(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.lengths[samples]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = int(self.lengths[index])
        targets = self.tokens[index, 1 : length + 1].clone()  # [t]
        targets[: length // 2] = -100
        return {"inputs": self.tokens[index, :length], "targets": targets}


class MaskedImages:
    """Random images, every third of which is excluded from the loss: deliberately uneven."""

    sample_kind: ClassVar[str] = "images"
    tokenizer = None
    targets_per_sample = None
    fingerprint = "masked"

    def __init__(self, *, num_samples: int, image_size: int = 8) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(num_samples, 1, image_size, image_size, generator=generator)  # [N, C, H, W]
        self.classes = torch.randint(10, (num_samples,), generator=generator)  # [N]
        self.classes[::3] = -100

    def prepare(self) -> None: ...

    def describe(self) -> str:
        return f"{len(self)} samples"

    def train(self) -> "MaskedImages":
        return self

    def val(self) -> "MaskedImages":
        return self

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.images[index], "targets": self.classes[index]}
