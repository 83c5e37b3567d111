"""ElasticJob description for joining hosts, and a host's description of itself; as values and as JSON."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.elastic.invitation import read_invitation
from thinwire.errors import CheckpointError, Refused, refusal
from thinwire.files import replace_whole
from thinwire.options import flag
from thinwire.runlog.run_identity import RunIdentity, identity_from_json
from thinwire.training.config import LOCAL, PLACES, TrainConfig, from_json, to_json, validate
from thinwire.transport.addresses import ListenConfig, RelayPlace, listen_config
from thinwire.version import __version__
from thinwire.workloads.cards import LANGUAGE

if TYPE_CHECKING:
    from thinwire.sync.method import Method

# Seconds without any replica after which the coordinator of a run of `thinwire.join` ends.
_IDLE_S = 600.0
# Seconds that the first replica of such a run waits for those that begin with it.
_START_S = 300.0
# Batches per data lease, at least; else a quarter of an interval, so that uncounted work is a few shards at most.
_BATCHES_A_SHARD = 16
LOCAL_FILE = "elastic.json"
# Bounds of a job's counts: replicas as at the coordinator, and steps of an interval, over which schedules iterate.
_MOST_REPLICAS, _MOST_INTERVAL_STEPS = 1024, 1 << 20
# A state holds each parameter and its momentum, 4 bytes each.
_STATE_BYTES = 8
_MOST_SHARE = 16.0
_MOST_DIGITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTerms:
    """Facts of a job that its coordinator and all its replicas must know alike.

    Attributes:
        sync_interval: H.
        overlap_steps: tau.
        part_share: Bytes of the parts that a replica sends in an interval, over those of the state.
        allows_overdue: Whether training goes on where a round's result is overdue: where rounds overlap steps.
        num_replicas: Planned replicas; of a loop of one's own, those that begin together.
        last_step: The run's last inner step, 0 where it has none.
        identity: The run's id, and the incarnations of its coordinator.
    """

    sync_interval: int
    overlap_steps: int
    part_share: float
    allows_overdue: bool
    num_replicas: int
    last_step: int
    identity: RunIdentity

    def to_json(self) -> dict[str, Any]:
        """Return the coordinator's description of the job."""
        return {
            "thinwire": __version__, "sync_interval": self.sync_interval, "overlap_steps": self.overlap_steps,
            "part_share": self.part_share, "allows_overdue": self.allows_overdue, "last_step": self.last_step,
            "identity": self.identity.to_json(),
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticJob(JobTerms):
    """Description of a job of `thinwire train`, shared by all its replicas.

    Attributes:
        config: Options, without those of single hosts.
        shard_windows: Windows of a data lease.
        resumed_step: Step of the state that this incarnation goes on from; 0 where it begins from the seed.
        resumed_sha256: Hash of that state's tensors, in hexadecimal: who holds the same need not fetch them.
    """

    config: TrainConfig
    shard_windows: int
    resumed_step: int = 0
    resumed_sha256: str = ""

    @classmethod
    def of(
        cls, config: TrainConfig, *, identity: RunIdentity, resumed_step: int = 0, resumed_sha256: str = ""
    ) -> ElasticJob:
        assert config.data.batch_size is not None
        from thinwire.training.build import make_method  # imports torch, which readers of a job do not need

        method = make_method(config)
        batches = max(_BATCHES_A_SHARD, -(-method.schedule.sync_interval // 4))
        return cls(
            config=config, shard_windows=batches * config.data.batch_size, identity=identity,
            num_replicas=config.num_replicas, last_step=config.run.steps, resumed_step=resumed_step,
            resumed_sha256=resumed_sha256, **_terms_of(method),
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {
            **JobTerms.to_json(self), "config": to_json(self.config, without=LOCAL),
            "shard_windows": self.shard_windows, "resumed_step": self.resumed_step,
            "resumed_sha256": self.resumed_sha256,
            "begin_with": self.config.elastic.begin_with or self.config.num_replicas,
            "is_invite_only": self.config.elastic.invite_only,
            "start_timeout_s": self.config.run.join_deadline_s, "window_samples": self.config.model.seq_len or 1,
        }  # fmt: skip

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ElasticJob:
        """Decode and check the result of `to_json` from the network.

        Raises:
            Refused: It is malformed, or of another version.
        """
        if "setup" in values:
            raise Refused(
                "the replicas of this run have training loops of their own; start the same script here, with "
                "thinwire.join"
            )
        try:
            terms = _read_terms(values, more=("shard_windows", "resumed_step"))
            default = TrainConfig()
            config = from_json(values["config"]).replace(**{name: default.option(name) for name in LOCAL})
            if ":" in config.run.workload:  # before anything looks for it: that would run its module
                raise ValueError(f"got workload {config.run.workload[:80]!r}, a program of another host")
            validate(config)
            is_text = config.run.workload == LANGUAGE.name
            if None in (config.run.replicas, config.data.batch_size) or (is_text and config.model.seq_len is None):
                raise ValueError("replicas, batch_size and seq_len must be given")
            assert config.run.replicas is not None
            if config.sync.pace or (config.sync.sync_interval or 1) > _MOST_INTERVAL_STEPS:
                raise ValueError(f"got pace {config.sync.pace}, sync_interval {config.sync.sync_interval}")
            if config.run.replicas > _MOST_REPLICAS:
                raise ValueError(f"got {config.run.replicas} replicas, at most {_MOST_REPLICAS} take part")
            sha256 = values["resumed_sha256"]
            if not isinstance(sha256, str) or len(sha256) > _MOST_DIGITS:
                raise ValueError(f"got resumed_sha256 {str(sha256)[:80]!r}")
            identity = identity_from_json(values["identity"])
            return cls(
                config=config, identity=identity, num_replicas=config.num_replicas, last_step=config.run.steps,
                resumed_sha256=sha256, **terms,
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise _no_job(error) from None

    def check_method(self, method: Method) -> None:
        """Refuse a job whose numbers are not those of its method: its rounds would never come."""
        of_method = _terms_of(method)
        stated = {name: getattr(self, name) for name in of_method}
        if stated != of_method:
            raise _no_job(ValueError(f"its numbers are {stated}, and its options give {of_method}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopJob(JobTerms):
    """Description of a run whose replicas have training loops of their own (`thinwire.join`).

    Attributes:
        setup: What all replicas must have alike: hash of the parameters' names, shapes and dtypes, and the method.
    """

    setup: Mapping[str, str]

    @classmethod
    def of(
        cls, method: Method, *, setup: Mapping[str, str], num_replicas: int, last_step: int, identity: RunIdentity
    ) -> LoopJob:
        return cls(setup=setup, num_replicas=num_replicas, last_step=last_step, identity=identity, **_terms_of(method))

    def to_json(self) -> dict[str, Any]:
        return {
            **JobTerms.to_json(self), "setup": dict(self.setup), "begin_with": self.num_replicas,
            "shard_windows": 1, "resumed_step": 0, "start_timeout_s": _START_S, "idle_s": _IDLE_S,
        }  # fmt: skip

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LoopJob:
        """Decode and check the result of `to_json` from the network; see `ElasticJob.from_json`."""
        if "config" in values:
            raise Refused(
                "this run is one of thinwire train --elastic; add a replica with: thinwire join - <<< ADDRESS"
            )
        try:
            terms = _read_terms(values, more=("begin_with", "last_step"))
            setup = values["setup"]
            if not isinstance(setup, Mapping) or not all(isinstance(text, str) for text in setup.values()):
                raise ValueError(f"got setup {str(setup)[:80]!r}")
            identity = identity_from_json(values["identity"])
            return cls(setup=dict(setup), num_replicas=terms.pop("begin_with"), identity=identity, **terms)
        except (KeyError, TypeError, ValueError) as error:
            raise _no_job(error) from None


def _terms_of(method: Method) -> dict[str, Any]:
    """Return what the coordinator and a session must know of a method."""
    overlap = getattr(method.schedule, "overlap_steps", 0)
    overlap_steps = max(overlap) if isinstance(overlap, tuple) else overlap
    codec, numel = getattr(method.exchanges(2)[0], "codec", None), 1 << 20
    part_bytes = 4 * numel if codec is None else codec.payload_bytes(numel)
    return {
        "sync_interval": method.schedule.sync_interval, "overlap_steps": overlap_steps,
        "part_share": min(_MOST_SHARE, round(part_bytes / (_STATE_BYTES * numel), 6)),
        "allows_overdue": overlap_steps > 0,
    }  # fmt: skip


def _read_terms(values: Mapping[str, Any], *, more: tuple[str, ...]) -> dict[str, Any]:
    """Read what `_terms_of` returned, and more counts, from the network."""
    counts = {name: values[name] for name in ("sync_interval", "overlap_steps", *more)}
    if not all(type(value) is int and 0 <= value < 1 << 32 for value in counts.values()):
        raise ValueError(f"got {counts}")
    for name, most in (("sync_interval", _MOST_INTERVAL_STEPS), ("begin_with", _MOST_REPLICAS)):
        if counts.get(name, 0) > most:
            raise ValueError(f"got {name} {counts[name]}, at most {most} are allowed")
    share, allows_overdue = values["part_share"], values["allows_overdue"]
    if not isinstance(share, float) or not 0 <= share <= _MOST_SHARE:
        raise ValueError(f"got part_share {share!r}")
    if not isinstance(allows_overdue, bool):
        raise ValueError(f"got allows_overdue {allows_overdue!r}")
    return {**counts, "part_share": share, "allows_overdue": allows_overdue}


def shared_places_of(config: TrainConfig) -> dict[str, str]:
    """Return what `PLACES` name, by option; a name that means the same on all hosts is no place.

    Example:
        >>> shared_places_of(TrainConfig.of(data="texts", model="35m"))
        {'data': 'texts'}
    """
    found = {name: config.option(name) for name in PLACES}
    is_everywhere = {
        "data": config.run.workload != LANGUAGE.name or config.data.source == "stdlib",
        "model": not config.model.name.startswith("hf:"),
    }
    return {name: str(value) for name, value in found.items() if value is not None and not is_everywhere.get(name)}


def _no_job(error: Exception) -> Refused:
    return Refused(
        f"the coordinator describes no job of this thinwire ({error}); install the same version on all hosts"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """Settings of a host's replicas, written by its launcher; None is as the job says, or to be found.

    Attributes:
        invitation: Where the coordinator is, without the secret.
        secret: File of the secret.
        data: Name or folder of the data on this host; None where the job reads the standard library.
        model: Name of the `hf:` model on this host; None where the job trains a preset.
        checkpoint_to: Folder or URL of checkpoints; None for the run's folder.
        address: This host's address that the others reach.
        replicas: Replicas of this host.
        is_joined: Whether this host joined a coordinator of another one.
        advertise: HOST:PORT that the others dial, see `ReachOptions`; `port_range` too.
        relay: Relay where others meet this host, with its token, as an address without a coordinator.
    """

    invitation: str
    secret: str
    out: str
    cache_dir: str
    threads: int
    device: str | None = None
    batch_size: int | None = None
    data: str | None = None
    model: str | None = None
    init_from: str | None = None
    checkpoint_to: str | None = None
    tensorboard: bool = False
    wandb: bool = False
    address: str | None = None
    ranks_per_replica: int = 1
    replicas: int = 1
    is_joined: bool = False
    advertise: str | None = None
    port_range: str | None = None
    relay: str | None = None

    def listen(self) -> ListenConfig | None:
        """Return where this host's replicas listen; None to find it."""
        if self.address is None:
            return None
        listen = listen_config(address=self.address, advertise=self.advertise, port_range=self.port_range)
        return dataclasses.replace(listen, relay=self.relay_place())

    def relay_place(self) -> RelayPlace | None:
        return None if self.relay is None else read_invitation(self.relay).relay

    def save(self) -> None:
        def write(path: Path) -> None:
            path.touch(mode=0o600)  # it may hold a relay's token
            path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

        replace_whole(Path(self.out) / LOCAL_FILE, write)

    @classmethod
    def load(cls, run_dir: Path) -> LocalSettings:
        return cls(**json.loads((run_dir / LOCAL_FILE).read_text()))

    @classmethod
    def of_resumed(cls, config: TrainConfig) -> LocalSettings | None:
        """Return this host's settings of the elastic run to resume; None where the run begins here."""
        if not config.elastic.is_enabled or config.output.resume is None:
            return None
        path = config.output.resume / LOCAL_FILE
        try:
            return cls.load(config.output.resume)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); restore it, or go on from another host") from error

    def apply(self, config: TrainConfig) -> TrainConfig:
        """Return the job's options with this host's own; refuse a place that the job names and this host does not."""
        own: dict[str, Any] = {"out": Path(self.out), "cache_dir": Path(self.cache_dir), "threads": self.threads}
        own |= {name: getattr(self, name) for name in ("ranks_per_replica", "tensorboard", "wandb")}
        given = {"device": self.device, "batch_size": self.batch_size, "address": self.address}
        own |= {name: value for name, value in given.items() if value is not None}
        for name, theirs in shared_places_of(config).items():
            if getattr(self, name) is None:
                raise refusal(
                    f"the job names {flag(name)} {theirs[:200]!r}, and a host uses no place that another one names",
                    got=f"no {flag(name)} here", allowed="this host's own place of the same",
                    remedy=f"thinwire join with {flag(name)} {shlex.quote(theirs[:200])}, if it is that here too",
                )  # fmt: skip
        return self.with_own_places(config).replace(**own)

    def with_own_places(self, config: TrainConfig) -> TrainConfig:
        own = {name: getattr(self, name) for name in PLACES}
        own["init_from"] = self.init_from and Path(self.init_from)
        return config.replace(**{name: value for name, value in own.items() if value is not None})
