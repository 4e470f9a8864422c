"""Every command of README.md and the pages is run (tests/test_train.py) or composed and checked, with the reason."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import BLOCKS, OWN_DATA, Block, read_commands
from support import ROOT

from recipes.config import compose_and_check
from recipes.config.compose import CONF
from recipes.errors import INSTALLED
from recipes.pipeline.main import is_pipeline
from recipes.pipeline.pipeline import check_pipeline
from recipes.project import NEW, open_project, write_project
from recipes.run_folder import CONFIG_FILE
from recipes.sweep.command_line import check_command

OWN_RUNS = ("houses", "reviews")  # of own_data.md
CHECKED = [block for block in BLOCKS if block.language == "sh" and block.reason is not None and read_commands(block)]
PYTHON_PAGES = sorted({block.page for block in BLOCKS if block.language == "python" and block.comment != "excerpt"})


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_a_command_is_in_a_block_that_the_tests_read() -> None:
    """In another language it would be checked by nobody."""
    hidden = [
        f"{name(block.page)}: {block.text}" for block in BLOCKS if block.language != "sh" and read_commands(block)
    ]
    assert hidden == []


def test_a_reason_is_given_where_a_command_is_not_run() -> None:
    assert all(len(block.reason or "") > 8 for block in CHECKED)
    assert len(CHECKED) >= 10


@pytest.mark.parametrize("block", CHECKED, ids=lambda block: f"{name(block.page)}: {block.text[:60]!r}")
def test_a_command_that_needs_more_than_this_machine_composes_and_is_valid(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path / "my_code")
    monkeypatch.chdir(_make_workplace(tmp_path))
    commands = read_commands(block)
    if block.page.name == "project.md":
        project = _make_project(tmp_path)
        monkeypatch.syspath_prepend(project / "src")
    if INSTALLED in block.text:
        monkeypatch.setenv("PYTHONPATH", "")
        monkeypatch.chdir(project)
        if "resume=logs/" in block.text:
            Path("logs").symlink_to(tmp_path / "logs")
        commands = [[*open_project(words), *words] for words in commands if words[0] != NEW]
    for overrides in commands:
        mistakes = [mistake for mistake in _check(overrides) if "is this machine offline?" not in mistake]
        if any(override.startswith("strategy.nvme_path=") for override in overrides):  # a disk, and a library for it
            mistakes = [mistake for mistake in mistakes if not re.search("nvme_path|libaio", mistake)]
        if "resume=logs/mine" in overrides:  # here of GPT-2 on texts, on two pages not
            others = ("the data has no answers", "its weights are those of GPT2")
            mistakes = [mistake for mistake in mistakes if not any(other in mistake for other in others)]
        made = [f"hydra.run.dir=logs/{run}" for run in ("mine", "judge", "simclr", *OWN_RUNS)]
        if not {*made}.isdisjoint(overrides):  # which other commands resume
            mistakes = [mistake for mistake in mistakes if "the folder contains a run" not in mistake]
        assert mistakes == [], overrides


def _check(overrides: list[str]) -> list[str]:
    if "--help" in overrides or any(word.startswith("--config") for word in overrides):
        return []
    if "-m" in overrides or "--multirun" in overrides:
        typed = [word for word in overrides if word not in ("-m", "--multirun")]
        return [str(mistake) for mistake in check_command(typed, config_folder=CONF, config_name="config").mistakes]
    if is_pipeline(overrides):
        return [str(mistake) for mistake in check_pipeline(overrides, config_folder=CONF, config_name="config")[2]]
    return [str(mistake) for mistake in compose_and_check(overrides)[1]]


def _make_workplace(folder: Path) -> Path:
    """Make the files that the pages name: texts, tokens and a finished run."""
    (folder / "my_code").mkdir()
    for page, files in (("own_data.md", OWN_DATA), ("own_module.md", ["net.py"])):
        own = [
            block for block in BLOCKS if block.page.name == page and block.language == "python" and not block.comment
        ]
        for file, block in zip(files, own, strict=False):
            (folder / "my_code" / file).write_text(block.text)
    (folder / "my_texts").mkdir()
    (folder / "my_texts/a.txt").write_text("text\n" * 100)
    (folder / "tokens.bin").write_bytes(bytes(2000))
    (folder / "SmolLM2-135M-Instruct").mkdir()
    (folder / "SmolLM2-135M-Instruct/config.json").write_text('{"model_type": "llama", "vocab_size": 49152}')
    (folder / "chats.jsonl").write_text('{"prompt": "1 + 1 = ", "completion": "2"}\n')
    for rows in ("pairs", "answers"):
        (folder / f"{rows}.jsonl").write_text('{"prompt": "1 + 1 = ", "chosen": "2", "rejected": "3"}\n')
    (folder / "qa.csv").write_text("question,answer\n1 + 1,2\n")
    (folder / "prompts.jsonl").write_text('{"prompt": "1 + 1 = ", "answer": "2"}\n')
    (folder / "questions.jsonl").write_text('{"question": "1 + 1 = "}\n')
    (folder / "my_rewards.py").write_text("def score(completions, **given):\n    return [0.0 for _ in completions]\n")
    (folder / "logs/judge/export").mkdir(parents=True)
    (folder / "logs/judge/export/config.json").write_text('{"architectures": ["GPT2ForSequenceClassification"]}')
    for weights in ("convnext_tiny", "vit"):
        (folder / f"{weights}.safetensors").write_bytes(bytes(8))
    for table in ("iris", "houses", "patients", "photos"):
        (folder / f"{table}.csv").write_text("size,price\n1,2\n")
    for name in ("raw", "tokens", "prepared/documents", "photos", "labelled", "imagenet"):
        (folder / name).mkdir(parents=True)
    from omegaconf import OmegaConf

    trained = [words for block in BLOCKS if block.page.name == "own_data.md" for words in read_commands(block)]
    typed = {run: ["hydra.run.dir=logs/mine"] for run in ("mine", "long", "run1", "judge")}
    typed["simclr"] = ["recipe=simclr", f"data.path={folder / 'photos'}", "model.name=resnet50"]
    typed |= {run: next(words for words in trained if f"hydra.run.dir=logs/{run}" in words) for run in OWN_RUNS}
    for run, words in typed.items():
        composed, _ = compose_and_check(words)
        assert composed is not None
        checkpoint = folder / f"logs/{run}/checkpoints/step_0000700.ckpt"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
        (checkpoint.parent / "last").symlink_to(checkpoint.name)
        OmegaConf.save(OmegaConf.create(composed.config), folder / "logs" / run / CONFIG_FILE)
        (folder / "logs" / run / "environment.json").write_text(
            json.dumps({"overrides": words if run in OWN_RUNS else []})
        )
    return folder


def _make_project(folder: Path) -> Path:
    """Make the project that a page names, with the recipe there."""
    project = write_project([str(folder / "my_project")])
    wide = next(block for block in BLOCKS if block.page.name == "project.md" and block.language == "yaml")
    (project / "conf/recipe/wide.yaml").write_text(wide.text)
    return project


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=name)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    blocks = [block for block in BLOCKS if block.page == page and block.language == "python"]
    program = "\n".join(block.text for block in blocks if block.comment != "excerpt")
    (tmp_path / "page.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
