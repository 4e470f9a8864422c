"""Continue prompts in batches: the loop over new tokens.

Shapes: B rows in the batch, V vocabulary with padding, N images of a prompt of C channels and S pixels a side.
"""

import functools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from recipes.errors import ConfigError
from recipes.generation.sampling import NO_TOKEN, Sampling, make_stream
from recipes.generation.window import Window, takes_images
from recipes.model import LanguageModel

log = logging.getLogger("lightning_recipes")
# without cuDNN's kernel, which builds a plan for every key length, and the length grows with each token
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_TOKENS_PER_READ = 8  # tokens that a GPU generates before the host waits for them


@dataclass
class Completion:
    """What was generated for one row.

    Attributes:
        tokens: New tokens, without a stop token.
        log_probabilities: Log-probability of each of them, and then of the stop token if there is one, under the
            distribution that it was sampled from; under the model's own if sampling is greedy.
        stop_token: Stop token that ended the row; None: something else did.
        has_ended: Whether a stop token or `is_complete` ended it; False: it reached the maximum length.
    """

    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    stop_token: int | None = None
    has_ended: bool = False


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    sampling: Sampling,
    seeds: Sequence[int],
    num_samples: int = 1,
    images: Sequence[Tensor] | None = None,
    ends: Collection[int] = (),
    is_complete: Callable[[list[int]], bool] | None = None,
    slides: bool = False,
    use_cache: bool = True,
    agree: Callable[[Tensor], Tensor] | None = None,
    all_ended: Callable[[bool], bool] | None = None,
) -> list[Completion]:
    """Continue prompts in evaluation mode, without compilation; the model's mode is restored.

    Args:
        model: Model on any device. Where its forward pass is a collective, call on every rank.
        prompts: At least one token each.
        num_tokens: Maximum number of tokens to generate per row.
        sampling: How tokens are drawn.
        seeds: Sampling seeds, one per row; the same seed gives the same tokens on the same kind of device, whatever
            else is in the batch.
        num_samples: Rows per prompt, which share its prefill; row i continues prompt i // num_samples.
        images: [N, C, S, S] of each prompt, which has the tokens of as many; read once, with a cache. No token of an
            image is generated. None: no prompt has one.
        ends: Stop tokens.
        is_complete: Called with the tokens of a row after each one; returns whether the row is complete.
        slides: Whether a row goes on beyond `max_seq_len` with the newest half of its window. Otherwise prompt and
            completion must fit into it, and a row ends where it does.
        use_cache: False recomputes the whole window for every token: slower, same tokens; always the case for a model
            whose `forward` has no `cache` argument.
        agree: Returns rank 0's tensor on every rank: where the ranks generate the same rows together. The last bits of
            logits differ between GPUs, so sampled tokens may too, and a rank that stopped earlier would leave the
            others waiting in a collective. None: the tokens of this rank count.
        all_ended: Returns whether the rows on all ranks have ended: where the ranks generate different rows together,
            all must run the same number of forward passes. None: this process need not wait for others.

    Returns:
        The completion of each row; shorter if the logits of a diverged model are NaN or inf.

    Raises:
        ConfigError: A prompt is empty, or longer than the model's window, which does not slide.
    """
    assert len(seeds) == len(prompts) * num_samples, f"{len(seeds)} seeds for {len(prompts)} x {num_samples} rows"
    assert images is None or (takes_images(model) and len(images) == len(prompts)), "images of each prompt of its model"
    assert not (slides and images is not None), "a window that slides forgets its images"
    assert not (slides and all_ended), "windows that slide run other numbers of forward passes on other ranks"
    _check(prompts, model.max_seq_len, num_tokens=num_tokens, slides=slides)
    if slides:
        half = max(1, model.max_seq_len // 2)
        prompts = [prompt if len(prompt) <= model.max_seq_len else prompt[-half:] for prompt in prompts]
    completions = [Completion() for _ in seeds]
    with _evaluating(model), torch.compiler.set_stance("force_eager"), sdpa_kernel(_KERNELS):
        for chosen in _divide(prompts, num_tokens, max_seq_len=model.max_seq_len, slides=slides):
            batch = _Batch(
                model,
                [prompts[index] for index in chosen],
                [completions[index * num_samples + sample] for index in chosen for sample in range(num_samples)],
                seeds=[seeds[index * num_samples + sample] for index in chosen for sample in range(num_samples)],
                num_tokens=num_tokens,
                slides=slides,
                use_cache=use_cache,
                images=None if images is None else [images[index] for index in chosen],
                ends=ends,
                is_complete=is_complete,
            )
            batch.run(sampling, agree=agree, all_ended=all_ended)
    return completions


class _Batch:
    """Rows that are generated together.

    Args:
        model: As for `generate`.
        prompts: As for `generate`, at most `max_seq_len` tokens each.
        completions: Filled in place; several for each prompt, one after the other.
        seeds: One per completion.
        num_tokens: As for `generate`.
        slides: As for `generate`.
        use_cache: As for `generate`.
        images: As for `generate`.
        ends: As for `generate`.
        is_complete: As for `generate`.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompts: list[Sequence[int]],
        completions: list[Completion],
        *,
        seeds: list[int],
        num_tokens: int,
        slides: bool,
        use_cache: bool,
        images: list[Tensor] | None,
        ends: Collection[int],
        is_complete: Callable[[list[int]], bool] | None,
    ) -> None:
        self._num_tokens, self._ends, self._is_complete = num_tokens, ends, is_complete
        self._completions = completions
        self._is_over = [False] * len(completions)
        num_samples = len(completions) // len(prompts)
        self._repeated = [index for index in range(len(prompts)) for _ in range(num_samples)]
        rooms = [num_tokens if slides else model.max_seq_len - len(prompt) for prompt in prompts]
        self._rooms = [rooms[index] for index in self._repeated]
        self._device = next(iter(model.parameters())).device
        self._stream = make_stream(seeds, num_positions=num_tokens, device=self._device)
        make_window = functools.partial(Window, model, num_tokens=num_tokens, slides=slides, use_cache=use_cache)
        self._window = make_window(prompts, images=images)
        if num_samples > 1 and not self._window.selects_rows:  # read the prompt once for each sample
            prompts = [prompts[index] for index in self._repeated]
            images = None if images is None else [images[index] for index in self._repeated]
            self._window = make_window(prompts, images=images)
            self._repeated = list(range(len(prompts)))

    def run(
        self,
        sampling: Sampling,
        *,
        agree: Callable[[Tensor], Tensor] | None,
        all_ended: Callable[[bool], bool] | None,
    ) -> None:
        """Generate until all rows have ended, on all ranks if `all_ended` says so."""
        unread: Tensor | None = None  # [B], the newest tokens
        num_done = 0
        while num_done < self._num_tokens:
            if all(self._is_over):
                if all_ended is None:
                    return
                self._window.run_idle()
                num_new = 1
            else:
                num_new = self._plan(num_done, is_alone=all_ended is None)
                drawn: list[Tensor] = []
                for _ in range(num_new):
                    logits = self._start() if unread is None else self._window.read(unread)  # [B, V]
                    # [2, B], tokens (exact in float64) and their log-probabilities
                    both = torch.stack([part.double() for part in sampling.draw(logits, self._stream)])
                    drawn.append(both if agree is None else agree(both))
                    unread = drawn[-1][0].long()
                assert unread is not None, "at least one token was drawn"
                self._take(torch.stack(drawn, dim=-1))
                unread = self._drop_ended(unread)
            num_done += num_new
            if all_ended is not None and all_ended(all(self._is_over)):
                return

    def _plan(self, num_done: int, *, is_alone: bool) -> int:
        """Return the number of tokens to generate before the host reads them."""
        if not is_alone or self._device.type == "cpu":
            return 1
        # one more than fit into the window: it may be a stop token, which is not read
        nearest = min(room + 1 for room, is_over in zip(self._rooms, self._is_over, strict=True) if not is_over)
        return min(_TOKENS_PER_READ, min(nearest, self._num_tokens) - num_done)

    def _start(self) -> Tensor:
        logits = self._window.start()  # [P, V]
        if self._repeated == list(range(len(logits))):
            return logits
        self._window.keep(self._repeated)
        return logits[torch.tensor(self._repeated, device=logits.device)]

    def _take(self, drawn: Tensor) -> None:
        """Add tokens and their log-probabilities, [2, B, new], to the completions of rows that have not ended."""
        was_over = list(self._is_over)
        tokens, log_probabilities = drawn.tolist()  # waits for the device
        for row, completion in enumerate(self._completions):
            if was_over[row]:
                continue
            for token, log_probability in zip(tokens[row], log_probabilities[row], strict=True):
                if token == NO_TOKEN or self._add(row, completion, int(token), log_probability):
                    self._is_over[row] = True
                    break
        is_new = [row for row, is_over in enumerate(was_over) if not is_over]
        if any(NO_TOKEN in tokens[row] and not self._completions[row].has_ended for row in is_new):
            log.warning("The model's logits are NaN or inf: no more text is generated")

    def _add(self, row: int, completion: Completion, token: int, log_probability: float) -> bool:
        """Add a token to a completion and return whether that ends it."""
        if token in self._ends:
            completion.stop_token, completion.has_ended = token, True
        elif len(completion.tokens) == self._rooms[row]:  # the window is full
            return True
        else:
            completion.tokens.append(token)
            completion.has_ended = self._is_complete is not None and self._is_complete(completion.tokens)
        completion.log_probabilities.append(log_probability)
        return completion.has_ended or len(completion.tokens) == self._num_tokens

    def _drop_ended(self, unread: Tensor) -> Tensor:
        """Take rows that have ended out of the batch: the last rows take their places. Return what is left of [B]."""
        num_left = self._is_over.count(False)
        if num_left in (0, len(self._is_over)) or not self._window.selects_rows:
            return unread
        last = (row for row in range(num_left, len(self._is_over)) if not self._is_over[row])
        rows = [next(last) if self._is_over[row] else row for row in range(num_left)]
        self._window.keep(rows)
        self._stream.keep(rows)
        self._completions = [self._completions[row] for row in rows]
        self._rooms = [self._rooms[row] for row in rows]
        self._is_over = [False] * num_left
        return unread[torch.tensor(rows, device=unread.device)]


def _divide(
    prompts: Sequence[Sequence[int]], num_tokens: int, *, max_seq_len: int, slides: bool
) -> Iterator[list[int]]:
    """Yield the prompts of each batch: all of them, or those of one length where their windows will slide."""
    if not slides or max(map(len, prompts)) + num_tokens <= max_seq_len:
        yield list(range(len(prompts)))
        return
    for length in sorted({len(prompt) for prompt in prompts}):
        yield [index for index, prompt in enumerate(prompts) if len(prompt) == length]


@contextmanager
def _evaluating(model: LanguageModel) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


def _check(prompts: Sequence[Sequence[int]], max_seq_len: int, *, num_tokens: int, slides: bool) -> None:
    if not all(prompts):
        raise ConfigError("an empty prompt", "the first token needs a token before it", "a non-empty prompt")
    longest = max(map(len, prompts))
    if longest > max_seq_len and not slides:
        raise ConfigError(
            f"a prompt of {longest} tokens",
            f"the model reads {max_seq_len}",
            f"a shorter prompt, or model.max_seq_len={longest + num_tokens}",
        )
