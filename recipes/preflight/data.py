"""Checks of the data without a model: shift, range, repeats, splits, and dependence of targets on inputs.

Shapes: N samples, T tokens.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.data import SampleDataset
from recipes.data.draws import has_draws, rng_at
from recipes.numerics.loss import IGNORE_INDEX
from recipes.preflight.result import Result, judge

Sample = Mapping[str, Tensor]

RANGE = "targets are classes of the model"
NUMBERS = "targets are numbers of the model"
READABLE = "images can be decoded"

_MAX_TOKENS = 200_000  # to count pairs in: enough to see structure in any vocabulary, a second of counting
_MAX_IMAGES = 1024
_MAX_DRAWN = 64
_MAX_IMBALANCE = 20
_MAX_REPEATED, _NEARLY_ALL = 0.1, 0.9  # of the captions
_LIKELY = 0.5  # label, from 0 to 1
_NUM_NAMED = 3  # files that cannot be read
_MAX_PIXELS = 1024  # sampled when two images are compared
_PRIOR = 5.0  # pseudo-counts of the frequencies of single tokens, in the frequencies of pairs
_MIN_GAIN = 0.02  # nats per token; shuffled targets gain less than nothing


def spread(dataset: SampleDataset, num_samples: int) -> list[Sample]:
    """Return samples spread evenly over a dataset, all of them if it has no more."""
    return [dataset[index] for index in spread_indices(dataset, num_samples)]


def spread_indices(dataset: SampleDataset, num_samples: int) -> list[int]:
    """Return indices spread evenly over a dataset, all of them if it has no more."""
    total = len(dataset)
    count = min(num_samples, total)
    return [i * total // count for i in range(count)]


def draw_each(dataset: Any, indices: Sequence[int], *, seed: int, position: int = 0) -> list[Sample]:
    """Return samples, drawn at consecutive positions if they are random."""
    if not has_draws(dataset):
        return [dataset[index] for index in indices]
    return [dataset.sample(index, rng_at(seed, position + number)) for number, index in enumerate(indices)]


def digest(inputs: Tensor, num_inputs: Any = None, images: Tensor | None = None) -> bytes:
    """Return a hash of a sample's inputs, without padding: how much there is depends on the other samples of a batch.

    Args:
        inputs: [T], or an image.
        num_inputs: Number of inputs that are tokens; None: all.
        images: Those among its tokens, [N, C, S, S]: one question may be asked of many; None: there are none.
    """
    inputs = inputs if num_inputs is None else inputs[: int(num_inputs)]
    parts = (inputs,) if images is None else (inputs, images)
    joined = b"".join(part.contiguous().cpu().numpy().tobytes() for part in parts)
    return hashlib.blake2b(joined, digest_size=12).digest()


def check_shift(samples: Sequence[Sample]) -> Result:
    """Check that the target at each position is the input at the next one."""
    name = "targets are the next tokens"
    shifted = same = count = 0
    for sample in samples:
        inputs, targets = sample["inputs"], sample["targets"]  # [T] each, or [K, T]
        inputs, targets = torch.atleast_2d(inputs).T, torch.atleast_2d(targets).T  # [T, K]
        counts = targets[:-1] != IGNORE_INDEX
        if "num_inputs" in sample:  # nor is padding the input after the last one
            counts = counts & (torch.arange(len(counts))[:, None] < sample["num_inputs"] - 1)
        if "positions" in sample:  # the last target of a packed document is not the first input of the next one
            counts = counts & (sample["positions"][1:, None] != 0)
        count += int(counts.sum())
        shifted += int((targets[:-1] == inputs[1:])[counts].sum())
        same += int((targets[:-1] == inputs[:-1])[counts].sum())
    if count == 0:
        return Result(check=name, status="warn", found="no target carries loss", remedy="look at the mask of the data")
    if shifted == count:
        return Result(check=name, status="pass", found=f"{count:,} of {count:,}")
    if same > 0.9 * count:
        return Result(
            check=name,
            status="fail",
            found=f"{same:,} of {count:,} targets are the input at the same position: the model learns to copy",
            remedy="shift the targets by one in the data source: targets[t] = tokens[t + 1]",
        )
    return Result(
        check=name,
        status="warn" if shifted > 0.9 * count else "fail",
        found=f"only {shifted:,} of {count:,} targets are the next input",
        remedy="right for targets that cross documents or come from elsewhere; else the data source shifts wrongly",
    )


def check_readable(bad: Sequence[tuple[str, str]], num_tried: int, *, skips: bool) -> Result:
    """Check that files of the data can be read.

    Args:
        bad: Name of each of those tried that cannot, and why.
        num_tried: Files that were tried.
        skips: Whether training replaces them; it ends at the first one otherwise.
    """
    found = f"{len(bad):,} of {num_tried:,} tried cannot be decoded"
    found += "".join(f"; {name}: {reason}" for name, reason in bad[:_NUM_NAMED])
    remedy = "they are replaced by the next ones: without them, every image is read once an epoch"
    if not skips:
        remedy = "training ends at the first one: data.on_bad_image=skip, or the data without them"
    return judge(READABLE, found, passes=not bad, fails=not skips, remedy=remedy)


def check_balance(of_each: Mapping[str, int]) -> Result:
    """Check that no class is so much rarer than another that a mean over samples hardly sees it.

    Args:
        of_each: Training samples of each class by its name.
    """
    rarest, most = min(of_each, key=of_each.__getitem__), max(of_each, key=of_each.__getitem__)
    found = f"{of_each[rarest]:,} of {rarest!r} to {of_each[most]:,} of {most!r}, in {len(of_each):,} classes"
    remedy = "accuracy hardly depends on rare classes: look at val/f1, or weigh them with +loss.class_weights=[…]"
    passes = of_each[most] <= _MAX_IMBALANCE * of_each[rarest]
    return judge("classes have similar sizes", found, passes=passes, fails=False, remedy=remedy)


def check_captions(samples: Sequence[Sample]) -> Result:
    """Check that few captions are those of several images, which nothing tells apart."""
    images: dict[int, set[int]] = {}
    for sample in samples:
        images.setdefault(int(sample["caption"]), set()).add(int(sample["image"]))
    repeated = sum(len(images[int(sample["caption"])]) > 1 for sample in samples)
    found = f"{repeated:,} of {len(samples):,} images have the caption of another one"
    passes, fails = repeated <= _MAX_REPEATED * len(samples), repeated > _NEARLY_ALL * len(samples)
    remedy = "the loss cannot fall below what they leave open: data.caption=<a column that says more>"
    return judge("captions tell images apart", found, passes=passes, fails=fails, remedy=remedy)


def check_range(samples: Sequence[Sample], num_classes: int) -> Result:
    """Check that every target is a class that the model predicts, and how many of those without padding carry loss."""
    targets = torch.cat([_without_padding(sample) for sample in samples])  # [N * T]
    carries = targets != IGNORE_INDEX
    wrong = carries & ((targets < 0) | (targets >= num_classes))
    if wrong.any():
        example = int(targets[wrong][0])
        return Result(
            check=RANGE,
            status="fail",
            found=f"{int(wrong.sum()):,} of {len(targets):,} are outside 0 to {num_classes - 1}, as {example}",
            remedy="the tokenizer or the classes of the data are not those of the model: model.vocab_size, num_classes",
        )
    share = float(carries.double().mean())
    found = f"{int(carries.sum()):,} targets, all in 0 to {num_classes - 1}; {share:.0%} carry loss"
    if share == 0.0:
        return Result(check=RANGE, status="fail", found=found, remedy="look at the mask of the data")
    return Result(check=RANGE, status="pass", found=found)


def _without_padding(sample: Sample) -> torch.Tensor:
    """Return the targets of a sample, [T], or of its rows one after the other."""
    targets, num_inputs = sample["targets"], sample.get("num_inputs")
    if num_inputs is None or num_inputs.ndim == 0:
        return targets.flatten()[:num_inputs]
    return torch.cat([row[:length] for row, length in zip(targets, num_inputs.tolist(), strict=True)])


def check_numbers(samples: Sequence[Sample], num_outputs: int, *, are_labels: bool) -> Result:
    """Check that targets are as many finite numbers as the model has outputs, that they vary, and labels are 0 to 1."""
    targets = torch.stack([sample["targets"].float().reshape(-1) for sample in samples])  # [N, V]
    known = ~targets.isnan()
    values = targets[known]
    spread_out = float(values.std()) if len(values) > 1 else 0.0
    low, high = (float(values.min()), float(values.max())) if len(values) else (math.nan, math.nan)
    found = (
        f"{targets.shape[1]} per sample for {num_outputs} outputs, from {low:.3g} to {high:.3g}, standard deviation"
        f" {spread_out:.3g}; {float(known.double().mean()):.0%} are known"
    )
    if targets.shape[1] != num_outputs:
        remedy = "set model.num_classes to the number of targets of a sample"
        return Result(check=NUMBERS, status="fail", found=found, remedy=remedy)
    if not math.isfinite(high - low) or spread_out == 0.0:
        return Result(check=NUMBERS, status="fail", found=found, remedy="look at the targets of the data")
    if are_labels and not (low >= 0 and high <= 1):
        return Result(check=NUMBERS, status="fail", found=found, remedy="labels are 0 or 1, NaN where one is unknown")
    return Result(check=NUMBERS, status="pass", found=found)


def check_similarity(samples: Sequence[Sample], *, kind: str = "image") -> Result:
    """Check, without a model, that similar inputs have similar numbers as targets.

    Args:
        samples: Some samples.
        kind: What one of them is, in a word.
    """
    targets = torch.stack([sample["targets"].double().reshape(-1) for sample in samples[:_MAX_IMAGES]])  # [N, V]
    targets = targets.nan_to_num()
    nearest = _find_nearest(samples)  # [N]
    errors = (targets - targets[nearest]).square().sum(dim=1)  # [N]
    chance = 2 * float(targets.var(dim=0).sum())  # of two samples drawn at random
    found = f"squared distance {float(errors.mean()):.3g} to the nearest other {kind}'s, by chance {chance:.3g}"
    passes = float(errors.mean()) < chance - 4 * float(errors.std()) / math.sqrt(len(errors))
    remedy = "inputs and targets do not match: check where the data source pairs, shuffles or sorts them"
    return judge("inputs are predictive of targets", found, passes=passes, fails=False, remedy=remedy)


def check_dependence(samples: Sequence[Sample], *, is_text: bool, kind: str = "image") -> Result:
    """Check, without a model, that inputs are informative about targets: otherwise no model can learn.

    Args:
        samples: Some samples.
        is_text: Whether they are tokens.
        kind: What one of them is, in a word.
    """
    name = "inputs are predictive of targets"
    remedy = "inputs and targets do not match: check where the data source pairs, shuffles or sorts them"
    if is_text:
        alone, given = _pair_entropies(samples)
        found = f"{alone:.2f} nats per target from frequencies alone, {given:.2f} from the input before it"
        return judge(name, found, passes=alone - given >= _MIN_GAIN, remedy=remedy)
    if samples[0]["targets"].ndim > 0:
        return Result(check=name, status="skip", found=f"each {kind} has several classes, not one")
    accuracy, chance, error = _nearest_neighbour(samples)
    found = f"the nearest other {kind} has the same class in {accuracy:.0%}, by chance {chance:.0%}"
    passes = accuracy > chance + 4 * error
    if not passes and len({int(sample["targets"]) for sample in samples}) > len(samples) // 8:
        return Result(check=name, status="skip", found=f"{found}: too few {kind}s of each class to tell")
    return judge(name, found, passes=passes, remedy=remedy)


def _pair_entropies(samples: Sequence[Sample]) -> tuple[float, float]:
    """Return held-out cross-entropies in nats of a unigram and a bigram model."""
    # alternating, not in halves: packed rows are sorted by length
    counted, held_out = _pairs(samples[::2]), _pairs(samples[1::2])
    targets, inputs, pairs = Counter(y for _, y in counted), Counter(x for x, _ in counted), Counter(counted)
    total, kinds = len(counted), len(targets) + 1
    alone = given = 0.0
    for x, y in held_out:
        # add-one smoothing: unseen pairs are rare, not impossible
        frequency = (targets[y] + 1) / (total + kinds)
        alone -= math.log(frequency)
        given -= math.log((pairs[x, y] + _PRIOR * frequency) / (inputs[x] + _PRIOR))
    return alone / max(len(held_out), 1), given / max(len(held_out), 1)


def _pairs(samples: Iterable[Sample]) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    for sample in samples:
        pairs += [
            (x, y)
            for x, y in zip(sample["inputs"].tolist(), sample["targets"].tolist(), strict=True)
            if y != IGNORE_INDEX
        ]
        if len(pairs) >= _MAX_TOKENS // 2:
            break
    return pairs


def _nearest_neighbour(samples: Sequence[Sample]) -> tuple[float, float, float]:
    """Return the accuracy of the nearest other sample's class, the chance level, and its standard error."""
    labels = torch.stack([sample["targets"] for sample in samples[:_MAX_IMAGES]])  # [N]
    accuracy = float((labels[_find_nearest(samples)] == labels).double().mean())
    shares = torch.bincount(labels).double() / len(labels)
    chance = float(shares.square().sum())
    return accuracy, chance, math.sqrt(chance * (1 - chance) / len(labels))


def _find_nearest(samples: Sequence[Sample]) -> Tensor:
    """Return the index of the most similar other sample of each sample, [N] int64."""
    inputs = torch.stack([sample["inputs"].float() for sample in samples[:_MAX_IMAGES]])  # [N, C, H, W], or [N, …]
    if inputs.ndim == 4:
        side = max(int(math.sqrt(_MAX_PIXELS / inputs.shape[1])), 1)
        inputs = F.adaptive_avg_pool2d(inputs, side) if inputs.shape[-1] > side else inputs
        flat = inputs.flatten(1)  # [N, pixels]
    else:  # columns may have different units
        flat = inputs.reshape(len(inputs), -1)
        flat = flat[:, :: max(flat.shape[1] // _MAX_PIXELS, 1)]
        flat = (flat - flat.mean(dim=0)) / flat.std(dim=0).clamp(min=1e-12)
    distances = torch.cdist(flat, flat)  # [N, N]
    distances.fill_diagonal_(math.inf)
    return distances.argmin(dim=1)


def check_draws(dataset: SampleDataset, *, seed: int) -> Result:
    """Check that a random sample is the same when it is drawn again at its position, and another one elsewhere."""
    indices = spread_indices(dataset, _MAX_DRAWN)
    first, again, elsewhere = (draw_each(dataset, indices, seed=seed, position=at) for at in (0, 0, _MAX_DRAWN))
    changed = sum(not _are_equal(*pair) for pair in zip(first, again, strict=True))
    same = sum(_are_equal(*pair) for pair in zip(first, elsewhere, strict=True))
    found = f"{changed} of {len(first)} differ when drawn again at the same position, {same} are the same at another"
    remedy = "`sample` must draw from the generator that it gets alone: a resumed run would train on other samples"
    if not changed:
        remedy = "it draws nothing, or rarely: without `sample`, the dataset is read by index"
    passes = changed == 0 and same < len(first)
    if not getattr(dataset, "always_draws", True) and changed == 0:
        passes, found = True, found if passes else f"{found}: nothing is drawn"
    return judge("a position draws its sample", found, passes=passes, fails=changed > 0, remedy=remedy)


def _are_equal(one: Sample, other: Sample) -> bool:
    pairs = [(one[name], other[name]) for name in one]
    # not `torch.equal`: a target of NaN has no loss
    return all(a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in pairs)


def digest_each(dataset: SampleDataset, num_samples: int) -> list[bytes]:
    """Return the hash of the inputs of samples spread evenly over a dataset, of which one is in memory at a time."""
    samples = (dataset[index] for index in spread_indices(dataset, num_samples))
    return [digest(sample["inputs"], images=sample.get("images")) for sample in samples]


def check_splits(train: Sequence[bytes], val: Sequence[bytes], *, is_complete: bool) -> Result:
    """Check that no validation sample is among the training samples.

    Args:
        train: Hashes of training samples.
        val: Hashes of validation samples.
        is_complete: Whether both are the whole splits.
    """
    known = {*train}
    common = sum(each in known for each in val)
    found = f"{common} of {len(val):,} are among {len(train):,} training samples{'' if is_complete else ' checked'}"
    remedy = "the validation loss will look better than it is: split by document or by source"
    return judge("validation samples are new", found, passes=common == 0, fails=common > 0.1 * len(val), remedy=remedy)


def check_repeats(digests: Sequence[bytes], num_samples: int, *, num_reads: int = 1) -> Result:
    """Check that the training stream does not repeat samples within an epoch.

    Args:
        digests: Input hashes of consecutive samples over all ranks.
        num_samples: Samples left in the epoch in which they begin.
        num_reads: Times that the order has each sample in an epoch.
    """
    drawn = digests[:num_samples]
    repeated = max(len(drawn) - num_reads * len(set(drawn)), 0)
    found = (
        f"{repeated} of {len(drawn):,} samples are repeats, before the remaining {num_samples:,} of the epoch are used"
    )
    passes, fails = repeated <= 0.01 * len(drawn), repeated > 0.1 * len(drawn)
    remedy = "the loader gives the same samples again, or several ranks the same ones; or the data holds duplicates"
    return judge("the stream brings new samples", found, passes=passes, fails=fails, remedy=remedy)


def describe_targets(targets: Tensor, names: Sequence[str] | None = None) -> str:
    """Describe the targets of one sample: its class or labels, by name where names are known, or its first numbers."""
    if not targets.is_floating_point() and targets.ndim == 0:
        number = int(targets)
        return f"class {number if names is None or not 0 <= number < len(names) else names[number]}"
    if names is not None and targets.ndim == 1:
        shown = [name for name, value in zip(names, targets.tolist(), strict=True) if value > _LIKELY]
        return ", ".join(shown[:4]) or "no label"
    values = ", ".join(f"{value:.3g}" for value in targets.reshape(-1)[:4].tolist())
    return f"targets {values}{', …' if targets.numel() > 4 else ''}"


def describe_caption(sample: Sample, decode: Any) -> str:
    """Return the caption of a sample as the model reads it, with the tokens that the tokenizer adds.

    Args:
        sample: Has tokens [T], and is_token [T].
        decode: Token ids -> text.
    """
    return f"caption {decode(sample['tokens'][sample['is_token']].tolist())!r}"


def show_samples(
    samples: Sequence[Sample], decode: Any, *, is_text: bool = True, names: Sequence[str] | None = None
) -> list[str]:
    """Format inputs and targets of samples for visual inspection.

    Args:
        samples: A few samples; those without targets are prompts.
        decode: Token ids -> text; None shows ids.
        is_text: Whether inputs [T] are tokens.
        names: Names of the classes or labels; None: they have none.
    """
    shown = []
    for sample in samples:
        inputs, targets = sample["inputs"], sample.get("targets")
        if targets is None:
            shown.append(f"prompt: {inputs.tolist() if decode is None else decode(inputs.tolist())!r}")
            continue
        if is_text and inputs.ndim == 2:  # rows of several answers
            lengths = sample["num_inputs"].tolist()
            rows = [
                {"inputs": row[:length], "targets": wanted[:length]}
                for row, wanted, length in zip(inputs, targets, lengths, strict=True)
            ]
            shown += show_samples(rows, decode)
            continue
        if inputs.ndim > 1 or not is_text:
            shape = " x ".join(map(str, inputs.shape)) or "1"
            low, mean, high = float(inputs.min()), float(inputs.float().mean()), float(inputs.max())
            label = describe_caption(sample, decode) if "caption" in sample else describe_targets(targets, names)
            shown.append(f"{label}: {shape} values from {low:.3g} to {high:.3g}, mean {mean:.3g}")
            continue
        for part, values in (("input", inputs), ("target", targets)):
            tokens = [int(value) for value in values[:24] if int(value) != IGNORE_INDEX]
            shown.append(f"{part:>6}: {decode(tokens)!r}" if decode is not None else f"{part:>6}: {tokens}")
    return shown
