"""No adaptive threshold: only the fixed `trainer.gradient_clip_val`."""

from typing import Any, ClassVar

import torch
from torch import Tensor


class NoClipping:
    """Sets no limit in addition to the fixed one."""

    sets_limit: ClassVar[bool] = False

    def limit(self, norm: Tensor) -> Tensor:
        return torch.full_like(norm, torch.inf)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
