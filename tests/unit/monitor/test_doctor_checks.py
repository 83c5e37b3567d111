"""Checks of this machine and its network, with each fault made on purpose."""

from __future__ import annotations

import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from thinwire.monitor.doctor import checks
from thinwire.monitor.doctor.checks import Check, Chosen, Verdict
from thinwire.transport.secret import make_secret

CPU = checks.Builds(
    python="3.12.1", torch="2.13.0", cuda="", num_gpus=0, has_gpu=False, pyzmq="27.1.0",
    backends={"gloo": True, "nccl": False},
)  # fmt: skip
CUDA = replace(CPU, cuda="13.0", num_gpus=2, has_gpu=True, backends={"gloo": True, "nccl": True})


def assert_says(check: Check, verdict: Verdict, found: str, remedy: str = "") -> None:
    assert check.verdict is verdict, check
    assert found in check.found, check
    assert remedy in check.remedy, check
    assert bool(check.remedy) == (verdict in (Verdict.WARNING, Verdict.WRONG)), "a fault has a remedy, and nothing else"


def test_what_is_installed_here_is_told() -> None:
    builds = checks.installed()
    assert builds.torch == torch.__version__ and builds.backends["gloo"] and builds.pyzmq
    check = checks.check_versions(builds, needs_pyzmq=True)
    assert_says(check, Verdict.OK, f"torch {torch.__version__}")
    assert re.match(r"thinwire \d+\.\d+\.\d+, Python \d", check.found)


@pytest.mark.parametrize(("needs", "verdict"), [(False, Verdict.WARNING), (True, Verdict.WRONG)])
def test_pyzmq_is_missed_where_a_secret_is_to_be_used(needs: bool, verdict: Verdict) -> None:
    check = checks.check_versions(replace(CPU, pyzmq=""), needs_pyzmq=needs)
    assert_says(check, verdict, "pyzmq -", "pip install 'thinwire[wire]'")


@pytest.mark.parametrize(
    ("builds", "verdict", "found", "remedy"),
    [
        (CPU, Verdict.OK, "training on the CPU", ""),
        (CUDA, Verdict.OK, "CUDA 13.0 sees 2 GPUs", ""),
        (replace(CPU, has_gpu=True), Verdict.WARNING, "torch is built without CUDA", "install a torch with CUDA"),
        (replace(CUDA, num_gpus=0), Verdict.WARNING, "no GPU is visible", "CUDA_VISIBLE_DEVICES"),
        (replace(CUDA, num_gpus=0, has_gpu=False), Verdict.WARNING, "no NVIDIA driver is here", "nvidia-smi"),
    ],
)
def test_a_gpu_that_is_not_used_is_told(builds: checks.Builds, verdict: Verdict, found: str, remedy: str) -> None:
    assert_says(checks.check_devices(builds), verdict, found, remedy)


@pytest.mark.parametrize(
    ("builds", "verdict", "found", "remedy"),
    [
        (CPU, Verdict.OK, "gloo yes, nccl no", ""),
        (CUDA, Verdict.OK, "gloo yes, nccl yes", ""),
        (replace(CPU, backends={"gloo": False, "nccl": False}), Verdict.WRONG, "gloo no", "has gloo"),
        (replace(CUDA, backends={"gloo": True, "nccl": False}), Verdict.WARNING, "needs nccl", "one GPU a replica"),
    ],
)
def test_missing_backends_are_told(builds: checks.Builds, verdict: Verdict, found: str, remedy: str) -> None:
    assert_says(checks.check_backends(builds), verdict, found, remedy)


def test_a_good_secret_is_told_by_its_fingerprint_and_not_shown(tmp_path: Path) -> None:
    secret = make_secret(tmp_path / "job.secret")
    check = checks.check_secret(tmp_path / "job.secret")
    assert_says(check, Verdict.OK, secret.fingerprint)
    assert secret.key.hex() not in str(check.to_json())


def test_a_secret_that_is_missing_open_or_broken_is_wrong_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "job.secret"
    assert_says(checks.check_secret(None), Verdict.SKIPPED, "no --secret FILE")
    assert_says(checks.check_secret(path), Verdict.WRONG, "there is no secret", f"thinwire secret {path}")
    make_secret(path)
    path.chmod(0o644)
    assert_says(checks.check_secret(path), Verdict.WRONG, "mode 0644", f"chmod 600 {path}")
    path.chmod(0o600)
    path.write_text(path.read_text()[:-9])
    assert checks.check_secret(path).found.endswith("; allowed 'thinwire-secret-v1' and 64 hexadecimal digits")
    assert_says(checks.check_secret(path), Verdict.WRONG, "holds no secret", "copy the file again")


@pytest.mark.parametrize(("free", "verdict"), [(99e6, Verdict.WRONG), (1.9e9, Verdict.WARNING), (2.1e9, Verdict.OK)])
def test_a_full_disk_is_told(free: float, verdict: Verdict, tmp_path: Path) -> None:
    check = checks.check_folder("run folder", tmp_path / "runs" / "new", free_bytes=lambda place: int(free))
    assert_says(check, verdict, "are free for", "" if verdict is Verdict.OK else "make room")
    assert not (tmp_path / "runs").exists() and not list(tmp_path.iterdir()), "looking makes nothing"


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check = checks.check_folder("cache", tmp_path / "file" / "cache")
    assert_says(check, Verdict.WRONG, "Not a directory", "--cache-dir")
    check = checks.check_folder("cache", Path("/proc/1/cache"))
    assert_says(check, Verdict.WRONG, "cannot be written", "--cache-dir")


def test_the_free_space_of_a_real_folder_is_asked_of_the_file_system(tmp_path: Path) -> None:
    assert checks.check_folder("run folder", tmp_path).found.endswith(f"are free for {tmp_path}")


@pytest.mark.parametrize(
    ("limit", "verdict"),
    [(255, Verdict.WRONG), (256, Verdict.WARNING), (1023, Verdict.WARNING), (1024, Verdict.OK), (-1, Verdict.OK)],
)
def test_a_low_limit_of_open_files_is_told(limit: int, verdict: Verdict) -> None:
    check = checks.check_open_files(limit)
    assert_says(check, verdict, "no limit" if limit < 0 else f"{limit:,} files")
    assert checks.check_open_files().name == "open files"


@pytest.mark.parametrize(("free", "verdict"), [(4e8, Verdict.WRONG), (1e9, Verdict.WARNING), (3e9, Verdict.OK)])
def test_little_memory_is_told(free: float, verdict: Verdict) -> None:
    assert_says(checks.check_memory(int(free), 8_000_000_000), verdict, "of 8.00 GB are free")


def test_more_threads_than_cores_and_threads_that_hinder_each_other_are_told() -> None:
    alone_s, many_s = 0.004, 0.005
    slower = lambda threads: alone_s if threads == 1 else many_s  # noqa: E731
    check = checks.check_speed(threads=4, cores=4, product_s=slower)
    assert_says(
        check, Verdict.WARNING, "4.0 ms with one thread: the threads hinder each other", "OMP_NUM_THREADS lower"
    )
    check = checks.check_speed(threads=4, cores=4, product_s=lambda threads: 0.004 / threads)
    assert_says(check, Verdict.OK, "268 GFLOP/s with 4 threads on 4 cores, 1.0 ms a product")
    check = checks.check_speed(threads=64, cores=1.5, product_s=lambda threads: 0.004 / threads)
    assert_says(check, Verdict.WARNING, "more threads than cores", "OMP_NUM_THREADS=1,")
    check = checks.check_speed(threads=1, cores=0.5, product_s=lambda threads: 0.004)
    assert_says(check, Verdict.WARNING, "with 1 threads on 0.5 cores", "OMP_NUM_THREADS=1,")


def test_a_real_product_is_timed_and_leaves_the_threads_as_they_were() -> None:
    before = torch.get_num_threads()
    check = checks.check_speed(threads=2, cores=8)
    assert re.match(r"\d+ GFLOP/s with 2 threads", check.found) and torch.get_num_threads() == before


def test_the_limit_of_a_container_counts_as_cores(tmp_path: Path) -> None:
    limit = tmp_path / "cpu.max"
    bound = checks.usable_cores(limit)
    assert bound >= 1
    for text, cores in (("50000 100000\n", 0.5), ("max 100000\n", bound), ("", bound), ("9900000 100000", bound)):
        limit.write_text(text)
        assert checks.usable_cores(limit) == min(cores, bound)


CHOSEN = Chosen(address="10.77.0.1", interface="eth0", why="the default route leaves from it", is_asked=False)


def unknown(name: str) -> list[str]:
    raise socket.gaierror(-2, "Name or service not known")


@pytest.mark.parametrize(
    ("addresses", "verdict"),
    [
        (["10.77.0.1"], Verdict.OK),
        (["127.0.1.1", "10.77.0.1"], Verdict.OK),
        (["127.0.1.1"], Verdict.WARNING),
        (["127.0.0.1", "127.0.1.1"], Verdict.WARNING),
    ],
)
def test_a_name_that_is_loopback_only_is_told(addresses: list[str], verdict: Verdict) -> None:
    check = checks.check_own_name("ada", find=lambda name: addresses)
    assert check.verdict is verdict and f"ada is {', '.join(addresses)}" in check.found
    assert ("/etc/hosts" in check.remedy) == (verdict is Verdict.WARNING)


def test_a_name_that_cannot_be_resolved_is_told() -> None:
    check = checks.check_own_name("ada", find=unknown)
    assert check.verdict is Verdict.WARNING and "ada cannot be resolved" in check.found and "/etc/hosts" in check.remedy


def test_names_are_looked_up_in_the_system_s_way() -> None:
    assert checks.addresses_of_name("localhost")[0] == "127.0.0.1"  # IPv4 comes first
    assert checks.addresses_of_name("10.77.0.9") == ["10.77.0.9"] and checks.addresses_of_name("::1") == ["::1"]
    with pytest.raises(OSError):
        checks.addresses_of_name("no-such-host.invalid")


def choose(**more: str) -> Chosen | Check:
    return checks.choose(
        **{"interface": None, "address": None, "gloo_interface": None, "target": None, **more}  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"interface": "lo", "gloo_interface": "nope0"}, "--interface"),
        ({"address": "localhost"}, "--address"),
        ({"gloo_interface": "lo,eth7"}, "the variable GLOO_SOCKET_IFNAME"),
        ({"target": "127.0.0.1"}, "packets to 127.0.0.1 leave from it"),
    ],
)
def test_the_address_is_chosen_as_connect_does_and_the_reason_told(asked: dict[str, str], why: str) -> None:
    assert choose(**asked) == Chosen(address="127.0.0.1", interface="lo", why=why, is_asked=True)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"interface": "nope0"}, "there is no interface 'nope0'"),
        ({"gloo_interface": "nope0"}, "there is no interface 'nope0'"),
        ({"address": "192.0.2.77"}, "no interface of this host has the address"),
        ({"address": "no-such-host.invalid"}, "cannot be resolved"),
    ],
)
def test_an_interface_or_address_that_is_not_here_is_wrong(asked: dict[str, str], found: str) -> None:
    check = choose(**asked)
    assert isinstance(check, Check) and check.verdict is Verdict.WRONG and found in check.found + check.remedy
    assert check.remedy


def test_no_route_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from thinwire.errors import ConnectError

    def nowhere(host: str) -> str:
        raise ConnectError(f"no route to {host}")

    monkeypatch.setattr(checks, "address_towards", nowhere)
    check = choose(target="10.9.9.9")
    assert isinstance(check, Check) and check.found == "there is no route to 10.9.9.9" and "--interface" in check.remedy
    monkeypatch.setattr(checks, "local_addresses", lambda: {"lo": ("127.0.0.1",), "eth1": ("10.0.0.5",)})
    check = choose()
    assert isinstance(check, Check) and check.verdict is Verdict.WARNING and "eth1 (10.0.0.5)" in check.found
    assert "give the ADDRESS" in check.remedy and "lo" not in check.found.split("which of ")[1].split(" others")[0]
    monkeypatch.setattr(checks, "local_addresses", lambda: {"lo": ("127.0.0.1",)})
    check = choose()
    assert isinstance(check, Check) and check.verdict is Verdict.WRONG and "no interface but loopback" in check.found


@pytest.mark.parametrize(
    ("changes", "target", "verdict", "found"),
    [
        ({}, None, Verdict.OK, "10.77.0.1 on eth0: the default route leaves from it"),
        ({"address": "127.0.0.1", "interface": "lo"}, None, Verdict.WRONG, "other hosts do not reach a loopback"),
        ({"address": "127.0.0.1", "interface": "lo"}, "10.77.0.2", Verdict.WRONG, "other hosts do not reach"),
        ({"address": "127.0.0.1", "interface": "lo"}, "127.0.0.1", Verdict.OK, "replicas on this host only"),
        ({"address": "169.254.3.4"}, None, Verdict.WARNING, "no DHCP server"),
        ({"interface": "docker0"}, None, Verdict.WARNING, "this bridge joins containers"),
        ({"interface": "br-01ab"}, "10.77.0.2", Verdict.WARNING, "this bridge joins containers"),
        ({"interface": "wg0"}, None, Verdict.WARNING, "in this private network too"),
        ({"interface": "tailscale0", "is_asked": True}, None, Verdict.OK, "in this private network too"),
        ({"interface": "bridge7"}, None, Verdict.OK, "bridge7"),
    ],
)
def test_an_address_that_the_others_hardly_reach_is_told(
    changes: dict[str, str], target: str | None, verdict: Verdict, found: str
) -> None:
    check = checks.check_own_address(replace(CHOSEN, **changes), target=target)  # type: ignore[arg-type]
    assert check.verdict is verdict and found in check.found
    assert ("--interface" in check.remedy) == (verdict is not Verdict.OK)


def test_a_port_is_opened_reached_and_closed_again() -> None:
    reached = []

    def connect(address: str, port: int) -> None:
        with socket.create_connection((address, port), timeout=5):
            reached.append(port)

    check = checks.check_port("127.0.0.1", connect=connect)
    assert check.verdict is Verdict.OK and f"port {reached[0]} of 127.0.0.1" in check.found
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", reached[0]), timeout=5)
    assert checks.check_port("127.0.0.1").verdict is Verdict.OK


def test_an_address_of_another_host_cannot_be_listened_on() -> None:
    check = checks.check_port("192.0.2.77")
    assert check.verdict is Verdict.WRONG and "cannot listen on its address 192.0.2.77" in check.found
    assert "--address" in check.remedy


@pytest.mark.parametrize("error", [TimeoutError("timed out"), PermissionError(1, "Operation not permitted")])
def test_a_port_that_is_not_reached_from_here_is_wrong(error: OSError) -> None:
    def dropped(address: str, port: int) -> None:
        raise error

    check = checks.check_port("127.0.0.1", connect=dropped)
    assert check.verdict is Verdict.WRONG and "cannot be reached even from this host" in check.found
    assert (error.strerror or "timed out") in check.found and "ephemeral TCP ports" in check.remedy


@pytest.mark.parametrize(
    ("path", "text", "name"),
    [
        ("etc/ufw/ufw.conf", "# ufw\nENABLED=yes\n", "ufw"),
        ("run/firewalld.pid", "77", "firewalld"),
        ("proc/net/ip_tables_names", "nat\nfilter\n", "iptables"),
    ],
)
def test_a_firewall_that_is_on_is_a_warning_with_its_ports(path: str, text: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    check = checks.check_firewall(tmp_path)
    assert check.verdict is Verdict.WARNING and check.found.startswith(f"{name} may drop")
    assert "ephemeral TCP ports" in check.remedy


def test_a_firewall_that_is_off_is_none(tmp_path: Path) -> None:
    (tmp_path / "etc/ufw").mkdir(parents=True)
    (tmp_path / "etc/ufw/ufw.conf").write_text("# ENABLED=yes would start it\nENABLED=no\n")
    check = checks.check_firewall(tmp_path)
    assert check.verdict is Verdict.OK and "ephemeral TCP ports" in check.found


@pytest.mark.parametrize(("mtu", "verdict"), [(1279, Verdict.WARNING), (1280, Verdict.OK), (9000, Verdict.OK)])
def test_a_small_mtu_is_told(mtu: int, verdict: Verdict) -> None:
    check = checks.check_mtu("wg0", mtu=mtu)
    assert check.verdict is verdict and "wg0" in check.found
    assert ("ip link set dev wg0" in check.remedy) == (verdict is Verdict.WARNING)


def test_the_mtu_is_read_from_the_interface_and_a_label_has_none() -> None:
    assert checks.check_mtu("lo").found == "lo sends packets of up to 65,536 bytes"
    assert checks.check_mtu("eth0:1").verdict is Verdict.SKIPPED
