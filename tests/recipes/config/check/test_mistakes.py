"""Mistakes in a config, each with its exact message: what was set, why it cannot work, what to type."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, composed_config, resolved, run_train
from typed_remedies import find_refused

from recipes.config import compose_and_check
from recipes.errors import ConfigError, format_report


def list_options(group: str) -> str:
    return " ".join(sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml")))


MESSAGES = {
    "max_steps=10": "max_steps=10: there is no 'max_steps'; type trainer.max_steps=10",
    "lr=1e-3": "lr=1e-3: there is no 'lr'; type optimizer.lr=1e-3",
    "batch_size=32": "batch_size=32: there is no 'batch_size'; type global_batch_size=32",
    "trainer.gpus=1": "trainer.gpus=1: there is no 'trainer.gpus'; type trainer.devices=1",
    "model=gpt2,llama_nano": (
        "model=gpt2,llama_nano: a single run takes one option; type python train.py -m model=gpt2,llama_nano"
    ),
    "trainer.max_steps=ten": ("trainer.max_steps=ten: it takes a whole number; type trainer.max_steps=<whole number>"),
    "~callbacks.sampletext": (
        "~callbacks.sampletext: there is no 'callbacks.sampletext'; type '~callbacks.sample_text'"
    ),
    "+callbacks.mine=bar": ("callbacks.mine=bar: a callback is a section with a _target_; type +callbacks.mine=null"),
    "recipe=sft_demo callbacks=[progress]": (
        "callbacks.generation_eval=…: recipe=sft_demo changes settings of it, and callbacks= does not choose it;"
        " type callbacks=[progress,generation_eval], or callbacks.generation_eval=null"
    ),
    "tokenizer=none": ("tokenizer=none: text needs a tokenizer; type tokenizer=bpe or tokenizer=bytes"),
    "name=a/b": "name=a/b: it names a folder under logs/: letters, digits, . _ and -; type name=a_b",
    "modle=gpt2": "modle=gpt2: there is no 'modle'; type model=gpt2",
    "optimizer.model=gpt2": (
        "optimizer.model=gpt2: build.py provides it; type the same command without optimizer.model"
    ),
    "model.pretrained=gpt2": (
        "model.pretrained=gpt2 tokenizer=bpe: published weights need the token ids of their own tokenizer;"
        " type tokenizer=huggingface tokenizer.name=gpt2"
    ),
    "mode=plan mode.prompt=hi": (
        "mode.prompt=hi: there is no 'mode.prompt';"
        " type one of mode.path= mode.advise= mode.max_ranks= mode.find_peak= mode.write_page="
    ),
    "evaluator=lm_eval": "no evaluator.tasks: it has no default; type evaluator.tasks=<list of texts>",
    "trainer.accelerator=tpu": (
        "trainer.accelerator=tpu: the options are auto cpu gpu cuda; type trainer.accelerator=auto"
    ),
    "trainer.overfit_batches=3": (
        "trainer.overfit_batches=3: another setting controls it; type debug=overfit, or loader.overfit_batches=<global batches>"
    ),
    "model.num_layers=0": ("model.num_layers=0: it must be from 1 to 1024; type model.num_layers=<from 1 to 1024>"),
    "loader=3": "loader=3: it is a section of settings; type loader.<setting>=<value>",
    "optimizer.betas=[0.9]": (
        "optimizer.betas=[0.9]: it takes a list of 2 numbers; type optimizer.betas=<list of 2 numbers>"
    ),
    "callbacks=[grad_norm] callbacks.sample_text.num_tokens=8": (
        "callbacks.sample_text.num_tokens=8: there is no 'callbacks.sample_text.num_tokens';"
        " type callbacks=[grad_norm,sample_text] callbacks.sample_text.num_tokens=8"
    ),
    "optimizer.lr.warm=3": (
        "optimizer.lr.warm=3: there is no 'optimizer.lr.warm'; type one of optimizer.layer_decay= optimizer.groups= optimizer.lr="
        " optimizer.betas= optimizer.eps= optimizer.weight_decay="
    ),
    "recipe=fsdp_bf61": (f"recipe=fsdp_bf61: the options are {list_options('recipe')}; type recipe=fsdp_bf16"),
    "model=gtp2": (f"model=gtp2: the options are {list_options('model')}; type model=gpt2"),
    "presicion=bf16-mixed": ("presicion=bf16-mixed: there is no 'presicion'; type precision=bf16-mixed"),
    "precision=bf16": (
        "precision=bf16: the options are 16-mixed 32-true bf16-mixed bf16-true fp8-mixed tf32; type precision=bf16-mixed"
    ),
    "trainer.max_stepz=9": ("trainer.max_stepz=9: there is no 'trainer.max_stepz'; type trainer.max_steps=9"),
    "trainer.strategy=ddp": ("trainer.strategy=ddp: another setting controls it; type strategy=ddp"),
    "trainer.max_epochs=-1": (
        "trainer.max_epochs=-1: another setting controls it; type trainer.max_steps=3epochs,"
        " or trainer.max_steps=<optimizer steps>"
    ),
    "trainer.limit_val_batches=3": (
        "trainer.limit_val_batches=3: another setting controls it; type eval_samples=<samples>"
    ),
    "optimizer.lr=fast": ("optimizer.lr=fast: it takes a number; type optimizer.lr=<number>"),
    "optimizer.lr=-1": ("optimizer.lr=-1: it must be above 0; type optimizer.lr=<above 0>"),
    "'optimizer.betas=[0.9,1.5]'": (
        "optimizer.betas[1]=1.5: it must be at least 0 and below 1;"
        " type 'optimizer.betas=[…]', each at least 0 and below 1"
    ),
    "optimizer.betas=0.9": (
        "optimizer.betas=0.9: it takes a list of 2 numbers; type optimizer.betas=<list of 2 numbers>"
    ),
    "model.hidden_size=100 model.num_heads=3": (
        "model.num_heads=3: model.hidden_size=100 is not divisible by 3 heads; type model.num_heads=2"
    ),
    "model=llama_nano model.num_kv_heads=4": (
        "model.num_kv_heads=4: model.num_heads=6 is not divisible by 4 groups; type model.num_kv_heads=3"
    ),
    "model=llama_nano model.hidden_size=36 model.num_heads=4": (
        "model.num_heads=4: rotary embeddings rotate pairs, and model.hidden_size=36 makes heads of 9; type model.hidden_size=32"
    ),
    "global_batch_size=10 micro_batch_size=4": (
        "global_batch_size=10: 10 samples do not divide evenly into micro-batches of 4 on 1 device; type global_batch_size=12 (or 8), or micro_batch_size=2"
    ),
    "global_batch_size=16 trainer.accumulate_grad_batches=3": (
        "global_batch_size=16: 16 samples do not divide evenly into 3 micro-batches on 1 device; type global_batch_size=18 (or 15)"
    ),
    "global_batch_size=16 micro_batch_size=4 trainer.accumulate_grad_batches=2": (
        "trainer.accumulate_grad_batches=2: global_batch_size=16 in micro-batches of 4 on 1 device needs 4 accumulation steps; type trainer.accumulate_grad_batches=4"
    ),
    "trainer.devices=2": (
        "trainer.devices=2 trainer.num_nodes=1: strategy=single trains on one device; type strategy=ddp, or trainer.devices=1 trainer.num_nodes=1"
    ),
    "seq_len=4096": ("seq_len=4096: the model accepts at most model.max_seq_len=128 tokens; type seq_len=128"),
    "tokenizer=bytes model.vocab_size=100": (
        "model.vocab_size=100: the tokenizer has 257 tokens; type model.vocab_size=257"
    ),
    "tokenizer.vocab_size=5000": (
        "tokenizer.vocab_size=5000: the model has model.vocab_size=2048 tokens; type model.vocab_size=5000"
    ),
    "data=digits": ("model=gpt2_nano data=digits: the model takes tokens, the data gives images; type model=resnet18"),
    "data=random_images": (
        "model=gpt2_nano data=random_images: the model takes tokens, the data gives images; type model=resnet50"
    ),
    "model=gpt2_nano data=digits": (
        "model=gpt2_nano data=digits: the model takes tokens, the data gives images;"
        " type model=resnet18, or data=stdlib_text"
    ),
    "model=resnet50 data=stdlib_text": (
        "model=resnet50 data=stdlib_text: the model takes images, the data gives tokens;"
        " type model=gpt2_nano, or data=random_images"
    ),
    "model=resnet50 data=digits": (
        "model.in_channels=3: the number of channels of the images of data= is 1;"
        " type model.in_channels=1, or another data="
    ),
    "model=resnet50 data.num_classes=2000": (
        "data.num_classes=2000: the model has model.num_classes=1000; type model.num_classes=2000"
    ),
    "model=resnet18 data=stdlib_text": (
        "model=resnet18 data=stdlib_text: the model takes images, the data gives tokens;"
        " type model=gpt2_nano, or data=digits"
    ),
    "task=classification": (
        "model=gpt2_nano task=classification: the model takes tokens, the task images or tensors; type task=language_modeling"
    ),
    "scheduler=wsd trainer.max_steps=100": (
        "warmup_steps=70 scheduler.decay_steps=200: together they are longer than trainer.max_steps=100; type warmup_steps=10 scheduler.decay_steps=20"
    ),
    "scheduler=constant_cooldown scheduler.cooldown_steps=800": (
        "scheduler.warmup_steps=0 scheduler.cooldown_steps=800: together they are longer than trainer.max_steps=700; type scheduler.warmup_steps=70 scheduler.cooldown_steps=140"
    ),
    "data=text_files": ("no data.path: it has no default; type data.path=<file, folder or glob>"),
    "data=text_files data.path=no/such/folder": (
        "data.path=no/such/folder: there is no such file or folder; type data.path=<a path that exists>"
    ),
    "resume=no/such/run": ("resume=no/such/run: there is no such folder; type resume=<a run folder or a checkpoint>"),
    "resume=auto": (
        "resume=auto: each start of this command creates a new run folder, so there is nothing to resume; type resume=auto hydra.run.dir=<folder>"
    ),
    "mode=sample": ("mode=sample: it needs a checkpoint; type mode=sample resume=<run folder>"),
    "mode=sample model=resnet18 resume=auto hydra.run.dir=x": (
        "mode=sample: it is for language models only; type mode=evaluate resume=<run folder>"
    ),
    "mode=sample mode.temperature=-1 resume=auto hydra.run.dir=x": (
        "mode.temperature=-1: it must be from 0 to 1000; type mode.temperature=<from 0 to 1000>"
    ),
    "mode=sample mode.top_p=1.5 resume=auto hydra.run.dir=x": (
        "mode.top_p=1.5: it must be from 0.001 to 1; type mode.top_p=<from 0.001 to 1>"
    ),
    "trainer.max_steps=0": ("trainer.max_steps=0: it must be at least 1; type trainer.max_steps=<at least 1>"),
    "log_every=0": ("log_every=0: it must be at least 1; type log_every=<at least 1>"),
    "seed=-1": ("seed=-1: it must be from 0 to 4294967295; type seed=<from 0 to 4294967295>"),
    "compile=yes_please": (
        "compile=yes_please: it takes true or false or auto or default or max-autotune-no-cudagraphs or reduce-overhead;"
        " type compile=<true or false or auto or default or max-autotune-no-cudagraphs or reduce-overhead>"
    ),
    "foo": ("foo: it is not of the form key=value; type key=value, or the same command without it"),
    "scheduler.warmup=3": ("scheduler.warmup=3: there is no 'scheduler.warmup'; type scheduler.warmup_steps=3"),
    "model.dropout=1.0": ("model.dropout=1.0: it must be from 0 to 0.999; type model.dropout=<from 0 to 0.999>"),
    "eval_samples=0": ("eval_samples=0: it must be at least 1; type eval_samples=<at least 1>"),
    "data.val_fraction=0.95": (
        "data.val_fraction=0.95: it must be above 0 and below 0.9; type data.val_fraction=<above 0 and below 0.9>"
    ),
    "+model.nonsense=3": ("model.nonsense=3: GPT2 has no argument 'nonsense'; type the same command without it"),
    "~optimizer.lr": ("no optimizer.lr: adamw needs it; type optimizer.lr=<value>"),
    "checkpoint.keep_last=0": ("checkpoint.keep_last=0: it must be at least 1; type checkpoint.keep_last=<at least 1>"),
    "name=[a]": ("name=[a]: it names a folder under logs/: letters, digits, . _ and -; type name=a"),
    "resume=3": ("resume=3: there is no such folder; type resume=<a run folder or a checkpoint>"),
    "trainer.devices=0": (
        "trainer.devices=0: it takes a positive number, a list of GPUs, or auto; type trainer.devices=auto"
    ),
    "trainer.devices=all strategy=ddp global_batch_size=7 micro_batch_size=2": (
        "trainer.devices=all: it takes a positive number, a list of GPUs, or auto; type trainer.devices=auto"
    ),
    "strategy=ddp trainer.accelerator=cpu trainer.devices=3 micro_batch_size=4": (
        "global_batch_size=16: 16 samples do not divide evenly into micro-batches of 4 on 3 devices; type global_batch_size=24 (or 12)"
    ),
    "strategy=ddp trainer.accelerator=cpu trainer.num_nodes=2": (
        "trainer.num_nodes=2: a run on several machines must be started on each of them; type torchrun --nnodes 2 --nproc-per-node 1 train.py …"
    ),
    "strategy=zero2": (
        "strategy=zero2: the options are ddp deepspeed_stage_1 deepspeed_stage_2 deepspeed_stage_2_offload deepspeed_stage_3 deepspeed_stage_3_nvme deepspeed_stage_3_offload fsdp hsdp single; type strategy=deepspeed_stage_2"
    ),
    "strategy=ddp strategy.buckets=3": (
        "strategy.buckets=3: there is no 'strategy.buckets'; type the same command without strategy.buckets"
    ),
    "strategy=ddp strategy.precision=bf16": (
        "strategy.precision=bf16: build.py provides it; type the same command without strategy.precision"
    ),
    "strategy=hsdp data_parallel_shard=3 trainer.accelerator=cpu trainer.devices=4": (
        "data_parallel_shard=3: 4 ranks are not divisible by 3; type data_parallel_shard=2 data_parallel_replicate=null"
    ),
    "strategy=hsdp data_parallel_shard=0": (
        "data_parallel_shard=0: it must be at least 1; type data_parallel_shard=<at least 1>"
    ),
    "strategy=fsdp strategy.gradient_sync=step": (
        "strategy.gradient_sync=step: it takes per_micro_batch or per_step; type strategy.gradient_sync=per_step"
    ),
    "model=resnet18 strategy=fsdp trainer.sync_batchnorm=true": (
        "trainer.sync_batchnorm=true: it is for GPUs under strategy=ddp, and this model has a norm for every strategy"
        " and device; type model.norm=sync trainer.sync_batchnorm=false"
    ),
    "strategy=fsdp trainer.sync_batchnorm=true": (
        "trainer.sync_batchnorm=true strategy=fsdp: batch norm statistics are synchronized under strategy=ddp only; type strategy=ddp"
    ),
    "strategy=deepspeed_stage_3 trainer.gradient_clip_algorithm=value": (
        "trainer.gradient_clip_algorithm=value strategy=deepspeed_stage_3: DeepSpeed clips by the global norm only; type trainer.gradient_clip_algorithm=norm"
    ),
}


@pytest.mark.parametrize("typed", MESSAGES)
def test_a_mistake_is_one_sentence_that_says_what_to_type(typed: str) -> None:
    command = shlex.split(typed)
    _, mistakes = compose_and_check(command)
    assert [str(mistake) for mistake in mistakes] == [MESSAGES[typed]]
    assert find_refused(command, mistakes) == []


def test_there_are_more_than_thirty_kinds_of_mistakes() -> None:
    assert len(MESSAGES) > 30


def test_five_mistakes_are_reported_together_in_three_lines_each() -> None:
    _, mistakes = compose_and_check(["modle=gpt2", "optimizer.lrr=1", "trainer.max_stepz=3", "recipe=quick", "seed=-1"])
    text = format_report(mistakes)
    assert text.splitlines()[0] == "The config has 5 mistakes; nothing was built."
    assert text.count("\n   type: ") == 5


def test_a_typo_inside_a_yaml_file_is_found_although_hydra_takes_it(tmp_path: Path) -> None:
    config = composed_config()
    config["model"]["num_layer"] = 4
    config["callbacks"]["progress"]["colour"] = "red"
    config["strtegy"] = {}
    from recipes.config.check import check_config

    assert [str(mistake) for mistake in check_config(resolved(config, tmp_path), [])] == [
        "strtegy=…: there is no such setting or section; type strategy=…",
        "callbacks.progress.colour=red: ProgressLine has no argument 'colour';"
        " type '~callbacks.progress.colour' to remove it",
        "model.num_layer=4: GPT2 has no argument 'num_layer'; type model.num_layers=4",
    ]


def test_several_ranks_of_torchrun_cannot_each_train_on_one_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    [left_over] = compose_and_check([])[1]
    assert str(left_over).startswith("WORLD_SIZE=2 without RANK, LOCAL_RANK,"), left_over
    assert left_over.fix.startswith("unset WORLD_SIZE, or torchrun")
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    _, mistakes = compose_and_check([])
    assert [str(mistake) for mistake in mistakes] == [
        "strategy=single with WORLD_SIZE=2: each of these ranks would train the same run in the same folder;"
        " type strategy=ddp, or python train.py … without torchrun"
    ]
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert compose_and_check([])[1] == []


def test_null_switches_a_callback_off() -> None:
    assert composed_config("callbacks.sample_text=null")["callbacks"]["sample_text"] is None


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("trainer:\n  max_step: 9\n", "trainer.max_steps=9 (in conf/recipe/mine.yaml, line 3)"),
        ("defaults:\n  - overide /optimizer: sgd\n", "- override /optimizer: sgd in that file"),
        ("defaults:\n  - override /optimizer: sdg\n", "- override /optimizer: sgd in {file}, line 3"),
        ("defaults:\n  - optimizer: sgd\n", "- override /optimizer: sgd in {file}, line 3"),
        ("trainer: [", "a corrected {file}, line 2"),
        ("trainer:\n\tmax_steps: 9\n", "spaces instead of the tab in {file}, line 3"),
    ],
)
def test_a_mistake_in_a_recipe_of_ones_own_names_its_file(
    text: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import recipes.config.check as origin
    from recipes.config import search_path
    from recipes.config.check import command_line, sections

    conf = tmp_path / "conf"
    shutil.copytree(ROOT / "conf", conf)
    (conf / "recipe" / "mine.yaml").write_text(f"# @package _global_\n{text}")
    for module in (command_line, origin, search_path, sections):
        monkeypatch.setattr(module, "CONF", conf)
    _, mistakes = compose_and_check(["recipe=mine"], config_folder=conf)
    file = conf / "recipe" / "mine.yaml"
    assert [mistake.fix for mistake in mistakes] == [fix.format(file=file)]


def test_an_argument_of_the_trainer_that_no_yaml_lists_may_be_typed() -> None:
    assert composed_config("trainer.benchmark=true")["trainer"]["benchmark"] is True


@pytest.mark.parametrize("name", ["def main(", "it's {here}", 'say "hi", twice', "a: [1, 2", "x = 1"])
def test_text_that_is_no_hydra_value_may_be_typed_as_it_is(name: str) -> None:
    composed, _ = compose_and_check([f"name={name}"])
    assert composed is not None
    assert composed.config["name"] == name


def test_a_mistake_ends_with_exit_code_2_and_leaves_no_folder(tmp_path: Path) -> None:
    done = run_train(["model=gpt3"], folder=tmp_path)
    assert done.returncode == 2
    assert "type: model=gpt2" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "typed",
    [
        "optimizer.lr=fast",
        "trainer.max_stepz=3",
        "data=digits",
        "strategy.cpu_offload=true",
        "trainer.gradient_clip_algorithm=value strategy=deepspeed_stage_3 trainer.accelerator=cpu",
    ],
)
def test_a_mistake_is_found_without_importing_torch_or_lightning(typed: str) -> None:
    program = (
        "import sys; from recipes.config import compose_and_check;"
        f"_, mistakes = compose_and_check({typed.split()!r}); assert mistakes;"
        "assert not {'torch', 'lightning', 'numpy', 'transformers', 'deepspeed'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_a_mistake_is_an_error_with_three_clauses() -> None:
    mistake = ConfigError("seed=-1", "a seed is at least 0", "seed=0")
    assert isinstance(mistake, ValueError)
    assert str(mistake) == "seed=-1: a seed is at least 0; type seed=0"
