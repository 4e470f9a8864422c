"""The learning rate follows the batch size from a reference point: arithmetic, mistakes, resume and sweep."""

import json
import math
from pathlib import Path

import pytest
import yaml
from support import TINY, read_metrics, run_train

from recipes.config import compose_and_check
from recipes.config.compose import compose_run, freeze
from recipes.lr_scaling import is_positive, scaled_lr

REFERENCE = ("lr_scaling.base_lr=3e-4", "lr_scaling.base_batch_size=32")


def mistakes(*overrides: str) -> list[str]:
    _, found = compose_and_check(overrides)
    return [str(mistake) for mistake in found]


def lr(*overrides: str) -> float:
    composed, found = compose_and_check(overrides)
    assert composed is not None
    assert not found
    rate: float = composed.config["optimizer"]["lr"]
    return rate


def test_four_times_the_batch_size_is_four_times_the_rate_with_linear_and_twice_with_sqrt() -> None:
    assert scaled_lr("linear", 0.1, 256, 1024) == 0.4
    assert scaled_lr("sqrt", 3e-4, 32, 128) == 6e-4


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
def test_the_reference_point_keeps_its_rate_to_the_bit(rule: str) -> None:
    assert scaled_lr(rule, 0.3, 48, 48) == 0.3


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
def test_scaling_there_and_back_returns_the_same_rate(rule: str) -> None:
    there = scaled_lr(rule, 1e-3, 24, 96)
    assert math.isclose(scaled_lr(rule, there, 96, 24), 1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, 0, -1, True, "3", float("nan"), float("inf")])
def test_a_value_that_is_not_a_positive_number_gives_no_learning_rate(value: object) -> None:
    assert not is_positive(value)
    assert scaled_lr("sqrt", value, 32, 32) is None
    assert scaled_lr("sqrt", 1e-3, value, 32) is None
    assert scaled_lr("sqrt", 1e-3, 32, value) is None


@pytest.mark.parametrize(("rule", "rate"), [("sqrt", 6e-4), ("linear", 1.2e-3)])
def test_a_batch_of_128_from_a_reference_of_32(rule: str, rate: float) -> None:
    assert math.isclose(lr(f"lr_scaling={rule}", *REFERENCE, "global_batch_size=128"), rate)


def test_the_rule_wins_over_the_rate_of_recipe_and_optimizer() -> None:
    overrides = ("recipe=quickstart", "optimizer=sgd", "lr_scaling=linear", *REFERENCE)
    assert lr(*overrides, "global_batch_size=32") == 3e-4


def test_without_a_rule_the_rate_is_that_of_the_optimizer() -> None:
    assert lr("recipe=single_fp32", "optimizer=adamw", "global_batch_size=1024") == 6e-4


def test_a_reference_that_is_missing_is_named_by_both_its_numbers() -> None:
    assert mistakes("lr_scaling=sqrt") == [
        "no lr_scaling.base_lr: lr_scaling=sqrt starts from a known good learning rate;"
        " type lr_scaling.base_lr=<above 0>",
        "no lr_scaling.base_batch_size: lr_scaling=sqrt starts from a known good batch size;"
        " type lr_scaling.base_batch_size=<above 0>",
    ]


def test_an_invalid_reference_point_is_reported_together_with_other_mistakes() -> None:
    overrides = ("lr_scaling.base_lr=-1", "lr_scaling.base_batch_size=many", "seq_len=4000")
    assert mistakes("lr_scaling=linear", *overrides) == [
        "lr_scaling.base_lr=-1: the learning rate must be a positive number; type lr_scaling.base_lr=<above 0>",
        "lr_scaling.base_batch_size=many: the batch size must be a positive number;"
        " type lr_scaling.base_batch_size=<above 0>",
        "seq_len=4000: the model accepts at most model.max_seq_len=128 tokens; type seq_len=128",
    ]


def test_a_learning_rate_set_in_addition_to_a_rule_is_rejected() -> None:
    overrides = ("lr_scaling=sqrt", *REFERENCE, "global_batch_size=128", "optimizer.lr=1e-3")
    assert mistakes(*overrides) == [
        "optimizer.lr=0.001: lr_scaling=sqrt makes it 0.0006 at global_batch_size=128;"
        " type the same command without optimizer.lr, or lr_scaling=none to set it yourself"
    ]


def test_a_reference_point_without_a_rule_is_rejected() -> None:
    assert mistakes("lr_scaling.base_lr=3e-4") == [
        "lr_scaling.base_lr=3e-4: no rule uses it with lr_scaling=none; type lr_scaling=sqrt lr_scaling.base_lr=3e-4"
        " lr_scaling.base_batch_size=<the batch size that it was tuned for>"
    ]


def test_an_unknown_rule_is_rejected() -> None:
    assert mistakes("lr_scaling=sqrt", *REFERENCE, "lr_scaling.rule=cubic") == [
        "lr_scaling.rule=cubic: the rules are linear sqrt; type lr_scaling=linear or lr_scaling=sqrt"
    ]


def frozen_run(folder: Path, *overrides: str) -> Path:
    """A run's folder with the config and the overrides that it was started with."""
    folder.mkdir()
    composed = compose_run([*overrides, f"hydra.run.dir={folder}"])
    freeze(composed)
    (folder / "environment.json").write_text(json.dumps({"overrides": list(overrides)}))
    return folder


def test_the_frozen_config_holds_the_number_and_a_resume_keeps_it(tmp_path: Path) -> None:
    overrides = ("lr_scaling=sqrt", *REFERENCE, "global_batch_size=128")
    run = frozen_run(tmp_path / "run", *overrides)
    assert yaml.safe_load((run / "config.yaml").read_text())["optimizer"]["lr"] == 6e-4
    assert compose_run([f"resume={run}"]).config["optimizer"]["lr"] == 6e-4
    larger = compose_run([f"resume={run}", "global_batch_size=512"]).config
    assert math.isclose(larger["optimizer"]["lr"], 1.2e-3)
    own = compose_run([f"resume={run}", "lr_scaling=none", "optimizer.lr=1e-5"]).config
    assert own["optimizer"]["lr"] == 1e-5


def test_a_frozen_config_run_again_with_another_batch_says_that_the_rate_stays(
    tmp_path: Path,
) -> None:
    run = frozen_run(tmp_path / "run", "lr_scaling=sqrt", *REFERENCE, "global_batch_size=128")
    _, found = compose_and_check(["global_batch_size=32"], config_folder=run)
    assert [str(mistake) for mistake in found] == [
        "optimizer.lr=0.0006: lr_scaling=sqrt makes it 0.0003 at global_batch_size=32;"
        " type optimizer.lr=0.0003, or lr_scaling.rule=none to set it yourself"
    ]
    _, found = compose_and_check(["global_batch_size=32", "lr_scaling.rule=none"], config_folder=run)
    assert not found


def test_in_a_sweep_the_rate_follows_each_batch(tmp_path: Path, text_folder: str) -> None:
    overrides = [*TINY, f"data.path={text_folder}", "trainer.max_steps=1", "scheduler=constant"]
    overrides += ["warmup_steps=0", "save_every=null", "lr_scaling=linear", "global_batch_size=8,16"]
    overrides += ["lr_scaling.base_lr=1e-3", "lr_scaling.base_batch_size=8"]
    done = run_train(["-m", *overrides, f"hydra.sweep.dir={tmp_path}/sweep"])
    assert done.returncode == 0, done.stdout + done.stderr
    rates = {
        yaml.safe_load(config.read_text())["global_batch_size"]: read_metrics(config.parent)[0]["lr"]
        for config in (tmp_path / "sweep").rglob("config.yaml")
        if (config.parent / "metrics.csv").is_file()
    }
    assert rates == {8: 1e-3, 16: 2e-3}
