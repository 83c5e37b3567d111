"""`thinwire secret` and `thinwire train --secret`: one clear line for each way in which it goes wrong."""

from __future__ import annotations

import re
import stat
import sys
from pathlib import Path

import pytest

from thinwire.cli.main import main
from thinwire.elastic.coordinator_server import KEY_FILE
from thinwire.elastic.invitation import read_invitation
from thinwire.transport.secret import JOIN_VARIABLE, SECRET_BYTES, make_secret, read_secret

DATA = ("--data", "stdlib", "--steps", "1")


def test_a_secret_is_made_and_what_to_do_next_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.secret"
    assert main(["secret", str(path)]) == 0
    told = capsys.readouterr()
    assert f"scp -p {path} HOST:{path}" in told.out and f"thinwire train --secret {path}" in told.out
    assert told.err == ""
    assert read_secret(path).key.hex() not in told.out


@pytest.mark.parametrize("words", [[], ["a", "b"], ["--file", "a"], ["{folder}/none/job.secret"], ["{folder}/there"]])
def test_wrong_words_are_one_line_and_make_nothing(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").write_text("mine")
    assert main(["secret", *(word.format(folder=tmp_path) for word in words)]) == 2
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1 and told.err.startswith("thinwire secret: error: ")
    assert [path.name for path in tmp_path.iterdir()] == ["there"] and (tmp_path / "there").read_text() == "mine"


def test_the_coordinator_of_own_loops_gets_a_key_and_the_address_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make = ["secret", "job.secret", "--coordinator", "127.0.0.1:29400"]
    assert main(make) == 0 == main(make), "the same key again"
    first, second = re.findall(rf"export {JOIN_VARIABLE}=(\S+)", capsys.readouterr().out)
    named = read_invitation(first)
    assert first == second and len(named.coordinator_key) == SECRET_BYTES and named.secret is None
    assert stat.S_IMODE((named.loop_folder / KEY_FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize("place", ["192.0.2.1:29400", "127.0.0.1", "thinwire://127.0.0.1:29400/" + 52 * "a"])
def test_a_coordinator_s_key_is_made_on_its_own_host(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["secret", "job.secret", "--coordinator", place]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["secret", str(tmp_path / "file" / "job.secret")]) == 1
    assert capsys.readouterr().err == f"thinwire secret: error: Not a directory: {tmp_path}/file/job.secret\n"


@pytest.mark.parametrize("problem", ["missing", "open to others", "no secret", "no pyzmq"])
def test_training_does_not_start_with_a_secret_that_is_none(
    problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.secret"
    if problem != "missing":
        make_secret(path)
    if problem == "open to others":
        path.chmod(0o644)
    if problem == "no secret":
        path.write_text("swordfish\n")
    if problem == "no pyzmq":
        monkeypatch.setitem(sys.modules, "zmq", None)
    code = main(["train", "--secret", str(path), "--out", str(tmp_path / "run"), *DATA])
    said = capsys.readouterr().err
    reasons = {
        "missing": f"there is no secret on this host; got {path}; allowed a file that thinwire secret wrote",
        "open to others": f"chmod 600 {path}",
        "no secret": "holds no secret",
        "no pyzmq": "pip install 'thinwire[wire]'",
    }
    assert code == (1 if problem == "no pyzmq" else 2)
    assert len(said.splitlines()) == 1 and reasons[problem] in said
    assert not (tmp_path / "run").exists()
