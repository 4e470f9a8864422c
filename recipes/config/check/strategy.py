"""Check the strategy: its offloading, the tools that DeepSpeed compiles with, and what it supports.

That is Trainer arguments, devices, optimizer and adapter.
"""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from recipes.config.check.types import to_setting
from recipes.config.resolved import ResolvedRun
from recipes.config.signature import find_signature, read_signature
from recipes.config.traits import StrategyTraits, read_strategy
from recipes.config.trust import CONF
from recipes.errors import ConfigError, type_command, type_extra
from recipes.runtime.world import num_gpus

_FSDP = "strategy=fsdp strategy.cpu_offload=true"
_NVME = "strategy=deepspeed_stage_3_nvme strategy.nvme_path="
# offload setting -> what to type for the same effect
_ALTERNATIVES = {
    "cpu_offload": f"{_FSDP}, or strategy=deepspeed_stage_2_offload",
    "offload_optimizer": f"strategy=deepspeed_stage_2_offload, or {_FSDP}",
    "offload_parameters": f"strategy=deepspeed_stage_3_offload, or {_FSDP}",
    "nvme_path": f"{_NVME}<folder>",
}
# deepspeed/ops/op_builder/async_io.py links io_submit; its sources include the header
_LIBAIO_PROGRAM = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"


def check_strategy(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check the strategy of a run that takes steps; every other mode runs on one device regardless.

    Args:
        run: Composed run whose nodes match their signatures.
    """
    if not run.mode.takes_steps:
        return
    traits, trainer = run.strategy, run.config["trainer"]
    yield from check_offload(run)
    clips_by = trainer.get("gradient_clip_algorithm")
    if clips_by == "value" and not traits.clips_by_value:
        yield ConfigError(
            f"trainer.gradient_clip_algorithm=value {traits.typed}",
            "DeepSpeed clips by the global norm only",
            "trainer.gradient_clip_algorithm=norm",
        )
    devices = trainer["devices"]
    is_list = isinstance(devices, list) and not traits.accepts_device_list
    if is_list and sorted(devices) != list(range(len(devices))):
        ids = ",".join(str(device) for device in devices)
        yield ConfigError(
            f"trainer.devices=[{ids}] {traits.typed}",
            "DeepSpeed counts the GPUs it sees from 0",  # it uses the one whose index is the local rank
            f"CUDA_VISIBLE_DEVICES={ids} {type_command(f'… trainer.devices={len(devices)}')}",
        )
    if trainer.get("sync_batchnorm"):
        takes_norm = "norm" in find_signature(run.config["model"]["_target_"]).parameters
        yield from _check_sync_batchnorm(traits, to_setting(trainer["sync_batchnorm"]), takes_norm=takes_norm)
    yield from check_toolchain(run)


def _check_sync_batchnorm(traits: StrategyTraits, typed: str, *, takes_norm: bool) -> Iterator[ConfigError]:
    if takes_norm:
        yield ConfigError(
            f"trainer.sync_batchnorm={typed}",
            "it is for GPUs under strategy=ddp, and this model has a norm for every strategy and device",
            "model.norm=sync trainer.sync_batchnorm=false",
        )
    elif traits.needs_process_group and not traits.syncs_batch_norm:
        yield ConfigError(
            f"trainer.sync_batchnorm={typed} {traits.typed}",
            "batch norm statistics are synchronized under strategy=ddp only",
            "strategy=ddp",
        )
    elif traits.syncs_batch_norm and num_gpus() == 0:
        yield ConfigError(
            f"trainer.sync_batchnorm={typed}",
            "torch synchronizes batch norm statistics between GPUs only, and there is none",
            "trainer.sync_batchnorm=false",
        )


def check_optimizer(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check that the optimizer supports the strategy's parameters, under ZeRO flat shards, and the run's average.

    Args:
        run: Composed run whose nodes match their signatures.
    """
    if not (run.mode.takes_steps or run.mode.plans_steps):
        return
    option = run.choices.get("optimizer", run.optimizer.name)
    if run.optimizer.keeps_average and run.ema_decay is not None:
        yield ConfigError(
            f"ema_decay={run.ema_decay} optimizer={option}",
            "this optimizer averages the weights itself, and mode.weights=ema reads one average",
            "ema_decay=null, or optimizer=adamw",
        )
    if run.strategy.state_layout != "zero" or run.optimizer.accepts_flat_partitions:
        return
    one_by_one = "it updates parameters individually, but DeepSpeed passes one flat shard of all parameters"
    offloads = run.strategy.offload_optimizer is not None
    yield ConfigError(
        f"optimizer={option} {run.strategy.typed}",
        run.optimizer.why_no_partitions or one_by_one,
        "strategy=fsdp strategy.cpu_offload=true" if offloads else "strategy=fsdp, or strategy=ddp",
    )


def find_rate_of_another_optimizer(run: ResolvedRun) -> Iterator[ConfigError]:
    """Yield a typed optimizer that trains at the learning rate of the recipe, which was chosen for another one.

    Only a warning: Adam's rate also suits Muon, but is a thousandth of what SGD needs.
    """
    option = run.choices.get("optimizer")
    typed = [override.partition("=")[0].lstrip("+") for override in run.overrides]
    if "optimizer" not in typed or {"optimizer.lr", "lr_scaling"} & {*typed}:
        return
    path = CONF / "optimizer" / f"{option}.yaml"
    own = yaml.safe_load(path.read_text(encoding="utf-8")).get("lr") if path.is_file() else None
    if isinstance(own, int | float) and own != run.lr:
        yield ConfigError(
            f"optimizer={option}",
            f"it trains at optimizer.lr={run.lr:g}, which the recipe sets for its own optimizer",
            f"optimizer.lr={own:g}, the rate of conf/optimizer/{option}.yaml",
        )


def check_adapter(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check that strategy and precision support an adapter and its frozen base weights."""
    adapter = run.config.get("adapter", {})
    if adapter.get("use_dora") and run.strategy.stage == 3:
        yield ConfigError(
            "adapter.use_dora=true strategy=deepspeed_stage_3",
            "DoRA needs the norms of the full frozen weights, and each rank has only a part of them",
            "strategy=fsdp, or adapter=lora",
        )
    if adapter.get("quantization") is not None:
        yield from _quantized_base(run, quantization=adapter["quantization"])


def _quantized_base(run: ResolvedRun, *, quantization: str) -> Iterator[ConfigError]:
    """Check that everything that reads the frozen base weights supports 4-bit weights."""
    if run.strategy.stage is not None:
        yield ConfigError(
            f"adapter.quantization={quantization} {run.strategy.typed}",
            "DeepSpeed broadcasts and partitions all weights as plain tensors, which weights in 4 bits are not",
            "strategy=fsdp, or adapter=lora",
        )
    if run.config["adapter"].get("use_dora"):
        yield ConfigError(
            f"adapter.quantization={quantization} adapter.use_dora=true",
            "DoRA computes row norms of the frozen weights in every step, which 4-bit storage does not provide",
            "adapter=qlora, or adapter=dora",
        )
    if run.precision == "fp8-mixed":
        yield ConfigError(
            f"adapter.quantization={quantization} precision=fp8-mixed",
            "float8 products cast weights of 16 or 32 bits, and these have 4",
            "precision=bf16-mixed, or adapter=lora",
        )


def misplaced_offload(strategy: Mapping[str, Any], setting: str, value: object, typed: str) -> ConfigError | None:
    """Return the error in an offload setting that the strategy does not support.

    Args:
        strategy: Config node of the strategy.
        setting: Name after `strategy.`.
        value: Its value.
        typed: Override, to name it in the message.

    Returns:
        None if it is not an offload setting or disables offload: there is no alternative to offer.
    """
    if setting not in _ALTERNATIVES or value in (None, False, ""):
        return None
    traits = read_strategy(strategy)
    option = traits.typed
    if setting == "nvme_path":
        reason, fix = f"{option} does not use a disk", f"{_NVME}{value}"
    elif value == "nvme":
        reason, fix = f"{option} does not use a disk", _ALTERNATIVES["nvme_path"]
    elif "cpu_offload" in read_signature(strategy["_target_"]).parameters:
        reason = f"{option} offloads weights, gradients and optimizer state together"
        fix = "strategy.cpu_offload=true"
    elif traits.stage is None:
        reason, fix = f"{option} keeps everything on its devices", _ALTERNATIVES[setting]
    elif traits.offload_optimizer is not None:
        reason, fix = f"{option} offloads already", f"the same command without strategy.{setting}"
    else:
        reason = f"{option} has settings of its own for it"
        fix = "strategy.offload_optimizer=cpu" if traits.stage == 1 else f"{option}_offload"  # 1 has no such option
    return ConfigError(typed, reason, fix)


def check_offload(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check that the ZeRO stage supports the requested offload, and that the folder on disk exists."""
    traits = run.strategy
    if traits.stage is None:
        return
    optimizer, parameters = traits.offload_optimizer, traits.offload_parameters
    keeps_parameters = traits.stage < 3
    if keeps_parameters and parameters is not None:
        yield ConfigError(
            f"strategy.offload_parameters={parameters}",
            f"{traits.typed} keeps all parameters on every rank",
            _ALTERNATIVES["nvme_path"] if parameters == "nvme" else "strategy=deepspeed_stage_3_offload",
        )
    if keeps_parameters and optimizer == "nvme":  # DeepSpeed 0.19.8 silently uses host memory
        yield ConfigError(
            "strategy.offload_optimizer=nvme",
            f"{traits.typed} offloads to host memory only",
            f"strategy.offload_optimizer=cpu, or {_ALTERNATIVES['nvme_path']}",
        )
    if not keeps_parameters or "nvme" not in (optimizer, parameters):
        yield from _check_folder(run.config["strategy"]["nvme_path"], get_disk_settings(traits))


def get_disk_settings(traits: StrategyTraits) -> str:
    """Return the settings that make ZeRO-3 use a disk, as typed; empty if there are none."""
    settings = ("offload_optimizer", "offload_parameters") if traits.stage == 3 else ()
    return " ".join(f"strategy.{name}=nvme" for name in settings if getattr(traits, name) == "nvme")


def _check_folder(path: str | None, settings: str) -> Iterator[ConfigError]:
    typed, another = f"strategy.nvme_path={to_setting(path)}", "strategy.nvme_path=<folder>"
    if path is None and settings:
        yield ConfigError(settings, "no folder on an NVMe disk is set", another)
    elif path is not None and not settings:
        yield ConfigError(typed, "nothing is offloaded to it", f"{_NVME}{path}")
    elif path is not None and not Path(path).is_dir():
        is_file = os.path.lexists(path)
        yield ConfigError(typed, "it is a file, not a folder" if is_file else "there is no such folder", another)
    elif path is not None and not os.access(path, os.W_OK | os.X_OK):
        yield ConfigError(typed, "the folder cannot be written to", another)


def check_toolchain(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check that DeepSpeed is installed, and a compiler if it will compile an operator on first use."""
    if run.strategy.stage is None:
        return
    installed = _deepspeed_folder()
    if installed is None:
        yield ConfigError(
            run.strategy.typed,
            "DeepSpeed is not installed",
            type_extra("deepspeed"),
        )
        return
    disk, device = get_disk_settings(run.strategy), run.strategy.offload_optimizer
    is_adam = str(run.config["optimizer"]["_target_"]).lower().endswith(("adam", "adamw"))
    compiles_adam = is_adam and device and not any(installed.glob("ops/adam/cpu_adam_op*.so"))
    compiles_disk = disk and not any(installed.glob("ops/aio/async_io_op*.so"))
    missing = list(_missing_tools()) if compiles_adam or compiles_disk else []
    if missing:
        typed = f"strategy.offload_optimizer={device}" if compiles_adam else disk
        what = "DeepSpeedCPUAdam" if compiles_adam else "DeepSpeed's disk access"
        yield ConfigError(
            typed,
            f"{what} is compiled on first use, but there is no {' and no '.join(tool for tool, _ in missing)}",
            ", and ".join(fix for _, fix in missing),
        )
    elif compiles_disk and not has_libaio():
        yield ConfigError(
            disk,
            "DeepSpeed uses libaio for the disk, and a test program that includes libaio.h failed to compile",
            "apt install libaio-dev (or yum install libaio-devel)",
        )
    elif compiles_disk and run.accelerator != "cpu" and num_gpus() and (home := _missing_cuda_home()) is not None:
        yield ConfigError(
            disk,
            f"on a GPU DeepSpeed compiles its disk access against the CUDA toolkit, and there is no {home}/bin/nvcc",
            "export CUDA_HOME=<a CUDA toolkit of torch's version>, or strategy=deepspeed_stage_3_offload",
        )


def _missing_cuda_home() -> str | None:
    """Return where torch's builder looks for the CUDA toolkit if it is missing; None if it is present.

    The places are those of `_find_cuda_home` in torch/utils/cpp_extension.py (2.13).
    """
    on_path = shutil.which("nvcc")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    home = home or (str(Path(on_path).parents[1]) if on_path else "/usr/local/cuda")
    is_amd = Path("/dev/kfd").exists()  # which has a toolkit of its own
    return None if is_amd or (Path(home) / "bin" / "nvcc").is_file() else home


def _missing_tools() -> Iterator[tuple[str, str]]:
    """Find what torch's builder of C++ extensions needs and this machine lacks, and how to install it.

    It calls `ninja`, and `c++` or whatever CXX names (torch/utils/cpp_extension.py, 2.13).
    """
    compiler = missing_compiler()
    if compiler is not None:
        yield compiler
    # the strategy adds the interpreter's folder to the PATH
    bundled = Path(sys.executable).parent / "ninja"
    if shutil.which("ninja") is None and not bundled.is_file():
        yield "ninja", "pip install ninja"


def missing_compiler() -> tuple[str, str] | None:
    """Return the C++ compiler that this machine lacks and how to install one; None if there is one."""
    if shutil.which(_compiler()[0]) is not None:
        return None
    others = [name for name in ("c++", "g++", "clang++") if shutil.which(name)]
    fix = f"export CXX={others[0]}" if others else "apt install g++ (or yum install gcc-c++)"
    return f"C++ compiler ({_compiler()[0]})", fix


def has_libaio() -> bool:
    """Return whether a program that uses libaio compiles and links, the test of async_io.py; about 0.1 s."""
    flags = [shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS")]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "uses_libaio.cpp"
        source.write_text(_LIBAIO_PROGRAM, encoding="utf-8")
        command = [*_compiler(), *flags[0], str(source), "-o", f"{folder}/out", *flags[1], "-laio"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def _deepspeed_folder() -> Path | None:
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))
