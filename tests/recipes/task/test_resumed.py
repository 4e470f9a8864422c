"""A checkpoint of an adapter goes on beside its own base weights, wherever they are now, and beside no others."""

import pytest

from recipes.errors import ConfigError
from recipes.task.frozen import Base, check_base
from recipes.task.resumable import check_published_config

PUBLISHED = Base("m", "0a", in_nf4=False)


@pytest.mark.parametrize("own", [PUBLISHED, Base("moved", "0a", in_nf4=False)])
def test_the_same_weights_in_any_folder_are_taken(own: Base) -> None:
    check_base(own, PUBLISHED.state())
    check_base(None, None)


@pytest.mark.parametrize(
    ("own", "saved", "reason"),
    [
        (Base("m", "0b", in_nf4=False), PUBLISHED, "they have other values than when the adapter was trained beside m"),
        (Base("1", None, in_nf4=False), Base("2", None, in_nf4=False), "were drawn from seed=2"),
        (Base("1", None, in_nf4=False), PUBLISHED, "beside the weights of m, and this run of an adapter beside"),
        (Base("m", "0a", in_nf4=True), PUBLISHED, "this run of an adapter beside the weights of m in NF4"),
        (None, PUBLISHED, "and this run of a model without an adapter"),
        (PUBLISHED, None, "the checkpoint is of a model without an adapter"),
    ],
)
def test_other_base_weights_are_rejected(own: Base | None, saved: Base | None, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_base(own, None if saved is None else saved.state())


def test_settings_that_two_versions_of_a_config_share_are_equal() -> None:
    before = {"rope_theta": 1.0, "scale": float("nan"), "dropped": 1}
    check_published_config({"rope_theta": 1.0, "scale": float("nan"), "added": 2}, before, "m")
    with pytest.raises(ConfigError, match=r"config\.json of m: it has rope_theta=2\.0, and .* rope_theta=1\.0"):
        check_published_config({"rope_theta": 2.0}, before, "m")
