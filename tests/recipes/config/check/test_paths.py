"""A run folder belongs to one run: no other is started, resumed or finished in it."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from support import resolved

from recipes.cache import open_cache_dir
from recipes.config.check.compatibility import check_compatibility
from recipes.config.check.paths import _check_data_path, _check_resume, check_run_folder
from recipes.config.check.sections import check_settings
from recipes.config.compose import CONF, claim_folder, compose_run, parse_override, quote_options
from recipes.config.resolved import ResolvedRun, resolve
from recipes.entry.run import run_resolved
from recipes.errors import ConfigError
from recipes.run_folder import FROZEN, claim_output


@pytest.fixture(scope="module")
def composed() -> ResolvedRun:
    return resolve(compose_run([]))


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[[str], Path]:
    """Make the folder of a run that has written something."""

    def make(name: str) -> Path:
        checkpoint = tmp_path / name / "checkpoints" / "step_0000001.ckpt"
        checkpoint.mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text(f"{FROZEN}\n{{}}\n")
        (tmp_path / name / "metrics.csv").write_text("step,train/loss\n1,2.5\n")
        return tmp_path / name

    return make


def test_a_run_is_resumed_in_its_own_folder_or_in_a_new_one_never_in_that_of_another(
    composed: ResolvedRun, make_run: Callable[[str], Path], tmp_path: Path
) -> None:
    first, second = make_run("first"), make_run("second")

    def mistakes(resume: str | None, folder: Path, *, continues: bool = False) -> list[str]:
        config = composed.config | {"resume": resume}
        return [mistake.setting for mistake in check_run_folder(replace(resolved(config, folder), continues=continues))]

    assert mistakes(str(first), second) == [f"resume={first} hydra.run.dir={second}"]
    [mistake] = check_run_folder(resolved(composed.config | {"resume": str(first)}, second))
    assert mistake.fix == f"resume={second} to resume it, or hydra.run.dir=<another folder>"
    assert mistakes(str(first / "checkpoints" / "step_0000001.ckpt"), second)
    assert mistakes(None, first) == [f"hydra.run.dir={first}"]
    assert mistakes(str(first), first) == []
    assert mistakes(str(first / "checkpoints" / "step_0000001.ckpt"), tmp_path / "." / "first") == []
    assert mistakes(str(first), tmp_path / "new") == []
    assert mistakes("auto", first) == []
    # a sweep that goes on starts its own jobs again
    assert mistakes(str(first), second, continues=True) == []


@pytest.mark.parametrize("name", ["metrics.csv", "train.log", ".lock", ".summary.json.tmp"])
def test_a_link_in_place_of_a_file_of_the_run_is_not_followed(
    composed: ResolvedRun, make_run: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    folder, outside = make_run("from_elsewhere"), tmp_path / "profile"
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)  # which need not exist: it would be created
    (folder / "more_checkpoints").symlink_to(tmp_path, target_is_directory=True)
    config = composed.config | {"resume": str(folder)}
    [mistake] = check_run_folder(resolved(config, folder))
    assert mistake.reason == f"{name} is a link to {outside}, where this run would write"
    assert mistake.setting == f"resume={folder}"


def test_a_link_to_a_file_beside_it_stays_in_the_run(composed: ResolvedRun, make_run: Callable[[str], Path]) -> None:
    folder = make_run("run")
    config = composed.config | {"resume": str(folder)}
    (folder / "metrics.csv").rename(folder / "metrics_2.csv")
    (folder / "metrics.csv").symlink_to("metrics_2.csv")
    assert list(check_run_folder(resolved(config, folder))) == []
    (folder / "events.jsonl").symlink_to("config.yaml")  # which the run would damage
    assert len(list(check_run_folder(resolved(config, folder)))) == 1


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("fit", "metrics.csv"),
        ("fit", ".lock"),
        ("evaluate", "summary.json"),
        ("sample", "tokenizer/tokenizer.json"),
        ("replay", "spikes/step_0000003/rank_00000.pt"),
        ("export", "export/config.json"),
    ],
)
def test_a_pipe_in_a_run_folder_blocks_no_mode(
    composed: ResolvedRun, make_run: Callable[[str], Path], mode: str, name: str
) -> None:
    folder = make_run("run")
    (folder / name).unlink(missing_ok=True)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(folder / name)
    node = {"_target_": f"recipes.mode.{mode}.{mode}", "path": None}
    [mistake] = check_run_folder(resolved(composed.config | {"resume": str(folder), "mode": node}, folder))
    assert mistake.reason.startswith(f"{name} is ")


@pytest.mark.parametrize(
    ("mode", "link"),
    [
        ("fit", "spikes"),
        ("fit", "tokenizer/special_tokens_map.json"),
        ("fit", "oom/rank_0.json"),
        ("fit", "checkpoints"),
        ("export", "export"),
        ("export", "tokenizer/chat_template.jinja"),
        ("replay", "spikes/step_0000003"),
        ("sample", "tokenizer"),
    ],
)
def test_no_link_inside_a_run_folder_is_written_through_or_copied(
    composed: ResolvedRun, make_run: Callable[[str], Path], tmp_path: Path, mode: str, link: str
) -> None:
    folder, other = make_run("from_elsewhere"), make_run("other") / "checkpoints"
    (folder / "checkpoints").rename(tmp_path / "moved")
    (folder / "checkpoints").symlink_to(tmp_path / "moved")  # which may be on another disk
    (folder / "oom").mkdir()
    (folder / "oom" / "rank_0.json").symlink_to("../metrics.csv")  # does not leave the folder
    node = {"_target_": f"recipes.mode.{mode}.{mode}", "path": None}
    config = composed.config | {"resume": str(folder), "mode": node}
    assert list(check_run_folder(resolved(config, folder))) == []
    (folder / link).parent.mkdir(exist_ok=True)
    (folder / link).unlink(missing_ok=True)
    (folder / link).symlink_to(other)
    [mistake] = check_run_folder(resolved(config, folder))
    assert mistake.reason.startswith(f"{link} is a link to {other}, where this run would ")
    is_copied = link.startswith("tokenizer")
    assert mistake.fix.startswith(f"rm {folder / link} && cp -r " if is_copied else f"rm {folder / link}, or ")
    # it is the run that is read whose files are copied, wherever the new ones go
    elsewhere = [str(each) for each in check_run_folder(resolved(config, tmp_path / "elsewhere"))]
    assert [f"resume={folder}: {link} is a link" in each for each in elsewhere] == [True] * is_copied
    if link == "export":
        typed = config | {"mode": node | {"path": str(tmp_path / "mine")}}
        assert list(check_run_folder(resolved(typed, folder))) == []


@pytest.mark.parametrize("resume", [None, "auto"])
@pytest.mark.parametrize(
    "name",
    ["config.yaml", "summary.json", "environment.json", "events.jsonl", "metrics.csv", "report.html", "tokenizer"],
)
def test_a_run_replaces_no_file_that_is_of_no_run(
    composed: ResolvedRun, tmp_path: Path, name: str, resume: str | None
) -> None:
    (tmp_path / "train.log").touch()  # of `python train.py … > train.log`
    (tmp_path / "README.md").touch()
    config = composed.config | {"resume": resume}
    assert list(check_run_folder(resolved(config, tmp_path))) == []
    (tmp_path / name).write_text(FROZEN)  # even a config.yaml of a run, alone, has been put there
    for continues in (False, True):
        [mistake] = check_run_folder(replace(resolved(config, tmp_path), continues=continues))
        assert mistake.setting == f"hydra.run.dir={tmp_path}"
        assert mistake.reason == f"it holds {name}, which is of no run, and which this run would replace"
    (tmp_path / ".lock").write_text("process 1 on here\n")  # of a start that failed before it wrote anything
    found = [mistake.reason for mistake in check_run_folder(replace(resolved(config, tmp_path), continues=True))]
    wrong_kind = f"{name} in it is a file, and this run makes a folder of that name"
    assert found == ([wrong_kind] if name == "tokenizer" else [])


def test_a_folder_in_place_of_a_file_of_a_run_is_found_before_the_run(
    composed: ResolvedRun, make_run: Callable[[str], Path]
) -> None:
    folder = make_run("mine")
    (folder / "report.html").mkdir()
    [mistake] = check_run_folder(resolved(composed.config | {"resume": "auto"}, folder))
    assert mistake.reason == "report.html in it is a folder, and this run writes a file of that name"


def test_a_run_that_waited_for_the_lock_looks_again_and_leaves_the_folder_as_it_is(
    composed: ResolvedRun, make_run: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    # checked before the other start wrote anything
    folder = make_run("shared")
    before = (folder / "metrics.csv").read_bytes()
    assert run_resolved(replace(composed, run_folder=folder)) == 2
    assert f"hydra.run.dir={folder}" in capsys.readouterr().out
    assert (folder / "metrics.csv").read_bytes() == before


def test_starts_of_the_same_second_get_folders_of_their_own(composed: ResolvedRun, tmp_path: Path) -> None:
    folder = tmp_path / "2026-01-02_03-04-05"
    starts = [replace(composed, run_folder=folder)] * 8
    with ThreadPoolExecutor(8) as threads:
        claimed = {start.run_folder.name for start in threads.map(claim_folder, starts)}
    assert claimed == {folder.name, *(f"{folder.name}_{number}" for number in range(2, 9))}
    # a folder that is typed, or resumed, is what was meant
    typed = replace(composed, run_folder=folder, overrides=[f"hydra.run.dir={folder}"])
    resumed = replace(composed, run_folder=folder, config=composed.config | {"resume": str(folder)})
    assert [claim_folder(run).run_folder for run in (typed, resumed)] == [folder, folder]


def test_a_tilde_is_the_home_folder_and_never_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run = compose_run(["hydra.run.dir='~/x'"])
    assert run.run_folder == tmp_path / "x"
    [mistake] = check_run_folder(resolve(compose_run(["hydra.run.dir='~nobody_here/x'"])))
    assert str(mistake) == "hydra.run.dir=~nobody_here/x: there is no such user; type hydra.run.dir=<a folder>"


@pytest.mark.parametrize(
    ("name", "reason", "fix"),
    [
        ("config.json", "a published model", "model=huggingface {typed}, without resume"),
        ("adapter_config.json", "an adapter", "adapter=<lora or ia3> {typed} with its model"),
    ],
)
def test_what_is_published_is_not_resumed(
    name: str, reason: str, fix: str, composed: ResolvedRun, make_run: Callable[[str], Path], tmp_path: Path
) -> None:
    export = make_run("run") / "export"
    for folder in (tmp_path / "alone (1)", export):
        folder.mkdir()
        (folder / name).touch()
    (export.parent / "checkpoints" / "step_0000001.ckpt" / "manifest.json").touch()
    alone = resolved(composed.config | {"resume": str(tmp_path / "alone (1)")})
    [mistake] = _check_resume(alone, [])
    assert reason in mistake.reason
    key = "model.name" if name == "config.json" else "adapter.pretrained"
    assert mistake.fix.startswith(fix.format(typed=f"\"{key}='{tmp_path}/alone (1)'\""))
    [mistake] = _check_resume(resolved(composed.config | {"resume": str(export)}), [])
    assert mistake.fix == f"resume={tmp_path / 'run'}"


def test_a_run_cannot_end_before_its_smallest_number_of_steps(composed: ResolvedRun) -> None:
    def settings(**trainer: int) -> list[str]:
        config = composed.config | {"trainer": composed.config["trainer"] | trainer}
        return [mistake.setting for mistake in check_compatibility(resolved(config))]

    assert settings(min_steps=99, max_steps=3) == ["trainer.min_steps=99 trainer.max_steps=3"]
    assert settings(min_steps=3, max_steps=3) == []


@pytest.mark.parametrize("name", [".", ".."])
def test_a_name_of_dots_would_be_another_folder(name: str, composed: ResolvedRun) -> None:
    assert [m.setting for m in check_settings(composed.config | {"name": name})] == [f"name={name}"]


@pytest.mark.parametrize("prompt", ["    return x", "x  ", " \tit is ", "  ${name}"])
def test_blanks_around_a_prompt_are_part_of_it(prompt: str) -> None:
    [override] = quote_options([f"mode.prompt={prompt}"])
    assert parse_override(override).value() == prompt
    # a number, a list, a choice of options and a quoted text are what they were
    for text in ("optimizer.lr= 1e-3", "tags= [a, b]", "model= gpt2,llama_nano", "name= 'x'", "debug= nan"):
        assert text.endswith("nan") or quote_options([text]) == [text]


def test_a_folder_that_cannot_be_listed_is_left_to_whoever_locks_it(composed: ResolvedRun, tmp_path: Path) -> None:
    for folder in (tmp_path / ("a" * 300), tmp_path / "missing"):
        assert list(check_run_folder(resolved(composed.config, folder))) == []


def test_data_is_a_path_that_exists_or_a_data_set_of_the_hub(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}")

    def mistakes(**data: object) -> list[str]:
        return [str(mistake) for mistake in _check_data_path("data", data)]

    assert mistakes(path=str(rows), val_path=f"{tmp_path}/*.jsonl") == []
    assert mistakes(path="hf://HuggingFaceH4/no_robots", val_path=None) == []
    assert mistakes(path=str(rows), val_path="missing.jsonl") == [
        "data.val_path=missing.jsonl: there is no such file or folder; type data.val_path=<a path that exists>"
    ]


@pytest.mark.parametrize(
    ("source", "path", "expected"),
    [
        ("text_files", "hf://org/x", "reads files on disk; type data=documents data.path=hf://org/x"),
        ("documents", "HF://org/x", "begins with hf://; type data.path=hf://org/x"),
        ("documents", "hf://", "it names no dataset; type data.path=hf://<id of a dataset>"),
        ("documents", "file:///data/a.jsonl", "reads files on disk; type data.path=/data/a.jsonl"),
        ("conversations", "https://x.org/a.jsonl", "reads files on disk; type data.path=<a copy on disk>"),
        ("token_file", "s3://b/x.bin", "type data.path=<a copy on disk>, or data=token_shards data.path=s3://b/x.bin"),
        ("token_shards", "s3://b/x.bin", None),
        *((source, "s3://b/x.tar", None) for source in ("image_shards", "image_text")),
        ("image_folder", "hf://org/x", "reads files on disk; type data=image_table data.path=hf://org/x"),
        *((source, "hf://org/x", None) for source in ("documents", "conversations", "preferences", "prompts")),
        *((source, "hf://org/x", None) for source in ("image_table", "image_text", "table")),
    ],
)
def test_an_address_is_answered_with_the_data_that_reads_it(source: str, path: str, expected: str | None) -> None:
    node = yaml.safe_load((CONF / "data" / f"{source}.yaml").read_text(encoding="utf-8")) | {"path": path}
    mistakes = [str(mistake) for mistake in _check_data_path("data", node)]
    assert [message.endswith(expected or "") for message in mistakes] == ([True] if expected else [])


def test_several_paths_are_answered_with_a_glob_that_reads_them(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "below/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for names, pattern in ((("a.txt", "b.txt"), "*.txt"), (("a.txt", "below/c.txt"), "**/*.txt")):
        typed = f"[{','.join(str(tmp_path / name) for name in names)}]"
        [mistake] = _check_data_path("data", {"path": typed})
        assert mistake.reason == "it takes one path, and these are 2"
        assert mistake.fix == f"'data.path={tmp_path}/{pattern}', which reads all of that name"
    [mistake] = _check_data_path("data", {"path": f"[{tmp_path}/a.txt]"})
    assert mistake.fix == f"data.path={tmp_path}/a.txt"


def test_an_address_is_no_place_to_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for write, setting in ((claim_output, "mode.output"), (lambda path, _: open_cache_dir(path), "data.cache_dir")):
        for path, fix in (("s3://bucket/out", "<path on disk>"), (f"file://{tmp_path}/out", f"{tmp_path}/out")):
            with pytest.raises(ConfigError, match="it is an address") as caught:
                write(path, setting)
            assert (caught.value.setting, caught.value.fix) == (f"{setting}={path}", f"{setting}={fix}")
    assert [*tmp_path.iterdir()] == []


def test_a_run_that_has_saved_nothing_is_started_again_not_resumed(composed: ResolvedRun, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("Interrupted\n")
    [mistake] = _check_resume(resolved(composed.config | {"resume": str(tmp_path)}), [])
    assert mistake.reason == "the run in it has saved no checkpoint, so there is no step to go on from"
    assert mistake.fix == "the command that started it, without resume"
