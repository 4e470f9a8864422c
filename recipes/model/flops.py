"""FLOPs per token or image, forward and backward, computed from shapes without running the model.

PaLM convention (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): 6 N + 12 L H Q T, where N parameters cost two
FLOPs each in the forward pass and four in the backward pass, and L layers of H heads of size Q attend to all T
positions. In the paper N is all parameters; here it excludes an untied input embedding, which is a lookup; a tied one
is counted once, as the head. Small parameters stay in N as in the paper (norms, biases and GPT-2's positional table:
0.5 % of N at 124M), so the numbers are comparable with llm.c, llm-foundry and torchtitan.

Causal convention: 6 N + 6 L H Q T, because a causal mask leaves half of the scores to compute (llm.c, Megatron-LM).
"""

import re
from abc import abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from recipes.blocks import apart


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of the forward and backward pass, without recomputation, in both conventions.

    Attributes:
        palm: All attention scores counted.
        causal: Half of the attention scores counted.
    """

    palm: float
    causal: float

    def plus(self, flops: float) -> "Flops":
        """Return the sum with FLOPs of products that no mask halves."""
        return Flops(palm=self.palm + flops, causal=self.causal + flops)


def flops_per_sample(
    model: nn.Module, shape: Sequence[int], *, frozen: Sequence[nn.Module] = (), num_images: int = 0
) -> Flops | None:
    """Return the FLOPs per trained sample as counted by the model; None if it does not count them.

    Args:
        model: Unsharded model on any device, including meta.
        shape: Shape of one sample: [T] tokens, or [C, H, W] of a square image.
        frozen: Models whose forward pass alone is run on the sample, before they are frozen.
        num_images: Images among its tokens, which are encoded beside them.
    """
    trained = _flops_of_sample(model, shape)
    if trained is not None and num_images:
        untyped: Any = model
        trained = trained.plus(num_images * untyped.flops_per_image())
    return _add_frozen(trained, (_flops_of_sample(each, shape) for each in frozen))


def _add_frozen(trained: Flops | None, frozen: Iterable[Flops | None]) -> Flops | None:
    """Return the FLOPs of a trained model and of the forward passes of others, a third of what training them takes."""
    for each in frozen:
        if trained is None or each is None:
            return None
        trained = Flops(palm=trained.palm + each.palm / 3, causal=trained.causal + each.causal / 3)
    return trained


def _flops_of_sample(model: Any, shape: Sequence[int]) -> Flops | None:
    if hasattr(model, "flops_per_token"):
        return _flops_of_tokens(model, shape[0], row_length=shape[0])
    if hasattr(model, "flops_per_sample") and shape[1] == shape[2]:
        per_sample: Flops | None = model.flops_per_sample(shape[1])
        return per_sample
    if getattr(model, "input_kind", None) in ("images", "tensors") and next(model.parameters()).is_meta:
        return _flops_of_products(model, shape)
    return None


def _flops_of_products(model: nn.Module, shape: Sequence[int]) -> Flops | None:
    """Return the FLOPs of a sample of numbers, from the products that a forward pass on the meta device calls.

    A product with a weight takes as much again for the gradient of its inputs and for that of the weight. Attention has
    no causal mask in such models. None if the forward pass reads values.
    """
    size = 2  # batch statistics of one sample have no variance
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), FlopCounterMode(display=False) as counter:
            model(torch.empty(size, *shape, dtype=dtype, device="meta"))  # [2, ...]
    except (RuntimeError, NotImplementedError):  # the plan and the meter of a run, which run it too, say why
        return None
    per_weight = flops_per_weight(model)
    share = _backward_share(model, per_weight)
    counts = {name: sum(each.values()) for name, each in counter.get_flop_counts().items()}
    root = type(model).__name__
    total = 0.0
    for name, module in model.named_modules():
        path = f"{root}.{name}" if name else root
        inside = sum(counts.get(f"{path}.{child}", 0) for child, _ in module.named_children())
        own = counts.get(path, 0) - inside
        weights = [per_weight[weight] for weight in module.parameters(recurse=False)]
        # 2, 4 or 6 FLOPs for each multiply-add, of which the forward pass is 2
        total += own * (max(weights) / 2 if weights else 3 * share)
    return Flops(palm=total / size, causal=total / size)


def _flops_of_tokens(model: Any, num_tokens: float, *, row_length: float) -> Flops | None:
    """Return the FLOPs of tokens in rows of one length; None if the model does not count them."""
    with apart(model) as beside:
        per_token: Flops | None = model.flops_per_token(row_length)
    own = per_token and Flops(palm=per_token.palm * num_tokens, causal=per_token.causal * num_tokens)
    if beside is None or own is None:
        return own
    more = _flops_of_tokens(beside, num_tokens, row_length=row_length)
    return more and Flops(palm=own.palm + more.palm, causal=own.causal + more.causal)


def decoder_flops_per_token(
    model: nn.Module,
    *,
    embedding: nn.Module,
    head: nn.Module,
    uses_head: bool = True,
    attention_width: int,
    seq_len: float,
    within: nn.Module | None = None,
) -> Flops:
    """Return the FLOPs per trained token of a decoder.

    Args:
        model: Unsharded decoder on any device, including meta.
        embedding: Input embedding, excluded from N unless its weight is that of a head that is used.
        head: Predicts tokens.
        uses_head: Whether it does; False for a model of rewards or values, of which N has no head.
        attention_width: L H Q, query heads times head size, summed over layers; H Q is hidden_size in most models.
        seq_len: T, tokens per sample; the mean over tokens where samples differ.
        within: Model that the decoder is a part of, whose other parts may be trained; None: it is the model.
    """
    of_all = flops_per_weight(within or model)
    per_weight: dict[Tensor, float] = {weight: of_all[weight] for weight in model.parameters()}
    products = sum(flops * weight.numel() for weight, flops in per_weight.items())
    of_embedding, of_head = {*embedding.parameters()}, {*head.parameters()}
    not_multiplied = of_embedding - of_head if uses_head else of_embedding | of_head
    products -= sum(per_weight[weight] * weight.numel() for weight in not_multiplied)
    attention = 12.0 * attention_width * seq_len * _backward_share(model, per_weight)
    return Flops(palm=products + attention, causal=products + attention / 2.0)


def attention_flops(tower: nn.Module, *, width: int, seq_len: float) -> float:
    """Return the FLOPs of a token in the attention of all blocks of a tower, forward and backward, without a mask.

    Args:
        tower: Tower on any device, unsharded.
        width: H Q of a block.
        seq_len: T.
    """
    num_blocks = len({_find_block(name) for name, _ in tower.named_parameters()} - {None})
    return 12.0 * num_blocks * width * seq_len * _backward_share(tower, flops_per_weight(tower))


def count_training(model: nn.Module, *inputs: Tensor) -> float:
    """Return the FLOPs of the products that a forward and a backward pass call, for the gradients that are needed.

    Args:
        model: Model on the meta device that returns several outputs, None for some.
        *inputs: Its inputs, likewise.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.enable_grad(), torch.random.fork_rng(devices=[]), FlopCounterMode(display=False) as counter:
        sums = [output.sum() for output in model(*inputs) if output is not None and output.requires_grad]
        if sums:
            torch.autograd.grad(sums, trained, allow_unused=True)  # leaves no gradient behind
    return float(counter.get_total_flops())


def flops_per_weight(model: nn.Module) -> dict[Tensor, float]:
    """Return the FLOPs of a token for each weight: 6; 4 if frozen, as it has no weight gradient.

    A frozen block before everything that is trained has no backward pass: 2. A head that alone is trained needs no
    gradient of its inputs: 4.
    """
    uses = {weight: name for name, weight in model.named_parameters(remove_duplicate=False)}  # a tied weight: as head
    places = {weight: place for place, (_, weight) in enumerate(model.named_parameters(remove_duplicate=False))}
    first = min((weight for weight in uses if weight.requires_grad), key=places.__getitem__, default=None)
    if first is None:
        return dict[Tensor, float].fromkeys(uses, 2.0)
    start, start_block = places[first], _find_block(uses[first])
    per_weight: dict[Tensor, float] = {}
    num_before = 0  # weights of blocks without a backward pass
    for weight, name in uses.items():
        block = _find_block(name)
        has_backward = weight.requires_grad or block is None or block == start_block or places[weight] > start
        num_before += not has_backward
        per_weight[weight] = 6.0 if weight.requires_grad else 4.0 if has_backward else 2.0
    if num_before and start_block is None:
        own = uses[first].rpartition(".")[0]
        per_weight |= {
            weight: 4.0 for weight, name in uses.items() if weight.requires_grad and name.rpartition(".")[0] == own
        }
    return per_weight


def _backward_share(model: nn.Module, per_weight: Mapping[Tensor, float]) -> float:
    """Return the FLOPs of attention over those with a backward pass in every block: a third of them is forward."""
    blocks: dict[str, bool] = {}  # whether it has a backward pass
    for name, weight in model.named_parameters():
        block = _find_block(name)
        if block is not None:
            blocks[block] = blocks.get(block, False) or per_weight[weight] > 2.0
    return sum(1.0 if has_backward else 1 / 3 for has_backward in blocks.values()) / max(len(blocks), 1)


def _find_block(name: str) -> str | None:
    """Return the block that a parameter is in, `blocks.3` of `blocks.3.mlp.up.weight`; None if it is in none."""
    numbered = re.match(r"(.*?\.\d+)\.", name)
    return None if numbered is None else numbered[1]


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

    def meta_frozen_models(self) -> list[nn.Module]:
        """Return unsharded copies of the frozen models that the task asks in a step, without storage."""
        return []

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
                # nearly every micro-batch has another number
                self._copy = (self.meta_model(), *self.meta_frozen_models())
            row_length = batch["num_token_pairs"] / num_tokens
            trained, *frozen = (
                _flops_of_tokens(model, num_tokens / self.data_size, row_length=row_length) for model in self._copy
            )
            return _add_frozen(trained, frozen)
        num_samples, *shape = batch["inputs"].shape
        per_sample = flops_per_sample(self.meta_model(), shape, frozen=self.meta_frozen_models())
        if per_sample is None:
            return None
        return Flops(palm=num_samples * per_sample.palm, causal=num_samples * per_sample.causal)

    def recipes_forward_on_meta(self, batch: dict[str, Any]) -> Tensor:
        """Return the outputs of a micro-batch on the meta device, for a FLOP counter that intercepts operators.

        Raises:
            ValueError: Rows are padded, or the task asks frozen models, too.
        """
        if "num_tokens" in batch:
            raise ValueError("operator counts would include the padding")
        if self.meta_frozen_models():
            raise ValueError("operator counts would be those of the trained model alone")
        outputs: Tensor = self.meta_model()(batch["inputs"])
        return outputs
