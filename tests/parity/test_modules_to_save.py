"""A projector trained in full beside an adapter: one curve on every engine, and a resume to the bit from both alone."""

from pathlib import Path
from typing import Any

import pytest
from cases import COMMON, ENGINES, GLOBAL_BATCH_SIZE, IS_LONG
from ranks import run_on_ranks
from vision_language_cases import write_llava

from recipes.adapter import is_adapter
from recipes.checkpoint.saved_tensor import open_tensors

RESUME = Path(__file__).parent / "resume_ranks.py"
SEQ_LEN = 32
ON_TWO = ["fsdp", "ZeRO-3", *(["ddp", "ZeRO-1", "ZeRO-2", "ZeRO-3, offload"] if IS_LONG else [])]
PROJECTOR = "model.inner.model.multi_modal_projector."


def make_case(strategy: str, *, world_size: int, folder: Path) -> dict[str, Any]:
    return {
        "overrides": [
            *("model=llava", f"model.name={folder}", "model.pretrained=null", f"model.max_seq_len={SEQ_LEN}"),
            *("data=random_tokens", "tokenizer=none", "adapter=lora", "adapter.r=4"),
            *("adapter.modules_to_save=[multi_modal_projector]", "optimizer.lr=1e-2"),
            *(each for each in COMMON if not each.startswith(("trainer.max_steps", "eval_every", "save_every"))),
            *("trainer.max_steps=3", "save_every=2", "eval_every=3"),
            *ENGINES[strategy],
            f"micro_batch_size={GLOBAL_BATCH_SIZE // 2 // world_size}",
            f"trainer.devices={world_size}",
        ],
        "data": {"_target_": "vision_language_cases.Illustrated", "num_samples": 50, "seq_len": SEQ_LEN},
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results by strategy, each with the folder of its runs."""
    model = write_llava(tmp_path_factory.mktemp("llava"))
    found: dict[str, Any] = {}
    for size, strategies in ((1, ["single"]), (2, ON_TWO)):
        folder = tmp_path_factory.mktemp("runs")
        cases = {name: make_case(name, world_size=size, folder=model) for name in strategies}
        of_size = run_on_ranks(cases, world_size=size, folder=folder, worker=RESUME)
        found |= {name: of_size[name] | {"folder": folder / f"results.json.{n}"} for n, name in enumerate(cases)}
    return found


def test_the_curve_is_that_of_one_device(results: dict[str, Any]) -> None:
    for name, result in results.items():
        assert "error" not in result, (name, result["error"])
    expected = results["single"]["uninterrupted"]
    for name, result in results.items():
        for key, tolerance in (("train/loss", 1e-5), ("grad/norm", 1e-4), ("val/loss", 1e-5)):  # sums in another order
            assert result["uninterrupted"][key] == pytest.approx(expected[key], rel=tolerance), (name, key)


@pytest.mark.parametrize("name", ["single", *ON_TWO])
def test_a_run_goes_on_to_the_bit_from_the_adapter_and_the_projector(name: str, results: dict[str, Any]) -> None:
    result = results[name]
    assert "error" not in result, result["error"]
    for key in ("train/loss", "grad/norm", "val/loss"):
        assert result["resumed"][key] == result["uninterrupted"][key], key
    checkpoint = result["folder"] / "uninterrupted/checkpoints/step_0000002.ckpt"
    saved = {key for key in open_tensors(checkpoint.glob("rank_*.safetensors")) if key.startswith("model.")}
    beside = {key for key in saved if not is_adapter(key)}
    parts = ("linear_1.bias", "linear_1.weight", "linear_2.bias", "linear_2.weight")
    assert beside == {f"{PROJECTOR}{part}" for part in parts}
    assert len(saved - beside) == 2 * 2 * 7, "two matrices of seven layers of two blocks of the language model"
