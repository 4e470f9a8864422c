"""What blocks keep, against itself and against torch.compile."""

import pytest

from recipes.config import compose_and_check

BUDGET = "activation_checkpoint=memory_budget"
OFFLOAD = "activation_checkpoint.offload=true"


def _mistakes(*overrides: str) -> list[tuple[str, str]]:
    _, mistakes = compose_and_check(["trainer.accelerator=cpu", *overrides])
    return [(mistake.setting, mistake.fix) for mistake in mistakes]


@pytest.mark.parametrize("setting", ["false", "auto"])
def test_a_budget_needs_compiled_blocks(setting: str) -> None:
    expected = f"activation_checkpoint.memory_budget=0.5 compile={setting}"
    assert _mistakes(BUDGET, f"compile={setting}") == [(expected, "compile=true, or activation_checkpoint=selective")]
    assert not _mistakes(BUDGET, "compile=true")
    assert not _mistakes(BUDGET, "compile=default")


def test_a_plan_is_no_run() -> None:
    assert not _mistakes(BUDGET, "compile=auto", "mode=plan")


def test_a_block_is_recomputed_in_one_way() -> None:
    found = _mistakes(BUDGET, "compile=true", "activation_checkpoint.every_nth_block=2")
    assert [setting for setting, _ in found] == [
        "activation_checkpoint.memory_budget=0.5 activation_checkpoint.every_nth_block=2"
    ]


def test_products_are_kept_in_recomputed_blocks() -> None:
    assert [fix for _, fix in _mistakes("activation_checkpoint.save_ops=products")] == [
        "activation_checkpoint=selective"
    ]


@pytest.mark.parametrize("option", ["none", "full", "every_nth", "selective", "offload"])
def test_every_option_can_be_offloaded(option: str) -> None:
    assert not _mistakes(f"activation_checkpoint={option}", OFFLOAD)
    assert not _mistakes(f"activation_checkpoint={option}", OFFLOAD, "compile=true")


def test_a_cuda_graph_keeps_its_memory() -> None:
    settings = [setting for setting, _ in _mistakes(OFFLOAD, "compile=reduce-overhead")]
    assert "activation_checkpoint.offload=true compile=reduce-overhead" in settings


@pytest.mark.parametrize("value", ["-0.1", "1.1"])
def test_a_budget_is_a_fraction(value: str) -> None:
    assert _mistakes(BUDGET, "compile=true", f"activation_checkpoint.memory_budget={value}") == [
        (f"activation_checkpoint.memory_budget={value}", "activation_checkpoint.memory_budget=<from 0 to 1>")
    ]
