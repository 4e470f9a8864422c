"""Each token of a batch has one place in packed rows, and comes back from it."""

import numpy as np
import pytest
import torch

from recipes.data.packed_batch import find_positions, pack_tokens, plan_branches, plan_packing, unpack

SHAPES = [([5], 64), ([1, 1, 1, 1], 64), ([0, 9, 0, 200], 200), ([63, 64, 65, 127, 128], 128)]
SHAPES += [([40, 200, 33, 7, 150, 90, 12, 64], 256), ([*range(1, 60)], 59), ([30] * 16, 1000)]


@pytest.mark.parametrize(("num_inputs", "seq_len"), SHAPES)
def test_packed_rows_hold_every_token_once_in_order_and_no_more_tokens_than_padded_ones(
    num_inputs: list[int], seq_len: int
) -> None:
    width = min(-(-max(num_inputs) // 64) * 64, seq_len)
    packing = plan_packing(np.array(num_inputs), width=width, seq_len=seq_len)
    num_rows, num_columns = packing["cells"].shape
    assert num_columns <= seq_len
    assert num_rows <= len(num_inputs)
    assert num_rows * num_columns <= len(num_inputs) * min(width + 64, seq_len), "room for one token more"
    tokens = torch.arange(len(num_inputs) * width).view(-1, width) + 1
    packed, positions = pack_tokens(tokens, packing), find_positions(packing)
    back = unpack(packed, packing)
    for row, number in enumerate(num_inputs):
        assert back[row, :number].tolist() == tokens[row, :number].tolist()
        assert unpack(positions, packing)[row, :number].tolist() == [*range(number)]
    read = torch.cat([packing["places"][row, :number] for row, number in enumerate(num_inputs)])
    assert len(read.unique()) == sum(num_inputs)
    numbers = (positions == 0).cumsum(dim=1)  # of the texts in a row, each of which attends to itself
    for row, number in enumerate(num_inputs):
        of_text = numbers.flatten()[packing["places"][row, :number]]
        assert len(of_text.unique()) <= 1
    assert (positions[:, 0] == 0).all()


def test_uneven_answers_of_a_batch_leave_little_padding() -> None:
    lengths = np.random.default_rng(0).integers(30, 900, 32)
    packing = plan_packing(lengths, width=896, seq_len=2048)
    assert lengths.sum() / (32 * 896) < 0.6
    assert lengths.sum() / packing["cells"].numel() > 0.93


def test_gradients_reach_tokens_through_their_places_only() -> None:
    packing = plan_packing(np.array([3, 70, 12]), width=128, seq_len=128)
    values = torch.zeros(packing["cells"].shape, requires_grad=True)
    is_read = torch.zeros(3, 129)
    is_read[0, :3] = is_read[1, :70] = is_read[2, :12] = 1
    (unpack(values, packing) * is_read).sum().backward()
    assert values.grad is not None
    assert values.grad.sum() == 85
    assert values.grad.max() == 1


# lengths of a group's beginning -> inputs of its rows
GROUPS = [{3: [5, 4, 9, 7], 0: [1, 2]}, {6: [7], 4: [5, 6, 7]}, {9: [10, 10, 10, 12, 13, 10, 11, 11, 10]}]


@pytest.mark.parametrize("pad_to", [1, 4])
@pytest.mark.parametrize("groups", GROUPS)
def test_rows_that_begin_alike_read_their_beginning_once(groups: dict[int, list[int]], pad_to: int) -> None:
    num_inputs = np.array([number for rows in groups.values() for number in rows])
    num_shared = np.array([shared for shared, rows in groups.items() for _ in rows])
    width = int(num_inputs.max())
    packing = plan_branches(num_inputs, num_shared, num_shared, width=width, pad_to=pad_to, break_even=1000)
    assert packing is not None
    num_rows, num_columns = packing["cells"].shape
    assert num_columns % pad_to == 0
    assert num_rows * num_columns < len(num_inputs) * width
    tokens = torch.arange(len(num_inputs) * width).view(-1, width) + 1
    first = {shared: row for row, shared in reversed([*enumerate(num_shared.tolist())])}
    for row, shared in enumerate(num_shared.tolist()):
        tokens[row, :shared] = tokens[first[shared], :shared]
    packed, positions, branches = pack_tokens(tokens, packing), find_positions(packing), packing["branches"]
    documents = (positions == 0).cumsum(dim=1)
    for row, (number, shared) in enumerate(zip(num_inputs.tolist(), num_shared.tolist(), strict=True)):
        assert unpack(packed, packing)[row, :number].tolist() == tokens[row, :number].tolist()
        assert unpack(positions, packing)[row, :number].tolist() == [*range(number)]
        own = packing["places"][row, :number]
        assert len(documents.flatten()[own].unique()) == 1
        assert branches.flatten()[own[:shared]].tolist() == [0] * shared
        [branch] = branches.flatten()[own[shared:]].unique().tolist()
        others = (branches[own[-1] // num_columns] == branch).sum()
        assert others == number - shared, "no other row has this branch"
    read = torch.cat([packing["places"][row, :number] for row, number in enumerate(num_inputs)])
    assert len(read.unique()) <= sum(num_inputs) - min(len(rows) - 1 for rows in groups.values() if len(rows) > 1)


def test_rows_share_a_packed_one_as_far_as_its_attention_costs_less_than_their_beginning() -> None:
    def count(shared: int, own: int, break_even: int) -> int | None:
        rows = np.full(16, shared + own), np.full(16, shared), np.arange(16) // 8
        packing = plan_branches(*rows, width=shared + own, pad_to=1, break_even=break_even)
        return None if packing is None else 16 // len(packing["cells"])

    assert count(100, 10, 1000) == 8
    assert count(100, 100, 1000) == 4
    assert count(100, 100, 100) is None, "attention costs most"
    assert count(4, 100, 1000) is None, "little is shared"
