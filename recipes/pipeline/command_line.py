"""Read the file of a pipeline and the command line beside it: what each stage is, as the overrides of a run."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.config.check.sections import NODES, SETTINGS, list_groups
from recipes.config.check.suggestions import list_options, suggest_option
from recipes.config.local_path import find_address
from recipes.config.overrides import drop_replaced, for_shell, make_override, parse_or_quote
from recipes.config.search_path import find_config_folders, select_search_path
from recipes.errors import ConfigError, type_command
from recipes.reward.model_folder import EXPORT, SETTING

_STAGE = re.compile(r"([+~]{0,2})stages\.([^.=]+)\.(.+)", re.DOTALL)  # of an override of one stage
_SEVERAL = re.compile(r"""[^\s='"{\[(]+=[^\s'"{\[(]*\s+[+~]*[\w.@/]+=""")  # overrides in one text
_NAME = re.compile(r"[A-Za-z][\w-]*")
# settings that may name the stage which exports the model
EXPORTED = (SETTING, "model.vision_pretrained", "model.language_pretrained", "tokenizer.name")
_SECTIONS = ("every_stage", "stages")
_EXAMPLE = "stages: {pretrain: [recipe=quickstart], sft: [recipe=sft, data.path=rows.jsonl]}"
_OF_PIPELINE = ("pipeline=", "hydra.run.dir=", "resume=", "start_from=", "mode=")  # and of no stage
# sections that one stage cannot have -> why, and what to type instead; nothing: the setting, for the pipeline
_NOT_OF_STAGE = {
    **dict.fromkeys(("launcher", "ignore_slurm"), ("one launcher starts every stage", "")),
    **dict.fromkeys(("pipeline", "stages", "every_stage"), ("a stage is one run", "the settings of that run alone")),
    **dict.fromkeys(("sweep", "hydra.sweep"), ("a stage is one run, and a sweep is several", "a stage without it")),
    "hydra.run": ("its folder is in that of the pipeline", ""),
}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One run of a pipeline.

    Attributes:
        name: Its name in the pipeline's file.
        folder: Its run folder.
        overrides: What is typed for it, without what says from which stage it starts.
        source: The earlier stage whose weights it starts from or acts on; None: there is none.
        trains: Whether it trains; otherwise it has a mode that acts on the run of another stage.
        reads: Earlier stages whose exported models it reads.
    """

    name: str
    folder: Path
    overrides: list[str]
    source: str | None
    trains: bool
    reads: tuple[str, ...] = ()

    @property
    def export(self) -> Path:
        """Folder of the model that this stage exports, if that is its mode."""
        typed = [text.partition("=")[2] for text in self.overrides if text.startswith("mode.path=")]
        return self.folder / EXPORT if not typed or typed[-1] == "null" else Path(typed[-1])

    @property
    def exports(self) -> bool:
        """Whether it exports a model."""
        return "mode=export" in self.overrides


@dataclass(frozen=True, kw_only=True)
class PipelineCommand:
    """The command line of a pipeline.

    Attributes:
        name: Name of the pipeline.
        folder: Its folder.
        stages: Its stages, in order.
        mistakes: Errors in its file, and in what concerns more than one stage.
    """

    name: str
    folder: Path
    stages: list[Stage] = field(default_factory=list)
    mistakes: list[ConfigError] = field(default_factory=list)


def read_command(typed: Sequence[str], *, config_folder: Path) -> PipelineCommand:
    """Read the file that `pipeline=` names, and divide the other overrides among its stages.

    Args:
        typed: Overrides of the command line.
        config_folder: The config folder; `pipeline/<name>.yaml` in it or in a folder of the search path is the file.
    """
    name = _get_value(typed, "pipeline", "")
    typed_folder = _get_value(typed, "hydra.run.dir", f"logs/{name}")
    folder = Path(os.path.expanduser(typed_folder))
    file = _find_file(name, typed, config_folder)
    if file is None:
        options = " ".join(list_options("pipeline", typed)) or "none"
        mistake = ConfigError(f"pipeline={name}", f"the options are {options}", suggest_option("pipeline", name, typed))
        return PipelineCommand(name=name, folder=folder, mistakes=[mistake])
    shared, own, mistakes = _read_file(file, name)
    if mistakes:
        return PipelineCommand(name=name, folder=folder, mistakes=mistakes)
    for_all, for_one, mistakes = _divide(typed, list(own))
    mistakes += _check_folder(typed_folder)
    stages: list[Stage] = []
    for number, (stage, overrides) in enumerate(own.items(), start=1):
        of_one = for_one.get(stage, [])
        trains = not any(word.startswith("mode=") and word != "mode=fit" for word in [*overrides, *of_one])
        # a stage that acts on a run has the settings of that run, which do not say where options of one's own are
        around = (shared, for_all) if trains else (select_search_path(shared), select_search_path(for_all))
        foreign = {text: wrong for text in [*overrides, *of_one] for wrong in _find_foreign(stage, text)}
        words = drop_replaced([*around[0], *overrides, *around[1], *of_one])
        words = [text for text in words if text not in foreign]
        source, words, unfit = _take_source(stage, words, stages, list(own), trains=trains)
        words, reads, unread = _name_exports(stage, words, stages, list(own))
        mistakes += [*foreign.values(), *unfit, *unread]
        digits = len(str(len(own)))
        of_stage = folder / f"{number:0{digits}d}_{stage}"
        stages.append(Stage(name=stage, folder=of_stage, overrides=words, source=source, trains=trains, reads=reads))
    return PipelineCommand(name=name, folder=folder, stages=stages, mistakes=[*mistakes, *_reject(typed, stages, own)])


def _get_value(typed: Sequence[str], key: str, default: str) -> str:
    found = next((text.lstrip("+") for text in reversed(typed) if text.lstrip("+").startswith(f"{key}=")), None)
    if found is None:
        return default
    parsed = parse_or_quote(found)[0]
    return found.partition("=")[2] if parsed is None or parsed.is_sweep_override() else str(parsed.value())


def _find_file(name: str, typed: Sequence[str], config_folder: Path) -> Path | None:
    folders = dict.fromkeys([config_folder, *find_config_folders(typed)])
    files = (file for folder in folders for file in sorted((folder / "pipeline").glob("*.yaml")))
    return next((file for file in files if file.stem == name), None)


def _check_folder(folder: str) -> Iterator[ConfigError]:
    """Reject a folder in which the same command would not find the pipeline again."""
    setting, fix = f"hydra.run.dir={folder}", "hydra.run.dir=<folder>"
    if folder in ("", "None"):
        yield ConfigError("hydra.run.dir=", "a pipeline needs a folder", fix)
    elif "${" in folder:
        yield ConfigError(setting, "the same command is to find this folder again, to go on there", fix)
    elif address := find_address("hydra.run.dir", folder):
        yield address


def _read_file(file: Path, name: str) -> tuple[list[str], dict[str, list[str]], list[ConfigError]]:
    """Return the overrides of every stage that trains, those of each stage, and the errors in the file."""
    setting = f"pipeline={name}"
    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(file))
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        return [], {}, [ConfigError(setting, f"{file} cannot be read: {reason}", f"{_EXAMPLE} in it")]
    if not isinstance(content, Mapping) or not isinstance(content.get("stages"), Mapping) or not content["stages"]:
        return [], {}, [ConfigError(setting, f"{file} has no stages", f"{_EXAMPLE} in it")]
    wrong = [
        ConfigError(setting, f"{file}: nothing reads {key!r}", f"{' or '.join(_SECTIONS)} in its place")
        for key in content
        if key not in _SECTIONS
    ]
    for stage in content["stages"]:
        if not isinstance(stage, str) or not _NAME.fullmatch(stage):
            reason = f"{file}: a stage is named {stage!r}, and its name is that of a folder"
            wrong.append(ConfigError(setting, reason, "a name of letters, digits, _ and -"))
    lists = {"every_stage": content.get("every_stage") or [], **content["stages"]}
    for key, overrides in lists.items():
        if not isinstance(overrides, list) or not all(isinstance(text, str) for text in overrides):
            place = key if key == "every_stage" else f"stages.{key}"
            reason = f"{file}: {place} is no list of overrides"
            wrong.append(ConfigError(setting, reason, f"{place}: [trainer.max_steps=200], each as it is typed"))
            continue
        for text in filter(_SEVERAL.match, overrides):
            reason = f"{file}: one override of {key} is {text!r}, which are several"
            wrong.append(ConfigError(setting, reason, f"[{', '.join(text.split())}]"))
    if wrong:
        return [], {}, wrong
    return lists["every_stage"], dict(content["stages"]), []


def _divide(typed: Sequence[str], names: Sequence[str]) -> tuple[list[str], dict[str, list[str]], list[ConfigError]]:
    """Divide overrides into those of every stage and those of one, `stages.sft.optimizer.lr=1e-4`."""
    for_all: list[str] = []
    for_one: dict[str, list[str]] = {}
    mistakes: list[ConfigError] = []
    for text in typed:
        if text.lstrip("+").startswith(_OF_PIPELINE):
            continue
        found, (section, _, setting) = _STAGE.fullmatch(text), text.lstrip("+~").partition("=")[0].partition(".")
        if found is None and section == "stages":
            one = setting or f"<{' | '.join(names)}>"
            fix = f"stages.{one}.<setting>=<value>, or a file beside it with other stages"
            mistakes.append(ConfigError(text, "which stages there are, the file of the pipeline says", fix))
        elif section == "every_stage":
            fix = for_shell(text.replace("every_stage.", "", 1)) if setting else "the overrides of it, each by itself"
            mistakes.append(ConfigError(text, "what is typed is of every stage that trains already", fix))
        elif found is None and section in ("stage", *names) and section not in {*SETTINGS, *list_groups(), *NODES}:
            fix = text.replace(section, "stages" if section == "stage" else f"stages.{section}", 1)
            mistakes.append(ConfigError(text, "a setting of one stage begins with stages.", for_shell(fix)))
        elif found is None:
            for_all.append(text)
        elif found[2] in names:
            for_one.setdefault(found[2], []).append(f"{found[1]}{found[3]}")
        else:
            near = get_close_matches(found[2], names, 1, cutoff=0.5) or [f"<{' | '.join(names)}>"]
            fix = for_shell(f"{found[1]}stages.{near[0]}.{found[3]}")
            mistakes.append(ConfigError(text, f"the stages are {' '.join(names)}", fix))
    return for_all, for_one, mistakes


def _take_source(
    stage: str, overrides: Sequence[str], before: Sequence[Stage], names: Sequence[str], *, trains: bool
) -> tuple[str | None, list[str], list[ConfigError]]:
    """Return the stage that another one starts from, its overrides without that, and the errors in them.

    `start_from=<stage>`, and `resume=<stage>` of a mode that acts on a run; by default the last one before that trains.
    What names a folder instead is left where it is.
    """
    key, other = ("start_from", "resume") if trains else ("resume", "start_from")
    kept = [text for text in overrides if not text.startswith((f"{key}=", f"{other}="))]
    mistakes = [
        ConfigError(
            f"stage {stage}: {text}",
            "a killed stage goes on by itself" if trains else f"it trains nothing, and acts on the run of {key}=",
            f"stages.{stage}.{key}=<{' | '.join(each.name for each in before if each.trains) or 'run folder'}>",
        )
        for text in overrides
        if text.startswith(f"{other}=")
    ]
    chosen = next((text.partition("=")[2] for text in overrides if text.startswith(f"{key}=")), None)
    trained = [each.name for each in before if each.trains]
    if chosen is None:
        return (trained[-1] if trained else None), kept, mistakes
    if chosen == "null":
        return None, kept, mistakes
    if chosen in trained:
        return chosen, kept, mistakes
    if chosen in names:
        reason = "it trains nothing" if chosen in [each.name for each in before] else "it does not run before this one"
        fix = f"stages.{stage}.{key}=<{' | '.join([*trained, 'run folder'])}>"
        mistakes.append(ConfigError(f"stage {stage}: {key}={chosen}", reason, fix))
        return None, kept, mistakes
    if near := get_close_matches(chosen, trained, 1, cutoff=0.75) if not Path(chosen).exists() else []:
        reason = f"the stages before it are {' '.join(trained)}, and there is no such folder"
        mistakes.append(ConfigError(f"stage {stage}: {key}={chosen}", reason, f"stages.{stage}.{key}={near[0]}"))
        return None, kept, mistakes
    return None, [*kept, f"{key}={chosen}"], mistakes


def _name_exports(
    stage: str, overrides: Sequence[str], before: Sequence[Stage], names: Sequence[str]
) -> tuple[list[str], tuple[str, ...], list[ConfigError]]:
    """Return overrides with the folders of models that name the stages which export them, these stages, and errors."""
    exported = {each.name: each for each in before if each.exports}
    kept, reads, mistakes = list[str](), list[str](), list[ConfigError]()
    for text in overrides:
        key, _, chosen = text.partition("=")
        if key not in EXPORTED or chosen not in names:
            kept.append(text)
        elif chosen in exported:
            kept.append(make_override(key, str(exported[chosen].export)))
            reads.append(chosen)
        else:
            is_before = chosen in [each.name for each in before]
            reason = "it exports no model" if is_before else "it does not run before this one"
            fix = f"stages.{stage}.{key}=<{' | '.join(exported) or 'a stage with [mode=export]'}>"
            kept.append(text)
            mistakes.append(ConfigError(f"stage {stage}: {text}", reason, fix))
    return kept, tuple(reads), mistakes


def _find_foreign(stage: str, text: str) -> Iterator[ConfigError]:
    """Yield the error in an override that is of the pipeline or of several runs, and of no stage."""
    key = text.lstrip("+~").partition("=")[0]
    section = next((name for name in _NOT_OF_STAGE if f"{key}.".startswith(f"{name}.")), None)
    if section is not None:
        reason, fix = _NOT_OF_STAGE[section]
        yield ConfigError(f"stage {stage}: {text}", reason, fix or f"{for_shell(text)} alone")


def _reject(typed: Sequence[str], stages: Sequence[Stage], own: Mapping[str, Sequence[str]]) -> Iterator[ConfigError]:
    """Reject overrides that say for every stage what only one can have."""
    for text in typed:
        key, _, value = text.partition("=")
        if key == "resume":
            reason = "a pipeline goes on by itself, at the stage and step where it stopped"
            yield ConfigError(text, reason, "the same command without it")
        elif key == "start_from":
            reason = "every stage but the first starts from the one before"
            yield ConfigError(text, reason, for_shell(f"stages.{stages[0].name}.start_from={value}"))
        elif key == "recipe" and any(word.startswith("recipe=") for words in own.values() for word in words):
            names = " | ".join(name for name, words in own.items() if any(word.startswith("recipe=") for word in words))
            yield ConfigError(text, "it would replace what each stage does", f"stages.<{names}>.{text}")
        elif key == "mode" and value != "fit":
            first = " ".join(map(for_shell, stages[0].overrides))
            reason = "it would replace what each stage does"
            yield ConfigError(text, reason, f"{type_command(f'{text} {first}')} for stage {stages[0].name}")
