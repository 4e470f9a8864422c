"""Band keys and evaluation sets made by another process, with another seed of Python's own hash, are the same."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import pickle, sys
from pydoc_data.topics import topics
from recipes.prepare.contamination import EvaluationSet
from recipes.prepare.minhash import BandHasher, shingles
hasher = BandHasher(18, 6)
texts = [topics[name] for name in sorted(topics)]
keys = [hasher.band_keys(shingles(text)).tolist() for text in texts]
items = [(name, text[:300]) for name, text in sorted(topics.items())]
questions = EvaluationSet(items, min_coverage=0.5)
hits = [questions.find(text) for text in texts]
sys.stdout.buffer.write(pickle.dumps((hash("salted"), keys, [[tuple(hit) for hit in found] for found in hits])))
"""


def run(hash_seed: int) -> Any:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, check=True)
    return pickle.loads(done.stdout)


@pytest.fixture(scope="module")
def results() -> tuple[Any, Any]:
    return run(1), run(2)


def test_the_seeds_salt_pythons_own_hash(results: tuple[Any, Any]) -> None:
    assert results[0][0] != results[1][0]


def test_band_keys_do_not_depend_on_the_process(results: tuple[Any, Any]) -> None:
    assert len(results[0][1]) == len(topics)
    assert results[0][1] == results[1][1]


def test_hits_and_their_order_do_not_depend_on_the_process(results: tuple[Any, Any]) -> None:
    assert sum(len(hits) for hits in results[0][2]) >= len(topics)
    assert results[0][2] == results[1][2]
