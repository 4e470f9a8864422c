"""The default data is on every machine; this is the one test that reads all of it."""

import time

from recipes.data.stdlib_text import StdlibText
from recipes.tokenizer.bytes import Bytes


def test_ten_million_bytes_of_library_and_a_cached_start_below_a_second(tmp_path):
    def prepare():
        source = StdlibText(tokenizer=Bytes(), seq_len=256, val_fraction=0.05, cache_dir=str(tmp_path))
        source.prepare()
        return source

    source = prepare()
    names = [document.name for document in source.list_documents()]
    assert 5_000_000 < source.cache.meta.num_bytes < 50_000_000
    assert "argparse.py" in names
    assert "json/decoder.py" in names
    assert not {"test", "tests", "site-packages"} & {part for name in names for part in name.split("/")}
    assert names == sorted(names, key=lambda name: name.split("/"))
    share = source.cache.meta.num_val_tokens / source.cache.meta.num_train_tokens
    assert 0.04 < share < 0.08
    started = time.monotonic()
    again = prepare()
    assert time.monotonic() - started < 1.0  # measured: 0.03 s
    assert again.cache.folder == source.cache.folder
