"""Pipelines of real runs: killed, changed, failing and interrupted ones, beside one that nothing disturbed."""

import json
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from started import Started
from support import ROOT, TINY, execute, read_metrics, write_texts
from sweeping import WATCHER, rows, wait_until

from recipes.config.compose import CONF
from recipes.errors import ConfigError
from recipes.pipeline.command_line import read_command
from recipes.pipeline.pipeline import name_stages, plan_stages
from recipes.pipeline.pipeline import read_state as read_pipeline_file

# learning rates tell the stages apart for the watcher
STAGES = {
    "pretrain": ["optimizer.lr=1e-3", "trainer.max_steps=4"],
    "second": ["optimizer.lr=2e-3", "trainer.max_steps=6"],
    "evaluate": ["mode=evaluate"],
}


class Pipelines:
    """Starts pipelines in one folder, of runs with a checkpoint every second step."""

    def __init__(self, folder: Path, *, environ: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self._environ = dict(environ or {})
        self.started: list[Started] = []
        (folder / "watcher.py").write_text(WATCHER)
        (folder / "own/pipeline").mkdir(parents=True)
        texts = write_texts(folder / "texts")
        every = [*TINY, f"data.path={texts}", "warmup_steps=1", "save_every=2", "eval_every=2"]
        every += ["+callbacks.watcher._target_=watcher.Watcher", f"+callbacks.watcher.folder={folder / 'records'}"]
        longer = {"pretrain": STAGES["pretrain"], "check": ["mode=evaluate"], **STAGES}
        for name, stages in {"tiny": STAGES, "longer": longer}.items():
            (folder / f"own/pipeline/{name}.yaml").write_text(json.dumps({"every_stage": every, "stages": stages}))

    def start(self, folder: str, *overrides: str, pipeline: str = "tiny") -> Started:
        """Start `python train.py pipeline=tiny` in a folder of this name."""
        typed = [f"pipeline={pipeline}", "hydra.searchpath=[own]", f"hydra.run.dir={folder}", "trainer.accelerator=cpu"]
        command = [sys.executable, str(ROOT / "train.py"), *typed, *overrides]
        paths = [self.folder, ROOT / "tests"]
        self.started.append(Started(command, folder=self.folder, paths=paths, environ=self._environ))
        return self.started[-1]

    def run(self, folder: str, *overrides: str, pipeline: str = "tiny") -> tuple[int, str]:
        """Run a pipeline to its end; return the exit code and the output."""
        started = self.start(folder, *overrides, pipeline=pipeline)
        output = started.end()
        assert started.left() == [], output
        return started.process.returncode, output

    def copy(self, of: Path, name: str) -> Path:
        """Return a copy of a pipeline's folder, from which the same command goes on."""
        return Path(shutil.copytree(of, self.folder / name, symlinks=True))


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipelines]:
    pipelines = Pipelines(tmp_path_factory.mktemp("pipelines"))
    yield pipelines
    for started in pipelines.started:
        started.kill()


@pytest.fixture(scope="module")
def undisturbed(pipelines: Pipelines) -> Path:
    """The folder of a pipeline that was not interrupted."""
    exit_code, output = pipelines.run("undisturbed")
    assert exit_code == 0, output
    assert "stage 2 of 3: second, undisturbed/2_second" in output
    return pipelines.folder / "undisturbed"


def read_state(folder: Path) -> Mapping[str, Any]:
    stages: Mapping[str, Any] = json.loads((folder / "pipeline.json").read_text())["stages"]
    return stages


def _read_weights(run: Path) -> dict[str, Any]:
    tensors = [load_file(file) for file in sorted((run / "checkpoints/last").resolve().glob("*.safetensors"))]
    assert tensors
    return {f"{number} {name}": tensor for number, shard in enumerate(tensors) for name, tensor in shard.items()}


def assert_equal_runs(run: Path, other: Path) -> None:
    assert rows(run) == rows(other)
    weights, others = _read_weights(run), _read_weights(other)
    assert weights.keys() == others.keys()
    assert all(weights[name].equal(others[name]) for name in weights)


def test_a_stage_begins_with_the_weights_of_the_one_before_and_is_evaluated(undisturbed: Path) -> None:
    first, second = read_metrics(undisturbed / "1_pretrain"), read_metrics(undisturbed / "2_second")
    assert [len(first), len(second)] == [4, 6]
    assert second[0]["train/loss"] < first[0]["train/loss"] - 0.1, "it does not begin with random weights"
    events = [json.loads(line) for line in (undisturbed / "2_second/events.jsonl").read_text().splitlines()]
    assert str(Path("undisturbed/1_pretrain")) in json.dumps(events)
    evaluated = json.loads((undisturbed / "3_evaluate/summary.json").read_text())["evaluations"]["val"]
    assert evaluated["checkpoint"] == "step_0000006.ckpt"
    assert {stage["state"] for stage in read_state(undisturbed).values()} == {"finished"}


def test_the_page_has_a_row_for_each_stage_and_is_written_again_by_a_report(undisturbed: Path) -> None:
    page = (undisturbed / "report.html").read_text()
    assert "Pipeline tiny" in page
    for name in STAGES:
        assert f'data-v="{name}"' in page
    (undisturbed / "report.html").unlink()
    assert execute("mode=report", f"mode.runs=[{undisturbed}]") == 0
    assert (undisturbed / "report.html").read_text() == page


def test_a_pipeline_killed_in_its_second_stage_goes_on_to_the_same_bits(
    pipelines: Pipelines, undisturbed: Path
) -> None:
    waits = "+stages.second.callbacks.watcher.wait_at_lr=2e-3"
    folder = pipelines.folder / "killed"
    started = pipelines.start("killed", waits)
    wait_until(lambda: (folder / "2_second/waits").exists() or started.process.poll() is not None)
    started.process.send_signal(signal.SIGKILL)
    wait_until(lambda: started.left() == [])
    assert read_state(folder)["second"]["state"] == "running"
    first = (folder / "1_pretrain/summary.json").stat().st_mtime_ns
    (folder / "2_second/was_killed").touch()

    exit_code, output = pipelines.run("killed", waits)
    assert exit_code == 0, output
    assert "stage 1 of 3: pretrain: finished before" in output
    assert "stage 2 of 3: second, resumed" in output
    assert (folder / "1_pretrain/summary.json").stat().st_mtime_ns == first
    assert '"event": "resume", "path": "step_0000002.ckpt"' in (folder / "2_second/events.jsonl").read_text()
    for stage in ("1_pretrain", "2_second"):
        assert_equal_runs(folder / stage, undisturbed / stage)
    assert not list(folder.glob("*_replaced"))


def test_a_changed_stage_runs_again_with_what_depends_on_it_and_nothing_else(
    pipelines: Pipelines, undisturbed: Path
) -> None:
    folder = pipelines.copy(undisturbed, "changed")
    first = (folder / "1_pretrain/summary.json").stat().st_mtime_ns
    exit_code, output = pipelines.run("changed", "stages.second.optimizer.lr=4e-3")
    assert exit_code == 0, output
    assert "stage second has changed (optimizer.lr=4e-3): 2_second is kept as 2_second_replaced" in output
    assert "stage evaluate acts on stage second, which has changed: 3_evaluate is kept as 3_evaluate_replaced" in output
    assert (folder / "1_pretrain/summary.json").stat().st_mtime_ns == first
    assert rows(folder / "2_second_replaced") == rows(undisturbed / "2_second")
    assert rows(folder / "2_second") != rows(undisturbed / "2_second")


def test_a_stage_put_before_others_moves_their_folders_and_runs_alone(pipelines: Pipelines, undisturbed: Path) -> None:
    folder = pipelines.copy(undisturbed, "longer")
    exit_code, output = pipelines.run("longer", pipeline="longer")
    assert exit_code == 0, output
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == [
        "1_pretrain",
        "2_check",
        "3_second",
        "4_evaluate",
    ]
    assert output.count("finished before") == 3
    assert rows(folder / "3_second") == rows(undisturbed / "2_second")


def test_what_only_shows_a_stage_or_says_who_it_is_runs_nothing_again(pipelines: Pipelines, undisturbed: Path) -> None:
    pipelines.copy(undisturbed, "shown")
    shown = ["logger=tensorboard", "tags=[mine]", "~callbacks.report", "~callbacks.progress", "profile_steps=2"]
    exit_code, output = pipelines.run("shown", *shown)
    assert exit_code == 0, output
    assert output.count("finished before") == 3


def test_a_failing_stage_ends_the_pipeline_with_its_exit_code_and_its_log(
    pipelines: Pipelines, undisturbed: Path
) -> None:
    pipelines.copy(undisturbed, "failing")
    exit_code, output = pipelines.run("failing", "+stages.second.callbacks.watcher.raise_at_lr=2e-3")
    assert exit_code == 1, output
    assert "OSError: the disk is gone" in output
    assert "Stage second failed; its log: failing/2_second/job.log; to go on: " in output
    assert "stage 3 of 3" not in output


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [("folder", "../x", "is not in that of the pipeline"), ("cluster_job", "../7", "'../7' is not a job id")],
)
def test_a_damaged_record_of_the_stages_is_one_sentence(tmp_path: Path, key: str, value: str, reason: str) -> None:
    entry = {"folder": "1_a", "overrides": [], "settings": "", "weights": None, "state": "running", key: value}
    (tmp_path / "pipeline.json").write_text(json.dumps({"pipeline": "tiny", "stages": {"a": entry}}))
    with pytest.raises(ConfigError, match=f"{reason}; type rm .*pipeline.json"):
        read_pipeline_file(tmp_path)


def test_ctrl_c_saves_the_stage_and_the_same_command_goes_on(pipelines: Pipelines, undisturbed: Path) -> None:
    folder = pipelines.copy(undisturbed, "interrupted")
    waits = "+stages.second.callbacks.watcher.wait_at_lr=2e-3"
    started = pipelines.start("interrupted", waits)
    wait_until(lambda: (folder / "2_second/waits").exists() or started.process.poll() is not None)
    started.process.send_signal(signal.SIGINT)
    output = started.end()
    assert started.process.returncode == 75, output
    assert "Stage second preempted" in output
    (folder / "2_second/was_killed").touch()
    exit_code, output = pipelines.run("interrupted", waits)
    assert exit_code == 0, output
    assert_equal_runs(folder / "2_second", undisturbed / "2_second")


def test_the_mistakes_of_all_stages_are_reported_together(
    pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(pipelines.folder)  # where the watcher is
    typed = ["pipeline=tiny", f"hydra.searchpath=[{pipelines.folder / 'own'}]"]
    typed += ["stages.pretrain.optimizer.lrr=1", "stages.second.model.num_layers=3", "stages.evaluate.mode.split=tst"]
    command = read_command(typed, config_folder=CONF)
    found = [str(each) for each in name_stages(plan_stages(command.stages, config_folder=CONF, config_name="config"))]
    assert len(found) == 3, found
    assert any(text.startswith("stage pretrain: optimizer.lrr=1") for text in found)
    assert any(text.startswith("stage second: start_from=pretrain model.num_layers=3") for text in found)
    assert any(text.startswith("stage evaluate: mode.split=tst") for text in found)


@pytest.mark.slow
def test_a_changed_judge_reruns_its_export_and_the_policy_that_reads_it_and_nothing_else(pipelines: Pipelines) -> None:
    size = ["model=gpt2_nano", "model.num_layers=1", "tokenizer=bytes", "model.vocab_size=257"]
    length = ["trainer.max_steps=2", "eval_every=2", "save_every=2", "~callbacks.report"]
    judged = ["start_from=sft", "data=synthetic_prompts", "reward=model", "reward.model.pretrained=judged"]
    stages = {
        "sft": ["recipe=sft_demo"],
        "judge": ["recipe=reward_model", "data=synthetic_preferences"],
        "judged": ["mode=export"],
        "ppo": ["recipe=ppo", *judged, "rollout.max_new_tokens=12", "eval_samples=8"],
    }
    file = pipelines.folder / "own/pipeline/judged.yaml"
    file.write_text(json.dumps({"every_stage": [*size, *length], "stages": stages}))
    exit_code, output = pipelines.run("judged", pipeline="judged")
    assert exit_code == 0, output
    assert "reward/model" in read_metrics(pipelines.folder / "judged/4_ppo")[0]
    exit_code, output = pipelines.run("judged", "stages.judge.optimizer.lr=1e-4", pipeline="judged")
    assert exit_code == 0, output
    assert "stage 1 of 4: sft: finished before" in output
    replaced = sorted(path.name for path in (pipelines.folder / "judged").glob("*_replaced"))
    assert replaced == ["2_judge_replaced", "3_judged_replaced", "4_ppo_replaced"]
