"""What blocks save is in host memory between the passes: each storage once, no parameter, nothing of the last block."""

import itertools
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_cuda import GPU, fake_streams
from small_models import MODELS, NONE, OPTIONS, make, train
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from recipes.activation_checkpoint import ActivationCheckpoint, host_offload
from recipes.activation_checkpoint.host_offload import HostOffload, Saved, _Call, _Copy, unpack

OFFLOAD = OPTIONS["offload"]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[weakref.ref[torch.UntypedStorage], int]]:
    """Every storage that was copied to host memory, with its address."""
    made: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []
    initialize = _Copy.__init__

    def note(copy: _Copy, tensor: Tensor, offload: HostOffload) -> None:
        made.append((weakref.ref(tensor.untyped_storage()), tensor.untyped_storage()._cdata))
        initialize(copy, tensor, offload)

    monkeypatch.setattr(_Copy, "__init__", note)
    return made


def _run(name: str, option: dict[str, Any] = OFFLOAD) -> tuple[Any, Tensor]:
    model = make(name, option)
    return model, model(MODELS[name][1]())


# the residual network's input, held by its gradient, and the output of the third block, which the last one saves
@pytest.mark.parametrize(("name", "expected"), [("gpt2", 0), ("llama", 0), ("residual", 2)])
def test_what_was_copied_is_no_longer_on_the_device(name: str, expected: int, copies: list[Any]) -> None:
    model, output = _run(name)
    assert len(copies) >= 3 * 3  # of all blocks but the last
    alive = [storage() for storage, _ in copies if storage() is not None]
    assert len(alive) == expected
    del model, output


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_each_storage_is_copied_once_and_no_parameter_or_table_is(name: str, copies: list[Any]) -> None:
    model = make(name, OFFLOAD)
    held = [tensor.untyped_storage() for tensor in [*model.parameters(), *model.buffers()]]
    sources: list[Any] = []  # alive, so that no address is used twice

    def note(tensor: Tensor) -> Tensor:
        sources.append(tensor.untyped_storage())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(MODELS[name][1]())
    addresses = [address for _, address in copies]
    assert not {storage._cdata for storage in held} & set(addresses)


def test_a_tensor_that_two_blocks_save_is_copied_once(copies: list[Any]) -> None:
    """The residual network's block ends in a ReLU, which saves its result; the next block's convolution does too."""
    model, output = _run("residual")
    # of a block: the results of 2 convolutions and 2 ReLUs, 2 statistics of 2 norms; and what the first block is given
    assert len(copies) == 3 * 8 + 1
    del model, output


def test_recomputed_blocks_offload_their_input_alone(copies: list[Any]) -> None:
    model, output = _run("llama", OPTIONS["every block, offload"])
    assert len(copies) == 3  # of all blocks but the last
    del model, output


def test_kept_products_are_offloaded_too(copies: list[Any]) -> None:
    model, output = _run("llama", OPTIONS["selective, offload"])
    # input, five products, attention and the sums in its softmax
    assert len(copies) == 3 * 8
    assert not [storage for storage, _ in copies if storage() is not None]
    del model, output


def test_small_tensors_stay(copies: list[Any]) -> None:
    train("gpt2", OFFLOAD | {"offload_min_mib": 4 * 16 * 4 * 32 * 4 / 2**20})  # [B, T, 4 W] float32
    assert len(copies) == 2 * 3 * 2  # micro-batches, blocks, before and after GELU


@pytest.mark.parametrize("is_training", [True, False], ids=["no gradients", "evaluation"])
@pytest.mark.parametrize("option", ["offload", "selective, offload"])
def test_there_are_no_hooks_without_a_backward_pass(option: str, is_training: bool, copies: list[Any]) -> None:
    model = make("gpt2", OPTIONS[option]).train(is_training)
    with torch.set_grad_enabled(not is_training):
        model(MODELS["gpt2"][1]())
    assert not copies


def test_a_block_is_fetched_while_the_one_behind_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("gpt2", OFFLOAD)
    events: list[str] = []
    fetch = _Copy.fetch
    number_of: dict[int, int] = {}
    pack = _Call.pack

    def note_pack(call: _Call, tensor: Tensor) -> Any:
        number_of.setdefault(id(call), len(number_of))
        saved = pack(call, tensor)
        if isinstance(saved, Saved):
            saved.copy.block = number_of[id(call)]  # type: ignore[attr-defined]
        return saved

    def note_fetch(copy: _Copy) -> None:
        if copy._source is None and copy._fetched is None:
            events.append(f"fetch {copy.block}")  # type: ignore[attr-defined]
        fetch(copy)

    monkeypatch.setattr(_Call, "pack", note_pack)
    monkeypatch.setattr(_Copy, "fetch", note_fetch)
    for index, block in enumerate(model.blocks):
        block.mlp.out.weight.register_hook(lambda gradient, index=index: events.append(f"compute {index}"))
    model(MODELS["gpt2"][1]()).sum().backward()
    runs = [event for event, before in zip(events, [None, *events], strict=False) if event != before]
    assert runs == ["fetch 2", "compute 3", "fetch 1", "compute 2", "fetch 0", "compute 1", "compute 0"]


def test_a_graph_can_be_used_twice() -> None:
    model = make("gpt2", OFFLOAD)
    loss = model(MODELS["gpt2"][1]()).float().logsumexp(-1).sum()
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.parameters()]
    loss.backward()
    assert all(torch.equal(parameter.grad, 2 * grad) for parameter, grad in zip(model.parameters(), once, strict=True))


class InPlace(nn.Module):
    """Changes what it has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        """[8] -> [8]"""
        y = x * self.weight
        z = y * self.weight  # saves y
        with torch.no_grad():
            y += 1
        return z


def test_a_saved_tensor_that_changes_in_place_is_an_error_as_without_hooks() -> None:
    blocks = nn.ModuleList(InPlace() for _ in range(3))
    ActivationCheckpoint(**OFFLOAD).apply(blocks)
    x = blocks[0](torch.ones(8, requires_grad=True))
    with pytest.raises(RuntimeError, match="changed in place"):
        blocks[1](x)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_unsharded_parameters_are_not_offloaded(one_rank: None, copies: list[Any]) -> None:
    """FSDP2 frees them after the forward pass and gathers them again: a copy would go over the link for nothing."""
    _run("gpt2")
    expected = len(copies)
    copies.clear()
    model = make("gpt2", OFFLOAD)
    mesh = init_device_mesh("cpu", (1,))
    for block in model.blocks:
        fully_shard([block.attention_norm, block.mlp_norm], mesh=mesh)  # type: ignore[arg-type]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(MODELS["gpt2"][1]())
    assert len(copies) == expected


@pytest.fixture
def order() -> Iterator[tuple[list[str], list[mock.Mock]]]:
    """What a GPU would be given: waits and copies in order, and the streams made."""
    made: list[str] = []
    numbers = itertools.count()
    compute = mock.Mock()
    compute.wait_event = lambda event: made.append(f"compute waits for {event.name}")

    def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert non_blocking
        made.append(f"{source.device.type} to {target.device.type}")
        return target  # torch without CUDA copies no fake tensors either

    def event() -> mock.Mock:
        number = next(numbers)
        recorded = mock.Mock()
        recorded.name = str(number)
        recorded.record = lambda stream: made.append(f"record {number}")
        return recorded

    # a patch of its own: undone after the fake streams, it would leave one of them in torch
    with fake_streams() as streams, pytest.MonkeyPatch.context() as monkeypatch, FakeTensorMode():
        make_stream = torch.cuda.Stream

        def stream() -> mock.Mock:
            new: Any = make_stream()
            new.wait_stream = lambda other: made.append("link waits" if other is compute else "?")
            return new

        monkeypatch.setattr(torch.cuda, "Stream", stream)
        monkeypatch.setattr(torch.cuda, "Event", event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: compute)
        monkeypatch.setattr(Tensor, "copy_", copy_)
        monkeypatch.setattr(host_offload, "allocate_host", lambda size, pinned: torch.empty(size, dtype=torch.uint8))
        yield made, streams


def _call(offload: HostOffload, previous: _Call | None, given: Tensor) -> _Call:
    before = None if previous is None else weakref.ref(previous)
    return _Call(offload, [], [given], previous=before, keeps=False)


def test_streams_wait_for_each_other_and_the_host_for_none(order: tuple[list[str], list[mock.Mock]]) -> None:
    made, streams = order
    offload = HostOffload(min_bytes=0)
    given = torch.zeros(4, device=GPU, requires_grad=True)
    first = _call(offload, None, given)
    tensor = torch.zeros(4, device=GPU)
    saved = first.pack(tensor)
    assert made == ["link waits", "cuda to cpu", "record 0"]  # after what computes the tensor
    storage = weakref.ref(tensor.untyped_storage())
    del tensor
    assert storage() is not None, "given to another tensor while it is copied"
    made.clear()
    first.release()
    assert made == ["compute waits for 0"]
    assert storage() is None
    second = _call(offload, first, given)
    made.clear()
    second.begin_backward()
    # after what computes so far: the memory may have been in use until then
    assert made == ["link waits", "cpu to cuda", "record 1"]
    made.clear()
    value = unpack(saved)
    assert made == ["compute waits for 1"]
    assert (value.device, value.shape) == (GPU, (4,))
    assert len(streams) == 1


def test_memory_that_is_being_filled_is_not_given_away(order: tuple[list[str], list[mock.Mock]]) -> None:
    """A backward pass that ends early drops what was fetched ahead."""
    made, _ = order
    offload = HostOffload(min_bytes=0)
    call = _call(offload, None, torch.zeros(4, device=GPU, requires_grad=True))
    saved = call.pack(torch.zeros(4, device=GPU))
    call.release()
    call.fetch()
    made.clear()
    del saved
    assert made == ["compute waits for 1"]


def test_one_stream_serves_all_copies(order: tuple[list[str], list[mock.Mock]]) -> None:
    _, streams = order
    offload = HostOffload(min_bytes=0)
    for _ in range(40):
        call = _call(offload, None, torch.zeros(4, device=GPU, requires_grad=True))
        call.pack(torch.zeros(4, device=GPU))
        call.release()
    assert len(streams) == 1


def test_tensors_of_another_device_and_of_all_blocks_stay(order: tuple[list[str], list[mock.Mock]]) -> None:
    made, _ = order
    table = torch.zeros(4, device=GPU)
    given = torch.zeros(4, device=GPU, requires_grad=True)
    call = _Call(HostOffload(min_bytes=0), [], [given, table], previous=None, keeps=False)
    assert unpack(call.pack(table)) is table
    host = torch.zeros(4)
    assert unpack(call.pack(host)) is host
    assert not made


def test_the_plain_run_saves_as_before() -> None:
    model = make("gpt2", NONE)
    assert all(type(block).__call__ is nn.Module.__call__ for block in model.blocks)
