"""Ranks of retrieval, against a sorted list."""

import pytest
import torch
import torch.nn.functional as F

from recipes.numerics import retrieval
from recipes.numerics.retrieval import find_ranks, summarize


def test_ranks_are_places_in_a_sorted_list_of_what_does_not_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "_ROWS", 4)
    generator = torch.Generator().manual_seed(0)
    queries, keys = (F.normalize(torch.randn(size, 5, generator=generator), dim=-1) for size in (11, 17))
    pairs = torch.stack([torch.arange(17) % 11, torch.arange(17)], dim=1)  # some queries have two keys
    expected = []
    for query in range(11):
        own = {key for of, key in pairs.tolist() if of == query}
        listed = sorted(range(17), key=lambda key: -float(queries[query] @ keys[key]))
        expected.append(next(place for place, key in enumerate(listed) if key in own))
    assert find_ranks(queries, keys, pairs).tolist() == expected
    assert max(expected) > 3, "some are not found at once"
    shares = [find_ranks(queries, keys, pairs, first=rank, step=3) for rank in range(3)]
    assert torch.stack(shares).sum(dim=0).tolist() == expected


@pytest.mark.parametrize("value", [1.0, torch.nan])
def test_a_model_that_maps_everything_to_one_feature_or_to_nan_finds_nothing(value: float) -> None:
    features, pairs = torch.full((4, 3), value), torch.arange(4)[:, None].expand(4, 2)
    assert find_ranks(features, features, pairs).tolist() == [3, 3, 3, 3]


def test_recall_counts_the_best_ranks_and_the_median_begins_at_one() -> None:
    assert summarize(torch.tensor([0, 0, 4, 5, 30])) == {
        "recall_1": pytest.approx(0.4),
        "recall_5": pytest.approx(0.6),
        "recall_10": pytest.approx(0.8),
        "median_rank": 5.0,
    }
