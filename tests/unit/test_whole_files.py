"""Files that are written whole, also by several processes at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from thinwire.files import replace_whole

OTHER = "import sys, pathlib; from thinwire.files import write_whole; write_whole(pathlib.Path(sys.argv[1]), 'other')"


def test_two_processes_of_a_host_may_write_the_same_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "origin.json"

    def write(temporary: Path) -> None:
        temporary.write_text("own")
        subprocess.run([sys.executable, "-c", OTHER, str(path)], check=True, timeout=600)
        assert path.read_text() == "other"

    replace_whole(path, write)
    assert path.read_text() == "own" and [one.name for one in tmp_path.iterdir()] == ["origin.json"]
