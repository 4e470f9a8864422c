"""Over all ranks every sample of a split is read once, and each rank has the same number of samples."""

import pytest
import torch
from support import MaskedTokens
from torch.utils.data import Subset

from recipes.data.batches import RankShare
from recipes.errors import ConfigError


def test_three_ranks_read_ten_samples_once_and_pad_to_four_each() -> None:
    source = MaskedTokens(num_samples=10, seq_len=4, vocab_size=9)
    shares = [RankShare(source, rank=rank, world_size=3) for rank in range(3)]
    assert [len(share) for share in shares] == [4, 4, 4]
    read = [share[index]["inputs"] for index in range(4) for share in shares]
    assert torch.equal(torch.stack(read[:10]), source.tokens[:, :-1])


def test_a_sample_that_pads_carries_no_loss_and_leaves_the_first_sample_as_it_was() -> None:
    source = MaskedTokens(num_samples=10, seq_len=4, vocab_size=9)
    before = source[0]["targets"].clone()
    padding = RankShare(source, rank=2, world_size=3)[3]
    assert (padding["targets"] == -100).all()
    assert torch.equal(source[0]["targets"], before)


def test_a_sample_that_pads_has_no_inputs_that_are_tokens_whether_their_number_is_a_tensor_or_not() -> None:
    row = {"inputs": torch.ones(4), "targets": torch.arange(4)}
    for num_inputs in (3, torch.tensor(3)):
        share = RankShare([row | {"num_inputs": num_inputs}], rank=1, world_size=2)
        assert int(share[0]["num_inputs"]) == 0


class Pairs:
    """Samples without targets."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"chosen": torch.tensor(index), "rejected": torch.tensor(10 + index)}


class PaddedPairs(Pairs):
    """Pairs that say how they pad."""

    def padding(self) -> dict[str, torch.Tensor]:
        return {"chosen": torch.tensor(-1), "rejected": torch.tensor(-1)}


def test_a_dataset_pads_with_its_own_sample_even_where_a_few_of_its_samples_are_read() -> None:
    dataset = PaddedPairs()
    whole = RankShare(dataset, rank=1, world_size=2)
    few = RankShare(Subset(dataset, [0, 2, 4]), rank=1, world_size=2, of=dataset)  # type: ignore[arg-type]
    assert [int(whole[index]["chosen"]) for index in range(2)] == [1, 3]
    assert int(few[0]["chosen"]) == 2
    for share, last in ((whole, 2), (few, 1)):
        assert (int(share[last]["chosen"]), int(share[last]["rejected"])) == (-1, -1)


def test_numbers_as_targets_are_padded_with_nan() -> None:
    samples = [{"inputs": torch.ones(4), "targets": torch.tensor([0.5, 0.5])}]
    assert RankShare(samples, rank=1, world_size=2)[0]["targets"].isnan().all()


def test_samples_without_targets_are_not_padded_by_a_guess() -> None:
    share = RankShare(Pairs(), rank=1, world_size=2)
    with pytest.raises(ConfigError) as caught:
        share[2]
    assert str(caught.value) == (
        "data=…: samples do not divide evenly over the ranks, and what pads them is unknown: they have no"
        " `targets`; type trainer.devices=1, or give the dataset a method `padding()`, which returns a sample without a"
        " loss"
    )


def test_one_rank_reads_the_split_as_it_is() -> None:
    source = MaskedTokens(num_samples=3, seq_len=4, vocab_size=9)
    share = RankShare(source, rank=0, world_size=1)
    assert all(torch.equal(share[i]["targets"], source[i]["targets"]) for i in range(3))
