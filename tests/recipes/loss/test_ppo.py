"""PPO against TRL's trainer on one rollout, and against formulas in float64 for completions of several lengths."""

import json
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.loss import NUM_TARGETS, divide, sum_by_count
from recipes.loss.policy import PolicyOutputs
from recipes.loss.ppo import PPO, Estimates, estimate_kl
from recipes.numerics.loss import IGNORE_INDEX

Array = NDArray[np.float64]

TRL = json.loads((Path(__file__).parent / "trl_ppo.json").read_text(encoding="utf-8"))
SIZE = len(TRL["scores"])
LONGEST = len(TRL["values"]["values"]) // SIZE
NUM_PROMPT = 2
WHOLE = [LONGEST] * SIZE
LENGTHS = [3, 6, 1, 5, 4]
TRUNCATED = [1, 3]

DEFAULTS: dict[str, Any] = {
    "epsilon": 0.2,
    "epsilon_high": None,
    "value_epsilon": 0.2,
    "value_weight": 0.1,
    "gamma": 1.0,
    "gae_lambda": 0.95,
    "whiten_advantages": True,
    "whiten_rewards": False,
    "kl_weight": 0.05,
    "kl_in": "reward",
    "kl_estimator": "k1",
    "kl_target": None,
    "kl_horizon": 10_000,
    "missing_end_penalty": 0.0,
    "entropy_weight": 0.0,
    "importance": "none",
    "importance_cap": 3.0,
}
# case of TRL -> settings of the loss
CASES: dict[str, dict[str, Any]] = {
    "usual": {},
    "k3": {"kl_estimator": "k3"},
    "whitened_rewards": {"whiten_rewards": True},
    "discounted": {"gamma": 0.9, "gae_lambda": 0.5},
}


def make_loss(**settings: Any) -> PPO:
    return PPO(**(DEFAULTS | settings))


def value(name: str) -> Tensor:
    """Return what TRL was given of each token, [5, 6]."""
    return torch.tensor(TRL["values"][name], dtype=torch.float64).view(SIZE, LONGEST)


class Rollout(NamedTuple):
    """Rows [R, 8] with a prompt of two tokens; numbers of TRL beyond an end stay there, as garbage."""

    targets: Tensor
    values: dict[str, Tensor]
    scores: Tensor
    is_truncated: Tensor

    @property
    def is_token(self) -> Tensor:
        return self.targets != IGNORE_INDEX


def make_rollout(lengths: Sequence[int] = LENGTHS, rows: Sequence[int] = range(SIZE), *, padding: int = 0) -> Rollout:
    """Return completions; `padding` rows, without any target, fill up."""
    size, width = len(rows) + padding, NUM_PROMPT + LONGEST
    values = {name: torch.full((size, width), 0.7, dtype=torch.float64) for name in TRL["values"]}
    targets = torch.full((size, width), IGNORE_INDEX)
    for place, row in enumerate(rows):
        for name, found in values.items():
            found[place, NUM_PROMPT:] = value(name)[row]
        targets[place, NUM_PROMPT : NUM_PROMPT + lengths[row]] = 1
    scores = torch.tensor([*(TRL["scores"][row] for row in rows), *[0.0] * padding], dtype=torch.float64)
    return Rollout(targets, values, scores, torch.tensor([*(row in TRUNCATED for row in rows), *[False] * padding]))


def estimate(loss: PPO, rollout: Rollout, sum_over_ranks: Callable[[Tensor], Tensor] = lambda own: own) -> Estimates:
    return loss.estimate(
        rollout.scores,
        rollout.is_truncated,
        rollout.is_token,
        values=rollout.values["old_values"],
        log_probs=rollout.values["old_log_probs"],
        reference=rollout.values["reference"] if loss.needs_reference else None,
        sum_over_ranks=sum_over_ranks,
    )


class Step(NamedTuple):
    """Objective, gradients [R, 8] of log-probabilities and values, and logged values of an optimizer step."""

    objective: float
    of_log_probs: Tensor
    of_values: Tensor
    logged: dict[str, float]


def make_batch(rollout: Rollout, estimates: Estimates) -> tuple[PolicyOutputs, dict[str, Any]]:
    outputs = PolicyOutputs(
        rollout.values["log_probs"].clone().requires_grad_(),
        reference=rollout.values["reference"],
        values=rollout.values["values"].clone().requires_grad_(),
    )
    batch = {
        "targets": rollout.targets,
        "advantages": estimates.advantages.double(),
        "returns": estimates.returns.double(),
        "old_values": rollout.values["old_values"],
        "old_log_probs": rollout.values["old_log_probs"],
    }
    return outputs, batch


def run_step(loss: PPO, rollout: Rollout, estimates: Estimates, parts: Sequence[slice] = (slice(None),)) -> Step:
    """Run a step in micro-batches, whose sums are divided by the tokens of all."""
    outputs, batch = make_batch(rollout, estimates)
    assert outputs.values is not None
    counts = loss.counts(batch)
    objective, logged = 0.0, dict[str, float]()
    for part in parts:
        cut = PolicyOutputs(*(None if each is None else each[part] for each in outputs))
        terms = loss(cut, {name: each[part] for name, each in batch.items()} | counts)
        divided = divide(sum_by_count(terms), counts)
        divided.backward()
        objective += divided.item()
        for term in terms:
            if term.logged_as is not None:
                logged[term.logged_as] = logged.get(term.logged_as, 0.0) + (term.sum / counts[term.per]).item()
    assert outputs.log_probs.grad is not None
    assert outputs.values.grad is not None
    return Step(objective, outputs.log_probs.grad, outputs.values.grad, logged)


@pytest.mark.parametrize("name", CASES)
def test_advantages_returns_loss_and_gradients_are_those_of_trl(name: str) -> None:
    trl, loss, rollout = TRL["cases"][name], make_loss(**CASES[name]), make_rollout(WHOLE)
    found = estimate(loss, rollout)
    for key in ("advantages", "returns"):
        expected = torch.tensor(trl[key]).view(SIZE, LONGEST)
        torch.testing.assert_close(getattr(found, key)[:, NUM_PROMPT:], expected, rtol=0, atol=1e-6)
    for parts in ([slice(None)], [slice(0, 1), slice(1, 5)], [slice(row, row + 1) for row in range(5)]):
        step = run_step(loss, rollout, found, parts)
        assert step.objective == pytest.approx(trl["loss"], abs=1e-6)
        for gradients, key in ((step.of_log_probs, "policy_gradients"), (step.of_values, "value_gradients")):
            expected = torch.tensor(trl[key], dtype=torch.float64).view(SIZE, LONGEST)
            torch.testing.assert_close(gradients[:, NUM_PROMPT:], expected, rtol=0, atol=1e-6)
            assert not gradients[:, :NUM_PROMPT].any(), "a prompt has no loss"
            assert (gradients[:, NUM_PROMPT:] == 0).any(), "some are clipped"
            assert gradients.abs().max() > 1e-3
        for key in ("value/loss", "value/clipped_fraction", "policy/clipped_fraction"):
            assert step.logged[key] == pytest.approx(trl[key], abs=1e-6) != 0


# Against formulas in float64, for completions of several lengths.


def rewards_of(rollout: Rollout, *, kl_weight: float, kind: str, penalty: float) -> list[Array]:
    """Return the rewards of the tokens of each completion."""
    found = []
    for row, length in enumerate(LENGTHS):
        d = (value("reference") - value("old_log_probs"))[row, :length].numpy()
        rewards = -kl_weight * (-d if kind == "k1" else np.exp(d) - d - 1)
        rewards[-1] += TRL["scores"][row] - penalty * (row in TRUNCATED)
        found.append(rewards)
    return found


def advantages_of(rewards: Sequence[Array], *, gamma: float, gae_lambda: float) -> list[Array]:
    """Return the advantages of each completion as sums of all errors that follow, each with its weight."""
    found = []
    for row, of_tokens in enumerate(rewards):
        values = np.append(value("old_values")[row, : len(of_tokens)].numpy(), 0.0)
        errors = of_tokens + gamma * values[1:] - values[:-1]
        factor = gamma * gae_lambda
        found.append(
            np.array([sum(factor**n * error for n, error in enumerate(errors[at:])) for at in range(len(errors))])
        )
    return found


def check_tokens(found: Tensor, expected: Sequence[Array]) -> None:
    for row, of_tokens in enumerate(expected):
        end = NUM_PROMPT + len(of_tokens)
        assert found[row, NUM_PROMPT:end].double().numpy() == pytest.approx(of_tokens, abs=1e-6)
        assert not found[row, :NUM_PROMPT].any()
        assert not found[row, end:].any()


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_estimates_of_completions_of_several_lengths_are_those_of_the_formulas(
    gamma: float, gae_lambda: float, kind: str
) -> None:
    rollout = make_rollout(padding=1)
    settings: dict[str, Any] = {"gamma": gamma, "gae_lambda": gae_lambda, "kl_estimator": kind}
    found = estimate(make_loss(**settings, missing_end_penalty=0.5, whiten_advantages=False), rollout)
    rewards = rewards_of(rollout, kl_weight=0.05, kind=kind, penalty=0.5)
    expected = advantages_of(rewards, gamma=gamma, gae_lambda=gae_lambda)
    check_tokens(found.advantages, expected)
    values = [value("old_values")[row, :length].numpy() for row, length in enumerate(LENGTHS)]
    returns = [one + other for one, other in zip(expected, values, strict=True)]
    check_tokens(found.returns, returns)
    explained = 1 - np.var(np.concatenate(expected)) / np.var(np.concatenate(returns))
    assert found.logged["value/explained_variance"] == pytest.approx(explained, abs=1e-9)
    whitened = estimate(make_loss(**settings, missing_end_penalty=0.5), rollout)
    every = np.concatenate(expected)
    scale = np.sqrt(every.var(ddof=1) + 1e-8)
    check_tokens(whitened.advantages, [(each - every.mean()) / scale for each in expected])
    assert torch.equal(whitened.returns, found.returns), "values learn what was there before"


def test_whitened_rewards_keep_their_mean() -> None:
    rollout = make_rollout()
    found = estimate(make_loss(whiten_rewards=True, whiten_advantages=False), rollout)
    rewards = rewards_of(rollout, kl_weight=0.05, kind="k1", penalty=0.0)
    every = np.concatenate(rewards)
    whitened = [(each - every.mean()) / np.sqrt(every.var(ddof=1) + 1e-8) + every.mean() for each in rewards]
    assert np.concatenate(whitened).mean() == pytest.approx(every.mean())
    check_tokens(found.advantages, advantages_of(whitened, gamma=1.0, gae_lambda=0.95))


def test_whitening_is_over_the_rollout_of_all_ranks() -> None:
    """TRL whitens over the completions of one rank, so that a gradient depends on their number."""
    settings: dict[str, Any] = {"whiten_rewards": True, "kl_target": 0.5}
    whole = estimate(make_loss(**settings), make_rollout())
    parts = [make_rollout(rows=[0, 2]), make_rollout(rows=[1, 3, 4], padding=2)]
    given, barrier = [torch.zeros(()), torch.zeros(())], threading.Barrier(2)

    def run(rank: int) -> Estimates:
        def add(own: Tensor) -> Tensor:
            given[rank] = own
            barrier.wait(timeout=10)
            whole = given[0] + given[1]
            barrier.wait(timeout=10)
            return whole

        return estimate(make_loss(**settings), parts[rank], add)

    with ThreadPoolExecutor(2) as ranks:
        found = [*ranks.map(run, range(2))]
    for rank, rows in enumerate(([0, 2], [1, 3, 4])):
        torch.testing.assert_close(found[rank].advantages[: len(rows)], whole.advantages[rows], rtol=1e-6, atol=1e-6)
        assert found[rank].logged == pytest.approx(whole.logged, rel=1e-12)


def test_one_token_in_all_has_the_advantage_0_and_no_nan() -> None:
    rollout = make_rollout([1] * SIZE, rows=[2])
    found = estimate(make_loss(whiten_rewards=True), rollout)
    assert found.advantages.abs().max() < 1e-6
    assert found.returns.isfinite().all()


# What goes wrong elsewhere.


def test_the_score_lands_on_the_end_token_and_not_one_after_it() -> None:
    """trl#3750: the reward is one token after the end, where nothing was sampled."""
    rollout = make_rollout(padding=1)
    loss = make_loss(kl_weight=0.0, gae_lambda=0.0, gamma=1e-12, whiten_advantages=False)
    rollout.values["old_values"].zero_()
    found = estimate(loss, rollout).advantages  # of lambda 0 and values 0 the reward itself
    for row, length in enumerate(LENGTHS):
        expected = torch.zeros(NUM_PROMPT + LONGEST)
        expected[NUM_PROMPT + length - 1] = TRL["scores"][row]
        torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-9)
    assert not found[-1].any(), "a row that only fills up"


def test_completions_without_an_end_lose_the_penalty_and_no_other() -> None:
    """trl#3750: the penalty for a missing end is not applied."""
    settings: dict[str, Any] = {"gae_lambda": 1.0, "whiten_advantages": False}
    plain, penalized = (
        estimate(make_loss(missing_end_penalty=penalty, **settings), make_rollout()).advantages for penalty in (0, 0.75)
    )
    for row, length in enumerate(LENGTHS):
        lost = (plain - penalized)[row, NUM_PROMPT : NUM_PROMPT + length]
        assert lost.tolist() == pytest.approx([0.75 * (row in TRUNCATED)] * length, abs=1e-6)


def test_padding_that_is_also_the_end_moves_no_score() -> None:
    """transformers#35352, trl PR#6952: tokens are found by what was sampled, and not by the id of the padding."""
    rollout = make_rollout()
    rollout.targets[rollout.is_token] = 0  # the id that fills inputs up
    expected = estimate(make_loss(), make_rollout())
    assert torch.equal(estimate(make_loss(), rollout).advantages, expected.advantages)


def test_garbage_outside_of_completions_changes_nothing() -> None:
    loss, found = make_loss(kl_in="loss", entropy_weight=0.1), []
    for garbage in (0.0, float("nan"), float("inf")):
        rollout = make_rollout()
        for values in rollout.values.values():
            values[~rollout.is_token] = garbage
        estimates = estimate(loss, rollout)
        outputs, batch = make_batch(rollout, estimates)
        outputs = outputs._replace(entropy=rollout.values["log_probs"])
        assert outputs.values is not None
        objective = divide(sum_by_count(loss(outputs, batch)), loss.counts(batch))
        found.append([estimates.advantages, *torch.autograd.grad(objective, [outputs.log_probs, outputs.values])])
    for others in found[1:]:
        assert all(map(torch.equal, others, found[0]))


# Ratios, values, divergence and entropy.


def test_at_the_first_iteration_the_ratio_is_1_and_the_gradient_that_of_reinforce() -> None:
    loss, rollout = make_loss(), make_rollout()
    estimates = estimate(loss, rollout)
    outputs, batch = make_batch(rollout, estimates)
    del batch["old_log_probs"]
    terms = loss(outputs, batch)
    assert terms[0].sum.item() == -batch["advantages"].sum().item()
    (gradients,) = torch.autograd.grad(terms[0].sum, outputs.log_probs)
    assert torch.equal(gradients, -batch["advantages"])
    logged = {term.logged_as: term.sum.item() for term in terms}
    assert logged["policy/clipped_fraction"] == 0


def test_a_value_beyond_its_limit_has_no_gradient_away_from_it() -> None:
    rollout = make_rollout()
    estimates = estimate(make_loss(), rollout)
    clipped, free = (run_step(make_loss(value_epsilon=epsilon), rollout, estimates) for epsilon in (0.2, None))
    old, now, returns = rollout.values["old_values"], rollout.values["values"], estimates.returns.double()
    is_far = ((now - old).abs() > 0.2) & rollout.is_token
    stops = is_far & ((old + (now - old).clamp(-0.2, 0.2) - returns).abs() > (now - returns).abs())
    assert 0 < stops.sum() < is_far.sum()
    assert not clipped.of_values[stops].any()
    assert torch.equal(clipped.of_values[~stops], free.of_values[~stops])
    num = rollout.is_token.sum()
    torch.testing.assert_close(
        free.of_values[rollout.is_token], (0.1 * (now - returns) / num)[rollout.is_token], rtol=1e-12, atol=0
    )
    assert clipped.logged["value/clipped_fraction"] == pytest.approx((stops.sum() / num).item())
    assert free.logged["value/clipped_fraction"] == 0


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_a_divergence_in_the_loss_has_the_gradient_of_the_expected_divergence(kind: Any) -> None:
    """Without the ratio, k1 has no gradient in expectation, and k3 that of another divergence (arXiv 2512.02556)."""
    logits = torch.tensor([0.3, -1.2, 0.8], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.5, -0.5], dtype=torch.float64).log_softmax(0)
    log_probs = logits.log_softmax(0)  # [V], the three completions of one token
    loss = make_loss(kl_in="loss", kl_weight=1.0, kl_estimator=kind)
    nothing = torch.zeros(3, 1, dtype=torch.float64)
    batch = {"targets": torch.ones(3, 1, dtype=torch.long)}
    batch |= dict.fromkeys(("advantages", "returns", "old_values"), nothing)
    of_each = loss.per_sample(PolicyOutputs(log_probs[:, None], None, reference[:, None], nothing), batch)
    (found,) = torch.autograd.grad((log_probs.exp().detach() * of_each).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((log_probs.exp() * (log_probs - reference)).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_estimators_of_the_divergence_have_its_mean() -> None:
    policy = np.array([0.5, 0.3, 0.2])
    reference = np.array([0.2, 0.2, 0.6])
    divergence = (policy * np.log(policy / reference)).sum()
    d = torch.from_numpy(np.log(reference / policy))
    for kind in ("k1", "k3"):
        found = estimate_kl(d, kind)  # type: ignore[arg-type]
        assert (torch.from_numpy(policy) * found).sum().item() == pytest.approx(divergence, rel=1e-12)
    assert (estimate_kl(d, "k3") > 0).all()
    assert (estimate_kl(d, "k1") < 0).any()


def test_the_divergence_is_in_the_rewards_or_in_the_loss_and_measured_in_both() -> None:
    rollout = make_rollout()
    free = estimate(make_loss(kl_weight=0.0), rollout)
    in_loss = estimate(make_loss(kl_in="loss"), rollout)
    assert torch.equal(free.advantages, in_loss.advantages)
    assert not torch.equal(free.advantages, estimate(make_loss(), rollout).advantages)
    steps = [run_step(make_loss(kl_in=where), rollout, free) for where in ("reward", "loss")]
    d = (value("reference") - value("log_probs")).numpy()
    expected = sum(-d[row, :length].sum() for row, length in enumerate(LENGTHS)) / sum(LENGTHS)
    assert [step.logged["policy/kl"] for step in steps] == pytest.approx([expected] * 2)
    assert steps[0].objective != steps[1].objective
    assert "policy/kl" not in make_loss(kl_weight=0.0).measures
    assert "policy/kl" not in run_step(make_loss(kl_weight=0.0), rollout, free).logged


@pytest.mark.parametrize(("target", "change"), [(1e-3, 0.2), (1e3, -0.2), (None, 0.0)])
def test_the_weight_of_the_divergence_follows_its_target_by_a_fifth_in_a_horizon(
    target: float | None, change: float
) -> None:
    rollout = make_rollout(padding=1)
    rollout.values["reference"] = rollout.values["old_log_probs"] - 0.1  # a divergence above 0
    loss = make_loss(kl_target=target, kl_horizon=100)
    logged = estimate(loss, rollout).logged
    assert loss.kl_weight == logged["policy/kl_weight"] == pytest.approx(0.05 * (1 + change * SIZE / 100))
    assert loss.adapts == (target is not None)


def test_near_its_target_the_weight_changes_in_proportion() -> None:
    rollout = make_rollout()
    rollout.values["reference"] = rollout.values["old_log_probs"] - 0.1
    divergence = 0.1 * sum(LENGTHS) / SIZE  # nats of a completion
    loss = make_loss(kl_target=divergence / 1.1, kl_horizon=SIZE)
    estimate(loss, rollout)
    assert loss.kl_weight == pytest.approx(0.05 * 1.1)


def test_a_bonus_of_the_entropy_lowers_the_loss_by_it() -> None:
    rollout, loss = make_rollout(), make_loss(entropy_weight=0.01)
    outputs, batch = make_batch(rollout, estimate(loss, rollout))
    entropy = value("log_probs").abs()
    whole = torch.nn.functional.pad(entropy, (NUM_PROMPT, 0)).requires_grad_()
    outputs = outputs._replace(entropy=whole)
    with_bonus, without = (
        divide(sum_by_count(each(outputs, batch)), each.counts(batch)) for each in (loss, make_loss())
    )
    mean = sum(entropy[row, :length].sum().item() for row, length in enumerate(LENGTHS)) / sum(LENGTHS)
    assert (without - with_bonus).item() == pytest.approx(0.01 * mean)
    (gradient,) = torch.autograd.grad(with_bonus, whole)
    assert gradient[rollout.is_token].tolist() == pytest.approx([-0.01 / sum(LENGTHS)] * sum(LENGTHS))
    assert loss.needs_entropy
    assert not make_loss().needs_entropy


def test_importance_weights_correct_the_sampler_in_the_loss_of_the_policy_alone() -> None:
    rollout, plain = make_rollout(), make_loss()
    outputs, batch = make_batch(rollout, estimate(plain, rollout))
    batch["sampler_log_probs"] = batch["old_log_probs"] - math.log(2)
    policy, values = (term.sum.item() for term in plain(outputs, batch)[:2])
    found = [term.sum.item() for term in make_loss(importance="token_truncate", importance_cap=1.5)(outputs, batch)]
    assert found[:2] == pytest.approx([1.5 * policy, values])


def test_the_loss_of_a_sample_is_that_of_a_step_with_it_alone() -> None:
    rollout, loss = make_rollout(padding=1), make_loss(kl_in="loss")
    estimates = estimate(loss, rollout)
    outputs, batch = make_batch(rollout, estimates)
    found = loss.per_sample(outputs, batch)
    assert found[-1] == 0, "a row that fills up"
    for row in range(SIZE):
        alone = {name: each[row : row + 1] for name, each in batch.items()}
        cut = PolicyOutputs(*(None if each is None else each[row : row + 1] for each in outputs))
        objective = divide(sum_by_count(loss(cut, alone)), loss.counts(alone))
        assert found[row].item() == pytest.approx(objective.item(), rel=1e-12)


def test_a_batch_of_a_plan_has_all_that_the_loss_reads() -> None:
    loss = make_loss(importance="token_mask")
    targets = torch.ones(2, 4, dtype=torch.long)
    batch = loss.complete({"inputs": targets, "targets": targets})
    nothing = torch.zeros(2, 4, requires_grad=True)
    terms = loss(PolicyOutputs(nothing, nothing.detach(), batch["reference_log_probs"], nothing), batch)
    assert terms[0].sum.dtype == torch.float32
    assert {term.logged_as for term in terms} - {None} == {*PPO.measures}
    assert {*loss.counts(batch)} == {NUM_TARGETS}
