"""Passes over the data, counted before anything else is built."""

import json
from pathlib import Path

import pytest
from support import TINY, execute, write_texts

from recipes.config import compose_and_check
from recipes.config.resolved import ResolvedRun
from recipes.entry.length import settle_length
from recipes.errors import ConfigError, ConfigErrors
from recipes.run_folder import read_config, read_environment

RANDOM = (
    *("data=random_tokens", "data.num_samples=100", "seq_len=16", "model.vocab_size=32", "model.num_layers=1"),
    *("model.num_heads=1", "model.hidden_size=8", "global_batch_size=16", "eval_samples=4", "callbacks=[]"),
)


def settled(*overrides: str) -> ResolvedRun:
    run, mistakes = compose_and_check([*RANDOM, *overrides])
    assert run is not None
    assert not mistakes
    return settle_length(run)


def test_the_schedule_has_the_steps_of_the_passes() -> None:
    run = settled("trainer.max_steps=2epochs", "warmup_steps=2")
    assert run.epochs is None
    assert run.max_steps == run.config["scheduler"]["num_steps"] == 13  # 200 / 16
    assert settle_length(run) is run


def test_passes_of_a_repeated_part_are_those_of_that_part() -> None:
    assert settled("trainer.max_steps=3epochs", "loader.overfit_batches=2").max_steps == 6


def test_modes_that_take_no_steps_count_nothing() -> None:
    run, _ = compose_and_check([*RANDOM, "trainer.max_steps=2epochs", "mode=report"])
    assert run is not None
    assert settle_length(run).epochs == "2"


def test_what_is_too_long_for_the_passes_is_a_mistake() -> None:
    with pytest.raises(ConfigErrors) as error:
        settled("trainer.max_steps=1epoch", "scheduler=wsd", "warmup_steps=5", "scheduler.decay_steps=5")
    assert error.value.head == "1 epoch of this data are 7 steps; nothing was built."
    assert error.value.mistakes[0].reason == "together they are longer than trainer.max_steps=7"


@pytest.mark.parametrize(("more", "steps"), [((), 50), (("rollout.num_iterations=3",), 150)])
def test_a_pass_over_prompts_samples_each_as_often_as_it_is_completed(
    more: tuple[str, ...], steps: int, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{row}>", "answer": "a"}) + "\n" for row in range(100)))
    typed = [f"data.path={path}", f"data.val_path={path}", f"data.cache_dir={tmp_path}", "tokenizer=bytes"]
    typed += ["model=gpt2_nano", "model.vocab_size=257", "rollout.max_new_tokens=8", "reward=exact_match"]
    run, mistakes = compose_and_check(
        ["recipe=grpo", *typed, "rollout.num_generations=16", "global_batch_size=32", "warmup_steps=0", *more]
    )
    assert run is not None
    assert not mistakes
    assert settle_length(run).max_steps == steps, "16 completions of each of 100 prompts, 32 in a step"


def test_a_mixture_has_no_pass_of_its_own(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    one = {"_target_": "recipes.data.text_files.TextFiles", "path": f"{texts}/*.txt"}
    settings = [f"+data@data.sources.one=text_files data.sources.one.path={one['path']}", "data.weights.one=1"]
    run, mistakes = compose_and_check(
        [*TINY[:1], "data=mixture", *" ".join(settings).split(" "), *TINY[2:], "trainer.max_steps=1epoch"]
    )
    assert run is not None
    assert not mistakes, [str(mistake) for mistake in mistakes]
    with pytest.raises(ConfigError, match="no pass of its own"):
        settle_length(run)


def test_a_resume_counts_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ("warmup_steps=2", "eval_every=100", f"hydra.run.dir={tmp_path / 'run'}")
    assert execute(*RANDOM, *short, "trainer.max_epochs=1") == 0
    assert read_config(tmp_path / "run")["trainer"]["max_steps"] == 7
    assert "trainer.max_steps=1epochs" in read_environment(tmp_path / "run")["overrides"]
    resume = f"resume={tmp_path / 'run'}"
    assert execute(resume, "global_batch_size=8") == 0
    config = read_config(tmp_path / "run")
    assert config["trainer"]["max_steps"] == config["scheduler"]["num_steps"] == 13
    assert execute(resume, "trainer.max_steps=15") == 0
    assert read_config(tmp_path / "run")["scheduler"]["num_steps"] == 15
    assert "1 epoch of 100 samples is 13 steps of 8 samples" in capsys.readouterr().out
