"""The check of what DeepSpeed needs on a machine to compile its optimizers, before DeepSpeed is imported."""

import shutil
import subprocess
from pathlib import Path

import pytest

from recipes.config import compose_and_check
from recipes.config.check import deepspeed as deepspeed_check

# the real ones: a fixture of conftest.py replaces them
real_has_libaio = deepspeed_check.has_libaio
real_deepspeed_folder = deepspeed_check._deepspeed_folder
HAS_COMPILER = shutil.which("c++") is not None


def _messages(*typed: str) -> list[str]:
    return [str(mistake) for mistake in compose_and_check(typed)[1]]


def _hide_programs(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make `shutil.which` find every program except these."""
    monkeypatch.setattr(deepspeed_check.shutil, "which", lambda name: None if name in names else f"/usr/bin/{name}")


def test_the_error_without_deepspeed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_check, "_deepspeed_folder", real_deepspeed_folder)
    monkeypatch.setattr(deepspeed_check.importlib.util, "find_spec", lambda name: None)
    strategy = {
        "_target_": "recipes.strategy.deepspeed.strategy.DeepSpeedZero",
        "stage": 2,
        "offload_optimizer": None,
    }
    [mistake] = deepspeed_check.check_toolchain(strategy, {})
    assert str(mistake) == (
        "strategy=deepspeed_stage_2: DeepSpeed is not installed; type pip install -e '.[deepspeed]'"
    )


def test_evaluation_does_not_require_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_check, "_deepspeed_folder", lambda: None)
    typed = ["strategy=deepspeed_stage_3_nvme", "resume=auto", "hydra.run.dir=x"]
    assert len(_messages(*typed)) == 2
    assert _messages("mode=evaluate", *typed) == []


def test_a_missing_compiler_and_a_missing_ninja_are_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(deepspeed_check.sys, "executable", str(tmp_path / "python"))
    _hide_programs(monkeypatch, "c++", "g++", "clang++", "ninja")
    assert _messages("strategy=deepspeed_stage_2_offload") == [
        "strategy.offload_optimizer=cpu: DeepSpeedCPUAdam is compiled on first use, but there is no C++ compiler (c++)"
        " and no ninja; type apt install g++ (or yum install gcc-c++), and pip install ninja"
    ]


def test_another_compiler_than_the_default_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _hide_programs(monkeypatch, "c++", "g++")
    assert _messages("strategy=deepspeed_stage_2_offload") == [
        "strategy.offload_optimizer=cpu: DeepSpeedCPUAdam is compiled on first use, but there is no C++ compiler (c++);"
        " type export CXX=clang++"
    ]
    monkeypatch.setenv("CXX", "ccache clang++")
    assert _messages("strategy=deepspeed_stage_2_offload") == []


def test_ninja_next_to_the_python_executable_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ninja").touch()
    monkeypatch.setattr(deepspeed_check.sys, "executable", str(tmp_path / "python"))
    _hide_programs(monkeypatch, "ninja")
    assert _messages("strategy=deepspeed_stage_3_offload") == []


@pytest.mark.parametrize(
    "typed",
    [
        ("strategy=deepspeed_stage_2",),
        ("strategy=deepspeed_stage_2_offload", "optimizer=sgd"),
        ("strategy=deepspeed_stage_3", "strategy.offload_parameters=cpu"),
        ("strategy=fsdp", "strategy.cpu_offload=true"),
    ],
)
def test_a_config_without_cpu_adam_and_nvme_needs_no_compiler(
    typed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    _hide_programs(monkeypatch, "c++", "g++", "clang++", "ninja")
    assert _messages(*typed) == []


def test_a_prebuilt_op_needs_no_compiler(monkeypatch: pytest.MonkeyPatch, deepspeed_folder: Path) -> None:
    _hide_programs(monkeypatch, "c++", "g++", "clang++", "ninja")
    built = deepspeed_folder / "ops" / "adam" / "cpu_adam_op.cpython-311-x86_64-linux-gnu.so"
    built.parent.mkdir(parents=True)
    built.touch()
    assert _messages("strategy=deepspeed_stage_2_offload") == []


def test_the_error_without_libaio_names_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(deepspeed_check, "has_libaio", lambda: False)
    assert _messages("strategy=deepspeed_stage_3_nvme", f"strategy.nvme_path={tmp_path}") == [
        "strategy.offload_optimizer=nvme strategy.offload_parameters=nvme: DeepSpeed uses libaio for the disk,"
        " and a test program that includes libaio.h failed to compile;"
        " type apt install libaio-dev (or yum install libaio-devel)"
    ]


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")
def test_libaio_is_found_by_compiling_and_linking(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CFLAGS", f"-I{tmp_path}")
    monkeypatch.setenv("LDFLAGS", f"-L{tmp_path}")
    header, source = tmp_path / "libaio.h", tmp_path / "aio.cpp"
    header.write_text("#error broken\n")
    assert not real_has_libaio()
    header.write_text("int io_submit(int, int, int);\n")
    source.write_text("int io_submit(int, int, int) { return 0; }\n")
    library = str(tmp_path / "libaio.so")
    subprocess.run(["c++", "-shared", "-fPIC", str(source), "-o", library], check=True)
    assert real_has_libaio()
