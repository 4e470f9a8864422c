"""MLflow, Aim and Comet, each with its own store on this machine: a run that rolled back, was killed and went on.

A service that is not installed is skipped; in CI, that is all but MLflow.
"""

import json
import os
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import ROOT, TINY, read_metrics, run_train, write_texts

Values = dict[str, dict[int, list[float]]]  # metric -> step -> its values in the order in which the service got them

# the module that a service needs
SERVICES = {"mlflow": "mlflow", "aim": "aim", "comet": "comet_ml"}
RESUMED_AT = 40
REPEATED = {*range(31, 48)}  # trained again after the rollback from 46 to 30, or after the resume at 40


def read_mlflow(folder: Path) -> Values:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    [experiment] = [found for found in client.search_experiments() if found.name == "lightning-recipes"]
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["optimizer/lr"] == "0.001"
    found: Values = {}
    for name in run.data.metrics:
        points = client.get_metric_history(run.info.run_id, name)
        for point in sorted(points, key=lambda point: point.timestamp):
            found.setdefault(name, {}).setdefault(point.step, []).append(point.value)
    return found


def read_aim(folder: Path) -> Values:
    from aim import Repo
    from aim.sdk.index_manager import RepoIndexManager

    [run_hash] = [path.name for path in (folder / ".aim/meta/chunks").iterdir()]
    # what `aim up` does all the time, and `aim storage reindex` once: readers see what is indexed
    RepoIndexManager.get_index_manager(Repo(str(folder))).index(run_hash)
    run = Repo(str(folder)).get_run(run_hash)
    assert run["hparams", "optimizer", "lr"] == 0.001
    assert run.end_time is not None
    found: Values = {}
    for metric in run.metrics():
        steps, (values, _, _) = metric.data.numpy()
        if not metric.name.startswith("__system__"):
            found[metric.name] = {step: [value] for step, value in zip(steps.tolist(), values.tolist(), strict=True)}
    return found


def read_comet(folder: Path) -> Values:
    found: Values = {}
    [path] = (folder / "comet").glob("*.zip")
    with zipfile.ZipFile(path) as archive:
        experiment = json.loads(archive.read("experiment.json"))
        messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
    runs = json.loads((folder / "run/logger_runs.json").read_text())
    assert experiment["offline_id"] == runs["logger.comet"]["run"]
    for message in (message["payload"]["metric"] for message in messages if message["type"] == "metric_msg"):
        if not message["metricName"].startswith(("sys.", "process duration")):
            values = found.setdefault(message["metricName"], {}).setdefault(message["step"], [])
            values.append(message["metricValue"])
    return found


READERS: dict[str, Callable[[Path], Values]] = {"mlflow": read_mlflow, "aim": read_aim, "comet": read_comet}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with all services that are installed, from whose parent it was started."""
    folder = tmp_path_factory.mktemp("services")
    installed = [name for name, module in SERVICES.items() if find_spec(module)]
    if not installed:
        pytest.skip("none of the services is installed")
    typed = [text for text in TINY if not text.startswith("~")]
    typed += [f"data.path={write_texts(folder / 'texts')}", "hydra.run.dir=run", f"logger=[{','.join(installed)}]"]
    typed += ["callbacks=[grad_norm,loss_scale,loss_spike]", "callbacks.loss_spike.window=32"]
    typed += ["callbacks.loss_spike.warmup_steps=16", "callbacks.loss_spike.snapshot_every=10"]
    typed += ["callbacks.loss_spike.quarantine_steps=10", "scheduler=constant", "optimizer.lr=1e-3", "seed=3"]
    typed += [
        "save_every=10",
        "eval_every=20",
        "log_every=2",
        "checkpoint.async_save=false",
        "trainer.max_steps=60",
        "resume=auto",
    ]
    faults = ["+callbacks.fault={_target_: faults.FaultAt, kind: weight, step: 36}"]
    faults += ["+callbacks.kill={_target_: recording_logger.KillOnceSent, step: 47, sent: 40}"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMET_START_ONLINE", "0")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        killed = run_train([*typed, *faults], folder=folder, python_path=path)
        done = run_train(typed, folder=folder, python_path=path)
    assert killed.returncode == -9, killed.stdout + killed.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in (folder / "run/events.jsonl").open()]
    assert [(e["event"], e["step"]) for e in events if e["event"] in ("rollback", "resume")] == [
        ("rollback", 30),
        ("resume", RESUMED_AT),
    ]
    return folder / "run"


@pytest.mark.parametrize("service", SERVICES)
def test_the_rows_of_a_service_are_those_of_metrics_csv_after_a_rollback_a_kill_and_a_resume(
    service: str, run_folder: Path
) -> None:
    pytest.importorskip(SERVICES[service])
    found = READERS[service](run_folder.parent)
    rows = {int(row.pop("step")): row for row in read_metrics(run_folder)}
    assert {*range(2, 61, 2)} <= {*rows}
    if service == "comet":  # offline, it writes its archive at the end of a process: a kill leaves none
        rows = {step: row for step, row in rows.items() if step > RESUMED_AT}
    assert {*found} == {name for row in rows.values() for name in row}
    for name, of_steps in found.items():
        expected = {step: row[name] for step, row in rows.items() if name in row}
        newest = {step: of_steps[step][-1] for step in expected}
        assert newest == pytest.approx(expected, rel=1e-6, abs=0, nan_ok=True), name
        # what was measured the first time alone, such as a gap in time, is all that it has beyond the file
        assert {*of_steps} - {*expected} <= REPEATED, name
    several = {step for step, values in found["train/loss"].items() if len(values) > 1}
    if service == "mlflow":  # it deletes nothing; Aim has one value of a step
        assert {32, 34, 42} <= several <= REPEATED
    else:
        assert several == set()
