"""Every engine handles a fault the same way: the same steps skipped, the same rollback, and training continues."""

from pathlib import Path
from typing import Any

import pytest
from cases import COMMON, DECODER, IS_LONG, TOKENS
from ranks import run_on_ranks

WORKER = Path(__file__).parent / "fault_ranks.py"
ENGINES = [
    "fsdp",
    "deepspeed_stage_3",
    *(["ddp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_2_offload"] if IS_LONG else []),
]
# One run meets these, two steps apart; the two micro-batches of a step differ in whether the fault is in them.
SKIPPED = {"inputs": 12, "nan_batch": 14, "inf_gradient": 16}  # counted from 0; rows and events count completed steps
WEIGHT_STEP = 24


def _case(engine: str, faults: dict[str, int], world_size: int, *, max_steps: int, accumulate: int) -> dict[str, Any]:
    overrides = [override for override in COMMON if not override.startswith(("trainer.max", "callbacks", "eval"))]
    overrides += [
        *DECODER,
        "model=gpt2_nano",
        f"strategy={engine}",
        f"trainer.devices={world_size}",
        f"micro_batch_size={16 // world_size // accumulate}",
        f"trainer.max_steps={max_steps}",
        f"eval_every={max_steps}",
        "callbacks=[grad_norm,loss_spike]",
        "callbacks.loss_spike.window=16",
        "callbacks.loss_spike.warmup_steps=8",
        "callbacks.loss_spike.snapshot_every=10",
        "callbacks.loss_spike.quarantine_steps=10",
        "callbacks.loss_spike.norm_threshold=8",  # low: norms show the damage first, in few steps
    ]
    # on the last rank only
    where = [{"kind": kind, "step": step, "rank": world_size - 1} for kind, step in faults.items()]
    return {"overrides": overrides, "data": TOKENS, "faults": where}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for engines, world_size in ((["single"], 1), (ENGINES, 2)):
        cases = {engine: _case(engine, SKIPPED, world_size, max_steps=18, accumulate=2) for engine in engines}
        weight = {"weight": WEIGHT_STEP}
        cases |= {
            f"{engine} weight": _case(engine, weight, world_size, max_steps=34, accumulate=1) for engine in engines
        }
        folder = tmp_path_factory.mktemp("faults")
        found |= run_on_ranks(cases, world_size=world_size, folder=folder, worker=WORKER)
    for result in found.values():
        assert "error" not in result, result["error"]
    return found


def _get_events(result: dict[str, Any]) -> list[tuple[str, int]]:
    kinds = ("skip", "rollback", "stop")
    return [(event["event"], event["step"]) for event in result["events"] if event["event"] in kinds]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_skips_the_bad_steps_and_its_losses_equal_those_of_one_device(
    engine: str, results: dict[str, Any]
) -> None:
    result, expected = results[engine], results["single"]
    assert _get_events(result) == _get_events(expected) == [("skip", step + 1) for step in SKIPPED.values()]
    for row, expected_row in zip(result["rows"], expected["rows"], strict=True):
        if row["step"] - 1 not in SKIPPED.values():
            # the tolerance of the parity tests: float32 sums are accumulated in a different order over 18 steps
            assert row["train/loss"] == pytest.approx(expected_row["train/loss"], rel=2e-5)
    norms = [row["grad/norm"] for row in result["rows"]]
    for step in SKIPPED.values():
        # infinity or not a number: a norm that is not finite is above any multiple
        assert not norms[step] <= 10 * norms[step - 1], "the skipped step logged the norm of the step before"


@pytest.mark.parametrize("engine", ["single", *ENGINES])
def test_a_corrupted_weight_leads_to_a_rollback(engine: str, results: dict[str, Any]) -> None:
    result = results[f"{engine} weight"]
    events = _get_events(result)
    assert ("rollback", 10) in events or ("rollback", 20) in events, events
    assert result["rows"][-1]["train/loss"] < result["rows"][WEIGHT_STEP - 1]["train/loss"] * 1.05
    assert [row["step"] for row in result["rows"]] == list(range(1, 35))
