"""IA3 (Liu et al. 2022, arXiv 2205.05638): learned scaling of the outputs or inputs of linear layers."""

from typing import Annotated, Literal

from torch import nn

from recipes.adapter import check_layers, find_targets, inject


class IA3:
    """Multiplies activations by learned factors, initialized to 1.

    Args:
        target_modules: Name suffixes within a block; `all`: every linear layer in blocks.
        feedforward_modules: Target modules whose inputs are scaled instead of their outputs.
        modules_to_save: Ends of the names of modules that are trained in full beside the adapter, and saved with it.
        pretrained: peft folder with initial adapter weights; None: factors start at 1.
    """

    def __init__(
        self,
        *,
        target_modules: Annotated[list[str], ">= 1"] | Literal["all"],
        feedforward_modules: list[str],
        modules_to_save: list[str],
        pretrained: str | None = None,
    ) -> None:
        self.target_modules = target_modules
        self.feedforward_modules = feedforward_modules
        self.modules_to_save = modules_to_save
        self.pretrained = pretrained

    def apply(self, model: nn.Module) -> None:
        """Freeze the model and add the factors, without storage.

        Raises:
            ConfigError: The model has no such layers.
        """
        check_layers(model, self.pretrained)
        names = find_targets(model, self.target_modules, setting=f"adapter.target_modules={self.target_modules}")
        typed = f"adapter.feedforward_modules={self.feedforward_modules}"
        inputs = find_targets(model, self.feedforward_modules, setting=typed) if self.feedforward_modules else []
        from peft import IA3Config

        has_conv1d = any(type(module).__name__ == "Conv1D" for module in model.modules())
        both = sorted({*names, *inputs})
        config = IA3Config(target_modules=both, feedforward_modules=inputs, fan_in_fan_out=has_conv1d)
        inject(model, config, pretrained=self.pretrained, modules_to_save=self.modules_to_save)
