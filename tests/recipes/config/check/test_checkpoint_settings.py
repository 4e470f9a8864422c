"""Settings of checkpoints: each mistake with its exact message, reported before anything is built."""

from pathlib import Path

import pytest
from support import composed_config, run_train

from recipes.config import compose_and_check

MESSAGES = {
    "save_every=0": ("save_every=0: it must be at least 1; type save_every=<at least 1>"),
    "save_every_minutes=0": ("save_every_minutes=0: it must be above 0; type save_every_minutes=<above 0>"),
    "save_every_minutes=soon": (
        "save_every_minutes=soon: it takes a number or null; type save_every_minutes=<number or null>"
    ),
    "checkpoint.keep_every=0": (
        "checkpoint.keep_every=0: it must be at least 1; type checkpoint.keep_every=<at least 1>"
    ),
    "checkpoint.keep_every=2.5": (
        "checkpoint.keep_every=2.5: it takes a whole number or null; type checkpoint.keep_every=<whole number or null>"
    ),
    "checkpoint.keep_best=-1": (
        "checkpoint.keep_best=-1: it must be at least 0; type checkpoint.keep_best=<at least 0>"
    ),
    "checkpoint.mode=up": ("checkpoint.mode=up: it takes min or max; type checkpoint.mode=<min or max>"),
    "checkpoint.on_save_error=ignore": (
        "checkpoint.on_save_error=ignore: it takes continue or stop; type checkpoint.on_save_error=<continue or stop>"
    ),
    "checkpoint.keep_lats=3": (
        "checkpoint.keep_lats=3: there is no 'checkpoint.keep_lats'; type checkpoint.keep_last=3"
    ),
}


@pytest.mark.parametrize("typed", MESSAGES)
def test_a_mistake_about_checkpoints_is_one_sentence_that_says_what_to_type(typed: str) -> None:
    _, mistakes = compose_and_check([typed])
    assert [str(mistake) for mistake in mistakes] == [MESSAGES[typed]]


def test_a_mistake_about_checkpoints_ends_with_exit_code_2_and_leaves_no_folder(
    tmp_path: Path,
) -> None:
    done = run_train(["checkpoint.mode=up"], folder=tmp_path)
    assert done.returncode == 2
    assert "type: checkpoint.mode=<min or max>" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_steps_and_minutes_may_both_be_null_and_a_minute_may_be_a_fraction() -> None:
    config = composed_config("save_every=null", "save_every_minutes=null")
    assert (config["checkpoint"]["save_every"], config["checkpoint"]["save_every_minutes"]) == (
        None,
        None,
    )
    config = composed_config("save_every_minutes=0.02")
    assert config["checkpoint"]["save_every_minutes"] == 0.02


def test_invalid_choices_and_numbers_out_of_range_are_reported_together() -> None:
    typed = ["checkpoint.mode=up", "checkpoint.keep_last=0", "checkpoint.keep_every=-1.5"]
    typed += ["optimizer.betas=x"]
    _, mistakes = compose_and_check(typed)
    assert sorted(mistake.setting for mistake in mistakes) == sorted(typed)


def test_a_setting_of_checkpoints_beside_a_typed_null_is_answered() -> None:
    _, mistakes = compose_and_check(["save_every=null", "checkpoint.keep_every=10"])
    assert [str(mistake) for mistake in mistakes] == [
        "checkpoint.keep_every=10 save_every=null: the run saves no checkpoint, so it has no effect;"
        " type the same command without it, or save_every=<optimizer steps> instead of save_every=null"
    ]
    for typed in (
        ["save_every=null", "save_every_minutes=5", "checkpoint.keep_every=10"],
        ["save_every=null", "checkpoint.verify_hashes=false"],
        ["debug=overfit", "checkpoint.keep_every=10"],  # beside a whole command
    ):
        assert compose_and_check(typed)[1] == []
