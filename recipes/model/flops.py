"""FLOPs per token or image, forward and backward, computed from shapes without running the model.

PaLM convention (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): 6 N + 12 L H Q T, where N parameters cost two
FLOPs each in the forward pass and four in the backward pass, and L layers of H heads of size Q attend to all T
positions. In the paper N is all parameters; here it excludes an untied input embedding, which is a lookup; a tied one
is counted once, as the head. Small parameters stay in N as in the paper (norms, biases and GPT-2's positional table:
0.5 % of N at 124M), so the numbers are comparable with llm.c, llm-foundry and torchtitan.

Causal convention: 6 N + 6 L H Q T, because a causal mask leaves half of the scores to compute (llm.c, Megatron-LM).
"""

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of the forward and backward pass, without recomputation, in both conventions.

    Attributes:
        palm: All attention scores counted.
        causal: Half of the attention scores counted.
    """

    palm: float
    causal: float


def flops_per_sample(model: nn.Module, shape: Sequence[int]) -> Flops | None:
    """Return the FLOPs per trained sample as counted by the model; None if it does not count them.

    Args:
        model: Unsharded model on any device, including meta.
        shape: Shape of one sample: [T] tokens, or [C, H, W] of a square image.
    """
    if hasattr(model, "flops_per_token"):
        return _flops_of_tokens(model, shape[0], row_length=shape[0])
    if hasattr(model, "flops_per_sample") and shape[1] == shape[2]:
        per_sample: Flops = model.flops_per_sample(shape[1])  # type: ignore[operator]
        return per_sample
    return None


def _flops_of_tokens(model: Any, num_tokens: float, *, row_length: float) -> Flops | None:
    """Return the FLOPs of tokens in rows of one length; None if the model does not count them."""
    per_token: Flops | None = model.flops_per_token(row_length)
    return None if per_token is None else Flops(palm=per_token.palm * num_tokens, causal=per_token.causal * num_tokens)


def decoder_flops_per_token(
    model: nn.Module, *, embedding: nn.Module | None, attention_width: int, seq_len: float
) -> Flops:
    """Return the FLOPs per trained token of a decoder.

    Args:
        model: Unsharded decoder on any device, including meta.
        embedding: Input embedding, excluded from N; None: tied to the head.
        attention_width: L H Q, query heads times head size, summed over layers; H Q is hidden_size in most models.
        seq_len: T, tokens per sample; the mean over tokens where samples differ.
    """
    products = flops_of_products(model)
    if embedding is not None:
        products -= flops_of_products(embedding)
    attention = 6.0 * attention_width * seq_len
    return Flops(palm=products + 2.0 * attention, causal=products + attention)


def flops_of_products(model: nn.Module) -> float:
    """Return the FLOPs per token of all weights: 6 each, or 4 if frozen, because they have no weight gradient."""
    return sum((6.0 if parameter.requires_grad else 4.0) * parameter.numel() for parameter in model.parameters())


class CountsFlops:
    """A task that counts the FLOPs of its batches on an unsharded copy of the model on the meta device.

    Attributes:
        data_size: Number of ranks, or groups of ranks, with different samples.
    """

    _copy: tuple[nn.Module, ...] = ()  # in a tuple, because a module would become a submodule of the task

    @property
    @abstractmethod
    def data_size(self) -> int: ...

    @abstractmethod
    def meta_model(self) -> nn.Module:
        """Return an unsharded model without storage."""

    def recipes_flops_key(self, batch: dict[str, Any]) -> Hashable:
        """Return what the FLOPs of a micro-batch depend on: its shape, and its tokens where rows are padded."""
        return tuple(batch["inputs"].shape), batch.get("num_tokens"), batch.get("num_token_pairs")

    def recipes_flops(self, batch: dict[str, Any]) -> Flops | None:
        """Return the FLOPs of a micro-batch, forward and backward; None if the model does not count them.

        Padding takes none. Rows of other ranks have other lengths then, so the result is the mean over the ranks. The
        FLOPs of a token are linear in the length of its row, so tokens of the mean row length have the FLOPs of all.
        """
        if batch.get("num_tokens"):
            num_tokens = batch["num_tokens"]
            if not self._copy:
                self._copy = (self.meta_model(),)  # nearly every micro-batch has another number
            row_length = batch["num_token_pairs"] / num_tokens
            return _flops_of_tokens(self._copy[0], num_tokens / self.data_size, row_length=row_length)
        num_samples, *shape = batch["inputs"].shape
        per_sample = flops_per_sample(self.meta_model(), shape)
        if per_sample is None:
            return None
        return Flops(palm=num_samples * per_sample.palm, causal=num_samples * per_sample.causal)

    def recipes_forward_on_meta(self, batch: dict[str, Any]) -> Tensor:
        """Return the outputs of a micro-batch on the meta device, for a FLOP counter that intercepts operators.

        Raises:
            ValueError: Rows are padded.
        """
        if "num_tokens" in batch:
            raise ValueError("operator counts would include the padding")
        outputs: Tensor = self.meta_model()(batch["inputs"])
        return outputs
