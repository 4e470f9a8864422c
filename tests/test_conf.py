"""conf/ is the index of the code: each option names its module, and every recipe builds every model."""

import importlib
import inspect
import itertools
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from support import RECIPES_OF_IMAGES, composed_config, needed_by, resolved
from torch._subclasses import FakeTensorMode

from recipes.blocks import named_blocks
from recipes.build import build
from recipes.config import compose_and_check
from recipes.config import resolved as resolved_module
from recipes.config.check import strategy as engines
from recipes.config.check.sections import SETTINGS
from recipes.config.signature import read_signature
from recipes.pipeline.pipeline import check_pipeline
from recipes.sweep.command_line import check_command

ROOT = Path(__file__).parent.parent
CONF = ROOT / "conf"
OPTIONS = sorted(CONF.glob("*/*.yaml"))
RECIPES = sorted(path.stem for path in (CONF / "recipe").glob("*.yaml"))
# of_module stands for the model of a LightningModule of one's own, which a run constructs with it; mlp has the size of
# its data (tests/recipes/model/test_mlp.py)
MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml") if path.stem not in ("of_module", "mlp"))


@pytest.fixture(autouse=True)
def _complete_toolchain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that everything DeepSpeed compiles with is installed."""
    monkeypatch.setattr(engines, "check_toolchain", lambda *_, **__: ())


def _targets(node: object) -> list[str]:
    if not isinstance(node, dict):
        return []
    own = [node["_target_"]] if "_target_" in node else []
    return own + [target for child in node.values() for target in _targets(child)]


@pytest.mark.parametrize("path", OPTIONS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_an_option_names_the_module_of_its_group(path: Path) -> None:
    group, option = path.parent.name, path.stem
    for target in _targets(yaml.safe_load(path.read_text())):
        if group == "trainer":
            assert target == "lightning.pytorch.Trainer"
            continue
        if target.startswith("lightning.pytorch.loggers."):  # which `recipes.logger.any_logger` wraps
            assert group == "logger"
        elif group != "reward" and target.startswith("recipes.reward."):  # what calls those that reward= chooses
            assert group in ("callbacks", "mode", "task")
        elif group == "metrics":
            assert target.startswith(("torchmetrics.", "recipes.metrics."))
        elif group == "callbacks":
            assert target.startswith(f"callbacks.{option}.")
        elif target.startswith("callbacks."):  # what a mode hands its work to: conf/ alone knows both
            assert group in ("mode", "sweep")
        else:
            assert target.startswith(f"recipes.{group}.")
            words = option.split("_")
            prefixes = ["_".join(words[:number]) for number in range(len(words), 0, -1)]
            own = [p for p in prefixes if (ROOT / "recipes" / group / f"{p}.py").is_file()]
            if own:  # the longest prefix of the option that is a module
                assert target.startswith(f"recipes.{group}.{own[0]}.")
        module, _, name = target.rpartition(".")
        assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("path", OPTIONS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_an_option_opens_with_what_it_is_and_its_command(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("# @package")]
    assert lines[0].startswith("# "), lines[0]
    comment = [line for line in lines[:6] if line.startswith("#")]
    assert any("python train.py" in line for line in comment), comment


def test_every_group_has_a_module_or_is_pure_composition() -> None:
    for folder in (path for path in CONF.iterdir() if path.is_dir()):
        if folder.name in ("recipe", "trainer", "debug", "hydra"):
            continue
        homes = [
            ROOT / "callbacks",
            ROOT / "recipes" / folder.name,
            ROOT / f"recipes/{folder.name}.py",
        ]
        assert any(home.exists() for home in homes), folder.name


def test_a_setting_of_the_config_is_checked_and_in_the_help() -> None:
    node = yaml.safe_load((CONF / "config.yaml").read_text())
    sections = ("defaults", "hydra", "loader", "eval_data", "optimizer")
    assert {*node} - {*sections} == {*SETTINGS}
    assert [key for key in SETTINGS if key not in str(node["hydra"]["help"])] == []


def test_a_default_lives_in_the_yaml_or_in_the_signature_never_in_both() -> None:
    for path in OPTIONS:
        node = yaml.safe_load(path.read_text())
        if not isinstance(node, dict) or not str(node.get("_target_", "")).startswith("recipes."):
            continue
        module, _, name = node["_target_"].rpartition(".")
        signature = inspect.signature(getattr(importlib.import_module(module), name))
        twice = [
            key
            for key, value in node.items()
            if key in signature.parameters and signature.parameters[key].default == value
        ]
        assert not twice, f"{path.relative_to(ROOT)}: {twice}"


@pytest.mark.parametrize("path", OPTIONS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_command_in_an_options_comment_composes(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "import lightning.pytorch as lightning\n"
        "class Photos:\n    def __init__(self, *, folder: str) -> None: ...\n"
        "class Rows:\n    def __init__(self, *, split: str) -> None: ...\n"
        "class Module(lightning.LightningModule):\n    def __init__(self, *, lr: float = 1.0) -> None: ...\n"
        "class DataModule(lightning.LightningDataModule): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    if path.parent.name == "precision":  # some are for those who have a GPU
        monkeypatch.setattr(resolved_module, "num_gpus", lambda: 1)
    lines = [line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#")]
    commands = [line for line in lines if line.startswith("python train.py")]
    assert commands
    for command in commands:
        overrides = shlex.split(command)[2:]
        is_sweep = "-m" in overrides or any(override.startswith("sweep=") for override in overrides)
        if is_sweep and "mode=wandb_sweep" not in overrides:  # which only writes the file of one
            typed = [override for override in overrides if override != "-m"]
            mistakes = check_command(typed, config_folder=CONF, config_name="config").mistakes
        elif path.parent.name == "pipeline":
            mistakes = check_pipeline(overrides, config_folder=CONF, config_name="config")[2]
        else:
            _, mistakes = compose_and_check(overrides)
        # runs, texts and disks named there are the reader's own
        theirs = (
            "resume=",
            "start_from=",
            "mode=",
            "data.path=",
            "strategy.nvme_path=",
            "model.name=",
            "model.vision=",
            "model.language=",
            "reward.mine.path=",
            "reward.model.pretrained=",
        )
        serious = [str(mistake) for mistake in mistakes if not mistake.setting.rpartition(": ")[2].startswith(theirs)]
        assert not serious, (command, serious)


def declares(model: str, constant: str) -> bool:
    """Whether the class of a model option has a constant, such as the styles by which ranks divide its layers."""
    node = yaml.safe_load((CONF / "model" / f"{model}.yaml").read_text())
    return constant in read_signature(node["_target_"]).constants


OF_ANSWERS = ("dpo", "orpo", "simpo", "kto", "reward_model", "grpo", "ppo")  # which refuse experts
SET_DATA = ("sft", "mixture", *OF_ANSWERS)
# recipes whose data is of no other model than that which they set
OF_ONE_MODEL = {**dict.fromkeys((*RECIPES_OF_IMAGES, "vision_quickstart"), "timm")} | dict.fromkeys(
    ("regression", "multi_label"), "mlp"
)
OF_ONE_MODEL |= {"clip": "clip", "siglip": "clip", "clip_quickstart": "dual_encoder", "clip_scenes": "clip"}
OF_ONE_MODEL |= {"vlm_sft": "llava", "vlm_scenes": "llava"}
# recipes whose ranks divide a model -> their smallest number; models that cannot be divided over two
DIVIDED = {"tp_bf16": 2, "fsdp_tp_bf16": 2, "cp_bf16": 2, "ep_bf16": 2, "pp_bf16": 2, "fsdp_tp_pp_bf16": 4}
WITH_EXPERTS = {"mixtral_nano", "mixtral_8x7b", "deepseek_nano", "deepseek_v3"}
BY_EXPERTS = ("ep_bf16", "pp_bf16")  # recipes that divide them
IMAGE_MODELS = {"resnet18", "resnet50", "timm", "clip", "dual_encoder", "llava"}
UNDIVIDED = {"gpt2_xl", *WITH_EXPERTS, *(model for model in MODELS if not declares(model, "tensor_parallel"))}
# every recipe once and every model once; all pairs in `make test-long`
ONCE = {*zip(RECIPES, itertools.cycle(MODELS), strict=False), *zip(itertools.cycle(RECIPES), MODELS, strict=False)}
ONCE |= {*OF_ONE_MODEL.items()}


@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        pytest.param(*pair, marks=[] if pair in ONCE else [pytest.mark.slow])
        for pair in itertools.product(RECIPES, MODELS)
        # these recipes set the data: text, and two of them its tokenizer
        if not (pair[0].startswith(SET_DATA) and pair[1] in IMAGE_MODELS)
        and OF_ONE_MODEL.get(pair[0], pair[1]) == pair[1]
        and not (pair[1] == "mlp" and pair[0] not in OF_ONE_MODEL)  # it has no data of its own
        and not (pair[0] in ("sft_demo", "mixture") and pair[1] == "huggingface")
        and (pair[1] in WITH_EXPERTS or pair[0] != "ep_bf16")
        and not (pair[0] in OF_ANSWERS and pair[1] in WITH_EXPERTS)
        and not (pair[0] in DIVIDED and pair[1] in (UNDIVIDED - WITH_EXPERTS if pair[0] in BY_EXPERTS else UNDIVIDED))
    ],
)
def test_every_recipe_composes_checks_and_builds_every_model_on_the_meta_device(
    recipe: str, model: str, tmp_path: Path
) -> None:
    ranks = [f"trainer.devices={DIVIDED[recipe]}", "trainer.accelerator=cpu"] if recipe in DIVIDED else []
    typed = [f"recipe={recipe}", f"model={model}", *needed_by(recipe, tmp_path, model=model), *ranks]
    config = composed_config(*typed)
    run = build(resolved(config, tmp_path))
    with torch.device("meta"):
        made = run.task._make_model()
    with FakeTensorMode(allow_non_fake_inputs=True):  # fused kernels accept it, and nothing on the meta device
        optimizer = run.task._make_optimizer(run.task._make_model())
    trained = [parameter for parameter in made.parameters() if parameter.requires_grad]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(trained)
    assert 0.0 < run.task._schedule(0) <= 1.0
    assert all(parameter.is_meta for parameter in made.parameters())
    assert sum(parameter.numel() for parameter in made.parameters()) > 500_000
    assert sum(map(len, named_blocks(made).values())) >= 2
