"""Reinforcement learning has one curve and one set of sampled tokens, whatever the engine and the split."""

import json
from pathlib import Path
from typing import Any

import pytest
from cases import COMMON, DECODER, ENGINES, IS_LONG, NUM_STEPS, count_data_ranks
from ranks import run_on_ranks
from reward_models import make_reward_model

SECONDS = 3000.0 if IS_LONG else 580.0
pytestmark = pytest.mark.timeout(1.2 * SECONDS)

GENERATIONS = 4
REUSED = ("rollout.num_iterations=2", "loss.epsilon=0.001", "optimizer.lr=1e-2")  # so that ratios are clipped
KINDS: dict[str, tuple[str, ...]] = {
    "dapo": (),
    "grpo": ("loss.kind=grpo", "loss.beta=0.1", "loss.mask_truncated=true"),
    "dr_grpo": ("loss.kind=dr_grpo", "loss.scale_rewards=none", "loss.baseline=leave_one_out"),
    "gspo": ("loss.kind=gspo", "loss.scale_rewards=batch", *REUSED),
    "reused": (*REUSED, "loss.beta=0.1", "loss.importance=token_truncate"),
    "ppo": ("task=actor_critic", *REUSED, "loss.kl_target=0.1", "loss.kl_horizon=100", "loss.entropy_weight=0.01"),
    "critic": ("task=actor_critic", "task.value=model", *REUSED, "loss.kl_weight=0.1"),
    "judged": ("reward=[model,mine]", "reward.model.weight=0.1", "reward.model.pretrained={judge}"),
    "cut": ("rollout.top_p=0.9", "rollout.temperature=0.7", "loss.baseline=batch", "loss.scale_rewards=batch"),
}
ON_TWO = ("ddp", "fsdp", "ZeRO-1", "ZeRO-2", "ZeRO-3", "tp2")
NOT_BESIDE_A_COPY = ("ZeRO-3", "tp2")  # refused
WITH_A_COPY = ("loss.beta=0.1", "task=actor_critic")
SPLITS = (1, 2, 4)
# a hash of the text: the mean over all completions is the same only if all of them are, byte by byte
REWARD = """
import zlib


def score(prompts, completions, references, rows):
    given = zip(prompts, completions, rows, strict=True)
    return [zlib.crc32(f"{prompt} {text} {row['number']}".encode()) % 1000 / 1000 for prompt, text, row in given]
"""


def make_files(folder: Path) -> dict[str, Any]:
    """Write 23 prompts of 2 to 7 letters and a reward, and return the data node that reads the prompts."""
    folder.mkdir(exist_ok=True)
    rows = [{"prompt": "abcdefgh"[: 1 + row % 6] + ">", "number": row} for row in range(23)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARD)
    return {
        "_target_": "recipes.data.prompts.Prompts",
        "path": str(folder / "prompts.jsonl"),
        "fields": {},
        "chat_template": "auto",
        "val_path": None,
        "val_fraction": 0.3,
        "split": "train",
        "num_generations": GENERATIONS,
        "max_new_tokens": 9,
        "global_batch_size": 16,
        "tokenizer": {"_target_": "recipes.tokenizer.bytes.Bytes"},
        "seq_len": 24,
        "vocab_size": 257,
        "cache_dir": str(folder / "cache"),
    }


def make_case(kind: str, engine: str, folder: Path, *, judge: Path, accumulate: int, world_size: int) -> dict[str, Any]:
    data = make_files(folder)
    size = 16 // accumulate // count_data_ranks(ENGINES[engine], world_size)
    kept = [override for override in DECODER if override.partition("=")[0] not in ("data", "model.vocab_size")]
    return {
        "overrides": [
            *kept,
            *("model=gpt2_nano", "model.vocab_size=257", "model.max_seq_len=24", "tokenizer=bytes"),
            *("task=policy", f"data.path={folder}/prompts.jsonl", "rollout.max_new_tokens=9"),
            *(f"rollout.num_generations={GENERATIONS}", "reward=mine", f"reward.mine.path={folder}/rewards.py:score"),
            *(override for override in COMMON if not override.startswith("eval_samples")),
            *(
                "eval_samples=null",
                "trainer.gradient_clip_val=0.05",
                "callbacks=[grad_norm,loss_scale,generation_eval]",
            ),
            *("callbacks.generation_eval.num_samples=5", "callbacks.generation_eval.max_new_tokens=4"),
            *(override.format(judge=judge) for override in KINDS[kind]),
            *ENGINES[engine],
            *(f"micro_batch_size={size}", f"trainer.devices={world_size}"),
        ],
        "data": data | {"num_iterations": 2 if "rollout.num_iterations=2" in KINDS[kind] else 1},
    }


def make_cases(folder: Path, *, world_size: int) -> dict[str, Any]:
    """Return the cases of a number of ranks by (kind, engine, micro-batches)."""
    engines = ("single",) if world_size == 1 else ON_TWO
    names = [
        (kind, engine, accumulate)
        for kind in KINDS
        for engine in engines
        for accumulate in SPLITS
        if not ({*WITH_A_COPY} & {*KINDS[kind]} and engine in NOT_BESIDE_A_COPY)
    ]
    if not IS_LONG and world_size == 1:
        names = [name for name in names if name[2] == 1 or name[0] in ("dapo", "reused", "ppo")]
    elif not IS_LONG:
        short = {
            *(("dapo", engine, 1) for engine in ON_TWO),
            *(("grpo", "fsdp", 2), ("grpo", "ZeRO-2", 1), ("dr_grpo", "ddp", 2), ("gspo", "ZeRO-3", 2)),
            *(("reused", "ddp", 1), ("reused", "fsdp", 2), ("cut", "tp2", 2), ("cut", "fsdp", 4)),
            *(("critic", "ddp", 2), ("critic", "fsdp", 1), ("critic", "fsdp", 2), ("critic", "ZeRO-2", 2)),
            *(("judged", "fsdp", 1), ("judged", "ZeRO-3", 1), ("judged", "tp2", 1)),
            *(("ppo", "ddp", 2), ("ppo", "fsdp", 1), ("ppo", "ZeRO-2", 2)),
        }
        names = [name for name in names if name in short]
    sizes = {"judge": make_reward_model(folder / "judge")[1], "world_size": world_size}
    return {json.dumps(name): make_case(*name[:2], folder, accumulate=name[2], **sizes) for name in names}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, ...], list[dict[str, float]]]:
    """Return the rows of each case by (kind, engine, micro-batches)."""
    found: dict[tuple[Any, ...], Any] = {}
    for world_size in (1, 2):
        folder = tmp_path_factory.mktemp(f"of_{world_size}")
        cases = make_cases(folder / "files", world_size=world_size)
        for name, result in run_on_ranks(cases, world_size=world_size, folder=folder, timeout_seconds=SECONDS).items():
            assert "error" not in result, f"{name}: {result['error']}"
            found[tuple(json.loads(name))] = result["rows"]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_engine_and_split_has_the_tokens_and_the_curve_of_one_device(
    kind: str, results: dict[tuple[Any, ...], list[dict[str, float]]]
) -> None:
    compared = 0
    reference = results[kind, "single", 1]
    for (of, engine, accumulate), rows in results.items():
        if of != kind or (engine, accumulate) == ("single", 1):
            continue
        assert len(rows) == len(reference) == NUM_STEPS
        for row, expected in zip(rows, reference, strict=True):
            sampled = [name for name in expected if name.startswith(("reward/", "rollout/to")) and "second" not in name]
            sampled = [name for name in sampled if "time" not in name]
            # the score of a model depends on the rows beside it in the last digit
            wanted = {name: expected[name] for name in sampled}
            wanted = pytest.approx(wanted, abs=1e-6) if kind == "judged" else wanted
            assert {name: row[name] for name in sampled} == wanted, (engine, row)
            for name in {"policy/kl", "policy/kl_weight", "value/loss", "value/explained_variance"} & expected.keys():
                assert row[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), (name, engine)
            # float32: other orders of the same sums; the loss is a sum of numbers of both signs that nearly cancel
            assert row["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-5, abs=1e-6), (engine, accumulate)
            assert row["grad/norm"] == pytest.approx(expected["grad/norm"], rel=1e-5), (engine, accumulate)
            if kind == "cut":
                assert row["rollout/logprob_gap"] > 0.01, "what top_p leaves out is a part of it"
            else:
                assert row["rollout/logprob_gap"] < 1e-6
        last, expected = rows[-1], reference[-1]
        tolerance = 1e-6 if kind == "judged" else 0.0
        assert last["val/reward"] == pytest.approx(expected["val/reward"], abs=tolerance, rel=0), (engine, accumulate)
        compared += 1
    assert compared >= 1


def test_completions_that_are_used_twice_are_clipped_only_the_second_time(
    results: dict[tuple[Any, ...], list[dict[str, float]]],
) -> None:
    rows = results["reused", "single", 1]
    assert [row["reward/mean"] for row in rows[0::2]] == [row["reward/mean"] for row in rows[1::2]], "sampled once"
    assert len({row["reward/mean"] for row in rows[0::2]}) == len(rows[0::2]), "and then anew"
    assert all(row["policy/clipped_fraction"] == 0 for row in rows[0::2]), "a ratio of 1"
    assert all(row["policy/clipped_fraction"] > 0 for row in rows[1::2])
