"""One replica of an elastic run, from joining to the end; after a removal it joins again with a new number."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thinwire.averaging.round_context import Average
from thinwire.elastic.coordinator_session import StateOffer
from thinwire.elastic.global_state import tensors_sha256
from thinwire.elastic.invitation import read_invitation
from thinwire.elastic.join import Membership
from thinwire.elastic.replica_state import global_tensors
from thinwire.errors import CheckpointError, DroppedBadParts, Expelled, RunOver
from thinwire.events import RoundMark
from thinwire.files import write_whole
from thinwire.recording.metrics import Meter, open_loggers
from thinwire.recording.recorder import Recorder, own_fault
from thinwire.runlog.forwarding import RecordForward
from thinwire.runlog.run_identity import check_folder, write_identity
from thinwire.runlog.writer import JsonlWriter
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.sync.round_engine import RoundEngine
from thinwire.sync.schedule import Round
from thinwire.training.build import check, make_inner_optimizer, make_method
from thinwire.training.checkpoints.checkpoint_files import ForeignCheckpoint
from thinwire.training.config import TrainConfig, config_text
from thinwire.training.drift import step_monitor_of
from thinwire.training.elastic.coordinator_process import read_port
from thinwire.training.elastic.job import ElasticJob, LocalSettings
from thinwire.training.elastic.local_snapshot import RESUMED_ERA, HeldState, LocalSnapshot, snapshot_path
from thinwire.training.elastic.remediation import write_pid
from thinwire.training.elastic.replica_ranks import Rank0Driver, check_ranks, whole_model
from thinwire.training.elastic.states import CheckpointPolicy, checkpoints_of
from thinwire.training.elastic.stay import ElasticPolicy, ElasticStay, Left
from thinwire.training.loop import Training
from thinwire.training.run_origin import keep_corpus, write_origin
from thinwire.training.summary import (
    begin_samples,
    finish_samples,
    parameters_sha256,
    replica_note,
    save_companion,
    save_model,
    summarise,
    write_summary,
)
from thinwire.transport.secret import Secret, read_secret
from thinwire.workloads.workload import Companion, Data, LeasedBatches, Leases


class RoundLog:
    """Writes `rounds-replica-N.jsonl`, a line for each round as it is applied."""

    def __init__(
        self, run_dir: Path, *, replica: int, engine: RoundEngine, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        # a line at a time, so that a replica that is killed leaves whole lines
        self._file = JsonlWriter(run_dir / f"rounds-replica-{replica}.jsonl", warn=warn)
        self._engine = engine
        engine.observers.append(self)

    def close(self) -> None:
        self._engine.observers.remove(self)
        self._file.close()

    def on_mark(self, mark: RoundMark) -> None:
        """Ignore it: only applied rounds are logged."""

    def on_applied(self, round: Round, average: Average) -> None:
        line = {
            "round": round.id, "fragment": round.fragment, "launch_step": round.launch_step,
            "members": list(average.members), "is_counted": average.is_counted,
            "crc": self._engine.view.parameters.reference_hash(round.fragment),
            "at_s": float(f"{time.time():.3f}"),  # the name `round` is taken
        }  # fmt: skip
        self._file.write(json.dumps(line, separators=(",", ":")), is_last=True)


# Seconds between two attempts to join; doubled up to the second while they fail at once.
_AGAIN_S, _LONGEST_AGAIN_S = 0.5, 10.0
_SHORT_LIFE_S = 30.0
# Seconds that a snapshot waits for the coordinator's account of the data; less than a launcher waits for the end.
_ACCOUNT_S = 10.0
# Intervals that a replica waits if dropped for NaN again before any part of it counted; doubled each time up to the
# second number, and ten minutes at most. Each attempt costs the others a copy of their state.
_BAD_AGAIN_INTERVALS, _MOST_BAD_INTERVALS = 1, 64
_LONGEST_BAD_AGAIN_S = 600.0
_LOOK_S = 0.5


def run_replica(
    settings: LocalSettings, *, report: Callable[[str], None], device_index: int = 0, rank0: Rank0Driver | None = None
) -> bool:
    """Take part in a job until it ends, or this replica is asked to leave; return whether the run came to its end.

    A replica of several ranks is driven through `rank0`.

    Raises:
        ThinwireError: The job cannot be joined, or the run cannot go on.
    """
    torch.set_num_threads(settings.threads)
    secret = read_secret(Path(settings.secret))
    pause_s, bad_intervals, wait_s = _AGAIN_S, 0, 0.0
    while True:
        began_s = time.monotonic()
        stay = _Stay(settings, secret=secret, report=report, device_index=device_index, rank0=rank0, wait_s=wait_s)
        wait_s = 0.0
        try:
            return stay.live()
        except Left as left:
            stay.why = str(left).partition(" ")[2].partition(" ")[2]
            report(str(left))
            return False
        except RunOver as over:
            report(str(over))
            return True
        except DroppedBadParts as dropped:
            report(str(dropped))
            stay.discard()
            if stay.has_counted:
                bad_intervals = 0
            wait_s = min(_LONGEST_BAD_AGAIN_S, bad_intervals * stay.interval_s())
            bad_intervals = min(_MOST_BAD_INTERVALS, max(_BAD_AGAIN_INTERVALS, 2 * bad_intervals))
        except Expelled as expelled:
            report(str(expelled))
            stay.doubt()
        except Exception as error:
            stay.fault = own_fault(error)
            raise
        finally:
            stay.close()
        if time.monotonic() - began_s > _SHORT_LIFE_S:
            pause_s = _AGAIN_S
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_AGAIN_S)


@dataclass(slots=True, kw_only=True)
class _Assembly:
    """Parts of a replica that knows its job."""

    config: TrainConfig
    job: ElasticJob
    data: Data
    companion: Companion
    device: torch.device
    model: torch.nn.Module
    optimizer: DistributedOptimizer
    batches: LeasedBatches


class _Stay:
    """One stay in a job, under one number."""

    def __init__(
        self, settings: LocalSettings, *, secret: Secret, report: Callable[[str], None], device_index: int,
        rank0: Rank0Driver | None, wait_s: float = 0.0,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._wait_s = wait_s
        self._optimizer: DistributedOptimizer | None = None
        self._secret = secret
        self._report = report
        self._device_index = device_index
        self._rank0 = rank0
        self._stay: ElasticStay[ElasticJob] | None = None
        self._meter: Meter | None = None
        self._round_log: RoundLog | None = None
        self._recorder: Recorder | None = None
        self._kept: LocalSnapshot | None = None
        self._held: HeldState | None = None
        self._is_from_held = self._has_moments = self._is_carried = False
        self.why = "left"
        self.fault = ""

    def doubt(self) -> None:
        """Begin from no own state again that this stay began from and did not get far with."""
        if self._kept is not None and self._is_from_held and not (self._stay is not None and self._stay.has_kept):
            self._kept.discard()

    def discard(self) -> None:
        """Delete the own state on disk, also one that is being written: this stay's parameters went bad."""
        if self._kept is not None:
            self._kept.close()
            self._kept.discard()

    @property
    def has_counted(self) -> bool:
        """Whether a part of this stay has been in a mean."""
        statistics = None if self._optimizer is None else self._optimizer.statistics
        return statistics is not None and statistics.rounds_applied > statistics.rounds_missed

    def interval_s(self) -> float:
        """Return how long a sync interval takes, as far as it was heard; one second else."""
        if self._stay is None:
            return 1.0
        session = self._stay.membership.session
        return session.interval_steps * (session.pace.step_s or session.step_s) or 1.0

    def live(self) -> bool:
        invitation = read_invitation(self._settings.invitation)
        self._is_carried = bool(invitation.carrier)
        self._stay = stay = ElasticStay(
            invitation, secret=self._secret, read_job=ElasticJob.from_json,
            listen=self._settings.listen(), report=self._report,
        )  # fmt: skip
        with suppress(OSError):  # a full disk must not end a replica; only restarts on request need the file
            write_pid(Path(self._settings.out), stay.membership.replica)
        self._wait(stay.membership)
        parts = self._assemble(stay)
        offer = self._arrive(stay, parts)
        step = self._begin(stay, parts, offer)
        training = self._training(stay, parts, step=step)
        training.run()
        with self._global_model(parts) as model:
            sha256 = parameters_sha256(model)
        finish = stay.finish(replica_note(training.reading(), sha256=sha256))
        if finish["writer"] == stay.membership.replica:
            self._write(parts, training, finish)
        self.why = "has come to the end"
        return True

    def close(self) -> None:
        if self._optimizer is not None:
            self._optimizer.abandon()
        if self._recorder is not None:
            self._recorder.close(error=self.fault)
        if self._stay is not None:
            self._stay.stop_states()
        if self._meter is not None:
            self._meter.close()
        if self._round_log is not None:
            self._round_log.close()
        if self._stay is not None:
            why = f"left after an error: {self.fault}" if self.fault else self.why
            self._stay.close(why=why if self._rank0 is None else self._rank0.problem or why)

    def _wait(self, membership: Membership) -> None:
        """Wait before taking part, as a member that the coordinator can reach: the run may end meanwhile."""
        until_s = time.monotonic() + self._wait_s
        if self._wait_s:
            self._report(f"waiting {self._wait_s:.1f} s before it takes part again: its last parts were refused")
        while (left_s := until_s - time.monotonic()) > 0:
            membership.session.check()
            if membership.session.view.leave_why:
                raise Left(f"replica {membership.replica} {membership.session.view.leave_why}")
            time.sleep(min(_LOOK_S, left_s))

    def _assemble(self, stay: ElasticStay[ElasticJob]) -> _Assembly:
        job, membership = stay.job, stay.membership
        config = self._settings.apply(job.config)
        # sizes come from another host: they are held against this one's memory before any is asked for
        check(config, num_local=self._settings.replicas)
        method = make_method(config)
        job.check_method(method)
        config.run_dir.mkdir(parents=True, exist_ok=True)
        self._keep_job(job, config)
        workload = config.workload
        data = workload.open_data(config)
        companion = workload.companion(data)
        keep_corpus(config, data.sha256)
        model, inner, device = self._model(config, workload.sizes(companion))
        if self._device_index == 0:
            save_companion(config.run_dir, files=companion.files())
        if membership.replica == 0 and self._rank0 is None and config.output.samples:
            begin_samples(config.run_dir, workload, model, data, warn=self._report)
        elastic_method = stay.elastic_method(method, pieces=self._rank0)
        optimizer = DistributedOptimizer(
            model, inner, method=elastic_method, transport=membership.transport, catch_up=stay.driver,
            seed=config.run.seed,
        )  # fmt: skip
        self._optimizer = optimizer
        session = membership.session
        leases = Leases(shard_windows=job.shard_windows, lend=session.lease, ask_ahead=session.ask_lease)
        batches = workload.leased_batches(config, data, leases)
        membership.session.track_windows(batches.used)
        return _Assembly(
            config=config, job=job, data=data, companion=companion, device=device, model=model, optimizer=optimizer,
            batches=batches,
        )  # fmt: skip

    def _keep_job(self, job: ElasticJob, config: TrainConfig) -> None:
        """Check that the folder is of this run, and keep what this host needs to go on with the run alone."""
        is_news = check_folder(config.run_dir, job.identity)
        if not self._settings.is_joined or self._device_index:
            return
        if is_news:
            write_identity(config.run_dir, job.identity)
        # the job's own options: what this host does otherwise stands in its settings
        names = ("data", "model", "init_from", "batch_size")
        plain = config.replace(**{name: job.config.option(name) for name in names}, address=None)
        text = config_text(plain)
        path = config.run_dir / "config.json"
        if is_news or not path.exists() or path.read_text() != text:
            write_whole(path, text)
        if is_news:
            write_origin(plain)

    def _model(
        self, config: TrainConfig, sizes: Mapping[str, int]
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.device]:
        if self._rank0 is not None:
            check_ranks(config, num_ranks=self._rank0.num_ranks)
            return *self._rank0.assemble(config, sizes=sizes), self._rank0.device
        is_cuda = config.model.device == "cuda"
        device = torch.device("cuda", self._device_index) if is_cuda else torch.device("cpu")
        torch.manual_seed(config.run.seed)
        model = config.workload.make_model(config, sizes, device)
        return model, make_inner_optimizer(config, model), device

    def _arrive(self, stay: ElasticStay[ElasticJob], parts: _Assembly) -> StateOffer:
        path = snapshot_path(parts.config.run_dir, self._device_index)
        if self._rank0 is None:  # what an inner optimizer remembers lies in shards where there are several ranks
            self._kept = LocalSnapshot(
                path, run=parts.job.identity, warn=self._report,
                account=lambda step: stay.membership.session.account(step, deadline_s=_ACCOUNT_S),
            )  # fmt: skip
            self._held = self._kept.read() or self._resumed(parts)
        return stay.announce(
            corpus=parts.data.sha256, num_windows=parts.batches.num_windows, held=self._held,
            disk_step=self._disk_step(parts),
        )  # fmt: skip

    def _resumed(self, parts: _Assembly) -> HeldState | None:
        """Return the state that the run was resumed from, where this host holds the same bits."""
        step, sha256 = parts.job.resumed_step, parts.job.resumed_sha256
        if not step or self._kept is None:
            return None
        if (held := self._kept.read_resumed(step=step, sha256=sha256)) is not None:
            return held
        with suppress(CheckpointError):  # without it, the state is fetched
            state = checkpoints_of(parts.config, run=parts.job.identity).load(step)
            if tensors_sha256(state) == sha256:
                return HeldState(step=step, era=RESUMED_ERA, state=state)
        return None

    def _disk_step(self, parts: _Assembly) -> int:
        """Return the step of a checkpoint that this host can read, 0 for none."""
        try:
            return checkpoints_of(parts.config, run=parts.job.identity).readable_step(parts.job.resumed_step)
        except ForeignCheckpoint:
            raise
        except CheckpointError as error:
            self._report(f"{error}; this replica begins from the others' state")
            return 0

    def _begin(self, stay: ElasticStay[ElasticJob], parts: _Assembly, offer: StateOffer) -> int:
        config, membership = parts.config, stay.membership
        checkpoints = checkpoints_of(config, run=parts.job.identity, warn=self._report)
        policy = CheckpointPolicy(
            checkpoints=checkpoints if self._device_index == 0 else None, every=config.output.checkpoint_every,
            last_step=config.run.steps, is_shared=parts.job.config.elastic.checkpoint_to is not None,
        )  # fmt: skip
        self._is_from_held = offer.root == "own"
        is_own = self._held is not None and offer.root in ("own", "disk") and offer.step == self._held.step
        self._has_moments = is_own and self._held is not None and self._held.has_inner
        step = stay.begin(
            offer, model=parts.model, optimizer=parts.optimizer, policy=policy, checkpoints=checkpoints,
            kept=self._kept, held=self._held, may_begin_early=parts.job.allows_overdue and self._rank0 is None,
        )  # fmt: skip
        self._held = None
        # a first host on a carrier has no port; others' records stay with them, since each is paid for there
        is_with_coordinator = read_port(config.run_dir) is not None or self._is_carried
        forward = None if is_with_coordinator else RecordForward(membership.session)
        self._recorder = Recorder(config.run_dir, rank=membership.replica, warn=self._report, forward=forward)
        self._recorder.follow(membership.transport, parts.optimizer.engine)
        if step:
            stay.driver.begin_at(parts.optimizer, step)
        return step

    def _training(self, stay: ElasticStay[ElasticJob], parts: _Assembly, *, step: int) -> Training:
        config, membership = parts.config, stay.membership
        loggers = open_loggers(
            config.run_dir, tensorboard=config.output.tensorboard, wandb=config.output.wandb,
            replica=membership.replica, after_step=step,
        )  # fmt: skip
        self._meter = Meter(
            config.run_dir, replica=membership.replica, log=membership.transport.log, loggers=loggers,
            measures=config.workload.card.measures, warn=self._report, connections=membership.transport.connections,
        )  # fmt: skip
        self._meter.start()
        self._round_log = RoundLog(
            config.run_dir, replica=membership.replica, engine=parts.optimizer.engine, warn=self._report
        )
        assert config.data.batch_size is not None
        policy = ElasticPolicy(
            membership, optimizer=parts.optimizer, throughput=stay.throughput, step=step,
            tokens_per_step=config.data.batch_size * config.workload.window_samples(config),
            is_fresh=not self._has_moments,
        )  # fmt: skip
        return Training(
            config=config, model=parts.model, optimizer=parts.optimizer, batches=parts.batches,
            held_out=lambda num_batches: config.workload.held_out(config, parts.data, num_batches),
            meter=self._meter, device=parts.device, recorder=self._recorder,
            watch=step_monitor_of(config, parts.optimizer, log=membership.transport.log), policy=policy,
            passes=self._rank0, step=step,
        )  # fmt: skip

    @contextmanager
    def _global_model(self, parts: _Assembly) -> Iterator[torch.nn.Module]:
        """Give a model that holds the global parameters whole: this replica's own, or one made of all ranks' shards."""
        if self._rank0 is not None:
            parameters, _ = global_tensors(parts.optimizer.engine, parts.model)
            sizes = parts.config.workload.sizes(parts.companion)
            yield whole_model(parts.config, sizes=sizes, parameters=parameters, sharded=parts.model)
            return
        with parts.optimizer.global_parameters(may_lag=True):
            yield parts.model

    def _write(self, parts: _Assembly, training: Training, finish: Mapping[str, Any]) -> None:
        config = parts.config
        shown = training.evaluate_at_end()
        with self._global_model(parts) as model:
            save_model(config.run_dir, model, files=parts.companion.files())
            finish_samples(config.run_dir, config.workload, model, parts.companion, warn=self._report)
        count = sum(p.numel() for p in parts.model.parameters() if p.requires_grad)
        summary = summarise(
            config, finish["notes"], shown=shown, parameters=count, num_fragments=parts.optimizer.num_fragments
        )
        data = finish["note"]["data"]
        samples, each = config.workload.card.measures.samples, config.workload.window_samples(config)
        summary["elastic"] = {
            f"{samples}_counted": int(data["counted"]) * each,
            f"{samples}_repeated": int(data["repeated"]) * each,
            "replicas_ever": finish["note"]["next_replica"],
        }
        write_summary(config.run_dir, summary)
