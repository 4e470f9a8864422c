"""`compile=true` changes the speed and not the curve."""

from pathlib import Path

import pytest
from support import TINY, composed_config, read_metrics, resolved
from torch._dynamo.callback import callback_handler

from recipes.build import build
from recipes.compile import CompilationCounter
from recipes.task.language_modeling import LanguageModeling


def train_rows(folder: Path, texts: str, *overrides: str) -> list[dict[str, float]]:
    folder.mkdir()
    common = [
        *TINY,
        f"data.path={texts}",
        "trainer.max_steps=4",
        "save_every=null",
        "warmup_steps=1",
    ]
    run = build(resolved(composed_config(*common, *overrides), folder))
    run.trainer.fit(run.task, datamodule=run.data)
    return read_metrics(folder)


def test_a_run_that_fails_leaves_no_counter_of_compilations_in_torch(
    tmp_path: Path, text_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, during = list(callback_handler.start_callbacks), list[object]()

    def fail(*arguments: object) -> None:
        during.extend(getattr(called, "__self__", None) for called in callback_handler.start_callbacks)
        raise FloatingPointError

    monkeypatch.setattr(LanguageModeling, "training_step", fail)
    run = build(resolved(composed_config(*TINY, f"data.path={text_folder}", "compile=true"), tmp_path))
    with pytest.raises(FloatingPointError):
        run.trainer.fit(run.task, datamodule=run.data)
    assert sum(isinstance(one, CompilationCounter) for one in during) == 1
    assert callback_handler.start_callbacks == before


@pytest.mark.slow  # on two ranks: tests/parity/test_speed_options.py
def test_a_compiled_run_has_the_curve_of_an_eager_one(tmp_path: Path, text_folder: str) -> None:
    eager = train_rows(tmp_path / "eager", text_folder)
    compiled = train_rows(tmp_path / "compiled", text_folder, "compile=true")
    assert len(compiled) == len(eager) == 4
    for row, expected in zip(compiled, eager, strict=True):
        for name in ("train/loss", "grad/norm"):
            # fused kernels round the same formulas in another order
            assert row[name] == pytest.approx(expected[name], rel=1e-4), (row["step"], name)
    assert compiled[-1]["val/loss"] == pytest.approx(eager[-1]["val/loss"], rel=1e-4)
