"""The cached composition equals Hydra's own, is unaffected by changes to what it returned, and sees changed files."""

import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal import defaults_list
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf

from recipes.config import cached_compose
from recipes.config.cached_compose import compose_overrides
from recipes.config.compose import CONF, register_resolvers

COMMANDS = [
    "",
    "seed=3 model=gpt2 optimizer.lr=1e-4 name=a",
    "~callbacks.report +trainer.benchmark=true callbacks.memory=null",
    "hydra.run.dir='x/${hydra.job.override_dirname}' seed=7 optimizer=sgd",
    "hydra/sweeper=optuna sweep=lr recipe=fsdp_bf16 ++optimizer.lr=1",
    "optimizer.lr=2 optimizer={lr:1}",
    "callbacks=[default,stop_at_nan] hydra.verbose=true",
    "~callbacks",
]
INVALID_OVERRIDES = ["optimizer.lrr=1", "modle=gpt2", "model=gpt3", "seed=1,2", "model=gpt2,llama_nano", "x"]


@pytest.fixture(autouse=True)
def _resolvers() -> None:
    register_resolvers()


def compose_with_hydra(overrides: list[str]) -> object:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_container(compose("config", overrides, return_hydra_config=True))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_cached_composition_equals_that_of_hydra(command: str) -> None:
    overrides = shlex.split(command)
    expected = compose_with_hydra(overrides)
    for _ in range(2):
        node = compose_overrides(overrides, CONF, "config")
        assert OmegaConf.to_container(node) == expected


@pytest.mark.parametrize("override", INVALID_OVERRIDES)
def test_what_hydra_rejects_is_rejected_with_its_message(override: str) -> None:
    with pytest.raises(HydraException) as expected:
        compose_with_hydra([override])
    with pytest.raises(HydraException) as raised:
        compose_overrides([override], CONF, "config")
    assert (type(raised.value), str(raised.value)) == (type(expected.value), str(expected.value))


def test_a_result_may_be_changed_without_changing_the_next_one() -> None:
    first = compose_overrides([], CONF, "config")
    first.seed = 99
    first.trainer.max_steps = 99
    again = compose_overrides([], CONF, "config")
    assert (again.seed, again.trainer.max_steps) == (1234, 700)


def test_only_a_different_option_or_a_changed_file_misses_the_cache(tmp_path: Path) -> None:
    (tmp_path / "group").mkdir()
    (tmp_path / "config.yaml").write_text("defaults: [_self_, {group: one}]\nseed: 1\n")
    (tmp_path / "group/one.yaml").write_text("x: 1\n")
    (tmp_path / "group/two.yaml").write_text("x: 2\n")
    cached_compose._compose_cached.cache_clear()

    def compose_x_and_count_misses(*overrides: str) -> tuple[int, int]:
        node = compose_overrides(overrides, tmp_path, "config")
        return node.group.x, cached_compose._compose_cached.cache_info().misses

    assert compose_x_and_count_misses() == (1, 1)
    assert compose_x_and_count_misses("seed=3") == (1, 1)
    assert compose_x_and_count_misses("group.x=5", "seed=4") == (5, 1)
    assert compose_x_and_count_misses("group=two") == (2, 2)
    (tmp_path / "group/one.yaml").write_text("x: 10\n")
    assert compose_x_and_count_misses() == (10, 3)


def test_settings_of_the_recipes_are_values_and_no_options() -> None:
    cached_compose._compose_cached.cache_clear()
    for typed in ([], ["seed=3", "name=other"], ["warmup_steps=9", "global_batch_size=4", "optimizer={lr: 1}"]):
        compose_overrides(typed, CONF, "config")
    assert cached_compose._compose_cached.cache_info().misses == 1


def test_another_option_parses_only_the_files_that_it_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "group").mkdir()
    (tmp_path / "config.yaml").write_text("defaults: [_self_, {group: one}]\nseed: 1\n")
    for option, x in (("one", 1), ("two", 2)):
        (tmp_path / f"group/{option}.yaml").write_text(f"x: {x}\n")
    parsed: list[str] = []
    load = FileConfigSource.load_config

    def load_and_note(source: FileConfigSource, config_path: str) -> ConfigResult:
        parsed.append(config_path)
        return load(source, config_path)

    monkeypatch.setattr(FileConfigSource, "load_config", load_and_note)
    assert compose_overrides([], tmp_path, "config").group.x == 1
    assert sorted(set(parsed)) == ["config", "group/one"]
    parsed.clear()
    first = compose_overrides(["group=two"], tmp_path, "config")
    assert (first.group.x, parsed) == (2, ["group/two"])


def test_a_search_path_on_the_command_line_adds_its_groups(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_text("size: 3\n")
    overrides = [f"hydra.searchpath=[file://{tmp_path}]", "model=mine"]
    assert compose_overrides(overrides, CONF, "config").model.size == 3


def test_defaults_that_refer_to_a_choice_are_resolved(tmp_path: Path) -> None:
    for name, text in {
        "config": "defaults: [model: wide, size: '${model}', _self_]",
        "model/wide": "width: 8",
        "model/deep": "width: 2",
        "size/wide": "layers: 1",
        "size/deep": "layers: 9",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    composed = [compose_overrides(typed, tmp_path, "config") for typed in ([], ["model=deep"])]
    assert [(node.model.width, node["size"].layers) for node in composed] == [(8, 1), (2, 9)]


def test_hydra_still_maps_all_choices_at_every_file(monkeypatch: pytest.MonkeyPatch) -> None:
    make, made = defaults_list._create_interpolation_map, []
    monkeypatch.setattr(defaults_list, "_create_interpolation_map", lambda *given: made.append(given) or make(*given))
    compose_with_hydra([])
    num_by_hydra = len(made)
    cached_compose._compose_cached.cache_clear()
    compose_overrides([], CONF, "config")
    num_by_us = len(made) - num_by_hydra
    assert num_by_hydra > 40
    assert num_by_us < 5, "Hydra's maps are made where they are used: _maps_of_interpolations_alone can go"
