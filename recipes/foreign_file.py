"""Files that others wrote: whatever a reader raises on one becomes a single error in three clauses.

Parsers answer a damaged or hostile file with nearly any exception (SafetensorError, KeyError, RecursionError, a panic
of Rust code). So each reader of downloaded weights, config.json, tokenizers or a run's own files opens them inside of
`reading`, instead of guessing what its parser may raise. Imports only the standard library.
"""

import codecs
import errno
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recipes.errors import ConfigError, shell, type_setting
from recipes.files import WriteError
from recipes.shipped_models import is_shipped

_NUM_HEAD_BYTES = 512
_NO_MEMORY = "DefaultCPUAllocator"  # torch's allocator of host memory raises RuntimeError
_UNSAFE = "Weights only load failed"  # torch, of a pickle that it does not load without running code
# what torch (2.13) says that it does not unpickle
_CODE = re.compile(r"(?:GLOBAL|callable|function|class) ([a-z_][\w.]+)")
_ZIP, _GZIP = b"PK\x03\x04", b"\x1f\x8b"
_MAX_MESSAGE = 200  # characters of a parser's message: some quote the whole file


class FormatError(ValueError):
    """What is wrong with the content of a file, in words for a person: `reading` repeats them as they are."""


@contextmanager
def reading(path: str | Path, setting: str, fix: str) -> Iterator[None]:
    """Report every error that is raised inside as one about this file.

    `ConfigError` passes as it is. So does a lack of memory, as a file of weights may be whole and the memory too small,
    and `WriteError`, which is of a file that is written meanwhile.

    Args:
        path: The file that is read.
        setting: The override that named it, `key=value`.
        fix: What to type instead; a Git LFS pointer gets its own.

    Raises:
        ConfigError: The file cannot be read as what it should be.
    """
    try:
        yield
    except (ConfigError, MemoryError, WriteError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError" or _NO_MEMORY in str(error):  # by name: torch is not imported
            raise
        raise _explain(path, setting, fix, error) from error
    except BaseException as error:
        # tokenizers and safetensors are Rust: what pyo3 makes of a panic is deliberately not an Exception
        if type(error).__name__ != "PanicException":
            raise
        raise _explain(path, setting, fix, error) from error


def missing_folder(name: str, key: str) -> ConfigError | None:
    """Return the error for a published model that is given as a file, or by a path that does not exist.

    Args:
        name: As it was typed.
        key: The setting that named it, `model.name` or `model.pretrained`.

    Returns:
        None for what may be the name of a hub repository.
    """
    setting, path = f"{key}={name}", os.path.expanduser(name)
    if name.strip().lower() in ("", "true", "false", "none"):
        fix = f"{key}=<folder with config.json, or hub id>" + (", or null" if key == "model.pretrained" else "")
        return ConfigError(setting, "it names neither a folder nor a repository of the hub", fix)
    if os.path.isfile(path):
        if name.lower().endswith(".gguf"):
            convert = f"mode=convert_gguf {type_setting('mode.path', name)} mode.output=<new folder>"
            return ConfigError(
                setting, "it is a file of llama.cpp, not a folder", f"{convert}, then {key}=<new folder>"
            )
        folder = os.path.dirname(name) or "."
        is_model = os.path.isfile(os.path.join(os.path.dirname(path), "config.json"))
        fix = type_setting(key, folder) if is_model else f"{key}=<folder with config.json and model.safetensors>"
        return ConfigError(setting, "it is a file, not a folder", fix)
    if name.startswith((".", "/", "~")):
        return ConfigError(setting, "there is no such folder", f"{key}=<folder with config.json, or hub id>")
    return None


def missing_published(name: str, key: str) -> ConfigError | None:
    """Return the error for published weights that are not in the file system under the path that names them.

    Args:
        name: As it was typed.
        key: The setting that named it, such as `model.pretrained`.

    Returns:
        None for a folder with a config.json, and for what may be the name of a hub repository.
    """
    if is_shipped(name):
        fix = f"{key}=null" if key.startswith("model.") else f"{key}=<folder with config.json, or hub id>"
        return ConfigError(f"{key}={name}", "it is a configuration that comes without weights", fix)
    folder = os.path.expanduser(name)
    if not (name and os.path.isdir(folder)):  # unlike Path.is_dir, False if the name is too long
        return missing_folder(name, key)
    return None if os.path.isfile(os.path.join(folder, "config.json")) else missing_config(name, key)


def missing_config(folder: str | Path, key: str) -> ConfigError:
    """Return the error for a folder that should hold a published model, and has no config.json.

    Args:
        folder: As it was typed.
        key: The setting that named it, `model.name` or `model.pretrained`.
    """
    setting, expanded = f"{key}={folder}", Path(os.path.expanduser(folder))
    if not os.access(expanded, os.R_OK | os.X_OK):
        fix = f"{shell('chmod u+rx', expanded)}, then the same command"
        return ConfigError(setting, "you may not read this folder", fix)
    if (expanded / "adapter_config.json").is_file():
        reason = "the folder holds an adapter of peft, which is trained on top of a model"
        pretrained = type_setting("adapter.pretrained", folder)
        return ConfigError(setting, reason, f"{key}=<model of the adapter> adapter=<lora or ia3> {pretrained}")
    if (expanded / "checkpoints").is_dir():
        reason = "the folder is that of a run, whose checkpoints are in another format"
        resumed, exported = type_setting("resume", folder), type_setting(key, f"{folder}/export")
        fix = f"mode=export {resumed}, then {exported}, or {resumed} alone to go on with the run"
        return ConfigError(setting, reason, fix)
    if (expanded / "manifest.json").is_file():
        reason = "the folder is a checkpoint of a run, which is in another format"
        exported = type_setting(key, Path(folder).parent.parent / "export")
        return ConfigError(setting, reason, f"mode=export {type_setting('resume', folder)}, then {exported}")
    return ConfigError(
        setting, "the folder has no config.json", f"{key}=<folder with config.json and model.safetensors>"
    )


def recognize(path: str | Path, setting: str, fix: str) -> ConfigError | None:
    """Return the error for a file that is none of what a reader reads, by what it begins with; None if unknown.

    Args:
        path: The file that is read.
        setting: The override that named it, `key=value`.
        fix: What to type instead; a Git LFS pointer gets its own.
    """
    head = _read_head(path)
    if isinstance(head, PermissionError):
        return ConfigError(setting, f"you may not read {path}", f"{shell('chmod u+r', path)}, then the same command")
    if head == b"":
        return ConfigError(setting, f"{path} is empty (0 bytes)", fix)
    if head.startswith(b"version https://git-lfs"):
        reason = f"{path} is a Git LFS pointer: the file itself was not downloaded"
        return ConfigError(setting, reason, f"{shell('git -C', Path(path).parent)} lfs pull, then the same command")
    if head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return ConfigError(setting, f"{path} is a web page: its download failed", fix)
    if known := _recognize_archive(path, head, setting, fix):
        return known
    if str(path).endswith(".json") and (encoding := _find_encoding(head)) is not None:
        reason = f"{path} is written in {encoding}, and JSON is UTF-8 without a byte order mark"
        if encoding == "UTF-8 with a byte order mark":
            return ConfigError(
                setting, reason, f"sed -i '1s/^\\xEF\\xBB\\xBF//' {shlex.quote(str(path))}, then the same command"
            )
        old, new = shlex.quote(str(path)), shlex.quote(f"{path}.new")
        convert = f"iconv -f {encoding} -t UTF-8 {old} > {new} && mv {new} {old}"
        return ConfigError(setting, reason, f"{convert}, then the same command")
    return None


def _recognize_archive(path: str | Path, head: bytes, setting: str, fix: str) -> ConfigError | None:
    """Return the error for a file of weights in another format than its name says; None if it is not one."""
    file, quoted = Path(path), shlex.quote(str(path))
    if head.startswith(_GZIP) and file.suffix not in (".gz", ".tgz"):
        unpacked = f"mv {quoted} {quoted}.gz && gunzip {quoted}.gz, then the same command"
        return ConfigError(setting, f"{path} is compressed with gzip", unpacked)
    if file.suffix == ".safetensors" and head.startswith(_ZIP):
        what, name = "is a zip archive, as torch.save writes it", re.sub("^model", "pytorch_model", file.stem) + ".bin"
    elif file.suffix == ".bin" and head[8:10] == b'{"':  # after the length of its header
        what, name = "holds safetensors", f"{file.stem.removeprefix('pytorch_')}.safetensors"
    else:
        return None
    if "-of-" not in file.name:  # else an index names it
        fix = f"mv {quoted} {shlex.quote(str(file.with_name(name)))}, then the same command"
    return ConfigError(setting, f"{path} {what}, and not what its name says", fix)


def _explain(path: str | Path, setting: str, fix: str, error: BaseException) -> ConfigError:
    known = recognize(path, setting, fix)
    return known or ConfigError(setting, f"{path} cannot be read: {describe_error(error)}", fix)


def describe_error(error: BaseException) -> str:
    """Return the type and the start of the first line of an exception, for an error of one line.

    Of torch, what it says about a file that holds more than tensors is replaced: it advises to run the code in it.
    """
    if isinstance(error, FormatError):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.EINVAL:  # torch, of an archive without its end
        return "it is cut off or damaged"
    if _UNSAFE in str(error):
        code = _CODE.search(str(error))
        return f"it holds more than tensors ({code[1]})" if code else "it is no file that torch.save has written"
    if type(error).__name__.startswith("StrictDataclass") and error.__cause__ is not None:
        error = error.__cause__  # huggingface_hub wraps what a setting of config.json is
    lines = str(error).strip().splitlines()
    message = lines[0] if lines else ""
    if message.endswith(":") and len(lines) > 1:  # the reason is on the next line
        message += f" {lines[1].strip()}"
    if len(message) > _MAX_MESSAGE:
        message = message[:_MAX_MESSAGE] + "…"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _find_encoding(head: bytes) -> str | None:
    """Return what a text is written in, by its byte order mark; None without one."""
    marks = {codecs.BOM_UTF8: "UTF-8 with a byte order mark", codecs.BOM_UTF32_LE: "UTF-32"}
    marks |= {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}
    return next((encoding for mark, encoding in marks.items() if head.startswith(mark)), None)


def _read_head(path: str | Path) -> bytes | PermissionError:
    """Return the first bytes of a regular file, or why they may not be read.

    One space for what cannot be opened for another reason, which its error describes.
    """
    try:
        if not Path(path).is_file():  # a FIFO would block
            return b" "
        with open(path, "rb") as file:
            return file.read(_NUM_HEAD_BYTES)
    except PermissionError as error:
        return error
    except (OSError, ValueError):  # ValueError: a name with a NUL character
        return b" "
