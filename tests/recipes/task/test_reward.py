"""A reward model scores the token that ends an answer, learns pairs, and is exported with equal scores."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import composed_config, execute, read_metrics
from torch import Tensor, nn

import lightning_recipes as lr
from recipes.config import compose_and_check
from recipes.config.instantiate import make_model
from recipes.loss.preference import IGNORE_INDEX
from recipes.model.score import compute_rewards, has_score
from recipes.model.weights import initialize
from recipes.model.weights.huggingface import export_pretrained
from recipes.task.reward import complete_rows

END = 256  # of a text, in the tokenizer of bytes
SMALL = ("model.vocab_size=257", "model.num_layers=2", "model.num_heads=2", "model.hidden_size=32")
GPT2 = ("model=gpt2_nano", *SMALL, "model.max_seq_len=32")
LLAMA = ("model=llama_nano", *SMALL, "model.max_seq_len=32", "model.num_kv_heads=1", "model.ffn_hidden_size=64")
SHORT = ("recipe=reward_model", "tokenizer=bytes", "optimizer.lr=3e-3", "warmup_steps=0", "callbacks=[]")
SHORT += ("log_every=1", "global_batch_size=16")
LORA = ("adapter=lora", "adapter.r=4", "adapter.lora_alpha=8")


def write_pairs(path: Path, *, num_rows: int = 160, shuffled: bool = False) -> Path:
    """Write pairs whose chosen answer is the prompt and whose rejected one is it reversed; of random order if asked."""
    draw = random.Random(0)
    rows = []
    for _ in range(num_rows):
        letters = draw.sample("abcdefgh", k=draw.randint(2, 6))
        answers = ["".join(sorted(letters)), "".join(sorted(letters, reverse=True))]
        if shuffled:
            draw.shuffle(answers)
        rows.append({"prompt": f"{''.join(letters)}>", "chosen": answers[0], "rejected": answers[1]})
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def write_config(folder: Path, model_type: str = "llama", **settings: Any) -> Path:
    """Write the config.json of a small published model without weights."""
    config = {"model_type": model_type, "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config |= {"max_position_embeddings": 32, "tie_word_embeddings": False, **settings}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_reward_model(*overrides: str, pretrained: Path | None = None) -> Any:
    config = composed_config("task=reward", f"data.path={__file__}", "tokenizer=bytes", *overrides)
    config["model"] |= {"pretrained": None if pretrained is None else str(pretrained)}
    with torch.device("meta"):
        model = make_model(config)
    model.to_empty(device="cpu")
    initialize(model, 0)
    return model.eval()


def weights_of(run: Path) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in lr.load(run).state_dict().items()}


# Where the score is read.


def test_rows_end_with_the_last_token_of_their_answer() -> None:
    pad, no = 0, IGNORE_INDEX
    inputs = torch.tensor([[1, 2, 3, 4], [5, 6, pad, pad], [7, 8, 9, 10]])
    targets = torch.tensor([[no, 3, 4, END], [no, END, no, no], [no, 9, END, no]])  # the last has more after its end
    inputs[2, 3] = END
    tokens, last = complete_rows(inputs, targets, max_seq_len=8)
    assert tokens.tolist() == [[1, 2, 3, 4, END], [5, 6, END, pad, pad], [7, 8, 9, END, pad]]
    assert last.tolist() == [4, 2, 3]
    cut, last = complete_rows(inputs, targets, max_seq_len=4)
    assert cut.shape == (3, 4)
    assert last.tolist() == [3, 2, 3]


def test_a_score_is_read_at_the_end_of_the_answer_where_padding_is_that_token_too() -> None:
    """transformers#35352, trl PR#6952: looked for as the last token that is no padding, the end is one token too late.

    trl#3750: it belongs to the token that ends the answer, and not to the one after it.
    """
    model, no = make_reward_model(*GPT2), IGNORE_INDEX
    rows = [[7, 8, 9, 10, END], [7, 8, END]]
    alone = [compute_rewards(model, torch.tensor([row]), torch.tensor([len(row) - 1])).item() for row in rows]
    for pad in (0, END):
        inputs = torch.tensor([[7, 8, 9, 10, pad], [7, 8, pad, pad, pad]])
        targets = torch.tensor([[no, 9, 10, END, no], [no, END, no, no, no]])
        tokens, last = complete_rows(inputs, targets, max_seq_len=32)
        assert tokens.gather(1, last[:, None]).flatten().tolist() == [END, END]
        assert compute_rewards(model, tokens, last).tolist() == pytest.approx(alone, abs=1e-6)
        later = compute_rewards(model, tokens, last + 1 - (last == 5).long())
        earlier = compute_rewards(model, tokens, last - 1)
        assert (later - torch.tensor(alone)).abs().max() > 1e-3
        assert (earlier - torch.tensor(alone)).abs().min() > 1e-3


@pytest.mark.parametrize("overrides", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_padded_row_has_the_score_that_it_has_alone(overrides: Sequence[str]) -> None:
    model = make_reward_model(*overrides)
    rows = [torch.arange(3, 3 + length) for length in (2, 9, 5)]
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    found = compute_rewards(model, padded, torch.tensor([len(row) - 1 for row in rows]))
    alone = [compute_rewards(model, row[None], torch.tensor([len(row) - 1]))[0] for row in rows]
    torch.testing.assert_close(found, torch.stack(alone), rtol=0, atol=1e-6)
    assert found.std() > 0, "rows differ"


# Which weights are trained, and where the others come from.


def test_an_untied_head_is_frozen_and_a_tied_one_is_trained_as_the_embedding() -> None:
    tied, untied = (make_reward_model(*GPT2, f"model.tie_embeddings={value}") for value in ("true", "false"))
    assert untied.head.weight.requires_grad is False
    assert tied.head.weight is tied.embedding.weight
    assert tied.embedding.weight.requires_grad
    for model in (tied, untied):
        tokens = torch.arange(12).view(2, 6)
        compute_rewards(model, tokens, torch.tensor([5, 3])).sum().backward()
        unused = [name for name, each in model.named_parameters() if each.requires_grad and each.grad is None]
        assert unused == [], "an engine would wait for their gradient"


def test_published_weights_load_beside_a_score_from_the_seed(tmp_path: Path) -> None:
    plain = make_reward_model(*LLAMA)
    published = tmp_path / "published"
    export_pretrained(plain, published)
    own = make_reward_model(*LLAMA, pretrained=published)
    any_model = ("model=huggingface", f"model.name={published}", "model.pretrained=null", "model.max_seq_len=32")
    other, drawn = make_reward_model(*any_model, pretrained=published), make_reward_model(*any_model)
    tokens, last = torch.arange(20).view(2, 10), torch.tensor([9, 4])
    expected = compute_rewards(plain, tokens, last)
    torch.testing.assert_close(compute_rewards(own, tokens, last), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(compute_rewards(other, tokens, last), expected, rtol=0, atol=1e-5)
    for model in (own, other, drawn):
        assert torch.equal(model.score.weight, plain.score.weight)
    assert plain.score.weight.std().item() == pytest.approx(0.02, rel=0.5)


# Runs.


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that has learned which of two answers is sorted."""
    folder = tmp_path_factory.mktemp("learned")
    pairs = write_pairs(folder / "pairs.jsonl")
    run = (*SHORT, *GPT2, f"data.path={pairs}", "data.val_fraction=0.3", "trainer.max_steps=80", "eval_every=80")
    assert execute(*run, f"hydra.run.dir={folder / 'run'}") == 0
    return folder / "run"


def test_pairs_are_learned(learned: Path) -> None:
    rows = read_metrics(learned)
    assert 0.2 < rows[0]["train/accuracy"] < 0.9
    assert rows[-1]["val/accuracy"] > 0.95
    assert rows[-1]["val/margin"] > 1
    assert rows[-1]["val/chosen_reward"] > rows[-1]["val/rejected_reward"]


def test_random_labels_teach_nothing(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl", num_rows=300, shuffled=True)
    run = (*SHORT, *GPT2, f"data.path={pairs}", "data.val_fraction=0.5", "trainer.max_steps=20", "eval_every=20")
    assert execute(*run, f"hydra.run.dir={tmp_path / 'run'}") == 0
    assert read_metrics(tmp_path / "run")[-1]["val/accuracy"] == pytest.approx(0.5, abs=0.12)  # of some 150 pairs


def test_modes_give_the_rewards_of_both_answers(learned: Path) -> None:
    assert execute("mode=evaluate", f"resume={learned}") == 0
    measured = json.loads((learned / "evaluate_val.json").read_text())
    assert measured["accuracy"] > 0.95
    assert "exact_match" not in measured, "it answers no questions"
    assert execute("mode=predict", f"resume={learned}") == 0
    rows = [json.loads(line) for line in (learned / "predictions_val.jsonl").read_text().splitlines()]
    margins = [row["chosen_reward"] - row["rejected_reward"] for row in rows]
    assert len(rows) == measured["samples"]
    assert sum(margins) / len(margins) == pytest.approx(measured["margin"], rel=1e-4)


def test_an_answer_is_scored_with_the_end_that_it_was_trained_with(learned: Path) -> None:
    """trl PR#5813, gpt-neox PR#1285: an end of text that is appended in training and not in scoring, or twice."""
    assert execute("mode=predict", f"resume={learned}") == 0
    rows = [json.loads(line) for line in (learned / "predictions_val.jsonl").read_text().splitlines()]
    pairs = [json.loads(line) for line in (learned.parent / "pairs.jsonl").read_text().splitlines()]
    model, found = lr.load(learned), list[list[float]]()
    for pair in pairs:
        text = [*pair["prompt"].encode(), *pair["chosen"].encode()]
        ends = ([*text, END], text, [*text, END, END])
        found.append(
            [compute_rewards(model, torch.tensor([each]), torch.tensor([len(each) - 1])).item() for each in ends]
        )
    for row in rows:
        with_end, without, twice = min(found, key=lambda rewards: abs(rewards[0] - row["chosen_reward"]))
        assert with_end == pytest.approx(row["chosen_reward"], abs=1e-5)
        assert abs(without - with_end) > 1e-2
        assert abs(twice - with_end) > 1e-2


def check_export(run: Path, folder: Path) -> None:
    """Check that transformers computes the scores of a run from its export, with padding and without."""
    from transformers import AutoModelForSequenceClassification

    assert execute("mode=export", f"resume={run}", f"mode.path={folder}") == 0
    theirs = AutoModelForSequenceClassification.from_pretrained(str(folder)).eval()
    assert theirs.config.num_labels == 1
    assert theirs.config.pad_token_id not in (None, END), "padding would hide the end of a text"
    ours = lr.load(run)
    assert has_score(ours)
    rows = [torch.tensor([*range(97, 97 + length), END]) for length in (1, 7, 3)]
    last = torch.tensor([len(row) - 1 for row in rows])
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=theirs.config.pad_token_id)
    with torch.no_grad():
        expected = compute_rewards(ours, padded, last)
        found = theirs(input_ids=padded, attention_mask=(torch.arange(8) <= last[:, None]).long()).logits[:, 0]
        alone = theirs(input_ids=rows[1][None]).logits[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(alone, expected[1:2], rtol=0, atol=1e-5)


def test_an_export_of_gpt2_has_equal_scores_in_transformers(learned: Path, tmp_path: Path) -> None:
    check_export(learned, tmp_path / "export")
    with pytest.raises(lr.InvalidConfigError, match="AutoModelForSequenceClassification"):
        lr.load(tmp_path / "export")


@pytest.mark.parametrize("model", ["llama", "huggingface", "huggingface, LoRA"])
def test_other_exports_have_equal_scores_in_transformers(model: str, tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl", num_rows=40)
    name = write_config(tmp_path / "config")
    of_any = ("model=huggingface", f"model.name={name}", "model.pretrained=null", "model.max_seq_len=32")
    typed = LLAMA if model == "llama" else (*of_any, *(LORA if "LoRA" in model else ()))
    run = (*SHORT, *typed, f"data.path={pairs}", "trainer.max_steps=2", "eval_every=1", "save_every=2")
    assert execute(*run, f"hydra.run.dir={tmp_path / 'run'}") == 0
    check_export(tmp_path / "run", tmp_path / "export")


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_an_adapter_alone_has_equal_scores_in_peft(model: Sequence[str], tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    pairs, published = write_pairs(tmp_path / "pairs.jsonl", num_rows=40), tmp_path / "published"
    tuned = ("recipe=sft", "data.fields={completion: chosen}", "tokenizer=bytes", "callbacks=[]", f"data.path={pairs}")
    steps = ("trainer.max_steps=1", "eval_every=1", "save_every=1", f"hydra.run.dir={tmp_path / 'tuned'}")
    assert execute(*tuned, *model, *steps) == 0
    assert execute("mode=export", f"resume={tmp_path / 'tuned'}", f"mode.path={published}") == 0
    typed = ("model=huggingface", f"model.name={published}", "model.max_seq_len=32", *LORA, f"data.path={pairs}")
    typed += ("tokenizer=huggingface", f"tokenizer.name={published}")
    short = [override for override in SHORT if override != "tokenizer=bytes"]
    run = (*short, *typed, "trainer.max_steps=3", "eval_every=3", "save_every=3", f"hydra.run.dir={tmp_path / 'run'}")
    assert execute(*run) == 0
    folder = tmp_path / "adapter"
    export = ("mode=export", "mode.adapter=separate", f"resume={tmp_path / 'run'}", f"mode.path={folder}")
    assert execute(*export) == 0
    record, config = (json.loads((folder / name).read_text()) for name in ("export.json", "adapter_config.json"))
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    assert record["pad_token_id"] != END, "padding would hide the end of a text"
    base = AutoModelForSequenceClassification.from_pretrained(
        str(published), num_labels=1, pad_token_id=record["pad_token_id"]
    )
    theirs = PeftModel.from_pretrained(base, str(folder)).eval()
    rows = [torch.tensor([*range(97, 97 + length), END]) for length in (1, 7, 3)]
    last = torch.tensor([len(row) - 1 for row in rows])
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=record["pad_token_id"])
    with torch.no_grad():
        expected = compute_rewards(lr.load(tmp_path / "run"), padded, last)
        found = theirs(input_ids=padded, attention_mask=(torch.arange(8) <= last[:, None]).long()).logits[:, 0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert expected.std() > 1e-3, "rows differ"
    card = (folder / "README.md").read_text()
    assert f"num_labels=1, pad_token_id={record['pad_token_id']})" in card
    with pytest.raises(lr.InvalidConfigError, match="peft.PeftModel"):
        lr.load(folder)


@pytest.mark.parametrize("adapter", [(), LORA], ids=["all weights", "LoRA"])
def test_a_run_goes_on_to_the_same_bits(adapter: Sequence[str], tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl", num_rows=60)
    run = (*SHORT, *GPT2, *adapter, "model.tie_embeddings=false", f"data.path={pairs}", "save_every=3", "ema_decay=0.9")
    run += ("eval_every=1", "scheduler=constant")
    assert execute(*run, "trainer.max_steps=6", f"hydra.run.dir={tmp_path / 'whole'}") == 0
    assert execute(*run, "trainer.max_steps=3", f"hydra.run.dir={tmp_path / 'first'}") == 0
    assert execute(f"resume={tmp_path / 'first'}", "trainer.max_steps=6") == 0
    whole, resumed = weights_of(tmp_path / "whole"), weights_of(tmp_path / "first")
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
    start = make_reward_model(*GPT2, *adapter, "model.tie_embeddings=false").state_dict()
    assert not torch.equal(whole["score.weight"], start["score.weight"]), "it is trained, with an adapter, too"


def test_a_reward_model_starts_from_runs_with_and_without_a_score(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl", num_rows=40)
    rest = (*GPT2, f"data.path={pairs}", "trainer.max_steps=1", "eval_every=1")
    still = ("optimizer.lr=1e-30",)  # the first step leaves the weights
    tuned = tmp_path / "tuned"
    typed = ("recipe=sft", "data.fields={completion: chosen}", "tokenizer=bytes", "callbacks=[]", "warmup_steps=0")
    assert execute(*typed, *rest, f"hydra.run.dir={tuned}") == 0
    assert execute(*SHORT, *rest, *LORA, f"start_from={tuned}", f"hydra.run.dir={tmp_path / 'rewards'}") == 0
    trained = weights_of(tmp_path / "rewards")
    assert torch.equal(trained["embedding.weight"], weights_of(tuned)["embedding.weight"])
    for name, adapter in {"kept": LORA, "merged": ()}.items():
        run = (
            *SHORT,
            *rest,
            *still,
            *adapter,
            f"start_from={tmp_path / 'rewards'}",
            f"hydra.run.dir={tmp_path / name}",
        )
        assert execute(*run) == 0
        torch.testing.assert_close(weights_of(tmp_path / name)["score.weight"], trained["score.weight"])


# What cannot be.


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        (("data.kind=answers",), "pairs"),
        (("model=mixtral_nano",), "balance of experts"),
        (("context_parallel_size=2", "strategy=fsdp", "trainer.devices=2"), "on several ranks"),
        (("mode=sample", "resume=run"), "for language models only"),
        (("loss=dpo",), "it compares log-probabilities"),
        (("task=preference", "loss=bradley_terry"), "it compares scores"),
    ],
)
def test_what_a_reward_model_cannot_be_is_said_at_once(typed: tuple[str, ...], reason: str) -> None:
    _, mistakes = compose_and_check(("recipe=reward_model", f"data.path={__file__}", "tokenizer=bytes", *typed))
    assert any(reason in str(mistake) for mistake in mistakes), [str(mistake) for mistake in mistakes]


def test_a_model_whose_hidden_states_are_unknown_is_refused(tmp_path: Path) -> None:
    name = write_config(tmp_path, "granite", logits_scaling=2.0)
    with pytest.raises(Exception, match="a score is computed from hidden states"):
        make_reward_model("model=huggingface", f"model.name={name}", "model.pretrained=null", "model.max_seq_len=32")


def test_an_architecture_without_a_classifier_says_what_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs, name = write_pairs(tmp_path / "pairs.jsonl", num_rows=40), write_config(tmp_path / "config", "ernie4_5")
    typed = ("model=huggingface", f"model.name={name}", "model.pretrained=null", "model.max_seq_len=32")
    run = (*SHORT, *typed, f"data.path={pairs}", "trainer.max_steps=1", "eval_every=1", "save_every=1")
    assert execute(*run, f"hydra.run.dir={tmp_path / 'run'}") == 0
    assert execute("mode=export", f"resume={tmp_path / 'run'}") == 2
    shown = capsys.readouterr()
    assert "no AutoModelForSequenceClassification of the type ernie4_5" in shown.out + shown.err
    assert not (tmp_path / "run/export/config.json").exists()
