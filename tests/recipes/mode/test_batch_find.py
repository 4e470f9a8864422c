"""The search for the largest micro-batch: its order, and a real one against a limit of memory on two ranks."""

import json
import re
from pathlib import Path

import pytest
from support import run_train

from recipes.mode.batch_find import Trial, search


@pytest.mark.parametrize(
    ("first", "largest", "tried"),
    [(2, 4, [4, 8]), (0, 4, [1, 2, 4, 8]), (4, 2, [16, 8, 4, 2]), (4, 16, [16]), (3, 0, [8, 4, 2, 1])],
)
def test_sizes_are_tried_from_the_estimate_to_the_first_that_changes_the_answer(
    first: int, largest: int, tried: list[int]
) -> None:
    trials = list(search([1, 2, 4, 8, 16], first, lambda size: Trial(size=size, fits=size <= largest)))
    assert [trial.size for trial in trials] == tried


SETTINGS = [
    "mode=batch_find", "data=random_tokens", "model.vocab_size=512", "model.num_layers=2", "seq_len=64",
    "model.max_seq_len=64", "model.hidden_size=64", "model.num_heads=2", "trainer.accelerator=cpu",
    "global_batch_size=64",
]  # fmt: skip


def test_two_ranks_find_the_largest_that_fits_and_the_next_one_exceeds_the_limit(tmp_path: Path) -> None:
    limit = 0.02  # GiB; 16 samples on a rank need about 0.015, all 32 about twice that
    done = run_train(
        [*SETTINGS, "strategy=ddp", "trainer.devices=2", f"plan.memory_gib={limit}", f"mode.path={tmp_path}"],
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "logs").exists()
    found = json.loads((tmp_path / "batch_find.json").read_text())
    tried = {trial["micro_batch_size"]: trial for trial in found["tried"]}
    best = found["micro_batch_size"]
    assert tried[best]["peak_gib"] <= 0.95 * limit < tried[2 * best]["peak_gib"]
    assert f"suggestion: micro_batch_size={best}" in done.stdout
    assert "global_batch_size=64 stays" in done.stdout


def test_where_nothing_fits_the_exit_code_is_that_of_a_full_memory(tmp_path: Path) -> None:
    done = run_train([*SETTINGS, "plan.memory_gib=0.001"], folder=tmp_path)
    assert done.returncode == 71
    assert re.search(r"not even one sample fits into 0.00 GiB: the same command with mode=plan", done.stdout)
