"""The arithmetic of MFU and the choice of sizes, against figures known elsewhere."""

from pathlib import Path

import pytest
import torch
from gpu_checks.check import Settings
from gpu_checks.plan import THROUGHPUT
from gpu_checks.runs import BARE, QUIET
from gpu_checks.speed import GPT2_124M, count_flops, find_disagreements, fit_micro_batch
from support import composed_config

from recipes.config import resolved as resolved_module
from recipes.model.gpt2 import GPT2


def _settings(memory_gib: float | None) -> Settings:
    accelerator = "cpu" if memory_gib is None else "gpu"
    return Settings(accelerator=accelerator, is_tiny=False, num_gpus=1, memory_gib=memory_gib, folder=Path())


def test_the_flops_written_out_are_those_of_the_model() -> None:
    with torch.device("meta"):
        model = GPT2(vocab_size=50257, max_seq_len=1024, num_layers=12, num_heads=12, hidden_size=768, dropout=0.0)
    assert count_flops(GPT2_124M) == model.flops_per_token(1024).palm == 860_101_632.0


def test_the_micro_batch_is_halved_until_it_fits() -> None:
    sizes = {gib: fit_micro_batch(_settings(gib), 48, 1.16, 2.0) for gib in (139.8, 79.1, 44.4, 22.0, 4.0, None)}
    assert sizes == {139.8: 48, 79.1: 48, 44.4: 24, 22.0: 12, 4.0: 1, None: 2}


AGREE = {
    "flops_per_token": 100.0,
    "flops_per_token_of_the_recipe": 100.0,
    "step_seconds": 0.155,
    "step_seconds_by_clock": 0.156,
    "recipe_over_by_hand": 0.97,
}


def test_figures_that_agree_pass() -> None:
    assert find_disagreements(AGREE, judges_speed=True) == []


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("flops_per_token_of_the_recipe", 50.0, "SpeedMonitor counts 0.5000 of the FLOPs"),
        ("step_seconds_by_clock", 0.200, "a step takes 0.775 of a second clock's time"),
        ("recipe_over_by_hand", 0.80, "the recipe reaches 0.800 of the hand-written loop's speed"),
    ],
)
def test_each_pair_that_disagrees_is_named(name: str, value: float, sentence: str) -> None:
    [failure] = find_disagreements(AGREE | {name: value}, judges_speed=True)
    assert sentence in failure
    without_times = find_disagreements(AGREE | {name: value}, judges_speed=False)
    assert bool(without_times) == name.startswith("flops")


@pytest.mark.parametrize("number", range(len(THROUGHPUT)))
def test_every_throughput_command_composes(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolved_module, "num_gpus", lambda: 2)  # float8, TF32 and CUDA graphs need one
    arguments = THROUGHPUT[number].arguments
    size = ["micro_batch_size=2", f"global_batch_size={2 * (arguments['num_gpus'] or 2)}"]
    ranks = "trainer.devices=2" if arguments["num_gpus"] == 0 else "trainer.devices=1"
    quiet = BARE if arguments["takes_images"] else QUIET
    config = composed_config(*arguments["overrides"], *quiet, *size, ranks)
    assert config["trainer"]["accelerator"] == "auto"
