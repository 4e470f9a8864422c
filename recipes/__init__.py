"""How a run is made. A line of conf/ names the module that implements it.

compose.py      L3  command line -> one plain, resolved config and the run folder
check/          L3  reads the config, builds nothing, reports every mistake at once
signature.py    L3  constructor signatures read from source, without importing
ranks.py        L3  how many processes carry a run, and who started them
launch.py       L3  run folder, log; then build and mode, here or on ranks of its own; exit codes
start_ranks.py  L3  one process per rank from one frozen composition; the first failure ends all
rank.py         L3  the main of such a process
die_with_parent.py L1 a process that ends with the one that started it
meeting.py      L1  the ranks of one start of torchrun find each other; a restart too
preemption.py   L1  SIGTERM and SIGUSR1 as a request to save and end
agreement.py    L1  all ranks do something after the same step
run_lock.py     L1  one run at a time in a folder
out_of_memory.py L3 memory is full: the cheapest ways out, as words to type
build.py        L3  the only file that instantiates: config -> Run(task, data, trainer)
mode/           L3  one file per mode=: fit, evaluate, sample, export, replay, report, dashboard, wandb_sweep
sweep/          L3  the jobs of -m: prepared, carried out, recorded; Optuna studies, W&B sweeps
launcher/       L3  where they run: this machine, SLURM; one file an option
task/           L2  LightningModules, one per kind of learning
strategy/       L2  how a step is carried out on the devices; one file per engine
checkpoint/     L2  what each rank writes behind training, how it is proven, where a run resumes from
logger/         L2  one row per logged optimizer step, one line per event
environment.py  L2  versions, devices, git state of a run
precision_plugin.py L2  a precision word as Lightning's plugin for each engine
reachable_gradients.py L2  what one device, DDP and FSDP2 answer alike
zero_partition.py L2  ZeRO-3: a described model made and divided one parameter at a time
zero_loss_scale.py L2  float16's loss scale inside a ZeRO optimizer
zero_step_guard.py L2  a step refused inside a ZeRO optimizer
zero_live_state.py L2  what ZeRO keeps of a run, the tensors themselves: for snapshots
data/           L1  where samples come from and in which order; datamodule.py is L2
tokenizer/      L1  text <-> token ids
model/          L1  one architecture a file, plain torch
optimizer/      L1  one optimizer a file; decay groups
clipping/       L1  a limit of the gradient norm from the norms before; one file an option
weight_average.py L1  an average of the weights, as one more moment of the optimizer
scheduler.py    L1  optimizer step -> multiplier of the learning rate
lr_scaling.py   L1  the learning rate that follows the batch size
precision.py    L1  three dtypes behind each precision word
accumulation.py L1  global batch <-> micro-batches, by exact division
gradients.py    L1  global norm and clipping, whole or sharded
step_guard.py   L1  refuses a step that is out of line, before it is made
collectives.py  L1  sums and means over ranks
compile_blocks.py L1  torch.compile block by block
failure.py      L1  how a rank that fails tells its launcher
leave.py        L1  the end of a process that has been a rank
mistake.py      L1  what you set, why it cannot be, what to type
loss.py         L1  sums over targets, never means of means
activation_checkpoint.py  L1  recompute blocks in the backward pass
"""
