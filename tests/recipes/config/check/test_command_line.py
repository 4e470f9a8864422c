"""Unit tests of the check of single overrides: every kind of message, and what composes nevertheless."""

import pytest

from recipes.config.check.command_line import _find_nearest, _parse, _sift, compose_typed
from recipes.config.check.sections import CONF
from recipes.errors import ConfigError


def clauses(*overrides: str) -> list[tuple[str, str, str]]:
    _, mistakes = compose_typed(overrides)
    return [(mistake.setting, mistake.reason, mistake.fix) for mistake in mistakes]


def fixes(*overrides: str) -> list[str]:
    return [fix for *_, fix in clauses(*overrides)]


def test_a_correct_command_line_composes_without_mistakes() -> None:
    composed, mistakes = compose_typed(["model=llama_nano", "seed=3", "~callbacks.report"])
    assert composed is not None
    assert mistakes == []
    assert composed.choices["model"] == "llama_nano"
    assert composed.config["seed"] == 3
    assert "report" not in composed.config["callbacks"]


def test_good_overrides_are_sifted_from_bad_ones_in_the_order_typed() -> None:
    typed = ["model=gtp2", "seed=3", "optimizer.lrr=1", "optimizer=sgd", "foo", "log_every=2"]
    good, mistakes = _sift(typed, CONF, "config")
    assert good == ["optimizer=sgd", "seed=3", "log_every=2"]
    assert [mistake.setting for mistake in mistakes] == ["model=gtp2", "foo", "optimizer.lrr=1"]


def test_the_run_is_composed_without_its_bad_overrides() -> None:
    composed, mistakes = compose_typed(["optimizer.lrr=1", "model=gtp2", "optimizer=sgd", "seed=3"])
    assert len(mistakes) == 2
    assert composed is not None
    assert composed.overrides == ["optimizer=sgd", "seed=3"]
    assert composed.config["optimizer"]["lr"] == 0.1


@pytest.mark.parametrize(
    ("typed", "good"),
    [
        ("trainer.benchmark=true", "+trainer.benchmark=true"),  # an argument the YAML does not list
        ("callbacks.grad_norm.per_block=true", "+callbacks.grad_norm.per_block=true"),
        ("+trainer.benchmark=true", "+trainer.benchmark=true"),
        ("++seed=3", "++seed=3"),
        ("trainer.max_steps=3", "trainer.max_steps=3"),
    ],
)
def test_an_argument_that_the_target_accepts_gets_its_plus(typed: str, good: str) -> None:
    assert _sift([typed], CONF, "config") == ([good], [])


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("seed=3", "seed=3"),
        ("name=f(x", "name='f(x'"),
        ("name=it's {here}", "name='it\\'s {here}'"),
        ("optimizer.betas=[0.9,0.95]", "optimizer.betas=[0.9,0.95]"),
    ],
)
def test_only_text_that_hydra_cannot_read_is_quoted(typed: str, text: str) -> None:
    override, written = _parse(typed)
    assert override is not None
    assert written == text
    assert override.value() == typed.partition("=")[2] or written == typed


def test_text_without_an_equals_sign_is_no_override() -> None:
    assert _parse("foo") == (None, "foo")
    assert clauses("foo") == [("foo", "it is not key=value", "key=value")]


@pytest.mark.parametrize("option", ["nan", "16", "null", "true", "inf"])
def test_an_option_that_looks_like_a_number_is_taken_by_its_name(option: str) -> None:
    [(setting, reason, _)] = clauses(f"optimizer={option}")
    assert (setting, reason) == (
        f"optimizer='{option}'",
        "the options are adam adamw adamw_nano sgd",
    )


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("precision=bf16", "precision=bf16-mixed"),
        ("precision=16", "precision=16-mixed"),
        ("precision=fp32", "precision=32-true"),
        ("strategy=fsdp2", "strategy=fsdp"),
        ("strategy=deepspeed", "strategy=deepspeed_stage_2"),
        ("strategy=zero3", "strategy=deepspeed_stage_3"),
        ("recipe=zero1", "recipe=zero1_bf16"),
        ("recipe=single", "recipe=single_bf16"),
        ("model=gtp2", "model=gpt2"),
        ("optimizer=zzz", "optimizer=<option>"),
        ("callbacks=[grad_norm,progres]", "callbacks=progress"),
    ],
)
def test_an_unknown_option_is_answered_with_its_alias_or_the_nearest_name(typed: str, fix: str) -> None:
    assert fixes(typed) == [fix]


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("batch_size=8", "global_batch_size=8"),
        ("trainer.gpus=2", "trainer.devices=2"),
        ("epochs=3", "trainer.max_steps=3"),
        ("checkpoint_every=5", "save_every=5"),
        ("ckpt_path=x", "resume=x"),
        ("lr=1", "optimizer.lr=1"),  # the section that has it
        ("optimizer.lrr=1", "optimizer.lr=1"),
        ("modle=gpt2", "model=gpt2"),
        ("presicion=16-mixed", "precision=16-mixed"),
        ("~callbacks.sampletext", "'~callbacks.sample_text'"),
        ("~optimizer.lrr", "'~optimizer.lr'"),
        (
            "strategy.offload=true",
            "strategy=fsdp strategy.cpu_offload=true, or strategy=deepspeed_stage_2_offload",
        ),
        ("callbacks.stop_at_nan.x=1", "+callbacks=stop_at_nan, which adds it"),
        ("strategy.buckets=3", "nothing for strategy.buckets"),
        ("qqqq=1", "python train.py --help for the list of settings"),
        (
            "optimizer.zzz=1",
            "one of optimizer.lr= optimizer.betas= optimizer.eps= optimizer.weight_decay=",
        ),
    ],
)
def test_a_key_that_does_not_exist_is_answered_with_what_was_meant(typed: str, fix: str) -> None:
    [(setting, reason, found)] = clauses(typed)
    assert setting == typed
    assert reason == f"there is no {typed.lstrip('~').partition('=')[0]!r}"
    assert found == fix


def test_a_group_that_has_the_option_typed_is_nearer_than_a_similar_name() -> None:
    assert _find_nearest([], ["modl"], ["mode", "model"], "gpt2") == "model=gpt2"
    assert _find_nearest([], ["modl"], ["mode", "model"], "evaluate") == "mode=evaluate"
    assert _find_nearest(["a"], ["lr", "x"], ["lrr"], "1") == "a.lrr.x=1"


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        ("model=gpt2,llama_nano", "a single run takes one option"),
        ("seed=1,2", "a single run takes one value"),
        ("optimizer.lr=interval(1e-4,1e-2)", "a single run takes one value"),
    ],
)
def test_a_sweep_needs_m(typed: str, reason: str) -> None:
    assert clauses(typed) == [(typed, reason, f"python train.py -m {typed}")]


def test_an_interpolation_of_a_missing_key_names_the_key_that_holds_it() -> None:
    [(setting, reason, fix)] = clauses("seed=${nothing}")
    assert (setting, fix) == ("seed=…", "seed=<value> on the command line")
    assert "nothing" in reason


def test_every_mistake_has_three_clauses_that_say_something() -> None:
    _, mistakes = compose_typed(["foo", "model=x", "lrr=1", "optimizer.zzz=1", "seed=1,2"])
    assert len(mistakes) == 5
    for mistake in mistakes:
        assert isinstance(mistake, ConfigError)
        assert all((mistake.setting, mistake.reason, mistake.fix))
