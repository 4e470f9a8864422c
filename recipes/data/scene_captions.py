"""Questions about pictures of colored shapes, for models that read images and answer: nothing to download."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from numpy.random import Generator
from typing_extensions import override

from recipes.data.conversations.source import Conversations
from recipes.data.draws import rng_at
from recipes.data.read_rows import Row, Rows
from recipes.data.shapes import (
    NUM_UNSEEN_SCENES,
    PICTURE_SEEDS,
    Scene,
    check_image_size,
    choose_seen,
    choose_unseen,
    draw_picture,
    encode_png,
    write_caption,
)
from recipes.errors import ConfigError

Question = Literal["what", "color", "count"]
_IMAGE = "<image>\n"
_COUNTS = ("one", "two", "three")
_SEED_OF_WORDS, _SEED_OF_QUESTIONS = 3, 4
_VERSION = 2  # of the rows
_NUM_BYTES = 400  # of a row, about


class SceneCaptions(Conversations):
    """Prompts such as an image and `What is there?`, with the answer `red circle top left`.

    The scenes and their pictures are those of `data=scenes`: the validation asks about 512 that are in no training.
    """

    fine_tunes: ClassVar[bool] = False

    def __init__(
        self,
        *,
        questions: Annotated[list[Question], ">= 1"],
        num_scenes: Annotated[int, ">= 1, <= 1_000_000"],
        image_size: Annotated[int, ">= 16"],
        as_text: bool,
        shuffle_words: bool,
        shuffle_answers: bool,
        **settings: Any,
    ) -> None:
        """Store the settings.

        Args:
            questions: Kinds of questions, which the scenes cycle through: `what` is where, which `color` is at a place,
                and the `count` of the shapes.
            num_scenes: Training scenes, each asked about once.
            image_size: Pixels a side of the pictures, an even number.
            as_text: Key words in the place of the image, so that a language model learns to read what stands before a
                question.
            shuffle_words: The shapes in the key words, and the words of each, in any order; False: as in the answers.
            shuffle_answers: Give each training scene the answer about another one: a control from which nothing can be
                learned.
            **settings: As for `Conversations`.

        Raises:
            ConfigError: There are no questions, one is unknown, or `image_size` is odd.
        """
        if not questions:
            raise ConfigError("data.questions=[]", "a scene needs a question", f"data.questions=[{','.join(_ASKED)}]")
        for kind in questions:
            if kind not in _ASKED:
                reason = f"there is no question {kind}"
                raise ConfigError(f"data.questions={questions}", reason, f"data.questions=[{','.join(_ASKED)}]")
        check_image_size(image_size)
        super().__init__(
            path="",
            format="prompt_completion",
            fields={},
            val_path="",
            val_fraction=0.5,
            split="train",
            image_folder=None,
            **settings,
        )
        common: dict[str, Any] = {"questions": questions, "image_size": image_size, "as_text": as_text}
        common |= {"shuffles_words": shuffle_words}
        self._rows_of_scenes = {
            "path": SceneRows("train", num_scenes, shuffles_answers=shuffle_answers, **common),
            "val_path": SceneRows("val", NUM_UNSEEN_SCENES, shuffles_answers=False, **common),
        }

    @override
    def hold_out_all(self) -> None:
        """Do nothing: the scenes of the validation are in no training."""

    @override
    def _open(self, name: str, path: str) -> Rows:
        return self._rows_of_scenes[name]


class SceneRows:
    """Rows of prompt and completion, and of an image unless key words stand in its place; the same ones every time.

    Args:
        split: `train` or `val`.
        num_scenes: Number of rows.
        questions: See `SceneCaptions`, as all others.
        image_size: Pixels a side.
        as_text: Key words in the place of the image.
        shuffles_words: Key words in any order.
        shuffles_answers: Each with the answer of the next one.
    """

    def __init__(
        self,
        split: str,
        num_scenes: int,
        *,
        questions: Sequence[Question],
        image_size: int,
        as_text: bool,
        shuffles_words: bool,
        shuffles_answers: bool,
    ) -> None:
        self.name = f"{num_scenes:,} scenes of {split}"
        self._split = split
        self._num_scenes = num_scenes
        self._questions = questions
        self._image_size = image_size
        self._as_text = as_text
        self._shuffles_words = shuffles_words
        self._shuffles_answers = shuffles_answers

    @property
    def num_bytes(self) -> int:
        """About what the rows take."""
        return self._num_scenes * _NUM_BYTES

    def content_hash(self, cache_dir: Path) -> str:
        own = (*self._questions, self._image_size, self._as_text, self._shuffles_words, self._shuffles_answers)
        return f"{_VERSION} {self.name} {own}"

    def __iter__(self) -> Iterator[Row]:
        scenes = choose_seen(self._num_scenes) if self._split == "train" else choose_unseen(self._num_scenes)
        asked = [self._ask(number, scene) for number, scene in enumerate(scenes)]
        answers = [answer for _, answer in asked]
        if self._shuffles_answers:
            others = len(self._questions)  # the next scene that is asked the same
            answers = answers[others:] + answers[:others]
        for number, (scene, (question, _), answer) in enumerate(zip(scenes, asked, answers, strict=True)):
            yield Row(f"{self._split} scene {number + 1}", self._show(number, scene, question) | {"completion": answer})

    def _ask(self, number: int, scene: Scene) -> tuple[str, str]:
        """Return the question about a scene, and its answer."""
        rng = rng_at(_SEED_OF_QUESTIONS, number)
        return _ASKED[self._questions[number % len(self._questions)]](scene, rng)

    def _show(self, number: int, scene: Scene, question: str) -> dict[str, Any]:
        """Return the prompt, after an image or the key words in its place."""
        if not self._as_text:
            picture = draw_picture(scene, rng_at(PICTURE_SEEDS[self._split], number), self._image_size)
            return {"prompt": f"{_IMAGE}{question}", "image": {"bytes": encode_png(picture)}}
        rng = rng_at(_SEED_OF_WORDS, number) if self._shuffles_words else None
        return {"prompt": f"{write_key_words(scene, rng)}\n{question}"}


def write_key_words(scene: Scene, rng: Generator | None) -> str:
    """Return the words of each shape in a scene, such as `circle top left red; square bottom right blue`.

    Args:
        scene: What they are of.
        rng: Draws the order of the shapes, and of the words of each; None: as in a caption.
    """
    order = [*range(len(scene))] if rng is None else rng.permutation(len(scene)).tolist()
    words = [[*scene[place]] for place in order]
    if rng is not None:
        words = [[each[place] for place in rng.permutation(len(each)).tolist()] for each in words]
    return "; ".join(map(" ".join, words))


def _ask_what(scene: Scene, rng: Generator) -> tuple[str, str]:
    return "What is there?", write_caption(scene)


def _ask_color(scene: Scene, rng: Generator) -> tuple[str, str]:
    shape = scene[int(rng.integers(len(scene)))]
    return f"What color is the shape at the {shape.place}?", shape.color


def _ask_count(scene: Scene, rng: Generator) -> tuple[str, str]:
    return "How many shapes are there?", _COUNTS[len(scene) - 1]


# a question about a scene, and its answer
_ASKED: dict[Question, Callable[[Scene, Generator], tuple[str, str]]] = {
    "what": _ask_what,
    "color": _ask_color,
    "count": _ask_count,
}
