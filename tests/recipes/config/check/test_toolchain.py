"""The check of what DeepSpeed needs on a machine to compile its optimizers, before DeepSpeed is imported."""

import inspect
import shutil
import subprocess
from pathlib import Path

import pytest
from support import resolved
from torch.utils import cpp_extension

from recipes.config import compose_and_check
from recipes.config.check import strategy as strategy_check

# the real ones: a fixture of conftest.py replaces them
real_has_libaio = strategy_check.has_libaio
real_deepspeed_folder = strategy_check._deepspeed_folder
HAS_COMPILER = shutil.which("c++") is not None


def _messages(*typed: str) -> list[str]:
    return [str(mistake) for mistake in compose_and_check(typed)[1]]


def _hide_programs(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make `shutil.which` find every program except these."""
    monkeypatch.setattr(strategy_check.shutil, "which", lambda name: None if name in names else f"/usr/bin/{name}")


def test_the_error_without_deepspeed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy_check, "_deepspeed_folder", real_deepspeed_folder)
    find_spec = strategy_check.importlib.util.find_spec  # reading the signature of the strategy needs it, too
    monkeypatch.setattr(
        strategy_check.importlib.util, "find_spec", lambda name: None if name == "deepspeed" else find_spec(name)
    )
    strategy = {
        "_target_": "recipes.strategy.deepspeed.strategy.DeepSpeedZero",
        "stage": 2,
        "offload_optimizer": None,
    }
    [mistake] = strategy_check.check_toolchain(resolved({"strategy": strategy}))
    assert str(mistake) == (
        "strategy=deepspeed_stage_2: DeepSpeed is not installed; type pip install -e '.[deepspeed]'"
    )


def test_evaluation_does_not_require_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy_check, "_deepspeed_folder", lambda: None)
    typed = ["strategy=deepspeed_stage_3_nvme", "resume=auto", "hydra.run.dir=x"]
    assert len(_messages(*typed)) == 2
    assert _messages("mode=evaluate", *typed) == []


def test_a_missing_compiler_and_a_missing_ninja_are_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(strategy_check.sys, "executable", str(tmp_path / "python"))
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
    monkeypatch.setattr(strategy_check.sys, "executable", str(tmp_path / "python"))
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
    monkeypatch.setattr(strategy_check, "has_libaio", lambda: False)
    assert _messages("strategy=deepspeed_stage_3_nvme", f"strategy.nvme_path={tmp_path}") == [
        "strategy.offload_optimizer=nvme strategy.offload_parameters=nvme: DeepSpeed uses libaio for the disk,"
        " and a test program that includes libaio.h failed to compile;"
        " type apt install libaio-dev (or yum install libaio-devel)"
    ]


@pytest.fixture
def gpu_without_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Pretend that there are GPUs, and a CUDA toolkit without a compiler, as in an image that only runs programs."""
    monkeypatch.setattr(strategy_check, "num_gpus", lambda: 8)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    return tmp_path / "cuda"


def test_on_a_gpu_disk_access_needs_the_cuda_toolkit(gpu_without_toolkit: Path, tmp_path: Path) -> None:
    """Without it DeepSpeed 0.19.8 fails when training starts, with `expected str, bytes or os.PathLike object`."""
    typed = ("strategy=deepspeed_stage_3_nvme", f"strategy.nvme_path={tmp_path}")
    assert _messages(*typed) == [
        "strategy.offload_optimizer=nvme strategy.offload_parameters=nvme: on a GPU DeepSpeed compiles its disk access"
        f" against the CUDA toolkit, and there is no {gpu_without_toolkit}/bin/nvcc; type export CUDA_HOME=<a CUDA"
        " toolkit of torch's version>, or strategy=deepspeed_stage_3_offload"
    ]
    assert _messages("trainer.accelerator=cpu", *typed) == []
    (gpu_without_toolkit / "bin").mkdir(parents=True)
    (gpu_without_toolkit / "bin" / "nvcc").touch()
    assert _messages(*typed) == []


def test_the_cuda_toolkit_is_looked_for_where_torch_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    _hide_programs(monkeypatch, "nvcc")
    source = inspect.getsource(cpp_extension._find_cuda_home)
    assert "'/usr/local/cuda'" in source
    if not Path("/usr/local/cuda/bin/nvcc").exists():
        assert strategy_check._missing_cuda_home() == "/usr/local/cuda"
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch()
    monkeypatch.setattr(strategy_check.shutil, "which", lambda name: str(nvcc))
    assert strategy_check._missing_cuda_home() is None
    monkeypatch.setenv("CUDA_PATH", "/no/such")
    assert strategy_check._missing_cuda_home() == "/no/such"


def test_weights_in_host_memory_need_no_cuda_toolkit(gpu_without_toolkit: Path) -> None:
    assert _messages("strategy=deepspeed_stage_3_offload") == []


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
