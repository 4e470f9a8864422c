"""Check rewards: that something scores with them, and that a function of the user's is there. Executes nothing."""

import ast
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from recipes.config.check.start_from import read_vocabularies
from recipes.config.check.suggestions import OWN_REWARD, find_typed_choice, suggest_addition
from recipes.config.resolved import ResolvedRun
from recipes.config.traits import select
from recipes.config.trust import RUNS_FILE
from recipes.errors import ConfigError, type_setting
from recipes.reward.mine import split_path
from recipes.reward.model_folder import ANOTHER_TOKENIZER, MODEL, SETTING, find_export, find_missing
from recipes.run_folder import read_json

_READERS = ("callbacks.generation_eval.rewards", "mode.answers.rewards", "task.rewards")
_GIVEN = ("prompts", "completions", "references", "rows")
_FUNCTIONS = (ast.FunctionDef, ast.ClassDef)


def check_rewards(run: ResolvedRun, overrides: Sequence[str]) -> Iterator[ConfigError]:
    """Check the rewards of a run.

    Args:
        run: The run.
        overrides: Overrides typed on this command line.
    """
    functions = {name: node for name, node in run.config["reward"].items() if isinstance(node, Mapping)}
    for name, node in functions.items():
        argument = RUNS_FILE.get(str(node.get("_target_")))
        if argument is not None and isinstance(node.get(argument), str):
            yield from _check_function(f"reward.{name}.{argument}", node[argument])
        if node.get("_target_") == MODEL and isinstance(node.get("pretrained"), str):
            missing = find_missing(node["pretrained"])
            yield from [missing] if missing is not None else _check_model(run, node["pretrained"])
    if not functions and isinstance(select(run.config, "task.rewards"), Mapping) and run.mode.takes_steps:
        task = f"task={run.choices.get('task', '…')}"
        fix = f"reward=exact_match, numeric or regex, or {OWN_REWARD}"
        yield ConfigError(f"reward=none {task}", "nothing scores the completions that it learns from", fix)
    typed = [text for text in overrides if text.lstrip("+").startswith(("reward=", "reward."))]
    if functions and typed and not _is_read(run):
        chosen = find_typed_choice("callbacks", run.overrides) or run.choices.get("callbacks", "default")
        fix = suggest_addition("callbacks", "generation_eval", chosen, overrides)
        yield ConfigError(typed[0], "nothing generates answers that it could score", f"{fix} {' '.join(typed)}")


def _is_read(run: ResolvedRun) -> bool:
    """Return whether something scores answers; a mode that neither trains nor evaluates leaves them alone."""
    if not run.mode.trains and not isinstance(select(run.config, "mode.answers"), Mapping):
        return True
    return any(isinstance(select(run.config, reader), Mapping) for reader in _READERS)


def _check_model(run: ResolvedRun, pretrained: str) -> Iterator[ConfigError]:
    """Check that a reward model in a folder has a score, and reads the tokens of the policy, and as many of them."""
    folder, setting = Path(os.path.expanduser(find_export(pretrained))), f"{SETTING}={pretrained}"
    if not folder.is_dir():  # of the hub
        return
    published = read_json(folder / "config.json", fix=f"{SETTING}=<a folder that mode=export has written>")
    architectures = published.get("architectures") or [""]
    if not str(architectures[0]).endswith("ForSequenceClassification"):
        reason = f"it holds a {architectures[0] or published.get('model_type')}, which has no score"
        yield ConfigError(setting, reason, f"{SETTING}=<exported reward model, or its run>")
        return
    longest = published.get("max_position_embeddings", published.get("n_positions"))
    if isinstance(longest, int) and run.seq_len is not None and run.seq_len > longest:
        reason = f"a prompt with its completion may have as many tokens, and the reward model reads {longest}"
        yield ConfigError(f"seq_len={run.seq_len} {setting}", reason, f"seq_len={longest}")
    own = Path(os.path.expanduser(str((run.config["tokenizer"] or {}).get("name", ""))))
    vocabularies = read_vocabularies(folder, own)
    if vocabularies is not None and vocabularies[0] != vocabularies[1]:
        yield ConfigError(setting, *ANOTHER_TOKENIZER)


def _check_function(key: str, path: str) -> Iterator[ConfigError]:
    """Check that a file defines the function that `file.py:function` names."""
    file, name = split_path(path)
    setting = f"{key}={path}"
    if not file.is_file():
        yield ConfigError(setting, f"there is no file {file}", f"{key}=<file.py>:{name or '<function>'}")
        return
    try:
        module = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        yield ConfigError(setting, f"{file} is no Python code: {error}", "the same command once it is corrected")
        return
    defined = [*_list_names(module)]
    if name not in defined and "*" not in defined:
        near = [node.name for node in module.body if isinstance(node, _FUNCTIONS)]
        fix = type_setting(key, f"{file}:{near[0]}") if near else f"{key}=<file.py>:<function>"
        reason = f"{file} has no function {name!r}" if name else "it names no function in that file"
        yield ConfigError(setting, reason, fix)
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            yield from _check_arguments(setting, node)


def _check_arguments(setting: str, function: ast.FunctionDef) -> Iterator[ConfigError]:
    """Check that a function takes what it is called with, by name, and asks for nothing else."""
    arguments = function.args
    by_name = [*arguments.args, *arguments.kwonlyargs]
    num_needed = len(arguments.args) - len(arguments.defaults)
    needed = [*arguments.posonlyargs, *arguments.args[:num_needed]]
    needed += [each for each, given in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if given is None]
    surplus = [each.arg for each in needed if each.arg not in _GIVEN or each in arguments.posonlyargs]
    untaken = {*_GIVEN} - {each.arg for each in by_name}
    fix = f"def {function.name}({', '.join(_GIVEN)}) there, or **others in place of what it does not read"
    if surplus:
        reason = f"it is called with {', '.join(_GIVEN)}, and asks for {', '.join(surplus)}, too"
        yield ConfigError(setting, reason, f"{fix}; fields of the data are in rows, one dict for each completion")
    elif untaken and arguments.kwarg is None:
        yield ConfigError(setting, f"it is called with {', '.join(_GIVEN)}, and does not take all of them", fix)


def _list_names(module: ast.Module) -> Iterator[str]:
    """Yield the names that a module has at its top level; `*` for those of another module."""
    for node in ast.walk(module):
        if isinstance(node, _FUNCTIONS):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
