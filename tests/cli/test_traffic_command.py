"""`thinwire traffic` on the command line, and the page that documents it."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from thinwire.cli.main import main
from thinwire.cli.traffic import TrafficCompareOptions, TrafficPlanOptions, TrafficProbeOptions

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = [
    "--fabric", str(ROOT / "examples/traffic/fabric-2x4.json"), "--flows", str(ROOT / "examples/traffic/flows-4.json"),
]  # fmt: skip


def test_the_options_are_those_that_were_agreed_on() -> None:
    options = [
        f"{command} --{field.name.replace('_', '-')}"
        for command, kind in (
            ("plan", TrafficPlanOptions),
            ("compare", TrafficCompareOptions),
            ("probe", TrafficProbeOptions),
        )
        for field in dataclasses.fields(kind)
    ]
    frozen = Path(__file__).with_name("options_of_traffic.txt").read_text().splitlines()
    assert sorted(options) == frozen, "an option is a promise: change tests/cli/options_of_traffic.txt and CHANGELOG.md"


def test_a_plan_is_one_json_object_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert main(["traffic", "plan", *EXAMPLE, "--method", "ethereal", "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(out.read_text())
    assert (found["method"], found["max_congestion"], found["bound"], found["pieces"]) == ("ethereal", 1.0, 1.0, 4)
    assert found["completion_s"] == pytest.approx(10.0)
    assert sorted(piece["spine"] for flow in found["assignment"] for piece in flow["pieces"]) == [0, 1, 2, 3]
    fields = {"share", "spine", "rail", "destination_rail", "source_port", "spare_source_ports", "destination_port"}
    assert set(found["assignment"][0]["pieces"][0]) == fields
    assert found["assignment"][0]["pieces"][0]["source_port"] is None, "no probe was given"
    assert found["settings"]["nccl_is_tried"] is False


def test_the_commands_of_the_page_print_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/traffic.md").read_text()
    shown = re.findall(r"```sh\nthinwire ([^`]*)```\n\n```text\n(.*?)```", page, re.DOTALL)
    assert len(shown) == 2
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for command, output in shown:
        assert main(shlex.split(command.replace("\\\n", " "))) == 0
        assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == output.splitlines()
    assert json.loads((tmp_path / "plan.json").read_text())["format"] == "thinwire-traffic-plan"


def test_a_probe_puts_source_ports_into_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    routers = {str(20_000 + n): f"10.80.0.{n % 4 + 1}" for n in range(16)}
    for source in ("host-2", "host-3"):
        probe = {"format": "thinwire-path-probe", "version": 1, "source": source, "destination_port": 29_600}
        (tmp_path / f"{source}.json").write_text(
            json.dumps({**probe, "routers": {"host-0": routers, "host-1": routers}})
        )
    flows = ["--flows", str(ROOT / "examples/traffic/connections-4.json")]
    assert main(["traffic", "plan", *EXAMPLE[:2], *flows, "--probe", str(tmp_path), "--json"]) == 0
    pieces = [piece for flow in json.loads(capsys.readouterr().out)["assignment"] for piece in flow["pieces"]]
    assert sorted(piece["spine"] for piece in pieces) == [0, 1, 2, 3]
    for piece in pieces:
        ports = [piece["source_port"], *piece["spare_source_ports"]]
        assert [routers[str(port)] for port in ports] == [f"10.80.0.{piece['spine'] + 1}"] * 4
    assert main(["traffic", "plan", *EXAMPLE[:2], *flows, "--probe", str(tmp_path)]) == 0
    assert "port" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "--fabric is missing"),
        ([*EXAMPLE[:2], "--source", "host-9"], "host-9"),
        ([*EXAMPLE[:2], "--source", "host-2", "--to", "host-2"], "host-2"),
        ([*EXAMPLE[:2], "--source", "host-2", "--source-ports", "7"], "--source-ports"),
        ([*EXAMPLE[:2], "--source", "host-2", "--port", "0"], "--port"),
        ([*EXAMPLE[:2], "--source", "host-2", "--by", "luck"], "unknown --by; got 'luck'"),
        (
            [*EXAMPLE[:2], "--source", "host-2", "--by", "timing", "--load-rate", "200mbit"],
            "a load would not fill one path alone; got 200 Mbit/s",
        ),
        (
            [*EXAMPLE[:2], "--source", "host-2", "--by", "timing", "--load-rate", "10mbit"],
            "a load would not fill one path alone; got 10.0 Mbit/s",
        ),
        (
            [*EXAMPLE[:2], "--source", "host-2", "--load-rate", "20mbit"],
            "--load-rate is for a probe by timing; got 20mbit with --by time-to-live",
        ),
    ],
)
def test_a_wrong_probe_is_refused_before_anything_is_sent(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["traffic", "probe", *words]) == 2
    assert problem in capsys.readouterr().err


def test_a_path_without_answering_routers_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--source", "host-2", "--to", "host-0=127.0.0.1", "--timeout", "50ms", "--out", str(tmp_path)]
    assert main(["traffic", "probe", *EXAMPLE[:2], *words]) == 1
    assert "no router answered at hop 2 on the way to host-0" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_probe_by_timing_writes_paths_without_addresses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class TwoPaths:
        """Even source ports take one path and odd ones the other; each load fills the next."""

        def __init__(self, destinations: dict[str, str], port: int, *, source_ports: range, load_bits_per_s: float):
            assert (destinations, port, load_bits_per_s) == ({"host-0": "127.0.0.1"}, 29_600, 30e6)
            self.ports, self.filled, self.loads = source_ports, None, 0

        def round_trips(self) -> dict[tuple[str, int], float]:
            return {("host-0", port): 0.2 if port % 2 == self.filled else 0.001 for port in self.ports}

        @contextmanager
        def load(self, number: int) -> Iterator[None]:
            self.filled, self.loads = self.loads % 2, self.loads + 1
            yield
            self.filled = None

    monkeypatch.setattr("thinwire.cli.traffic.TcpPaths", TwoPaths)
    words = ["--source", "host-2", "--to", "host-0=127.0.0.1", "--by", "timing", "--load-rate", "30mbit"]
    ports = ["--source-ports", "20000-20003", "--out", str(tmp_path)]
    assert main(["traffic", "probe", *EXAMPLE[:2], *words, *ports]) == 0
    assert "host-2 to host-0: 4 source ports over 2 paths\n  path-0  2 ports\n" in capsys.readouterr().out
    routers = json.loads((tmp_path / "host-2.json").read_text())["routers"]["host-0"]
    assert routers == {"20000": "path-0", "20001": "path-1", "20002": "path-0", "20003": "path-1"}


def test_a_table_states_the_result_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["traffic", "plan", *EXAMPLE, "--failed", "leaf-0/spine-1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == ("ethereal: fullest cable carries 1.33 flows (bound 1.33); complete after 13.3 s")
    assert lines[1] == "6 connections for 4 flows"
    assert lines[4 + 6 : 4 + 6 + 3] == ["", "gloo (rails; name your own interfaces):", "  GLOO_SOCKET_IFNAME=eth0"]
    assert lines[-6] == "nccl (not tried on GPUs):" and "  NCCL_IB_QPS_PER_CONNECTION=3" in lines[-5:]


def test_the_rounds_of_a_method_are_planned_and_timed_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--method-of", "streaming-diloco", "--sync-interval", "12", "--overlap-steps", "2", "--method", "c4p"]
    assert main(["traffic", "plan", *EXAMPLE[:2], *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rounds = found["rounds"]
    # three fragments in turn, each once an interval, and each waited for two steps later
    assert sorted(one["fragments"][0] for one in rounds) == [0, 1, 2]
    assert [one["step"] for one in rounds] == [16, 20, 24] and {one["steps_until_applied"] for one in rounds} == {2}
    assert len(found["assignment"]) == 12, "every pair of hosts"
    # a spine of 10 Mbit/s carries one pair of hosts each way
    for one in rounds:
        assert one["seconds"] == pytest.approx(one["bytes"] / 12 * 8 / 10e6, rel=1e-3)
    assert sum(one["seconds"] for one in rounds) == pytest.approx(found["completion_s"], rel=1e-3)
    assert main(["traffic", "plan", *EXAMPLE[:2], *words]) == 0
    assert "rounds of an interval over these paths" in capsys.readouterr().out


def test_methods_are_compared_with_and_without_dead_cables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / "figure.svg"
    arguments = ["traffic", "compare", *EXAMPLE, "--failed", "leaf-0/spine-1", "--figure", str(figure)]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "all cables work\n" in text and "dead: leaf-0/spine-1\n" in text
    assert ET.fromstring(figure.read_text()).tag.endswith("svg")
    assert main([*arguments, "--json", "--method", "c4p"]) == 0
    cases = json.loads(capsys.readouterr().out)
    assert [rows[0]["max_congestion"] for rows in cases.values()] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["plans"], "try plan", 2),
        (["plan"], "--fabric is missing", 2),
        (["plan", *EXAMPLE[:2]], "there are no flows", 2),
        (["plan", *EXAMPLE, "--method-of", "diloco"], "--flows does not go with --method-of", 2),
        (["plan", *EXAMPLE[:2], "--method-of", "dilocoo"], "try diloco", 2),
        (["plan", *EXAMPLE[:2], "--method-of", "diloco", "--replicas", "5"], "5 replicas and 4 hosts", 2),
        (["plan", *EXAMPLE[:2], "--method-of", "diloco", "--replicas", "0"], "--replicas is too small; got 0", 2),
        (["plan", *EXAMPLE, "--codec", "e3m0"], "--codec is for the rounds of a training method", 2),
        (["plan", *EXAMPLE[:2], "--method-of", "all-reduce", "--sync-interval", "5"], "--sync-interval does not go", 2),
        (["plan", *EXAMPLE, "--run", "runs/x"], "--flows does not go with --run", 2),
        (["plan", *EXAMPLE[:2], "--run", "runs/none"], "there is no run", 1),
        (["plan", *EXAMPLE, "--method", "color"], "try colour", 2),
        (["plan", *EXAMPLE, "--k", "0"], "--k is too small", 2),
        (["compare", *EXAMPLE, "--seeds", "0"], "--seeds is too small", 2),
        (["compare", *EXAMPLE, "--failed", "spine-9"], "no such cable", 2),
        (["plan", "--fabric", EXAMPLE[3], "--flows", EXAMPLE[1]], "is no thinwire-fabric file", 1),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(
    arguments: list[str], message: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["traffic", *arguments]) == code
    told = capsys.readouterr()
    assert message in told.err and told.err.count("\n") == 1 and not told.out
