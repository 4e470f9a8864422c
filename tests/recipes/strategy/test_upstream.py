"""The upstream bugs that our strategies work around still exist: if a test fails, its workaround can go."""

import inspect
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import DeepSpeedPrecision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from thread_ranks import run_on_threads
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, loss, loss_parallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from recipes.strategy.deepspeed.compiled_op import load_op


def test_lightning_still_lets_deepspeed_divide_by_the_accumulation_steps_a_second_time() -> None:
    """#6170, `DeepSpeedZero.backward`."""
    from deepspeed.runtime import engine

    assert "def backward(self, loss, retain_graph=False, scale_wrt_gas=True)" in inspect.getsource(engine)
    assert "scale_wrt_gas" not in inspect.getsource(DeepSpeedPrecision)
    assert "scale_wrt_gas" not in inspect.getsource(DeepSpeedStrategy)


def test_lightning_still_calls_the_hooks_of_a_step_for_every_micro_batch_under_deepspeed() -> None:
    """#19350, `ZeroPrecision._after_closure`."""
    assert "_should_accumulate" not in inspect.getsource(DeepSpeedPrecision.optimizer_step)


def test_lightning_still_zeroes_gradients_after_the_training_step() -> None:
    """2.6, `task.divided`: the training step of a pipeline is forward and backward passes in one."""
    calls: list[str] = []

    def step() -> ClosureResult:
        calls.append("step")
        return ClosureResult(closure_loss=torch.ones(()))

    def backward(_: Tensor) -> None:
        calls.append("backward")

    Closure(step, backward_fn=backward, zero_grad_fn=lambda: calls.append("zero_grad")).closure()
    assert calls == ["step", "zero_grad", "backward"]


def test_lightning_still_rejects_deepspeed_on_a_cpu() -> None:
    """#12607, `DeepSpeedZero.setup_environment`."""
    assert "only supported on CUDA GPUs" in inspect.getsource(DeepSpeedStrategy.setup_environment)


def test_lightning_still_broadcasts_before_every_micro_batch() -> None:
    """#21487, `lightning_internals.disable_signal_handling`."""
    source = inspect.getsource(_TrainingEpochLoop.advance)
    assert "self._broadcast_sigterm_tensor()" in source
    assert "every_n" not in source


def test_lightning_still_broadcasts_inside_its_signal_handler() -> None:
    """2.6.6, `lightning_internals.disable_signal_handling`."""
    assert "dist.broadcast(" in inspect.getsource(_SignalConnector._sigterm_notifier_fn)


def test_lightning_still_wraps_ddp_on_a_stream_of_its_own() -> None:
    """#21567, `DDP._setup_model`."""
    assert "torch.cuda.stream(torch.cuda.Stream())" in inspect.getsource(DDPStrategy._setup_model)


def test_lightning_still_copies_the_state_to_the_host_when_a_run_ends() -> None:
    """2.6.6, `lightning_internals.state_left_on_device`."""
    source = inspect.getsource(Strategy.teardown)
    assert '_optimizers_to_device(self.optimizers, torch.device("cpu"))' in source
    assert "self.lightning_module.cpu()" in source


def test_deepspeed_still_links_optimizer_state_when_only_the_first_group_has_any() -> None:
    """0.19.8, `recipes.strategy.deepspeed.checkpoint._link`."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    source = inspect.getsource(DeepSpeedZeroOptimizer._optimizer_step)
    assert "_lazy_init_hp_params_optimizer_state()" in source


def test_deepspeed_still_gives_each_rank_a_scaler_of_its_own_under_autocast() -> None:
    """0.19.8, `DeepSpeedZero.init_deepspeed`."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    source = inspect.getsource(DeepSpeedZeroOptimizer._optimizer_step)
    assert "self.torch_autocast_gradscaler.step(self.optimizer)" in source


def test_deepspeed_still_pickles_its_loss_scaler_into_its_own_checkpoints() -> None:
    """0.19.8: `torch.load(..., weights_only=True)` rejects them; `strategy/deepspeed/checkpoint.py` writes tensors."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    assert "[LOSS_SCALER] = self.loss_scaler" in inspect.getsource(DeepSpeedZeroOptimizer.state_dict)


def test_deepspeed_still_starts_a_program_to_count_the_devices_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.19.8, `DeepSpeedZero.__init__`: 26 times a step at stage 3, unless LOCAL_SIZE says how many there are."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    started = []
    answer = b"available: 1 nodes (0)\nnode 0 cpus: 0 1\n"
    monkeypatch.setattr(subprocess, "check_output", lambda command: started.append(command) or answer)
    monkeypatch.setenv("LOCAL_SIZE", "2")
    assert CPU_Accelerator().device_count() == 2
    assert not started
    monkeypatch.delenv("LOCAL_SIZE")
    for _ in range(2):
        CPU_Accelerator().device_count()
    assert started == [["numactl", "--hardware"]] * 2


def test_deepspeed_still_needs_the_cuda_toolkit_for_disk_access_alone() -> None:
    """0.19.8, `recipes.config.check.strategy.check_toolchain`; its CPU Adam is built without."""
    from deepspeed.ops.op_builder import async_io
    from deepspeed.ops.op_builder.cpu import cpu_adam

    needed = 'os.path.join(torch.utils.cpp_extension.CUDA_HOME, "include")'
    assert needed in inspect.getsource(async_io.AsyncIOBuilder.include_paths)
    assert "CUDA_HOME" not in inspect.getsource(cpu_adam)


def test_deepspeed_still_ignores_the_number_of_threads_that_lightning_sets() -> None:
    """0.19.8 and 2.6.6, `DeepSpeedZero.__init__`."""
    from deepspeed.runtime.swap_tensor.aio_config import get_aio_config

    assert get_aio_config({"aio": {"thread_count": 4}})["intra_op_parallelism"] == 1


def test_deepspeed_cpu_adam_still_rounds_differently_where_steps_are_left_out() -> None:
    """0.19.8, `recipes.strategy.deepspeed.checkpoint.advance_step_count`: the last bit differs at some step."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    library = load_op(CPUAdamBuilder())

    def after(steps: range) -> float:
        weight = torch.zeros(1)
        library.create_adam(0, 1.0, 0.9, 0.999, 0.0, 0.0, True, False)
        for step in steps:
            moments = (torch.full((1,), 0.3), torch.full((1,), 0.7))
            weight.fill_(0.0)
            library.adam_update(0, step, 1.0, 0.9, 0.999, 1e-8, 0.0, True, weight, torch.ones(1), *moments)
        library.destroy_adam(0)
        return float(weight)

    assert any(after(range(1, n)) != after(range(n - 1, n)) for n in range(3, 300))


def test_torch_still_rebuilds_the_buckets_of_ddp_after_the_first_backward_pass(
    tmp_path: Path,
) -> None:
    """2.13, `DDP.setup`."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = DistributedDataParallel(torch.nn.Linear(3, 3))
        assert not model.reducer._rebuild_buckets()
        model(torch.ones(1, 3)).sum().backward()
        assert model.reducer._rebuild_buckets()
    finally:
        torch.distributed.destroy_process_group()


def test_torch_still_says_that_a_strided_shard_is_no_shard() -> None:
    """2.13, `strategy.torch_native._holds_first`: such a gradient is sharded, and only `is_replicate` knows."""
    placement = _StridedShard(0, split_factor=2)
    assert not isinstance(placement, Shard)
    assert not placement.is_shard()
    assert not placement.is_replicate()


def _place(*placements: Any, mesh_shape: tuple[int, ...] = (2, 2)) -> DTensor:
    mesh = init_device_mesh("cpu", mesh_shape)
    return distribute_tensor(torch.ones(4, 4), mesh, list(placements))


def test_torch_still_takes_no_norm_over_several_meshes_or_beside_plain_tensors() -> None:
    """2.13, `strategy.torch_native.global_norm`."""

    def work(rank: int) -> list[str]:
        divided, other = _place(Shard(0), Shard(1)), _place(Shard(0), mesh_shape=(4,))
        raised = []
        for grads in ([divided, other], [divided, torch.ones(3)]):
            with pytest.raises(RuntimeError) as caught:
                nn.utils.get_total_norm(grads)
            raised.append(str(caught.value))
        parameters = [nn.Parameter(tensor) for tensor in (divided, other)]
        for parameter in parameters:
            parameter.grad = parameter.detach()
        with pytest.raises(RuntimeError) as caught:
            nn.utils.clip_grads_with_norm_(parameters, 1.0, torch.tensor(8.0))
        return [*raised, str(caught.value)]

    for several, mixed, clipped in run_on_threads(work):
        assert "must have the same mesh" in several or "different meshes" in several
        assert "mixed torch.Tensor and DTensor" in mixed
        assert "different meshes" in clipped or "same mesh" in clipped


def test_torch_still_reduces_the_overflow_flag_by_the_placements_of_the_first_gradient() -> None:
    """2.13, `strategy.precision_plugin.CountingScaler`."""

    def work(rank: int) -> float:
        norm, row = _place(Shard(0), Replicate()), _place(Shard(0), Shard(1))
        parameters = [nn.Parameter(tensor) for tensor in (norm, row)]
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        if rank == 3:
            parameters[1].grad.to_local()[0, 0] = torch.inf
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        found = torch.amp.GradScaler("cpu")._unscale_grads_(optimizer, torch.ones(()), torch.zeros(()), False)
        [flag] = found.values()
        return float(flag.full_tensor() if isinstance(flag, DTensor) else flag)

    flags = run_on_threads(work)
    assert flags[3] == 1.0
    assert set(flags) == {0.0, 1.0}, "some ranks would step"


def test_torch_still_divides_the_gradient_of_a_single_shard_twice() -> None:
    """2.13, `strategy.sharding._shard_unit`: with a factor of its own, and sums instead of means."""

    def work(rank: int) -> tuple[float, float]:
        found = []
        for forces_sums in (False, True):
            layer = nn.Linear(1, 1, bias=False)
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
            layer.set_gradient_divide_factor(4.0)
            layer.set_force_sum_reduction_for_comms(forces_sums)
            layer(torch.ones(1, 1)).sum().backward()
            assert isinstance(layer.weight.grad, DTensor)
            found.append(float(layer.weight.grad.to_local()))
        return found[0], found[1]

    assert run_on_threads(work, num_ranks=1) == [(1 / 4, 1 / 16)]


def test_gloo_still_cannot_scale_while_it_adds(tmp_path: Path) -> None:
    """torch 2.13, `strategy.sharding._make_group_of_experts`."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises((RuntimeError, ValueError), match="PREMUL_SUM"):
            torch.distributed.all_reduce(torch.ones(1), op=torch.distributed._make_nccl_premul_sum(0.5))
    finally:
        torch.distributed.destroy_process_group()


def test_gloo_still_cannot_gather_float8(tmp_path: Path) -> None:
    """torch 2.13: a collective of its own dtype; `precision.float8` leaves gathering to FSDP2."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        part = torch.ones(4).to(torch.float8_e4m3fn)
        with pytest.raises(RuntimeError, match="Invalid scalar type"):
            torch.distributed.all_gather_into_tensor(torch.empty_like(part), part)
    finally:
        torch.distributed.destroy_process_group()


def test_torch_still_hides_the_padding_of_divided_logits_in_a_copy() -> None:
    """2.13, `model.decoder.Head`, which joins its columns first."""

    def work(rank: int) -> Tensor:
        logits = _place(Shard(1), mesh_shape=(2,))
        logits[..., 3:].fill_(-torch.inf)
        return logits.full_tensor()

    assert all(logits.isfinite().all() for logits in run_on_threads(work, num_ranks=2))


def test_torch_still_leaves_gradients_of_a_divided_sequence_unreduced() -> None:
    """2.13, `FSDP2Strategy.materialize`: FSDP2 reduces them, and shards over one rank for that alone."""

    def work(rank: int) -> list[Any]:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor"))
        placements = []
        for shards in (False, True):
            model = nn.Sequential(nn.LayerNorm(4))
            parallelize_module(model, mesh["tensor"], {"0": SequenceParallel()})
            if shards:
                fully_shard(model, mesh=mesh["shard"])
            model(torch.ones(1, 2, 4)).sum().backward()
            placements.append(model[0].weight.grad.placements)  # type: ignore[union-attr]
        return placements

    assert run_on_threads(work, num_ranks=2) == [[(Partial(),), (Shard(0), Replicate())]] * 2


def test_torch_still_leaves_its_divided_loss_on_after_an_error() -> None:
    """2.13, `numerics.divided_vocabulary`; nor does it smooth labels."""
    assert "finally" not in inspect.getsource(loss_parallel)
    after = inspect.getsource(loss).partition("label_smoothing:")[2]
    assert after.split()[:3] == ["Currently", "not", "supported."]


def test_torch_still_compiles_away_the_gradient_of_what_is_on_its_way() -> None:
    """2.13, `numerics.collectives`, whose operators wait."""

    def work(rank: int) -> list[bool]:
        mesh = init_device_mesh("cpu", (2,))
        compiled = torch.compile(lambda x: x.sin(), backend="aot_eager", fullgraph=True)
        has_gradient = []
        for is_on_its_way in (False, True):
            parts = DTensor.from_local(torch.ones(4, 4, requires_grad=True), mesh, [Partial()])
            own = parts.redistribute(placements=[Shard(0)], async_op=is_on_its_way).to_local()
            assert own.requires_grad
            has_gradient.append(compiled(own).requires_grad)
        return has_gradient

    assert run_on_threads(work, num_ranks=2) == [[True, False]] * 2


def test_torch_still_aligns_a_causal_mask_at_the_first_key() -> None:
    """2.13, `parallel.context.ContextRanks.causal_rows`."""
    values = torch.eye(4)[None, None]
    mixed = F.scaled_dot_product_attention(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 4, 4), values, is_causal=True)
    assert mixed[0, 0].tolist() == [[1, 0, 0, 0], [0.5, 0.5, 0, 0]]


def test_torch_still_has_no_attention_of_divided_sequences_on_a_cpu() -> None:
    """2.13, `parallel.context`."""

    def work(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,))
        parts = [distribute_tensor(torch.ones(1, 2, 8, 4), mesh, [Shard(2)]) for _ in range(3)]
        with pytest.raises(NotImplementedError) as caught:
            F.scaled_dot_product_attention(*parts, is_causal=True)
        return str(caught.value)

    for message in run_on_threads(work, num_ranks=2):
        assert "_scaled_dot_product_flash_attention_for_cpu" in message


def test_torch_still_rejects_the_gradient_of_a_sum_in_a_product_of_groups() -> None:
    """2.13, `numerics.grouped_linear`, which copies it."""
    x = torch.ones(4, 8, requires_grad=True)
    weight = torch.ones(2, 8, 8, requires_grad=True)
    out = F.grouped_mm(x, weight, offs=torch.tensor([1, 4], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="Invalid strides/sizes"):
        out.sum().backward()
