"""Obvious command lines either work or are answered with one that does; none is blamed on a file nobody has touched."""

import shlex
from pathlib import Path

import pytest
from typed_remedies import find_refused

from recipes.config import compose_and_check
from recipes.config.check.command_line import compose_typed
from recipes.config.check.suggestions import list_options
from recipes.config.compose import CONF
from recipes.errors import ConfigError
from recipes.sweep.command_line import SweepCommand, _answer_plugin, check_command

SAMPLE = "mode=sample resume=auto hydra.run.dir=x"
# command line -> dotted key, and the value that it must have
WORKS = {
    "optimizer.betas=[0,0.95]": ("optimizer.betas", [0, 0.95]),
    "launcher=slurm 'launcher.directives={account: mine}'": ("launcher.directives", {"account": "mine"}),
    "launcher=slurm launcher.directives.account=mine": ("launcher.directives", {"account": "mine"}),
    f"{SAMPLE} mode.prompt='Once upon a time, there was'": ("mode.prompt", "Once upon a time, there was"),
    f"{SAMPLE} mode.prompt='cd \\${{HOME}}, then ls'": ("mode.prompt", "cd ${HOME}, then ls"),
    f"{SAMPLE} mode.prompt='[é, \"b\", c]'": ("mode.prompt", '[é, "b", c]'),  # text, of which no part is quoted
    f"{SAMPLE} mode.prompt=1984": ("mode.prompt", "1984"),
    f"{SAMPLE} mode.prompt='{{a: b}}'": ("mode.prompt", "{a: b}"),
    "data=text_files data.path=x,y.txt": ("data.path", "x,y.txt"),
    'data=text_files "data.path=it\'s.txt"': ("data.path", "it's.txt"),
    "name=2024": ("name", "2024"),
    "optimizer={lr:1}": ("optimizer.lr", 1),
    "callbacks=[]": ("callbacks", {}),
    "tags=[é,~/x,'a b']": ("tags", ["é", "~/x", "a b"]),
    "\"tags=['l, m', é]\"": ("tags", ["l, m", "é"]),
    "'tags=${oc.create:[a,b]}'": ("tags", ["a", "b"]),
    "~callbacks.progress callbacks.progress=null": ("seed", 1234),
    "debug=[nan,fast_dev_run]": ("trainer.max_steps", 1),
}
# reported together, in any order
TOGETHER = {
    "data.path=nope,y.txt": "data.path=nope,y.txt: there is no 'data.path'; type data=documents data.path=nope,y.txt,"
    " or data=text_files data.path=nope,y.txt",
    "name=nope,y": "name=nope,y: a single run takes one value; type \"name='nope,y'\" for one text,"
    " or python train.py -m name=nope,y",
    "optimizer.lr=0,001": "optimizer.lr=0,001: a comma separates the values of a sweep; type optimizer.lr=0.001",
    "lr=0,001": "lr=0,001: there is no 'lr'; type optimizer.lr=0.001",
    "tags=a,b": "tags=a,b: it takes a list; type 'tags=[a,b]'",
    "optimizer.betas=0.9,0.95": "optimizer.betas=0.9,0.95: it takes a list; type 'optimizer.betas=[0.9,0.95]'",
    "logger.wandb.project=x": (
        "logger.wandb.project=x: there is no 'logger.wandb.project'; type logger=wandb logger.wandb.project=x"
    ),
    "hydra.rundir=x": "hydra.rundir=x: there is no 'hydra.rundir'; type hydra.run.dir=x",
    "hydra.run=x": "hydra.run=x: it is a section of settings; type hydra.run.dir=x",
    "dry_run=true": (
        "dry_run=true: there is no 'dry_run'; type debug=fast_dev_run, or --cfg job, which prints the config"
    ),
    "recipe=none": f"recipe=none: the options are {' '.join(list_options('recipe'))}; type '~recipe'",
    "experiment=single_fp32": "experiment=single_fp32: there is no 'experiment'; type recipe=single_fp32",
    "trainer=gpu": "trainer=gpu: the options are default; type recipe=single_bf16",
    "optim\u200bizer.lr=1e-3": (
        "optim\u200bizer.lr=1e-3: a name in a setting has the letters a to z, digits, _ and -; type optimizer.lr=1e-3"
    ),
    "model..num_layers=1": (
        "model..num_layers=1: the parts of a key are joined by one point each; type model.num_layers=1"
    ),
    "model＝llama_nano": (  # noqa: RUF001
        "model＝llama_nano: it has full-width characters, such as ＝ for =; type model=llama_nano"  # noqa: RUF001
    ),
    "~optimizer.eps=1e-8": "no optimizer.eps: adamw needs it; type the same command without ~optimizer.eps=1e-8",
    "trainer.gradient_clip_val=0": (
        "trainer.gradient_clip_val=0: it must be above 0;"
        " type trainer.gradient_clip_val=<above 0>, or trainer.gradient_clip_val=null for no clipping"
    ),
    "seed=${mul:2}": (
        "seed=${mul:2}: `${` begins a reference to another setting: there is no function 'mul' to compute one;"
        " type seed=<value>, or \\${ instead of ${ where it is text"
    ),
    "+logger=wandb": (
        "+logger=wandb: logger=csv is already chosen, and + adds a setting, not an option; type logger=wandb"
    ),
    "+callbacks=stop_at_nan": "+callbacks=stop_at_nan: callbacks=default is already chosen,"
    " and + adds a setting, not an option; type callbacks=[default,stop_at_nan]",
    "+callbacks=memory": "+callbacks=memory: callbacks=default is already chosen, and + adds a setting, not an option;"
    " type the same command without it: callbacks=default includes it",
    "data.path=t.txt": "data.path=t.txt: there is no 'data.path';"
    " type data=documents data.path=t.txt, or data=text_files data.path=t.txt",
    "optimizer.momentum=0.9": (
        "optimizer.momentum=0.9: there is no 'optimizer.momentum'; type optimizer=sgd optimizer.momentum=0.9,"
        " or optimizer=muon optimizer.momentum=0.9"
    ),
    "mode.prompt=a b": "mode.prompt=a b: there is no 'mode.prompt'; type mode=sample 'mode.prompt=a b'",
    "optimizer=AdamW": (
        "optimizer=AdamW: the options are adafactor adam adamw adamw_8bit lion muon schedule_free sgd;"
        " type optimizer=adamw"
    ),
    "+optimizer.lr=1": "+optimizer.lr=1: it already exists; type optimizer.lr=1",
    "~resume": "~resume: this setting is required; type resume=null",
    "~trainer": "~trainer: this setting is required; type trainer=default",
    "~name": "~name: this setting is required; type name=<text>",
    "~loader": "~loader: this setting is required; type the same command without loader",
    "epochs=3": "epochs=3: there is no 'epochs'; type trainer.max_steps=3epochs",
    "wd=0.2": "wd=0.2: there is no 'wd'; type optimizer.weight_decay=0.2",
    "precision=float32": (
        "precision=float32: the options are 16-mixed 32-true bf16-mixed bf16-true fp8-mixed tf32;"
        " type precision=32-true"
    ),
    "callbacks/hang=hang": "callbacks/hang=hang: there is no 'callbacks/hang'; type callbacks=[default,hang]",
    "+callbacks/hang@callbacks=hang": (
        "+callbacks/hang@callbacks=hang: the place of a group in the config is fixed; type callbacks=[default,hang]"
    ),
    "hydra/launcher=joblib": (
        "hydra/launcher=joblib: there is no 'hydra/launcher'; type launcher.max_jobs=<jobs at a time>"
    ),
    "optimizer[eps]=1e-3": "optimizer[eps]=1e-3: the parts of a key are joined by points; type optimizer.eps=1e-3",
    "fp16=true": "fp16=true: there is no 'fp16'; type precision=16-mixed",
    "gradient_checkpointing=false": (
        "gradient_checkpointing=false: there is no 'gradient_checkpointing'; type the same command without it"
    ),
    "output_dir=x": "output_dir=x: there is no 'output_dir'; type hydra.run.dir=x",
    "max_length=16": "max_length=16: there is no 'max_length'; type seq_len=16",
    "optimizer.eps = 1e-3": "optimizer.eps = 1e-3: there is a space beside the =; type optimizer.eps=1e-3",
    "optimizer.eps:1e-3": "optimizer.eps:1e-3: a setting is typed with =, not with a colon; type optimizer.eps=1e-3",
    "model/gpt2_nano": "model/gpt2_nano: an option of a group is typed with =; type model=gpt2_nano",
    "": "'': an empty word: a variable of the shell that is not set, or a space after a backslash;"
    " type the same command without it",
    "optimizer.lr=interval(1e-4,1e-2)": "optimizer.lr=interval(1e-4,1e-2): a single run takes one value;"
    " type python train.py -m hydra/sweeper=optuna 'optimizer.lr=interval(1e-4,1e-2)'",
    "=3": "=3: it is not of the form key=value; type key=value, or the same command without it",
    "~key": "~key: there is no 'key'; type the same command without it",
    "~callbacks.nope": "~callbacks.nope: there is no 'callbacks.nope'; type the same command without it",
    "~optimizer.lr=1e-3": (
        "~optimizer.lr=1e-3: ~ removes a setting, and this one has another value; type optimizer.lr=1e-3"
    ),
    "mode=train": (
        "mode=train: the options are batch_find chat convert_gguf dashboard diagnose evaluate export fit lr_find"
        " noise_scale plan predict preflight prepare replay report sample test wandb_sweep; type mode=fit"
    ),
    "optimizer.block_size=0": (
        "optimizer.block_size=0: there is no 'optimizer.block_size'; type one of"
        " optimizer.layer_decay= optimizer.groups= optimizer.lr= optimizer.betas="
        " optimizer.eps= optimizer.weight_decay="
    ),
    # the nearest name, warmup_steps, takes no text
    "warmup_stepss=abc": (
        "warmup_stepss=abc: there is no 'warmup_stepss'; type python train.py --help for the list of settings"
    ),
    "micro_batch_size=0": "micro_batch_size=0: it must be at least 1; type micro_batch_size=<at least 1>",
    "optimizer.lr=inf": "optimizer.lr=inf: it must be finite and above 0; type optimizer.lr=<finite and above 0>",
    "scheduler._target_=x": "scheduler._target_=x: 'x' is not the dotted path of a class or function;"
    " type scheduler=<an option of conf/scheduler/>",
}
ALONE = {
    "data=text_files data.path=. data.cache_dir=": "data.cache_dir=: it is empty; type data.cache_dir=<folder>",
    "resume=last": "resume=last: there is no such folder; type resume=auto hydra.run.dir=<the folder of the run>",
    "hydra/job_logging=default": (
        "hydra/job_logging=default: train.log in the run folder holds all lines; type the same command without it"
    ),
    "launcher=local,slurm": "launcher=local,slurm: a command takes one option; type launcher=<local | slurm>",
    "trainer.devices='\"1\"'": (
        "trainer.devices='1': it takes a positive number, a list of GPUs, or auto, and in quotes it is text;"
        " type trainer.devices=1"
    ),
    "launcher=slurm launcher.time=1 launcher.signal_seconds=120": (
        "launcher.time=1 launcher.signal_seconds=120: the limit is 60 seconds: the job would be signalled and requeued"
        " at once, again and again; type launcher.signal_seconds=6, or launcher.time=12"
    ),
    "launcher=slurm launcher.time=0:01:00 launcher.signal_seconds=120": (
        "launcher.time=0:01:00 launcher.signal_seconds=120: the limit is 60 seconds: the job would be signalled and"
        " requeued at once, again and again; type launcher.signal_seconds=6, or launcher.time=12"
    ),
    "launcher=slurm strategy=ddp trainer.devices=2 'launcher.directives={ntasks: 4, gpus: 2}'": (
        "launcher.directives={ntasks: 4}: trainer.num_nodes=1 with 2 ranks a node makes it 2; type"
        " trainer.num_nodes=<whole number> trainer.devices=<whole number> without ntasks among the directives"
    ),
    "callbacks=default,hang": (
        "callbacks=default,hang: several options of a group are a list; type 'callbacks=[default,hang]',"
        " or python train.py -m callbacks=default,hang to compare them"
    ),
    "'+metrics.a/b={_target_: recipes.metrics.Perplexity}'": (
        "+metrics.a/b={_target_: recipes.metrics.Perplexity}: a name in a setting has the letters a to z, digits, _"
        " and -; type '+metrics.a_b={_target_: recipes.metrics.Perplexity}'"
    ),
    "+model.num_layer=null": (
        "model.num_layer=null: GPT2 has no argument 'num_layer'; type the same command without it"
    ),
    "trainer.profiler=nope": (
        "trainer.profiler=nope: the options are simple advanced pytorch xla; type trainer.profiler=null"
    ),
    "callbacks.sample_text.temperature=1e300": (
        "callbacks.sample_text.temperature=1e300: it must be from 0 to 1000;"
        " type callbacks.sample_text.temperature=<from 0 to 1000>"
    ),
    "~trainer.devices": "no trainer.devices: this setting is required; type trainer.devices=<value>",
    "~model.vocab_size": "no model.vocab_size: GPT2 needs it; type model.vocab_size=<value>",
    "tags={a:1}": "tags={a:1}: it takes a list of texts; type tags=<list of texts>",
    "hydra.run.dir=null": (
        "hydra.run.dir=null: field 'hydra.run.dir' is not Optional; type hydra.run.dir=<another value>"
    ),
    "hydra.run.dir='${nope}'": (
        "hydra.run.dir=${nope}: `${` begins a reference to another setting: there is no setting 'nope';"
        " type hydra.run.dir=<value>, or \\${ instead of ${ where it is text"
    ),
    "mode._target_=null": (
        "mode._target_=null: it names the class or function to call;"
        " type mode=<batch_find | chat | convert_gguf | dashboard | diagnose | evaluate | export | fit | lr_find |"
        " noise_scale | plan | predict | preflight | prepare | replay | report | sample | test | wandb_sweep>"
    ),
    "logger.csv=null": "logger.csv=null: every run writes metrics.csv; type logger=none to write only metrics.csv",
    "data=text_files data.path='~nouser/x'": (
        "data.path=~nouser/x: there is no such file or folder; type data.path=<a path that exists>"
    ),
    "model.hidden_size=1048575 model.num_heads=4": (
        "model.num_heads=4: model.hidden_size=1048575 is not divisible by 4 heads; type model.num_heads=3"
    ),
    "callbacks.early_stop.patience=3 callbacks.early_stop.monitor=val_loss": (
        "callbacks.early_stop.monitor=val_loss: validation computes val/loss val/perplexity val/token_accuracy;"
        " type callbacks.early_stop.monitor=val/loss, or +metrics.…"
    ),
    "launcher=slurm launcher.time=abc": (
        "launcher.time=abc: sbatch does not accept it as a time limit; type launcher.time=240 in minutes,"
        " or launcher.time=1-12:00:00 in days, hours, minutes and seconds"
    ),
    "launcher=slurm launcher.signal_seconds=0": (
        "launcher.signal_seconds=0: it must be at least 1; type launcher.signal_seconds=<at least 1>"
    ),
    "data=text_files data.path=. bogus=1": (
        "bogus=1: there is no 'bogus'; type python train.py --help for the list of settings"
    ),
    "mode=preflight mode.steps=3": (
        "mode.steps=3: there is no 'mode.steps'; type one of mode.overfit_steps= mode.path= mode.write_page="
    ),
    "+data@eval_data.a=text_files +data@eval_data.a=text_files": (
        "+data@eval_data.a=text_files: data@eval_data.a appears more than once in the final defaults list;"
        " type the same command without it"
    ),
    "data@eval_data.x=text_files": (
        "data@eval_data.x=text_files: Could not override 'data@eval_data.x'; type +data@eval_data.x=text_files"
    ),
    "scheduler={_target_:recipes.scheduler.linear,milestones:[1]}": (
        "scheduler.milestones=…: linear has no argument 'milestones'; type the same command without milestones in"
        " scheduler"
    ),
    "clipping=null": "clipping='null': the options are none quantile zclip; type clipping=none",
    "plan=nope": "plan=nope: the options are default; type plan=default",
    "measure_peak=True": "measure_peak=True: there is no 'measure_peak'; type callbacks.throughput.measure_peak=True",
    "trainer.max_time=abc": (
        "trainer.max_time=abc: its format is days:hours:minutes:seconds;"
        " type trainer.max_time=00:08:00:00, which is 8 hours"
    ),
    "optimizer=sgd optimizer.momentum=0": (
        "optimizer.momentum=0 optimizer.nesterov=true: Nesterov's method looks ahead along the momentum, and there is"
        " none; type optimizer.nesterov=false, or optimizer.momentum=0.9"
    ),
    "callbacks.loss_spike=null callbacks.loss_spike.max_skips=2": (
        "callbacks.loss_spike.max_skips=2: callbacks.loss_spike=null removes what it is a setting of;"
        " type the same command without callbacks.loss_spike=null"
    ),
    "callbacks=none": (
        "callbacks=none: the options are bottleneck class_report classes classification completions conversations"
        " default early_stop generation_eval grad_norm hang image_text loss_scale loss_spike memory optimizer_state"
        " policy preferences progress report retrieval_report sample_text step_profiler stop_at_nan throughput"
        " zero_shot; type callbacks=[]"
    ),
    "'model=glob(gpt2*)'": (
        "model=glob(gpt2*): a single run takes one option; type python train.py -m 'model=glob(gpt2*)'"
    ),
    "tags=mine": "tags=mine: it takes a list of texts; type tags=[mine]",
    "trainer.max_steps=1e3": "trainer.max_steps=1e3: it takes a whole number; type trainer.max_steps=1000",
    "seed=0x10": "seed=0x10: it takes a whole number; type seed=16",
    "optimizer.lr=1e\u22123": "optimizer.lr=1e\u22123: it takes a number; type optimizer.lr=0.001",
    "'seed=${oc.env:NOT_SET_HERE}'": (
        "seed=${oc.env:NOT_SET_HERE}: the environment variable NOT_SET_HERE is not set; type NOT_SET_HERE=<value>"
        " before the command, and 'seed=${oc.decode:${oc.env:NOT_SET_HERE}}', as a variable is text"
    ),
    "'seed=${oc.env:SEED_OF_A_TEST}'": (
        "seed=${oc.env:SEED_OF_A_TEST}: it takes a whole number, and a variable is text;"
        " type 'seed=${oc.decode:${oc.env:SEED_OF_A_TEST}}'"
    ),
    "++foo=1": "++foo=1: there is no such setting or section; type the same command without foo",
    "model.vocab_size=200 tokenizer=bytes": (
        "model.vocab_size=200: the tokenizer has 257 tokens; type model.vocab_size=257"
    ),
    "+model.num_kv_heads=2": (
        "model.num_kv_heads=2: GPT2 has no argument 'num_kv_heads'; type model=llama_1b model.num_kv_heads=2,"
        " or model=llama_8b model.num_kv_heads=2"
    ),
    "optimizer._target_=torch.optim.AdamW": (
        "optimizer._target_=torch.optim.AdamW: a run calls it with the model, and AdamW takes no 'model';"
        " type optimizer=<an option of conf/optimizer/>, or a function of yours that takes 'model', as theirs do"
    ),
    "+logger.x._target_=lightning.pytorch.loggers.CSVLogger": (
        "no logger.x.save_dir: CSVLogger needs it; type +logger.x.save_dir=<value>"
    ),
    "+logger.x._target_=lightning.pytorch.loggers.CSVLogger +logger.x.save_dir=x +logger.x._partial_=true": (
        "logger.x._partial_=true: it is built at once: nobody calls it again; type +logger.x._partial_=false"
    ),
    "metrics.token_accuracy.num_classes=10": (
        "metrics.token_accuracy.num_classes=10: the model has 2048 classes;"
        " type metrics.token_accuracy.num_classes=2048"
    ),
    "callbacks.early_stop.stopping_threshold=6 callbacks.early_stop.divergence_threshold=5": (
        "callbacks.early_stop.stopping_threshold=6 callbacks.early_stop.divergence_threshold=5: with"
        " callbacks.early_stop.mode=min every value is beyond one of them; type"
        " callbacks.early_stop.stopping_threshold=5 callbacks.early_stop.divergence_threshold=6"
    ),
    "model=deepseek_nano model.num_experts=6": (
        "model.n_group=4: model.num_experts=6 do not divide into groups of two or more;"
        " type model.n_group=3 model.topk_group=0"
    ),
    "model=deepseek_nano model.qk_rope_head_dim=3": (
        "model.qk_rope_head_dim=3: rotary positions rotate pairs of channels; type model.qk_rope_head_dim=4"
    ),
    "logger=wandb logger.wandb.project=team/mine": (
        "logger.wandb.project=team/mine: W&B takes no / in a name; type logger.wandb.entity=team"
        " logger.wandb.project=mine"
    ),
    "trainer.reload_dataloaders_every_n_epochs=1": (
        "trainer.reload_dataloaders_every_n_epochs=1: training is a stream without epochs;"
        " type the same command without it"
    ),
    # these have no effect
    "pipeline_schedule=ZBVZeroBubble": (
        "pipeline_schedule=ZBVZeroBubble: pipeline_parallel_size=1 has no stages to schedule; type the same"
        " command without it, or strategy=fsdp pipeline_parallel_size=<stages> beside it"
    ),
    "sequence_parallel=false": (
        "sequence_parallel=false: tensor_parallel_size=1 has no ranks that share a sequence; type the"
        " same command without it, or strategy=fsdp tensor_parallel_size=<ranks> beside it"
    ),
    "callbacks.early_stop.mode=max": (
        "callbacks.early_stop.mode=max: without a patience or a threshold callbacks.early_stop is off;"
        " type the same command without it, or callbacks.early_stop.patience=<validations> beside it"
    ),
    "callbacks.throughput.peak_tflops=9 callbacks.throughput.measure_peak=true": (
        "callbacks.throughput.peak_tflops=9 callbacks.throughput.measure_peak=true: callbacks.throughput."
        "measure_peak=true measures what a matmul reaches instead; type callbacks.throughput.peak_tflops=9 alone,"
        " or without it"
    ),
    "trainer.model_registry=foo": (
        "trainer.model_registry=foo: only Lightning's own checkpoints are uploaded there, and a run writes none;"
        " type the same command without it"
    ),
    "hydra.job.chdir=true": (
        "hydra.job.chdir=true: paths of a command are relative to the folder that it is typed in, and stay so;"
        " type the same command without it"
    ),
    "scheduler=step warmup_steps=3": (
        "warmup_steps=3: scheduler.warmup_steps has a value of its own, and nothing else reads it;"
        " type scheduler.warmup_steps=3"
    ),
    "profile_steps=3 '~callbacks.step_profiler'": (
        "profile_steps=3: callbacks.step_profiler takes none, and nothing else reads it; type the same command without"
        " it"
    ),
    "model=resnet18 global_batch_size=1": (
        "global_batch_size=1: one image of 8 x 8 leaves batch norm a single value per channel, which has no variance;"
        " type micro_batch_size=2 global_batch_size=2"
    ),
    "model=resnet18 model.norm=frozen": (
        "model.norm=frozen: it keeps the mean and variance of trained weights, and these weights are initial ones; type"
        " model.pretrained=<weights>, start_from=<run folder>, or model.norm=batch"
    ),
    "optimizer=schedule_free ema_decay=0.5": (
        "ema_decay=0.5 optimizer=schedule_free: this optimizer averages the weights itself, and mode.weights=ema reads"
        " one average; type ema_decay=null, or optimizer=adamw"
    ),
    f"name={'a' * 300}": f"name={'a' * 40}…: it names a folder: 200 bytes at most; type name=<a shorter name>",
}
# of composed values, reported if nothing else is wrong
FOUND_LATER = ["micro_batch_size=0", "optimizer.lr=inf", "scheduler._target_=x"]
FOUND_LATER += ["~optimizer.eps=1e-8", "trainer.gradient_clip_val=0"]
# without their exact words
READABLE = ("name=${", "callbacks=[null]", "model=[]", "model={a:1}", f"resume={'a' * 300}", "data._target_=3")


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("x,y.txt", "it's.txt"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEED_OF_A_TEST", "7")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("RECIPES_CACHE", raising=False)


@pytest.mark.parametrize("typed", WORKS)
def test_an_obvious_command_line_works(typed: str) -> None:
    composed, mistakes = compose_and_check(shlex.split(typed))
    assert [str(mistake) for mistake in mistakes] == []
    assert composed is not None
    key, expected = WORKS[typed]
    value: object = composed.config
    for part in key.split("."):
        assert isinstance(value, dict)
        value = value[part]
    assert value == expected


def test_mistakes_of_one_command_line_are_each_answered_with_what_works() -> None:
    _, mistakes = compose_typed([typed for typed in TOGETHER if typed not in FOUND_LATER])
    assert {str(mistake) for mistake in mistakes} == {TOGETHER[typed] for typed in TOGETHER if typed not in FOUND_LATER}
    _, mistakes = compose_and_check(FOUND_LATER)
    assert {str(mistake) for mistake in mistakes} == {TOGETHER[typed] for typed in FOUND_LATER}


@pytest.mark.parametrize("typed", ALONE)
def test_a_mistake_is_answered_with_what_works(typed: str) -> None:
    command = shlex.split(typed)
    _, mistakes = compose_and_check(command)
    assert [str(mistake) for mistake in mistakes] == [ALONE[typed]]
    assert find_refused(command, mistakes) == []


@pytest.mark.parametrize("typed", READABLE)
def test_a_mistake_names_what_was_typed(typed: str) -> None:
    _, [mistake] = compose_and_check(words := shlex.split(typed))
    keys = {word.lstrip("+~").partition("=")[0] for word in words}
    assert mistake.setting.lstrip("+~").removeprefix("no ").partition("=")[0].partition(".")[0] in {
        key.partition(".")[0] for key in keys
    }
    assert "\n" not in str(mistake)


def sweep(*typed: str) -> SweepCommand:
    return check_command(typed, config_folder=CONF, config_name="config")


def test_a_sweep_quotes_what_hydra_cannot_read_as_a_single_run_does() -> None:
    command = sweep("data=text_files", "data.path=it's.txt", "optimizer.lr=1e-3,1e-2")
    assert command.mistakes == []
    assert command.for_hydra == ["data=text_files", "data.path='it\\'s.txt'", "optimizer.lr=1e-3,1e-2"]


def test_every_option_of_a_sweep_over_a_group_is_checked_before_its_folder_exists() -> None:
    assert [mistake.setting for mistake in sweep("model=gpt2_nano,nope,llama_nano").mistakes] == ["model=nope"]


@pytest.mark.parametrize(
    ("setting", "fix"),
    [
        (
            "sampler=RandomSampler",
            "sampler._target_=optuna.samplers.RandomSampler '~hydra.sweeper.sampler.n_startup_trials'",
        ),
        ("sampler=Nope", None),
        ("n_trials=x", None),
    ],
)
def test_a_sampler_given_by_name_is_answered_with_its_class(setting: str, fix: str | None) -> None:
    answer = _answer_plugin(ConfigError(f"hydra.sweeper.{setting}", "", "as before"))
    assert answer.fix == ("as before" if fix is None else f"hydra.sweeper.{fix}")


def test_what_is_typed_with_a_mistake_and_without_is_composed_the_same() -> None:
    typed = ["launcher=slurm", "launcher.directives={account: mine}", "name=2024"]
    right, _ = compose_typed(typed)
    wrong, mistakes = compose_typed([*typed, "optimizer.lrr=3"])
    assert len(mistakes) == 1
    assert right is not None
    assert wrong is not None
    assert right.config | {"name": "2024"} == wrong.config | {"name": "2024"}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("mine.yaml", "optimizer: {lr: 1e-4}\n", "recipe=mine: {file}: its settings stand below recipe"),
        ("mine.yaml", "", "recipe=mine: {file}: it is empty; type # @package _global_ as the first line of {file}"),
        (
            "mine.yml",
            "# @package _global_\nseed: 1\n",
            "recipe=mine: there is {file}, and Hydra reads files that end in",
        ),
        (
            "mine.yaml",
            "# @package _global_\ndefaults:\n  - /optimizer: lion\n",
            "{file}: every run has an option of optimizer already, and this adds a second one; type - override"
            " /optimizer: lion in that file",
        ),
        ("mine.yaml", "# @package _global_\n# gr\udcf6sse\nseed: 3\n", "{file}: it is not text in UTF-8"),
        (
            "mine.yaml",
            '# @package _global_\noptimizer:\n  lr: "1e-4"\n',
            "optimizer.lr=1e-4: it takes a number, and in quotes it is text; type optimizer.lr=0.0001 (in {file},"
            " line 3)",
        ),
    ],
)
def test_an_own_recipe_is_answered_with_its_file_and_what_to_write(
    name: str, text: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "own" / "recipe" / name
    file.parent.mkdir(parents=True)
    file.write_text(text, encoding="utf-8", errors="surrogateescape")
    _, [mistake] = compose_and_check([f"hydra.searchpath=[{tmp_path}/own]", "recipe=mine"])
    assert str(mistake).startswith(said.format(file=file))


def test_the_mode_of_wandb_is_checked_where_its_logger_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offlne")
    assert [str(mistake) for mistake in compose_and_check(["logger=wandb"])[1]] == [
        "WANDB_MODE=offlne: the modes of W&B are online offline disabled; type WANDB_MODE=offline before the command"
    ]
    assert compose_and_check([])[1] == []
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "team/x")
    assert [str(mistake) for mistake in compose_and_check(["logger=wandb"])[1]] == [
        "WANDB_PROJECT=team/x: W&B takes no / in a name; type logger.wandb.entity=team logger.wandb.project=x"
    ]
