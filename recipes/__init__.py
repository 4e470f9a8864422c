"""How a run is made. A line of conf/ names the module that implements it.

compose.py      L3  command line -> one plain, resolved config and the run folder
check/          L3  reads the config, builds nothing, reports every mistake at once
signature.py    L3  constructor signatures read from source, without importing
launch.py       L3  run folder, frozen config, log; then build and mode; exit codes
build.py        L3  the only file that instantiates: config -> Run(task, data, trainer)
mode/           L3  one file per mode=: fit, evaluate, sample, export
task/           L2  LightningModules, one per kind of learning
strategy/       L2  how a step is carried out on the devices; one file per engine
checkpoint/     L2  what is written, where a run resumes from
logger/         L2  one row per logged optimizer step, one line per event
environment.py  L2  versions, devices, git state of a run
data/           L1  where samples come from and in which order; datamodule.py is L2
tokenizer/      L1  text <-> token ids
model/          L1  one architecture a file, plain torch
optimizer/      L1  one optimizer a file; decay groups
scheduler.py    L1  optimizer step -> multiplier of the learning rate
precision.py    L1  three dtypes behind each precision word
accumulation.py L1  global batch <-> micro-batches, by exact division
mistake.py      L1  what you set, why it cannot be, what to type
loss.py         L1  sums over targets, never means of means
activation_checkpoint.py  L1  recompute blocks in the backward pass
"""
