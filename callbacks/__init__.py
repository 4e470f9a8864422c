"""Callbacks that watch a run, in anybody's Lightning project; this import itself costs nothing.

A metric's prefix is the name of the callback that owns it, and nobody else writes under it:

| prefix                 | callback          | module         |
|------------------------|-------------------|----------------|
| `grad/`                | `GradNormMonitor` | `grad_norm`    |
| `throughput/` `time/`  | `SpeedMonitor`    | `throughput`   |
| none, a line           | `BottleneckMonitor`| `bottleneck`  |
| `memory/`              | `MemoryMonitor`   | `memory`       |
| none, `profile/`       | `StepProfiler`    | `step_profiler`|
| `precision/`           | `LossScaleMonitor`| `loss_scale`   |
| `spike/`               | `LossSpikeRollback`| `loss_spike`  |
| none, ends the run     | `EarlyStop`       | `early_stop`   |
| none, ends the run     | `StopAtNan`       | `stop_at_nan`  |
| none, writes log lines | `ProgressLine`    | `progress`     |
| none, `samples.jsonl`  | `SampleText`      | `sample_text`  |
| none, `report.html`    | `RunReport`       | `report`       |

They read what a module offers (`num_tokens`, `num_samples`, `flops_of`, `grad_norm`, `generate_text`) and do
with less where it offers nothing. A name is imported when it is first asked for, so that
`from callbacks.report.page import write_report` does not pay for Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .bottleneck.callback import BottleneckMonitor
    from .early_stop import EarlyStop
    from .grad_norm.callback import GradNormMonitor
    from .loss_scale import LossScaleMonitor
    from .loss_spike.callback import LossSpikeRollback
    from .memory.callback import MemoryMonitor
    from .progress.callback import ProgressLine
    from .report.callback import RunReport
    from .report.compare.page import write_comparison
    from .report.page import write_report
    from .sample_text import SampleText
    from .step_profiler import StepProfiler
    from .stop_at_nan import StopAtNan
    from .throughput.callback import SpeedMonitor

_HOME = {
    "BottleneckMonitor": "bottleneck.callback",
    "EarlyStop": "early_stop",
    "GradNormMonitor": "grad_norm.callback",
    "LossScaleMonitor": "loss_scale",
    "LossSpikeRollback": "loss_spike.callback",
    "MemoryMonitor": "memory.callback",
    "ProgressLine": "progress.callback",
    "RunReport": "report.callback",
    "SampleText": "sample_text",
    "SpeedMonitor": "throughput.callback",
    "StepProfiler": "step_profiler",
    "StopAtNan": "stop_at_nan",
    "write_comparison": "report.compare.page",
    "write_report": "report.page",
}

__all__ = [
    "BottleneckMonitor",
    "EarlyStop",
    "GradNormMonitor",
    "LossScaleMonitor",
    "LossSpikeRollback",
    "MemoryMonitor",
    "ProgressLine",
    "RunReport",
    "SampleText",
    "SpeedMonitor",
    "StepProfiler",
    "StopAtNan",
    "write_comparison",
    "write_report",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
