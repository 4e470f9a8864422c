"""Generation: with the cache and without it the same tokens; sampling probabilities by arithmetic."""

import contextlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from one_text import generate, generate_rows
from torch import nn

from recipes.errors import ConfigError
from recipes.generation import Completion, Sampling
from recipes.model.gpt2 import GPT2
from recipes.model.kv_cache import KeyValueCache, LayerCache
from recipes.model.llama import Llama
from recipes.task.language_modeling import LanguageModeling
from recipes.tokenizer.bytes import byte_tokenizer

torch.set_num_threads(1)

ARCHITECTURES = ["gpt2", "llama", "llama_qk_norm"]
MAX_SEQ_LEN = 16


def model_of(architecture: str) -> GPT2 | Llama:
    """Return a small model whose weights are large enough that the likeliest token changes."""
    model: GPT2 | Llama
    if architecture == "gpt2":
        model = GPT2(
            vocab_size=50,
            max_seq_len=MAX_SEQ_LEN,
            num_layers=2,
            num_heads=4,
            hidden_size=32,
            dropout=0.1,
        )
    else:
        model = Llama(
            vocab_size=50,
            max_seq_len=MAX_SEQ_LEN,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            hidden_size=32,
            ffn_hidden_size=48,
            rope_theta=10000.0,
            qk_norm=architecture == "llama_qk_norm",
        )
    model.init_weights(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8.0)
    return model


def greedy(model: GPT2 | Llama, num_tokens: int, **options: bool) -> list[int]:
    return generate(model, [1, 2, 3], num_tokens, temperature=0.0, top_k=None, top_p=None, seed=0, **options)


def sampled(model: GPT2 | Llama, seed: int) -> list[int]:
    return generate(model, [1, 2, 3], 20, temperature=1.0, top_k=None, top_p=None, seed=seed)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("chunks", [(16,), (1,) * 16, (5, 1, 7, 3)])
def test_logits_with_the_cache_equal_those_without(architecture: str, chunks: tuple[int, ...]) -> None:
    model = model_of(architecture).eval()
    tokens = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(0))
    whole = model(tokens)
    cache = KeyValueCache(num_layers=2, capacity=16)
    for chunk in tokens.split(chunks, dim=1):
        last = model(chunk, cache=cache)
        assert last.shape == (2, 1, 64)
        # One row instead of 16 in the same sums: float32 rounding of logits of order 1.
        expected = whole[:, cache.length - 1]
        torch.testing.assert_close(last[:, 0], expected, rtol=1e-5, atol=1e-5)
    assert cache.length == 16


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_are_the_same_with_and_without_the_cache_past_two_windows(
    architecture: str,
) -> None:
    model = model_of(architecture)
    with_cache = greedy(model, 40)
    assert with_cache == greedy(model, 40, use_cache=False)
    assert len(with_cache) == 40
    assert len(set(with_cache)) > 5  # no fixed point that would prove nothing
    assert max(with_cache) < 50


def test_a_full_window_slides_to_its_newest_half() -> None:
    model = model_of("llama")
    seen: list[int] = []
    handle = model.embedding.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[1]))
    greedy(model, 24)
    handle.remove()
    # 3 of the prompt, then one by one to 16; the 17th makes the window the newest 8.
    assert seen == [3, *[1] * 13, 8, *[1] * 8, 8]


def test_a_prompt_longer_than_the_window_is_cut_to_its_newest_half() -> None:
    model = model_of("gpt2")
    long = list(range(40))
    options = {"temperature": 0.0, "top_k": None, "top_p": None, "seed": 0}
    assert generate(model, long, 5, **options) == generate(model, long[-8:], 5, **options)


def test_same_seed_same_text_other_seed_other_text() -> None:
    model = model_of("gpt2")
    assert sampled(model, 1) == sampled(model, 1)
    assert sampled(model, 1) != sampled(model, 2)


def test_generation_stops_before_end_of_text() -> None:
    model = model_of("gpt2")
    tokens = greedy(model, 20)
    end = tokens[7]
    stopped = generate(model, [1, 2, 3], 20, temperature=0.0, top_k=None, top_p=None, seed=0, ends=[end])
    assert stopped == tokens[: tokens.index(end)]


def test_the_mode_of_the_model_is_restored_and_no_gradient_is_recorded() -> None:
    model = model_of("gpt2").train()
    model.blocks[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    state = torch.get_rng_state()
    sampled(model, 1)
    assert modes == {name: module.training for name, module in model.named_modules()}
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_compiled_blocks_generate_eagerly_and_are_not_compiled_again() -> None:
    model = model_of("llama")
    expected = greedy(model, 20)
    compiled: list[nn.Module] = []

    def backend(module: nn.Module, inputs: list[torch.Tensor]) -> nn.Module:
        compiled.append(module)
        return module

    for block in model.blocks:
        block.compile(backend=backend)
    assert greedy(model, 20) == expected
    assert compiled == []


LOGITS = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()


def probabilities(**changes: float | None) -> list[float]:
    options: Any = {"temperature": 1.0, "top_k": None, "top_p": None}
    result = Sampling(**(options | changes)).probabilities(LOGITS)
    return [round(value, 6) for value in result.tolist()]


def test_temperature_divides_the_logits() -> None:
    assert probabilities() == [0.5, 0.25, 0.125, 0.125]
    squares = [0.25, 0.0625, 0.015625, 0.015625]
    assert probabilities(temperature=0.5) == [round(x / sum(squares), 6) for x in squares]
    assert probabilities(temperature=0.0) == [1.0, 0.0, 0.0, 0.0]


def test_top_k_keeps_the_k_likeliest_and_ties_of_the_last() -> None:
    assert probabilities(top_k=1) == [1.0, 0.0, 0.0, 0.0]
    assert probabilities(top_k=2) == [0.666667, 0.333333, 0.0, 0.0]
    assert probabilities(top_k=3) == [0.5, 0.25, 0.125, 0.125]
    assert probabilities(top_k=99) == [0.5, 0.25, 0.125, 0.125]


def test_top_p_keeps_the_fewest_tokens_that_have_probability_p_together() -> None:
    assert probabilities(top_p=0.5) == [1.0, 0.0, 0.0, 0.0]
    assert probabilities(top_p=0.51) == [0.666667, 0.333333, 0.0, 0.0]
    assert probabilities(top_p=0.75) == [0.666667, 0.333333, 0.0, 0.0]
    assert probabilities(top_p=1.0) == [0.5, 0.25, 0.125, 0.125]


def test_top_p_counts_what_top_k_leaves() -> None:
    assert probabilities(top_k=2, top_p=0.6) == [1.0, 0.0, 0.0, 0.0]


def test_padded_tokens_are_never_sampled() -> None:
    logits = torch.tensor([0.0, 0.0, -math.inf, -math.inf])
    result = Sampling(temperature=2.0, top_k=3, top_p=1.0).probabilities(logits)
    assert result.tolist() == [0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("changes", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_settings_out_of_range_are_rejected(changes: dict[str, float]) -> None:
    options = {"temperature": 1.0, "top_k": None, "top_p": None, "seed": 0} | changes
    with pytest.raises(ConfigError, match=next(iter(changes))):
        generate(model_of("gpt2"), [1], 1, **options)


def test_an_empty_prompt_is_rejected() -> None:
    with pytest.raises(ConfigError, match="an empty prompt"):
        generate(model_of("gpt2"), [], 1, temperature=0.0, top_k=None, top_p=None, seed=0)


def test_the_mask_of_two_new_tokens_after_three_held() -> None:
    cache = LayerCache(capacity=5)
    for num_tokens in (3, 2):
        cache.append(torch.zeros(1, 1, num_tokens, 4), torch.zeros(1, 1, num_tokens, 4))
    mask = cache.mask(2, device=torch.device("cpu"))
    assert mask is not None
    assert mask.tolist() == [[True] * 4 + [False], [True] * 5]


@pytest.mark.parametrize("is_independent", [False, True])
def test_a_task_takes_the_tokens_of_rank_0_where_ranks_generate_together(is_independent: bool) -> None:
    sent: list[torch.Tensor] = []

    class Strategy:
        """Rank 0 has sampled the token 5 each time."""

        def gather_for_generation(self) -> contextlib.AbstractContextManager[bool]:
            return contextlib.nullcontext(is_independent)

        def share_first(self, value: torch.Tensor) -> torch.Tensor:
            sent.append(value)
            return torch.tensor([[5.0], [-1.0]], dtype=torch.float64)

    task: Any = SimpleNamespace(
        tokenizer=byte_tokenizer(),
        model=model_of("gpt2"),
        trainer=SimpleNamespace(
            strategy=Strategy(), precision_plugin=SimpleNamespace(forward_context=contextlib.nullcontext)
        ),
    )
    texts = LanguageModeling.generate_texts(task, [1, 2], 3, sampling=Sampling(), seeds=[0])
    assert (texts == ["\x05\x05\x05"], len(sent)) == ((False, 0) if is_independent else (True, 3))


def test_a_diverged_model_generates_nothing_instead_of_ending_the_run() -> None:
    model = model_of("gpt2")
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    assert generate(model, [1, 2], 5, temperature=1.0, top_k=None, top_p=0.9, seed=0) == []


def test_a_temperature_that_float32_cannot_divide_by_is_greedy() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0])
    probabilities = Sampling(temperature=1e-300).probabilities(logits)
    assert probabilities.tolist() == [0.0, 1.0, 0.0]


def tokens_of(answers: list[Completion]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


PROMPTS = [[1, 2, 3], [7], [4, 5, 6, 7, 8, 9, 10], [3, 3]]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompts_of_different_lengths_are_continued_together_as_alone(architecture: str, temperature: float) -> None:
    model = model_of(architecture)
    settings: Any = {"temperature": temperature, "top_k": None, "top_p": 0.9}
    together = tokens_of(generate_rows(model, PROMPTS, 9, sampling=Sampling(**settings), seeds=[0, 1, 2, 3], ends=[]))
    for index, prompt in enumerate(PROMPTS):
        assert together[index] == generate(model, prompt, 9, **settings, seed=index)
    assert len({tuple(tokens) for tokens in together}) == 4


def test_an_answer_ends_at_its_own_end_and_the_others_go_on() -> None:
    model = model_of("llama")
    settings: Any = {"temperature": 0.0, "top_k": None, "top_p": None}
    whole = tokens_of(generate_rows(model, PROMPTS, 9, sampling=Sampling(**settings), seeds=range(4), ends=[]))
    end = whole[0][3]
    answers = generate_rows(model, PROMPTS, 9, sampling=Sampling(**settings), seeds=range(4), ends=[end])
    assert [answer.has_ended for answer in answers] == [end in full for full in whole]
    cut = tokens_of(answers)
    for answer, full in zip(cut, whole, strict=True):
        assert answer == (full[: full.index(end)] if end in full else full)
    assert len(cut[0]) == whole[0].index(end) < 9
    assert max(map(len, cut)) == 9


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_answer_ends_where_the_window_does_whatever_the_others_do(architecture: str) -> None:
    model = model_of(architecture)
    settings: Any = {"temperature": 0.0, "top_k": None, "top_p": None}
    prompts = [[5] * 14, [1], [5] * MAX_SEQ_LEN]
    answers = tokens_of(generate_rows(model, prompts, 20, sampling=Sampling(**settings), seeds=range(3), ends=[]))
    assert [len(answer) for answer in answers] == [2, 15, 0]
    assert answers[1] == generate(model, [1], 15, **settings, seed=0)
    assert answers[0] == generate(model, [5] * 14, 2, **settings, seed=0)


def test_ranks_go_on_until_all_have_ended() -> None:
    model, asked = model_of("gpt2"), []

    def all_ended(ended: bool) -> bool:
        asked.append(ended)
        return len(asked) == 5

    first = generate(model, [1, 2, 3], 1, temperature=0.0, top_k=None, top_p=None, seed=0)
    sampling = Sampling(temperature=0.0)
    [answer] = generate_rows(model, [[1, 2, 3]], 9, sampling=sampling, seeds=[0], ends=first, all_ended=all_ended)
    assert (answer.tokens, answer.has_ended) == ([], True)
    assert asked == [True] * 5


def test_a_rank_whose_windows_are_full_does_not_leave_the_others_waiting() -> None:
    calls = []
    for prompt in ([1] * (MAX_SEQ_LEN - 1), [1, 2]):
        asked: list[bool] = []
        sampling = Sampling(temperature=0.0)
        generate_rows(
            model_of("gpt2"), [prompt], 6, sampling=sampling, seeds=[0], all_ended=lambda e, a=asked: a.append(e)
        )
        calls.append(len(asked))
    assert calls == [6, 6]


def test_an_answer_ends_after_the_token_that_completes_it_and_the_others_go_on() -> None:
    model = model_of("llama")
    settings: Any = {"sampling": Sampling(temperature=0.0), "seeds": range(4)}
    whole = tokens_of(generate_rows(model, PROMPTS, 9, **settings))
    last = whole[0][3:5]
    answers = generate_rows(model, PROMPTS, 9, **settings, is_complete=lambda tokens: tokens[-2:] == last)
    assert (answers[0].tokens, answers[0].has_ended) == (whole[0][:5], True)
    assert [answer.tokens for answer in answers[1:] if not answer.has_ended] == [
        full for answer, full in zip(answers[1:], whole[1:], strict=True) if not answer.has_ended
    ]
    assert max(len(answer.tokens) for answer in answers) == 9


def test_a_prompt_beyond_the_window_is_rejected() -> None:
    with pytest.raises(ConfigError, match="a prompt of 17 tokens: the model reads 16"):
        generate_rows(model_of("gpt2"), [[1] * 17], 2, sampling=Sampling(temperature=0.0), seeds=[0])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 12}, {"top_p": 0.8}, {"min_p": 0.1}])
def test_a_row_has_the_tokens_of_multinomial_with_a_generator_of_its_seed(
    architecture: str, settings: dict[str, Any]
) -> None:
    model, sampling = model_of(architecture).eval(), Sampling(**settings)
    completions = generate_rows(model, PROMPTS, 8, sampling=sampling, seeds=range(40, 48), num_samples=2)
    for row, completion in enumerate(completions):
        generator = torch.Generator().manual_seed(40 + row)
        tokens = list(PROMPTS[row // 2])
        for log_probability in completion.log_probabilities:
            probabilities = sampling.probabilities(model(torch.tensor([tokens]))[0, -1].detach())
            tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
            # one row and position in the same sums: float32 rounding
            assert log_probability == pytest.approx(math.log(probabilities[tokens[-1]]), abs=1e-5)
        assert tokens == [*PROMPTS[row // 2], *completion.tokens]
        assert len(completion.log_probabilities) == 8


def test_log_probabilities_of_greedy_tokens_are_the_models_own() -> None:
    model = model_of("llama").eval()
    [completion] = generate_rows(model, [[1, 2, 3]], 9, sampling=Sampling(temperature=0.0), seeds=[0])
    tokens = torch.tensor([[1, 2, 3, *completion.tokens]])
    expected = model(tokens)[0, 2:-1].log_softmax(-1).gather(-1, tokens[0, 3:, None])[:, 0].tolist()
    assert completion.log_probabilities == pytest.approx(expected, abs=1e-5)


def test_the_log_probability_of_a_stop_token_is_the_last_one() -> None:
    model = model_of("llama")
    [whole] = generate_rows(model, [[1, 2, 3]], 9, sampling=Sampling(), seeds=[1])
    end = whole.tokens[4]
    first = whole.tokens.index(end)
    [cut] = generate_rows(model, [[1, 2, 3]], 9, sampling=Sampling(), seeds=[1], ends=[end])
    assert (cut.stop_token, cut.has_ended, cut.tokens) == (end, True, whole.tokens[:first])
    assert cut.log_probabilities == whole.log_probabilities[: first + 1]


def test_samples_share_the_prefill_and_rows_that_have_ended_leave_the_batch() -> None:
    model = model_of("llama")
    settings: Any = {"sampling": Sampling(), "seeds": range(8), "num_samples": 4}
    whole = generate_rows(model, PROMPTS[:2], 9, **settings)
    ends = [whole[5].tokens[2]]
    seen: list[tuple[int, ...]] = []
    handle = model.embedding.register_forward_pre_hook(lambda module, inputs: seen.append(tuple(inputs[0].shape)))
    completions = generate_rows(model, PROMPTS[:2], 9, **settings, ends=ends)
    handle.remove()
    drawn = [len(completion.log_probabilities) for completion in completions]
    assert seen == [(2, 3), *[(sum(number > step for number in drawn), 1) for step in range(1, max(drawn))]]
    assert min(drawn) <= 3
    for completion, full in zip(completions, tokens_of(whole), strict=True):
        assert completion.tokens == (full[: full.index(ends[0])] if ends[0] in full else full)


def test_windows_of_different_lengths_slide_each_at_its_own_time() -> None:
    model, sampling = model_of("gpt2"), Sampling(temperature=0.8)
    together = tokens_of(generate_rows(model, PROMPTS, 40, sampling=sampling, seeds=range(4), slides=True))
    for index, prompt in enumerate(PROMPTS):
        assert together[index] == generate(model, prompt, 40, temperature=0.8, top_k=None, top_p=None, seed=index)
    without = generate_rows(model, PROMPTS, 40, sampling=sampling, seeds=range(4), slides=True, use_cache=False)
    assert together == tokens_of(without)


def test_memory_is_allocated_by_the_first_tokens_alone() -> None:
    model = model_of("gpt2").eval()
    cache = KeyValueCache(num_layers=2, capacity=8, padding=torch.tensor([0, 2]))
    with torch.no_grad():
        model(torch.ones(2, 4, dtype=torch.int64), cache=cache)
        places = {id(layer._keys) for layer in cache.layers}
        model(torch.ones(2, 1, dtype=torch.int64), cache=cache)
        cache.keep([1])  # of the shorter one, 3 tokens
        model(torch.ones(1, 1, dtype=torch.int64), cache=cache)
    assert places == {id(layer._keys) for layer in cache.layers}
    assert (cache.length, cache.padding) == (4, None)
