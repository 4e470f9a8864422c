"""Compose, check and execute training runs. A group of conf/ is named after the module or package that implements it.

Layers: L3 composes, L2 are Lightning components, L1 is arithmetic and torch; a layer imports its own and lower ones.

config/                   L3  command line -> one checked, frozen config; without torch and Lightning
entry/                    L3  checked config -> running processes and their exit codes
build.py                  L3  the only file that instantiates: config -> task, data and Trainer
mode/                     L3  one file per mode=: fit, evaluate, sample, export, replay, report, dashboard, wandb_sweep
sweep/                    L3  which jobs run: -m, Optuna studies, W&B sweeps
launcher/                 L3  where they run: this machine or SLURM
task/                     L2  LightningModules, one per kind of learning
strategy/                 L2  one engine per file: single, ddp, fsdp; deepspeed/
checkpoint/               L2  checkpoint format, writer, retention, resume, the same for every engine
logger/                   L2  metrics.csv and events.jsonl, TensorBoard; wandb/
lightning_internals.py    L2  private Lightning attributes in use
data/                     L1  samples and their order; datamodule.py is L2
tokenizer/                L1  text <-> token ids
model/                    L1  one architecture per file; weights/ converts published ones
numerics/                 L1  accumulation, collectives, loss, EMA: arithmetic shared by all strategies
runtime/                  L1  one process: ranks, signals, lock, console, failure, exit codes
optimizer/                L1  one optimizer per file; weight decay groups
clipping/                 L1  adaptive gradient clipping thresholds
scheduler.py              L1  optimizer step -> multiplier of the learning rate
lr_scaling.py             L1  batch size -> learning rate
precision.py              L1  dtypes of weights, products and gradients
activation_checkpoint/    L1  activation recomputation and offloading to host memory
compile.py                L1  torch.compile, block by block
run_folder.py             L1  file names of a run folder and their readers
errors.py                 L1  what you set, why it cannot work, what to type
cache.py                  L1  folders shared by processes, such as tokenized text
"""
