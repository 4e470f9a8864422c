"""Pictures of short words in the fonts that come with matplotlib, captioned with the word: nothing to download.

Shapes: N images, S x S pixels.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from typing_extensions import override

from recipes.data.draws import rng_at
from recipes.data.image_text import CaptionedSplit, CaptionSource
from recipes.data.images import ImageSplit, Names
from recipes.data.order import mix64
from recipes.errors import ConfigError, type_extra
from recipes.tokenizer import TokenizerConfig
from recipes.transform.images import ImageTransform

_LETTERS = "abcdefghijkl"
_LENGTHS = (3, 4, 5)
_FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSansMono-Bold"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "STIXGeneral"),
)
_NUM_HELD_OUT = 256  # words for validation, in which the nearest of one is right by chance in 0.4 % of cases
_SIZES = (0.28, 0.31, 0.34)  # of a font, in parts of the side of an image
_SHIFT = 1  # pixels up or down
_NOISE = 12.0  # standard deviation, of 255


class Words(CaptionSource):
    """Words of 3 to 5 of 12 letters, white on black in 7 fonts; the 256 words of the validation are no training words.

    Args:
        num_words: Training images, each of another word.
        image_size: S of the drawn images, gray; `transform.size` is what the model sees.
        shuffle_captions: Give each training image the word of another one, as a control from which nothing is learned.
        tokenizer: See `CaptionSource`, as the following four.
        seq_len: T.
        transform: What is made of an image.
        cache_dir: Folder of trained tokenizers.
        vocab_size: Vocabulary size of the model; None: any.
    """

    def __init__(
        self,
        *,
        num_words: Annotated[int, ">= 1, <= 200_000"],
        image_size: Annotated[int, ">= 24"],
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
        self._num_words = num_words
        self._image_size = image_size
        self._shuffles = shuffle_captions

    @override
    def list_splits(self) -> dict[str, ImageSplit]:
        """Choose the words.

        Raises:
            ConfigError: matplotlib or Pillow is not installed.
        """
        words = ["".join(letters) for length in _LENGTHS for letters in itertools.product(_LETTERS, repeat=length)]
        order = np.argsort(mix64(np.arange(len(words), dtype=np.uint64)))
        held_out, chosen = (
            [words[place] for place in places.tolist()]
            for places in (order[:_NUM_HELD_OUT], order[_NUM_HELD_OUT : _NUM_HELD_OUT + self._num_words])
        )
        captions = [*chosen[1:], chosen[0]] if self._shuffles else chosen
        return {"train": self._draw(chosen, captions), "val": self._draw(held_out, held_out)}

    def _draw(self, words: Sequence[str], captions: Sequence[str]) -> CaptionedSplit:
        return CaptionedSplit.of_one_each(_DrawnWords(words, self._image_size), words, captions)


class _DrawnWords:
    """Words as encoded images, drawn when they are read: font, size and place depend on the number alone.

    Args:
        words: N.
        image_size: S.

    Raises:
        ConfigError: matplotlib or Pillow is not installed.
    """

    def __init__(self, words: Sequence[str], image_size: int) -> None:
        try:
            import matplotlib
            from PIL import ImageFont
        except ImportError as error:
            reason = "it draws with Pillow the fonts of matplotlib, which are not installed"
            raise ConfigError("data=words", reason, type_extra("vision")) from error
        folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
        sizes = [round(part * image_size) for part in _SIZES]
        self._fonts = [ImageFont.truetype(str(folder / f"{font}.ttf"), size) for font in _FONTS for size in sizes]
        self._words = Names(words)
        self._image_size = image_size

    def __len__(self) -> int:
        return len(self._words)

    def read(self, number: int) -> bytes:
        """Return an image as a PGM file."""
        from PIL import Image, ImageDraw

        side, rng = self._image_size, rng_at(0, number)
        font = self._fonts[int(rng.integers(len(self._fonts)))]
        left, _, right, _ = font.getbbox(self._words[number])
        x = int(rng.integers(max(side - (right - left), 0) + 1)) - left
        y = round((side - font.size) / 2) + int(rng.integers(-_SHIFT, _SHIFT + 1))
        image = Image.new("L", (side, side))
        ImageDraw.Draw(image).text((x, y), self._words[number], fill=255, font=font)
        noisy = np.asarray(image) + rng.normal(0.0, _NOISE, (side, side))  # [S, S]
        pixels: bytes = noisy.clip(0, 255).astype(np.uint8).tobytes()
        return b"P5 %d %d 255\n" % (side, side) + pixels

    def name(self, number: int) -> str:
        """Return a name for errors and the log."""
        return f"word {self._words[number]}"
