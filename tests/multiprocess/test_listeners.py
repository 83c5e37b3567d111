"""Every listening socket of every command, compared with the table in `docs/reference/listeners.md`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest
from listeners import EVERY, Command, Expected, Listener, check, documented
from live_processes import name_of
from namespaces import ADDRESSES, CABLE, Hosts
from processes import free_port
from training_runs import DOCUMENTS, OPTIONS

from thinwire.elastic.invitation import Invitation, read_invitation
from thinwire.training.elastic.job import LOCAL_FILE, LocalSettings
from thinwire.transport.secret import Secret, make_secret, read_secret

CLI = [sys.executable, "-m", "thinwire.cli.main"]
WORKER = "thinwire.cli.processes replica "
MAIN = "thinwire.cli.main"

TRAIN_GLOO = [Expected(id="train-gloo", process=WORKER)]
TRAIN_WIRE = [Expected(id="train-wire", process=WORKER)]
ELASTIC = [
    Expected(id=name, process=f"thinwire.cli.processes {kind}")
    for name in ("elastic-wire", "elastic-ranks")
    for kind in ("elastic-replica", "standby-replica", "replica-rank")
]
COORDINATOR = [Expected(id="elastic-coordinator", process="thinwire.cli.processes coordinator")]
TEST_HERE = [Expected(id="diagnose-test-local", process="thinwire.cli.processes diagnose-rank")]
DASHBOARD = [Expected(id="dashboard", process=MAIN)]
STORE = [Expected(id="hosts-store", process=MAIN)]
REACH_CHECK = [Expected(id="hosts-check", process=MAIN)]
HOSTS_GLOO = [Expected(id="hosts-gloo", process=MAIN)]
HOSTS_WIRE = [Expected(id="hosts-wire", process=MAIN)]
SPLIT = [Expected(id="split", process=MAIN)]
RELAY = [Expected(id="relay", process=MAIN)]
RELAY_LOCAL = [Expected(id="relay-local", process=MAIN)]
BURSTS = [Expected(id="watch-bursts", process="watched.py")]
HERE = [*TRAIN_GLOO, *TRAIN_WIRE, *ELASTIC, *COORDINATOR, *TEST_HERE, *DASHBOARD, *RELAY_LOCAL]
BETWEEN_HOSTS = [*STORE, *REACH_CHECK, *HOSTS_GLOO, *HOSTS_WIRE, *SPLIT, *RELAY, *BURSTS]

ATTACKER = """
import json, socket, sys

def attempt(port):
    try:
        socket.create_connection((sys.argv[1], port), timeout=20).close()
    except OSError as error:
        return type(error).__name__
    return "connected"

print(json.dumps({port: attempt(int(port)) for port in sys.argv[2:]}))
"""

WATCHED = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
import thinwire

here = Path(sys.argv[1])
dist.init_process_group("gloo")
(here / f"joined-{dist.get_rank()}").touch()
while not (here / "go").exists():
    time.sleep(0.05)
thinwire.watch(here / "records", probe_wires=True)
(here / f"watched-{dist.get_rank()}").touch()
while True:
    time.sleep(0.05)
    dist.all_reduce(torch.ones(8))
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(DOCUMENTS):
        (folder / f"{number}.txt").write_text(text)
    return folder


def train(texts: Path, out: Path, *more: str) -> list[str]:
    words = ["--steps", "1000000", "--data", str(texts), "--cache-dir", str(texts / ".cache"), "--out", str(out)]
    return [*CLI, "train", *words, *OPTIONS, *more]


def rank(number: int, port: int) -> dict[str, str]:
    """Return the environment of a rank that is started by hand, one a host."""
    names = {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return {**names, "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": CABLE}


def at(port: int, expected: Expected) -> Expected:
    return dataclasses.replace(expected, port=port)


def secret_in(folder: Path) -> list[str]:
    make_secret(folder / "job.secret")
    return ["--secret", str(folder / "job.secret")]


def tried_from_outside(hosts: Hosts, found: set[Listener]) -> dict[str, str]:
    """Return what became of a connection from the other host to each port."""
    ports = sorted({str(listener.port) for listener in found})
    tried: dict[str, str] = json.loads(hosts.on(1, sys.executable, "-c", ATTACKER, ADDRESSES[0], *ports))
    return tried


def test_the_table_has_no_row_that_no_scenario_below_meets() -> None:
    assert set(documented()) == {one.id for one in (*HERE, *BETWEEN_HOSTS)}


@pytest.mark.parametrize("is_secret", [False, True], ids=["without a secret", "with a secret"])
def test_replicas_of_one_machine_listen_on_loopback_alone_and_another_host_is_refused(
    texts: Path, tmp_path: Path, hosts: Hosts, is_secret: bool
) -> None:
    run = tmp_path / "run"
    words = train(texts, run, "--replicas", "2", *(secret_in(tmp_path) if is_secret else []))
    with Command(words, hosts=hosts, host=0, log=tmp_path / "log") as command:
        now = command.until((run / "metrics-replica-1.jsonl").exists, "metrics")
        expected = TRAIN_WIRE if is_secret else TRAIN_GLOO
        # whoever reaches a store of torch's can overwrite what the launcher unpickles
        tried = tried_from_outside(hosts, now)
        assert tried and set(tried.values()) == {"ConnectionRefusedError"}, tried
        check(now, expected=expected)
        check(command.ever, expected=expected)


def test_an_elastic_run_and_a_host_that_joins_it(texts: Path, tmp_path: Path, hosts: Hosts) -> None:
    run, joined, secret = tmp_path / "run", tmp_path / "joined", secret_in(tmp_path)
    port = free_port()
    more = ["--elastic", "--replicas", "1", "--ranks-per-replica", "2", "--port", str(port)]
    first = train(texts, run, *more, *secret)
    first[first.index("--batch-size") + 1] = "2"  # one sequence a rank
    coordinator = [at(port, *COORDINATOR)]
    with contextlib.ExitStack() as commands:
        one = commands.enter_context(Command(first, hosts=hosts, host=0, log=tmp_path / "first.log"))
        one.until((run / LOCAL_FILE).exists, "the address")
        place = dataclasses.replace(read_invitation(LocalSettings.load(run).invitation), host=ADDRESSES[0])
        second = [
            *CLI, "join", place.text(), *secret, "--out", str(joined), "--ranks-per-replica", "2", "--quiet",
            "--cache-dir", str(texts / ".cache"), "--threads", "1", "--data", str(texts),
        ]  # fmt: skip
        other = commands.enter_context(Command(second, hosts=hosts, host=1, log=tmp_path / "second.log"))
        one.until(lambda: any(run.glob("rounds-replica-*.jsonl")), "a round")
        there = other.until(lambda: any(joined.glob("metrics-replica-*.jsonl")), "metrics of the host that joined")
        here = one.listeners()
        for found in (here, one.ever):
            check(found, expected=[*ELASTIC, *coordinator])
        for found in (there, other.ever):
            check(found, expected=ELASTIC)


@pytest.mark.parametrize("is_secret", [False, True], ids=["without a secret", "with a secret"])
@pytest.mark.parametrize("verb", ["train", "probe"])
def test_ranks_started_by_hand_on_two_hosts(
    texts: Path, tmp_path: Path, hosts: Hosts, verb: str, is_secret: bool
) -> None:
    port = free_port()
    secret = secret_in(tmp_path) if is_secret else []
    outs = [tmp_path / f"host-{number}" for number in (0, 1)]
    little = ["--budget", "5s", "--step-time", "100ms", "--most", "1MiB", "--batch-size", "1", "--seq-len", "16"]
    probe = [*CLI, "probe", *secret, *little, "--threads", "1"]
    words = [
        train(texts, out, *secret) if verb == "train" else [*probe, "--out", str(out.with_suffix(".json"))]
        for out in outs
    ]
    store, data = at(port, *STORE), HOSTS_WIRE if is_secret else HOSTS_GLOO
    with Command(words[0], hosts=hosts, host=0, log=tmp_path / "log-0", environment=rank(0, port)) as first:
        # rank 0 waits for the other: its store, and a port by which the other sees whether it is reached
        waiting = first.until(lambda: len(first.listeners()) >= 2, "the meeting point")
        check(waiting, expected=[store, *(HOSTS_WIRE if is_secret else REACH_CHECK)])
        with Command(words[1], hosts=hosts, host=1, log=tmp_path / "log-1", environment=rank(1, port)) as second:
            if verb == "train":
                here = first.until((outs[0] / "metrics-replica-0.jsonl").exists, "metrics")
                check(here, expected=[store, *data])
                check(second.listeners(), expected=data)
            else:
                first.until(lambda: first.process.poll() == 0, "the end of the probe")
            check(first.ever, expected=[store, *REACH_CHECK, *data], must_see=[])
            check(second.ever, expected=[*REACH_CHECK, *data], must_see=[])


def test_a_test_of_wires_between_hosts_and_its_rehearsal(tmp_path: Path, hosts: Hosts) -> None:
    port = free_port()
    words = [*CLI, "diagnose", "test", "--deadline", "240s"]
    with Command(words, hosts=hosts, host=0, log=tmp_path / "log-0", environment=rank(0, port)) as first:
        now = first.until(lambda: len(first.listeners()) >= 2, "the meeting point")
        check(now, expected=[at(port, *STORE), *HOSTS_WIRE])
    with Command([*words, "--replicas", "2"], hosts=hosts, host=0, log=tmp_path / "log-local") as rehearsal:
        now = rehearsal.until(lambda: len(rehearsal.listeners()) >= 1, "a wire")
        check(now, expected=TEST_HERE)


def test_a_dashboard(tmp_path: Path, hosts: Hosts) -> None:
    port = free_port()
    words = [*CLI, "dashboard", str(tmp_path), "--port", str(port)]
    with Command(words, hosts=hosts, host=0, log=tmp_path / "log") as command:
        now = command.until(lambda: f":{port}/" in command.log.read_text(), "its address")
        check(now, expected=[at(port, *DASHBOARD)])
        assert set(tried_from_outside(hosts, now).values()) == {"ConnectionRefusedError"}


def test_a_server_of_middle_layers(tmp_path: Path, hosts: Hosts) -> None:
    port, model = free_port(), tmp_path / "config.json"
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    model.write_text(json.dumps({"model_type": "llama", "num_attention_heads": 2, **sizes}))
    words = [*CLI, "split", "serve", "--model", f"hf:{model}", "--layers", "1:2", *secret_in(tmp_path)]
    with Command([*words, "--port", str(port)], hosts=hosts, host=0, log=tmp_path / "log") as command:
        now = command.until(lambda: f"at port {port}" in command.log.read_text(), "its port")
        check(now, expected=[at(port, *SPLIT)])


def test_a_relay_and_a_command_that_asks_by_it(tmp_path: Path, hosts: Hosts) -> None:
    port, token = free_port(), tmp_path / "relay.token"
    words = [*CLI, "relay", "--port", str(port), "--token", str(token)]
    with Command(words, hosts=hosts, host=0, log=tmp_path / "log") as relay:
        now = relay.until(lambda: f"at port {port}" in relay.log.read_text(), "its port")
        check(now, expected=[at(port, *RELAY)])
        address = Invitation(
            host=ADDRESSES[0], port=port, secret=Secret(key=bytes(32)), relay_token=read_secret(token)
        ).text()  # fmt: skip
        with Command([*CLI, "status", address], hosts=hosts, host=1, log=tmp_path / "status") as status:
            check(status.until(lambda: len(status.listeners()) >= 1, "a way"), expected=RELAY_LOCAL)


def test_bursts_of_a_watched_job(tmp_path: Path, hosts: Hosts) -> None:
    script = tmp_path / "watched.py"
    script.write_text(WATCHED)
    port = free_port()
    source = os.pathsep.join([str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")])

    def started(number: int) -> Command:
        return Command(
            [sys.executable, str(script), str(tmp_path)], hosts=hosts, host=number, log=tmp_path / f"log-{number}",
            environment={**rank(number, port), "PYTHONPATH": source},
        )  # fmt: skip

    with started(0) as first, started(1) as second:
        both = (first, second)
        for number, command in enumerate(both):
            command.until((tmp_path / f"joined-{number}").exists, "a group")
        of_torch = [command.listeners() for command in both]
        (tmp_path / "go").touch()
        for number, (command, before) in enumerate(zip(both, of_torch, strict=True)):
            now = command.until((tmp_path / f"watched-{number}").exists, "a watch")
            check(now - before, expected=BURSTS)
        # what torch itself opens, and what the page says of it
        assert any(one.port == port and one.interface == EVERY for one in of_torch[0]), of_torch[0]


def test_a_terminal_that_watches_and_a_lab_listen_nowhere(tmp_path: Path, hosts: Hosts) -> None:
    with Command([*CLI, "watch", str(tmp_path)], hosts=hosts, host=0, log=tmp_path / "watch.log") as watch:
        watch.until(lambda: bool(watch.log.read_text().strip()), "words")
        assert not watch.ever
    in_lab = [*CLI, "lab", "--hosts", "2", "--", "sleep", "1000"]
    with Command(in_lab, hosts=hosts, host=0, log=tmp_path / "lab.log") as lab:
        lab.until(lambda: "sleep" in programs(lab), "the hosts' commands")
        assert not lab.ever


def programs(command: Command) -> set[str]:
    return set(map(name_of, command.family()))
