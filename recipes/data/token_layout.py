"""Where the tokens are in a file: raw, a .npy array, or behind the header of llm.c; anything else is rejected."""

import hashlib
import io
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recipes.data.file_kinds import NPY, is_ascii_text, recognize
from recipes.errors import ConfigError
from recipes.files import count

LOGGER = logging.getLogger("lightning_recipes")

_NPY_DTYPES = {"<u2": "uint16", "<u4": "uint32"}
# llm.c and those who follow it, such as modded-nanogpt: 256 int32, of which the first three are these
_LLM_C_HEADER_BYTES = 1024
_LLM_C_MAGICS = {20240520: "uint16", 20240801: "uint32"}
LLM_C = "llm.c"
_MAX_VOCABULARY = 10_000_000  # of no tokenizer: larger ids are not tokens
PERIOD = 4  # 16-bit tokens per number of the widest type that a file may have been written with


@dataclass(frozen=True)
class TokenLayout:
    """Location and type of the tokens in a file.

    Attributes:
        dtype: "uint16" or "uint32", little-endian.
        byte_offset: Offset of the first token.
        num_tokens: Number of tokens.
        header: What records the dtype: ".npy" or "llm.c"; None: nothing, the file is raw.
    """

    dtype: str
    byte_offset: int
    num_tokens: int
    header: str | None = None


def read_layout(head: bytes, *, num_bytes: int, dtype: str, name: str, key: str) -> TokenLayout:
    """Return the layout of a file of tokens.

    Args:
        head: First bytes, `NUM_HEAD_BYTES` of them if there are as many.
        num_bytes: Size of the file.
        dtype: Dtype of a file that does not record it.
        name: Name of the file, for errors.
        key: Setting that named it, such as "data.path".

    Raises:
        ConfigError: The file is empty, truncated, or does not hold tokens.
    """
    typed, fix = f"{key}={name}", f"{key}=<file of {dtype} tokens>"
    if num_bytes == 0:
        raise ConfigError(typed, "the file is empty", fix)
    if head.startswith(NPY):
        return _read_npy(head, num_bytes=num_bytes, typed=typed, key=key)
    if len(head) >= _LLM_C_HEADER_BYTES:
        magic, _, num_tokens = np.frombuffer(head[:12], "<i4").tolist()
        if magic in _LLM_C_MAGICS:
            return _read_llm_c(_LLM_C_MAGICS[magic], num_tokens, num_bytes=num_bytes, typed=typed, key=key)
    if (kind := recognize(head, name, is_text=False)) is not None:
        raise ConfigError(typed, f"{kind.reason}, not raw tokens", kind.fix or _suggest_array(key))
    if name.lower().endswith(".npy"):
        raise ConfigError(typed, "it is not a valid .npy file: it does not begin like one", _suggest_array(key))
    if is_ascii_text(head):
        raise ConfigError(typed, "it is text, not tokens", f"data=text_files data.path={name}")
    item_bytes = np.dtype(dtype).itemsize
    if num_bytes % item_bytes:
        reason = f"{num_bytes} bytes are not a multiple of {item_bytes}, the size of a {dtype} token: it is truncated"
        other = "" if num_bytes % 2 else f", or {_section(key)}.dtype=uint16"  # half a token of uint32
        raise ConfigError(typed, reason, f"{fix}, copied again{other}")
    return TokenLayout(dtype, 0, num_bytes // item_bytes)


def file_key(path: str | Path) -> int:
    """Return a hash of where a file is, by which sources find out that they read the same one."""
    name = str(path) if "://" in str(path) else os.path.realpath(path)
    return int.from_bytes(hashlib.blake2b(os.fsencode(name), digest_size=8).digest(), "little")


def find_wider_type(largest: list[int], layout: TokenLayout, *, vocab_size: int) -> int | None:
    """Return the bit width of the numbers in a raw file that was read with too narrow a type; None if it fits.

    A raw file does not record its type. But uint32 tokens read as uint16 are 1017, 0, 5, 0, …: every second one is the
    upper half of a token, at most that of the largest token in the vocabulary. With int64, three of four are 0.

    Args:
        largest: Largest token at each position modulo four.
        layout: Layout with which the file is read.
        vocab_size: Every token must be below it.
    """
    bits = 8 * np.dtype(layout.dtype).itemsize
    highest_upper_half = (vocab_size - 1) >> bits
    is_raw = layout.header is None
    if not is_raw or largest[0] <= highest_upper_half or layout.num_tokens % 2 or layout.num_tokens < PERIOD:
        return None
    if max(largest[1], largest[3]) > highest_upper_half:
        return None
    is_cut_in_four = largest[2] == 0 and layout.num_tokens % PERIOD == 0 and bits == 16
    return 64 if is_cut_in_four or bits == 32 else 32


def find_largest(tokens: NDArray[np.unsignedinteger]) -> list[int]:
    """Return the largest token at each position modulo four."""
    return [int(tokens[position::PERIOD].max(initial=0)) for position in range(PERIOD)]


def explain_wider_type(key: str, name: str, dtype: str, bits: int) -> ConfigError:
    """Return the error for a raw file whose numbers have more bits than `dtype`."""
    reason = f"every second token is 0 or the upper half of one: the file holds {bits}-bit integers"
    fix = "data.dtype=uint32" if bits == 32 else f"{key}=<the same tokens written as uint32> data.dtype=uint32"
    return ConfigError(f"{key}={name} data.dtype={dtype}", reason, fix)


def explain_large_token(key: str, name: str, largest: int, layout: TokenLayout, *, vocab_size: int) -> ConfigError:
    """Return the error for a token that the model does not know."""
    reason = f"token id {largest} is outside the vocabulary (maximum {vocab_size - 1})"
    fixes = [f"model.vocab_size={largest + 1} or more"] if largest < _MAX_VOCABULARY else []
    if layout.header is None and layout.dtype == "uint32":  # two tokens of uint16 read as one
        fixes.append(f"{_section(key)}.dtype=uint16")
    return ConfigError(f"{key}={name}", reason, ", or ".join(fixes) or f"{key}=<file of tokens below {vocab_size}>")


def _section(key: str) -> str:
    return key.rpartition(".")[0]


def _read_npy(head: bytes, *, num_bytes: int, typed: str, key: str) -> TokenLayout:
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)  # type: ignore[no-untyped-call]
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)  # type: ignore[no-untyped-call]
    except Exception as error:  # the header is Python source, and its parser raises what that of Python does
        reason = f"it is not a valid .npy file ({type(error).__name__})"
        raise ConfigError(typed, reason, _suggest_array(key)) from error
    if len(shape) != 1 or shape[0] < 0 or dtype.str[1:] not in ("u2", "u4"):
        reason = f"it is an array of {dtype.name} with the shape {shape}, and tokens are a row of uint16 or uint32"
        raise ConfigError(typed, reason, _suggest_array(key))
    if dtype.str not in _NPY_DTYPES:
        raise ConfigError(typed, "its bytes are big-endian", _suggest_array(key))
    [num_tokens], offset = shape, file.tell()
    num_held = (num_bytes - offset) // dtype.itemsize
    if num_held < num_tokens:
        reason = f"it is not a valid .npy file: it holds {num_held:,} of its {num_tokens:,} tokens, so it is truncated"
        raise ConfigError(typed, reason, f"{_suggest_array(key)}, copied again")
    if num_after := num_bytes - offset - num_tokens * dtype.itemsize:  # as of several np.save to one open file
        LOGGER.warning(
            "%s: it is an array of %s, and %s after it are not read",
            *(typed, count(num_tokens, "token"), count(num_after, "byte")),
        )
    return TokenLayout(_NPY_DTYPES[dtype.str], offset, num_tokens, header=".npy")


def _read_llm_c(dtype: str, num_tokens: int, *, num_bytes: int, typed: str, key: str) -> TokenLayout:
    num_held = (num_bytes - _LLM_C_HEADER_BYTES) // np.dtype(dtype).itemsize
    if num_held < 1 and num_tokens < 1:
        raise ConfigError(typed, "it holds a header, as of llm.c, and no token", f"{key}=<file of {dtype} tokens>")
    if num_tokens != num_held:
        reason = f"its header, as of llm.c, counts {count(num_tokens, 'token')}, and it holds {num_held:,}"
        if num_tokens > num_held:
            raise ConfigError(typed, f"{reason}: it is truncated", "the file copied again")
        fix = f"{key}=<the file with the right count in its header>, or {_suggest_array(key)} with the same tokens"
        raise ConfigError(typed, f"{reason}: the count is wrong", fix)
    return TokenLayout(dtype, _LLM_C_HEADER_BYTES, num_tokens, header=LLM_C)


def _suggest_array(key: str) -> str:
    return f"{key}=<one-dimensional .npy of uint16 or uint32>"
