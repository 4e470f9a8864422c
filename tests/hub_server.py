"""A hub of models on this machine: it creates repositories, takes commits, and remembers who asked for what."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """What the server was asked and what it holds.

    Attributes:
        address: Of the server.
        refuses: Status that it answers a new repository with; None: it creates it.
        repositories: Name -> files by name.
        created: Name -> "private" or "public", of each repository that was asked for.
        tokens: What requests were authorized with.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.refuses: int | None = None
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.created: dict[str, str] = {}
        self.tokens: set[str | None] = set()


def _answer(hub: Hub, path: str, body: bytes) -> tuple[int, Any]:
    if path == "/api/repos/create":
        asked = json.loads(body)
        name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
        hub.created[name] = asked.get("visibility", "private" if asked.get("private") else "public")
        if hub.refuses is not None:
            return hub.refuses, {"error": "no"}
        hub.repositories.setdefault(name, {})
        return 200, {"url": f"{hub.address}/{name}", "name": name}
    if path == "/api/validate-yaml":
        return 200, {"errors": [], "warnings": []}
    name, _, rest = path.removeprefix("/api/models/").partition("/")
    own, _, rest = rest.partition("/")
    if f"{name}/{own}" not in hub.repositories:
        return 404, {"error": "Repository not found"}
    files = hub.repositories[f"{name}/{own}"]
    if rest.startswith("preupload"):
        sent = json.loads(body)["files"]
        return 200, {"files": [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in sent]}
    if rest.startswith("tree"):
        return 200, [{"type": "file", "path": each, "oid": "0", "size": len(files[each])} for each in files]
    if rest.startswith("commit"):
        for line in body.decode().splitlines():
            change = json.loads(line)
            if change["key"] == "file":
                files[change["value"]["path"]] = base64.b64decode(change["value"]["content"])
            elif change["key"] == "deletedFile":
                del files[change["value"]["path"]]
        return 200, {"commitOid": "1" * 40, "commitUrl": f"{hub.address}/{name}/{own}/commit/{'1' * 40}"}
    return 200, {"id": f"{name}/{own}", "sha": "0" * 40, "siblings": [{"rfilename": each} for each in files]}


@contextmanager
def serve() -> Iterator[Hub]:
    """Serve a hub on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.tokens.add(self.headers.get("Authorization"))
            status, content = _answer(hub, self.path.partition("?")[0], body)
            sent = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        do_GET = do_POST = _reply  # noqa: N815 - names of the standard library

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
