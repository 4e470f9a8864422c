"""Ordered rules on parameter names: which parameters are frozen, and how the others differ in rate and decay.

`optimizer.groups` lists them; `optimizer.layer_decay` and `freeze` are short forms, which come first in the list. Each
rule decides what it names, and where several match, the last one that names a setting decides it. Rules are applied to
the unsharded model on the meta device, before any engine wraps it, and found again by name when the optimizer is made.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from recipes.adapter import is_adapter
from recipes.blocks import list_units, named_blocks
from recipes.errors import ConfigError, type_setting
from recipes.optimizer.param_groups import divide_bounded, find_decayed

Entry = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule; None leaves a setting as the rules before it, or the optimizer, have it.

    Attributes:
        match: Regular expression, searched for in the names of parameters.
        lr_scale: Factor of the learning rate.
        weight_decay: Weight decay of the matrices among them.
        freeze: Whether they are frozen.
        label: Name in the table and in the names of groups.
        key: Setting that it is typed in; None: a short form that matches by construction.
    """

    match: str
    lr_scale: float | None = None
    weight_decay: float | None = None
    freeze: bool | None = None
    label: str = ""
    key: str | None = None


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """What the rules say of a trained parameter.

    Attributes:
        label: Names of the rules that decide it; empty: none does.
        lr_scale: Factor of the learning rate.
        weight_decay: Weight decay, for a matrix; None: that of the optimizer.
    """

    label: str = ""
    lr_scale: float = 1.0
    weight_decay: float | None = None


@dataclass(frozen=True, kw_only=True)
class ParameterRules:
    """What the rules say of the parameters of an unsharded model.

    Attributes:
        trained: Settings of every trained parameter, by each of its names.
        frozen: Number of elements that each rule has frozen, by its label.
        frozen_names: Every name of the parameters that rules have frozen.
    """

    trained: Mapping[str, GroupSettings]
    frozen: Mapping[str, int]
    frozen_names: frozenset[str]

    def list_settings(self) -> list[GroupSettings]:
        """Return the different settings, in the order of the parameters: the same on every rank."""
        return list(dict.fromkeys(self.trained.values()))


@dataclass(frozen=True, kw_only=True)
class GroupRow:
    """A line of the table of groups.

    Attributes:
        name: Name of the group.
        num_parameters: Elements in it, over all pipeline ranks.
        lr: Peak learning rate; None: frozen.
        weight_decay: Weight decay; None: frozen, or the optimizer has none.
    """

    name: str
    num_parameters: int
    lr: float | None = None
    weight_decay: float | None = None


def apply_rules(model: nn.Module, *, freeze: Sequence[str], groups: Sequence[Entry], layer_decay: float | None) -> None:
    """Freeze parameters in place, and note the settings of the others on the model as `parameter_rules`.

    Args:
        model: Unsharded model with its adapter, usually on the meta device.
        freeze: Regular expressions on the names of parameters to freeze.
        groups: Entries of `optimizer.groups`.
        layer_decay: Factor of the learning rate from each layer to the one before it; None: all have the same.

    Raises:
        ConfigError: A rule matches nothing, or nothing that is trained; an adapter has frozen what is to be trained; or
            nothing is left to train.
    """
    rules = [*_decay_by_layer(model, layer_decay), *read_rules(freeze, groups)]
    if not rules:
        return
    names: dict[nn.Parameter, list[str]] = {}  # a tied parameter has several, and a rule may match any of them
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    matched = [_find_matches(rule, names) for rule in rules]
    deciding = {
        parameter: [rule for rule, found in zip(rules, matched, strict=True) if parameter in found]
        for parameter in names
    }
    has_adapter = any(is_adapter(name) for own in names.values() for name in own)
    for parameter, own in names.items():
        _freeze(parameter, own[0], deciding[parameter], has_adapter=has_adapter)
    if not any(parameter.requires_grad for parameter in names):
        typed = "freeze" if freeze else "optimizer.groups"
        reason = "every parameter is frozen, and nothing is left to train"
        raise ConfigError(f"{typed}=…", reason, f"the same command without {typed}, or a match that leaves some out")
    for rule, found in zip(rules, matched, strict=True):
        is_of_trained = rule.lr_scale is not None or rule.weight_decay is not None
        if rule.key is not None and is_of_trained and not any(parameter.requires_grad for parameter in found):
            reason = "every parameter that it matches is frozen, and has neither a learning rate nor a decay"
            raise ConfigError(_show(rule), reason, f"{rule.key} without this entry")
    trained: dict[str, GroupSettings] = {}
    frozen: dict[str, int] = {}
    frozen_names: list[str] = []
    for parameter, own in names.items():
        if parameter.requires_grad:
            trained |= dict.fromkeys(own, _merge(deciding[parameter]))
        elif (freezing := _find_freezing(deciding[parameter])) is not None:
            frozen[freezing.match] = frozen.get(freezing.match, 0) + parameter.numel()
            frozen_names += own
    noted: Any = ParameterRules(trained=trained, frozen=frozen, frozen_names=frozenset(frozen_names))
    model.parameter_rules = noted


def get_rules(model: nn.Module) -> ParameterRules | None:
    """Return what `apply_rules` has noted on a model, or on the model that a pipeline stage is cut from."""
    return getattr(model, "parameter_rules", None)


def read_rules(freeze: Sequence[str], groups: Sequence[Entry]) -> list[Rule]:
    """Return the rules of `freeze` and `optimizer.groups`, each group with a label of its own."""
    rules = [Rule(match=match, freeze=True, label=_make_label(match), key="freeze") for match in freeze]
    labels: list[str] = []
    for entry in groups:
        label = _make_label(entry["match"])
        labels.append(label)
        number = labels.count(label)
        label = label if number == 1 else f"{label}_{number}"
        rules.append(Rule(**entry, label=label, key="optimizer.groups"))
    return rules


def _make_label(match: str) -> str:
    """Return the words of a regular expression, which may stand in the name of a metric."""
    without_classes = re.sub(r"\\[AbBdDsSwWZ]", "_", match)
    return re.sub(r"[^A-Za-z0-9]+", "_", without_classes).strip("_") or "rule"


@runtime_checkable
class NumbersLayers(Protocol):
    """A model whose layers for layer-wise decay are not those of one tower of blocks."""

    def number_layers(self) -> Mapping[str, int]:
        """Return the layer of each parameter by its name, from 0 at the inputs."""


def _decay_by_layer(model: nn.Module, layer_decay: float | None) -> Iterator[Rule]:
    """Yield the rules that layer-wise decay is short for: one of each layer, of which the last has a scale of 1.

    Raises:
        ConfigError: The model has no blocks.
    """
    if layer_decay is None:
        return
    if isinstance(model, NumbersLayers):
        numbers: Mapping[str, int] = model.number_layers()
        last = max(numbers.values())
    else:
        numbers, last = _number_layers(model, layer_decay)
    names: dict[int, list[str]] = {}
    for name, number in numbers.items():
        names.setdefault(number, []).append(name)
    for number, own in sorted(names.items()):
        match = f"^({'|'.join(map(re.escape, own))})$"
        yield Rule(match=match, lr_scale=layer_decay ** (last - number), label=f"layer_{number}")


def _number_layers(model: nn.Module, layer_decay: float) -> tuple[dict[str, int], int]:
    """Return the layer of each parameter and the last layer, as timm (1.0) counts them in a vision transformer.

    What comes before the blocks is layer 0, block i is layer i + 1, and the head, the last module, is the last layer.
    What stands between the blocks and the head, such as a norm, belongs to the last block. A head that is tied to the
    embedding is in layer 0 with it.

    Raises:
        ConfigError: The model has no blocks.
    """
    towers = [*named_blocks(model).values()]
    blocks = towers[0] if len(towers) == 1 else None
    if not isinstance(blocks, nn.ModuleList | nn.Sequential) or not len(blocks):
        name = getattr(model, "title", type(model).__name__)
        what = f"{len(towers)} towers of them" if len(towers) > 1 else "none"
        reason = f"it counts the blocks of a model, and {name} has {what}"
        raise ConfigError(f"optimizer.layer_decay={layer_decay}", reason, "optimizer.layer_decay=null")
    units = [unit for unit, _ in list_units(model) if any(True for _ in unit.parameters())]
    at_blocks = next(index for index, unit in enumerate(units) if unit is blocks)
    last = len(blocks) + 1
    layers = {parameter: 0 for unit in units[:at_blocks] for parameter in unit.parameters()}
    numbered = [*enumerate(blocks, 1), *((last - 1, unit) for unit in units[at_blocks + 1 : -1])]
    numbered += [(last, unit) for unit in units[at_blocks + 1 :][-1:]]
    for number, unit in numbered:
        for parameter in unit.parameters():
            layers.setdefault(parameter, number)
    # 0: a parameter of the model itself
    return {name: layers.get(parameter, 0) for name, parameter in model.named_parameters()}, last


def _find_matches(rule: Rule, names: Mapping[nn.Parameter, Sequence[str]]) -> set[nn.Parameter]:
    """Return the parameters with a name that a rule matches.

    Raises:
        ConfigError: There is none.
    """
    pattern = re.compile(rule.match)
    found = {parameter for parameter, own in names.items() if any(map(pattern.search, own))}
    if not found:
        raise _matches_nothing(rule, [name for own in names.values() for name in own])
    return found


def _matches_nothing(rule: Rule, names: Sequence[str]) -> ConfigError:
    assert rule.key is not None, f"{rule} matches by construction"
    prefixes = {name[: dot.start()] for name in names for dot in re.finditer(r"\.", name)}
    last_parts = {name.rpartition(".")[2] for name in names}
    words = rule.match.replace("\\", "").strip("^$.*()")
    near = get_close_matches(words, [*dict.fromkeys([*sorted(prefixes), *names, *sorted(last_parts)])], 3, 0.6)
    listed = ", ".join(near) if near else f"{', '.join(names[:3])} … {names[-1]}"
    reason = (
        f"no parameter has a name that {rule.match!r} matches; {'near names are' if near else 'names are'} {listed}"
    )
    meant = near[0] if near else names[0]
    escaped = meant.replace(".", "[.]")  # a backslash would have to be quoted for the shell
    is_last = meant in last_parts and meant not in names
    match = f"[.]{escaped}$" if is_last else f"^{escaped}{'[.]' if meant in prefixes else '$'}"
    return ConfigError(_show(rule), reason, _type(replace(rule, match=match)))


def _show(rule: Rule) -> str:
    return f"{rule.key}=[{rule.match}]" if rule.key == "freeze" else f"{rule.key} with match: {rule.match}"


def _type(rule: Rule) -> str:
    """Return a rule as it is typed, in a list of its own."""
    if rule.key == "freeze":
        return type_setting("freeze", [rule.match])
    named = {"match": rule.match, "lr_scale": rule.lr_scale, "weight_decay": rule.weight_decay, "freeze": rule.freeze}
    return type_setting("optimizer.groups", [{name: value for name, value in named.items() if value is not None}])


def _freeze(parameter: nn.Parameter, name: str, deciding: Sequence[Rule], *, has_adapter: bool) -> None:
    """Freeze a parameter, or not, as the last rule that matches it and says so.

    Raises:
        ConfigError: A weight beside an adapter was to be trained.
    """
    rule = _find_freezing(deciding)
    if rule is None:
        return
    if has_adapter and not rule.freeze and not (is_adapter(name) or parameter.requires_grad):
        # a checkpoint and an export hold what the adapter trains alone
        reason = f"an adapter trains beside frozen weights, which no checkpoint of it holds, and it trains {name}"
        module = name.removeprefix("inner.").rpartition(".")[0]
        fix = f"adapter.modules_to_save=[{module}] instead, adapter=none, or a match of weights that the adapter trains"
        raise ConfigError(_show(rule), reason, fix)
    if rule.freeze or not has_adapter:
        parameter.requires_grad_(not rule.freeze)


def _find_freezing(deciding: Sequence[Rule]) -> Rule | None:
    """Return the rule that decides whether a parameter is frozen; None if none says so."""
    return next((rule for rule in reversed(deciding) if rule.freeze is not None), None)


def _merge(deciding: Sequence[Rule]) -> GroupSettings:
    """Return what the last rules that name a learning rate or a decay say, and their labels."""
    by_rate = next((rule for rule in reversed(deciding) if rule.lr_scale is not None), None)
    by_decay = next((rule for rule in reversed(deciding) if rule.weight_decay is not None), None)
    labels = dict.fromkeys(rule.label for rule in (by_rate, by_decay) if rule is not None)
    return GroupSettings(
        label="_".join(labels),
        lr_scale=1.0 if by_rate is None or by_rate.lr_scale is None else by_rate.lr_scale,
        weight_decay=None if by_decay is None else by_decay.weight_decay,
    )


def make_optimizer(
    model: nn.Module, *, construct: Callable[[nn.Module], torch.optim.Optimizer]
) -> torch.optim.Optimizer:
    """Return the optimizer of a model, with its groups divided as the rules say.

    Args:
        model: Model on the device, whole or a stage of it, sharded or not.
        construct: model -> optimizer, of any class.
    """
    optimizer = construct(model)
    rules = get_rules(model)
    if rules is not None:
        divide_groups(optimizer, model, rules)
    divide_bounded(optimizer, model)
    return optimizer


def divide_groups(optimizer: torch.optim.Optimizer, model: nn.Module, rules: ParameterRules) -> None:
    """Divide each group of an optimizer by the settings of its parameters, in place, before its first step.

    Groups with a scale of 1 come first, so that the learning rate of the first group is that of the config. A group may
    be empty, as every rank of a pipeline has the same ones.

    Raises:
        ConfigError: A rule sets a weight decay, and the optimizer has none.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    with_decay = find_decayed(model)
    divided: list[tuple[float, dict[str, Any]]] = []
    for index, group in enumerate(optimizer.param_groups):
        members: dict[tuple[GroupSettings, bool], list[nn.Parameter]] = {}
        for settings in rules.list_settings():
            for decayed in (True, False) if settings.weight_decay is not None else (True,):
                members[settings, decayed] = []
        for parameter in group["params"]:
            settings = rules.trained[names[parameter]]
            members[settings, settings.weight_decay is None or parameter in with_decay].append(parameter)
        own_name = group.get("group_name", f"group_{index}")
        for (settings, decayed), parameters in members.items():
            changed = dict(group) | {"params": parameters, "lr": group["lr"] * settings.lr_scale}
            changed["group_name"] = f"{settings.label}_{own_name}" if settings.label else own_name
            if settings.weight_decay is not None:
                if "weight_decay" not in group:
                    reason = f"{type(optimizer).__name__} has no weight decay in its parameter groups"
                    raise ConfigError("optimizer.groups with weight_decay", reason, "the same entry without it")
                changed["weight_decay"] = settings.weight_decay if decayed else group["weight_decay"]
            divided.append((settings.lr_scale, changed))
    divided.sort(key=lambda scaled: scaled[0] != 1.0)  # stable
    optimizer.param_groups[:] = [group for _, group in divided]


def list_rows(groups: Sequence[Mapping[str, Any]], counts: Sequence[int], rules: ParameterRules) -> list[GroupRow]:
    """Return the table of groups: those of the optimizer, then what each rule has frozen.

    Args:
        groups: Parameter groups of the optimizer, before an engine replaces their parameters.
        counts: Elements in each of them, over all pipeline ranks.
        rules: Rules of the model.
    """
    rows = [
        GroupRow(name=group["group_name"], num_parameters=count, lr=group["lr"], weight_decay=group.get("weight_decay"))
        for group, count in zip(groups, counts, strict=True)
    ]
    return rows + [GroupRow(name=match, num_parameters=count) for match, count in rules.frozen.items()]


def format_rows(rows: Sequence[GroupRow]) -> Iterator[str]:
    """Yield the lines of a table: group, parameters, learning rate, decay, and whether it is trained."""
    width = max(len("group"), *(len(row.name) for row in rows))
    yield f"{'group':<{width}}  {'parameters':>15}  {'lr':>9}  {'decay':>7}  trained"
    for row in rows:
        rate, decay = ("-" if value is None else f"{value:.4g}" for value in (row.lr, row.weight_decay))
        trained = "no" if row.lr is None else "yes"
        yield f"{row.name:<{width}}  {row.num_parameters:>15,}  {rate:>9}  {decay:>7}  {trained}"
