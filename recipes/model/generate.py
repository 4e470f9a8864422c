"""Generate text: with a key-value cache, one forward pass of one token per new token.

A full window slides by half. Positions are absolute (learned, or rotated keys in the cache), so the newest half of
`max_seq_len` is read again from position 0: one forward pass of max_seq_len / 2 tokens every max_seq_len / 2 tokens.
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
# without cuDNN's, which would plan for every number of keys, and that grows with each token
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_GREEDY_BELOW = 1e-6  # float32 cannot hold logits divided by less; the likeliest token has all the probability anyway


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
        model: On any device. Under a strategy with collectives, call on every rank with the same arguments.
        prompt_tokens: At least one token.
        num_tokens: Largest number of tokens to add.
        temperature: 0: always the likeliest token; below 1: sharper; above 1: flatter.
        top_k: Sample among the k likeliest tokens; None: all.
        top_p: Sample among the fewest tokens that have this probability together; None: all.
        seed: The same seed and logits give the same tokens, on any device.
        ends: Stop when one of these tokens is sampled; it is not returned.
        use_cache: False reads the whole window for every token: slower, the same tokens; a model whose `forward` has
            no `cache` argument always does.
        agree: Returns rank 0's token on every rank. On different GPUs the last bits of logits differ, and so may the
            sampled tokens: where weights are sharded, a rank that ended earlier would leave the others waiting in a
            collective. None: this process generates alone.

    Returns:
        Only the new tokens; fewer if the logits of a diverged model are NaN or inf.

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
    """What a model has generated.

    Attributes:
        tokens: New ones.
        has_ended: Whether the model has ended it; else there was no more room.
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
    """Continue many prompts of different lengths together: the tokens of each are those it would get alone.

    A forward pass reads one token of every prompt. Prompt and answer must fit into `max_seq_len`; the window does not
    slide.

    Args:
        model: On any device, with `cache` among the arguments of its `forward`.
        prompts: At least one token each.
        num_tokens: Largest number of tokens to add to each; an answer also ends where `max_seq_len` does.
        temperature: As for `generate`.
        top_k: As for `generate`.
        top_p: As for `generate`.
        seeds: Of the sampling, one a prompt.
        ends: Tokens that end an answer; they are not returned.
        all_ended: Returns whether this rank's answers and those of all other ranks have ended: where weights are
            sharded, every rank must run as many forward passes as the others. None: this process generates alone.
        is_complete: Returns whether the tokens of an answer complete it, called after each one; None: `ends` decide.

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
        for step in range(num_tokens):  # not fewer where all windows are full: other ranks would wait for this one
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
            padding += torch.tensor(is_over, device=padding.device)  # the next one replaces their last
    return answers


def _pad_right(prompts: Sequence[list[int]], *, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the prompts as one tensor [B, T], and how many tokens at the end of each row are padding, [B]."""
    width = max(map(len, prompts))
    tokens = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts], device=device)
    return tokens, torch.tensor([width - len(prompt) for prompt in prompts], device=device)


def _draw(probabilities: Tensor, rng: torch.Generator) -> int | None:
    """Return a token; None where the logits of a diverged model are NaN or inf."""
    if not probabilities.isfinite().all():
        return None
    return int(torch.multinomial(probabilities, 1, generator=rng))


def sampling_probabilities(logits: Tensor, *, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Return probabilities [..., V], float32 on the CPU, of logits [..., V]: temperature, then top-k, then top-p.

    All tokens tied with the k-th likeliest stay, and so does the token that crosses `top_p`.
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
        before = ordered.cumsum(dim=-1) - ordered  # probability of all likelier tokens
        probabilities = torch.zeros_like(ordered).scatter_(-1, order, ordered.masked_fill(before >= top_p, 0.0))
        probabilities /= probabilities.sum(dim=-1, keepdim=True)
    return probabilities


class _Window:
    """The newest tokens, at most `max_seq_len`, and the logits after them."""

    def __init__(self, model: LanguageModel, *, use_cache: bool) -> None:
        self.model = model
        self.tokens: list[int] = []
        self.cache = _make_cache(model, capacity=model.max_seq_len) if use_cache else None

    def read(self, new_tokens: list[int]) -> Tensor:
        """Return the logits [V] after `new_tokens`."""
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
    """Return an empty cache: the model's own, or keys and values by layer."""
    if hasattr(model, "make_cache"):
        return model.make_cache(capacity=capacity, padding=padding)
    num_layers = int(getattr(model, "num_layers", len(model.blocks)))  # a rank of a pipeline has some of the blocks
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
        raise ConfigError("an empty prompt", "the first token needs a token before it", "a word as prompt")
    if temperature < 0.0:
        raise ConfigError(f"temperature={temperature}", "it divides the logits", "temperature=0.8")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k={top_k}", "at least one token must remain", "top_k=null for all")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ConfigError(f"top_p={top_p}", "it is a probability above 0", "top_p=0.95, or null")
