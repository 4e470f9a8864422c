"""Published dense peak FLOP/s by device name and number format; None for unknown devices.

A device that clocks above its vendor's stated boost can exceed its published peak. The device name does not reveal
power limits or a partitioned MI300X.
"""

import re
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["bf16", "fp16", "tf32", "fp32", "fp8"]


@dataclass(frozen=True)
class Peak:
    """TFLOP/s without sparsity, None if unknown, and one line that names the source."""

    tflops: float | None
    description: str


@dataclass(frozen=True)
class PeakFlops:
    """Peaks of one device. A name matches if it has all of `words`, and no others except `also` and vendor names."""

    device: str
    words: frozenset[str]
    source: str
    tflops: dict[Kind, float]
    also: frozenset[str] = frozenset()


def _row(device: str, words: str, tflops: tuple[float, ...], source: str, *, also: str = "") -> PeakFlops:
    """Build a row; float16 is as fast as bfloat16 on all of these devices if both accumulate in float32."""
    by_kind = dict(zip(_COLUMNS, tflops, strict=False)) | {"fp16": tflops[0]}
    return PeakFlops(device, frozenset(words.split()), source, by_kind, frozenset(also.split()))


# Words that say nothing about speed. Any other word that a row does not list (Ti, D, Laptop, Max-Q, a custom
# memory size, a slice of a virtual GPU) means another device.
_NEUTRAL = frozenset({"nvidia", "geforce", "amd", "instinct"})

# documents cited by more than one row
_H100_PAPER = "NVIDIA H100 Tensor Core GPU Architecture white paper, 2022"
_GA102_PAPER = "NVIDIA Ampere GA102 GPU Architecture white paper, 2021"
_H200_SHEET = "NVIDIA H200 data sheet, 2024"
_BLACKWELL_SHEET = "NVIDIA Blackwell data sheet, 2025"

# order of the TFLOP/s in a row; the last may be missing
_COLUMNS: tuple[Kind, ...] = ("bf16", "tf32", "fp32", "fp8")

# bf16, fp16, tf32, fp8: matrix units, float32 accumulation, no sparsity; fp32: vector units.
# "Halved": the document prints only the figure with 2:4 sparsity.
ROWS: tuple[PeakFlops, ...] = (
    # Drivers print "NVIDIA H100 80GB HBM3" for SXM. "H100 80GB HBM2e" is reported from PCIe cards and
    # from SXM hosts, and the 64, 94 and 96 GB modules of some customers have no public data sheet: these
    # have no row.
    _row("H100 SXM", "h100 80gb hbm3", (989.4, 494.7, 66.9, 1978.9), f"{_H100_PAPER}, H100 SXM5"),
    _row("H100 PCIe", "h100 pcie", (756.0, 378.0, 51.2, 1513.0), f"{_H100_PAPER}, H100 PCIe", also="80gb hbm2e"),
    # The dense figure of a kind equals the sparse one of the kind twice as wide: 835 is printed for TF32.
    _row(
        "H100 NVL",
        "h100 nvl",
        (835.0, 417.5, 60.0, 1671.0),
        "NVIDIA H100 data sheet, 2024, H100 NVL, per GPU, halved",
        also="94gb hbm3",
    ),
    _row("H200 NVL", "h200 nvl", (835.0, 417.5, 60.0, 1671.0), f"{_H200_SHEET}, H200 NVL, halved", also="141gb hbm3e"),
    _row("RTX A6000", "rtx a6000", (154.8, 77.4, 38.7), f"{_GA102_PAPER}, RTX A6000"),
    # GeForce runs at half rate when accumulating in float32: the often quoted 142, 330 and 419 are for float16.
    # fp8 of the 4090 is from the newer document, which measurements confirm: older ones print twice that.
    # The 5090 has no fp8 figure: 419 is printed, and block-scaled fp8 runs at twice that.
    _row("RTX 3090", "rtx 3090", (71.0, 35.6, 35.6), f"{_GA102_PAPER}, GeForce RTX 3090"),
    _row(
        "RTX 4090",
        "rtx 4090",
        (165.2, 82.6, 82.6, 330.3),
        "NVIDIA Ada and RTX Blackwell GPU Architecture white papers, 2022 and 2025, GeForce RTX 4090",
    ),
    _row(
        "RTX 5090",
        "rtx 5090",
        (209.5, 104.8, 104.8),
        "NVIDIA RTX Blackwell GPU Architecture white paper, 2025, GeForce RTX 5090",
    ),
    # An A100 of 64 GB is a faster chip of one customer.
    _row("A100", "a100", (312.0, 156.0, 19.5), "NVIDIA A100 data sheet, 2021", also="sxm4 sxm pcie 40gb 80gb"),
    _row("H200 SXM", "h200", (989.5, 494.5, 67.0, 1979.0), f"{_H200_SHEET}, H200 SXM, halved", also="141gb hbm3e"),
    _row(
        "GH200",
        "gh200",
        (989.5, 494.5, 67.0, 1979.0),
        "NVIDIA GH200 Grace Hopper Superchip data sheet, 2024, halved",
        also="120gb 480gb 144g 144gb hbm3e",
    ),
    # PFLOP/s with two digits in the document: tf32 is 1,100 where half of bf16 is 1,125.
    _row("B200", "b200", (2250.0, 1100.0, 75.0, 4500.0), f"{_BLACKWELL_SHEET}, HGX B200, per GPU, halved"),
    _row("GB200", "gb200", (2500.0, 1250.0, 80.0, 5000.0), f"{_BLACKWELL_SHEET}, GB200 NVL72, per GPU, halved"),
    _row("L4", "l4", (121.0, 60.0, 30.3, 242.5), "NVIDIA L4 data sheet, 2023, halved"),
    # As printed: 733 is 1.2 % more than twice 362.05.
    _row("L40S", "l40s", (362.05, 183.0, 91.6, 733.0), "NVIDIA L40S data sheet, 2023"),
    _row("A10", "a10", (125.0, 62.5, 31.2), "NVIDIA A10 data sheet, 2021"),
    _row("MI300X", "mi300x", (1307.4, 653.7, 163.4, 2614.9), "AMD Instinct MI300X data sheet, 2023", also="oam"),
)


def get_peak(device_name: str, kind: Kind) -> Peak:
    """Return the dense peak of a device.

    Args:
        device_name: As `torch.cuda.get_device_name` returns it.
        kind: Number format of the matmuls.

    Raises:
        ValueError: `kind` is not one of `Kind`.
    """
    if kind not in get_args(Kind):
        known = ", ".join(get_args(Kind))
        raise ValueError(f"kind is {kind!r}: peaks are known for {known}: use one of these")
    words = name_words(device_name)
    if "mig" in words:
        return _unknown(f"{device_name!r} is a MIG slice, for which no peak is published", kind)
    rows = find_rows(words)
    if not rows:
        return _unknown(f"{device_name!r} is not in the table of peaks", kind)
    row = rows[0]
    if kind not in row.tflops:
        return _unknown(f"the row of {row.device} ({row.source}) has no {kind} figure", kind)
    tflops = row.tflops[kind]
    return Peak(tflops, f"{row.device}: {tflops:g} TFLOP/s dense {kind} ({row.source})")


def name_words(device_name: str) -> frozenset[str]:
    """Split a name into lower-case alphanumeric words; 'MIG3g.90gb' and 'Max-Q' yield several words."""
    return frozenset(re.findall(r"mig(?=\d)|[a-z0-9]+", device_name.lower()))


def find_rows(words: frozenset[str]) -> list[PeakFlops]:
    """Return the rows that match a name with these words, most specific first."""
    rows = [row for row in ROWS if row.words <= words <= row.words | row.also | _NEUTRAL]
    return sorted(rows, key=lambda row: -len(row.words))


def _unknown(why: str, kind: Kind) -> Peak:
    what = f"peak_tflops=<dense TFLOP/s of your device in {kind}>"
    return Peak(None, f"{why}: no MFU unless you set {what}")
