"""A CUDA mesh without a GPU: fake tensors, a fake process group, and a record of copies that are never awaited."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

GPU = torch.device("cuda", 0)


class FakeGpus:
    """A mesh of GPUs whose tensors have shapes and devices but no values.

    Attributes:
        mesh: One dimension over all ranks.
        unawaited: Copies from a GPU to the host that the host does not wait for, so it may read stale data.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.unawaited: list[str] = []

    def offloaded_parameter(self, rows: int, columns: int, *, dtype: torch.dtype = torch.float32) -> nn.Parameter:
        """Return a parameter sharded by rows; its shards and their gradients are in host memory."""
        shard = torch.zeros(rows // self.mesh.size(), columns, dtype=dtype)  # [rows per rank, columns]
        shape = torch.Size([rows, columns])
        spec = DTensorSpec(self.mesh, (Shard(0),), tensor_meta=TensorMeta(shape, (columns, 1), dtype))
        parameter = nn.Parameter(DTensor(shard, spec, requires_grad=False))  # type: ignore[call-arg]
        parameter.grad = DTensor(torch.ones_like(shard), spec, requires_grad=False)  # type: ignore[call-arg]
        return parameter


@contextmanager
def fake_gpus(num_ranks: int = 8) -> Iterator[FakeGpus]:
    """Make this process rank 0 of several, each with its own GPU; every tensor created inside is fake."""
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    gpus = FakeGpus(init_device_mesh("cuda", (num_ranks,)))
    copy = Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # without a driver, torch cannot resolve an index for plain `cuda`
        args = tuple(GPU if str(argument) == "cuda" else argument for argument in args)
        result = copy(self, *args, **kwargs)
        if kwargs.get("non_blocking") and self.device.type == "cuda" and result.device.type == "cpu":
            gpus.unawaited.append(f"{tuple(self.shape)} {self.dtype}")
        return result

    try:
        with mock.patch.object(Tensor, "to", to), FakeTensorMode(allow_non_fake_inputs=True):
            yield gpus
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_streams() -> Iterator[list[mock.Mock]]:
    """Replace CUDA streams and events with mocks; yield the list of streams created."""
    streams: list[mock.Mock] = []

    def make(*args: Any, **kwargs: Any) -> mock.Mock:
        streams.append(mock.Mock(name=f"stream {len(streams)}"))
        return streams[-1]

    with (
        mock.patch.object(torch.cuda, "Stream", make),
        mock.patch.object(torch.cuda, "Event", mock.Mock),
        mock.patch.object(torch.cuda, "stream", return_value=nullcontext()),
        mock.patch.object(torch.cuda, "current_stream", return_value=mock.Mock()),
    ):
        yield streams
