"""Device names as drivers print them, and their published dense peaks; an unknown device has none."""

from collections import Counter
from typing import get_args

import pytest

from callbacks.throughput.peak_flops import ROWS, Kind, PeakFlops, find_rows, get_peak, name_words

# TFLOP/s in bf16 with float32 accumulation, without sparsity.
BF16 = {
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "A100-SXM4-40GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H200": 989.5,
    "NVIDIA H200 NVL": 835.0,
    "NVIDIA GH200 480GB": 989.5,
    "NVIDIA GH200 120GB": 989.5,
    "NVIDIA GH200 144G HBM3e": 989.5,
    "NVIDIA B200": 2250.0,
    "NVIDIA GB200": 2500.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40S": 362.05,
    "NVIDIA A10": 125.0,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA GeForce RTX 3090": 71.0,
    "GeForce RTX 3090": 71.0,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5090": 209.5,
    "AMD Instinct MI300X": 1307.4,
    "AMD Instinct MI300X OAM": 1307.4,
}

UNKNOWN = [
    "NVIDIA A10G",
    "NVIDIA A100X",
    "NVIDIA A100-SXM-64GB",
    "NVIDIA A800-SXM4-80GB",
    "NVIDIA H800",
    "NVIDIA H20",
    "NVIDIA H100",
    "NVIDIA H100 96GB HBM3",
    "NVIDIA H100 64GB HBM3",
    "NVIDIA B300",
    "NVIDIA GB300",
    "NVIDIA L40",
    "NVIDIA L4-24Q",
    "GRID A100-40C",
    "NVIDIA RTX 6000 Ada Generation",
    "Quadro RTX 6000",
    "NVIDIA RTX A6000 Laptop GPU",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 with Max-Q Design",
    "NVIDIA GeForce RTX 5090 D",
    "NVIDIA GeForce RTX 5090 D v2",
    "NVIDIA GeForce RTX 4080 SUPER",
    "NVIDIA Graphics Device",
    "AMD Instinct MI300A",
    "AMD Instinct MI300X VF",
    "AMD Instinct MI308X",
    "AMD Instinct MI325X",
    "AMD Radeon Graphics",
    "Tesla T4",
]


def by_device(row: PeakFlops) -> str:
    return row.device


@pytest.mark.parametrize(("name", "tflops"), BF16.items())
def test_a_driver_name_has_the_published_dense_figure(name: str, tflops: float) -> None:
    peak = get_peak(name, "bf16")
    assert peak.tflops == tflops
    assert f"{tflops:g} TFLOP/s dense bf16" in peak.description


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_device_never_gets_its_neighbours_figure(name: str) -> None:
    for kind in get_args(Kind):
        assert get_peak(name, kind).tflops is None
    assert name in get_peak(name, "bf16").description


@pytest.mark.parametrize("name", ["", "cpu", "AMD EPYC 9654 96-Core Processor", "Intel(R) Xeon(R)"])
def test_a_processor_has_no_peak_and_not_the_312_of_an_a100(name: str) -> None:
    assert get_peak(name, "bf16").tflops is None


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H200 MIG 7g.141gb",
        "NVIDIA B200 MIG3g.90gb",
    ],
)
def test_a_slice_does_not_get_the_peak_of_the_whole_device(name: str) -> None:
    peak = get_peak(name, "bf16")
    assert peak.tflops is None
    assert "MIG" in peak.description


def test_an_h100_name_that_may_be_pcie_or_sxm_has_no_figure() -> None:
    """Both PCIe cards and SXM hosts are reported to print this name: 756 and 989 are 31 % apart."""
    assert get_peak("NVIDIA H100 80GB HBM2e", "bf16").tflops is None


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("NVIDIA H100 80GB HBM3", 1979.0),  # with sparsity
        ("NVIDIA H200", None),  # looked for as "H200 SXM1", a name no driver prints
        ("NVIDIA H200", 1979.0),  # with sparsity
        ("NVIDIA H200", 312.0),  # "whatever is not listed is an A100"
        ("NVIDIA H200 NVL", 989.5),  # the SXM module's
        ("NVIDIA H100 NVL", 1979.0),  # the sparse figure of the SXM module
        ("NVIDIA L40S", 121.0),  # the L4's: its name is in this one
        ("NVIDIA GeForce RTX 4090", 82.6),  # tf32
        ("NVIDIA GeForce RTX 4090", 330.3),  # float16 accumulation
        ("NVIDIA GeForce RTX 3090", 35.6),  # tf32
        ("NVIDIA GeForce RTX 3090", 142.0),  # float16 accumulation
        ("NVIDIA RTX A6000", 38.7),  # fp32
        ("NVIDIA RTX A6000", 309.7),  # with sparsity
        ("NVIDIA B200", 312.0),  # as the H200's
        ("NVIDIA GB200", 5000.0),  # of a superchip, which is two devices, or with sparsity
        ("AMD Instinct MI300X", 2614.9),  # with sparsity, or fp8
    ],
)
def test_wrong_figures_of_other_tables_are_not_repeated(name: str, wrong: float | None) -> None:
    assert get_peak(name, "bf16").tflops != wrong


def test_names_match_in_any_case() -> None:
    """A test for "l40s" against "NVIDIA L40S" that forgets this is never true."""
    assert get_peak("nvidia l40s", "bf16") == get_peak("NVIDIA L40S", "bf16")


@pytest.mark.parametrize("name", [*BF16, *UNKNOWN])
def test_no_name_matches_two_rows_of_equal_length(name: str) -> None:
    lengths = Counter(len(row.words) for row in find_rows(name_words(name)))
    assert all(count == 1 for count in lengths.values())


def test_every_row_is_the_first_match_of_a_printed_name() -> None:
    assert {find_rows(name_words(name))[0].device for name in BF16} == {row.device for row in ROWS}


@pytest.mark.parametrize("row", ROWS, ids=by_device)
def test_every_row_cites_a_vendors_document_and_its_year(row: PeakFlops) -> None:
    vendor, *_ = row.source.split()
    assert vendor in {"NVIDIA", "AMD"}
    assert "data sheet" in row.source or "white paper" in row.source
    assert any(str(year) in row.source for year in range(2020, 2027))


@pytest.mark.parametrize("row", ROWS, ids=by_device)
def test_halving_the_bits_doubles_the_matrix_rate(row: PeakFlops) -> None:
    """A sparse figure, or one of float16 accumulation, among dense ones is off by two.

    2.5 %: the B200's sheet rounds tf32 to two digits; the L40S's prints 362.05 beside 733.
    """
    assert row.tflops["fp16"] == row.tflops["bf16"]
    assert row.tflops["bf16"] == pytest.approx(2 * row.tflops["tf32"], rel=0.025)
    if "fp8" in row.tflops:
        assert row.tflops["fp8"] == pytest.approx(2 * row.tflops["bf16"], rel=0.025)


@pytest.mark.parametrize(
    ("device", "num_units", "fma", "ghz"),
    [
        # Streaming multiprocessors (compute units), dense bf16 multiply-adds of each a cycle, boost clock.
        ("A100", 108, 1024, 1.41),
        ("H100 SXM", 132, 2048, 1.83),
        ("H100 PCIe", 114, 2048, 1.62),
        ("L4", 58, 512, 2.04),
        ("A10", 72, 512, 1.695),
        ("RTX A6000", 84, 512, 1.80),
        ("RTX 3090", 82, 256, 1.695),
        ("RTX 4090", 128, 256, 2.52),
        ("RTX 5090", 170, 256, 2.407),
        ("MI300X", 304, 1024, 2.1),
    ],
)
def test_the_dense_figure_is_units_times_rate_times_clock(device: str, num_units: int, fma: int, ghz: float) -> None:
    """0.5 %: documents round to three or four digits, clocks to ten megahertz."""
    (row,) = (row for row in ROWS if row.device == device)
    assert row.tflops["bf16"] == pytest.approx(num_units * fma * 2 * ghz / 1000, rel=0.005)


@pytest.mark.parametrize("row", ROWS, ids=by_device)
def test_vector_units_are_no_faster_than_matrix_units(row: PeakFlops) -> None:
    assert row.tflops["fp32"] <= row.tflops["tf32"]


def test_a_kind_the_device_lacks_has_no_peak() -> None:
    peak = get_peak("NVIDIA A100-SXM4-80GB", "fp8")
    assert peak.tflops is None
    assert "the row of A100 (NVIDIA A100 data sheet, 2021) has no fp8 figure" in peak.description


def test_fp8_of_an_rtx_5090_depends_on_the_kernel_and_has_no_figure() -> None:
    """419 plain and twice that block-scaled, both with float32 accumulation."""
    assert get_peak("NVIDIA GeForce RTX 5090", "fp8").tflops is None


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("name", ["NVIDIA H20", "NVIDIA H200 MIG 1g.18gb", "cpu"])
def test_the_line_of_an_unknown_peak_says_what_to_type(name: str, kind: Kind) -> None:
    line = get_peak(name, kind).description
    assert "\n" not in line
    assert line.endswith(f"you set peak_tflops=<dense TFLOP/s of your device in {kind}>")


def test_the_line_of_a_known_peak_names_its_source() -> None:
    line = get_peak("NVIDIA H200", "bf16").description
    assert line == "H200 SXM: 989.5 TFLOP/s dense bf16 (NVIDIA H200 data sheet, 2024, H200 SXM, halved)"


def test_an_unknown_kind_of_arithmetic_is_an_error() -> None:
    with pytest.raises(ValueError, match="'int8'.*bf16, fp16, tf32, fp32, fp8"):
        get_peak("NVIDIA H200", "int8")  # type: ignore[arg-type]
