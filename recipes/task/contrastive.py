"""Self-supervised learning: two random views of an image are nearer to each other than to those of all other images.

Shapes: B images of a micro-batch, n of a rank in a step, N of the global batch or split; F numbers of a projection.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from recipes.errors import ConfigError
from recipes.lightning_internals import get_data
from recipes.loss import Term
from recipes.loss.nt_xent import COMPARED, GRADIENT, UNIFORMITY, NTXent, find_uniformity
from recipes.model.flops import Flops
from recipes.task.base import Batch
from recipes.task.supervised import arrange
from recipes.task.two_passes import TwoPasses, drawing_again


class Contrastive(TwoPasses):
    """Trains a model with a projection in the place of its classifier on two views of each image.

    The loss of an image depends on all others of the global batch, so each step has two passes.

    Args:
        hidden_size: Hidden units of the projection.
        projection_size: Numbers that it returns, F.
        channels_last: As of `Supervised`.
        **settings: Arguments of `TwoPasses`.

    Attributes:
        attaches: What is added to the model, see `recipes.config.instantiate.make_model`.
    """

    input_kind: ClassVar[tuple[str, ...]] = ("images", "tensors")
    has_fixed_shapes: ClassVar[bool] = True
    attaches: ClassVar[str] = "recipes.model.projection.attach_projection"
    num_views: ClassVar[int] = 2
    supports: ClassVar[frozenset[str]] = frozenset()
    unused_model_settings: ClassVar[tuple[str, ...]] = ("num_classes",)
    loss: NTXent

    def __init__(
        self,
        *,
        hidden_size: Annotated[int, ">= 1"],
        projection_size: Annotated[int, ">= 1"],
        channels_last: bool | None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)  # the model is made with these sizes, see `attaches`
        self._channels_last = channels_last
        self._found: dict[int, list[tuple[Tensor, Tensor]]] = {}  # of the validation that runs, by its set
        self._losses_of_split: Iterator[float] = iter(())

    @override
    def outputs(self, batch: Batch) -> Tensor:
        views = batch["inputs"].flatten(0, 1)  # [2 B, C, H, W]
        with drawing_again(batch):
            projected: Tensor = self.model(arrange(views, self._channels_last))  # [2 B, F], compute dtype
        return projected.view(-1, self.num_views, projected.shape[-1])

    @override
    def on_fit_start(self) -> None:
        """Check that the data has two views of an image.

        Raises:
            ConfigError: It has something else.
        """
        super().on_fit_start()
        data = get_data(self.trainer)
        if data is None:
            return
        shape = [*data.source.train()[0]["inputs"].shape]
        if len(shape) < 2 or shape[0] != self.num_views:
            reason = f"a sample has inputs {shape}, and [2, …] are the two views that are compared"
            raise ConfigError("data=… task=contrastive", reason, "data=image_folder transform=simclr")

    @override
    def compare_window(self, micro_batches: Sequence[Batch], features: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        carries = torch.cat([self.loss.carries(batch) for batch in micro_batches])  # [n]
        own = torch.cat([each.float() for each in features]).requires_grad_()  # [n, 2, F]
        with torch.enable_grad():
            compared = self._compare(own, carries)  # [n, 5]
            [gradient] = torch.autograd.grad(compared[:, 0].sum(), own)  # [n, 2, F]
        uniformity = self._find_uniformity(compared)
        sizes = [len(each) for each in features]
        parts = zip(compared.detach().split(sizes), gradient.split(sizes), strict=True)
        return [{COMPARED: found, GRADIENT: of_batch, UNIFORMITY: uniformity} for found, of_batch in parts]

    def _compare(self, own: Tensor, carries: Tensor) -> Tensor:
        """Compare the images of this rank with those of all ranks, [n, 5]. Collective.

        Args:
            own: [n, 2, F], as many on every rank.
            carries: [n] bool.
        """
        engine = self.engine
        every = engine.gather_over_data_ranks(own)  # [N, 2, F]
        all_carry = engine.gather_over_data_ranks(carries.float()) > 0  # [N]
        return self.loss.compare(own, every, first=engine.data_rank * len(own), carries=all_carry)

    def _find_uniformity(self, compared: Tensor) -> Tensor:
        return find_uniformity(self.engine.sum_over_data_ranks(compared.detach().double().sum(dim=0))).float()

    # Validation: every image is compared with the whole split.

    @override
    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self._found = {}

    @override
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        found = self.outputs(batch).float(), self.loss.carries(batch)
        self._found.setdefault(dataloader_idx, []).append(found)

    @override
    def on_validation_epoch_end(self) -> None:
        for index, found in self._found.items():
            terms, carries = self._compare_split(found)
            # as the loss counts them: a target of -100 is none
            self._metrics_of(index).update(terms, outputs=None, batch={"targets": carries.long() * 100 - 100})
        self._found = {}
        super().on_validation_epoch_end()

    def _compare_split(self, found: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[Term], Tensor]:
        projections, carries = (torch.cat(parts) for parts in zip(*found, strict=True))  # [n, 2, F], [n]
        compared = self._compare(projections, carries)
        return self.loss.to_terms(compared, self._find_uniformity(compared), objective=compared[:, 0].sum()), carries

    @override
    def before_split(self, batches: Iterator[Batch]) -> None:
        found = [(self.outputs(batch).float(), self.loss.carries(batch)) for batch in batches]
        projections, carries = (torch.cat(parts) for parts in zip(*found, strict=True))
        compared = self._compare(projections, carries)
        self._losses_of_split = iter((compared[:, 0] / compared[:, 4]).tolist())

    @override
    def predictions(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss of each image of a batch among the whole split, [B]; batches come in its order."""
        return {"loss": torch.tensor([next(self._losses_of_split) for _ in batch["inputs"]])}

    @override
    def recipes_flops(self, batch: Batch) -> Flops | None:
        """Return None: the formula of a model is that with its classifier, so operators are counted."""
        return None

    @override
    def recipes_forward_on_meta(self, batch: Batch) -> Tensor:
        return super().recipes_forward_on_meta({**batch, "inputs": batch["inputs"].flatten(0, 1)})
