"""Join the replicas of a run: torchrun's environment, an address that the others reach, and gloo between them.

This module is the one place of the library that reads the environment, because torchrun speaks through it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from thinwire.errors import ConnectError
from thinwire.events import TransferLog
from thinwire.transport.addresses import (
    RENDEZVOUS_FILE,
    Address,
    RankEndpoint,
    address_of,
    firewall_hint,
    first_unreachable,
    host_identity,
    interface_of,
    listen,
    own_address,
    resolve,
)
from thinwire.transport.process_group import ProcessGroupTransport
from thinwire.transport.recording import RecordingTransport
from thinwire.transport.rendezvous import POLL_S, Rendezvous, open_file_store, open_store, prefixed
from thinwire.transport.secret import SECRET_BYTES, Secret, need_pyzmq, read_secret
from thinwire.transport.tcp_stats import LocalSockets

if TYPE_CHECKING:
    from thinwire.transport.wire.wire_transport import WireTransport

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
REACH_S = 5.0
# Results of an active test travel over the rendezvous of a partial job.
MAX_PARTIAL_TEXT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlace:
    """Place of a process in its job, by torchrun's environment; `rendezvous_file` is set by thinwire's own launcher."""

    rank: int
    world_size: int
    master_address: str
    master_port: int
    agent_serves_store: bool
    prefix: str
    rendezvous_file: str = ""

    @property
    def name(self) -> str:
        """Name of the rendezvous in errors."""
        return self.rendezvous_file or f"{self.master_address}:{self.master_port}"


class _Stores:
    """Stores of this process's jobs, kept until the process ends.

    A process may join, close and join again. A store that ended with its first group would leave a fast rank in the
    old store while rank 0 opens the next; so it stays, and each rendezvous in it has a number of its own.
    """

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}
        self._counts: Counter[str] = Counter()

    def open(self, place: JobPlace, *, serve: bool, deadline_s: float) -> tuple[Any, str]:
        """Return the store at a place and the prefix of its next rendezvous."""
        if place.name not in self._found:
            self._found[place.name] = (
                open_file_store(place.rendezvous_file, world_size=place.world_size)
                if place.rendezvous_file
                else open_store(place.master_address, place.master_port, serve=serve, deadline_s=deadline_s)
            )
        number = self._counts[place.prefix]
        self._counts[place.prefix] += 1
        return self._found[place.name], f"{place.prefix}/{number}"


stores = _Stores()


def connect(
    *,
    ranks_per_replica: int = 1,
    interface: str | None = None,
    address: str | None = None,
    deadline_s: float = 300.0,
    log: TransferLog | None = None,
    secret: Path | None = None,
) -> RecordingTransport:
    """Join the replicas of this run and return the transport between them.

    Under torchrun (or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set by hand) the ranks meet at MASTER_ADDR,
    prove that every host reaches every other, and join in a gloo group (with nccl beside it where there are GPUs) that
    is also torch's default group. A default group that exists already is used as it is. Without any of these variables
    this process is the only replica.

    With a secret, the replicas send over connections of their own, authenticated and encrypted
    (`thinwire.transport.wire`), and no group is made. The ranks meet in the same store, which authenticates nobody:
    who reaches it can keep the run from starting, but neither join it nor read it.

    Args:
        ranks_per_replica: Ranks that hold one replica together; consecutive ranks form a replica.
        interface: Network interface whose IPv4 address the others shall use, such as `"eth0"`.
        address: IPv4 address (or name) of this host that the others shall use. By default the address from which
            MASTER_ADDR is reached, unless the variable GLOO_SOCKET_IFNAME names an interface.
        deadline_s: Seconds that ranks may come one after another; also the time-out of torch's own collectives in the
            groups made here.
        log: Where transfers are recorded, a new log by default.
        secret: The job's secret, the same file on all hosts; `thinwire secret FILE` makes one.

    Returns:
        A transport; its `close()` ends the groups made here.

    Raises:
        MissingExtra: A secret is given, and pyzmq is not installed.
        ValueError: A bad argument, an incomplete environment, or an interface or address that this host does not have.
        ConnectError: A rank did not come, a host cannot be reached, or the port is taken.

    Example:
        >>> transport = connect()  # not under torchrun
        >>> transport.num_replicas
        1
    """
    if interface is not None and address is not None:
        raise ValueError(f"give interface or address, not both, got interface={interface!r} and address={address!r}")
    if deadline_s <= 0:
        raise ValueError(f"deadline_s must be positive, got {deadline_s}")
    if ranks_per_replica < 1:
        raise ValueError(f"ranks_per_replica must be at least 1, got {ranks_per_replica}")
    job = None if secret is None else _check_secret(secret, ranks_per_replica=ranks_per_replica)
    if job is None and dist.is_available() and dist.is_initialized():
        chosen = _chosen_interface(interface=interface, address=address)
        return RecordingTransport(_own_group(ranks_per_replica, chosen, deadline_s=deadline_s), log=log)
    place = job_place()
    if place is None:
        _check_divides(ranks_per_replica, world_size=1)
        from thinwire.transport.loopback import LoopbackWorld

        return RecordingTransport(LoopbackWorld(1).transports[0], log=log)
    _check_divides(ranks_per_replica, world_size=place.world_size)
    own_address = address_at(place, interface=interface, address=address)
    if job is not None:
        return RecordingTransport(_join_by_wire(place, own_address, job, deadline_s=deadline_s), log=log)
    transport = _join(place, own_address, ranks_per_replica=ranks_per_replica, deadline_s=deadline_s)
    return RecordingTransport(transport, log=log)


def _check_secret(path: Path, *, ranks_per_replica: int) -> Secret:
    if ranks_per_replica != 1:
        raise ValueError(
            f"with a secret a replica is one rank, got ranks_per_replica={ranks_per_replica}; leave secret out, and "
            f"put the hosts into one private network instead"
        )
    if dist.is_available() and dist.is_initialized():
        raise ValueError(
            "with a secret the replicas join without torch.distributed; call connect(secret=...) before "
            "init_process_group, or leave secret out"
        )
    need_pyzmq()
    return read_secret(path)


def job_place() -> JobPlace | None:
    """Return what this process's environment says, or None where no variable of torchrun's is set.

    Raises:
        ValueError: Only some are set, or one is no number in its range.
    """
    return _read_environment(os.environ)


def _read_environment(environment: Mapping[str, str]) -> JobPlace | None:
    file = environment.get(RENDEZVOUS_FILE, "")
    if file:
        # MASTER_ADDR and MASTER_PORT of another job may stand in the shell that started the launcher
        environment = {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    missing = [name for name in REQUIRED if not environment.get(name)]
    if len(missing) == len(REQUIRED):
        return None
    if missing:
        present = [name for name in REQUIRED if name not in missing]
        raise ValueError(
            f"{', '.join(missing)} must be set where {', '.join(present)} is; start with torchrun, which sets all of "
            f"{', '.join(REQUIRED)}, or unset them all to run in this process alone"
        )
    place = JobPlace(
        rank=_integer(environment, "RANK", low=0),
        world_size=_integer(environment, "WORLD_SIZE", low=1),
        master_address=environment["MASTER_ADDR"],
        master_port=_integer(environment, "MASTER_PORT", low=1),
        # torchrun's agent may hold the store itself; then no rank may open the port.
        agent_serves_store=not file and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        # A restarted job meets in the same store: notes of the attempt before must not count.
        prefix=f"thinwire/{environment.get('TORCHELASTIC_RUN_ID', '')}/"
        f"{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        rendezvous_file=file,
    )
    if place.rank >= place.world_size:
        raise ValueError(f"RANK must be below WORLD_SIZE {place.world_size}, got {place.rank}")
    if place.master_port > 65_535:
        raise ValueError(f"MASTER_PORT must be at most 65535, got {place.master_port}")
    return place


def _integer(environment: Mapping[str, str], name: str, *, low: int) -> int:
    text = environment[name]
    if not text.isascii() or not text.isdecimal() or int(text) < low:
        raise ValueError(f"{name} must be a whole number of at least {low}, got {text!r}")
    return int(text)


def _check_divides(ranks_per_replica: int, *, world_size: int) -> None:
    if world_size % ranks_per_replica:
        raise ValueError(
            f"ranks_per_replica must divide WORLD_SIZE, got {ranks_per_replica} for {world_size}; "
            f"start a multiple of {ranks_per_replica} ranks"
        )


def _chosen_interface(*, interface: str | None, address: str | None) -> str | None:
    if interface is not None:
        address_of(interface)
        return interface
    return None if address is None else interface_of(resolve(address))


def address_at(place: JobPlace, *, interface: str | None, address: str | None) -> str:
    """Return the IPv4 address by which the others of a job reach this host.

    Raises:
        ValueError: The interface or address named is not this host's.
        ConnectError: There is no route to MASTER_ADDR.
    """
    if address is None and interface is None and place.rendezvous_file:
        return "127.0.0.1"  # all ranks run on this host
    if address is None and interface is None and os.environ.get(GLOO_INTERFACE):
        # gloo takes a list of interfaces; the first is the one it starts with.
        interface = os.environ[GLOO_INTERFACE].split(",")[0]
    return own_address(address=address, interface=interface, towards=place.master_address)


def _join(place: JobPlace, address: str, *, ranks_per_replica: int, deadline_s: float) -> ProcessGroupTransport:
    interface = interface_of(address)
    if place.rendezvous_file:
        keep_nccl_on_loopback()
    rendezvous, store, prefix = _meet(place, ranks_per_replica=ranks_per_replica, deadline_s=deadline_s)
    try:
        # No accept is needed: the kernel completes connections up to the backlog.
        with listen(address, backlog=place.world_size + 1) as listener:
            own = _endpoint(place, address, port=listener.getsockname()[1], ranks_per_replica=ranks_per_replica)
            endpoints = _exchange_endpoints(own, rendezvous, ranks_per_replica=ranks_per_replica)
    finally:
        rendezvous.leave(place.world_size)
    with gloo_on(interface), _naming_failures(address):
        # Both sides of a GPU replica: messages from host memory, the user's own collectives on the device.
        both = torch.cuda.is_available() and dist.is_nccl_available()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if both else "gloo",
            store=prefixed(store, f"{prefix}/groups"),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=deadline_s),
        )
        try:
            sockets = LocalSockets({endpoint.rank: endpoint.address for endpoint in endpoints})
            return _own_group(
                ranks_per_replica, interface, deadline_s=deadline_s, made_default=True, sockets=sockets
            )  # fmt: skip
        except BaseException:
            dist.destroy_process_group()
            raise


def _join_by_wire(place: JobPlace, address: str, secret: Secret, *, deadline_s: float) -> WireTransport:
    """Meet as for gloo; from there on, nothing that was read in the store is believed but where to try."""
    from thinwire.transport.wire.wire_transport import WireTransport

    end = time.monotonic() + deadline_s
    rendezvous, _, _ = _meet(place, ranks_per_replica=1, deadline_s=deadline_s)
    transport = WireTransport(replica=place.rank, num_replicas=place.world_size, secret=secret, address=address)
    try:
        own = _endpoint(place, address, port=transport.port, ranks_per_replica=1, secret=secret.fingerprint)
        endpoints = _exchange_endpoints(own, rendezvous, ranks_per_replica=1)
        below = {s.rank: Address(host=s.address, port=s.port) for s in endpoints if s.rank < place.rank}
        try:
            transport.dial(below, deadline_s=max(0.0, end - time.monotonic()))
        except ConnectError as error:
            rendezvous.fail(str(error))
        rendezvous.post(f"joined/{place.rank}", "")
        rendezvous.collect_all("joined")
    except BaseException:
        transport.close()
        raise
    finally:
        rendezvous.leave(place.world_size)
    return transport


def _meet(place: JobPlace, *, ranks_per_replica: int, deadline_s: float) -> tuple[Rendezvous, Any, str]:
    end = time.monotonic() + deadline_s
    serve = place.rank == 0 and not place.agent_serves_store
    store, prefix = stores.open(place, serve=serve, deadline_s=deadline_s)
    rendezvous = Rendezvous(
        prefixed(store, f"{prefix}/rendezvous"),
        rank=place.rank,
        world_size=place.world_size,
        ranks_per_replica=ranks_per_replica,
        deadline_s=max(0.0, end - time.monotonic()),
        place=place.name,
    )
    return rendezvous, store, prefix


def _endpoint(place: JobPlace, address: str, *, port: int, ranks_per_replica: int, secret: str = "") -> RankEndpoint:
    return RankEndpoint(
        rank=place.rank,
        replica=place.rank // ranks_per_replica,
        hostname=socket.gethostname(),
        host=host_identity(),
        address=address,
        port=port,
        secret=secret,
    )


def _exchange_endpoints(own: RankEndpoint, rendezvous: Rendezvous, *, ranks_per_replica: int) -> list[RankEndpoint]:
    """Exchange addresses and prove that every host reaches every other, before anything else is tried."""
    rendezvous.post(f"endpoint/{own.rank}", own.to_json())
    endpoints = [
        RankEndpoint.from_json(text, rank=rank) for rank, text in enumerate(rendezvous.collect_all("endpoint"))
    ]
    problem = _misconfigured(endpoints, ranks_per_replica=ranks_per_replica) or first_unreachable(
        own, endpoints, deadline_s=REACH_S
    )
    rendezvous.post(f"verdict/{own.rank}", problem)
    for verdict in rendezvous.collect_all("verdict"):
        if verdict:
            raise ConnectError(verdict)
    return endpoints


def _misconfigured(endpoints: list[RankEndpoint], *, ranks_per_replica: int) -> str:
    for endpoint in endpoints:
        if endpoint.replica != endpoint.rank // ranks_per_replica:
            return (
                f"rank {endpoint.rank} considers itself part of replica {endpoint.replica}, expected "
                f"{endpoint.rank // ranks_per_replica}: give every rank the same ranks_per_replica"
            )
        if endpoint.secret != endpoints[0].secret:
            return (
                f"rank {endpoint.rank} on host {endpoint.hostname} and rank 0 on host {endpoints[0].hostname} do not "
                f"have the same secret; give every rank the same secret file (--secret), or none"
            )
    return ""


def _own_group(
    ranks_per_replica: int, interface: str | None, *, deadline_s: float, made_default: bool = False,
    sockets: LocalSockets | None = None,
) -> ProcessGroupTransport:  # fmt: skip
    """Make a gloo group for thinwire's messages alone: a user's collectives never meet them."""
    _check_divides(ranks_per_replica, world_size=dist.get_world_size())
    with gloo_on(interface), _naming_failures("this host"):
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
    assert group is not None, "a group of all ranks holds this rank"

    def release() -> None:
        if dist.is_initialized():
            dist.destroy_process_group(group)
        if made_default and dist.is_initialized():
            dist.destroy_process_group()

    return ProcessGroupTransport(group, ranks_per_replica=ranks_per_replica, release=release, sockets=sockets)


@contextlib.contextmanager
def gloo_on(interface: str | None) -> Iterator[None]:
    """Let gloo listen on an interface: it offers no other public way than this variable."""
    before = os.environ.get(GLOO_INTERFACE)
    if interface is not None:
        os.environ[GLOO_INTERFACE] = interface
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(GLOO_INTERFACE, None)
        else:
            os.environ[GLOO_INTERFACE] = before


def keep_nccl_on_loopback() -> None:
    """Let nccl listen on loopback alone, in a process whose groups all stay on this host.

    nccl reads its variable when the first group is used, which may be much later. A user's own choice stays.
    """
    os.environ.setdefault(NCCL_INTERFACE, interface_of("127.0.0.1"))


@contextlib.contextmanager
def _naming_failures(where: str) -> Iterator[None]:
    try:
        yield
    except ConnectError:
        raise
    except RuntimeError as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConnectError(f"gloo could not join the ranks from {where}: {first_line}; {firewall_hint()}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialJob:
    """A job of which some ranks or connections may be missing.

    Attributes:
        rank: This rank.
        world_size: How many were expected.
        rendezvous: Texts between its ranks.
        endpoints: By rank; only of ranks that came.
        transport: Between them; not all may be connected.
        connected: Ranks that this rank is connected to.
        connect_s: Seconds until the last of them was connected.
    """

    rank: int
    world_size: int
    rendezvous: Rendezvous
    endpoints: Mapping[int, RankEndpoint]
    transport: WireTransport
    connected: tuple[int, ...] = field(default=())
    connect_s: float = 0.0


def connect_reachable(
    *, interface: str | None = None, address: str | None = None, secret: Path | None = None, deadline_s: float = 60.0
) -> PartialJob:
    """Join the ranks of torchrun's environment; a rank that does not come or is not reached is left out.

    `connect` refuses a job in which one host does not reach another; a test that looks for that fault must not. The
    ranks agree over the store at MASTER_ADDR, which each must reach, and talk over an open `WireTransport`, whose
    connections come up and fail one by one.

    Args:
        interface: Network interface whose address the others shall use.
        address: Or that address.
        secret: The job's secret, the same file on all hosts. Without one, rank 0 makes a key for this job and posts it
            in the store, where any process that reaches the store can read it.
        deadline_s: Seconds that ranks may come one after another.

    Returns:
        The same endpoints on all ranks; the caller closes the transport and leaves the rendezvous.

    Raises:
        MissingExtra: pyzmq is not installed.
        ValueError: A bad argument, or an incomplete environment.
        ConnectError: The store is not reached, or ranks hold other secrets.
    """
    from thinwire.transport.wire.wire_transport import WireTransport

    if interface is not None and address is not None:
        raise ValueError(f"give interface or address, not both, got interface={interface!r} and address={address!r}")
    need_pyzmq()
    own_secret = None if secret is None else read_secret(secret)
    place = job_place()
    if place is None:
        raise ValueError("no other rank: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not set; start by torchrun")
    own_address = address_at(place, interface=interface, address=address)
    serve = place.rank == 0 and not place.agent_serves_store
    store, prefix = stores.open(place, serve=serve, deadline_s=deadline_s)
    store.set_timeout(timedelta(seconds=deadline_s))
    rendezvous = Rendezvous(
        prefixed(store, f"{prefix}/partial"), rank=place.rank, world_size=place.world_size, place=place.name,
        max_bytes=MAX_PARTIAL_TEXT_BYTES,
    )  # fmt: skip
    rendezvous.promise(deadline_s)
    key = own_secret or _shared_key(rendezvous, deadline_s=deadline_s)
    transport = WireTransport(
        replica=place.rank, num_replicas=place.world_size, secret=key, address=own_address, is_open=True
    )
    try:
        fingerprint = "" if own_secret is None else own_secret.fingerprint
        own = _endpoint(place, own_address, port=transport.port, ranks_per_replica=1, secret=fingerprint)
        endpoints = _gather_endpoints(own, rendezvous, deadline_s=deadline_s)
        connected, connect_s = _dial_all(transport, endpoints, rank=place.rank)
    except BaseException:
        transport.close()
        raise
    return PartialJob(
        rank=place.rank, world_size=place.world_size, rendezvous=rendezvous, endpoints=endpoints, transport=transport,
        connected=connected, connect_s=connect_s,
    )  # fmt: skip


def _shared_key(rendezvous: Rendezvous, *, deadline_s: float) -> Secret:
    if rendezvous.rank == 0:
        rendezvous.post("key", secrets.token_bytes(SECRET_BYTES).hex())
    try:
        key = bytes.fromhex(_from_rank_0(rendezvous, "key", deadline_s=deadline_s))
    except ValueError:
        key = b""
    if len(key) != SECRET_BYTES:
        raise ConnectError("rank 0 posted a key that is none; run the same thinwire on all hosts")
    return Secret(key=key)


def _from_rank_0(rendezvous: Rendezvous, key: str, *, deadline_s: float) -> str:
    """Return a text of rank 0, which may not have begun yet."""
    end = time.monotonic() + deadline_s
    while (text := rendezvous.read(key)) is None:
        if time.monotonic() > end:
            raise ConnectError(f"rank 0 did not begin within {deadline_s:g} s; start it, and see its log")
        time.sleep(POLL_S)
    return text


def _gather_endpoints(own: RankEndpoint, rendezvous: Rendezvous, *, deadline_s: float) -> dict[int, RankEndpoint]:
    """Return the endpoints of all ranks that came in time, as rank 0 saw it."""
    rendezvous.post(f"endpoint/{own.rank}", own.to_json())
    rendezvous.promise(2 * deadline_s)
    if own.rank == 0:
        end, present = time.monotonic() + deadline_s, {0}
        while len(present) < rendezvous.world_size and time.monotonic() < end:
            present |= {r for r in range(rendezvous.world_size) if rendezvous.read(f"endpoint/{r}") is not None}
            time.sleep(POLL_S)
        rendezvous.post("present", " ".join(map(str, sorted(present))))
    _from_rank_0(rendezvous, "endpoint/0", deadline_s=deadline_s)
    ranks = _present_ranks(rendezvous.wait_for("present", whom=0), world_size=rendezvous.world_size)
    endpoints = {
        rank: RankEndpoint.from_json(rendezvous.read(f"endpoint/{rank}") or "", rank=rank) for rank in sorted(ranks)
    }
    if own.rank not in endpoints:
        raise ConnectError(
            f"rank {own.rank} came after the others had begun; start all within {deadline_s:g} s (--deadline)"
        )
    if problem := _misconfigured(list(endpoints.values()), ranks_per_replica=1):
        raise ConnectError(problem)
    return endpoints


def _present_ranks(text: str, *, world_size: int) -> list[int]:
    """Read rank 0's list of the ranks that came.

    Raises:
        ConnectError: It is no such list, or lacks rank 0, which wrote it.
    """
    words = text.split()
    # the length is checked first: Python refuses to convert thousands of digits
    is_list = all(word.isascii() and word.isdecimal() and len(word) < 10 for word in words)
    ranks = [int(word) for word in words] if is_list else []
    if 0 not in ranks or any(rank >= world_size for rank in ranks):
        raise ConnectError("rank 0 posted a list of ranks that is none; run the same thinwire on all hosts")
    return ranks


def _dial_all(
    transport: WireTransport, endpoints: Mapping[int, RankEndpoint], *, rank: int
) -> tuple[tuple[int, ...], float]:
    """Dial all others; wait at most ten times as long as the slowest that answered took, and at least 5 s."""
    others = sorted(set(endpoints) - {rank})
    began_s, latest_s, count = time.monotonic(), 0.0, 0
    for peer in others:
        place = Address(host=endpoints[peer].address, port=endpoints[peer].port)
        transport.add(peer, address=place if peer < rank else None)
    while True:
        connected = transport.wait_until_connected(others, deadline_s=0.1)
        elapsed_s = time.monotonic() - began_s
        if len(connected) > count:
            count, latest_s = len(connected), elapsed_s
        if len(connected) == len(others) or elapsed_s > max(REACH_S, 10 * latest_s):
            return connected, latest_s
