"""`thinwire lab`: what goes where, which exit code, and one clear line for every wrong command."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.machine import skip_where_labs_are_impossible
from tests.sample_texts import TEXTS
from thinwire.cli.main import main
from thinwire.planning.plan import load_plan
from thinwire.runlog.run_folder import read_files

THINWIRE = [sys.executable, "-m", "thinwire.cli.main"]
OPTIONS_FILE = Path(__file__).with_name("options_of_lab.txt")
NOBODY = 65534


@pytest.fixture
def can_lab() -> None:
    skip_where_labs_are_impossible()


def lab(*words: str, cwd: Path, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*THINWIRE, "lab", *words],
        capture_output=True, text=True, timeout=120, cwd=cwd, input=stdin, env={**os.environ, **environment},
    )  # fmt: skip


def test_the_options_of_lab_are_those_that_were_agreed_on(tmp_path: Path) -> None:
    told = lab("--help", cwd=tmp_path, COLUMNS="100").stdout
    options = sorted(set(re.findall(r"^  (?:-h, )?(--[a-z][a-z-]*)", told, re.MULTILINE)))
    assert options == OPTIONS_FILE.read_text().splitlines(), (
        "an option is a promise: change tests/cli/options_of_lab.txt and CHANGELOG.md with it"
    )


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "the command is missing; got nothing behind --"),
        (["--"], "the command is missing; got nothing behind --"),
        (["--hosts", "2", "hostname"], "an argument without an option; got 'hostname'"),
        (["--hosts", "two", "--", "true"], "--hosts is no whole number"),
        (["--hots", "2", "--", "true"], "try --hosts"),
        (["--hosts", "0", "--", "true"], "the number of hosts is out of range; got 0; allowed 1 to 200"),
        (["--rate", "fast", "--", "true"], "the rate cannot be read; got 'fast'"),
        (["--rate", "1bit", "--", "true"], "the rate is out of range; got 1 bit/s"),
        (["--rate", "5mbit/", "--", "true"], "the rate cannot be read"),
        (["--host", "2=1mbit", "--", "true"], "this lab has no such host; got 2; allowed 0 to 1"),
        (["--host", "1mbit", "--", "true"], "a host's access cannot be read; got '1mbit'"),
        (["--link", "0-2=1mbit", "--", "true"], "this lab has no such host; got 2; allowed 0 to 1"),
        (["--link", "1-1=1mbit", "--", "true"], "a link joins a host to itself; got 1-1"),
        (["--link", "0-1", "--", "true"], "a link cannot be read; got '0-1'"),
        (
            ["--latency", "5ms", "--jitter", "10ms", "--", "true"],
            "the jitter exceeds the latency, so packets would arrive before they were sent; got 0.01s",
        ),
        (["--latency", "40", "--", "true"], "the duration has no unit; got '40'"),
        (["--latency", "2min", "--", "true"], "the latency is out of range; got 120s; allowed 0s to 60s"),
        (["--loss", "100%", "--", "true"], "the loss is no share of the packets; got 1"),
        (["--loss", "-1%", "--", "true"], "the loss cannot be read; got '-1%'"),
        (["--grace", "soon", "--", "true"], "the duration cannot be read"),
        (["doctor", "--jason"], "unknown option '--jason'; there is --json"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["lab", *words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert reason in told.err and told.err.startswith("thinwire lab")
    assert len(told.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("can_lab")
def test_stdout_is_host_0_alone_and_the_others_are_named_on_stderr_and_kept_in_logs(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo out-$(hostname); echo err-$(hostname) >&2; cat"]
    done = lab("--hosts", "3", "--out", "here", "--", *command, cwd=tmp_path, stdin="typed\n")
    assert done.returncode == 0
    assert done.stdout == "out-host-0\ntyped\n", "host 0 has the command's stdin, too"
    lines = done.stderr.splitlines()
    assert "err-host-0" in lines
    for host in (1, 2):
        assert f"host-{host} | out-host-{host}" in lines
        assert f"host-{host} | err-host-{host}" in lines
        assert (tmp_path / "here" / f"host-{host}.out").read_text() == f"out-host-{host}\n"
        assert (tmp_path / "here" / f"host-{host}.err").read_text() == f"err-host-{host}\n"
    assert "bytes as the kernel counted them" in done.stderr and "logs and counts: " in done.stderr
    summary = json.loads((tmp_path / "here" / "summary.json").read_text())
    assert [row["exit_code"] for row in summary["hosts"]] == [0, 0, 0]
    assert json.loads((tmp_path / "here" / "counters.jsonl").read_text().splitlines()[0])["sent_bytes"] == [0, 0, 0]


@pytest.mark.usefixtures("can_lab")
def test_a_quiet_lab_says_nothing_of_its_own_and_logs_all_the_same(tmp_path: Path) -> None:
    done = lab("--quiet", "--", "sh", "-c", "echo $(hostname)", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "host-0\n", "")
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"lab-\d{8}-\d{6}-\d+", folder.name)
    assert (folder / "host-1.out").read_text() == "host-1\n"


@pytest.mark.usefixtures("can_lab")
def test_the_settings_of_the_command_line_are_those_of_the_lab(tmp_path: Path) -> None:
    words = ["--hosts", "3", "--rate", "50mbit/10mbit", "--host", "2=5mbit", "--latency", "2ms", "--seed", "7"]
    words += ["--jitter", "1ms", "--loss", "0.1%", "--link", "0-1=1mbit,40ms", "--link", "2>0=cut", "--out", "x"]
    assert lab(*words, "--", "true", cwd=tmp_path).returncode == 0
    settings = json.loads((tmp_path / "x" / "summary.json").read_text())["settings"]
    assert [(a["down_bits_per_s"], a["up_bits_per_s"]) for a in settings["accesses"]] == [
        (50e6, 10e6), (50e6, 10e6), (5e6, 5e6),
    ]  # fmt: skip
    usual = {"rate_bits_per_s": None, "latency_s": 0.002, "jitter_s": 0.001, "loss": 0.001, "is_cut": False}
    assert settings["link"] == usual
    between = {**usual, "rate_bits_per_s": 1e6, "latency_s": 0.04}
    assert settings["links"] == [[0, 1, between], [1, 0, between], [2, 0, {**usual, "is_cut": True}]]
    assert settings["seed"] == 7


@pytest.mark.usefixtures("can_lab")
def test_the_exit_code_is_that_of_the_host_that_failed_and_the_others_have_their_grace(tmp_path: Path) -> None:
    began_s = time.monotonic()
    command = ["sh", "-c", "[ $RANK = 1 ] && exit 7; sleep 600"]
    done = lab("--grace", "0.3s", "--out", "x", "--", *command, cwd=tmp_path)
    assert done.returncode == 7
    assert time.monotonic() - began_s < 20
    assert "thinwire lab: host-1 ended with exit code 7; the others have 0.3 s to end (--grace)" in done.stderr
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert [row["exit_code"] for row in summary["hosts"]] == [-9, 7]


@pytest.mark.usefixtures("can_lab")
def test_others_that_end_within_their_grace_end_by_themselves(tmp_path: Path) -> None:
    command = ["sh", "-c", "[ $RANK = 1 ] && kill -9 $$; sleep 0.3; echo done"]
    done = lab("--grace", "30s", "--", *command, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (128 + 9, "done\n")
    assert "host-1 was ended by SIGKILL" in done.stderr


@pytest.mark.usefixtures("can_lab")
def test_a_command_that_does_not_exist_is_a_wrong_command_line(tmp_path: Path) -> None:
    done = lab("--", "no-such-command", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "thinwire lab: error: No such file or directory: no-such-command\n"


@pytest.mark.usefixtures("can_lab")
def test_a_folder_with_another_labs_counts_is_refused(tmp_path: Path) -> None:
    assert lab("--out", "x", "--", "true", cwd=tmp_path).returncode == 0
    counts = (tmp_path / "x" / "counters.jsonl").read_text()
    done = lab("--out", "x", "--", "true", cwd=tmp_path)
    assert done.returncode == 2
    assert "--out holds another lab's counts; got " in done.stderr
    assert (tmp_path / "x" / "counters.jsonl").read_text() == counts


def small_train(folder: Path) -> list[str]:
    """Write a little text, and return a command that trains a small model on it for a few steps."""
    texts = folder / "texts"
    texts.mkdir()
    for number, text in enumerate(TEXTS):
        (texts / f"{number:03}.txt").write_text(text)
    train = ["train", "--steps", "4", "--model", "nano", "--data", "texts", "--tokenizer", "bytes", "--seq-len", "32"]
    return [*THINWIRE, *train, "--batch-size", "2", "--cache-dir", "cache", "--out", "run", "--eval-every", "0"]


@pytest.mark.usefixtures("can_lab")
def test_thinwire_train_runs_between_two_sites_in_one_command(tmp_path: Path) -> None:
    words = ["--rate", "50mbit/10mbit", "--latency", "30ms", "--out", "lab"]
    done = lab(*words, "--", *small_train(tmp_path), "--sync-interval", "2", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "validation loss of the global parameters" in done.stdout
    sent = json.loads((tmp_path / "run" / "summary.json").read_text())
    hosts = json.loads((tmp_path / "lab" / "summary.json").read_text())["hosts"]
    for host in hosts:
        assert host["sent_bytes"] > 100_000, sent
    # and each rank wrote down what its kernel counts of the connections to the other one
    flows = read_files([tmp_path / "run"]).flows
    assert {(one.rank, one.peer) for one in flows} == {(0, 1), (1, 0)}
    for one in flows:
        assert one.busy_s > 0 and one.held_s <= one.busy_s and one.num_bytes <= hosts[one.rank]["sent_bytes"]


@pytest.mark.usefixtures("can_lab")
def test_two_hosts_probe_their_wires_plan_and_train_in_one_command(tmp_path: Path) -> None:
    chosen = ["--method", "auto", "--sync-interval", "2"]
    words = ["--rate", "20mbit", "--out", "lab"]
    done = lab(*words, "--", *small_train(tmp_path), *chosen, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    plan = load_plan(tmp_path / "run" / "plan.json")
    ran = json.loads((tmp_path / "run" / "config.json").read_text())
    assert plan.hosts == ("host-0", "host-1") and plan.settings["model"] == "nano"
    assert ran["run"]["expected_step_s"] == plan.prediction.step_s > 0
    assert (ran["sync"]["method"], ran["sync"]["sync_interval"]) == (plan.settings["method"], 2)
    assert "plan: " in done.stderr and "validation loss of the global parameters" in done.stdout


@pytest.mark.usefixtures("can_lab")
def test_the_doctor_tries_all_and_tells_it_in_words_and_as_json() -> None:
    told = subprocess.run([*THINWIRE, "lab", "doctor", "--json"], capture_output=True, text=True, timeout=120)
    checks = {check["name"]: check for check in json.loads(told.stdout)}
    assert list(checks) == ["programs", "hosts", "rates", "links", "delays"]
    assert told.returncode == int(not all(check["is_ok"] for check in checks.values()))
    assert checks["hosts"]["is_ok"], checks["hosts"]
    for check in checks.values():
        assert check["is_ok"] or check["remedy"]


@pytest.mark.usefixtures("can_lab")
def test_without_its_programs_a_lab_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = lab("--", "true", cwd=tmp_path, PATH=str(tmp_path / "empty"))
    assert done.returncode == 1
    assert done.stderr == (
        "thinwire lab: error: a lab needs the program 'ip', which is not here; install it: apt install iproute2\n"
    )
    assert not (tmp_path / "runs").exists()
    told = lab("doctor", cwd=tmp_path, PATH=str(tmp_path / "empty"))
    assert told.returncode == 1
    assert told.stdout.startswith("MISSING  programs: a lab needs the program 'ip'")
    assert len(told.stdout.splitlines()) == 2, "what needs the programs is not tried"


def test_on_another_system_a_lab_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert main(["lab", "--", "true"]) == 1
    told = capsys.readouterr().err
    reason = "a lab is made of Linux network namespaces, and this is darwin; use a Linux machine"
    assert told == f"thinwire lab: error: {reason}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Return a folder that everybody may use, unlike those of pytest."""
    with tempfile.TemporaryDirectory(prefix="thinwire-test-") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def as_nobody() -> list[str]:
    """Return the words that make a command one of a user without rights."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "sh", "-c", 'exec "$@"', "sh"]


def python_of_nobody(folder: Path, variables: dict[str, str]) -> str:
    """Return an interpreter by which that user can run thinwire, or skip with the reason."""
    # a virtual environment may be made of an interpreter in a home that others may not enter
    version = f"python3.{sys.version_info.minor}"
    for python in filter(None, (sys.executable, shutil.which(version, path=os.defpath))):
        words = [*as_nobody(), python, "-c", "import thinwire.cli.lab"]
        tried = subprocess.run(words, capture_output=True, env=variables, timeout=60, cwd=folder)
        if tried.returncode == 0:
            return python
    pytest.skip("a user without rights can run no interpreter that has thinwire here")


def can_as_nobody(*words: str) -> bool:
    return subprocess.run([*as_nobody(), *words], capture_output=True, timeout=20).returncode == 0


@pytest.mark.usefixtures("can_lab")
@pytest.mark.parametrize("latency", ["0ms", "2ms"])
def test_a_user_without_rights_has_a_lab_where_the_kernel_allows_it_and_else_the_remedy(
    open_folder: Path, latency: str
) -> None:
    own = {"PYTHONPATH": ":".join(filter(None, sys.path)), "TMPDIR": str(open_folder), "PYTHONDONTWRITEBYTECODE": "1"}
    # what such a user ran cannot be written down beside the others' coverage
    variables = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")} | own
    python = python_of_nobody(open_folder, variables)
    own_world = ["unshare", "--user", "--map-root-user", "--net"]
    has_netem = can_as_nobody(*own_world, "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    has_tap = can_as_nobody("sh", "-c", "exec 3<>/dev/net/tun")
    words = ["-m", "thinwire.cli.main", "lab", "--rate", "20mbit", "--latency", latency, "--out", "x", "--"]
    done = subprocess.run(
        [*as_nobody(), python, *words, "sh", "-c", "hostname; id -u"],
        capture_output=True, text=True, timeout=60, cwd=open_folder, env=variables,
    )  # fmt: skip
    if can_as_nobody(*own_world, "true") and (latency == "0ms" or has_netem or has_tap):
        assert done.stdout == "host-0\n0\n", done.stderr
        assert (open_folder / "x" / "host-1.out").read_text() == "host-1\n0\n"
        return
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    if not can_as_nobody(*own_world, "true"):
        assert "the kernel does not let this user" in done.stderr and "run as root, or allow user" in done.stderr
    elif Path("/dev/net/tun").exists():
        assert "this user may not use /dev/net/tun" in done.stderr and "chmod 0666 /dev/net/tun" in done.stderr
    else:
        assert "this kernel refuses both" in done.stderr and "modprobe tun" in done.stderr
