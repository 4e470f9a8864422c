"""Every recipe's checkpoint holds only plain data and tensors, and the recipe resumes from it bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import DECODER, IS_LONG, TOKENS
from ranks import run_on_ranks
from support import ROOT, TINY, write_texts

from recipes.config.check.strategy import has_libaio

RECIPES = sorted(path.stem for path in (ROOT / "conf/recipe").glob("*.yaml"))
if not has_libaio():  # needs seconds a step, and a library that pip does not install
    RECIPES.remove("zero3_bf16_nvme")
# the others differ from one of these in what is not part of a checkpoint; `make test-long` runs them too
if not IS_LONG:
    RECIPES = [
        *("quickstart", "single_fp16", "ddp_fp16", "fsdp_bf16_offload", "hsdp_bf16"),
        *("zero1_bf16", "zero2_fp16_offload", "zero3_bf16", "zero3_fp16"),
    ]
ALONE = [name for name in RECIPES if name.startswith(("single_", "quickstart", "sft", "mixture"))]
ON_FOUR = [name for name in RECIPES if name == "fsdp_tp_pp_bf16"]
ON_TWO = [name for name in RECIPES if name not in (*ALONE, *ON_FOUR)]
NUM_RANKS = {1: ALONE, 2: ON_TWO, 4: ON_FOUR}
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
# metrics that are computed, not measured
COMPUTED = ("train/", "val/", "lr", "grad/", "precision/")


def count_ranks(name: str) -> int:
    """Return the number of ranks on which a recipe is trained here."""
    [number] = [number for number, names in NUM_RANKS.items() if name in names]
    return number


def _case(name: str, texts: Path) -> dict[str, Any]:
    overrides = [f"recipe={name}", *COMMON]
    if name == "quickstart":
        small = [override for override in TINY if not override.startswith("global_batch_size")]
        return {"overrides": [*overrides, *small, f"data.path={texts}", "seq_len=16"]}
    model = DECODER
    if name in ("mixture", "sft_demo"):  # their data has settings of its own; `TOKENS` takes its place
        model = [override for override in DECODER if override != "data=random_tokens"]
        model += ["model.vocab_size=257"]
        overrides.append("callbacks.generation_eval=null")
    overrides += [*model, "micro_batch_size=2", "callbacks=[grad_norm,loss_scale]"]
    overrides.append(f"trainer.devices={count_ranks(name)}")
    if "pp_" in name:  # these recipes say how many micro-batches a pipeline takes
        overrides.append("trainer.accumulate_grad_batches=2")
    if name.startswith("hsdp"):
        overrides.append("data_parallel_shard=2")
    if name == "zero3_bf16_nvme":  # DeepSpeed leaves what is smaller than a MiB in memory
        overrides += ["model.hidden_size=512", "model.vocab_size=8192"]
        disk = texts.parent / "disk"
        disk.mkdir()
        overrides.append(f"strategy.nvme_path={disk}")
    return {"overrides": overrides, "data": TOKENS}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return both runs of every recipe, and their folder."""
    texts = write_texts(tmp_path_factory.mktemp("texts"))
    found: dict[str, Any] = {}
    for world_size, names in NUM_RANKS.items():
        if not names:
            continue
        folder = tmp_path_factory.mktemp("recipes")
        cases = {name: _case(name, texts) for name in names}
        group = run_on_ranks(cases, world_size=world_size, folder=folder, worker=WORKER)
        for number, name in enumerate(cases):
            found[name] = group[name] | {"folder": folder / f"results.json.{number}"}
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_resumes_bit_for_bit_from_its_own_checkpoint(name: str, results: dict[str, Any]) -> None:
    result = results[name]
    assert "error" not in result, result["error"]
    uninterrupted, resumed = (
        {key: value for key, value in result[run].items() if key.startswith(COMPUTED)}
        for run in ("uninterrupted", "resumed")
    )
    assert resumed == uninterrupted
    assert result["resumed"]["step"] == 3
    assert {"train/loss", "val/loss", "lr", "train/samples"} <= set(resumed)


@pytest.mark.parametrize("name", RECIPES)
def test_a_checkpoint_of_every_recipe_loads_with_weights_only(name: str, results: dict[str, Any]) -> None:
    folder = results[name]["folder"] / "uninterrupted/checkpoints/step_0000002.ckpt"
    world_size = count_ranks(name)
    shards = [f"rank_{rank:05d}.safetensors" for rank in range(world_size)]
    # nothing else: no file written by an engine, which would hold pickled objects
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", *shards, "run.pt"]
    plain = torch.load(folder / "run.pt", weights_only=True)
    assert plain["global_step"] == 2
    assert plain["consumed"]["samples"] == 8


@pytest.mark.skipif("zero3_bf16_nvme" not in RECIPES, reason="needs libaio")
def test_the_nvme_recipe_swapped_weights_and_optimizer_state_to_disk(
    results: dict[str, Any],
) -> None:
    disk = results["zero3_bf16_nvme"]["folder"].parents[1] / "disk/zero_stage_3"
    swapped = [path for path in disk.rglob("*.swp") if path.stat().st_size]
    assert {path.relative_to(disk).parts[0] for path in swapped} == {"optimizer", "float32params"}
