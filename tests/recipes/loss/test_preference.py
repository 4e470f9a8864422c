"""Losses on preferences against TRL's trainers, on one batch, and against formulas written out in float64."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from recipes.clipping.none import NoClipping
from recipes.data.batches import sum_counts
from recipes.data.conversations.store import ExampleStore
from recipes.data.preferences import PreferenceRows, pad_samples
from recipes.errors import ConfigError
from recipes.loss import Loss, Term, divide, logged_by_count, sum_by_count
from recipes.loss.preference import DPO, KTO, ORPO, AnswerLoss, BradleyTerry, Likelihoods, SimPO, log1mexp
from recipes.mesh import Mesh
from recipes.model.llama import Llama
from recipes.model.weights.hf_llama import LlamaFormat
from recipes.numerics.loss import IGNORE_INDEX
from recipes.parallel.groups import Groups
from recipes.task.preference import PreferenceTuning

Samples = list[dict[str, Tensor]]

TRL = json.loads((Path(__file__).parent / "trl_preferences.json").read_text(encoding="utf-8"))
PROMPTS, CHOSEN, REJECTED = (TRL["tokens"][name] for name in ("prompts", "chosen", "rejected"))
SEQ_LEN = TRL["config"]["max_position_embeddings"]

LOSSES: dict[str, Loss] = {
    "dpo_sigmoid": DPO(beta=0.1, kind="sigmoid", label_smoothing=0, nll_weight=0),
    "dpo_hinge": DPO(beta=0.5, kind="hinge", label_smoothing=0, nll_weight=0),
    "dpo_ipo": DPO(beta=0.1, kind="ipo", label_smoothing=0, nll_weight=0),
    "dpo_robust": DPO(beta=0.1, kind="robust", label_smoothing=0.1, nll_weight=0),
    "dpo_nll": DPO(beta=0.1, kind="sigmoid", label_smoothing=0, nll_weight=0.5),
    "orpo": ORPO(beta=0.1),
    "simpo": SimPO(beta=2.0, simpo_gamma=1.0, nll_weight=0),
    "simpo_nll": SimPO(beta=2.0, simpo_gamma=0.5, nll_weight=0.3),
    "kto": KTO(beta=0.1, desirable_weight=1, undesirable_weight=1),
    "kto_weights": KTO(beta=0.1, desirable_weight=1.5, undesirable_weight=0.5),
    "kto_below": KTO(beta=0.1, desirable_weight=1, undesirable_weight=1),
    "reward": BradleyTerry(center_rewards_coefficient=0),
    "reward_margin": BradleyTerry(center_rewards_coefficient=0),
    "reward_centred": BradleyTerry(center_rewards_coefficient=0.01),
}

# what TRL logs under the same name is another quantity: means over tokens, and of IPO, whose ratios are means, sums
LOGGED_OTHERWISE = {
    "orpo": {"chosen_log_prob", "rejected_log_prob"},
    "simpo": {"chosen_log_prob", "rejected_log_prob"},
    "dpo_ipo": {"chosen_reward", "rejected_reward", "margin", "accuracy"},
}

# The batch of TRL, as samples of the data.


class Answers:
    """What rows read of an `ExampleStore`: answers to prompts, in memory."""

    def __init__(self, prompts: Sequence[Any], answers: Sequence[Any], values: Sequence[float]) -> None:
        self._all = [(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        self.lengths = np.array([len(prompt) + len(answer) for prompt, answer in self._all])
        self.num_targets = np.array([len(answer) for _, answer in self._all])
        self.questions = np.array([hash(tuple(prompt)) % 2**63 for prompt, _ in self._all], dtype=np.uint64)
        self.values = np.array(values, dtype=np.float64)

    def tokens(self, example: int, *, stop: int | None = None) -> NDArray[np.int64]:
        prompt, answer = self._all[example]
        return np.array([*prompt, *answer])[:stop]

    def carries_loss(self, example: int, *, stop: int | None = None) -> NDArray[np.bool_]:
        prompt, answer = self._all[example]
        return (np.arange(len(prompt) + len(answer)) >= len(prompt))[:stop]


class AfterPreviousPrompt(PreferenceRows):
    """Rows whose answers to other prompts are those of the row before, as TRL takes them inside of a batch."""

    @override
    def _mismatch(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        prompts, answers = PROMPTS * 2, CHOSEN + REJECTED
        tokens = np.array([*prompts[index], *answers[index - 1]])
        return tokens, np.arange(len(tokens)) >= len(prompts[index])


def make_rows(kind: str, *, margins: Sequence[float] = (0, 0, 0, 0)) -> PreferenceRows:
    if kind == "answers":
        store = Answers(PROMPTS * 2, CHOSEN + REJECTED, TRL["tokens"]["labels"])
        return AfterPreviousPrompt(cast(ExampleStore, store), np.arange(8), seq_len=SEQ_LEN, kind="answers")
    pairs = [answer for pair in zip(CHOSEN, REJECTED, strict=True) for answer in pair]
    values = [value for margin in margins for value in (margin, math.nan)]
    store = Answers([prompt for prompt in PROMPTS for _ in "12"], pairs, values)
    return PreferenceRows(cast(ExampleStore, store), np.arange(8), seq_len=SEQ_LEN, kind="pairs")


def make_model(values: Sequence[float], shapes: dict[str, list[int]]) -> Llama:
    config = TRL["config"]
    model = Llama(
        vocab_size=config["vocab_size"],
        max_seq_len=SEQ_LEN,
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_attention_heads"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        rope_theta=10_000.0,
        rms_eps=config["rms_norm_eps"],
        vocab_pad_multiple=1,
    )
    model.double().init_buffers()
    found = ours(values, shapes, model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(found.get(name, torch.zeros_like(weight)))
    return model


def by_name(values: Sequence[float], shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    """Return the tensors of transformers' model: weights, or gradients of them."""
    parts = torch.tensor(values, dtype=torch.float64).split([math.prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}


def ours(values: Sequence[float], shapes: dict[str, list[int]], model: Llama) -> dict[str, Tensor]:
    """Return them by the names of our parameters."""
    tensors = by_name(values, shapes)
    of_model = dict(model.named_parameters())
    return {
        entry.name: entry.assemble(tensors.__getitem__, shape=of_model[entry.name].shape, setting="")
        for entry in LlamaFormat(model).entries()
        if all(name in tensors for name in entry.published)
    }


def make_task(model: nn.Module, loss: Loss) -> PreferenceTuning:
    task = PreferenceTuning(
        reference="precomputed",
        cache_dir="",
        make_model=lambda: model,
        make_optimizer=torch.optim.SGD,
        schedule=lambda step: 1.0,
        convert_model=lambda model, shards_weights: None,
        activation_checkpoint=None,
        compile_mode=None,
        loss=loss,
        scales_loss=False,
        clipping=NoClipping(),
        ema_decay=None,
        seed=0,
        metrics={},
    )
    groups = {"mesh": Mesh(shard=1), "groups": Groups(), "data_size": 1}
    strategy = SimpleNamespace(guard=None, pipeline=None, sum_over_data_ranks=lambda sums: sums, **groups)
    task.model = model
    task.trainer = SimpleNamespace(strategy=strategy)  # type: ignore[assignment]
    return task


class OfTask:
    """Likelihoods as the task computes them, and gradients by parameter of the language model."""

    packs = False

    def __init__(self, name: str, loss: AnswerLoss) -> None:
        weights, shapes = TRL["weights"], TRL["shapes"]["model"]
        names = ("reference", "model") if name == "kto_below" else ("model", "reference")
        self.model, reference = (make_model(weights[each], shapes) for each in names)
        self.expected = ours(TRL["cases"][name]["gradients"], shapes, self.model)
        self.rows = make_rows("answers" if loss.num_answers == 1 else "pairs")
        self._task = make_task(self.model, loss)
        if loss.needs_reference:
            of_reference = make_task(reference, loss)
            every = self.collate([self.rows[i] for i in range(len(self.rows))])
            measured = of_reference._measure_answers(reference, every)
            rows = {int(self.rows[i]["id"]): values for i, values in enumerate(measured.detach())}
            found = {0: torch.zeros_like(measured[0])} | rows
            look_up = lambda ids: torch.stack([found[int(each)] for each in ids])  # noqa: E731
            self._task._table = SimpleNamespace(look_up=look_up)  # type: ignore[assignment]

    def collate(self, samples: Samples) -> dict[str, Any]:
        return pad_samples(samples, seq_len=SEQ_LEN, packs=self.packs)

    def before_window(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self._task.before_window(batches) if self._task.looks_ahead else batches

    def outputs(self, batch: dict[str, Any]) -> Any:
        return self._task.outputs(batch)

    def gradients(self) -> dict[str, Tensor]:
        return {name: weight.grad for name, weight in self.model.named_parameters() if weight.grad is not None}


class OfRewards(OfTask):
    """Rewards of a sequence classifier: a linear function of the last state before padding."""

    def __init__(self, name: str) -> None:
        weights, shapes = TRL["weights"]["reward"], TRL["shapes"]["reward"]
        self.model = make_model(weights, shapes)
        self._score = by_name(weights, shapes)["score.weight"].clone().requires_grad_()  # [1, W]
        gradients = TRL["cases"][name]["gradients"]
        self.expected = ours(gradients, shapes, self.model) | {"score": by_name(gradients, shapes)["score.weight"]}
        self.rows = make_rows("pairs", margins=(0, 0, 0, 0) if name == "reward" else TRL["tokens"]["margins"])

    @override
    def before_window(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return batches

    @override
    def outputs(self, batch: dict[str, Any]) -> Tensor:
        states = []
        for inputs, targets, num_inputs in zip(batch["inputs"], batch["targets"], batch["num_inputs"], strict=True):
            # the end of the answer is a target, which the classifier reads; a row that fills up reads token 0
            row = torch.cat([inputs[:num_inputs], targets[num_inputs - 1 : num_inputs].clamp(min=0)])
            row = row if len(row) else torch.zeros(1, dtype=torch.int64)
            states.append(self.model(row[None], reduce=lambda hidden, weight: hidden)[0, -1])
        return (torch.stack(states) @ self._score.T).view(-1, 2)

    @override
    def gradients(self) -> dict[str, Tensor]:
        assert self._score.grad is not None
        return super().gradients() | {"score": self._score.grad}


class Step(NamedTuple):
    """Objective and logged loss, gradients by parameter, and logged values of an optimizer step."""

    objective: float
    loss: float
    gradients: dict[str, Tensor]
    logged: dict[str, float]


def run_step(case: OfTask, loss: Loss, *, num_parts: int, num_padding: int = 0) -> Step:
    """Run a step in micro-batches, whose sums are divided by the counts of the whole batch."""
    samples = [case.rows[index] for index in range(len(case.rows))]
    size = len(samples) // num_parts
    parts = [samples[start : start + size] for start in range(0, len(samples), size)]
    padding = [case.rows.padding() | {"id": torch.tensor(0)} for _ in range(num_padding)]
    batches = [case.collate([*part, *padding]) for part in parts]
    counts = sum_counts([loss.counts(batch) for batch in batches], lambda sums: sums)
    objective = logged_loss = 0.0
    logged = dict[str, float]()
    for batch in case.before_window([{**batch, **counts} for batch in batches]):
        terms = loss(case.outputs(batch), batch)
        divided = divide(sum_by_count(terms), batch)
        divided.backward()
        objective += divided.item()
        logged_loss += divide(logged_by_count(terms), batch).item()
        for name, value in measures(terms, batch).items():
            logged[name] = logged.get(name, 0.0) + value
    return Step(objective, logged_loss, case.gradients(), logged)


def measures(terms: Sequence[Term], counts: Mapping[str, Any]) -> dict[str, float]:
    return {term.logged_as: (term.sum / counts[term.per]).item() for term in terms if term.logged_as is not None}


def make_case(name: str) -> OfTask:
    loss = LOSSES[name]
    return OfTask(name, loss) if isinstance(loss, AnswerLoss) else OfRewards(name)


@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_rewards_and_gradients_are_those_of_trl_for_every_split_of_the_batch(name: str, num_parts: int) -> None:
    case, trl = make_case(name), TRL["cases"][name]
    found = run_step(case, LOSSES[name], num_parts=num_parts, num_padding=num_parts - 1)
    # of IPO relative: its loss is (D - 5)^2, about 25, of which 1e-6 is less than the rounding of TRL's float32 norms
    assert found.objective == pytest.approx(trl["loss"], abs=1e-6 * max(1.0, trl["loss"]))
    assert {*case.expected} <= {*found.gradients}
    largest = max(1.0, *(each.abs().max().item() for each in case.expected.values()))
    for parameter, expected in case.expected.items():
        assert (found.gradients[parameter] - expected).abs().max().item() < 1e-6 * largest, parameter
    compared = (LOSSES[name].measures.keys() & trl["logged"].keys()) - LOGGED_OTHERWISE.get(name.split("_")[0], set())
    compared -= LOGGED_OTHERWISE.get(name, set())
    assert len(compared) >= 2
    for measure in compared:
        value = trl["logged"][measure]
        assert found.logged[measure] == pytest.approx(value, abs=1e-6 * max(1.0, abs(value))), measure


@pytest.mark.parametrize("chunk_tokens", [None, 7])
@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if isinstance(loss, AnswerLoss)])
def test_packed_answers_have_the_loss_the_gradient_and_the_measures_of_padded_ones(
    name: str, chunk_tokens: int | None
) -> None:
    loss, found = copy(LOSSES[name]), list[Step]()
    assert isinstance(loss, AnswerLoss)
    loss.chunk_tokens = chunk_tokens
    for packs in (False, True):
        case = OfTask(name, loss)
        case.packs = packs
        found.append(run_step(case, loss, num_parts=2, num_padding=1))
    padded, packed = found
    assert packed.objective == pytest.approx(padded.objective, rel=1e-12, abs=1e-12)
    assert packed.logged == pytest.approx(padded.logged, rel=1e-12, abs=1e-12)
    assert {*packed.gradients} == {*padded.gradients}
    for parameter, gradient in padded.gradients.items():
        torch.testing.assert_close(packed.gradients[parameter], gradient, rtol=1e-12, atol=1e-12, msg=parameter)


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_a_sample_is_that_of_a_step_with_it_alone(name: str) -> None:
    case, loss = make_case(name), LOSSES[name]
    batches = [case.collate([case.rows[index]]) for index in range(3)]
    for batch in case.before_window(batches):
        outputs = case.outputs(batch)
        expected = divide(logged_by_count(loss(outputs, batch)), loss.counts(batch))
        torch.testing.assert_close(loss.per_sample(outputs, batch), expected[None], rtol=1e-6, atol=1e-6)


def test_the_logged_loss_of_a_reward_model_leaves_out_the_centring() -> None:
    found = run_step(make_case("reward_centred"), LOSSES["reward_centred"], num_parts=1)
    assert found.loss == pytest.approx(TRL["cases"]["reward_margin"]["loss"], abs=1e-6)
    assert found.objective - found.loss > 0.01


def test_of_kto_the_divergence_is_that_of_all_micro_batches_and_not_the_last_one() -> None:
    """trl PR#2153, trl PR#1402, align-anything PR#216: z of one micro-batch or one rank is another loss."""
    found = [run_step(make_case("kto"), LOSSES["kto"], num_parts=parts).logged["kl"] for parts in (1, 2, 8)]
    expected = TRL["cases"]["kto"]["logged"]["kl"]
    assert expected > 1
    assert found == pytest.approx([expected] * 3, abs=1e-6)
    assert run_step(make_case("kto_below"), LOSSES["kto_below"], num_parts=1).logged["kl"] == 0, "never negative"


def test_of_kto_the_divergence_of_a_batch_of_one_is_not_its_own_reward() -> None:
    """trl#2554: an answer matched with itself has the loss 1 - sigmoid(0) = 0.5, and no gradient, whatever it is."""
    loss, found = LOSSES["kto"], []
    for index in range(8):
        case = make_case("kto")
        case.rows = cast(Any, torch.utils.data.Subset(case.rows, [index]))
        step = run_step(case, loss, num_parts=1)
        reward = step.logged["chosen_reward"] + step.logged["rejected_reward"]  # of the one there is
        assert 0.1 * step.logged["kl"] != pytest.approx(reward, abs=1e-3)
        label = bool(case.rows[0]["label"])
        ratio = reward - 0.1 * step.logged["kl"]
        assert step.objective == pytest.approx(1 - sigmoid(ratio if label else -ratio), abs=1e-6)
        found.append(step.objective)
        assert max(gradient.abs().max() for gradient in step.gradients.values()) > 1e-4
    assert all(abs(value - 0.5) > 1e-3 for value in found)


def test_trl_ignores_label_smoothing_under_sigmoid_and_this_loss_does_not() -> None:
    assert TRL["cases"]["dpo_sigmoid_smoothed"]["loss"] == TRL["cases"]["dpo_sigmoid"]["loss"]
    smoothed = DPO(beta=0.1, kind="sigmoid", label_smoothing=0.3, nll_weight=0)
    found = run_step(make_case("dpo_sigmoid"), smoothed, num_parts=1)
    assert abs(found.loss - TRL["cases"]["dpo_sigmoid"]["loss"]) > 1e-3


# Formulas, written out in float64, of answers with given log-probabilities.

LENGTHS = [[2, 5], [7, 1], [3, 3]]  # of the chosen and the rejected answer, in tokens
LOG_PROBS = [[-3.5, -9.0], [-20.0, -0.5], [-2.0, -2.5]]
REFERENCE = [[-4.0, -6.5], [-17.0, -1.75], [-9.0, -2.0]]


def make_batch(lengths: Sequence[Sequence[int]], *, num_prompt: int = 2, **more: Any) -> dict[str, Any]:
    """Return rows of prompts of `num_prompt` tokens and answers, padded."""
    flat = [length for pair in lengths for length in pair]
    targets = torch.full((len(flat), num_prompt + max(flat)), IGNORE_INDEX)
    for row, length in zip(targets, flat, strict=True):
        row[num_prompt - 1 : num_prompt - 1 + length] = 1
    num_inputs = torch.tensor([num_prompt - 1 + length if length else 0 for length in flat])
    return {"targets": targets, "num_inputs": num_inputs} | more


def likelihoods(
    log_probs: Any = LOG_PROBS, reference: Any = REFERENCE, of_prompts: Any = None, kl: float | None = None
) -> Likelihoods:
    def wide(values: Any) -> Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.float64)

    given = torch.tensor(log_probs, dtype=torch.float64, requires_grad=True)
    return Likelihoods(given, wide(reference), of_prompts=wide(of_prompts), kl=wide(kl))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def objective(loss: Loss, outputs: Any, batch: dict[str, Any]) -> float:
    return divide(sum_by_count(loss(outputs, batch)), loss.counts(batch)).item()


def log_ratios() -> list[tuple[float, float]]:
    return [(own[0] - ref[0], own[1] - ref[1]) for own, ref in zip(LOG_PROBS, REFERENCE, strict=True)]


def test_conservative_dpo_is_the_cross_entropy_of_a_label_that_is_right_with_probability_one_minus_s() -> None:
    smoothing, beta = 0.3, 0.2
    probabilities = [sigmoid(beta * (chosen - rejected)) for chosen, rejected in log_ratios()]
    expected = mean(-(1 - smoothing) * math.log(p) - smoothing * math.log(1 - p) for p in probabilities)
    loss = DPO(beta=beta, kind="sigmoid", label_smoothing=smoothing, nll_weight=0)
    assert objective(loss, likelihoods(), make_batch(LENGTHS)) == pytest.approx(expected, rel=1e-12)


def test_robust_dpo_of_labels_flipped_with_probability_s_is_on_average_the_loss_of_the_right_ones() -> None:
    smoothing = 0.2
    loss, plain = (DPO(beta=0.2, kind="robust", label_smoothing=s, nll_weight=0) for s in (smoothing, 0.0))
    batch = make_batch(LENGTHS)
    swapped = likelihoods([pair[::-1] for pair in LOG_PROBS], [pair[::-1] for pair in REFERENCE])
    right, flipped = (objective(loss, outputs, batch) for outputs in (likelihoods(), swapped))
    expected = objective(plain, likelihoods(), batch)
    assert (1 - smoothing) * right + smoothing * flipped == pytest.approx(expected, rel=1e-12)


def test_ipo_is_the_square_of_ratios_per_token_less_half_of_the_inverse_beta() -> None:
    beta = 0.1
    pairs = zip(log_ratios(), LENGTHS, strict=True)
    expected = mean((c / lengths[0] - r / lengths[1] - 1 / (2 * beta)) ** 2 for (c, r), lengths in pairs)
    loss = DPO(beta=beta, kind="ipo", label_smoothing=0, nll_weight=0)
    assert objective(loss, likelihoods(), make_batch(LENGTHS)) == pytest.approx(expected, rel=1e-12)


def test_simpo_compares_means_over_tokens_less_gamma() -> None:
    beta, gamma = 2.5, 1.25
    pairs = zip(LOG_PROBS, LENGTHS, strict=True)
    margins = [beta * (own[0] / length[0] - own[1] / length[1]) - gamma for own, length in pairs]
    loss = SimPO(beta=beta, simpo_gamma=gamma, nll_weight=0)
    expected = mean(-math.log(sigmoid(margin)) for margin in margins)
    assert objective(loss, likelihoods(reference=None), make_batch(LENGTHS)) == pytest.approx(expected, rel=1e-12)


def odds(log_prob: float, length: int) -> float:
    probability = math.exp(log_prob / length)
    return probability / (1 - probability)


def test_orpo_adds_the_log_odds_ratio_to_the_cross_entropy_of_prompt_and_chosen_answer() -> None:
    """trl#1676, trl#2502, trl#2527: whether the cross-entropy covers the prompt; here as in the authors' code."""
    beta, of_prompts = 0.2, [-4.0, -5.0, -6.0]
    batch = make_batch(LENGTHS, num_prompt=3)
    pairs = zip(LOG_PROBS, LENGTHS, strict=True)
    ratios = [odds(own[0], length[0]) / odds(own[1], length[1]) for own, length in pairs]
    num_tokens = sum(2 + length[0] for length in LENGTHS)  # the first token of a prompt follows none
    cross_entropy = -(sum(own[0] for own in LOG_PROBS) + sum(of_prompts)) / num_tokens
    expected = cross_entropy - beta * mean(math.log(sigmoid(math.log(ratio))) for ratio in ratios)
    outputs = likelihoods(reference=None, of_prompts=of_prompts)
    assert objective(ORPO(beta=beta), outputs, batch) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orpo_of_an_answer_with_probability_one_is_finite(dtype: torch.dtype) -> None:
    """trl#1473, trl#3237, axolotl PR#3910: log1p(-exp(0)) is -inf, and its gradient not a number."""
    loss, batch = ORPO(beta=0.1), make_batch(LENGTHS)
    for log_probs in ([[0.0, -1e-9], [-1e-9, 0.0], [0.0, 0.0]], [[-900.0, 0.0], [0.0, -900.0], [-1e-7, -1.0]]):
        given = torch.tensor(log_probs, dtype=dtype, requires_grad=True)
        total = sum_by_count(loss(Likelihoods(given, of_prompts=torch.zeros(3, dtype=dtype)), batch))
        divided = divide(total, loss.counts(batch))
        divided.backward()
        assert divided.isfinite()
        assert given.grad is not None
        assert given.grad.isfinite().all()


def test_log1mexp_keeps_its_digits_where_one_less_the_probability_is_small_and_where_it_is_large() -> None:
    x = torch.cat([-torch.logspace(-7, 1.9, 200), torch.tensor([-0.6931471805599453])]).requires_grad_()
    found = log1mexp(x)
    found.sum().backward()
    wide = x.detach().double()
    assert x.grad is not None
    expected = torch.where(wide > -1, torch.log(-torch.expm1(wide)), torch.log1p(-torch.exp(wide)))
    assert found.detach().double().numpy() == pytest.approx(expected.numpy(), rel=5e-7)
    assert x.grad.double().numpy() == pytest.approx((-1 / torch.expm1(-wide)).numpy(), rel=1e-6)
    naive = torch.log1p(-torch.exp(torch.tensor(-1e-9)))
    assert naive == -math.inf


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (DPO(beta=0.1, kind="sigmoid", label_smoothing=0, nll_weight=0), math.log(2)),
        (DPO(beta=0.1, kind="sigmoid", label_smoothing=0.3, nll_weight=0), math.log(2)),
        (DPO(beta=0.1, kind="robust", label_smoothing=0.3, nll_weight=0), math.log(2)),
        (DPO(beta=0.1, kind="hinge", label_smoothing=0, nll_weight=0), 1.0),
        (DPO(beta=0.1, kind="ipo", label_smoothing=0, nll_weight=0), 25.0),
    ],
)
def test_at_the_reference_the_loss_is_ln_2_and_every_reward_0(loss: DPO, expected: float) -> None:
    """dpo#34, trl#1236: a reference that differs at step 0 shows in both."""
    batch, outputs = make_batch(LENGTHS), likelihoods(LOG_PROBS, LOG_PROBS)
    terms = loss(outputs, batch)
    counts = loss.counts(batch)
    assert divide(sum_by_count(terms), counts).item() == pytest.approx(expected, rel=1e-12)
    logged = measures(terms, counts)
    assert (logged["chosen_reward"], logged["rejected_reward"], logged["margin"], logged["accuracy"]) == (0, 0, 0, 0)


def test_the_falling_log_probability_of_chosen_answers_is_logged_although_the_margin_grows() -> None:
    """dpo#32, dpo#36, trl#800, LlamaFactory#6153."""
    loss, batch = DPO(beta=0.1, kind="sigmoid", label_smoothing=0, nll_weight=0), make_batch(LENGTHS)
    fallen = [[chosen - 5, rejected - 15] for chosen, rejected in REFERENCE]
    before, after = (
        measures(loss(likelihoods(log_probs), batch), loss.counts(batch)) for log_probs in (REFERENCE, fallen)
    )
    assert after["margin"] - before["margin"] == pytest.approx(0.1 * 10)
    assert after["chosen_log_prob"] - before["chosen_log_prob"] == pytest.approx(-5)
    assert after["rejected_log_prob"] - before["rejected_log_prob"] == pytest.approx(-15)


def test_log_ratios_are_means_over_pairs_of_what_a_token_has_gained_on_the_reference() -> None:
    loss, batch = DPO(beta=0.7, kind="ipo", label_smoothing=0, nll_weight=0), make_batch(LENGTHS)
    moved = [
        [chosen + 0.3 * lengths[0], rejected - 0.2 * lengths[1]]
        for (chosen, rejected), lengths in zip(REFERENCE, LENGTHS, strict=True)
    ]
    logged = measures(loss(likelihoods(moved), batch), loss.counts(batch))
    assert logged["chosen_log_ratio"] == pytest.approx(0.3, rel=1e-12), "whatever the lengths, and beta"
    assert logged["rejected_log_ratio"] == pytest.approx(-0.2, rel=1e-12)


def test_nll_weight_pulls_chosen_answers_up_by_their_tokens() -> None:
    batch, gradients = make_batch(LENGTHS), []
    for weight in (0.0, 0.6):
        loss = DPO(beta=0.1, kind="sigmoid", label_smoothing=0, nll_weight=weight)
        outputs = likelihoods()
        divide(sum_by_count(loss(outputs, batch)), loss.counts(batch)).backward()
        assert outputs.log_probs.grad is not None
        gradients.append(outputs.log_probs.grad)
    num_tokens = sum(length[0] for length in LENGTHS)
    expected = torch.tensor([[-0.6 / num_tokens, 0.0]] * 3, dtype=torch.float64)
    torch.testing.assert_close(gradients[1] - gradients[0], expected, rtol=1e-12, atol=1e-15)


def test_kto_weighs_good_and_bad_answers_and_its_divergence_has_no_gradient() -> None:
    ratios, labels, kl, beta = [0.5, -2.0, 4.0], [1.0, 0.0, 1.0], 0.75, 0.3
    good = [1.5 * (1 - sigmoid(beta * (ratio - kl))) for ratio, label in zip(ratios, labels, strict=True) if label]
    bad = [0.5 * (1 - sigmoid(beta * (kl - ratio))) for ratio, label in zip(ratios, labels, strict=True) if not label]
    loss = KTO(beta=beta, desirable_weight=1.5, undesirable_weight=0.5)
    batch = make_batch([[2], [3], [4]], label=torch.tensor(labels))
    outputs = likelihoods([[ratio - 7] for ratio in ratios], [[-7.0]] * 3, kl=kl)
    assert objective(loss, outputs, batch) == pytest.approx((sum(good) + sum(bad)) / 3, rel=1e-12)
    assert outputs.kl is not None
    assert not outputs.kl.requires_grad


@pytest.mark.parametrize("loss", [LOSSES[name] for name in ("dpo_nll", "dpo_ipo", "orpo", "simpo", "kto")])
def test_a_sample_that_only_fills_up_enters_no_sum_and_no_count(loss: AnswerLoss) -> None:
    found = []
    for more in ([], [[-1e4, 3e4]]):
        log_probs, reference = (
            [pair[: loss.num_answers] for pair in values + more] for values in (LOG_PROBS, REFERENCE)
        )
        lengths = [pair[: loss.num_answers] for pair in LENGTHS + [[0, 0]] * len(more)]
        batch = make_batch(lengths, label=torch.tensor([1.0, 0.0, 1.0, 0.0])[: len(lengths)])
        terms = loss(likelihoods(log_probs, reference, [-1.0] * len(lengths), kl=0.5), batch)
        counts = {name: int(value) for name, value in loss.counts(batch).items()}
        found.append(([term.sum.item() for term in terms], counts))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["hinge", "ipo"])
def test_label_smoothing_of_a_loss_without_a_probability_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match=f"the loss of kind {kind} has no probability to smooth"):
        DPO(beta=0.1, kind=kind, label_smoothing=0.1, nll_weight=0)
