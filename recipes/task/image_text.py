"""Images and captions: a model of two towers learns which caption belongs to which image.

Shapes: B pairs of a micro-batch, n of a rank in a step, N of the global batch or split; F numbers of a feature.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from recipes.errors import ConfigError
from recipes.lightning_internals import get_data
from recipes.loss.image_text import COMPARED, GRADIENTS, Features, PairLoss, Pairs
from recipes.numerics.retrieval import find_ranks, summarize
from recipes.task.base import Batch
from recipes.task.supervised import arrange
from recipes.task.two_passes import TwoPasses, drawing_again

_IMAGE_TO_CAPTION, _CAPTION_TO_IMAGE = "image_to_caption", "caption_to_image"
_NUM_SHOWN, _NUM_NEAREST = 8, 5  # images and captions of a validation whose nearest ones are kept


class _Different(NamedTuple):
    """Different images, or captions, of a split.

    Attributes:
        numbers: [K] int64, sorted, see `Pairs`.
        features: [K, F], normalized.
        first: [K] int64, the first pair that each is in, among N.
        which: [N] int64, which of them is in each pair.
    """

    numbers: Tensor
    features: Tensor
    first: Tensor
    which: Tensor


class _Nearest(NamedTuple):
    """What some images or captions find.

    Attributes:
        queries: [8], which of the different images, or captions, they are.
        ranks: [8], how many that do not belong to each are as near as the nearest that does.
        found: [8, 5], which captions, or images, are the nearest.
        cosines: [8, 5].
        is_own: [8, 5] bool.
    """

    queries: Tensor
    ranks: Tensor
    found: Tensor
    cosines: Tensor
    is_own: Tensor


class _Retrieved(NamedTuple):
    """What a validation retrieves, on the host; of images and captions, without their features.

    Attributes:
        images: Numbers of the different images.
        captions: Numbers of the different captions.
        image_of_caption: [captions], the number of an image that each belongs to.
        of_images: What some images find.
        of_captions: What some captions find.
    """

    images: Tensor
    captions: Tensor
    image_of_caption: Tensor
    of_images: _Nearest
    of_captions: _Nearest


class ImageText(TwoPasses):
    """Trains a tower of images and a tower of text on images with their captions, as CLIP and SigLIP.

    A validation compares every image with every caption of its split, over all ranks: the loss is that of a batch as
    large as the split, and `val/image_to_caption_recall_1` is the fraction of images whose nearest caption is one of
    their own. Equal captions are one, and copies of an image are one, so what belongs together is never counted as an
    error.

    Args:
        channels_last: As of `Supervised`.
        **settings: Arguments of `TwoPasses`.

    Attributes:
        data: Data module that makes tokens of captions and reads images; set before a validation. None: not known.
    """

    input_kind: ClassVar[str] = "images_and_text"
    has_fixed_shapes: ClassVar[bool] = True
    validation_metrics: ClassVar[tuple[str, ...]] = (
        "image_to_caption_recall_1",
        "image_to_caption_recall_5",
        "image_to_caption_recall_10",
        "image_to_caption_median_rank",
        "caption_to_image_recall_1",
        "caption_to_image_recall_5",
        "caption_to_image_recall_10",
        "caption_to_image_median_rank",
    )
    loss: PairLoss

    def __init__(self, *, channels_last: bool | None, **settings: Any) -> None:
        super().__init__(**settings)
        self._channels_last = channels_last
        self._validated: dict[int, list[tuple[Features, Pairs]]] = {}  # of the validation that runs, by its set
        self._retrieved: dict[str, float] = {}
        self._newest: _Retrieved | None = None  # of the split
        self.data: Any = None

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        if (data := get_data(self.trainer)) is not None:
            self.data = data

    @override
    def on_fit_start(self) -> None:
        """Check that captions end with the token at which the model reads them.

        Raises:
            ConfigError: They end with another one: each would be read at its first token.
        """
        super().on_fit_start()
        tokenizer = getattr(getattr(self.data, "source", None), "tokenizer", None)
        model: Any = self.meta_model()
        if tokenizer is None or not hasattr(model, "check_end"):
            return
        model.check_end(tokenizer.end_of_text, num_ids=tokenizer.vocab_size)

    @override
    def outputs(self, batch: Batch) -> Features:
        images = arrange(batch["inputs"], self._channels_last)  # [B, C, S, S]
        with drawing_again(batch):
            return Features(*self.model(images, batch["tokens"], batch["is_token"]))

    # Training.

    @override
    def compare_window(self, micro_batches: Sequence[Batch], features: Sequence[Features]) -> list[dict[str, Any]]:
        sizes = [len(each.images) for each in features]
        own = Features(*(value.requires_grad_() for value in _join(features)))
        with torch.enable_grad():
            compared = self._compare(own, _join_pairs([self.loss.pairs(batch) for batch in micro_batches]))  # [n, 5]
            of_all = torch.autograd.grad(compared[:, 0].sum(), own, materialize_grads=True, allow_unused=True)
        # scale and bias are in every micro-batch, and their gradient is in the step once
        of_pairs, of_scalars = of_all[:2], [gradient / len(sizes) for gradient in of_all[2:]]
        parts = zip(compared.detach().split(sizes), *(gradient.split(sizes) for gradient in of_pairs), strict=True)
        return [{COMPARED: found, GRADIENTS: [*of_batch, *of_scalars]} for found, *of_batch in parts]

    def _compare(self, own: Features, pairs: Pairs) -> Tensor:
        """Compare the pairs of this rank, as many on every rank, with those of all ranks, [n, 5]. Collective."""
        every, of_all = self._gather(own, pairs)
        return self.loss.compare(own, every, of_all, first=self.engine.data_rank * len(own.images))

    def _gather(self, own: Features, pairs: Pairs) -> tuple[Features, Pairs]:
        """Return features and pairs of all ranks. Collective."""
        gather = self.engine.gather_over_data_ranks
        every = own._replace(images=gather(own.images), captions=gather(own.captions))
        numbers = gather(torch.stack([each.long() for each in pairs], dim=1))  # [N, 3]
        return every, Pairs(numbers[:, 0], numbers[:, 1], numbers[:, 2] > 0)

    # Validation: every pair is compared with the whole split.

    @override
    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self._validated, self._retrieved = {}, {}

    @override
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._validated.setdefault(dataloader_idx, []).append((self.outputs(batch), self.loss.pairs(batch)))

    @override
    def on_validation_epoch_end(self) -> None:
        for index, found in self._validated.items():
            own, pairs = _join([features for features, _ in found]), _join_pairs([each for _, each in found])
            compared = self._compare(own, pairs)
            terms = self.loss.to_terms(compared, objective=compared[:, 0].sum(), log_scale=own.log_scale)
            metrics = self._metrics_of(index)
            # as the loss counts them: a target of -100 is none
            metrics.update(terms, outputs=None, batch={"targets": pairs.carries.long() * 100 - 100})
            measured, retrieved = self._retrieve(own, pairs)
            self._retrieved |= {f"{metrics.prefix}{name}": value for name, value in measured.items()}
            self._newest = self._newest if index else retrieved
        self._validated = {}
        super().on_validation_epoch_end()

    def _retrieve(self, own: Features, pairs: Pairs) -> tuple[dict[str, float], _Retrieved]:
        """Return recalls and median ranks of all images and captions of all ranks, and what some find. Collective."""
        every, of_all = self._gather(own, pairs)
        carries = of_all.carries
        images = _find_different(every.images[carries], of_all.image[carries])
        captions = _find_different(every.captions[carries], of_all.caption[carries])
        belongs = torch.stack([images.which, captions.which], dim=1)  # [N, 2]
        share = {"first": self.engine.data_rank, "step": self.data_size}
        measured: dict[str, float] = {}
        nearest: list[_Nearest] = []
        shown = _spread(len(images.numbers), _NUM_SHOWN).to(belongs.device)  # [8], of images
        for name, queries, keys, of_query, chosen in (
            (_IMAGE_TO_CAPTION, images, captions, belongs, shown),
            (_CAPTION_TO_IMAGE, captions, images, belongs.flip(1), captions.which[images.first[shown]].unique()),
        ):
            ranks = find_ranks(queries.features, keys.features, of_query, **share)  # [queries]
            ranks = self.engine.sum_over_data_ranks(ranks)
            measured |= {f"{name}_{measure}": value for measure, value in summarize(ranks).items()}
            nearest.append(_find_nearest(queries, keys, of_query, chosen=chosen, ranks=ranks))
        image_of_caption = of_all.image[carries][captions.first].cpu()
        return measured, _Retrieved(images.numbers.cpu(), captions.numbers.cpu(), image_of_caption, *nearest)

    @override
    def further_measures(self) -> Mapping[str, float]:
        return self._retrieved

    @override
    def list_measures(self) -> dict[str, bool | None]:
        measured = super().list_measures()
        for metrics in (self.val_metrics, *self.eval_metrics):
            measured |= {f"{metrics.prefix}{name}": "recall" in name for name in self.validation_metrics}
        return measured

    # For callbacks: what was retrieved, and zero-shot classification.

    def recipes_retrieved(self) -> dict[str, Any] | None:
        """Return what some images and captions of the newest validation found, see `callbacks.protocols`."""
        newest, samples = self._newest, _find_samples(self.trainer.val_dataloaders)
        if newest is None or not hasattr(samples, "read_pixels"):  # a dataset of somebody's own
            return None

        def show_image(place: int) -> dict[str, Any]:
            return {"pixels": samples.read_pixels(int(newest.images[place]))}

        def show_caption(place: int) -> dict[str, Any]:
            image, number = int(newest.image_of_caption[place]), int(newest.captions[place])
            return {"text": samples.find_caption(image, number)}

        return {
            "num_images": len(newest.images),
            "num_captions": len(newest.captions),
            "captions": _list_found(newest.of_captions, show_caption, show_image, "images"),
            "images": _list_found(newest.of_images, show_image, show_caption, "captions"),
        }

    def recipes_encode_captions(self, captions: Sequence[str]) -> Tensor:
        """Return the features of captions, [n, F] float32; as many on every rank. Collective."""
        source, size = self._get_source(), self.data.micro_batch_size
        found: list[Tensor] = []
        for start in range(0, len(captions), size):
            encoded = [source.encode_caption(caption) for caption in captions[start : start + size]]
            tokens, is_token = (torch.stack(each).to(self.device) for each in zip(*encoded, strict=True))  # [B, T]
            found.append(self._encode(None, tokens, is_token)[1])
        return torch.cat(found)

    def recipes_encode_images(self, paths: Sequence[Path], classes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the features of this rank's share of images, [n, F] float32, and their classes, [n]. Collective."""
        found: list[tuple[Tensor, Tensor]] = []
        samples = self._get_source().open_files(paths, classes)
        for batch in self.data.load_further(samples):
            images = arrange(batch["inputs"].to(self.device), self._channels_last)  # [B, C, S, S]
            found.append((self._encode(images, None, None)[0], batch["targets"].to(self.device)))
        features, numbers = (torch.cat(each) for each in zip(*found, strict=True))
        return features, numbers

    def _encode(self, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what one tower makes of a batch, in float32, and nothing in the place of the other."""
        with torch.no_grad(), self.trainer.precision_plugin.forward_context():
            images, captions, *_ = self.model(*inputs)
        return tuple(None if each is None else each.float() for each in (images, captions))  # type: ignore[return-value]

    def _get_source(self) -> Any:
        """Return the source of images with captions.

        Raises:
            ConfigError: The data is of another kind.
        """
        source = getattr(self.data, "source", None)
        if not hasattr(source, "encode_caption"):
            reason = f"the templates of classes become tokens as captions do, and {type(source).__name__} has none"
            raise ConfigError("callbacks.zero_shot.path=…", reason, "data=image_text, or callbacks.zero_shot.path=null")
        return source

    # Single pairs.

    @override
    def predictions(self, batch: Batch) -> dict[str, Tensor]:
        """Return the normalized features of images and captions, [B, F], and the cosine of each pair, [B]."""
        features = self.outputs(batch)
        images, captions = (F.normalize(each.float(), dim=-1) for each in features[:2])  # [B, F]
        cosines = (images * captions).sum(dim=-1)  # [B]
        return {"cosine": cosines, "image_features": images, "caption_features": captions}

    @override
    def recipes_forward_on_meta(self, batch: Batch) -> Tensor:
        images, captions, *_ = self.meta_model()(batch["inputs"], batch["tokens"], batch["is_token"])
        return torch.cat([images, captions])


def _join(features: Sequence[Features]) -> Features:
    """Return the features of several micro-batches as those of one, in float32; scale and bias are those of each."""
    images, captions = (torch.cat([each[place].float() for each in features]) for place in (0, 1))
    last = features[-1]
    return Features(images, captions, last.log_scale.float().clone(), last.bias.float().clone())


def _join_pairs(pairs: Sequence[Pairs]) -> Pairs:
    return Pairs(*(torch.cat(parts) for parts in zip(*pairs, strict=True)))


def _find_different(features: Tensor, numbers: Tensor) -> _Different:
    """Return the different ones of images, or captions, with the normalized features of the first of each.

    Args:
        features: [N, F].
        numbers: [N], equal for the same thing.
    """
    different, which = numbers.unique(return_inverse=True)  # [K], [N]
    places = torch.arange(len(numbers), device=numbers.device)
    first = torch.full_like(different, len(numbers)).scatter_reduce(0, which, places, "amin")  # [K]
    return _Different(different, F.normalize(features[first], dim=-1), first, which)


def _find_nearest(queries: _Different, keys: _Different, belongs: Tensor, *, chosen: Tensor, ranks: Tensor) -> _Nearest:
    """Return the nearest keys of some queries, on the host.

    Args:
        queries: Q of them.
        keys: K of them.
        belongs: [N, 2] int64, of a query and a key that belongs to it.
        chosen: [8], of the queries.
        ranks: [Q].
    """
    similar = queries.features[chosen] @ keys.features.T  # [8, K]
    found = similar.topk(min(_NUM_NEAREST, similar.shape[1]))  # [8, 5]
    number_of_pair = belongs[:, 0] * len(keys.numbers) + belongs[:, 1]  # [N]
    is_own = torch.isin(chosen[:, None] * len(keys.numbers) + found.indices, number_of_pair)  # [8, 5]
    return _Nearest(*(each.cpu() for each in (chosen, ranks[chosen], found.indices, found.values, is_own)))


def _find_samples(loaders: Any) -> Any:
    """Return the dataset that the first loader of a validation reads a share of; None: it is somebody's own."""
    first = loaders[0] if isinstance(loaders, list) else loaders
    return getattr(getattr(first, "dataset", None), "of", None)


def _spread(total: int, number: int) -> Tensor:
    """Return so many places of a total, spread evenly, or all if there are fewer."""
    number = min(total, number)
    return torch.arange(number) * total // number


def _list_found(
    nearest: _Nearest,
    show_query: Callable[[int], dict[str, Any]],
    show_key: Callable[[int], dict[str, Any]],
    name: str,
) -> list[dict[str, Any]]:
    """Return each query with its rank, from 1, and what it found, under a name."""
    rows = zip(*(each.tolist() for each in nearest), strict=True)
    return [
        show_query(query)
        | {
            "rank": rank + 1,
            name: [
                show_key(key) | {"cosine": cosine, "is_own": own}
                for key, cosine, own in zip(found, cosines, is_own, strict=True)
            ],
        }
        for query, rank, found, cosines, is_own in rows
    ]
