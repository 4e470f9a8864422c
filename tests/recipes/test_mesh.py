"""Places, samples and groups of ranks in a mesh, for random sizes of its dimensions."""

import math
import random
from typing import Any

import pytest

from recipes.mesh import Mesh, Place

_RNG = random.Random(0)
MESHES = [Mesh(**{name: _RNG.randint(1, 4) for name in Place._fields}) for _ in range(20)]


@pytest.fixture(params=MESHES, ids=lambda mesh: "x".join(str(getattr(mesh, name)) for name in Place._fields))
def mesh(request: Any) -> Mesh:
    """Return one of several meshes of random sizes."""
    made: Mesh = request.param
    return made


def test_every_place_has_one_rank(mesh: Mesh) -> None:
    places = [mesh.place(rank) for rank in range(mesh.world_size)]
    assert len(set(places)) == mesh.world_size
    for place in places:
        assert all(0 <= number < getattr(mesh, name) for name, number in place._asdict().items())


def test_neighbours_differ_in_the_tensor_dimension(mesh: Mesh) -> None:
    for rank in range(mesh.world_size - 1):
        here, there = mesh.place(rank), mesh.place(rank + 1)
        assert here < there, "the order of ranks is that of places"
        if here.tensor < mesh.tensor - 1:
            assert there == here._replace(tensor=here.tensor + 1)


def test_ranks_have_the_same_samples_exactly_where_they_are_of_the_same_shard_of_the_same_copy(mesh: Mesh) -> None:
    samples: dict[tuple[int, int], set[int]] = {}
    for rank in range(mesh.world_size):
        place = mesh.place(rank)
        samples.setdefault((place.replicate, place.shard), set()).add(mesh.data_rank(rank))
    assert all(len(of_place) == 1 for of_place in samples.values())
    numbers = sorted(number for of_place in samples.values() for number in of_place)
    assert numbers == list(range(mesh.data_size))


@pytest.mark.parametrize(
    "dimensions",
    [*((name,) for name in Place._fields), ("replicate", "shard"), ("replicate", "shard", "context"), Place._fields],
    ids=lambda names: " ".join(names),
)
def test_each_rank_is_in_one_group_whose_ranks_differ_in_these_dimensions_alone(
    mesh: Mesh, dimensions: tuple[str, ...]
) -> None:
    groups = list(mesh.groups(*dimensions))
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    others = [name for name in Place._fields if name not in dimensions]
    for group in groups:
        assert group == sorted(group)
        places = [mesh.place(rank) for rank in group]
        assert all(getattr(place, name) == getattr(places[0], name) for place in places for name in others)
        assert len(group) == len(set(places)) == math.prod(getattr(mesh, name) for name in dimensions)


def test_the_ranks_of_a_tensor_group_are_next_to_each_other(mesh: Mesh) -> None:
    for group in mesh.groups("tensor"):
        assert group == list(range(group[0], group[0] + mesh.tensor))


def test_sizes_multiply_up(mesh: Mesh) -> None:
    assert mesh.data_size * mesh.model_size == mesh.world_size
    assert mesh.averaged_size == mesh.data_size * mesh.context
    assert 1 not in mesh.sizes().values()
    assert math.prod(mesh.sizes().values()) == mesh.world_size


def test_a_mesh_without_sizes_is_one_rank() -> None:
    assert Mesh().world_size == 1
    assert Mesh().sizes() == {}
    assert list(Mesh().groups("tensor")) == [[0]]
