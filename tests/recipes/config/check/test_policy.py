"""Mistakes about runs that learn from rewards: each is one sentence."""

from pathlib import Path

import pytest

from recipes.config import compose_and_check

GROUPS = "it counts completions, and each prompt has rollout.num_generations=8"
ALONE = (
    "a completion would be compared with itself alone, and all advantages be 0; type rollout.num_generations=8, or"
    " loss.baseline=batch loss.scale_rewards=batch"
)
NO_ROLLOUT = (
    "it learns from completions that are sampled and rewarded, and this task samples none; type recipe=grpo, or another"
    " loss"
)
NO_REFERENCE = (
    "a loss without the term of the divergence asks no reference; type task.reference=auto, or loss.beta=0.04"
)
EXPERTS = "its experts are balanced by a term of the loss of texts, which is no part of this one"

# what is typed beside recipe=grpo -> the mistake
MISTAKES = {
    "rollout.num_generations=1": f"rollout.num_generations=1 loss.baseline=group: {ALONE}",
    "rollout.num_generations=1 loss.baseline=leave_one_out": (
        f"rollout.num_generations=1 loss.baseline=leave_one_out: {ALONE}"
    ),
    "rollout.num_generations=1 loss.baseline=batch loss.scale_rewards=batch global_batch_size=1": (
        "global_batch_size=1: its one completion would be compared with itself alone, and its advantage be 0; type"
        " global_batch_size=8"
    ),
    "loss.baseline=batch": (
        "loss.baseline=batch loss.scale_rewards=group: a group of equal rewards has the deviation 0, and may be far"
        " from the mean of the batch; type loss.scale_rewards=batch"
    ),
    "global_batch_size=20": f"global_batch_size=20: {GROUPS}; type global_batch_size=24 (or 16)",
    "global_batch_size=4": f"global_batch_size=4: {GROUPS}; type global_batch_size=8",
    "global_batch_size=20 micro_batch_size=5": f"global_batch_size=20: {GROUPS}; type global_batch_size=40",
    # which 3 ranks do not divide, either
    "global_batch_size=20 strategy=ddp trainer.devices=3": f"global_batch_size=20: {GROUPS}; type global_batch_size=24",
    "loss.kind=gspo loss.importance=token_mask": (
        "loss.kind=gspo loss.importance=token_mask: its completions have one ratio each, of which weights of single"
        " tokens would correct nothing; type loss.importance=sequence_mask"
    ),
    "model=mixtral_nano": f"model=mixtral_nano task=policy: {EXPERTS}; type model=<one without experts>",
    "context_parallel_size=2 strategy=fsdp trainer.devices=2": (
        "context_parallel_size=2 task=policy: a completion is sampled token by token, and its tokens would be on"
        " several ranks; type context_parallel_size=1"
    ),
    "pipeline_parallel_size=2 strategy=fsdp trainer.devices=2": (
        "pipeline_parallel_size=2 task=policy: a completion is sampled by the whole model, of which a rank would have"
        " one stage; type pipeline_parallel_size=1"
    ),
    "mode=lr_find": (
        "mode=lr_find task=policy: it looks for the rate at which the loss falls, and that of a policy lies around 0"
        " whatever it learns; type -m optimizer.lr=1e-6,5e-6,2e-5, whose jobs are ranked by val/reward"
    ),
    "loss=dpo": "loss=dpo task=policy: it learns nothing from rewards of completions; type loss=grpo",
    "rollout.max_new_tokens=128": (
        "rollout.max_new_tokens=128: prompt and completion have to fit into seq_len=128; type"
        " rollout.max_new_tokens=64, or model.max_seq_len=256 seq_len=256, of a model that has so many positions"
    ),
    "data=mixture": (
        "data=mixture task=policy: a mixture is of texts, and a policy answers prompts; type data=prompts"
        " data.path=<a folder or glob>, which reads all of its files"
    ),
    "data=synthetic_preferences": (
        "loss=grpo data=synthetic_preferences: it learns from completions that are sampled for prompts, and this data"
        " holds texts to learn from; type data=prompts data.path=<rows with a prompt each>"
    ),
    "loss.kl_weight=0.1": "loss.kl_weight=0.1: there is no 'loss.kl_weight'; type loss.beta=0.1",
    "loss.gamma=0.9": "loss.gamma=0.9: there is no 'loss.gamma'; type recipe=ppo loss.gamma=0.9",
    "+data@eval_data.more=synthetic_prompts": (
        "eval_data.more=…: of task=policy, the held-out prompts of data= alone are answered; type"
        " data.val_path=<a file or glob with its prompts, too>"
    ),
    "max_new_tokens=64": "max_new_tokens=64: there is no 'max_new_tokens'; type rollout.max_new_tokens=64",
    "loss_type=gspo": "loss_type=gspo: there is no 'loss_type'; type loss.kind=gspo",
    "task.reference=frozen_copy": f"task.reference=frozen_copy loss.beta=0.0: {NO_REFERENCE}",
    "task.reference=adapter_off loss.beta=0.1": (
        "task.reference=adapter_off: the model has no adapter to switch off; type adapter=lora, or"
        " task.reference=frozen_copy"
    ),
    "adapter=lora task.reference=frozen_copy loss.beta=0.1": (
        "task.reference=frozen_copy adapter=lora: the weights beside the adapter are frozen already, and a copy would"
        " hold them twice; type task.reference=adapter_off"
    ),
    "adapter=lora adapter.modules_to_save=[lm_head] loss.beta=0.1": (
        "task.reference=adapter_off adapter.modules_to_save=[lm_head]: the reference is the model without its adapter,"
        " and these modules change in the training; type adapter.modules_to_save=[], or loss.beta=0"
    ),
    "loss.beta=0.1 strategy=fsdp tensor_parallel_size=2 trainer.devices=2": (  # of task.reference=auto
        "task.reference=frozen_copy tensor_parallel_size=2 task=policy: the reference is sharded over the ranks of"
        " strategy=fsdp only; type tensor_parallel_size=1, or loss.beta=0"
    ),
}


@pytest.fixture
def recipe(tmp_path: Path) -> list[str]:
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(f'{{"prompt": "1+{i}=", "reference": "{1 + i}"}}\n' for i in range(9)), encoding="utf-8")
    return ["recipe=grpo", f"data.path={rows}", "reward=exact_match"]


NO_REWARD = (
    "reward=none task=policy: nothing scores the completions that it learns from; type reward=exact_match, numeric or"
    " regex, or reward=mine reward.mine.path=<file.py>:<function>"
)
OWN = "type reward=mine reward.mine.path=<file.py>:<function>"
REWARDS = "exact_match format length mine model none numeric regex vqa_accuracy"
# what is typed in place of recipe=grpo with data and a reward -> all mistakes
FIRST_COMMANDS = {
    "recipe=grpo model=gpt2_nano": [
        "no data.path: it has no default; type data.path=<file, folder or glob>",
        NO_REWARD,
    ],
    "recipe=grpo reward=accuracy": [
        f"reward=accuracy: the options are {REWARDS}; type reward=exact_match",
        "no data.path: it has no default; type data.path=<file, folder or glob>",
    ],
    "recipe=grpo DATA reward=my.py:score": [
        f"reward=my.py:score: the options are {REWARDS}; type reward=mine reward.mine.path=my.py:score"
    ],
    "recipe=ppo DATA reward.path=my.py:score": [f"reward.path=my.py:score: there is no 'reward.path'; {OWN}"],
    "recipe=grpo DATA reward_funcs=my.py:score": [f"reward_funcs=my.py:score: there is no 'reward_funcs'; {OWN}"],
    "recipe=ppo DATA reward=numeric kl_coef=0.1": ["kl_coef=0.1: there is no 'kl_coef'; type loss.kl_weight=0.1"],
}


@pytest.mark.parametrize("typed", FIRST_COMMANDS)
def test_a_first_command_has_one_mistake_for_each_thing_that_it_lacks(recipe: list[str], typed: str) -> None:
    _, mistakes = compose_and_check(typed.replace("DATA", recipe[1]).split())
    assert [str(mistake) for mistake in mistakes] == FIRST_COMMANDS[typed]


@pytest.mark.parametrize(("method", "recipe_of_it"), [("rloo", "grpo loss.baseline=leave_one_out"), ("rlhf", "ppo")])
def test_a_method_is_answered_with_the_recipe_that_has_it(method: str, recipe_of_it: str) -> None:
    [mistake] = compose_and_check([f"recipe={method}"])[1]
    assert mistake.fix.startswith(f"recipe={recipe_of_it}")


def test_completions_have_half_of_the_window_and_no_more_than_leaves_a_prompt(recipe: list[str]) -> None:
    for typed, longest in (([], 64), (["seq_len=99"], 49), (["model.max_seq_len=1000"], 500)):
        run, mistakes = compose_and_check([*recipe, *typed])
        assert run is not None
        assert mistakes == []
        assert [run.config[group]["max_new_tokens"] for group in ("rollout", "data", "loss")] == [longest] * 3


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_about_a_policy_is_one_sentence(recipe: list[str], typed: str) -> None:
    has_path = not typed.startswith("data=")
    base = [word for word in recipe if has_path or not word.startswith("data.path=")]
    _, mistakes = compose_and_check([*base, *typed.split()])
    assert [str(mistake) for mistake in mistakes] == [MISTAKES[typed]]


# what is typed beside recipe=ppo -> the mistake
MISTAKES_OF_PPO = {
    "loss=grpo": "loss=grpo task=actor_critic: it does not train the values that this task predicts; type recipe=grpo",
    "task=policy loss=ppo": (
        "loss=ppo task=policy: it measures rewards by values, which the model of this task does not predict; type"
        " recipe=ppo, or loss=grpo"
    ),
    "loss=dpo": "loss=dpo task=actor_critic: it learns nothing from rewards of completions; type loss=ppo",
    "loss.beta=0.1": "loss.beta=0.1: there is no 'loss.beta'; type loss.kl_weight=0.1",
    "loss.baseline=group": "loss.baseline=group: there is no 'loss.baseline'; type recipe=grpo loss.baseline=group",
    "task=language_modeling loss=ppo rollout=none data=prompts": (
        "loss=ppo task=language_modeling: it learns from completions that are sampled and rewarded, and this task"
        " samples none; type recipe=ppo, or another loss"
    ),
    "loss.kl_weight=0 loss.kl_target=6": (
        "loss.kl_target=6 loss.kl_weight=0: the weight is multiplied until the divergence is at the target, and 0"
        " stays 0; type loss.kl_weight=0.05, or loss.kl_target=null"
    ),
    "task.reference=frozen_copy loss.kl_weight=0": (
        "task.reference=frozen_copy loss.kl_weight=0: a loss without the term of the divergence asks no reference;"
        " type task.reference=auto, or loss.kl_weight=0.05"
    ),
    "loss.kl_weight=0 tensor_parallel_size=2 strategy=fsdp trainer.devices=2": (
        "tensor_parallel_size=2 task=actor_critic: values are computed beside the probabilities of all tokens, of which"
        " a rank would have a part; type tensor_parallel_size=1"
    ),
    "rollout.num_generations=8 global_batch_size=20": (
        f"global_batch_size=20: {GROUPS}; type global_batch_size=24 (or 16)"
    ),
}


@pytest.mark.parametrize("typed", MISTAKES_OF_PPO)
def test_a_mistake_about_a_policy_with_values_is_one_sentence(recipe: list[str], typed: str) -> None:
    _, mistakes = compose_and_check(["recipe=ppo", *recipe[1:], *typed.split()])
    assert [str(mistake) for mistake in mistakes] == [MISTAKES_OF_PPO[typed]]


@pytest.mark.parametrize(
    "typed",
    [
        "global_batch_size=1",
        "rollout.num_generations=4 loss.kl_weight=0 strategy=deepspeed_stage_3 trainer.devices=2",
        "adapter=lora loss.kl_in=loss loss.kl_estimator=k3",
    ],
)
def test_values_need_no_group_and_no_reference(recipe: list[str], typed: str) -> None:
    _, mistakes = compose_and_check(["recipe=ppo", *recipe[1:], *typed.split()])
    assert [str(mistake) for mistake in mistakes] == []


@pytest.mark.parametrize(
    "typed",
    [
        "loss.kind=dr_grpo loss.scale_rewards=none",
        "loss.kind=gspo loss.epsilon=3e-4 loss.epsilon_high=4e-4 loss.importance=sequence_mask",
        "loss.baseline=leave_one_out loss.scale_rewards=none loss.beta=0.04 task.reference=frozen_copy",
        "loss.baseline=batch loss.scale_rewards=batch rollout.num_generations=1 global_batch_size=5",
        "global_batch_size=24 strategy=ddp trainer.devices=3",
        "global_batch_size=40 micro_batch_size=5",
        "adapter=lora loss.beta=0.04 strategy=deepspeed_stage_3 trainer.devices=2",
    ],
)
def test_algorithms_that_the_options_name_and_what_mistakes_advise_have_no_mistake(
    recipe: list[str], typed: str
) -> None:
    _, mistakes = compose_and_check([*recipe, *typed.split()])
    assert [str(mistake) for mistake in mistakes] == []


def test_a_policy_needs_a_rollout_and_nothing_else_does() -> None:
    _, mistakes = compose_and_check(["recipe=grpo", "data=stdlib_text", "rollout=none"])
    expected = "rollout=none task=policy: nothing samples the completions that it learns from; type rollout=local"
    assert [str(mistake) for mistake in mistakes] == [expected]
    _, mistakes = compose_and_check(["rollout=local"])
    expected = (
        "rollout=local task=language_modeling: this task samples no completions; type recipe=grpo, or rollout=none"
    )
    assert [str(mistake) for mistake in mistakes] == [expected]


@pytest.mark.parametrize("task", ["language_modeling", "preference"])
def test_a_loss_of_completions_is_one_mistake_under_a_task_that_samples_none(recipe: list[str], task: str) -> None:
    typed = ["loss=grpo"] if task == "language_modeling" else ["recipe=dpo", "loss=grpo", recipe[1]]
    _, mistakes = compose_and_check(typed)
    assert [str(mistake) for mistake in mistakes] == [f"loss=grpo task={task}: {NO_ROLLOUT}"]
