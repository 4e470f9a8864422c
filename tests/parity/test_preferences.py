"""Preference losses have one curve, whatever the engine, the split and the reference: answers of uneven lengths."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from cases import COMMON, DECODER, ENGINES, IS_LONG, NUM_STEPS, count_data_ranks
from ranks import run_on_ranks

SECONDS = 3000.0 if IS_LONG else 580.0  # twenty steps of 231 cases are 25 minutes on two cores
pytestmark = pytest.mark.timeout(1.2 * SECONDS)

LOSSES = ("dpo", "orpo", "simpo", "kto", "nll", "copy", "reward", "untied")
ON_TWO = ("ddp", "fsdp", "ZeRO-1", "ZeRO-2", "ZeRO-3", "tp2")
SPLITS = (1, 2, 4)
ROLLBACK = Path(__file__).parent / "rollback_ranks.py"
NOT_BESIDE_A_COPY = ("ZeRO-3", "tp2")  # refused
WITHOUT_REFERENCE = ("orpo", "simpo")
REWARD = ("task=reward", "loss.center_rewards_coefficient=0.01")
PACKED = " packed"  # after the name of a loss whose answers share rows
TASKS: dict[str, tuple[str, ...]] = {  # of losses that have not the name of their option
    "nll": ("task=preference", "loss=dpo", "loss.nll_weight=0.5", "loss.beta=0.5"),
    "copy": ("task=preference", "loss=dpo", "task.reference=frozen_copy"),
    "reward": REWARD,
    "untied": (*REWARD, "model.tie_embeddings=false"),
}
# Adam makes a step of the full rate of a gradient about its eps, of which rounding is a large part: at 1e-8 the norm of
# SimPO with LoRA differs by 1.1e-5 between 1 and 4 micro-batches of one device, and by 2e-6 where the first weights do
# by 6e-8; at 1e-6 by 4e-7
WITH_LORA = {"simpo": ("optimizer.eps=1e-6",)}


def make_data(loss: str, folder: Path) -> dict[str, Any]:
    """Write 61 rows whose answers have 1 to 9 letters, and return the data node that reads them."""
    folder.mkdir(exist_ok=True)
    packing, loss = loss.endswith(PACKED), loss.removesuffix(PACKED)
    kind, path = "answers" if loss == "kto" else "pairs", folder / f"{loss}.jsonl"
    words = ["".join(chr(97 + (7 * row + 3 * place) % 26) for place in range(1 + row % 9)) for row in range(61)]
    rows: list[dict[str, Any]] = []
    for row, word in enumerate(words):
        prompt = f"{word[::-1]}{row}>"
        if loss == "kto":
            rows.append({"prompt": prompt, "completion": word, "label": row % 3 != 0})
        else:
            rows.append({"prompt": prompt, "chosen": word, "rejected": word[: 1 + row % 4] + "zz" * (row % 3) + "!"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "_target_": "recipes.data.preferences.Preferences",
        "path": str(path),
        "kind": kind,
        "fields": {},
        "packing": packing,
        "chat_template": "auto",
        "val_path": None,
        "val_fraction": 0.3,
        "split": "train",
        "tokenizer": {"_target_": "recipes.tokenizer.bytes.Bytes"},
        "seq_len": 24,
        "vocab_size": 257,
        "cache_dir": str(folder / "data"),
    }


def make_case(
    loss: str, engine: str, folder: Path, *, accumulate: int, world_size: int, adapter: bool = False
) -> dict[str, Any]:
    name = f"{loss}-{engine}-{accumulate}-{adapter}".replace(" ", "").replace(",", "")
    data = make_data(loss, folder)
    loss = loss.removesuffix(PACKED)
    size = 16 // accumulate // count_data_ranks(ENGINES[engine], world_size)
    kept = [override for override in DECODER if override.partition("=")[0] not in ("data", "model.vocab_size")]
    return {
        "overrides": [
            *kept,
            *("model=gpt2_nano", "model.vocab_size=257", "model.max_seq_len=24", "tokenizer=bytes"),
            f"data.path={folder / loss}.jsonl",
            *TASKS.get(loss, ("task=preference", f"task.cache_dir={folder / name}", f"loss={loss}")),
            *(("data.kind=answers",) if loss == "kto" else ()),
            *(("adapter=lora", "adapter.r=4", *WITH_LORA.get(loss, ())) if adapter else ()),
            *(override for override in COMMON if not override.startswith("eval_samples")),
            *("eval_samples=null", "trainer.gradient_clip_val=0.05"),
            *ENGINES[engine],
            *(f"micro_batch_size={size}", f"trainer.devices={world_size}"),
        ],
        "data": data,
    }


def make_cases(folder: Path, *, world_size: int) -> dict[str, Any]:
    """Return the cases of a number of ranks by (loss, engine, micro-batches, adapter)."""
    engines = ("single",) if world_size == 1 else ON_TWO
    names = [
        (loss, engine, accumulate, adapter)
        for loss in (*LOSSES, *(f"{loss}{PACKED}" for loss in LOSSES))
        for engine in engines
        for accumulate in SPLITS
        for adapter in (False, True)
        if not (adapter and engine == "tp2")  # refused
        and not (loss.startswith("copy") and (adapter or engine in NOT_BESIDE_A_COPY))
    ]
    if not IS_LONG and world_size == 1:
        names = [name for name in names if name[2] == 1 or (name[2] == 4 and not name[3])]
        names = [name for name in names if PACKED not in name[0] or name[2:] == (1, False)]
    elif not IS_LONG:
        short = {
            *(("dpo", engine, 1, False) for engine in ON_TWO),
            *(("kto", engine, 2, False) for engine in ("ddp", "fsdp", "ZeRO-3")),
            *(("orpo", engine, 2, False) for engine in ("fsdp", "ZeRO-2")),
            *(("dpo", engine, 2, True) for engine in ("fsdp", "ZeRO-2")),
            *(("copy", engine, 2, False) for engine in ("ddp", "fsdp", "ZeRO-1", "ZeRO-2")),
            *(("simpo", "ddp", 2, False), ("kto", "fsdp", 1, True), ("nll", "fsdp", 2, False)),
            *(("reward", "tp2", 1, False), ("reward", "ZeRO-3", 2, False), ("reward", "fsdp", 2, True)),
            *(("untied", "ddp", 1, False), ("untied", "fsdp", 2, False), ("untied", "ZeRO-2", 1, True)),
            *((f"dpo{PACKED}", "tp2", 1, False), (f"orpo{PACKED}", "ZeRO-3", 2, False)),
            *((f"kto{PACKED}", "ddp", 2, False), (f"nll{PACKED}", "ZeRO-2", 1, False)),
            *((f"reward{PACKED}", "fsdp", 1, False), (f"reward{PACKED}", "ddp", 2, True)),
        }
        names = [name for name in names if name in short]
    return {
        json.dumps(name): make_case(*name[:2], folder, accumulate=name[2], world_size=world_size, adapter=name[3])
        for name in names
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, ...], list[dict[str, float]]]:
    """Return the rows of each case by (loss, engine, micro-batches, adapter)."""
    found: dict[tuple[Any, ...], Any] = {}
    for world_size in (1, 2):
        folder = tmp_path_factory.mktemp(f"of_{world_size}")
        cases = make_cases(folder / "files", world_size=world_size)
        for name, result in run_on_ranks(cases, world_size=world_size, folder=folder, timeout_seconds=SECONDS).items():
            assert "error" not in result, f"{name}: {result['error']}"
            found[tuple(json.loads(name))] = result["rows"]
    return found


@pytest.mark.parametrize("loss", LOSSES)
def test_every_engine_and_split_has_the_curve_of_one_device(
    loss: str, results: dict[tuple[Any, ...], list[dict[str, float]]]
) -> None:
    compared = 0
    for (of, engine, accumulate, adapter), rows in results.items():
        if of.removesuffix(PACKED) != loss or (of, engine, accumulate) == (loss, "single", 1):
            continue
        reference = results[loss, "single", 1, adapter]
        assert len(rows) == len(reference) == NUM_STEPS
        for row, expected in zip(rows, reference, strict=True):
            for name in ("train/loss", "grad/norm"):
                # float32: other orders of the same sums, relative to the size of the loss
                assert row[name] == pytest.approx(expected[name], rel=1e-5), (of, engine, accumulate, adapter, name)
            for name in expected:
                if name.startswith(("train/chosen", "train/rejected", "train/kl", "train/margin")):
                    assert row[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), (of, engine, name)
        last, expected = rows[-1], reference[-1]
        assert last["val/loss"] == pytest.approx(expected["val/loss"], rel=1e-5), (of, engine, accumulate, adapter)
        compared += 1
    assert compared >= 2


def test_a_frozen_copy_has_the_curve_of_a_precomputed_reference(
    results: dict[tuple[Any, ...], list[dict[str, float]]],
) -> None:
    expected = results["dpo", "single", 1, False]
    for (loss, engine, accumulate, _), rows in results.items():
        if loss == "copy":
            for row, reference in zip(rows, expected, strict=True):
                for name in ("train/loss", "grad/norm"):
                    # float32: sums in another order
                    assert row[name] == pytest.approx(reference[name], rel=2e-6), (engine, accumulate, name)


def test_steps_that_are_repeated_after_a_rollback_have_the_losses_of_the_same_copy(tmp_path: Path) -> None:
    at, to, last = 9, 4, 11
    case = make_case("copy", "single", tmp_path / "files", accumulate=1, world_size=1)
    kept = [each for each in case["overrides"] if not each.startswith(("trainer.max_steps", "save_every", "callbacks"))]
    steps = [f"trainer.max_steps={last}", f"save_every={to}", "callbacks=[grad_norm,loss_scale]"]
    case |= {"overrides": [*kept, *steps], "at": at, "to": to, "arguments": {}, "reads_state": False}
    [result] = run_on_ranks({"copy": case}, world_size=1, folder=tmp_path, worker=ROLLBACK).values()
    assert "error" not in result, result["error"]
    losses = result["losses"]
    assert [step for step, _ in losses] == [*range(1, at + 1), *range(to + 1, last + 1)]
    assert losses[to:at] == losses[at : at + at - to], "to the bit"


@pytest.mark.parametrize("adapter", [False, True])
def test_dpo_begins_at_ln_2_with_rewards_of_zero(
    adapter: bool, results: dict[tuple[Any, ...], list[dict[str, float]]]
) -> None:
    for (loss, engine, *_, of_adapter), rows in results.items():
        if loss == "dpo" and of_adapter is adapter:
            assert rows[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6), engine
            assert rows[0]["train/chosen_reward"] == pytest.approx(0, abs=1e-6), engine
            assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 1e-3, "and it learns"
