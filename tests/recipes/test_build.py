"""Mistakes that only the machine can reveal are reported before anything is built, in the same three clauses."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from support import TINY, composed_config, resolved

from recipes.build import _find_other_data, _make_member, _make_schedule, _make_trainer, build
from recipes.config import ranks
from recipes.config.instantiate import make
from recipes.config.resolved import ResolvedRun
from recipes.errors import ConfigError
from recipes.scheduler import warmup_cosine

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@needs_no_gpu
def test_a_requested_gpu_that_does_not_exist_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        build(resolved(composed_config("trainer.accelerator=gpu"), tmp_path))
    assert caught.value.fix == "trainer.accelerator=auto"


def test_what_the_constructor_of_a_metric_raises_is_a_config_error_whatever_its_type() -> None:
    with pytest.raises(ConfigError, match="torch.Generator says: ") as caught:
        _make_member("metrics.mine", {"_target_": "torch.Generator", "device": "nope"})  # a RuntimeError
    assert caught.value.fix == "'~metrics.mine'"


def test_building_creates_no_weights_and_reads_no_data(tmp_path: Path) -> None:
    run = build(resolved(composed_config("model=llama_8b", "recipe=single_bf16"), tmp_path))
    assert list(run.task.parameters()) == []
    assert list(tmp_path.iterdir()) == []


def test_a_wait_for_data_may_take_three_quarters_of_the_time_that_slurm_leaves_to_save(tmp_path: Path) -> None:
    slurm = ("launcher=slurm", "launcher.signal_seconds=300")
    for overrides, seconds in (((), 120), (slurm, 225)):
        run = build(resolved(composed_config("model=gpt2_nano", "recipe=single_bf16", *overrides), tmp_path))
        [saver] = run.trainer.checkpoint_callbacks
        assert saver.wait_seconds == seconds  # type: ignore[attr-defined]


def test_a_tokenizer_larger_than_the_model_is_found_before_training(tmp_path: Path, text_folder: str) -> None:
    from recipes.mode.fit import fit

    tiny = [override for override in TINY if not override.startswith("tokenizer")]
    overrides = [*tiny, f"data.path={text_folder}", "tokenizer=huggingface", "tokenizer.name=x"]
    config = composed_config(*overrides)
    config["data"]["tokenizer"] = {"_target_": "recipes.tokenizer.bytes.Bytes"}
    config["data"]["vocab_size"] = 200
    with pytest.raises(ConfigError) as caught:
        fit(build(resolved(config, tmp_path)))
    assert caught.value.fix.startswith("model.vocab_size=257 ")


@pytest.mark.parametrize(
    "strategy", ["strategy=ddp", "strategy=hsdp", "strategy=deepspeed_stage_2"], ids=["ddp", "hsdp", "deepspeed"]
)
def test_a_slurm_task_that_sees_one_gpu_trains_on_it_whatever_its_local_rank(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`srun --gpus-per-task=1`: four ranks of a node, each with a GPU of the index 0."""
    config = composed_config(strategy, "global_batch_size=8")
    environ = {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "4",
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "3",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "node0",
        "SLURM_JOB_ID": "7",
        "SLURM_GPUS_PER_TASK": "1",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # the Trainer sets it, and later runs of this process read it
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "DS_ACCELERATOR", "LOCAL_SIZE"):
        monkeypatch.setenv(name, "")  # what DeepSpeed and its strategy set is gone after this test
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(ranks, "num_gpus", lambda: 1)
    run = build(resolved(config, tmp_path))
    engine: Any = run.trainer.strategy
    assert (engine.local_rank, engine.root_device) == (3, torch.device("cuda", 0))
    assert (run.trainer.world_size, engine.num_processes) == (4, 4)
    assert run.accumulation.micro_batch_size == 2
    if strategy.startswith("strategy=deepspeed"):
        engine._set_node_environment_variables()
        assert os.environ["LOCAL_RANK"] == "0", "DeepSpeed takes the GPU of this index"


@pytest.mark.parametrize("partial", [False, True])
def test_text_that_looks_like_a_reference_reaches_a_constructor_as_it_is(partial: bool) -> None:
    arguments = {"a": "${HOME}", "l": ["${x}", {"y": "z${q}"}], "d": {"k": "\\${b}"}, "p": "\\x $ {a}"}
    made = make({"_target_": "builtins.dict", "_partial_": partial} | arguments)
    assert (made() if partial else made) == arguments


def test_an_argument_that_lightning_rejects_is_a_mistake() -> None:
    node = {"_target_": "lightning.pytorch.Trainer", "max_steps": 3, "benchmark": True, "deterministic": "warn"}
    with pytest.raises(ConfigError, match=r"one of trainer\.max_steps, trainer\.benchmark"):
        _make_trainer(
            node, accelerator="cpu", logger=False, max_epochs="many", barebones=True, enable_progress_bar=True
        )


def test_the_schedule_is_the_function_itself_with_the_settings_of_its_node() -> None:
    node = composed_config("scheduler=warmup_cosine", "warmup_steps=10", "trainer.max_steps=100")["scheduler"]
    schedule = _make_schedule(node)
    assert schedule.func is warmup_cosine, "Hydra's wrapper would check what it may run, at every step"  # type: ignore[attr-defined]
    checked = make(node)
    assert [schedule(step) for step in range(100)] == [checked(step) for step in range(100)]


def test_additional_validation_text_that_is_trained_on_or_divided_as_typed_keeps_its_split(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a")
    (tmp_path / "link.txt").symlink_to(tmp_path / "train.txt")
    train = {"_target_": "text_files", "path": str(tmp_path / "train.txt")}
    stdlib, hub = {"_target_": "stdlib_text"}, {"_target_": "documents", "path": "hf://a/b", "split": "train"}

    def is_whole(node: dict[str, Any], *typed: str, data: dict[str, Any] = train) -> bool:
        config = {"data": data, "eval_data": {"mine": node, "none": None}}
        run = ResolvedRun(config=config, choices={}, run_folder=Path(), overrides=list(typed))
        return _find_other_data(run, None) == ["eval_data.mine"]

    other = {"_target_": "text_files", "path": "other.txt"}
    assert is_whole(other, "eval_data.mine.path=other.txt", "eval_data.others.val_fraction=0.1")
    assert not is_whole(other, "eval_data.mine.val_fraction=0.05")
    assert not is_whole(other, "+eval_data={mine: {val_fraction: 0.05}}")
    assert not is_whole(other | {"val_path": "val.txt"})
    assert not is_whole({"_target_": "documents", "path": str(tmp_path / "link.txt"), "split": "train"})
    assert not is_whole(train, data={"_target_": "mixture", "sources": {"a": train}})
    folder = train | {"path": str(tmp_path)}
    assert not is_whole(train, data=folder)
    assert not is_whole(folder)
    assert not is_whole(train, data=train | {"path": f"{tmp_path}/t*.txt"})
    assert is_whole(train | {"path": f"{tmp_path}/val.txt"}, data=train | {"path": f"{tmp_path}/t*.txt"})
    assert is_whole(train | {"path": f"{tmp_path}2"}, data=folder)
    assert is_whole(stdlib)
    assert not is_whole(stdlib, data=stdlib)
    assert is_whole(hub | {"split": "test"}, data=hub)
    assert not is_whole(hub, data=hub)
