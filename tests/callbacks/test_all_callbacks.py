"""All default callbacks together, as conf/ configures them, in someone else's Lightning project."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import Tensor

import callbacks
from callbacks.loss_spike.recovery import TrainingDivergedError

CONF = Path(__file__).parents[2] / "conf" / "callbacks"
# values of interpolations in conf/callbacks
INTERPOLATED: dict[str, Any] = {
    "${profile_steps}": 2,
    "${checkpoint.monitor}": "val/loss",
    "${checkpoint.mode}": "min",
    "${dashboard.sections}": yaml.safe_load((CONF.parent / "dashboard/default.yaml").read_text())["sections"],
}
DEFAULT: list[str] = yaml.safe_load((CONF / "default.yaml").read_text())["defaults"]


def build(name: str) -> Any:
    """Build what Hydra would build from one file: its single node, which has the name of the file."""
    (key, node) = next(iter(yaml.safe_load((CONF / f"{name}.yaml").read_text()).items()))
    assert key == name
    module, _, cls = node.pop("_target_").rpartition(".")
    assert module in (f"callbacks.{name}", f"callbacks.{name}.callback")
    arguments = {name: INTERPOLATED[value] if str(value).startswith("${") else value for name, value in node.items()}
    return getattr(import_module(module), cls)(**arguments)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_plain_module_trains_with_all_of_them(plain_module, make_trainer, tmp_path, read_column, accumulate) -> None:
    make_trainer(
        callbacks=[build(name) for name in DEFAULT],
        accumulate_grad_batches=accumulate,
        limit_val_batches=1,
        num_sanity_val_steps=1,
        gradient_clip_val=1.0,
    ).fit(plain_module())
    for name in ("grad/norm", "time/excluded_seconds", "memory/host_peak_gib", "train_loss"):
        assert len(read_column(name)) == 8 // accumulate
    assert len(read_column("time/step_seconds")) == 8 // accumulate - 1  # not the first
    assert (tmp_path / "run" / "report.html").exists()


def test_two_optimizers_stepped_by_hand_get_their_rows(plain_module, make_trainer, read_column) -> None:
    import torch

    class ByHand(plain_module):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.layer(batch[0]).square().mean())
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([p], lr=0.01) for p in self.layer.parameters()]

    make_trainer(callbacks=[build(name) for name in DEFAULT], log_every_n_steps=4).fit(ByHand())
    for index in range(2):
        assert len(read_column(f"grad/norm/optimizer_{index}")) == 2
    assert len(read_column("time/step_seconds")) == 2


def test_default_holds_every_callback_that_has_a_file_but_those_that_cost_or_need_questions() -> None:
    others = {
        "default",
        "classification",
        "classes",
        "conversations",
        "preferences",
        "policy",
        "completions",
        "class_report",
        "stop_at_nan",
        "generation_eval",
        "hang",
        "optimizer_state",
        "image_text",
        "retrieval_report",
        "zero_shot",
    }
    files = {path.stem for path in CONF.glob("*.yaml")} - others
    assert sorted(DEFAULT) == sorted(files)


def test_no_callback_imports_recipes_or_hydra() -> None:
    allowed = {
        "IPython",
        "callbacks",
        "jinja2",
        "lightning",
        "markupsafe",
        "matplotlib",
        "rich",
        "torch",
        "typing_extensions",
        "yaml",
    } | set(sys.stdlib_module_names)
    for path in Path(callbacks.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            absolute = isinstance(node, ast.ImportFrom) and not node.level
            names = [node.module] if absolute else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert {name.partition(".")[0] for name in names} <= allowed, path.name


def test_no_module_needs_a_posix_system_to_be_imported() -> None:
    posix = {"curses", "fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios"}
    for path in Path(callbacks.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not posix & set(names), path.name


def test_the_report_can_be_written_without_lightning_and_imports_matplotlib_late() -> None:
    code = (
        "import sys; from callbacks import write_report;"
        "print([m for m in ('torch', 'lightning', 'matplotlib', 'rich') if m in sys.modules])"
    )
    root = CONF.parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_public_name_can_be_imported_and_no_other() -> None:
    for name in callbacks.__all__:
        assert getattr(callbacks, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        callbacks.Nothing  # noqa: B018


def test_the_error_that_ends_a_diverged_run_can_be_caught_by_its_exported_name() -> None:
    assert callbacks.TrainingDivergedError is TrainingDivergedError
    assert "TrainingDivergedError" in dir(callbacks)
