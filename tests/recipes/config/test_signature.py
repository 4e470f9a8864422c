"""Signatures read from source equal those of the imported objects."""

import inspect
import subprocess
import sys

import lightning.pytorch as lightning
import pytest
from support import ROOT

from recipes.config.signature import TargetNotFoundError, find_lineage, read_signature
from recipes.model.llama import Llama
from recipes.optimizer.adamw import adamw


@pytest.mark.parametrize(
    ("target", "real"),
    [
        ("lightning.pytorch.Trainer", lightning.Trainer),
        ("recipes.model.llama.Llama", Llama),
        ("recipes.optimizer.adamw.adamw", adamw),
    ],
)
def test_a_signature_read_from_source_is_that_of_the_object(target: str, real: type) -> None:
    read = read_signature(target)
    parameters = inspect.signature(real).parameters
    assert list(read.parameters) == list(parameters)
    for name, parameter in parameters.items():
        assert read.parameters[name].required == (parameter.default is inspect.Parameter.empty)


def test_a_name_that_a_package_imports_with_a_star_is_found() -> None:
    assert "in_features" in read_signature("torch.nn.Linear").parameters


def test_the_lineage_of_a_class_is_that_of_the_object() -> None:
    bars = find_lineage("lightning.pytorch.callbacks.TQDMProgressBar")
    real = {f"{cls.__module__}.{cls.__qualname__}" for cls in lightning.callbacks.TQDMProgressBar.__mro__}
    assert bars == real - {"builtins.object"}
    assert find_lineage("recipes.optimizer.adamw.adamw") is None


def test_a_class_attribute_is_read_as_a_literal() -> None:
    assert read_signature("recipes.model.gpt2.GPT2").constants["input_kind"] == "tokens"


def test_dataclass_fields_are_arguments() -> None:
    read = read_signature("recipes.precision.Precision")
    assert list(read.parameters) == ["name"]


def test_an_inherited_constructor_is_found_and_kwargs_are_those_of_the_base() -> None:
    read = read_signature("recipes.task.language_modeling.LanguageModeling")
    assert "make_model" in read.parameters
    assert not read.takes_any


def test_kwargs_that_a_constructor_does_not_pass_to_its_base_are_anything() -> None:
    assert read_signature("lightning.pytorch.loggers.CometLogger").takes_any  # for Comet: offline_directory, log_code
    assert read_signature("lightning.pytorch.loggers.WandbLogger").takes_any  # for wandb.init: entity, tags
    assert not read_signature("lightning.pytorch.loggers.MLFlowLogger").takes_any


def test_an_argument_that_a_constructor_passes_to_its_base_is_none_of_its_own() -> None:
    read = read_signature("torchmetrics.classification.MulticlassF1Score")
    assert [name for name, parameter in read.parameters.items() if parameter.required] == ["num_classes"]
    assert "beta" not in read.parameters  # which MulticlassF1Score passes as 1.0


@pytest.mark.parametrize("target", ["recipes.model.gpt3.GPT3", "recipes.model.gpt2.GPT3", "no_such_package.X", "x"])
def test_what_does_not_exist_is_not_found(target: str) -> None:
    with pytest.raises(TargetNotFoundError):
        read_signature(target)


def test_nothing_is_imported_while_reading() -> None:
    program = (
        "import sys; from recipes.config.signature import read_signature as read;"
        "read('lightning.pytorch.Trainer'); read('recipes.model.gpt2.GPT2');"
        "assert not {'torch', 'lightning', 'recipes.model'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_a_dataclass_has_the_fields_of_its_base() -> None:
    read = read_signature("recipes.data.image_folder.ImageFolder")
    assert {"path", "val_fraction", "transform"} < read.parameters.keys()
    assert read.constants["sample_kind"] == "images"
