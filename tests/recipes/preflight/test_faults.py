"""Every planted fault is found by the line that is about it, and a sound recipe passes every line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import preflight_faults
import pytest
from support import TINY

from recipes.config import compose_and_check
from recipes.mode.preflight import preflight
from recipes.runtime.exit_codes import ExitCode

FAULTS = preflight_faults.__name__
TEXT = ("trainer.accelerator=cpu", "scheduler=constant", "warmup_steps=0", "optimizer.lr=3e-3")
SMALL_AND_RANDOM = (
    "model._target_=small_models.SmallClassifier",
    "data.random_crop_padding=1",
    "optimizer.lr=1e-2",
    "scheduler=constant",
    "warmup_steps=0",
)
IMAGES = ("model=resnet18", "trainer.accelerator=cpu", "global_batch_size=8")


def run_preflight(
    folder: Path, *overrides: str, steps: int = 20, shown: list[Any] | None = None, **targets: str
) -> tuple[int, dict[str, str]]:
    """Run the checks with other constructors in some sections; return the exit code and status by check.

    The images of the page are appended to `shown`.
    """
    composed, mistakes = compose_and_check([*overrides, "mode=preflight", f"mode.overfit_steps={steps}"])
    assert composed is not None, mistakes
    assert not mistakes, [str(mistake) for mistake in mistakes]
    config: dict[str, Any] = composed.config
    for section, name in targets.items():
        config = config | {section: config[section] | {"_target_": f"{FAULTS}.{name}"}}
    images_of_page = [] if shown is None else shown
    code = preflight(
        replace(composed, config=config, run_folder=folder / "run"),
        overfit_steps=steps,
        path=str(folder / "preflight"),
        write_page=lambda path, results, images, **_: images_of_page.extend(images),
    )
    assert not (folder / "run").exists()
    results = json.loads((folder / "preflight" / "preflight.json").read_text())["results"]
    return code, {result["check"]: result["status"] for result in results}


def test_a_sound_recipe_of_text_passes(tmp_path: Path, text_folder: str) -> None:
    overrides = [*TINY, f"data.path={text_folder}", *TEXT, "label_smoothing=0.1", "z_loss=1e-4", "model.dropout=0.1"]
    code, found = run_preflight(tmp_path, *overrides)
    # these small texts repeat themselves
    assert {check for check, status in found.items() if status == "warn"} <= {"the stream brings new samples"}
    assert code == ExitCode.FINISHED
    assert len(found) == 22


@pytest.mark.parametrize("more", [(), SMALL_AND_RANDOM], ids=["as they are", "random crops"])
def test_a_sound_recipe_of_images_passes(more: tuple[str, ...], tmp_path: Path) -> None:
    code, found = run_preflight(tmp_path, *IMAGES, *more, steps=30 if more else 12)
    assert [check for check, status in found.items() if status in ("warn", "fail")] == []
    assert code == ExitCode.FINISHED
    assert ("a position draws its sample" in found) == bool(more)


def test_images_that_draw_from_a_generator_of_their_own_are_found_by_their_own_line(tmp_path: Path) -> None:
    code, found = run_preflight(tmp_path, *IMAGES, *SMALL_AND_RANDOM, data="DrawsByItself", steps=12)
    assert found["a position draws its sample"] == "fail"
    assert code == ExitCode.CHECK_FAILED


@pytest.mark.parametrize(
    ("targets", "check", "more"),
    [
        ({"data": "Unshifted"}, "targets are the next tokens", ()),
        ({"data": "OutOfRange"}, "targets are classes of the model", ()),
        ({"data": "Repeating"}, "the stream brings new samples", ()),
        ({"data": "Leaking"}, "validation samples are new", ()),
        ({"data": "Slow"}, "loading is faster than training", ()),
        ({"model": "FrozenLayer"}, "no parameter is frozen", ()),
        ({"model": "UnusedLayer"}, "every parameter has a gradient", ()),
        ({"model": "SeesTheFuture"}, "no leak from the future", ()),
        ({"model": "SeesNeighbours"}, "samples are independent", ()),
        ({"model": "LargeFirstWeights"}, "loss before the first step", ()),
        ({"model": "DropoutInEvaluation"}, "evaluation is repeatable", ()),
        ({"model": "CoarseInLowPrecision"}, "low precision agrees with float32", ("precision=bf16-mixed",)),
        ({"model": "ForgetsAtSave"}, "a checkpoint restores the loss", ()),
        ({"optimizer": "adamw_of_matrices"}, "the optimizer has all parameters", ()),
        ({"task": "UndividedAccumulation"}, "accumulation equals one batch", ()),
        ({"task": "SmoothsOverPadding"}, "regularizers leave padding out", ("label_smoothing=0.1",)),
    ],
    ids=lambda value: "".join(value.values()) if isinstance(value, dict) else None,
)
def test_a_fault_in_text_is_found_by_its_own_line(
    targets: dict[str, str], check: str, more: tuple[str, ...], tmp_path: Path, text_folder: str
) -> None:
    code, found = run_preflight(tmp_path, *TINY, f"data.path={text_folder}", *TEXT, *more, steps=10, **targets)
    # how slow a loader is depends on what else the machine does
    assert found[check] == "fail" or (found[check] == "warn" and "Slow" in targets.values()), found
    assert code == ExitCode.CHECK_FAILED or found[check] == "warn"


def test_a_sound_reward_model_passes_whose_last_bias_cancels_in_a_comparison(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{row}>", "chosen": "ab" * (1 + row % 3), "rejected": "c" * (1 + row % 4)} for row in range(90)]
    pairs.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    overrides = ("recipe=reward_model", f"data.path={pairs}", f"data.cache_dir={tmp_path}", "tokenizer=bytes", *TEXT)
    small = ("model=gpt2_nano", "model.vocab_size=257", "model.max_seq_len=32", "model.num_layers=1")
    code, found = run_preflight(
        tmp_path, *overrides, *small, "model.tie_embeddings=false", "global_batch_size=16", steps=30
    )
    assert [check for check, status in found.items() if status == "fail"] == []
    assert found["every parameter has a gradient"] == "pass"
    assert found["no parameter is frozen"] == "pass", "a head that is not used is no fault"
    assert code == ExitCode.FINISHED
    written = json.loads((tmp_path / "preflight" / "preflight.json").read_text())["results"]
    [line] = [result["found"] for result in written if result["check"] == "every parameter has a gradient"]
    assert line.startswith("all but model.norm.bias, which shifts all scores alike")


@pytest.mark.parametrize(
    ("targets", "check"),
    [
        ({"data": "ShuffledLabels"}, "inputs are predictive of targets"),
        ({"model": "NormOfTheBatch"}, "samples are independent"),
    ],
)
def test_a_fault_in_images_is_found_by_its_own_line(targets: dict[str, str], check: str, tmp_path: Path) -> None:
    code, found = run_preflight(tmp_path, *IMAGES, steps=10, **targets)
    assert found[check] == "fail", found
    assert code == ExitCode.CHECK_FAILED


def test_a_learning_rate_that_learns_nothing_is_found(tmp_path: Path, text_folder: str) -> None:
    _, found = run_preflight(tmp_path, *TINY, f"data.path={text_folder}", *TEXT[:3], "optimizer.lr=1e-9", steps=10)
    assert found["one batch can be memorized"] == "fail"


def test_a_sound_recipe_in_float8_passes(tmp_path: Path, text_folder: str) -> None:
    float8 = ("precision=fp8-mixed", "precision.emulate=true", "model.vocab_pad_multiple=16")
    code, found = run_preflight(tmp_path, *TINY, f"data.path={text_folder}", *TEXT, *float8)
    assert [check for check, status in found.items() if status == "fail"] == []
    assert found["low precision agrees with float32"] == "pass"
    assert found["no leak from the future"] == "skip"
    assert code == ExitCode.FINISHED


def test_a_resumed_run_is_rejected(tmp_path: Path) -> None:
    composed, _ = compose_and_check([*TINY[:1], "mode=preflight"])
    assert composed is not None
    with pytest.raises(Exception, match="resume=x mode=preflight: the trial starts from the initial weights"):
        preflight(
            replace(composed, config=composed.config | {"resume": "x"}),
            overfit_steps=10, path=None, write_page=lambda *_, **__: None,
        )  # fmt: skip


def test_images_in_files_are_shown_with_their_classes_and_a_broken_one_ends_the_checks(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for number in range(24):
        file = tmp_path / "photos" / ("ant", "bee")[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (8, 8), (255 * (number % 2), number, 0)).save(file)
    overrides = [*IMAGES, *SMALL_AND_RANDOM, "data=image_folder", f"data.path={tmp_path / 'photos'}"]
    kept = [each for each in overrides if not each.startswith(("data.random", "data=digits"))]
    typed = [*kept, "model.num_classes=2", "model.in_channels=3", "transform=small_images", "transform.size=8"]
    found: list[Any] = []
    _, checks = run_preflight(tmp_path, *typed, "data.val_fraction=0.3", steps=10, shown=found)
    assert checks["images can be decoded"] == "pass"
    assert checks["classes have similar sizes"] == "pass"
    assert {label for _, label in found} == {"ant", "bee"}
    (tmp_path / "photos" / "bee" / "1.png").write_bytes(b"")
    code, checks = run_preflight(tmp_path, *typed, "data.val_fraction=0.3")
    assert code == ExitCode.CHECK_FAILED
    assert checks == {"images can be decoded": "fail"}
