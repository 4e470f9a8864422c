"""A reward model as the reward of a policy: its own scores, in one process, the same model for a whole run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from reward_models import END, make_reward_model, score
from safetensors.torch import load_file, save_file
from support import composed_config, execute, read_metrics, resolved
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from torch import nn

from recipes.checkpoint.saved_tensor import open_tensors
from recipes.config import compose_and_check
from recipes.errors import ConfigError
from recipes.plan.hardware import find_cluster
from recipes.plan.plan import REWARD_MODELS, make_plan
from recipes.reward.model import RewardModel
from recipes.reward.workers import RewardsInProcesses, RewardWorkers, Scores
from recipes.tokenizer import Tokenizer
from recipes.tokenizer.bytes import Bytes

SMALL = (
    *("tokenizer=bytes", "model=gpt2_nano", "model.vocab_size=257", "model.max_seq_len=24", "model.num_layers=2"),
    *("model.num_heads=2", "model.hidden_size=32", "global_batch_size=16", "optimizer.lr=1e-2", "warmup_steps=0"),
    *("trainer.accelerator=cpu", "callbacks=policy", "~callbacks.report", "rollout.max_new_tokens=6"),
    *("callbacks.completions.every_n_steps=1", "callbacks.completions.num_completions=16", "log_every=1"),
    *("callbacks.generation_eval.num_samples=4", "callbacks.generation_eval.max_new_tokens=3", "seed=5"),
    *("rollout.num_generations=4", "eval_every=3", "save_every=1"),
)
TIMED = ("time", "throughput/", "memory/", "rollout/tokens_per_second")


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    return make_reward_model(tmp_path_factory.mktemp("judge"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"prompt": "abcdefgh"[: 1 + row % 8] + f"{row}>", "answer": "xy"} for row in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def list_overrides(prompts: Path, folder: Path, judge: Path, *more: str) -> list[str]:
    places = [f"data.path={prompts}", f"data.cache_dir={prompts.parent / 'cache'}", f"hydra.run.dir={folder}"]
    return ["recipe=grpo", *SMALL, *places, "reward=model", f"reward.model.pretrained={judge}", *more]


def make(folder: Path, **settings: Any) -> RewardModel:
    given: dict[str, Any] = {"weight": 1.0, "rows_at_a_time": 2, "device": "auto"} | settings
    return RewardModel(pretrained=str(folder), **given)


def test_each_completion_has_the_score_of_its_last_token_whatever_it_is_padded_with(
    judge: tuple[nn.Module, Path],
) -> None:
    model, folder = judge
    rows = [[*b"ab>c", END], [*b"abcdefg>hello"], [*b"a>", END], [*b"xyz>12345", END], [97]]
    expected = [score(model, row) for row in rows]
    assert max(expected) - min(expected) > 0.1, "they differ by more than rounding"
    for size in (1, 2, 5):
        function = make(folder, rows_at_a_time=size)
        function.load()
        assert function(tokens=rows) == pytest.approx(expected, abs=1e-5)


def test_a_policy_is_rewarded_with_the_scores_of_the_reward_model_in_training_validation_and_evaluation(
    judge: tuple[nn.Module, Path], prompts: Path, tmp_path: Path
) -> None:
    model, folder = judge
    more = ("reward=[model,length]", "reward.model.weight=0.5", "reward.length.weight=0.1", "trainer.max_steps=3")
    seen, ask = list[tuple[dict[str, Any], Scores]](), RewardWorkers.__call__

    def noting(workers: RewardWorkers, **given: Any) -> Scores:
        seen.append((given, ask(workers, **given)))
        return seen[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RewardWorkers, "__call__", noting)
        assert execute(*list_overrides(prompts, tmp_path / "run", folder, *more)) == 0
    assert [len(given["tokens"]) for given, _ in seen] == [2, 16, 16, 16, 2], "three steps between two validations"
    for given, scores in seen:
        of_model, of_length = (scores.of_functions[name] for name in ("model", "length"))
        assert of_model == pytest.approx([score(model, tokens) for tokens in given["tokens"]], abs=1e-5)
        expected = [0.5 * one + 0.1 * other for one, other in zip(of_model, of_length, strict=True)]
        assert scores.total == pytest.approx(expected, abs=1e-9)
        for prompt, tokens in zip(given["prompts"], given["tokens"], strict=True):
            assert bytes(tokens[: len(prompt)]) == prompt.encode()
    rows = [json.loads(line) for line in (tmp_path / "run/completions.jsonl").read_text().splitlines()]
    sampled = [tokens for given, _ in seen[1:4] for tokens in given["tokens"]]
    assert [row["ended"] for row in rows] == [tokens[-1] == END for tokens in sampled]
    assert len({row["ended"] for row in rows}) == 2, "some are cut off"
    assert [row["reward/model"] for row in rows] == [
        each for _, scores in seen[1:4] for each in scores.of_functions["model"]
    ]
    metrics = read_metrics(tmp_path / "run")
    assert metrics[0]["reward/model"] == pytest.approx(sum(row["reward/model"] for row in rows[:16]) / 16)
    answers = [json.loads(line) for line in (tmp_path / "run/answers.jsonl").read_text().splitlines()][-2:]
    assert metrics[-1]["val/reward/model"] == pytest.approx(sum(row["reward/model"] for row in answers) / 2, abs=1e-6)
    assert execute("mode=evaluate", f"resume={tmp_path / 'run'}", "mode.answers.max_new_tokens=3") == 0
    evaluated = json.loads((tmp_path / "run/evaluate_val.json").read_text())
    assert evaluated["reward/model"] == pytest.approx(metrics[-1]["val/reward/model"], abs=1e-5)


def test_a_run_that_is_resumed_has_the_bits_of_a_whole_one_and_no_other_reward_model(
    judge: tuple[nn.Module, Path], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "judge"
    folder.mkdir()
    for path in judge[1].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for name, steps in (("whole", 4), ("parted", 2)):
        assert execute(*list_overrides(prompts, tmp_path / name, folder, f"trainer.max_steps={steps}")) == 0
    assert execute(f"resume={tmp_path / 'parted'}", "trainer.max_steps=4") == 0
    saved = [open_tensors((tmp_path / name / "checkpoints/last").glob("*.safetensors")) for name in ("whole", "parted")]
    assert all(torch.equal(tensor.read(), saved[1][name].read()) for name, tensor in saved[0].items())
    whole, parted = (read_metrics(tmp_path / name) for name in ("whole", "parted"))
    for row, expected in zip(parted, whole, strict=True):
        assert row["reward/model"] == expected["reward/model"]
    weights = load_file(folder / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    capsys.readouterr()
    assert execute(f"resume={tmp_path / 'parted'}", "trainer.max_steps=5") == 2
    shown = " ".join("".join(capsys.readouterr()).split())
    assert f"they have other values than when the run was trained beside {folder}" in shown
    assert "reward.model.pretrained=<folder with the weights as they were>" in shown


def test_training_and_validation_ask_one_process(judge: tuple[nn.Module, Path]) -> None:
    settings: dict[str, Any] = {"timeout_seconds": 60.0, "error_score": 0.0, "max_errors": 5}
    training = RewardWorkers(functions={"model": make(judge[1])}, **settings)
    validation = RewardsInProcesses(functions={"model": make(judge[1])}, **settings)
    given: dict[str, Any] = {"prompts": ["a"], "completions": ["b"], "references": [""], "rows": [{}]}
    scores = training(**given, tokens=[[97, 98]])
    worker = training._workers["model"]
    assert validation(**given, tokens=[[97, 98]])["reward"] == scores.total
    assert validation._workers._workers["model"] is worker
    training.close()


def test_another_tokenizer_is_refused_before_the_run_and_another_template_before_its_first_step(
    judge: tuple[nn.Module, Path], prompts: Path, tmp_path: Path
) -> None:
    backend = Backend(WordLevel({chr(97 + id): id for id in range(26)} | {"<|endoftext|>": 26}, unk_token="z"))
    words = Tokenizer(backend, end_of_text=26)
    words.save(tmp_path / "words")
    typed = list_overrides(prompts, tmp_path / "run", judge[1])
    typed[typed.index("tokenizer=bytes")] = "tokenizer=huggingface"
    mistakes = [str(each) for each in compose_and_check([*typed, f"tokenizer.name={tmp_path / 'words'}"])[1]]
    assert mistakes == [
        f"reward.model.pretrained={judge[1]}: it has another tokenizer than the policy, whose tokens it would read as"
        " other ones; type reward.model.pretrained=<a reward model trained from the run that the policy starts from>"
    ]
    function, own = make(judge[1]), Bytes().make(None)  # type: ignore[arg-type]
    function.check_tokens(own)
    with pytest.raises(ConfigError, match="another tokenizer"):
        function.check_tokens(words)
    with pytest.raises(ConfigError, match="another chat template"):
        function.check_tokens(own.with_chat_template("{{ messages }}"))


def test_damaged_weights_are_refused_by_the_setting_that_names_them(
    judge: tuple[nn.Module, Path], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(judge[1], cut)
    with (cut / "model.safetensors").open("rb+") as file:
        file.truncate(2000)
    assert execute(*list_overrides(prompts, tmp_path / "run", cut)) == 2
    said = capsys.readouterr().out
    assert f"reward.model.pretrained={cut}\n" in said, said
    assert "reward.model.pretrained=<a complete copy of it>" in said
    with pytest.raises(ConfigError, match="model.safetensors") as refused:
        make(cut).load()  # where nothing trains, a process beside the rank finds it
    assert refused.value.setting == f"reward.model.pretrained={cut}"


def test_a_plan_counts_its_weights_on_the_device_of_each_rank_or_in_host_memory(
    judge: tuple[nn.Module, Path], prompts: Path
) -> None:
    num_bytes = (judge[1] / "model.safetensors").stat().st_size
    cluster = find_cluster("h100x8", per_node=1, num_nodes=1, interconnect=None, memory_gib=None)
    typed = list_overrides(prompts, Path("unused"), judge[1])
    plan = make_plan(resolved(composed_config(*typed)), cluster, rates=None)
    assert plan.peak.held[REWARD_MODELS] == num_bytes
    plan = make_plan(resolved(composed_config(*typed, "reward.model.device=cpu")), cluster, rates=None)
    assert REWARD_MODELS not in plan.peak.held
    assert plan.host[REWARD_MODELS] == num_bytes
