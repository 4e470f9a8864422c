"""Every private API of torch in use, checked with torch 2.13; `pyproject.toml` allows no later version untested.

Imported from here alone, so that a new version of torch is tried in one place. Attributes of torch's own objects stay
with the code that needs them: `FSDPModule._get_fsdp_state` (`recipes.strategy.sharding`), the reducer of DDP
(`recipes.strategy.ddp`) and `Module._compiled_call_impl` (`recipes.compile`).
"""

from typing import Any

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.callback import CallbackTrigger as CallbackTrigger
from torch._dynamo.callback import callback_handler as callback_handler
from torch._dynamo.utils import counters as counters
from torch._functorch import config as partitioner_config
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.distributed.distributed_c10d import _set_pg_timeout as set_group_timeout
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo as FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info as get_mesh_info
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as FSDPParamGroup
from torch.distributed.tensor._utils import (
    compute_local_shape_and_global_offset as compute_local_shape_and_global_offset,
)
from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as set_aside_modes
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

__all__ = [
    "dynamo_config",
    "get_mesh_info",
    "inductor_config",
    "partitioner_config",
    "set_aside_modes",
    "set_group_timeout",
]

ONEDNN_LINEAR: Any = torch.ops.mkldnn._linear_pointwise  # of torch.compile, for linear layers with constant weights
COLLECTIVES: Any = torch.ops._c10d_functional
