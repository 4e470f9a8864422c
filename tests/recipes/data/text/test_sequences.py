"""Windows are slices of the token file."""

import pickle
import re

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from recipes.data.text.sequences import TokenWindows, check_splits
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


@pytest.mark.parametrize(
    ("num_tokens", "val_fraction", "cuts", "message"),
    [
        (
            12,
            0.05,
            True,
            "the training split has 11 tokens; type seq_len=5 data.val_fraction=0.5",
        ),
        (
            40,
            0.05,
            True,
            "the validation split has 2 tokens; type seq_len=19 data.val_fraction=0.5",
        ),
        (100, 0.01, True, "the validation split has 1 token; type data.val_fraction=0.33"),
        (5000, 1e-6, True, "the validation split has 0 tokens; type data.val_fraction=0.01"),
        (5000, 1e-6, False, "the validation split has 0 tokens; type data.val_fraction=0.2"),
        (12, 0.05, False, "the training split has 11 tokens; type"),
        (2, 0.05, True, "the training split has 2 tokens; type"),
    ],
)
def test_a_split_without_a_window_says_what_makes_both_long_enough(tokens, num_tokens, val_fraction, cuts, message):
    def divide(seq_len, fraction):
        cut = num_tokens - round(num_tokens * fraction)
        whole = {"path": tokens[0], "dtype": "uint16", "seq_len": seq_len}
        return TokenWindows(**whole, start=0, stop=cut), TokenWindows(**whole, start=cut, stop=num_tokens)

    with pytest.raises(ConfigError) as caught:
        check_splits(*divide(32, val_fraction), val_fraction=val_fraction, cuts=cuts, more="data.path=<more>")
    found, _, fix = message.partition("; ")
    assert str(caught.value) == (
        f"seq_len=32 data.val_fraction={val_fraction:g}: {found} and one sample takes 33; "
        f"{fix}{'' if fix == 'type' else ', or'} data.path=<more>"
    )
    typed = re.search(r"(?:seq_len=(\d+))?.*?(?:data.val_fraction=([\d.]+))?, or", caught.value.fix)
    if cuts and typed:
        splits = divide(int(typed[1] or 32), float(typed[2] or val_fraction))
        check_splits(*splits, val_fraction=val_fraction, cuts=cuts, more="")


def test_a_cached_token_outside_the_vocabulary_is_an_error_that_names_the_folder(tmp_path):
    path = tmp_path / "train.bin"
    np.array([1, 2, 65535, 4], dtype="<u2").tofile(path)
    with pytest.raises(ConfigError, match=f"id 65535 is outside the vocabulary of 257 tokens; type rm -r {tmp_path}"):
        TokenWindows(path, dtype="uint16", seq_len=3, start=0, stop=4, vocab_size=257)[0]
