"""Turn a GGUF file, as llama.cpp and its tools read it, into a folder that `model=huggingface` trains."""

import shutil
from pathlib import Path
from typing import Any, Literal

import torch

from recipes.config.compose import Composed
from recipes.errors import ConfigError
from recipes.numerics.torchao_import import without_warnings_of_torchao
from recipes.runtime.console import LOGGER

_MAGIC = b"GGUF"


def unpack(composed: Composed, *, path: str, output: str, dtype: Literal["float32", "bfloat16", "float16"]) -> int:
    """Write weights, settings and tokenizer of a GGUF file as `transformers` stores them.

    Quantized weights become numbers again: those that the file stands for, not those it was once made from.

    Args:
        composed: Unused: the file says what model it is.
        path: The file.
        output: Folder to write.
        dtype: Of the weights; float32 holds what the file stands for exactly.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: It is no such file, or of a model that transformers does not read from one.
    """
    del composed
    file, folder = Path(path).expanduser().absolute(), Path(output).expanduser()
    _check(file, folder)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model, tokenizer = _load(file, getattr(torch, dtype))
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    num_weights = sum(weight.numel() for weight in model.parameters())
    LOGGER.info(
        f"{model.config.model_type} of {num_weights:,} weights in {dtype}: model=huggingface model.name={folder}"
    )
    return 0


def _check(file: Path, folder: Path) -> None:
    if not file.is_file():
        raise ConfigError(f"mode.path={file}", "there is no such file", "mode.path=<a .gguf file>")
    with file.open("rb") as opened:
        if opened.read(len(_MAGIC)) != _MAGIC:
            raise ConfigError(f"mode.path={file}", "it is no GGUF file", "mode.path=<a .gguf file>")
    if folder.exists():
        raise ConfigError(f"mode.output={folder}", "it exists already", "mode.output=<a new folder>")


def _load(file: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return model and tokenizer of a file."""
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
    except Exception as error:  # of many kinds: an unknown model, a missing key, a damaged file
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(f"mode.path={file}", f"transformers says: {reason}", "mode.path=<another file>") from error
    # transformers 5.23 takes the model for quantized, and saves none that is; its weights are numbers by now
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer
