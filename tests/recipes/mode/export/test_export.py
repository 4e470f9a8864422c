"""What an export refuses to replace, and what it says about an adapter."""

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from exported_models import Kind, Text, make_model, publish_text

from recipes.errors import ConfigError
from recipes.mode.export import export

PLAIN = Text(is_like_sentencepiece=False, has_start=False, has_several_ends=False, has_template=False)


def make_run(folder: Path, published: Path) -> Any:
    tokenizer = folder / "tokenizer"
    accumulation = SimpleNamespace(global_batch_size=8)
    of_model = {"base": str(published), "model_node": {"pretrained": str(published)}, "data_names": ["text_files"]}
    return SimpleNamespace(
        folder=folder, name="mine", tokenizer_folder=tokenizer, published=str(published), checkpoint=None,
        accumulation=accumulation, has_own_training=False, **of_model,
    )  # fmt: skip


def export_separately(run: Any, path: str | None) -> int:
    return export(
        run, path=path, weights="trained", adapter="separate", format="auto", dtype=None, push_to=None, private=True
    )


def test_an_export_never_replaces_the_published_model_that_its_run_started_from(tmp_path: Path) -> None:
    source, run_folder = tmp_path / "source", tmp_path / "run"
    source.mkdir()
    run_folder.mkdir()
    (tmp_path / "link").symlink_to(source)
    (run_folder / "export").symlink_to(source)
    run = make_run(run_folder, source)
    for path, setting in (
        (str(source), f"mode.path={source}"),
        (str(tmp_path / "link"), f"mode.path={tmp_path / 'link'}"),
        (None, f"mode.path={run_folder / 'export'}"),
    ):
        with pytest.raises(ConfigError, match="holds the published model that the run started from") as raised:
            export_separately(run, path)
        assert (raised.value.setting, raised.value.fix) == (setting, "mode.path=<another folder>")
    assert [*source.iterdir()] == []


def test_an_export_replaces_an_earlier_one_of_its_run_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "source", tmp_path / "export"
    model = make_model(Kind("any llama", "lora"), publish_text(PLAIN, source), source)
    (source / "secret.txt").symlink_to("/etc/hostname")
    loaded = (SimpleNamespace(model=model), tmp_path / "step_0000002.ckpt")
    monkeypatch.setattr("recipes.mode.export.load_task", lambda run, weights: loaded)
    run = make_run(tmp_path / "run", source)

    def export_into(folder: Path, run: Any = run) -> int:
        return export_separately(run, str(folder))

    for name in ("config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "export.json"):
        foreign = tmp_path / f"with_{name}"
        foreign.mkdir()
        (foreign / name).write_text('{"run": "of another"}')
        (foreign / "README.md").touch()
        with pytest.raises(ConfigError, match=f"it holds {name}, which is not of an export of this run"):
            export_into(foreign)
        assert sorted(path.name for path in foreign.iterdir()) == ["README.md", name]
    with pytest.raises(ConfigError, match="the checkpoints of the run are there"):
        export_into(run.folder / "checkpoints" / "last")
    assert [export_into(target), export_into(target)] == [0, 0]
    assert "secret.txt" not in [path.name for path in target.iterdir()], "a link out of a downloaded folder"
    assert str(tmp_path) not in (target / "export.json").read_text()
    with pytest.raises(ConfigError, match="which is not of an export of this run"):
        export_into(target, make_run(tmp_path / "another", source))
    (target / "adapter_config.json").write_text("{}")  # somebody has put another adapter there
    with pytest.raises(ConfigError, match="which is not of an export of this run"):
        export_into(target)
    # the folder of a run holds no less of others' work than a typed one
    own = run.folder / "export"
    target.rename(own)
    with pytest.raises(ConfigError, match="which is not of an export of this run") as raised:
        export_separately(run, None)
    assert (raised.value.setting, raised.value.fix) == (f"mode.path={own}", "mode.path=<another folder>")


def test_an_export_is_that_of_its_run_after_the_run_has_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    model = make_model(Kind("any llama", "lora"), publish_text(PLAIN, source), source)
    loaded = (SimpleNamespace(model=model), tmp_path / "step_0000002.ckpt")
    monkeypatch.setattr("recipes.mode.export.load_task", lambda run, weights: loaded)
    for name, time in (("run", 1.0), ("another", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_text(f'{{"time": {time}, "step": 0, "event": "start"}}\n')
    run = make_run(tmp_path / "run", source)
    assert export_separately(run, None) == 0
    moved = make_run(run.folder.rename(tmp_path / "moved"), source)
    assert export_separately(moved, None) == 0
    copied = shutil.copytree(moved.folder / "export", tmp_path / "another" / "export")
    with pytest.raises(ConfigError, match="which is not of an export of this run"):
        export_separately(make_run(copied.parent, source), None)


@pytest.mark.parametrize(("adapter", "num_lines"), [("lora", 0), ("qlora", 1)])
def test_only_an_adapter_beside_nf4_is_said_to_depend_on_it(
    adapter: str, num_lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lightning_recipes")
    source = tmp_path / "source"
    model = make_model(Kind("any llama", adapter), publish_text(PLAIN, source), source)
    loaded = (SimpleNamespace(model=model), tmp_path / "step_0000002.ckpt")
    monkeypatch.setattr("recipes.mode.export.load_task", lambda run, weights: loaded)
    run = make_run(tmp_path / "run", source)
    assert export_separately(run, str(tmp_path / "export")) == 0
    assert caplog.text.count("trained on NF4-quantized weights") == num_lines
