"""Language models that read images among their tokens, of LLaVA's kind (arXiv:2304.08485; 2310.03744 of version 1.5).

A tower turns an image into features of its patches, a projector makes them as wide as embedded tokens, and they stand
in the place of the image's tokens. Any `LlavaForConditionalGeneration` of transformers, or one put together from a
tower of CLIP or SigLIP and a causal language model.

Shapes: B rows of T tokens, N images of all rows, C channels, S pixels a side, P tokens of an image, W hidden size of
the language model, V vocabulary.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from recipes.errors import ConfigError
from recipes.model.flops import Flops, count_training
from recipes.model.huggingface import OfTransformers, TransformersCache
from recipes.model.transformers_models import (
    OF_VISION_LANGUAGE,
    check_kind,
    check_sizes,
    draw_decoder,
    draw_tower,
    drop_unread_layers,
    find_blocks,
    join_configs,
    load_config,
    make_model_on_meta,
    make_published,
    naming_part,
    read_vision_language,
    reading_model,
    warn_of_untested,
)

_TOWER, _DECODER = "model.vision_tower", "model.language_model"
_LAYERS = "encoder.layers"  # of a tower
# after the last layer that is read: computed by nobody
_UNREAD = ("post_layernorm",)


class Llava(OfTransformers):
    """Wraps a `LlavaForConditionalGeneration`.

    Layers of the tower behind the one whose features are read are left out, of memory and of an export.

    Args:
        name: Folder with config.json, or hub name, of a whole model; None: it is put together.
        pretrained: Folder or hub name of its weights; None: random weights by the rules of the model.
        vision: Folder or hub name of a CLIP or SigLIP model, or of the tower of one; None beside `name`.
        language: The same of a causal language model.
        vision_pretrained: Folder or hub name of the weights of the tower; None: random.
        language_pretrained: The same of the language model.
        vision_feature_layer: Layer of the tower whose features are read, counted from the end if negative; -2, the one
            before the last, as LLaVA does. That of a whole model is in its config.json.
        image_token_id: Id of the token that stands for a patch. Where the vocabulary ends before it, it is extended by
            rows that begin as the mean of the others.
        image_seq_length: P, as config.json gives it.
        image_size: S, likewise.
        in_channels: C, likewise.
        max_seq_len: Longest row, tokens of images included.
        vocab_size: V, with `image_token_id`.

    Raises:
        ConfigError: A model does not exist, is of another type or size, or transformers is not installed.
    """

    published_format: ClassVar[str] = "llava"
    reads_images: ClassVar[bool] = True  # among tokens

    def __init__(
        self,
        *,
        name: str | None,
        pretrained: str | None,
        vision: str | None,
        language: str | None,
        vision_pretrained: str | None,
        language_pretrained: str | None,
        vision_feature_layer: Annotated[int, ">= -1024, <= 1024"],
        image_token_id: Annotated[int, ">= 0"] | None,
        image_seq_length: Annotated[int, ">= 1"] | None,
        image_size: Annotated[int, ">= 1"] | None,
        in_channels: Annotated[int, ">= 1"] | None,
        max_seq_len: Annotated[int, ">= 1"],
        vocab_size: Annotated[int, ">= 1"] | None,
    ) -> None:
        said = "the check of the config has found a model without it"
        assert vocab_size is not None, said
        assert image_token_id is not None, said
        assert image_seq_length is not None, said
        assert image_size is not None, said
        assert in_channels is not None, said
        super().__init__(max_seq_len=max_seq_len, vocab_size=vocab_size)
        self.name = name if name is not None else f"{vision} and {language}"
        self.is_whole = name is not None
        self.pretrained = pretrained or vision_pretrained or language_pretrained
        self.vision_pretrained, self.language_pretrained = vision_pretrained, language_pretrained
        self.image_token_id, self.image_seq_length = image_token_id, image_seq_length
        self.image_size, self.in_channels = image_size, in_channels
        if name is not None:
            with reading_model(name, wanted=OF_VISION_LANGUAGE):
                config = read_vision_language(load_config(name, wanted=OF_VISION_LANGUAGE), name=name)
        else:
            assert vision is not None, said
            assert language is not None, said
            config = join_configs(vision, language, feature_layer=vision_feature_layer)
            config.image_token_index = image_token_id
            config.text_config.vocab_size = vocab_size
        text = config.text_config
        of_language = contextlib.nullcontext() if name is not None else naming_part("language")
        with of_language, reading_model(name or language or "", wanted=OF_VISION_LANGUAGE):
            check_kind(text, name=name or language or "")
            warn_of_untested(text.model_type)
            check_sizes(text, max_seq_len=max_seq_len, vocab_size=vocab_size)
        self._check_sizes_of_images(config)
        drop_unread_layers(config)
        config.image_seq_length = image_seq_length
        if config.tie_word_embeddings and not hasattr(make_model_on_meta(text).base_model, "embed_tokens"):
            typed = f"model.name={name}" if name is not None else f"model.language={language}"
            reason = f"transformers ties the head of a LLaVA model to embed_tokens, and a {text.model_type} has none"
            raise ConfigError(typed, reason, "model.language=<another model, such as a Llama or Qwen>")
        inner = make_published(config, name=self.name, wanted=OF_VISION_LANGUAGE)
        decoder = inner.get_submodule(_DECODER)
        parent, own = find_blocks(decoder, name=self.name)
        self.hold(inner, where_blocks_are=(f"{_DECODER}.{parent}".removesuffix("."), own), text_config=text)
        for part in _UNREAD:
            inner.get_submodule(f"{_TOWER}.{part}").requires_grad_(False)

    def _check_sizes_of_images(self, config: Any) -> None:
        images, own = config.vision_config, self.name
        patches = (images.image_size // images.patch_size) ** 2
        begins = int(images.model_type == "clip_vision_model") - int(config.vision_feature_select_strategy == "default")
        found = {
            "image_size": images.image_size,
            "in_channels": images.num_channels,
            "image_seq_length": patches + begins,
            "image_token_id": config.image_token_id,
        }
        for key, value in found.items():
            if getattr(self, key) != value:
                reason = f"config.json of {own} has {value}"
                raise ConfigError(f"model.{key}={getattr(self, key)}", reason, f"model.{key}={value}")

    @property
    def pretrained_parts(self) -> tuple[str, ...]:
        """Folders or hub names of the weights that it begins with: of the whole model, or of its parts."""
        parts = (self.pretrained,) if self.is_whole else (self.vision_pretrained, self.language_pretrained)
        return tuple(part for part in parts if part is not None)

    @property
    @override
    def decoder(self) -> Any:
        return self.inner.get_submodule(_DECODER)

    def named_blocks(self) -> dict[str, nn.ModuleList]:
        """Return the blocks of the tower and of the language model by name."""
        parent, own = self._where_blocks_are
        tower: Any = self.inner.get_submodule(f"{_TOWER}.{_LAYERS}")
        return {f"inner.{_TOWER}.{_LAYERS}": tower, f"inner.{parent}.{own}": self.blocks}

    def adapted_blocks(self) -> nn.ModuleList:
        """Return the blocks that an adapter adapts: those of the language model."""
        return self.blocks

    def encode_images(self, images: Tensor) -> Tensor:
        """Images [N, C, S, S] -> projected features of their patches [N, P, W]."""
        model = self.inner.model
        tower, config = model.vision_tower, self.inner.config
        hidden = tower.embeddings(images)  # [N, patches, width], with the class token of CLIP
        if hasattr(tower, "pre_layrnorm"):
            hidden = tower.pre_layrnorm(hidden)
        states = [hidden]
        for layer in tower.encoder.layers:
            states.append(layer(states[-1], None))
        read = config.vision_feature_layer
        begin = int(config.vision_feature_select_strategy == "default")  # without the class token
        features = [states[place][:, begin:] for place in ([read] if isinstance(read, int) else read)]
        projected: Tensor = model.multi_modal_projector(features[0] if len(features) == 1 else torch.cat(features, -1))
        return projected

    def embed(self, tokens: Tensor, images: Tensor | None) -> Tensor:
        """Return embedded tokens [B, T, W], those of images replaced by the features of their patches.

        The k-th token of an image in the batch, row by row, has the k-th feature. Without an image the tower reads one
        of zeros, which no token takes: where parameters are sharded or summed over ranks, all have to compute with
        them, and a trained one has a gradient of zero.

        Args:
            tokens: [B, T] int64.
            images: [N, C, S, S]; None: there is none.
        """
        if images is None:
            images = torch.zeros(1, self.in_channels, self.image_size, self.image_size, device=tokens.device)
        embedded: Tensor = self.inner.get_input_embeddings()(tokens)  # [B, T, W]
        features = self.encode_images(images).flatten(0, 1).to(embedded.dtype)  # [N P, W]
        is_image = tokens.eq(self.image_token_id)  # [B, T]
        of_images = is_image.flatten().cumsum(0) - 1  # [B T]
        # any feature for the others, which do not take it: one for all would receive their gradients one by one
        others = torch.arange(tokens.numel(), device=tokens.device) % len(features)
        chosen = features[torch.where(is_image.flatten(), of_images, others)].view_as(embedded)
        return torch.where(is_image[..., None], chosen, embedded)

    def forward(
        self,
        tokens: Tensor,
        images: Tensor | None = None,
        cache: "TransformersCache | None" = None,
        reduce: Callable[[Tensor, Tensor], Any] | None = None,
        positions: Tensor | None = None,
    ) -> Any:
        """Return next-token logits.

        Args:
            tokens: [B, T] int64, with P times `image_token_id` for each image.
            images: [N, C, S, S], those of all rows in order; None: there is none.
            cache: Earlier tokens of the same sequences, extended by this call; images are among the first ones alone.
            reduce: See `HuggingFace.forward`.
            positions: [B, T] position of each token in its document, 0 at its start; None: a row is one document.

        Returns:
            [B, T, V]; with a cache only the last position, [B, 1, V].
        """
        head = self.inner.get_output_embeddings()
        if cache is not None:
            embed = self.inner.get_input_embeddings() if cache.has_prompt else (lambda new: self.embed(new, images))
            return head(cache.run(self.decoder, tokens, embed=embed))
        options = {} if positions is None else {"position_ids": positions}
        embedded = self.embed(tokens, images)
        hidden = self.decoder(inputs_embeds=embedded, use_cache=False, **options).last_hidden_state  # [B, T, W]
        return head(hidden) if reduce is None else head(hidden, reduce)

    @override
    def make_cache(self, *, capacity: int, padding: Tensor | None = None) -> TransformersCache:
        return TransformersCache(self.inner.config.text_config, gives_hidden=True, padding=padding)

    def flops_per_token(self, seq_len: float) -> Flops | None:
        """Return the FLOPs of the language model per trained token, forward and backward, images' tokens included.

        What they cost before is `flops_per_image`. None: see `OfTransformers.decoder_flops_per_token`.
        """
        return self.decoder_flops_per_token(
            nn.ModuleList([self.decoder, self.inner.get_output_embeddings()]), seq_len, within=self.inner
        )

    def flops_per_image(self) -> float:
        """Return the FLOPs of tower and projector for an image, forward and backward; on the meta device."""
        dtype = next(self.parameters()).dtype
        images = torch.empty(1, self.in_channels, self.image_size, self.image_size, dtype=dtype, device="meta")
        return count_training(_Encoder(self), images)

    @override
    def draw(
        self, seed: int, *, only: Collection[str] | None = None, without: tuple[str, ...] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield initial values as `OfTransformers.draw` does, each part by its own rules.

        Args:
            seed: Seed of the run.
            only: Names of modules whose values are wanted; None: all.
            without: Beginnings of names whose values are not wanted.
        """
        fresh = make_model_on_meta(self.inner.config)
        tower, decoder = fresh.model.vision_tower, fresh.model.language_model
        fresh.model.vision_tower = fresh.model.language_model = nn.Identity()  # the rest: projector and head
        if only is None and f"{_TOWER}." not in without:
            yield from draw_tower(tower, seed=seed, prefix=f"{_TOWER}.")
        if f"{_DECODER}." not in without:
            parent, own = find_blocks(decoder, name=self.name)
            blocks = f"{parent}.{own}" if parent else own
            yield from draw_decoder(decoder, blocks=blocks, seed=seed, only=only, prefix=f"{_DECODER}.")
        rest = draw_decoder(fresh, blocks="none", seed=seed, only=only)
        yield from ((name, value) for name, value in rest if not name.startswith(without))

    @override
    @torch.no_grad()
    def init_buffers(self) -> None:
        super().init_buffers()
        for name, buffer in self.inner.named_buffers():
            if name.endswith(".position_ids") and not buffer.is_meta:
                buffer.copy_(torch.arange(buffer.shape[1])[None])  # [1, positions]


class _Encoder(nn.Module):
    """What a model does with images alone, for a count of its products."""

    def __init__(self, model: Llava) -> None:
        super().__init__()
        self.model = model

    @override
    def forward(self, images: Tensor) -> tuple[Tensor]:
        return (self.model.encode_images(images),)
