"""`compile=true` changes the speed and not the curve."""

from pathlib import Path

import pytest
from support import TINY, composed_config, read_metrics

from recipes.build import build


def train_rows(folder: Path, texts: str, *overrides: str) -> list[dict[str, float]]:
    folder.mkdir()
    common = [
        *TINY,
        f"data.path={texts}",
        "trainer.max_steps=4",
        "save_every=null",
        "warmup_steps=1",
    ]
    run = build(composed_config(*common, *overrides), folder, [])
    run.trainer.fit(run.task, datamodule=run.data)
    return read_metrics(folder)


def test_a_compiled_run_has_the_curve_of_an_eager_one(tmp_path: Path, text_folder: str) -> None:
    eager = train_rows(tmp_path / "eager", text_folder)
    compiled = train_rows(tmp_path / "compiled", text_folder, "compile=true")
    assert len(compiled) == len(eager) == 4
    for row, expected in zip(compiled, eager, strict=True):
        for name in ("train/loss", "grad/norm"):
            # fused kernels round the same formulas in another order
            assert row[name] == pytest.approx(expected[name], rel=1e-4), (row["step"], name)
    assert compiled[-1]["val/loss"] == pytest.approx(eager[-1]["val/loss"], rel=1e-4)
