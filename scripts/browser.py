"""A page in headless Chromium, driven over its debugging pipe: no driver and no package is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ANSWER_S = 60.0
_LOOK_S = 0.1


class Page:
    """One tab; see `page`.

    Args:
        to_browser: Takes messages, each with a zero byte at its end.
        from_browser: Gives answers and events.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.ask("Page.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask the browser for something by the DevTools protocol, and return its answer.

        Raises:
            RuntimeError: It refuses.
            TimeoutError: It does not answer.
        """
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until_s = time.monotonic() + _ANSWER_S
        while True:
            answer = self._next(until_s)
            if answer.get("id") == self._number:
                break
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    def open(self, url: str, *, width: int, height: int, scheme: str, is_forced: bool = False) -> None:
        """Load an address in a window of so many CSS pixels, in a light or dark scheme, with forced colours or not."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        media = {"prefers-color-scheme": scheme, "forced-colors": "active" if is_forced else "none"}
        self.ask(
            "Emulation.setEmulatedMedia", features=[{"name": name, "value": value} for name, value in media.items()]
        )
        self.ask("Page.setBypassCSP", enabled=True)  # the checks are scripts that the page itself does not allow
        self.ask("Page.navigate", url=url)
        until_s = time.monotonic() + _ANSWER_S
        while self.value("document.readyState") != "complete" or self.value("location.href") == "about:blank":
            if time.monotonic() > until_s:
                raise TimeoutError(f"{url} was not there after {_ANSWER_S:g} s")
            time.sleep(_LOOK_S)

    def value(self, script: str) -> Any:
        """Return the value of a script, also where it is a promise of one.

        Raises:
            RuntimeError: The script has thrown.
        """
        found = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"].get("exception", found["exceptionDetails"])))
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key, such as `Tab`, `Enter`, ` ` or `ArrowDown`."""
        codes = {"Tab": 9, "Enter": 13, " ": 32, "ArrowDown": 40, "ArrowRight": 39, "Escape": 27}
        text = {"Enter": {"text": "\r"}, " ": {"text": " "}}.get(key, {})
        about = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": codes[key]}
        self.ask("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **about)

    def picture(self, path: Path) -> None:
        """Write a picture of the whole page, also of what a person would scroll to."""
        found = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _next(self, until_s: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([self._from], [], [], left_s)[0]:
                raise TimeoutError(f"the browser has not answered for {_ANSWER_S:g} s")
            more = os.read(self._from, 1 << 16)
            if not more:
                raise RuntimeError("the browser has ended")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))


@contextlib.contextmanager
def page() -> Iterator[Page]:
    """Start a browser, give its page, and end it.

    Raises:
        FileNotFoundError: Chromium is not installed.
    """
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise FileNotFoundError("chromium is not installed; on Debian: apt-get install chromium")
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory() as profile:
        words = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
                 "--remote-debugging-pipe", f"--user-data-dir={profile}"]  # fmt: skip
        # the browser reads from its descriptor 3 and writes to 4
        shell = ["/bin/sh", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "sh", *words]
        browser = subprocess.Popen(shell, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL)
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Page(ours_out, ours_in)
        finally:
            os.close(ours_out)
            os.close(ours_in)
            browser.terminate()
            try:
                browser.wait(timeout=10)
            except subprocess.TimeoutExpired:
                browser.kill()
                browser.wait()
