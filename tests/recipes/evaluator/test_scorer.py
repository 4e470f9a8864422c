"""Scores and generated texts equal lm-evaluation-harness's on the exported model; what cannot be scored is an error."""

import json
from pathlib import Path
from typing import Any

import pytest
from exported_models import Text, make_backend
from scorer_cases import GENERATE_REQUESTS, ROLLING_TEXTS, SCORE_REQUESTS, WINDOW, Case, make_case

from recipes.errors import ConfigError
from recipes.evaluator.scorer import Generation, PromptTokens
from recipes.generation import Sampling, StopStrings
from recipes.tokenizer import Tokenizer

REFERENCE = json.loads(Path(__file__).with_name("lm_eval_results.json").read_text(encoding="utf-8"))["models"]
# up to 206 log-probabilities (-1,332 in all) summed in float32 in another order: largest difference 5.0e-5
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def case(name: str) -> Case:
    return make_case(name)


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_log_likelihoods_and_greedy_flags_are_those_of_lm_eval(case: Case, name: str, batch_size: int) -> None:
    found = case.scorer(batch_size=batch_size).score(SCORE_REQUESTS)
    expected = REFERENCE[name]["scored"]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], rel=0, abs=TOLERANCE)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert {greedy for _, greedy in found} == {True, False}


@pytest.mark.parametrize("batch_size", [1, 64])
def test_whole_texts_longer_than_the_window_score_as_in_lm_eval(case: Case, name: str, batch_size: int) -> None:
    found = case.scorer(batch_size=batch_size).score_rolling(ROLLING_TEXTS)
    assert found == pytest.approx(REFERENCE[name]["rolled"], rel=0, abs=TOLERANCE)


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_generated_texts_are_those_of_lm_eval(case: Case, name: str, batch_size: int) -> None:
    assert case.scorer(batch_size=batch_size).generate(GENERATE_REQUESTS) == REFERENCE[name]["generated"]


def test_a_model_without_a_chunked_loss_scores_from_all_of_its_logits(case: Case, name: str) -> None:
    scorer = case.scorer(batch_size=3)
    scorer._can_select_logits = False
    found, expected = scorer.score(SCORE_REQUESTS), REFERENCE[name]["scored"]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], rel=0, abs=TOLERANCE)


def test_requests_with_the_same_input_share_a_row(case: Case) -> None:
    rows: list[int] = []
    hook = case.model.embedding.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    scorer = case.scorer(batch_size=2)
    try:
        scorer.score([("2 + 2 =", f"{digit}") for digit in range(10)])
    finally:
        hook.remove()
    assert rows == [1]


def test_truncated_contexts_are_counted(case: Case) -> None:
    scorer = case.scorer(batch_size=8)
    scorer.score([("a" * (WINDOW + 1), "b"), ("a", "b"), ("a" * (WINDOW - 2), "b")])
    assert scorer.num_truncated == 1
    scorer.generate([("a" * WINDOW, {"max_gen_toks": 4}), ("a", {"max_gen_toks": 4})])
    assert scorer.num_truncated == 2


def test_what_cannot_be_scored_or_generated_is_an_error(case: Case) -> None:
    scorer = case.scorer(batch_size=8)
    with pytest.raises(ConfigError, match=f"a continuation of {2 * WINDOW} tokens, 'bbb.*the model reads {WINDOW}"):
        scorer.score([("a", "b" * 2 * WINDOW)])
    with pytest.raises(ConfigError, match="it adds no token to its context"):
        scorer.score([("a", "")])
    with pytest.raises(ConfigError, match=f"max_gen_toks=256: .* the model's window is {WINDOW} tokens"):
        scorer.generate([("a", {"until": ["\n"]})])


def test_sampled_texts_depend_on_the_request_and_not_on_the_batch_size(case: Case) -> None:
    settings = {"max_gen_toks": 8, "do_sample": True, "temperature": 2.0}
    texts = case.scorer(batch_size=2).generate([("a", settings)] * 4)
    assert len(set(texts)) == 4
    assert case.scorer(batch_size=4).generate([("a", settings)] * 4) == texts


def test_context_and_continuation_are_split_where_lm_eval_splits_them() -> None:
    prompts = PromptTokens(make_case("gpt2").tokenizer)
    the, cat = prompts.encode(" the"), prompts.encode(" cat")
    assert (len(the), len(cat)) == (1, 1)
    assert prompts.split("in the", " cat") == (prompts.encode("in the"), cat)
    assert prompts.split("in the ", "cat") == (prompts.encode("in the"), cat)
    assert prompts.split("", " cat") == ([prompts.start], cat)
    assert prompts.split(" ", "cat") == ([prompts.start], cat)
    # "the cat" is `t` `he` ` cat`, and "th" is two tokens too: `he` straddles the boundary, so its "e" is not scored
    assert prompts.split("th", "e cat") == (prompts.encode("th"), cat)
    assert prompts.split("", "<|endoftext|> cat") == ([prompts.start], cat)


def test_a_text_that_begins_with_bos_gets_no_second_bos() -> None:
    prompts = PromptTokens(make_case("llama").tokenizer)
    assert prompts.encode("<s>a") == prompts.encode("a") == [prompts.start, ord("a")]


def test_a_rendered_conversation_begins_as_its_template_says() -> None:
    prompts = PromptTokens(make_case("llama").tokenizer, is_rendered=True)
    assert prompts.encode("<|im_start|>a") == prompts.encode("<s><|im_start|>a")[1:] == [258, ord("a")]


@pytest.mark.parametrize("num_tokens", [0, 1, 4, 5, 8, 9, 11])
def test_a_rolling_window_scores_each_token_once(num_tokens: int) -> None:
    prompts = PromptTokens(make_case("gpt2").tokenizer)
    tokens = prompts.encode("x" * num_tokens)
    parts = list(prompts.roll("x" * num_tokens, window=4))
    assert [token for _, scored in parts for token in scored] == tokens
    assert all(len(context) + len(scored) == 5 for context, scored in parts[1:])
    assert all(context == [prompts.start] for context, _ in parts[:1])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"until": "\n"},
            Generation(until=("\n",), num_tokens=256, sampling=Sampling(temperature=0.0)),
        ),
        (
            {"until": None, "max_new_tokens": "7", "max_gen_toks": 5},
            Generation(until=(), num_tokens=5, sampling=Sampling(temperature=0.0)),
        ),
        (
            {"do_sample": False, "temperature": 1.0},
            Generation(until=(), num_tokens=256, sampling=Sampling(temperature=0.0)),
        ),
        (
            {"do_sample": True, "top_k": 0, "top_p": 1},
            Generation(until=(), num_tokens=256, sampling=Sampling(temperature=1.0, top_p=1.0)),
        ),
        (
            {"temperature": 0.5, "top_k": 3},
            Generation(until=(), num_tokens=256, sampling=Sampling(temperature=0.5, top_k=3)),
        ),
    ],
)
def test_settings_of_a_generation_are_read_as_lm_eval_does(given: dict[str, Any], expected: Generation) -> None:
    assert Generation.read(given) == expected


def test_a_setting_without_a_counterpart_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"generation_kwargs.num_beams=4: the task asks for it"):
        Generation.read({"until": [], "num_beams": 4})


def test_generation_stops_at_a_stop_string_even_if_it_is_a_special_token() -> None:
    tokenizer = make_case("llama").tokenizer
    stop_strings = StopStrings(["\n\n", "<|im_end|>", ""], tokenizer)
    spelled = tokenizer.encode_rendered("a\nb<|im_end|>").ids
    assert [stop_strings.is_reached(spelled[:end]) for end in range(1, 5)] == [False, False, False, True]
    assert stop_strings.cut(spelled) == "a\nb"
    assert stop_strings.is_reached(tokenizer.encode("ü\n\n"))
    assert stop_strings.cut(tokenizer.encode("ü\n\nb")) == "ü"


def test_a_stop_string_that_begins_with_a_blank_is_found_whatever_the_decoder_drops() -> None:
    backend = make_backend(Text(True, has_start=False, has_several_ends=False, has_template=False))
    tokenizer = Tokenizer(backend, end_of_text=backend.token_to_id("</s>"))
    stop_strings = StopStrings([" the"], tokenizer)
    answer = tokenizer.encode("the")  # after a prompt: a blank and a word
    assert stop_strings.is_reached(answer)
    prompt = tokenizer.encode("loss")
    assert stop_strings.cut([*answer, *answer], prompt=prompt) == ""
    assert StopStrings(["x"], tokenizer).cut(answer, prompt=prompt) == " the"
