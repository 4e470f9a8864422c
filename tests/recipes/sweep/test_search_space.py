"""Sweep overrides as parameters, compared with how Hydra itself reads them."""

import math

import pytest
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from recipes.config.compose import CONF
from recipes.config.overrides import parse_override
from recipes.sweep.search_space import Choice, Interval, SearchSpace, read_space

INT_RANGES = ["range(5)", "range(1,10)", "range(1,10,3)", "range(10,1,-2)", "range(-3,3)"]
FLOAT_RANGES = ["range(0,1,0.1)", "range(0.5,2.75,0.25)", "range(1,0,-0.3)", "float(range(1,4))"]


def parse_space(*overrides: str) -> SearchSpace:
    space, mistakes = read_space(overrides)
    assert mistakes == []
    return space


def parse_parameter(override: str) -> Choice | Interval:
    [parameter] = parse_space(override).parameters.values()
    return parameter


@pytest.mark.parametrize(
    ("override", "interval"),
    [
        ("x=interval(0.001,0.1)", Interval(low=0.001, high=0.1)),
        ("x=interval(1,8)", Interval(low=1.0, high=8.0)),
        ("x=tag(log,interval(1e-4,1e-2))", Interval(low=1e-4, high=1e-2, log=True)),
        ("x=int(interval(2,8))", Interval(low=2, high=8, is_integer=True)),
        ("x=tag(log,int(interval(8,512)))", Interval(low=8, high=512, log=True, is_integer=True)),
        ("x=int(tag(log,interval(8,512)))", Interval(low=8, high=512, log=True, is_integer=True)),
        ("x=range(1,10)", Interval(low=1, high=9, is_integer=True, step=1)),
        ("x=range(1,10,step=2)", Interval(low=1, high=9, is_integer=True, step=2)),
        ("x=range(1,11,3)", Interval(low=1, high=10, is_integer=True, step=3)),
        ("x=range(10,1,-2)", Interval(low=2, high=10, is_integer=True, step=2)),
        ("x=shuffle(range(4))", Interval(low=0, high=3, is_integer=True, step=1)),
        ("x=range(0.5,2,0.5)", Interval(low=0.5, high=1.5, step=0.5)),
        ("x=tag(log,range(8,65))", Interval(low=8, high=64, log=True, is_integer=True, step=1)),
    ],
)
def test_an_interval_has_the_bounds_that_can_be_sampled(override: str, interval: Interval) -> None:
    found = parse_parameter(override)
    assert found == interval
    assert isinstance(found, Interval)
    assert {type(found.low), type(found.high)} == {int if interval.is_integer else float}


@pytest.mark.parametrize("swept_range", INT_RANGES + FLOAT_RANGES)
def test_a_range_has_the_values_that_hydra_enumerates(swept_range: str) -> None:
    found = parse_parameter(f"x={swept_range}")
    assert isinstance(found, Interval)
    expected = sorted(parse_override(f"x={swept_range}").sweep_iterator())
    assert found.values() == pytest.approx(expected, rel=1e-15, abs=1e-15)
    assert {type(value) for value in found.values()} == {type(value) for value in expected}
    assert (found.low, found.high) == pytest.approx((expected[0], expected[-1]), rel=1e-15)


@pytest.mark.parametrize(
    ("override", "options"),
    [
        ("model=gpt2_nano,llama_nano", ("gpt2_nano", "llama_nano")),
        ("precision=32-true,bf16-mixed,16-mixed", ("32-true", "bf16-mixed", "16-mixed")),
        ("lr=1e-4,3e-4,1e-3", ("0.0001", "0.0003", "0.001")),
        ("x=choice(1,1.0,true,a)", ("1", "1.0", "true", "a")),
        ("x=null,1", ("null", "1")),
        ("x=shuffle(c,a,b)", ("c", "a", "b")),
        ("x=sort(c,a,b)", ("a", "b", "c")),
        ("x='a,b',\"c d\",''", ("'a,b'", "c d", "")),
        ("betas=[0.9,0.95],[0.9,0.999]", ("[0.9,0.95]", "[0.9,0.999]")),
        ("+x.y=int(1.0,2.0)", ("1", "2")),
        ("x=${seed},2", ("${seed}", "2")),
    ],
)
def test_a_choice_has_the_options_of_hydras_own_sweeper(override: str, options: tuple[str]) -> None:
    found = parse_parameter(override)
    assert isinstance(found, Choice)
    assert found.options == options
    key = parse_override(override).get_key_element()
    values = [parse_override(f"{key}={option}").value() for option in options]
    [jobs] = BasicSweeper.split_arguments([parse_override(override)], None)
    expected = [parse_override(job).value() for [job] in jobs]
    if "shuffle" in override:
        expected.sort(key=values.index)
    assert repr(values) == repr(expected)
    assert repr(list(found.values)) == repr(expected)


def test_quoted_text_stays_text_where_hydras_own_sweeper_turns_it_into_a_number() -> None:
    found = parse_parameter("x=choice('1',2)")
    assert found == Choice(options=("'1'", "2"), values=("1", 2))
    [[[first], _]] = BasicSweeper.split_arguments([parse_override("x=choice('1',2)")], None)
    assert first == "x=1"


def test_a_glob_has_the_matching_options_of_its_group() -> None:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        space, mistakes = read_space(["model=glob(gpt2*,exclude=*l*)"], config_loader=loader)
        _, none = read_space(["model=glob(nothing*)"], config_loader=loader)
    assert mistakes == []
    assert space.parameters["model"] == Choice(
        options=("gpt2", "gpt2_medium", "gpt2_nano"), values=("gpt2", "gpt2_medium", "gpt2_nano")
    )
    assert [mistake.reason for mistake in none] == ["no option matches"]


def test_a_later_override_replaces_an_earlier_one_of_the_same_key() -> None:
    space = parse_space(
        *("optimizer.lr=1e-3,1e-2", "model=gpt2_nano,llama_nano", "+callbacks.x={a:1}"),
        *(
            "seed=1",
            "~callbacks.report",
            "optimizer.lr=interval(0.1,0.2)",
            "model=gpt2_nano",
        ),
        *("seed=range(3)", "callbacks.x=null", "name='a b'"),
    )
    assert space.parameters == {
        "optimizer.lr": Interval(low=0.1, high=0.2),
        "seed": Interval(low=0, high=2, is_integer=True, step=1),
    }
    assert space.fixed == [
        "~callbacks.report",
        "model=gpt2_nano",
        "callbacks.x=null",
        "name=a b",
    ]


def test_fixed_words_are_read_by_hydra_as_they_were() -> None:
    overrides = ["a=1e-4", "b='1'", "c=[a,'b,c',{d:${e}}]", "+d=null", "~e", "f=", "g@h.i=j", "k=a b"]
    space = parse_space(*overrides)
    parser = OverridesParser.create()
    before, after = parser.parse_overrides(overrides), parser.parse_overrides(space.fixed)
    assert [repr(o.value()) for o in after] == [repr(o.value()) for o in before]
    assert [o.get_key_element() for o in after] == [o.get_key_element() for o in before]


def test_a_shuffled_list_is_one_list_for_every_run() -> None:
    [fixed] = parse_space("x=shuffle([1,2,3,4,5,6,7,8])").fixed
    assert len({repr(parse_override(fixed).value()) for _ in range(10)}) == 1
    assert sorted(parse_override(fixed).value()) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("override", "reason", "fix"),
    [
        ("x=interval(2,1)", "its lower end, 2.0, is above its upper end, 1.0", "'x=interval(1.0,2.0)'"),
        (
            "x=tag(log,interval(2,1))",
            "its lower end, 2.0, is above its upper end, 1.0",
            "'x=tag(log,interval(1.0,2.0))'",
        ),
        (
            "x=tag(log,interval(0,1))",
            "0 has no logarithm",
            "'x=tag(log,interval(<above 0>,1.0))'",
        ),
        (
            "x=tag(log,range(0,9))",
            "0 has no logarithm",
            "'x=tag(log,interval(<above 0>,8))'",
        ),
        ("x=interval(0,inf)", "both ends must be finite", "'x=interval(<low>,<high>)'"),
        ("x=interval(nan,1)", "both ends must be finite", "'x=interval(<low>,<high>)'"),
        ("x=range(3,1)", "the sweep has no values", "'x=range(<low>,<high>)'"),
        ("x=range(1,3,0)", "the range never ends", "'x=range(<low>,<high>,<step>)'"),
        ("x=range(0,inf,0.5)", "the range never ends", "'x=range(<low>,<high>,<step>)'"),
        (
            "x=tag(log,range(2,9,2))",
            "its steps are not equal ratios",
            "'x=tag(log,interval(<low>,<high>))'",
        ),
        (
            "x=tag(log,choice(1,2))",
            "a list of values has no scale",
            "'x=tag(log,interval(<low>,<high>))', or the values without the tag",
        ),
        ("x=tag(lg,interval(1,2))", "there is no tag 'lg': the only one is log", "'x=tag(log,interval(1,2))'"),
        ("x=1e-3,0.001,2", "0.001 is listed twice", "x=0.001,2"),
        ("model=glob(*)", "the options of the group are not known here", "model=<options>"),
    ],
)
def test_a_parameter_that_cannot_be_sampled_is_reported(override: str, reason: str, fix: str) -> None:
    space, [mistake] = read_space([override, "y=1,2"])
    assert (mistake.setting, mistake.reason, mistake.fix) == (override, reason, fix)
    assert list(space.parameters) == ["y"]


@pytest.mark.parametrize(
    "override",
    ["x=choice()", "x=interval(a,b)", "x=int(interval(0,inf))", "x=[1", "x=[1,choice(1,2)]", "=,"],
)
def test_an_override_that_hydra_cannot_parse_is_reported_with_its_reason(override: str) -> None:
    space, [mistake] = read_space([override, "y=1,2"])
    assert mistake.setting.startswith("x=") or override == "=,"
    assert mistake.reason
    assert list(space.parameters) == ["y"]


def test_a_range_of_a_trillion_values_is_not_enumerated() -> None:
    found = parse_parameter("x=range(0,1_000_000_000_000,0.5)")
    assert found == Interval(low=0.0, high=1e12 - 0.5, step=0.5)
    assert math.isfinite(found.high)
