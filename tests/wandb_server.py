"""The part of a W&B server that a run needs: it stores the rows sent to it and reports its data for a run."""

import contextlib
import gzip
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "0123456789" * 4  # W&B checks the length


class Runs:
    """Data stored for each run, by id: rows, summary and exit codes."""

    def __init__(self) -> None:
        self.rows: dict[str, list[str]] = {}
        self.summary: dict[str, str] = {}
        self.exit_codes: dict[str, list[int]] = {}
        self.alerts: list[str] = []
        self.base_url = ""

    def steps(self, run_id: str) -> list[tuple[int, int]]:
        """Return W&B's own step count and the optimizer step of each row."""
        rows = [json.loads(row) for row in self.rows[run_id]]
        return [(row["_step"], row["trainer/global_step"]) for row in rows]

    def stream(self, run_id: str, sent: dict[str, Any]) -> None:
        """Store rows at the offset given by the sender, and the latest summary."""
        for name, chunk in (sent.get("files") or {}).items():
            if name == "wandb-history.jsonl":
                self.rows[run_id][chunk["offset"] :] = chunk["content"]
            elif name == "wandb-summary.json":
                self.summary[run_id] = chunk["content"][-1]
        if sent.get("complete"):
            self.exit_codes.setdefault(run_id, []).append(sent["exitcode"])

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Answer the GraphQL queries that open a run.

        Raises:
            LookupError: The query is of another kind.
        """
        name = str(variables.get("name"))
        if "mutation UpsertBucket" in query:
            is_new = name not in self.rows
            self.rows.setdefault(name, [])
            project = {"id": "p", "name": variables["project"], "entity": {"id": "e", "name": "us"}}
            rows = len(self.rows[name])
            bucket = {"id": name, "name": name, "displayName": name, "historyLineCount": rows}
            return {"upsertBucket": {"bucket": bucket | {"project": project}, "inserted": is_new}}
        if "mutation NotifyScriptableRunAlert" in query:
            self.alerts.append(str(variables["title"]))
            return {"notifyScriptableRunAlert": {"success": True}}
        if "mutation CreateRunFiles" in query:
            return {"createRunFiles": {"runID": name, "uploadHeaders": [], "files": []}}
        if "query RunResumeStatus" not in query:
            raise LookupError(query.split("(")[0])
        if name not in self.rows:
            return {"model": {"bucket": None}}
        newest = self.rows[name][-1] if self.rows[name] else "{}"
        counts = {"historyLineCount": len(self.rows[name]), "eventsLineCount": 0, "logLineCount": 0}
        texts = {"historyTail": json.dumps([newest]), "eventsTail": '["{}"]', "config": "{}"}
        texts |= {"summaryMetrics": self.summary.get(name, "{}"), "wandbConfig": '{"t": 1}'}
        bucket = {"id": name, "name": name, "displayName": name, "tags": []} | counts | texts
        return {"model": {"id": "p", "name": "p", "entity": {"name": "us"}, "bucket": bucket}}


@contextlib.contextmanager
def serving() -> Iterator[Runs]:
    """Serve on a free port and yield the stored runs."""
    runs = Runs()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"] or 0))
            if self.headers["Content-Encoding"] == "gzip":
                content = gzip.decompress(content)
            if streamed := re.search(r"/(\w+)/file_stream$", self.path):
                runs.stream(streamed.group(1), json.loads(content))
                self._send({})
            elif self.path == "/graphql":
                request = json.loads(content)
                try:
                    data = runs.answer(request["query"], request.get("variables") or {})
                except LookupError as error:
                    self._send({"errors": [{"message": f"no answer to {error}"}]})
                else:
                    self._send({"data": data})
            else:
                self._send({})  # W&B's own telemetry

        def _send(self, answer: dict[str, Any]) -> None:
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        runs.base_url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield runs
        server.shutdown()
