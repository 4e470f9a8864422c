"""What an export says of itself, from which `lr.load` constructs a model with the same outputs, to the bit."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from own_modules import Classifier
from safetensors.torch import load_file, save_file
from support import TINY, execute, write_texts
from torch import nn

import lightning_recipes as lr
from recipes.model.gpt2 import GPT2
from recipes.model.resnet import ResNet18

STEPS = ["trainer.max_steps=2", "eval_every=2", "trainer.accelerator=cpu", "callbacks=[]", "global_batch_size=4"]
OF_TEXT = [*(text for text in TINY if not text.startswith("~")), *STEPS]
PERCEPTRON = "model._target_=dataset_cases.Perceptron"
RUNS = {
    "classes": ["model=resnet18", "eval_samples=8"],
    "values": [
        *("data=dataset", "task=regression", "data.target_kind=values", "data.inputs=x", "data.targets=y"),
        *(PERCEPTRON, "data.train={_target_: dataset_cases.Rows, seed: 1}"),
        "data.val={_target_: dataset_cases.Rows, seed: 2}",
    ],
    "labels": [
        *(
            "data=dataset",
            "task=multilabel",
            "metrics=none",
            "data.target_kind=labels",
            PERCEPTRON,
            "model.num_outputs=3",
        ),
        *(f"data.{split}={{_target_: dataset_cases.Labelled, kind: labels}}" for split in ("train", "val")),
    ],
}
INPUTS = {
    "classes": {
        "kind": "images",
        "shape": [1, 8, 8],
        "dtype": "float32",
        "transform": "dark pixels in each 4 x 4 cell of the scan, 0 to 16, divided by 16",
    },
    "values": {"kind": "tensors", "shape": [8], "dtype": "float32"},
    "labels": {"kind": "tensors", "shape": [8], "dtype": "float32"},
}
OUTPUTS: dict[str, Any] = {
    "classes": {"kind": "classes", "number": 10, "classes": [*"0123456789"]},
    "values": {"kind": "values"},
    "labels": {"kind": "labels"},
}


def export(run: Path, *overrides: str) -> Path:
    assert execute(f"resume={run}", "mode=export", *overrides) == 0
    return run / "export"


def own(overrides: list[str], group: str = "") -> list[str]:
    """Return the overrides that name classes of one's own."""
    return [text for text in overrides if "_target_" in text and text.startswith(group)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of a short run of each kind of target, with an export in each."""
    folders = {}
    for kind, overrides in RUNS.items():
        folders[kind] = tmp_path_factory.mktemp(kind)
        assert execute(*overrides, *STEPS, f"hydra.run.dir={folders[kind]}") == 0
        export(folders[kind], *own(overrides))
    return folders


@pytest.mark.parametrize("kind", RUNS)
def test_the_model_of_an_export_has_the_outputs_of_that_of_its_run_to_the_bit(kind: str, runs: dict[str, Path]) -> None:
    of_run, of_export = (
        lr.load(folder, *own(RUNS[kind], group))
        for folder, group in ((runs[kind], ""), (runs[kind] / "export", "model"))
    )
    assert type(of_export) is type(of_run)
    assert not of_export.training
    assert of_export.tokenizer is None
    record = json.loads((runs[kind] / "export/export.json").read_text())
    assert (record["inputs"], record["outputs"]) == (INPUTS[kind], OUTPUTS[kind])
    assert (record["format"], record["dtype"]) == ("safetensors", "float32")
    inputs = torch.randn(5, *record["inputs"]["shape"], generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(of_export(inputs), of_run(inputs))


def test_running_statistics_and_whole_numbers_keep_their_dtype(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "half"
    export(runs["classes"], "mode.dtype=bfloat16", f"mode.path={folder}")
    full, half = load_file(runs["classes"] / "export/model.safetensors"), load_file(folder / "model.safetensors")
    assert full.keys() == half.keys()
    model = ResNet18(num_classes=10, in_channels=1, small_images=True)
    buffers = {name for name, _ in model.named_buffers()}
    assert {half[name].dtype for name in buffers} == {torch.float32, torch.int64}
    assert {half[name].dtype for name in half.keys() - buffers} == {torch.bfloat16}
    assert all(torch.equal(half[name], tensor.to(half[name].dtype)) for name, tensor in full.items())
    # 8 bits: the loaded model computes in float32 with the rounded values
    loaded = lr.load(folder)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert torch.equal(loaded.get_parameter("head.weight"), half["head.weight"].float())
    assert json.loads((folder / "export.json").read_text())["dtype"] == "bfloat16"


def test_a_language_model_of_ones_own_is_exported_with_its_tokenizer(tmp_path: Path) -> None:
    run, own_class = tmp_path / "run", "model._target_=small_models.WrappedGPT"
    texts = f"data.path={write_texts(tmp_path / 'texts')}"
    assert execute(*OF_TEXT, texts, own_class, f"hydra.run.dir={run}") == 0
    exported = export(run, own_class)
    model, of_run = (lr.load(folder, own_class) for folder in (exported, run))
    text: Any = model.tokenizer
    tokens = torch.tensor([text.encode("a = 1")])
    with torch.no_grad():
        assert torch.equal(model(tokens), of_run(tokens))
    assert text.decode(tokens[0].tolist()) == "a = 1"
    # its head is tied to its embedding, and its blocks have two names: each tensor is in the file once
    assert len(load_file(exported / "model.safetensors")) == len([*of_run.parameters()])


OF_MODULE = "task.module._target_=own_modules.Classifier"


def test_a_lightning_module_of_ones_own_comes_back_as_it_was_saved(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    data = ["data=lightning", "data.module={_target_: own_modules.Rows}"]
    typed = ["task=lightning", "task.module={_target_: own_modules.Classifier, dropout: 0.3}", *data]
    steps = ["trainer.max_steps=2", "trainer.accelerator=cpu", "callbacks=[]"]
    assert execute(*typed, *steps, f"hydra.run.dir={run}") == 0
    capfd.readouterr()
    exported = export(run, OF_MODULE, "data.module._target_=own_modules.Rows")
    assert "has no effect" not in capfd.readouterr().out, "it says which class the folder may name"
    with pytest.raises(lr.InvalidConfigError, match=rf"type: \+\+{re.escape(OF_MODULE)} if you trust it"):
        lr.load(exported)
    module: Any = lr.load(exported, OF_MODULE)
    assert (type(module).__name__, module.training, module.hparams["dropout"]) == ("Classifier", False, 0.3)
    saved: dict[str, torch.Tensor] = {}
    for file in (run / "checkpoints/last").glob("*.safetensors"):
        saved |= {name: tensor for name, tensor in load_file(file).items() if name.startswith("model.")}
    assert {"model.0.weight", "model.3.bias"} <= module.state_dict().keys()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, saved[name]), name
    assert json.loads((exported / "export.json").read_text())["module"]["dropout"] == 0.3
    of_run: Any = lr.load(run, f"++{OF_MODULE}")  # without the class of its data, of which nothing is read
    assert type(of_run) is type(module) is Classifier, "not a part of it that is called model, and no class of ours"
    assert (of_run.training, of_run.tokenizer, of_run._trainer) == (False, None, None)
    assert vars(of_run).keys() == vars(module).keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in of_run.state_dict().items())


def test_a_model_of_which_transformers_has_no_form_is_exported_all_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The experts of Mixtral have no biases there."""
    routed = ["model=mixtral_nano", "model.balance_rate=1e-3", "model.router_aux_loss_coef=0", "model.num_kv_heads=2"]
    texts, run = f"data.path={write_texts(tmp_path / 'texts')}", tmp_path / "run"
    assert execute(*routed, *OF_TEXT, texts, f"hydra.run.dir={run}") == 0
    model, of_run = lr.load(export(run)), lr.load(run)
    assert "not for transformers: the experts have biases (model.balance_rate)" in capfd.readouterr().out
    assert json.loads((run / "export/export.json").read_text())["format"] == "safetensors"
    tokens = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        assert torch.equal(model(tokens), of_run(tokens))
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("router.bias")]
    assert all(bias.any() for bias in biases)
    assert biases


def test_the_layout_of_transformers_is_loaded_as_our_model_to_the_bit(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert execute(*OF_TEXT, f"data.path={write_texts(tmp_path / 'texts')}", f"hydra.run.dir={run}") == 0
    ours: Any = lr.load(run)
    theirs: Any = lr.load(export(run))
    tokens = torch.tensor([theirs.tokenizer.encode("b = 2")])
    with torch.no_grad():
        assert torch.equal(theirs(tokens), ours(tokens))
    assert "texts" not in (run / "export/export.json").read_text(), "no path of this machine"
    assert type(theirs) is GPT2
    with pytest.raises(lr.InvalidConfigError, match="an export has one set of weights, on the CPU"):
        lr.load(run / "export", weights="ema")
    with pytest.raises(lr.InvalidConfigError, match=re.escape("without trainer.accelerator=gpu")):
        lr.load(run / "export", "trainer.accelerator=gpu")


class Evil(nn.Module):
    """What a downloaded folder must not construct."""

    def __init__(self, **settings: object) -> None:
        raise AssertionError("constructed")


def forge(source: Path, target: Path, **record: object) -> Path:
    """Copy an export with another record."""
    target.mkdir()
    (target / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    text = (source / "export.json").read_text()
    (target / "export.json").write_text(json.dumps(json.loads(text) | record))
    return target


def test_a_folder_may_not_choose_the_code_that_runs(runs: dict[str, Path], tmp_path: Path) -> None:
    exported = runs["classes"] / "export"
    node = json.loads((exported / "export.json").read_text())["model"]
    evil = {"_target_": "subprocess.run", "args": ["touch", str(tmp_path / "touched")]}
    forgeries: dict[str, Any] = {
        "another package": evil,
        "in a place of another group": node | {"_target_": "recipes.reward.mine.OwnFunction"},
        "within": node | {"num_classes": evil},
        "a list": node | {"num_classes": [evil]},
        "with a key of Hydra's": node | {"_args_": [3]},
    }
    for name, forged in forgeries.items():
        with pytest.raises(lr.InvalidConfigError, match="The weights cannot be loaded") as caught:
            lr.load(forge(exported, tmp_path / name, model=forged))
        assert "a folder may not choose the code that runs" in str(caught.value) or "no such key" in str(caught.value)
    assert not (tmp_path / "touched").exists()
    # a class of one's own is constructed where it is typed, and nowhere else
    with pytest.raises(
        lr.InvalidConfigError, match=r"type: \+\+model\._target_=dataset_cases\.Perceptron if you trust it"
    ):
        lr.load(runs["values"] / "export")
    assert type(lr.load(runs["values"] / "export", PERCEPTRON)).__name__ == "Perceptron"


def test_a_damaged_export_is_one_error(runs: dict[str, Path], tmp_path: Path) -> None:
    exported = runs["classes"] / "export"
    node = json.loads((exported / "export.json").read_text())["model"]
    cases: dict[str, dict[str, Any]] = {
        "does not say how its model is constructed": {"model": None},
        "head.weight is (10, 512), the model's (7, 512)": {"model": node | {"num_classes": 7}},
        "cannot be read: InstantiationException": {"model": node | {"width": 3}},
        'type: onnxruntime.InferenceSession("model.onnx")': {"format": "onnx"},
        "type: peft.PeftModel.from_pretrained": {"format": "peft"},
    }
    for number, (message, record) in enumerate(cases.items()):
        with pytest.raises(lr.InvalidConfigError) as caught:
            lr.load(forge(exported, tmp_path / str(number), **record))
        assert message in str(caught.value)
    cut = forge(exported, tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(lr.InvalidConfigError, match=r"model\.safetensors cannot be read: SafetensorError"):
        lr.load(cut)
    fewer = forge(exported, tmp_path / "fewer")
    tensors = load_file(fewer / "model.safetensors")
    save_file(tensors | {"extra": tensors.pop("head.bias").clone()}, fewer / "model.safetensors")
    with pytest.raises(lr.InvalidConfigError, match=r"head\.bias is missing; extra is unknown"):
        lr.load(fewer)


def test_an_export_without_its_data_says_so_in_one_line(
    runs: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(self: Any) -> None:
        from recipes.errors import ConfigError

        raise ConfigError("data.path=gone", "there is no such folder", "data.path=<folder>")

    monkeypatch.setattr("recipes.data.digits.Digits.prepare", prepare)
    export(runs["classes"], f"mode.path={tmp_path / 'out'}")
    assert (
        "export.json does not say which shape the inputs have: data.path=gone: there is no such"
        in capfd.readouterr().out
    )
    record = json.loads((tmp_path / "out/export.json").read_text())
    assert record["inputs"] == {"kind": "images"}
    assert record["outputs"] == {"kind": "classes", "number": 10, "classes": list("0123456789")}, "of the checkpoint"
