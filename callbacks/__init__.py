"""Callbacks that monitor a run, for any Lightning project. Importing this package is cheap.

Each callback owns the prefix of its metrics (`grad/`, `throughput/`, `memory/`, …), which its docstring names; no
other callback logs under it. They need nothing of a module; what it may provide stands in `protocols`, as methods whose
names begin with `recipes_`.

A callback declares its own facts on its class, so that loggers and the report need no list of callbacks:

* `summary_fields`: fields it adds to summary.json, with the value each has before anything is known. A `summary()`
  method returns the values. Fields in `summed_fields` add up over the callbacks that report them.
* `events`: kinds of events it logs, with how readers treat them, see `events.EventKind`.
* `Annotated[int, ">= 1"]` on an argument of `__init__`: its valid range, which the config check reads from source.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

# The public names, listed here only: at run time a name is imported from its module on first use, so that
# `from callbacks import write_report` does not pay for importing torch and Lightning.
if TYPE_CHECKING:
    from .answer_check import AnswerCheck as AnswerCheck
    from .bottleneck.callback import BottleneckMonitor as BottleneckMonitor
    from .diagnosis.diagnose import diagnose as diagnose
    from .early_stop import EarlyStop as EarlyStop
    from .grad_norm.callback import GradNormMonitor as GradNormMonitor
    from .loss_scale import LossScaleMonitor as LossScaleMonitor
    from .loss_spike.callback import LossSpikeRollback as LossSpikeRollback
    from .loss_spike.recovery import TrainingDivergedError as TrainingDivergedError
    from .memory.callback import MemoryMonitor as MemoryMonitor
    from .progress.callback import ProgressLine as ProgressLine
    from .protocols import SupportsAnswers as SupportsAnswers
    from .protocols import SupportsConsumed as SupportsConsumed
    from .protocols import SupportsFlops as SupportsFlops
    from .protocols import SupportsMetaForward as SupportsMetaForward
    from .protocols import SupportsRow as SupportsRow
    from .protocols import SupportsText as SupportsText
    from .report.callback import RunReport as RunReport
    from .report.compare.page import write_comparison as write_comparison
    from .report.page import write_report as write_report
    from .sample_text import SampleText as SampleText
    from .step_profiler import StepProfiler as StepProfiler
    from .stop_at_nan import StopAtNan as StopAtNan
    from .throughput.callback import SpeedMonitor as SpeedMonitor


@cache
def _modules() -> dict[str, str]:
    """Return the module of each public name, read from the imports above."""
    import ast
    from pathlib import Path

    imports = [
        node
        for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level == 1
    ]
    return {alias.name: f".{node.module}" for node in imports for alias in node.names}


def __getattr__(name: str) -> object:
    if name == "__all__":
        return sorted(_modules())
    if name not in _modules():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_modules()[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_modules()})
