"""A shard file holds every bit of every tensor, is read by safetensors and torch, and detects NaN and inf."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from recipes.checkpoint.manifest import hash_file
from recipes.checkpoint.shard_file import Part, write_shard
from recipes.checkpoint.shards import unsharded_part

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
CHUNK = 4 << 20  # bytes that are checked, hashed and written at a time


def _bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def _random_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return any bits a dtype may have: NaN with a payload, denormals, both zeros."""
    if dtype == torch.bool:
        return torch.randint(2, shape).bool()
    num_bytes = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(256, (*shape, num_bytes), dtype=torch.uint8).view(dtype).reshape(shape)


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    """Return every dtype in every special shape, element sizes mixed so that their order matters."""
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for dtype in [torch.bool, torch.bfloat16, *INTEGERS, *FLOATS]:
        name = str(dtype).partition(".")[2]
        tensors |= {
            f"{name}.odd": _random_bits(dtype, 3, 7),
            f"{name}.scalar": _random_bits(dtype, 1).reshape(()),
            f"{name}.empty": _random_bits(dtype, 0, 4),
            f"{name}.transposed": _random_bits(dtype, 5, 3).T,
            f"{name}.expanded": _random_bits(dtype, 1, 3).expand(4, 3),
        }
    tensors["larger_than_a_chunk"] = _random_bits(torch.bfloat16, CHUNK // 2 + 3)
    return tensors


def test_every_bit_of_every_tensor_is_read_by_safetensors(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "rank_00000.safetensors"
    record, _ = write_shard(path, {name: unsharded_part(tensor) for name, tensor in tensors.items()})
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype, name
        assert read[name].shape == tensor.shape, name
        assert _bits(read[name]) == _bits(tensor), name
    assert record.bytes == path.stat().st_size
    assert record.xxh3_128 == hash_file(path)


def test_each_tensor_starts_at_a_multiple_of_its_element_size(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    """A reader may then map it; an odd number of bfloat16 before float64 is where that goes wrong."""
    path = tmp_path / "rank_00000.safetensors"
    write_shard(path, {name: unsharded_part(tensor) for name, tensor in tensors.items()})
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    described = json.loads(content[8 : 8 + length])
    del described["__metadata__"]
    assert (8 + length) % 8 == 0
    assert described.keys() == tensors.keys()
    for name, entry in described.items():
        assert (8 + length + entry["data_offsets"][0]) % tensors[name].element_size() == 0, name


def test_a_tensor_with_strides_is_written_element_by_element(tmp_path: Path) -> None:
    every_other = torch.arange(11.0)[::2]
    write_shard(tmp_path / "file", {"every_other": unsharded_part(every_other)})
    assert torch.equal(load_file(tmp_path / "file")["every_other"], every_other)


def test_a_file_without_tensors_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "rank_00001.safetensors"  # of a rank that holds nothing
    assert write_shard(path, {})[1] is None
    assert load_file(path) == {}


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "rank_00000.safetensors"
    path.write_bytes(b"there")
    with pytest.raises(FileExistsError):
        write_shard(path, {})
    assert path.read_bytes() == b"there"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "nan with a payload"])
def test_nan_and_inf_are_found_at_any_position(dtype: torch.dtype, value: str, tmp_path: Path) -> None:
    size = CHUNK // torch.empty(0, dtype=dtype).element_size() + 5
    for place in (0, size - 6, size - 5, size - 1):  # both sides of a chunk boundary
        odd = torch.zeros(size, dtype=dtype)
        odd[place] = float(value.partition(" ")[0])
        if "payload" in value:
            odd.view(torch.uint8)[place * odd.element_size()] |= 1
        parts = {"fine": unsharded_part(torch.ones(3)), "odd": unsharded_part(odd)}
        _, not_finite = write_shard(tmp_path / f"at_{place}", parts)
        assert not_finite == "odd", place


@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_denormals_and_the_largest_values_are_finite(dtype: torch.dtype, tmp_path: Path) -> None:
    limits = torch.finfo(dtype)
    values = [0.0, -0.0, limits.max, limits.min, limits.tiny, limits.smallest_normal, limits.eps]
    tensor = torch.tensor(values, dtype=dtype)
    denormal = torch.zeros(1, dtype=dtype)
    denormal.view(torch.uint8)[0] = 1
    parts = {"values": unsharded_part(tensor), "denormal": unsharded_part(denormal)}
    assert write_shard(tmp_path / "file", parts)[1] is None


@pytest.mark.parametrize("dtype", [torch.bool, *INTEGERS])
def test_integers_may_have_any_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    ones = torch.full((9,), -1).to(dtype) if dtype != torch.bool else torch.ones(9).bool()
    assert write_shard(tmp_path / "file", {"ones": unsharded_part(ones)})[1] is None


def test_torch_itself_reads_what_two_ranks_wrote(tmp_path: Path) -> None:
    """Two shards of rows, as under FSDP with two ranks, one tensor that one rank writes, and a scalar."""
    torch.manual_seed(0)
    unsharded = {
        "weight": torch.randn(5, 3, 2),
        "half": torch.randn(7).bfloat16(),
        "step": torch.tensor(7.0),
        "alone": torch.arange(4),
    }

    def rows(name: str, start: int, stop: int) -> Part:
        tensor = unsharded[name]
        offsets = (start, *[0] * (tensor.ndim - 1))
        return Part(tensor=tensor[start:stop], offsets=offsets, unsharded_shape=tensor.shape)

    first = {"weight": rows("weight", 0, 3), "half": rows("half", 0, 4)}
    first["step"] = unsharded_part(unsharded["step"])
    second = {"weight": rows("weight", 3, 5), "half": rows("half", 4, 7)}
    second["alone"] = unsharded_part(unsharded["alone"])
    write_shard(tmp_path / "rank_00000.safetensors", first)
    write_shard(tmp_path / "rank_00001.safetensors", second)
    read = {name: torch.zeros_like(tensor) for name, tensor in unsharded.items()}
    dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(path=str(tmp_path)))
    for name, tensor in unsharded.items():
        assert torch.equal(read[name], tensor), name
    with safe_open(tmp_path / "rank_00001.safetensors", framework="pt") as file:
        assert "DCP_SHARDING_INFO" in file.metadata()
