"""The first rollouts of a policy: what is found in what they log, and a reward that never differs, by the command."""

import json
from pathlib import Path

import pytest
from support import execute

from recipes.preflight.rollout import FirstRollout, RolloutProbe, check_rollouts
from recipes.runtime.exit_codes import ExitCode

GOOD = {
    "reward/mean": 0.4,
    "reward/std": 0.49,
    "reward/no_spread_fraction": 0.1,
    "reward/errors": 0.0,
    "rollout/truncated_fraction": 0.02,
    "rollout/tokens_mean": 50.0,
    "rollout/logprob_gap": 0.004,
}


def find(reward_seconds: float = 0.1, **changed: float) -> dict[str, str]:
    probe, row = RolloutProbe(), GOOD | {name.replace("__", "/"): value for name, value in changed.items()}
    probe.rollouts = [
        FirstRollout(row=row, rollout_seconds=1.0, reward_seconds=reward_seconds, num_completions=16) for _ in range(3)
    ]
    return {result.check: result.status for result in check_rollouts(probe)}


def test_each_fault_of_a_rollout_is_found_by_one_check() -> None:
    assert set(find().values()) == {"pass"}
    for expected, check, found in (
        ("fail", "rewards differ within groups", find(reward__no_spread_fraction=1.0)),
        ("warn", "rewards differ within groups", find(reward__no_spread_fraction=0.95)),
        ("fail", "reward functions work", find(reward__errors=2.0)),
        ("warn", "completions end", find(rollout__truncated_fraction=0.9)),
        ("warn", "sampler and model agree", find(rollout__logprob_gap=0.1)),
        ("fail", "sampler and model agree", find(rollout__logprob_gap=2.0)),
        ("warn", "rewards are faster than sampling", find(reward_seconds=3.0)),
    ):
        assert found.pop(check) == expected
        assert set(found.values()) == {"pass"}


@pytest.mark.parametrize(("reward", "code"), [("[0.5 for _ in completions]", 4), ("[*map(len, completions)]", 0)])
def test_a_policy_whose_rewards_never_differ_fails_the_checklist(
    reward: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "abcdefgh"[: 1 + row % 8] + f"{row}>", "answer": "xy"} for row in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(f"def score(prompts, completions, references, rows):\n    return {reward}\n")
    settings = (
        *("recipe=grpo", "mode=preflight", "tokenizer=bytes", "model=gpt2_nano", "model.vocab_size=257"),
        *("model.max_seq_len=24", "model.num_layers=2", "model.num_heads=2", "model.hidden_size=32"),
        *(
            "global_batch_size=16",
            "rollout.num_generations=4",
            "rollout.max_new_tokens=6",
            "trainer.accelerator=cpu",
            "trainer.max_steps=3",
        ),
        *("reward=mine", f"reward.mine.path={tmp_path}/rewards.py:score", f"data.path={tmp_path}/prompts.jsonl"),
        *(f"data.cache_dir={tmp_path}/cache", f"hydra.run.dir={tmp_path}/run"),
    )
    assert execute(*settings) == code == (ExitCode.CHECK_FAILED if code else ExitCode.FINISHED)
    [line] = [message for message in capsys.readouterr().out.splitlines() if "rewards differ within groups" in message]
    assert line.startswith("FAIL" if code else "pass")
