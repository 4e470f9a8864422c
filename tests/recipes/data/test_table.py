"""Tables of numbers: what a row becomes, and scaling by the training rows alone."""

import numpy as np
import pytest
import torch

from recipes.data.table import Table
from recipes.data.targets import TargetColumns
from recipes.errors import ConfigError


def table_of(path, **settings):
    known = {"path": str(path), "inputs": None, "targets": "y", "target_kind": "classes", "separator": None}
    known |= {"standardize": True, "on_missing": "error", "val_path": None, "val_fraction": 0.3, "split": "train"}
    return Table(**known | settings)


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def numbers(tmp_path):
    rng = np.random.default_rng(0)
    rows = [f"{a:.6f},{b:.6f},{'pos' if a > 5 else 'neg'}" for a, b in rng.normal(5, 3, size=(60, 2))]
    return write(tmp_path / "t.csv", "a,b,y", *rows)


def mistake(*arguments, **settings):
    with pytest.raises(ConfigError) as caught:
        table_of(*arguments, **settings).prepare()
    return str(caught.value)


def stacked(rows):
    return torch.stack([rows[index]["inputs"] for index in range(len(rows))])


def test_inputs_of_training_have_mean_0_and_deviation_1_and_validation_is_scaled_by_training(numbers):
    scaled, raw = table_of(numbers), table_of(numbers, standardize=False)
    scaled.prepare()
    raw.prepare()
    inputs = stacked(scaled.train())
    torch.testing.assert_close(inputs.mean(dim=0), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(inputs.std(dim=0, correction=0), torch.ones(2), atol=1e-6, rtol=0)
    of_training = stacked(raw.train())
    expected = (stacked(raw.val()) - of_training.mean(dim=0)) / of_training.std(dim=0, correction=0)
    torch.testing.assert_close(stacked(scaled.val()), expected, atol=1e-5, rtol=1e-5)
    assert scaled.class_names == ["neg", "pos"]
    assert scaled.fingerprint != raw.fingerprint
    assert len(scaled.train()) + len(scaled.val()) == 60


def test_a_constant_column_becomes_0(tmp_path):
    source = table_of(write(tmp_path / "t.csv", "a,b,y", *(f"{i},7,{i % 2}" for i in range(20))))
    source.prepare()
    assert stacked(source.train())[:, 1].tolist() == [0.0] * len(source.train())


def test_a_recorded_scaling_is_used_for_other_rows(numbers, tmp_path):
    trained = table_of(numbers)
    trained.prepare()
    other = write(tmp_path / "other.csv", "a,b,y", *(f"{i},{i},{'neg' if i % 2 else 'pos'}" for i in range(30)))
    source = table_of(other)
    source.use_statistics(trained.statistics)
    source.prepare()
    assert source.statistics == trained.statistics
    late = table_of(numbers, inputs=["a"])
    late.use_statistics(trained.statistics)
    with pytest.raises(ConfigError) as caught:
        late.prepare()
    assert str(caught.value) == "data: the inputs are a, and the run was trained on others; type 'data.inputs=[a, b]'"


def test_an_empty_cell_is_refused_or_the_mean_of_training(tmp_path):
    path = write(tmp_path / "t.csv", "a,b,y", *(f"{i},{'' if i == 3 else 2 * i},{i % 2}" for i in range(20)))
    assert mistake(path) == (
        f"{path} t.csv:5: it has no b, as 1 row of 20 have an empty cell; type data.on_missing=mean for the mean of the"
        " column, or the rows without those"
    )
    source = table_of(path, on_missing="mean", val_path=str(path))
    source.prepare()
    assert source.train()[3]["inputs"][1] == 0.0
    assert "2 empty cells read as the mean" in source.describe()


def test_values_and_labels_are_rows_of_floats(tmp_path):
    path = write(tmp_path / "t.csv", "a,w,h", *(f"{i},{i / 2},{i % 2}" for i in range(20)))
    values = table_of(path, targets=["w", "h"], target_kind="values")
    values.prepare()
    assert values.train()[0]["targets"].shape == (2,)
    assert values.class_names is None
    labels = table_of(path, inputs=["a"], targets=["h"], target_kind="values")
    labels.prepare()
    assert labels.train()[0]["targets"].shape == (1,)
    assert "its w is 1.5, and a label is 0 or 1" in mistake(path, targets=["w", "h"], target_kind="labels")


def test_arrays_of_a_file_are_columns(tmp_path):
    x = np.arange(60.0).reshape(20, 3)
    np.savez(tmp_path / "t.npz", x=x, y=np.arange(20) % 4)
    source = table_of(tmp_path / "t.npz", standardize=False)
    source.prepare()
    both = torch.cat([stacked(source.train()), stacked(source.val())])
    assert sorted(both.tolist()) == x.tolist()
    assert source.statistics["inputs"] == ["x_0", "x_1", "x_2"]
    assert source.class_names == ["0", "1", "2", "3"]
    several = table_of(tmp_path / "t.npz", targets="x", target_kind="values", val_path=str(tmp_path / "t.npz"))
    several.prepare()
    assert several.train()[0]["targets"].shape == (3,)
    np.savez(tmp_path / "bad.npz", x=x, y=np.arange(3))
    assert "its arrays are x [20, 3], y [3]" in mistake(tmp_path / "bad.npz")
    np.savez(tmp_path / "code.npz", x=np.array([{}], dtype=object))
    assert "cannot be read" in mistake(tmp_path / "code.npz")


def test_text_as_an_input_is_refused_with_the_columns_that_are_numbers(tmp_path):
    path = write(tmp_path / "t.csv", "a,city,y", "1,Rome,0", "2,Oslo,1")
    assert mistake(path) == (
        "t.csv:2: its city is 'Rome', which is no number, and inputs are numbers; type 'data.inputs=[a]', or a column"
        " of 0 and 1 for each value of city"
    )


@pytest.mark.parametrize(
    ("cells", "names", "numbers"),
    [
        (["b", "a", "b"], ["a", "b"], [1, 0, 1]),
        (["2", "0", "2"], ["0", "1", "2"], [2, 0, 2]),
        ([1.0, 0.0], ["0", "1"], [1, 0]),
        ([True, False], ["0", "1"], [1, 0]),
        (["07", "7"], ["07", "7"], [0, 1]),
        (["-1", "1"], ["-1", "1"], [0, 1]),
    ],
)
def test_whole_numbers_from_0_are_classes_and_anything_else_a_name(cells, names, numbers):
    columns = TargetColumns.of("y", "classes")
    found, known = columns.read([[cell] for cell in cells], [str(i) for i in range(len(cells))], None)
    assert known == names
    assert found.tolist() == numbers


def test_labels_are_lists_or_a_text_with_a_separator():
    lists, names = TargetColumns.of("y", "labels").read([[["b", "a"]], [[]]], ["1", "2"], None)
    assert (lists.tolist(), names) == ([[1, 1], [0, 0]], ["a", "b"])
    texts, names = TargetColumns.of("y", "labels", ";").read([["b; a"], ["a"]], ["1", "2"], None)
    assert (texts.tolist(), names) == ([[1, 1], [1, 0]], ["a", "b"])
    with pytest.raises(ConfigError, match="not a list of labels"):
        TargetColumns.of("y", "labels").read([["a;b"]], ["1"], None)


def test_a_class_is_in_one_column_and_no_number_between():
    with pytest.raises(ConfigError, match="a class is in one column"):
        TargetColumns.of(["y", "z"], "classes")
    with pytest.raises(ConfigError, match="a class is one name or number"):
        TargetColumns.of("y", "classes").read([[0.5]], ["1"], None)
    with pytest.raises(ConfigError, match="the largest class is 99,999,999"):
        TargetColumns.of("y", "classes").read([["99999999"]], ["1"], None)


def test_what_fills_an_empty_cell_is_recorded_without_standardizing(tmp_path):
    rows = [f"{i if i % 4 else ''},{i},{i % 2}" for i in range(40)]
    path = write(tmp_path / "t.csv", "a,b,y", *rows)
    first, resumed = (table_of(path, standardize=False, on_missing="mean") for _ in range(2))
    first.prepare()
    resumed.use_statistics(first.statistics)
    resumed.prepare()
    assert torch.equal(stacked(resumed.train()), stacked(first.train()))
    assert resumed.fingerprint == first.fingerprint
    assert stacked(first.train())[:, 0].min() > 0, "an empty cell is no 0"


def test_times_in_seconds_keep_their_seconds(tmp_path):
    source = table_of(write(tmp_path / "t.csv", "at,y", *(f"{1_700_000_000 + i},{i % 2}" for i in range(60))))
    source.prepare()
    inputs = stacked(source.train())[:, 0]
    assert len(inputs.unique()) == len(inputs), "float32 would keep steps of 128 seconds"
    assert abs(inputs.std(correction=0).item() - 1) < 1e-5


def test_a_blank_class_is_refused_and_no_class_of_its_own(tmp_path):
    rows = [f"{i},{i % 3}" for i in range(20)]
    path = write(tmp_path / "t.csv", "a,y", *rows, '7,"  "')
    assert "it has no y" in mistake(path)


def test_another_table_is_validated_on_as_a_whole(numbers):
    source = table_of(numbers)
    source.hold_out_all()
    source.prepare()
    assert len(source.val()) == 60
