"""A policy that predicts values: where they are read, what a rollout makes of them, and what becomes of their head."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support import composed_config, execute, read_metrics, resolved
from torch import Tensor

import lightning_recipes as lr
from recipes.build import build
from recipes.config import compose_and_check
from recipes.model.init import VALUE_WEIGHT
from recipes.numerics.loss import IGNORE_INDEX
from recipes.plan.hardware import find_cluster
from recipes.plan.plan import make_plan
from recipes.task.actor_critic import ActorCritic

SMALL = (
    *("tokenizer=bytes", "model=gpt2_nano", "model.vocab_size=257", "model.max_seq_len=24", "model.num_layers=2"),
    *("model.num_heads=2", "model.hidden_size=32", "global_batch_size=16", "optimizer.lr=1e-2", "warmup_steps=0"),
    *("trainer.accelerator=cpu", "callbacks=[grad_norm,generation_eval]", "rollout.max_new_tokens=6"),
    *("reward=exact_match", "log_every=1", "eval_every=8", "save_every=8", "callbacks.generation_eval.num_samples=2"),
    "callbacks.generation_eval.max_new_tokens=3",
)
STILL = ("optimizer.lr=1e-30",)  # the first step leaves the weights
LORA = ("adapter=lora", "adapter.r=4", "adapter.lora_alpha=8")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("files") / "prompts.jsonl"
    rows = [{"prompt": "abcdefgh"[: 1 + row % 8] + f"{row}>", "reference": "x"} for row in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.path={path}"


def train(prompts: str, folder: Path, *more: str, recipe: str = "ppo", steps: int = 2) -> list[dict[str, float]]:
    run = (f"recipe={recipe}", prompts, *SMALL, f"trainer.max_steps={steps}", f"hydra.run.dir={folder}", *more)
    assert execute(*run) == 0
    return read_metrics(folder)


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in lr.load(folder).state_dict().items()}


@pytest.fixture(scope="module")
def trained(prompts: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[ActorCritic, list[dict[str, Tensor]]]:
    """Return the task of a run after two steps, and the micro-batches of the second."""
    config = composed_config("recipe=ppo", prompts, *SMALL, "trainer.max_steps=2", "loss.missing_end_penalty=0.5")
    run = build(resolved(config, tmp_path_factory.mktemp("run")))
    task, seen = cast(ActorCritic, run.task), list[dict[str, Tensor]]()
    begin = task.before_window

    def before_window(micro_batches: list[Any]) -> list[Any]:
        seen[:] = begin(micro_batches)
        return seen

    task.before_window = before_window  # type: ignore[method-assign]
    run.trainer.fit(task, datamodule=run.data)
    return task, seen


def test_a_value_is_read_from_the_hidden_state_before_its_token_in_chunks_and_without(
    trained: tuple[ActorCritic, list[dict[str, Tensor]]],
) -> None:
    task, [batch] = trained
    model: Any = task.model.eval()
    with torch.no_grad():
        hidden = model(batch["inputs"], reduce=lambda hidden, weight: hidden)
        expected = (hidden * model.value.weight).sum(dim=-1)
        log_probs = model(batch["inputs"])[..., :257].log_softmax(dim=-1)
        expected_log_probs = log_probs.gather(-1, batch["targets"].clamp(min=0)[..., None])[..., 0]
        is_token = batch["targets"] != IGNORE_INDEX
        assert expected[is_token].abs().max() > 0.01, "trained"
        for task.loss.chunk_tokens in (None, 7):
            found = task.outputs(cast(Any, batch))
            assert found.values is not None
            torch.testing.assert_close(found.values[is_token], expected[is_token], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(found.log_probs[is_token], expected_log_probs[is_token], rtol=1e-5, atol=1e-5)


def test_a_rollout_gives_the_score_to_the_last_token_and_whitens_advantages(
    trained: tuple[ActorCritic, list[dict[str, Tensor]]],
) -> None:
    _, [batch] = trained
    is_token = batch["targets"] != IGNORE_INDEX
    advantages = batch["advantages"]
    assert advantages.shape == batch["targets"].shape
    assert not advantages[~is_token].any()
    assert advantages[is_token].mean().item() == pytest.approx(0, abs=1e-6)
    assert advantages[is_token].std().item() == pytest.approx(1, abs=1e-4)
    # with the first values 0, and no divergence from the reference yet, returns are discounted scores
    for row in range(len(advantages)):
        score = batch["rewards"][row].item() - 0.5 * batch["is_truncated"][row].item()
        returns = batch["returns"][row][is_token[row]].tolist()
        expected = [score * 0.95**place for place in range(len(returns))]
        assert returns == pytest.approx(expected[::-1], abs=1e-6)


def test_ratios_are_1_to_the_last_bit_at_the_first_iteration_with_dropout_too(prompts: str, tmp_path: Path) -> None:
    rows = train(prompts, tmp_path / "run", "rollout.num_iterations=1", "loss.epsilon=1e-9", "model.dropout=0.1")
    assert [row["policy/clipped_fraction"] for row in rows] == [0, 0]
    rows = train(prompts, tmp_path / "reused", "rollout.num_iterations=2", "loss.epsilon=1e-9")
    assert rows[0]["policy/clipped_fraction"] == 0 < rows[1]["policy/clipped_fraction"]


@pytest.fixture(scope="module")
def runs(prompts: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two steps of PPO, and a run without values that starts from it and leaves its weights."""
    folder = tmp_path_factory.mktemp("runs")
    train(prompts, folder / "ppo", "loss.kl_weight=0.0")
    train(prompts, folder / "grpo", *STILL, f"start_from={folder / 'ppo'}", recipe="grpo", steps=1)
    return folder


def test_the_first_values_are_0_and_an_export_has_none(runs: Path, tmp_path: Path) -> None:
    rows = read_metrics(runs / "ppo")
    assert rows[0]["value/explained_variance"] == pytest.approx(0, abs=1e-9)
    trained = weights_of(runs / "ppo")
    assert trained[VALUE_WEIGHT].abs().min() > 0, "every weight has moved"
    for format in ("transformers", "safetensors"):
        folder = tmp_path / format
        typed = ("mode=export", f"mode.format={format}", f"resume={runs / 'ppo'}", f"mode.path={folder}")
        assert execute(*typed) == 0
        exported = weights_of(folder)
        assert exported.keys() == trained.keys() - {VALUE_WEIGHT}
        assert all(torch.equal(exported[name], trained[name]) for name in exported)
        assert json.loads((folder / "export.json").read_text())["outputs"]["kind"] == "logits of the next token"


def test_runs_start_from_each_other_with_and_without_values(runs: Path, prompts: str, tmp_path: Path) -> None:
    first = weights_of(runs / "ppo")
    train(prompts, tmp_path / "again", *STILL, f"start_from={runs / 'ppo'}", steps=1)
    torch.testing.assert_close(weights_of(tmp_path / "again"), first)
    without = weights_of(runs / "grpo")
    assert without.keys() == first.keys() - {VALUE_WEIGHT}
    torch.testing.assert_close(without, {name: first[name] for name in without})
    train(prompts, tmp_path / "new", *STILL, f"start_from={runs / 'grpo'}", steps=1)
    new = weights_of(tmp_path / "new")
    assert new[VALUE_WEIGHT].abs().max() < 1e-20
    torch.testing.assert_close(new, without | {VALUE_WEIGHT: new[VALUE_WEIGHT]})


def test_values_are_trained_beside_an_adapter_and_its_run_goes_on(runs: Path, prompts: str, tmp_path: Path) -> None:
    adapted = (*LORA, f"start_from={runs / 'grpo'}", "save_every=1")
    train(prompts, tmp_path / "whole", *adapted, steps=4)
    train(prompts, tmp_path / "parted", *adapted, steps=2)
    assert execute(f"resume={tmp_path / 'parted'}", "trainer.max_steps=4") == 0
    whole, parted = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parted")
    assert [name for name in whole if not torch.equal(whole[name], parted[name])] == []
    assert whole[VALUE_WEIGHT].abs().max() > 0
    assert all(row["policy/kl"] != 0 for row in read_metrics(tmp_path / "whole")[1:]), "without its adapter"
    merged = ("mode=export", f"resume={tmp_path / 'whole'}", f"mode.path={tmp_path / 'merged'}")
    assert execute(*merged) == 0
    assert weights_of(tmp_path / "merged").keys() == weights_of(runs / "grpo").keys()


def test_a_rollback_returns_to_the_weight_of_the_divergence_if_it_follows_a_target(prompts: str) -> None:
    for more, changed in ((("loss.kl_target=1.0",), 0.05), ((), 0.3)):
        task = cast(ActorCritic, build(resolved(composed_config("recipe=ppo", prompts, *SMALL, *more))).task)
        scalars = task.recipes_live_scalars()
        task.loss.kl_weight = 0.3
        task.recipes_restore_scalars(scalars)
        assert task.loss.kl_weight == changed


CRITIC = "task.value=model"
TRUNK = "value.trunk."


def test_a_value_model_begins_with_the_weights_of_the_policy_and_leaves_it_alone(prompts: str, tmp_path: Path) -> None:
    """A policy learns the same whatever weight the values have, which a head on its trunk would change."""
    train(prompts, tmp_path / "base", recipe="grpo", steps=1)
    start = f"start_from={tmp_path / 'base'}"
    train(prompts, tmp_path / "still", CRITIC, start, "optimizer.lr=1e-30", steps=1)
    still, base = weights_of(tmp_path / "still"), weights_of(tmp_path / "base")
    torch.testing.assert_close({name: still[name] for name in base}, base)
    torch.testing.assert_close({name: still[f"{TRUNK}{name}"] for name in base if f"{TRUNK}{name}" in still}, base)
    assert still.keys() == {*base, *(f"{TRUNK}{name}" for name in base), VALUE_WEIGHT}
    kept = (start, "trainer.gradient_clip_val=null", "rollout.num_iterations=2")  # values move between the two steps
    found = {}
    for value in ("head", "model"):
        for weight in (0.1, 1.0):
            run = tmp_path / f"{value}_{weight}"
            train(prompts, run, *kept, f"task.value={value}", f"loss.value_weight={weight}")
            found[value, weight] = weights_of(run)
    for name in base:
        assert torch.equal(found["model", 0.1][name], found["model", 1.0][name]), name
    assert any(not torch.equal(found["head", 0.1][name], found["head", 1.0][name]) for name in base)


def test_a_value_model_is_not_exported_and_its_run_goes_on_to_the_same_bits(prompts: str, tmp_path: Path) -> None:
    adapted = (CRITIC, *LORA, "model.tie_embeddings=false", "save_every=1")
    train(prompts, tmp_path / "whole", *adapted, steps=4)
    train(prompts, tmp_path / "parted", *adapted, steps=2)
    assert execute(f"resume={tmp_path / 'parted'}", "trainer.max_steps=4") == 0
    whole, parted = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parted")
    assert [name for name in whole if not torch.equal(whole[name], parted[name])] == []
    assert any(name.startswith(TRUNK) and "lora_B" in name and whole[name].any() for name in whole), "it is trained"
    assert execute("mode=export", f"resume={tmp_path / 'whole'}", f"mode.path={tmp_path / 'merged'}") == 0
    assert not [name for name in weights_of(tmp_path / "merged") if name.startswith("value")]


def test_a_plan_counts_a_value_model_and_zero_3_is_refused_with_one(prompts: str) -> None:
    cluster = find_cluster("h100x8", per_node=1, num_nodes=1, interconnect=None, memory_gib=None)
    head, model = (
        make_plan(resolved(composed_config("recipe=ppo", prompts, *SMALL, f"task.value={each}")), cluster, rates=None)
        for each in ("head", "model")
    )
    assert model.num_parameters - head.num_parameters == head.num_parameters - 32
    assert model.optimizer_bytes == pytest.approx(2 * head.optimizer_bytes, rel=1e-2)
    assert model.moments[0].held["frozen models"] == head.moments[0].held["frozen models"], "of the policy alone"
    assert head.flops is not None
    assert model.flops is not None
    # a third of the policy's are those of the reference; the second model does not use the head of 320 rows
    second = head.flops.palm * 3 / 4 - 6 * 320 * 32 * 24
    assert model.flops.palm - head.flops.palm == pytest.approx(second, rel=1e-2)
    typed = ("recipe=ppo", prompts, *SMALL, CRITIC, "strategy=deepspeed_stage_3", "loss.kl_weight=0.0")
    [mistake] = compose_and_check(typed)[1]
    assert str(mistake) == (
        "strategy=deepspeed_stage_3 task.value=model: ZeRO-3 fills the weights of one model, and a second one begins"
        " with the same; type strategy=fsdp, which shards both, or task.value=head"
    )
