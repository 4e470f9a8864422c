"""Over all ranks every sample of a split is read once, and each rank has the same number of samples."""

import torch
from support import MaskedTokens

from recipes.data.batches import RankShare


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
    row = {"inputs": torch.ones(4), "targets": torch.ones(4)}
    for num_inputs in (3, torch.tensor(3)):
        share = RankShare([row | {"num_inputs": num_inputs}], rank=1, world_size=2)
        assert int(share[0]["num_inputs"]) == 0


def test_one_rank_reads_the_split_as_it_is() -> None:
    source = MaskedTokens(num_samples=3, seq_len=4, vocab_size=9)
    share = RankShare(source, rank=0, world_size=1)
    assert all(torch.equal(share[i]["targets"], source[i]["targets"]) for i in range(3))
