"""Every engine handles a fault the same way: the same steps skipped, the same rollback, and training continues."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import COMMON, DECODER, TOKENS
from ranks import run_on_ranks

WORKER = Path(__file__).parent / "fault_ranks.py"
ENGINES = [
    "ddp",
    "fsdp",
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "deepspeed_stage_2_offload",
    "deepspeed_stage_3",
]
FAULTS = ["inputs", "nan_batch", "inf_gradient", "weight"]
# Each of these strategies has a step guard of its own and is tested with every fault. The others inherit one: with the
# fault that a single rank sees first and the one that ends in a rollback; `make test-long` runs the rest.
WITH_OWN_GUARD = ("single", "ddp", "fsdp", "deepspeed_stage_2")
FAULTS_OF_OTHERS = ("inf_gradient", "weight")
FAULT_STEP = 24  # counted from 0; rows and events count completed steps


def _case(engine: str, fault: str, world_size: int) -> dict[str, Any]:
    overrides = [override for override in COMMON if not override.startswith(("trainer.max", "callbacks", "eval"))]
    overrides += [
        *DECODER,
        "model=gpt2_nano",
        f"strategy={engine}",
        f"trainer.devices={world_size}",
    ]
    overrides += [
        # two micro-batches a step where the fault is in one of them
        f"micro_batch_size={(8 if fault == 'nan_batch' else 16) // world_size}",
        "trainer.max_steps=34",
        "eval_every=34",
        "callbacks=[grad_norm,loss_spike]",
        "callbacks.loss_spike.window=16",
        "callbacks.loss_spike.warmup_steps=8",
        "callbacks.loss_spike.snapshot_every=10",
        "callbacks.loss_spike.quarantine_steps=10",
        "callbacks.loss_spike.norm_threshold=8",  # low: norms show the damage first, in only 34 steps
    ]
    # on the last rank only
    where = {"kind": fault, "step": FAULT_STEP, "rank": world_size - 1}
    return {"overrides": overrides, "data": TOKENS, "fault": where}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _run(tmp_path_factory.mktemp("faults"), lambda engine, kind: not _runs_in_long_tests(engine, kind))


@pytest.fixture(scope="module")
def long_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _run(tmp_path_factory.mktemp("long_faults"), _runs_in_long_tests)


def _runs_in_long_tests(engine: str, kind: str) -> bool:
    return engine not in WITH_OWN_GUARD and kind not in FAULTS_OF_OTHERS


def _run(folder: Path, should_run: Callable[[str, str], bool]) -> dict[str, Any]:
    all_results: dict[str, Any] = {}
    for engines, world_size in ((["single"], 1), (ENGINES, 2)):
        cases = {
            f"{engine} {kind}": _case(engine, kind, world_size)
            for engine in engines
            for kind in FAULTS
            if should_run(engine, kind)
        }
        if cases:
            output = folder / f"{world_size}"
            all_results |= run_on_ranks(cases, world_size=world_size, folder=output, worker=WORKER)
    return all_results


def _get_events(result: dict[str, Any]) -> list[tuple[str, int]]:
    assert "error" not in result, result["error"]
    return [
        (event["event"], event["step"]) for event in result["events"] if event["event"] in ("skip", "rollback", "stop")
    ]


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        pytest.param(engine, kind, marks=[pytest.mark.slow] if _runs_in_long_tests(engine, kind) else [])
        for engine in ENGINES
        for kind in ("inputs", "nan_batch", "inf_gradient")
    ],
)
def test_every_engine_skips_a_bad_step_and_its_losses_equal_those_of_one_device(
    engine: str, kind: str, results: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    expected = results[f"single {kind}"]
    if _runs_in_long_tests(engine, kind):
        result = request.getfixturevalue("long_results")[f"{engine} {kind}"]
    else:
        result = results[f"{engine} {kind}"]
    assert _get_events(result) == _get_events(expected) == [("skip", FAULT_STEP + 1)]
    for row, expected_row in zip(result["rows"], expected["rows"], strict=True):
        if row["step"] == FAULT_STEP + 1:
            continue
        # the tolerance of the parity tests: float32 sums are accumulated in a different order over 34 steps
        assert row["train/loss"] == pytest.approx(expected_row["train/loss"], rel=2e-5)
    norms = [row["grad/norm"] for row in result["rows"]]
    assert norms[FAULT_STEP] > 10 * norms[FAULT_STEP - 1], "the skipped step logged the norm of the step before"


@pytest.mark.parametrize("engine", ["single", *ENGINES])
def test_a_corrupted_weight_leads_to_a_rollback(engine: str, results: dict[str, Any]) -> None:
    result = results[f"{engine} weight"]
    events = _get_events(result)
    assert ("rollback", 10) in events or ("rollback", 20) in events, events
    assert result["rows"][-1]["train/loss"] < result["rows"][FAULT_STEP - 1]["train/loss"] * 1.05
    assert [row["step"] for row in result["rows"]] == list(range(1, 35))
