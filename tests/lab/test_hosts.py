"""Hosts of a lab: names, environment, commands and their ends, and what the kernel counted for each."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from live_processes import DEADLINE_S
from traffic_flow import flowing

from thinwire.errors import LabError
from thinwire.lab import HostProcess, Lab
from thinwire.lab.counters import peak_rate, sent_by

PYTHON = [sys.executable, "-c"]
TELL = """
import json, os, socket
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PET_NODE_RANK", "PET_NNODES", "EXTRA")
told = {name: os.environ.get(name) for name in names}
told["hostname"] = socket.gethostname()
told["addresses"] = [socket.gethostbyname(f"host-{host}") for host in range(3)]
both = socket.AI_V4MAPPED | socket.AI_ALL
told["both"] = socket.getaddrinfo("host-1", 80, family=socket.AF_INET6, flags=both)[0][4][0]
print(json.dumps(told))
"""
# Every host greets every other one by TCP, and says whom it heard.
GREET = """
import json, os, socket, threading, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
server = socket.create_server(("", 7777), backlog=64)
def greet(other):
    end = time.monotonic() + 100
    while time.monotonic() < end:
        try:
            with socket.create_connection((f"host-{other}", 7777), timeout=5) as connection:
                connection.sendall(bytes([rank]))
                return
        except OSError:
            time.sleep(0.05)
others = [other for other in range(size) if other != rank]
threads = [threading.Thread(target=greet, args=(other,)) for other in others]
for thread in threads:
    thread.start()
server.settimeout(20)
heard = []
for _ in others:
    connection, (address, _) = server.accept()
    heard.append([connection.recv(1)[0], address])
for thread in threads:
    thread.join()
print(json.dumps(sorted(heard)))
"""
MAKE = """
from thinwire.errors import LabError
from thinwire.lab import Lab
try:
    Lab(hosts=1)
except LabError as error:
    print(error)
"""
ALL_REDUCE = """
import datetime, os, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
tensor = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(tensor)
print(os.environ["RANK"], dist.get_world_size(), tensor[-1].item())
dist.destroy_process_group()
"""
# Writes a line now and then, and so does a child that has left the command's session.
BEAT = """
import subprocess, sys, time
if len(sys.argv) == 2:
    subprocess.Popen([sys.executable, "-c", open(sys.argv[1] + ".py").read(), sys.argv[1], "x"], start_new_session=True)
while True:
    print(sys.argv[-1], file=open(sys.argv[1], "a"), flush=True)
    time.sleep(0.02)
"""


def wait_until(found: object, *, deadline_s: float = 120.0) -> None:
    assert callable(found)
    end_s = time.monotonic() + deadline_s
    while not found():
        assert time.monotonic() < end_s, "it did not come to pass"
        time.sleep(0.02)


def test_every_host_has_a_name_knows_the_others_and_finds_its_rank_and_rendezvous() -> None:
    with Lab(hosts=3) as lab:
        results = lab.run([*PYTHON, TELL], deadline_s=30, environment={"EXTRA": "1"})
        told = [json.loads(result.stdout) for result in results]
        assert [lab.address(host) for host in range(3)] == told[0]["addresses"]
    for host, words in enumerate(told):
        assert words["hostname"] == f"host-{host}"
        assert words["addresses"] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
        assert words["both"] == "::ffff:10.77.0.2", "a socket for both versions of IP finds it too"
        assert (words["RANK"], words["WORLD_SIZE"], words["LOCAL_RANK"]) == (str(host), "3", "0")
        assert (words["PET_NODE_RANK"], words["PET_NNODES"]) == (str(host), "3")
        assert words["MASTER_ADDR"] == "10.77.0.1"
        assert words["EXTRA"] == "1"
    assert len({words["MASTER_PORT"] for words in told}) == 1
    assert socket.gethostname() != "host-0", "the names are the hosts' own"


@pytest.mark.parametrize("as_torchrun", [False, True])
def test_a_gloo_script_averages_over_the_hosts(as_torchrun: bool, tmp_path: Path) -> None:
    script = tmp_path / "average.py"
    script.write_text(ALL_REDUCE)
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "1"] if as_torchrun else []
    with Lab(hosts=2, rate="50mbit") as lab:
        results = lab.run([sys.executable, *launch, str(script)], deadline_s=150, environment={"OMP_NUM_THREADS": "1"})
        counters = lab.counters()
    for result in results:
        assert result.exit_code == 0, result.stderr
        assert result.stdout.split() == [str(result.host), "2", "3.0"]
        assert counters[result.host].sent_bytes > 4000, "the bytes crossed the host's interface"


def test_a_result_holds_the_exit_code_and_both_outputs_of_its_host() -> None:
    with Lab(hosts=3) as lab:
        results = lab.run(["sh", "-c", "echo out-$RANK; echo err-$RANK >&2; exit $RANK"], deadline_s=120)
    assert [(result.host, result.exit_code) for result in results] == [(0, 0), (1, 1), (2, 2)]
    assert [result.stdout for result in results] == ["out-0\n", "out-1\n", "out-2\n"]
    assert [result.stderr for result in results] == ["err-0\n", "err-1\n", "err-2\n"]


def test_a_command_that_a_signal_ended_has_that_signals_number_as_exit_code() -> None:
    with Lab(hosts=2) as lab:
        assert [result.exit_code for result in lab.run(["sh", "-c", "kill -USR1 $$"], deadline_s=120)] == [
            -signal.SIGUSR1
        ] * 2
        sleeper = lab.start(["sleep", "60"], host=1)
        assert sleeper.exit_code is None
        sleeper.terminate()
        assert sleeper.wait(deadline_s=10) == -signal.SIGTERM
        sleeper.kill()  # one that has ended is left alone
        assert sleeper.exit_code == -signal.SIGTERM


def test_commands_start_with_the_usual_signals_even_where_the_lab_ignores_them() -> None:
    with Lab(hosts=1) as lab:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            sleeper = lab.start(["sleep", "60"], host=0)
            sleeper.send_signal(number)
            assert sleeper.wait(deadline_s=10) == -number


@pytest.mark.parametrize(
    ("command", "more", "reason"),
    [
        (["no-such-command"], {}, "no-such-command"),
        (["/etc"], {}, "Permission denied"),
        ([], {}, "at least one word"),
        (["true"], {"host": 2}, "this lab has no such host; got 2; allowed 0 to 1"),
        (["true"], {"host": -1}, "this lab has no such host; got -1"),
        (["true"], {"folder": "/no/such/folder"}, "/no/such/folder"),
        (["a\0b"], {}, "null byte"),
    ],
)
def test_a_command_that_cannot_start_is_a_value_error_and_the_lab_goes_on(
    command: list[str], more: dict[str, object], reason: str
) -> None:
    with Lab(hosts=2) as lab:
        with pytest.raises(ValueError, match=reason):
            lab.start(command, **{"host": 0, **more})  # type: ignore[arg-type]
        assert lab.run(["hostname"], deadline_s=120)[1].stdout == "host-1\n"


def test_a_command_that_does_not_end_is_ended_at_the_deadline() -> None:
    with Lab(hosts=2) as lab:
        began_s = time.monotonic()
        with pytest.raises(TimeoutError, match=r"sleep has not ended on every host within 0\.3 s"):
            lab.run(["sleep", "600"], deadline_s=0.3)
        assert time.monotonic() - began_s < 60, "it is not waited for to its end"
        wait_until(lambda: lab.kill_host(0) == lab.kill_host(1) == 0)


def test_commands_begin_in_the_callers_folder_or_in_the_one_they_are_given(tmp_path: Path) -> None:
    with Lab(hosts=1) as lab, tempfile.TemporaryFile() as output:
        assert lab.run(["pwd", "-P"], deadline_s=120)[0].stdout.strip() == str(Path.cwd().resolve())
        lab.start(["pwd", "-P"], host=0, stdout=output, folder=tmp_path).wait(deadline_s=120)
        output.seek(0)
        assert output.read().decode().strip() == str(tmp_path.resolve())


def test_sixteen_hosts_reach_each_other() -> None:
    with Lab(hosts=16, rate="100mbit") as lab:
        results = lab.run([*PYTHON, GREET], deadline_s=200)
    for result in results:
        assert result.exit_code == 0, result.stderr
        others = [[host, f"10.77.0.{host + 1}"] for host in range(16) if host != result.host]
        assert json.loads(result.stdout) == others


def test_two_labs_at_once_do_not_see_each_other() -> None:
    connect = "import socket; socket.create_connection(('10.77.0.1', 8888), timeout=5)"
    with Lab(hosts=2) as one, Lab(hosts=2) as other, flowing(one, 1, 0, port="8888") as flow:
        before = other.counters()
        outcome = other.run([*PYTHON, connect], deadline_s=120)[1]
        assert "ConnectionRefusedError" in outcome.stderr, "the other host of that address does not listen"
        flow.wait_for_bytes(more=10_000_000)
        for host, count in enumerate(other.counters()):
            assert count.received_bytes - before[host].received_bytes < 1000
        assert other.kill_host(0) == other.kill_host(1) == 0, "the other lab's processes are out of reach"
        assert flow.sender.exit_code is None and flow.receiver.exit_code is None
        assert one.folder != other.folder


def test_a_host_reaches_nothing_outside_the_lab() -> None:
    outside = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), timeout=5)"
    with socket.create_server(("127.0.0.1", 0)) as server, Lab(hosts=1) as lab:
        port = str(server.getsockname()[1])
        assert "ConnectionRefusedError" in lab.run([*PYTHON, outside, port], deadline_s=120)[0].stderr
        elsewhere = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=5)"
        assert "Network is unreachable" in lab.run([*PYTHON, elsewhere], deadline_s=120)[0].stderr


def test_the_counters_hold_every_byte_of_a_datagram_and_nothing_else() -> None:
    send = """
import socket, sys
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(100):
    end.sendto(bytes(1000), ("host-1", 9))
"""
    listen = """
import socket, time
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end.bind(("", 9))
time.sleep(60)
"""
    with Lab(hosts=3, rate="20mbit") as lab:
        listener = lab.start([*PYTHON, listen], host=1)
        wait_for_port(lab, host=1, port=9)
        assert lab.start([*PYTHON, send], host=0).wait(deadline_s=120) == 0
        frame = 1000 + 8 + 20 + 14  # UDP, IP and the link layer
        wait_until(lambda: lab.counters()[1].received_packets == 100)
        sender, receiver, third = lab.counters()
        lab.cut(2)
        lab.mend(2)
        assert lab.start([*PYTHON, send], host=0).wait(deadline_s=120) == 0
        wait_until(lambda: lab.counters()[1].received_packets == 200)
        listener.kill()
        assert lab.counters()[2] == third, "also after its cable was pulled"
    assert (sender.sent_packets, sender.sent_bytes) == (100, 100 * frame)
    assert (receiver.received_packets, receiver.received_bytes) == (100, 100 * frame)
    assert (sender.received_bytes, receiver.sent_bytes) == (0, 0)
    assert (third.sent_bytes, third.received_bytes) == (0, 0), "the switch does not tell the others"


def wait_for_port(lab: Lab, *, host: int, port: int) -> HostProcess:
    waiter = lab.start(["sh", "-c", f"until grep -q :{port:04X} /proc/net/udp; do sleep 0.02; done"], host=host)
    assert waiter.wait(deadline_s=120) == 0
    return waiter


def test_the_counters_of_a_tcp_transfer_are_its_bytes_and_the_headers_of_its_packets() -> None:
    num_bytes = 1_000_000
    send = f"import socket; socket.create_connection(('host-1', 6666), timeout=10).sendall(bytes({num_bytes}))"
    receive = """
import socket
server = socket.create_server(("", 6666))
connection = server.accept()[0]
count = 0
while part := connection.recv(1 << 20):
    count += len(part)
print(count)
"""
    began_s = time.time()
    with Lab(hosts=2, rate="50mbit") as lab, tempfile.TemporaryFile() as heard:
        receiver = lab.start([*PYTHON, receive], host=1, stdout=heard)
        listening = lab.start(["sh", "-c", "until grep -q :1A0A /proc/net/tcp; do sleep 0.02; done"], host=1)
        assert listening.wait(deadline_s=120) == 0
        assert lab.start([*PYTHON, send], host=0).wait(deadline_s=120) == 0
        assert receiver.wait(deadline_s=120) == 0
        heard.seek(0)
        assert int(heard.read()) == num_bytes
        sent, received = lab.counters()[0].sent_bytes, lab.counters()[1].received_bytes
        samples = lab.samples()
    wanted = num_bytes * 1514 / 1448
    assert wanted <= sent <= 1.03 * wanted
    assert sent == pytest.approx(received, abs=1600)
    points = sent_by(samples, host=0)
    assert points[-1][1] == pytest.approx(sent, abs=200)
    assert points[0][1] < 0.1 * sent
    times = [time_s for time_s, _ in points]
    assert times == sorted(times) and began_s - 1 < times[0] and times[-1] < time.time() + 1
    assert peak_rate(points) == pytest.approx(50e6, rel=0.2)


def test_a_stopped_host_stands_still_goes_on_and_starts_commands_again_after_all_are_killed(tmp_path: Path) -> None:
    beats = [tmp_path / "one", tmp_path / "other"]
    with Lab(hosts=2) as lab:
        commands = []
        for host, beat in enumerate(beats):
            (tmp_path / f"{beat.name}.py").write_text(BEAT)
            commands.append(lab.start([sys.executable, f"{beat}.py", str(beat)], host=host))
        for beat in beats:
            wait_until(lambda beat=beat: beat.exists() and {"x", str(beat)} <= set(beat.read_text().split()))

        assert lab.stop_host(0) == 2
        time.sleep(0.05)
        still, moving = (len(beat.read_text()) for beat in beats)
        time.sleep(0.4)
        assert len(beats[0].read_text()) == still
        assert len(beats[1].read_text()) > moving, "the other host is left alone"
        assert commands[0].exit_code is None

        assert lab.continue_host(0) == 2
        wait_until(lambda: {"x", str(beats[0])} <= set(beats[0].read_text()[still:].split()))

        assert lab.kill_host(0) == 2
        assert commands[0].wait(deadline_s=10) == -signal.SIGKILL
        wait_until(lambda: lab.kill_host(0) == 0)  # a process whose memory the kernel still takes back counts a while
        assert commands[1].exit_code is None
        assert [result.exit_code for result in lab.run(["hostname"], deadline_s=120)] == [0, 0]


def test_a_host_that_removes_its_own_device_keeps_its_counts_and_the_lab_goes_on() -> None:
    with Lab(hosts=2, rate="20mbit") as lab:
        with flowing(lab, 0, 1):
            pass
        before = lab.counters()[0].sent_bytes
        assert lab.start(["ip", "link", "delete", "eth0"], host=0).wait(deadline_s=120) == 0
        time.sleep(0.1)
        assert lab.counters()[0].sent_bytes >= before > 0
        assert lab.run(["hostname"], deadline_s=120)[0].stdout == "host-0\n"


def test_the_lab_writes_its_counts_into_a_folder_that_stays_where_one_is_given(tmp_path: Path) -> None:
    with Lab(hosts=2, folder=tmp_path / "deep" / "lab") as lab:
        lab.run(["true"], deadline_s=120)
        time.sleep(0.1)
    assert len(lab.samples()[0].sent_bytes) == 2
    with Lab(hosts=2) as temporary:
        assert temporary.folder.exists()
    assert not temporary.folder.exists()


def test_a_lab_without_a_usable_temporary_folder_says_so_and_what_to_do(tmp_path: Path) -> None:
    # what is covered could not be written down either
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *PYTHON, MAKE],  # no folder takes files, also not from root
        capture_output=True, text=True, timeout=DEADLINE_S, env={**environment, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    tried = f"the lab's folder cannot be made: No usable temporary directory found in ['{tmp_path}', "
    assert done.stdout.startswith(tried), done.stderr
    assert done.stdout.endswith("]; set TMPDIR to a folder that takes files, or give one (folder=)\n")
    assert done.stderr == ""


def test_a_closed_lab_says_so_and_closing_again_does_nothing() -> None:
    with Lab(hosts=1) as lab:
        sleeper = lab.start(["sleep", "60"], host=0)
    lab.close()
    with pytest.raises(LabError, match="this lab is closed; make another"):
        lab.counters()
    with pytest.raises(LabError, match="sleep on host 0 ended with its lab"):
        sleeper.wait(deadline_s=60)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"hosts": 0}, "the number of hosts is out of range; got 0; allowed 1 to 200"),
        ({"hosts": 201}, "the number of hosts is out of range; got 201; allowed 1 to 200"),
        ({"hosts": 2, "rate": "fast"}, "'fast'"),
        ({"hosts": 2, "rates": {2: "1mbit"}}, "this lab has no such host; got 2"),
    ],
)
def test_a_lab_of_the_wrong_shape_is_refused_before_anything_is_made(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Lab(**options)  # type: ignore[arg-type]


def test_the_hosts_tcp_reacts_to_congestion_as_it_is_told() -> None:
    ask = (
        "import socket; one = socket.socket(); one.setblocking(False); one.connect_ex(('10.77.0.1', 9)); "
        "print(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b'\\0').decode())"
    )
    with Lab(hosts=2) as lab:
        lab.set_congestion_control("reno")
        assert lab.run([sys.executable, "-c", ask], deadline_s=30)[1].stdout.strip() == "reno"
        with pytest.raises(LabError, match=r"no congestion control 'nosuch'; cat /proc/sys/net/ipv4/tcp_available"):
            lab.set_congestion_control("nosuch")
