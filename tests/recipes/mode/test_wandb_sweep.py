"""W&B sweeps: the YAML against W&B's own schema and sampler, and its command as W&B's own agent starts it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import ROOT, TINY, write_texts

from recipes.config import compose_and_check
from recipes.entry.run import run_resolved
from recipes.logger.wandb.session import ID_FILE, STEP
from tests.recipes.logger.test_wandb import find_rows, one_of, records_of, summary_of

SPACE = (
    "optimizer.lr=tag(log,interval(1e-5,1e-2))",
    "warmup_steps=int(interval(1,8))",
    "global_batch_size=8,16",
    "seed=range(0,10,3)",
    "trainer.gradient_clip_val=interval(0.5,2.0)",
    "scheduler=constant,linear",
    "optimizer.betas=[0.9,0.95],[0.9,0.999]",
    "micro_batch_size=null,8",
    "compile=false,true",
    "name=a-b,'1e-3'",
    "model.hidden_size=tag(log,int(interval(16,64)))",
    "+trainer.benchmark=true,false",
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, a home without a W&B key, and no W&B variable in the environment."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    # W&B's agent sets these in this process; monkeypatch removes them at the end
    for name in ("WANDB_DIR", "WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # the agent starts `python`
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_sweep(*overrides: str) -> dict[str, Any]:
    """Write the YAML and return its content."""
    composed, mistakes = compose_and_check(["mode=wandb_sweep", *overrides])
    assert composed is not None
    assert not mistakes, [str(mistake) for mistake in mistakes]
    assert run_resolved(composed) == 0
    content: dict[str, Any] = yaml.safe_load(Path("wandb_sweep.yaml").read_text())
    return content


def error_report(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """Return the report of an invalid sweep, for which no file is written."""
    composed, mistakes = compose_and_check(["mode=wandb_sweep", *overrides])
    assert composed is not None
    assert not mistakes, [str(mistake) for mistake in mistakes]
    assert run_resolved(composed) == 2
    assert not Path("wandb_sweep.yaml").exists()
    output = capsys.readouterr()
    return output.out + output.err


@pytest.fixture(scope="class")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """W&B's schema and sampler: the package of `wandb[sweeps]`, without its requirement of an old NumPy."""
    folder = str(tmp_path_factory.mktemp("wandb_sweeps"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
    done = subprocess.run([*pip, "sweeps==0.3.0"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip install sweeps: {done.stderr}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield pytest.importorskip("sweeps")
        for name in [name for name in sys.modules if name.split(".")[0] == "sweeps"]:
            patch.delitem(sys.modules, name)


class TestAgainstWandbsSchemaAndSampler:
    """`pip install 'wandb[sweeps]'` brings the schema that W&B checks a sweep with, and its sampler."""

    @pytest.mark.parametrize(
        "overrides",
        [
            ("optimizer.lr=1e-4,3e-4",),
            (*SPACE, "mode.num_trials=7"),
            (*SPACE, "mode.method=random", "mode.early_terminate=3"),
            ("seed=1,2", "logger=wandb", "logger.wandb.entity=us", "logger.wandb.project=ours"),
            ("sweep=lr",),
            *[
                pytest.param((f"sweep={path.stem}",), marks=pytest.mark.slow)
                for path in sorted((ROOT / "conf/sweep").glob("[!n]*.yaml"))
                if path.stem != "lr"
            ],
        ],
        ids=lambda overrides: overrides[-1],
    )
    def test_the_yaml_has_no_violation_of_the_schema(self, sweeps: Any, overrides: tuple[str]) -> None:
        content = write_sweep(*overrides)
        assert sweeps.config.schema_violations_from_proposed_config(content) == []

    def test_every_sampled_trial_composes_without_mistakes(
        self, sweeps: Any, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        texts = write_texts(elsewhere / "texts")
        content = write_sweep(*TINY, f"data.path={texts}", *SPACE)
        monkeypatch.setenv("WANDB_SWEEP_ID", "s")
        monkeypatch.setenv("WANDB_RUN_ID", "r")
        for _ in range(8):
            drawn = sweeps.next_run(content, []).config
            args = {name: as_json(value["value"]) for name, value in drawn.items()}
            composed, mistakes = compose_and_check(agent_command(content, args)[3:])
            assert composed is not None
            wrong = [m.setting for m in mistakes if not m.setting.startswith("model.hidden_size=")]
            assert wrong == []  # a width that the heads do not divide is one
            config = composed.config
            assert 1e-5 <= config["optimizer"]["lr"] <= 1e-2
            assert (config["warmup_steps"], type(config["warmup_steps"])) in [(steps, int) for steps in range(1, 9)]
            assert config["global_batch_size"] in (8, 16)
            assert config["seed"] in (0, 3, 6, 9)
            assert config["optimizer"]["betas"] in ([0.9, 0.95], [0.9, 0.999])
            assert config["micro_batch_size"] in (None, 8)
            assert config["compile"] in (True, False)
            assert config["name"] in ("a-b", "1e-3")
            assert isinstance(config["model"]["hidden_size"], int)
            assert 16 <= config["model"]["hidden_size"] <= 64
            assert config["trainer"]["benchmark"] in (True, False)

    def test_a_grid_is_every_combination_once(self, sweeps: Any) -> None:
        content = write_sweep("optimizer.lr=1e-4,3e-4,1e-3", "seed=range(4)", "micro_batch_size=null,8")
        runs: list[Any] = []
        while (run := sweeps.next_run(content, runs)) is not None:
            runs.append(run)
        values = [tuple(value["value"] for value in run.config.values()) for run in runs]
        assert len(values) == len({repr(value) for value in values}) == 24


def as_json(value: Any) -> Any:
    """Return a value as the server sends it to an agent."""
    return json.loads(json.dumps(value, default=lambda number: number.item()))


def agent_command(content: dict[str, Any], args: dict[str, Any]) -> list[str]:
    """Return the command that W&B's agent starts."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    macros = create_sweep_command_args({"args": {k: {"value": v} for k, v in args.items()}})
    macros |= {"env": ["env"], "interpreter": ["python"], "program": [content["program"]]}
    command = []
    for part in create_sweep_command(list(content["command"])):
        command += macros[part[2:-1]] if part.startswith("${") else [part]
    return command


class Trial:
    """A trial started by W&B's own agent, as if the server had requested it.

    Args:
        content: The content of the YAML.
        run_id: The run's id at W&B.
        args: The sampled values.
    """

    def __init__(self, content: dict[str, Any], *, run_id: str, args: dict[str, Any]) -> None:
        from wandb.wandb_agent import Agent

        os.environ["WANDB_SWEEP_ID"] = "swp"
        agent = Agent(None, None, sweep_id="swp")
        agent._sweep_command = list(content["command"])
        message = {"type": "run", "run_id": run_id, "program": content["program"]}
        agent._process_command(message | {"args": {key: {"value": v} for key, v in args.items()}})
        self.process = agent._run_processes[run_id]._popen

    def end(self) -> int:
        """Wait for the trial and return its exit code."""
        code: int = self.process.wait(timeout=200)
        return code


def run_overrides(folder: Path) -> list[str]:
    """Return the overrides of a run of four steps on two ranks, with a validation after every second step."""
    texts = write_texts(folder / "texts")
    overrides = [*TINY, f"data.path={texts}", "trainer.accelerator=cpu", "trainer.max_steps=4"]
    overrides += ["name=ddp_test"]
    return [*overrides, "strategy=ddp", "trainer.devices=2", "micro_batch_size=4", "eval_every=2"]


def test_trials_on_two_ranks_log_to_the_runs_named_by_the_agent(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    content = write_sweep(*run_overrides(elsewhere), "optimizer.lr=1e-3,3e-3", "model=gpt2_nano,llama_nano")
    monkeypatch.setenv("WANDB_PROJECT", "theirs")  # as `wandb agent us/theirs/swp` does
    drawn = {"trial1": 0.001, "trial2": 0.003}
    started = [
        Trial(content, run_id=run_id, args={"optimizer.lr": lr, "model": "gpt2_nano"}) for run_id, lr in drawn.items()
    ]  # in the same second
    assert [trial.end() for trial in started] == [0, 0], capfd.readouterr()
    for run_id, lr in drawn.items():
        folder = elsewhere / "logs" / "ddp_test" / "wandb_swp" / run_id
        frozen = yaml.safe_load((folder / "config.yaml").read_text())
        assert frozen["optimizer"]["lr"] == lr
        [records] = records_of(folder / "wandb")  # rank 0's
        run = one_of(records, "run")
        assert (run["run_id"], run["sweep_id"], run["project"]) == (run_id, "swp", "theirs")
        assert run["run_group"] == "sweep_swp"
        assert run["display_name"] == f"ddp_test_gpt2_nano_swp_{run_id}"
        record = json.loads((folder / ID_FILE).read_text())
        assert (record["id"], record["step"]) == (run_id, 4)
        config = run["config"]["update"] | one_of(records, "config")["update"]
        assert (config["optimizer.lr"], config["optimizer"]["lr"]) == (lr, lr)
        assert config["model"] == "gpt2_nano"  # as W&B has sampled it
        assert config["model_settings"] == frozen["model"]
        steps = [row[STEP] for row in find_rows(records)]
        assert steps == [1, 2, 3, 4]
        # the sweep's metric is in the run's summary under the same name
        summary = summary_of(records)
        assert content["metric"] == {"name": "best_val_loss", "goal": "minimize"}
        assert summary[content["metric"]["name"]] == min(
            row["val/loss"] for row in find_rows(records) if "val/loss" in row
        )


@pytest.mark.slow
def test_a_preempted_trial_of_a_conf_sweep_option_resumes_in_its_folder_and_wandb_run(
    elsewhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stop = "+callbacks.signals={_target_: signalled.SignalAt, folder: .,"
    overrides = [
        *run_overrides(elsewhere),
        f"{stop} signals: [step_3_SIGTERM_0]}}",
        "micro_batch_size=8",
    ]
    content = write_sweep(*overrides, "sweep=lr", "strategy=single", "trainer.devices=1")
    os.environ["PYTHONPATH"] = str(ROOT / "tests")
    args = {"optimizer.lr": 0.003}
    codes = [Trial(content, run_id="cut", args=args).end() for _ in range(2)]
    assert codes == [75, 0], capfd.readouterr()
    folder = elsewhere / "logs" / "ddp_test" / "wandb_swp" / "cut"
    both = records_of(folder / "wandb")
    assert [one_of(records, "run")["run_id"] for records in both] == ["cut", "cut"]
    steps = [row[STEP] for records in both for row in find_rows(records)]
    assert sorted(set(steps)) == [1, 2, 3, 4]


def test_the_overrides_of_every_trial_are_in_the_command() -> None:
    content = write_sweep("optimizer.lr=1e-3,3e-3", "sweep=lr", "mode.path=wandb_sweep.yaml", "seed=7")
    assert content["command"] == [
        *("${env}", "${interpreter}", "${program}", "sweep=lr", "seed=7"),
        *("resume=auto", "hydra.mode=RUN", "logger=wandb", "${args_no_hyphens}"),
    ]
    assert content["parameters"] == {
        "optimizer.lr": {"values": [0.001, 0.003]}
    }  # typed values replace those of sweep=lr
    assert (Path.cwd() / content["program"]).resolve() == ROOT / "train.py"
    head = {key: content[key] for key in ("name", "project", "method", "metric")}
    assert head == {
        "name": "quickstart_lr",
        "project": "lightning-recipes",
        "method": "grid",
        "metric": {"name": "best_val_loss", "goal": "minimize"},
    }


def test_each_kind_of_interval_has_its_distribution() -> None:
    content = write_sweep(
        "sweep.objective=tokens_per_second",
        "sweep.direction=maximize",
        "optimizer.lr=tag(log,interval(1e-5,1e-2))",
        *("warmup_steps=int(interval(1,8))", "trainer.gradient_clip_val=interval(0.5,2)"),
        *("global_batch_size=range(32,65,32)", "seed=range(3)", "eval_every=interval(5,5)"),
        *("log_every=tag(log,int(interval(1,64)))", "micro_batch_size=null,8"),
        "mode.num_trials=9",
    )
    assert content["parameters"] == {
        "optimizer.lr": {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-2},
        "warmup_steps": {"distribution": "int_uniform", "min": 1, "max": 8},
        "trainer.gradient_clip_val": {"distribution": "uniform", "min": 0.5, "max": 2.0},
        "global_batch_size": {"values": [32, 64]},
        "seed": {"distribution": "int_uniform", "min": 0, "max": 2},
        "eval_every": {"value": 5.0},
        "log_every": {"distribution": "q_log_uniform_values", "min": 1, "max": 64, "q": 1},
        "micro_batch_size": {"values": ["null", 8]},  # the agent would pass None as the text `None`
    }
    assert (content["method"], content["run_cap"]) == ("bayes", 9)
    assert content["metric"] == {"name": "tokens_per_second", "goal": "maximize"}


def test_an_optuna_sweep_keeps_its_space_and_its_number_of_trials() -> None:
    content = write_sweep("sweep=optuna_lr", "hydra.sweeper.n_trials=12")
    assert (content["method"], content["run_cap"]) == ("bayes", 12)
    lr = content["parameters"]["optimizer.lr"]
    assert lr == {"distribution": "log_uniform_values", "min": 1e-4, "max": 1e-2}
    assert [part for part in content["command"] if part.startswith("hydra")] == ["hydra.mode=RUN"]


def test_early_termination_uses_a_metric_that_is_logged_during_the_run() -> None:
    content = write_sweep("optimizer.lr=1e-3,3e-3", "mode.early_terminate=3")
    assert content["early_terminate"] == {"type": "hyperband", "min_iter": 3}
    assert content["metric"]["name"] == "val/loss"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=1"], "there is nothing to search"),
        (["seed=1,2", "hydra.run.dir=x"], "all trials of the sweep would share that folder"),
        (["seed=1,2", "logger=csv"], "the trials would not log to W&B"),
        (["seed=1,2", "sweep.objective=los"], "type: sweep.objective="),
        (["optimizer.lr=interval(0.2,0.1)"], "its lower end, 0.2, is above its upper end, 0.1"),
        (["optimizer.lr=interval(0,1)", "mode.method=grid"], "a grid needs single values"),
        (["seed=range(100000)", "mode.method=grid"], "W&B would get a list of 99999 values"),
        (["optimizer.rate=interval(0,1)"], "there is no 'optimizer.rate'"),
        (["model=gpt2_nano,gpt2_nan"], "type: model=gpt2_nano"),
        (["optimizer.lr=1e-3,-1"], "1. optimizer.lr=-1\n   it must be above 0\n"),
        (["callbacks@x=default,default2"], "letters, digits and _ . - only"),
        (
            ["seed=1,2", "sweep.objective=mfu", "mode.early_terminate=3"],
            "it is known only at the end of a trial",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_an_invalid_sweep_is_reported_and_not_written(
    capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
) -> None:
    assert message in error_report(capsys, *overrides)
