"""Checks of `thinwire doctor` on this machine: versions, the secret, disk, open files, memory, speed.

Each check takes what it judges as values, or as functions that a test can replace; the defaults ask the machine.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from thinwire.monitor.doctor.check import Check, ok, skipped, warning, wrong, wrong_by
from thinwire.transport.process_group import available_backends
from thinwire.transport.secret import read_secret
from thinwire.units import format_bytes, format_seconds
from thinwire.version import __version__

LEAST_DISK_BYTES, SCARCE_DISK_BYTES = 100e6, 2e9
LEAST_MEMORY_BYTES, SCARCE_MEMORY_BYTES = 500e6, 2e9
LEAST_FILES, SCARCE_FILES = 256, 1024
_SIZE = 512
_TIMINGS = 5
_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_NVIDIA = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Builds:
    """What is installed.

    Attributes:
        python: Its version.
        torch: Its version.
        cuda: The CUDA version that torch was built for, empty for a build without.
        num_gpus: GPUs that torch sees.
        has_gpu: Whether the machine has an NVIDIA driver.
        pyzmq: Its version, empty where it is not installed.
        backends: Whether torch.distributed has gloo and nccl.
    """

    python: str
    torch: str
    cuda: str
    num_gpus: int
    has_gpu: bool
    pyzmq: str
    backends: Mapping[str, bool]


def installed() -> Builds:
    """Ask this process."""
    return Builds(
        python=platform.python_version(), torch=torch.__version__, cuda=torch.version.cuda or "",
        num_gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0, has_gpu=_NVIDIA.exists(),
        pyzmq=_version_of("pyzmq"), backends=available_backends(),
    )  # fmt: skip


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_versions(builds: Builds, *, needs_pyzmq: bool) -> Check:
    """Say what is installed, and whether a secret can be used.

    Args:
        builds: What is installed.
        needs_pyzmq: Whether a secret is to be used.
    """
    found = f"thinwire {__version__}, Python {builds.python}, torch {builds.torch}, pyzmq {builds.pyzmq or '-'}"
    if builds.pyzmq:
        return ok("versions", found)
    remedy = "install it: pip install 'thinwire[wire]'"
    if needs_pyzmq:
        return wrong("versions", f"{found}: a secret needs pyzmq", remedy=remedy)
    return warning("versions", f"{found}: without pyzmq there is no secret (--secret)", remedy=remedy)


def check_devices(builds: Builds) -> Check:
    """Say whether torch uses the GPU that is here."""
    if not builds.cuda:
        if not builds.has_gpu:
            return ok("devices", "torch is built without CUDA, and no NVIDIA driver is here: training on the CPU")
        return warning(
            "devices", "this machine has an NVIDIA driver, and torch is built without CUDA",
            remedy="install a torch with CUDA (pytorch.org), or train on the CPU",
        )  # fmt: skip
    if builds.num_gpus:
        return ok("devices", f"torch with CUDA {builds.cuda} sees {builds.num_gpus} GPUs")
    what = "no GPU is visible" if builds.has_gpu else "no NVIDIA driver is here"
    return warning(
        "devices", f"torch is built for CUDA {builds.cuda}, and {what}",
        remedy="see nvidia-smi and CUDA_VISIBLE_DEVICES; a container needs --gpus all; or train on the CPU",
    )  # fmt: skip


def check_backends(builds: Builds) -> Check:
    """Say whether torch.distributed can join replicas."""
    found = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in builds.backends.items())
    if not builds.backends.get("gloo"):
        return wrong(
            "torch.distributed", f"{found}: replicas without a secret meet over gloo",
            remedy="install a torch whose torch.distributed has gloo, as the wheels for Linux have",
        )  # fmt: skip
    if builds.num_gpus and not builds.backends.get("nccl"):
        return warning(
            "torch.distributed", f"{found}: a replica over several GPUs needs nccl",
            remedy="install a torch with nccl, or use one GPU a replica",
        )  # fmt: skip
    return ok("torch.distributed", found)


def check_secret(path: Path | None) -> Check:
    """Read the secret, if one is given.

    Args:
        path: The file of `--secret`.
    """
    if path is None:
        return skipped("secret", "no --secret FILE was given")
    try:
        secret = read_secret(path)
    except ValueError as error:
        return wrong_by("secret", error)
    return ok("secret", f"{path} is a secret; its fingerprint {secret.fingerprint} must be the same on all hosts")


def check_folder(name: str, folder: Path, *, free_bytes: Callable[[Path], int] | None = None) -> Check:
    """Write a file into a folder, or into the nearest one above it that exists, and look at the free space.

    Args:
        name: What the folder is for.
        folder: It need not exist; it is not made.
        free_bytes: Tells the free space; asks the file system by default.
    """
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
        free = (free_bytes or _free_bytes)(place)
    except OSError as error:
        return wrong(
            name, f"{folder} cannot be written: {error.strerror} ({place})",
            remedy="give another folder (--out, --cache-dir), or the right to write there",
        )  # fmt: skip
    found = f"{format_bytes(free)} are free for {folder}"
    remedy = "make room, or give a folder on another disk (--out, --cache-dir)"
    if free < LEAST_DISK_BYTES:
        return wrong(name, found, remedy=remedy)
    return warning(name, found, remedy=remedy) if free < SCARCE_DISK_BYTES else ok(name, found)


def _free_bytes(place: Path) -> int:
    return shutil.disk_usage(place).free


def check_open_files(limit: int | None = None) -> Check:
    """Look at how many files and sockets this process may open.

    Args:
        limit: The limit; by default this process's own.
    """
    if limit is None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return ok("open files", "no limit")
    found = f"{limit:,} files and sockets may be open"
    remedy = "raise it: ulimit -n 65536, or LimitNOFILE= of the service"
    if limit < LEAST_FILES:
        return wrong("open files", found, remedy=remedy)
    return warning("open files", found, remedy=remedy) if limit < SCARCE_FILES else ok("open files", found)


def check_memory(available: int | None = None, total: int | None = None) -> Check:
    """Look at the free memory.

    Args:
        available: Bytes that can be had; asks the system by default.
        total: Bytes that the machine has, likewise.
    """
    memory = psutil.virtual_memory()
    available = memory.available if available is None else available
    found = f"{format_bytes(available)} of {format_bytes(memory.total if total is None else total)} are free"
    remedy = "end what else runs here, or take a smaller model or batch; thinwire plan says what a model needs"
    if available < LEAST_MEMORY_BYTES:
        return wrong("memory", found, remedy=remedy)
    return warning("memory", found, remedy=remedy) if available < SCARCE_MEMORY_BYTES else ok("memory", found)


def check_speed(
    *, threads: int | None = None, cores: float | None = None, product_s: Callable[[int], float] | None = None
) -> Check:
    """Time a small matrix product with torch's threads and with one: too many threads are slower than one.

    Args:
        threads: Torch's threads; those of this process by default.
        cores: Cores that this process may use; by default as the scheduler and the container say.
        product_s: Tells the seconds of a product of two float32 matrices `(512, 512)` with so many threads; measures
            by default.
    """
    threads = torch.get_num_threads() if threads is None else threads
    cores = usable_cores() if cores is None else cores
    measure = product_s or _product_s
    many_s = measure(threads)
    one_s = many_s if threads == 1 else measure(1)
    rate = 2 * _SIZE**3 / many_s / 1e9
    found = f"{rate:.0f} GFLOP/s with {threads} threads on {cores:g} cores, {format_seconds(many_s)} a product"
    if threads > cores:
        return warning(
            "speed", f"{found}: more threads than cores",
            remedy=f"set OMP_NUM_THREADS={max(1, int(cores))}, or thinwire train --threads",
        )  # fmt: skip
    if many_s > 1.1 * one_s:
        return warning(
            "speed", f"{found}, and {format_seconds(one_s)} with one thread: the threads hinder each other",
            remedy="end what else computes here, or set OMP_NUM_THREADS lower",
        )  # fmt: skip
    return ok("speed", found)


def usable_cores(limit: Path = _CPU_LIMIT) -> float:
    """Return how many cores this process may use: those it is bound to, or fewer where its container has a limit.

    Args:
        limit: The kernel's file with the container's limit.
    """
    # Linux alone says which cores a process is bound to
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = float(bound)
    try:
        quota, period = limit.read_text().split()
        return cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        return cores


def _product_s(threads: int) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        left, right = torch.rand(_SIZE, _SIZE), torch.rand(_SIZE, _SIZE)
        torch.mm(left, right)  # the first one makes the threads
        return statistics.median(_timed(lambda: torch.mm(left, right)) for _ in range(_TIMINGS))
    finally:
        torch.set_num_threads(before)


def _timed(action: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s
