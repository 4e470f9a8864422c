"""Any range and any box of a tensor are read correctly from any split into parts; a missing part is an error."""

import itertools
import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from recipes.checkpoint.saved_tensor import SavedTensor, open_tensors
from recipes.checkpoint.shard_file import Part, write_shard
from recipes.checkpoint.shards import unsharded_part
from recipes.parallel.placement import RowOrder, cut_box

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64]


def _split_flat(tensor: Tensor, rng: random.Random) -> list[Part]:
    """Return ranges of the flattened tensor, as under ZeRO."""
    size = tensor.numel()
    bounds = sorted({0, size, *(rng.randint(0, size) for _ in range(rng.randint(0, 4)))})
    return [
        Part(tensor=tensor.reshape(-1)[start:stop], offsets=(start,), unsharded_shape=tensor.shape)
        for start, stop in pairwise(bounds)
    ]


def _split_by_rows(tensor: Tensor, rng: random.Random) -> list[Part]:
    """Return slabs of rows, as under FSDP."""
    rows = tensor.shape[0]
    bounds = sorted({0, rows, *(rng.randint(0, rows) for _ in range(rng.randint(0, 4)))})
    return [
        Part(
            tensor=tensor[start:stop],
            offsets=(start, *[0] * (tensor.ndim - 1)),
            unsharded_shape=tensor.shape,
        )
        for start, stop in pairwise(bounds)
    ]


def _split_by_boxes(tensor: Tensor, rng: random.Random) -> list[Part]:
    """Return boxes, as under tensor parallelism and FSDP."""
    bounds = [sorted({0, size, *(rng.randint(0, size) for _ in range(2))}) for size in tensor.shape]
    parts = []
    for box in itertools.product(*(pairwise(along) for along in bounds)):
        offsets, shape = tuple(start for start, _ in box), tuple(stop - start for start, stop in box)
        parts.append(Part(tensor=cut_box(tensor, offsets, shape), offsets=offsets, unsharded_shape=tensor.shape))
    return parts


def _split_stacked_rows(tensor: Tensor, rng: random.Random) -> list[Part]:
    """Return slabs of rows whose parts each rank has a share of, as those of queries, keys and values."""
    sizes, num_ranks = _find_stack(len(tensor))
    order = RowOrder(sizes=sizes, num_ranks=num_ranks)
    return [
        replace(part, rows=tuple(order.find(part.offsets[0], len(part.tensor))))
        for part in _split_by_rows(order.to_ranks(tensor), rng)
    ]


def _find_stack(num_rows: int) -> tuple[tuple[int, ...], int]:
    """Return sizes of three or fewer parts and a number of ranks that divides each."""
    num_ranks = 2 if num_rows % 2 == 0 else 1
    unit = num_rows // num_ranks
    sizes = [unit // 2, unit // 4, unit - unit // 2 - unit // 4]
    return tuple(size * num_ranks for size in sizes), num_ranks


def _write(folder: Path, parts: list[Part], rng: random.Random) -> dict[str, SavedTensor]:
    """Write each part to the file of another rank, and open the files in any order."""
    files = []
    for rank, part in enumerate(parts):
        files.append(folder / f"rank_{rank:05d}.safetensors")
        write_shard(files[-1], {"weight": part})
    rng.shuffle(files)
    return open_tensors(files)


@pytest.mark.parametrize("seed", range(40))
def test_any_range_of_any_split_is_the_slice_of_the_unsharded_tensor(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    shape = [rng.randint(1, 9) for _ in range(rng.randint(1, 3))]
    tensor = torch.randint(-99, 99, shape).to(rng.choice(DTYPES))
    split = rng.choice([_split_flat, _split_by_rows, _split_by_boxes, _split_stacked_rows])
    saved = _write(tmp_path, split(tensor, rng), rng)["weight"]
    assert saved.shape == tensor.shape
    assert torch.equal(saved.read(), tensor)
    assert saved.read().dtype == tensor.dtype
    flat = tensor.reshape(-1)
    for _ in range(20):
        start, stop = sorted(rng.randint(0, len(flat)) for _ in range(2))
        assert saved.read_range(start, stop).tolist() == flat[start:stop].tolist()
        offsets = tuple(rng.randint(0, size) for size in shape)
        box = tuple(rng.randint(0, size - offset) for offset, size in zip(offsets, shape, strict=True))
        assert torch.equal(saved.read_box(offsets, box), cut_box(tensor, offsets, box))


@pytest.mark.parametrize("missing", range(6))
def test_a_missing_box_is_an_error_for_every_box_that_needs_it(missing: int, tmp_path: Path) -> None:
    tensor = torch.arange(48.0).view(6, 8)
    places = [((row, column), (3, size)) for row in (0, 3) for column, size in ((0, 2), (2, 5), (7, 1))]
    parts = [Part(tensor=cut_box(tensor, *place), offsets=place[0], unsharded_shape=tensor.shape) for place in places]
    del parts[missing]
    saved = _write(tmp_path, parts, random.Random(0))["weight"]
    (row, column), (height, width) = places[missing]
    for top, left in itertools.product(range(6), range(8)):
        box = ((top, left), (1, 1))
        if row <= top < row + height and column <= left < column + width:
            with pytest.raises(ValueError, match="are not in the checkpoint"):
                saved.read_box(*box)
        else:
            assert torch.equal(saved.read_box(*box), cut_box(tensor, *box))
    with pytest.raises(ValueError, match="are not in the checkpoint"):
        saved.read()


def test_a_tensor_that_was_read_shares_no_memory_with_the_file(tmp_path: Path) -> None:
    """A weight must not change with the file, nor be read-only as the file may be."""
    path = tmp_path / "rank_00000.safetensors"
    write_shard(path, {"weight": unsharded_part(torch.arange(6.0))})
    saved = open_tensors([path])["weight"]
    first = saved.read()
    first.zero_()
    assert saved.read().tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("missing", range(4))
def test_a_missing_part_is_an_error_for_every_range_that_needs_it(missing: int, tmp_path: Path) -> None:
    tensor = torch.arange(12.0)
    bounds = [0, 2, 5, 9, 12]
    parts = [
        Part(tensor=tensor[start:stop], offsets=(start,), unsharded_shape=tensor.shape)
        for start, stop in pairwise(bounds)
    ]
    del parts[missing]
    saved = _write(tmp_path, parts, random.Random(0))["weight"]
    gone = set(range(bounds[missing], bounds[missing + 1]))
    for start in range(12):
        for stop in range(start + 1, 13):
            if gone & set(range(start, stop)):
                with pytest.raises(ValueError, match="are not in the checkpoint"):
                    saved.read_range(start, stop)
            else:
                assert torch.equal(saved.read_range(start, stop), tensor[start:stop])
    with pytest.raises(ValueError, match="are not in the checkpoint"):
        saved.read()


def test_an_empty_part_among_others_changes_nothing(tmp_path: Path) -> None:
    tensor = torch.arange(6.0)
    parts = [
        Part(tensor=tensor[start:stop], offsets=(start,), unsharded_shape=tensor.shape)
        for start, stop in ((3, 6), (3, 3), (0, 3))
    ]
    for seed in range(6):  # in several orders
        (tmp_path / str(seed)).mkdir()
        saved = _write(tmp_path / str(seed), parts, random.Random(seed))["weight"]
        assert torch.equal(saved.read(), tensor)


def test_parts_of_several_files_are_joined_by_name(tmp_path: Path) -> None:
    held: dict[int, dict[str, Part]] = defaultdict(dict)
    weight = torch.arange(10.0).reshape(5, 2)
    for rank, (start, stop) in enumerate([(0, 3), (3, 5)]):
        rows = weight[start:stop]
        held[rank]["weight"] = Part(tensor=rows, offsets=(start, 0), unsharded_shape=weight.shape)
        held[rank][f"rng/{rank}/cpu"] = unsharded_part(torch.tensor([rank]))
    files = []
    for rank, parts in held.items():
        files.append(tmp_path / f"rank_{rank:05d}.safetensors")
        write_shard(files[-1], parts)
    tensors = open_tensors(files)
    assert sorted(tensors) == ["rng/0/cpu", "rng/1/cpu", "weight"]
    assert torch.equal(tensors["weight"].read(), weight)
    assert tensors["rng/1/cpu"].read().tolist() == [1]


def test_a_scalar_and_an_empty_tensor_keep_shape_and_dtype(tmp_path: Path) -> None:
    path = tmp_path / "rank_00000.safetensors"
    tensors = {"step": torch.tensor(7.0).double(), "empty": torch.zeros(0, 3)}
    write_shard(path, {name: unsharded_part(tensor) for name, tensor in tensors.items()})
    for name, saved in open_tensors([path]).items():
        assert saved.read().shape == tensors[name].shape
        assert saved.read().dtype == tensors[name].dtype
        assert torch.equal(saved.read(), tensors[name])


def test_an_empty_tensor_of_another_dtype_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "rank_00000.safetensors"
    write_shard(path, {"empty": unsharded_part(torch.zeros(0, 3, dtype=torch.int64))})
    assert open_tensors([path])["empty"].read().dtype == torch.int64
