"""`start_from` on the command line: what it names, and that its weights mean the same in the new run."""

import json
from pathlib import Path

import pytest
import yaml
from typed_remedies import find_refused

from recipes.config import compose_and_check
from recipes.config.compose import compose_run
from recipes.config.unread import list_unread

TYPED = ["model.num_layers=2", "model.hidden_size=48", "model.num_heads=2"]
VOCABULARY = {"a": 0, "b": 1}


def make_run(folder: Path, *typed: str) -> Path:
    """Return a run folder with a checkpoint and a tokenizer, as far as the check of the config looks."""
    checkpoint = folder / "checkpoints" / "step_0000003.ckpt"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    (folder / "config.yaml").write_text(yaml.safe_dump(compose_run([*TYPED, *typed]).config))
    write_tokenizer(folder / "tokenizer", VOCABULARY)
    return folder


def write_tokenizer(folder: Path, vocabulary: dict[str, int]) -> Path:
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_run(tmp_path / "source")


def check(*typed: str) -> list[str]:
    return [str(mistake) for mistake in compose_and_check(typed)[1]]


def test_a_run_of_this_model_is_accepted_with_its_tokenizer(source: Path) -> None:
    for named in (source, source / "checkpoints/step_0000003.ckpt"):
        run, mistakes = compose_and_check([*TYPED, f"start_from={named}"])
        assert not mistakes, [*map(str, mistakes)]
        assert run is not None
        expected = {"_target_": "recipes.tokenizer.huggingface.HuggingFace", "name": str(source / "tokenizer")}
        assert run.config["tokenizer"] == run.config["data"]["tokenizer"] == expected


MISTAKES = {
    "resume=SOURCE": "start_from=SOURCE resume=SOURCE: a run that is continued has its own weights, and one that starts"
    " from another run is a new one; type the same command without start_from, or without resume",
    "model.pretrained=gpt2": "start_from=SOURCE model.pretrained=gpt2: both name the first weights of the model;"
    " type the same command without model.pretrained, or without start_from",
    "model.num_heads=3 model.num_layers=4": "start_from=SOURCE model.num_layers=4 model.num_heads=3: its weights were"
    " trained with model.num_layers=2 model.num_heads=2; type model.num_layers=2 model.num_heads=2,"
    " or start_from=null to train another model",
    "model.vocab_size=1000": "start_from=SOURCE model.vocab_size=1000: its weights were trained with"
    " model.vocab_size=2048; type model.vocab_size=2048, or start_from=null to train another model",
    "tokenizer=bytes": "start_from=SOURCE tokenizer=bytes: its weights were trained with other token ids;"
    " type the same command without tokenizer, which takes that of the run",
    "hydra.run.dir=SOURCE": "start_from=SOURCE: it is the folder of this run, which it would overwrite;"
    " type resume=SOURCE",
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_what_contradicts_the_source_is_refused(typed: str, source: Path) -> None:
    words = typed.replace("SOURCE", str(source)).split()
    keys = [word.partition("=")[0] for word in words]
    command = [*(word for word in TYPED if word.partition("=")[0] not in keys), f"start_from={source}", *words]
    _, mistakes = compose_and_check(command)
    assert MISTAKES[typed].replace("SOURCE", str(source)) in [str(mistake) for mistake in mistakes]
    if typed.startswith("model.num"):
        assert len(mistakes) == 1
        assert find_refused(command, mistakes) == []


def test_another_model_is_refused(source: Path) -> None:
    [mistake] = check("model=llama_nano", "model.vocab_size=2048", f"start_from={source}")
    assert "its weights are those of GPT2, and this model is Llama" in mistake


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none", "there is no such folder"),
        ("file", "it is a file, not the folder of a run"),
        ("empty", "it contains no valid checkpoint"),
        ("source/checkpoints", "it is the folder of all checkpoints, not of one or of the run"),
        ("peft", "it holds an adapter of peft, not a checkpoint of a run"),
        ("published", "it holds a published model, not a checkpoint of a run"),
    ],
)
def test_a_path_that_is_no_run_is_named(name: str, reason: str, source: Path) -> None:
    folder = source.parent
    (folder / "file").write_text("")
    for other, file in (("empty", "notes.txt"), ("peft", "adapter_config.json"), ("published", "config.json")):
        (folder / other).mkdir()
        (folder / other / file).write_text("{}")
    [mistake] = check(*TYPED, f"start_from={folder / name}")
    assert mistake.startswith(f"start_from={folder / name}: {reason}; type ")


def test_an_adapter_is_kept_as_it_was_or_merged(tmp_path: Path) -> None:
    source = make_run(tmp_path / "source", "adapter=lora", "adapter.r=4")
    start = [*TYPED, f"start_from={source}"]
    assert check(*start) == check(*start, "adapter=lora", "adapter.r=4", "adapter.lora_dropout=0.1") == []
    [rank] = check(*start, "adapter=lora", "adapter.r=8")
    assert rank.endswith("its adapter was trained with adapter.r=4; type adapter.r=4, or adapter=none, which merges it")
    [other] = check(*start, "adapter=ia3")
    assert "its weights are those of lora beside frozen ones; type adapter=lora, or adapter=none" in other
    config = yaml.safe_load((source / "config.yaml").read_text())
    config["adapter"]["_target_"] = "os.system"
    (source / "config.yaml").write_text(yaml.safe_dump(config))
    [forged] = check(*start)
    assert "names os.system as its adapter, and a folder may not choose the code that runs" in forged


def test_more_tokens_are_accepted_behind_those_of_the_source(source: Path, tmp_path: Path) -> None:
    start = [*TYPED, f"start_from={source}", "model.vocab_size=2060", "tokenizer=huggingface"]
    grown = write_tokenizer(tmp_path / "grown", {**VOCABULARY, "c": 2})
    assert check(*start, f"tokenizer.name={grown}") == []
    other = write_tokenizer(tmp_path / "other", {"a": 1, "b": 0})
    assert any("other token ids" in mistake for mistake in check(*start, f"tokenizer.name={other}"))


def test_a_run_that_goes_on_from_its_own_checkpoint_asks_nothing_of_its_source(source: Path, tmp_path: Path) -> None:
    own = make_run(tmp_path / "own", f"start_from={tmp_path}/gone")
    typed = [*TYPED, f"start_from={tmp_path}/gone"]
    assert check(*typed, "resume=auto", f"hydra.run.dir={own}") == []
    assert check(f"resume={own}") == []
    assert any("there is no such folder" in mistake for mistake in check(*typed, f"hydra.run.dir={tmp_path}/new"))


def test_modes_that_read_no_first_weights_name_it_as_without_effect(source: Path) -> None:
    run, mistakes = compose_and_check([*TYPED, "mode=plan", f"start_from={source.parent}/later"])
    assert not mistakes
    assert run is not None
    assert list_unread(run) == [f"start_from={source.parent}/later"]
    assert any("it has no effect" in mistake for mistake in check("start_from_weights=ema"))
