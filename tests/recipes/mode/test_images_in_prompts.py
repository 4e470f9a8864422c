"""What is done with a run that has learned from images: answers, their rewards, samples, a chat about an image."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from illustrated_runs import IMAGE_ID, train
from support import execute, read_metrics

from recipes.config import compose_and_check
from recipes.generation import generate
from recipes.tokenizer import NUM_BYTES

GREEDY = ("mode.max_new_tokens=8", "mode.temperature=0")
ASKED = ("mode.apply_chat_template=true", "mode.prompt=color?")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("illustrated"), "reward=[vqa_accuracy,mine]", *own_reward(tmp_path_factory))


def own_reward(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Write a reward that gives the number in the answers of a row."""
    path = tmp_path_factory.getbasetemp() / "mine.py"
    path.write_text(
        "def number(prompts, completions, references, rows):\n"
        "    return [float(row['answers'][0].split()[1]) for row in rows]\n"
    )
    return [f"reward.mine.path={path}:number"]


def sampled(run: Path, capfd: pytest.CaptureFixture[str], *typed: str) -> str:
    capfd.readouterr()
    assert execute("mode=sample", f"resume={run}", *GREEDY, *typed, f"reward.mine.path={_mine(run)}") == 0
    return capfd.readouterr().out


def _mine(run: Path) -> str:
    config = (run / "config.yaml").read_text()
    return next(line.split("path: ")[1] for line in config.splitlines() if "mine.py:number" in line)


def test_questions_show_an_image_once_and_rewards_see_the_row_of_each_although_their_texts_are_the_same(
    run: Path,
) -> None:
    rows = [json.loads(line) for line in (run / "answers.jsonl").open()]
    assert len(rows) == 4
    assert all(row["question"].count("<image>") <= 2 for row in rows)
    assert len({row["question"] for row in rows}) < 4
    assert len({row["reward/mine"] for row in rows}) == 4
    for row in rows:
        assert ("red", "blue")[int(row["reward/mine"]) % 2] == row["expected"]
    assert "val/reward/vqa_accuracy" in read_metrics(run)[-1]


def test_an_evaluation_answers_as_the_run_did(run: Path) -> None:
    last = read_metrics(run)[-1]
    typed = ["mode=evaluate", f"resume={run}", "mode.answers.num_samples=4", f"reward.mine.path={_mine(run)}"]
    assert execute(*typed) == 0
    found = json.loads((run / "evaluate_val.json").read_text())
    assert (found["exact_match"], found["reward/mine"]) == (last["val/exact_match"], last["val/reward/mine"])


def test_images_are_first_or_where_the_prompt_says_in_the_order_of_their_files(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[list[int], Any]] = []

    def record(model: Any, prompts: Any, *others: Any, **options: Any) -> Any:
        given.append((prompts[0], options["images"]))
        return generate(model, prompts, *others, **options)

    monkeypatch.setattr("recipes.task.generation.generate", record)
    red, blue = (run.parent / f"{number}.png" for number in (2, 3))
    chat = "mode.apply_chat_template=true"
    for typed in (
        [*ASKED, f"mode.image={red}"],
        [chat, 'mode.prompt="<image>\ncolor?"', f"mode.image={red}"],
        [*ASKED, f"mode.image=[{red},{blue}]"],
        [chat, "mode.prompt=a <image> b <image>", f"mode.image=[{blue},{red}]"],
        ["mode.prompt=a <image> b", f"mode.image={red}"],
        [*ASKED],
    ):
        sampled(run, capfd, *typed)
    prompts, images = zip(*given, strict=True)
    assert prompts[0] == prompts[1]
    assert torch.equal(images[0][0], images[1][0])
    assert [prompt.count(IMAGE_ID) for prompt in prompts] == [4, 4, 8, 8, 4, 0]
    assert images[2][0].shape == (2, 3, 8, 8)
    assert torch.equal(images[2][0], images[3][0].flip(0))
    assert not torch.equal(images[2][0][0], images[2][0][1])
    image, a, b = [IMAGE_ID] * 4, [*b"a "], [*b" b"]
    assert prompts[4] == [NUM_BYTES, *a, *image, *b], "after <s>"
    assert images[5] is None


def test_a_chat_about_an_image_answers_as_a_sample_does(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = f"mode.image={run.parent / '2.png'}"
    answer = sampled(run, capfd, *ASKED, image).partition("color?\n")[2].removesuffix("\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("color?\nand <image>?\n/new\ncolor?\n"))
    assert execute("mode=chat", f"resume={run}", *GREEDY, image, f"reward.mine.path={_mine(run)}") == 0
    parts = capfd.readouterr().out.split("> ")
    assert parts[1] == parts[4] == f"{answer}\n"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            ["mode.image=none.png"],
            "there is no such file or folder; type mode.image=<file of an image>",
        ),
        (["mode.image=."], "it is a folder; type mode.image=<file of an image>"),
        (
            ["mode.prompt=<image>"],
            "it has 1 place for images, and there are none in mode.image; type 1 file as mode.image, or a prompt"
            " without <image>, which the images are before",
        ),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_read(run: Path, typed: list[str], said: str) -> None:
    _, mistakes = compose_and_check(["mode=sample", f"resume={run}", *typed, f"reward.mine.path={_mine(run)}"])
    assert [str(mistake) for mistake in mistakes] == [f"{typed[0]}: {said}"]


def test_a_file_that_is_no_image_is_one_sentence(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = run.parent / "questions.jsonl"
    typed: list[Any] = ["mode=sample", f"resume={run}", *ASKED, f"mode.image={file}"]
    assert execute(*typed, f"reward.mine.path={_mine(run)}") == 2
    said = "".join(capfd.readouterr())
    assert f"1. mode.image={file}\n   it is none of BMP, GIF, JPEG" in said
