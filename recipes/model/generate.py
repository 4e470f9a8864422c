"""Generate text with a key-value cache: one single-token forward pass per new token.

A full window slides by half. Positions are absolute (learned, or rotated keys in the cache), so the newest half of
the window is recomputed from position 0: one forward pass of max_seq_len / 2 tokens every max_seq_len / 2 tokens.
"""

import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from recipes.errors import ConfigError
from recipes.model import KeyValueCache, LanguageModel

log = logging.getLogger("lightning_recipes")
# without cuDNN's kernel, which builds a plan for every key length, and the length grows with each token
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_GREEDY_BELOW = 1e-6  # logits divided by less overflow in float32; sampling is greedy at this temperature anyway


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt_tokens: list[int],
    num_tokens: int,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    ends: Collection[int] = (),
    use_cache: bool = True,
    agree: Callable[[int], int] | None = None,
) -> list[int]:
    """Continue `prompt_tokens` in evaluation mode, without compilation; the model's mode is restored.

    Args:
        model: Model on any device. Under a strategy with collectives, call on every rank with the same arguments.
        prompt_tokens: At least one token.
        num_tokens: Maximum number of tokens to generate.
        temperature: 0: greedy; below 1: sharper; above 1: flatter.
        top_k: Sample from the k most likely tokens; None: all.
        top_p: Sample from the smallest set of tokens with this total probability; None: all.
        seed: Sampling seed; the same seed and logits give the same tokens, on any device.
        ends: Stop tokens, which are not returned.
        use_cache: False recomputes the whole window for every token: slower, same tokens; always the case for a model
            whose `forward` has no `cache` argument.
        agree: Returns rank 0's token on every rank. The last bits of logits differ between GPUs, so sampled tokens may
            too: with sharded weights, a rank that stopped earlier would leave the others waiting in a collective.
            None: only this process generates.

    Returns:
        New tokens only; fewer if the logits of a diverged model are NaN or inf.

    Raises:
        ValueError: A setting is out of range.
    """
    _check(prompt_tokens, temperature=temperature, top_k=top_k, top_p=top_p)
    rng = torch.Generator().manual_seed(seed)
    takes_cache = "cache" in inspect.signature(model.forward).parameters
    window = _Window(model, use_cache=use_cache and takes_cache)
    new_tokens: list[int] = []
    with _evaluating(model), torch.compiler.set_stance("force_eager"), sdpa_kernel(_KERNELS):
        for step in range(num_tokens):
            logits = window.read(prompt_tokens if step == 0 else new_tokens[-1:])  # [V]
            probabilities = sampling_probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p)
            token = _draw(probabilities, rng)
            if token is None:
                log.warning("The model's logits are NaN or inf: no more text is generated")
                break
            if agree is not None:
                token = agree(token)
            if token in ends:
                break
            new_tokens.append(token)
    return new_tokens


@dataclass
class Answer:
    """Generated answer.

    Attributes:
        tokens: New tokens.
        has_ended: Whether the model ended the answer; False: it reached the maximum length.
    """

    tokens: list[int]
    has_ended: bool


@torch.no_grad()
def generate_batch(
    model: LanguageModel,
    prompts: Sequence[list[int]],
    num_tokens: int,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seeds: Sequence[int],
    ends: Collection[int],
    all_ended: Callable[[bool], bool] | None = None,
    is_complete: Callable[[list[int]], bool] | None = None,
) -> list[Answer]:
    """Continue prompts of different lengths in one batch, each with the tokens it would get alone.

    Each forward pass processes one token per sequence. Prompt and answer must fit into `max_seq_len`; the window does
    not slide.

    Args:
        model: Model on any device whose `forward` accepts `cache`.
        prompts: At least one token each.
        num_tokens: Maximum number of tokens to generate per prompt; an answer also ends at `max_seq_len`.
        temperature: As for `generate`.
        top_k: As for `generate`.
        top_p: As for `generate`.
        seeds: Sampling seeds, one per prompt.
        ends: Stop tokens, which are not returned.
        all_ended: Returns whether the answers on all ranks have ended: with sharded weights, all ranks must run the
            same number of forward passes. None: only this process generates.
        is_complete: Called after each token; returns whether the answer is complete; None: only `ends` end it.

    Returns:
        The answer to each prompt.

    Raises:
        ValueError: A setting is out of range, or a prompt is longer than the model's window.
    """
    for prompt in prompts:
        _check(prompt, temperature=temperature, top_k=top_k, top_p=top_p)
        if len(prompt) > model.max_seq_len:
            raise ConfigError(
                f"a prompt of {len(prompt)} tokens",
                f"the model reads {model.max_seq_len}",
                f"a shorter prompt, or model.max_seq_len={len(prompt) + num_tokens}",
            )
    rngs = [torch.Generator().manual_seed(seed) for seed in seeds]
    answers = [Answer(tokens=[], has_ended=False) for _ in prompts]
    unread, padding = _pad_right(prompts, device=next(iter(model.parameters())).device)  # [B, T], [B]
    cache = _make_cache(model, capacity=unread.shape[1] + num_tokens, padding=padding)
    is_over = [False] * len(prompts)
    with _evaluating(model), torch.compiler.set_stance("force_eager"), sdpa_kernel(_KERNELS):
        for step in range(num_tokens):  # no early exit when all windows are full: other ranks would hang
            logits = model(unread, cache=cache)[:, -1]  # [B, V]
            probabilities = sampling_probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p)
            chosen = [_draw(row, rng) for row, rng in zip(probabilities, rngs, strict=True)]
            for row, token in enumerate(chosen):
                is_full = len(prompts[row]) + step >= model.max_seq_len
                if token in ends and not is_over[row]:
                    answers[row].has_ended = True
                is_over[row] = is_over[row] or token is None or token in ends or is_full
                if token is not None and not is_over[row]:
                    answers[row].tokens.append(token)
                    if is_complete is not None and is_complete(answers[row].tokens):
                        answers[row].has_ended = is_over[row] = True
            ended = all(is_over)
            if all_ended(ended) if all_ended is not None else ended:
                break
            unread = torch.tensor([[token or 0] for token in chosen], device=unread.device)  # [B, 1]
            padding += torch.tensor(is_over, device=padding.device)  # the next token replaces their last one
    return answers


def _pad_right(prompts: Sequence[list[int]], *, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the prompts as one tensor [B, T], and the number of padding tokens at the end of each row, [B]."""
    width = max(map(len, prompts))
    tokens = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts], device=device)
    return tokens, torch.tensor([width - len(prompt) for prompt in prompts], device=device)


def _draw(probabilities: Tensor, rng: torch.Generator) -> int | None:
    """Sample a token; return None if the logits of a diverged model are NaN or inf."""
    if not probabilities.isfinite().all():
        return None
    return int(torch.multinomial(probabilities, 1, generator=rng))


def sampling_probabilities(logits: Tensor, *, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Return sampling probabilities [..., V], float32 on the CPU: temperature, then top-k, then top-p.

    All tokens tied with the k-th most likely one stay, and so does the token that crosses `top_p`.
    """
    logits = logits.float().cpu()
    if temperature < _GREEDY_BELOW:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        kth = logits.topk(top_k).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    probabilities = logits.softmax(dim=-1)
    if top_p is not None:
        ordered, order = probabilities.sort(descending=True)
        before = ordered.cumsum(dim=-1) - ordered  # total probability of more likely tokens
        probabilities = torch.zeros_like(ordered).scatter_(-1, order, ordered.masked_fill(before >= top_p, 0.0))
        probabilities /= probabilities.sum(dim=-1, keepdim=True)
    return probabilities


class _Window:
    """Sliding window over the newest `max_seq_len` tokens."""

    def __init__(self, model: LanguageModel, *, use_cache: bool) -> None:
        self.model = model
        self.tokens: list[int] = []
        self.cache = _make_cache(model, capacity=model.max_seq_len) if use_cache else None

    def read(self, new_tokens: list[int]) -> Tensor:
        """Append `new_tokens` and return the next-token logits [V]."""
        self.tokens.extend(new_tokens)
        unread = new_tokens
        if len(self.tokens) > self.model.max_seq_len:
            self.tokens = self.tokens[-max(1, self.model.max_seq_len // 2) :]
            unread = self.tokens
            if self.cache is not None:
                self.cache.clear()
        if self.cache is None:
            unread = self.tokens
        device = next(iter(self.model.parameters())).device
        tokens = torch.tensor([unread], device=device)  # [1, T]
        logits: Tensor = self.model(tokens) if self.cache is None else self.model(tokens, cache=self.cache)
        return logits[0, -1]


def _make_cache(model: LanguageModel, *, capacity: int, padding: Tensor | None = None) -> Any:
    """Return an empty cache: from the model's `make_cache` if it has one, otherwise a `KeyValueCache`."""
    if hasattr(model, "make_cache"):
        return model.make_cache(capacity=capacity, padding=padding)
    num_layers = int(getattr(model, "num_layers", len(model.blocks)))  # a pipeline rank has only some of the blocks
    return KeyValueCache(num_layers=num_layers, capacity=capacity, padding=padding)


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


def _check(prompt_tokens: list[int], *, temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not prompt_tokens:
        raise ConfigError("an empty prompt", "the first token needs a token before it", "a non-empty prompt")
    if temperature < 0.0:
        raise ConfigError(f"temperature={temperature}", "it must not be negative", "temperature=0.8")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k={top_k}", "at least one token must remain", "top_k=null for all")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ConfigError(f"top_p={top_p}", "it is a probability above 0", "top_p=0.95, or null")
