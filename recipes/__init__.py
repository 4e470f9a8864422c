"""Compose, check and execute training runs. A group of conf/ is named after the module or package that implements it.

Layers: L3 composes, L2 are Lightning components, L1 is arithmetic and torch; a layer imports its own and lower ones.

config/                   L3  command line -> one checked, frozen config; without torch and Lightning
entry/                    L3  checked config -> running processes and their exit codes
build.py                  L3  instantiates a run: config -> task, data and Trainer
mode/                     L3  one file per mode=, such as fit, evaluate, export, plan, preflight, lr_find
sweep/                    L3  which jobs a sweep runs: -m, Optuna studies, W&B sweeps
launcher/                 L3  where sweep jobs run: this machine or SLURM
plan/                     L3  predicted memory, time and cost of a run
preflight/                L3  sanity checks of a recipe before a long run
trial/                    L3  a few real steps without a run folder: batch size, learning rate and noise scale
task/                     L2  LightningModules, one per kind of learning
evaluator/                L2  evaluators for mode=evaluate besides a split of the data
engine.py                 L2  what a strategy is to everything else, and how to get it
strategy/                 L2  one engine per file: single, ddp, fsdp; deepspeed/
checkpoint/               L2  checkpoint format, writer, retention, resume, the same for every engine
logger/                   L2  metrics.csv and events.jsonl, TensorBoard; wandb/
lightning_internals.py    L2  all uses of private Lightning attributes
data/                     L1  samples and their order; datamodule.py is L2
prepare/                  L1  quality rules, deduplication and contamination checks for documents
tokenizer/                L1  text <-> token ids
model/                    L1  one architecture per file; weights/ converts published ones
adapter/                  L1  LoRA, DoRA and IA3; NF4 base weights
parallel/                 L1  tensor, context, expert and pipeline parallelism
mesh.py                   L1  mesh dimensions and coordinates of each rank
numerics/                 L1  accumulation, collectives, loss, EMA: arithmetic shared by all strategies
runtime/                  L1  one process: ranks, signals, lock, console, failure, exit codes
optimizer/                L1  one optimizer per file; weight decay groups
clipping/                 L1  adaptive gradient clipping thresholds
scheduler.py              L1  optimizer step -> learning-rate multiplier
lr_scaling.py             L1  batch size -> learning rate
precision/                L1  dtypes of weights, matmuls and gradient reduction
activation_checkpoint/    L1  activation recomputation and offloading to host memory
metrics.py                L1  validation metrics
compile.py                L1  torch.compile, block by block
run_folder.py             L1  file names of a run folder and their readers
errors.py                 L1  what you set, why it cannot work, what to type
cache.py                  L1  folders shared by processes, such as tokenized text
"""

from recipes.torchvision_import import repair as _repair

_repair()  # before Lightning is imported, by whoever: torchmetrics imports torchvision where it is installed
