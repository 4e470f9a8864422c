"""Windows are slices of the token file."""

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from recipes.data.text.sequences import TokenWindows, check_length
from recipes.errors import ConfigError


@pytest.fixture
def tokens(tmp_path):
    values = np.arange(60_000, 60_103, dtype=np.uint16)
    values.tofile(tmp_path / "tokens.bin")
    return tmp_path / "tokens.bin", values.astype(np.int64)


def windows(path, **changes):
    settings = {"dtype": "uint16", "seq_len": 10, "start": 0, "stop": 103} | changes
    return TokenWindows(path, **settings)


def test_sample_i_is_tokens_i_times_l_and_each_target_the_next_token(tokens):
    path, values = tokens
    data = windows(path)
    assert len(data) == 10
    for i in range(10):
        assert data[i]["inputs"].dtype == data[i]["targets"].dtype == torch.int64
        assert data[i]["inputs"].tolist() == values[i * 10 : i * 10 + 10].tolist()
        assert data[i]["targets"].tolist() == values[i * 10 + 1 : i * 10 + 11].tolist()


def test_the_last_window_needs_the_token_after_it(tokens):
    path, _ = tokens
    assert [len(windows(path, stop=stop)) for stop in (0, 1, 10, 11, 20, 21)] == [0, 0, 0, 1, 1, 2]


def test_a_range_and_a_header_shift_the_windows(tokens):
    path, values = tokens
    data = windows(path, start=50, stop=100, byte_offset=6)
    assert data[1]["inputs"].tolist() == values[63:73].tolist()
    assert len(data) == 4


def test_many_samples_at_once_equal_one_at_a_time(tokens):
    data = windows(tokens[0])
    for together, index in zip(data.__getitems__([7, 0, 7]), [7, 0, 7], strict=True):
        assert torch.equal(together["inputs"], data[index]["inputs"])
        assert torch.equal(together["targets"], data[index]["targets"])


def test_an_index_outside_is_an_index_error(tokens):
    data = windows(tokens[0])
    assert torch.equal(data[-1]["inputs"], data[9]["inputs"])
    for index in (10, -11):
        with pytest.raises(IndexError):
            data[index]


def test_pickling_carries_a_path_and_no_tokens(tmp_path):
    np.zeros(1_000_000, dtype=np.uint32).tofile(tmp_path / "tokens.bin")
    data = TokenWindows(tmp_path / "tokens.bin", dtype="uint32", seq_len=10, start=0, stop=1_000_000)
    assert data[0]["inputs"].tolist() == [0] * 10
    pickled = pickle.dumps(data)
    assert len(pickled) < 2000
    assert pickle.loads(pickled)[5]["targets"].tolist() == [0] * 10


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_worker_processes_read_the_same_batches(tokens, context):
    data = windows(tokens[0])
    here = [batch["inputs"].tolist() for batch in DataLoader(data, batch_size=4)]
    loader = DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context=context)
    assert [batch["inputs"].tolist() for batch in loader] == here


def test_a_split_without_a_window_says_which_length_would_fit(tokens):
    with pytest.raises(ConfigError) as caught:
        check_length(windows(tokens[0], stop=8), split="validation", fix="data.path=<more>")
    assert str(caught.value) == (
        "seq_len=10: the validation split has 8 tokens and one sample takes 11; "
        "type seq_len=7 or less, or data.path=<more>"
    )
