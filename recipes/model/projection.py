"""The projection of a self-supervised image model: a small network in the place of its classifier.

It is a child of the model, whose other weights keep their names: a classifier starts from them, with a new head.

Shapes: B images, W features, H hidden units, F numbers of a projection.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from recipes.errors import ConfigError
from recipes.model.init import constant_, named_parameters, normal_

_NAME = "projection"


class Projection(nn.Module):
    """Features [B, W] -> projections [B, F] by two layers with a ReLU between them (SimCLR, arXiv:2002.05709).

    Args:
        num_features: W.
        hidden_size: H.
        projection_size: F.
    """

    def __init__(self, num_features: int, hidden_size: int, projection_size: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(num_features, hidden_size)
        self.out = nn.Linear(hidden_size, projection_size)

    @override
    def forward(self, features: Tensor) -> Tensor:
        projected: Tensor = self.out(F.relu(self.hidden(features)))
        return projected


def attach_projection(model: nn.Module, *, hidden_size: int, projection_size: int) -> None:
    """Replace the classifier of an image model by nothing, and project the features that it then returns, in place.

    Args:
        model: On the meta device.
        hidden_size: H.
        projection_size: F.

    Raises:
        ConfigError: The model has no linear classifier.
    """
    name, classifier = _find_classifier(model)
    model.set_submodule(name, nn.Identity())
    model.projection = Projection(classifier.in_features, hidden_size, projection_size)
    # a hook of the model itself: engines gather the weights of whatever its forward pass calls
    model.register_forward_hook(_project)


def _project(model: Any, inputs: Any, features: Tensor) -> Tensor:
    projected: Tensor = model.projection(features)
    return projected


def _find_classifier(model: Any) -> tuple[str, nn.Linear]:
    """Return the last layer, which timm's models name themselves and others call `head`."""
    inner: Any = getattr(model, "inner", None)
    head = inner.get_classifier() if hasattr(inner, "get_classifier") else getattr(model, "head", None)
    name = next((name for name, module in model.named_modules() if module is head), None)
    if name is None or not isinstance(head, nn.Linear):
        title = getattr(model, "name", type(model).__name__)
        reason = f"the features of {title} are not known here: its last layer is no linear classifier"
        raise ConfigError("task=contrastive model=…", reason, "model=timm model.name=resnet50, or another such model")
    return name, head


def init_projection(model: nn.Module, *, seed: int) -> None:
    """Draw the weights of the projection, if the model has one, from the seed and their names; biases are 0."""
    for name, parameter in named_parameters(model):
        if name in (f"{_NAME}.hidden.bias", f"{_NAME}.out.bias"):
            constant_(parameter, 0.0)
        elif name in (f"{_NAME}.hidden.weight", f"{_NAME}.out.weight"):
            gain = 2.0 if name == f"{_NAME}.hidden.weight" else 1.0  # of the ReLU that follows
            normal_(parameter, name=name, seed=seed, std=math.sqrt(gain / parameter.shape[1]))


@contextmanager
def without_projection(model: nn.Module) -> Iterator[None]:
    """Take the projection out of a model for a while: its own rules and published weights know no such names."""
    projection = model._modules.pop(_NAME, None)
    try:
        yield
    finally:
        if projection is not None:
            model._modules[_NAME] = projection
