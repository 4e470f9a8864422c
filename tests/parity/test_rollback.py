"""A run that rolls back repeats the same steps bit for bit, under every engine."""

from pathlib import Path
from typing import Any

import pytest
from cases import COMMON, DECODER, IS_LONG, TOKENS
from ranks import run_on_ranks

from recipes.config.check.strategy import has_libaio

AT, TO, STEPS = (21, 10, 24) if IS_LONG else (9, 4, 11)  # at least 5 steps are executed twice
WORKER = Path(__file__).parent / "rollback_ranks.py"
ALONE = ["recipe=single_fp32", "recipe=single_fp16"]
ON_TWO = [
    "recipe=ddp_fp32",
    "recipe=ddp_fp16",
    "recipe=zero3_fp16_offload",
    "recipe=ddp_fp32 callbacks.loss_spike.snapshot_storage=disk",
    "recipe=fsdp_bf16 optimizer=muon ema_decay=0.9",
    "recipe=fsdp_bf16 adapter=qlora model.hidden_size=64",
    "recipe=ep_bf16 model.num_kv_heads=1 model.ffn_hidden_size=32",
]
ON_FOUR = ["recipe=fsdp_tp_pp_bf16 trainer.accumulate_grad_batches=null micro_batch_size=4"]
# a frozen block above a trained embedding, groups with rates of their own, of which some are empty
_RULES = "freeze=['^position','^blocks[.]0[.]'] optimizer.layer_decay=0.75"
FROZEN_ALONE = [f"recipe=single_fp32 {_RULES}"]
FROZEN_ON_TWO = [f"recipe=fsdp_bf16 {_RULES}"]
if IS_LONG:
    _KEPT = "activation_checkpoint=full compile=true"
    FROZEN_ALONE += [f"recipe=single_fp32 {_RULES} ema_decay=0.9", f"recipe=single_fp32 {_RULES} {_KEPT}"]
    FROZEN_ON_TWO += [f"recipe=fsdp_bf16 {_RULES} ema_decay=0.9", f"recipe=fsdp_bf16 {_RULES} {_KEPT}"]
    FROZEN_ON_TWO += [f"recipe=zero2_fp16 {_RULES}", f"strategy=deepspeed_stage_2 {_RULES} {_KEPT}"]
FROZEN = [*FROZEN_ALONE, *FROZEN_ON_TWO]
ALONE += FROZEN_ALONE
ON_TWO += FROZEN_ON_TWO
if IS_LONG:
    ALONE += ["recipe=single_bf16", "recipe=single_fp32 optimizer=sgd"]
    ON_TWO += [
        "recipe=zero2_fp16",
        "recipe=fsdp_bf16",
        "recipe=fsdp_bf16_offload",
        "recipe=fsdp_bf16 adapter=lora",
        "recipe=tp_bf16",
    ]
    ON_TWO += ["recipe=cp_bf16 strategy=ddp", "recipe=pp_bf16 trainer.accumulate_grad_batches=null"]
    ON_TWO += ["recipe=zero2_bf16_offload", "recipe=zero3_bf16", "recipe=zero3_bf16 adapter=lora"]
    ON_TWO += [
        "recipe=fsdp_bf16 optimizer=adafactor",
        "recipe=fsdp_fp16",
        "recipe=zero1_bf16",
        "strategy=deepspeed_stage_2 precision=bf16-true",
        "recipe=zero3_bf16 optimizer=lion",
    ]
    ON_TWO += ["recipe=zero3_bf16_nvme"] if has_libaio() else []


def _case(name: str, folder: Path, world_size: int) -> dict[str, Any]:
    overrides = [override for override in COMMON if not override.startswith(("trainer.max", "callbacks"))]
    has_experts = name.startswith("recipe=ep_")
    overrides += [
        *DECODER,
        *([] if has_experts else ["model=gpt2_nano", "model.dropout=0.1"]),
        "callbacks=[grad_norm,loss_scale]",
    ]
    overrides += [f"trainer.max_steps={STEPS}", f"trainer.devices={world_size}", f"save_every={TO}"]
    overrides += [override for override in name.split() if not override.startswith("callbacks.loss_spike")]
    if "micro_batch_size" not in name:
        overrides.append(f"micro_batch_size={8 // world_size}")
    if "nvme" in name:  # DeepSpeed leaves what is smaller than a MiB in memory
        (folder / "nvme").mkdir()
        overrides += [
            "model.hidden_size=512",
            "model.vocab_size=8192",
            f"strategy.nvme_path={folder / 'nvme'}",
        ]
    on_disk = {"snapshot_storage": "disk"} if "disk" in name else {}
    times = {"at": AT, "to": TO}
    if "nvme" in name:  # two seconds a step
        times = {"at": 9, "to": 4}
        overrides.append("trainer.max_steps=10")
    return {"overrides": overrides, "data": TOKENS, "arguments": on_disk, "reads_state": "freeze" in name} | times


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for names, world_size in ((ALONE, 1), (ON_TWO, 2), (ON_FOUR, 4)):
        folder = tmp_path_factory.mktemp("rollback")
        cases = {name: _case(name, folder, world_size) for name in names}
        found |= run_on_ranks(cases, world_size=world_size, folder=folder, worker=WORKER)
    return found


@pytest.mark.parametrize("name", [*ALONE, *ON_TWO, *ON_FOUR])
def test_after_a_rollback_that_rewinds_the_data_the_losses_repeat_bit_for_bit(
    name: str, results: dict[str, Any]
) -> None:
    result = results[name]
    assert "error" not in result, result["error"]
    at, to, steps = (9, 4, 10) if "nvme" in name else (AT, TO, STEPS)
    losses = result["losses"]
    assert [step for step, _ in losses] == [*range(1, at + 1), *range(to + 1, steps + 1)]
    first, again = losses[to:at], losses[at : at + at - to]
    assert len(again) >= 5
    assert again == first
    assert len({loss for _, loss in first}) == len(first), "constant losses would prove nothing"


@pytest.mark.parametrize("name", [*ALONE, *ON_TWO, *ON_FOUR])
def test_a_run_that_rolled_back_has_one_row_per_step_and_no_checkpoint_of_rolled_back_steps(
    name: str, results: dict[str, Any]
) -> None:
    result, files = results[name], results[name]["files"]
    last = int(result["rows"][-1]["step"])
    assert [row["step"] for row in result["rows"]] == list(range(1, last + 1))
    assert any(file.startswith(f"rolled_back/steps_{result['to'] + 1:07d}_to_") for file in files)
    left = {file for file in files if file.startswith("checkpoints/step") and file.count("/") == 1}
    newest = (4, 10) if "nvme" in name else (2 * TO, STEPS)
    assert left == {f"checkpoints/step_{step:07d}.ckpt" for step in newest}
    assert not any(file.startswith("snapshots/") for file in files)


@pytest.mark.parametrize("name", FROZEN)
def test_a_rollback_restores_every_bit_of_what_is_trained_and_what_is_frozen_never_changes(
    name: str, results: dict[str, Any]
) -> None:
    result, world_size = results[name], 1 if name in FROZEN_ALONE else 2
    assert "error" not in result, result["error"]
    assert result["differences"]["to, restored"] == {}
    trained = {*result["trained"], "model.head.weight"}  # tied to the embedding
    assert not [weight for weight in trained if weight.startswith(("model.position.", "model.blocks.0."))]
    for moments in ("to, at", "start, last"):  # without a rollback, and from the first step to the last
        changed = result["differences"][moments]
        weights = {key.removeprefix("module/") for key in changed if key.startswith("module/")}
        assert weights == trained, moments
        assert any(key.endswith("/exp_avg_sq") for key in changed), moments
        assert set(changed.values()) == {world_size}, moments  # on every rank


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_ranks_of_a_node_that_hold_the_same_state_keep_one_snapshot_together(
    precision: str, results: dict[str, Any]
) -> None:
    alone, shared = (results[f"recipe={strategy}_{precision}"]["num_bytes"] for strategy in ("single", "ddp"))
    # rank 0 of two: half of the large tensors, and all small ones
    assert 0.5 * alone <= shared < 0.6 * alone
