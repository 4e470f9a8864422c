"""The copy holds the state at the moment of the save, whatever changes meanwhile."""

import threading

import pytest
import torch
from fake_cuda import fake_streams
from torch._subclasses.fake_tensor import FakeTensorMode

from recipes.checkpoint.shards import unsharded_part
from recipes.checkpoint.writer import HostStaging


def test_what_may_change_before_the_next_step_is_cloned_at_once() -> None:
    """A batch-norm counter changes in the next forward pass, a weight in the next optimizer step."""
    counter, weight = torch.zeros(3), torch.zeros(3)
    staging = HostStaging()
    staging.begin({"counter": unsharded_part(counter, constant=False), "weight": unsharded_part(weight)})
    counter += 1
    filled = staging.fill()
    weight += 1  # after the copy: as after `wait`
    assert filled["counter"].tensor.tolist() == [0, 0, 0]
    assert filled["weight"].tensor.tolist() == [0, 0, 0]


def test_wait_returns_once_everything_is_copied() -> None:
    staging = HostStaging()
    staging.wait()  # nothing to wait for
    staging.begin({"weight": unsharded_part(torch.ones(3))})
    waited = threading.Event()

    def wait() -> None:
        staging.wait()
        waited.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not waited.wait(0.2)
    staging.fill()
    thread.join(10)
    assert waited.is_set()


def test_buffers_are_reused_for_the_same_shapes_and_replaced_for_others() -> None:
    staging = HostStaging()
    tensors = {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.ones(4).bfloat16()}
    held = []
    for _ in range(2):
        staging.begin({name: unsharded_part(tensor) for name, tensor in tensors.items()})
        filled = staging.fill()
        for name, tensor in tensors.items():
            assert torch.equal(filled[name].tensor, tensor)
        held.append({name: part.tensor.data_ptr() for name, part in filled.items()})
    assert held[0] == held[1]
    other = {"b": torch.ones(2, 5, dtype=torch.int64)}  # another shape, another dtype, one gone
    staging.begin({name: unsharded_part(tensor) for name, tensor in other.items()})
    filled = staging.fill()
    assert filled.keys() == other.keys()
    assert torch.equal(filled["b"].tensor, other["b"])


def test_empty_and_scalar_tensors_are_copied() -> None:
    staging = HostStaging()
    staging.begin({"empty": unsharded_part(torch.zeros(0, 3)), "step": unsharded_part(torch.tensor(7.0))})
    filled = staging.fill()
    assert filled["empty"].tensor.shape == (0, 3)
    assert float(filled["step"].tensor) == 7


def test_all_saves_are_copied_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new stream would be the next of torch's 32, and soon one on which something else runs."""
    staging = HostStaging()
    with fake_streams() as streams, FakeTensorMode():
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        monkeypatch.setattr(staging, "_buffer", lambda name: torch.empty(3))
        weight = unsharded_part(torch.zeros(3, device=torch.device("cuda", 0)))
        for _ in range(40):
            staging.begin({"weight": weight})
            staging._sources = {}  # as `fill` leaves it
    assert len(streams) == 1
    assert streams[0].wait_stream.call_count == 40
