"""A real browser: Debian's chromium without a window, spoken to in its DevTools protocol over two pipes.

The browser is $PUBSUB_CHROMIUM, one on the path, or Debian's packages, unpacked beside the tests' servers without being installed:

    python -m tests.support.browser fetch
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from pubsub import jars

PATIENCE: Final = 300.0
_KEYS: Final = {
    "Tab": ("Tab", 9), "Enter": ("Enter", 13), "ArrowLeft": ("ArrowLeft", 37), "ArrowRight": ("ArrowRight", 39),
    "ArrowDown": ("ArrowDown", 40), " ": ("Space", 32), "/": ("Slash", 191), "End": ("End", 35),
}  # fmt: skip


def kept() -> Path:
    return jars.share_directory() / "chromium"


def program() -> Path | None:
    """Return a chromium; None if there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = os.environ.get("PUBSUB_CHROMIUM") or shutil.which(name)
        if found is not None:
            return Path(found)
    unpacked = kept() / "usr" / "lib" / "chromium" / "chromium"
    return unpacked if unpacked.is_file() else None


def fetch() -> None:
    """Unpack Debian's chromium, and the packages that it needs and the machine lacks, unless there is a browser."""
    if program() is not None or shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return
    asked = ["apt-get", "--simulate", "--no-install-recommends", "install", "chromium", "fonts-dejavu-core"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False)
    if told.returncode != 0:
        subprocess.run(["apt-get", "update"], capture_output=True, check=False)  # the machine may have no list yet
        told = subprocess.run(asked, capture_output=True, text=True, check=False)
    names = re.findall(r"^Inst (\S+)", told.stdout, re.MULTILINE)
    if told.returncode != 0 or not names:
        print("no chromium can be had: tests of the page are skipped", file=sys.stderr)
        return
    kept().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept().parent) as directory:
        unpacked = Path(directory) / "unpacked"
        got = subprocess.run(
            ["apt-get", "download", *names], cwd=directory, check=False, capture_output=True, text=True
        )
        if got.returncode != 0:
            print(f"no chromium can be had: tests of the page are skipped ({got.stderr[-500:]})", file=sys.stderr)
            return
        for package in Path(directory).glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(unpacked)], check=True)
        unpacked.replace(kept())


class Browser:
    """A running browser; `tab` opens a page in it."""

    def __init__(self, executable: Path, profile: Path) -> None:
        to_read, to_write = os.pipe()
        answers, their_answers = os.pipe()
        environment = dict(os.environ)
        if executable.is_relative_to(kept()):
            libraries = {str(one.parent) for one in kept().rglob("*.so*")}
            environment["LD_LIBRARY_PATH"] = ":".join(sorted(libraries))
        # The shell puts the pipes where --remote-debugging-pipe wants them: 3 and 4.
        command = f'exec "$0" "$@" 3<&{to_read} 4>&{their_answers}'
        self._process = subprocess.Popen(
            [
                "bash", "-c", command, str(executable), "--headless", "--no-sandbox", "--disable-gpu",
                "--disable-dev-shm-usage", "--remote-debugging-pipe", "--hide-scrollbars", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--disable-sync",
                f"--user-data-dir={profile}", "about:blank",
            ],
            pass_fds=(to_read, their_answers),
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(their_answers)
        self._out = os.fdopen(to_write, "wb", buffering=0)
        self._in = os.fdopen(answers, "rb", buffering=0)
        self._numbers = itertools.count(1)
        self._left = b""
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        self._out.close()
        self._in.close()
        self._process.terminate()
        self._process.wait(PATIENCE)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """Carry out a command of the protocol; events that come meanwhile join `events`."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            data = self._in.read(1 << 20)
            assert data, "the browser has ended"
            self._left += data
        found, _, self._left = self._left.partition(b"\0")
        answer: dict[str, Any] = json.loads(found)
        return answer

    def tab(self, url: str, width: int, height: int = 900, *, dark: bool = False) -> Tab:
        """Open a page of so many CSS pixels."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Accessibility", "Network"):
            tab.call(f"{domain}.enable")
        tab.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", features=[scheme])
        tab.call("Page.navigate", url=url)
        return tab


class Tab:
    """One page of a browser."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser = browser
        self._session = session
        self._target = target
        self._width = 0

    def call(self, method: str, **parameters: Any) -> Any:
        return self._browser.call(method, self._session, **parameters)

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)

    def resize(self, width: int, height: int = 900) -> None:
        self._width = width
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str, what: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.run(f"!!({expression})"):
            assert time.monotonic() < end, f"{what} did not come about:\n{self.run('document.body.innerText')[:3000]}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Press a key, by its name or as a character."""
        code, number = _KEYS.get(key, ("", ord(key[0].upper())))
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            given = text if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=code, windowsVirtualKeyCode=number, **given)

    def write(self, text: str) -> None:
        for character in text:
            self.press(character)

    def names(self, role: str) -> list[str]:
        """Return the names that a screen reader gives to the elements of a role."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            one.get("name", {}).get("value", "")
            for one in nodes
            if not one.get("ignored") and one.get("role", {}).get("value") == role
        ]

    def picture(self, path: Path, height: int | None = None) -> None:
        """Write the page as a PNG, whole or its first so many pixels."""
        whole = self.run("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": self._width, "height": min(whole, height or whole), "scale": 1}
        data = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
        """Return what the page has logged as an error, and each exception, so far."""
        found = []
        self.run("0")  # so that the events that came before are read
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(event["params"]["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                found.append(event["params"]["entry"]["text"] + " " + event["params"]["entry"].get("url", ""))
        return found

    def hosts(self) -> set[str]:
        """Return the hosts that the page has asked for anything."""
        self.run("0")
        return {
            event["params"]["request"]["url"].split("/")[2]
            for event in self._browser.events
            if event.get("sessionId") == self._session
            and event["method"] == "Network.requestWillBeSent"
            and event["params"]["request"]["url"].startswith("http")
        }


@contextmanager
def browser(directory: Path) -> Iterator[Browser]:
    """Run a browser; skip the test if there is none."""
    import pytest

    found = program()
    if found is None:
        pytest.skip("there is no chromium: apt-get install chromium, or python -m tests.support.browser fetch")
    running = Browser(found, directory / "profile")
    try:
        yield running
    finally:
        running.close()


if __name__ == "__main__":
    if sys.argv[1:] == ["fetch"]:
        fetch()
    else:
        sys.exit("python -m tests.support.browser fetch")
