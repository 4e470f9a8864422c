"""What the checks of the data say of healthy data whose order or size is unusual."""

import torch

from recipes.preflight.data import (
    check_balance,
    check_captions,
    check_dependence,
    check_range,
    check_readable,
    check_repeats,
    check_shift,
    describe_caption,
    describe_targets,
    digest,
    show_samples,
)
from recipes.preflight.model import _first_samples


def test_rows_in_the_order_of_their_lengths_still_say_something_of_their_targets() -> None:
    # [T] each: the first half counts in tokens 0 to 49, the second in 50 to 99, as where the longest come first
    rows = [torch.arange(49) + (0 if number < 100 else 50) for number in range(200)]
    samples = [{"inputs": row, "targets": row + 1} for row in rows]
    assert check_dependence(samples, is_text=True).status == "pass"


def test_samples_of_the_next_epoch_are_no_repeats() -> None:
    epoch = [bytes([number]) for number in range(100)]
    drawn = [*epoch[48:], *epoch[:48]]
    assert check_repeats(drawn, 100 - 48).status == "pass"
    assert check_repeats([*epoch[48:74], *epoch[48:74]], 100 - 48).status == "fail"


def test_an_order_that_has_each_sample_four_times_repeats_it_three_times() -> None:
    drawn = [bytes([number // 4]) for number in range(32)]
    assert check_repeats(drawn, 400, num_reads=4).status == "pass"
    assert check_repeats([*drawn[:16], *drawn[:16]], 400, num_reads=4).status == "fail"


def test_a_sample_without_targets_is_shown_as_a_prompt() -> None:
    sample = {"inputs": torch.tensor([5, 6])}
    assert show_samples([sample], None) == ["prompt: [5, 6]"]
    assert show_samples([sample], lambda ids: f"<{ids}>") == ["prompt: '<[5, 6]>'"]


def test_a_sample_is_the_same_however_its_batch_was_padded() -> None:
    wide, narrow = torch.tensor([5, 7, 0, 0, 0, 0]), torch.tensor([5, 7, 0, 0])
    assert digest(wide, torch.tensor(2)) == digest(narrow, torch.tensor(2)) == digest(torch.tensor([5, 7]))
    assert digest(wide, torch.tensor(3)) != digest(narrow, torch.tensor(2))


def test_one_question_of_two_images_is_two_samples() -> None:
    question, images = torch.tensor([5, 7]), torch.rand(2, 1, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    assert digest(question, images=images[0]) == digest(question, images=images[0].clone())
    assert len({digest(question, images=each) for each in (*images, torch.zeros(0, 3, 4, 4))}) == 3
    assert digest(question) == digest(question, images=torch.zeros(0, 3, 4, 4)), "of rows without an image"


def test_the_first_samples_of_a_batch_have_their_own_images() -> None:
    numbers, images = torch.tensor([2, 0, 1]), torch.arange(3.0)[:, None, None, None]
    batch = {"inputs": torch.zeros(3, 4), "images": images, "num_images": numbers}
    assert [_first_samples(batch, size)["images"].flatten().tolist() for size in (1, 2, 3)] == [
        [0, 1],
        [0, 1],
        [0, 1, 2],
    ]
    assert len(_first_samples(batch | {"num_images": torch.tensor([0, 1, 2])}, 1)["images"]) == 1, (
        "which no token reads"
    )


def test_the_share_of_targets_that_carry_loss_is_that_of_tokens() -> None:
    sample = {
        "inputs": torch.arange(8),
        "targets": torch.tensor([-100, 3, 4, *[-100] * 5]),
        "num_inputs": torch.tensor(4),
    }
    assert check_range([sample], 9).found == "2 targets, all in 0 to 8; 50% carry loss"


def test_rows_of_two_answers_are_compared_and_shown_one_by_one() -> None:
    inputs = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0]])
    targets = torch.tensor([[-100, 7, 8, 3], [-100, 9, 3, -100]])
    sample = {"inputs": inputs, "targets": targets, "num_inputs": torch.tensor([4, 3])}
    assert check_shift([sample]).status == "pass"
    assert check_shift([sample]).found == "3 of 3", "the ends of both answers have no next input, but padding"
    wrong = sample | {"targets": torch.tensor([[-100, 8, 8, 3], [-100, 9, 3, -100]])}
    assert check_shift([wrong]).found == "only 2 of 3 targets are the next input"
    assert check_range([sample], 10).found == "5 targets, all in 0 to 9; 71% carry loss"
    assert [line.strip() for line in show_samples([sample], None)] == [
        *("input: [5, 6, 7, 8]", "target: [7, 8, 3]", "input: [5, 6, 9]", "target: [9, 3]"),
    ]


def test_images_that_cannot_be_decoded_are_named_and_fail_where_training_would_end() -> None:
    bad = [(f"{number}.png", "it is empty (0 bytes)") for number in range(5)]
    found = check_readable(bad, 100, skips=False)
    assert found.status == "fail"
    assert found.found == "5 of 100 tried cannot be decoded" + "".join(
        f"; {number}.png: it is empty (0 bytes)" for number in range(3)
    )
    assert check_readable(bad, 100, skips=True).status == "warn"
    assert check_readable([], 100, skips=False).status == "pass"


def test_classes_of_which_one_is_21_times_as_large_are_worth_a_look() -> None:
    assert check_balance({"ant": 20, "bee": 1}).status == "pass"
    found = check_balance({"ant": 21, "bee": 1, "cat": 5})
    assert (found.status, found.found) == ("warn", "1 of 'bee' to 21 of 'ant', in 3 classes")


def test_targets_are_shown_by_their_names() -> None:
    assert describe_targets(torch.tensor(1), ["ant", "bee"]) == "class bee"
    assert describe_targets(torch.tensor(7), ["ant", "bee"]) == "class 7"
    assert describe_targets(torch.tensor([1.0, 0.0, 1.0]), ["ant", "bee", "cat"]) == "ant, cat"
    assert describe_targets(torch.tensor([0.25, 2.0])) == "targets 0.25, 2"


def test_captions_of_several_images_are_counted_and_read_copies_are_not() -> None:
    def samples(*captions: int) -> list[dict[str, torch.Tensor]]:
        return [{"caption": torch.tensor(each), "image": torch.tensor(n)} for n, each in enumerate(captions)]

    assert check_captions(samples(*range(20))).status == "pass"
    some = check_captions(samples(*range(16), 0, 1, 2, 2))
    assert (some.status, some.found) == ("warn", "7 of 20 images have the caption of another one")
    assert check_captions(samples(*[5] * 20)).status == "fail"
    assert check_captions([*samples(1, 2), *samples(1, 2)]).status == "pass", "one image that is read twice"


def test_a_caption_is_shown_as_the_model_reads_it() -> None:
    tokens, is_token = torch.tensor([7, 8, 9, 9]), torch.tensor([True, True, True, False])
    sample = {"inputs": torch.zeros(3, 2, 2), "targets": torch.tensor(0), "caption": torch.tensor(1)}
    sample |= {"tokens": tokens, "is_token": is_token}
    assert describe_caption(sample, lambda ids: f"{ids}") == "caption '[7, 8, 9]'"
    [shown] = show_samples([sample], lambda ids: f"{ids}", is_text=False)
    assert shown == "caption '[7, 8, 9]': 3 x 2 x 2 values from 0 to 0, mean 0"
