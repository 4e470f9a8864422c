"""Where the reward model is that `reward.model.pretrained` names, and how large. Imports no torch."""

import os
from pathlib import Path

from recipes.errors import ConfigError, type_setting
from recipes.foreign_file import missing_published
from recipes.run_folder import CONFIG_FILE

EXPORT = "export"  # where mode=export writes, in the folder of a run
MODEL = "recipes.reward.model.RewardModel"
SETTING = "reward.model.pretrained"
ANOTHER_TOKENIZER = (
    "it has another tokenizer than the policy, whose tokens it would read as other ones",
    f"{SETTING}=<a reward model trained from the run that the policy starts from>",
)


def find_export(pretrained: str) -> str:
    """Return the export of a run where its folder is named, if there is one; else what is named."""
    run = Path(os.path.expanduser(pretrained))
    is_exported = (run / CONFIG_FILE).is_file() and (run / EXPORT / "config.json").is_file()
    return str(Path(pretrained) / EXPORT) if is_exported else pretrained


def count_bytes(pretrained: str) -> int | None:
    """Return the bytes of the files of weights in a folder; None: it is not on this machine."""
    folder = Path(os.path.expanduser(find_export(pretrained)))
    for pattern in ("*.safetensors", "*.bin"):
        if sizes := [path.stat().st_size for path in folder.glob(pattern)]:
            return sum(sizes)
    return None


def find_missing(pretrained: str) -> ConfigError | None:
    """Return why there is no model in the file system under the path that names it; None also for a hub name."""
    if find_export(pretrained) == pretrained and (Path(os.path.expanduser(pretrained)) / CONFIG_FILE).is_file():
        fix = f"{type_setting('mode', 'export')} {type_setting('resume', pretrained)} and then this command again"
        return ConfigError(type_setting(SETTING, pretrained), "it is a run whose model is not exported yet", fix)
    return missing_published(find_export(pretrained), SETTING)
