"""Type what an error says to type: it is accepted, and the error is gone."""

import contextlib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from recipes.config import compose_and_check
from recipes.errors import ConfigError

# of placeholders between angle brackets, by their words
EXAMPLES = [
    (r"^above ([\d.]+) and below .*", "0.5"),
    (r"^\{name: \w+\}$", "{a:1}"),
    (r"^option of data$", "text_files"),
    (r"^(text|global batches|samples|whole number|number)$", "1"),
    (r"^value$", "1"),
    (r"^(finite and |finite in float32 and )?above 0.*$", "1"),
    (r"^at least (\d+).*", r"\1"),
    (r"^finite and at least (\d+).*", r"\1"),
    (r"^at most (-?\d+).*", r"\1"),
    (r"^from ([\d.]+) to .*", r"\1"),
    (r"^list of at least 1$", "[rev]"),
    (r"^list of texts$", "[a]"),
    (r"^list of 2 numbers$", "[0.5,0.5]"),
    (r"^list$", "[]"),
    (r"^list of sections or null$", "null"),
    (r"^section .* or null$", "null"),
    (r"^([\w-]+) or .*", r"\1"),
    (r"^([\w-]+) \| .*", r"\1"),
]
_WITHOUT_MODEL = ", without the other settings of model"
# what needs a machine, a folder or a file that is not here, or is no override
NOT_TYPED = re.compile(
    r"python train\.py|torchrun|before the command|…|run folder|a path that exists|optimizer steps"
    r"|an option of|section with|path=<file|\.<"
)


def read_remedies(mistake: ConfigError) -> list[list[str]]:
    """Return the overrides of each alternative of an error's remedy; none for what is no override."""
    fix = re.sub(r" \((in conf/.*|or .*)\)$", "", mistake.fix)
    fix = fix.partition(", which ")[0].partition(_WITHOUT_MODEL)[0].partition(" in minutes")[0].partition(" for ")[0]
    if NOT_TYPED.search(fix) or fix.startswith(("nothing", "one of", "the same", "another", "key=", "'~")):
        return []
    fix = fix.replace("vocab_size=<value>", "vocab_size=300")  # as many as there are bytes, at least
    alternatives = []
    for alternative in re.split(r", or |,? or (?=[\w.+']+=)", fix):
        filled = re.sub(r"<([^<>]+)>", lambda found: _fill(found[1]), alternative)
        alternatives.append([word for word in shlex.split(filled) if word.partition("=")[2]])
    return [words for words in alternatives if words]


def _fill(words: str) -> str:
    for pattern, example in EXAMPLES:
        if re.match(pattern, words):
            return re.sub(pattern, example, words)
    return words


def replace(command: Sequence[str], mistake: ConfigError, remedy: list[str]) -> list[str]:
    """Return the command with the remedy in place of what is wrong in it."""
    replaced = {_key(word) for word in [*mistake.setting.split(" "), *remedy]}
    kept = [word for word in command if _key(word) not in replaced and word != mistake.setting]
    if mistake.fix.endswith(_WITHOUT_MODEL):
        kept = [word for word in kept if not _key(word).startswith("model.")]
    return [*kept, *remedy]


def _key(word: str) -> str:
    name = word.lstrip("+~").partition("=")[0].partition("[")[0]
    return name.partition("@")[2] or name  # the place of an option: `+data@eval_data.mine=text_files`


def find_refused(command: Sequence[str], mistakes: Sequence[ConfigError]) -> list[str]:
    """Return the remedies that the check does not accept: typed in place of what is wrong, they are wrong again.

    A remedy that is no override, or that needs another machine or a file of the user's, is not typed.
    """
    refused = []
    for mistake in mistakes:
        for remedy in read_remedies(mistake):
            _, left = compose_and_check(replace(command, mistake, remedy))
            typed = {_key(word) for word in remedy}
            again = [str(other) for other in left if _key(other.setting.removeprefix("no ")) in typed]
            refused += [f"{mistake} -> {' '.join(remedy)} -> {again[0]}"] if again else []
    return refused


def run_command(fix: str, new: Path) -> None:
    """Run the command of a remedy that writes `<new file>`; Python code in this process, which starts none."""
    command = fix.partition(", then")[0].partition(", and its path")[0].partition(" to add it")[0]
    command = command.replace("<new file>", shlex.quote(str(new)))
    words = shlex.split(command)
    if words[:2] != ["python", "-c"]:
        subprocess.run(["bash", "-c", command], check=True)
        return
    redirected = [index for index, word in enumerate(words) if word in ("<", ">")]
    arguments = words[2 : min(redirected, default=len(words))]
    files = {words[index]: Path(words[index + 1]) for index in redirected}
    stdin = io.TextIOWrapper(io.BytesIO(files["<"].read_bytes() if "<" in files else b""))
    argv = ["-c", *arguments[1:]]
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(sys, "stdin", stdin),
        contextlib.redirect_stdout(io.StringIO()) as written,
    ):
        exec(arguments[0], {})
    if ">" in files:
        files[">"].write_text(written.getvalue(), encoding="utf-8")
