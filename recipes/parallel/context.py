"""Context parallelism: N ranks shard every sequence and exchange queries, keys and values for attention.

If N divides the heads, each rank gets some heads of all tokens (DeepSpeed-Ulysses, arXiv 2309.14509): attention, mask
and kernel are the same as on one device, and the work is balanced. Otherwise each rank gathers the keys and values of
all tokens for its own queries.

Shapes: B sequences, H query heads, G key-value heads, T tokens, t = T / N tokens of a rank, Q head size.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.errors import ConfigError
from recipes.numerics.collectives import ExchangeParts, GatherParts

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class ContextRanks:
    """Context-parallel ranks; each has a contiguous shard of the sequence, in rank order.

    Args:
        group: Process group of the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()
        self.rank = group.rank()

    def own_tokens(self, x: Tensor, *, dim: int) -> Tensor:
        """Return this rank's shard of a tensor along the sequence dimension.

        Raises:
            ValueError: The sequence length is not divisible by the number of ranks.
        """
        if x.shape[dim] % self.size:
            raise ValueError(
                f"{x.shape[dim]} tokens are not divisible by context_parallel_size={self.size}; set another seq_len"
            )
        return x.chunk(self.size, dim=dim)[self.rank]

    def exchange(self, queries: Tensor, keys: Tensor, values: Tensor, attend: Attend) -> Tensor | None:
        """Return causal attention [B, H, t, Q] computed by head; None if the heads do not divide evenly.

        Args:
            queries: [B, H, t, Q].
            keys: [B, G, t, Q].
            values: [B, G, t, Q].
            attend: Attention for a subset of heads over all tokens.
        """
        if queries.shape[1] % self.size:
            return None
        if keys.shape[1] % self.size:  # repeat to the number of query heads: a rank needs whole heads
            repeats = queries.shape[1] // keys.shape[1]
            keys, values = (part.repeat_interleave(repeats, dim=1) for part in (keys, values))  # [B, H, t, Q]
        by_heads = [
            ExchangeParts.apply(part, self.group, 1, 2) for part in (queries, keys, values)
        ]  # [B, H / N, T, Q], [B, G / N, T, Q] twice
        mixed = attend(*by_heads)
        out: Tensor = ExchangeParts.apply(mixed, self.group, 2, 1)
        return out

    def gather(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All-gather keys and values: [B, G, t, Q] -> [B, G, T, Q]."""
        every: Any = [GatherParts.apply(part, self.group, 2, part.dtype) for part in (keys, values)]
        return every[0], every[1]

    def causal_rows(self, num_own: int, *, device: torch.device) -> Tensor:
        """Return the causal mask of this rank's t tokens, [t, T] bool."""
        rows = self.rank * num_own + torch.arange(num_own, device=device)  # [t]
        return torch.arange(num_own * self.size, device=device) <= rows[:, None]


def apply_context_parallel(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Make a model compute a shard of every sequence, in place.

    Args:
        model: Model whose attention modules have an attribute `context`.
        group: Context-parallel process group.

    Raises:
        ConfigError: The model has no such attribute.
    """
    if not hasattr(model, "context"):
        raise ConfigError(
            f"context_parallel_size={group.size()}",
            f"the attention of {type(model).__name__} cannot be sharded along the sequence",
            "context_parallel_size=1, or model=gpt2 or a Llama",
        )
    ranks = ContextRanks(group)
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if hasattr(module, "context"):
            module.context = ranks
