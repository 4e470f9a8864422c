"""The words of a sweep against Hydra's own reading of them."""

import math

import pytest
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from recipes.config.compose import CONF, parse_override
from recipes.sweep.search_space import Choice, Interval, SearchSpace, read_space

FREE_RANGES = ["range(5)", "range(1,10)", "range(1,10,3)", "range(10,1,-2)", "range(-3,3)"]
FLOAT_RANGES = ["range(0,1,0.1)", "range(0.5,2.75,0.25)", "range(1,0,-0.3)", "float(range(1,4))"]


def space_of(*words: str) -> SearchSpace:
    space, mistakes = read_space(words)
    assert mistakes == []
    return space


def only(word: str) -> Choice | Interval:
    [found] = space_of(word).parameters.values()
    return found


@pytest.mark.parametrize(
    ("word", "interval"),
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
def test_an_interval_has_the_ends_that_can_be_drawn(word: str, interval: Interval) -> None:
    found = only(word)
    assert found == interval
    assert isinstance(found, Interval)
    assert {type(found.low), type(found.high)} == {int if interval.is_integer else float}


@pytest.mark.parametrize("word", FREE_RANGES + FLOAT_RANGES)
def test_a_range_has_the_values_that_hydra_counts(word: str) -> None:
    found = only(f"x={word}")
    assert isinstance(found, Interval)
    counted = sorted(parse_override(f"x={word}").sweep_iterator())
    assert found.values() == pytest.approx(counted, rel=1e-15, abs=1e-15)
    assert {type(value) for value in found.values()} == {type(value) for value in counted}
    assert (found.low, found.high) == pytest.approx((counted[0], counted[-1]), rel=1e-15)


@pytest.mark.parametrize(
    ("word", "options"),
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
def test_a_choice_has_the_options_of_hydras_own_sweeper(word: str, options: tuple[str]) -> None:
    found = only(word)
    assert isinstance(found, Choice)
    assert found.options == options
    key = parse_override(word).get_key_element()
    ours = [parse_override(f"{key}={option}").value() for option in options]
    [jobs] = BasicSweeper.split_arguments([parse_override(word)], None)
    hydras = [parse_override(one).value() for [one] in jobs]
    if "shuffle" in word:
        hydras.sort(key=ours.index)
    assert repr(ours) == repr(hydras)
    assert repr(list(found.values)) == repr(hydras)


def test_text_in_quotes_stays_text_where_hydras_own_sweeper_makes_it_a_number() -> None:
    found = only("x=choice('1',2)")
    assert found == Choice(options=("'1'", "2"), values=("1", 2))
    [[[hydras], _]] = BasicSweeper.split_arguments([parse_override("x=choice('1',2)")], None)
    assert hydras == "x=1"


def test_a_glob_is_the_options_of_its_group() -> None:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        space, mistakes = read_space(["model=glob(gpt2*,exclude=*l*)"], config_loader=loader)
        _, none = read_space(["model=glob(nothing*)"], config_loader=loader)
    assert mistakes == []
    assert space.parameters["model"] == Choice(
        options=("gpt2", "gpt2_medium", "gpt2_nano"), values=("gpt2", "gpt2_medium", "gpt2_nano")
    )
    assert [mistake.reason for mistake in none] == ["no option is of that name"]


def test_later_words_replace_earlier_ones_whatever_they_did_with_the_key() -> None:
    space = space_of(
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
    words = ["a=1e-4", "b='1'", "c=[a,'b,c',{d:${e}}]", "+d=null", "~e", "f=", "g@h.i=j", "k=a b"]
    space = space_of(*words)
    parser = OverridesParser.create()
    before, after = parser.parse_overrides(words), parser.parse_overrides(space.fixed)
    assert [repr(o.value()) for o in after] == [repr(o.value()) for o in before]
    assert [o.get_key_element() for o in after] == [o.get_key_element() for o in before]


def test_a_shuffled_list_is_one_list_for_every_run() -> None:
    [fixed] = space_of("x=shuffle([1,2,3,4,5,6,7,8])").fixed
    assert len({repr(parse_override(fixed).value()) for _ in range(10)}) == 1
    assert sorted(parse_override(fixed).value()) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("word", "why", "fix"),
    [
        ("x=interval(2,1)", "2.0 is greater than 1.0", "x=interval(1.0,2.0)"),
        (
            "x=tag(log,interval(2,1))",
            "2.0 is greater than 1.0",
            "x=tag(log,interval(1.0,2.0))",
        ),
        (
            "x=tag(log,interval(0,1))",
            "0.0 has no logarithm",
            "x=tag(log,interval(<above 0>,1.0))",
        ),
        (
            "x=tag(log,range(0,9))",
            "0 has no logarithm",
            "x=tag(log,interval(<above 0>,8))",
        ),
        ("x=interval(0,inf)", "its ends must be numbers", "x=interval(<low>,<high>)"),
        ("x=interval(nan,1)", "its ends must be numbers", "x=interval(<low>,<high>)"),
        ("x=range(3,1)", "it is empty", "x=range(<low>,<high>)"),
        ("x=range(1,3,0)", "it has no end", "x=range(<low>,<high>,<step>)"),
        ("x=range(0,inf,0.5)", "it has no end", "x=range(<low>,<high>,<step>)"),
        (
            "x=tag(log,range(2,9,2))",
            "its steps are no equal ratios",
            "x=tag(log,interval(<low>,<high>))",
        ),
        (
            "x=tag(log,choice(1,2))",
            "single values have no scale",
            "x=tag(log,interval(<low>,<high>)), or no tag",
        ),
        ("x=tag(lg,interval(1,2))", "the tag 'lg' means nothing here", "tag(log,<a sweep>)"),
        ("x=1e-3,0.001,2", "0.001 is named twice", "x=0.001,2"),
        ("model=glob(*)", "there are no options to choose from", "model=<options>"),
    ],
)
def test_what_cannot_be_searched_is_a_mistake(word: str, why: str, fix: str) -> None:
    space, [mistake] = read_space([word, "y=1,2"])
    assert (mistake.setting, mistake.reason, mistake.fix) == (word, why, fix)
    assert list(space.parameters) == ["y"]


@pytest.mark.parametrize(
    "word",
    ["x=choice()", "x=interval(a,b)", "x=int(interval(0,inf))", "x=[1", "x=[1,choice(1,2)]", "=,"],
)
def test_what_hydra_cannot_read_is_a_mistake_with_its_reason(word: str) -> None:
    space, [mistake] = read_space([word, "y=1,2"])
    assert mistake.setting.startswith("x=") or word == "=,"
    assert mistake.reason
    assert list(space.parameters) == ["y"]


def test_a_range_of_a_trillion_costs_nothing() -> None:
    found = only("x=range(0,1_000_000_000_000,0.5)")
    assert found == Interval(low=0.0, high=1e12 - 0.5, step=0.5)
    assert math.isfinite(found.high)
