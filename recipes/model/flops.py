"""FLOPs of one token, forward and backward, from shapes alone. Free: no pass is run.

PaLM convention (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): 6 N + 12 L H Q T, where N
parameters cost two FLOPs each in the forward pass and four in the backward pass, and L layers of H
heads of size Q score every one of the T positions. The paper's N is all parameters. Ours is all
that multiply: an untied input embedding is a look-up and is left out, a tied one is counted once,
as the head. Everything small stays in N as in the paper (norms, biases and GPT-2's positional
table: 0.5 % of N at 124M), so the figures compare with llm.c, llm-foundry and torchtitan.

Causal convention: 6 N + 6 L H Q T, as a causal mask leaves half of the scores to compute (llm.c,
Megatron-LM).
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of the forward and backward pass, recomputation left out, in both conventions.

    Attributes:
        palm: Attention counted in full.
        causal: Attention counted at half.
    """

    palm: float
    causal: float


def flops_per_sample(model: nn.Module, shape: Sequence[int]) -> Flops | None:
    """FLOPs per trained sample, by what the model says of itself; None where it says nothing.

    Args:
        model: On any device, also meta; whole.
        shape: Of one sample: [T] tokens, or [C, H, W] of a square image.
    """
    if hasattr(model, "flops_per_token"):
        per_token: Flops = model.flops_per_token(shape[0])  # type: ignore[operator]
        return Flops(palm=per_token.palm * shape[0], causal=per_token.causal * shape[0])
    if hasattr(model, "flops_per_sample") and shape[1] == shape[2]:
        per_sample: Flops = model.flops_per_sample(shape[1])  # type: ignore[operator]
        return per_sample
    return None


def decoder_flops_per_token(
    model: nn.Module, *, embedding: nn.Embedding, attention_width: int, seq_len: int
) -> Flops:
    """FLOPs per trained token of a decoder with `model.blocks` and `model.tie_embeddings`.

    Args:
        model: The whole decoder, on any device, also meta.
        embedding: Its input embedding, left out of N where it is not the head as well.
        attention_width: H Q, query heads times head size; equal to the hidden_size in most models.
        seq_len: T, tokens per sample.
    """
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if not model.tie_embeddings:
        num_parameters -= embedding.weight.numel()
    assert isinstance(model.blocks, nn.ModuleList)
    attention = 6.0 * len(model.blocks) * attention_width * seq_len
    return Flops(
        palm=6.0 * num_parameters + 2.0 * attention, causal=6.0 * num_parameters + attention
    )


class CountsFlops:
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
