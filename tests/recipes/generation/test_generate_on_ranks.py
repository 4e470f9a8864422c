"""Generation with sharded weights: all ranks run the same forward passes, so that none waits in a collective alone."""

from pathlib import Path

from ranks import run_on_ranks
from vision_language_cases import NUM_IMAGES, PROMPTS, images_of, model_of, tokens_of


def test_ranks_that_would_sample_other_tokens_generate_those_of_rank_0_and_end_together(tmp_path: Path) -> None:
    """On different GPUs logits differ in their last bits; here the seeds of the two ranks differ."""
    worker = Path(__file__).with_name("generation_ranks.py")
    first, second = run_on_ranks({}, world_size=2, folder=tmp_path, worker=worker)["tokens"]
    assert first == second
    assert 0 < len(first) < 48, "they ended at the end of the text"


def test_a_rank_without_an_image_runs_the_tower_with_the_others_and_then_waits_for_their_tokens(tmp_path: Path) -> None:
    worker = Path(__file__).with_name("image_ranks.py")
    found = run_on_ranks({}, world_size=2, folder=tmp_path, worker=worker)
    images = images_of(NUM_IMAGES)
    expected = tokens_of(model_of(tmp_path), PROMPTS, images)
    for first, second in found.values():
        assert first == [expected[0][:1]]
        assert second == expected[2:]
