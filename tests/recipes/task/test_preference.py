"""Preference tuning in a run: where it begins, what it goes on with, and what its reference is."""

import html
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import FaultAt
from lightning.pytorch.callbacks import Callback
from support import composed_config, execute, read_metrics, resolved

import lightning_recipes as lr
from recipes.build import build
from recipes.checkpoint.saved_tensor import open_tensors
from recipes.config import compose_and_check
from recipes.data.preferences import Preferences
from recipes.task.preference import PreferenceTuning
from recipes.task.reference import ReferenceTable

SMALL = (
    *("tokenizer=bytes", "model=gpt2_nano", "model.vocab_size=257", "model.max_seq_len=24", "model.num_layers=2"),
    *("model.num_heads=2", "model.hidden_size=32", "global_batch_size=8", "optimizer.lr=1e-3", "seed=5"),
    *("trainer.accelerator=cpu", "callbacks=[grad_norm,loss_scale]", "log_every=1", "warmup_steps=2"),
)


FSDP = ("strategy=fsdp", "trainer.devices=2")
ZERO_3 = ("strategy=deepspeed_stage_3", "trainer.devices=2")


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
    [
        ("dpo", ()),
        ("dpo", ("adapter=lora", "adapter.r=4")),
        ("dpo", ("task.reference=frozen_copy",)),
        ("kto", ()),
        ("kto", ("task.reference=frozen_copy",)),
        ("orpo", ()),
        ("simpo", ()),
    ],
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


# A frozen copy as the reference.

COPY = ("task.reference=frozen_copy", "scheduler=constant", "model.dropout=0.1")


@pytest.mark.parametrize("recipe", ["dpo", "kto"])
def test_a_frozen_copy_gives_the_losses_and_gradients_of_a_precomputed_reference(
    recipe: str, pairs: Path, tmp_path: Path
) -> None:
    at_once, in_advance = (
        without_times(train(pairs, tmp_path / kind, f"task.reference={kind}", recipe=recipe))
        for kind in ("frozen_copy", "precomputed")
    )
    assert not (tmp_path / "frozen_copy" / "reference.npz").exists()
    for row, expected in zip(at_once, in_advance, strict=True):
        assert row.keys() == expected.keys()
        # float32: a batch is computed with other rows
        assert [*row.values()] == pytest.approx([*expected.values()], rel=1e-6, abs=2e-6)
    if recipe == "dpo":
        assert at_once[0]["train/margin"] == pytest.approx(0, abs=1e-6)
        assert at_once[-1]["train/loss"] < math.log(2) - 0.01, "the trained model leaves the copy"


def test_a_frozen_copy_is_of_the_run_that_was_started_from_after_a_resume_too(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, whole, parted = (tmp_path / name for name in ("first", "whole", "parted"))
    train(pairs, first, "ema_decay=0.5", "seed=7", steps=3)
    start = (*COPY, f"start_from={first}", "start_from_weights=ema")
    rows = without_times(train(pairs, whole, *start))
    train(pairs, parted, *start, steps=3)
    assert execute(f"resume={parted}", "trainer.max_steps=6") == 0
    assert without_times(read_metrics(parted)) == rows, "to the last digit that is logged"
    saved = open_tensors((parted / "checkpoints/step_0000006.ckpt").glob("*.safetensors"))
    names = {name for name in saved if not name.startswith("optimizer/")}
    assert names == {name for name in open_tensors((first / "checkpoints/last").glob("*.safetensors")) if name in names}
    assert not any("reference" in name for name in saved), "the copy is in no checkpoint"
    assert execute("mode=evaluate", f"resume={parted}") == 0
    measured = json.loads((parted / "evaluate_val.json").read_text())
    assert measured["margin"] == pytest.approx(rows[-1]["val/margin"], rel=1e-6)
    assert execute("mode=replay", "mode.step=2", f"resume={parted}") == 0
    lines = [json.loads(line) for line in (parted / "replayed_step_0000002.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == pytest.approx([math.log(2)] * 8, abs=1e-6), "the run began at its copy"
    (first / "checkpoints").rename(tmp_path / "elsewhere")
    capsys.readouterr()
    assert execute("mode=evaluate", f"resume={parted}") == 2
    assert "the weights that the run started from are needed again" in capsys.readouterr().out
    assert lr.load(parted)(torch.zeros(1, 4, dtype=torch.int64)).shape[:2] == (1, 4), "without its reference"


def test_a_copy_of_other_weights_than_those_of_the_start_is_refused(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(pairs, tmp_path / "run", *COPY, steps=3)
    train(pairs, tmp_path / "precomputed", steps=3)
    capsys.readouterr()
    assert execute(f"resume={tmp_path / 'run'}", "trainer.max_steps=6", "seed=6") != 0
    assert "the weights that the run began with were drawn from seed=5" in capsys.readouterr().out
    changed = (f"resume={tmp_path / 'precomputed'}", "trainer.max_steps=6", "task.reference=frozen_copy")
    assert execute(*changed) != 0
    assert "no checkpoint of it says with which weights it began" in capsys.readouterr().out


class DrawnPairs(Preferences):
    """Pairs whose rows change with every reading, as data that is generated does."""

    def train(self) -> Any:
        dataset: Any = super().train()

        def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
            found = dataset[(index + int(rng.integers(len(dataset)))) % len(dataset)]
            return found | {"id": torch.tensor(int(rng.integers(1 << 60)))}

        dataset.sample = sample
        return dataset


def test_samples_that_are_drawn_while_the_run_goes_have_a_reference_in_a_frozen_copy(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = f"data._target_={__name__}.DrawnPairs"
    assert train(pairs, tmp_path / "copy", drawn, *COPY[:2])[0]["train/margin"] == pytest.approx(0, abs=1e-6)
    last = read_metrics(tmp_path / "copy")[-1]
    assert 0.1 < last["train/loss"] < math.log(2) - 0.01
    places = [f"data.path={pairs}", f"data.cache_dir={tmp_path}", f"hydra.run.dir={tmp_path / 'run'}"]
    capsys.readouterr()
    assert execute("recipe=dpo", *SMALL, *places, drawn, f"task.cache_dir={tmp_path}", "trainer.max_steps=1") == 2
    assert "the data draws its samples while the run goes" in capsys.readouterr().out


def test_each_validation_set_of_kto_has_its_own_divergence(pairs: Path, tmp_path: Path) -> None:
    other, run = tmp_path / "other.jsonl", tmp_path / "run"
    rows = [{"prompt": f"{row}?", "completion": "ab" * (1 + row % 3), "label": row % 2 == 0} for row in range(40, 48)]
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    further = (
        "+data@eval_data.other=preferences",
        f"eval_data.other.path={pairs}",
        f"eval_data.other.val_path={other}",
    )
    found = train(pairs, run, *further, "eval_data.other.kind=answers", "optimizer.lr=1e-2", recipe="kto", steps=3)[-1]
    assert found["val/other/kl"] > found["val/kl"] + 0.01, "all its answers have become more probable"
    assert execute("mode=evaluate", f"resume={run}", f"data.val_path={other}") == 0
    alone = json.loads((run / "evaluate_val.json").read_text())
    assert found["val/other/kl"] == pytest.approx(alone["kl"], rel=1e-5), "that of the set alone"
    assert found["val/other/loss"] == pytest.approx(alone["loss"], rel=1e-5)


@pytest.mark.parametrize("more", [(), ("adapter=lora", "adapter.r=4"), ("task.reference=frozen_copy",)])
def test_every_pass_of_kto_is_in_the_precision_of_the_run(
    more: tuple[str, ...], pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, is_mixed = PreferenceTuning._measure_answers, list[bool]()

    def record(task: PreferenceTuning, *given: Any, **options: Any) -> torch.Tensor:
        is_mixed.append(torch.is_autocast_enabled("cpu"))
        return measure(task, *given, **options)

    monkeypatch.setattr(PreferenceTuning, "_measure_answers", record)
    train(pairs, tmp_path / "run", "precision=bf16-mixed", *more, recipe="kto", steps=3)
    assert len(is_mixed) > 6
    assert all(is_mixed), "in float32 a divergence would be of other weights than the losses are"


@pytest.mark.parametrize("reference", ["precomputed", "frozen_copy"])
def test_predictions_are_compared_with_the_reference_of_the_run(reference: str, pairs: Path, tmp_path: Path) -> None:
    rows = train(pairs, tmp_path / "run", f"task.reference={reference}", steps=3)
    assert execute("mode=predict", f"resume={tmp_path / 'run'}") == 0
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run/predictions_val.jsonl").read_text().splitlines()]
    assert sum(losses) / len(losses) == pytest.approx(rows[-1]["val/loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        (("task.reference=frozen_copy", "adapter=lora"), "would hold them twice; type task.reference=adapter_off"),
        (
            ("adapter=lora", "adapter.modules_to_save=[lm_head]"),
            "change in the training; type adapter.modules_to_save=[]",
        ),
        (("task.reference=precomputed", "adapter=lora", "adapter.modules_to_save=[lm_head]"), "change in the training"),
        (("task.reference=frozen_copy", *ZERO_3), "and of no reference beside it; type strategy=fsdp"),
        (("task.reference=frozen_copy", "tensor_parallel_size=2", *FSDP), "type tensor_parallel_size=1, or task"),
        (("task.reference=frozen_copy", "loss=simpo"), "asks no reference; type task.reference=auto"),
        (("task.reference=adapter_off",), "no adapter to switch off; type adapter=lora"),
        (("pipeline_parallel_size=2", *FSDP), "in different micro-batches of the pipeline; type pipeline_par"),
        (("context_parallel_size=2", *FSDP), "would be on several ranks; type context_parallel_size=1"),
        (("model=mixtral_nano",), "an answer counts as a whole; type model=<one without experts>"),
    ],
)
def test_what_a_reference_cannot_be_is_said_at_once_in_one_sentence(typed: tuple[str, ...], reason: str) -> None:
    _, mistakes = compose_and_check(("recipe=dpo", f"data.path={__file__}", "tokenizer=bytes", *typed))
    assert len(mistakes) == 1, [str(mistake) for mistake in mistakes]
    assert reason in str(mistakes[0])


class SkipsAfter(Callback):
    """Passes over some steps' worth of data after a step."""

    def __init__(self, step: int, num_steps: int) -> None:
        self._step, self._num_steps = step, num_steps

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self._step:
            trainer.datamodule.skip_batches(self._num_steps)


ROLLED_BACK = (
    *("callbacks=[grad_norm,loss_spike]", "callbacks.loss_spike.action=rollback"),
    *("callbacks.loss_spike.max_non_finite=1", "callbacks.loss_spike.window=16", "callbacks.loss_spike.warmup_steps=8"),
    *("callbacks.loss_spike.snapshot_every=4", "callbacks.loss_spike.quarantine_steps=4", "eval_every=6"),
    *("trainer.max_steps=12", "save_every=null", "scheduler=constant"),
)


@pytest.mark.parametrize(
    ("recipe", "more"), [("dpo", ()), ("dpo", ("adapter=lora", "adapter.r=4")), ("kto", ()), ("reward_model", ())]
)
def test_a_rollback_leaves_the_curve_of_a_run_that_never_read_the_samples_of_undone_steps(
    recipe: str, more: tuple[str, ...], pairs: Path, tmp_path: Path
) -> None:
    def train_with(name: str, *callbacks: Callback) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
        places = [f"data.path={pairs}", f"data.cache_dir={tmp_path}", f"hydra.run.dir={tmp_path / name}"]
        places += [] if recipe == "reward_model" else [f"task.cache_dir={tmp_path}"]
        own = [override for override in SMALL if not override.startswith("callbacks")]
        (tmp_path / name).mkdir()
        run = build(resolved(composed_config(f"recipe={recipe}", *more, *own, *places, *ROLLED_BACK), tmp_path / name))
        run.data.prepare_data()
        run.trainer.callbacks[:0] = list(callbacks)  # type: ignore[attr-defined]
        run.trainer.fit(run.task, datamodule=run.data)
        events = [json.loads(line) for line in (tmp_path / name / "events.jsonl").read_text().splitlines()]
        return read_metrics(tmp_path / name), events

    faults = [FaultAt(kind="inf_gradient", step=step) for step in (2, 8, 9)]  # steps 3, 9 and 10, counted from 1
    rows, events = train_with("spiked", *faults)
    [rollback] = [event for event in events if event["event"] == "rollback"]
    assert (rollback["from"], rollback["step"], rollback["position"]) == (10, 4, 80)
    assert [event["step"] for event in events if event["event"] == "skip"] == [3, 9, 10]
    assert rows[-1]["train/samples"] == 8 * (12 + 6)
    others, _ = train_with("skipping", FaultAt(kind="inf_gradient", step=2), SkipsAfter(4, 6))
    read = ("train/samples", "train/tokens")  # of undone steps, too
    found, expected = (
        [{name: value for name, value in row.items() if name not in read} for row in without_times(of_run)]
        for of_run in (rows, others)
    )
    assert found == expected, "to the last digit that is logged"
    assert len(found) == 12
    assert len({row["train/loss"] for row in found}) == 12


def test_dropout_is_reported_because_rewards_then_do_not_begin_at_zero(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = train(pairs, tmp_path / "clean", steps=1)
    assert rows[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert "do not begin at 0" not in capsys.readouterr().out
    rows = train(pairs, tmp_path / "noisy", "model.dropout=0.2", steps=1)
    assert abs(rows[0]["train/chosen_reward"]) > 1e-4
    assert "do not begin at 0" in capsys.readouterr().out


def test_a_reference_of_the_precision_of_training_begins_at_zero(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """dpo#34, trl#1236: a reference in another precision than the forward pass has rewards that are not 0."""
    for precision in ("bf16-mixed", "bf16-true"):
        for packing in (False, True):
            folder = tmp_path / f"{precision}_{packing}"
            rows = train(pairs, folder, f"precision={precision}", f"data.packing={packing}", "loss.beta=0.1", steps=1)
            # 8 bits of mantissa: other batches than those of the reference round otherwise
            assert rows[0]["train/loss"] == pytest.approx(math.log(2), abs=5e-3), precision
            assert abs(rows[0]["train/chosen_reward"]) < 0.03
            assert "do not begin at 0" not in capsys.readouterr().out


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


@pytest.mark.parametrize("recipe", ["dpo", "kto"])
def test_losses_of_samples_are_measured_against_the_reference_of_the_run(
    recipe: str, pairs: Path, tmp_path: Path
) -> None:
    small = ("micro_batch_size=4", "data.val_fraction=0.3")
    rows, run = train(pairs, tmp_path / "run", *small, recipe=recipe), tmp_path / "run"
    assert execute("mode=predict", f"resume={run}") == 0
    predicted = [json.loads(line)["loss"] for line in (run / "predictions_val.jsonl").read_text().splitlines()]
    assert sum(predicted) / len(predicted) == pytest.approx(rows[-1]["val/loss"], rel=1e-5)  # float32
    assert execute("mode=replay", f"resume={run}", "mode.step=4") == 0  # with the weights of step 3
    replayed = [json.loads(line) for line in (run / "replayed_step_0000004.jsonl").read_text().splitlines()]
    assert sum(row["loss"] for row in replayed) / len(replayed) == pytest.approx(rows[3]["train/loss"], rel=1e-5)
    for row in replayed:
        line = int(row["documents"][0]["name"].partition(":")[2]) - 1
        chosen, rejected = f"{line}?{'ab' * (1 + line % 4)}", f"{line}?{'ba' * (1 + line % 3)}c"
        assert row["text"] in ([f"{chosen}\n\n{rejected}"] if recipe == "dpo" else [chosen, rejected])


@pytest.mark.parametrize("recipe", ["dpo", "kto"])
def test_a_spike_is_recomputed_against_the_reference_of_the_run(recipe: str, pairs: Path, tmp_path: Path) -> None:
    fault = ("_target_=faults.FaultAt", "kind=inf_gradient", "step=4")  # its loss is not touched
    callbacks = ("callbacks=[loss_spike]", *(f"+callbacks.fault.{setting}" for setting in fault))
    train(pairs, tmp_path / "run", "micro_batch_size=4", *callbacks, recipe=recipe)
    assert execute("mode=replay", f"resume={tmp_path / 'run'}", "mode.step=5", f"++callbacks.fault.{fault[0]}") == 0
    dump = tmp_path / "run/spikes/step_0000005"
    recorded, replayed = (json.loads((dump / f"{name}.json").read_text()) for name in ("spike", "replay"))
    assert recorded["loss"] < (math.log(2) if recipe == "dpo" else 0.5) - 1e-3, "another one than at the start"
    assert replayed["loss"] == pytest.approx(recorded["loss"], rel=1e-5)
    losses = [json.loads(line)["loss"] for line in (dump / "samples.jsonl").read_text().splitlines()]
    assert sum(losses) / len(losses) == pytest.approx(recorded["loss"], rel=1e-5)


def test_a_replayed_sample_has_the_text_of_both_its_answers(pairs: Path, tmp_path: Path) -> None:
    train(pairs, tmp_path / "run", "save_every=1", "data.packing=true", "trainer.max_steps=2")
    assert execute("mode=replay", f"resume={tmp_path / 'run'}", "mode.step=1") == 0
    rows = map(json.loads, (tmp_path / "run" / "replayed_step_0000001.jsonl").open())
    known = [json.loads(line) for line in pairs.read_text().splitlines()]
    shown = 0
    for row in rows:
        pair = known[int(row["documents"][0]["name"].rsplit(":", 1)[1]) - 1]
        assert row["text"] == "\n\n".join(pair["prompt"] + pair[name] for name in ("chosen", "rejected"))
        shown += 1
    assert shown == 8


def test_a_run_without_its_table_says_what_is_missing(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(pairs, tmp_path / "run", steps=3)
    (tmp_path / "run" / "reference.npz").unlink()
    assert execute(f"resume={tmp_path / 'run'}", "trainer.max_steps=6") != 0
    assert "reference.npz is not there" in capsys.readouterr().out
    assert execute("mode=predict", f"resume={tmp_path / 'run'}") != 0
    assert "reference.npz is not there" in capsys.readouterr().out


def test_another_folder_takes_the_table_of_the_run_whose_checkpoint_it_reads(pairs: Path, tmp_path: Path) -> None:
    trained = train(pairs, tmp_path / "run", steps=3)
    resume = f"resume={tmp_path / 'run'}"
    assert execute("mode=evaluate", resume, f"hydra.run.dir={tmp_path / 'scores'}") == 0
    assert not (tmp_path / "scores/reference.npz").exists()
    [scores] = json.loads((tmp_path / "scores/summary.json").read_text())["evaluations"].values()
    assert scores["loss"] == pytest.approx(trained[-1]["val/loss"], rel=1e-5)
    assert execute(resume, "trainer.max_steps=6", f"hydra.run.dir={tmp_path / 'other'}") == 0
    assert (tmp_path / "other/reference.npz").read_bytes() == (tmp_path / "run/reference.npz").read_bytes()


def test_the_report_shows_answers_of_the_start_beside_the_newest_and_both_of_the_row(
    pairs: Path, tmp_path: Path
) -> None:
    answering = (
        "callbacks=preferences",
        "callbacks.generation_eval.num_samples=3",
        "callbacks.generation_eval.max_new_tokens=4",
    )
    train(pairs, tmp_path / "run", *answering, "scheduler=constant", "optimizer.lr=1e-2", steps=3)
    written = [json.loads(line) for line in (tmp_path / "run" / "answers.jsonl").open()]
    assert [row["step"] for row in written] == [0, 0, 0, 3, 3, 3]
    known = {row["prompt"]: row for row in map(json.loads, pairs.read_text().splitlines())}
    for row in written:
        assert (row["expected"], row["rejected"]) == tuple(
            known[row["question"]][name] for name in ("chosen", "rejected")
        )
    assert execute(f"resume={tmp_path / 'run'}", "trainer.max_steps=6") == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "answers.jsonl").open()]
    assert rows[:6] == written
    assert [row["step"] for row in rows[6:]] == [6, 6, 6], "a resumed run does not begin again"
    evaluate = ("mode=evaluate", f"resume={tmp_path / 'run'}")
    assert execute(*evaluate) == 0
    assert len([*(tmp_path / "run" / "answers.jsonl").open()]) == 9
    page = (tmp_path / "run" / "report.html").read_text()
    for name in ("answer of the start", "answer at step 6", "chosen", "rejected"):
        assert f"<th>{name}</th>" in page
    for row in (*rows[:3], *rows[6:]):
        assert html.escape(row["given"]) in page


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
