"""Follows a run while somebody looks, and hands every looker what changed since their last look."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from thinwire.monitor.dashboard.snapshot import VERSION, RunFollower

PERIOD_S = 0.5
# Nobody has looked for so long: reading stops until somebody does.
_IDLE_S = 30.0


class Feed:
    """One thread reads the run; any number of others wait for what is new.

    Args:
        follower: Of the run.
        period_s: Time between two looks at the files.
    """

    def __init__(self, follower: RunFollower, *, period_s: float = PERIOD_S) -> None:
        self._follower = follower
        self._period_s = period_s
        self._changed = threading.Condition()
        self._sections: dict[str, tuple[int, str]] = {}
        self._version = 0
        self._wanted_s = -_IDLE_S
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="thinwire-dashboard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let all that wait go."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._is_closed

    def after(self, version: int, *, wait_s: float) -> tuple[int, str]:
        """Wait for what is newer than a version, and return the latest version and one JSON object.

        Args:
            version: What the asker has; 0 for nothing.
            wait_s: How long to wait.

        Returns:
            The same version and an empty text where nothing came in time.
        """
        with self._changed:
            self._wanted_s = time.monotonic()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._version > version or self._is_closed, timeout=wait_s)
            self._wanted_s = time.monotonic()
            if self._version <= version:
                return version, ""
            fresh = [f"{json.dumps(name)}:{text}" for name, (at, text) in self._sections.items() if at > version]
            head = f'{{"version":{VERSION},"now":{round(time.time(), 3)},"sections":{{'
            return self._version, f"{head}{','.join(fresh)}}}}}"

    def _run(self) -> None:
        while not self._is_closed:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or time.monotonic() - self._wanted_s < _IDLE_S)
            is_behind = False
            try:
                is_behind = self._follower.look()
                self._take({**self._follower.sections(), "fault": ""})
            except Exception as error:  # whatever files hold, those who look are told, and the next look is made
                self._take({"fault": f"The folder could not be read: {type(error).__name__}: {error}"[:500]})
            if not is_behind:
                time.sleep(self._period_s)

    def _take(self, sections: dict[str, Any]) -> None:
        told = {name: json.dumps(value, separators=(",", ":"), allow_nan=False) for name, value in sections.items()}
        with self._changed:
            changed = [name for name, text in told.items() if self._sections.get(name, (0, ""))[1] != text]
            if changed:
                self._version += 1
                self._sections |= {name: (self._version, told[name]) for name in changed}
                self._changed.notify_all()
