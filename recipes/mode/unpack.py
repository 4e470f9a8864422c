"""Convert a GGUF file (llama.cpp) to a folder that `model=huggingface` can train."""

from pathlib import Path
from typing import Any, Literal

import torch

from recipes.config.compose import Composed
from recipes.errors import ConfigError
from recipes.files import filling
from recipes.model.weights.text_side import write_text_side
from recipes.numerics.torchao_import import without_warnings_of_torchao
from recipes.run_folder import claim_output
from recipes.runtime.console import LOGGER
from recipes.tokenizer import read_folder

_MAGIC = b"GGUF"


def unpack(composed: Composed, *, path: str, output: str, dtype: Literal["float32", "bfloat16", "float16"]) -> int:
    """Write the weights, config and tokenizer of a GGUF file in `transformers` format.

    Quantized weights are dequantized, which does not restore the original weights.

    Args:
        composed: Unused; the file describes its model.
        path: GGUF file.
        output: Folder to write.
        dtype: Dtype of the weights; float32 represents the dequantized values exactly.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: It is not a GGUF file, transformers cannot read its model from GGUF, or nothing can be written.
    """
    del composed
    file, folder = Path(path).expanduser().absolute(), Path(output).expanduser()
    _check(file, folder)
    claim_output(folder, "mode.output", is_file=True)
    model, tokenizer = _load(file, getattr(torch, dtype))
    with filling(folder) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        _rewrite_text_files(unfinished)
    num_weights = sum(weight.numel() for weight in model.parameters())
    LOGGER.info(
        f"{model.config.model_type} of {num_weights:,} weights in {dtype}: model=huggingface model.name={folder}"
    )
    return 0


def _rewrite_text_files(folder: Path) -> None:
    """Write the stop tokens into the configs, and make the tokenizer load as it is."""
    try:
        tokenizer = read_folder(folder)
    except ConfigError as error:
        LOGGER.warning(f"{error.reason}: it cannot be trained on text, and its stop tokens are unknown")
        return
    write_text_side(folder, tokenizer=tokenizer, published=None)


def _check(file: Path, folder: Path) -> None:
    if not file.is_file():
        raise ConfigError(f"mode.path={file}", "there is no such file", "mode.path=<a .gguf file>")
    with file.open("rb") as opened:
        if opened.read(len(_MAGIC)) != _MAGIC:
            raise ConfigError(f"mode.path={file}", "it is not a GGUF file", "mode.path=<a .gguf file>")
    if folder.exists():
        raise ConfigError(f"mode.output={folder}", "it already exists", "mode.output=<a new folder>")


def _load(file: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load model and tokenizer from a file."""
    try:
        import gguf  # noqa: F401  transformers reads the file with it
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        reason = f"it needs the package {error.name}, which is not installed"
        raise ConfigError("mode=unpack", reason, "pip install -e '.[huggingface]'") from error
    where: dict[str, Any] = {"gguf_file": file.name}
    try:
        with without_warnings_of_torchao():
            model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=dtype, **where)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
    except Exception as error:  # many types: an unknown model, a missing key, a damaged file
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(f"mode.path={file}", f"transformers says: {reason}", "mode.path=<another file>") from error
    # transformers 5.23 considers the model quantized and refuses to save it, but its weights are dequantized by now
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer
