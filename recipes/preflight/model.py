"""Check the model at initialization by forward passes on one micro-batch, on every rank, under the run's strategy.

Shapes: B samples, T tokens, V classes.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.loss import get_mean, logged_by_count, sum_by_count
from recipes.loss.cross_entropy import CrossEntropy
from recipes.numerics.loss import IGNORE_INDEX
from recipes.preflight.result import Result, judge
from recipes.task.base import Batch, TrainingTask

Forward = Callable[[Batch], tuple[Tensor, Tensor]]  # a micro-batch -> its loss and logits
Context = Callable[[], contextlib.AbstractContextManager[Any]]
# largest difference that rounding in bfloat16 makes between equal results, as a share of the largest logit
_ROUNDING = 0.05
_SILENT = 0.8  # fraction of inactive units; about half is normal after a ReLU


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Expected properties of the model according to the config.

    Attributes:
        num_classes: V without padding; None: no setting of the model says, and it is what the model returns.
        starts_trained: Whether it starts from pretrained weights.
        in_float8: Whether its matmuls use float8 with tensor-wise scales.
    """

    num_classes: int | None
    starts_trained: bool
    in_float8: bool


def check_model(
    task: TrainingTask, batch: Batch, expected: Expected, *, context: Context, mean_over_ranks: Callable[[float], float]
) -> Iterator[Result]:
    """Yield the results of all checks of a model. Collective: call it on every rank.

    Args:
        task: Task with its model built and on the device; in training mode before and after.
        batch: A micro-batch on the device.
        expected: Expected properties.
        context: Context of a forward pass in the run's precision.
        mean_over_ranks: Averages a scalar over all ranks.
    """

    def forward(part: Batch) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), context():
            outputs = task.outputs(part)
            is_of_rows = isinstance(outputs, Tensor) and len(outputs) == len(part["targets"])
            shown = outputs.float() if is_of_rows else torch.empty(0)
            return get_mean(task.loss, outputs, part).float(), shown

    task.model.eval()
    predicts_classes = isinstance(task.loss, CrossEntropy)
    first_loss, outputs = forward(batch)
    first = mean_over_ranks(float(first_loss))
    if not outputs.numel():
        task.model.train()
        yield _check_finite(first)
        found = "the loss reads something else than the outputs of the model"
        yield Result(check="outputs of single tokens and samples", status="skip", found=found)
        return
    expected = replace(expected, num_classes=expected.num_classes or outputs.shape[-1])
    if predicts_classes:
        yield _check_first_loss(first, expected)
        yield _check_loss(*forward(batch), batch, expected)
    else:
        yield _check_finite(first)
    is_plain = not task.frozen_models  # whose terms have no formula here
    if is_plain and isinstance(task.loss, CrossEntropy) and (task.loss.label_smoothing or task.loss.z_loss):
        yield _check_objective(task, task.loss, batch, forward, context, expected)
    whole = _cut_padding(batch)
    if task.is_causal:
        yield _check_future(whole, forward, expected, image_token_id=getattr(task.model, "image_token_id", None))
    yield _check_neighbours(batch, forward)
    yield _check_repeatable(batch, forward)
    task.model.train()  # batch norm has no running statistics yet
    yield _check_activations(task.model, lambda: forward(whole), mean_over_ranks)
    yield _check_dropout(task.model, batch, forward)


def _check_finite(loss: float) -> Result:
    remedy = "the first forward pass already overflows, or targets are not finite"
    is_finite = math.isfinite(loss)
    return judge("loss before the first step", f"{loss:.3f}", passes=is_finite, fails=not is_finite, remedy=remedy)


def _cut_padding(batch: Batch) -> Batch:
    """Return the samples up to the end of the shortest, so that padding is in no statistic of the checks."""
    if "num_inputs" not in batch:
        return batch
    # tensor-parallel ranks, of which a node has up to 8, divide the tokens
    length = max(int(batch["num_inputs"].min()) // 8 * 8, 8)
    cut = {name: batch[name][:, :length] for name in ("inputs", "targets", "positions") if name in batch}  # [B, t]
    return batch | cut | {"num_inputs": batch["num_inputs"].clamp(max=length)}


def _check_first_loss(loss: float, expected: Expected) -> Result:
    name = "loss before the first step"
    assert expected.num_classes is not None, "check_model has set it"
    uniform = math.log(expected.num_classes)
    found = f"{loss:.3f}; a uniform guess has ln({expected.num_classes}) = {uniform:.3f}"
    if expected.starts_trained:
        remedy = "trained weights guess no better than chance: another tokenizer, or weights that were not loaded"
        return judge(name, found, passes=loss < uniform, remedy=remedy)
    if not math.isfinite(loss):
        return Result(check=name, status="fail", found=found, remedy="the first forward pass already overflows")
    if loss < 0.9 * uniform - 0.1:
        remedy = "the model knows the answer before it has learned: the targets leak into the inputs"
        return Result(check=name, status="fail", found=found, remedy=remedy)
    excess = loss - uniform
    passes, fails = excess <= 0.1 * uniform + 0.3, excess > 0.5 * uniform + 0.5
    remedy = "the initial weights are too large: the model is confident in wrong answers and must unlearn them first"
    return judge(name, found, passes=passes, fails=fails, remedy=remedy)


def _check_loss(loss: Tensor, logits: Tensor, batch: Batch, expected: Expected) -> Result:
    """Compare the task's loss with the cross-entropy of its logits over the real classes."""
    real = logits[..., : expected.num_classes].flatten(0, -2)  # [B * T, V]
    targets = batch["targets"]  # [B, T], or probabilities [B, V] of mixed samples
    known = targets if targets.is_floating_point() else targets.flatten()
    own = float(F.cross_entropy(real, known, ignore_index=IGNORE_INDEX))
    found = f"{float(loss):.5f}; of the logits over {expected.num_classes} classes {own:.5f}"
    passes = math.isclose(float(loss), own, rel_tol=1e-3, abs_tol=1e-5)
    remedy = "the loss is divided by something other than its number of targets, or counts classes that do not exist"
    return judge("loss is the cross-entropy", found, passes=passes, remedy=remedy)


def _check_objective(
    task: TrainingTask, loss: CrossEntropy, batch: Batch, forward: Forward, context: Context, expected: Expected
) -> Result:
    """Compare what training minimizes with the formulas of label smoothing and z-loss over the real classes."""
    with torch.no_grad(), context():
        terms = task.terms(batch)
    [objective], [loss_sum] = (list(sums.values()) for sums in (sum_by_count(terms), logged_by_count(terms)))
    _, logits = forward(batch)
    real = logits[..., : expected.num_classes].flatten(0, -2).double()  # [B * T, V]
    carries = loss.has_loss(batch["targets"]).flatten()  # [B * T]
    log_probabilities = real.log_softmax(dim=-1)
    if batch["targets"].is_floating_point():  # probabilities [B, V] of mixed samples
        target = (log_probabilities * batch["targets"]).sum(dim=-1)
    else:
        target = log_probabilities.gather(1, batch["targets"].flatten().clamp(min=0)[:, None]).squeeze(1)
    smoothing = loss.label_smoothing
    each = -(1 - smoothing) * target - smoothing * log_probabilities.mean(dim=-1)
    each = each + loss.z_loss * real.logsumexp(dim=-1).square()
    own = float(each[carries].sum())
    found = f"objective {objective:.4f}, by the formulas over {expected.num_classes} classes {own:.4f}"
    passes = math.isclose(float(objective), own, rel_tol=2e-3)
    if passes:
        found += f" (loss {loss_sum:.4f})"
    remedy = "label smoothing or z-loss counts the columns that pad the vocabulary: cut the logits at model.vocab_size"
    return judge("regularizers leave padding out", found, passes=passes, remedy=remedy)


def _check_future(batch: Batch, forward: Forward, expected: Expected, *, image_token_id: int | None) -> Result:
    """Change one token of the first sample: only later logits may change, and must.

    Args:
        batch: A micro-batch.
        forward: Computes logits.
        expected: Expected properties.
        image_token_id: Token that stands for a part of an image, of which there are as many as in the images.
    """
    name = "no leak from the future"
    first = _first_samples(batch, 1)
    inputs = first["inputs"]  # [1, T]
    length = inputs.shape[1]
    if length < 2:
        return Result(check=name, status="skip", found="the samples have one token")
    if expected.in_float8:  # one token may set the scale that rounds all others
        return Result(check=name, status="skip", found="float8 scales depend on all tokens: try precision=bf16-mixed")
    assert expected.num_classes is not None, "check_model has set it"
    place = length // 2
    changed = inputs.clone()
    other = (int(changed[0, place]) + 1) % expected.num_classes
    changed[0, place] = (other + 1) % expected.num_classes if other == image_token_id else other
    before = forward(first)[1][0, :, : expected.num_classes]  # [T, V]
    after = forward(first | {"inputs": changed})[1][0, :, : expected.num_classes]
    moved = (after - before).abs().amax(dim=-1)  # [T]
    earlier, later = float(moved[:place].max()), float(moved[place:].max())
    found = f"changing token {place} moves logits before it by {earlier:.2g}, from it on by {later:.2g}"
    if later == 0.0:
        return Result(check=name, status="fail", found=found, remedy="the model does not read its inputs")
    remedy = "attention is not causal, or positions are mixed: the validation loss will be too good, generation bad"
    return judge(name, found, passes=earlier <= 1e-3 * later, remedy=remedy)


def _check_neighbours(batch: Batch, forward: Forward) -> Result:
    """Drop the second half of the batch: the logits of the first half must not change."""
    name = "samples are independent"
    size = len(batch["targets"])
    if size < 2:
        return Result(check=name, status="skip", found="the micro-batch is one sample")
    half = _first_samples(batch, size // 2)
    whole, part = forward(batch)[1][: size // 2], forward(half)[1]
    finite = whole.isfinite() & part.isfinite()  # padding columns are -inf
    if not finite.any():
        return Result(check=name, status="fail", found="no logit is finite", remedy="look at the initial weights")
    moved, largest = float((whole - part)[finite].abs().max()), float(whole[finite].abs().max())
    found = f"without the other half of the batch, logits of up to {largest:.3g} move by {moved:.2g}"
    remedy = "evaluation depends on what else is in the batch: batch norm in training mode, or a mixed-up dimension"
    return judge(name, found, passes=moved <= _ROUNDING * largest, remedy=remedy)


def _first_samples(batch: Batch, size: int) -> Batch:
    first = {key: value[:size] if isinstance(value, Tensor) and value.ndim else value for key, value in batch.items()}
    if "num_images" in batch:  # each sample has a number of images among its tokens
        first["images"] = batch["images"][: max(int(first["num_images"].sum()), 1)]
    return first


def _check_repeatable(batch: Batch, forward: Forward) -> Result:
    first, second = (float(forward(batch)[0]) for _ in range(2))
    found = f"loss {first:.6f}, and {second:.6f} for the same batch again"
    remedy = "dropout or another source of noise stays on in evaluation: it must read self.training"
    return judge("evaluation is repeatable", found, passes=math.isclose(first, second, rel_tol=1e-5), remedy=remedy)


def _check_dropout(model: nn.Module, batch: Batch, forward: Forward) -> Result:
    name = "training mode differs as set"
    rates = sorted({module.p for module in model.modules() if isinstance(module, nn.Dropout) and module.p > 0})
    first, second = (float(forward(batch)[0]) for _ in range(2))
    found = f"loss {first:.6f} and {second:.6f}, dropout {', '.join(f'{rate:g}' for rate in rates) or 'none'}"
    if rates and first == second:
        return Result(check=name, status="fail", found=found, remedy="dropout is set and has no effect in training")
    passes = bool(rates) or math.isclose(first, second, rel_tol=1e-3)
    return judge(name, found, passes=passes, fails=False, remedy="something other than dropout makes training noisy")


def _check_activations(model: nn.Module, run: Callable[[], Any], mean_over_ranks: Callable[[float], float]) -> Result:
    """Check the inputs of every weight: units that are silent for the whole batch, and the scale over depth."""
    name = "activations are alive"
    silent: dict[str, float] = {}
    scales: list[float] = []

    def read(module_name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if not inputs or not isinstance(inputs[0], Tensor) or not inputs[0].is_floating_point():
                return
            value = inputs[0].detach().float()
            units = value.movedim(1, -1) if isinstance(module, nn.Conv2d) else value
            peaks = units.flatten(0, -2).abs().amax(dim=0)  # [units]
            silent[module_name] = float((peaks <= 1e-6 * peaks.max()).double().mean())
            scales.append(float(value.square().mean().sqrt()))

        return hook

    handles = [
        module.register_forward_pre_hook(read(module_name))
        for module_name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    if not silent:
        return Result(check=name, status="skip", found="no linear layer or convolution was called as a module")
    worst = max(silent, key=lambda key: silent[key])
    low, high = (mean_over_ranks(value) for value in (min(scales), max(scales)))
    found = f"{silent[worst]:.0%} silent units where most are ({worst}), scale of inputs {low:.2g} to {high:.2g}"
    if not math.isfinite(high):
        return Result(check=name, status="fail", found=found, remedy="activations overflow before the first step")
    passes = not (silent[worst] > _SILENT or high > 1e3 * max(low, 1e-12))
    remedy = "units that nothing reaches do not learn; a scale that grows with depth saturates what follows"
    return judge(name, found, passes=passes, fails=False, remedy=f"{remedy}: look at the initial weights")
