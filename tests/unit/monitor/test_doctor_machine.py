"""What the doctor says of this machine, with each fault made on purpose."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from thinwire.monitor.doctor import checks
from thinwire.monitor.doctor.checks import Check, Verdict
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
