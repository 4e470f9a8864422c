"""Losses of reinforcement learning against TRL's trainers, on one batch, and against formulas in float64."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.data.batches import sum_counts
from recipes.loss import NUM_TARGETS, Term, divide, logged_by_count, sum_by_count
from recipes.loss.policy import GRPO, NUM_COMPLETIONS, PolicyOutputs
from recipes.numerics.loss import IGNORE_INDEX

Array = NDArray[np.float64]

TRL = json.loads((Path(__file__).parent / "trl_policy.json").read_text(encoding="utf-8"))
LENGTHS: list[int] = TRL["lengths"]  # of eight completions, two groups of four
NUM_PROMPT, LONGEST = 2, max(LENGTHS)

DEFAULTS: dict[str, Any] = {
    "kind": "dapo",
    "baseline": "group",
    "scale_rewards": "group",
    "epsilon": 0.2,
    "epsilon_high": None,
    "beta": 0.0,
    "mask_truncated": False,
    "importance": "none",
    "importance_cap": 3.0,
    "max_new_tokens": TRL["max_new_tokens"],
}
LATER = {"epsilon_high": 0.28, "beta": 0.04}  # of a later iteration, when ratios are no longer 1
GSPO = {"kind": "gspo", "epsilon": 0.02, "epsilon_high": 0.03, "beta": 0.04}
KINDS = ("dapo", "grpo", "dr_grpo", "bnpo", "gspo")


def make_loss(**settings: Any) -> GRPO:
    return GRPO(**(DEFAULTS | settings))


def of_kind(kind: str) -> dict[str, Any]:
    return GSPO if kind == "gspo" else {"kind": kind, **LATER}


# case of TRL -> settings of the loss
CASES: dict[str, dict[str, Any]] = {
    "first_iteration": {},
    "first_iteration_with_reference": {"beta": 0.04},
    **{kind: of_kind(kind) for kind in KINDS},
    **{f"{kind}_masked": of_kind(kind) | {"mask_truncated": True} for kind in KINDS if kind != "bnpo"},
    **{
        f"dapo_{mode}": of_kind("dapo") | {"importance": mode}
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
    **{f"gspo_{mode}": GSPO | {"importance": mode} for mode in ("sequence_truncate", "sequence_mask")},
}


def value(name: str) -> Tensor:
    """Return log-probabilities that TRL was given, [8, 6]."""
    return torch.tensor(TRL["values"][name], dtype=torch.float64).view(len(LENGTHS), LONGEST)


class Batch(NamedTuple):
    """A micro-batch; `log_probs` gathers the gradient."""

    log_probs: Tensor
    outputs: PolicyOutputs
    columns: dict[str, Any]


def make_batch(rows: Sequence[int], advantages: Sequence[float], *, padding: int = 0, **left_out: bool) -> Batch:
    """Return completions after prompts of two tokens; numbers of TRL beyond their ends stay there, as garbage.

    Args:
        rows: Indices of the completions.
        advantages: Of all eight.
        padding: Number of rows that only fill up.
        left_out: `old_log_probs=False` for a first iteration.
    """
    size, width = len(rows) + padding, NUM_PROMPT + LONGEST
    found = {}
    for name in TRL["values"]:
        found[name] = torch.full((size, width), 0.7, dtype=torch.float64)
        found[name][: len(rows), NUM_PROMPT:] = value(name)[list(rows)]
    targets = torch.full((size, width), IGNORE_INDEX)
    for place, row in enumerate(rows):
        targets[place, NUM_PROMPT : NUM_PROMPT + LENGTHS[row]] = 1
    columns = {name: found[name] for name in ("old_log_probs", "sampler_log_probs") if left_out.get(name, True)}
    columns["advantages"] = torch.zeros(size, dtype=torch.float64)
    columns["advantages"][: len(rows)] = torch.tensor([advantages[row] for row in rows], dtype=torch.float64)
    columns["is_truncated"] = torch.tensor([*(row in TRL["truncated"] for row in rows), *[False] * padding])
    log_probs = found["log_probs"].requires_grad_()
    outputs = PolicyOutputs(log_probs, found["entropy"], found["reference"])
    return Batch(log_probs, outputs, {"targets": targets, **columns})


class Step(NamedTuple):
    """Objective and logged loss, gradients [8, 6], and logged values of an optimizer step."""

    objective: float
    loss: float
    gradients: Tensor
    logged: dict[str, float]


def run_step(loss: GRPO, advantages: Sequence[float], *, parts: Sequence[Sequence[int]], **options: Any) -> Step:
    """Run a step in micro-batches of these completions, whose sums are divided by the counts of all."""
    batches = [make_batch(rows, advantages, **options) for rows in parts]
    counts = sum_counts([loss.counts(batch.columns) for batch in batches], lambda sums: sums)
    gradients = torch.zeros(len(LENGTHS), LONGEST, dtype=torch.float64)
    objective = logged_loss = 0.0
    logged = dict[str, float]()
    for rows, batch in zip(parts, batches, strict=True):
        terms = loss(batch.outputs, batch.columns | counts)
        divided = divide(sum_by_count(terms), counts)
        divided.backward()
        assert batch.log_probs.grad is not None
        gradients[list(rows)] = batch.log_probs.grad[: len(rows), NUM_PROMPT:]
        assert not batch.log_probs.grad[:, :NUM_PROMPT].any(), "a prompt has no loss"
        assert not batch.log_probs.grad[len(rows) :].any()
        objective += divided.item()
        logged_loss += divide(logged_by_count(terms), counts).item()
        for name, part in measures(terms, counts).items():
            logged[name] = logged.get(name, 0.0) + part
    return Step(objective, logged_loss, gradients, logged)


def measures(terms: Sequence[Term], counts: Mapping[str, Tensor]) -> dict[str, float]:
    return {term.logged_as: (term.sum / counts[term.per]).item() for term in terms if term.logged_as is not None}


ALL = range(len(LENGTHS))
SPLITS = {"whole": [ALL], "halves": [range(4), range(4, 8)], "uneven": [[3], [0, 5], [7, 1, 2, 4, 6]]}


@pytest.mark.parametrize("name", CASES)
def test_loss_gradient_and_measures_are_those_of_trl_for_every_split_of_the_batch(name: str) -> None:
    trl, loss = TRL["cases"][name], make_loss(**CASES[name])
    for split, parts in SPLITS.items():
        old = not name.startswith("first_iteration")
        found = run_step(loss, trl["advantages"], parts=parts, padding=len(parts) - 1, old_log_probs=old)
        assert found.objective == found.loss == pytest.approx(trl["loss"], abs=1e-6), split
        expected = torch.tensor(trl["gradients"], dtype=torch.float64).view_as(found.gradients)
        assert (found.gradients - expected).abs().max() < 1e-6, split
        assert found.gradients.abs().max() > 0.01
        # TRL's share of clipped completions is that of their tokens here
        compared = {key for key in trl["logged"] if key in loss.measures and not ("gspo" in name and "clipped" in key)}
        assert len(compared) >= 2
        for key in compared:
            assert found.logged[key] == pytest.approx(trl["logged"][key], abs=1e-6), key


@pytest.mark.parametrize("kind", KINDS)
def test_no_split_of_a_batch_changes_a_sum(kind: str) -> None:
    """trl#3021, PR#3231, PR#3256, PR#6024: losses that were divided by the tokens of each micro-batch, or of each rank.

    Completions of 1 token and of 6 in micro-batches of different sizes, and rows that only fill up.
    """
    loss = make_loss(**of_kind(kind), mask_truncated=True)
    whole, *others = (
        run_step(loss, TRL["rewards"], parts=parts, padding=2 * len(parts) - 2)
        for parts in (*SPLITS.values(), [[row] for row in ALL])
    )
    for found in others:
        assert found.objective == pytest.approx(whole.objective, rel=1e-12)
        torch.testing.assert_close(found.gradients, whole.gradients, rtol=1e-12, atol=1e-15)
        assert found.logged == pytest.approx(whole.logged, rel=1e-12)


def test_bnpo_is_dapo_because_it_is_divided_by_the_tokens_of_the_global_batch() -> None:
    dapo, bnpo = (
        run_step(make_loss(**of_kind(kind)), TRL["rewards"], parts=SPLITS["uneven"]) for kind in ("dapo", "bnpo")
    )
    assert bnpo.objective == dapo.objective
    assert torch.equal(bnpo.gradients, dapo.gradients)


# Formulas, written out in float64.


def numpy_loss(kind: str, epsilon: float, epsilon_high: float, beta: float) -> float:
    """Return the loss of the batch, completion by completion, with TRL's rewards in the place of advantages."""
    log_probs, old, reference = (value(name).numpy() for name in ("log_probs", "old_log_probs", "reference"))
    per_completion: list[Array] = []
    for row, length in enumerate(LENGTHS):
        log_ratios = (log_probs - old)[row, :length]
        ratios = np.exp(np.full(length, log_ratios.mean()) if kind == "gspo" else log_ratios)
        advantage = TRL["rewards"][row]
        d = (reference - log_probs)[row, :length]
        clipped = np.clip(ratios, 1 - epsilon, 1 + epsilon_high)
        kl = ratios * (np.exp(d) - d - 1)
        per_completion.append(-np.minimum(ratios * advantage, clipped * advantage) + beta * kl)
    if kind in ("grpo", "gspo"):
        return float(np.mean([losses.mean() for losses in per_completion]))
    total = sum(losses.sum() for losses in per_completion)
    return float(total / (len(LENGTHS) * TRL["max_new_tokens"] if kind == "dr_grpo" else sum(LENGTHS)))


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_its_formula(kind: str) -> None:
    settings = of_kind(kind) | {"beta": 0.5}
    found = run_step(make_loss(**settings), TRL["rewards"], parts=[ALL])
    limits = settings.get("epsilon", 0.2), settings["epsilon_high"]
    assert found.objective == pytest.approx(numpy_loss(kind, *limits, beta=0.5), rel=1e-12)


def test_epsilon_high_is_epsilon_unless_it_is_set() -> None:
    advantages = TRL["cases"]["dapo"]["advantages"]
    unset, same, other = (
        run_step(make_loss(epsilon=0.1, epsilon_high=high), advantages, parts=[ALL]) for high in (None, 0.1, 0.3)
    )
    assert unset.objective == same.objective != other.objective
    assert torch.equal(unset.gradients, same.gradients)
    assert other.logged["policy/clipped_low_fraction"] == unset.logged["policy/clipped_low_fraction"] > 0
    assert other.logged["policy/clipped_high_fraction"] < unset.logged["policy/clipped_high_fraction"]


@pytest.mark.parametrize("kind", KINDS)
def test_at_the_first_iteration_the_gradient_is_that_of_reinforce_to_the_last_bit(kind: str) -> None:
    """The gradient of -A log_prob, divided as the kind divides: ratios are 1 and nothing is clipped."""
    advantages = TRL["cases"]["first_iteration"]["advantages"]
    found = run_step(make_loss(kind=kind, epsilon=1e-6), advantages, parts=[ALL], old_log_probs=False)
    assert found.logged["policy/clipped_fraction"] == 0
    for row, length in enumerate(LENGTHS):
        divisor = sum(LENGTHS)
        if kind in ("grpo", "gspo"):
            divisor = len(LENGTHS) * length
        elif kind == "dr_grpo":
            divisor = len(LENGTHS) * TRL["max_new_tokens"]
        expected = torch.zeros(LONGEST, dtype=torch.float64)
        expected[:length] = -advantages[row] / divisor
        torch.testing.assert_close(found.gradients[row], expected, rtol=1e-15, atol=0)


def test_old_log_probs_of_the_model_itself_are_those_of_a_first_iteration() -> None:
    batch = make_batch(ALL, TRL["rewards"])
    batch.columns["old_log_probs"] = batch.log_probs.detach().clone()
    loss = make_loss(**of_kind("dapo"))
    given = loss(batch.outputs, batch.columns)[0].sum
    del batch.columns["old_log_probs"]
    absent = loss(batch.outputs, batch.columns)[0].sum
    gradients = [torch.autograd.grad(each, batch.log_probs)[0] for each in (given, absent)]
    assert torch.equal(given, absent)
    assert torch.equal(*gradients)


def test_the_gradient_of_the_divergence_is_that_of_the_expected_divergence() -> None:
    """arXiv 2512.02556: without the ratio, k3 is an estimate of the divergence whose gradient is that of another.

    Over all tokens of a vocabulary of three, weighted by their probabilities.
    """
    logits = torch.tensor([0.3, -1.2, 0.8], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.5, -0.5], dtype=torch.float64).log_softmax(0)
    log_probs = logits.log_softmax(0)  # [V], the three completions of one token
    loss = make_loss(beta=1.0)
    columns = {"targets": torch.ones(3, 1, dtype=torch.long), "advantages": torch.zeros(3, dtype=torch.float64)}
    of_each = loss.per_sample(PolicyOutputs(log_probs[:, None], None, reference[:, None]), columns)
    (found,) = torch.autograd.grad((log_probs.exp().detach() * of_each).sum(), logits, retain_graph=True)
    divergence = (log_probs.exp() * (log_probs - reference)).sum()
    (expected,) = torch.autograd.grad(divergence, logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_a_sample_is_that_of_a_step_with_it_alone(kind: str) -> None:
    loss = make_loss(**of_kind(kind), max_new_tokens=1)
    whole = make_batch(ALL, TRL["rewards"], padding=1)
    found = loss.per_sample(whole.outputs, whole.columns)
    assert found[-1] == 0, "a row that fills up"
    for row, length in enumerate(LENGTHS):
        scale = 1 / length if kind == "dr_grpo" else 1  # which a sample alone is not divided by
        step = run_step(loss, TRL["rewards"], parts=[[row]])
        assert found[row].item() == pytest.approx(step.objective * scale, rel=1e-12)


# Importance weights, and what is measured.


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_importance_weights_are_ratios_of_the_old_model_to_the_sampler_up_to_the_cap(mode: str) -> None:
    gaps = (value("old_log_probs") - value("sampler_log_probs")).numpy()
    advantages, cap = TRL["rewards"], 1.5
    found = run_step(make_loss(importance=mode, importance_cap=cap, epsilon=9), advantages, parts=[ALL])
    expected, num_above = 0.0, 0
    ratios = (value("log_probs") - value("old_log_probs")).exp().numpy()
    for row, length in enumerate(LENGTHS):
        of_row = gaps[row, :length]
        weights = np.exp(np.full(length, of_row.sum()) if mode.startswith("sequence") else of_row)
        num_above += int((weights > cap).sum())
        above = cap if mode.endswith("truncate") else 0.0
        expected -= (np.where(weights > cap, above, weights) * ratios[row, :length] * advantages[row]).sum()
    assert 0 < num_above < sum(LENGTHS)
    assert found.objective == pytest.approx(expected / sum(LENGTHS), rel=1e-12)


def test_the_gap_of_the_sampler_is_that_of_the_weights_that_sampled_at_every_iteration() -> None:
    mask = torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]
    for old in (True, False):
        found = run_step(make_loss(), TRL["rewards"], parts=SPLITS["uneven"], old_log_probs=old)
        gaps = (value("old_log_probs" if old else "log_probs") - value("sampler_log_probs")).abs()
        assert found.logged["rollout/logprob_gap"] == pytest.approx(gaps[mask].mean().item(), rel=1e-12)


def test_only_what_is_computed_is_measured() -> None:
    batch = make_batch(ALL, TRL["rewards"], sampler_log_probs=False)
    loss = make_loss()
    outputs = batch.outputs._replace(entropy=None, reference=None)
    clipped = {"policy/clipped_fraction", "policy/clipped_low_fraction", "policy/clipped_high_fraction"}
    assert {*measures(loss(outputs, batch.columns), loss.counts(batch.columns))} == clipped
    everything = make_batch(ALL, TRL["rewards"])
    tied = make_loss(beta=0.1)
    assert {*measures(tied(everything.outputs, everything.columns), tied.counts(everything.columns))} == {
        *GRPO.measures
    }
    assert tied.needs_reference
    assert not loss.needs_reference


def test_clipped_fractions_are_of_tokens_and_of_gspo_of_the_tokens_of_clipped_completions() -> None:
    log_ratios = (value("log_probs") - value("old_log_probs")).numpy()
    advantages = np.array(TRL["cases"]["gspo"]["advantages"])
    low = high = 0
    for row, length in enumerate(LENGTHS):
        ratio = np.exp(log_ratios[row, :length].mean())
        low += length if ratio < 0.98 and advantages[row] < 0 else 0
        high += length if ratio > 1.03 and advantages[row] > 0 else 0
    found = run_step(make_loss(**GSPO), advantages.tolist(), parts=SPLITS["uneven"]).logged
    assert low > 0 < high
    assert found["policy/clipped_low_fraction"] == pytest.approx(low / sum(LENGTHS))
    assert found["policy/clipped_high_fraction"] == pytest.approx(high / sum(LENGTHS))
    assert found["policy/clipped_fraction"] == pytest.approx((low + high) / sum(LENGTHS))


# Advantages.


def advantages(rewards: Sequence[float], num_generations: int, **settings: Any) -> list[float]:
    found = make_loss(**settings).advantages(torch.tensor(rewards, dtype=torch.float64), num_generations)
    assert found.dtype == torch.float64
    values: list[float] = found.tolist()
    return values


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("scale_group", {}),
        ("scale_batch", {"scale_rewards": "batch"}),
        ("scale_none", {"scale_rewards": "none"}),
        ("rloo", {"baseline": "leave_one_out", "scale_rewards": "none"}),
        ("rloo_normalized", {"baseline": "leave_one_out", "scale_rewards": "batch"}),
    ],
)
def test_advantages_are_those_of_trl(case: str, settings: dict[str, Any]) -> None:
    found = advantages(TRL["rewards"], 4, **settings)
    assert found == pytest.approx(TRL["cases"][case]["advantages"], abs=1e-6)


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("no_spread_scale_group", {}),
        ("no_spread_scale_batch", {"scale_rewards": "batch"}),
        ("no_spread_scale_none", {"scale_rewards": "none"}),
        ("rloo_no_spread", {"baseline": "leave_one_out", "scale_rewards": "none"}),
    ],
)
def test_a_group_without_spread_has_no_advantage(case: str, settings: dict[str, Any]) -> None:
    found = advantages(TRL["no_spread"], 4, **settings)
    assert found == pytest.approx(TRL["cases"][case]["advantages"], abs=1e-6)
    assert found[:4] == [0, 0, 0, 0]
    rewards = torch.tensor(TRL["no_spread"], dtype=torch.float64)
    assert make_loss(**settings).describe_groups(rewards, 4) == {"reward/no_spread_fraction": 0.5}


@pytest.mark.parametrize("baseline", ["group", "leave_one_out", "batch"])
@pytest.mark.parametrize("size", [2, 3, 6, 8, 16])
@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, -2.9, 1e6 + 0.1])
def test_the_mean_of_equal_rewards_is_rounded_and_their_advantage_is_0(baseline: str, size: int, reward: float) -> None:
    scale = "batch" if baseline == "batch" else "group"
    assert advantages([reward] * size, size, baseline=baseline, scale_rewards=scale) == [0.0] * size


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    rewards = [1.0, 0.0, 0.5, 0.3, 0.2, 0.9]
    expected = [reward - (sum(rewards[:3]) - reward) / 2 for reward in rewards[:3]]
    expected += [reward - (sum(rewards[3:]) - reward) / 2 for reward in rewards[3:]]
    settings = {"baseline": "leave_one_out", "scale_rewards": "none"}
    assert advantages(rewards, 3, **settings) == pytest.approx(expected, rel=1e-12)


def test_reinforce_plus_plus_normalizes_over_the_batch_and_takes_groups_of_one() -> None:
    rewards = [1.0, 0.0, 0.5, 0.3]
    expected = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-4)
    loss = make_loss(baseline="batch", scale_rewards="batch")
    for size in (1, 2):
        assert advantages(rewards, size, baseline="batch", scale_rewards="batch") == pytest.approx(expected, rel=1e-12)
        found = loss.describe_groups(torch.tensor(rewards, dtype=torch.float64), size)
        assert found == {"reward/no_spread_fraction": 0.0}, "the batch is the one group"


def test_a_reward_that_is_compared_with_itself_is_no_advantage() -> None:
    for baseline in ("group", "leave_one_out"):
        with pytest.raises(AssertionError, match="compared with itself"):
            advantages([1.0, 0.0], 1, baseline=baseline)
    with pytest.raises(AssertionError, match="far from the mean of the batch"):
        advantages([1.0, 1.0, 0.0, 0.0], 2, baseline="batch", scale_rewards="group")


# What goes wrong elsewhere.


def gradient_of_completions(**settings: Any) -> list[float]:
    """Return the sum of the gradients of each completion, with advantages of 1 at the first iteration."""
    found = run_step(make_loss(**settings), [1.0] * len(LENGTHS), parts=[ALL], old_log_probs=False)
    sums: list[float] = found.gradients.sum(dim=1).tolist()
    return sums


def test_length_bias_a_token_counts_the_same_in_a_long_completion_unless_the_kind_is_one_that_divides_by_length() -> (
    None
):
    """trl PR#3138, open-instruct#636: with a mean over each completion, a token of a long one counts less."""
    for kind in ("dapo", "bnpo", "dr_grpo"):
        per_token = np.array(gradient_of_completions(kind=kind)) / LENGTHS
        assert per_token == pytest.approx(per_token[0], rel=1e-12)
    for kind in ("grpo", "gspo"):
        assert gradient_of_completions(kind=kind) == pytest.approx([-1 / len(LENGTHS)] * len(LENGTHS), rel=1e-12)


def test_dr_grpo_is_divided_by_a_constant_and_not_by_the_tokens_that_were_sampled() -> None:
    """trl PR#3256: the longest possible completion, whatever the micro-batch or the rank sampled."""
    shorter, longer = (gradient_of_completions(kind="dr_grpo", max_new_tokens=size) for size in (6, 12))
    assert longer == pytest.approx([each / 2 for each in shorter], rel=1e-12)
    assert shorter == pytest.approx([-length / (8 * 6) for length in LENGTHS], rel=1e-12)


def test_std_bias_without_scaling_an_easy_prompt_counts_as_its_rewards_do() -> None:
    """trl PR#3138, open-instruct#636: with the deviation of its group, a prompt that is nearly solved counts more."""
    easy, even = [1.0] * 7 + [0.0], [1.0] * 4 + [0.0] * 4
    scaled, plain = (advantages(easy + even, 8, scale_rewards=scale) for scale in ("group", "none"))
    assert min(plain[:8]) == pytest.approx(-7 / 8)
    assert min(scaled[:8]) < 2 * min(scaled[8:]) < -1.8
    assert [sum(each[:8]) for each in (scaled, plain)] == pytest.approx([0, 0], abs=1e-12)


def test_groups_without_spread_move_the_model_by_their_divergence_alone_and_are_counted() -> None:
    """trl#5588: kept as in TRL; without a reference they have no gradient at all. They take places in batches, too."""
    rewards = torch.tensor(TRL["no_spread"], dtype=torch.float64)
    for beta, is_moved in ((0.0, False), (0.04, True)):
        loss = make_loss(beta=beta)
        found = run_step(loss, loss.advantages(rewards, 4).tolist(), parts=[ALL], old_log_probs=False)
        assert bool(found.gradients[:4].any()) is is_moved
        assert found.gradients[4:].any()
        assert loss.describe_groups(rewards, 4)["reward/no_spread_fraction"] == 0.5


def test_the_end_token_carries_loss() -> None:
    """unsloth-zoo PR#832: without it, a completion is not rewarded for having ended."""
    found = run_step(make_loss(), TRL["rewards"], parts=[ALL], old_log_probs=False)
    for row, length in enumerate(LENGTHS):
        assert (found.gradients[row, length - 1] != 0) == (TRL["rewards"][row] != 0)
        assert not found.gradients[row, length:].any()


@pytest.mark.parametrize("kind", KINDS)
def test_masked_completions_enter_no_sum_and_no_number_of_tokens_and_stay_completions(kind: str) -> None:
    """trl PR#6439: masked in the sum and not in the number of tokens, they diluted the loss of all others."""
    loss = make_loss(**of_kind(kind), mask_truncated=True)
    batch = make_batch(ALL, TRL["rewards"], padding=2)
    counts = {name: int(count) for name, count in loss.counts(batch.columns).items()}
    num_masked = sum(LENGTHS[row] for row in TRL["truncated"])
    assert counts == {NUM_TARGETS: sum(LENGTHS) - num_masked, NUM_COMPLETIONS: len(LENGTHS)}
    masked = run_step(loss, TRL["rewards"], parts=SPLITS["uneven"])
    assert not masked.gradients[TRL["truncated"]].any()
    kept = [row for row in ALL if row not in TRL["truncated"]]
    alone = run_step(make_loss(**of_kind(kind)), TRL["rewards"], parts=[kept])
    scale = 1.0 if kind in ("dapo", "bnpo") else len(kept) / len(LENGTHS)
    torch.testing.assert_close(masked.gradients, alone.gradients * scale, rtol=1e-12, atol=0)
    assert masked.logged == pytest.approx(alone.logged, rel=1e-12)


def test_a_batch_of_truncated_completions_alone_has_the_loss_0_and_no_gradient() -> None:
    found = run_step(make_loss(**LATER, mask_truncated=True), TRL["rewards"], parts=[TRL["truncated"]])
    assert found.objective == 0
    assert not found.gradients.any()
    assert {*found.logged.values()} == {0.0}


def test_without_masking_a_truncated_completion_is_trained_on_with_its_reward() -> None:
    """Scored as wrong for want of an end, it would lower what was right so far: `mask_truncated` leaves it out."""
    found = run_step(make_loss(), TRL["rewards"], parts=[ALL], old_log_probs=False)
    assert found.gradients[TRL["truncated"]].any(dim=1).all()


def test_garbage_outside_of_completions_changes_nothing() -> None:
    loss = make_loss(**of_kind("dapo"), importance="sequence_truncate")
    found = []
    for garbage in (0.0, float("nan"), float("inf")):
        batch = make_batch(ALL, TRL["rewards"])
        outside = batch.columns["targets"] == IGNORE_INDEX
        for values in (*batch.outputs, batch.columns["old_log_probs"], batch.columns["sampler_log_probs"]):
            if values is None:
                continue
            values.data[outside] = garbage
        terms = loss(batch.outputs, batch.columns)
        (gradient,) = torch.autograd.grad(terms[0].sum, batch.log_probs)
        found.append((gradient, [term.sum.item() for term in terms]))
    for gradient, sums in found[1:]:
        assert torch.equal(gradient, found[0][0])
        assert sums == found[0][1]


def test_a_batch_of_a_plan_has_all_that_the_loss_reads() -> None:
    loss = make_loss(beta=0.1, mask_truncated=True, importance="token_mask")
    targets = torch.ones(2, 4, dtype=torch.long)
    batch = loss.complete({"inputs": targets, "targets": targets})
    outputs = PolicyOutputs(torch.zeros(2, 4, requires_grad=True), torch.zeros(2, 4), batch["reference_log_probs"])
    terms = loss(outputs, batch)
    assert terms[0].sum.dtype == torch.float32
    assert {*measures(terms, loss.counts(batch))} == {*GRPO.measures}
