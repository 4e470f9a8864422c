"""What a resumed run keeps of its command line, and damaged files of its folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.config import compose_and_check
from recipes.config.compose import compose_run, freeze
from recipes.config.resume import is_other_data
from recipes.errors import ConfigError

FSDP = ["tokenizer=bytes", "strategy=fsdp", "strategy.gradient_sync=per_micro_batch", "trainer.accelerator=cpu"]


def start(folder: Path, *typed: str) -> Path:
    """Write what a run with these overrides leaves in its folder, and a checkpoint by name."""
    folder.mkdir(exist_ok=True)
    began = compose_run([*typed, f"hydra.run.dir={folder}"])
    freeze(began)
    (folder / "environment.json").write_text(json.dumps({"overrides": began.overrides}))
    checkpoint = folder / "checkpoints/step_0000002.ckpt"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    return folder


def resume(folder: Path, *typed: str) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the config of a resumed run, its overrides and the mistakes."""
    composed, mistakes = compose_and_check([f"resume={folder}", *typed])
    assert composed is not None
    return composed.config, composed.overrides, [str(mistake) for mistake in mistakes]


def test_a_shell_leaves_the_home_folder_in_a_resume_to_this_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(tmp_path / "run", "tokenizer=bytes", "optimizer.lr=7e-4")
    monkeypatch.setenv("HOME", str(tmp_path))
    composed, mistakes = compose_and_check(["resume=~/run"])
    assert mistakes == []
    assert composed is not None
    assert (composed.run_folder, composed.config["resume"]) == (run, str(run))
    assert composed.config["optimizer"]["lr"] == 7e-4


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start(tmp_path_factory.mktemp("started") / "run", "tokenizer=bytes")


def test_an_override_of_a_replaced_option_is_dropped_and_every_other_one_stays(tmp_path: Path) -> None:
    run = start(
        tmp_path / "run",
        "recipe=single_fp32",
        *FSDP,
        "optimizer.lr=7e-4",
        "callbacks.memory=null",
        "logger=tensorboard",
    )
    composed, mistakes = compose_and_check([f"resume={run}", "strategy=single", "logger=csv"])
    assert mistakes == []
    assert composed is not None
    assert composed.dropped_overrides == ["strategy.gradient_sync=per_micro_batch"]
    assert "gradient_sync" not in composed.config["strategy"]
    assert (composed.config["optimizer"]["lr"], composed.config["callbacks"]["memory"]) == (7e-4, None)
    config, overrides, mistakes = resume(run, "optimizer=sgd", "callbacks=[default,stop_at_nan]")
    assert config["optimizer"]["lr"] == 0.1, "that of AdamW is not one for SGD"
    assert config["callbacks"]["memory"] is None
    assert "stop_at_nan" in config["callbacks"]
    assert "strategy.gradient_sync=per_micro_batch" in overrides
    # the same option again keeps what was set for it, and so does a recipe that chooses it
    assert resume(run, "strategy=fsdp")[0]["strategy"] == config["strategy"]
    assert "strategy.gradient_sync=per_micro_batch" not in resume(run, "recipe=ddp_bf16", "strategy=ddp")[1]


def test_a_typo_in_a_resume_is_reported_without_losing_what_the_run_was_started_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):
        Path(name).touch()
    run = start(tmp_path / "run", "data=text_files", "data.path=a.txt", "+trainer.benchmark=true")
    *_, mistakes = resume(run, "data.path=b.txt", "trainer.benchmark=false", "optimizer.lrr=3")
    assert mistakes == ["optimizer.lrr=3: there is no 'optimizer.lrr'; type optimizer.lr=3"]
    config, _, mistakes = resume(run, "data.path=b.txt", "trainer.deterministic=true")
    assert mistakes == []
    assert (config["data"]["path"], config["trainer"]["benchmark"]) == ("b.txt", True)
    assert config["trainer"]["deterministic"] is True


def test_what_is_typed_counts_where_the_run_has_another_value_than_conf(started: Path, tmp_path: Path) -> None:
    run = shutil.copytree(started, tmp_path / "run")
    conf = compose_run([]).config
    text = (run / "config.yaml").read_text()
    # of another version, or edited: `before` and `now` are the same
    text = text.replace("seed: 1234", "seed: 9")
    for space in ("", "  "):
        text = text.replace(f"\n{space}seq_len: {conf['seq_len']}", f"\n{space}seq_len: 64")
    (run / "config.yaml").write_text(text)
    config, _, mistakes = resume(run)
    assert (config["seed"], config["seq_len"], config["data"]["seq_len"], mistakes) == (9, 64, 64, [])
    config, _, mistakes = resume(run, f"seq_len={conf['seq_len']}", "seed=1234")
    assert (config["seed"], config["seq_len"], mistakes) == (1234, conf["seq_len"], [])
    assert config["data"]["seq_len"] == conf["seq_len"]


def test_a_run_of_an_earlier_version_has_the_defaults_of_what_a_later_one_added(tmp_path: Path) -> None:
    run = start(tmp_path / "run", "tokenizer=bytes", "label_smoothing=0.1", "~callbacks.progress")
    config = yaml.safe_load((run / "config.yaml").read_text())
    for key in ("loss", "freeze"):
        del config[key]
    del config["optimizer"]["layer_decay"]
    del config["callbacks"]["report"]  # a member that somebody took out of the file
    (run / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    composed, mistakes = compose_and_check([f"resume={run}"])
    assert mistakes == []
    assert composed is not None
    assert sorted(composed.added_settings) == ["freeze", "loss", "optimizer.layer_decay"]
    assert composed.config["loss"]["label_smoothing"] == 0.1
    assert (composed.config["freeze"], composed.config["optimizer"]["layer_decay"]) == ([], None)
    assert {"report", "progress"}.isdisjoint(composed.config["callbacks"])
    _, mistakes = compose_and_check([f"resume={run}", "loss=mse"])
    assert len(mistakes) > 0, "what is typed counts beside what was added"


def test_text_that_looks_like_a_reference_survives_a_freeze(tmp_path: Path) -> None:
    typed = ["tags=['\\${HOME}','a \\\\\\${x}','$5 {b}']"]
    run = start(tmp_path / "run", *typed)
    expected = ["${HOME}", "a \\${x}", "$5 {b}"]
    assert compose_run(typed).config["tags"] == expected
    assert resume(run)[0]["tags"] == expected
    again = compose_run([], config_folder=run, config_name="config")
    assert again.config["tags"] == expected


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("config.yaml", b"", "it is empty"),
        ("config.yaml", b"- a\n- b\n", "it holds a list"),
        ("config.yaml", b"just words", "it holds a single value"),
        ("config.yaml", b"seed: 1\n\tname: x\n", "it is not valid YAML in line 2: "),
        ("config.yaml", b"seed: 1\n<<<<<<< HEAD\nname: x\n", "line 2 is a conflict marker of git: <<<<<<< HEAD"),
        ("config.yaml", b"\x00\xff\xfe\x80", "is not UTF-8"),
        ("environment.json", b"", "it is empty"),
        ("environment.json", b"{", "invalid JSON"),
        ("environment.json", b"[]", "it holds a list"),
        ("environment.json", b"{}", "`overrides` is not a list"),
        ("environment.json", b'{"overrides": [3]}', "3 is not an override"),
        ("environment.json", b'{"overrides": ["=="]}', "'==' is not an override"),
        ("metrics.csv", b"\xef\xbb\xbfstep,train/loss\n1,2.0\n", "its first column is"),
        ("metrics.csv", b"step;train/loss\n1;2.0\n", "its first column is 'step;train/loss', not step"),
        ("metrics.csv", b"step,train/loss\n1.0,2.0\n", "line 2 begins with '1.0', not a step"),
        ("events.jsonl", b'{"event": "start", "step": 0}\n{\n', "line 2 is not valid JSON"),
        ("events.jsonl", b"3\n", "line 1 holds a single value"),
        ("config.yaml", b"a: " + b"[" * 3000 + b"]" * 3000, "it is not valid YAML"),
        ("config.yaml", b"a: &a [*a]", "it expands to more than 100,000 values"),
        ("config.yaml", b"model: {}", "it has no section data"),
        ("config.yaml", b"model:\n  a: 1\n  b: 2\n  a: 3\n", "line 4 sets a again, after line 2"),
        ("environment.json", b'{"overrides": ["nope=3"]}', "the run was started with nope=3, which means nothing here"),
        ("environment.json", b'{"overrides": ["model=nope"]}', "the run was started with model=nope, which means"),
        ("environment.json", json.dumps({"overrides": ["seed=1"] * 2000}).encode(), "longer than any command line"),
        ("environment.json", json.dumps({"overrides": ["x=" + "[" * 3000]}).encode(), "is not an override"),
        ("metrics.csv", b"step,lr\n1," + b"9" * 200_000 + b"\n", "line 2 has a cell of more than 10,000 characters"),
        ("metrics.csv", b"step,lr,lr\n1,2,3\n", "two of its columns are named lr"),
        ("metrics.csv", b"step,train/loss\n1,2,3\n", "line 2 has 3 cells, not 2"),
        ("metrics.csv", b"step,train/loss\n2,2.0\n1,2.0\n\n", "line 3 is of step 1, after step 2"),
        ("metrics.csv", b"step,train/loss\n1,2.0\n2,abc\n", "line 3 of it has a cell that is not numeric"),
        ("metrics.csv", b"step,train/loss\n" + b"9" * 5000 + b",1\n", "not a step"),
        ("events.jsonl", b'{"event": "start"}\n', "event 1 of it has no name, step and time"),
        ("events.jsonl", b'{"event": "start", "step": "1"}\n', "event 1 of it has no name, step and time"),
        ("samples.jsonl", b'{"step": 1, "prompt": "a"}\n', "sample 1 of it has no step, prompt and text"),
        ("events.jsonl", b'{"a": ' + b"[" * 100_000 + b"\n", "line 1 is not valid JSON: RecursionError"),
    ],
)
def test_a_damaged_file_of_a_run_is_named_with_what_to_do(
    file: str, content: bytes, reason: str, tmp_path: Path, started: Path
) -> None:
    run = shutil.copytree(started, tmp_path / "run")
    (run / file).write_bytes(content)
    _, mistakes = compose_and_check([f"resume={run}"])
    [mistake] = mistakes
    assert mistake.setting == str(run / file)
    assert reason in mistake.reason
    assert mistake.fix
    assert isinstance(mistake, ConfigError)
    assert (run / file).read_bytes() == content


@pytest.mark.parametrize("key", ["my_note", "model.my_note"])
def test_a_key_too_many_in_the_config_of_a_run_is_named_with_its_line(key: str, tmp_path: Path) -> None:
    run = start(tmp_path / "run", "tokenizer=bytes")
    config = run / "config.yaml"
    text = config.read_text()
    added = text + "my_note: hello\n" if key == "my_note" else text.replace("model:\n", "model:\n  my_note: hello\n", 1)
    config.write_text(added)
    line = 1 + next(n for n, line in enumerate(added.splitlines()) if "my_note" in line)
    for typed in ([], [f"~{key}"]):
        last = resume(run, *typed)[2][-1]
        assert last.endswith(f"; type the same command without {key} in {config}, line {line}")
    config.write_text(text)
    assert resume(run)[2] == []


def test_a_wrong_value_in_the_config_of_a_run_is_blamed_on_its_line(started: Path, tmp_path: Path) -> None:
    run = shutil.copytree(started, tmp_path / "run")
    config = run / "config.yaml"
    text = config.read_text()
    layers = compose_run([]).config["model"]["num_layers"]
    wrong = text.replace("seed: 1234", "seed: twelve", 1).replace(f"  num_layers: {layers}", "  num_layers: 'x'", 1)
    config.write_text(wrong)
    lines = [n for n, line in enumerate(wrong.splitlines(), 1) if line in ("seed: twelve", "  num_layers: 'x'")]
    places = [mistake.rpartition("(")[2] for mistake in resume(run)[2]]
    assert sorted(places) == sorted(f"in {config}, line {line})" for line in lines)
    assert len(places) == 2
    # conf/ has these values, too
    assert resume(run, "seed=1234", f"model.num_layers={layers}")[2] == []


@pytest.mark.parametrize("below", ["checkpoints", "config.yaml", "checkpoints/step_0000002.ckpt/manifest.json"])
def test_a_path_inside_of_a_run_is_answered_with_the_run(below: str, tmp_path: Path) -> None:
    run = start(tmp_path / "run", "tokenizer=bytes")
    _, mistakes = compose_and_check([f"resume={run / below}"])
    [fix] = [mistake.fix for mistake in mistakes if mistake.setting == f"resume={run / below}"]
    assert fix == f"resume={run}"
    assert resume(run)[2] == []


@pytest.mark.parametrize("name", ["", "checkpoints/step_0000002.ckpt"])
def test_a_run_without_its_config_needs_the_model_typed(name: str, tmp_path: Path) -> None:
    run = start(tmp_path / "run", "tokenizer=bytes")
    (run / "config.yaml").unlink()
    _, mistakes = compose_and_check([f"resume={run / name}"])
    [reason] = [mistake.reason for mistake in mistakes]
    assert reason == f"{run}/config.yaml is missing, and nothing else says which model its weights are of"
    assert compose_and_check([f"resume={run / name}", "tokenizer=bytes", "model=gpt2_nano"])[1] == []


def test_published_weights_in_a_resume_have_one_answer_that_works(tmp_path: Path) -> None:
    run = start(tmp_path / "run", "tokenizer=bytes")
    [mistake] = resume(run, "model.pretrained=gpt2")[2]
    assert mistake.endswith(
        "; type the same command without model.pretrained, or resume=null to start from these weights"
    )


def test_a_blank_line_among_the_events_is_none(tmp_path: Path) -> None:
    run = start(tmp_path / "run", "tokenizer=bytes")
    (run / "events.jsonl").write_text('{"event": "start", "step": 0}\n\n')
    assert resume(run)[2] == []


def test_a_callback_that_was_added_and_deleted_again_stays_deleted(tmp_path: Path) -> None:
    added = ["+callbacks.mine._target_=lightning.pytorch.callbacks.Timer", "+callbacks.mine.interval=step"]
    run = start(tmp_path / "run", "tokenizer=bytes", *added, "~callbacks.mine")
    config, overrides, mistakes = resume(run)
    assert mistakes == []
    assert "~callbacks.mine" in overrides
    assert "mine" not in config["callbacks"]


def test_the_cache_is_that_of_the_machine_a_run_is_resumed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECIPES_CACHE", str(tmp_path / "there"))
    run = start(tmp_path / "run", "tokenizer=bytes", "data=stdlib_text")
    assert f"cache_dir: {tmp_path}/there\n" in (run / "config.yaml").read_text()
    monkeypatch.setenv("RECIPES_CACHE", str(tmp_path / "here"))
    assert resume(run)[0]["data"]["cache_dir"] == str(tmp_path / "here")


def test_other_data_is_evaluated_as_a_whole_unless_its_validation_data_is_typed() -> None:
    text = {"_target_": "text", "path": "a", "val_fraction": 0.1}
    rows = {"_target_": "rows", "path": "b", "val_fraction": 0.1, "val_path": None}
    assert is_other_data(text | {"path": "b"}, text)
    assert is_other_data(rows, text)
    assert not is_other_data(rows | {"val_path": "c"}, text)
    assert is_other_data(rows | {"path": "d"}, rows)
    assert not is_other_data(rows | {"path": "d", "val_path": "c"}, rows)


@pytest.mark.parametrize(
    ("typed", "rate", "num_steps"),
    [
        (["scheduler=constant", "trainer.max_steps=6"], 3e-3, None),
        (["scheduler=linear", "trainer.max_steps=6"], 3e-3, 6),
    ],
)
def test_a_run_without_a_record_of_its_overrides_keeps_its_values(
    typed: list[str], rate: float, num_steps: int | None, tmp_path: Path
) -> None:
    began = ["tokenizer=bytes", "model.vocab_size=257", "scheduler=constant", "warmup_steps=1", "trainer.max_steps=4"]
    run = start(tmp_path / "run", *began, "global_batch_size=4", "~callbacks.progress")
    recorded, _, mistakes = resume(run, *typed)
    (run / "environment.json").unlink()
    config, overrides, same_mistakes = resume(run, *typed)
    assert config == recorded
    assert mistakes == same_mistakes
    assert config["scheduler"]["warmup_steps"] == 1
    assert config["scheduler"].get("num_steps") == num_steps
    assert config["optimizer"]["lr"] == rate
    assert "warmup_steps=1" in overrides, "the record of this start has what was inferred"
