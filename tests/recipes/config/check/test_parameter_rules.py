"""Rules on names of parameters are checked before anything is built: what is typed instead is accepted."""

import subprocess
import sys

import pytest
from support import ROOT
from typed_remedies import find_refused

from recipes.config import compose_and_check

_NO_EXPRESSION = "is no regular expression: missing ), unterminated subpattern at position 0"
_ENTRY = "optimizer.groups=[{"
MISTAKES = [
    ("freeze=embedding", "it takes a list of texts", "freeze=[embedding]"),
    ("freeze=['(']", f"'(' {_NO_EXPRESSION}", None),
    ("optimizer.layer_decay=1.5", "it must be above 0 and at most 1", None),
    ("optimizer.layer_decay=abc", "it takes a number or null", "optimizer.layer_decay=0.75"),
    (f"{_ENTRY}match: '(', lr_scale: 2}}]", f"'(' {_NO_EXPRESSION}", None),
    (f"{_ENTRY}macth: head, lr_scale: 2}}]", "an entry has match, lr_scale, weight_decay, freeze, and no macth", None),
    (f"{_ENTRY}match: head, rate: 2}}]", "an entry has match, lr_scale, weight_decay, freeze, and no rate", None),
    (f"{_ENTRY}lr_scale: 2}}]", "an entry names its parameters with match, a regular expression", None),
    (f"{_ENTRY}match: head}}]", "it says nothing of what it matches: lr_scale, weight_decay or freeze", None),
    (f"{_ENTRY}match: head, lr_scale: 0}}]", "lr_scale must be above 0", None),
    (f"{_ENTRY}match: head, weight_decay: -1}}]", "weight_decay must be at least 0", None),
    (f"{_ENTRY}match: head, freeze: 3}}]", "freeze takes true or false or null", None),
    (
        f"{_ENTRY}match: head, freeze: true, lr_scale: 2}}]",
        "frozen parameters have neither a learning rate nor a decay",
        "'optimizer.groups=[{match: head, freeze: true}]'",
    ),
    (
        "optimizer.groups=[head]",
        'an entry is a section such as {match: "^head", lr_scale: 10}',
        "'optimizer.groups=[{match: head, freeze: true}]'",
    ),
]


@pytest.mark.parametrize(("typed", "reason", "fix"), MISTAKES, ids=[typed for typed, _, _ in MISTAKES])
def test_a_rule_that_cannot_work_is_answered_with_one_that_does(typed: str, reason: str, fix: str | None) -> None:
    _, [mistake] = compose_and_check([typed])
    assert mistake.reason == reason
    assert fix is None or mistake.fix == fix
    assert find_refused([typed], [mistake]) == []


def test_an_optimizer_without_weight_decay_takes_none() -> None:
    typed = ["optimizer._target_=torch.optim.Rprop", "~optimizer.betas", "~optimizer.eps", "~optimizer.weight_decay"]
    _, mistakes = compose_and_check([*typed, f"{_ENTRY}match: head, weight_decay: 0.1}}]"])
    assert "Rprop has no weight decay" in [mistake.reason for mistake in mistakes]


def test_what_can_be_trained_with_is_no_mistake() -> None:
    rules = f"{_ENTRY}match: ^head, lr_scale: 10, weight_decay: 0}}, {{match: '[.]bias$', freeze: false}}]"
    typed = ["freeze=['^embedding']", "optimizer=sgd", "optimizer.layer_decay=0.65", rules.replace("^head", "'^head'")]
    run, mistakes = compose_and_check(typed)
    assert mistakes == []
    assert run is not None
    assert run.config["optimizer"]["groups"][0] == {"match": "^head", "lr_scale": 10, "weight_decay": 0}


def test_a_wrong_expression_is_answered_without_torch() -> None:
    code = "import sys; from recipes.config import compose_and_check; _, found = compose_and_check(sys.argv[1:])"
    code += "; print(len(found), 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, "freeze=['(']"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["1", "False"]


def test_a_section_in_the_place_of_a_list_is_answered_with_the_list() -> None:
    _, mistakes = compose_and_check(["optimizer.groups={match: head, lr_scale: 2}"])
    expected = "it takes a list; type 'optimizer.groups=[{match: head, lr_scale: 2}]'"
    assert [str(mistake).partition(": it")[2] for mistake in mistakes] == [expected.removeprefix("it")]
    assert compose_and_check(["optimizer.groups=[{match: head, lr_scale: 2}]"])[1] == []
