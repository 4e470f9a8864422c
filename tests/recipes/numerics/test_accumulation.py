"""A global batch divides exactly into micro-batches, or an error names the nearest one that does."""

import pytest

from recipes.errors import ConfigError
from recipes.numerics.accumulation import divide


@pytest.mark.parametrize(
    ("global_batch", "micro", "devices", "explicit", "expected"),
    [
        (32, None, 1, None, (32, 1)),
        (32, 8, 1, None, (8, 4)),
        (32, 8, 2, None, (8, 2)),
        (32, None, 2, 4, (4, 4)),
        (32, 8, 2, 2, (8, 2)),
        (7, 7, 1, 1, (7, 1)),
    ],
)
def test_micro_batch_size_times_their_number_times_devices_is_the_global_batch(
    global_batch: int,
    micro: int | None,
    devices: int,
    explicit: int | None,
    expected: tuple[int, int],
) -> None:
    plan = divide(
        global_batch_size=global_batch,
        micro_batch_size=micro,
        num_devices=devices,
        accumulate_grad_batches=explicit,
    )
    assert (plan.micro_batch_size, plan.num_micro_batches) == expected
    assert plan.micro_batch_size * plan.num_micro_batches * devices == global_batch


@pytest.mark.parametrize(
    ("global_batch", "micro", "devices", "explicit", "fix"),
    [
        (10, 4, 1, None, "global_batch_size=12 (or 8), or micro_batch_size=2"),
        (9, None, 2, None, "global_batch_size=10 (or 8)"),
        (3, 4, 1, None, "global_batch_size=4, or micro_batch_size=3"),
        (16, 4, 1, 2, "trainer.accumulate_grad_batches=4"),
        (16, None, 1, 3, "global_batch_size=18 (or 15)"),
    ],
)
def test_a_batch_that_does_not_divide_names_the_nearest_that_does(
    global_batch: int, micro: int | None, devices: int, explicit: int | None, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        divide(
            global_batch_size=global_batch,
            micro_batch_size=micro,
            num_devices=devices,
            accumulate_grad_batches=explicit,
        )
    assert caught.value.fix == fix
