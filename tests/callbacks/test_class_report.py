"""Counts of classes and their predictions over ranks, and the worst mistakes with their images."""

import json
import zlib
from base64 import b64decode
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from thread_ranks import run_on_threads
from torch import Tensor

from callbacks import class_report
from callbacks.class_report import ClassReport

NUM_SAMPLES, NUM_CLASSES = 40, 1000


def draw() -> dict[str, Tensor]:
    """Return the validation step's output for all samples, of which some only fill up a batch, and their images."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(NUM_CLASSES, (NUM_SAMPLES,), generator=generator)
    predicted = torch.where(torch.rand(NUM_SAMPLES, generator=generator) < 0.5, target, (target + 1) % NUM_CLASSES)
    target[7] = target[39] = -100
    loss = torch.rand(NUM_SAMPLES, generator=generator)
    loss[7] = 100.0
    images = torch.rand(NUM_SAMPLES, 3, 4, 6, generator=generator)
    return {"target": target, "predicted": predicted, "loss": loss, "inputs": images}


def validate(report: ClassReport, folder: Path, *, rank: int = 0, num_ranks: int = 1, size: int = 4) -> None:
    """Run the hooks of a validation on this rank's samples."""
    strategy = SimpleNamespace(data_rank=rank)
    trainer: Any = SimpleNamespace(
        strategy=strategy,
        sanity_checking=False,
        is_global_zero=rank == 0,
        global_rank=rank,
        loggers=[],
        default_root_dir=folder,
        global_step=12,
        lightning_module=SimpleNamespace(automatic_optimization=True),
        datamodule=SimpleNamespace(class_names=[f"kind {number}" for number in range(NUM_CLASSES)]),
    )
    module: Any = trainer.lightning_module
    share = {name: values[rank::num_ranks] for name, values in draw().items()}
    report.on_validation_epoch_start(trainer, module)
    for number, start in enumerate(range(0, len(share["target"]), size)):
        part = {name: values[start : start + size] for name, values in share.items()}
        report.on_validation_batch_end(trainer, module, part, {"inputs": part["inputs"]}, number)
    further = {"target": torch.tensor([3]), "predicted": torch.tensor([4]), "loss": torch.tensor([1e6])}
    report.on_validation_batch_end(trainer, module, further, {"inputs": torch.rand(1, 3, 4, 6)}, 0, dataloader_idx=1)
    report.on_validation_epoch_end(trainer, module)


def read(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "classes_val.json").read_text())
    return record


def test_pairs_and_mistakes_are_those_of_all_samples_whichever_rank_has_them(tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    validate(ClassReport(num_mistakes=5), alone)
    run_on_threads(lambda rank: validate(ClassReport(num_mistakes=5), together, rank=rank, num_ranks=4), num_ranks=4)
    record = read(alone)
    assert read(together) == record
    drawn, expected = draw(), dict[tuple[int, int], int]()
    for target, predicted in zip(drawn["target"].tolist(), drawn["predicted"].tolist(), strict=True):
        if target != -100:
            expected[target, predicted] = expected.get((target, predicted), 0) + 1
    wrong = {(target, predicted): count for target, predicted, count in record["pairs"]}
    assert wrong == {pair: count for pair, count in expected.items() if pair[0] != pair[1]}
    assert 5 < len(wrong) < 35
    right = {number: count for number, count in enumerate(record["right"]) if count}
    assert right == {pair[0]: count for pair, count in expected.items() if pair[0] == pair[1]}
    assert sum(record["samples"]) == NUM_SAMPLES - 2 == sum(wrong.values()) + sum(right.values())
    is_wrong = (drawn["target"] != drawn["predicted"]) & (drawn["target"] != -100)
    worst = drawn["loss"].masked_fill(~is_wrong, -1).topk(5)
    assert [mistake["loss"] for mistake in record["mistakes"]] == worst.values.tolist()
    assert [mistake["target"] for mistake in record["mistakes"]] == drawn["target"][worst.indices].tolist()
    assert record["class_names"][999] == "kind 999"
    assert record["step"] == 12


def test_the_rarest_mistakes_are_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    validate(ClassReport(), tmp_path)
    whole = read(tmp_path)
    monkeypatch.setattr(class_report, "_MOST_PAIRS", 3)
    validate(ClassReport(), tmp_path)
    cut = read(tmp_path)
    assert (cut["samples"], cut["right"]) == (whole["samples"], whole["right"])
    assert cut["pairs"] == whole["pairs"][:3]


def test_an_image_is_written_as_it_is_but_for_its_range(tmp_path: Path) -> None:
    validate(ClassReport(num_mistakes=1), tmp_path)
    [mistake] = read(tmp_path)["mistakes"]
    drawn = draw()
    [row] = [number for number, loss in enumerate(drawn["loss"].tolist()) if loss == mistake["loss"]]
    image = drawn["inputs"][row]
    scaled = (255 * (image - image.min()) / (image.max() - image.min())).round().to(torch.uint8)
    png = b64decode(mistake["image"])
    start = png.index(b"IDAT") + 4
    pixels = zlib.decompress(png[start : png.index(b"IEND") - 8])
    rows = torch.tensor([*pixels], dtype=torch.uint8).view(4, 1 + 6 * 3)
    assert (rows[:, 0] == 0).all()
    assert torch.equal(rows[:, 1:].reshape(4, 6, 3).permute(2, 0, 1), scaled)


def test_outputs_without_classes_write_nothing(tmp_path: Path) -> None:
    report = ClassReport()
    trainer: Any = SimpleNamespace(sanity_checking=False)
    report.on_validation_epoch_start(trainer, trainer)
    report.on_validation_batch_end(trainer, trainer, None, {}, 0)
    report.on_validation_epoch_end(trainer, trainer)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ValueError, match="num_mistakes is -1; it is 0 or more; set num_mistakes=24"):
        ClassReport(num_mistakes=-1)


def test_no_mistakes_are_kept_where_none_are_wanted(tmp_path: Path) -> None:
    validate(ClassReport(num_mistakes=0), tmp_path)
    record = read(tmp_path)
    assert record["mistakes"] == []
