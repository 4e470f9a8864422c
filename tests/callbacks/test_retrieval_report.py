"""What is retrieved is written once, by rank 0, with its images as PNG."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from callbacks.class_report import encode_image
from callbacks.report.page import write_report
from callbacks.report.retrieval import read_retrieved
from callbacks.retrieval_report import RetrievalReport

PIXELS = torch.arange(3 * 4 * 6, dtype=torch.uint8).view(3, 4, 6)
FOUND = {
    "num_images": 9,
    "num_captions": 12,
    "captions": [
        {
            "text": "a <b>cat</b>",
            "rank": 7,
            "images": [
                {"pixels": PIXELS, "cosine": 0.75, "is_own": True},
                {"pixels": 255 - PIXELS, "cosine": 0.5, "is_own": False},
            ],
        }
    ],
    "images": [{"pixels": PIXELS, "rank": 1, "captions": [{"text": "a dog", "cosine": -0.25, "is_own": False}]}],
}


def make_trainer(folder: Path, **settings: Any) -> Any:
    known = {
        "sanity_checking": False,
        "is_global_zero": True,
        "loggers": [],
        "default_root_dir": folder,
        "global_step": 12,
        "lightning_module": SimpleNamespace(automatic_optimization=True),
    }
    return SimpleNamespace(**known | settings)


def write(folder: Path, found: Any, **settings: Any) -> None:
    module: Any = SimpleNamespace(recipes_retrieved=lambda: found)
    RetrievalReport().on_validation_end(make_trainer(folder, **settings), module)


def test_a_record_has_the_images_as_png_and_the_rest_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, FOUND)
    record = json.loads((tmp_path / "retrieval_val.json").read_text())
    assert (record["step"], record["num_images"], record["num_captions"]) == (12, 9, 12)
    [caption], [image] = record["captions"], record["images"]
    assert caption == {
        "text": "a <b>cat</b>",
        "rank": 7,
        "images": [
            {"pixels": encode_image(PIXELS), "cosine": 0.75, "is_own": True},
            {"pixels": encode_image(255 - PIXELS), "cosine": 0.5, "is_own": False},
        ],
    }
    assert image["pixels"] == encode_image(PIXELS)


def test_nothing_is_written_but_by_rank_0_and_of_what_is_known(tmp_path: Path) -> None:
    write(tmp_path, None)
    write(tmp_path, FOUND, is_global_zero=False)
    write(tmp_path, FOUND, sanity_checking=True)
    RetrievalReport().on_validation_end(make_trainer(tmp_path), make_trainer(tmp_path))
    assert not [*tmp_path.iterdir()]


def test_the_page_marks_its_own_and_escapes_captions(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,train/loss\n8,1.0\n")
    write(tmp_path, FOUND)
    (tmp_path / "retrieval_test.json").write_text('{"num_images": 1, "num_captions": 1, "images": [{"rank": 1}]}')
    write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    shown = page.partition("Retrieval of val</h2>")[2].partition("</section>")[0]
    assert "9 images with 12 captions at step 12" in shown
    assert shown.count("<figure") == 5
    assert shown.count('<figure class="own">') == 1
    assert shown.index("0.750") < shown.index("0.500") < shown.index("-0.250")
    assert "own at rank 7 of 9" in shown
    assert "own at rank 1 of 12" in shown
    assert "a &lt;b&gt;cat&lt;/b&gt;" in shown
    assert (
        "retrieval_test.json could not be read: {&#39;rank&#39;: 1} is not a query with its rank and captions" in page
    )


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"text": 3, "rank": 1, "images": []}, "is neither an image nor a caption"),
        ({"pixels": '"><script>', "rank": 1, "images": []}, "is neither an image nor a caption"),
        ({"text": "x", "images": []}, "is not a query with its rank and images"),
        ({"text": "x", "rank": 1, "images": ["y"]}, "y is neither an image nor a caption"),
    ],
)
def test_what_is_damaged_is_named(item: dict[str, Any], message: str) -> None:
    record = {"split": "val", "num_images": 2, "num_captions": 2, "captions": [item], "images": []}
    with pytest.raises(ValueError, match=message):
        read_retrieved(record)
    assert read_retrieved({"split": "val"}) is None
