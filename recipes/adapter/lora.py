"""LoRA (Hu et al. 2021, arXiv 2106.09685): y = W x + (alpha / r) B A x with W frozen; DoRA also scales rows."""

import functools
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from recipes.adapter import check_layers, find_targets, inject
from recipes.adapter.nf4_base import hold_in_nf4


class Lora:
    """Adds a low-rank update to each target layer.

    Args:
        r: Rank.
        lora_alpha: The update is scaled by lora_alpha / r; with `use_rslora`, by lora_alpha / sqrt(r).
        lora_dropout: Dropout probability on the inputs of A.
        target_modules: Name suffixes within a block; `all`: every linear layer in blocks.
        use_rslora: Use rsLoRA scaling (arXiv 2312.03732), for ranks of 64 or more.
        use_dora: Learn the norm of each row separately from its direction (arXiv 2402.09353).
        modules_to_save: Ends of the names of modules that are trained in full beside the adapter, and saved with it.
        pretrained: peft folder with initial adapter weights; None: B starts at zero.
        quantization: Storage of the frozen weights of linear layers in the blocks: `nf4`, in 4 bits (QLoRA, arXiv
            2305.14314); None: in the dtype of the run.
    """

    def __init__(
        self,
        *,
        r: Annotated[int, ">= 1"],
        lora_alpha: Annotated[float, "> 0"],
        lora_dropout: Annotated[float, ">= 0, <= 0.999"],
        target_modules: Annotated[list[str], ">= 1"] | Literal["all"],
        use_rslora: bool,
        use_dora: bool,
        modules_to_save: list[str],
        pretrained: str | None = None,
        quantization: Literal["nf4"] | None = None,
    ) -> None:
        self.r = r
        self.lora_alpha = lora_alpha
        self.lora_dropout = lora_dropout
        self.target_modules = target_modules
        self.use_rslora = use_rslora
        self.use_dora = use_dora
        self.modules_to_save = modules_to_save
        self.pretrained = pretrained
        self.quantization = quantization

    def apply(self, model: nn.Module) -> None:
        """Freeze the model and add the matrices, without storage.

        Raises:
            ConfigError: The model has no such layers, or none that can be held in NF4.
        """
        check_layers(model, self.pretrained)
        names = find_targets(model, self.target_modules, setting=f"adapter.target_modules={self.target_modules}")
        from peft import LoraConfig

        if self.use_dora:
            _let_compilers_read_weights()
        inject(
            model,
            LoraConfig(
                r=self.r,
                lora_alpha=self.lora_alpha,
                lora_dropout=self.lora_dropout,
                target_modules=names,
                use_rslora=self.use_rslora,
                use_dora=self.use_dora,
                fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
            ),
            pretrained=self.pretrained,
            modules_to_save=self.modules_to_save,
        )
        if self.quantization == "nf4":
            hold_in_nf4(model)


@functools.cache  # once a process: torch accepts no second substitute
def _let_compilers_read_weights() -> None:
    """Let torch.compile trace how DoRA reads the frozen weight of a layer, which would break the graph of every layer.

    peft (0.21) first looks for quantized weights by the module of their class, a string that Dynamo (torch 2.13) does
    not know. Here no such weight is quantized: the config check rejects DoRA on NF4. The substitute returns a plain
    tensor, because peft makes a new parameter of a transposed one (`Conv1D`), which Dynamo does not support either.
    """
    from peft.utils.integrations import dequantize_module_weight

    def get_weight(module: Any) -> Tensor:
        weight: Tensor = module.weight.detach()
        return weight

    torch.compiler.substitute_in_graph(dequantize_module_weight, skip_signature_check=True)(get_weight)
