"""An export of a model that reads images: its processor gives the ids and pixels of training, and its text is equal."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from illustrated_runs import IMAGE_ID, list_overrides, train
from PIL import Image
from support import composed_config, execute, resolved

import lightning_recipes as lr
from recipes.build import build

ASKED = ("mode.apply_chat_template=true", "mode.prompt=color?", "mode.max_new_tokens=8", "mode.temperature=0")


@pytest.fixture(scope="module", params=["whole", "of parts"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with its export.

    The whole model has a template of parts and a token for images, the other one a template of texts, and no token.
    """
    folder = train(tmp_path_factory.mktemp("exported"), is_of_parts=request.param == "of parts")
    assert execute("mode=export", f"resume={folder}") == 0
    return folder


def source_of(run: Path) -> Any:
    """Return the data of the run, all of it for validation."""
    is_of_parts = not (run.parent / "published" / "config.json").exists()
    typed = [each for each in list_overrides(run.parent, is_of_parts=is_of_parts) if "val_fraction" not in each]
    typed.append(f"data.val_path={run.parent / 'questions.jsonl'}")
    source = build(resolved(composed_config(*typed), run.parent / "unused")).data.source
    source.prepare()
    return source


def test_the_processor_gives_the_ids_and_the_pixels_of_training(run: Path) -> None:
    processor = hf.AutoProcessor.from_pretrained(run / "export")
    source = source_of(run)
    number = 20
    questions = zip(source.questions(number), source.question_images(number), source.question_rows(number), strict=True)
    seen = set()
    for (prompt, _), images, row in questions:
        [asked, _] = row["messages"]
        parts = [part if part["type"] == "text" else {"type": "image"} for part in asked["content"]]
        files = [Image.open(run.parent / part["path"]) for part in asked["content"] if part["type"] == "image"]
        text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
        given = processor(text=text, images=files or None, return_tensors="pt")
        assert given.input_ids[0].tolist() == prompt
        if files:
            assert torch.allclose(given.pixel_values, images, atol=1e-6)
        seen.add(len(files))
    assert seen == {0, 1, 2}


def test_transformers_generates_the_text_of_a_sample(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    image = run.parent / "2.png"
    capfd.readouterr()
    assert execute("mode=sample", f"resume={run}", *ASKED, f"mode.image={image}") == 0
    text = capfd.readouterr().out.partition("color?\n")[2].removesuffix("\n")
    processor = hf.AutoProcessor.from_pretrained(run / "export")
    model: Any = hf.LlavaForConditionalGeneration.from_pretrained(run / "export").eval()
    asked = [{"type": "image", "image": Image.open(image)}, {"type": "text", "text": "color?"}]
    chat = [{"role": "user", "content": asked}]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    given = processor.apply_chat_template(chat, **options)
    out = model.generate(**given, max_new_tokens=8, do_sample=False)[0, given.input_ids.shape[1] :]
    assert model.generation_config.suppress_tokens == [IMAGE_ID]
    assert processor.tokenizer.decode(out, skip_special_tokens=True) == text


def test_the_export_loads_with_its_tokenizer_and_says_what_an_image_is(run: Path) -> None:
    record = json.loads((run / "export" / "export.json").read_text())
    assert record["format"] == "transformers"
    assert record["inputs"]["images"] == record["inputs"]["images"] | {
        "shape": [3, 8, 8],
        "tokens": 4,
        "token": IMAGE_ID,
    }
    loaded: Any = lr.load(run / "export")
    of_run: Any = lr.load(run)
    tokens = torch.tensor([[1, *[IMAGE_ID] * 4, 5]])
    images = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(loaded(tokens, images), of_run(tokens, images))
    assert loaded.tokenizer.spell(IMAGE_ID) == "<image>"
