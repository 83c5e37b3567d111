"""`thinwire doctor`: its options, its exit codes, and what it prints."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from live_processes import DEADLINE_S

from thinwire.cli.main import main
from thinwire.transport.secret import make_secret

OPTIONS_FILE = Path(__file__).with_name("options_of_doctor.txt")
VERDICTS = {"ok", "warning", "wrong", "skipped"}
HERE = ["versions", "devices", "torch.distributed", "secret", "run folder", "cache", "open files", "memory", "speed",
        "host name", "own address", "listening", "firewall", "MTU"]  # fmt: skip
THERE = [
    "name of the address", "TCP connection", "torch store", "packet size", "other interfaces", "other version", "clock",
]  # fmt: skip


def test_the_options_of_doctor_are_those_that_were_agreed_on() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "thinwire.cli.main", "doctor", "--help"],
        capture_output=True, text=True, timeout=DEADLINE_S, env={**os.environ, "COLUMNS": "100"},
    ).stdout  # fmt: skip
    options = sorted(set(re.findall(r"^  (?:-h, )?(--[a-z][a-z-]*)", told, re.MULTILINE)))
    assert options == OPTIONS_FILE.read_text().splitlines(), (
        "an option is a promise: change tests/cli/options_of_doctor.txt and CHANGELOG.md with it"
    )


def checks(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, str]]]:
    code = main(["doctor", "--json", *words])
    found = json.loads(capsys.readouterr().out)
    assert all(set(check) == {"name", "verdict", "found", "remedy"} and check["verdict"] in VERDICTS for check in found)
    return code, {check["name"]: check for check in found}


def test_a_port_that_answers_on_this_host_is_well(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make_secret(tmp_path / "job.secret")
    with closing(socket.create_server(("127.0.0.1", 0), backlog=16)) as server:
        words = [
            f"127.0.0.1:{server.getsockname()[1]}",
            "--secret",
            str(tmp_path / "job.secret"),
            "--out",
            str(tmp_path),
        ]
        code, found = checks(words, capsys)
    assert sorted(found) == sorted(HERE + THERE)
    assert [name for name, check in found.items() if check["verdict"] == "wrong"] == []
    assert code == 0, found
    for name in ("secret", "own address", "listening", "TCP connection", "packet size"):
        assert found[name]["verdict"] == "ok", found[name]
    assert found["clock"]["verdict"] == "skipped"


def test_what_is_wrong_is_told_with_its_remedy_and_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        assert main(["doctor", f"127.0.0.1:{port}", "--secret", str(tmp_path / "none")]) == 1
    told = capsys.readouterr().out
    assert f"WRONG    TCP connection: 127.0.0.1, port {port}: refused" in told
    assert "         -> the host is there, and nothing listens on port" in told
    assert f"WRONG    secret: there is no secret on this host; got {tmp_path}/none" in told
    assert re.fullmatch(r"21 checks: \d+ ok, \d+ warning, 2 wrong, 5 skipped", told.splitlines()[-1])


def test_an_interface_that_is_not_here_leaves_the_rest_to_be_looked_at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    code, found = checks(["127.0.0.1:9"], capsys)
    assert code == 1 and found["own address"]["verdict"] == "wrong" and "'nope0'" in found["own address"]["found"]
    assert found["TCP connection"]["verdict"] == "skipped" and found["memory"]["verdict"] in VERDICTS


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["host-a"], "an address must look like HOST:PORT, with a port of 1 to 65535, got 'host-a'"),
        (["--deadline", "soon"], "the duration cannot be read; got 'soon'"),
        (["--deadline", "0s"], "the deadline of a connection must be above 0 s, got 0"),
        (["--interface", "a", "--address", "b"], "give --interface or --address, not both"),
        (["--interfac", "a"], "try --interface"),
    ],
)
def test_wrong_options_are_refused_in_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1
    assert told.err.startswith("thinwire doctor: error: ") and said in told.err
