"""What ZeRO adds to the memory of one device, against arithmetic."""

from recipes.plan.memory import MASTER, Moment, Zero, find_peak, with_unsharded_gradients, with_zero
from recipes.plan.trace import ACTIVATIONS, GATHERED, GRADIENTS, OPTIMIZER, WEIGHTS

P = 1_000_000


def _zero(stage: int, *, is_half: bool = False) -> Zero:
    return Zero(
        stage=stage,  # type: ignore[arg-type]
        num_ranks=4,
        bucket=1024,
        num_buckets=1,
        offloads_optimizer=False,
        offloads_weights=False,
        is_half=is_half,
    )


def _moments(*, weight_bytes: int = 4) -> list[Moment]:
    """A forward pass that keeps 10 bytes, a backward pass in which half of the gradients are there."""
    state = {WEIGHTS: weight_bytes * P, OPTIMIZER: 8 * P}
    return [
        Moment(section="before", op="start", held=state),
        Moment(section="forward/block 0", op="mm", held=state | {ACTIVATIONS: 10}),
        Moment(section="backward/block 0", op="mm", held=state | {ACTIVATIONS: 10, GRADIENTS: weight_bytes * P // 2}),
    ]


def _peak(stage: int, *, accumulates: bool = False) -> dict[str, int]:
    moments = list(
        with_zero(
            _moments(), _zero(stage), num_parameters=P, num_trained=P, num_forward_only=0, accumulates=accumulates
        )
    )
    return find_peak(moments).held


def test_stage_1_partitions_the_optimizer_state_and_copies_a_share_of_the_gradients_to_step() -> None:
    held = _peak(1)
    assert (held[WEIGHTS], held[OPTIMIZER], held[MASTER]) == (4 * P, 2 * P, P)
    assert held[GRADIENTS] == 4 * P + P


def test_stage_2_keeps_a_share_of_the_gradients_beside_what_is_under_way() -> None:
    assert _peak(2)[GRADIENTS] == P + 2 * P
    assert _peak(2, accumulates=True)[GRADIENTS] == 2 * P + 2 * P


def test_stage_3_keeps_a_share_of_the_weights_and_gathers_small_models_whole() -> None:
    moments = list(
        with_zero(_moments(), _zero(3), num_parameters=P, num_trained=P, num_forward_only=0, accumulates=False)
    )
    forward, backward = moments[1].held, moments[2].held
    assert forward[WEIGHTS] == P
    assert forward[GATHERED] - backward[GATHERED] == 4 * P  # what was gathered ahead, until it is copied out
    assert backward[GATHERED] == 4 * P + 4 * 1024


def test_stage_3_lets_weights_go_that_have_no_backward_pass() -> None:
    settings = {"num_parameters": P, "num_trained": P // 2, "accumulates": False}
    kept, released = (
        [
            moment.held.get(GATHERED, 0)
            for moment in with_zero(_moments(), _zero(3), num_forward_only=number, **settings)
        ]
        for number in (0, P // 4)
    )
    assert [before - after for before, after in zip(kept, released, strict=True)] == [P // 4 * 4] * len(kept)


def test_bfloat16_weights_have_a_master_copy_in_float32() -> None:
    moments = list(
        with_zero(
            _moments(weight_bytes=2),
            _zero(1, is_half=True),
            num_parameters=P,
            num_trained=P,
            num_forward_only=0,
            accumulates=False,
        )
    )
    held = moments[1].held
    assert (held[WEIGHTS], held[MASTER]) == (2 * P, P)


def test_fsdp_that_reduces_once_a_step_has_all_gradients_until_its_blocks_reduce_theirs() -> None:
    sections = [
        "before",
        "forward/block 0",
        "backward/head",
        "backward/block 1",
        "backward/block 0",
        "backward/embedding",
    ]
    moments = [Moment(section=section, op="aten::op", held={GRADIENTS: P}) for section in sections]
    before, *computing = with_unsharded_gradients(moments, num_bytes=4 * P)
    assert before.held == {GRADIENTS: P}
    reduced = [0, 0, 0, 1, 2]  # quarters: of head, two blocks and embedding
    assert [moment.held[GATHERED] for moment in computing] == [P * (4 - quarters) for quarters in reduced]
    assert [moment.held[GRADIENTS] for moment in computing] == [P * quarters // 4 for quarters in reduced]
