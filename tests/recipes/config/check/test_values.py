"""Values that cannot work: of another type, outside of a range, or of a key that nobody reads; each named as typed."""

import ast
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import ROOT
from typed_remedies import find_refused

from recipes.config import compose_and_check
from recipes.config.check.nodes import get_provided
from recipes.config.check.types import annotation_from, describe, find_out_of_range, matches_type
from recipes.config.signature import read_signature
from recipes.config.traits import list_nodes

# command line -> what is said of it, in any order; several mistakes share a composition
WRONG = {
    "checkpoint.save_every=0 checkpoint.save_every_minutes=0 scheduler.num_steps=0"
    " optimizer.lr=1e39 optimizer.eps=1e-46 optimizer.weight_decay=inf trainer.gradient_clip_val=nan"
    " model.hidden_size=4294967296 plan.memory_gib=inf plan.dollars_per_hour=nan data.seq_len=0 save_every=0"
    " warmup_steps=10000000000000000000": [
        "checkpoint.save_every=0: it must be at least 1; type checkpoint.save_every=<at least 1>",
        "checkpoint.save_every_minutes=0: it must be above 0; type checkpoint.save_every_minutes=<above 0>",
        "scheduler.num_steps=0: it must be at least 1; type scheduler.num_steps=<at least 1>",
        "optimizer.lr=1e39: it must be finite in float32 and above 0;"
        " type optimizer.lr=<finite in float32 and above 0>",
        "optimizer.eps=1e-46: it must be above 0 in float32; type optimizer.eps=<above 0 in float32>",
        "optimizer.weight_decay=inf: it must be finite and at least 0;"
        " type optimizer.weight_decay=<finite and at least 0>",
        "trainer.gradient_clip_val=nan: it must be above 0; type trainer.gradient_clip_val=<above 0>",
        "model.hidden_size=4294967296: it must be from 1 to 1048576; type model.hidden_size=<from 1 to 1048576>",
        "plan.memory_gib=inf: it must be finite and above 0; type plan.memory_gib=<finite and above 0>",
        "plan.dollars_per_hour=nan: only mode=plan and mode=batch_find read it;"
        " type the same command without it, or mode=plan beside it",
        "data.seq_len=0: it must be at least 1; type data.seq_len=<at least 1>",
        "save_every=0: it must be at least 1; type save_every=<at least 1>",
        "warmup_steps=10000000000000000000: it must be at least 0 and below 2^63;"
        " type warmup_steps=<at least 0 and below 2^63>",
    ],
    "scheduler=step scheduler.gamma=nan scheduler.milestones=[5,-1] model=llama_nano model.rope_theta=0"
    " model.rms_eps=nan model.head_dim=-4 model.rope_scaling_factor=0.5 optimizer=adafactor"
    " optimizer.beta2_decay=1 optimizer.eps=[1e-15,-1] mode=lr_find mode.max_lr=inf": [
        "scheduler.gamma=nan: it must be finite and above 0; type scheduler.gamma=<finite and above 0>",
        "scheduler.milestones[1]=-1: it must be at least 1; type 'scheduler.milestones=[…]', each at least 1",
        "model.rope_theta=0: it must be above 0; type model.rope_theta=<above 0>",
        "model.rms_eps=nan: it must be finite and at least 0; type model.rms_eps=<finite and at least 0>",
        "model.head_dim=-4: it must be at least 2; type model.head_dim=<at least 2>",
        "model.rope_scaling_factor=0.5: it must be at least 1; type model.rope_scaling_factor=<at least 1>",
        "optimizer.beta2_decay=1: it must be at most 0; type optimizer.beta2_decay=<at most 0>",
        "optimizer.eps[1]=-1: it must be at least 0; type 'optimizer.eps=[…]', each at least 0",
        "mode.max_lr=inf: it must be finite and above 0; type mode.max_lr=<finite and above 0>",
    ],
    "model=mixtral_nano model.scoring_func=nope data=synthetic_tasks data.train_on=question data.tasks=[]"
    " adapter=lora adapter.target_modules=[] callbacks=[default,generation_eval]"
    " callbacks.generation_eval.reward=nope": [
        "model.scoring_func=nope: it takes softmax or sigmoid; type model.scoring_func=<softmax or sigmoid>",
        "data.train_on=question: it takes answers or last_answer or all;"
        " type data.train_on=<answers or last_answer or all>",
        "data.tasks=[]: it must be a list of at least 1; type data.tasks=<list of at least 1>",
        "adapter.target_modules=[]: it must be a list of at least 1; type adapter.target_modules=<list of at least 1>",
        "callbacks.generation_eval.reward=nope: it takes a section with a _target_ and _partial_: true or null;"
        " type 'callbacks.generation_eval.reward={_target_: <module.function>, _partial_: true}'",
    ],
    "data=mixture data.weights={a:x} data.stages={} mode=report mode.runs=[logs] mode.write=null": [
        "data.weights={a:x}: it takes a section such as {name: number}; type data.weights=<{name: number}>",
        "data.stages={}: it takes a list; type data.stages=<list>",
        "mode.write=null: it takes a section with a _target_ and _partial_: true;"
        " type 'mode.write={_target_: <module.function>, _partial_: true}'",
    ],
    "data.tokenizer=null": [
        "data.tokenizer=null: it takes a section with a _target_; type data.tokenizer=<section with a _target_>"
    ],
    "data.vocab_size=300": ["data.vocab_size=300: its tokenizer has 2048 tokens; type data.vocab_size=2048"],
    "+optimizer._args_=[a] ++model._partial_=true ++data._convert_=all scheduler._partial_=false ~loader._partial_": [
        "optimizer._args_=[a]: it has no effect: a section is built with its settings as they stand, each by its"
        " name;"
        " type the same command without optimizer._args_",
        "model._partial_=true: it is built at once: nobody calls it again; type +model._partial_=false",
        "data._convert_=all: it has no effect: a section is built with its settings as they stand, each by its"
        " name;"
        " type the same command without data._convert_",
        "scheduler._partial_=false: build.py calls it with step; type scheduler._partial_=true",
        "no loader._partial_: build.py calls it with accumulation and eval_samples; type loader._partial_=true",
    ],
    "optimizer._target_=builtins.eval": [
        "optimizer._target_=builtins.eval: builtins: 'builtins' is part of Python itself;"
        " type optimizer=<an option of conf/optimizer/>"
    ],
    "+x._target_=os.system": ["x=…: there is no such setting or section; type the same command without x"],
    "data=random_tokens tokenizer=bpe callbacks=[sample_text,generation_eval] clipping=quantile clipping.window=10"
    " trainer.gradient_clip_algorithm=value": [
        "tokenizer=bpe: the data has no text, so it has no effect; type the same command without tokenizer",
        "callbacks=[sample_text,generation_eval]: sample_text and generation_eval need text and its tokenizer, and the"
        " data has none; type the same command without it",
        "trainer.gradient_clip_algorithm=value clipping._target_=recipes.clipping.quantile.Quantile: Quantile finds"
        " limits of the norm, which clipping by value does not read;"
        " type trainer.gradient_clip_algorithm=norm, or clipping=none",
        "clipping.window=10 clipping.warmup_steps=100: the window of clipping.window=10 never holds that many norms;"
        " type clipping.window=100",
    ],
    "data=digits model=resnet18 seq_len=32": [
        "seq_len=32: the data has no text, so it has no effect; type the same command without seq_len"
    ],
    "data=documents data.path=tests data.domain_field=kind data.split=test": [
        "data.domain_field=kind: only mode=prepare reads it; type the same command without data.domain_field",
        "data.split=test: data.path=tests is of files, and only datasets at hf:// have splits;"
        " type the same command without data.split",
    ],
    "data=token_file data.path=train.py data.val_path=setup.py data.val_fraction=0.3": [
        "data.val_fraction=0.3: all of data.val_path=setup.py is for validation, so it has no effect;"
        " type the same command without data.val_fraction, or data.val_path=null"
    ],
    "data=token_shards data.path=tests data.val_fraction=0.1": [
        "data.val_fraction=0.1: there is no 'data.val_fraction';"
        " type data.val_path=<a path that exists> of other tokens"
    ],
    "quality=c4": [
        "quality=c4: only mode=prepare reads it, and writes a folder to train on: other modes take texts as they are;"
        " type mode=prepare data=documents mode.output=<folder> quality=c4"
    ],
    "mode=export mode.adapter=separate resume=auto hydra.run.dir=x": [
        "mode.adapter=separate: the run has no adapter; type mode.adapter=merged"
    ],
}
OWN = ("recipes.", "callbacks.")


@pytest.mark.parametrize("typed", WRONG)
def test_a_value_that_cannot_work_is_named_as_it_was_typed(typed: str) -> None:
    command = shlex.split(typed)
    _, mistakes = compose_and_check(command)
    assert sorted(map(str, mistakes)) == sorted(WRONG[typed])
    assert find_refused(command, mistakes) == []


def nodes_of_conf() -> list[tuple[str, dict[str, Any]]]:
    """Return every section of conf/ with a `_target_` of this project, with its place in the config."""
    found = []
    for file in sorted((ROOT / "conf").rglob("*.yaml")):
        text, content = file.read_text(), yaml.safe_load(file.read_text()) or {}
        group = "" if "@package _global_" in text or file.parent.name == "conf" else file.parent.name
        found += list(list_nodes({group: content} if group else content))
    return [(path, dict(node)) for path, node in found if node["_target_"].startswith(OWN)]


def test_every_number_that_a_config_sets_has_a_declared_range() -> None:
    without = set()
    for path, node in nodes_of_conf():
        for name, parameter in read_signature(node["_target_"]).parameters.items():
            if parameter.annotation is not None and name not in get_provided(path):
                without |= {f"{path}.{name}" for bare in _bare_numbers(parameter.annotation) if bare}
    assert without == set()


def _bare_numbers(annotation: ast.expr) -> list[str]:
    """Return the numbers in an annotation that no `Annotated` gives a range."""
    if isinstance(annotation, ast.Name):
        return [annotation.id] if annotation.id in ("int", "float") else []
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in ("Annotated", "Literal"):
        return []
    return [
        bare
        for child in ast.iter_child_nodes(annotation)
        if isinstance(child, ast.expr)
        for bare in _bare_numbers(child)
    ]


def test_every_annotation_that_a_config_sets_is_known_to_the_check() -> None:
    num_annotations = 0
    for _, node in nodes_of_conf():
        for parameter in read_signature(node["_target_"]).parameters.values():
            assert parameter.annotation is not None
            assert describe(parameter.annotation)
            matches_type("text", parameter.annotation)  # raises for an annotation outside of its vocabulary
            num_annotations += 1
    assert num_annotations > 300


def test_an_annotation_outside_of_the_vocabulary_is_an_error_of_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match="does not know the annotation"):
        matches_type(3, annotation_from("set[int]"))
    (tmp_path / "callbacks_of_mine.py").write_text(
        "import other\ndef make(*, size: other.Size, kind: 'Kind', n: int): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    theirs = read_signature("callbacks_of_mine.make").parameters
    assert [ast.unparse(p.annotation) for p in theirs.values() if p.annotation] == ["Any", "Any", "int"]


def test_aliases_of_an_annotation_are_followed_through_modules() -> None:
    train_on = read_signature("recipes.data.conversations.source.Conversations").parameters["train_on"].annotation
    assert train_on is not None
    assert ast.unparse(train_on) == "Literal['answers', 'last_answer', 'all']"
    precision = read_signature("lightning.pytorch.Trainer").parameters["precision"].annotation
    assert precision is not None
    assert matches_type("bf16-mixed", precision)
    assert not matches_type("bf17", precision)


@pytest.mark.parametrize(
    ("annotation", "value", "place"),
    [
        ("Annotated[float, '> 0']", float("nan"), ""),
        ("Annotated[float, '> 0']", float("inf"), ""),
        ("Annotated[float, '> 0']", 2.0**128, ""),
        ("Annotated[float, '> 0']", 2.0**-150, ""),
        ("Annotated[float, '> 0, <= inf']", float("nan"), ""),
        ("Annotated[int, '>= 1']", 2**63, ""),
        ("Annotated[int, '<= 0']", 1, ""),
        ("tuple[Annotated[float, '> 0'], Annotated[float, '>= 5']]", [1.0, 4.0], "[1]"),
        ("list[Annotated[int, '>= 1']]", [1, 0], "[1]"),
        ("dict[str, Annotated[float, '>= 0']]", {"a": 0, "b": -1}, ".b"),
        ("Annotated[list[str], '>= 1'] | None", [], ""),
    ],
)
def test_a_number_outside_of_its_range_is_found_where_it_stands(annotation: str, value: object, place: str) -> None:
    found = find_out_of_range(value, annotation_from(annotation))
    assert found is not None
    assert found[0] == place


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        ("Annotated[float, '> 0']", 2.0**-149),
        ("Annotated[float, '>= 0']", 0.0),
        ("Annotated[float, '> 0, <= inf']", float("inf")),
        ("Annotated[int, '>= 1']", 2**63 - 1),
        ("Annotated[int, '>= 1'] | None", None),
        ("Annotated[list[str], '>= 1']", ["a"]),
    ],
)
def test_a_number_inside_of_its_range_is_accepted(annotation: str, value: object) -> None:
    assert find_out_of_range(value, annotation_from(annotation)) is None


def test_true_is_no_number_and_one_is_not_true() -> None:
    assert not matches_type(True, annotation_from("Literal[1, 2, 3]"))
    assert not matches_type(True, annotation_from("int"))
    assert not matches_type(1, annotation_from("bool"))
