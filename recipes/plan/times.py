"""Time of an optimizer step: computation, exposed communication, transfers and pipeline bubbles."""

from dataclasses import dataclass

from recipes.config.resolved import ResolvedRun
from recipes.errors import ConfigError
from recipes.plan.activations import PCIE_BYTES_PER_SECOND, Transfer, time_transfers
from recipes.plan.communication import Communication, Traffic, of_model_ranks, of_partitions, of_replicas, of_shards
from recipes.plan.hardware import Cluster
from recipes.plan.measured import OperatorTimer, calibrate, time_operators
from recipes.plan.recorded import Recorded
from recipes.plan.roofline import Rates, StepSeconds, time_step
from recipes.plan.stages import Stages, time_stages
from recipes.plan.trace import GRADIENTS

_HOST_ADAM_BYTES_PER_SECOND = 20e9  # of Adam on the CPU, per rank; depends on the host


@dataclass(frozen=True, kw_only=True)
class Times:
    """Time breakdown of a step.

    Attributes:
        step: Seconds by section.
        communication: Traffic per step.
        transfer: Activations to host memory and back, per micro-batch; None: no offloading.
        step_seconds: Seconds per optimizer step.
        forward_seconds: Forward seconds per micro-batch, without gradients.
        bubble: Fraction of a step in which a pipeline stage is idle; None: no pipeline.
    """

    step: StepSeconds
    communication: Communication
    transfer: Transfer | None
    step_seconds: float
    forward_seconds: float
    bubble: float | None = None


def measure_times(recorded: Recorded, timer: OperatorTimer) -> Times:
    """Return the times of a step with operators timed on this machine.

    Args:
        recorded: Step recorded with its calls.
        timer: Operator timer of the device.

    Raises:
        ConfigError: There is more than one rank.
    """
    if recorded.engine.num_ranks > 1:
        raise ConfigError(
            f"plan.hardware=measured with {recorded.engine.num_ranks} ranks",
            "operators are timed on one device, and communication between ranks is not",
            "strategy=single trainer.devices=1, or plan.hardware=<a device of the table>",
        )
    times = time_operators(recorded.ops, timer, factor=calibrate(recorded.step, recorded.kinds, timer))
    forward, backward = times.of("forward/").total, times.of("backward/").total
    transfer = time_transfers(recorded.ops, times) if recorded.step.on_gpu else None  # on a CPU the copies were timed
    exposed = transfer.exposed_seconds if transfer is not None else 0.0
    passes = recorded.step.num_forward_passes * forward + backward
    seconds = recorded.accumulation.num_micro_batches * (passes + exposed)
    seconds += times.of("clipping").total + times.of("optimizer").total
    return Times(
        step=times,
        communication=Communication(),
        transfer=transfer,
        step_seconds=seconds,
        forward_seconds=forward,
    )


def estimate_times(
    resolved: ResolvedRun, cluster: Cluster, recorded: Recorded, rates: Rates, *, stages: Stages | None
) -> Times:
    """Return the times of a step estimated from the rates of a device.

    Args:
        resolved: The run.
        cluster: The devices.
        recorded: Recorded step.
        rates: Rates of a device.
        stages: Stages of the pipeline; None: no pipeline.
    """
    ops, num_micro_batches = recorded.ops, recorded.accumulation.num_micro_batches
    on_gpu = cluster.device.full_name is not None
    step = time_step(ops, rates, is_compiled=resolved.compile_mode_on(gpu=on_gpu) is not None)
    transfer = time_transfers(ops, step)
    optimizer = _optimizer_seconds(recorded, step, rates)
    forward, backward = step.of("forward/").total, step.of("backward/").total
    bubble = None
    if stages is not None:
        seconds, bubble, communication = time_stages(
            ops, step, cluster, recorded.engine.mesh, stages, num_micro_batches=num_micro_batches
        )
        seconds += optimizer * stages.largest_share
    else:
        traffic = _list_traffic(recorded, step, cluster)
        communication = Communication(traffic=tuple(part for part in traffic if part.num_bytes))
        exposed = transfer.exposed_seconds if transfer is not None else 0.0
        passes = recorded.step.num_forward_passes * forward + backward
        seconds = num_micro_batches * (passes + exposed) + optimizer + communication.exposed_seconds
    return Times(
        step=step,
        communication=communication,
        transfer=transfer,
        step_seconds=seconds,
        forward_seconds=forward,
        bubble=bubble,
    )


def _list_traffic(recorded: Recorded, step: StepSeconds, cluster: Cluster) -> list[Traffic]:
    ops, engine, num_parameters = recorded.ops, recorded.engine, recorded.num_parameters
    num_micro_batches = recorded.accumulation.num_micro_batches
    divided = of_model_ranks(ops, cluster, engine.mesh, num_micro_batches=num_micro_batches)
    if engine.sharding is not None:
        shards = of_shards(
            ops,
            step,
            cluster,
            engine.mesh,
            num_micro_batches=num_micro_batches,
            syncs_each_micro_batch=engine.sharding.syncs_each_micro_batch,
        )
        return [*shards, *divided]
    if engine.zero is not None:
        partitions = of_partitions(
            engine.zero,
            step,
            cluster,
            num_parameters=num_parameters,
            num_trained=recorded.num_trained,
            num_micro_batches=num_micro_batches,
            gathers_once=num_parameters <= 1_000_000_000,
        )
        return [partitions, *divided]
    replicas = of_replicas(
        cluster,
        num_ranks=engine.num_ranks,
        gradient_bytes=float(ops[0].allocated.get(GRADIENTS, 0)),
        backward_seconds=step.of("backward/").total,
        ops=ops,
    )
    return [replicas, *divided]


def _optimizer_seconds(recorded: Recorded, step: StepSeconds, rates: Rates) -> float:
    engine = recorded.engine
    share = 4.0 * recorded.num_trained / engine.num_ranks
    if engine.offloads:  # gradients to the host, weights back, and 7 reads or writes of the state between
        return 2 * share / PCIE_BYTES_PER_SECOND + 7 * share / _HOST_ADAM_BYTES_PER_SECOND
    if engine.zero is not None:
        return 9 * share / (rates.bandwidth * rates.memory)
    return step.of("clipping").total + step.of("optimizer").total
