"""`thinwire dashboard`: who may look, what is sent, and that it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_processes import DEADLINE_S

from tests.rehearsed_run import finding_line
from tests.sample_runs import append, step_line, write_run
from thinwire.cli.dashboard import DashboardOptions, main
from thinwire.monitor.dashboard import server as server_module
from thinwire.monitor.dashboard.server import DashboardServer, Feed, check_token
from thinwire.monitor.dashboard.snapshot import RunFollower

TOKEN = "a-token-of-24-letters.00"


@contextlib.contextmanager
def served(run: Path, *, host: str = "127.0.0.1", token: str | None = None) -> Iterator[DashboardServer]:
    feed = Feed(RunFollower(run), period_s=0.05)
    server = DashboardServer(feed, host=host, port=0, token=token)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        feed.close()
        server.shutdown()
        thread.join(timeout=60)
        server.server_close()


def ask(
    server: DashboardServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def event(stream: http.client.HTTPResponse) -> dict[str, Any]:
    """Return the next event of a stream, comments passed over."""
    while True:
        line = stream.readline()
        assert line, "the stream ended"
        if line.startswith(b"data: "):
            return dict(json.loads(line.removeprefix(b"data: ")))


def test_the_options_are_those_that_were_agreed_on() -> None:
    names = [field.name for field in dataclasses.fields(DashboardOptions) if field.name != "run"]
    options = sorted("--" + name.replace("_", "-") for name in names)
    frozen = Path(__file__).with_name("options_of_dashboard.txt").read_text().splitlines()
    assert options == frozen, "an option is a promise: change tests/cli/options_of_dashboard.txt and CHANGELOG.md too"


def test_only_this_machine_is_served_and_the_page_may_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    assert DashboardOptions(run=tmp_path).host == "127.0.0.1"
    with served(write_run(tmp_path)) as server:
        status, headers, page = ask(server, "/")
        assert server.url == f"http://127.0.0.1:{server.server_port}/"
    assert status == 200 and "<h1" in page
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"


def test_an_event_comes_when_a_file_grows_and_holds_what_changed_only(tmp_path: Path) -> None:
    append(tmp_path / "metrics-replica-0.jsonl", step_line(10))
    with served(tmp_path) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        connection.request("GET", "/events")
        stream = connection.getresponse()
        assert stream.headers["Content-Type"] == "text/event-stream"
        first = event(stream)
        assert first["sections"]["replicas"][0]["step"] == 10 and "links" in first["sections"]
        begun = time.monotonic()
        append(tmp_path / "metrics-replica-0.jsonl", step_line(20))
        (tmp_path / "findings.jsonl").write_text(finding_line())
        seen: dict[str, Any] = {}
        while "headline" not in seen or seen["replicas"][0]["step"] != 20:
            told = event(stream)["sections"]
            assert "links" not in told
            seen |= told
            assert time.monotonic() - begun < 60
        assert seen["headline"]["text"] == "communication slow: link 0 -> 2"
        connection.close()


def test_metrics_are_served_and_need_the_token_where_the_page_does(tmp_path: Path) -> None:
    append(tmp_path / "metrics-replica-0.jsonl", step_line(10))
    with served(tmp_path, token=TOKEN) as server:
        assert ask(server, "/metrics")[0] == 401
        status, headers, told = ask(server, "/metrics", Authorization=f"Bearer {TOKEN}")
    assert status == 200 and headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'thinwire_replica_step{replica="0"} 10' in told.splitlines()


def test_garbage_in_the_folder_is_told_and_the_page_still_comes(tmp_path: Path) -> None:
    (tmp_path / "findings.jsonl").write_bytes(b"\xff\xfe{\n" + b'{"state": "new", "at": 1, "finding": 3}\n')
    (tmp_path / "config.json").write_text("[]")
    append(
        tmp_path / "metrics-replica-0.jsonl", {"kind": "warning", "step": 1, "message": "</script><b>&"}, step_line(10)
    )
    with served(tmp_path) as server:
        _, _, told = ask(server, "/snapshot.json")  # waits for the first look at the folder, which the page hardly does
        status, _, page = ask(server, "/")
    assert status == 200 and "</script><b>" not in page and "\\u003c/script>\\u003cb>" in page
    assert len(json.loads(told)["sections"]["notes"]["refused"]) == 3


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "", "192.0.2.7:1", "localhost.evil.example", "[::2]:80", "127.0.0.1.nip"],
)
def test_a_name_that_was_made_to_point_here_is_refused(tmp_path: Path, host: str) -> None:
    with served(tmp_path) as server:
        for path in ("/", "/events", "/snapshot.json"):
            status, _, text = ask(server, path, Host=host)
            assert status == 421 and "Host header" in text
        for well in ("localhost", f"localhost:{server.server_port}", f"127.0.0.1:{server.server_port}", "[::1]:9"):
            assert ask(server, "/snapshot.json", Host=well)[0] == 200


def test_no_address_leads_to_a_file_and_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("the secret")
    with served(tmp_path) as server:
        for path in (
            "/secret",
            "/../secret",
            "/%2e%2e/secret",
            "//secret",
            "/snapshot.json/../secret",
            "/events/",
            "/?x=/etc",
        ):
            status, _, text = ask(server, path)
            assert status == (200 if path.startswith("/?") else 404) and "the secret" not in text
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"):
            assert ask(server, "/", method=method)[0] == 501
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n")
            assert b" 431 " in raw.recv(200)


def test_another_address_is_not_served_without_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.7", "example.org"):
        assert main([str(tmp_path), "--host", host, "--port", "0"]) == 2
        said = capsys.readouterr()
        assert "--token-file" in said.err and len(said.err.splitlines()) == 1 and said.out == ""


def test_a_token_is_asked_for_and_leaves_the_address_bar(tmp_path: Path) -> None:
    with served(write_run(tmp_path), host="0.0.0.0", token=TOKEN) as server:
        assert server.url.endswith(f"/?token={TOKEN}")
        for path in (
            "/",
            "/?token=wrong",
            "/?token=",
            "/events",
            f"/events?token={TOKEN}",
            "/snapshot.json",
            "/favicon.ico",
            f"/?a=1&b=2&c=3&d=4&token={TOKEN}",
        ):
            status, headers, text = ask(server, path)
            assert status == 401 and "its token" in text and "Set-Cookie" not in headers, path
        assert ask(server, "/", Cookie=f"{server.cookie}={TOKEN[:-1]}")[0] == 401
        assert ask(server, "/", Authorization=f"Bearer {TOKEN}\xe9")[0] == 401
        status, headers, text = ask(server, f"/?token={TOKEN}")
        assert status == 303 and headers["Location"] == "/" and text == ""
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        status, _, page = ask(server, "/", Cookie=cookie.partition(";")[0])
        assert status == 200 and TOKEN not in page
        assert ask(server, "/snapshot.json", Authorization=f"Bearer {TOKEN}")[0] == 200
        assert ask(server, "/snapshot.json", Authorization=f"Bearer {TOKEN}", Host="evil.example")[0] == 421


@pytest.mark.parametrize(
    "token", ["short", "x" * 600, "a token with spaces in it", "ümlaut-ümlaut-ümlaut", "", "a" * 15]
)
def test_a_token_that_cannot_stand_in_an_address_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match=r"cannot stand in an address; got .*; allowed 16 to 512 of .*; try openssl"):
        check_token(token)


def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o644)
    assert main([str(tmp_path), "--token-file", str(path)]) == 2
    assert f"got {path} with mode 0644; allowed mode 0600; try chmod 600 {path}" in capsys.readouterr().err
    assert main([str(tmp_path), "--token-file", str(tmp_path / "none")]) == 2
    assert f"--token-file cannot be read; got {tmp_path / 'none'}: No such file" in capsys.readouterr().err
    path.chmod(0o600)
    path.write_bytes(b"\xff" * 20)
    assert main([str(tmp_path), "--token-file", str(path)]) == 2
    assert f"other characters than ASCII; got {path}; allowed letters, digits" in capsys.readouterr().err


@contextlib.contextmanager
def slow_clients(server: DashboardServer, count: int, *, address: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    """Hold connections open: a third says nothing, a third half a request, a third a byte now and then."""
    is_over = threading.Event()
    clients = []
    for number in range(count):
        one = socket.create_connection(("127.0.0.1", server.server_port), timeout=60, source_address=(address, 0))
        clients.append(one)
        if number % 3 == 1:
            one.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        elif number % 3 == 2:
            one.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")

    def drip() -> None:
        while not is_over.wait(0.05):
            for one in clients[2::3]:
                with contextlib.suppress(OSError):
                    one.send(b"a")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield clients
    finally:
        is_over.set()
        thread.join()
        for one in clients:
            one.close()


def is_hung_up(client: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while client.recv(1 << 16):
            continue
    return True


@pytest.mark.parametrize("token", [None, TOKEN])
def test_forty_slow_clients_keep_nobody_from_the_page(tmp_path: Path, token: str | None) -> None:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    with served(write_run(tmp_path), token=token) as server, slow_clients(server, 40) as clients:
        for path in ("/", "/snapshot.json", "/metrics", "/"):
            assert ask(server, path, **headers)[0] == 200
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
        connection.request("GET", "/events", headers=headers)
        assert "replicas" in event(connection.getresponse())["sections"]
        connection.close()
        assert is_hung_up(clients[0]), "beyond its address's quota the oldest ends"


def test_a_request_that_does_not_come_whole_in_time_ends_whatever_drips_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "HEAD_S", 0.5)
    with served(write_run(tmp_path)) as server, slow_clients(server, 6) as clients:
        assert all(map(is_hung_up, clients))
        assert ask(server, "/")[0] == 200


def test_a_flood_from_another_address_takes_no_place_from_a_slow_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "HEAD_S", 120.0)
    with (
        served(write_run(tmp_path)) as server,
        socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as user,
    ):
        user.sendall(b"GET / HTTP/1.1\r\nHost: local")
        with slow_clients(server, 200, address="127.0.0.2"):
            assert ask(server, "/")[0] == 200
            user.sendall(b"host\r\n\r\n")
            assert user.recv(12) == b"HTTP/1.1 200"


def test_clients_that_never_read_their_answers_keep_nobody_from_the_page(tmp_path: Path) -> None:
    with served(write_run(tmp_path)) as server, contextlib.ExitStack() as stack:
        for _ in range(40):
            one = stack.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            one.connect(("127.0.0.1", server.server_port))
            one.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert ask(server, "/")[0] == 200


def test_a_request_of_more_than_32_kib_is_refused_and_not_read_to_its_end(tmp_path: Path) -> None:
    with (
        served(write_run(tmp_path)) as server,
        socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as client,
    ):
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X-Long: " + b"a" * 40_000 + b"\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 431"


def test_more_clients_than_there_are_places_are_sent_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MOST_CLIENTS", 2)
    with served(write_run(tmp_path)) as server:
        held = [http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60) for _ in range(2)]
        for connection in held:
            connection.request("GET", "/events")
            event(connection.getresponse())
        status, _, text = ask(server, "/events")
        assert status == 503 and "close one" in text
        assert ask(server, "/")[0] == 200, "the page itself comes all the same"
        for connection in held:
            connection.close()


def test_a_port_in_use_and_no_folder_are_told_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main([str(tmp_path), "--port", str(taken.getsockname()[1])]) == 1
    said = capsys.readouterr()
    assert "Address already in use" in said.err and "--port 0" in said.err and len(said.err.splitlines()) == 1
    assert main([str(tmp_path / "none"), "--port", "0"]) == 1
    assert "there is no folder" in capsys.readouterr().err
    assert main([str(tmp_path), "--port", "65536"]) == 2


def test_the_address_is_the_only_line_on_stdout_and_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "thinwire.cli.main", "dashboard", str(write_run(tmp_path)), "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        # whoever runs the tests in the background has Ctrl-C ignored in all that they start
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().rstrip("/\n").rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/events")
        assert "replicas" in event(connection.getresponse())["sections"]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0 and out == "" and "Traceback" not in err
        connection.close()
    finally:
        process.kill()
        process.wait(timeout=DEADLINE_S)


def test_a_fault_of_the_reading_is_told_and_reading_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follower, calls = RunFollower(tmp_path), []
    inner = follower.sections

    def sections() -> dict[str, Any]:
        calls.append(1)
        if len(calls) < 3:
            raise RuntimeError("a slip")
        return inner()

    monkeypatch.setattr(follower, "sections", sections)
    feed = Feed(follower, period_s=0.01)
    version, told = feed.after(0, wait_s=5)
    assert json.loads(told)["sections"] == {"fault": "The folder could not be read: RuntimeError: a slip"}
    _, told = feed.after(version, wait_s=5)
    assert json.loads(told)["sections"]["fault"] == "" and "run" in json.loads(told)["sections"]
    feed.close()
