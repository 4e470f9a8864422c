"""Zero-shot classification: hits by hand from features, on one rank and several, and mistakes before the first step."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.profilers import PassThroughProfiler
from thread_ranks import run_on_threads
from torch import Tensor

from callbacks.zero_shot import NO_CLASS, SUFFIXES, ZeroShot
from recipes.data.image_file import SUFFIXES as DECODED

NAMES = ["ant", "big_bee", "cat", "dog", "eel", "fox", "gnu"]
TEMPLATES = ["a {}", "the {}."]
WIDTH = 5


def feature_of(text: str) -> Tensor:
    """Return features of a text that are neither normalized nor those of another one, [F]."""
    seed = int.from_bytes(text.encode(), "big") % 2**31
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed)) * (len(text) + 1)


class Model:
    """Knows the features of captions and files by their names, and counts its calls; this rank has every `size`-th."""

    def __init__(self, rank: int, size: int, broken: str = "") -> None:
        self.rank, self.size, self.broken = rank, size, broken
        self.logged: dict[str, float] = {}
        self.captions: list[str] = []

    def recipes_encode_captions(self, captions: Sequence[str]) -> Tensor:
        self.captions += captions
        return torch.stack([feature_of(caption) for caption in captions])

    def recipes_encode_images(self, paths: Sequence[Path], classes: Sequence[int]) -> tuple[Tensor, Tensor]:
        padded = -(-len(paths) // self.size) * self.size
        places = range(self.rank, padded, self.size)
        files = [paths[place % len(paths)] for place in places]
        features = torch.stack(
            [torch.nan * feature_of("") if f.stem == self.broken else feature_of(f.stem) for f in files]
        )
        own = [classes[place] if place < len(paths) else NO_CLASS for place in places]
        return features, torch.tensor(own)

    def log(self, name: str, value: float, **_: Any) -> None:
        self.logged[name] = value


def write_folder(root: Path, names: Sequence[str] = NAMES) -> Path:
    for number, name in enumerate(names):
        folder = root / name / ("deeper" if number % 2 else "")
        folder.mkdir(parents=True)
        for image in range(1 + number % 3):
            (folder / f"{name}{image}.PNG").touch()
        (folder / "labels.txt").touch()
        (folder / ".hidden.png").touch()
    (root / ".cache").mkdir()
    return root


def validate(check: ZeroShot, *, rank: int = 0, size: int = 1, broken: str = "") -> Model:
    model = Model(rank, size, broken)
    strategy = SimpleNamespace(data_rank=rank, data_size=size)
    trainer: Any = SimpleNamespace(
        strategy=strategy, sanity_checking=False, global_rank=rank, world_size=size, profiler=PassThroughProfiler()
    )
    module: Any = model
    check.setup(trainer, module, "fit")
    check.on_validation_epoch_end(trainer, module)
    return model


def expected(names: Sequence[str], folder: Path) -> list[int]:
    """Return the rank of the class of each image, from 0, by the formula of CLIP."""
    classes = []
    for name in names:
        each = [F.normalize(feature_of(template.format(name)), dim=0) for template in TEMPLATES]
        classes.append(F.normalize(torch.stack(each).mean(dim=0), dim=0))
    found = []
    for path in sorted(folder.rglob("[!.]*.PNG")):
        own = sorted(each.name for each in folder.iterdir() if each.name[0] != ".").index(
            path.relative_to(folder).parts[0]
        )
        cosines = [float(F.normalize(feature_of(path.stem), dim=0) @ each) for each in classes]
        found.append(sum(cosine >= cosines[own] for cosine in cosines) - 1)
    return found


def test_hits_are_those_of_averaged_templates_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    ranks = expected([name.replace("_", " ") for name in NAMES], folder)
    assert len(ranks) == 13
    hits, hits_of_top = sum(rank < 1 for rank in ranks), sum(rank < 5 for rank in ranks)
    assert 0 < hits < hits_of_top < 13
    alone = validate(ZeroShot(path=str(folder), templates=TEMPLATES))
    assert alone.logged == {"val/zero_shot_accuracy": hits / 13, "val/zero_shot_accuracy_top5": hits_of_top / 13}
    assert len(alone.captions) == len({*alone.captions}) == 14, "each is encoded once"
    for size in (2, 4, 16):  # of 16, three have no image and nine no class of their own
        work = lambda rank, size=size: validate(ZeroShot(path=str(folder), templates=TEMPLATES), rank=rank, size=size)  # noqa: E731
        models = run_on_threads(work, num_ranks=size)
        assert all(model.logged == alone.logged for model in models)
        assert {len(model.captions) for model in models} == {2 * -(-7 // size)}, "as many calls on every rank"


def test_names_are_those_given_and_top_5_of_5_is_not_logged(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, NAMES[:5])
    check = ZeroShot(path=str(folder), templates=TEMPLATES, classes={name: f"{name}!" for name in NAMES})
    model = validate(check)
    assert check.class_names == [f"{name}!" for name in NAMES[:5]]
    ranks = expected(check.class_names, folder)
    assert model.logged == {"val/zero_shot_accuracy": sum(rank < 1 for rank in ranks) / len(ranks)}


def test_a_feature_of_nan_or_as_near_to_two_classes_is_no_hit(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    whole = validate(ZeroShot(path=str(folder), templates=TEMPLATES)).logged["val/zero_shot_accuracy"]
    ranks = expected([name.replace("_", " ") for name in NAMES], folder)
    stems = [path.stem for path in sorted(folder.rglob("[!.]*.PNG"))]
    broken = validate(ZeroShot(path=str(folder), templates=TEMPLATES), broken=stems[ranks.index(0)])
    assert broken.logged["val/zero_shot_accuracy"] == pytest.approx(whole - 1 / 13)
    same = validate(ZeroShot(path=str(folder), templates=TEMPLATES, classes=dict.fromkeys(NAMES, "x")))
    assert same.logged["val/zero_shot_accuracy"] == same.logged["val/zero_shot_accuracy_top5"] == 0.0


def test_without_a_path_nothing_is_asked_of_a_module() -> None:
    module: Any = SimpleNamespace()
    trainer: Any = SimpleNamespace(sanity_checking=False)
    check = ZeroShot(path=None, templates=TEMPLATES)
    check.setup(trainer, module, "fit")
    check.on_validation_epoch_end(trainer, module)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "nowhere"}, "there is no such folder; set path=<a folder with one folder of images per class>"),
        ({"path": "ant/ant0.PNG"}, "it is a file; set path=<a folder with one folder of images per class>"),
        ({"path": "big_bee"}, "'deeper' is its only folder, and one class cannot be taken for another; set path=<"),
        ({"path": "ant"}, "it has no folder, and one class cannot be taken for another; set path=<a folder"),
        ({"path": "empty"}, "no image is in its folder 'a'; images end with .bmp"),
        ({"path": ".", "classes": {"ant": "ant"}}, "it has no name for 'big_bee', which is a folder of path"),
        (
            {"path": None, "templates": ["a {}", "b"]},
            "templates is ['a {}', 'b']; 'b' has no {} for the name of a class",
        ),
        ({"path": None, "templates": []}, "templates is []; a class needs a caption; set templates=[<"),
    ],
)
def test_what_cannot_be_classified_is_a_mistake_at_once(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    if settings["path"] == "empty":
        for name in ("a", "b"):
            (folder / "empty" / name).mkdir(parents=True)
    if settings["path"] is not None:
        settings = settings | {"path": str(folder / settings["path"])}
    with pytest.raises(ValueError, match="; set ") as error:
        ZeroShot(**{"templates": TEMPLATES} | settings)
    assert message in str(error.value)


def test_a_module_without_captions_is_a_mistake_before_the_first_step(tmp_path: Path) -> None:
    check = ZeroShot(path=str(write_folder(tmp_path)), templates=TEMPLATES)
    module: Any = SimpleNamespace()
    with pytest.raises(ValueError, match=r"path is set; SimpleNamespace does not compare images .*; set path=None"):
        check.setup(module, module, "fit")


def test_files_are_taken_for_images_that_the_data_would_read() -> None:
    assert SUFFIXES == DECODED
