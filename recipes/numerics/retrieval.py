"""Retrieval: at which rank the nearest of what belongs to a query is, among everything that could be found.

Shapes: Q queries, K keys, P pairs of a query with a key that belongs to it; F numbers of a feature.
"""

import torch
from torch import Tensor

_ROWS = 1024  # queries whose similarities with all keys are in memory at a time
CUTOFFS = (1, 5, 10)  # of recall


def find_ranks(queries: Tensor, keys: Tensor, pairs: Tensor, *, first: int = 0, step: int = 1) -> Tensor:
    """Return how many keys that do not belong to a query are as near to it as the nearest one that does, [Q] int64.

    0 is the best. A key that is as near counts, and so does NaN: of a model that maps everything to one feature, no
    query finds anything.

    Args:
        queries: [Q, F], normalized.
        keys: [K, F], normalized.
        pairs: [P, 2] int64, of a query and a key; each query has one or more.
        first: The first query that is ranked.
        step: From one that is ranked to the next, such as a number of ranks; of all others the result is 0.
    """
    ranks = torch.zeros(len(queries), dtype=torch.int64, device=queries.device)
    for places in torch.arange(first, len(queries), step, device=queries.device).split(_ROWS):
        similar = queries[places] @ keys.T  # [c, K]
        row = torch.full((len(queries),), -1, dtype=torch.int64, device=queries.device)  # [Q]
        row[places] = torch.arange(len(places), device=queries.device)
        of_row = row[pairs[:, 0]]  # [P]
        belongs = torch.zeros_like(similar, dtype=torch.bool)
        belongs[of_row[of_row >= 0], pairs[of_row >= 0, 1]] = True
        best = similar.masked_fill(~belongs, -torch.inf).amax(dim=1, keepdim=True)  # [c, 1]
        ranks[places] = (~(similar < best) & ~belongs).sum(dim=1)
    return ranks


def summarize(ranks: Tensor) -> dict[str, float]:
    """Return recall at each cutoff, and the median rank, from 1, of ranks [Q] from 0."""
    recalls = {f"recall_{cutoff}": float((ranks < cutoff).double().mean()) for cutoff in CUTOFFS}
    return recalls | {"median_rank": float(ranks.double().quantile(0.5)) + 1}
