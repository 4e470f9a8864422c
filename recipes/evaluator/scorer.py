"""Score and generate text with a model of this project for lm-evaluation-harness.

Results equal those of the harness's own class for transformers on the exported model, except that a generated text
keeps its first blank where a decoder in the style of SentencePiece drops it. Rows are sorted by length,
requests with the same input share a row, and the head computes only the logits of scored positions.

Shapes: B rows, T tokens, W hidden size, N scored positions of a batch, K scored tokens of its requests, V vocabulary
size.
"""

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recipes.data.conversations.chat_template import find_stop_ids
from recipes.errors import ConfigError
from recipes.generation import Sampling, StopStrings, generate
from recipes.model import LanguageModel
from recipes.numerics.head_loss import cast_weight
from recipes.numerics.linear import linear
from recipes.tokenizer import Tokenizer

# Tokenize context and continuation of requests, split where lm-evaluation-harness splits them.

Pair = tuple[list[int], list[int]]  # tokens of a context, and of the continuation to score


class PromptTokens:
    """Tokenizes like `transformers`: a tokenizer's first tokens are prepended, and special tokens are parsed in text.

    In training data the text of a special token is plain text; here results must be comparable with published ones.

    Args:
        tokenizer: Tokenizer of the run.
        is_rendered: Whether texts are rendered conversations, which begin as their template says, as in training.

    Attributes:
        start: Token for an empty context: beginning-of-sequence, or end-of-text if there is none.
    """

    def __init__(self, tokenizer: Tokenizer, *, is_rendered: bool = False) -> None:
        self._tokenizer = tokenizer
        self._is_rendered = is_rendered
        spelling = tokenizer.special_tokens.get("bos_token")
        ids = self._read(spelling) if spelling is not None else []
        self.start: int = ids[0] if len(ids) == 1 else tokenizer.end_of_text

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; a rendered conversation that begins with the first token gets no other one."""
        if self._is_rendered:
            return self._read(text)
        return self._tokenizer.encode_start(text, reads_special_tokens=True)

    def split(self, context: str, continuation: str) -> Pair:
        """Return the tokens of a context, at least one, and of its continuation.

        The continuation is everything in the joint tokens after the length of the context's own. If a token spans the
        seam, the model reads the context's part and the rest is not scored: as in the harness, and rare, because
        trailing spaces of the context move to the continuation, where most vocabularies put them.
        """
        if not context.rstrip():  # empty or only white space
            tokens = self._read(context + continuation)
            if tokens[:1] == [self.start]:
                return tokens[:1], tokens[1:]
            return [self.start], tokens
        num_blanks = len(context) - len(context.rstrip())
        if num_blanks:
            context, continuation = context[:-num_blanks], context[-num_blanks:] + continuation
        tokens = self.encode(context)
        return tokens, self.encode(context + continuation)[len(tokens) :]

    def roll(self, text: str, *, window: int) -> Iterator[Pair]:
        """Yield a text in parts that cover each token once, each after as much context as fits into the window.

        The first part follows the start token, even where the tokenizer has already added one: the harness counts it.

        Args:
            text: Text of any length.
            window: Maximum number of tokens that the model reads.
        """
        tokens = [self.start, *self.encode(text)]
        for begin in range(1, len(tokens), window):
            end = min(begin + window, len(tokens))
            yield tokens[max(0, end - 1 - window) : begin], tokens[begin:end]

    def _read(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode_rendered(text).ids
        return ids


LOGGER = logging.getLogger("lightning_recipes")
Score = tuple[float, bool]  # log-likelihood of a continuation, and whether greedy decoding would produce it
Row = tuple[int, ...]  # input of the model
_REPORT_SECONDS = 30.0


class Scorer:
    """Scores and continues texts, without gradients or compilation.

    Args:
        model: Model in evaluation mode, on any device.
        tokenizer: Tokenizer that the model was trained with.
        batch_size: Rows per forward pass.
        forward_context: Returns a context manager that sets the precision of a forward pass.
        is_rendered: Whether contexts are rendered conversations, which begin as their template says, as in training.

    Attributes:
        num_truncated: Number of contexts truncated at the start to fit the model's window.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        forward_context: Callable[[], AbstractContextManager[Any]],
        is_rendered: bool = False,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._prompts = PromptTokens(tokenizer, is_rendered=is_rendered)
        self._batch_size = batch_size
        self._forward_context = forward_context
        self._ends = find_stop_ids(tokenizer)
        takes_reduce = "reduce" in inspect.signature(model.forward).parameters
        self._can_select_logits = takes_reduce and getattr(model, "computes_loss_in_chunks", True)
        self.num_truncated = 0

    def score(self, requests: Sequence[tuple[str, str]]) -> list[Score]:
        """Score the continuation in each pair of context and continuation.

        Raises:
            ConfigError: A continuation has no tokens, or more than fit into the model's window.
        """
        pairs = [self._prompts.split(context, continuation) for context, continuation in requests]
        return self._score_pairs(pairs)

    def score_rolling(self, texts: Sequence[str]) -> list[float]:
        """Return the log-likelihoods of whole texts of any length."""
        window = self._model.max_seq_len
        parts = [list(self._prompts.roll(text, window=window)) for text in texts]
        scores = iter(self._score_pairs([pair for pairs in parts for pair in pairs]))
        return [sum(next(scores)[0] for _ in pairs) for pairs in parts]

    def generate(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Continue the context in each pair of context and settings; text i is sampled with seed i.

        Raises:
            ConfigError: A setting has no counterpart here, or asks for more tokens than fit into the model's window.
        """
        by_settings: dict[Generation, list[int]] = {}
        for index, (_, given) in enumerate(requests):
            by_settings.setdefault(Generation.read(given), []).append(index)
        prompts = [self._prompts.encode(context) or [self._prompts.start] for context, _ in requests]
        texts: dict[int, str] = {}
        report = _Progress(len(requests), "texts are generated")
        for settings, chosen in by_settings.items():
            num_read = self._room_for_prompt(settings.num_tokens)
            self.num_truncated += sum(len(prompts[index]) > num_read for index in chosen)
            chosen.sort(key=lambda index: -len(prompts[index]))
            ending = StopStrings(settings.until, self._tokenizer)
            for batch in _batches(chosen, self._batch_size):
                with self._forward_context():
                    answers = generate(
                        self._model,
                        [prompts[index][-num_read:] for index in batch],
                        settings.num_tokens,
                        sampling=settings.sampling,
                        seeds=batch,
                        ends=self._ends,
                        is_complete=ending.is_reached,
                    )
                for index, answer in zip(batch, answers, strict=True):
                    texts[index] = ending.cut(answer.tokens, prompt=prompts[index])
                report.add(len(batch))
        return [texts[index] for index in range(len(requests))]

    def _room_for_prompt(self, num_tokens: int) -> int:
        """Return the number of prompt tokens that fit before `num_tokens` new ones."""
        window = self._model.max_seq_len
        if num_tokens >= window:
            raise ConfigError(
                f"generation_kwargs.max_gen_toks={num_tokens}",
                f"the task requests that many new tokens, and the model's window is {window} tokens, prompt included",
                f"generation_kwargs: {{max_gen_toks: {window // 2}}} in a YAML file of your own",
            )
        return window - num_tokens

    @torch.no_grad()
    def _score_pairs(self, pairs: Sequence[Pair]) -> list[Score]:
        window = self._model.max_seq_len
        rows: dict[Row, list[int]] = {}  # input -> requests that share it, e.g. one-token choices
        for index, (context, continuation) in enumerate(pairs):
            if not 0 < len(continuation) <= window:
                text = self._tokenizer.decode_continuation(context, continuation)
                raise _cannot_score(text, len(continuation), window)
            self.num_truncated += len(context) + len(continuation) > window + 1
            # the last token is scored but not read, so window + 1 tokens fit
            rows.setdefault(tuple([*context, *continuation][-window - 1 : -1]), []).append(index)
        scores: dict[int, Score] = {}
        report = _Progress(len(pairs), "texts are scored")
        for batch in _batches(sorted(rows, key=len, reverse=True), self._batch_size):
            chosen = [rows[row] for row in batch]
            scores |= self._score_batch(batch, chosen, pairs)
            report.add(sum(map(len, chosen)))
        return [scores[index] for index in range(len(pairs))]

    def _score_batch(
        self, rows: Sequence[Row], chosen: Sequence[Sequence[int]], pairs: Sequence[Pair]
    ) -> dict[int, Score]:
        """Return the scores of the requests of some rows.

        Args:
            rows: Inputs, longest first.
            chosen: Requests of each row.
            pairs: Tokens of all requests.
        """
        device = next(iter(self._model.parameters())).device
        tokens = torch.zeros(len(rows), len(rows[0]), dtype=torch.int64)  # [B, T]; padded at the end
        is_scored = torch.zeros(len(rows), len(rows[0]), dtype=torch.bool)  # [B, T]
        places, targets, counts = list[int](), list[int](), dict[int, int]()
        end = 0  # within the scored positions of all rows so far
        for number, (row, requests) in enumerate(zip(rows, chosen, strict=True)):
            tokens[number, : len(row)] = torch.tensor(row)
            longest = max(len(pairs[index][1]) for index in requests)
            is_scored[number, len(row) - longest : len(row)] = True
            end += longest
            for index in requests:
                continuation = pairs[index][1]
                places += range(end - len(continuation), end)
                targets += continuation
                counts[index] = len(continuation)
        with self._forward_context(), torch.compiler.set_stance("force_eager"):
            logits = self._compute_logits(tokens.to(device), is_scored.to(device)).float()  # [N, V] float32
        at, wanted = torch.tensor(places, device=device), torch.tensor(targets, device=device)  # [K], [K]
        likelihoods = (logits[at, wanted] - logits.logsumexp(dim=1)[at]).double().cpu()  # [K]
        is_likeliest = (logits.argmax(dim=1)[at] == wanted).cpu()  # [K]
        sizes = [*counts.values()]
        parts = zip(counts, torch.split(likelihoods, sizes), torch.split(is_likeliest, sizes), strict=True)
        return {index: (float(values.sum()), bool(same.all())) for index, values, same in parts}

    def _compute_logits(self, tokens: Tensor, is_scored: Tensor) -> Tensor:
        """Return the logits of the scored positions, [N, V], without padding columns of the vocabulary.

        Args:
            tokens: [B, T].
            is_scored: [B, T] bool.
        """
        if not self._can_select_logits:
            logits: Tensor = self._model(tokens)[is_scored]  # [N, V']
            return logits[:, : self._model.vocab_size]

        def compute_head(hidden: Tensor, weight: Tensor) -> Tensor:  # [B, T, W], [V', W]
            weight = cast_weight(weight)
            return linear(hidden[is_scored].to(weight.dtype), weight)

        logits = self._model(tokens, reduce=compute_head)
        return logits[:, : self._model.vocab_size]


def _cannot_score(text: str, num_tokens: int, window: int) -> ConfigError:
    shown = f"a continuation of {num_tokens} tokens, {text[:40]!r}"
    if num_tokens:
        return ConfigError(shown, f"the model reads {window}", "another task, or a model with a longer window")
    return ConfigError(shown, "it adds no token to its context", "a task whose choices begin with a blank")


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


class _Progress:
    """Logs the progress every half minute."""

    def __init__(self, total: int, what: str) -> None:
        self._done, self._total, self._what = 0, total, what
        self._logged = time.monotonic()

    def add(self, num_done: int) -> None:
        self._done += num_done
        if time.monotonic() - self._logged > _REPORT_SECONDS:
            self._logged = time.monotonic()
            LOGGER.info(f"{self._done:,} of {self._total:,} {self._what}")


# Generation settings and stop strings of lm-evaluation-harness tasks.

_NUM_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # in order of precedence
_DEFAULT_NUM_TOKENS = 256  # the harness's default


@dataclass(frozen=True)
class Generation:
    """Generation settings of a request, hashable.

    Attributes:
        until: Stop strings, which are not part of the answer.
        num_tokens: Maximum number of tokens to generate.
        sampling: How tokens are drawn.
    """

    until: tuple[str, ...]
    num_tokens: int
    sampling: Sampling

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> "Generation":
        """Read the `generation_kwargs` of a task.

        Raises:
            ConfigError: A setting has no counterpart here.
        """
        rest = dict(settings)
        until = rest.pop("until", None) or []
        lengths = [rest.pop(name, None) for name in _NUM_TOKENS]
        num_tokens = next((int(length) for length in lengths if length is not None), _DEFAULT_NUM_TOKENS)
        samples = rest.pop("do_sample", None)
        temperature = float(rest.pop("temperature", 1.0 if samples else 0.0))
        top_k, top_p, min_p = rest.pop("top_k", None), rest.pop("top_p", None), rest.pop("min_p", None)
        if rest:
            name, value = next(iter(rest.items()))
            raise ConfigError(
                f"generation_kwargs.{name}={value}",
                "the task asks for it, and it has no counterpart here",
                f"a task whose YAML sets no {name}",
            )
        return cls(
            until=(until,) if isinstance(until, str) else tuple(until),
            num_tokens=num_tokens,
            sampling=Sampling(
                temperature=0.0 if samples is False else temperature,
                top_k=int(top_k) if top_k else None,  # 0 means all, as in transformers
                top_p=None if top_p is None else float(top_p),
                min_p=None if min_p is None else float(min_p),
            ),
        )
