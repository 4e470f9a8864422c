"""What the config leaves to be derived: the size of a validation, and cuDNN's search for algorithms."""

import pytest
from support import composed_config, resolved


@pytest.mark.parametrize(
    ("typed", "num_samples"),
    [
        (["eval_every=500", "global_batch_size=480"], 14_400),  # of 240,000: a third of the time of 6 % is 2 %
        (["eval_every=1", "global_batch_size=480"], 480),  # at least a global batch
        (["eval_samples=7"], 7),
        (["eval_samples=null"], None),
    ],
)
def test_a_validation_takes_two_percent_of_the_time(typed: list[str], num_samples: int | None) -> None:
    assert resolved(composed_config("recipe=single_fp32", *typed)).eval_samples == num_samples


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["model=gpt2_nano"], False),
        (["model=resnet18"], True),
        (["model=resnet18", "trainer.benchmark=false"], False),
        (["model=gpt2_nano", "trainer.benchmark=true"], True),
        (["model=resnet18", "+trainer.deterministic=true"], False),
    ],
)
def test_cudnn_tries_its_algorithms_for_images_unless_bits_matter(typed: list[str], expected: bool) -> None:
    assert resolved(composed_config(*typed)).tries_convolutions is expected


@pytest.mark.parametrize(
    ("typed", "num_tokens"),
    [
        (["data=random_tokens"], 128),
        (["recipe=sft_demo"], None),  # a packed row ends with padding
        (["recipe=mixture"], None),  # one of its sources has packed rows
        (["model=resnet18"], None),
    ],
)
def test_a_plan_counts_tokens_where_no_row_is_padded(typed: list[str], num_tokens: int | None) -> None:
    assert resolved(composed_config(*typed)).tokens_per_sample == num_tokens
