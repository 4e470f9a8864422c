"""Every recipe's checkpoint holds plain data and tensors, and the recipe goes on from it as if it had not stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import DECODER, TOKENS
from ranks import run_on_ranks
from support import ROOT, TINY, write_texts

from recipes.config.check.deepspeed import has_libaio

RECIPES = sorted(path.stem for path in (ROOT / "conf/recipe").glob("*.yaml"))
if not has_libaio():  # the only recipe that needs a library which pip does not bring
    RECIPES.remove("zero3_bf16_nvme")
ALONE = [name for name in RECIPES if name.startswith(("single_", "quickstart"))]
ON_TWO = [name for name in RECIPES if name not in ALONE]
WORKER = Path(__file__).parent / "resume_ranks.py"
COMMON = [
    "trainer.accelerator=cpu",
    "trainer.max_steps=3",
    "save_every=2",
    "eval_every=3",
    "log_every=1",
    "warmup_steps=2",
    "global_batch_size=4",
    "seed=7",
]
# numbers that are computed, not measured
COMPUTED = ("train/", "val/", "lr", "grad/", "precision/")


def _case(name: str, texts: Path) -> dict[str, Any]:
    words = [f"recipe={name}", *COMMON]
    if name == "quickstart":
        small = [word for word in TINY if not word.startswith("global_batch_size")]
        return {"words": [*words, *small, f"data.path={texts}", "seq_len=16"]}
    words += [*DECODER, "micro_batch_size=2", "callbacks=[grad_norm,loss_scale]"]
    words.append(f"trainer.devices={2 if name in ON_TWO else 1}")
    if name.startswith("hsdp"):
        words.append("strategy.shard_size=2")
    if name == "zero3_bf16_nvme":  # DeepSpeed leaves what is smaller than a MiB in memory
        words += ["model.hidden_size=512", "model.vocab_size=8192"]
        disk = texts.parent / "disk"
        disk.mkdir()
        words.append(f"strategy.nvme_path={disk}")
    return {"words": words, "data": TOKENS}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Both runs of every recipe, and the folder they left."""
    texts = write_texts(tmp_path_factory.mktemp("texts"))
    found: dict[str, Any] = {}
    for names, world_size in ((ALONE, 1), (ON_TWO, 2)):
        folder = tmp_path_factory.mktemp("recipes")
        cases = {name: _case(name, texts) for name in names}
        group = run_on_ranks(cases, world_size=world_size, folder=folder, worker=WORKER)
        for number, name in enumerate(cases):
            found[name] = group[name] | {"folder": folder / f"results.json.{number}"}
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_goes_on_from_its_own_checkpoint_to_the_last_bit(
    name: str, results: dict[str, Any]
) -> None:
    result = results[name]
    assert "error" not in result, result["error"]
    whole, resumed = (
        {key: value for key, value in result[run].items() if key.startswith(COMPUTED)}
        for run in ("whole", "resumed")
    )
    assert resumed == whole
    assert result["resumed"]["step"] == 3
    assert {"train/loss", "val/loss", "lr", "train/samples"} <= set(resumed)


@pytest.mark.parametrize("name", RECIPES)
def test_a_checkpoint_of_every_recipe_loads_with_weights_only(
    name: str, results: dict[str, Any]
) -> None:
    folder = results[name]["folder"] / "whole/checkpoints/step_0000002.ckpt"
    world_size = 2 if name in ON_TWO else 1
    shards = [f"rank_{rank:05d}.safetensors" for rank in range(world_size)]
    # nothing else: no file of an engine's own, which would hold pickled objects
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", *shards, "run.pt"]
    plain = torch.load(folder / "run.pt", weights_only=True)
    assert plain["global_step"] == 2
    assert plain["consumed"]["samples"] == 8


@pytest.mark.skipif("zero3_bf16_nvme" not in RECIPES, reason="needs libaio")
def test_the_recipe_on_a_disk_had_weights_and_moments_there(results: dict[str, Any]) -> None:
    disk = results["zero3_bf16_nvme"]["folder"].parents[1] / "disk/zero_stage_3"
    swapped = [path for path in disk.rglob("*.swp") if path.stat().st_size]
    assert {path.relative_to(disk).parts[0] for path in swapped} == {"optimizer", "float32params"}
