"""Paths and folders that must exist before a run starts: names and sizes only, nothing is opened."""

import glob
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recipes.mistake import Mistake

_NEED_CHECKPOINT = ("evaluate", "sample", "export")


def check_run(config: Mapping[str, Any]) -> Iterator[Mistake]:
    """The data's path, the folder to resume from."""
    yield from _data_path(config["data"])
    yield from _resume(config)


def _data_path(data: Mapping[str, Any]) -> Iterator[Mistake]:
    path = data.get("path")
    if not isinstance(path, str):
        return
    expanded = str(Path(path).expanduser())
    if not Path(expanded).exists() and not glob.glob(expanded, recursive=True):
        yield Mistake(
            f"data.path={path}", "there is no such file or folder", "data.path=<a path that exists>"
        )


def _resume(config: Mapping[str, Any]) -> Iterator[Mistake]:
    resume, mode = config["resume"], config["mode"]["_target_"].rpartition(".")[2]
    if resume in (None, "auto"):
        if mode in _NEED_CHECKPOINT and resume is None:
            yield Mistake(
                f"mode={mode}", "it needs a checkpoint", f"mode={mode} resume=<run folder>"
            )
        return
    folder = Path(resume)
    if not folder.is_dir():
        yield Mistake(
            f"resume={resume}", "there is no such folder", "resume=<a run folder or a checkpoint>"
        )
    elif not (folder / "manifest.json").is_file() and not any(
        (folder / "checkpoints").glob("step_*.ckpt/manifest.json")
    ):
        yield Mistake(
            f"resume={resume}", "there is no whole checkpoint in it", "resume=<a run that saved one>"
        )
