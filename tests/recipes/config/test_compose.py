"""From the command line to one resolved config and the run folder."""

import json
from pathlib import Path

import pytest
from support import composed_config

from recipes.config.compose import compose_run, freeze, run_folder


def test_the_run_folder_is_new_unless_a_job_or_a_resumed_run_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for variable in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    assert run_folder("quickstart", None).startswith("logs/quickstart/20")
    monkeypatch.setenv("SLURM_JOB_ID", "417")
    assert run_folder("quickstart", "auto") == "logs/quickstart/slurm_417"
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # what torchrun sets where no id is given
    assert run_folder("quickstart", None).startswith("logs/quickstart/20")
    (tmp_path / "config.yaml").write_text("")
    assert run_folder("quickstart", str(tmp_path)) == str(tmp_path)
    checkpoint = tmp_path / "checkpoints" / "step_0000010.ckpt"
    assert run_folder("quickstart", str(checkpoint)) == str(tmp_path)


def test_the_command_line_beats_the_recipe_and_the_recipe_beats_the_defaults() -> None:
    assert composed_config("recipe=single_bf16")["precision"]["name"] == "bf16-mixed"
    both = composed_config("recipe=single_bf16", "precision=32-true")
    assert both["precision"]["name"] == "32-true"
    assert (both["name"], both["log_every"]) == ("single_bf16", 10)


def test_a_model_of_another_kind_brings_its_task_and_data() -> None:
    config = composed_config("model=resnet18")
    assert config["task"]["_target_"] == "recipes.task.supervised.Supervised"
    assert config["data"]["_target_"] == "recipes.data.digits.Digits"
    assert config["tokenizer"] == {}


def test_a_resumed_run_keeps_its_config_and_changes_only_what_is_typed(tmp_path: Path) -> None:
    typed = [
        "model=llama_nano",
        "tokenizer=bytes",
        "optimizer.lr=7e-4",
        f"hydra.run.dir={tmp_path}",
    ]
    began = compose_run(typed)
    freeze(began)
    (tmp_path / "environment.json").write_text(json.dumps({"overrides": began.overrides}))
    resume = f"resume={tmp_path}"
    again = compose_run([resume, "trainer.max_steps=9"])
    assert again.run_folder == tmp_path
    assert again.config["trainer"]["max_steps"] == 9
    assert again.config["scheduler"]["num_steps"] == 9  # which is interpolated from it
    changed = {"resume", "trainer", "scheduler"}
    for key in began.config.keys() - changed:
        assert again.config[key] == began.config[key], key
    overrides = ["save_every=2", "warmup_steps=4", "seq_len=16", "optimizer=sgd"]
    many = compose_run([resume, *overrides]).config
    assert many["checkpoint"]["save_every"] == 2
    assert many["scheduler"]["warmup_steps"] == 4
    assert many["data"]["seq_len"] == 16
    assert many["optimizer"]["_target_"] == "recipes.optimizer.sgd.sgd"
    assert "betas" not in many["optimizer"]
    assert many["tokenizer"] == began.config["tokenizer"]
    sampling = compose_run([resume, "mode=sample", "mode.seed=5"]).config
    assert sampling["mode"]["_target_"] == "recipes.mode.sample.sample"
    assert sampling["mode"]["seed"] == 5
    assert sampling["model"] == began.config["model"]
    other = compose_run([resume, "mode=evaluate", "data=text_files", "data.path=x"]).config
    assert other["data"]["path"] == "x"
    # composed in the context of that run: its tokenizer, not the default one
    assert other["data"]["tokenizer"] == began.config["tokenizer"]


def test_the_same_words_with_a_resumed_run_delete_what_they_deleted(tmp_path: Path) -> None:
    typed = ["~callbacks.report", "tokenizer=bytes", f"hydra.run.dir={tmp_path}"]
    began = compose_run(typed)
    freeze(began)
    (tmp_path / "environment.json").write_text(json.dumps({"overrides": began.overrides}))
    again = compose_run([*typed, f"resume={tmp_path}"])
    assert again.config["callbacks"] == began.config["callbacks"]
    assert "report" not in again.config["callbacks"]


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ([], "Classifier"),
        (["name=mine"], "mine"),
        (["recipe=single_bf16"], "single_bf16"),
        (["recipe=quickstart"], "quickstart"),
    ],
)
def test_a_run_of_a_module_of_ones_own_has_the_name_of_its_class(typed: list[str], name: str) -> None:
    own = ["task=lightning", "task.module={_target_: own_modules.Classifier}", "data.module=null"]
    composed = compose_run([*own, *typed])
    assert composed.config["name"] == name
    assert composed.run_folder.parent == Path("logs", name)
