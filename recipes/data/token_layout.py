"""Where the tokens are in a file: raw, a .npy array, or behind the header of llm.c; anything else is rejected."""

import hashlib
import io
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from recipes.data.compression import NEW_FILE
from recipes.data.encodings import describe_conversion
from recipes.data.file_kinds import NPY, OTHER_ENCODING, find_text_encoding, holds_rows, recognize
from recipes.errors import ConfigError, python, type_setting
from recipes.files import count

LOGGER = logging.getLogger("lightning_recipes")

_NPY_DTYPES = {"<u2": "uint16", "<u4": "uint32"}
# llm.c and those who follow it, such as modded-nanogpt: 256 int32, of which the first three are these
_LLM_C_HEADER_BYTES = 1024
_MIN_HEADER_BYTES, _MAX_VERSION = 8, 16  # to recognize a part of one
_LLM_C_MAGICS = {20240520: "uint16", 20240801: "uint32"}
LLM_C = "llm.c"
_MAX_VOCABULARY = 10_000_000  # of no tokenizer: larger ids are not tokens
SAMPLE_BLOCKS, SAMPLE_BYTES = 64, 1 << 16  # of a file, from which the type of its tokens is found
_LARGE_VOCABULARY = 1 << 20  # which is larger than nearly all, and shows in the upper half of uint32
_COMMON_IDS = 16  # ids below are in every text, and those of a large vocabulary are seldom all below
_MIN_SHARE = 0.9  # of the numbers that are read, some may be no tokens: -1, or ids of another vocabulary
_NO_ID = 2**16 - 1  # both halves of -1


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
    elif len(head) >= _MIN_HEADER_BYTES:
        magic, version = np.frombuffer(head[:_MIN_HEADER_BYTES], "<i4").tolist()
        if magic in _LLM_C_MAGICS and 0 < version < _MAX_VERSION:
            reason = f"it begins with a header, as of llm.c, and ends after {count(num_bytes, 'byte')} of it"
            raise ConfigError(typed, f"{reason}: it is truncated", "the file copied again")
    if (kind := recognize(head, name, is_text=False)) is not None:
        raise ConfigError(typed, f"{kind.reason}, not raw tokens", kind.fix or _suggest_array(key))
    if name.lower().endswith(".npy"):
        raise ConfigError(typed, "it is not a valid .npy file: it does not begin like one", _suggest_array(key))
    if (encoding := find_text_encoding(head)) is not None:
        raise _explain_text(head, encoding, typed, name)
    item_bytes = np.dtype(dtype).itemsize
    if num_bytes % item_bytes:
        reason = f"{num_bytes} bytes are not a multiple of {item_bytes}, the size of a {dtype} token: it is truncated"
        is_narrow = num_bytes % 2 == 0 and find_bits(head, vocab_size=_LARGE_VOCABULARY) == 16
        other = f", or {_section(key)}.dtype=uint16" if is_narrow else ""
        raise ConfigError(typed, reason, f"{fix}, copied again{other}")
    return TokenLayout(dtype, 0, num_bytes // item_bytes)


def log_overruled(layout: TokenLayout, dtype: str, *, name: str, section: str) -> None:
    """Name the dtype of a setting that is not read, because the header of a file records another one."""
    if layout.header is not None and layout.dtype != dtype:
        LOGGER.info(
            "%s: its tokens are %s, as its header records; %s.dtype=%s is for files without a header",
            *(name, layout.dtype, section, dtype),
        )


def file_key(path: str | Path) -> int:
    """Return a hash of where a file is, by which sources find out that they read the same one."""
    name = str(path) if "://" in str(path) else os.path.realpath(path)
    return int.from_bytes(hashlib.blake2b(os.fsencode(name), digest_size=8).digest(), "little")


def find_bits(data: bytes, *, vocab_size: int) -> int | None:
    """Return the bit width of the integers in a part of a raw file: 16, 32 or 64; None if it does not show.

    A raw file does not record its type. But uint32 tokens are 1017, 0, 5, 0, … as 16-bit numbers: every second one is
    the upper half of a token, at most that of the largest token in the vocabulary. With int64, three of four are 0.

    Args:
        data: Bytes of the file, from an offset that is a multiple of eight.
        vocab_size: Size of the vocabulary.
    """
    halves = np.frombuffer(data[: len(data) // 8 * 8], "<u2").reshape(-1, 4)
    upper = (vocab_size - 1) >> 16
    for largest_upper in (max(_COMMON_IDS, upper), upper):
        low, high = halves[:, 0::2], halves[:, 1::2]  # of 32-bit numbers
        is_read = ((low > largest_upper) | (high > largest_upper)) & (low != _NO_ID)
        if is_read.sum() <= is_read.size // 32:  # padding
            continue
        is_wide = is_read & (high <= largest_upper)
        if is_wide.sum() < _MIN_SHARE * is_read.sum():
            return 16
        first = is_read[:, 0]
        is_widest = first & is_wide[:, 0] & (low[:, 1] == 0) & (high[:, 1] == 0)
        return 64 if first.any() and is_widest.sum() >= _MIN_SHARE * first.sum() else 32
    return None


def sample_bytes(file: BinaryIO, layout: TokenLayout) -> bytes:
    """Return blocks of a raw file that are evenly spaced, for `find_bits`."""
    num_bytes = layout.num_tokens * np.dtype(layout.dtype).itemsize
    blocks = []
    for start in sorted({num_bytes * block // SAMPLE_BLOCKS // SAMPLE_BYTES for block in range(SAMPLE_BLOCKS)}):
        file.seek(start * SAMPLE_BYTES)
        blocks.append(file.read(SAMPLE_BYTES))
    return b"".join(blocks)


def reject_big_endian(data: bytes, dtype: str, *, key: str, name: str, vocab_size: int) -> None:
    """Reject a raw file whose numbers are tokens once their bytes are swapped, unlike those that are read.

    Args:
        data: Bytes of the file, from an offset that is a multiple of eight.
        dtype: Type with which the file is read.
        key: Setting that named it, such as "data.path".
        name: Name of the file.
        vocab_size: Size of the vocabulary.

    Raises:
        ConfigError: They are.
    """
    for width in (4, 2):
        little, big = (np.frombuffer(data[: len(data) // 8 * 8], f"{order}u{width}") for order in "<>")
        is_token = (little < vocab_size).mean() if len(little) else 1.0
        if is_token < _MIN_SHARE / 2 and (big < vocab_size).all():
            reason = f"its bytes are big-endian: swapped, all of its {8 * width}-bit integers are tokens"
            fix = f"{_write_array(name, f'>u{width}', f'uint{8 * width}')}, then its path"
            raise ConfigError(f"{key}={name} {_section(key)}.dtype={dtype}", reason, fix)


def explain_type(key: str, name: str, layout: TokenLayout, bits: int, *, largest: int, vocab_size: int) -> ConfigError:
    """Return the error for a raw file whose integers are of another width than its `dtype`.

    Args:
        key: Setting that named it, such as "data.path".
        name: Name of the file.
        layout: Layout with which it is read.
        bits: What `find_bits` returns.
        largest: The largest of the integers, if they are of 16 or 32 bits.
        vocab_size: Every token must be below it.
    """
    shown = {16: "they are not 0 at every second place", 32: "every second place is 0 or the upper half of one"}
    reason = f"read as uint16, {shown.get(bits, 'three of four places are 0')}: the file holds {bits}-bit integers"
    fix = f"{_section(key)}.dtype=uint{bits}"
    if bits == 64:
        fix = f"{key}=<the same tokens written as uint32> {_section(key)}.dtype=uint32"
    elif largest >= _MAX_VOCABULARY:
        reason += f", and {_describe_id(largest)} is no token"
        fix = f"{key}=<the same tokens without {largest}> {fix}"
    elif largest >= vocab_size:
        reason += f", and token id {largest} is outside the vocabulary (maximum {vocab_size - 1})"
        fix += f" model.vocab_size={largest + 1}, or more"
    return ConfigError(f"{key}={name} {_section(key)}.dtype={layout.dtype}", reason, fix)


def explain_two_types(files: Mapping[int, tuple[str, str]], dtype: str) -> ConfigError:
    """Return the error for raw files of different types, of which a run has only one.

    Args:
        files: Width of the integers -> setting and name of a file.
        dtype: Type with which all are read.
    """
    (key, name), other_key = files[max(files)], files[min(files)][0]
    other = files[min(files)][1] if other_key == key else f"{other_key}={files[min(files)][1]}"
    reason = f"it holds {max(files)}-bit integers, and {other} {min(files)}-bit ones; raw files share one dtype"
    convert = _write_array(name, f"<i{max(files) // 8}", "uint32")
    fix = f"{convert}, and its path, as it records its type, in place of {name}"
    if min(files) == 16 and dtype != "uint16":
        fix += f"; and {_section(key)}.dtype=uint16"
    return ConfigError(f"{key}={name}", reason, fix)


def explain_large_token(key: str, name: str, largest: int, *, vocab_size: int) -> ConfigError:
    """Return the error for a token that the model does not know."""
    reason = f"token id {_describe_id(largest)} is outside the vocabulary (maximum {vocab_size - 1})"
    is_of_larger = largest < _MAX_VOCABULARY
    fix = f"model.vocab_size={largest + 1} or more" if is_of_larger else f"{key}=<file of tokens below {vocab_size}>"
    return ConfigError(f"{key}={name}", reason, fix)


def _explain_text(head: bytes, encoding: str, typed: str, name: str) -> ConfigError:
    read = type_setting("data.path", name)
    if encoding != "utf-8":
        is_known = encoding != OTHER_ENCODING
        reason = f"it is text, which looks like {encoding}, not tokens" if is_known else "it is text, not tokens"
        convert = describe_conversion(name, encoding if is_known else None).removesuffix(NEW_FILE)
        fix = f"{convert}> <new file>, then data=text_files data.path=<new file> tokenizer=bpe"
    elif holds_rows(head):
        reason, fix = "it holds rows of JSON, not tokens", f"data=documents {read} tokenizer=bpe"
    else:
        reason, fix = "it is text, not tokens", f"data=text_files {read} tokenizer=bpe"
    return ConfigError(typed, reason, fix)


def _write_array(name: str, dtype: str, new: str) -> str:
    """Return the command that writes the integers of a raw file to a .npy file of another type."""
    code = f"import numpy, sys; numpy.save(sys.argv[2], numpy.fromfile(sys.argv[1], '{dtype}').astype('{new}'))"
    return f"{python(code, name)} <new file>.npy"


def _describe_id(id: int) -> str:
    return f"{id}, -1 as uint32," if id == 2**32 - 1 else str(id)


def _section(key: str) -> str:
    return key.rpartition(".")[0]


def _read_npy(head: bytes, *, num_bytes: int, typed: str, key: str) -> TokenLayout:
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
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
