"""Join the replicas of a run: torchrun's environment, an address that the others reach, and gloo between them.

This module and `job_environment` are the places of the library that touch the environment.
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
from typing import TYPE_CHECKING, Any, Unpack

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from thinwire.errors import ConnectError, excluded, refusal
from thinwire.events import TransferLog
from thinwire.transport.addresses import (
    ANY_LOOPBACK,
    Address,
    DialPaths,
    ListenConfig,
    RankEndpoint,
    ReachOptions,
    address_of,
    firewall_hint,
    first_unreachable,
    host_identity,
    interface_of,
    listen,
    listen_config,
    own_address,
    read_dial_paths,
    resolve,
)
from thinwire.transport.base import RankSubset, Transport, innermost
from thinwire.transport.default_group import default_store
from thinwire.transport.forked import kept_from_children
from thinwire.transport.job_environment import (
    JobPlace,
    ReplicaWorld,
    hide_job,
    is_hidden,
    job_place,
    pin_gpus,
    refuse_engines,
)
from thinwire.transport.process_group import ProcessGroupTransport, release_within
from thinwire.transport.recording import RecordingTransport
from thinwire.transport.rendezvous import POLL_S, Rendezvous, open_file_store, open_store
from thinwire.transport.secret import JOIN_VARIABLE, SECRET_BYTES, SECRET_VARIABLE, Secret, need_pyzmq, read_secret
from thinwire.transport.tcp_stats import LocalSockets

if TYPE_CHECKING:
    from thinwire.transport.wire.wire_transport import WireTransport

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
TRAFFIC_PLAN_VARIABLE = "THINWIRE_TRAFFIC_PLAN"
REACH_S = 5.0
# Results of an active test travel over the rendezvous of a partial job.
MAX_PARTIAL_TEXT_BYTES = 1 << 20


def given_join_uri() -> str:
    """Return the environment's address of an elastic run, empty where there is none."""
    return os.environ.get(JOIN_VARIABLE, "").strip()


def check_way_to_join(transport: Transport | None, uri: str | None) -> None:
    """Refuse both or neither of a transport and the address of an elastic run; the environment may hold the address.

    Raises:
        ValueError: That is so.
    """
    if transport is not None and uri is not None:
        raise excluded("uri", "transport", why="an elastic run makes its own", remedy="one of the two")
    if transport is None and not (uri or given_join_uri()):
        raise refusal(
            "nothing joins this trainer to the others", got="neither transport nor uri",
            allowed=f"one of them, or the variable {JOIN_VARIABLE}",
            remedy="transport=thinwire.connect(solo=True), or for an elastic run uri='HOST:PORT'",
        )  # fmt: skip


def given_secret_file(path: Path | str | None) -> Path | None:
    """Return the file of the secret: the one given, else the environment's; None where there is none."""
    return _given_file(path, SECRET_VARIABLE)


def _given_file(path: Path | str | None, variable: str) -> Path | None:
    found = path if path is not None else os.environ.get(variable)
    return None if not found else Path(found).resolve()


# Stores of this process's jobs, by place, kept until the process ends. It may join, close and join again. A store that
# ended with its first group would leave a fast rank in the old store while rank 0 opens the next; so it stays, and each
# rendezvous in it has a number of its own.
_stores: dict[str, Any] = {}
_num_rendezvous: Counter[str] = Counter()


def job_store(*, deadline_s: float) -> tuple[JobPlace, Any]:
    """Return this process's place in its job, and the store in which the job's ranks meet.

    Raises:
        ValueError: No launcher's variables are set.
        ConnectError: The store does not answer.
    """
    place = job_place()
    if place is None:
        raise refusal("this process is no rank of a job", got="no RANK", allowed="RANK and WORLD_SIZE of a launcher",
                      remedy="torchrun")  # fmt: skip
    return place, _store_at(place, deadline_s=deadline_s)


def _open_store(place: JobPlace, *, deadline_s: float) -> tuple[Any, str]:
    """Return the store at a place and the prefix of its next rendezvous."""
    store = _store_at(place, deadline_s=deadline_s)
    _num_rendezvous[place.prefix] += 1
    return store, f"{place.prefix}/{_num_rendezvous[place.prefix] - 1}"


def _store_at(place: JobPlace, *, deadline_s: float) -> Any:
    if place.name not in _stores:
        serve = place.rank == 0 and not place.agent_serves_store
        _stores[place.name] = (
            open_file_store(place.rendezvous_file, world_size=place.world_size)
            if place.rendezvous_file
            else open_store(place.master_address, place.master_port, serve=serve, deadline_s=deadline_s)
        )
    return _stores[place.name]


def replace_default_group() -> None:
    """End the default group that a launcher has made, such as Ray; the ranks then meet in its store.

    Without a group or a launcher's variables it does nothing.
    """
    place = job_place()
    if place is None or not dist.is_available() or not dist.is_initialized():
        return
    # kept: with the group, rank 0 would end the store while another rank still asks it
    _stores[place.name] = default_store()
    dist.destroy_process_group()


def connect(
    *, ranks_per_replica: int = 1, interface: str | None = None, address: str | None = None, deadline_s: float = 300.0,
    log: TransferLog | None = None, secret: Path | None = None, solo: bool = False, traffic_plan: Path | None = None,
    **reach: Unpack[ReachOptions],
) -> RecordingTransport:  # fmt: skip
    """Join the replicas of this run and return the transport between them.

    Under torchrun (or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set by hand) the ranks meet at MASTER_ADDR,
    prove that every host reaches every other, and join in a gloo group (with nccl beside it where there are GPUs) that
    is also torch's default group. A default group that exists already is used as it is. srun and mpirun state the
    same in variables of their own, which count where torchrun's are missing. Without any of these variables this
    process is the only replica; one that a launcher started beside others is refused.

    With a secret, the replicas send over connections of their own, authenticated and encrypted
    (`thinwire.transport.wire`), and no group is made. The ranks meet in the same store, which authenticates nobody:
    who reaches it can keep the run from starting, but neither join it nor read it.

    With `solo=True`, libraries inside the replica see that replica alone. accelerate, Lightning and many loops read
    torchrun's variables and then reduce gradients over all ranks at every step. So the variables are removed from the
    environment for good, no default group is left, and CUDA_VISIBLE_DEVICES holds the GPU of LOCAL_RANK alone. Where
    `ranks_per_replica` is above 1, the replica's ranks are the default group, and the variables describe them: RANK
    and WORLD_SIZE within the replica, with a MASTER_PORT of its own.

    Args:
        ranks_per_replica: Ranks that hold one replica together; consecutive ranks form a replica.
        interface: Network interface whose address the others shall use, such as `"eth0"`.
        address: Address (or name) of this host that the others shall use; IPv6 with a secret only. By default the
            address from which MASTER_ADDR is reached, unless the variable GLOO_SOCKET_IFNAME names an interface.
        deadline_s: Seconds that ranks may come one after another; also the time-out of torch's own collectives in the
            groups made here.
        log: Where transfers are recorded, a new log by default.
        secret: The job's secret, the same file on all hosts; `thinwire secret FILE` makes one. By default that of the
            variable THINWIRE_SECRET_FILE, if it is set. Where a replica has several ranks, it takes `solo=True`, and
            gloo joins the ranks of each replica; `wire_within` returns the encrypted connections between them.
        solo: Hide the other replicas from the libraries of this process. Call it before anything uses CUDA or makes a
            process group, and give it again when the process joins again.
        traffic_plan: Plan of `thinwire traffic plan --probe`, with a secret only: connections then take planned paths.
            Rank n runs on the plan's n-th host. By default that of the variable THINWIRE_TRAFFIC_PLAN.
        reach: See `ReachOptions`; with a secret only, since gloo listens on any port.

    Returns:
        A transport; its `close()` ends the groups made here.

    Raises:
        MissingExtra: A secret is given, and pyzmq is not installed.
        ValueError: A bad argument, an incomplete environment, or an interface or address that this host does not have.
        DataError: The traffic plan cannot be read.
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
    _check_solo(solo)
    secret = given_secret_file(secret)
    job = None if secret is None else _check_secret(secret, has_group=ranks_per_replica > 1, solo=solo, **reach)
    if job is None and dist.is_available() and dist.is_initialized():
        chosen = _chosen_interface(interface=interface, address=address)
        with kept_from_children():
            own = _own_group(ranks_per_replica, chosen, deadline_s=deadline_s)
        return RecordingTransport(own, log=log)
    place = job_place()
    if place is None:
        _check_divides(ranks_per_replica, world_size=1)
        from thinwire.transport.loopback import LoopbackWorld

        return RecordingTransport(LoopbackWorld(1).transports[0], log=log)
    plan = _given_file(traffic_plan, TRAFFIC_PLAN_VARIABLE)
    _check_divides(ranks_per_replica, world_size=place.world_size)
    own_address = address if address in ANY_LOOPBACK else address_at(place, interface=interface, address=address)
    if job is not None:
        listen = listen_config(address=own_address, **reach)
        paths = {} if plan is None else read_dial_paths(plan, rank=place.rank, world_size=place.world_size)
        with kept_from_children():
            wire = _join_by_wire(place, listen, job, deadline_s=deadline_s, solo=solo, paths=paths,
                                 ranks_per_replica=ranks_per_replica)  # fmt: skip
        return RecordingTransport(wire, log=log)
    if plan is not None:
        raise refusal("a traffic plan needs a secret: gloo takes any source port", got=f"no secret and {plan}",
                      allowed="connect(secret=FILE)", remedy="thinwire secret FILE")  # fmt: skip
    if any(reach.values()):
        raise refusal("advertise and port_range need a secret: gloo listens on any port", got="no secret",
                      allowed="connect(secret=FILE)", remedy="thinwire secret FILE")  # fmt: skip
    assert own_address is not None
    if ":" in own_address:
        raise refusal("without a secret, gloo joins the ranks, over IPv4 alone", got=own_address,
                      allowed="an IPv4 address, or connect(secret=FILE)", remedy="thinwire secret FILE")  # fmt: skip
    with kept_from_children():
        transport = _join(place, own_address, ranks_per_replica=ranks_per_replica, deadline_s=deadline_s, solo=solo)
    return RecordingTransport(transport, log=log)


def _check_solo(solo: bool) -> None:
    if solo and not is_hidden():  # a library may set the variables later, for this replica alone
        refuse_engines(os.environ)
    if is_hidden() and not solo:
        raise refusal("this process joined with solo=True before, which hid the other replicas", got="solo=False",
                      allowed="solo=True", remedy="connect(solo=True) at every call")  # fmt: skip
    if solo and dist.is_available() and dist.is_initialized():
        raise refusal(
            "solo=True hides the other replicas, and torch has a default process group already",
            got=f"a group of {dist.get_world_size()} ranks", allowed="no default process group",
            remedy="connect(solo=True) before init_process_group, and before any Accelerator or Trainer is made; in a "
            "worker of Ray, thinwire.integrations.ray.connect()",
        )  # fmt: skip


def wire_within(transport: RecordingTransport) -> Transport | None:
    """Return the encrypted connections between a replica's own ranks; None where `connect` had no secret.

    The transport is not the caller's to close.
    """
    if not isinstance(transport.inner, RankSubset):
        return None
    wire: WireTransport = innermost(transport)
    first = wire.replica - wire.replica % wire.ranks_per_replica
    return RankSubset(wire, range(first, first + wire.ranks_per_replica))


def _check_secret(path: Path, *, has_group: bool, solo: bool, **reach: object) -> Secret:
    if has_group and not solo:
        raise refusal("with a secret, the ranks of a replica are in a world of their own", got="solo=False",
                      allowed="solo=True, or ranks_per_replica=1", remedy="connect(solo=True)")  # fmt: skip
    if has_group and any(reach.values()):
        raise refusal("advertise and port_range reach connections of thinwire's own, and gloo joins the ranks of a "
                      "replica on any port", got="replicas of several ranks", allowed="ranks_per_replica=1",
                      remedy="one private network, without advertise and port_range")  # fmt: skip
    if dist.is_available() and dist.is_initialized():
        raise ValueError(
            "with a secret the replicas join without torch.distributed; call connect(secret=...) before "
            f"init_process_group, or leave secret and {SECRET_VARIABLE} out"
        )
    need_pyzmq()
    return read_secret(path)


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


def _join(
    place: JobPlace, address: str, *, ranks_per_replica: int, deadline_s: float, solo: bool
) -> ProcessGroupTransport:
    interface = interface_of(address)
    if place.rendezvous_file:
        keep_nccl_on_loopback()
    rendezvous, store, prefix = _meet(place, ranks_per_replica=ranks_per_replica, deadline_s=deadline_s)
    try:
        # No accept is needed: the kernel completes connections up to the backlog.
        with listen(address, backlog=place.world_size + 1) as listener:
            own = _endpoint(place, address, port=listener.getsockname()[1], ranks_per_replica=ranks_per_replica)
            endpoints = _exchange_endpoints(own, rendezvous, ranks_per_replica=ranks_per_replica)
        world = _replica_world(own, endpoints, rendezvous) if solo else None
    finally:
        rendezvous.leave(place.world_size)
    sockets = LocalSockets({endpoint.rank: endpoint.address for endpoint in endpoints})
    timeout = timedelta(seconds=deadline_s)
    with gloo_on(interface), _naming_failures(address):
        if world is not None:
            # gloo itself, in no world of torch's: a default group would show the other replicas to every library
            group = dist.ProcessGroupGloo(PrefixStore(f"{prefix}/groups", store), place.rank, place.world_size, timeout)
            _enter_replica(place, world, PrefixStore(prefix, store), address=address, timeout=timeout)
            return ProcessGroupTransport(
                group, ranks_per_replica=ranks_per_replica, sockets=sockets,
                release=end_default_group if world.size > 1 else None,
            )  # fmt: skip
        make_default_group(
            PrefixStore(f"{prefix}/groups", store), rank=place.rank, world_size=place.world_size, timeout=timeout
        )
        try:
            return _own_group(ranks_per_replica, interface, deadline_s=deadline_s, made_default=True, sockets=sockets)
        except BaseException:
            dist.destroy_process_group()
            raise


def _enter_replica(
    place: JobPlace, world: ReplicaWorld | None, store: Any, *, address: str, timeout: timedelta
) -> None:  # fmt: skip
    """Hide the other replicas from the libraries of this process; ranks of one (`world`) get a default group."""
    local_rank, local_size = (0, 1) if world is None else (world.local_rank, world.local_size)
    if place.local_rank is not None:
        pin_gpus(range(place.local_rank - local_rank, place.local_rank - local_rank + local_size))
    if world is not None and world.size > 1:
        own = PrefixStore(f"replica/{place.rank // world.size}", store)
        with gloo_on(interface_of(address)), _naming_failures(address):
            make_default_group(own, rank=world.rank, world_size=world.size, timeout=timeout)
    hide_job(place, world=world if world is not None and world.size > 1 else None)
    _take_init_lines()


def _take_init_lines() -> None:
    """Let a script's own `init_process_group` find the replica's group, or make one of this process alone.

    torch would refuse a second default group, and without the launcher's variables a first one.
    """
    if hasattr(dist.init_process_group, "original"):
        return
    original = dist.init_process_group

    def init_process_group(
        backend: Any = None, init_method: Any = None, timeout: Any = None, world_size: int = -1, **options: Any
    ) -> None:
        present = dist.get_world_size() if dist.is_initialized() else 1
        if world_size not in (-1, present):
            raise refusal(
                "connect(solo=True) has given this process the world of one replica, and init_process_group asks for "
                "another", got=f"world_size={world_size}", allowed=f"{present}, or no world_size",
                remedy="to delete the line init_process_group(...)",
            )  # fmt: skip
        if not dist.is_initialized() and os.environ.get("RANK"):  # of the replica's own world, after `close`
            original(backend, init_method, timeout, world_size, **options)
        elif not dist.is_initialized():
            original(backend, store=HashStore(), rank=0, world_size=1)

    init_process_group.original = original  # type: ignore[attr-defined]
    dist.init_process_group = init_process_group  # type: ignore[assignment]


def make_default_group(store: Any, *, rank: int, world_size: int, timeout: timedelta) -> None:
    """Make torch's default group, with gloo and, where there are GPUs, nccl."""
    # Both sides of a GPU replica: messages from host memory, the user's own collectives on the device.
    both = torch.cuda.is_available() and dist.is_nccl_available()
    backend = "cpu:gloo,cuda:nccl" if both else "gloo"
    # an earlier `connect` in this process may have taken the script's own lines
    begin = getattr(dist.init_process_group, "original", dist.init_process_group)
    begin(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def end_default_group() -> None:
    """End torch's default group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _replica_world(own: RankEndpoint, endpoints: list[RankEndpoint], rendezvous: Rendezvous) -> ReplicaWorld:
    """Return the world of this rank's replica, with a port of its first rank on which the replica could meet."""
    with listen(own.address, backlog=1) as listener:  # free now; only a library that makes a group again takes it
        rendezvous.post(f"port/{own.rank}", str(listener.getsockname()[1]))
    ports = rendezvous.collect_all("port")
    ranks = [endpoint for endpoint in endpoints if endpoint.replica == own.replica]
    here = [endpoint.rank for endpoint in ranks if endpoint.host == own.host]
    port = ports[ranks[0].rank]
    if not port.isdecimal() or len(port) > 5:
        raise ConnectError(f"rank {ranks[0].rank} posted a port that is none; run the same thinwire on all hosts")
    return ReplicaWorld(
        rank=own.rank - ranks[0].rank, size=len(ranks), local_rank=here.index(own.rank), local_size=len(here),
        master_address=ranks[0].address, master_port=int(port),
    )  # fmt: skip


def _join_by_wire(
    place: JobPlace, listen: ListenConfig, secret: Secret, *, deadline_s: float, solo: bool,
    paths: Mapping[int, DialPaths], ranks_per_replica: int,
) -> Transport:  # fmt: skip
    """Meet as for gloo; from there on, nothing that was read in the store is believed but where to try."""
    from thinwire.transport.wire.wire_transport import WireTransport

    end = time.monotonic() + deadline_s
    rendezvous, store, prefix = _meet(place, ranks_per_replica=ranks_per_replica, deadline_s=deadline_s)
    transport = WireTransport(
        replica=place.rank, num_replicas=place.world_size, secret=secret, address=listen.address,
        ports=listen.candidates, ranks_per_replica=ranks_per_replica,
    )  # fmt: skip
    try:
        shown = listen.advertised(transport.port)
        own = _endpoint(
            place, shown.host, port=shown.port, ranks_per_replica=ranks_per_replica, secret=secret.fingerprint
        )  # fmt: skip
        endpoints = _exchange_endpoints(own, rendezvous, ranks_per_replica=ranks_per_replica)
        below = {s.rank: Address(host=s.address, port=s.port) for s in endpoints if s.rank < place.rank}
        try:
            transport.dial(below, deadline_s=max(0.0, end - time.monotonic()), paths=paths)
        except ConnectError as error:
            rendezvous.fail(str(error))
        rendezvous.post(f"joined/{place.rank}", "")
        rendezvous.collect_all("joined")
        if solo:
            world = _replica_world(own, endpoints, rendezvous) if ranks_per_replica > 1 else None
            _enter_replica(place, world, PrefixStore(prefix, store), address=own.address,
                           timeout=timedelta(seconds=deadline_s))  # fmt: skip
    except BaseException:
        transport.close()
        raise
    finally:
        rendezvous.leave(place.world_size)
    if ranks_per_replica == 1:
        return transport
    peers = range(place.rank % ranks_per_replica, place.world_size, ranks_per_replica)
    return RankSubset(transport, peers, release=lambda: release_within(end_default_group))


def meet(*, deadline_s: float) -> Rendezvous | None:
    """Return the rendezvous of this job's ranks, for what needs no transport; None if this process is alone.

    Raises:
        ConnectError: The rendezvous does not answer.
    """
    place = job_place()
    return None if place is None else _meet(place, ranks_per_replica=1, deadline_s=deadline_s)[0]


def _meet(place: JobPlace, *, ranks_per_replica: int, deadline_s: float) -> tuple[Rendezvous, Any, str]:
    end = time.monotonic() + deadline_s
    store, prefix = _open_store(place, deadline_s=deadline_s)
    rendezvous = Rendezvous(
        PrefixStore(f"{prefix}/rendezvous", store), rank=place.rank, world_size=place.world_size,
        ranks_per_replica=ranks_per_replica, deadline_s=max(0.0, end - time.monotonic()), place=place.name,
    )  # fmt: skip
    return rendezvous, store, prefix


def _endpoint(place: JobPlace, address: str, *, port: int, ranks_per_replica: int, secret: str = "") -> RankEndpoint:
    return RankEndpoint(
        rank=place.rank, replica=place.rank // ranks_per_replica, hostname=socket.gethostname(), host=host_identity(),
        address=address, port=port, secret=secret,
    )  # fmt: skip


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
        if made_default:
            end_default_group()

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
    """A job of which some ranks or connections may be missing."""

    rank: int
    world_size: int
    rendezvous: Rendezvous
    endpoints: Mapping[int, RankEndpoint]  # by rank; only of ranks that came
    transport: WireTransport  # between them; not all may be connected
    connected: tuple[int, ...] = field(default=())  # ranks that this rank is connected to
    connect_s: float = 0.0  # seconds until the last of them was connected


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
    store, prefix = _open_store(place, deadline_s=deadline_s)
    store.set_timeout(timedelta(seconds=deadline_s))
    rendezvous = Rendezvous(
        PrefixStore(f"{prefix}/partial", store), rank=place.rank, world_size=place.world_size, place=place.name,
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
