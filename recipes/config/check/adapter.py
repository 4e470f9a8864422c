"""Check that strategy and precision can hold an adapter and the frozen weights that it stands beside."""

from collections.abc import Iterator, Mapping
from typing import Any

from recipes.config.traits import get_traits
from recipes.errors import ConfigError


def check_adapter(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check that the strategy can hold an adapter and what it stands beside."""
    adapter = config.get("adapter", {})
    if adapter.get("dora") and config["strategy"].get("stage") == 3:
        yield ConfigError(
            "adapter.dora=true strategy=deepspeed_stage_3",
            "DoRA measures the frozen weights themselves, of which each rank has a part",
            "strategy=fsdp, or adapter=lora",
        )
    if adapter.get("base") is not None:
        yield from _quantized_base(config, base=adapter["base"])


def _quantized_base(config: Mapping[str, Any], *, base: str) -> Iterator[ConfigError]:
    """Check that everything that would read the frozen weights themselves can read them in 4 bits."""
    stage = config["strategy"].get("stage")
    if stage is not None:
        yield ConfigError(
            f"adapter.base={base} strategy={get_traits(config['strategy']).option}",
            "DeepSpeed broadcasts and partitions all weights as plain tensors, which weights in 4 bits are not",
            "strategy=fsdp, or adapter=lora",
        )
    if config["adapter"].get("dora"):
        yield ConfigError(
            f"adapter.base={base} adapter.dora=true",
            "DoRA measures the rows of the frozen weights in every step, which 4 bits do not hold as numbers",
            "adapter=qlora, or adapter=dora",
        )
    if config["precision"]["name"] == "fp8-mixed":
        yield ConfigError(
            f"adapter.base={base} precision=fp8-mixed",
            "float8 products cast weights of 16 or 32 bits, and these have 4",
            "precision=bf16-mixed, or adapter=lora",
        )
