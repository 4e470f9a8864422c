"""Reinforcement learning in a run: what it samples, goes on with and logs, and rewards that fail."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import execute, read_metrics

from recipes.checkpoint.saved_tensor import open_tensors
from recipes.data.packed_batch import plan_branches
from recipes.generation import Completion
from recipes.numerics.loss import IGNORE_INDEX
from recipes.task import policy
from recipes.task.policy import PolicyTuning, _stack
from recipes.tokenizer.bytes import byte_tokenizer

SMALL = (
    *("tokenizer=bytes", "model=gpt2_nano", "model.vocab_size=257", "model.max_seq_len=24", "model.num_layers=2"),
    *("model.num_heads=2", "model.hidden_size=32", "global_batch_size=16", "optimizer.lr=1e-2", "seed=5"),
    *("trainer.accelerator=cpu", "callbacks=[grad_norm,loss_scale,generation_eval,completions]", "log_every=1"),
    *("callbacks.completions.every_n_steps=1", "callbacks.completions.num_completions=16", "warmup_steps=0"),
    *("callbacks.generation_eval.num_samples=4", "callbacks.generation_eval.max_new_tokens=3"),
    *("rollout.num_generations=4", "rollout.max_new_tokens=6", "reward=mine"),
)
REWARDS = """
import os
import time
import zlib


def by_hash(prompts, completions, references, rows):
    return [zlib.crc32(text.encode()) % 100 / 100 for text in completions]


def letters(prompts, completions, references, rows):
    return [sum(letter.isascii() and letter.isalpha() for letter in text) / 6 for text in completions]


def same(prompts, completions, references, rows):
    return [0.1 for _ in completions]


def hangs_at_an_a(prompts, completions, references, rows):
    if any("a" in text for text in completions):
        time.sleep(3600)
    return [1.0 for _ in completions]


def dies_at_an_a(prompts, completions, references, rows):
    if any("a" in text for text in completions):
        os._exit(3)
    return [1.0 for _ in completions]


def raises_at_an_a(prompts, completions, references, rows):
    return [float(text.index("a") < 0) if "a" in text and 1 / 0 else 1.0 for text in completions]
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    rows = [{"prompt": "abcdefgh"[: 1 + row % 8] + f"{row}>", "answer": "xy"} for row in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def train(files: Path, folder: Path, *more: str, reward: str = "by_hash", steps: int = 6) -> list[dict[str, float]]:
    places = [f"data.path={files / 'prompts.jsonl'}", f"data.cache_dir={files / 'cache'}", f"hydra.run.dir={folder}"]
    lengths = [
        f"trainer.max_steps={steps}",
        "eval_every=3",
        "save_every=1",
        f"reward.mine.path={files}/rewards.py:{reward}",
    ]
    assert execute("recipe=grpo", *SMALL, *places, *lengths, *more) == 0
    return read_metrics(folder)


def resume(folder: Path, files: Path, *more: str, reward: str = "by_hash") -> None:
    assert execute(f"resume={folder}", f"++reward.mine.path={files}/rewards.py:{reward}", *more) == 0


def without_times(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    kept = ("step", "lr", "train/", "val/", "grad/", "reward/", "rollout/", "policy/")
    timed = ("/time_fraction", "_per_second")
    return [
        {name: value for name, value in row.items() if name.startswith(kept) and not name.endswith(timed)}
        for row in rows
    ]


def read_completions(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    saved = open_tensors((folder / "checkpoints/last").glob("*.safetensors"))
    return {name: tensor.read() for name, tensor in saved.items() if not name.startswith("optimizer/")}


PPO = ("recipe=ppo", "rollout.num_iterations=3", "loss.epsilon=0.01", "loss.kl_target=0.2", "loss.kl_horizon=50")
REUSED = ("rollout.num_iterations=3", "loss.epsilon=0.01", "loss.beta=0.1")


KINDS = {"once": (), "reused": REUSED, "ppo": PPO}


@pytest.fixture(scope="module")
def whole(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the folder of a run of six steps of a kind, which is made once."""

    @functools.cache
    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind) / "whole"
        train(files, folder, *KINDS[kind])
        return folder

    return make


# after the third step the reused completions are used up, after the fourth they are not
@pytest.mark.parametrize(("kind", "at"), [("once", 4), ("reused", 3), ("reused", 4), ("ppo", 3), ("ppo", 4)])
def test_a_run_stopped_between_two_steps_has_the_tokens_and_losses_of_a_whole_one(
    kind: str, at: int, whole: Callable[[str], Path], files: Path, tmp_path: Path
) -> None:
    expected_rows = without_times(read_metrics(whole(kind)))
    train(files, tmp_path / "parted", *KINDS[kind], steps=at)
    resume(tmp_path / "parted", files, "trainer.max_steps=6")
    resumed = without_times(read_metrics(tmp_path / "parted"))
    skipped = {name for name in resumed[at - 1] if name.startswith("val/")}  # validated because it ended there
    for row, expected in zip(resumed, expected_rows, strict=True):
        assert {name: value for name, value in row.items() if name not in skipped} == {
            name: value for name, value in expected.items() if name not in skipped
        }, "to the last digit that is logged"
    sampled = {row["step"]: row for row in read_completions(whole(kind))}
    assert {row["step"]: row for row in read_completions(tmp_path / "parted")} == sampled


@pytest.mark.parametrize("reward", ["hangs_at_an_a", "dies_at_an_a", "raises_at_an_a"])
def test_a_reward_that_fails_for_some_completions_costs_these_alone(
    reward: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = train(files, tmp_path / "run", "task.rewards.timeout_seconds=2", "seed=3", reward=reward, steps=4)
    sampled = read_completions(tmp_path / "run")
    failed = [row for row in sampled if "a" in row["completion"]]
    assert 0 < len(failed) < len(sampled), "some completions have the letter"
    assert {row["reward"] for row in failed} == {0.0}
    assert {row["reward"] for row in sampled if row not in failed} == {1.0}
    assert sum(row["reward/errors"] for row in rows) == len(failed)
    assert "called for each completion alone" in capsys.readouterr().out


@pytest.fixture(scope="module")
def equal(
    files: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, float]], list[tuple[int, int]], Path]:
    """Return the rows of a run whose completions all have one reward, the widths of its batches, and its folder."""
    widths: list[tuple[int, int]] = []
    folder = tmp_path_factory.mktemp("equal") / "run"
    look = PolicyTuning._look

    def noting(task: PolicyTuning, model: Any, batch: Any, **settings: Any) -> Any:
        widths.append((batch["inputs"].shape[1], int(batch["num_inputs"].max())))
        return look(task, model, batch, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PolicyTuning, "_look", noting)
        rows = train(files, folder, "model.max_seq_len=64", "seq_len=64", reward="same", steps=2)
    return rows, widths, folder


def test_rows_of_an_eager_run_on_a_cpu_have_no_column_that_all_pad(equal: Any) -> None:
    _, widths, _ = equal
    assert widths
    assert all(width == longest for width, longest in widths), widths


def test_prompts_that_are_read_once_for_their_completions_give_the_numbers_of_rows_read_apart(
    whole: Callable[[str], Path], files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Any] = []
    monkeypatch.setattr(policy, "plan_branches", lambda *rows, **sizes: plans.append(plan_branches(*rows, **sizes)))
    apart = without_times(train(files, tmp_path / "run", *REUSED))
    read = [plan["cells"].numel() for plan in plans if plan is not None]
    assert len(read) == len(plans) == 2 + 6, "of two rollouts, and of six steps"
    assert max(read) < 0.8 * 16 * min(plan["places"].shape[1] - 1 for plan in plans)
    for row, expected in zip(without_times(read_metrics(whole("reused"))), apart, strict=True):
        sampled = [name for name in expected if name.startswith(("reward/", "rollout/t"))]
        assert {name: row[name] for name in sampled} == {name: expected[name] for name in sampled}
        # at a learning rate of 0.01, five steps make a hundred times of the last digit
        assert row == pytest.approx(expected, rel=1e-6 if row["step"] == 1 else 1e-3, abs=2e-7)


def test_groups_without_spread_move_no_weight(equal: Any) -> None:
    rows, _, _ = equal
    assert [row["reward/no_spread_fraction"] for row in rows] == [1, 1]
    assert [row["grad/norm"] for row in rows] == [0, 0]
    assert {row["reward/mean"] for row in rows} == {0.1}


def test_completions_are_not_retokenized_and_the_end_that_was_sampled_is_a_target(equal: Any) -> None:
    """The text of a token need not be encoded as that token: half of a letter, or two tokens that are one word."""
    tokenizer, sampled = byte_tokenizer(), [0xC3, 0xC3, 97]
    assert tokenizer.encode(tokenizer.decode(sampled)) != sampled, "what a policy must not learn from"
    ended = Completion(tokens=sampled, log_probabilities=[-1.0] * 4, stop_token=256, has_ended=True)
    cut = Completion(tokens=sampled, log_probabilities=[-1.0] * 3)
    rows = _stack([[5, 6], [5]], [ended, cut], fit_width=lambda longest: longest, device=torch.device("cpu"))
    assert rows["targets"].tolist() == [[IGNORE_INDEX, *sampled, 256], [*sampled, IGNORE_INDEX, IGNORE_INDEX]]
    assert rows["inputs"].tolist() == [[5, 6, *sampled], [5, *sampled[:-1], 0, 0]]
    # in a run, whose random bytes are seldom text
    assert any("\N{REPLACEMENT CHARACTER}" in row["completion"] for row in read_completions(equal[2]))
    assert all(row["rollout/logprob_gap"] < 1e-6 for row in equal[0]), "of the tokens that were sampled"


def test_a_policy_learns_what_is_rewarded(files: Path, tmp_path: Path) -> None:
    rows = train(files, tmp_path / "run", "global_batch_size=32", reward="letters", steps=30)
    first, last = (sum(row["reward/mean"] for row in part) / 5 for part in (rows[:5], rows[-5:]))
    assert last > first + 0.3, (first, last)
    assert all(row["rollout/logprob_gap"] < 1e-6 for row in rows)


def test_data_that_repeats_is_sampled_anew_after_its_iterations(files: Path, tmp_path: Path) -> None:
    train(files, tmp_path / "run", "loader.overfit_batches=1", "rollout.num_iterations=2", steps=6)
    of_step: dict[int, list[str]] = {}
    for row in read_completions(tmp_path / "run"):
        of_step.setdefault(row["step"], []).append(row["completion"])
    assert [of_step[1], of_step[3], of_step[5]] == [of_step[2], of_step[4], of_step[6]]
    assert of_step[1] != of_step[3] != of_step[5], "by a policy that has learned"
