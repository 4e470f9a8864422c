"""Pictures of colored shapes, captioned with what is where in them: nothing to download.

Shapes: N images, S x S pixels.
"""

from collections.abc import Sequence
from typing import Annotated

from typing_extensions import override

from recipes.data.draws import rng_at
from recipes.data.image_text import CaptionedSplit, CaptionSource
from recipes.data.images import ImageSplit, Names
from recipes.data.shapes import (
    NUM_UNSEEN_SCENES,
    PICTURE_SEEDS,
    check_image_size,
    choose_seen,
    choose_unseen,
    draw_picture,
    read_caption,
    write_caption,
)
from recipes.tokenizer import TokenizerConfig
from recipes.transform.images import ImageTransform


class Scenes(CaptionSource):
    """One to three shapes in colors at places, each picture another one; see `recipes.data.shapes`.

    The validation has 512 different scenes, and each of them a combination of color, form and place that no training
    image has.

    Args:
        num_scenes: Training images.
        image_size: S of the drawn images, in color, an even number; `transform.size` is what the model sees.
        shuffle_captions: Give each training image the caption of another one, as a control from which nothing is
            learned.
        tokenizer: See `CaptionSource`, as the following four.
        seq_len: T.
        transform: What is made of an image.
        cache_dir: Folder of trained tokenizers.
        vocab_size: Vocabulary size of the model; None: any.

    Raises:
        ConfigError: `image_size` is odd.
    """

    def __init__(
        self,
        *,
        num_scenes: Annotated[int, ">= 1, <= 1_000_000"],
        image_size: Annotated[int, ">= 16"],
        shuffle_captions: bool,
        tokenizer: TokenizerConfig,
        seq_len: Annotated[int, ">= 1"] | None,
        transform: ImageTransform,
        cache_dir: str,
        vocab_size: Annotated[int, ">= 1"] | None,
    ) -> None:
        super().__init__(
            val_fraction=0.5,  # not used: both splits are drawn
            tokenizer=tokenizer,
            seq_len=seq_len,
            transform=transform,
            on_bad_image="error",
            cache_dir=cache_dir,
            vocab_size=vocab_size,
        )
        check_image_size(image_size)
        self._num_scenes = num_scenes
        self._image_size = image_size
        self._shuffles = shuffle_captions

    @override
    def list_splits(self) -> dict[str, ImageSplit]:
        """Choose the scenes."""
        chosen = {"train": choose_seen(self._num_scenes), "val": choose_unseen(NUM_UNSEEN_SCENES)}
        return {split: self._describe(split, [*map(write_caption, scenes)]) for split, scenes in chosen.items()}

    def _describe(self, split: str, scenes: Sequence[str]) -> CaptionedSplit:
        drawn = DrawnScenes(scenes, PICTURE_SEEDS[split], self._image_size)
        captions = [*scenes[1:], scenes[0]] if self._shuffles and split == "train" else scenes
        keys = (f"{split} {drawn.name(number)}" for number in range(len(scenes)))
        return CaptionedSplit.of_one_each(drawn, keys, captions)


class DrawnScenes:
    """Scenes as encoded images, drawn when they are read: sizes, places and colors depend on seed and number alone.

    Args:
        captions: N, of what is in each.
        seed: Seed of the pictures.
        image_size: S.
    """

    def __init__(self, captions: Sequence[str], seed: int, image_size: int) -> None:
        self._captions = Names(captions)
        self._seed = seed
        self._image_size = image_size

    def __len__(self) -> int:
        return len(self._captions)

    def read(self, number: int) -> bytes:
        """Return an image as a PPM file."""
        scene = read_caption(self._captions[number])
        pixels: bytes = draw_picture(scene, rng_at(self._seed, number), self._image_size).tobytes()
        return b"P6 %d %d 255\n" % (self._image_size, self._image_size) + pixels

    def name(self, number: int) -> str:
        """Return a name for errors and the log."""
        return f"scene {number}: {self._captions[number]}"
