"""Any image model of timm, by its name there: built without storage, sharded by its own blocks, with timm's weights.

Shapes: B images, C channels, H x W pixels, V classes.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from recipes.errors import ConfigError, type_extra
from recipes.model.init import fill, generator_for, named_parameters, without_wrappers
from recipes.torch_internals import unset_fake_temporarily
from recipes.torchvision_import import repair

_MODELS = "timm.models."


class TimmModel(nn.Module):
    """A classifier of timm: images [B, C, H, W] float -> logits [B, V].

    Args:
        name: Name of the model in timm, such as convnext_tiny.
        num_classes: V, classes, labels or numbers.
        in_channels: C.
        image_size: H and W of a model whose weights depend on it, such as a ViT; None: that of its published weights.
        drop_path: Probability that a residual branch of the last block is left out, less in those before it (Huang et
            al. 2016, arXiv:1603.09382).
        dropout: Probability of dropout before the head.
        pretrained: A .safetensors or .pth file, or a folder, with timm's names; None: initial weights by timm's rules.

    Raises:
        ConfigError: timm is not installed, has no such model, or the model does not take a setting.
    """

    input_kind: ClassVar[str] = "images"
    published_format: ClassVar[str] = "timm"

    def __init__(
        self,
        *,
        name: str,
        num_classes: Annotated[int, ">= 1"],
        in_channels: Annotated[int, ">= 1"],
        image_size: Annotated[int, ">= 1"] | None,
        drop_path: Annotated[float, ">= 0, < 1"],
        dropout: Annotated[float, ">= 0, < 1"],
        pretrained: str | None,
    ) -> None:
        super().__init__()
        self.name = name
        self.num_classes = num_classes
        self.in_channels = in_channels
        self.pretrained = pretrained
        settings: dict[str, Any] = {"num_classes": num_classes, "in_chans": in_channels}
        settings |= {"img_size": image_size} if image_size is not None else {}
        settings |= {"drop_path_rate": drop_path} if drop_path else {}
        settings |= {"drop_rate": dropout} if dropout else {}
        self._settings = settings
        device = torch.get_default_device()
        # timm reads numbers of tensors while it constructs, which those of a plan do not have
        with unset_fake_temporarily(), torch.device("meta"):
            self.inner: Any = _make(name, settings)
        self.inner.to_empty(device=device)
        self._towers = _find_towers(self.inner)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] float -> logits [B, V] in the compute dtype."""
        logits: Tensor = self.inner(images)
        return logits

    def named_blocks(self) -> dict[str, Any]:
        """Return the stages, each a sequence of blocks, by name."""
        return {f"inner.{name}": self.inner.get_submodule(name) for name in self._towers}

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Initialize every parameter and buffer in place, by timm's rules, from the seed alone."""
        fresh = self._draw(seed)
        values = dict(fresh.named_parameters())
        for name, parameter in named_parameters(self.inner):
            fill(parameter, values[name].detach())
        self._fill_buffers(fresh)

    @torch.no_grad()
    def init_buffers(self) -> None:
        """Set running statistics, and what is computed from sizes alone; does nothing on the meta device."""
        buffers = [*self.inner.buffers()]
        if buffers and not buffers[0].is_meta:
            self._fill_buffers(self._draw(0))

    def _draw(self, seed: int) -> nn.Module:
        """Return a copy of the model in the host's memory with initial weights: timm draws when it constructs."""
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator_for(self.name, seed=seed).initial_seed())
            made: nn.Module = _make(self.name, self._settings)
        return made

    def _fill_buffers(self, fresh: nn.Module) -> None:
        values = dict(fresh.named_buffers())
        for name, buffer in self.inner.named_buffers():
            buffer.copy_(values[without_wrappers(name)])


def import_timm() -> Any:
    """Return timm.

    Raises:
        ConfigError: It is not installed.
    """
    repair()
    try:
        import timm
    except ImportError as error:
        raise ConfigError("model=timm", "it needs timm, which is not installed", type_extra("vision")) from error
    return timm


def _make(name: str, settings: Mapping[str, Any]) -> nn.Module:
    timm = import_timm()
    if not timm.is_model(name):
        import difflib

        near = difflib.get_close_matches(name, timm.list_models(), n=3)
        fix = f"model.name={near[0]}" if near else "model.name=convnext_tiny"
        raise ConfigError(f"model.name={name}", f"timm {timm.__version__} has no such model", fix)
    try:
        made: nn.Module = timm.create_model(name, pretrained=False, **settings)
    except (TypeError, AssertionError, ValueError) as error:
        shown = ", ".join(f"{key}={value}" for key, value in settings.items())
        reason = f"timm does not construct it with {shown}: {error}"
        raise ConfigError(f"model.name={name}", reason, "model.image_size=null, or a setting that it takes") from error
    return made


def _find_towers(model: nn.Module) -> list[str]:
    """Return the names of the innermost sequences whose members are all of one class of timm's models."""
    found: list[str] = []
    for name, module in model.named_modules():
        members = [*module.children()] if isinstance(module, nn.ModuleList | nn.Sequential) else []
        classes = {type(member) for member in members}
        is_tower = len(classes) == 1 and next(iter(classes)).__module__.startswith(_MODELS)
        if is_tower and any(True for _ in members[0].parameters()):
            found = [other for other in found if not name.startswith(f"{other}.")]
            found.append(name)
    return found
