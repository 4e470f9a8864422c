"""Data source that mixes other sources by weight, with one tokenizer for all."""

import functools
import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.data import DataSource, get_val_fingerprint, in_section, prepare_with
from recipes.data.image_file import OnDemand
from recipes.data.mixture.samples import MixedSamples, MixedValidation, collate
from recipes.data.mixture.stages import PERIOD, Stages, count_shares
from recipes.data.text.token_cache import SPLIT_TEXT
from recipes.errors import ConfigError
from recipes.files import count
from recipes.tokenizer import TextCorpus, Tokenizer

LOGGER = logging.getLogger("lightning_recipes")

_TOLERANCE = 1e-6  # for the sum of weights
_EXAMPLE_SAMPLES = 100_000  # of a stage, in what to type
_MAX_POSITION = 1 << 60  # of a stage: the numbers of samples before it are 64-bit integers
_EXAMPLE = "+data@data.sources.code=stdlib_text"


class Mixture:
    """Samples of several sources by weight, in an order that depends only on position and seed.

    Attributes:
        sources: Data sources by name.
    """

    sample_kind: ClassVar[str] = "tokens"

    def __init__(
        self,
        *,
        sources: dict[str, Any],
        weights: dict[str, Annotated[float, ">= 0"]],
        stages: list[Any],
        max_epochs: Annotated[float, "> 0"] | None,
        seq_len: Annotated[int, ">= 1"],
    ) -> None:
        """Store the settings; nothing is read before `prepare`.

        Args:
            sources: Text sources by name.
            weights: Fraction of samples from each source, at the start of the stream.
            stages: Changes of weights: each has `from`, a position in the stream in samples, and `weights`.
            max_epochs: Maximum number of times that the run may read a sample; None: unlimited.
            seq_len: Maximum number of tokens per sample.

        Raises:
            ConfigError: There are no sources, weights do not match them or do not sum to 1, or stages are not in order.
        """
        if not sources:
            raise ConfigError("data.sources={}", "a mixture needs sources", f"{_EXAMPLE} 'data.weights={{code: 1.0}}'")
        self.sources: dict[str, DataSource] = {str(name): source for name, source in sources.items()}
        names = list(self.sources)
        starts, of_stages = [0], [_check_weights("data.weights", weights, names, "data.weights={}")]
        for index in range(len(stages)):
            start, of_stage = _check_stage(stages, index, names, after=starts[-1])
            starts.append(start)
            of_stages.append(of_stage)
        self._stages = Stages(starts, of_stages)
        self._last_stage = Stages([0], of_stages[-1:])
        self._max_epochs = max_epochs
        self._seq_len = seq_len
        self._prepared: tuple[MixedSamples, MixedValidation] | None = None

    def prepare(self) -> None:
        """Prepare all sources with one tokenizer, made from their combined text; a second call does nothing.

        Raises:
            ConfigError: A source cannot be prepared.
        """
        if self._prepared is not None:
            return
        corpora = {name: self._corpus(name) for name, source in self.sources.items() if hasattr(source, "corpus")}
        tokenizer = None
        if corpora:
            first: Any = self.sources[next(iter(corpora))]
            joined = corpora if len(corpora) > 1 else None
            tokenizer = first.make_tokenizer(next(iter(corpora.values())) if joined is None else _JoinedText(joined))
        for name, source in self.sources.items():
            with in_section(f"data.sources.{name}"):
                prepare_with(source, tokenizer)
        for name, source in self.sources.items():
            longest = source.train().tokens_per_sample
            if longest > self._seq_len:
                reason = f"a sample of the mixture has at most {self._seq_len} tokens"
                setting = f"data.sources.{name}.seq_len"
                raise ConfigError(f"{setting}={longest}", reason, f"{setting}={self._seq_len}")
        _share_split(self.sources)
        self._mix()

    def _mix(self) -> None:
        train = MixedSamples({name: source.train() for name, source in self.sources.items()}, self._stages)
        val = MixedValidation({name: source.val() for name, source in self.sources.items()}, self._last_stage)
        self._prepared = train, val

    def split_texts(self) -> NDArray[np.void]:
        """Return the split of each text of all sources, as `SPLIT_TEXT`; after `prepare`."""
        found = [source.split_texts() for source in self.sources.values() if hasattr(source, "split_texts")]
        return np.concatenate(found) if found else np.zeros(0, dtype=SPLIT_TEXT)

    def hold_out(self, keys: NDArray[np.uint64], num_train: NDArray[np.int64]) -> int:
        """Train at most on the first tokens of some texts, in every source; see `TextSource.hold_out`."""
        divided = [source for source in self.sources.values() if hasattr(source, "hold_out")]
        num_held_out: int = sum(source.hold_out(keys, num_train) for source in divided)
        self._mix()
        return num_held_out

    def check_run(self, num_samples: int) -> None:
        """Check that a run does not exceed `max_epochs` for any source, and name the stages that it never reaches.

        Args:
            num_samples: Number of samples that the run reads.

        Raises:
            ConfigError: A source would be repeated too often.
        """
        starts = [start for start, _ in self._stages]
        if unreached := [index for index, start in enumerate(starts[1:]) if start >= num_samples]:
            LOGGER.warning(
                "%s never %s: this run ends after %s, and val/loss is the loss at the weights of the last stage",
                ", ".join(f"data.stages[{index}]" for index in unreached),
                "begins" if len(unreached) == 1 else "begin",
                count(num_samples, "sample"),
            )
        if self._max_epochs is None:
            return
        for name, epochs in self.train().count_epochs(num_samples).items():
            if epochs > self._max_epochs:
                num_own = len(self.train().parts[name])
                reason = f"{num_samples:,} samples of this run read the {num_own:,} of {name} {epochs:.3g} times"
                fix = f"data.max_epochs={math.ceil(epochs)}, a smaller data.weights.{name}, or fewer trainer.max_steps"
                raise ConfigError(f"data.max_epochs={self._max_epochs}", reason, fix)

    @property
    def source_names(self) -> list[str]:
        """Names of the sources, in the order of the `source` index of samples."""
        return list(self.sources)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of all sources, with a chat template if any source has conversations; after `prepare`."""
        found = [source.tokenizer for source in self.sources.values() if source.tokenizer is not None]
        with_template = [tokenizer for tokenizer in found if tokenizer.chat_template is not None]
        return next(iter(with_template or found), None)

    @property
    def packs(self) -> bool:
        """Whether samples of any source hold several examples."""
        return any(getattr(source, "packs", False) for source in self.sources.values())

    @property
    def collate(self) -> Callable[[Sequence[Any]], Any]:
        """Collate function."""
        return functools.partial(collate, seq_len=self._seq_len)

    @property
    def val_fingerprint(self) -> str:
        """String that is equal for equal validation samples, which have the weights of the last stage."""
        parts = [f"{name}={get_val_fingerprint(source)}" for name, source in self.sources.items()]
        return f"{'+'.join(parts)}/{next(counts.tolist() for _, counts in self._last_stage)}"

    @property
    def fingerprint(self) -> str:
        """String that is equal for equal samples and weights."""
        parts = [f"{name}={source.fingerprint}" for name, source in self.sources.items()]
        shares = ";".join(f"{start}:{counts.tolist()}" for start, counts in self._stages)
        return f"{'+'.join(parts)}/{shares}"

    def describe(self) -> str:
        """Return the amount of data of each source, and its weight at the start."""
        _, counts = next(iter(self._stages))
        parts = [
            f"{name} ({count / PERIOD:.4g} of the samples): {source.describe()}"
            for (name, source), count in zip(self.sources.items(), counts.tolist(), strict=True)
        ]
        return "; ".join(parts)

    def describe_sample(self, sample: int) -> dict[str, Any]:
        """Return the origin of a training sample, for the dump of a bad batch."""
        number, own = self.train().locate(sample)
        name = self.source_names[number]
        describe: Any = getattr(self.sources[name], "describe_sample", lambda _: {})
        found: dict[str, Any] = describe(own)
        return {"source": name} | found

    def train(self) -> MixedSamples:
        """Return the training samples."""
        assert self._prepared is not None, "prepare() comes first"
        return self._prepared[0]

    def val(self) -> MixedValidation:
        """Return validation samples with the weights of the last stage."""
        assert self._prepared is not None, "prepare() comes first"
        return self._prepared[1]

    def questions(self, num_samples: int) -> list[tuple[list[int], list[int]]]:
        """Return equally many questions from each source that has some."""
        found: list[tuple[list[int], list[int]]] = []
        for source, each in self._share(num_samples):
            found += source.questions(each)
        return found[:num_samples]

    @property
    def image_reader(self) -> Any:
        """Reads images as training does: all sources read them alike; None: there are none."""
        readers = (getattr(source, "image_reader", None) for source in self.sources.values())
        return next((reader for reader in readers if reader is not None), None)

    def question_images(self, num_samples: int) -> Sequence[Tensor]:
        """Return the images of each of `questions`, [N, C, S, S] float32, where any source has images."""
        shape = next(shape for part in self.train().parts.values() if (shape := getattr(part, "image_shape", None)))
        found: list[tuple[Sequence[Tensor], int]] = []
        for source, each in self._share(num_samples):
            has_images = getattr(source.train(), "image_shape", None) is not None
            none = [torch.zeros(0, *shape)] * (0 if has_images else len(source.questions(each)))
            images = source.question_images(each) if has_images else none
            found += [(images, number) for number in range(len(images))]
        return OnDemand(min(num_samples, len(found)), lambda number: found[number][0][found[number][1]])

    def question_rows(self, num_samples: int) -> list[Mapping[str, Any]]:
        """Return the fields of the row of each of `questions`."""
        found: list[Mapping[str, Any]] = []
        for source, each in self._share(num_samples):
            is_known = hasattr(source, "question_rows")  # not by a source of another package
            found += source.question_rows(each) if is_known else [{} for _ in source.questions(each)]
        return found[:num_samples]

    def _share(self, num_samples: int) -> list[tuple[Any, int]]:
        """Return the sources that have questions, each with how many to take of it."""
        asked: list[Any] = [source for source in self.sources.values() if hasattr(source, "questions")]
        return [(source, -(-num_samples // len(asked))) for source in asked]

    def _corpus(self, name: str) -> TextCorpus:
        source: Any = self.sources[name]
        with in_section(f"data.sources.{name}"):
            corpus: TextCorpus = source.corpus()
        return corpus


def _check_weights(setting: str, weights: object, names: Sequence[str], fix: str) -> list[float]:
    """Return the weights in the order of the sources.

    Args:
        setting: Key of the weights.
        weights: Weights by name of a source.
        names: Names of the sources.
        fix: What to type, with `{}` in place of right weights.
    """
    typed = f"{setting}={_show(weights)}"
    equal = [1.0] * len(names)
    by_name = {str(name): value for name, value in weights.items()} if isinstance(weights, dict) else {}
    if set(by_name) != set(names):
        reason = f"the sources are {', '.join(names)}, and each has a weight"
        known = [by_name.get(name, 0.0) for name in names]
        is_share = all(map(_is_share, known)) and sum(known) > 0
        is_whole = is_share and ({*names} <= {*by_name} or abs(sum(known) - 1) <= _TOLERANCE)
        raise ConfigError(typed, reason, _suggest_weights(fix, names, known if is_whole else equal))
    values = [by_name[name] for name in names]
    if not all(map(_is_share, values)):
        raise ConfigError(typed, "weights are numbers from 0 to 1", _suggest_weights(fix, names, equal))
    total = sum(values)
    if abs(total - 1) > _TOLERANCE:
        reason = f"weights must add up to 1; these add up to {total:.6g}"
        raise ConfigError(typed, reason, _suggest_weights(fix, names, values if total > 0 else equal))
    if smallest := [value for value in values if 0 < value < 1 / PERIOD]:
        reason = f"shares are counted in {PERIOD:,}ths, and {smallest[0]:.3g} is less than one"
        enlarged = [max(value, 1 / PERIOD) if value else 0 for value in values]
        raise ConfigError(typed, reason, _suggest_weights(fix, names, enlarged))
    return values


def _suggest_weights(fix: str, names: Sequence[str], values: Sequence[float]) -> str:
    """Return what to type for these shares, rounded such that they add up to 1."""
    shares = (count_shares(values) / PERIOD).tolist()
    shown = ", ".join(f"{name}: {share:.4g}" for name, share in zip(names, shares, strict=True))
    return f"'{fix.replace('{}', f'{{{shown}}}', 1)}'"


def _check_stage(stages: Sequence[Any], index: int, names: Sequence[str], *, after: int) -> tuple[int, list[float]]:
    """Return the first position and the weights of a stage.

    Args:
        stages: All stages; Hydra sets a list only as a whole.
        index: Index of this one.
        names: Names of the sources.
        after: First position of the stage before.
    """
    stage, where = stages[index], f"data.stages[{index}]"
    equal = [1.0] * len(names)
    others = [_show(other) for other in stages]

    def suggest(start: object, weights: str) -> str:
        right = f"{{from: {start}, weights: {weights}}}"
        return f"data.stages=[{', '.join([*others[:index], right, *others[index + 1 :]])}]"

    later = 2 * after or _EXAMPLE_SAMPLES
    if not isinstance(stage, dict) or set(stage) != {"from", "weights"}:
        values = stage.values() if isinstance(stage, dict) else ()  # under names of which one is mistyped
        kept = next((value for value in values if isinstance(value, int) and value > after), later)
        weights = next((value for value in values if isinstance(value, dict)), None)
        fix = f"'{suggest(kept, _show(weights))}'" if weights else _suggest_weights(suggest(kept, "{}"), names, equal)
        raise ConfigError(f"{where}={_show(stage)}", "a stage has a position, `from`, and `weights`", fix)
    start, shown = stage["from"], _show(stage["weights"])
    if isinstance(start, float) and start.is_integer():
        start = int(start)  # 1e5
    reason, fix = None, f"'{suggest(later, shown)}'"
    if not isinstance(start, int) or isinstance(start, bool):
        reason = "a position is a whole number of samples"
        fix = f"'{suggest(max(round(start), after + 1), shown)}'" if _is_finite(start) else fix
    elif start <= 0:
        reason = "data.weights are those from the start, and a stage begins later"
        rest = ", ".join([*others[:index], *others[index + 1 :]])
        fix = f"'data.weights={shown}' 'data.stages=[{rest}]'"
    elif start <= after:
        reason = f"stages follow each other, and the one before begins at sample {after:,}"
        positions = [other.get("from") if isinstance(other, dict) else None for other in stages]
        if all(map(_is_finite, positions)) and len({*positions}) == len(positions):
            ordered = [_show(other) for other in sorted(stages, key=lambda other: float(other["from"]))]
            fix = f"'data.stages=[{', '.join(ordered)}]'"
    elif start > _MAX_POSITION:
        reason = f"no run gets there: positions end at {_MAX_POSITION:,}"
    if reason is not None:
        raise ConfigError(f"{where}.from={_show(stage['from'])}", reason, fix)
    return start, _check_weights(f"{where}.weights", stage["weights"], names, suggest(start, "{}"))


def _is_finite(value: object) -> TypeGuard[int | float]:
    return _is_number(value) and math.isfinite(value)


def _is_share(value: object) -> bool:
    return _is_finite(value) and value >= 0


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _show(value: object) -> str:
    """Return a value as it is typed."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_show(child)}" for name, child in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _share_split(sources: Mapping[str, Any]) -> None:
    """Hold out of every source what any of them holds out, so that none trains on what another one validates on.

    A text that is cut, because the tail of its source is validation data, is cut at the same token in every source;
    where it has another number of tokens, as the question of a conversation, no source trains on any part of it.
    """
    divided = {name: source for name, source in sources.items() if hasattr(source, "split_texts")}
    if len(divided) < 2:
        return
    texts = np.concatenate([np.asarray(source.split_texts()) for source in divided.values()])
    texts = texts[np.isin(texts["key"], texts["key"][texts["num_train"] < texts["num_tokens"]])]
    if not len(texts):
        return
    texts = texts[np.argsort(texts["key"], kind="stable")]
    keys, firsts = np.unique(texts["key"], return_index=True)
    num_train = np.minimum.reduceat(texts["num_train"], firsts)
    shortest, longest = (of.reduceat(texts["num_tokens"], firsts) for of in (np.minimum, np.maximum))
    num_train[shortest != longest] = 0
    for name, source in divided.items():
        with in_section(f"data.sources.{name}"):
            num_held_out = source.hold_out(keys, num_train)
        if num_held_out:
            held_out = f"{count(num_held_out, 'text')} {'is' if num_held_out == 1 else 'are'}"
            LOGGER.info(f"{name}: {held_out} validation data of another source, so held out here, too")


class _JoinedText:
    """Equal amounts of text from several corpora, for training a tokenizer."""

    def __init__(self, corpora: Mapping[str, TextCorpus]) -> None:
        self._corpora = list(corpora.values())
        content = "\0".join(corpus.content_hash for corpus in self._corpora)
        self.content_hash = hashlib.blake2b(content.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()

    @property
    def cache_dir(self) -> Path:
        return self._corpora[0].cache_dir

    def texts(self, max_bytes: int) -> Iterator[str]:
        for corpus in self._corpora:
            yield from corpus.texts(max_bytes // len(self._corpora))
