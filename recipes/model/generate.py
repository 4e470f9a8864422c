"""Generate text: with a key-value cache, one forward pass of one token per new token.

A full window slides by half. Positions are absolute (learned, or rotated keys in the cache), so the newest half of
`max_seq_len` is read again from position 0: one forward pass of max_seq_len / 2 tokens every max_seq_len / 2 tokens.
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from recipes.errors import ConfigError
from recipes.model import KeyValueCache, LanguageModel

log = logging.getLogger("lightning_recipes")
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
    end_of_text: int | None = None,
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
        end_of_text: Stop when this token is sampled; it is not returned. None: never.
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
    # cuDNN's kernel would plan for every number of keys, which grows with each token
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with _evaluating(model), torch.compiler.set_stance("force_eager"), sdpa_kernel(kernels):
        for step in range(num_tokens):
            logits = window.read(prompt_tokens if step == 0 else new_tokens[-1:])  # [V]
            probabilities = sampling_probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p)
            if not probabilities.isfinite().all():
                log.warning("The model's logits are NaN or inf: no more text is generated")
                break
            token = int(torch.multinomial(probabilities, 1, generator=rng))
            if agree is not None:
                token = agree(token)
            if token == end_of_text:
                break
            new_tokens.append(token)
    return new_tokens


def sampling_probabilities(logits: Tensor, *, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Return probabilities [V], float32 on the CPU, of logits [V]: temperature, then top-k, then top-p.

    All tokens tied with the k-th likeliest stay, and so does the token that crosses `top_p`.
    """
    logits = logits.float().cpu()
    if temperature < _GREEDY_BELOW:
        return torch.zeros_like(logits).index_fill_(0, logits.argmax(), 1.0)
    logits = logits / temperature
    if top_k is not None and top_k < len(logits):
        kth = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    probabilities = logits.softmax(dim=-1)
    if top_p is not None:
        ordered, order = probabilities.sort(descending=True)
        before = ordered.cumsum(dim=-1) - ordered  # probability of all likelier tokens
        probabilities[order[before >= top_p]] = 0.0
        probabilities /= probabilities.sum()
    return probabilities


class _Window:
    """The newest tokens, at most `max_seq_len`, and the logits after them."""

    def __init__(self, model: LanguageModel, *, use_cache: bool) -> None:
        self.model = model
        self.tokens: list[int] = []
        self.cache = KeyValueCache(num_layers=len(model.blocks), capacity=model.max_seq_len) if use_cache else None

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
