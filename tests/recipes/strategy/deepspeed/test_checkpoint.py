"""ZeRO partitions become named tensors and come back, at any number of ranks; fakes stand in for DeepSpeed."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipes.checkpoint.saved_tensor import SavedTensor, open_tensors
from recipes.checkpoint.shard_file import Part, write_shard
from recipes.strategy.deepspeed.checkpoint import ZeroState

SHAPES = {"weight": (3, 5), "bias": (7,), "frozen": (2, 2)}
HYPERPARAMETERS = {"lr": 0.1, "betas": (0.9, 0.95)}


class Model(nn.Module):
    """Two parameters that train, one that does not, and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            values = torch.randn(shape, generator=random)
            setattr(self, name, nn.Parameter(values, requires_grad=name != "frozen"))
        self.register_buffer("counter", torch.tensor([float(seed)]))

    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.named_parameters() if p.requires_grad}


class FlatRank:
    """What one rank holds at stages 1 and 2: a range of all trained parameters in a row, padded.

    Args:
        model: This rank's copy.
        rank: Its index.
        ranks: Their number.
        values: Optimizer state by name and parameter; none before the first step.
    """

    def __init__(self, model: Model, rank: int, ranks: int, values: dict[str, dict[str, Tensor]]) -> None:
        self.model, trained = model, model.trained()
        total = sum(parameter.numel() for parameter in trained.values())
        size = -(-total // ranks)  # the last rank's is padded
        begin = rank * size
        self.flat = nn.Parameter(self._range(trained, begin, size))
        self.inner = SimpleNamespace(state={}, param_groups=[dict(HYPERPARAMETERS)])
        if values:
            self.inner.state[self.flat] = {
                name: self._range(by_parameter, begin, size) for name, by_parameter in values.items()
            } | {"step": torch.tensor(9.0)}
        self.optimizer = SimpleNamespace(
            optimizer=self.inner,
            param_groups=[dict(HYPERPARAMETERS) | {"params": [self.flat]}],
            bit16_groups=[list(trained.values())],
            single_partition_of_fp32_groups=[self.flat],
        )
        position = 0
        for parameter in trained.values():
            first, last = max(position, begin), min(position + parameter.numel(), begin + size)
            parameter._hp_mapping = (  # type: ignore[attr-defined]
                self._mapping(first - begin, first - position, last - first) if first < last else None
            )
            position += parameter.numel()

    @staticmethod
    def _range(tensors: dict[str, Any], begin: int, size: int) -> Tensor:
        row = torch.cat([tensor.detach().flatten() for tensor in tensors.values()])
        padded = torch.cat([row, row.new_zeros(size)])
        return padded[begin : begin + size].clone()

    def _mapping(self, offset: int, start: int, numel: int) -> Any:
        def get_hp_fragment(name: str | None = None) -> Tensor:
            source = self.flat.data if name is None else self.inner.state[self.flat][name]
            return source.narrow(0, offset, numel)

        return SimpleNamespace(
            lp_fragment_address=SimpleNamespace(start=start, numel=numel),
            get_hp_fragment=get_hp_fragment,
        )

    def zero_state(self) -> ZeroState:
        state = ZeroState()
        groups = [{"params": list(self.model.trained().values())}]
        state.remember(SimpleNamespace(param_groups=groups))  # type: ignore[arg-type]
        return state


class Stage3Rank:
    """What one rank holds at stage 3: a padded range of each parameter, one after the other in one sub-group."""

    def __init__(
        self,
        model: Model,
        rank: int,
        ranks: int,
        values: dict[str, dict[str, Tensor]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
        self.model, trained = model, model.trained()
        sizes = {name: -(-parameter.numel() // ranks) for name, parameter in model.named_parameters()}
        self._rank, self._sizes = rank, {name: sizes[name] for name in trained}
        self.flat = nn.Parameter(self._ranges(trained))
        inner = SimpleNamespace(state={self.flat: {}}, param_groups=[dict(HYPERPARAMETERS)])
        if values:
            moments = {name: self._ranges(tensors) for name, tensors in values.items()}
            inner.state[self.flat] = moments | {"step": torch.tensor(9.0)}
        self.optimizer = SimpleNamespace(
            optimizer=inner,
            param_groups=[dict(HYPERPARAMETERS) | {"params": [self.flat]}],
            fp16_groups=[list(trained.values())],
            sub_group_to_group_id={0: 0},
            fp32_partitioned_groups_flat=[self.flat],
            grad_position={},
            get_param_id=id,
            _swappable_optimizer_subgroup=lambda index: False,
            _reassign_or_swap_out_partitioned_parameters=self._refresh,
        )
        position = 0
        for name, parameter in model.named_parameters():
            unsharded, shape, size = parameter.detach().flatten(), parameter.shape, sizes[name]
            part = torch.cat([unsharded, unsharded.new_zeros(size * ranks)])[rank * size : (rank + 1) * size].clone()
            part.ds_numel, part.status = size, SimpleNamespace(name="AVAILABLE")  # type: ignore[attr-defined]
            parameter.ds_id, parameter.ds_shape, parameter.ds_tensor = name, shape, part  # type: ignore[attr-defined]
            parameter.ds_numel = unsharded.numel()  # type: ignore[attr-defined]
            if parameter.requires_grad:
                parameter._z3_optimizer = self.optimizer  # type: ignore[attr-defined]
                self.optimizer.grad_position[id(parameter)] = (0, position, size)
                position += size
            parameter.data = torch.empty(0)  # as DeepSpeed frees it

    def _ranges(self, tensors: dict[str, Any]) -> Tensor:
        padded = []
        for name, size in self._sizes.items():
            row = tensors[name].detach().flatten()
            row = torch.cat([row, row.new_zeros(size * (self._rank + 1))])
            padded.append(row[self._rank * size : (self._rank + 1) * size])
        return torch.cat(padded)

    def _refresh(self, index: int) -> None:
        """Copy the master weights to those that compute, as DeepSpeed does after a step."""
        for parameter in self.optimizer.fp16_groups[index]:
            _, start, size = self.optimizer.grad_position[id(parameter)]
            parameter.ds_tensor.copy_(self.flat.data[start : start + size])

    zero_state = FlatRank.zero_state


@pytest.fixture(params=["stages 1 and 2", "stage 3"])
def make_rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "stage 3":
        return lambda *arguments: Stage3Rank(*arguments, monkeypatch)
    return FlatRank


def get_state(seed: int) -> dict[str, dict[str, Tensor]]:
    """Return two moments of every trained parameter."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: {key: torch.randn(SHAPES[key], generator=random) for key in ("weight", "bias")}
        for name in ("exp_avg", "exp_avg_sq")
    }


def as_saved(parts: list[dict[str, Part]], folder: Path) -> dict[str, SavedTensor]:
    """Write each rank's parts to a file and open them together."""
    folder.mkdir()
    files = [folder / f"rank_{rank:05d}.safetensors" for rank in range(len(parts))]
    for path, of_rank in zip(files, parts, strict=True):
        write_shard(path, of_rank)
    return open_tensors(files)


def save(make_rank: Any, ranks: int, folder: Path) -> tuple[dict[str, SavedTensor], dict[str, Any]]:
    """Return the weights and the optimizer state that some ranks have saved."""
    weights, moments, groups = [], [], None
    for rank in range(ranks):
        held = make_rank(Model(1), rank, ranks, get_state(2))
        state, first = held.zero_state(), rank == 0
        weights.append(state.model(held.model, writes_unsharded=first))
        saved = state.optimizer(held.optimizer, writes_unsharded=first)
        groups = saved["param_groups"]
        moments.append(dict(_flattened(saved["state"])))
    tensors = as_saved(moments, folder / "optimizer")
    merged: dict[int, dict[str, SavedTensor]] = {}
    for name, tensor in tensors.items():
        index, _, key = name.partition("/")
        merged.setdefault(int(index), {})[key] = tensor
    state = {"state": dict(sorted(merged.items())), "param_groups": groups}
    return as_saved(weights, folder / "weights"), state


def _flattened(state: dict[int, dict[str, Part]]) -> Iterator[tuple[str, Part]]:
    for index, values in state.items():
        for key, part in values.items():
            yield f"{index}/{key}", part


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_all_ranks_together_save_every_tensor_under_torchs_names(ranks: int, make_rank: Any, tmp_path: Path) -> None:
    weights, optimizer = save(make_rank, ranks, tmp_path)
    expected = Model(1).state_dict()
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name].read(), tensor), name
    for name, by_parameter in get_state(2).items():
        for index, tensor in enumerate(by_parameter.values()):
            assert torch.equal(optimizer["state"][index][name].read(), tensor), (name, index)
    assert [float(values["step"].read()) for values in optimizer["state"].values()] == [9.0, 9.0]
    assert optimizer["param_groups"] == [HYPERPARAMETERS | {"params": [0, 1]}]


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, 3), (2, 2), (3, 2), (5, 1)])
def test_what_some_ranks_save_any_number_of_ranks_loads(
    saved_on: int, loaded_on: int, make_rank: Any, tmp_path: Path
) -> None:
    weights, optimizer = save(make_rank, saved_on, tmp_path)
    for rank in range(loaded_on):
        loaded = make_rank(Model(7), rank, loaded_on, {})
        state = loaded.zero_state()
        state.load_model(loaded.model, weights)
        state.load_optimizer(loaded.optimizer, optimizer)
        # a rank that has held these values from the start
        expected = make_rank(Model(1), rank, loaded_on, get_state(2))
        assert torch.equal(loaded.flat, expected.flat)
        assert torch.equal(loaded.model.counter, expected.model.counter)
        [found] = loaded.optimizer.optimizer.state.values()
        [wanted] = expected.optimizer.optimizer.state.values()
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name
        for name, parameter in expected.model.named_parameters():
            own = loaded.model.get_parameter(name)
            assert torch.equal(own, parameter), name
            if hasattr(own, "ds_tensor"):
                assert torch.equal(own.ds_tensor, parameter.ds_tensor), name


def test_before_the_first_step_there_is_no_optimizer_state(make_rank: Any) -> None:
    held = make_rank(Model(1), 0, 2, {})
    saved = held.zero_state().optimizer(held.optimizer, writes_unsharded=True)
    assert saved["state"] == {}
    fresh = make_rank(Model(7), 0, 2, {})
    fresh.zero_state().load_optimizer(fresh.optimizer, saved)
    assert not any(fresh.optimizer.optimizer.state.values())


def test_only_one_rank_writes_what_every_rank_holds(make_rank: Any) -> None:
    held = make_rank(Model(1), 1, 2, get_state(2))
    parts = held.zero_state().model(held.model, writes_unsharded=False)
    assert "counter" not in parts
    saved = held.zero_state().optimizer(held.optimizer, writes_unsharded=False)
    assert not any("step" in values for values in saved["state"].values())
