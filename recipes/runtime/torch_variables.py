"""Check environment variables that torch parses while it is imported, where it would raise. Imports no torch."""

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from recipes.errors import ConfigError

# parsed by int() in torch 2.13: _dynamo/config.py, _inductor/config.py, _native/common_utils.py
_INTEGERS = (
    "AOTINDUCTOR_REPRO_LEVEL",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCHDYNAMO_REPRO_LEVEL",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCHINDUCTOR_CPP_GEMM_MAX_K_SLICES",
    "TORCHINDUCTOR_CPP_MIN_CHUNK_SIZE",
    "TORCHINDUCTOR_FILE_LOCK_TIMEOUT",
    "TORCHINDUCTOR_MIN_NUM_SPLIT",
    "TORCHINDUCTOR_ORIGAMI_TOPK",
    "TORCH_DISABLE_NATIVE_JIT",
    "TORCH_NATIVE_SKIP_VERSION_CHECK",
)
_NAME_OF_LOG = re.compile(r"""register_(?:log|artifact)\(\s*["']([\w.]+)["']""")


def find_variables_of_torch(environ: Mapping[str, str] = os.environ) -> list[ConfigError]:
    """Return the errors in environment variables that torch cannot parse when it is imported."""
    mistakes = [
        ConfigError(f"{name}={environ[name]}", "torch takes a whole number", f"unset {name}")
        for name in _INTEGERS
        if name in environ and re.fullmatch(r"\s*[+-]?\d+\s*", environ[name]) is None
    ]
    return [*mistakes, *_check_logs(environ.get("TORCH_LOGS", ""))]


def _check_logs(typed: str) -> list[ConfigError]:
    """Check the names in TORCH_LOGS: those that torch registers, or a package's."""
    entries = [entry.strip() for entry in typed.split(",") if entry.strip()]
    spec = find_spec("torch") if entries else None
    if spec is None or spec.origin is None:
        return []
    text = (Path(spec.origin).parent / "_logging" / "_registrations.py").read_text(encoding="utf-8")
    known = {"all", *_NAME_OF_LOG.findall(text)}
    unknown = [entry for entry in entries if (name := entry.lstrip("+-")) not in known and not _is_package(name)]
    if not unknown:
        return []
    near = [get_close_matches(entry.lstrip("+-"), known, 1) for entry in unknown]
    fix = ",".join([*(entry for entry in entries if entry not in unknown), *(name for names in near for name in names)])
    reason = f"the logs of torch are {' '.join(sorted(known))}"
    return [ConfigError(f"TORCH_LOGS={typed}", reason, f"export TORCH_LOGS={fix}" if fix else "unset TORCH_LOGS")]


def _is_package(name: str) -> bool:
    root = name.partition(".")[0]
    return root.isidentifier() and find_spec(root) is not None
