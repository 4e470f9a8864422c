"""Preference tuning in a run: where it begins, what it goes on with, and what its reference is."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import composed_config, execute, read_metrics, resolved

import lightning_recipes as lr
from recipes.build import build
from recipes.task.reference import ReferenceTable

SMALL = (
    *("tokenizer=bytes", "model=gpt2_nano", "model.vocab_size=257", "model.max_seq_len=24", "model.num_layers=2"),
    *("model.num_heads=2", "model.hidden_size=32", "global_batch_size=8", "optimizer.lr=1e-3", "seed=5"),
    *("trainer.accelerator=cpu", "callbacks=[grad_norm,loss_scale]", "log_every=1", "warmup_steps=2"),
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "pairs.jsonl"
    rows = [
        {"prompt": f"{row}?", "chosen": "ab" * (1 + row % 4), "rejected": "ba" * (1 + row % 3) + "c"}
        for row in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(pairs: Path, folder: Path, *more: str, recipe: str = "dpo", steps: int = 6) -> list[dict[str, float]]:
    cache = folder.parent / "cache"
    places = [f"data.path={pairs}", f"data.cache_dir={cache}", f"task.cache_dir={cache}", f"hydra.run.dir={folder}"]
    lengths = [f"trainer.max_steps={steps}", "eval_every=3", "save_every=3"]
    assert execute(f"recipe={recipe}", *SMALL, *places, *lengths, *more) == 0
    return read_metrics(folder)


def without_times(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    kept = ("step", "lr", "train/", "val/", "grad/")
    return [{name: value for name, value in row.items() if name.startswith(kept)} for row in rows]


@pytest.mark.parametrize(
    ("recipe", "more"),
    [("dpo", ()), ("dpo", ("adapter=lora", "adapter.r=4")), ("kto", ()), ("orpo", ()), ("simpo", ())],
)
def test_a_run_stopped_at_step_3_has_the_losses_of_a_whole_one(
    recipe: str, more: tuple[str, ...], pairs: Path, tmp_path: Path
) -> None:
    train(pairs, tmp_path / "parted", *more, "scheduler=constant", recipe=recipe, steps=3)
    shutil.rmtree(tmp_path / "cache" / "references", ignore_errors=True)  # the run folder has what it needs
    train(pairs, tmp_path / "other", *more, "scheduler=constant", recipe=recipe)
    assert execute(f"resume={tmp_path / 'parted'}", "trainer.max_steps=6") == 0
    resumed, at_once = (without_times(read_metrics(tmp_path / name)) for name in ("parted", "other"))
    assert resumed == at_once, "to the last digit that is logged"
    assert len(resumed) == 6


def test_dropout_is_reported_because_rewards_then_do_not_begin_at_zero(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = train(pairs, tmp_path / "clean", steps=1)
    assert rows[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert "do not begin at 0" not in capsys.readouterr().out
    rows = train(pairs, tmp_path / "noisy", "model.dropout=0.2", steps=1)
    assert abs(rows[0]["train/chosen_reward"]) > 1e-4
    assert "do not begin at 0" in capsys.readouterr().out


def test_the_reference_is_computed_once_for_all_runs_with_the_same_weights(pairs: Path, tmp_path: Path) -> None:
    train(pairs, tmp_path / "one", steps=1)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "references").iterdir()}
    train(pairs, tmp_path / "two", "loss.beta=0.5", "optimizer.lr=1e-2", steps=1)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "references").iterdir()} == written
    train(pairs, tmp_path / "three", "seed=6", steps=1)
    assert len([*(tmp_path / "cache" / "references").iterdir()]) == 2 * len(written), "other weights"


def test_a_cached_table_of_other_weights_is_computed_again(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = train(pairs, tmp_path / "one", steps=2)
    for path in (tmp_path / "cache" / "references").iterdir():
        with np.load(path) as saved:
            ids, values = saved["ids"], saved["values"]
        np.savez(path, ids=ids, values=values * 1.01)
    capsys.readouterr()
    assert without_times(train(pairs, tmp_path / "two", steps=2)) == without_times(rows)
    assert capsys.readouterr().out.count("is of other weights, in spite of its key") == 2


def test_the_table_is_what_a_forward_pass_of_the_first_weights_says(pairs: Path, tmp_path: Path) -> None:
    train(pairs, tmp_path / "run", steps=3)
    run = build(resolved(composed_config(f"resume={tmp_path / 'run'}", "mode=evaluate"), tmp_path / "run"))
    run.data.prepare_data()
    dataset: Any = run.data.source.train()
    first = build(resolved(composed_config("recipe=dpo", *SMALL, f"data.path={pairs}"), tmp_path / "new"))
    model = first.task._make_model()
    model.init_weights(5)
    with np.load(tmp_path / "run" / "reference.npz") as saved:
        table = ReferenceTable(saved["ids"], saved["values"], device=torch.device("cpu"))
    for index in (0, 7, 20):
        sample = dataset[index]
        log_p = model(sample["inputs"]).log_softmax(dim=-1)  # [2, T, V]
        is_target = sample["targets"] >= 0
        expected = (log_p.gather(2, sample["targets"].clamp(min=0)[..., None]).squeeze(2) * is_target).sum(dim=1)
        torch.testing.assert_close(table.look_up(sample["id"][None])[0], expected, rtol=1e-5, atol=1e-5)
    assert table.look_up(torch.tensor([12345])).isnan().all(), "an unknown sample has no value"


def test_a_row_without_an_answer_ends_the_run_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "chosen": "b"}\n')
    places = [f"data.path={path}", f"data.cache_dir={tmp_path}", f"hydra.run.dir={tmp_path / 'run'}"]
    assert execute("recipe=dpo", *SMALL, *places) == 2
    assert "rows.jsonl:1\n   its fields are prompt, chosen" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["kto", "simpo"])
def test_a_run_is_loaded_without_its_rows(recipe: str, pairs: Path, tmp_path: Path) -> None:
    rows = shutil.copy(pairs, tmp_path / "rows.jsonl")
    train(Path(rows), tmp_path / "run", recipe=recipe, steps=3)
    Path(rows).unlink()
    model = lr.load(tmp_path / "run")
    assert model(torch.zeros(1, 4, dtype=torch.int64)).shape[:2] == (1, 4)


def test_other_rows_than_those_of_the_run_have_no_reference(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(pairs, tmp_path / "run", steps=3)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(f'{{"prompt": "{row}!", "chosen": "a", "rejected": "b"}}\n' for row in range(8)))
    evaluate = ["mode=evaluate", f"resume={tmp_path / 'run'}"]
    assert execute(*evaluate) == 0
    assert execute(*evaluate, f"data.path={other}") == 2
    assert "the reference was computed for the samples of the run" in capsys.readouterr().out


def test_a_run_without_its_table_says_what_is_missing(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(pairs, tmp_path / "run", steps=3)
    (tmp_path / "run" / "reference.npz").unlink()
    assert execute(f"resume={tmp_path / 'run'}", "trainer.max_steps=6") != 0
    assert "reference.npz is not there" in capsys.readouterr().out


def test_logits_in_chunks_give_the_losses_of_all_at_once(pairs: Path, tmp_path: Path) -> None:
    names = ("train/loss", "grad/norm", "train/margin")
    rows = [
        train(pairs, tmp_path / f"{recipe}_{size}", f"loss_chunk_tokens={size}", recipe=recipe, steps=3)
        for recipe in ("dpo", "orpo")
        for size in ("null", 40)
    ]
    for whole, chunked in ((rows[0], rows[1]), (rows[2], rows[3])):
        for one, other in zip(whole, chunked, strict=True):
            # float32: sums in another order
            assert [other[name] for name in names] == pytest.approx([one[name] for name in names], rel=1e-5, abs=1e-6)
