"""Run preflight, the range test and the noise scale as one rank: python trial_ranks.py <cases.json> <results.json>."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:3]]

from run_cases import run_all  # noqa: E402

from recipes.config import compose_and_check  # noqa: E402
from recipes.config.resolved import ResolvedRun  # noqa: E402
from recipes.errors import ConfigError  # noqa: E402
from recipes.mode.lr_find import lr_find  # noqa: E402
from recipes.mode.noise_scale import noise_scale  # noqa: E402
from recipes.mode.preflight import preflight  # noqa: E402


def compose(overrides: list[str], mode: str, folder: Path) -> ResolvedRun:
    composed, mistakes = compose_and_check([*overrides, f"mode={mode}"])
    assert composed is not None, mistakes
    assert not mistakes, [str(mistake) for mistake in mistakes]
    return replace(composed, run_folder=folder / "run")


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    def no_page(*_: Any, **__: Any) -> None:
        pass

    overrides, path = case["overrides"], str(folder)
    result: dict[str, Any] = {"preflight": {}, "noise_scale": None}
    if case["checks"]:
        composed = compose(overrides, "preflight", folder)
        result["code"] = preflight(composed, overfit_steps=12, path=path, write_page=no_page)
    if case["trials"]:
        lr_find(
            compose(overrides, "lr_find", folder), min_lr=1e-5, max_lr=10.0, num_steps=30, path=path, write_page=no_page
        )
        try:
            noise_scale(compose(overrides, "noise_scale", folder), num_steps=10, path=path, write_page=no_page)
        except ConfigError as mistake:
            result["mistake"] = str(mistake)
    if os.environ.get("RANK", "0") != "0":
        return {}
    for name in ("preflight", "lr_find", "noise_scale"):
        if (folder / f"{name}.json").exists():
            result[name] = json.loads((folder / f"{name}.json").read_text())
    result["left"] = sorted(file.name for file in folder.iterdir())
    return result


if __name__ == "__main__":
    run_all(run_case)
