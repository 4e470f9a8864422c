"""What a pipeline's file and the overrides beside it make of each stage, and what is refused before anything runs."""

import json
from pathlib import Path

import pytest

from recipes.config import compose_and_check
from recipes.config.compose import CONF
from recipes.entry.hydra_main import parse_flags
from recipes.pipeline.command_line import PipelineCommand, read_command
from recipes.pipeline.main import run_pipeline
from recipes.pipeline.pipeline import name_stages, plan_stages

STAGES = {
    "pretrain": ["trainer.max_steps=4"],
    "sft": ["recipe=sft_demo", "optimizer.lr=1e-3"],
    "scores": ["mode=evaluate"],
    "again": ["trainer.max_steps=2"],
}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "pipeline").mkdir()
    content = {"every_stage": ["tokenizer=bytes", "model.vocab_size=257"], "stages": STAGES}
    (tmp_path / "pipeline/mine.yaml").write_text(json.dumps(content))
    return tmp_path


def _read(own: Path, *typed: str, name: str = "mine") -> PipelineCommand:
    return read_command([f"pipeline={name}", f"hydra.searchpath=[{own}]", *typed], config_folder=CONF)


def _write(own: Path, text: str) -> list[str]:
    (own / "pipeline/other.yaml").write_text(text)
    return [*map(str, _read(own, name="other").mistakes)]


def test_a_stage_starts_from_the_last_one_that_trains(own: Path) -> None:
    command = _read(own)
    assert command.mistakes == []
    assert {stage.name: stage.source for stage in command.stages} == {
        "pretrain": None,
        "sft": "pretrain",
        "scores": "sft",
        "again": "sft",
    }
    assert [str(stage.folder) for stage in command.stages][1] == "logs/mine/2_sft"


def test_a_stage_starts_from_what_it_names(own: Path) -> None:
    command = _read(
        own, "stages.again.start_from=pretrain", "stages.sft.start_from=null", "stages.scores.resume=runs/x"
    )
    assert command.mistakes == []
    sources = {stage.name: stage.source for stage in command.stages}
    assert sources == {"pretrain": None, "sft": None, "scores": None, "again": "pretrain"}
    assert "resume=runs/x" in command.stages[2].overrides, "a folder is left to the run"


def test_an_override_is_that_of_every_stage_that_trains_or_of_one(own: Path) -> None:
    typed = (
        "seed=7",
        "stages.sft.optimizer.lr=2e-3",
        "+stages.sft.trainer.benchmark=true",
        "~stages.sft.callbacks.report",
    )
    by_name = {stage.name: stage.overrides for stage in _read(own, *typed).stages}
    assert "seed=7" in by_name["pretrain"]
    assert "seed=7" not in by_name["scores"], "it has the settings of the run that it reads"
    assert [text for text in by_name["sft"] if "optimizer.lr" in text] == ["optimizer.lr=2e-3"]
    assert {"+trainer.benchmark=true", "~callbacks.report", "tokenizer=bytes"} <= {*by_name["sft"]}
    assert any(text.startswith("hydra.searchpath=") for text in by_name["scores"])


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("stages.sfd.optimizer.lr=1", "stages.sft.optimizer.lr=1"),
        ("stages.sft.start_from=again", "stages.sft.start_from=<pretrain | run folder>"),
        ("stages.again.start_from=scores", "stages.again.start_from=<pretrain | sft | run folder>"),
        ("stages.sft.resume=auto", "stages.sft.start_from=<pretrain>"),
        ("stages.scores.start_from=sft", "stages.scores.resume=<pretrain | sft>"),
        ("stages.sft.launcher=slurm", "launcher=slurm"),
        ("stages.sft.hydra.run.dir=logs/x", "hydra.run.dir=logs/x alone"),
        ("stages.sft.pipeline=mine", "the settings of that run alone"),
        ("stages.sft.sweep=lr", "a stage without it"),
        ("stages.sft.start_from=pretrian", "stages.sft.start_from=pretrain"),
        ("stages.sft=null", "stages.sft.<setting>=<value>"),
        ("stages=[sft]", "stages.<pretrain | sft | scores | again>.<setting>=<value>"),
        ("~stages.sft", "stages.sft.<setting>=<value>"),
        ("stage.sft.seed=1", "stages.sft.seed=1"),
        ("sft.seed=1", "stages.sft.seed=1"),
        ("every_stage.seed=1", "seed=1"),
        ("recipe=dpo", "stages.<sft>.recipe=dpo"),
        ("start_from=logs/x", "stages.pretrain.start_from=logs/x"),
        ("resume=auto", "the same command without it"),
        ("hydra.run.dir=logs/${now:%H}", "hydra.run.dir=<folder>"),
        ("hydra.run.dir=", "hydra.run.dir=<folder>"),
    ],
)
def test_an_override_that_no_stage_can_have_is_answered(own: Path, typed: str, fix: str) -> None:
    [mistake] = _read(own, typed).mistakes
    assert typed.removeprefix("stages.").partition(".")[2] in mistake.setting or typed == mistake.setting
    assert fix in mistake.fix


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no stages"),
        ("stages: {}", "has no stages"),
        ("stages: [a]", "has no stages"),
        ("stages: {a: seed=1}", "stages.a is no list of overrides"),
        ("stages: {a: [{seed: 1}]}", "stages.a is no list of overrides"),
        ("stages: {a/b: [seed=1]}", "a stage is named 'a/b'"),
        ("stages: {1: [seed=1]}", "a stage is named 1"),
        ("stages: {a: [seed=1], a: [seed=2]}", "duplicate key"),
        ("stages: {a: [seed=1]}\nevery: [seed=2]", "nothing reads 'every'"),
        ("stages: {a: [seed=1", "cannot be read"),
        ("stages: {a: ['seed=1 trainer.max_steps=2']}", "'seed=1 trainer.max_steps=2', which are several"),
    ],
)
def test_a_wrong_file_is_one_sentence(own: Path, text: str, reason: str) -> None:
    [mistake] = _write(own, text)
    assert reason in mistake


def test_an_unknown_pipeline_is_answered_with_those_there_are(own: Path) -> None:
    [mistake] = _read(own, name="mien").mistakes
    assert "chat_nano" in mistake.reason
    assert mistake.fix == "pipeline=mine"


@pytest.mark.parametrize(
    "typed", ["-m", "--cfg job", "sweep=lr", "hydra.sweep.dir=x", "mode=plan", "launcher.wait=false"]
)
def test_what_is_of_one_run_is_refused_in_one_sentence(
    own: Path, typed: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    args, _ = parse_flags(["pipeline=mine", f"hydra.searchpath=[{own}]", *typed.split()])
    assert run_pipeline(args, CONF, "config") == 2
    assert "The config has 1 mistake" in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()


def test_help_names_the_command_of_each_stage(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args, _ = parse_flags(["pipeline=mine", f"hydra.searchpath=[{own}]", "--help"])
    assert run_pipeline(args, CONF, "config") == 0
    shown = capsys.readouterr().out
    assert "2_sft: python train.py tokenizer=bytes" in shown
    assert "start_from=logs/mine/1_pretrain" in shown
    assert "resume=logs/mine/2_sft" in shown


def test_a_mode_leaves_out_what_was_typed_for_an_option_of_its_run_that_it_replaces(own: Path) -> None:
    of_sft = ["stages.sft.data.num_examples=2000", "stages.sft.data.shuffle_answers=true"]
    of_scores = ["stages.scores.task=language_modeling", "stages.scores.data=stdlib_text"]
    planned = plan_stages(_read(own, *of_sft, *of_scores).stages, config_folder=CONF, config_name="config")
    assert [str(each) for each in name_stages(planned)] == []
    assert planned[2].run is not None
    assert planned[2].run.config["data"]["_target_"].endswith("StdlibText")


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("data=stdlib_txt", "data=stdlib_text"),
        ("mode=evalute", "mode=evaluate"),
        ("data={", "data=<option>"),
        ("data.val_fraction=0.1,0.2", "data.val_fraction=<value>"),
    ],
)
def test_what_is_wrong_in_a_mode_on_another_stage_is_one_mistake(own: Path, typed: str, fix: str) -> None:
    of_sft = ["stages.sft.data.num_examples=2000", f"stages.scores.{typed}"]
    planned = plan_stages(_read(own, *of_sft).stages, config_folder=CONF, config_name="config")
    [mistake] = name_stages(planned)
    assert mistake.setting == f"stage scores: {typed}"
    assert fix in mistake.fix


def test_a_stage_neither_writes_where_another_one_does_nor_waits_for_a_person(own: Path) -> None:
    text = "stages: {a: [seed=1], b: [mode=export, mode.path=x], c: [mode=export, mode.path=./x], d: [mode=chat]}"
    assert _write(own, text) == []
    found = name_stages(plan_stages(_read(own, name="other").stages, config_folder=CONF, config_name="config"))
    assert [(each.setting, each.reason.partition(",")[0]) for each in found] == [
        ("stage c: mode.path=./x", "stage b writes there"),
        ("stage d: mode=chat", "a stage trains"),
    ]


_JUDGED = """
every_stage: [model=gpt2_nano, tokenizer=bytes, model.vocab_size=257]
stages:
  sft: [recipe=sft_demo]
  judge: [recipe=reward_model, data=synthetic_preferences]
  judged: [mode=export]
  ppo: [recipe=ppo, start_from=sft, data=synthetic_prompts, reward=model, reward.model.pretrained=judged]
  answers: [mode=evaluate]
"""


def test_a_stage_reads_the_model_that_an_earlier_one_exports_before_it_is_there(own: Path) -> None:
    assert _write(own, _JUDGED) == []
    command = _read(own, name="other")
    ppo = command.stages[3]
    assert (ppo.source, ppo.reads) == ("sft", ("judged",))
    assert f"reward.model.pretrained={command.stages[2].folder}/export" in ppo.overrides
    assert _write(own, _JUDGED.replace("[mode=export]", "[mode=export, mode.path=judge_of_mine]")) == []
    assert "reward.model.pretrained=judge_of_mine" in _read(own, name="other").stages[3].overrides
    assert [*name_stages(plan_stages(command.stages, config_folder=CONF, config_name="config"))] == []


def test_a_stage_is_put_together_from_the_models_and_the_tokenizer_that_two_others_export(own: Path) -> None:
    parts = "model.vision_pretrained=seen, model.language_pretrained=spoken, tokenizer.name=spoken"
    stages = f"see: [], seen: [mode=export], speak: [start_from=null], spoken: [mode=export], both: [{parts}]"
    (own / "pipeline" / "other.yaml").write_text(f"stages: {{{stages}}}")
    *_, (_, seen, _, spoken, both) = [_read(own, name="other").stages]
    assert both.reads == ("seen", "spoken", "spoken")
    assert f"model.vision_pretrained={seen.export}" in both.overrides
    assert f"model.language_pretrained={spoken.export}" in both.overrides
    assert f"tokenizer.name={spoken.export}" in both.overrides


@pytest.mark.parametrize(
    ("named", "reason"), [("judge", "it exports no model"), ("answers", "it does not run before this one")]
)
def test_a_stage_that_exports_no_model_before_is_one_mistake(own: Path, named: str, reason: str) -> None:
    [mistake] = _write(own, _JUDGED.replace("pretrained=judged", f"pretrained={named}"))
    fix = "type stages.ppo.reward.model.pretrained=<judged>"
    assert mistake == f"stage ppo: reward.model.pretrained={named}: {reason}; {fix}"
    command = _read(own, name="other")
    assert [*name_stages(plan_stages(command.stages, config_folder=CONF, config_name="config"))] == []


@pytest.mark.parametrize(("value", "fix"), [("1,2", "1.2"), ("1e-3,1e-4", "<value>")])
def test_several_values_in_a_stage_are_not_answered_with_a_sweep(own: Path, value: str, fix: str) -> None:
    command = _read(own, f"stages.sft.optimizer.lr={value}")
    planned = plan_stages(command.stages, config_folder=CONF, config_name="config")
    [mistake] = [*name_stages(planned)]
    assert mistake.setting == f"stage sft: optimizer.lr={value}"
    assert mistake.fix == f"optimizer.lr={fix}"


def test_a_stage_without_its_pipeline_is_answered_with_the_pipelines() -> None:
    typed = ["stages.sft.optimizer.lr=1"]
    [mistake] = compose_and_check(typed, config_folder=CONF, config_name="config")[1]
    assert (mistake.setting, mistake.reason) == (typed[0], "only a pipeline has stages")
    assert mistake.fix == "pipeline=<chat_nano | llava | vlm_nano> stages.sft.optimizer.lr=1"


def test_a_run_that_saves_nothing_has_no_stage_after_it(own: Path) -> None:
    command = _read(own, "stages.sft.save_every=null")
    found = name_stages(plan_stages(command.stages, config_folder=CONF, config_name="config"))
    assert [str(each).partition(";")[0] for each in found] == [
        "stage scores: mode=evaluate: it needs a checkpoint, and sft saves none",
        "stage again: start_from=sft: that run saves no checkpoint",
    ]


def test_the_stages_of_the_project_have_no_mistakes() -> None:
    command = read_command(["pipeline=chat_nano"], config_folder=CONF)
    planned = plan_stages(command.stages, config_folder=CONF, config_name="config")
    assert [str(each) for each in name_stages(planned)] == []
