"""The notebook of the docs runs from its first cell to its last in one kernel, with its numbers and its pictures."""

import base64
import html
import os
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib.image
import nbclient
import nbformat
import pytest
from support import ROOT

NOTEBOOK = ROOT / "docs/guides/notebook.ipynb"
PICTURE = re.compile(r'src="data:image/([a-z+]+);base64,([^"]+)"')


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Run the notebook in a folder without anything, and return its cells of code."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(NOTEBOOK, nbformat.NO_CONVERT)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
    client.execute(env=os.environ | {"PYTHONPATH": path, "RECIPES_CACHE": str(folder / "cache")})
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def find(cells: list[Any], text: str) -> Any:
    [cell] = [cell for cell in cells if text in cell.source]
    return cell


def read_text(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def read_pages(cell: Any) -> list[str]:
    return [output.data["text/html"] for output in cell.outputs if "text/html" in output.get("data", {})]


def test_it_is_shipped_without_outputs() -> None:
    shipped = nbformat.read(NOTEBOOK, nbformat.NO_CONVERT)
    nbformat.validate(shipped)
    code = [cell for cell in shipped.cells if cell.cell_type == "code"]
    assert len(code) >= 8
    assert [(cell.outputs, cell.execution_count) for cell in code] == [([], None)] * len(code)


def test_nothing_is_written_to_the_standard_error(cells: list[Any]) -> None:
    errors = [output for cell in cells for output in cell.outputs if output.get("name") == "stderr"]
    assert errors == []


def test_the_loss_falls_and_the_run_goes_on_after_a_resume(cells: list[Any]) -> None:
    found = re.fullmatch(
        r"60 rows, loss (\d\.\d\d) to (\d\.\d\d), val loss (\d\.\d\d)\n", read_text(find(cells, "losses ="))
    )
    assert found is not None
    first, last, val = map(float, found.groups())
    assert abs(first - 5.5) < 0.2, "257 bytes, none of them likelier: 5.55 nats"
    assert last < 3.5
    assert val < 3.5
    more = read_text(find(cells, "trainer.max_steps=80"))
    assert "at step 60\n" in more
    assert "\n80 steps, val loss" in more


def test_the_model_is_loaded_with_the_trained_weights(cells: list[Any]) -> None:
    found = re.fullmatch(r"(\d+\.\d\d) as it is, (\d+\.\d\d) in capitals\n", read_text(find(cells, "done.load()")))
    assert found is not None
    as_it_is, in_capitals = map(float, found.groups())
    assert as_it_is + 1 < in_capitals, "there are few capitals in what it was trained on"


def test_a_mistake_says_what_to_type(cells: list[Any]) -> None:
    assert read_text(find(cells, "modle=gpt2")).endswith("   type: model=gpt2\n")


def test_a_plan_is_its_page(cells: list[Any]) -> None:
    [page] = read_pages(find(cells, "lr.plan("))
    assert "8 x h100" in html.unescape(page)


def test_training_draws_one_bar_and_one_chart_in_place_and_no_line_per_step(cells: list[Any]) -> None:
    cell = find(cells, "done = run.fit()")
    [shown] = [output.data for output in cell.outputs if output.output_type == "display_data"]
    assert re.match(r"step 60/60  ━{40}  loss \d\.\d{4}  val \d\.\d{4}  ", shown["text/plain"])
    [(kind, data)] = PICTURE.findall(shown["text/html"])
    assert kind == "svg+xml"
    lines = [
        line.attrib["points"]
        for line in ElementTree.fromstring(base64.b64decode(data)).iter()
        if "points" in line.attrib
    ]
    train, val = [[tuple(map(float, place.split(","))) for place in line.split()] for line in lines]
    assert (len(train), len(val)) == (60, 3)
    assert train[0][1] < train[-1][1], "y counts downwards"
    printed = read_text(cell)
    assert "step" not in printed.partition("batch: ")[2].partition("\n")[2].partition("Finished: 60 steps")[0]
    # what the bar shows last is what the run says last
    val_loss = re.search(r"val loss (\d\.\d{4})", printed.rpartition("Finished")[2])
    assert val_loss is not None
    assert f"val {val_loss[1]}" in shown["text/plain"]


def test_a_run_is_its_curves_and_its_report(cells: list[Any], tmp_path: Path) -> None:
    [shown] = read_pages(next(cell for cell in cells if cell.source == "done"))
    [(kind, data)] = PICTURE.findall(shown)
    assert kind == "png"
    (tmp_path / "curves.png").write_bytes(base64.b64decode(data))
    pixels = matplotlib.image.imread(tmp_path / "curves.png")  # [height, width, RGBA]
    assert min(pixels.shape[:2]) > 500
    assert pixels[..., :3].std() > 0.02, "not one colour"
    [page] = re.findall(r'srcdoc="([^"]*)"', shown)
    assert "train/loss" in html.unescape(page)


NET = """%%writefile edited_net.py
import lightning.pytorch as lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(2, (64,))), 8)
"""
WORDS = ("task=lightning", "task.module._target_=edited_net.Net", "data.module=null", "trainer.max_steps=2")
FIT = f"lr.compose({WORDS}).fit()"
LATE = "%load_ext autoreload\n%autoreload 2"


def test_a_class_edited_between_two_runs_is_the_new_one_and_a_plan_says_how_far_it_is(tmp_path: Path) -> None:
    edited = [NET.replace("Linear(8, 2)", f"Linear(8, {size})") for size in (5, 7)]
    plan = 'lr.plan("recipe=ddp_bf16", "model=gpt2_nano", "plan.hardware=h100x8");'
    sources = ["import lightning_recipes as lr", NET, FIT, edited[0], LATE, FIT, edited[1], FIT, plan]
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, sources)))
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    shown = []
    process = client.process_message

    def record(message: Any, *of_cell: Any) -> Any:
        if message["msg_type"] == "update_display_data":
            shown.append(message["content"]["data"]["text/plain"])
        return process(message, *of_cell)

    client.process_message = record
    path = os.pathsep.join([str(ROOT), str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    client.execute(env=os.environ | {"PYTHONPATH": path})
    fits = [cell for cell in notebook.cells if cell.source == FIT]
    numbers = [re.findall(r"model: Net, (\d+) parameters", read_text(cell)) for cell in fits]
    assert numbers == [["18"], ["45"], ["63"]]
    assert "imported again: edited_net" in read_text(fits[1]), "autoreload was switched on after the edit"
    of_plan = [line for line in shown if line.startswith("plan: plan ")]
    assert re.match(r"plan: plan 2: .* strategy=ddp .*  0:\d\d$", of_plan[0])
    assert len(of_plan) >= 2
    assert shown[-1] == ""
