"""Opens a page in headless Chromium over its debugging protocol, and says what happened."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


_SCROLLING = (
    "JSON.stringify([...document.querySelectorAll('.scroll')]"
    ".filter(e => e.querySelector('table') && e.scrollWidth > e.clientWidth)"
    ".map(e => e.innerText.slice(0, 60)))"
)


@dataclass
class Visit:
    """What a browser saw of one page at one size."""

    screenshot: Path
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    overflow: int = 0
    text: str = ""
    scrolling: list[str] = field(default_factory=list)
    """Text of each table that is wider than its place, so that a reader must scroll sideways."""


class Browser:
    """One headless Chromium with a profile of its own."""

    def __init__(self, address: str):
        import websocket

        self._socket = websocket.create_connection(address, timeout=30, suppress_origin=True)
        self._number = 0
        self._events: list[dict[str, Any]] = []
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._events.append(answer)

    def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression on the open page."""
        return self._call("Runtime.evaluate", expression=expression)["result"].get("value")

    def open(self, page: Path, *, width: int, scheme: str, screenshot: Path) -> Visit:
        """Opens a local page, waits until it has loaded, and takes a screenshot of all of it."""
        self._events.clear()
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=features)
        self._call("Page.navigate", url=page.as_uri())
        deadline = time.monotonic() + 20
        while self.evaluate("document.readyState + location.href") != "complete" + page.as_uri():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{page.name} did not load within 20 s")
            time.sleep(0.05)
        picture = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        screenshot.write_bytes(base64.b64decode(picture["data"]))
        root = "document.documentElement"
        return Visit(
            screenshot=screenshot,
            problems=self._problems(),
            requests=self._requests(page),
            overflow=self.evaluate(f"{root}.scrollWidth - {root}.clientWidth"),
            text=self.evaluate("document.body.innerText"),
            scrolling=json.loads(self.evaluate(_SCROLLING)),
        )

    def _problems(self) -> list[str]:
        found = []
        for event in self._events:
            if event["method"] == "Log.entryAdded":
                entry = event["params"]["entry"]
                if entry["level"] in ("error", "warning"):
                    found.append(entry["text"])
            if event["method"] == "Runtime.exceptionThrown":
                found.append(event["params"]["exceptionDetails"]["text"])
            if event["method"] == "Runtime.consoleAPICalled":
                found.append(event["params"]["type"])
        return found

    def _requests(self, page: Path) -> list[str]:
        urls = [
            event["params"]["request"]["url"]
            for event in self._events
            if event["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in urls if url != page.as_uri() and not url.startswith("data:")]


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Starts Chromium with a fresh profile and ends it, and only it, afterwards."""
    binary = shutil.which("chromium") or shutil.which("chromium-browser")
    if binary is None:
        raise FileNotFoundError("chromium")
    process = subprocess.Popen(
        [binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield Browser(_page_address(profile, process))
    finally:
        process.terminate()
        process.wait(timeout=20)


def _page_address(profile: Path, process: subprocess.Popen[bytes]) -> str:
    import urllib.request

    port_file = profile / "DevToolsActivePort"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        if port_file.is_file() and port_file.read_text().count("\n"):
            port = int(port_file.read_text().split("\n")[0])
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=10) as answer:
                pages = [one for one in json.load(answer) if one["type"] == "page"]
            if pages:
                return pages[0]["webSocketDebuggerUrl"]
        time.sleep(0.05)
    raise RuntimeError("chromium did not start within 30 s")
