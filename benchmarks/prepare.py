"""`mode=prepare` on a gigabyte of text: speed of each stage, memory, and the fraction of planted copies found.

python benchmarks/prepare.py

To compare with datatrove, install it in a separate environment, because it would replace versions used here:

python3 -m venv .venv-datatrove
.venv-datatrove/bin/pip install 'datatrove[processing]==0.10.1' orjson spacy
PEERS_PYTHON=.venv-datatrove/bin/python python benchmarks/prepare.py peers
"""

import json
import os
import pydoc_data.topics
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure import in_turn, report

ROOT = Path(__file__).parent.parent
CORPUS_MB, PEERS_MB, ROUNDS = 1000, 20, 3
WORDS_A_DOCUMENT = 500
COPIES = {"exact": 0.02, "near": 0.05}  # fractions of all documents
CHANGED = 0.01  # fraction of words changed in a near copy: Jaccard similarity of about 0.9
RULES = "quality=[gopher,c4,fineweb]"
NO_COPIES = ("mode.exact_copies=false", "mode.near_copies=null")
CASES: dict[str, tuple[str, ...]] = {
    "read and write": (*NO_COPIES,),
    "rules of Gopher, C4, FineWeb": (*NO_COPIES, RULES, "quality.remove_unpunctuated_lines=null"),
    "exact and near copies": (),
    "all, and an evaluation set": (RULES, "quality.remove_unpunctuated_lines=null", "evaluation"),
}


def write_corpus(path: Path, num_bytes: int) -> tuple[int, int]:
    """Write documents with the word frequencies of English prose; return the numbers of documents and near copies."""
    words, counts = np.unique(" ".join(pydoc_data.topics.topics.values()).split(), return_counts=True)
    frequencies = counts / counts.sum()
    rng = np.random.default_rng(0)
    earlier: list[Any] = []
    written = number = num_near = 0
    with path.open("w", encoding="utf-8") as file:
        while written < num_bytes:
            draw = rng.random()
            if earlier and draw < COPIES["exact"] + COPIES["near"]:
                drawn = earlier[int(rng.integers(len(earlier)))].copy()
                if draw >= COPIES["exact"]:
                    changed = rng.choice(WORDS_A_DOCUMENT, int(CHANGED * WORDS_A_DOCUMENT), replace=False)
                    drawn[changed] = rng.choice(len(words), len(changed))
                    num_near += 1
            else:
                drawn = rng.choice(len(words), WORDS_A_DOCUMENT, p=frequencies)
                if len(earlier) < 20_000:
                    earlier.append(drawn)
            sentences = [" ".join(words[part]) + "." for part in drawn.reshape(-1, 20)]
            written += file.write(json.dumps({"text": "\n".join(sentences), "id": number}) + "\n")
            number += 1
    return number, num_near


class _Memory(threading.Thread):
    """Tracks the peak memory of a process and its children, counting shared pages once."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._pid = pid

    def run(self) -> None:
        while Path(f"/proc/{self._pid}").exists():
            self.peak_bytes = max(self.peak_bytes, sum(map(_held, _tree(self._pid))))
            time.sleep(0.5)


def _tree(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [pid, *(inner for child in text.split() for inner in _tree(int(child)))]


def _held(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def prepare(name: str, corpus: Path, folder: Path, planted: tuple[int, int]) -> dict[str, Any]:
    """Run a case and return its result row."""
    print(name, file=sys.stderr)
    output = folder / "out"
    options = [option for option in CASES[name] if option != "evaluation"]
    if "evaluation" in CASES[name]:
        questions = folder / "questions.jsonl"
        lines = (json.dumps({"question": " ".join(text.split()[:60])}) for text in pydoc_data.topics.topics.values())
        questions.write_text("\n".join(lines))
        options.append(f"mode.evaluation={{topics: {questions}}}")
    command = ["mode=prepare", "data=documents", f"data.path={corpus}", f"mode.output={output}", *options]
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, str(ROOT / "train.py"), *command], stdout=subprocess.DEVNULL)
    memory = _Memory(process.pid)
    memory.start()
    assert process.wait() == 0, command
    seconds = time.perf_counter() - began
    found = json.loads((output / "report.json").read_text())
    subprocess.run(["rm", "-r", str(output)], check=True)
    near = found["dropped"].get("near copy", 0)
    return {
        "what is done": name,
        "text, MB": f"{found['bytes'] / 1e6:,.0f}",
        "MB/s": f"{found['bytes'] / 1e6 / seconds:.1f}",
        "peak memory, MiB": f"{memory.peak_bytes / 2**20:,.0f}",
        "documents": f"{found['documents']:,}",
        "kept": f"{found['kept']:,}",
        # the rules drop copies before the comparison
        "planted near copies found": f"{near / planted[1]:.1%}" if near and RULES not in options else "",
    }


def compare() -> list[dict[str, Any]]:
    """Prepare 20 MB here and with datatrove, in turns, with two processes each; return a row per kind of work."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "corpus", PEERS_MB * 10**6)
        lines = (folder / "corpus").read_text().splitlines(keepends=True)
        (folder / "parts").mkdir()
        for part in range(2):  # one file for each datatrove process
            (folder / "parts" / f"{part}.jsonl").write_text("".join(lines[part::2]))
        for title, what, options in (
            ("rules of Gopher, C4, FineWeb", "filters", CASES["rules of Gopher, C4, FineWeb"]),
            ("near copies", "copies", ("mode.exact_copies=false",)),
        ):
            source = f"data.path={folder / 'parts'}"
            ours = [str(ROOT / "train.py"), "mode=prepare", "data=documents", source, "mode.num_processes=2", *options]
            theirs = [str(ROOT / "benchmarks/contenders/datatrove_prepare.py"), what, str(folder / "parts")]
            seconds: dict[str, list[float]] = {"here": [], "datatrove": []}
            kept = {}
            for number in in_turn(ROUNDS):
                output = folder / f"{what}_{number}"
                commands = {
                    "here": [sys.executable, *ours, f"mode.output={output}_here"],
                    "datatrove": [os.environ["PEERS_PYTHON"], *theirs, f"{output}_theirs"],
                }
                for who, command in commands.items():
                    began = time.perf_counter()
                    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                    seconds[who].append(time.perf_counter() - began)
                kept["here"] = _count_lines(Path(f"{output}_here/documents"))
                kept["datatrove"] = _count_lines(Path(f"{output}_theirs/kept"))
            median = {who: statistics.median(values) for who, values in seconds.items()}
            rows.append(
                {
                    "what is done": title,
                    "text, MB": PEERS_MB,
                    "here, MB/s": f"{PEERS_MB / median['here']:.1f}",
                    "datatrove, MB/s": f"{PEERS_MB / median['datatrove']:.1f}",
                    "kept here": f"{kept['here']:,}",
                    "kept by datatrove": f"{kept['datatrove']:,}",
                }
            )
    return rows


def _count_lines(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.glob("*")) if folder.is_dir() else 0


def main() -> None:
    if sys.argv[1:] == ["peers"]:
        report("prepare_peers", compare(), command="PEERS_PYTHON=… python benchmarks/prepare.py peers")
        return
    with tempfile.TemporaryDirectory() as name:
        corpus = Path(name) / "corpus.jsonl"
        planted = write_corpus(corpus, CORPUS_MB * 10**6)
        report("prepare", [prepare(case, corpus, Path(name), planted) for case in CASES])


if __name__ == "__main__":
    main()
