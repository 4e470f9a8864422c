"""Runs that start from the weights of another: their first loss is its last, and every tensor is accounted for."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import execute, read_metrics

from recipes.build import build
from recipes.checkpoint.layout import RUN_FILE, is_shard
from recipes.checkpoint.saved_tensor import open_tensors
from recipes.config import compose_and_check
from recipes.config.resolved import ResolvedRun
from recipes.errors import ConfigError
from recipes.mode.load import load_task
from recipes.model.init import normal_
from recipes.model.weights.adapter import merge_adapter

MODEL = [
    *("model.num_layers=2", "model.hidden_size=48", "model.num_heads=2", "model.vocab_size=300"),
    "model.max_seq_len=32",
]
SMALL = [
    *("global_batch_size=4", "trainer.max_steps=4", "eval_every=2", "save_every=2", "eval_samples=8", "warmup_steps=1"),
    *("~callbacks.report", "~callbacks.sample_text", "seq_len=32"),
]
STILL = ["optimizer.lr=1e-30", "trainer.max_steps=2"]  # in float32 the weights stay as they are
Run = Callable[..., Path]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that executes a run in a new folder, and returns the folder."""
    from support import write_texts

    texts = write_texts(tmp_path_factory.mktemp("texts"))

    def run(name: str, *typed: str, folder: Path | None = None) -> Path:
        where = folder or tmp_path_factory.mktemp(name)
        given = ["data=text_files", f"data.path={texts}", *MODEL, *SMALL, *typed, f"hydra.run.dir={where}"]
        keys = [word.lstrip("~+").partition("=")[0] for word in given]
        # what is typed last counts, as in a shell
        assert execute(*(word for i, word in enumerate(given) if keys[i] not in keys[i + 1 :])) == 0
        return where

    return run


@pytest.fixture(scope="module")
def full(start: Run) -> Path:
    """Return a run of all weights, with a moving average."""
    return start("full", "ema_decay=0.5", "optimizer.lr=0.01")


@pytest.fixture(scope="module")
def adapted(start: Run, full: Path) -> Path:
    """Return a run of an adapter beside the weights of the full run."""
    return start("adapted", f"start_from={full}", "adapter=lora", "adapter.r=2", "optimizer.lr=0.01", "seed=5")


def tensors(run: Path) -> dict[str, torch.Tensor]:
    files = [path for path in (run / "checkpoints/last").iterdir() if is_shard(path.name)]
    return {name: tensor.read() for name, tensor in open_tensors(files).items()}


def weights(run: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors(run).items() if name.startswith("model.")}


def last_loss(run: Path) -> str:
    """Return the last validation loss, all digits that there are."""
    with (run / "metrics.csv").open(newline="") as file:
        return [row["val/loss"] for row in csv.DictReader(file)][-1]


def log_lines(run: Path) -> list[str]:
    return (run / "train.log").read_text().splitlines()


def recorded(run: Path) -> list[dict[str, Any]]:
    record: list[dict[str, Any]] = json.loads((run / "environment.json").read_text())["started_from"]
    saved = torch.load(run / "checkpoints/last" / RUN_FILE, weights_only=True)["started_from"]
    assert saved == record
    return record


def test_the_first_loss_is_that_of_the_source_and_every_tensor_is_named(start: Run, full: Path) -> None:
    run = start("still", f"start_from={full}", "seed=7", *STILL)
    assert last_loss(run) == last_loss(full)
    found = weights(run)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(full).items())
    [source] = recorded(run)
    assert source["path"] == str((full / "checkpoints/step_0000004.ckpt").resolve())
    assert (source["step"], source["weights"], len(source["hash"])) == (4, "trained", 32)
    [line] = [line for line in log_lines(run) if line.startswith("  loaded: ")]
    assert line.startswith("  loaded: 28 tensors, 73,536 values: embedding.weight, position.weight, blocks.*.attention")
    assert not any(line.startswith(("  new", "  left out")) for line in log_lines(run))


def test_averaged_weights_are_a_choice(start: Run, full: Path) -> None:
    run = start("averaged", f"start_from={full}/checkpoints/last", "start_from_weights=ema", *STILL)
    found, saved = weights(run), tensors(full)
    assert all(torch.equal(found[name], saved[f"optimizer/ema/{name}"]) for name in found)
    assert execute("mode=evaluate", f"resume={full}", "mode.weights=ema") == 0
    evaluated = json.loads((full / "evaluate_val.json").read_text())
    assert evaluated["loss"] != pytest.approx(float(last_loss(full)), rel=1e-4)
    assert recorded(run)[0]["weights"] == "ema"
    with pytest.raises(AssertionError):
        start("none", f"start_from={run}", "start_from_weights=ema", *STILL)


def test_an_adapter_begins_on_the_weights_of_a_run_and_goes_on_bit_for_bit(
    start: Run, full: Path, adapted: Path, tmp_path: Path
) -> None:
    typed = [f"start_from={full}", "adapter=lora", "adapter.r=2", "optimizer.lr=0.01", "seed=5", "resume=auto"]
    still = start("still_adapter", *typed[:3], *STILL)
    assert last_loss(still) == last_loss(full), "B of an adapter begins at zero"
    start("first", *typed, "trainer.max_steps=2", "scheduler=constant", folder=tmp_path / "run")
    [line] = [line for line in log_lines(tmp_path / "run") if line.startswith("  new: ")]
    assert line.startswith("  new: 16 tensors, ")
    assert "lora_A.default.weight (2)" in line
    whole = start("whole", *typed, "scheduler=constant")
    start("second", *typed, "scheduler=constant", folder=tmp_path / "run")
    assert read_metrics(tmp_path / "run")[-1]["val/loss"] == read_metrics(whole)[-1]["val/loss"]
    resumed = weights(tmp_path / "run")
    assert {name for name in resumed if ".lora_" not in name} == set(), "a checkpoint holds the adapter alone"
    assert all(torch.equal(resumed[name], tensor) for name, tensor in weights(whole).items())
    assert execute("mode=evaluate", f"resume={adapted}") == 0
    found = json.loads((adapted / "evaluate_val.json").read_text())["loss"]
    assert execute("mode=export", f"resume={adapted}") == 0
    assert found > 0


def test_an_adapter_is_kept_or_merged_and_a_chain_is_recorded(start: Run, full: Path, adapted: Path) -> None:
    kept = start("kept", f"start_from={adapted}", "adapter=lora", "adapter.r=2", *STILL)
    assert last_loss(kept) == last_loss(adapted)
    assert [source["path"].split("/")[-3] for source in recorded(kept)] == [adapted.name, full.name]
    again = start("kept_again", f"start_from={kept}", "adapter=lora", "adapter.r=2", *STILL)
    assert last_loss(again) == last_loss(adapted)
    assert len(recorded(again)) == 3
    assert execute("mode=evaluate", f"resume={again}", "mode.weights=trained") == 0

    merged = start("merged", f"start_from={adapted}", *STILL)
    assert float(last_loss(merged)) == pytest.approx(float(last_loss(adapted)), rel=1e-6)  # W + BA in another order
    resolved, _ = compose_and_check(["mode=evaluate", f"resume={adapted}"])
    assert isinstance(resolved, ResolvedRun)
    task, _ = load_task(build(resolved), "trained")
    merge_adapter(task.model)
    found = weights(merged)
    expected = {name: tensor for name, tensor in task.state_dict().items() if name in found}
    assert len(expected) == len(found) == 28
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), "as an export merges them"


def test_a_vocabulary_may_grow_and_its_rows_are_named(start: Run, full: Path) -> None:
    run = start("grown", f"start_from={full}", "model.vocab_size=310", "seed=3", *STILL)
    assert "  vocabulary: 10 new tokens, rows 300 to 310 of embedding.weight" in log_lines(run)
    found, before = weights(run)["model.embedding.weight"], weights(full)["model.embedding.weight"]
    assert torch.equal(found[:300], before[:300])
    drawn = torch.empty_like(found)
    normal_(drawn, name="embedding.weight", seed=3, std=0.02, num_rows=310)
    assert torch.equal(found[300:310], drawn[300:310])


def test_a_run_that_started_from_another_resumes_without_it(start: Run, full: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(full, source, symlinks=True)
    typed = [f"start_from={source}", "scheduler=constant", "seed=2", "resume=auto"]
    whole = start("uninterrupted", *typed)
    start("first", *typed, "trainer.max_steps=2", folder=tmp_path / "run")
    shutil.rmtree(source)
    start("second", *typed, folder=tmp_path / "run")
    found = weights(tmp_path / "run")
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(whole).items())
    assert read_metrics(tmp_path / "run")[-1]["val/loss"] == read_metrics(whole)[-1]["val/loss"]
    assert recorded(tmp_path / "run") == recorded(whole)


def test_other_data_takes_the_tokenizer_of_the_source(start: Run, full: Path, tmp_path: Path) -> None:
    rows = "".join(json.dumps({"prompt": f"{i}?", "completion": f"{2 * i}"}) + "\n" for i in range(40))
    (tmp_path / "rows.jsonl").write_text(rows)
    typed = ["data=conversations", f"data.path={tmp_path}/rows.jsonl", "data.val_fraction=0.3"]
    run = start("tuned", *typed, f"start_from={full}", *STILL)
    saved = [(folder / "tokenizer/tokenizer.json").read_text() for folder in (full, run)]
    assert saved[0] == saved[1]
    assert torch.equal(weights(run)["model.norm.weight"], weights(full)["model.norm.weight"])


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["model.max_seq_len=16", "seq_len=16"], r"position.weight is \[32, 48\] there and \[16, 48\] here"),
        (["model.vocab_size=200"], "its weights were trained with model.vocab_size=300"),
    ],
)
def test_what_does_not_fit_is_an_error_before_a_step(
    typed: list[str], message: str, full: Path, tmp_path: Path
) -> None:
    """Without a config.yaml, so that the checkpoint alone says what it is of."""
    source = tmp_path / "source"
    shutil.copytree(full / "checkpoints/last", source / "checkpoints/step_0000004.ckpt")
    words = ["data=random_tokens", *MODEL, *SMALL, f"start_from={source}", f"hydra.run.dir={tmp_path}/run"]
    keys = [word.partition("=")[0] for word in typed]
    resolved, mistakes = compose_and_check([*(word for word in words if word.partition("=")[0] not in keys), *typed])
    assert not mistakes, list(map(str, mistakes))
    assert resolved is not None
    run = build(resolved)
    with pytest.raises(ConfigError, match=message):
        run.trainer.fit(run.task, datamodule=run.data)
    assert not (tmp_path / "run" / "metrics.csv").exists()


def test_a_damaged_source_is_passed_over_unless_it_was_named(start: Run, full: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(full, source, symlinks=True)
    shard = source / "checkpoints/step_0000004.ckpt/rank_00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    run = start("older", f"start_from={source}", *STILL)
    assert recorded(run)[0]["step"] == 2
    words = [f"start_from={source}/checkpoints/step_0000004.ckpt", f"hydra.run.dir={tmp_path}/run"]
    resolved, _ = compose_and_check(["data=random_tokens", *MODEL, *SMALL, *words])
    assert resolved is not None
    named = build(resolved)
    with pytest.raises(
        ConfigError, match=r"start_from=.*hash mismatch; it was named; type start_from=<the run's folder>"
    ):
        named.trainer.fit(named.task, datamodule=named.data)


def test_statistics_and_balances_come_along(tmp_path: Path) -> None:
    """Buffers that training changes are weights, too: before the first step they are those of the source."""
    short = ["trainer.max_steps=1", "eval_every=1", "save_every=1", "eval_samples=4", "global_batch_size=4"]
    model = ["model=resnet18", "data=digits", "optimizer=sgd", "~callbacks.report", *short]
    assert execute(*model, f"hydra.run.dir={tmp_path}/source") == 0
    resolved, mistakes = compose_and_check([*model, f"start_from={tmp_path}/source", f"hydra.run.dir={tmp_path}/run"])
    assert not mistakes, list(map(str, mistakes))
    assert resolved is not None
    run = build(resolved)
    run.task.trainer = run.trainer
    run.task.configure_model()
    found, saved = run.task.state_dict(), weights(tmp_path / "source")
    assert any("running_mean" in name for name in saved)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())


def test_a_head_of_other_classes_begins_anew_and_the_rest_is_loaded(tmp_path: Path) -> None:
    rows = [f"{index % 7},{index % 5},{index % 3},{index % 4}\n" for index in range(60)]
    (tmp_path / "rows.csv").write_text("".join(["a,b,three,four\n", *rows]))
    typed = ["data=table", f"data.path={tmp_path / 'rows.csv'}", "data.inputs=[a,b]", "model=mlp", "model.num_inputs=2"]
    typed += ["model.hidden_sizes=[8]", "~callbacks.report", "warmup_steps=1", "metrics=none", "eval_every=2"]
    short = ["global_batch_size=4", "trainer.max_steps=2", "save_every=2"]
    first, second = tmp_path / "three", tmp_path / "four"
    of_three = ["data.targets=three", "model.num_classes=3", f"hydra.run.dir={first}"]
    assert execute(*typed, *short, *of_three, "optimizer.lr=0.01") == 0
    of_four = ["data.targets=four", "model.num_classes=4", f"hydra.run.dir={second}", f"start_from={first}"]

    assert execute(*typed, *short, *of_four, "optimizer.lr=1e-30") == 0
    assert "  head of 3 outputs there and 4 here, which begins anew" in log_lines(second)
    assert "  new: 2 tensors, 36 values: head.weight, head.bias" in log_lines(second)
    before, after = (weights(folder) for folder in (first, second))
    assert before.keys() == after.keys()
    kept = [name for name in before if "head" not in name]
    assert kept
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert [before[name].shape[0] for name in before if "head" in name] == [3, 3]
