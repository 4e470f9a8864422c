"""Rows of random tokens with images among them, and the smallest LLaVA model that reads them."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from support import MaskedTokens, RaggedTokens
from torch import Tensor

from recipes.data.conversations.rows import pad_rows
from recipes.generation import Sampling, generate
from recipes.model.llava import Llava

IMAGE_SIZE, PATCHES, IMAGE_TOKEN, VOCAB_SIZE = 8, 4, 63, 64
IMAGE = [IMAGE_TOKEN] * PATCHES
# no image, one at the start of a row that is padded, two apart, one at the end
PROMPTS = [[5, 6, 7], [*IMAGE, 8, 9], [3, *IMAGE, 4, *IMAGE, 10, 11], [12, *IMAGE]]
NUM_IMAGES = [0, 1, 2, 1]
NUM_TOKENS = 12
GREEDY = Sampling(temperature=0.0)
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}


def write_llava(
    folder: Path,
    *,
    vision: str = "clip_vision_model",
    language: str = "llama",
    image_token: int = IMAGE_TOKEN,
    dropout: float = 0.0,
    num_layers: int = 2,
    tower_sizes: Mapping[str, int] = MappingProxyType({}),
    **text: Any,
) -> Path:
    """Write the config.json of a LLaVA model of some thousand parameters, with 4 tokens of an image."""
    from transformers import AutoConfig, LlavaConfig

    of_tower = SIZES | {"num_hidden_layers": 3, "image_size": IMAGE_SIZE, "patch_size": 4} | tower_sizes
    tower = AutoConfig.for_model(vision, **of_tower)
    tower.attention_dropout = dropout
    sizes = {"num_key_value_heads": 1, "max_position_embeddings": 64, "vocab_size": VOCAB_SIZE, **SIZES, **text}
    config = LlavaConfig(
        vision_config=tower,
        text_config=AutoConfig.for_model(language, num_hidden_layers=num_layers, **sizes),
        image_token_index=image_token,
        image_seq_length=(tower.image_size // tower.patch_size) ** 2,
        vision_feature_select_strategy="default" if vision == "clip_vision_model" else "full",
    )
    config.save_pretrained(folder)
    return folder


def make_parts(folder: Path, *, vision: str, language: str, **sizes: Any) -> tuple[Any, Any]:
    """Write a model of images and text and a language model with weights, and return both."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    torch.manual_seed(1)
    tower = {**SIZES, "num_hidden_layers": 3, "image_size": IMAGE_SIZE, "patch_size": 4}
    text = {**SIZES, "num_hidden_layers": 1, "vocab_size": 50, "projection_size": 32}
    both = AutoModel.from_config(AutoConfig.for_model(vision, vision_config=tower, text_config=text))
    own = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 1, "vocab_size": 60, **sizes}
    causal = AutoModelForCausalLM.from_config(AutoConfig.for_model(language, **own))
    both.save_pretrained(folder / "vision")
    causal.save_pretrained(folder / "language")
    return both, causal.eval()


def make_llava(folder: Path, *, pretrained: str | None = None) -> Llava:
    """Return the model of a folder that `write_llava` has written, on the current device."""
    return Llava(
        **dict.fromkeys(("vision", "language", "vision_pretrained", "language_pretrained")),
        name=str(folder),
        pretrained=pretrained,
        vision_feature_layer=-2,
        in_channels=3,
        image_token_id=IMAGE_TOKEN,
        image_seq_length=PATCHES,
        image_size=IMAGE_SIZE,
        max_seq_len=64,
        vocab_size=VOCAB_SIZE,
    )


class Illustrated(RaggedTokens):
    """Rows of 1 to T tokens, every fourth with one or two images at its start, which have no loss.

    Most micro-batches of one or two rows have no image on some rank.
    """

    fingerprint = "illustrated"

    def __init__(self, *, num_samples: int, seq_len: int) -> None:
        super().__init__(num_samples=num_samples, seq_len=seq_len, vocab_size=IMAGE_TOKEN)
        self.num_images = [0 if index % 4 else 1 + index % 8 // 4 for index in range(num_samples)]
        generator = torch.Generator().manual_seed(3)
        self.images = torch.randn(num_samples, 2, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)  # [N, 2, C, S, S]
        longest = PATCHES * 2 + 2
        self.lengths = self.lengths.clip(min=[longest if number else 1 for number in self.num_images])
        self.collate = functools.partial(join_rows, seq_len=seq_len)

    def count_images(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of images of each row."""
        return np.array(self.num_images)[samples]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row, number = super().__getitem__(index), self.num_images[index]
        inputs, targets = row["inputs"].clone(), row["targets"].clone()
        inputs[: number * PATCHES] = IMAGE_TOKEN
        targets[: max(0, number * PATCHES - 1)] = -100
        return {"inputs": inputs, "targets": targets, "images": self.images[index, :number]}


def join_rows(samples: Sequence[dict[str, Tensor]], *, seq_len: int) -> dict[str, Any]:
    """Return a batch with the images of all rows; one of zeros if there is none."""
    batch = pad_rows([{name: row[name] for name in ("inputs", "targets")} for row in samples], seq_len=seq_len)
    images = torch.cat([row["images"] for row in samples])  # [N, C, S, S]
    batch["images"] = images if len(images) else torch.zeros(1, *images.shape[1:])
    return batch | {"num_images": torch.tensor([len(row["images"]) for row in samples])}


def model_of(folder: Path, **settings: Any) -> Any:
    """Return a tiny model whose weights are large enough that the likeliest token changes."""
    write_llava(folder, **settings)
    model = Llava(
        name=str(folder),
        pretrained=None,
        vision=None,
        language=None,
        vision_pretrained=None,
        language_pretrained=None,
        vision_feature_layer=-2,
        image_token_id=IMAGE_TOKEN,
        in_channels=3,
        image_seq_length=PATCHES,
        image_size=IMAGE_SIZE,
        max_seq_len=64,
        vocab_size=64,
    )
    model.init_weights(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(16.0)
    return model.eval()


def images_of(numbers: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(number, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator) for number in numbers]


def tokens_of(model: Any, prompts: list[list[int]], images: list[Tensor] | None, **options: Any) -> list[list[int]]:
    number = len(prompts) * options.get("num_samples", 1)
    settings: dict[str, Any] = {"sampling": GREEDY, "seeds": range(number), "images": images} | options
    return [completion.tokens for completion in generate(model, prompts, NUM_TOKENS, **settings)]


class Pictured(MaskedTokens):
    """Rows of T tokens, each with one image at its start, which has no loss."""

    fingerprint = "pictured"
    targets_per_sample = None

    def __init__(self, *, num_samples: int, seq_len: int, image_token: int, patches: int, image_size: int) -> None:
        super().__init__(num_samples=num_samples, seq_len=seq_len, vocab_size=image_token)
        self._image_token, self._patches, self._image_size = image_token, patches, image_size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs, targets = self.tokens[index, :-1].clone(), self.tokens[index, 1:].clone()
        inputs[: self._patches] = self._image_token
        targets[: self._patches - 1] = -100
        generator = torch.Generator().manual_seed(index)
        images = torch.randn(1, 3, self._image_size, self._image_size, generator=generator)  # [1, C, S, S]
        return {"inputs": inputs, "targets": targets, "images": images}

    @staticmethod
    def collate(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return a batch with the images of all rows."""
        batch = {name: torch.stack([row[name] for row in samples]) for name in ("inputs", "targets")}
        return batch | {
            "images": torch.cat([row["images"] for row in samples]),  # [B, C, S, S]
            "num_images": torch.ones(len(samples), dtype=torch.int64),
        }
