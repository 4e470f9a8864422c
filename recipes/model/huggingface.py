"""Wrapper for any causal language model of `transformers`, by folder or hub name.

Shapes: B sequences, T new tokens, W hidden size, V vocabulary.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from recipes.model import Stack
from recipes.model.flops import Flops, decoder_flops_per_token
from recipes.model.init import fill, generator_for, named_parameters
from recipes.model.score import uses_head
from recipes.model.transformers_models import (
    COMPARED,
    check_kind,
    check_sizes,
    find_blocks,
    find_stacks,
    list_settings,
    load_config,
    make_model_on_meta,
    make_published,
    reading_model,
    warn_of_untested,
)
from recipes.numerics.linear import Linear

# config keys of models that change the logits after the head, or the hidden states before it
_CHANGE_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale")
_HAVE_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "ffn_config")


class HuggingFace(nn.Module):
    """Wraps an `AutoModelForCausalLM`.

    Its blocks are the modules that the model declares unsplittable (`_no_split_modules`). Packed documents are
    separated by the masks that the model builds from positions.

    Args:
        name: Folder with config.json, or hub name.
        pretrained: Folder or hub name of weights to start from; None: random weights by the rules of the model.
        max_seq_len: Longest row; the model must have at least this many positions.
        vocab_size: V; as in config.json.

    Raises:
        ConfigError: The model does not exist, has too few positions or no blocks, or transformers is not installed.
    """

    input_kind: ClassVar[str] = "tokens"
    built_by_name: ClassVar[bool] = True  # `model.name` is that of a published one

    def __init__(
        self,
        *,
        name: str,
        pretrained: str | None,
        max_seq_len: Annotated[int, ">= 1"],
        vocab_size: Annotated[int, ">= 1"] | None,
    ) -> None:
        super().__init__()
        self.name = name
        self.pretrained = pretrained
        self.max_seq_len = max_seq_len
        assert vocab_size is not None, "the check of the config has found a model without a vocabulary"
        self.vocab_size = vocab_size
        config = load_config(name)
        with reading_model(name):
            check_kind(config, name=name)
            warn_of_untested(config.model_type)
            check_sizes(config, max_seq_len=max_seq_len, vocab_size=vocab_size)
            self.inner: Any = make_published(config, name=name)
            self._where_blocks_are = find_blocks(self.inner, name=name)
        self.title = type(self.inner).__name__
        # a chunked loss computes logits itself, from the head weight only
        changed = any(getattr(config, key, None) not in (None, 1, 1.0) for key in _CHANGE_LOGITS)
        head = self.inner.get_output_embeddings()
        is_compared = config.model_type in COMPARED
        self.computes_loss_in_chunks = is_compared and type(head) is nn.Linear and head.bias is None and not changed
        self.keeps_documents_apart = is_compared
        self._dtypes = {name: buffer.dtype for name, buffer in self.inner.named_buffers()}
        for module in self.inner.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear
        if self.computes_loss_in_chunks:
            head.__class__ = _Head

    @property
    def blocks(self) -> nn.ModuleList:
        """Units of compilation, activation recomputation and sharding; part of `inner`."""
        parent, name = self._where_blocks_are
        blocks: nn.ModuleList = getattr(self.inner.get_submodule(parent), name)
        return blocks

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; `blocks` is set on the module inside `inner` that holds them."""
        if name == "blocks":
            parent, own = self._where_blocks_are
            setattr(self.inner.get_submodule(parent), own, value)
        else:
            super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert the parameters; tie again, because `to_empty` gives each module its own parameter."""
        super()._apply(fn, recurse)
        self.inner.tie_weights()
        changed = [name for name, buffer in self.inner.named_buffers() if buffer.dtype != self._dtypes[name]]
        for name in changed:  # in bfloat16, rotary positions above 256 would not be distinct
            parent, _, own = name.rpartition(".")
            module = self.inner.get_submodule(parent)
            module._buffers[own] = module._buffers[own].to(self._dtypes[name])
        if changed:
            self.init_buffers()
        return self

    def forward(
        self,
        tokens: Tensor,
        cache: "TransformersCache | None" = None,
        reduce: Callable[[Tensor, Tensor], Any] | None = None,
        positions: Tensor | None = None,
    ) -> Any:
        """Return next-token logits.

        Args:
            tokens: [B, T] int64.
            cache: Earlier tokens of the same sequences, extended by this call; None: no earlier tokens.
            reduce: Called with the final hidden states [B, T, W] and the head weight [V, W] instead of computing
                logits; its result is returned.
            positions: [B, T] position of each token in its document, 0 at its start; None: a row is one document.

        Returns:
            [B, T, V]; with a cache only the last position, [B, 1, V].
        """
        if cache is not None:
            last = cache.run(self.inner, tokens)  # [B, 1, W or V]
            return self.inner.get_output_embeddings()(last) if self.computes_loss_in_chunks else last
        options = {} if positions is None else {"position_ids": positions}
        if not self.computes_loss_in_chunks:
            return self.inner(input_ids=tokens, use_cache=False, **options).logits  # [B, T, V]
        hidden = self.inner.base_model(input_ids=tokens, use_cache=False, **options).last_hidden_state  # [B, T, W]
        return self.inner.get_output_embeddings()(hidden, reduce)

    def stacks(self) -> dict[str, Stack | None]:
        """Return the matrices in the weights of fused layers, by layer; None where it is not known which there are."""
        return {f"inner.{name}": stack for name, stack in find_stacks(self.inner).items()}

    def published_config(self) -> dict[str, Any]:
        """Return the settings of config.json that change what the weights compute, as plain values."""
        return list_settings(self.inner.config)

    def make_cache(self, *, capacity: int, padding: Tensor | None = None) -> "TransformersCache":
        """Return an empty cache for `forward`; arguments as for `KeyValueCache`."""
        return TransformersCache(self.inner.config, gives_hidden=self.computes_loss_in_chunks, padding=padding)

    def init_weights(self, seed: int) -> None:
        """Initialize every parameter and buffer in place by the rules of the model, from (seed, name)."""
        parameters, buffers = dict(named_parameters(self.inner)), dict(self.inner.named_buffers())
        for name, value in self._drawn(seed):
            if name in parameters:
                fill(parameters[name], value)
            elif name in buffers:
                buffers[name].data.copy_(value)
        self.init_buffers()

    @torch.no_grad()
    def init_buffers(self) -> None:
        """Initialize non-persistent buffers in place, such as rotary frequencies; does nothing on the meta device."""
        saved = self.inner.state_dict()
        buffers = {name: buffer for name, buffer in self.inner.named_buffers() if name not in saved}
        if not buffers or next(iter(buffers.values())).is_meta:
            return
        units = {name.rpartition(".")[0] for name in buffers}
        for name, value in self._drawn(0, only=units):
            if name in buffers:
                buffers[name].copy_(value)

    def flops_per_token(self, seq_len: float) -> Flops | None:
        """Return the FLOPs per trained token, forward and backward.

        None for mixture-of-experts models, and for those of which a block has no attention, such as state-space models:
        the formula is not theirs.
        """
        config = self.inner.config.get_text_config()
        num_heads = getattr(config, "num_attention_heads", None)
        if any(getattr(config, key, None) for key in _HAVE_EXPERTS):
            return None
        if not isinstance(num_heads, int) or not all(map(_has_attention, self.blocks)):
            return None
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        return decoder_flops_per_token(
            self.inner,
            embedding=self.inner.get_input_embeddings(),
            head=self.inner.get_output_embeddings(),
            uses_head=uses_head(self),
            attention_width=len(self.blocks) * num_heads * head_dim,
            seq_len=seq_len,
        )

    def _drawn(self, seed: int, *, only: set[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield initial values of parameters and buffers by name, drawn on the CPU one unit at a time.

        A unit is a block, because models scale the end of a residual branch there, or a module outside blocks.
        """
        fresh = make_model_on_meta(self.inner.config)
        parent, own = find_blocks(fresh, name=self.name)
        prefix = f"{parent}.{own}." if parent else f"{own}."
        for name, module in list(fresh.named_modules()):
            is_block = name.startswith(prefix) and "." not in name.removeprefix(prefix)
            if name.startswith(prefix) and not is_block:
                continue
            if only is not None and not any(
                unit == name or (is_block and unit.startswith(f"{name}.")) for unit in only
            ):
                continue
            if not is_block and not any(True for _ in _own_tensors(module)):
                continue
            module.to_empty(device="cpu", recurse=is_block)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(generator_for(name, seed=seed).initial_seed())
                for part in reversed(list(module.modules())) if is_block else [module]:
                    fresh._init_weights(part)  # transformers does this only for models not on the meta device
            found = [*module.named_parameters(recurse=is_block), *module.named_buffers(recurse=is_block)]
            yield from ((f"{name}.{own_name}" if name else own_name, value.detach()) for own_name, value in found)
            module.to_empty(device="meta", recurse=is_block)


class TransformersCache:
    """Key-value cache of a `transformers` model; counterpart of `kv_cache.KeyValueCache`.

    Padding at the end of a prompt is moved to its start and masked.

    Args:
        config: Config of the model, whose layers may cache state other than keys and values.
        gives_hidden: Whether `run` returns hidden states for a head (True) or logits (False).
        padding: [B] number of padding tokens at the end of each row of the first forward pass; None: none.
    """

    def __init__(self, config: Any, *, gives_hidden: bool, padding: Tensor | None) -> None:
        self._config = config
        self.padding = padding
        self._gives_hidden = gives_hidden
        self.clear()

    def clear(self) -> None:
        """Remove all tokens."""
        from transformers import DynamicCache

        self.length = 0
        self._cache = DynamicCache(config=self._config)
        self._mask: Tensor | None = None  # [B, cached tokens]

    @property
    def selects_rows(self) -> bool:
        """Whether `keep` is supported: not where a layer holds the state of a recurrence."""
        from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

        kept, others = DynamicLayer, LinearAttentionCacheLayerMixin
        layers = self._cache.layers
        return bool(layers) and all(isinstance(x, kept) and not isinstance(x, others) for x in layers)

    def count_values(self, num_tokens: int) -> int | None:
        """Return the values that a sequence of so many tokens takes, known from one that was read.

        A layer with a sliding window keeps no more tokens than that. None where a layer holds the state of a
        recurrence.
        """
        if not self.selects_rows:
            return None
        kept: list[int] = [
            min(num_tokens, getattr(layer, "sliding_window", None) or num_tokens) for layer in self._cache.layers
        ]
        of_token: list[int] = [
            (layer.keys.numel() + layer.values.numel()) // self.length for layer in self._cache.layers
        ]
        return sum(number * size for number, size in zip(kept, of_token, strict=True))

    def keep(self, rows: Sequence[int]) -> None:
        """Make sequence i that of rows[i], which may be fewer, or several of the same."""
        assert self._mask is not None, "a prompt has been read"
        index = torch.tensor(rows, device=self._mask.device)
        self._cache.batch_select_indices(index)
        self._mask = self._mask[index]
        self.padding = None if self.padding is None else self.padding[index]

    def run(self, inner: Any, tokens: Tensor) -> Tensor:
        """Run `inner` and return hidden states [B, 1, W] or logits [B, 1, V] of the last token of each sequence."""
        num_new = tokens.shape[1]
        positions = torch.arange(self.length, self.length + num_new, device=tokens.device)[None]  # [1, T]
        is_read = torch.ones_like(tokens)  # [B, T]
        if self.padding is not None:
            positions = positions - self.padding[:, None]  # [B, T]
            if self.length == 0:  # to the front, so that sliding-window attention sees adjacent tokens
                is_read = (positions >= 0).long()
                tokens = tokens.gather(1, positions.clamp(min=0))
            positions = positions.clamp(min=0)
        self._mask = is_read if self._mask is None else torch.cat([self._mask, is_read], dim=1)
        model = inner.base_model if self._gives_hidden else inner
        known = inspect.signature(model.forward).parameters
        # only the last logits of a prompt are needed
        last = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        # transformers 5.24 renames the argument, model by model, and warns of the old name
        cache = {"cache" if "cache" in known else "past_key_values": self._cache}
        out = model(
            input_ids=tokens,
            position_ids=positions.expand(len(tokens), -1),
            attention_mask=None if self.padding is None else self._mask,
            use_cache=True,
            **cache,
            **last,
        )
        self.length += num_new
        values: Tensor = out.last_hidden_state if self._gives_hidden else out.logits  # [B, T, W or V]
        return values[:, -1:]


class _Head(Linear):
    """Output projection with support for a chunked loss; see `decoder.Head`."""

    def forward(self, input: Tensor, reduce: Callable[[Tensor, Tensor], Any] | None = None) -> Any:
        """Return logits [..., V] of hidden states [..., W], or the result of `reduce` for hidden states and weight."""
        return super().forward(input) if reduce is None else reduce(input, self.weight)


def _has_attention(block: nn.Module) -> bool:
    return any("attention" in type(module).__name__.lower() for module in block.modules())


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
