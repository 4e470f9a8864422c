"""Panels from plain lists; without any, every metric has exactly one place."""

from pathlib import Path

import pytest
import yaml

from callbacks.report.dashboard import Panel, add_own, get_sections, sections_for

ROOT = Path(__file__).parents[3]


def test_a_panel_draws_its_metrics_in_its_own_order_and_each_once() -> None:
    panel = Panel(title="norms", metrics=("grad/norm", "grad/*"))
    written = ["grad/clipped", "lr", "grad/norm"]
    assert panel.metrics_among(written) == ["grad/norm", "grad/clipped"]


def test_a_metric_with_a_bracket_in_its_name_is_found_by_its_name() -> None:
    assert Panel(title="x", metrics=("acc[top5]",)).metrics_among(["acc[top5]"]) == ["acc[top5]"]
    [section] = sections_for(["val/acc[top5]"])
    assert section.panels[0].metrics_among(["val/acc[top5]"]) == ["val/acc[top5]"]


def test_an_unknown_key_of_a_panel_is_an_error() -> None:
    with pytest.raises(TypeError, match="colour"):
        get_sections([{"title": "a", "panels": [{"title": "b", "metrics": ["c"], "colour": "red"}]}])


def test_the_default_dashboard_is_valid_and_its_picture_begins_with_the_reward_or_the_loss() -> None:
    config = yaml.safe_load((ROOT / "conf" / "dashboard" / "default.yaml").read_text())
    panels = [panel for section in get_sections(config["sections"]) for panel in section.panels]
    first, second, third, *_ = [panel.metrics for panel in panels if panel.picture]
    assert first == ("reward/mean",), "policies alone have it"
    assert second == ("rollout/tokens_mean", "rollout/tokens_max"), "likewise"
    assert third == ("train/loss", "val/loss")
    assert {panel.kind for panel in panels} == {"line", "bar", "parallel"}


def test_what_a_module_logs_under_names_of_its_own_is_drawn_with_its_losses_in_the_panel_of_the_loss() -> None:
    loss = {"title": "loss", "metrics": ["train/loss"], "picture": True}
    named = get_sections([{"title": "learning", "panels": [loss], "adds_own": True}])
    names = ["train/loss", "g_loss", "val_acc", "KLD", "grad/norm"]
    drawn = {p.title: p.metrics_among(names) for section in add_own(named, names) for p in section.panels}
    assert drawn == {"loss": ["train/loss", "g_loss"], "acc": ["val_acc"], "KLD": ["KLD"]}
    assert add_own(named, names)[0].panels[0].picture


def test_lightnings_usual_metric_names_share_the_panels_of_learning() -> None:
    names = [
        "epoch",
        "val_loss",
        "lr-Adam",
        "train_loss_step",
        "train_acc",
        "val_acc",
        "train_loss_epoch",
    ]
    learning, other = sections_for(names)
    assert [(panel.title, panel.metrics_among(names)) for panel in learning.panels] == [
        ("loss", ["val_loss", "train_loss_step", "train_loss_epoch"]),
        ("acc", ["train_acc", "val_acc"]),
        ("learning rate", ["lr-Adam"]),
    ]
    assert (other.title, other.panels[0].title) == ("other", "epoch")


def test_without_a_dashboard_every_metric_is_drawn_exactly_once() -> None:
    names = [
        "train/loss", "val/loss", "loss", "lr", "lr/head", "grad/norm", "grad/norm/blocks.0",
        "throughput/tokens_per_second", "memory/peak_gib", "my metric", "train_x", "a/b/c/d", "*",
    ]  # fmt: skip
    drawn = [name for section in sections_for(names) for panel in section.panels for name in panel.metrics_among(names)]
    assert sorted(drawn) == sorted(names)


def test_the_picture_has_at_most_eight_panels_and_learning_comes_first() -> None:
    names = [f"train/m{i}" for i in range(20)] + ["grad/norm"]
    panels = [panel for section in sections_for(names) for panel in section.panels]
    assert sum(panel.picture for panel in panels) == 8
    assert panels[0].picture


def test_no_metrics_make_no_sections() -> None:
    assert sections_for([]) == []


def test_a_pattern_leaves_out_what_a_panel_names_in_full() -> None:
    panels = [{"title": "mean", "metrics": ["reward/mean"]}, {"title": "by function", "metrics": ["reward/*"]}]
    [section] = get_sections([{"title": "policy", "panels": panels}])
    written = ["reward/mean", "reward/exact_match", "reward/length"]
    assert [panel.metrics_among(written) for panel in section.panels] == [["reward/mean"], written[1:]]


def test_the_report_of_a_policy_has_lengths_entropy_and_divergence_beside_its_reward_and_no_chart_of_its_loss() -> None:
    default = yaml.safe_load((ROOT / "conf" / "dashboard" / "default.yaml").read_text(encoding="utf-8"))["sections"]
    of_policy = ["reward/mean", "rollout/tokens_mean", "policy/entropy", "policy/kl", "val/reward"]
    for written, expected in (([*of_policy, "train/loss"], of_policy), (["train/loss", "val/reward"], None)):
        learning = add_own(get_sections(default), written)[0]
        drawn = [name for panel in learning.panels for name in panel.metrics_among(written)]
        assert drawn == (expected or written)
