"""What is typed for nothing is named, and only that."""

from pathlib import Path

import pytest

from recipes.config.resolved import ResolvedRun
from recipes.config.unread import list_unread


@pytest.mark.parametrize(
    ("mode", "resume", "typed", "expected"),
    [
        ("evaluate", "run", ["eval_samples=2", "micro_batch_size=2", "data.path=x"], ["eval_samples=2"]),
        ("evaluate", "run", ["optimizer=sgd", "++optimizer.lr=1", "~scheduler"], [0, 1, 2]),
        ("evaluate", "auto", ["eval_samples=2", "optimizer=sgd"], []),
        ("sample", "run", ["+data@eval_data.mine=text_files", "mode.seed=3", "resume=run"], [0]),
        ("replay", "run", ["z_loss=1e-4", "save_every=3"], ["save_every=3"]),
        ("report", None, ["mode.runs=[a]", "model=gpt2", "dashboard.sections=[]", "hydra.run.dir=x"], ["model=gpt2"]),
        ("convert_gguf", None, ["seed=3", "mode.path=x"], ["seed=3"]),
        ("fit", "run", ["eval_samples=2"], []),
        ("prepare", None, ["data.path=x", "trainer.max_steps=3", "quality=gopher", "tokenizer=bpe"], [1, 3]),
        ("prepare", None, ["data=documents", "data.text_field=x", "data.val_fraction=0.1"], [2]),
        ("lr_find", None, ["trainer.max_steps=3", "optimizer=sgd", "logger=wandb", "mode.num_steps=5"], [0, 2]),
        ("lr_find", None, ["checkpoint.keep_every=3", "checkpoint.verify_hashes=false", "warmup_steps=0"], [0, 2]),
        ("batch_find", None, ["micro_batch_size=2", "global_batch_size=8", "log_every=2"], [0, 2]),
        ("plan", None, ["trainer.max_steps=3", "logger=wandb", "eval_every=2"], ["logger=wandb"]),
    ],
)
def test_settings_that_a_mode_does_not_read_are_listed(
    mode: str, resume: str | None, typed: list[str], expected: list[str | int]
) -> None:
    config = {"mode": {"_target_": f"recipes.mode.{mode}.{mode}"}, "resume": resume}
    run = ResolvedRun(config=config, choices={}, run_folder=Path(), overrides=["optimizer.lr=1", *typed], typed=typed)
    assert list_unread(run) == [typed[name] if isinstance(name, int) else name for name in expected]
