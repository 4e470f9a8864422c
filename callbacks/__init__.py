"""Callbacks that monitor and protect training runs in any Lightning project. Importing this package is cheap.

Each callback logs its metrics under a prefix of its own (`grad/`, `throughput/`, `memory/`, …), named in its docstring.
Callbacks work with any module; the optional methods that a module may provide, whose names begin with `recipes_`, are
listed in `protocols`.

A callback declares its metadata on its class, so that loggers and the report need no list of callbacks:

* `summary_fields`: fields that it adds to summary.json, with their initial values. Its `summary()` method returns the
  current values. Fields in `summed_fields` are summed over all callbacks that report them.
* `events`: kinds of events that it logs and how readers treat them; see `events.EventKind`.
* `validation_metrics`: names, without `val/`, of the metrics that it logs after a validation. With `validates_with`,
  the name of an argument, it logs none while that is None; with `input_kind`, it needs a task for such samples.
* `Annotated[int, ">= 1"]` on an argument of `__init__`: its valid range, which the config check reads from source.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

# The public names, listed only here. At run time, a name is imported from its module on first use, so that
# `from callbacks import write_report` does not import torch and Lightning.
if TYPE_CHECKING:
    from .bottleneck.callback import BottleneckMonitor as BottleneckMonitor
    from .class_report import ClassReport as ClassReport
    from .diagnosis.diagnose import diagnose as diagnose
    from .early_stop import EarlyStop as EarlyStop
    from .generation_eval import GenerationEval as GenerationEval
    from .grad_norm.callback import GradNormMonitor as GradNormMonitor
    from .hang import HangMonitor as HangMonitor
    from .loss_scale import LossScaleMonitor as LossScaleMonitor
    from .loss_spike.callback import LossSpikeRollback as LossSpikeRollback
    from .loss_spike.recovery import TrainingDivergedError as TrainingDivergedError
    from .memory.callback import MemoryMonitor as MemoryMonitor
    from .optimizer_state import OptimizerMonitor as OptimizerMonitor
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
    from .retrieval_report import RetrievalReport as RetrievalReport
    from .sample_text import SampleText as SampleText
    from .step_profiler import StepProfiler as StepProfiler
    from .stop_at_nan import StopAtNan as StopAtNan
    from .throughput.callback import SpeedMonitor as SpeedMonitor
    from .zero_shot import ZeroShot as ZeroShot


@cache
def _modules() -> dict[str, str]:
    """Return the module of each public name, parsed from the imports above."""
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
