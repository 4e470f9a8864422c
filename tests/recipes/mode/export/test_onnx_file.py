"""An ONNX graph computes what its model computes, for any number of samples and tokens, or is not written."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported_models import Kind, Text, make_model, publish_text
from support import TINY, execute, write_texts
from torch import Tensor, nn

import lightning_recipes as lr
from recipes.errors import ConfigError
from recipes.mode.export.onnx_file import TOLERANCE, write_onnx

onnxruntime: Any = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

STEPS = ["trainer.max_steps=2", "eval_every=2", "trainer.accelerator=cpu", "callbacks=[]", "global_batch_size=4"]
PLAIN = Text(is_like_sentencepiece=False, has_start=False, has_several_ends=False, has_template=False)


def compute(folder: Path, inputs: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    [outputs] = session.run(None, {"inputs": inputs.numpy()})
    return torch.from_numpy(outputs)


def assert_equal(computed: Tensor, expected: Tensor) -> None:
    assert computed.shape == expected.shape
    assert (computed - expected).abs().max() <= TOLERANCE * expected.abs().max().clamp(min=1.0)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    assert execute("model=resnet18", *STEPS, "eval_samples=8", f"hydra.run.dir={folder}") == 0
    return folder


def test_the_graph_of_a_classifier_takes_any_number_of_images(classifier: Path) -> None:
    assert execute(f"resume={classifier}", "mode=export", "mode.format=onnx") == 0
    folder, model = classifier / "export", lr.load(classifier)
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "export.json", "model.onnx"]
    record = json.loads((folder / "export.json").read_text())
    assert (record["format"], record["outputs"]["number"]) == ("onnx", 10)
    for number in (1, 2, 7):
        images = torch.rand(number, *record["inputs"]["shape"], generator=torch.Generator().manual_seed(number))
        with torch.no_grad():
            assert_equal(compute(folder, images), model(images))


def test_the_graph_of_a_language_model_takes_any_number_of_tokens_and_returns_no_padding(tmp_path: Path) -> None:
    texts, run = write_texts(tmp_path / "texts"), tmp_path / "run"
    typed = [text for text in TINY if not text.startswith("~")]
    assert execute(*typed, *STEPS, f"data.path={texts}", "compile=false", f"hydra.run.dir={run}") == 0
    assert execute(f"resume={run}", "mode=export", "mode.format=onnx") == 0
    assert (run / "export/tokenizer.json").is_file()
    model: Any = lr.load(run)
    for shape in ((1, 1), (2, 9), (5, 32)):
        tokens = torch.from_numpy(np.random.default_rng(1).integers(257, size=shape))
        with torch.no_grad():
            assert_equal(compute(run / "export", tokens), model(tokens)[..., :257])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rotary_models_become_graphs(family: str, tmp_path: Path) -> None:
    model = make_model(Kind(family), publish_text(PLAIN, tmp_path), tmp_path)
    difference = write_onnx(model, torch.arange(24).reshape(3, 8), tmp_path)
    assert difference <= TOLERANCE


def test_a_model_whose_operations_have_no_graph_is_refused_with_the_reason(tmp_path: Path) -> None:
    before = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    model = make_model(Kind("mixtral"), publish_text(PLAIN, tmp_path), tmp_path)
    with pytest.raises(ConfigError) as caught:
        write_onnx(model, torch.arange(24).reshape(3, 8), tmp_path)
    assert caught.value.setting == "mode.format=onnx"
    assert caught.value.reason.startswith("torch cannot write this model as a graph: DispatchError: No ONNX function")
    assert torch.backends.cudnn.conv.fp32_precision == before  # type: ignore[attr-defined]


class Untraced(nn.Module):
    """Adds 0.01 where it is not traced."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * 2.0 + (0.0 if torch.compiler.is_exporting() else 0.01)


def test_a_graph_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the outputs of the graph differ by 5.0e-03 from those of the model"):
        write_onnx(Untraced(), torch.ones(3, 4), tmp_path)
