"""Rules on names of parameters: layer-wise decay as timm has it, what is frozen, and the groups that come of both."""

import re
from typing import Any

import pytest
import torch
from support import composed_config
from torch import nn

from recipes.adapter import is_adapter
from recipes.config.instantiate import make_model, make_optimizer
from recipes.errors import ConfigError
from recipes.model.gpt2 import GPT2
from recipes.optimizer.rules import apply_rules, divide_groups, format_rows, get_rules, list_rows

NANO = [
    "data=random_tokens",
    "model.num_layers=3",
    "model.num_heads=2",
    "model.hidden_size=16",
    "model.vocab_size=64",
    "model.max_seq_len=8",
]


class Vit(nn.Module):
    """The names, shapes and order of the parameters of a vision transformer in timm."""

    def __init__(self, depth: int = 4, width: int = 8) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, width))
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, width, 2)
        self.blocks = nn.ModuleList([self._block(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3)

    @staticmethod
    def _block(width: int) -> nn.Module:
        block = nn.Module()
        block.norm1, block.qkv, block.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        return block


def timm_groups(model: nn.Module, *, weight_decay: float, layer_decay: float) -> dict[str, tuple[float, float]]:
    """Return scale and decay by name as timm 1.0's `param_groups_layer_decay` assigns them.

    Its layers: the stem, which its `group_matcher` names, is the first; each block one more; `norm` is matched to the
    group before it; whatever the matcher does not name, the head, is the last. The scale is decay^(last - layer), and
    vectors (`ndim <= 1`, and biases) are not decayed.
    """
    last, num_blocks = len(model.blocks) + 1, len(model.blocks)  # type: ignore[arg-type]
    found = {}
    for name, parameter in model.named_parameters():
        if re.match(r"^cls_token|pos_embed|patch_embed", name):
            layer = 0
        elif in_block := re.match(r"^blocks\.(\d+)", name):
            layer = int(in_block[1]) + 1
        else:
            layer = num_blocks if re.match(r"^norm", name) else last
        decay = 0.0 if parameter.ndim <= 1 or name.endswith(".bias") else weight_decay
        found[name] = (layer_decay ** (last - layer), decay)
    return found


def small(*, tied: bool = True) -> GPT2:
    with torch.device("meta"):
        return GPT2(
            vocab_size=64, max_seq_len=8, num_layers=3, num_heads=2, hidden_size=16, dropout=0.0, tie_embeddings=tied
        )


def find_trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def group_by_name(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Any]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: group for group in optimizer.param_groups for parameter in group["params"]}


def test_layer_decay_makes_the_groups_of_timm() -> None:
    model = Vit()
    apply_rules(model, freeze=[], groups=[], layer_decay=0.75)
    optimizer = make_optimizer(composed_config("optimizer=adamw", "optimizer.lr=1e-3", "optimizer.weight_decay=0.05"))(
        model
    )
    groups = group_by_name(optimizer, model)
    expected = timm_groups(model, weight_decay=0.05, layer_decay=0.75)
    assert {name: (group["lr"] / 1e-3, group["weight_decay"]) for name, group in groups.items()} == {
        name: (pytest.approx(scale, rel=1e-12), decay) for name, (scale, decay) in expected.items()
    }
    assert optimizer.param_groups[0]["lr"] == 1e-3  # `lr` in the log is that of the head
    assert groups["blocks.2.qkv.weight"]["group_name"] == "layer_3_decay"
    assert len({group["group_name"] for group in optimizer.param_groups}) == len(optimizer.param_groups)


def test_a_tied_head_is_in_the_layer_of_the_embedding() -> None:
    model = small()
    apply_rules(model, freeze=[], groups=[], layer_decay=0.5)
    rules = get_rules(model)
    assert rules is not None
    scales = {name: settings.lr_scale for name, settings in rules.trained.items()}
    assert scales["head.weight"] == scales["embedding.weight"] == scales["position.weight"] == 0.5**4
    assert [scales[f"blocks.{index}.mlp.up.weight"] for index in range(3)] == [0.5**3, 0.5**2, 0.5]
    assert scales["norm.weight"] == 0.5


def test_the_last_rule_that_names_a_setting_decides_it() -> None:
    model = small(tied=False)
    groups = [
        {"match": "^head", "lr_scale": 10.0},
        {"match": r"\.weight$", "weight_decay": 0.0},
        {"match": r"^blocks\.2\.mlp\.", "freeze": False, "weight_decay": 0.3},
    ]
    apply_rules(model, freeze=["^blocks"], groups=groups, layer_decay=0.5)
    found = find_trained(model)
    assert [name for name in found if name.startswith("blocks")] == [
        f"blocks.2.mlp.{name}" for name in ("up.weight", "up.bias", "out.weight", "out.bias")
    ]
    optimizer = make_optimizer(composed_config("optimizer=adamw", "optimizer.lr=1e-3", "optimizer.weight_decay=0.1"))(
        model
    )
    groups_by_name = group_by_name(optimizer, model)
    found_settings = {name: (group["lr"], group["weight_decay"]) for name, group in groups_by_name.items()}
    assert found_settings["head.weight"] == (1e-2, 0.0)  # 10 instead of 1, and a decay of its own
    assert found_settings["embedding.weight"] == (1e-3 * 0.5**4, 0.0)
    assert found_settings["blocks.2.mlp.up.weight"] == (1e-3 * 0.5, 0.3)
    assert found_settings["blocks.2.mlp.up.bias"] == (1e-3 * 0.5, 0.0)  # a vector is not decayed, whatever a rule says


@pytest.mark.parametrize("option", ["adamw", "adamw_8bit", "schedule_free", "adam", "sgd", "lion", "adafactor", "muon"])
def test_every_optimizer_steps_by_the_rules_and_no_frozen_parameter(option: str) -> None:
    typed = [
        *NANO,
        *(f"optimizer={option}", "freeze=['^embedding','^blocks[.]0[.]']"),
        "optimizer.groups=[{match: '^blocks[.]1[.]', lr_scale: 0.5}, {match: '^blocks[.]2[.]', lr_scale: 1e-30}]",
    ]
    config = composed_config(*typed)
    model = make_model(config)
    model.init_weights(0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = make_optimizer(config)(model)
    model(torch.arange(8)[None]).logsumexp(-1).square().sum().backward()
    optimizer.step()
    lr = config["optimizer"]["lr"]
    assert {group["lr"] for group in optimizer.param_groups if group["params"]} == {lr, lr * 0.5, lr * 1e-30}
    moved = {name for name, tensor in model.state_dict().items() if (tensor - before[name]).abs().max() > 1e-12}
    frozen = [name for name in before if name.startswith(("embedding", "blocks.0."))]
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in frozen)
    assert {name.partition(".mlp")[0].partition(".attention")[0] for name in moved} == {
        *("position.weight", "blocks.1", "norm.weight", "norm.bias")
    }
    assert len(optimizer.state) == len(find_trained(model))


def test_an_optimizer_of_another_package_gets_the_groups_too() -> None:
    model = small(tied=False)
    apply_rules(model, freeze=[], groups=[{"match": "^head", "lr_scale": 0.1, "weight_decay": 0.5}], layer_decay=None)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    rules = get_rules(model)
    assert rules is not None
    divide_groups(optimizer, model, rules)
    used = [group for group in optimizer.param_groups if group["params"]]
    assert [(group["group_name"], group["lr"], group["weight_decay"]) for group in used] == [
        ("group_0", 1e-3, 0),
        ("head_group_0", pytest.approx(1e-4), 0.5),
    ]


def test_an_optimizer_without_weight_decay_gets_none_from_a_rule() -> None:
    model = small(tied=False)
    apply_rules(model, freeze=[], groups=[{"match": "^head", "weight_decay": 0.5}], layer_decay=None)
    optimizer = torch.optim.Rprop(model.parameters(), lr=1e-3)
    rules = get_rules(model)
    assert rules is not None
    with pytest.raises(ConfigError, match="Rprop has no weight decay in its parameter groups"):
        divide_groups(optimizer, model, rules)


def test_adapter_weights_have_rules_and_what_is_beside_them_stays_frozen() -> None:
    typed = [*NANO, "adapter=lora", "adapter.r=2", "optimizer.groups=[{match: lora_B, lr_scale: 16}]"]
    model = make_model(composed_config(*typed))
    assert all(map(is_adapter, find_trained(model)))
    rules = get_rules(model)
    assert rules is not None
    assert {name: settings.lr_scale for name, settings in rules.trained.items()} == {
        name: 16.0 if "lora_B" in name else 1.0 for name in find_trained(model)
    }
    frozen = make_model(composed_config(*typed[:-1], "freeze=[lora_A]"))
    assert all("lora_B" in name for name in find_trained(frozen))
    with pytest.raises(ConfigError, match="an adapter trains beside frozen weights"):
        make_model(composed_config(*typed[:-1], "optimizer.groups=[{match: '^norm', freeze: false}]"))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"freeze": ["^embeding"]},
            "freeze=[^embeding]: no parameter has a name that '^embeding' matches; near names are embedding,"
            " embedding.weight; type freeze='[^embedding[.]]'",
        ),
        (
            {"groups": [{"match": "^haed", "lr_scale": 10.0}]},
            "optimizer.groups with match: ^haed: no parameter has a name that '^haed' matches; near names are head;"
            " type optimizer.groups='[{match: ^head[.], lr_scale: 10.0}]'",
        ),
        (
            {"freeze": ["."]},
            "freeze=…: every parameter is frozen, and nothing is left to train; type the same command without freeze,"
            " or a match that leaves some out",
        ),
        (
            {"freeze": ["^head"], "groups": [{"match": "^head", "lr_scale": 10.0}]},
            "optimizer.groups with match: ^head: every parameter that it matches is frozen, and has neither a learning"
            " rate nor a decay; type optimizer.groups without this entry",
        ),
    ],
)
def test_a_rule_that_does_nothing_is_a_mistake(settings: dict[str, Any], expected: str) -> None:
    given = {"freeze": [], "groups": [], "layer_decay": None} | settings
    with pytest.raises(ConfigError) as raised:
        apply_rules(small(tied=False), **given)
    assert re.sub("['\"]", "", str(raised.value)) == re.sub("['\"]", "", expected)


def test_layer_decay_needs_blocks() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.layer_decay=0\.5: it counts the blocks of a model, and Linear"):
        apply_rules(nn.Linear(2, 2), freeze=[], groups=[], layer_decay=0.5)


def test_without_rules_the_groups_are_those_of_the_optimizer() -> None:
    model = small()
    apply_rules(model, freeze=[], groups=[], layer_decay=None)
    assert get_rules(model) is None
    groups = make_optimizer(composed_config("optimizer=adamw"))(model).param_groups
    assert [group["group_name"] for group in groups] == ["decay", "no_decay"]


def test_the_table_has_a_line_for_each_group_and_each_frozen_match() -> None:
    model = small(tied=False)
    groups = [{"match": "^head", "lr_scale": 0.5}]
    apply_rules(model, freeze=["^blocks"], groups=groups, layer_decay=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p.requires_grad]
    rules = get_rules(model)
    assert rules is not None
    divide_groups(optimizer, model, rules)
    counts = [sum(p.numel() for p in group["params"]) for group in optimizer.param_groups]
    num_in_blocks = sum(p.numel() for p in model.blocks.parameters())
    assert [line.split() for line in format_rows(list_rows(optimizer.param_groups, counts, rules))] == [
        ["group", "parameters", "lr", "decay", "trained"],
        ["group_0", "1,184", "0.001", "0.1", "yes"],  # embedding 64 x 16, positions 8 x 16, norm 2 x 16
        ["head_group_0", "1,024", "0.0005", "0.1", "yes"],
        ["^blocks", f"{num_in_blocks:,}", "-", "-", "no"],
    ]
