"""Random streams: on an accelerator by a hash, as likely as the probabilities say and the same in every batch."""

import numpy as np
import pytest
import torch

from recipes.errors import ConfigError
from recipes.generation import Sampling, row_seed
from recipes.generation.sampling import NO_TOKEN, DeviceStream, HostStream

PROBABILITIES = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.1])
NUM_ROWS, NUM_POSITIONS = 40, 500


def stream_of(seeds: range | list[int], num_positions: int = NUM_POSITIONS) -> DeviceStream:
    return DeviceStream(seeds, num_positions=num_positions, device=torch.device("cpu"))


def test_tokens_of_a_device_are_as_likely_as_their_probabilities() -> None:
    stream = stream_of(range(NUM_ROWS))
    drawn = torch.stack([stream.draw(PROBABILITIES.expand(NUM_ROWS, -1)) for _ in range(NUM_POSITIONS)])
    shares = torch.bincount(drawn.flatten(), minlength=5) / drawn.numel()
    # 20,000 draws: four standard deviations of a share of 0.4 are 0.014
    torch.testing.assert_close(shares, PROBABILITIES, rtol=0, atol=0.014)
    assert shares[1] == 0
    assert shares.sum() == 1
    same = (drawn[1:] == drawn[:-1]).float().mean(), (drawn[:, 1:] == drawn[:, :-1]).float().mean()
    # neighbors are equal as often as independent draws
    assert all(abs(float(share) - float((PROBABILITIES**2).sum())) < 0.015 for share in same)


def test_tokens_of_a_row_are_the_same_alone_and_after_others_have_left() -> None:
    alone, together = stream_of([7], 6), stream_of([3, 5, 7, 9], 6)
    row = 2
    for position in range(6):
        [expected] = alone.draw(PROBABILITIES[None]).tolist()
        rows = 4 if position < 3 else 2
        assert together.draw(PROBABILITIES.expand(rows, -1)).tolist()[row] == expected
        if position == 2:
            together.keep([0, 2])
            row = 1


def test_a_row_on_a_cpu_draws_the_token_that_torch_draws_with_its_seed() -> None:
    logits = 2 * torch.randn(6, 1000, generator=torch.Generator().manual_seed(0))
    stream, generators = HostStream(range(6)), [torch.Generator().manual_seed(seed) for seed in range(6)]
    for _ in range(20):
        probabilities = logits.softmax(dim=-1)
        expected = [
            int(torch.multinomial(row, 1, generator=generator))
            for row, generator in zip(probabilities, generators, strict=True)
        ]
        assert stream.draw(probabilities).tolist() == expected
        logits = logits.roll(1, dims=-1)


@pytest.mark.parametrize("stream", [stream_of([0, 1]), HostStream([0, 1])])
def test_a_diverged_row_has_no_token_and_the_others_have(stream: DeviceStream | HostStream) -> None:
    logits = torch.zeros(2, 5)
    logits[0, 3] = float("nan")
    for sampling in (Sampling(), Sampling(top_k=2), Sampling(top_p=0.5), Sampling(temperature=0.0)):
        tokens, _ = sampling.draw(logits, stream)
        assert tokens[0] == NO_TOKEN
        assert tokens[1] >= 0


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest() -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    assert Sampling(min_p=0.25).probabilities(logits).tolist() == pytest.approx([0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0])
    assert Sampling(min_p=1.0).probabilities(logits).tolist() == [1.0, 0.0, 0.0, 0.0]
    with pytest.raises(ConfigError, match="min_p=1.5"):
        Sampling(min_p=1.5)


def test_every_row_of_a_training_run_has_a_seed_of_its_own() -> None:
    seeds = [
        row_seed(seed, step=step, prompt=prompt, sample=sample)
        for seed in range(3)
        for step in range(5)
        for prompt in range(16)
        for sample in range(8)
    ]
    assert len(set(seeds)) == len(seeds)
    assert np.array(seeds).max() < 2**32  # all that a generator of torch reads
    assert row_seed(1, step=2, prompt=3, sample=4) == row_seed(1, step=2, prompt=3, sample=4)
