"""Mixup and cutmix against timm's with the same draw, and the pairs that any split of the stream holds."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recipes.data.batches import PositionSampler
from recipes.data.draws import DrawnSamples, rng_at
from recipes.data.order import ShuffledOrder
from recipes.errors import ConfigError
from recipes.transform.mixing import Mixing

timm_mixup: Any = pytest.importorskip("timm.data.mixup")

V, SIZE = 5, 12


def make_pair(seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(2, 3, SIZE, SIZE, generator=generator)
    first, second = ({"inputs": image, "targets": torch.tensor(3 * i)} for i, image in enumerate(images))
    return first, second


def mixing(**settings: Any) -> Mixing:
    return Mixing(**{"mixup": 0.8, "cutmix": 1.0, "probability": 1.0, "switch": 0.5, "epochs": None} | settings)


class Recorded:
    """A generator that remembers what it drew, to give timm the same."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.kept = -1.0
        self.centers: list[int] = []

    def random(self) -> float:
        return float(self._rng.random())

    def beta(self, one: float, other: float) -> float:
        self.kept = float(self._rng.beta(one, other))
        return self.kept

    def integers(self, length: int) -> int:
        self.centers.append(int(self._rng.integers(length)))
        return self.centers[-1]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_images_and_targets_are_those_of_timm_with_the_same_share_and_box(
    smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_boxes = 0
    for seed in range(20):
        rng: Any = Recorded(seed)
        mixed = mixing()(*make_pair(seed), rng, epoch=0.0, num_classes=V)
        theirs = timm_mixup.Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=smoothing, num_classes=V)
        centers = iter(rng.centers)
        monkeypatch.setattr(theirs, "_params_per_batch", lambda rng=rng: (rng.kept, bool(rng.centers)))
        monkeypatch.setattr(timm_mixup.np.random, "randint", lambda *_, centers=centers, **__: next(centers))
        images, targets = (torch.stack([sample[name] for sample in make_pair(seed)]) for name in ("inputs", "targets"))
        images, targets = theirs(images, targets)
        found = torch.stack([sample["targets"] for sample in mixed])  # [2, V]
        assert torch.allclose(torch.stack([sample["inputs"] for sample in mixed]), images, rtol=0, atol=1e-6)
        # smoothing is a setting of the loss, and linear in the targets
        assert torch.allclose(found * (1 - smoothing) + smoothing / V, targets, rtol=0, atol=1e-6)
        assert torch.allclose(found.sum(dim=1), torch.ones(2), rtol=0, atol=1e-6)
        num_boxes += bool(rng.centers)
    assert 5 <= num_boxes <= 15


def test_a_probability_of_0_5_leaves_half_of_the_pairs_and_the_last_epochs_leave_all() -> None:
    def is_mixed(seed: int, epoch: float) -> bool:
        mixed, _ = mixing(probability=0.5, epochs=2.5)(*make_pair(), rng_at(seed, 0), epoch=epoch, num_classes=V)
        return not torch.equal(mixed["inputs"], make_pair()[0]["inputs"])

    assert 75 < sum(is_mixed(seed, 2.4) for seed in range(200)) < 125
    assert not any(is_mixed(seed, 2.5) for seed in range(50))
    left, _ = mixing(epochs=0.0)(*make_pair(), rng_at(0, 0), epoch=0.0, num_classes=V)
    assert left["targets"].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]  # of one kind with the targets of mixed pairs


def test_several_labels_are_mixed_as_they_are() -> None:
    first, second = make_pair()
    labels = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    pair = first | {"targets": labels[0]}, second | {"targets": labels[1]}
    mixed = mixing(cutmix=0.0)(*pair, rng_at(0, 0), epoch=0.0, num_classes=V)
    share = mixed[0]["targets"][0]
    assert 0 < share < 1
    assert mixed[0]["targets"].tolist() == pytest.approx([float(share), 1.0, 0.0])
    assert mixed[1]["targets"].tolist() == pytest.approx([1 - float(share), 1.0, 0.0])


class Numbers(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples that say which of them a pair holds, and what its generator drew."""

    def __len__(self) -> int:
        return 40

    def sample(self, index: int, rng: np.random.Generator) -> dict[str, Any]:
        return {"index": index, "drawn": float(rng.random())}

    def mix_pair(self, first: Any, second: Any, rng: np.random.Generator, position: int) -> Any:
        drawn = float(rng.random())
        assert drawn != first["drawn"]
        pair = (first["index"], second["index"], position, drawn)
        return first | {"pair": pair}, second | {"pair": pair}


@pytest.mark.parametrize(("size", "world_size"), [(2, 1), (8, 1), (16, 1), (2, 2), (8, 2), (4, 4)])
def test_any_ranks_and_micro_batches_mix_the_same_pairs(size: int, world_size: int) -> None:
    def read(size: int, world_size: int, start: int = 0) -> set[Any]:
        drawn = DrawnSamples(Numbers(), seed=3)
        found: set[Any] = set()
        for rank in range(world_size):
            number = (64 - start) // (size * world_size)
            options = {"micro_batch_size": size, "world_size": world_size, "num_micro_batches": number, "draws": True}
            sampler = PositionSampler(ShuffledOrder(40, 3), start_position=start, rank=rank, **options)
            for places in sampler:
                found |= {sample["pair"] for sample in drawn.__getitems__(places)}
        return found

    assert read(size, world_size) == read(4, 1)
    assert len(read(4, 1)) == 32
    assert {pair[2] for pair in read(size, world_size, start=32)} == {*range(32, 64, 2)}
    assert read(size, world_size, start=32) == {pair for pair in read(4, 1) if pair[2] >= 32}


def test_an_image_without_a_partner_is_refused() -> None:
    with pytest.raises(ConfigError, match="micro_batch_size=3: .*no partner; type micro_batch_size=4"):
        DrawnSamples(Numbers(), seed=0).__getitems__([(0, 0), (1, 1), (2, 2)])
