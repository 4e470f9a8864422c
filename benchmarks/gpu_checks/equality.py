"""Same losses and norms from every engine: float32, bfloat16 and float16, one rank and two, and after resuming."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_checks.check import Outcome, Settings, Skip, judge
from gpu_checks.rank_cases import (
    PARITY,
    Rows,
    describe_missing,
    make_case,
    only_installed,
    packed_case,
    policy_case,
    preference_case,
    run_cases,
    run_curves,
)
from gpu_checks.runs import TINY_GPT2, Finished, fit_here, run_train
from recipes.run_folder import METRICS_FILE, read_rows

PROMISED = 1e-5  # largest relative difference of loss or norm in float32; a different summation order stays below 1e-6
ACROSS_DEVICES = 1e-4  # kernels differ from those of a CPU; TF32, which must be off, would show as 1e-3
ENGINES = ["fsdp", "fsdp, cpu offload", "ZeRO-1", "ZeRO-2", "ZeRO-2, offload", "ZeRO-3", "ZeRO-3, offload"]
ON_TWO = ["ddp", "fsdp", "fsdp, gradient sync per step", "ZeRO-1", "ZeRO-2", "ZeRO-2, offload", "ZeRO-3"]
ONE_OF_EACH = ["fsdp", "ZeRO-2", "ZeRO-3"]
_RESUMED_ON_TWO = ["ddp", "fsdp", "ZeRO-3"]
# subset of each list for `--tiny`; the others differ only in ways that tests/parity covers on a CPU
_TINY = {
    "parity": ["fsdp", "fsdp, cpu offload", "ZeRO-1", "ZeRO-2, offload", "ZeRO-3"],
    "low precision": ["fsdp", "ZeRO-2"],
    "resume": ["fsdp", "ZeRO-3"],
    "rollback": ["fsdp", "ZeRO-3"],
    "two ranks": ["ddp", "fsdp", "ZeRO-2"],
    "answers": ["fsdp", "ZeRO-2"],
    "components": ["llama", "muon", "qlora", "offloaded activations"],
    "resume on two": ["fsdp"],
}
# what has kernels, a place or a dtype of its own on a GPU: a model of tests/parity/cases.py, and overrides
COMPONENTS: dict[str, tuple[str, list[str]]] = {
    "llama": ("llama", []),
    "experts": ("experts", []),
    "two towers": ("two towers", []),
    "resnet18": ("resnet18", []),
    **{
        name: ("gpt2", [f"optimizer={name}"])
        for name in ("adafactor", "adam", "adamw_8bit", "lion", "muon", "schedule_free", "sgd")
    },
    "layer decay": ("gpt2", ["optimizer.layer_decay=0.8", "freeze=[embedding]"]),
    **{name: ("llama", [f"adapter={name}"]) for name in ("lora", "dora", "ia3", "qlora")},
    **{f"recomputed, {name}": ("gpt2", [f"activation_checkpoint={name}"]) for name in ("full", "selective")},
    "offloaded activations": ("gpt2", ["activation_checkpoint=offload"]),
    "dropout": ("gpt2", ["model.dropout=0.1"]),
    "z-loss": ("gpt2", ["z_loss=1e-3", "label_smoothing=0.1", "loss_chunk_tokens=null"]),
    "float8": ("gpt2", ["precision=fp8-mixed"]),
}
# products in bfloat16 (`recipes.optimizer.muon`); other random numbers; eight bits
_OWN_LIMITS = {"muon": 2e-2, "dropout": 5e-2, "float8": 1e-2}
# losses of tests/parity/test_preferences.py, and kinds of tests/parity/test_policy.py
_PREFERENCES = ("dpo", "orpo", "kto", "copy", "reward")
_POLICIES = ("dapo", "reused", "ppo")
_BESIDE_A_COPY = ["fsdp", "ZeRO-2"]  # ZeRO-3 refuses a frozen copy of the model
# precisions of a module of one's own, and how far its loss may be from that in float32 on a CPU
_OF_OWN_MODULES = {"32-true": ACROSS_DEVICES, "16-mixed": 1e-2, "bf16-mixed": 5e-2}
_PRECISIONS = ("bf16-mixed", "16-mixed")
_FROM_FLOAT32 = 1e-3  # 1e-5 on a CPU: rounding errors of up to 4e-3 average out over the targets of eight steps
_SPLITS, _TINY_SPLITS = (1, 2, 4, 8, 16), (1, 2, 4)
_FAILED_RANK_SECONDS = 90.0  # time for a run to end after a rank fails, including imports
_STREAM_WARNING = "AccumulateGrad node's stream does not match"
_COMPARED = ("train/loss", "grad/norm")

Differences = dict[str, dict[str, float]]


def parity(settings: Settings) -> Outcome:
    """Compare every engine's curve on one device with that of `strategy=single`, in float32."""
    names = choose_engines(settings, "parity", ENGINES)
    cases = {name: make_case(settings, name) for name in ["single", *names]}
    # their sums are of host tensors, but a process group opened by another case with NCCL alone has no CPU backend
    apart = {"fsdp, cpu offload": cases.pop("fsdp, cpu offload")}
    if settings.accelerator == "gpu":
        # first, before there is a process group
        apart = {"single on the CPU": make_case(settings, "single", "trainer.accelerator=cpu"), **apart}
    rows = run_curves(settings, "one", cases) | run_curves(settings, "apart", apart)
    found = find_differences(rows, rows["single"])
    limits = dict.fromkeys(names, PROMISED) | {"single on the CPU": ACROSS_DEVICES}
    return judge(find_excess(found, limits), headline=largest(found), figures=found, note=describe_missing(ENGINES))


def components(settings: Settings) -> Outcome:
    """Train with each component on this device and on the CPU, eagerly, and compare the curves."""
    names = _TINY["components"] if settings.is_tiny else list(COMPONENTS)
    curves: list[dict[str, Rows]] = []
    for accelerator in (settings.accelerator, "cpu"):
        where = [f"trainer.accelerator={accelerator}", "compile=false"]
        cases = {
            name: make_case(settings, "single", *COMPONENTS[name][1], *where, model=COMPONENTS[name][0])
            for name in names
        }
        # a CPU has no units for float8: its run is that of bfloat16
        if accelerator == "cpu" and "float8" in cases:
            cases["float8"] = make_case(settings, "single", *where, "precision=bf16-mixed")
        curves.append(run_curves(settings, f"components_{len(curves)}", cases))
    found: Differences = {}
    for name in names:
        found |= find_differences({name: curves[0][name]}, curves[1][name])
    failures = find_excess(found, dict.fromkeys(names, ACROSS_DEVICES) | _OWN_LIMITS)
    comparable = {name: found[name] for name in names if name not in _OWN_LIMITS}
    headline = f"{len(names)} components, {largest(comparable)}"
    return judge(failures, headline=headline, figures=found)


def preferences(settings: Settings) -> Outcome:
    """Compare losses on pairs and answers, and reward models: engines with one device, and that with the CPU."""
    engines = choose_engines(settings, "answers", ONE_OF_EACH)
    cases, on_cpu = {}, {}
    for loss in _PREFERENCES:
        for engine in ["single", *engines]:
            if loss != "copy" or engine in ("single", *_BESIDE_A_COPY):
                cases[f"{loss}, {engine}"] = preference_case(settings, loss, engine)
        on_cpu[f"{loss}, on the CPU"] = preference_case(settings, loss, "single", "trainer.accelerator=cpu")
    # in a process of their own: a process group of NCCL alone has no CPU backend
    rows = run_curves(settings, "preferences", cases) | run_curves(settings, "on_the_cpu", on_cpu)
    found: Differences = {}
    for loss in _PREFERENCES:
        of_loss = {name: curve for name, curve in rows.items() if name.startswith(f"{loss}, ")}
        found |= find_differences(of_loss, rows[f"{loss}, single"])
    limits = {name: ACROSS_DEVICES if name.endswith("the CPU") else PROMISED for name in found}
    note = describe_missing(ONE_OF_EACH)
    return judge(find_excess(found, limits), headline=largest(found), figures=found, note=note)


def policies(settings: Settings) -> Outcome:
    """Compare engines with one device: rewards, which are hashes of the sampled text, have to be equal to the bit."""
    engines = choose_engines(settings, "answers", ONE_OF_EACH)
    cases = {}
    for kind in _POLICIES:
        beside_a_copy = kind != "dapo"
        for engine in ["single", *engines]:
            if not beside_a_copy or engine in ("single", *_BESIDE_A_COPY):
                cases[f"{kind}, {engine}"] = policy_case(settings, kind, engine)
    rows = run_curves(settings, "policies", cases)
    figures: dict[str, Any] = {}
    failures = []
    for kind in _POLICIES:
        of_kind = {name: curve for name, curve in rows.items() if name.startswith(f"{kind}, ")}
        alone = rows[f"{kind}, single"]
        # the loss is a sum of numbers of both signs that nearly cancel: its norm is compared
        found = {name: {"grad/norm": row["grad/norm"]} for name, row in find_differences(of_kind, alone).items()}
        failures += find_excess(found, dict.fromkeys(found, PROMISED))
        for name, curve in of_kind.items():
            same = [row["reward/mean"] == other["reward/mean"] for row, other in zip(curve, alone, strict=True)]
            gap = max(row["rollout/logprob_gap"] for row in curve)
            figures[name] = found.get(name, {}) | {"steps of the same samples": sum(same), "logprob_gap": gap}
            if not all(same):
                failures.append(f"{name}: step {1 + same.index(False)} has other samples than one device")
            if gap > PROMISED:
                failures.append(f"{name}: log-probabilities of samples and training differ by {gap:.1e}")
    norm = max(row.get("grad/norm", 0.0) for row in figures.values())
    headline = f"{len(figures)} curves, norm {norm:.0e}"
    return judge(failures, headline=headline, figures=figures, note=describe_missing(ONE_OF_EACH))


def own_module(settings: Settings) -> Outcome:
    """Train a LightningModule of one's own with one and two optimizers on this device, and on the CPU in float32."""
    own = ["task=lightning", "data=lightning", "data.module={_target_: own_modules.Rows, noisy: false}"]
    own += [
        "trainer.max_steps=8",
        "eval_every=4",
        "save_every=null",
        "trainer.devices=1",
        "log_every=1",
        "compile=false",
    ]
    modules = {
        "one optimizer": ("{_target_: own_modules.Branched, dropout: 0.0}", "train/loss"),
        "two optimizers": ("{_target_: own_modules.Adversaries}", "discriminator_loss"),
    }
    figures: dict[str, Any] = {}
    for name, (module, loss) in modules.items():
        curves = {}
        for precision, where in [("the CPU", "cpu"), *((each, settings.accelerator) for each in _OF_OWN_MODULES)]:
            typed = [*own, f"task.module={module}", f"trainer.accelerator={where}"]
            typed.append(f"precision={'32-true' if where == 'cpu' and precision == 'the CPU' else precision}")
            run = fit_here(settings, f"{name} {precision}".translate(str.maketrans(" -", "__")), typed)
            curves[precision] = [row[loss] for row in read_rows(run.folder / METRICS_FILE) if loss in row]
        reference = curves.pop("the CPU")
        for precision, curve in curves.items():
            assert len(curve) == len(reference) >= 4, f"{name}, {precision}: {len(curve)} rows"
            of_steps = [abs(value / other - 1) for value, other in zip(curve, reference, strict=True)]
            figures[f"{name}, {precision}"] = max(of_steps) if all(map(math.isfinite, of_steps)) else math.inf
    failures = [
        f"{name}: the loss differs by {found:.1e}, more than {_OF_OWN_MODULES[name.split(', ')[1]]:.0e}"
        for name, found in figures.items()
        if found > _OF_OWN_MODULES[name.split(", ")[1]]
    ]
    largest_of = {
        each: max(found for name, found in figures.items() if name.endswith(each)) for each in _OF_OWN_MODULES
    }
    headline = "loss from float32 on a CPU: " + ", ".join(f"{each} {found:.0e}" for each, found in largest_of.items())
    return judge(failures, headline=headline, figures=figures)


def low_precision(settings: Settings) -> Outcome:
    """Compare engines in bfloat16 and float16 with a single device, and that with float32.

    The single device splits the batch in several ways: the spread of its curves, due to rounding alone, is the unit.
    """
    names = choose_engines(settings, "low precision", ONE_OF_EACH)
    splits = _TINY_SPLITS if settings.is_tiny else _SPLITS
    eager = "compile=false"  # compiling each of 17 cases takes longer than training it
    cases = {"float32": make_case(settings, "single", eager)}
    for precision in _PRECISIONS:
        typed = [f"precision={precision}", eager]
        for split in splits:
            cases[f"{precision} x{split}"] = make_case(settings, "single", *typed, accumulate=split)
        for name in names:
            cases[f"{precision}, {name}"] = make_case(settings, name, *typed)
    rows = run_curves(settings, "low", cases)
    figures: dict[str, Any] = {}
    failures = []
    for precision in _PRECISIONS:
        alone = rows[f"{precision} x1"]
        spread = find_differences({f"x{n}": rows[f"{precision} x{n}"] for n in splits[1:]}, alone)
        found = find_differences({f"{precision}, {name}": rows[f"{precision}, {name}"] for name in names}, alone)
        # the maximum over a few summation orders is itself random: twice that can still be rounding
        limits = {key: 2 * max(values[key] for values in spread.values()) for key in _COMPARED}
        for key in _COMPARED:
            of_key = {name: {key: values[key]} for name, values in found.items()}
            failures += find_excess(of_key, dict.fromkeys(found, limits[key]))
        from_float32 = find_differences({precision: alone}, rows["float32"])
        failures += find_excess(
            {precision: {"loss": from_float32[precision]["train/loss"]}}, {precision: _FROM_FLOAT32}
        )
        figures |= found | {f"{precision}, twice the spread of one device": limits}
        figures[f"{precision}, single, from float32"] = from_float32[precision]
    far = [f"{name} {figures[f'{name}, single, from float32']['train/loss']:.0e}" for name in _PRECISIONS]
    headline = f"loss from float32: {', '.join(far)}"
    return judge(failures, headline=headline, figures=figures, note=describe_missing(ONE_OF_EACH))


def resume_of_engines(settings: Settings) -> Outcome:
    """Require bit-identical results in step 3, with and without resuming from the checkpoint of step 2."""
    names = ["single", *choose_engines(settings, "resume", ONE_OF_EACH)]
    figures, failures = _resume(settings, names, world_size=1)
    headline = f"{len(names)} engines" if not failures else ""
    return judge(failures, headline=headline, figures=figures, note=describe_missing(ONE_OF_EACH))


def two_ranks(settings: Settings) -> Outcome:
    """Compare two ranks with one device, resume on two, and let one of two ranks fail; uses NCCL on GPUs.

    Raises:
        Skip: There is only one GPU.
    """
    if settings.accelerator == "gpu" and settings.num_gpus < 2:
        raise Skip(f"needs two GPUs; this machine has {settings.num_gpus}")
    names = choose_engines(settings, "two ranks", ON_TWO)
    alone = run_curves(settings, "one", {"single": make_case(settings, "single")})
    rows = run_curves(settings, "two", {name: make_case(settings, name, world_size=2) for name in names}, world_size=2)
    found = find_differences(rows, alone["single"])
    failures = find_excess(found, dict.fromkeys(names, PROMISED))
    on_two = choose_engines(settings, "resume on two", _RESUMED_ON_TWO)
    resumed, unequal = _resume(settings, on_two, world_size=2)
    figures: dict[str, Any] = {"differences": found, "resumed": resumed}
    for starter in ("train.py", "torchrun"):
        ended = _fail_on_rank_1(settings, starter)
        figures[f"seconds until {starter} ended after a failure"] = round(ended.seconds, 1)
        if ended.code != 1 or "as the check demands" not in ended.output:
            failures.append(f"{starter} ended with {ended.code} after rank 1 had failed: {ended.output[-500:]}")
    log = "".join(path.read_text() for path in settings.folder.rglob("rank_*.log"))
    figures["warnings of a stream mismatch"] = log.count(_STREAM_WARNING)
    note = f"DDP synchronizes per parameter: {_STREAM_WARNING}" if _STREAM_WARNING in log else ""
    return judge([*failures, *unequal], headline=largest(found), figures=figures, note=note)


def packed(settings: Settings) -> Outcome:
    """Compare FlexAttention on packed examples with a dense mask, on this device and on the CPU."""
    if settings.accelerator == "cpu":
        raise Skip("FlexAttention needs a GPU: a CPU takes the dense mask")
    cache = str(settings.folder / "examples")
    on_gpu, models = f"trainer.accelerator={settings.accelerator}", ("gpt2", "llama")
    cases = {
        f"{model}, {name}": packed_case("single", *typed, world_size=1, model=model, cache_dir=cache)
        for model in models
        for name, typed in {
            "FlexAttention": [on_gpu, "compile=true"],
            "dense mask": [on_gpu, "compile=false"],
            "dense mask on the CPU": ["compile=false"],
        }.items()
    }
    rows = run_curves(settings, "packed", cases)
    found: Differences = {}
    for model in models:
        of_model = {name: curve for name, curve in rows.items() if name.startswith(model)}
        found |= find_differences(of_model, rows[f"{model}, dense mask on the CPU"])
    limits = dict.fromkeys(found, ACROSS_DEVICES)
    return judge(find_excess(found, limits), headline=largest(found), figures=found)


def choose_engines(settings: Settings, check: str, names: Sequence[str]) -> list[str]:
    """Return the installed engines of a check; with `--tiny`, a subset."""
    return only_installed(_TINY[check] if settings.is_tiny else names)


def _resume(settings: Settings, names: Sequence[str], *, world_size: int) -> tuple[dict[str, Any], list[str]]:
    """Return `same bits` or both runs' differing values for each engine, and a sentence for each failure."""
    more = ["trainer.max_steps=3", "save_every=2", "eval_every=3", "trainer.deterministic=true"]
    cases = {engine: make_case(settings, engine, *more, world_size=world_size) for engine in names}
    worker = PARITY / "resume_ranks.py"
    figures: dict[str, Any] = {}
    failures = []
    for engine, found in run_cases(settings, "resume", cases, world_size=world_size, worker=worker).items():
        pairs = {key: [found[run][key] for run in ("uninterrupted", "resumed")] for key in _COMPARED}
        unequal = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
        figures[engine] = unequal or "same bits"
        failures += [f"{engine}: {key} is {b!r} after a resume, not {a!r}" for key, (a, b) in unequal.items()]
    return figures, failures


def _fail_on_rank_1(settings: Settings, starter: str) -> Finished:
    """Start two ranks, one of which raises, and wait for both."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    overrides = [*TINY_GPT2, "data=random_tokens", "strategy=ddp", f"trainer.accelerator={settings.accelerator}"]
    overrides += ["trainer.devices=2", "global_batch_size=4", "trainer.max_steps=6", "save_every=null"]
    overrides += ["callbacks=[grad_norm]", "+callbacks.fail._target_=gpu_checks.callbacks.FailAt"]
    overrides += ["+callbacks.fail.step=3", "+callbacks.fail.rank=1"]
    launcher = torchrun if starter == "torchrun" else []
    return run_train(
        settings, starter, overrides, launcher=launcher, limit_seconds=settings.limit(_FAILED_RANK_SECONDS)
    )


def find_differences(rows: Mapping[str, Rows], reference: Rows) -> Differences:
    """Return each curve's largest relative difference of loss and norm from the reference; inf for NaN."""
    found: Differences = {}
    for name, curve in rows.items():
        if curve is reference:
            continue
        assert len(curve) == len(reference), f"{name}: {len(curve)} rows, not {len(reference)}"
        found[name] = {}
        for key in _COMPARED:
            of_steps = [abs(row[key] / other[key] - 1) for row, other in zip(curve, reference, strict=True)]
            # `max` may ignore NaN
            found[name][key] = max(of_steps) if all(map(math.isfinite, of_steps)) else math.inf
    return found


def find_excess(differences: Mapping[str, Mapping[str, float]], limits: Mapping[str, float]) -> list[str]:
    """Return a sentence for each difference above its limit."""
    return [
        f"{name}: {key} differs by {value:.1e}, more than {limits[name]:.0e}"
        for name, found in differences.items()
        for key, value in found.items()
        if value > limits[name]
    ]


def largest(differences: Differences) -> str:
    """Format the largest differences of loss and norm as text."""
    loss, norm = (max(found[key] for found in differences.values()) for key in _COMPARED)
    return f"loss {loss:.0e}, norm {norm:.0e}"
