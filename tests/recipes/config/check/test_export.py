"""What an export cannot be, found before a checkpoint is read."""

import shlex

import pytest
from typed_remedies import find_refused

from recipes.config import compose_and_check

EXPORT = ["mode=export", "resume=auto", "hydra.run.dir=x"]
WRONG = {
    "mode.dtype=float8": [
        "mode.dtype=float8: it takes float32 or bfloat16 or float16 or null; type mode.dtype=float32"
    ],
    "mode.format=gguf": [
        "mode.format=gguf: it takes auto or transformers or timm or safetensors or onnx; type mode.format=<auto or"
        " transformers or timm or safetensors or onnx>"
    ],
    "mode.format=onnx mode.dtype=bfloat16": [
        "mode.format=onnx mode.dtype=bfloat16: a graph is compared with the model in float32, and onnxruntime converts"
        " it to other dtypes; type mode.format=onnx mode.dtype=float32"
    ],
    "adapter=lora mode.format=onnx mode.adapter=separate": [
        "mode.format=onnx mode.adapter=separate: an adapter alone has the layout of peft; type mode.format=onnx"
        " mode.adapter=merged"
    ],
    "mode.format=transformers model=resnet18": [
        "mode.format=transformers: transformers has no layout for ResNet18; type mode.format=safetensors, which"
        " lightning_recipes.load loads"
    ],
    "task=lightning 'task.module={_target_: own_modules.Classifier}' data=digits mode.format=onnx": [
        "mode.format=onnx task=lightning: what a LightningModule takes and returns is known to itself alone; type"
        " mode.format=safetensors"
    ],
    "mode.push_to=mine": [
        "mode.push_to=mine: a repository of the hub has the name of its user or organization, a slash, and its own;"
        " type mode.push_to=<user or organization>/mine"
    ],
    "mode.push_to='https://huggingface.co/me/it'": [
        "mode.push_to=https://huggingface.co/me/it: a repository of the hub has the name of its user or organization, a"
        " slash, and its own; type mode.push_to=<user or organization>/it"
    ],
    "mode.private=false": [
        "mode.private=false: nothing is pushed, so it has no effect; type mode.private=false mode.push_to=<user or"
        " organization>/<name>, or the same command without it"
    ],
}


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.config.check.export.find_spec", lambda name: name)


@pytest.mark.parametrize("typed", WRONG)
def test_what_an_export_cannot_be_is_answered(typed: str) -> None:
    command = [*EXPORT, *shlex.split(typed)]
    _, mistakes = compose_and_check(command)
    assert [*map(str, mistakes)] == WRONG[typed]
    assert find_refused(command, mistakes) == []


@pytest.mark.parametrize(
    "typed",
    [
        "mode.dtype=float16",
        "model=resnet18",
        "model=resnet18 mode.format=onnx",
        "mode.format=onnx mode.dtype=float32",
        "mode.push_to=my-team_2/a.model mode.private=false",
        "model=resnet50 data.targets=values task=regression mode.format=safetensors mode.dtype=bfloat16",
    ],
)
def test_what_an_export_can_be_is_accepted(typed: str) -> None:
    _, mistakes = compose_and_check([*EXPORT, *typed.split()])
    assert [*map(str, mistakes)] == []


def test_packages_that_are_missing_are_named_with_what_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.config.check.export.find_spec", lambda name: None if "onnx" in name else name)
    _, [mistake] = compose_and_check([*EXPORT, "mode.format=onnx"])
    assert str(mistake) == (
        "mode.format=onnx: it needs onnx and onnxscript and onnxruntime, which are not installed; type pip install -e"
        " '.[onnx]'"
    )
    monkeypatch.setattr("recipes.config.check.export.find_spec", lambda name: None)
    _, [mistake] = compose_and_check([*EXPORT, "mode.push_to=me/it"])
    assert mistake.reason == "it needs huggingface_hub, which is not installed"


def test_a_model_of_transformers_has_no_other_layout(tmp_path_factory: pytest.TempPathFactory) -> None:
    from support import needed_by

    typed = ["model=huggingface", *needed_by("", tmp_path_factory.mktemp("model"), model="huggingface")]
    _, mistakes = compose_and_check([*EXPORT, *typed, "tokenizer=bytes", "mode.format=safetensors"])
    assert [mistake.fix for mistake in mistakes if mistake.setting.startswith("mode.")] == ["mode.format=transformers"]
