"""The wheel in a third-party project: an environment of its own, beside a folder named `callbacks`."""

import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from email.parser import Parser
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support import ROOT

STRANGER = """
import sys

import lightning_recipes.recipes  # before Lightning, for the torchvision of the tests, as in conftest.py
for name in [name for name in sys.modules if "recipes" in name.split(".")]:
    del sys.modules[name]  # and nothing else of the recipes from here on
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

# from here on everything else of the extras is out of reach
ABSENT = {"hydra", "omegaconf", "wandb", "matplotlib", "tokenizers", "safetensors", "xxhash", "deepspeed", "rich"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
for name in [name for name in sys.modules if name.partition(".")[0] in ABSENT]:
    del sys.modules[name]

import callbacks  # the user's own
assert callbacks.OWNER == "user"
from lightning_recipes.callbacks import (
    GradNormMonitor, LossSpikeRollback, MemoryMonitor, ProgressLine, RunReport, SpeedMonitor
)

class Terminal:
    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def isatty(self):
        return True

sys.stdout, sys.stderr = Terminal(sys.stdout), Terminal(sys.stderr)

class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layer(inputs), targets)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

inputs = torch.randn(64, 4)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
trainer = Trainer(
    max_steps=8, accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False,
    log_every_n_steps=1,
    callbacks=[GradNormMonitor(), MemoryMonitor(), SpeedMonitor(), RunReport(), ProgressLine()],
)
trainer.fit(Regression(), loader)
assert trainer.callback_metrics["grad/norm"] > 0
print("trained", trainer.global_step, "steps; recipes" if "recipes" in sys.modules else "steps")
"""

FROM_PYTHON = """
import callbacks
import lightning_recipes.recipes  # as above
import lightning_recipes as lr
from lightning_recipes.callbacks import GradNormMonitor

run = lr.compose(
    "data=random_tokens", "model.vocab_size=64", "model.max_seq_len=16", "model.num_layers=1", "model.num_heads=2",
    "model.hidden_size=16", "trainer.max_steps=2", "trainer.accelerator=cpu", "callbacks=[grad_norm]",
    "hydra.run.dir=run",
).fit()
model = lr.load("run")
import lightning_recipes.recipes.model.gpt2
import recipes.model.gpt2

assert callbacks.OWNER == "user" and GradNormMonitor.__module__.startswith("lightning_recipes.callbacks.")
assert lightning_recipes.recipes.model.gpt2 is recipes.model.gpt2
assert isinstance(model, recipes.model.gpt2.GPT2) and model.tokenizer is None
assert all("grad/norm" in row for row in run.rows)
print(f"loaded {sum(weight.numel() for weight in model.parameters()):,} weights after {run.summary['steps']} steps")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of what git would hand out, so that nothing is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if name.split("/")[0] in ("tests", "docs", "benchmarks") or not (ROOT / name).is_file():
            continue
        copy = folder / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run([*command, str(folder / "source")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment that holds the wheel; torch and Lightning come from the one that runs the tests."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(packages), str(wheel)], check=True)
    # appended to the path, and .pth files in it are not read: the editable install stays out of sight
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def test_it_needs_torch_lightning_and_a_dependency_of_torch_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    required = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    assert {r.name for r in required if r.marker is None} == {"torch", "lightning", "jinja2"}
    assert "jinja2" in {Requirement(text).name for text in requires("torch") or []}


def test_old_torch_and_lightning_are_accepted_and_versions_with_known_holes_are_not() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    alone, extras = project["dependencies"], project["optional-dependencies"]
    accepted = {each.name: each.specifier for each in map(Requirement, alone)}
    assert {"2.6.0", "2.13.0"} <= set(accepted["torch"].filter(["2.5.1", "2.6.0", "2.13.0"]))
    # the two releases of Lightning that stole credentials: GHSA-w37p-236h-pfx3
    released = ["2.5.0", "2.6.1", "2.6.2", "2.6.3", "2.6.6"]
    assert list(accepted["lightning"].filter(released)) == ["2.5.0", "2.6.1", "2.6.6"]
    recipes = {each.name: each.specifier for each in map(Requirement, [*extras["recipes"], *extras["huggingface"]])}
    assert list(recipes["lightning"].filter(released)) == ["2.6.6"]
    # Hydra before 1.3.8 runs commands that a config names: GHSA-37p2-j732-x8pj
    assert list(recipes["hydra-core"].filter(["1.3.2", "1.3.7", "1.3.8"])) == ["1.3.8"]
    assert list(recipes["transformers"].filter(["4.57.0", "5.0.0"])) == ["5.0.0"]


def test_it_installs_one_name_and_no_top_level_recipes_or_callbacks(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"lightning_recipes"}
    assert "lightning_recipes/conf/config.yaml" in names
    report = "lightning_recipes/callbacks/report"
    files = ["assets/charts.js", "assets/uPlot.js", "assets/uPlot.css", "assets/uPlot.LICENSE", "templates/run.jinja"]
    assert {f"{report}/{name}" for name in files} <= set(names)
    assert {"lightning_recipes/py.typed", "lightning_recipes/train.py"} <= set(names)
    shipped = "lightning_recipes/recipes/model/shipped"
    assert {f"{shipped}/{name}/config.json" for name in ("clip_nano", "llama_nano")} <= set(names)
    assert "lightning_recipes/setup.py" not in names
    template = ROOT / "recipes/project/template"
    files = {str(file.relative_to(ROOT)) for file in template.rglob("*") if file.is_file() and file.suffix != ".pyc"}
    assert {f"lightning_recipes/{name}" for name in files} <= set(names)


def test_another_project_trains_with_our_callbacks_beside_a_folder_of_the_same_name(
    python: Path, tmp_path: Path
) -> None:
    (tmp_path / "callbacks").mkdir()
    (tmp_path / "callbacks" / "__init__.py").write_text('OWNER = "user"\n')
    (tmp_path / "main.py").write_text(STRANGER)
    done = subprocess.run([python, "main.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "trained 8 steps"
    # neither rich nor matplotlib: lines on a terminal, and a page without a picture
    assert done.stderr.count("no progress bar: it needs rich; type: pip install rich") == 1
    assert "step 8/8  loss" in done.stderr
    assert done.stderr.count("no curves.png: it needs matplotlib; type: pip install matplotlib") == 1
    assert "Traceback" not in done.stderr
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert not (tmp_path / "curves.png").exists()


def test_python_trains_and_loads_beside_a_module_named_callbacks(python: Path, tmp_path: Path) -> None:
    (tmp_path / "callbacks.py").write_text('OWNER = "user"\n')
    (tmp_path / "main.py").write_text(FROM_PYTHON)
    done = subprocess.run([python, "main.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "loaded 4,592 weights after 2 steps"


def test_the_installed_command_runs_a_recipe_beside_a_folder_of_the_same_name(python: Path, tmp_path: Path) -> None:
    (tmp_path / "callbacks").mkdir()
    (tmp_path / "callbacks" / "__init__.py").write_text('raise ImportError("the user\'s")\n')
    command = "from lightning_recipes.recipes.entry.installed import main; main()"
    overrides = [
        "data=random_tokens", "model.vocab_size=64", "model.max_seq_len=16", "model.num_layers=1",
        "model.num_heads=2", "model.hidden_size=16", "trainer.max_steps=2", "trainer.accelerator=cpu",
        "callbacks=[grad_norm]", "hydra.run.dir=run",
    ]  # fmt: skip
    done = subprocess.run(
        [python, "-c", command, *overrides],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "metrics.csv").is_file()


def test_the_installed_command_writes_a_project_that_trains_and_loads(python: Path, tmp_path: Path) -> None:
    main = "from lightning_recipes.recipes.entry.installed import main; main()"
    load = "import lightning_recipes as lr; print(type(lr.load('logs/mine')).__module__)"
    printed = []
    for folder, *words in (
        (tmp_path, "-c", main, "new", "my_net"),
        (
            tmp_path / "my_net",
            "-c",
            main,
            "recipe=first",
            "trainer.max_steps=4",
            "eval_every=4",
            "hydra.run.dir=logs/mine",
        ),
        (tmp_path / "my_net", "-c", load),
        # its classes alone, before anything of ours has made the name `recipes`
        (tmp_path / "my_net", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "one_logit_per_class"),
    ):
        done = subprocess.run([python, *words], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        printed.append(done.stdout)
    assert printed[2] == "my_net.model\n"
    assert printed[3].splitlines()[-1].startswith("1 passed")
