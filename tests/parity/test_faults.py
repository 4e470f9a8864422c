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
KINDS = ["inputs", "nan_batch", "inf_gradient", "weight"]
# every kind where the step is guarded by other code; where it is inherited, the one that a single rank sees first and
# the one that ends in a rollback. The rest runs in `make test-long`.
FULLY = ("single", "ddp", "fsdp", "deepspeed_stage_2")
INHERITED_KINDS = ("inf_gradient", "weight")
AT = 24


def _case(engine: str, kind: str, world_size: int) -> dict[str, Any]:
    overrides = [override for override in COMMON if not override.startswith(("trainer.max", "callbacks", "eval"))]
    overrides += [
        *DECODER,
        "model=gpt2_nano",
        f"strategy={engine}",
        f"trainer.devices={world_size}",
    ]
    overrides += [
        f"micro_batch_size={8 // world_size}",
        "trainer.max_steps=34",
        "eval_every=34",
        "callbacks=[grad_norm,loss_spike]",
        "callbacks.loss_spike.window=16",
        "callbacks.loss_spike.warmup_steps=8",
        "callbacks.loss_spike.snapshot_every=10",
        "callbacks.loss_spike.quarantine_steps=10",
        "callbacks.loss_spike.norm_threshold=8",  # the damage shows in norms first, and 34 steps are few
    ]
    # only the last rank's gradient
    fault = {"kind": kind, "step": AT, "rank": world_size - 1}
    return {"overrides": overrides, "data": TOKENS, "fault": fault}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _run(tmp_path_factory.mktemp("faults"), lambda engine, kind: not _is_slow(engine, kind))


@pytest.fixture(scope="module")
def long_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _run(tmp_path_factory.mktemp("long_faults"), _is_slow)


def _is_slow(engine: str, kind: str) -> bool:
    return engine not in FULLY and kind not in INHERITED_KINDS


def _run(folder: Path, selects: Callable[[str, str], bool]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for engines, world_size in ((["single"], 1), (ENGINES, 2)):
        cases = {
            f"{engine} {kind}": _case(engine, kind, world_size)
            for engine in engines
            for kind in KINDS
            if selects(engine, kind)
        }
        if cases:
            ranks = folder / f"{world_size}"
            found |= run_on_ranks(cases, world_size=world_size, folder=ranks, worker=WORKER)
    return found


def _get_events(result: dict[str, Any]) -> list[tuple[str, int]]:
    assert "error" not in result, result["error"]
    return [
        (event["event"], event["step"]) for event in result["events"] if event["event"] in ("skip", "rollback", "stop")
    ]


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        pytest.param(engine, kind, marks=[pytest.mark.slow] if _is_slow(engine, kind) else [])
        for engine in ENGINES
        for kind in ("inputs", "nan_batch", "inf_gradient")
    ],
)
def test_a_bad_step_is_skipped_by_every_engine_and_the_curve_is_that_of_one_device(
    engine: str, kind: str, results: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    expected = results[f"single {kind}"]
    if _is_slow(engine, kind):
        found = request.getfixturevalue("long_results")[f"{engine} {kind}"]
    else:
        found = results[f"{engine} {kind}"]
    assert _get_events(found) == _get_events(expected) == [("skip", AT + 1)]
    for row, other in zip(found["rows"], expected["rows"], strict=True):
        if row["step"] == AT + 1:
            continue
        # the tolerance of the parity tests: float32 sums in another order over 34 steps
        assert row["train/loss"] == pytest.approx(other["train/loss"], rel=2e-5)
    norms = [row["grad/norm"] for row in found["rows"]]
    assert norms[AT] > 10 * norms[AT - 1], "the norm of the skipped step, not of the step before"


@pytest.mark.parametrize("engine", ["single", *ENGINES])
def test_a_corrupted_weight_leads_to_a_rollback(engine: str, results: dict[str, Any]) -> None:
    found = results[f"{engine} weight"]
    events = _get_events(found)
    assert ("rollback", 10) in events or ("rollback", 20) in events, events
    assert found["rows"][-1]["train/loss"] < found["rows"][AT - 1]["train/loss"] * 1.05
    assert [row["step"] for row in found["rows"]] == list(range(1, 35))
