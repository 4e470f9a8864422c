"""A headless Chromium over its DevTools protocol: a socket, a few frames, nothing to install."""

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


class Browser:
    """One page at a time. What the page throws or complains of gathers in `complaints`."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        self.complaints: list[str] = []
        self._last_id = 0
        flags = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
        )
        ports = (
            "--remote-debugging-port=0",
            "--remote-allow-origins=*",
            f"--user-data-dir={profile}",
        )
        with (profile / "log").open("w") as log:
            self._process = subprocess.Popen(
                [PROGRAM, *flags, *ports, "about:blank"], stdout=log, stderr=log
            )
        port = _wait_for(profile / "DevToolsActivePort").split()[0]
        request = Request(f"http://127.0.0.1:{port}/json/new?about:blank", method="PUT")
        with urlopen(request, timeout=20) as answer:
            path = json.load(answer)["webSocketDebuggerUrl"].partition(port)[2]
        self._socket = _upgraded(int(port), path)
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def open(self, page: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Load a file in a window of this size, as on a phone where it is narrow."""
        phone = width < 600
        self.complaints.clear()
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=phone,
        )  # fmt: skip
        self.send("Emulation.setTouchEmulationEnabled", enabled=phone, maxTouchPoints=5)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)
        self.send("Page.navigate", url=page.resolve().as_uri())
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'")
        self.settle()

    def value(self, script: str) -> Any:
        """What an expression of the page is."""
        answer = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def settle(self) -> None:
        """Two frames: what was asked to be drawn is drawn."""
        self.value(
            "new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(() => r(1))))"
        )

    def wait(self, script: str) -> None:
        for _ in range(200):
            if self.value(script):
                return
            time.sleep(0.05)
        raise TimeoutError(script)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.send("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def click(self, x: float, y: float, *, times: int = 1) -> None:
        for count in range(1, times + 1):
            self.mouse("Pressed", x, y, button="left", buttons=1, clickCount=count)
            self.mouse("Released", x, y, button="left", clickCount=count)
        self.settle()

    def drag(self, x: float, to: float, y: float) -> None:
        self.mouse("Moved", x, y)
        self.mouse("Pressed", x, y, button="left", buttons=1, clickCount=1)
        for part in (0.3, 0.7, 1.0):
            self.mouse("Moved", x + part * (to - x), y, button="left", buttons=1)
        self.mouse("Released", to, y, button="left", clickCount=1)
        self.settle()

    def fingers(self, kind: str, *places: tuple[float, float]) -> None:
        """`Start`, `Move` or `End`, with where each finger is."""
        points = [{"x": x, "y": y, "id": i} for i, (x, y) in enumerate(places)]
        self.send("Input.dispatchTouchEvent", type=f"touch{kind}", touchPoints=points)

    def key(self, name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name)
        self.settle()

    def picture(self, path: Path) -> None:
        """The whole page."""
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask, and read until the answer is there."""
        self._last_id += 1
        text = json.dumps({"id": self._last_id, "method": method, "params": parameters})
        _write_frame(self._socket, text.encode())
        while True:
            message = json.loads(_read_message(self._socket))
            if message.get("id") == self._last_id:
                assert "error" not in message, message["error"]
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(event["params"]["exceptionDetails"]))
        elif event.get("method") == "Runtime.consoleAPICalled":
            self.complaints.append(json.dumps(event["params"]["args"]))
        elif event.get("method") == "Log.entryAdded":
            self.complaints.append(event["params"]["entry"]["text"])


def _wait_for(path: Path) -> str:
    for _ in range(600):
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(0.05)
    raise TimeoutError(f"{path}: Chromium has not started")


def _upgraded(port: int, path: str) -> socket.socket:
    """A connection that speaks WebSocket (RFC 6455)."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    key = base64.b64encode(os.urandom(16)).decode()
    head = (
        f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    connection.sendall(head.encode())
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        answer += connection.recv(1)
    assert b" 101 " in answer, answer
    return connection


def _write_frame(connection: socket.socket, payload: bytes) -> None:
    mask, size = os.urandom(4), len(payload)
    if size < 126:
        head = struct.pack("!BB", 0x81, 0x80 | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", 0x81, 0x80 | 126, size)
    else:
        head = struct.pack("!BBQ", 0x81, 0x80 | 127, size)
    connection.sendall(head + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(payload)))


def _read_message(connection: socket.socket) -> bytes:
    message = b""
    while True:
        first, second = _read(connection, 2)
        size = second & 0x7F
        if size == 126:
            [size] = struct.unpack("!H", _read(connection, 2))
        elif size == 127:
            [size] = struct.unpack("!Q", _read(connection, 8))
        message += _read(connection, size)
        if first & 0x80:
            return message


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        assert part, "Chromium has closed the connection"
        data += part
    return data
