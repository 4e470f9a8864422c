"""What an error says to type is read by a shell and by Hydra as what was meant."""

import shlex

import pytest
from omegaconf import OmegaConf

from recipes.config.overrides import parse_or_quote
from recipes.errors import ConfigError, type_setting

NAMES = ["a", "a b", " a", "it's", 'a"b', "a=b, {c}", "a,b", "[a]", "(1)", "~a", "*.txt", "é", "$HOME", "${seed}"]
NAMES += ["a\\", "a\\'b", "\\${seed}", "7", "1e5", ".5", "null", "True", "nan", "", "#", "a;b", "`a`", "!a", "-a"]


@pytest.mark.parametrize("name", NAMES)
def test_a_value_of_any_letters_is_read_as_it_is(name: str) -> None:
    for typed in (type_setting("data.text_field", name), type_setting("data.fields", {"text": name, "system": None})):
        [word] = shlex.split(typed)
        override, _ = parse_or_quote(word)
        assert override is not None
        assert not override.is_sweep_override()
        config = OmegaConf.to_container(OmegaConf.create({"value": override.value(), "seed": 3}), resolve=True)
        assert isinstance(config, dict)
        assert config["value"] in (name, {"text": name, "system": None})


def test_the_name_of_a_file_is_no_setting_of_a_source() -> None:
    mistake = ConfigError("data.path=data.txt.gz", "", "gunzip < data.txt.gz > <new file>, or \"data.path='a b'\"")
    moved = mistake.in_section("data.sources.x")
    assert moved.setting == "data.sources.x.path=data.txt.gz"
    assert moved.fix == "gunzip < data.txt.gz > <new file>, or \"data.sources.x.path='a b'\""
