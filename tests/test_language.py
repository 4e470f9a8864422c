"""Plain English stays plain: words that this project once used in a sense of its own do not come back."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [
    path
    for pattern in (
        "recipes/**/*.py",
        "callbacks/**/*.py",
        "conf/**/*.yaml",
        "docs/**/*.md",
        "tests/**/*.py",
        "benchmarks/**/*.py",
    )
    for path in sorted(ROOT.glob(pattern))
] + [ROOT / name for name in ("train.py", "README.md", "CHANGELOG.md", "Makefile")]
# word -> what the field says
BANNED = {
    r"anew": "again, rewritten",
    r"told|tells": "reported, logged, warned",
    r"heed(ed|s)?": "handle",
    r"mend(ed|s)?": "fix",
    r"the house": "this project",
    r"no number": "NaN or inf",
    r"out of line": "outlier, spike",
    r"carr(y|ied|ies) out": "run, execute",
    r"by heart": "memorize",
    r"in vain": "needlessly",
    r"for ever": "permanently",
    r"gone back to": "rolled back to",
}


@pytest.mark.parametrize("word", BANNED)
def test_a_banned_word_is_nowhere(word: str) -> None:
    pattern = re.compile(rf"\b(?:{word})\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not found, f"say {BANNED[word]}:\n" + "\n".join(found)
