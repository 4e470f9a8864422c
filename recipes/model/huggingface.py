"""Wrapper for any causal language model of `transformers`, by folder or hub name; its base is that of LLaVA, too.

Shapes: B sequences, T new tokens, W hidden size, V vocabulary.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from recipes.model import Stack
from recipes.model.flops import Flops, decoder_flops_per_token
from recipes.model.init import fill, named_parameters
from recipes.model.score import uses_head
from recipes.model.transformers_models import (
    COMPARED,
    changes_logits,
    check_kind,
    check_sizes,
    draw_decoder,
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

_HAVE_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "ffn_config")


class OfTransformers(nn.Module, ABC):
    """A model of `transformers` that predicts the next token, as the attribute `inner`.

    Attributes:
        name: Folder or hub name; of a model of parts, those of all of them.
        max_seq_len: Longest row.
        vocab_size: V.
        title: Name of the architecture.
        computes_loss_in_chunks: Whether `forward` takes `reduce`: logits are those of the head's weight, unchanged.
        keeps_documents_apart: Whether positions separate packed documents: compared with transformers.
    """

    input_kind: ClassVar[str] = "tokens"
    built_by_name: ClassVar[bool] = True  # `model.name` is that of a published one
    name: str

    def __init__(self, *, max_seq_len: int, vocab_size: int) -> None:
        super().__init__()
        self.max_seq_len = max_seq_len
        self.vocab_size = vocab_size

    def hold(self, inner: Any, *, where_blocks_are: tuple[str, str], text_config: Any) -> None:
        """Take the model of transformers as a child, with layers that compute in the dtype of their inputs.

        Args:
            inner: The model.
            where_blocks_are: Module of `inner` that holds the blocks of its decoder, and their name in it.
            text_config: Settings of the decoder.
        """
        self.inner: Any = inner
        self._where_blocks_are = where_blocks_are
        self.title = type(inner).__name__
        # a chunked loss computes logits itself, from the head weight only
        head = inner.get_output_embeddings()
        is_compared, is_changed = text_config.model_type in COMPARED, changes_logits(text_config)
        self.computes_loss_in_chunks = is_compared and type(head) is nn.Linear and head.bias is None and not is_changed
        self.keeps_documents_apart = is_compared
        self._dtypes = {name: buffer.dtype for name, buffer in inner.named_buffers()}
        for module in inner.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear
        if self.computes_loss_in_chunks:
            head.__class__ = _Head

    @property
    @abstractmethod
    def decoder(self) -> Any:
        """The part of `inner` that turns embedded tokens into hidden states."""

    @property
    def blocks(self) -> nn.ModuleList:
        """Blocks of the decoder; part of `inner`."""
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

    def stacks(self) -> dict[str, Stack | None]:
        """Return the matrices in the weights of fused layers, by layer; None where it is not known which there are."""
        return {f"inner.{name}": stack for name, stack in find_stacks(self.inner).items()}

    def published_config(self) -> dict[str, Any]:
        """Return the settings of config.json that change what the weights compute, as plain values."""
        return list_settings(self.inner.config)

    def make_cache(self, *, capacity: int, padding: Tensor | None = None) -> "TransformersCache":
        """Return an empty cache for `forward`; arguments as for `KeyValueCache`."""
        config = self.inner.config.get_text_config()
        return TransformersCache(config, gives_hidden=self.computes_loss_in_chunks, padding=padding)

    def init_weights(self, seed: int) -> None:
        """Initialize every parameter and buffer in place by the rules of the model, from (seed, name)."""
        self.fill_drawn(self.draw(seed))
        self.init_buffers()

    def fill_drawn(self, drawn: Iterable[tuple[str, Tensor]]) -> None:
        """Fill parameters and buffers of `inner` with drawn values, by name."""
        parameters, buffers = dict(named_parameters(self.inner)), dict(self.inner.named_buffers())
        for name, value in drawn:
            if name in parameters:
                fill(parameters[name], value)
            elif name in buffers:
                buffers[name].data.copy_(value)

    @torch.no_grad()
    def init_buffers(self) -> None:
        """Initialize non-persistent buffers in place, such as rotary frequencies; does nothing on the meta device."""
        saved = self.inner.state_dict()
        buffers = {name: buffer for name, buffer in self.inner.named_buffers() if name not in saved}
        if not buffers or next(iter(buffers.values())).is_meta:
            return
        units = {name.rpartition(".")[0] for name in buffers}
        for name, value in self.draw(0, only=units):
            if name in buffers:
                buffers[name].copy_(value)

    @abstractmethod
    def draw(self, seed: int, *, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield initial values of parameters and buffers of `inner` by name, drawn on the CPU one unit at a time.

        Args:
            seed: Seed of the run.
            only: Names of modules whose values are wanted; None: all.
        """

    def decoder_flops_per_token(
        self, model: nn.Module, seq_len: float, *, within: nn.Module | None = None
    ) -> Flops | None:
        """Return the FLOPs per trained token of the decoder, forward and backward.

        None for mixture-of-experts models, and for those of which a block has no attention, such as state-space models:
        the formula is not theirs.

        Args:
            model: Modules whose weights every token is multiplied with; the embedding may be one of them.
            seq_len: T.
            within: Module around it, with what runs before and may be trained; None: there is none.
        """
        config = self.inner.config.get_text_config()
        num_heads = getattr(config, "num_attention_heads", None)
        if any(getattr(config, key, None) for key in _HAVE_EXPERTS):
            return None
        if not isinstance(num_heads, int) or not all(map(_has_attention, self.blocks)):
            return None
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        return decoder_flops_per_token(
            model,
            embedding=self.inner.get_input_embeddings(),
            head=self.inner.get_output_embeddings(),
            uses_head=uses_head(self),
            attention_width=len(self.blocks) * num_heads * head_dim,
            seq_len=seq_len,
            within=within,
        )


class HuggingFace(OfTransformers):
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

    def __init__(
        self,
        *,
        name: str,
        pretrained: str | None,
        max_seq_len: Annotated[int, ">= 1"],
        vocab_size: Annotated[int, ">= 1"] | None,
    ) -> None:
        assert vocab_size is not None, "the check of the config has found a model without a vocabulary"
        super().__init__(max_seq_len=max_seq_len, vocab_size=vocab_size)
        self.name = name
        self.pretrained = pretrained
        config = load_config(name)
        with reading_model(name):
            check_kind(config, name=name)
            warn_of_untested(config.model_type)
            check_sizes(config, max_seq_len=max_seq_len, vocab_size=vocab_size)
            inner = make_published(config, name=name)
            self.hold(inner, where_blocks_are=find_blocks(inner, name=name), text_config=config)

    @property
    @override
    def decoder(self) -> Any:
        return self.inner.base_model

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
            # [B, 1, W or V]
            last = cache.run(self.decoder if self.computes_loss_in_chunks else self.inner, tokens)
            return self.inner.get_output_embeddings()(last) if self.computes_loss_in_chunks else last
        options = {} if positions is None else {"position_ids": positions}
        if not self.computes_loss_in_chunks:
            return self.inner(input_ids=tokens, use_cache=False, **options).logits  # [B, T, V]
        hidden = self.decoder(input_ids=tokens, use_cache=False, **options).last_hidden_state  # [B, T, W]
        return self.inner.get_output_embeddings()(hidden, reduce)

    def flops_per_token(self, seq_len: float) -> Flops | None:
        """Return the FLOPs per trained token, forward and backward; None: see `decoder_flops_per_token`."""
        return self.decoder_flops_per_token(self.inner, seq_len)

    @override
    def draw(self, seed: int, *, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        fresh = make_model_on_meta(self.inner.config)
        parent, own = find_blocks(fresh, name=self.name)
        yield from draw_decoder(fresh, blocks=f"{parent}.{own}" if parent else own, seed=seed, only=only)


class TransformersCache:
    """Key-value cache of a `transformers` model; counterpart of `kv_cache.KeyValueCache`.

    Padding at the end of a prompt is moved to its start and masked.

    Args:
        config: Config of the model, whose layers may cache state other than keys and values.
        gives_hidden: Whether `run` returns hidden states for a head (True) or logits (False).
        padding: [B] number of padding tokens at the end of each row of the first forward pass; None: none.

    Attributes:
        length: Number of tokens in it.
        has_prompt: Whether prompts were read, with their images, here or by the ranks that read on together.
    """

    def __init__(self, config: Any, *, gives_hidden: bool, padding: Tensor | None) -> None:
        self._config = config
        self.padding = padding
        self._gives_hidden = gives_hidden
        self.clear()

    def clear(self) -> None:
        """Remove all tokens."""
        from transformers import DynamicCache

        self.length, self.has_prompt = 0, False
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

    def run(self, model: Any, tokens: Tensor, *, embed: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Run a model and return hidden states [B, 1, W] or logits [B, 1, V] of the last token of each sequence.

        Args:
            model: Of hidden states or of logits, as `gives_hidden` says.
            tokens: [B, T] new tokens.
            embed: Embeds tokens [B, T], as [B, T, W]; None: the model does.
        """
        num_new = tokens.shape[1]
        positions = torch.arange(self.length, self.length + num_new, device=tokens.device)[None]  # [1, T]
        is_read = torch.ones_like(tokens)  # [B, T]
        if self.padding is not None:
            positions = positions - self.padding[:, None]  # [B, T]
            if self.length == 0:  # to the front, so that sliding-window attention sees adjacent tokens
                is_read = (positions >= 0).long()
                # zeros before it: a copy of its first token may be one of an image, whose features are counted
                tokens = tokens.gather(1, positions.clamp(min=0)) * is_read
            positions = positions.clamp(min=0)
        self._mask = is_read if self._mask is None else torch.cat([self._mask, is_read], dim=1)
        known = inspect.signature(model.forward).parameters
        # only the last logits of a prompt are needed
        last = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        # transformers 5.24 renames the argument, model by model, and warns of the old name
        cache = {"cache" if "cache" in known else "past_key_values": self._cache}
        inputs = {"input_ids": tokens} if embed is None else {"inputs_embeds": embed(tokens)}
        out = model(
            **inputs,
            position_ids=positions.expand(len(tokens), -1),
            attention_mask=None if self.padding is None else self._mask,
            use_cache=True,
            **cache,
            **last,
        )
        self.length, self.has_prompt = self.length + num_new, True
        values: Tensor = out.last_hidden_state if self._gives_hidden else out.logits  # [B, T, W or V]
        return values[:, -1:]


class _Head(Linear):
    """Output projection with support for a chunked loss; see `decoder.Head`."""

    def forward(self, input: Tensor, reduce: Callable[[Tensor, Tensor], Any] | None = None) -> Any:
        """Return logits [..., V] of hidden states [..., W], or the result of `reduce` for hidden states and weight."""
        return super().forward(input) if reduce is None else reduce(input, self.weight)


def _has_attention(block: nn.Module) -> bool:
    return any("attention" in type(module).__name__.lower() for module in block.modules())
