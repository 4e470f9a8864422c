"""An export is pushed once it is verified, with the token of the environment; if the hub refuses, it is on the disk."""

import json
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import yaml
from hub_server import Hub, serve
from support import execute

import lightning_recipes as lr
from recipes.mode.export.card import find_licence
from recipes.mode.export.hub import push
from recipes.runtime.exit_codes import ExitCode

SECRET = "hf_a_secret_of_the_environment"
OWN = "model._target_=small_models.SmallClassifier"
FILES = ["README.md", "export.json", "model.safetensors"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of two steps of a small classifier."""
    folder = tmp_path_factory.mktemp("pushed")
    typed = ["model=resnet18", OWN, "trainer.max_steps=2", "eval_every=2"]
    typed += ["trainer.accelerator=cpu", "callbacks=[]", "global_batch_size=4", "eval_samples=8", "name=mine"]
    assert execute(*typed, f"hydra.run.dir={folder}") == 0
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", SECRET)
        yield hub


def export(run: Path, *overrides: str) -> int:
    return execute(OWN, f"resume={run}", "mode=export", *overrides)


def test_the_files_of_an_export_are_pushed_and_nothing_else(
    run: Path, hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "notes.txt").write_text("not of the export")
    hub.repositories["me/it"] = {"model.onnx": b"of an earlier export", "mine.txt": b"kept"}
    assert export(run, f"mode.path={folder}", "mode.push_to=me/it") == ExitCode.FINISHED
    printed = "".join(capfd.readouterr())
    assert f"Pushed to {hub.address}/me/it" in printed
    assert hub.created == {"me/it": "private"}
    pushed = hub.repositories["me/it"]
    assert {*pushed} == {*FILES, "mine.txt"}
    assert all(pushed[name] == (folder / name).read_bytes() for name in FILES)
    assert hub.tokens - {None} == {f"Bearer {SECRET}"}  # the check of the card's head needs none
    assert SECRET not in printed
    assert all(SECRET.encode() not in file.read_bytes() for file in folder.iterdir())


def test_a_repository_is_public_only_where_that_is_typed(run: Path, hub: Hub, tmp_path: Path) -> None:
    assert export(run, f"mode.path={tmp_path}", "mode.push_to=me/it", "mode.private=false") == ExitCode.FINISHED
    assert hub.created == {"me/it": "public"}


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (
            401,
            "the hub does not accept the token; type HF_TOKEN=<a token that may write> before the command",
        ),
        (403, "the token may not write there; type HF_TOKEN=<a token that may write there> before the command"),
        (404, "the hub knows no such user or organization; type mode.push_to=<user or organization of yours>/<name>"),
        (500, "the hub answers with status 500; type the same command later"),
    ],
)
def test_an_answer_of_the_hub_is_one_line_and_the_export_stays(
    status: int, message: str, run: Path, hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.refuses = status
    assert export(run, f"mode.path={tmp_path}", "mode.push_to=me/it") == ExitCode.UNSAVED
    lines = [line for line in "".join(capfd.readouterr()).splitlines() if "mode.push_to" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"mode.push_to=me/it: {message}")
    assert lines[0].endswith(f". The export is whole in {tmp_path}")
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES


def test_without_a_network_or_offline_the_line_says_so(
    run: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    failure = push(tmp_path, "me/it", private=True, files=[], owned=[])
    assert failure is not None
    assert failure.startswith("mode.push_to=me/it: the hub cannot be reached (ConnectError: ")
    assert failure.endswith("; type the same command where there is a network")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    failure = push(tmp_path, "me/it", private=True, files=[], owned=[])
    huggingface_hub.close_session()
    assert failure is not None
    assert "the hub cannot be reached (OfflineModeIsEnabled: " in failure


def test_a_missing_token_ends_it_before_the_work(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert export(run, f"mode.path={tmp_path}", "mode.push_to=me/it") == ExitCode.INVALID_CONFIG
    assert "there is no token for the hub" in "".join(capfd.readouterr())
    assert [*tmp_path.iterdir()] == []


def test_the_card_says_what_it_is_and_a_card_of_somebody_stays(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert export(run, f"mode.path={tmp_path}") == ExitCode.FINISHED
    card = (tmp_path / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front == {"library_name": "lightning-recipes", "tags": ["lightning-recipes"]}
    [last] = [row for row in lr.read(run).rows if "val/loss" in row]
    number = sum(parameter.numel() for parameter in lr.load(tmp_path, OWN).parameters())
    for name, value in {
        "model": "SmallClassifier",
        "parameters": f"{number:,}",
        "dtype": "float32",
        "trained from": "random weights",
        "data": "digits",
        "optimizer steps": "2",
        "samples per step": "4",
        "val/loss": f"{last['val/loss']:.6g}",
        "inputs": "images [1, 8, 8], float32",
        "outputs": "10 classes",
        "classes": "0, 1, 2, 3, 4, 5, 6, 7, 8, 9",
    }.items():
        assert f"| {name} | {value} |" in card, name
    assert "# mine\n" in card
    assert str(tmp_path) not in card
    (tmp_path / "README.md").write_text(card + "\nTrained by me.\n")
    assert export(run, f"mode.path={tmp_path}", "mode.dtype=bfloat16") == ExitCode.FINISHED
    assert "is not as an export has written it, and stays as it is" in "".join(capfd.readouterr())
    assert (tmp_path / "README.md").read_text().endswith("\nTrained by me.\n")
    (tmp_path / "README.md").write_text(card)
    assert export(run, f"mode.path={tmp_path}", "mode.dtype=bfloat16") == ExitCode.FINISHED
    assert "| dtype | bfloat16 |" in (tmp_path / "README.md").read_text()
    assert json.loads((tmp_path / "export.json").read_text())["dtype"] == "bfloat16"


def test_the_licence_of_a_base_is_on_the_card(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\n---\n# A model\n")
    assert find_licence(str(tmp_path)) == ("apache-2.0", False)
    (tmp_path / "LICENSE").write_text("for anybody")
    (tmp_path / "README.md").write_text("---\n- a list\n---\n")
    assert find_licence(str(tmp_path)) == (None, True)
    (tmp_path / "README.md").write_text("no front matter")
    assert find_licence(str(tmp_path)) == (None, True)
    assert find_licence(None) == (None, False)
