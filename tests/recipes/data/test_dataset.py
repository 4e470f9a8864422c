"""A torch Dataset of one's own: its samples, order and draws are those of any source, bit for bit."""

import csv
import json
import random
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dataset_cases
import numpy as np
import pytest
import torch
from doc_pages import BLOCKS, OWN_DATA
from streams import open_stream, take
from support import composed_config, execute, read_metrics
from torch import Tensor

from recipes.config import compose_and_check
from recipes.data import prepare_with
from recipes.data.dataset import OwnDataset
from recipes.errors import ConfigError
from recipes.preflight.data import check_draws

TRAIN = "data.train={_target_: dataset_cases.Rows, seed: 1}"
VAL = "data.val={_target_: dataset_cases.Rows, seed: 2}"
ROWS = ("task=regression", "data=dataset", "data.target_kind=values", "data.inputs=x", "data.targets=y", TRAIN, VAL)
PERCEPTRON = "model._target_=dataset_cases.Perceptron"


def own(dataset: Any, val: Any = None, **settings: Any) -> OwnDataset:
    """Return the source of a dataset, prepared."""
    defaults = {"kind": "tensors", "target_kind": "classes", "inputs": "inputs", "targets": "targets"}
    source = OwnDataset(
        **{"train": lambda: dataset, "val": lambda: val or dataset, "test": None, "predict": None}
        | {"draws": True, "collate": None}
        | defaults
        | settings
    )
    prepare_with(source, None)
    return source


@pytest.fixture(scope="module")
def drawn() -> OwnDataset:
    return own(dataset_cases.Drawn(seed=1))


@pytest.fixture(scope="module")
def whole(drawn: OwnDataset) -> Tensor:
    """Return the first 80 rows of the stream, two epochs and six rows."""
    return take(open_stream(drawn)[1], 10)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_draws_of_global_generators_are_the_same_for_any_loader_processes_and_after_a_resume_within_an_epoch(
    drawn: OwnDataset, num_workers: int, whole: Tensor
) -> None:
    random.seed(num_workers)  # the state of the process does not matter
    assert torch.equal(take(open_stream(drawn, num_workers=num_workers)[1], 3), whole[:24])
    assert torch.equal(take(open_stream(drawn, num_workers=num_workers, position=56)[1], 3), whole[56:])
    assert torch.equal(take(open_stream(own(dataset_cases.Drawn(seed=1)), position=56)[1], 3), whole[56:])


def test_two_ranks_draw_the_rows_of_one(drawn: OwnDataset, whole: Tensor) -> None:
    ranks = [open_stream(drawn, micro_batch_size=4, world_size=2, rank=rank)[1] for rank in (0, 1)]
    assert torch.equal(torch.cat([take(batches, 1) for _ in range(10) for batches in ranks]), whole)
    late = [open_stream(drawn, micro_batch_size=2, world_size=2, rank=rank, position=40)[1] for rank in (0, 1)]
    assert torch.equal(torch.cat([take(batches, 1) for _ in range(10) for batches in late]), whole[40:])


def test_epochs_draw_differently_and_a_validation_always_the_same(drawn: OwnDataset, whole: Tensor) -> None:
    assert len({tuple(row) for row in whole.tolist()}) == 80
    assert torch.equal(drawn.val()[5]["inputs"], drawn.val()[5]["inputs"])


def test_the_generators_of_the_process_are_neither_read_nor_moved(drawn: OwnDataset) -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = random.Random(1).random(), np.random.RandomState(1).rand(), torch.initial_seed()
    drawn.train()[0]
    take(open_stream(drawn)[1], 1)
    assert (random.random(), np.random.rand(), torch.initial_seed()) == expected
    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(1))


def test_a_generator_of_the_datasets_own_is_found_by_preflight() -> None:
    assert check_draws(own(dataset_cases.Remembering(seed=1)).train(), seed=1).status == "fail"
    assert check_draws(own(dataset_cases.Drawn(seed=1)).train(), seed=1).status == "pass"
    plain = own(dataset_cases.Rows(seed=1), inputs="x", targets="y", target_kind="values").train()
    assert check_draws(plain, seed=1).found.endswith("nothing is drawn")


def test_a_dict_becomes_float32_inputs_and_targets_and_keeps_its_other_numbers() -> None:
    source = own(dataset_cases.Rows(seed=1), inputs="x", targets="y", target_kind="values")
    sample = source.train()[3]
    row = np.random.default_rng(1).standard_normal((37, 8))[3]
    assert torch.equal(sample["inputs"], torch.from_numpy(row).float())
    assert sample["targets"].tolist() == [np.float32(row.sum())]
    assert sample["weight"] == 2.0
    assert "file" not in sample
    rows = "37 training and 37 validation samples of Rows"
    assert source.describe() == f"{rows}: weight float32 [], inputs float32 [8], targets float32 [1]"


def test_whole_numbers_that_are_values_may_be_minus_100() -> None:
    """As a class, -100 has no loss."""
    sample = own(dataset_cases.Whatever((torch.zeros(2), -100)), target_kind="values").train()[0]
    assert sample["targets"].dtype == torch.float32
    assert sample["targets"] == -100


def test_other_samples_have_another_fingerprint() -> None:
    first, same, other, longer = (
        own(dataset_cases.Rows(seed=seed, num_rows=rows), inputs="x", targets="y", target_kind="values").fingerprint
        for seed, rows in ((1, 37), (1, 37), (2, 37), (1, 38))
    )
    assert first == same
    assert len({first, other, longer}) == 3


def test_samples_of_different_lengths_are_padded_by_a_function_of_the_users() -> None:
    class Ragged(dataset_cases.Rows):
        def __getitem__(self, index: int) -> Any:
            return torch.ones(1 + index % 3), 0

    def pad(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        rows = torch.nn.utils.rnn.pad_sequence([sample["inputs"] for sample in samples], batch_first=True)
        return {"inputs": rows, "targets": torch.stack([sample["targets"] for sample in samples])}

    with pytest.raises(ConfigError, match=r"different shapes, \[1\] and \[3\]; type 'data.collate="):
        own(Ragged(seed=1))
    assert next(open_stream(own(Ragged(seed=1), collate=pad))[1])["inputs"].shape == (8, 3)


WRONG = {
    "a stream": (dataset_cases.Endless(), "Endless: it is an IterableDataset, which has no sample at an index:"),
    "no length": (
        dataset_cases.NoLength(),
        "NoLength: it has no __len__, by which samples are found; type def __len__",
    ),
    "neither": (object(), "object: it has no __len__ and no __getitem__, by which samples are found; type def __len"),
    "empty": (dataset_cases.Whatever(length=0), "Whatever: it has no samples; type data.train.<setting>=<value>"),
    "three parts": (dataset_cases.Whatever((1, 2, 3)), "a sample of it is a tuple of 3, and neither a pair"),
    "a text": (dataset_cases.Whatever("a"), "a sample of it is of type builtins.str, and neither a pair"),
    "no tensor": (dataset_cases.Whatever((object(), 1)), "the inputs of a sample are of type builtins.object, not"),
    "other names": (
        dataset_cases.Whatever({"x": 1, "targets": 2}),
        "dict of x, targets, and has no 'inputs'; type data.",
    ),
    "a name of ours": (
        dataset_cases.Whatever({"inputs": 1, "targets": 2, "source": 3}),
        "a sample of it has 'source', which is a name of the batch's own; type another name for 'source'",
    ),
    "classes as floats": (dataset_cases.Whatever((1.0, 2.0)), "and classes are whole numbers; type data.target_kind=v"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_dataset_is_answered_in_three_clauses(name: str) -> None:
    dataset, words = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        own(dataset)
    assert words in str(caught.value)
    assert str(caught.value).startswith(("data.train._target_=", "data.target_kind=classes data.train._target_="))


def test_images_are_floating_point_numbers_of_three_axes() -> None:
    with pytest.raises(ConfigError, match="a sample has uint8"):
        own(dataset_cases.Whatever((torch.zeros(3, 8, 8, dtype=torch.uint8), 1)), kind="images")
    assert own(dataset_cases.Whatever((torch.zeros(3, 8, 8), 1)), kind="images").sample_kind == "images"


def test_a_source_that_lacks_members_is_told_all_of_them() -> None:
    class Incomplete:
        def prepare(self) -> None: ...
        def train(self) -> Any:
            return [{"inputs": 0}]

    with pytest.raises(ConfigError) as caught:
        prepare_with(Incomplete(), None)
    missing = "Incomplete has no val and no fingerprint and no describe and no tokenizer"
    assert f".Incomplete: {missing}, see docs/reference/protocols.md; type in the class Incomplete: " in str(
        caught.value
    )

    class NoTargets(Incomplete):
        val, fingerprint, describe, tokenizer = Incomplete.train, "", str, None

    with pytest.raises(ConfigError, match=r"has no targets_per_sample, see .*; type in the"):
        prepare_with(NoTargets(), None)


def mistakes_of(*overrides: str) -> list[str]:
    return [str(mistake) for mistake in compose_and_check(overrides)[1]]


def test_a_model_of_another_kind_is_answered_with_what_to_type() -> None:
    assert mistakes_of(*ROWS) == [
        "model=gpt2_nano data=dataset: the model takes tokens, the data gives tensors; type model=mlp"
    ]
    [mistake] = mistakes_of("model=resnet18", "data=dataset", TRAIN, VAL)
    assert mistake.endswith("or data.kind=images")
    assert mistakes_of(*ROWS[:2], *ROWS[3:], PERCEPTRON) == [
        "loss=mse data=dataset: the loss reads values, the targets of the data are classes; type"
        " data.target_kind=values"
    ]


def test_a_dataset_that_is_not_typed_is_asked_for() -> None:
    assert mistakes_of("data=dataset", "data.kind=images", "model=resnet18", VAL) == [
        "no data.train: it has no default; type 'data.train={_target_: <module.Class>}'"
    ]


def test_a_class_in_the_place_of_another_needs_no_deletion_of_its_settings() -> None:
    config = composed_config(*ROWS, PERCEPTRON, "model.width=4", "loss._target_=dataset_cases.Cubed")
    defaults = {"num_inputs": 8, "num_outputs": 1}  # of the class, which a run folder keeps
    assert config["model"] == {"_target_": "dataset_cases.Perceptron", "width": 4} | defaults
    assert config["loss"] == {"_target_": "dataset_cases.Cubed"}
    assert config["seq_len"] is None, "that of the model which was replaced"
    nested = composed_config(*ROWS, "model={_target_: dataset_cases.Perceptron, width: 4}")
    assert nested["model"] == config["model"]
    plain = composed_config(*ROWS[:5], VAL, PERCEPTRON, "data.train._target_=dataset_cases.Rows", "data.train.seed=7")
    assert plain["data"]["train"] == {"_target_": "dataset_cases.Rows", "seed": 7, "num_rows": 37}


@pytest.mark.parametrize(
    ("inputs", "where"),
    [
        (torch.tensor([1.0, torch.nan, torch.inf]), "at index 1, 2"),
        (torch.tensor([[1.0, torch.nan]]), "at index [0, 1]"),
        (torch.tensor(torch.nan), "at index 0"),
        (torch.full((9,), torch.nan), "at index 0, 1, 2, 3, 4, …"),
    ],
)
def test_inputs_of_nan_or_inf_are_a_mistake_with_their_places(inputs: Tensor, where: str) -> None:
    with pytest.raises(ConfigError) as error:
        own(dataset_cases.Whatever((torch.zeros_like(inputs), 0)), val=dataset_cases.Whatever((inputs, 0)))
    assert error.value.setting == "data.val._target_=dataset_cases.Whatever"
    assert error.value.reason == (
        f"the inputs of 5 of the 5 samples tried hold NaN or inf, {where}, and with them the loss is NaN"
    )


def test_inputs_of_nan_are_left_to_a_collate_of_ones_own_and_targets_have_no_loss() -> None:
    own(dataset_cases.Whatever((torch.tensor([torch.nan]), 0)), collate=torch.utils.data.default_collate)
    own(dataset_cases.Whatever((torch.zeros(1), torch.nan)), target_kind="values")


def test_a_typed_setting_that_the_class_lacks_is_still_a_mistake() -> None:
    assert mistakes_of(*ROWS, PERCEPTRON, "model.num_layers=4") != []
    assert mistakes_of(*ROWS, PERCEPTRON, "model.widht=4") == [
        "model.widht=4: there is no 'model.widht'; type model.width=4"
    ]


@pytest.mark.parametrize("target", ["torch.nn.MSELoss", "torch.nn.CrossEntropyLoss"])
def test_a_loss_of_torch_is_told_what_it_lacks(target: str) -> None:
    [mistake] = [mistake for mistake in mistakes_of(*ROWS, PERCEPTRON, f"loss._target_={target}") if "loss." in mistake]
    name = target.rpartition(".")[2]
    assert mistake == (
        f"loss._target_={target}: {name} is no loss of sums and counts, which has the methods __call__(), counts(),"
        " per_sample(); type loss=<an option of conf/loss/>, or a class of yours that is derived from"
        " recipes.loss.TargetLoss"
    )


def test_a_loss_or_task_with_a_method_too_few_is_told_which() -> None:
    assert mistakes_of(*ROWS, PERCEPTRON, "loss._target_=dataset_cases.WithoutLosses") == [
        "loss._target_=dataset_cases.WithoutLosses: WithoutLosses has no losses(), which its base leaves to it; type"
        " def losses(self, …) in that class"
    ]
    [mistake] = mistakes_of(*ROWS, PERCEPTRON, "task._target_=recipes.task.base.TrainingTask")
    assert mistake.startswith("task._target_=recipes.task.base.TrainingTask: TrainingTask has no outputs(), which")


def test_digits_as_a_dataset_have_the_losses_of_digits_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    common = ["model=resnet18", "model._target_=small_models.SmallClassifier", "recipe=single_fp32", "callbacks=[]"]
    common += ["trainer.max_steps=12", "eval_every=6", "log_every=1", "save_every=null"]
    common += ["global_batch_size=24", "micro_batch_size=8"]
    own_data = [f"data.{split}={{_target_: dataset_cases.DigitPairs, split: {split}}}" for split in ("train", "val")]
    found = []
    for name, data in (("ours", ["data=digits"]), ("own", ["data=dataset", "data.kind=images", *own_data])):
        assert execute(*common, *data, f"hydra.run.dir={tmp_path / name}") == 0
        rows = read_metrics(tmp_path / name)
        found.append([(row.get("train/loss"), row.get("val/loss"), row.get("val/accuracy")) for row in rows])
    assert found[0] == found[1]
    assert len(found[0]) == 12


def test_rows_train_resume_and_are_evaluated_as_by_a_loop_of_plain_torch(tmp_path: Path) -> None:
    """Resumed in the middle of the second epoch; SGD without momentum, so that the loop is four lines."""
    typed = [*ROWS, PERCEPTRON, "optimizer=sgd", "optimizer.lr=0.01", "optimizer.momentum=0", "scheduler=constant"]
    typed += ["optimizer.nesterov=false", "log_every=1"]
    typed += ["recipe=single_fp32", "callbacks=[]", "global_batch_size=8", "warmup_steps=0", "save_every=6", "seed=5"]
    typed += ["optimizer.weight_decay=0", "trainer.gradient_clip_val=null", f"hydra.run.dir={tmp_path}", "resume=auto"]
    for steps in (6, 10):
        assert execute(*typed, f"trainer.max_steps={steps}") == 0
    losses = [row["train/loss"] for row in read_metrics(tmp_path) if "train/loss" in row]

    from recipes.data.order import ShuffledOrder

    dataset, order, model = dataset_cases.Rows(seed=1), ShuffledOrder(37, 5), dataset_cases.Perceptron()
    model.init_weights(5)
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.01), []
    for step in range(10):
        batch = [dataset[order(8 * step + row)] for row in range(8)]
        rows, sums = (torch.tensor(np.array([sample[key] for sample in batch])).float() for key in ("x", "y"))
        loss = (model(rows) - sums).square().sum() / 8
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        expected.append(loss.item())
    assert losses == [float(f"{loss:.9g}") for loss in expected], "as metrics.csv has them, all digits of float32"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Make the files of the page in the working folder; return its commands that have a text, without `python`."""
    blocks = [block for block in BLOCKS if block.page.name == "own_data.md"]
    code = [block.text for block in blocks if block.language == "python" and block.comment is None]
    for file, text in zip(OWN_DATA, code, strict=False):
        (tmp_path / file).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    commands = [block.text for block in blocks if block.language == "sh"]

    def type_command(part: str) -> list[str]:
        words = shlex.split(next(text for text in commands if part in text).replace("\\\n", " "))
        return words[words.index("train.py") + 1 :]

    return type_command


def test_the_table_of_the_page_trains_predicts_and_loads(page: Callable[[str], list[str]]) -> None:
    draw = random.Random(1)
    lines = ["area,rooms,age,city,price"]
    for row in range(100):
        area, rooms, city = draw.randint(30, 200), draw.randint(1, 6), draw.choice(["Bonn", "Mainz", "Trier"])
        lines.append(f"{area if row % 9 else ''},{rooms},{draw.randint(0, 90)},{city},{2000 * area + 9000 * rooms}")
    Path("houses.csv").write_text("\n".join(lines) + "\n")
    assert execute(*page("split: val"), "callbacks=[]") == 0
    assert read_metrics(Path("logs/houses"))[-1]["val/r2"] > 0.5
    assert execute(*page("mode=predict")) == 0
    predicted = list(csv.DictReader(Path("predictions.csv").read_text().splitlines()))
    found: dict[str, Any] = {}
    exec(next(block.text for block in BLOCKS if block.page.name == "own_data.md" and block.comment == "excerpt"), found)
    val, prices = found["new"], [float(line.rpartition(",")[2]) for line in lines[1::5]]
    values = torch.tensor([float(row["values"]) for row in predicted])
    torch.testing.assert_close(found["prices"], val.to_price(values))
    torch.testing.assert_close(val.to_price(val.y), torch.tensor(prices))
    Path("houses.csv").unlink()
    Path("new.csv").write_text("\n".join(line.rpartition(",")[0] for line in [lines[0], *lines[1::5]]) + "\n")
    assert execute(*page("new_prices.csv")) == 0
    again = list(csv.DictReader(Path("new_prices.csv").read_text().splitlines()))
    assert [list(row) for row in again] == [["sample", "values"]] * 20
    assert [float(row["values"]) for row in again] == pytest.approx(values.tolist(), rel=1e-5)


def test_the_texts_with_labels_of_the_page_are_learned(page: Callable[[str], list[str]]) -> None:
    rows = [f"a {'fine' if row % 2 else 'dull'} film {row},{'good' if row % 2 else 'bad'}" for row in range(60)]
    Path("reviews.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    assert execute(*page("reviews.Reviews"), "callbacks=[]") == 0
    assert read_metrics(Path("logs/reviews"))[-1]["val/accuracy"] == 1.0
    Path("reviews.csv").unlink()
    Path("new.csv").write_text("text\na dull evening\nfine\n")
    assert execute(*page("labels.jsonl")) == 0
    rows = [json.loads(line) for line in Path("labels.jsonl").read_text().splitlines()]
    assert [row["class_name"] for row in rows] == ["bad", "good"]


def test_the_example_of_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [block for block in BLOCKS if block.page.name == "own_data.md"]
    code = next(block.text for block in blocks if block.language == "python")
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 40
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    command = next(block.text for block in blocks if "data=dataset" in block.text and block.language == "sh")
    words = shlex.split(command.replace("\\\n", " "))
    typed = words[words.index("train.py") + 1 :]
    assert execute(*typed, "callbacks=[]", "save_every=null", f"hydra.run.dir={tmp_path / 'run'}") == 0
    losses = [row["train/loss"] for row in read_metrics(tmp_path / "run") if "train/loss" in row]
    assert losses[-1] < losses[0] / 2
