"""Named data sources: of a mixture and of further validations."""

from pathlib import Path
from typing import Any

import pytest
from support import execute, read_metrics, write_texts

from recipes.config import compose_and_check
from recipes.config.check.origin import check_origin
from recipes.config.compose import compose_run
from recipes.config.resolved import resolve
from recipes.entry.run import _find_mistake
from recipes.errors import ConfigError

MIXED = (
    "data=mixture",
    "+data@data.sources.code=stdlib_text",
    "+data@data.sources.noise=random_tokens",
    "tokenizer=bytes",
    "data.weights={code: 0.5, noise: 0.5}",
)


def mistakes_of(*overrides: str) -> list[str]:
    return [str(mistake) for mistake in compose_and_check(overrides)[1]]


def test_options_of_data_stand_in_a_mixture_and_beside_it() -> None:
    composed, mistakes = compose_and_check([*MIXED, "+data@eval_data.other=stdlib_text", "eval_data.other.seq_len=8"])
    assert mistakes == []
    assert composed is not None
    assert list(composed.config["data"]["sources"]) == ["code", "noise"]
    assert composed.config["eval_data"]["other"]["seq_len"] == 8


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["+data@eval_data.a.b=stdlib_text"],
            "has no dots: letters, digits, - and _; type +data@eval_data.a_b=stdlib_text",
        ),
        (
            [*MIXED, "+data@data.sources.code.py=text_files", "data.sources.code.py.path=x"],
            "has no dots: letters, digits, - and _; type +data@data.sources.code_py=text_files",
        ),
        ([*MIXED, "+data@data.sources.m=mixture"], "data.sources.m=…: a mixture cannot hold a mixture"),
        (["data=mixture", "tokenizer=bytes"], "data.sources={}: a mixture needs sources; type +data@data.sources.code"),
        (
            [*MIXED, "+data@eval_data.code=text_files", "eval_data.code.path=tests"],
            "type +data@eval_data.<another name>=text_files eval_data.<another name>.path=tests",
        ),
        (["+data@eval_data.digits=digits"], "eval_data.digits=…: it gives images, and data= gives tokens"),
        (["+model@eval_data.x=gpt2_nano"], "eval_data.x=…: recipes.model.gpt2.GPT2 is no data source"),
        (["+tokenizer@eval_data.x=bytes"], "eval_data.x=…: recipes.tokenizer.bytes.Bytes is no data source"),
        ([*MIXED, "+data@data.sources._target_=random_tokens"], "data.sources._target_=…: its name is part of"),
        ([*MIXED, "data.sources.noise.vocab_size=60000"], "data.sources.noise.vocab_size=60000: the model has model."),
        (
            ["data=digits", "model=resnet18", "model.num_classes=2", "~metrics.accuracy_top5"],
            "have 10 classes; type mod",
        ),
        (["loader.num_workers=99999"], "loader.num_workers=99999: it must be from 0 to 256"),
        ([*MIXED, "data.sources.code.seq_len=0"], "data.sources.code.seq_len=0: it must be at least 1"),
        (["+eval_data.x=3"], "eval_data.x=3: it must be a data source: a section with a _target_"),
        (
            [*MIXED, "+data@eval_data.code=stdlib_text"],
            "both would be val/code/loss; type +data@eval_data.<another name>=stdlib_text",
        ),
        ([*MIXED, "+data@data.sources.digits=digits"], "data.sources.digits=…: it gives images"),
        ([*MIXED, "data.sources.code.val_fraktion=0.1"], "type data.sources.code.val_fraction=0.1"),
        ([*MIXED, "+data@data.sources.mine=text_files"], "no data.sources.mine.path"),
        (["+data@model.x=stdlib_text"], "model.x=…: GPT2 has no argument 'x'"),
        (["+data@eval_data.x=stdlib_test"], "stdlib_text"),
        (
            ["+data@eval_data.x=stdlib_text", "eval_data.x.tokenizer={_target_: recipes.tokenizer.bytes.Bytes}"],
            "one model reads all data, with the tokens of data",
        ),
        (["+data@eval_data.x=stdlib_text", "+eval_data.x.tokenizer=bytes"], "of its own group; type tokenizer=bytes"),
        ([*MIXED, "data.sources.code.tokenizer=bpe"], "all data has one tokenizer, which is an option"),
        (["+data@eval_data.ä=stdlib_text"], "digits, _ and -; type +data@eval_data.a=stdlib_text"),
        (["+data@eval_data.代码=stdlib_text"], "digits, _ and -; type '+data@eval_data.<name>=stdlib_text'"),
        (
            [*MIXED, "data.weights={ä: 0.5, noise: 0.5}"],
            "data.weights={ä: 0.5, noise: 0.5}: a name in a setting has the letters a to z, digits, _ and -;"
            " type 'data.weights={a: 0.5, noise: 0.5}'",
        ),
        (["+data@eval_data.x=text_files", "eval_data.x.path=nowhere"], "eval_data.x.path=nowhere: there is no such"),
    ],
)
def test_a_wrong_source_is_named_with_its_place(overrides: list[str], expected: str) -> None:
    found = mistakes_of(*overrides)
    assert len(found) == 1, found
    assert expected in found[0]


def test_an_error_names_the_key_that_has_the_value() -> None:
    typed = resolve(compose_run(["data=stdlib_text", "data.vocab_size=3", "data.seq_len=7"]))
    for setting, fix, named in (
        ("model.vocab_size=3", "model.vocab_size=257", "data.vocab_size=3 data.vocab_size=257"),
        ("seq_len=7", "seq_len=6 or less", "data.seq_len=7 data.seq_len=6 or less"),
        ("seq_len=8", "seq_len=6", "seq_len=8 seq_len=6"),  # nothing has it
        (f"seq_len={typed.config['seq_len']}", "seq_len=6", f"seq_len={typed.config['seq_len']} seq_len=6"),
        ("data.path=/a/b", "data.path=…", "data.path=/a/b data.path=…"),
    ):
        mistake = _find_mistake(ConfigError(setting, "why", fix), typed)
        assert mistake is not None
        assert f"{mistake.setting} {mistake.fix}" == named


@pytest.mark.parametrize("name", ["val/code/loss", "val/other/loss", "val/other/perplexity"])
def test_checkpoints_may_be_ranked_by_the_loss_of_one_source(name: str) -> None:
    more = ("+data@eval_data.other=stdlib_text", "checkpoint.keep_best=1")
    assert mistakes_of(*MIXED, *more, f"checkpoint.monitor={name}") == []
    wrong = mistakes_of(*MIXED, *more, f"checkpoint.monitor={name}es")
    assert f"type checkpoint.monitor={name}, or" in wrong[0]


@pytest.mark.parametrize(
    ("place", "node", "is_known"),
    [
        ("data.sources.x", {"_target_": "recipes.data.random_tokens.RandomTokens"}, True),
        ("eval_data.x", {"_target_": "recipes.data.random_tokens.RandomTokens"}, True),
        ("eval_data.x", {"_target_": "os.system", "command": "true"}, False),
        ("data.sources.x", {"_target_": "recipes.mode.export.export"}, False),
        ("eval_data.x.tokenizer", {"_target_": "recipes.tokenizer.bytes.Bytes"}, True),
        ("eval_data.x.tokenizer", {"_target_": "os.system"}, False),
    ],
)
def test_a_folder_names_the_sources_of_conf_alone(place: str, node: dict[str, Any], is_known: bool) -> None:
    config: dict[str, Any] = compose_run([text.replace("data.weights", "+data.weights") for text in MIXED]).config
    *sections, last = place.split(".")
    section = config
    for name in sections:
        section = section.setdefault(name, {})
    section[last] = node
    # typed options are of this command line; those of a folder are none of it
    found = [mistake.setting for mistake in check_origin(config, [], Path("run/config.yaml"))]
    assert any(setting.startswith(f"{place}._target_=") for setting in found) is not is_known


def test_a_resumed_mixture_goes_on_with_the_rows_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    tiny = [
        *("model.vocab_size=257", "model.num_layers=2", "model.num_heads=2", "model.hidden_size=32", "seq_len=32"),
        *("model.max_seq_len=32", "global_batch_size=8", "eval_samples=8", "callbacks=[]", "trainer.accelerator=cpu"),
        *("data=mixture", "+data@data.sources.lines=text_files", "+data@data.sources.noise=random_tokens"),
        *("tokenizer=bytes", f"data.sources.lines.path={texts}", "data.weights={lines: 0.7, noise: 0.3}"),
        "data.stages=[{from: 29, weights: {lines: 0.4, noise: 0.6}}]",
        *("+data@eval_data.again=text_files", f"eval_data.again.path={texts}", "save_every=3", "eval_every=3"),
        "trainer.max_steps=6",
    ]
    assert execute(*tiny, f"hydra.run.dir={tmp_path / 'whole'}") == 0
    assert execute(*tiny, f"hydra.run.dir={tmp_path / 'parts'}", "trainer.max_steps=3") == 0
    again = ["trainer.max_steps=6", "micro_batch_size=4"]
    assert execute(f"resume={tmp_path / 'parts'}", f"hydra.run.dir={tmp_path / 'rest'}", *again) == 0
    whole, rest = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "rest")
    assert [row["step"] for row in rest] == [4, 5, 6]
    for row, other in zip(rest, whole[3:], strict=True):
        assert row["train/lines/tokens"] == other["train/lines/tokens"]
        # two micro-batches instead of one: sums in another order, in float32
        for name in ("train/loss", "train/lines/loss", "train/noise/loss"):
            assert row[name] == pytest.approx(other[name], rel=1e-6)
    for name in ("val/loss", "val/lines/loss", "val/again/loss"):
        assert rest[-1][name] == pytest.approx(whole[-1][name], rel=1e-6)
