"""What a micro-batch costs in FLOPs: from shapes alone, on a model without memory."""

from abc import abstractmethod
from typing import Any

from torch import Tensor, nn

from recipes.model import Flops
from recipes.model.flops import flops_per_sample


class TellsFlops:
    """A task whose batches have `inputs`. The model at hand may be in pieces: these ask a whole one."""

    @abstractmethod
    def meta_model(self) -> nn.Module:
        """The model on the meta device."""

    def flops_of(self, batch: dict[str, Any]) -> Flops | None:
        """Of a micro-batch, forward and backward; None: the model does not tell its own."""
        num_samples, *shape = batch["inputs"].shape
        of_one = flops_per_sample(self.meta_model(), shape)
        if of_one is None:
            return None
        return Flops(palm=num_samples * of_one.palm, causal=num_samples * of_one.causal)

    def forward_on_meta(self, batch: dict[str, Any]) -> Tensor:
        """The outputs of a batch on the meta device, for who counts its FLOPs."""
        outputs: Tensor = self.meta_model()(batch["inputs"])
        return outputs
