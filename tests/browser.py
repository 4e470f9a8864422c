"""Drive headless Chromium over its DevTools protocol with our own WebSocket client, so there is nothing to install."""

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

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Chromium:
    """A browser process with any number of tabs; takes half a second to a few seconds to start.

    Args:
        profile: Empty folder for the browser profile.
    """

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        flags = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            "--remote-debugging-port=0",
            "--remote-allow-origins=*",
            f"--user-data-dir={profile}",
        )
        with (profile / "log").open("w") as log:
            self._process = subprocess.Popen([PROGRAM, *flags, "about:blank"], stdout=log, stderr=log)
        try:
            self._port = int(_wait_for_content(profile / "DevToolsActivePort").split()[0])
        except BaseException:
            self.close()
            raise

    def new_tab(self) -> "Tab":
        """Open a tab with its own pointer, window size and console."""
        request = Request(f"http://127.0.0.1:{self._port}/json/new?about:blank", method="PUT")
        with urlopen(request, timeout=20) as response:
            target = json.load(response)
        path = target["webSocketDebuggerUrl"].partition(str(self._port))[2]
        return Tab(_connect(self._port, path))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Tab:
    """A browser tab; exceptions and console messages of its page are collected in `console`.

    Args:
        connection: WebSocket to the tab's DevTools.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.console: list[str] = []
        self._last_id = 0
        self._socket = connection
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        self.send("Page.close")
        self._socket.close()

    def open(self, page: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Load a file in a window of this size; a narrow window emulates a phone with a touch screen."""
        is_phone = width < 600
        self.console.clear()
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=is_phone,
        )  # fmt: skip
        self.send("Emulation.setTouchEmulationEnabled", enabled=is_phone, maxTouchPoints=5)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)
        self.send("Page.navigate", url=page.resolve().as_uri())
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'")
        self.settle()

    def value(self, script: str) -> Any:
        """Evaluate a JavaScript expression, awaiting a promise."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def settle(self) -> None:
        """Wait two frames, so that all pending rendering is done."""
        self.value("new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(() => r(1))))")

    def wait(self, script: str) -> None:
        """Wait until an expression is true, for at most ten seconds."""
        for _ in range(200):
            if self.value(script):
                return
            time.sleep(0.05)
        raise TimeoutError(script)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send `Moved`, `Pressed` or `Released` at a window position in pixels."""
        self.send("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def click(self, x: float, y: float, *, times: int = 1) -> None:
        for count in range(1, times + 1):
            self.mouse("Pressed", x, y, button="left", buttons=1, clickCount=count)
            self.mouse("Released", x, y, button="left", clickCount=count)
        self.settle()

    def drag(self, x: float, to: float, y: float) -> None:
        """Drag from x to `to` in four steps."""
        self.mouse("Moved", x, y)
        self.mouse("Pressed", x, y, button="left", buttons=1, clickCount=1)
        for fraction in (0.3, 0.7, 1.0):
            self.mouse("Moved", x + fraction * (to - x), y, button="left", buttons=1)
        self.mouse("Released", to, y, button="left", clickCount=1)
        self.settle()

    def touch(self, kind: str, *fingers: tuple[float, float]) -> None:
        """Send `Start`, `Move` or `End` with the position of each finger."""
        points = [{"x": x, "y": y, "id": i} for i, (x, y) in enumerate(fingers)]
        self.send("Input.dispatchTouchEvent", type=f"touch{kind}", touchPoints=points)

    def key(self, name: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name)
        self.settle()

    def screenshot(self, path: Path) -> None:
        """Save the entire page, not only the visible window, as a PNG."""
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a DevTools method and return its result; events that arrive first are recorded."""
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
            self.console.append(json.dumps(event["params"]["exceptionDetails"]))
        elif event.get("method") == "Runtime.consoleAPICalled":
            self.console.append(json.dumps(event["params"]["args"]))
        elif event.get("method") == "Log.entryAdded":
            self.console.append(event["params"]["entry"]["text"])


def _wait_for_content(path: Path) -> str:
    for _ in range(600):
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(0.05)
    raise TimeoutError(f"{path}: Chromium has not started")


def _connect(port: int, path: str) -> socket.socket:
    """Open a WebSocket (RFC 6455)."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    key = base64.b64encode(os.urandom(16)).decode()
    request = (
        f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    connection.sendall(request.encode())
    response = b""
    while not response.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        assert byte, f"Chromium closed the connection after {response!r}"
        response += byte
    assert b" 101 " in response, response
    return connection


def _write_frame(connection: socket.socket, payload: bytes) -> None:
    """Send one text frame, masked as a client must."""
    mask, size = os.urandom(4), len(payload)
    if size < 126:
        head = struct.pack("!BB", 0x81, 0x80 | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", 0x81, 0x80 | 126, size)
    else:
        head = struct.pack("!BBQ", 0x81, 0x80 | 127, size)
    connection.sendall(head + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(payload)))


def _read_message(connection: socket.socket) -> bytes:
    """Read frames until a message is complete."""
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
        assert part, "Chromium closed the connection"
        data += part
    return data
