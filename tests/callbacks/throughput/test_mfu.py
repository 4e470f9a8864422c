"""MFU on a clock that only the steps move, and devices by the names their drivers print."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import HalfPrecision
from timed import monitor_at, timed
from torch import nn

from callbacks.throughput.callback import SpeedMonitor
from callbacks.throughput.mfu import FlopMeter, get_kind, measure_peak_tflops
from callbacks.throughput.stopwatch import Snapshot

TERA = 1e12
ROOT = Path(__file__).parents[3]


class Figures:
    """A module's own FLOPs of a micro-batch."""

    palm, causal = 8 * TERA, 6 * TERA


def timed_with_flops(base: type, clock: Any) -> Any:
    module = timed(base, clock)
    module.recipes_flops = lambda batch: Figures()
    return module


def test_mfu_is_flops_over_seconds_over_the_peak_in_both_conventions(
    plain_module, make_trainer, read_column, clock
) -> None:
    monitor = SpeedMonitor(peak_tflops=40.0)
    monitor.clock = clock
    make_trainer(callbacks=[monitor], accumulate_grad_batches=2).fit(timed_with_flops(plain_module, clock))
    # steps of 2 seconds of two micro-batches of 8 TFLOP each
    assert read_column("throughput/tflops") == [8.0] * 3
    assert read_column("throughput/total_tflops") == [8.0] * 3
    assert read_column("throughput/mfu") == [0.2] * 3
    assert read_column("throughput/mfu_causal") == [0.15] * 3
    assert monitor.summary()["mfu"] == 0.2


@pytest.mark.parametrize(
    ("device", "precision", "peak", "text"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-true", 989.4, "H100 SXM"),
        ("NVIDIA H200", "bf16-true", 989.5, "H200"),
        ("NVIDIA L40S", "bf16-true", 362.05, "L40S"),
        ("NVIDIA GeForce RTX 4090", "16-mixed", 165.2, "RTX 4090"),
        ("NVIDIA A100-SXM4-80GB", "32-true", 19.5, "A100"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16-true", None, "MIG"),
        ("NVIDIA Unheard 9000", "bf16-true", None, "peak_tflops="),
    ],
)
def test_a_gpu_is_known_by_its_name_and_the_precision_of_the_run(
    monkeypatch, caplog, device, precision, peak, text
) -> None:
    meter = meter_on(monkeypatch, device, precision=precision, caplog=caplog)
    window = Snapshot(flops=8 * TERA, causal_flops=6 * TERA, seconds=1.0, device_seconds=2.0)
    row = meter.row(window)
    assert row["throughput/tflops"] == 4.0
    assert row["throughput/total_tflops"] == 8.0
    mfu = row["throughput/mfu"] if "throughput/mfu" in row else None
    assert mfu == (None if peak is None else 4.0 / peak)
    [line] = [record.getMessage() for record in caplog.records]
    assert text in line


def test_a_second_run_without_a_peak_has_no_mfu_of_the_first_one(monkeypatch, caplog) -> None:
    meter = meter_on(monkeypatch, "NVIDIA H200", precision="bf16-true", caplog=caplog)
    window = Snapshot(flops=8 * TERA, seconds=1.0, device_seconds=1.0)
    assert "throughput/mfu" in meter.row(window)
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        precision_plugin=None,
        precision="32-true",
        is_global_zero=False,
    )
    meter.start(trainer, nn.Linear(1, 1))
    assert "throughput/mfu" not in meter.row(window)


def meter_on(monkeypatch: Any, device: str, *, precision: str, caplog: Any, module: Any = None) -> FlopMeter:
    """Make a meter that has started on a GPU of this name."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: device)
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cuda", 0)),
        precision_plugin=HalfPrecision(),
        precision=precision,
        is_global_zero=True,
    )
    meter = FlopMeter(peak_tflops=None, measure_peak=False)
    with caplog.at_level("INFO", logger="lightning_recipes"):
        meter.start(trainer, module if module is not None else nn.Linear(1, 1))
    return meter


def test_eight_bit_layers_are_never_shown_against_the_bf16_peak(monkeypatch, caplog) -> None:
    class Float8Linear(nn.Linear):
        """Named as torchao names its own."""

    window = Snapshot(flops=989.4 * TERA, seconds=1.0, device_seconds=1.0)
    for device, mfu in (("NVIDIA H100 80GB HBM3", 0.5), ("NVIDIA A100-SXM4-80GB", None)):
        model = nn.Sequential(nn.Linear(1, 1), Float8Linear(1, 1))
        meter = meter_on(monkeypatch, device, precision="bf16-mixed", caplog=caplog, module=model)
        row = meter.row(window)
        found = row["throughput/mfu"] if "throughput/mfu" in row else None
        assert (found is None) == (mfu is None)
        assert found is None or found == pytest.approx(mfu, rel=1e-3)  # printed: 1978.9 and 989.4


@pytest.mark.parametrize(
    ("precision", "kind"),
    [("32-true", "fp32"), ("bf16-mixed", "bf16"), ("64-true", None)],
)
def test_the_kind_of_product_follows_from_the_precision(make_trainer, plain_module, precision, kind) -> None:
    assert get_kind(make_trainer(precision=precision), plain_module()) == kind


TF32 = {
    "by the old setting": "torch.set_float32_matmul_precision('high')",
    "by the new setting": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "by neither": "",
}


@pytest.mark.parametrize("how", TF32)
def test_float32_products_in_tf32_are_shown_against_its_peak(how: str, tmp_path: Path) -> None:
    if how == "by the new setting" and not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("from torch 2.9 on")
    # in a process of its own: torch allows only one of the two settings per process
    code = f"""
import torch
from lightning.pytorch import LightningModule, Trainer
from callbacks.throughput.mfu import get_kind
{TF32[how]}
print(get_kind(Trainer(accelerator="cpu", logger=False), LightningModule()))
"""
    (tmp_path / "kind.py").write_text(code)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "kind.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == ["fp32" if how == "by neither" else "tf32"], done.stderr


def test_a_cpu_has_no_mfu_and_no_line_about_it(plain_module, make_trainer, tmp_path, clock, caplog) -> None:
    with caplog.at_level("INFO", logger="lightning_recipes"):
        make_trainer(callbacks=[monitor_at(clock)]).fit(timed_with_flops(plain_module, clock))
    assert not [r.getMessage() for r in caplog.records if "MFU" in r.getMessage()]
    assert "throughput/mfu" not in (tmp_path / "run" / "metrics.csv").read_text()


def test_the_fraction_of_a_measured_product_is_logged_instead(
    plain_module, make_trainer, read_column, tmp_path, clock, monkeypatch
) -> None:
    monkeypatch.setattr("callbacks.throughput.mfu.measure_peak_tflops", lambda device, dtype: 32.0)
    monitor = SpeedMonitor(measure_peak=True)
    monitor.clock = clock
    make_trainer(callbacks=[monitor]).fit(timed_with_flops(plain_module, clock))
    assert read_column("throughput/matmul_fraction") == [0.25] * 7
    assert "throughput/mfu" not in (tmp_path / "run" / "metrics.csv").read_text()


def test_a_measured_peak_is_a_rate_and_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    assert 1e-4 < measure_peak_tflops(torch.device("cpu"), torch.float32) < 100
    assert torch.equal(before, torch.get_rng_state())


def test_a_resume_on_fewer_devices_keeps_the_mfu_of_the_earlier_ones(plain_module, make_trainer, clock) -> None:
    first = SpeedMonitor(peak_tflops=40.0)
    first.clock = clock
    make_trainer(callbacks=[first]).fit(timed_with_flops(plain_module, clock))
    on_eight = first.state_dict()  # as if eight ranks had done it
    on_eight = on_eight | {name: 8 * on_eight[name] for name in ("flops", "device_seconds")}
    second = SpeedMonitor(peak_tflops=40.0)
    second.clock = clock
    second.load_state_dict(on_eight)
    make_trainer(callbacks=[second]).fit(timed_with_flops(plain_module, clock))
    assert first.summary()["mfu"] == second.summary()["mfu"] == 0.2
