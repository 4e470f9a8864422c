"""Any image model of timm, by its name there: built without storage, sharded by its own blocks, with timm's weights.

Shapes: B images, C channels, H x W pixels, V classes.
"""

import fnmatch
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from recipes.errors import ConfigError, type_extra
from recipes.model.init import fill, generator_for, named_parameters, without_wrappers
from recipes.model.norm import Norm, list_batch_norms, replace_batch_norms
from recipes.torch_internals import unset_fake_temporarily
from recipes.torchvision_import import repair

_MODELS = "timm.models."
# arguments in timm -> settings
_OWN_NAMES = {
    "num_classes": "num_classes",
    "in_chans": "in_channels",
    "img_size": "image_size",
    "drop_path_rate": "drop_path",
    "drop_rate": "dropout",
}


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
        norm: What normalizes in the place of batch norm, see `recipes.model.norm`; batch: the norms of the model.
        arguments: Further arguments of the model in timm, such as depth or global_pool.
        pretrained: A .safetensors or .pth file, a folder or a repository of the hub with weights that fit timm's model;
            None: initial weights by timm's rules.

    Raises:
        ConfigError: timm is not installed, has no such model, or the model does not take a setting; or it has no batch
            norm to replace, or published weights were trained with one that is replaced by another kind.
    """

    input_kind: ClassVar[str] = "images"
    published_format: ClassVar[str] = "timm"
    free_at_resume: ClassVar[tuple[str, ...]] = ("norm",)  # batch, sync and frozen have the same weights
    new_head_with: ClassVar[tuple[str, ...]] = ("num_classes",)  # start_from= may change it

    def __init__(
        self,
        *,
        name: str,
        num_classes: Annotated[int, ">= 1"],
        in_channels: Annotated[int, ">= 1"],
        image_size: Annotated[int, ">= 1"] | None,
        drop_path: Annotated[float, ">= 0, < 1"],
        dropout: Annotated[float, ">= 0, < 1"],
        norm: Norm,
        arguments: Mapping[str, Any],
        pretrained: str | None,
    ) -> None:
        super().__init__()
        self.name = self.title = name
        self.num_classes = num_classes
        self.in_channels = in_channels
        self.norm = norm
        self.pretrained = pretrained
        settings: dict[str, Any] = {"num_classes": num_classes, "in_chans": in_channels}
        settings |= {"img_size": image_size} if image_size is not None else {}
        settings |= {"drop_path_rate": drop_path} if drop_path else {}
        settings |= {"drop_rate": dropout} if dropout else {}
        if twice := [key for key in arguments if key in _OWN_NAMES]:
            fix = f"model.{_OWN_NAMES[twice[0]]}={arguments[twice[0]]}"
            raise ConfigError(f"model.arguments={{{twice[0]}: …}}", "the model has a setting of its own for it", fix)
        self.settings = settings | dict(arguments)
        device = torch.get_default_device()
        # timm reads numbers of tensors while it constructs, which those of a plan do not have
        with unset_fake_temporarily(), torch.device("meta"):
            self.inner: Any = make_timm(name, self.settings)
        if norm == "group" and pretrained is not None and list_batch_norms(self.inner):
            reason = "these weights were trained with batch norm, and compute something else with group norm"
            raise ConfigError(f"model.norm=group model.pretrained={pretrained}", reason, "model.norm=frozen")
        replace_batch_norms(self, norm)
        self.inner.to_empty(device=device)
        self._towers = _find_towers(self.inner)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] float -> logits [B, V] in the compute dtype."""
        logits: Tensor = self.inner(images)
        return logits

    def named_blocks(self) -> dict[str, Any]:
        """Return the stages, each a sequence of blocks, by name."""
        return {f"inner.{name}": self.inner.get_submodule(name) for name in self._towers}

    def number_layers(self) -> dict[str, int]:
        """Return the layer of each parameter, from 0 at the images, as timm numbers them for layer-wise decay."""
        timm = import_timm()
        match = getattr(self.inner, "group_matcher", None)
        if match is None:
            numbers = timm.optim.auto_group_layers(self.inner)
        else:
            numbers = timm.models.group_parameters(self.inner, match(coarse=False), reverse=True)
        return {f"inner.{name}": number for name, number in numbers.items()}

    def names_without_decay(self) -> set[str]:
        """Return the parameters that are not decayed whatever their shape, such as position embeddings."""
        patterns: Collection[str] = getattr(self.inner, "no_weight_decay", set)()
        names = [name for name, _ in named_parameters(self.inner)]
        return {f"inner.{name}" for pattern in patterns for name in fnmatch.filter(names, pattern)}

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Initialize every parameter and buffer in place, by timm's rules, from the seed alone."""
        self.fill_from(self.draw(seed))

    @torch.no_grad()
    def fill_from(self, whole: nn.Module) -> None:
        """Fill every parameter and buffer in place from a model of timm in the host's memory."""
        values = dict(whole.named_parameters())
        for name, parameter in named_parameters(self.inner):
            fill(parameter, values[name].detach())
        self._fill_buffers(whole)

    @torch.no_grad()
    def init_buffers(self) -> None:
        """Set running statistics, and what is computed from sizes alone; does nothing on the meta device."""
        buffers = [*self.inner.buffers()]
        if buffers and not buffers[0].is_meta:
            self._fill_buffers(self.draw(0))

    def draw(self, seed: int) -> nn.Module:
        """Return timm's model in the host's memory with initial weights, which timm draws when it constructs."""
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator_for(self.name, seed=seed).initial_seed())
            return make_timm(self.name, self.settings)

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


def make_timm(name: str, settings: Mapping[str, Any], **weights: Any) -> nn.Module:
    """Return a model of timm.

    Args:
        name: Its name in timm.
        settings: Its arguments.
        **weights: Arguments of `timm.create_model` that load weights; none: initial weights.

    Raises:
        ConfigError: timm has no such model, or the model does not take an argument.
        RuntimeError: The weights do not fit the model.
    """
    timm = import_timm()
    if not timm.is_model(name):
        import difflib

        near = difflib.get_close_matches(name, timm.list_models(), n=3)
        fix = f"model.name={near[0]}" if near else "model.name=convnext_tiny"
        raise ConfigError(f"model.name={name}", f"timm {timm.__version__} has no such model", fix)
    try:
        made: nn.Module = timm.create_model(name, **settings, **weights)
    except (TypeError, AssertionError, RuntimeError, ValueError) as error:
        if weights and isinstance(error, RuntimeError):
            raise  # the weights do not fit: the reader of them says what is wrong
        shown = ", ".join(f"{key}={value}" for key, value in settings.items())
        reason = f"timm does not construct it with {shown}: {error}"
        fix = "model.image_size=null, or without the argument of model.arguments that it does not take"
        raise ConfigError(f"model.name={name}", reason, fix) from error
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
