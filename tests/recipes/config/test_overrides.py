"""Values written as overrides are read back by Hydra to the last bit and with the same type."""

import math
import random
import struct
from typing import Any

import numpy as np
import pytest

from recipes.config.overrides import drop_replaced, make_override, parse_or_quote, parse_override, to_overrides
from recipes.errors import ConfigError


def read(override: str) -> Any:
    """What Hydra makes of it."""
    return parse_override(override).value()


def test_a_thousand_floats_of_random_bits_are_read_back_as_they_are() -> None:
    random.seed(0)
    for _ in range(1000):
        [value] = struct.unpack("<d", random.randbytes(8))
        got = read(make_override("x", value))
        assert got == value or (math.isnan(got) and math.isnan(value))


@pytest.mark.parametrize(
    "value",
    [
        *[0, -7, 10**30, 0.0, -0.0, 1.0, 1e-05, 1e22, 1e16, 0.1 + 0.2, math.inf, -math.inf],
        *[True, False, None, "", "abc", "true", "Null", "1", "1e-3", "nan", "16-mixed", "32-true"],
        *["a,b", "a=b", "f(x)", "int(3)", "range(1,3)", "glob(*)", "[1,2]", "{a:1}", " x ", "a b"],
        *["it's", 'say "no"', "back\\", "\\'", "a\\b", "~/x", "C:/x", "${seed}", "${oc.env:A,b}"],
        *["line\nline", "tab\t", "ünïcode", "a:b", "100%", "#", "*"],
        *[[1, 2.0, "3", None, True], [], [[1], ["a,b"]], {"a": 1, "b": {"c": "1"}}, {}],
    ],
    ids=repr,
)
def test_a_value_is_read_back_as_it_is(value: object) -> None:
    override = make_override("a.b", value)
    assert parse_override(override).key_or_group == "a.b"
    assert repr(read(override)) == repr(value)


def test_numpys_numbers_are_written_as_pythons() -> None:
    values = [np.float64(0.1), np.int64(3), np.str_("a,b")]
    assert [make_override("+x", value) for value in values] == ["+x=0.1", "+x=3", "+x='a,b'"]


def test_a_value_that_the_grammar_cannot_express_is_an_error() -> None:
    for value in ({"a:b": 1}, {"1": 2}, object()):
        with pytest.raises(ConfigError):
            make_override("x", value)


def test_sweeper_params_given_as_text_are_taken_as_typed() -> None:
    params = {"a": "interval(0,1)", "b": "1,2", "c": 0.1, "d": None, "e": [1, "x"], "f": True}
    assert to_overrides(params) == [
        "a=interval(0,1)",
        "b=1,2",
        "c=0.1",
        "d=null",
        "e=[1,x]",
        "f=true",
    ]
    assert to_overrides(None) == []


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("seed=x -m model=gpt2 seed=2", "-m model=gpt2 seed=2"),
        ("resume=a resume=b resume=a", "resume=a"),
        ("optimizer={lr:1} optimizer={eps:2}", "optimizer={lr:1} optimizer={eps:2}"),  # merged, not replaced
        ("+trainer.benchmark=1 trainer.benchmark=true", "+trainer.benchmark=true"),
        ("optimizer.lr=x ++optimizer.lr=1", "++optimizer.lr=1"),
        ("seed=1,2 seed=3", "seed=3"),
        ("+data@eval_data.a=digits +data@eval_data.b=digits ~seed seed", None),
    ],
)
def test_the_last_value_of_a_setting_counts(typed: str, kept: str | None) -> None:
    assert drop_replaced(typed.split()) == (kept or typed).split()


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("['l, m', é]", ["l, m", "é"]),
        ("[baseline, 'run 3', \"a,b\", naïve]", ["baseline", "run 3", "a,b", "naïve"]),
        ("['lr 1e-3, wd 0.1', größe=3]", ["lr 1e-3, wd 0.1", "größe=3"]),
        ("[it's, ü, b's]", ["it's", "ü", "b's"]),  # apostrophes close nothing
        ("['tis é, 'twas]", ["'tis é", "'twas"]),
        (r"[b\, c, ü]", ["b, c", "ü"]),
        ("[é, [ö, 'a, ü'], 1, null]", ["é", ["ö", "a, ü"], 1, None]),
        ("{a: é, b: 'c, d', c: [ü, 'e, f']}", {"a": "é", "b": "c, d", "c": ["ü", "e, f"]}),
        ("Größe, und", "Größe, und"),
        ("[é, b", "[é, b"),
        ("[]é", "[]é"),
    ],
)
def test_what_the_grammar_cannot_read_is_quoted_value_by_value(typed: str, expected: object) -> None:
    override, text = parse_or_quote(f"x={typed}")
    assert override is not None
    assert override.value() == expected == read(text)


@pytest.mark.parametrize(
    ("typed", "values"),
    [
        ("'é, b',c", ["é, b", "c"]),
        ("é,choice", ["é", "choice"]),
        ("choice(é,1)", ["é", 1]),
        ("[é],[b]", [["é"], ["b"]]),
    ],
)
def test_commas_outside_of_quotes_and_lists_separate_the_values_of_a_sweep(typed: str, values: list[object]) -> None:
    override, _ = parse_or_quote(f"x={typed}", sweeps=True)
    assert override is not None
    assert [override._convert_value(value) for value in read_sweep(override)] == values


def read_sweep(override: Any) -> list[Any]:
    """Values of a sweep as Hydra's grammar holds them."""
    return list(override.value().list)
