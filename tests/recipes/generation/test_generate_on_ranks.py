"""Generation with sharded weights: all ranks take the same tokens, so that none waits in a collective alone."""

from pathlib import Path

from ranks import run_on_ranks


def test_ranks_that_would_sample_other_tokens_generate_those_of_rank_0_and_end_together(tmp_path: Path) -> None:
    """On different GPUs logits differ in their last bits; here the seeds of the two ranks differ."""
    worker = Path(__file__).with_name("generation_ranks.py")
    first, second = run_on_ranks({}, world_size=2, folder=tmp_path, worker=worker)["tokens"]
    assert first == second
    assert 0 < len(first) < 48, "they ended at the end of the text"
