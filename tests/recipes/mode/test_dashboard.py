"""The panels of conf/dashboard/ as a W&B workspace: every panel in its section; what is sent, and when nothing is."""

import gzip
import json
import re
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import ROOT

from recipes.config import compose_and_check
from recipes.config.check.dashboard import KINDS, check_dashboards
from recipes.config.overrides import parse_override
from recipes.config.resolved import ResolvedRun
from recipes.errors import ConfigError
from recipes.mode.dashboard import STEP, dashboard, make_workspace, names_pattern

SPEC = yaml.safe_load((ROOT / "conf" / "dashboard" / "default.yaml").read_text())["sections"]
PANELS = [panel for section in SPEC for panel in section["panels"]]
VIEW_TYPES = {
    "Run History Line Plot": "line",
    "Bar Chart": "bar",
    "Parallel Coordinates Plot": "parallel",
}


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb_workspaces")
    for name in ("API_KEY", "IDENTITY_TOKEN_FILE", "MODE", "ENTITY", "PROJECT", "BASE_URL"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))


@pytest.fixture
def _no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(socket.socket):
        """Allow socket pairs inside this process, which wandb's event loop uses; fail on any other."""

        def __init__(self, family: int = -1, *args: Any, **kwargs: Any) -> None:
            assert family == socket.AF_UNIX, "a socket was opened"
            super().__init__(family, *args, **kwargs)

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a host name was looked up")

    monkeypatch.setattr(socket, "socket", Local)
    monkeypatch.setattr(socket, "getaddrinfo", fail)


def composed(run_folder: Path) -> ResolvedRun:
    return ResolvedRun(config={}, choices={}, run_folder=run_folder, overrides=[])


def run_dashboard(run_folder: Path, **settings: Any) -> int:
    default = {"entity": None, "project": "p", "title": None, "path": None}
    return dashboard(composed(run_folder), **({"sections": SPEC} | default | settings))


def parse_panel(panel: dict[str, Any]) -> dict[str, Any]:
    """Return a panel of the JSON in the form of the spec."""
    config, kind = panel["config"], VIEW_TYPES[panel["viewType"]]
    found = {"title": config["chartTitle"], "kind": kind}
    if kind == "parallel":
        columns = [column["accessor"].partition(":") for column in config["columns"]]
        found["metrics"] = [name for where, _, name in columns if where == "summary"]
        found["parameters"] = [name.replace(".value", "", 1) for where, _, name in columns if where == "config"]
        return found
    if kind == "line":
        assert config["xAxis"] == STEP
        found["log_scale"] = "yLogScale" in config
    if "metricRegex" in config:
        assert config["useMetricRegex"] is True
        assert config["metrics"] == []
        found["pattern"] = config["metricRegex"]
    else:
        found["metrics"] = config["metrics"]
    return found


def expected_panel(panel: dict[str, Any]) -> dict[str, Any]:
    """Return a panel of the spec with its defaults filled in."""
    kind = panel["kind"] if "kind" in panel else "line"
    found = {"title": panel["title"], "kind": kind}
    if any("*" in name for name in panel["metrics"]):
        found["pattern"] = names_pattern(panel["metrics"])
    else:
        found["metrics"] = panel["metrics"]
    if kind == "parallel":
        found["parameters"] = panel["parameters"]
    if kind == "line":
        found["log_scale"] = "log_scale" in panel and panel["log_scale"]
    return found


def parse_sections(spec: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    bank = spec["section"]["panelBankConfig"]
    assert spec["section"]["settings"]["xAxis"] == STEP
    assert spec["section"]["settings"]["shouldAutoGeneratePanels"] is False
    assert all(section["localPanelSettings"]["xAxis"] == STEP for section in bank["sections"])
    return [(section["name"], [parse_panel(panel) for panel in section["panels"]]) for section in bank["sections"]]


IN_ORDER = [(section["title"], [expected_panel(panel) for panel in section["panels"]]) for section in SPEC]


@pytest.mark.usefixtures("_no_socket")
def test_without_a_key_every_panel_is_in_the_json_under_its_section_and_no_socket_is_opened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert run_dashboard(tmp_path) == 0
    view = json.loads((tmp_path / "dashboard.json").read_text())
    assert parse_sections(view["spec"]) == IN_ORDER
    assert (view["project"], view["displayName"]) == ("p", "p")
    assert len(caplog.messages) == 1
    assert f"there is no W&B key; the workspace's JSON is in {tmp_path}" in caplog.messages[0]
    assert "`wandb login`" in caplog.messages[0]


@pytest.mark.usefixtures("_no_socket")
def test_offline_the_json_is_written_even_with_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_MODE", "offline")
    # without a run folder the JSON is written to its parent
    assert run_dashboard(tmp_path / "runs" / "new") == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["dashboard.json"]
    assert caplog.messages[0].startswith("Nothing was sent: WANDB_MODE=offline")


@pytest.mark.usefixtures("_no_socket")
def test_with_a_path_the_json_is_written_there_and_nothing_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    file = tmp_path / "a" / "b.json"
    assert run_dashboard(tmp_path, path=str(file), entity="us", title="ours") == 0
    view = json.loads(file.read_text())
    assert (view["entity"], view["displayName"]) == ("us", "ours")
    assert parse_sections(view["spec"]) == IN_ORDER


def test_the_user_is_never_prompted_for_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            raise AssertionError("prompted")

        def write(self, text: str) -> int:
            return len(text)

        def flush(self) -> None: ...

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert run_dashboard(tmp_path) == 0
    assert sys.stdin is terminal


class Server(BaseHTTPRequestHandler):
    """Answer like W&B for a valid key; record the queries."""

    queries: list[dict[str, Any]]
    knows_project: bool

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer: dict[str, Any] = {}
        if self.path == "/graphql":
            zipped = self.headers["Content-Encoding"] == "gzip"
            query = json.loads(gzip.decompress(body) if zipped else body)
            self.queries.append(query)
            answer = self._answer(query)
        encoded = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def _answer(self, query: dict[str, Any]) -> dict[str, Any]:
        if "upsertView" not in query["query"]:
            viewer = {"id": "V", "entity": "us", "username": "us", "email": "", "flags": "{}"}
            lists = {"teams": {"edges": []}, "apiKeys": {"edges": []}}
            return {"data": {"viewer": viewer | lists | {"admin": False}}}
        if not self.knows_project:
            return {"errors": [{"message": "project not found"}]}
        view = {"id": "1", "name": query["variables"]["name"]}
        return {"data": {"upsertView": {"view": view, "inserted": True}}}

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Server]]:
    handler = type("Handler", (Server,), {"queries": [], "knows_project": True})
    listening = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{listening.server_port}")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    yield handler
    listening.shutdown()
    thread.join()
    listening.server_close()


def test_with_a_key_the_workspace_is_saved_under_the_default_entity_and_its_address_is_shown(
    server: type[Server], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert run_dashboard(tmp_path) == 0
    [saved] = [query["variables"] for query in server.queries if "upsertView" in query["query"]]
    assert (saved["entityName"], saved["projectName"]) == ("us", "p")
    assert parse_sections(json.loads(saved["spec"])) == IN_ORDER
    assert re.search(r"The workspace is at http://127.0.0.1:\d+/us/p\?nw=\w+$", caplog.messages[-1])
    assert not (tmp_path / "dashboard.json").exists()


def test_a_workspace_that_wandb_rejects_is_an_error_with_its_message(server: type[Server], tmp_path: Path) -> None:
    server.knows_project = False
    with pytest.raises(ConfigError, match="mode.project=p: W&B rejects .*project not found"):
        run_dashboard(tmp_path)


@pytest.mark.parametrize(
    ("panel", "message"),
    [
        ("text", "dashboard.sections[0].panels[0]=text: it needs title, metrics, kind"),
        (
            {"metrics": ["lr"]},
            "no dashboard.sections[0].panels[0].title: it needs title and metrics",
        ),
        ({"title": "a", "metrics": []}, "panels[0].metrics=[]: it needs a list of names"),
        ({"title": "a", "metrics": "lr"}, "panels[0].metrics=lr: it must be a list; type"),
        ({"title": "a", "metrics": ["lr"], "colour": 1}, "colour=1: there is no key 'colour'"),
        ({"title": "a", "metrics": ["lr"], "kind": "pie"}, "kind=pie: the kinds are line, bar"),
        ({"title": "a", "metrics": ["lr"], "kind": "parallel"}, "needs parameters; type"),
        ({"title": "a", "metrics": ["lr"], "parameters": ["seed"]}, "has no parameters; type"),
        ({"title": "a", "metrics": ["lr/*"], "kind": "bar"}, "a bar panel cannot use patterns"),
    ],
)
def test_an_invalid_panel_is_an_error_with_three_clauses(panel: Any, message: str) -> None:
    sections = [{"title": "s", "panels": [panel]}]
    with pytest.raises(ConfigError) as caught:
        make_workspace(sections, entity="", project="p", title="t")
    assert message in str(caught.value)
    # a page is written at the end of a run: the check finds it before
    config = {"dashboard": {"sections": sections}, "callbacks": {"report": {"dashboard": sections}}}
    is_only_of_wandb = "needs parameters" in message or "patterns" in message
    assert list(map(str, check_dashboards(config))) == ([] if is_only_of_wandb else [str(caught.value)])


@pytest.mark.parametrize(("title", "without"), [("lr=3e-4, <b>", "lr3e-4, b"), ("run 🙂", "run"), ("🙂", None)])
def test_a_title_that_no_workspace_can_have_is_an_error_with_one_that_it_can(title: str, without: str | None) -> None:
    with pytest.raises(ConfigError, match="no emoji or other symbol") as raised:
        make_workspace([], entity="", project="p", title=title)
    assert raised.value.setting == f"mode.title={title}"
    if without is None:
        assert raised.value.fix == "mode.title=<text>"
        return
    [override] = shlex.split(raised.value.fix)
    assert parse_override(override).value() == without
    assert make_workspace([], entity="", project="p", title=without).name == without


@pytest.mark.parametrize("sections", [[3], [None], "x", 3, {}, [{"title": "x"}], [{"title": "x", "panels": [{}]}]])
def test_sections_of_another_form_are_found_where_they_are_typed(sections: Any) -> None:
    default: list[Any] = []
    config = {"dashboard": {"sections": default}, "mode": {"dashboard": sections}, "sweep": {"dashboard": default}}
    [mistake] = check_dashboards(config)
    assert mistake.setting.removeprefix("no ").startswith("mode.dashboard")
    assert list(check_dashboards({"callbacks": {"report": {"dashboard": None}}})) == []


def test_a_missing_package_is_an_error_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("wandb_workspaces")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    with pytest.raises(ConfigError) as caught:
        run_dashboard(tmp_path)
    assert str(caught.value) == (
        "mode=dashboard: it needs the package wandb_workspaces, which is not installed;"
        " type pip install -e '.[dashboard]'"
    )


def test_a_star_matches_any_characters_and_a_dot_only_a_dot() -> None:
    pattern = re.compile(names_pattern(["lr", "lr/*", "a.b"]))
    names = ["lr", "lr/no_decay", "lr_scale", "train/lr", "a.b", "a-b"]
    assert [name for name in names if pattern.match(name)] == ["lr", "lr/no_decay", "a.b"]


def test_the_mode_composes_with_the_sections_of_the_chosen_dashboard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    composed, mistakes = compose_and_check(["mode=dashboard"])
    assert composed is not None
    assert [str(mistake) for mistake in mistakes] == []
    mode = composed.config["mode"]
    assert mode["sections"] == SPEC
    assert (mode["entity"], mode["project"]) == (None, "ours")


def test_the_parameters_of_the_sweep_panel_are_keys_of_every_config() -> None:
    [parallel] = [panel for panel in PANELS if "parameters" in panel]
    composed, _ = compose_and_check([])
    assert composed is not None
    for key in parallel["parameters"]:
        value: Any = composed.config
        for part in key.split("."):
            value = value[part]
        assert value is not None, key
    assert {panel["kind"] for panel in PANELS if "kind" in panel} | {"line"} == set(KINDS)
