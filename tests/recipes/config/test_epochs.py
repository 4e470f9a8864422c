"""A length in passes: what is typed, what stands for it until the data is counted, and how many steps it is."""

from pathlib import Path

import pytest
from support import composed_config

from recipes.config import compose_and_check
from recipes.config.epochs import UNCOUNTED, count_steps, write_epochs


def test_every_sample_is_read_at_least_as_often_as_the_passes_say() -> None:
    assert count_steps("1", num_samples=100, global_batch_size=16) == 7
    assert count_steps("3", num_samples=100, global_batch_size=25) == 12
    assert count_steps("0.1", num_samples=30, global_batch_size=1) == 3  # 0.1 * 30 is 3.0000000000000004 as floats
    assert count_steps(".5", num_samples=1, global_batch_size=8) == 1


@pytest.mark.parametrize("typed", ["trainer.max_epochs=3", "+trainer.max_epochs=3", "++trainer.max_epochs=3"])
def test_the_passes_of_lightning_are_ours(typed: str) -> None:
    assert write_epochs(typed) == "trainer.max_steps=3epochs"


@pytest.mark.parametrize("typed", ["trainer.max_steps=3epochs", "'trainer.max_steps=3 epochs'", "trainer.max_epochs=3"])
def test_the_schedule_waits_for_the_count(typed: str) -> None:
    run, mistakes = compose_and_check([typed.strip("'"), "warmup_steps=5000", "scheduler=wsd"])
    assert run is not None
    assert not mistakes  # warm-up and decay may fit into three passes
    assert run.epochs == "3"
    assert run.config["trainer"]["max_steps"] == run.config["scheduler"]["num_steps"] == UNCOUNTED
    assert run.list_followers("trainer.max_steps") == ["trainer.max_steps", "scheduler.num_steps"]


def test_the_last_of_steps_and_passes_counts() -> None:
    assert composed_config("trainer.max_epochs=3", "trainer.max_steps=20")["scheduler"]["num_steps"] == 20


def test_no_pass_is_no_run() -> None:
    _, [mistake] = compose_and_check(["trainer.max_steps=0epochs"])
    assert str(mistake) == "trainer.max_steps=0epochs: a run takes at least one step; type trainer.max_steps=1epoch"


def test_a_setting_computed_from_the_steps_is_named(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    mine = "# @package _global_\nwarmup_steps: ${steps_of:${trainer.max_steps},1,10}\n"
    (tmp_path / "recipe/mine.yaml").write_text(mine)
    mine = [f"hydra.searchpath=[file://{tmp_path}]", "recipe=mine"]
    assert compose_and_check([*mine, "trainer.max_steps=50"])[1] == []
    _, [mistake] = compose_and_check([*mine, "trainer.max_steps=1epoch"])
    assert mistake.reason.startswith("warmup_steps=${steps_of:")
    assert mistake.fix == "trainer.max_steps=<optimizer steps>, or warmup_steps=<a number>"
