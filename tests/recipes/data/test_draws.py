"""What a sample draws is a function of (seed, position): of no process, rank, micro-batch or past."""

import functools
import pickle

import numpy as np
import pytest
import torch
from numpy.random import Generator, Philox
from streams import SEED, open_stream, take
from support import MaskedTokens
from torch import Tensor

from recipes.data.augmentation import AugmentedImages
from recipes.data.draws import DrawnSamples, rng_at
from recipes.data.mixture.samples import MixedSamples, MixedValidation
from recipes.data.mixture.stages import Stages
from recipes.data.order import RepeatedOrder, ShuffledOrder
from recipes.data.random_images import RandomImages

NUM_IMAGES = 37
IMAGES = RandomImages(
    num_classes=10,
    in_channels=1,
    image_size=8,
    num_samples=NUM_IMAGES,
    random_crop_padding=2,
    random_horizontal_flip=True,
    targets="classes",
)


stream = functools.partial(open_stream, IMAGES)


@pytest.fixture(scope="module")
def whole() -> Tensor:
    """Return the first 80 images of the stream, which are two epochs and six samples."""
    return take(stream()[1], 10)


def test_the_key_of_a_generator_is_the_seed_and_the_position() -> None:
    for seed, position in ((0, 0), (3, 5), (2**64 - 1, 2**62), (-1, 7)):
        words = np.array([seed % 2**64, position], dtype=np.uint64)
        assert rng_at(seed, position).random(4).tolist() == Generator(Philox(key=words)).random(4).tolist()
    firsts = {rng_at(seed, position).random() for seed in range(20) for position in range(50)}
    assert len(firsts) == 1000


def test_positions_that_differ_by_2_to_the_32_draw_other_numbers() -> None:
    """The generator of torch reads the lower half of its seed."""
    ours, theirs = ({draw(at) for at in (1, 1 + 2**32)} for draw in (_first_of_ours, _first_of_torch))
    assert len(ours) == 2
    assert len(theirs) == 1


def _first_of_ours(position: int) -> float:
    return rng_at(0, position).random()


def _first_of_torch(position: int) -> float:
    return torch.rand((), generator=torch.Generator().manual_seed(position)).item()


def test_two_epochs_draw_different_crops_of_an_image(whole: Tensor) -> None:
    order = ShuffledOrder(NUM_IMAGES, SEED).indices(np.arange(80))
    crops = [[whole[at] for at in np.flatnonzero(order == index)[:2]] for index in range(NUM_IMAGES)]
    # 25 crops, each mirrored or not: a pair is equal once in 50
    assert sum(torch.equal(*pair) for pair in crops) <= 4
    plain = IMAGES._images(num_samples=NUM_IMAGES, seed=0)
    for index, pair in enumerate(crops):
        image = plain[index]["inputs"]
        for crop in pair:
            assert set(crop[crop != 0].tolist()) <= set(image.flatten().tolist())


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_the_samples_are_the_same_for_any_number_of_loader_processes_and_after_a_resume(
    num_workers: int, whole: Tensor
) -> None:
    assert torch.equal(take(stream(num_workers=num_workers)[1], 4), whole[:32])
    assert torch.equal(take(stream(num_workers=num_workers, position=40)[1], 5), whole[40:])


def test_the_samples_are_the_same_for_every_split_into_micro_batches(whole: Tensor) -> None:
    for accumulate in (2, 4, 8):
        batches = stream(micro_batch_size=8 // accumulate, accumulate=accumulate)[1]
        assert torch.equal(take(batches, 10 * accumulate), whole)


def test_two_ranks_share_the_samples_of_one(whole: Tensor) -> None:
    ranks = [stream(micro_batch_size=2, accumulate=2, world_size=2, rank=rank)[1] for rank in (0, 1)]
    assert torch.equal(torch.cat([take(batches, 1) for _ in range(20) for batches in ranks]), whole)


def test_a_stream_that_is_moved_draws_what_is_at_the_new_position(whole: Tensor) -> None:
    data, batches = stream()
    take(batches, 2)
    data.move_to(48)
    assert torch.equal(take(batches, 2), whole[48:64])
    data.move_to(8)
    assert torch.equal(take(batches, 1), whole[8:16])


def test_neither_torchs_nor_numpys_global_generator_is_read_or_moved(whole: Tensor) -> None:
    torch.manual_seed(11)
    np.random.seed(11)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]
    assert torch.equal(take(stream()[1], 10), whole)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]


def test_another_seed_of_the_run_draws_other_crops() -> None:
    dataset = IMAGES.train()
    own, other = (DrawnSamples(dataset, seed) for seed in (3, 4))
    same = sum(torch.equal(own[7, at]["inputs"], other[7, at]["inputs"]) for at in range(100))
    assert same <= 8  # one in 50
    assert torch.equal(own[7, 1]["inputs"], pickle.loads(pickle.dumps(own))[7, 1]["inputs"])


def test_repeated_batches_are_drawn_as_they_were_and_validated_as_they_are_drawn(whole: Tensor) -> None:
    for accumulate in (1, 4):
        data, batches = stream(micro_batch_size=8 // accumulate, accumulate=accumulate, overfit_batches=2)
        assert torch.equal(take(batches, 6 * accumulate), torch.cat([whole[:16]] * 3))
        validated = torch.cat([batch["inputs"] for batch in data.val_dataloader()])  # type: ignore[call-overload]
        assert torch.equal(validated, whole[:16])


def test_a_repeated_stream_within_another_draws_at_the_first_of_its_positions() -> None:
    order = RepeatedOrder(RepeatedOrder(ShuffledOrder(10, SEED), period=12), period=8)
    assert order.draws(np.arange(20)).tolist() == [at % 8 for at in range(20)]
    assert order.places(np.array([[9]])).tolist() == [[[order(1), 1]]]


def test_validation_and_evaluation_of_the_training_split_draw_nothing() -> None:
    data, _ = stream()
    plain = IMAGES._images(num_samples=NUM_IMAGES, seed=0)
    [loader] = data.split_dataloaders("train")
    evaluated = torch.cat([batch["inputs"] for batch in loader])
    assert torch.equal(evaluated, torch.stack([plain[index]["inputs"] for index in range(NUM_IMAGES)]))
    assert not isinstance(IMAGES.val(), AugmentedImages)


def test_samples_of_a_step_say_how_they_are_drawn_again(whole: Tensor) -> None:
    for overfit_batches in (None, 1):
        data, batches = stream(micro_batch_size=4, accumulate=2, overfit_batches=overfit_batches)
        images = take(batches, 6)[-8:]
        samples = data.samples_of_step(24)
        assert [entry["position"] for entry in samples] == list(range(16, 24))
        for entry, image in zip(samples, images, strict=True):
            drawn = IMAGES.train().sample(entry["sample"], rng_at(**entry["draw"]))  # type: ignore[attr-defined]
            assert torch.equal(drawn["inputs"], image)


def test_a_batch_says_of_how_many_samples_it_was_made() -> None:
    class Pairs(MaskedTokens):
        """Two rows for each sample."""

        def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
            return {name: torch.stack([sample[name] for sample in samples] * 2) for name in samples[0]}

    pairs = Pairs(num_samples=NUM_IMAGES, seq_len=4, vocab_size=8)
    batch = next(open_stream(pairs, micro_batch_size=2, accumulate=2)[1])
    assert batch["targets"].shape == (4, 4)
    assert batch["num_samples"] == 2


class Noisy(MaskedTokens):
    """Tokens with a random first one; random only if it is asked for."""

    def __init__(self, *, draws: bool, num_samples: int = 20) -> None:
        super().__init__(num_samples=num_samples, seq_len=4, vocab_size=8)
        if not draws:
            self.sample = None  # type: ignore[assignment, method-assign]

    def sample(self, index: int, rng: Generator) -> dict[str, Tensor]:
        sample = self[index]
        return sample | {"inputs": torch.cat([torch.tensor([100 + int(rng.integers(1 << 20))]), sample["inputs"][1:]])}

    def padding(self) -> dict[str, Tensor]:
        return {name: torch.full((4,), -100 if name == "targets" else 7) for name in ("inputs", "targets")}


def mixed(*draws: bool) -> MixedSamples:
    parts = {f"part_{number}": Noisy(draws=each) for number, each in enumerate(draws)}
    return MixedSamples(parts, Stages([0], [[1 / len(parts)] * len(parts)]))


def test_a_mixture_draws_for_its_sources_that_draw() -> None:
    dataset = mixed(True, False)
    samples = [DrawnSamples(dataset, SEED)[index, 5] for index in range(40)]
    assert [int(sample["source"]) for sample in samples] == [0] * 20 + [1] * 20
    assert len({int(sample["inputs"][0]) for sample in samples[:20]}) == 1, "one position draws one number"
    assert int(samples[0]["inputs"][0]) == 100 + int(rng_at(SEED, 5).integers(1 << 20))
    for index in range(20, 40):
        assert torch.equal(samples[index]["inputs"], dataset[index]["inputs"])
    assert mixed(False, False).sample is None


def test_a_mixture_pads_with_the_sample_of_its_first_source() -> None:
    dataset = mixed(True, False)
    for split in (dataset, MixedValidation(dataset.parts, dataset.stages)):
        padding = split.padding()
        assert padding["inputs"].tolist() == [7] * 4
        assert padding["source"] == 0
