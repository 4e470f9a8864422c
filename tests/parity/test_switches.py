"""Adaptive clipping, averaged weights and regularizers give the same numbers under every engine as on one device."""

from pathlib import Path
from typing import Any

import pytest
from cases import COMMON, DECODER, IS_LONG, TOKENS
from ranks import run_on_ranks

WORKER = Path(__file__).parent / "switch_ranks.py"
ENGINES = ["fsdp", "deepspeed_stage_3", "deepspeed_stage_2_offload"]
ENGINES += ["ddp", "deepspeed_stage_2"] if IS_LONG else []
STEPS = 10


def _case(engine: str, world_size: int) -> dict[str, Any]:
    overrides = [override for override in COMMON if not override.startswith(("trainer.", "eval", "save"))]
    overrides += [
        *DECODER,
        "model=gpt2_nano",
        f"strategy={engine}",
        f"trainer.devices={world_size}",
    ]
    overrides += [
        "trainer.accelerator=cpu",
        f"trainer.max_steps={STEPS}",
        f"eval_every={STEPS}",
        f"save_every={STEPS // 2}",
        f"micro_batch_size={8 // world_size}",
        "trainer.gradient_clip_val=null",
        "clipping=zclip",
        "clipping.warmup_steps=3",
        "clipping.z_score=0.5",
        "ema_decay=0.9",
        "label_smoothing=0.1",
        "z_loss=0.001",
    ]
    return {"overrides": overrides, "data": TOKENS, "half": STEPS // 2}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for engines, world_size in ((["single"], 1), (ENGINES, 2)):
        cases = {engine: _case(engine, world_size) for engine in engines}
        folder = tmp_path_factory.mktemp("switches")
        found |= run_on_ranks(cases, world_size=world_size, folder=folder, worker=WORKER)
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_clips_averages_and_regularizes_as_one_device(engine: str, results: dict[str, Any]) -> None:
    found, expected = results[engine], results["single"]
    for result in (found, expected):
        assert "error" not in result, result["error"]
    for row, other in zip(found["rows"], expected["rows"], strict=True):
        for name in ("train/loss", "grad/norm", "grad/clip_threshold"):
            # float32 sums in another order over 10 steps, as in the parity tests
            assert row[name] == pytest.approx(other[name], rel=3e-5), (row["step"], name)
    assert any(row["grad/clip_threshold"] < row["grad/norm"] for row in expected["rows"])
    # weights of about 0.02 that have moved by up to 10 x 1e-3
    assert found["average"] == pytest.approx(expected["average"], rel=1e-4, abs=2e-6)
    assert found["average"] != pytest.approx(found["weights"], rel=1e-3)


@pytest.mark.parametrize("engine", ["single", *ENGINES])
def test_a_resume_restores_clipping_and_averaged_weights_bit_for_bit(engine: str, results: dict[str, Any]) -> None:
    result = results[engine]
    assert result["resumed average"] == result["average"]
    computed = ("train/", "grad/", "val/")
    expected, found = (
        {name: value for name, value in rows[-1].items() if name.startswith(computed)}
        for rows in (result["rows"], result["resumed rows"])
    )
    found.pop("grad/clipped_fraction", None)
    expected.pop("grad/clipped_fraction", None)
    assert found == expected


def test_the_logged_loss_excludes_the_regularizers(results: dict[str, Any]) -> None:
    first = results["single"]["rows"][0]
    # ln 64 = 4.16 for an untrained model; the z-loss alone would add 0.001 x 4.16^2 = 0.017
    assert first["train/loss"] == pytest.approx(4.159, abs=0.012)
