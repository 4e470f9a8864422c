"""What tasks on answers share: values of single tokens without all logits at a time, and the model without its adapter.

Shapes: R rows of T tokens, V tokens of the vocabulary.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from recipes.adapter import switched_off
from recipes.data.packed_batch import Packing, find_positions, pack_tokens, unpack
from recipes.errors import ConfigError
from recipes.model.score import drop_value
from recipes.model.weights.adapter import has_adapter, remove_adapter
from recipes.numerics.head_loss import split
from recipes.numerics.loss import IGNORE_INDEX, token_losses
from recipes.task.frozen import FrozenModel
from recipes.task.language_modeling import LanguageModeling

REFERENCE = "reference"  # name of the frozen copy
OfHidden = Callable[[Tensor], Tensor]  # hidden states [n, W] -> [n] float32
OfLogits = Callable[[Tensor, Tensor], Tensor]  # logits [..., V], targets [...] -> [..., k] or [...] float32


class AnswerTask(LanguageModeling):
    """A task whose loss reads values of the tokens of answers, and may compare with a reference model.

    Args:
        reference: Where the reference is: `adapter_off`, `frozen_copy`, or what a subclass adds; `auto`: the model
            without its adapter if it has one.
        **settings: Arguments of `TrainingTask`.
    """

    loss: Any

    def __init__(self, *, reference: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._reference = reference
        if self._copies and self._compares:
            copy = FrozenModel(section="model", make=self._make_reference, is_copy=True)
            self._frozen = {**self._frozen, REFERENCE: copy}

    def _make_reference(self) -> nn.Module:
        model = self._make_model()
        drop_value(model)  # it predicts tokens alone
        return model

    @property
    def _compares(self) -> bool:
        """Whether the loss reads a reference; whoever loads weights alone gives the task another loss."""
        return bool(getattr(self.loss, "needs_reference", False))

    @property
    def _copies(self) -> bool:
        """Whether the reference is a frozen copy of the model, known before the model is."""
        return self._reference == "frozen_copy"

    @property
    def _instead_of_adapter(self) -> str:
        """What `reference=auto` is without an adapter."""
        return "frozen_copy"

    @property
    def reference_kind(self) -> str:
        """Where the reference is.

        Raises:
            ConfigError: The model has no adapter to switch off.
        """
        if self._reference == "auto":
            return "adapter_off" if has_adapter(self.model) else self._instead_of_adapter
        if self._reference == "adapter_off" and not has_adapter(self.model):
            reason = "the model has no adapter to switch off"
            fix = f"adapter=lora, or task.reference={self._instead_of_adapter}"
            raise ConfigError("task.reference=adapter_off", reason, fix)
        return self._reference

    @override
    def meta_frozen_models(self) -> list[nn.Module]:
        models, model = super().meta_frozen_models(), self.meta_model()
        drop_value(model)
        if self._compares and self._reference in ("auto", "adapter_off") and has_adapter(model):
            remove_adapter(model)  # its forward pass alone is that of the reference
            models.append(model)
        return models

    @contextmanager
    def as_reference(self) -> Iterator[nn.Module]:
        """Yield the reference model, in eval mode and without gradients: a frozen copy, or the model without adapter.

        Collective, the first time.
        """
        if self.reference_kind == "frozen_copy":
            if REFERENCE not in self.frozen_models:  # outside of training
                self.hold_frozen_models()
            with torch.no_grad():
                yield self.frozen_models[REFERENCE]
            return
        with torch.no_grad(), evaluating(self.model), switched_off(self.model):
            yield self.model

    def of_tokens(
        self,
        model: nn.Module,
        inputs: Tensor,
        targets: Tensor,
        packing: Packing | None = None,
        *,
        read: OfLogits = token_losses,
        of_hidden: OfHidden | None = None,
    ) -> Tensor:
        """Return values of each target, [R, T] or [R, T, k] float32, 0 if ignored; differentiable where `read` is.

        Args:
            model: The trained model, or its reference.
            inputs: [R, T].
            targets: [R, T].
            packing: Rows in which the model reads the tokens; None: as they are.
            read: What is computed from logits and targets; the cross-entropy.
            of_hidden: What is computed from the hidden states beside, also where nothing is a target; the last one of
                the values. Of a model that gives its hidden states.
        """
        if packing is not None:
            assert of_hidden is None
            options: dict[str, Any] = {"positions": find_positions(packing)}
            if "branches" in packing:
                options["branches"] = packing["branches"]
            packed = self._of_rows(
                model,
                pack_tokens(inputs, packing),
                pack_tokens(targets, packing, fill=IGNORE_INDEX),
                read=read,
                **options,
            )  # [P, W] or [P, W, k]
            found = unpack(packed, packing)[:, :-1]
            is_target = (targets != IGNORE_INDEX).view(*targets.shape, *[1] * (found.ndim - targets.ndim))
            return torch.where(is_target, found, 0.0)
        return self._of_rows(model, inputs, targets, read=read, of_hidden=of_hidden)

    def _of_rows(
        self,
        model: nn.Module,
        inputs: Tensor,
        targets: Tensor,
        *,
        read: OfLogits,
        of_hidden: OfHidden | None = None,
        **options: Tensor,
    ) -> Tensor:
        if not self._computes_in_chunks and of_hidden is None:
            return read(model(inputs, **options), targets)
        in_chunks = functools.partial(self._in_chunks, targets=targets, read=read, of_hidden=of_hidden)
        values: Tensor = model(inputs, reduce=in_chunks, **options)
        return values.view(*targets.shape, *values.shape[1:])  # outside of the model: FSDP2 warns of a view in it

    @functools.cached_property
    def _computes_in_chunks(self) -> bool:
        # a sharded vocabulary has the loss of its own columns only, and joins the logits in the head
        is_sharded = getattr(getattr(self.model, "head", None), "ranks", None) is not None
        return self.loss.chunk_tokens is not None and self.takes_reduce and not is_sharded

    def _in_chunks(
        self, hidden: Tensor, weight: Tensor, *, targets: Tensor, read: OfLogits, of_hidden: OfHidden | None
    ) -> Tensor:
        """Return values of each target [R T, …] from hidden states [R, T, W], a chunk of logits at a time.

        The logits of a chunk are computed again in the backward pass, which costs a third of the head's products and
        holds none of them in between.
        """
        flat, flat_targets = hidden.flatten(0, -2), targets.flatten()  # [R T, W], [R T]
        run: Callable[..., Tensor] = functools.partial(_read_chunk, vocab_size=self.loss.num_outputs, read=read)
        if self.loss.chunk_tokens is None:
            values = run(flat, weight, flat_targets)
        else:
            parts = [
                checkpoint(run, flat[part], weight, flat_targets[part], use_reentrant=False, preserve_rng_state=False)
                for part in split(len(flat), self.loss.chunk_tokens)
            ]
            values = torch.cat(parts)
        if of_hidden is None:
            return values
        return torch.cat([values.view(len(flat), -1), of_hidden(flat)[:, None]], dim=1)


def _read_chunk(hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab_size: int | None, read: OfLogits) -> Tensor:
    """Return values of n targets from hidden states [n, W] and the weight of the head [V', W]."""
    logits = nn.functional.linear(hidden.to(weight.dtype), weight)  # [n, V']
    return read(logits[:, :vocab_size], targets)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off for a while."""
    in_training = [module for module in model.modules() if module.training]
    for module in in_training:
        module.training = False
    try:
        yield
    finally:
        for module in in_training:
            module.training = True
