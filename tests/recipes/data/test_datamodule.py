"""The stream of samples is a function of (seed, position), however ranks and micro-batches split it."""

import functools
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from streams import open_stream
from support import MaskedTokens, RaggedTokens
from vision_language_cases import Illustrated

from recipes.build import build
from recipes.config import compose_and_check
from recipes.data import datamodule
from recipes.data.text.token_cache import SPLIT_TEXT
from recipes.data.text_files import TextFiles
from recipes.errors import ConfigError
from recipes.tokenizer.bytes import Bytes


class Numbered(MaskedTokens):
    """Samples that carry their own index."""

    targets_per_sample = 1  # type: ignore[assignment]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": torch.tensor(index), "targets": torch.tensor(index)}


NUMBERED = Numbered(num_samples=37, seq_len=4, vocab_size=8)
stream = functools.partial(open_stream, NUMBERED, eval_samples=5)


def take(batches: Any, number: int) -> list[int]:
    """Return the sample indices of the next micro-batches."""
    return [index for _ in range(number) for index in next(batches)["inputs"].tolist()]


def test_the_order_is_the_same_for_every_split_into_micro_batches() -> None:
    orders = [take(stream(micro_batch_size=8 // n, accumulate=n)[1], 6 * n) for n in (1, 2, 4, 8)]
    assert len(orders[0]) == 48
    assert all(order == orders[0] for order in orders)


def test_two_ranks_share_the_stream_of_one() -> None:
    alone = take(stream(micro_batch_size=8, accumulate=1)[1], 4)
    ranks = [stream(micro_batch_size=2, accumulate=2, world_size=2, rank=rank)[1] for rank in (0, 1)]
    together = [index for _ in range(8) for batches in ranks for index in take(batches, 1)]
    assert together == alone


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_resumed_at_a_position_continues_with_the_next_sample(num_workers: int) -> None:
    whole = take(stream(micro_batch_size=4, accumulate=2, num_workers=num_workers)[1], 12)
    first, batches = stream(micro_batch_size=4, accumulate=2, num_workers=num_workers)
    head = take(batches, 6)  # three windows of two
    position = first.state_dict()["position"]
    assert position == 24
    tail = take(stream(micro_batch_size=8, accumulate=1, position=position)[1], 3)
    assert head + tail == whole


def test_the_position_advances_only_at_the_end_of_a_window() -> None:
    data, batches = stream(micro_batch_size=2, accumulate=4)
    positions = []
    for _ in range(9):
        next(batches)
        positions.append(data.position)
    assert positions == [0, 0, 0, 8, 8, 8, 8, 16, 16]


def test_every_sample_comes_once_before_any_comes_twice() -> None:
    order = take(stream(micro_batch_size=1, accumulate=1)[1], 74)
    assert sorted(order[:37]) == list(range(37))
    assert sorted(order[37:]) == list(range(37))
    assert order[:37] != order[37:]


def test_the_global_random_state_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    take(stream(micro_batch_size=4, accumulate=1, num_workers=2)[1], 5)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_position_in_other_data_logs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    data, _ = stream(micro_batch_size=2, accumulate=1)
    logging.getLogger("lightning_recipes").propagate = True
    data.load_state_dict(data.state_dict() | {"position": 8})
    assert caplog.records == []
    data.load_state_dict(data.state_dict() | {"seed": 4, "num_samples": 36})
    [record] = caplog.records
    assert "seed 4 -> 3, num_samples 36 -> 37" in record.getMessage()
    assert data.position == 8


def test_other_validation_samples_are_named_with_what_it_means_for_the_best_checkpoint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data, _ = stream(micro_batch_size=2, accumulate=1)
    other, _ = stream(micro_batch_size=2, accumulate=1, eval_samples=6)
    logging.getLogger("lightning_recipes").propagate = True
    data.load_state_dict(data.state_dict() | {"seed": 4})
    assert "validation" not in caplog.text, "the order of the training data has no part in it"
    caplog.clear()
    data.load_state_dict(other.state_dict())
    [record] = caplog.records
    assert "The validation split differs from that of the checkpoint" in record.getMessage()
    assert "`best` compares the two" in record.getMessage()


def test_texts_of_an_additional_validation_set_that_are_trained_on_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def source_of(texts: list[tuple[int, int, int]]) -> Any:
        source = Numbered(num_samples=37, seq_len=4, vocab_size=8)
        source.split_texts = lambda: np.array(texts, dtype=SPLIT_TEXT)  # type: ignore[attr-defined]
        return source

    data, _ = stream(micro_batch_size=2, accumulate=1)
    data.source = source_of([(1, 9, 9), (2, 0, 9), (3, 4, 9)])  # trained on, held out, and cut
    data.eval_sources = {"mine": source_of([(1, 0, 9), (2, 0, 9), (3, 0, 9), (4, 9, 9)])}
    logging.getLogger("lightning_recipes").propagate = True
    data.prepare_data()
    data.prepare_data()
    [record] = caplog.records
    assert "2 of the 3 validation texts of eval_data.mine are also trained on" in record.getMessage()


def test_all_of_an_additional_validation_set_that_is_not_trained_on_is_used(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab" * 50)
    settings: Any = {"tokenizer": Bytes(), "seq_len": 4, "val_fraction": 0.05, "cache_dir": str(tmp_path / "cache")}
    source = TextFiles(path=str(tmp_path / "a.txt"), **settings)
    data, _ = stream(micro_batch_size=2, accumulate=1)
    data.eval_sources = {"mine": source, "other": Numbered(num_samples=3, seq_len=4, vocab_size=8)}  # type: ignore[dict-item]
    data.hold_out(["mine", "other"])
    source.prepare()
    assert source.describe().startswith("1 document, 0 training and 101 validation tokens")
    assert len(source.val()) == 25


def test_five_validation_samples_are_spread_over_the_split() -> None:
    data, _ = stream(micro_batch_size=2, accumulate=1)
    indices = [i for batch in data.val_dataloader() for i in batch["inputs"].tolist()]
    assert indices == [0, 7, 14, 22, 29]


@pytest.mark.parametrize(
    ("eval_samples", "said"),
    [(5, "; each validation reads 5 of 37 samples (eval_samples=null: all)"), (37, ""), (None, "")],
)
def test_a_part_of_the_validation_samples_is_said_to_be_one(eval_samples: int | None, said: str) -> None:
    module = open_stream(NUMBERED, eval_samples=eval_samples)[0]
    assert module.describe_validation(module.source) == said


@pytest.mark.parametrize("num_workers", [0, 2])
def test_one_batch_repeats_for_every_split_into_micro_batches(
    num_workers: int,
) -> None:
    first = take(stream(micro_batch_size=8, accumulate=1)[1], 1)
    for accumulate in (1, 2, 4):
        plan = {
            "micro_batch_size": 8 // accumulate,
            "accumulate": accumulate,
            "num_workers": num_workers,
        }
        assert take(stream(**plan, overfit_batches=1)[1], 5 * accumulate) == 5 * first


def test_two_ranks_share_the_repeated_batches_of_one() -> None:
    alone = take(stream(micro_batch_size=8, accumulate=1, overfit_batches=2)[1], 4)
    assert alone[:16] == alone[16:]
    assert alone[:8] != alone[8:16]
    ranks = [stream(micro_batch_size=2, accumulate=2, world_size=2, rank=rank, overfit_batches=2)[1] for rank in (0, 1)]
    assert [index for _ in range(8) for batches in ranks for index in take(batches, 1)] == alone


def test_a_repeated_stream_resumes_with_the_next_of_its_batches() -> None:
    whole = take(stream(micro_batch_size=8, accumulate=1, overfit_batches=3)[1], 9)
    data, batches = stream(micro_batch_size=4, accumulate=2, overfit_batches=3)
    head = take(batches, 10)
    assert data.state_dict()["position"] == 40
    tail = stream(micro_batch_size=2, accumulate=4, overfit_batches=3, position=40)[1]
    assert head + take(tail, 16) == whole


def test_validation_is_on_the_repeated_batches() -> None:
    data, batches = stream(micro_batch_size=4, accumulate=1, overfit_batches=2, eval_samples=None)
    validated = [i for batch in data.val_dataloader() for i in batch["inputs"].tolist()]
    assert validated == take(batches, 2)


def test_samples_of_step_names_the_samples_of_the_repeated_batch() -> None:
    data, batches = stream(micro_batch_size=4, accumulate=1, overfit_batches=1)
    samples = take(batches, 3)[-4:]
    assert [entry["sample"] for entry in data.samples_of_step(12)] == samples


def test_a_stream_that_is_moved_continues_at_the_new_position() -> None:
    expected = take(stream(micro_batch_size=4, accumulate=2)[1], 12)
    data, batches = stream(micro_batch_size=4, accumulate=2)
    take(batches, 2)
    data.skip_batches(2)
    assert take(batches, 2) == expected[24:32]
    data.move_to(8)
    assert data.position == 8
    assert take(batches, 2) == expected[8:16]
    assert data.position == 16


def test_a_position_of_the_full_stream_in_a_repeated_one_logs_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data, _ = stream(micro_batch_size=2, accumulate=1, overfit_batches=1)
    logging.getLogger("lightning_recipes").propagate = True
    data.load_state_dict(data.state_dict() | {"position": 8})
    assert not [record for record in caplog.records if "now refers to" in record.getMessage()]
    data.load_state_dict(data.state_dict() | {"period": None})
    assert "period None -> 2" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(("cores", "workers", "num_lines"), [(1, 1, 1), (3, 3, 1), (4, 4, 0), (64, 4, 0)])
def test_a_rank_on_a_gpu_starts_no_more_loader_processes_than_it_has_cores(
    cores: int, workers: int, num_lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A SLURM task often has one core of a machine of a hundred."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(datamodule.LOGGER, "propagate", True)
    caplog.set_level(logging.INFO, datamodule.LOGGER.name)
    datamodule._choose_workers.cache_clear()
    assert [datamodule._choose_workers() for _ in range(2)] == [workers, workers]
    datamodule._choose_workers.cache_clear()
    assert len(caplog.messages) == num_lines
    assert all(f"{cores} of the machine's 128 cores" in line for line in caplog.messages)
    assert all("launcher.cpus_per_task=8" in line for line in caplog.messages)


@pytest.mark.parametrize(("micro_batch_size", "world_size"), [(8, 1), (2, 1), (2, 2)])
def test_tokens_of_a_step_are_those_of_its_samples_whatever_the_split(micro_batch_size: int, world_size: int) -> None:
    accumulate = 8 // (micro_batch_size * world_size)
    source = RaggedTokens(num_samples=37, seq_len=100, vocab_size=8)
    for rank in range(world_size):
        data, _ = stream(micro_batch_size=micro_batch_size, accumulate=accumulate, world_size=world_size, rank=rank)
        data.source = source
        batches = iter(data.train_dataloader())
        for first in (0, 8):
            window = [next(batches) for _ in range(accumulate)]
            lengths = source.lengths[data._order(source).indices(np.arange(first, first + 8))]
            assert sum(batch["num_tokens"] for batch in window) == lengths.sum()
            assert sum(batch["num_token_pairs"] for batch in window) == (lengths**2).sum()


def test_images_of_a_step_are_those_of_the_samples_of_all_ranks() -> None:
    source = Illustrated(num_samples=37, seq_len=32)
    counted = []
    for rank in range(2):
        data, _ = stream(micro_batch_size=2, accumulate=2, world_size=2, rank=rank)
        data.source = source
        batches = iter(data.train_dataloader())
        of_rank = [next(batches) for _ in range(8)]  # four steps
        samples = data._order(source).indices(np.arange(32))
        assert sum(batch["num_read_images"] for batch in of_rank) == source.count_images(samples).sum()
        counted.append([batch["num_read_images"] for batch in of_rank])
        assert any(batch["num_images"].sum() != batch["num_read_images"] for batch in of_rank), "those of all ranks"
    assert counted[0] == counted[1]


@pytest.mark.parametrize(
    ("train", "val", "doubts"),
    [
        ("{_target_: dataset_cases.Whatever, sample: [[1.0], 3]}", None, ["data.train: all 5 samples of train", "3"]),
        (
            None,
            "{_target_: dataset_cases.Whatever, sample: [[1.0], 0], length: 4000}",
            ["data.val: 1,000 samples tried, all of val", "0"],
        ),
        (None, None, []),
        ("{_target_: dataset_cases.Whatever, sample: [[1.0], -100]}", None, []),  # without a loss
    ],
)
def test_targets_that_are_all_the_same_are_doubted(train: str | None, val: str | None, doubts: list[str]) -> None:
    usual = "{_target_: dataset_cases.Labelled, kind: classes}"
    typed = ["task=classification", "data=dataset", f"data.train={train or usual}", f"data.val={val or usual}"]
    composed, _ = compose_and_check([*typed, "model._target_=dataset_cases.OfThreeClasses", "metrics=none"])
    assert composed is not None
    data = build(composed).data
    data.prepare_data()
    found = [str(doubt) for doubt in data.find_doubts()]
    assert found == [
        f"{start} have the target {target}: a model that ignores its inputs is right; type data with other targets,"
        " too, or the right column as targets"
        for start, target in [doubts] * bool(doubts)
    ]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["ant", "cat"], "data: its class 1 is 'cat', and the run was trained on 'bee' there; type the data with the"),
        (["ant"], "data: it has 1 class, and the run was trained on 2; type the data with the classes of the run, or"),
    ],
)
def test_classes_other_than_those_of_the_checkpoint_are_refused(
    names: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, _ = stream()
    monkeypatch.setattr(NUMBERED, "class_names", ["ant", "bee"], raising=False)
    state = data.state_dict()
    data.load_state_dict(state)
    monkeypatch.setattr(NUMBERED, "class_names", names)
    with pytest.raises(ConfigError) as resumed:
        data.load_state_dict(state)
    data.restore_names(state)
    with pytest.raises(ConfigError) as evaluated:
        data.prepare_split("val")
    assert str(resumed.value) == str(evaluated.value)
    assert str(resumed.value).startswith(said)


def test_the_scaling_of_a_checkpoint_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    data, _ = stream()
    used: list[Any] = []
    monkeypatch.setattr(NUMBERED, "statistics", {"mean": [1.0]}, raising=False)
    monkeypatch.setattr(NUMBERED, "use_statistics", used.append, raising=False)
    state = data.state_dict()
    data.restore_names(state)
    data.load_state_dict(state)
    assert used == [{"mean": [1.0]}] * 2
