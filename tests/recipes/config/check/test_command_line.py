"""Each error of a command-line override, and the config composed from the overrides that are valid."""

import pytest

from recipes.config import compose_and_check
from recipes.config.check.command_line import _split_valid, compose_typed, parse_or_quote
from recipes.config.check.sections import CONF
from recipes.config.check.suggestions import find_nearest
from recipes.config.overrides import for_shell
from recipes.errors import ConfigError


def error_fields(*overrides: str) -> list[tuple[str, str, str]]:
    _, mistakes = compose_typed(overrides)
    return [(mistake.setting, mistake.reason, mistake.fix) for mistake in mistakes]


def fixes(*overrides: str) -> list[str]:
    return [fix for *_, fix in error_fields(*overrides)]


def test_a_correct_command_line_composes_without_mistakes() -> None:
    composed, mistakes = compose_typed(["model=llama_nano", "seed=3", "~callbacks.report"])
    assert composed is not None
    assert mistakes == []
    assert composed.choices["model"] == "llama_nano"
    assert composed.config["seed"] == 3
    assert "report" not in composed.config["callbacks"]


def test_valid_overrides_are_separated_from_invalid_ones_with_choices_of_groups_first() -> None:
    typed = ["model=gtp2", "seed=3", "optimizer.lrr=1", "optimizer=sgd", "foo", "log_every=2"]
    valid, mistakes = _split_valid(typed, CONF, "config")
    assert valid == ["optimizer=sgd", "seed=3", "log_every=2"]
    assert [mistake.setting for mistake in mistakes] == ["model=gtp2", "foo", "optimizer.lrr=1"]


def test_the_config_is_composed_from_the_valid_overrides() -> None:
    composed, mistakes = compose_typed(["optimizer.lrr=1", "model=gtp2", "optimizer=sgd", "seed=3"])
    assert len(mistakes) == 2
    assert composed is not None
    assert composed.overrides == ["optimizer=sgd", "seed=3"]
    assert composed.config["optimizer"]["nesterov"] is True


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("trainer.detect_anomaly=true", "++trainer.detect_anomaly=true"),  # an argument the YAML does not list
        ("callbacks.grad_norm.per_block=true", "++callbacks.grad_norm.per_block=true"),
        ("+trainer.detect_anomaly=true", "+trainer.detect_anomaly=true"),
        ("++seed=3", "++seed=3"),
        ("trainer.max_steps=3", "trainer.max_steps=3"),
    ],
)
def test_an_argument_that_the_yaml_does_not_list_is_added_with_a_plus(typed: str, expected: str) -> None:
    assert _split_valid([typed], CONF, "config") == ([expected], [])


@pytest.mark.parametrize("later", ["data.fields.prompt=b", "+data.fields.prompt=b", "data.fields={prompt: b}"])
def test_a_setting_within_a_typed_dictionary_replaces_its_value_there(later: str) -> None:
    typed = ["data=conversations", "data.path=x", "data.fields={prompt: a, completion: c}", later]
    composed, mistakes = compose_typed(typed)
    assert mistakes == []
    assert composed is not None
    assert composed.config["data"]["fields"] == {"prompt": "b", "completion": "c"}


def test_a_setting_of_data_beside_a_mixture_is_one_of_a_source() -> None:
    mixture = ["data=mixture", "+data@data.sources.a=text_files", "+data@data.sources.b=synthetic_tasks"]
    assert fixes(*mixture, "data.path=x", "data.text_field=x") == [
        "data.sources.a.path=x",
        "'data.sources.<new name>.text_field=x' with +data@data.sources.<new name>=documents",
    ]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("seed=3", "seed=3"),
        ("name=f(x", "name='f(x'"),
        ("name=it's {here}", "name='it\\'s {here}'"),
        ("optimizer.betas=[0.9,0.95]", "optimizer.betas=[0.9,0.95]"),
    ],
)
def test_only_values_that_hydra_cannot_parse_are_quoted(typed: str, expected: str) -> None:
    override, rendered = parse_or_quote(typed)
    assert override is not None
    assert rendered == expected
    assert override.value() == typed.partition("=")[2] or rendered == typed


def test_a_bare_word_is_rejected() -> None:
    assert parse_or_quote("foo") == (None, "foo")
    assert error_fields("foo") == [
        ("foo", "it is not of the form key=value", "key=value, or the same command without it")
    ]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["optimizer.lr", "=1e-3"], "optimizer.lr=1e-3"),
        (["optimizer.lr=", "1e-3"], "optimizer.lr=1e-3"),
        (["optimizer:lr=1e-3"], "optimizer.lr=1e-3"),
        (["optimizer/lr=1e-3"], "optimizer.lr=1e-3"),
        (["optimizer.lr=‘1e-3’"], "optimizer.lr=1e-3"),  # noqa: RUF001  typed so
        (["–m"], "-m"),  # noqa: RUF001  typed so
        (["python", "train.py"], "python train.py and the settings, once"),
        (["tags=[a,b"], "'tags=[a,b]'"),
        (["tags=[1,a]"], "\"tags=['1',a]\""),
        (["trainer.devices=0,1"], "'trainer.devices=[0,1]'"),
        (["callbacks.hang=null"], "the same command without it"),
        (["metrics.accuracy.top_k=3"], "metrics.token_accuracy.top_k=3"),
        (["hydra.run.dir=file:///data/x y"], "'hydra.run.dir=/data/x y'"),
        (["hydra.run.dir=s3://b/x"], "hydra.run.dir=<a local folder, or one below which the storage is mounted>"),
        (["plan.dollars_per_hour=-1"], "the same command without it, or mode=plan beside it"),
        (["scheduler=wsd", "trainer.max_steps=10"], "warmup_steps=1 scheduler.decay_steps=2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_meant_is_said_once(words: list[str], fix: str) -> None:
    assert [mistake.fix for mistake in compose_and_check(words)[1]] == [fix]


@pytest.mark.parametrize("option", ["nan", "16", "null", "true", "inf"])
def test_option_names_that_yaml_reads_as_a_number_null_or_bool_stay_names(option: str) -> None:
    [(setting, reason, _)] = error_fields(f"optimizer={option}")
    assert (setting, reason) == (
        f"optimizer='{option}'",
        "the options are adafactor adam adamw adamw_8bit lion muon schedule_free sgd",
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
        ("callbacks=[grad_norm,progres]", "callbacks=[grad_norm,progress]"),
        ("logger=many_loggers", "logger=[csv,tensorboard,wandb]"),
        ("trainer=ddp_spawn", "recipe=ddp_bf16"),
        ("fit", "mode=fit"),
        ("validate", "mode=evaluate"),
    ],
)
def test_an_unknown_option_gets_its_alias_or_the_closest_name_suggested(typed: str, fix: str) -> None:
    assert fixes(typed) == [fix]


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("batch_size=8", "global_batch_size=8"),
        ("trainer.gpus=2", "trainer.devices=2"),
        ("test=true", "mode=test resume=<run folder>"),
        ("test=false", "the same command without it"),
        ("train=True", "mode=fit"),
        ("seed_everything=1", "seed=1"),
        ("extras.print_config=true", "--cfg job, which prints the config"),
        ("epochs=3", "trainer.max_steps=3epochs"),
        ("trainer.num_epochs=1", "trainer.max_steps=1epoch"),
        ("max_epochs=many", "trainer.max_steps=3epochs"),
        ("checkpoint_every=5", "save_every=5"),
        ("ckpt_path=x", "resume=x"),
        ("lr=1", "optimizer.lr=1"),  # the only section with this key
        ("optimizer.lrr=1", "optimizer.lr=1"),
        ("modle=gpt2", "model=gpt2"),
        ("presicion=16-mixed", "precision=16-mixed"),
        ("~callbacks.sampletext", "'~callbacks.sample_text'"),
        ("~optimizer.lrr", "'~optimizer.lr'"),
        (
            "strategy.offload=true",
            "strategy=fsdp strategy.cpu_offload=true, or strategy=deepspeed_stage_2_offload",
        ),
        ("callbacks.stop_at_nan.x=1", "callbacks=[default,stop_at_nan] callbacks.stop_at_nan.x=1"),
        ("strategy.buckets=3", "the same command without strategy.buckets"),
        ("qqqq=1", "python train.py --help for the list of settings"),
        (
            "optimizer.zzz=1",
            "one of optimizer.layer_decay= optimizer.groups= optimizer.lr= optimizer.betas= optimizer.eps="
            " optimizer.weight_decay=",
        ),
    ],
)
def test_an_unknown_setting_gets_the_closest_one_suggested(typed: str, fix: str) -> None:
    [(setting, reason, actual_fix)] = error_fields(typed)
    assert setting == typed
    assert reason == f"there is no {typed.lstrip('~').partition('=')[0]!r}"
    assert actual_fix == fix


def test_a_group_with_the_option_is_preferred_over_a_closer_spelling() -> None:
    assert find_nearest([], ["modl"], ["mode", "model"], "gpt2") == "model=gpt2"
    assert find_nearest([], ["modl"], ["mode", "model"], "evaluate") == "mode=evaluate"
    assert find_nearest(["a"], ["lr", "x"], ["lrr"], "1") == "a.lrr.x=1"


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        ("model=gpt2,llama_nano", "a single run takes one option"),
        ("seed=1,2", "a single run takes one value"),
    ],
)
def test_a_sweep_requires_the_flag_m(typed: str, reason: str) -> None:
    assert error_fields(typed) == [(typed, reason, f"python train.py -m {for_shell(typed)}")]


@pytest.mark.parametrize("key", ["hydra.run.dir", "resume"])
def test_a_folder_with_a_comma_is_quoted_and_not_swept_over(key: str) -> None:
    [(setting, reason, fix)] = error_fields(f"{key}=/tmp/a,b")
    assert (setting, reason) == (f"{key}=/tmp/a,b", "a comma separates the values of a sweep")
    assert fix == f"\"{key}='/tmp/a,b'\""
    assert error_fields("hydra.run.dir='/tmp/a,b'") == []


def test_an_unresolved_interpolation_names_the_setting_that_contains_it() -> None:
    [(setting, reason, fix)] = error_fields("seed=${nothing}")
    assert (setting, fix) == ("seed=${nothing}", "seed=<value>, or \\${ instead of ${ where it is text")
    assert "nothing" in reason


def test_every_error_has_a_setting_a_reason_and_a_fix() -> None:
    _, mistakes = compose_typed(["foo", "model=x", "lrr=1", "optimizer.zzz=1", "seed=1,2"])
    assert len(mistakes) == 5
    for mistake in mistakes:
        assert isinstance(mistake, ConfigError)
        assert all((mistake.setting, mistake.reason, mistake.fix))


@pytest.mark.parametrize(
    ("mode", "fix"),
    [
        ("compare", "mode=report"),
        ("validate", "mode=evaluate"),
        ("generate", "mode=sample"),
        ("infer", "mode=sample"),
        ("merge", "mode=export"),
        ("profile", "mode=fit callbacks=[default,step_profiler]"),
        ("train", "mode=fit"),
        ("resume", "mode=fit resume=<run folder>"),
        ("sweep", "mode=fit -m sweep=lr"),
        ("tune", "mode=lr_find"),
        ("preprare", "mode=prepare"),  # a typo
    ],
)
def test_a_mode_that_others_have_is_answered_with_the_one_that_does_it(mode: str, fix: str) -> None:
    assert fixes(f"mode={mode}") == [fix]
    words = [word for word in fix.split() if "=" in word and "<" not in word]
    assert fixes(*words, "resume=x") == []
