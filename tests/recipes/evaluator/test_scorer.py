"""Scores and generated texts: those of lm-evaluation-harness on the exported model, and the cases it rejects."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness import GENERATED, ROLLED, SCORED, WINDOW, Case, make_case

from recipes.errors import ConfigError
from recipes.evaluator.generation import Ending, Generation
from recipes.evaluator.prompt_tokens import PromptTokens

REFERENCE = json.loads(Path(__file__).with_name("lm_eval_results.json").read_text(encoding="utf-8"))["models"]
# float32 sums of up to 206 log-probabilities, of -1,332 together, computed in another order: measured 5.0e-5
CLOSE = 1e-4


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def case(name: str) -> Case:
    return make_case(name)


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_log_likelihoods_and_greedy_flags_are_those_of_the_harness(case: Case, name: str, batch_size: int) -> None:
    found = case.scorer(batch_size=batch_size).score(SCORED)
    expected = REFERENCE[name]["scored"]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], rel=0, abs=CLOSE)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert {greedy for _, greedy in found} == {True, False}


@pytest.mark.parametrize("batch_size", [1, 64])
def test_whole_texts_longer_than_the_window_score_as_in_the_harness(case: Case, name: str, batch_size: int) -> None:
    found = case.scorer(batch_size=batch_size).score_rolling(ROLLED)
    assert found == pytest.approx(REFERENCE[name]["rolled"], rel=0, abs=CLOSE)


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_generated_texts_are_those_of_the_harness(case: Case, name: str, batch_size: int) -> None:
    assert case.scorer(batch_size=batch_size).generate(GENERATED) == REFERENCE[name]["generated"]


def test_a_model_without_a_loss_in_chunks_scores_by_all_of_its_logits(case: Case, name: str) -> None:
    scorer = case.scorer(batch_size=3)
    scorer._computes_head = False
    found, expected = scorer.score(SCORED), REFERENCE[name]["scored"]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], rel=0, abs=CLOSE)


def test_requests_with_the_same_input_share_a_row(case: Case) -> None:
    rows: list[int] = []
    hook = case.model.embedding.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    scorer = case.scorer(batch_size=2)
    try:
        scorer.score([("2 + 2 =", f"{digit}") for digit in range(10)])
    finally:
        hook.remove()
    assert rows == [1]


def test_contexts_that_lose_their_beginning_are_counted(case: Case) -> None:
    scorer = case.scorer(batch_size=8)
    scorer.score([("a" * (WINDOW + 1), "b"), ("a", "b"), ("a" * (WINDOW - 2), "b")])
    assert scorer.num_cut == 1
    scorer.generate([("a" * WINDOW, {"max_gen_toks": 4}), ("a", {"max_gen_toks": 4})])
    assert scorer.num_cut == 2


def test_what_cannot_be_scored_or_generated_is_an_error(case: Case) -> None:
    scorer = case.scorer(batch_size=8)
    with pytest.raises(ConfigError, match=f"a continuation of {2 * WINDOW} tokens, 'bbb.*the model reads {WINDOW}"):
        scorer.score([("a", "b" * 2 * WINDOW)])
    with pytest.raises(ConfigError, match="together with its context it has no token of its own"):
        scorer.score([("a", "")])
    with pytest.raises(ConfigError, match=f"max_gen_toks=256: .* the model reads {WINDOW} with the prompt"):
        scorer.generate([("a", {"until": ["\n"]})])


def test_sampled_texts_differ_by_their_place_and_repeat(case: Case) -> None:
    settings = {"max_gen_toks": 8, "do_sample": True, "temperature": 2.0}
    texts = case.scorer(batch_size=2).generate([("a", settings)] * 4)
    assert len(set(texts)) == 4
    assert case.scorer(batch_size=4).generate([("a", settings)] * 4) == texts


def test_context_and_continuation_are_split_where_the_harness_splits_them() -> None:
    prompts = PromptTokens(make_case("gpt2").tokenizer)
    the, cat = prompts.encode(" the"), prompts.encode(" cat")
    assert (len(the), len(cat)) == (1, 1)
    assert prompts.split("in the", " cat") == (prompts.encode("in the"), cat)
    assert prompts.split("in the ", "cat") == (prompts.encode("in the"), cat)
    assert prompts.split("", " cat") == ([prompts.start], cat)
    assert prompts.split(" ", "cat") == ([prompts.start], cat)
    # `the` and ` cat` are read as two tokens, and `t` `he`: the part of a token across the seam is not scored
    assert prompts.split("th", "e cat") == (prompts.encode("th"), cat)
    assert prompts.split("", "<|endoftext|> cat") == ([prompts.start], cat)


def test_a_text_that_spells_the_first_token_gets_no_second_one() -> None:
    prompts = PromptTokens(make_case("llama").tokenizer)
    assert prompts.encode("<s>a") == prompts.encode("a") == [prompts.start, ord("a")]


@pytest.mark.parametrize("num_tokens", [0, 1, 4, 5, 8, 9, 11])
def test_a_text_is_rolled_over_the_window_once(num_tokens: int) -> None:
    prompts = PromptTokens(make_case("gpt2").tokenizer)
    tokens = prompts.encode("x" * num_tokens)
    parts = list(prompts.roll("x" * num_tokens, window=4))
    assert [token for _, scored in parts for token in scored] == tokens
    assert all(len(context) + len(scored) == 5 for context, scored in parts[1:])
    assert all(context == [prompts.start] for context, _ in parts[:1])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"until": "\n"}, Generation(("\n",), 256, 0.0, None, None)),
        ({"until": None, "max_new_tokens": "7", "max_gen_toks": 5}, Generation((), 5, 0.0, None, None)),
        ({"do_sample": False, "temperature": 1.0}, Generation((), 256, 0.0, None, None)),
        ({"do_sample": True, "top_k": 0, "top_p": 1}, Generation((), 256, 1.0, None, 1.0)),
        ({"temperature": 0.5, "top_k": 3}, Generation((), 256, 0.5, 3, None)),
    ],
)
def test_settings_of_a_generation_are_read_as_the_harness_does(given: dict[str, Any], expected: Generation) -> None:
    assert Generation.read(given) == expected


def test_a_setting_without_a_counterpart_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"generation_kwargs.num_beams=4: the task asks for it"):
        Generation.read({"until": [], "num_beams": 4})


def test_an_answer_ends_at_a_text_or_at_the_spelling_of_a_special_token() -> None:
    tokenizer = make_case("llama").tokenizer
    ending = Ending(["\n\n", "<|im_end|>", ""], tokenizer)
    spelled = tokenizer.encode_rendered("a\nb<|im_end|>").ids
    assert [ending.is_reached(spelled[:end]) for end in range(1, 5)] == [False, False, False, True]
    assert ending.cut(spelled) == "a\nb"
    assert ending.is_reached(tokenizer.encode("ü\n\n"))
    assert ending.cut(tokenizer.encode("ü\n\nb")) == "ü"
