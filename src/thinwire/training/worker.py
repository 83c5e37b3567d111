"""One replica of a run: joins the others, agrees on the first step, trains, and reports the result."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from thinwire.errors import DataError, DesyncError, Stopped, ThinwireError, warn_untested
from thinwire.files import write_whole
from thinwire.recording.metrics import Logger, Meter, open_loggers
from thinwire.recording.recorder import Recorder, own_fault
from thinwire.runlog.run_identity import (
    RUN_FILE,
    RunIdentity,
    identity_from_json,
    new_identity,
    write_identity,
)  # fmt: skip
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.training.agreed_stop import AgreedStop, NetworkStop
from thinwire.training.build import make_inner_optimizer, make_method
from thinwire.training.checkpoints.replica_checkpoints import (
    Found,
    ReplicaCheckpoints,
    choose_step,
    verify_all,
)
from thinwire.training.config import PLACES, TrainConfig, config_text, has_run, meaning
from thinwire.training.cost_check import complain
from thinwire.training.drift import step_monitor_of
from thinwire.training.launch import RANKS, rank_folder
from thinwire.training.loop import Training
from thinwire.training.run_origin import ORIGIN_FILE, check_corpus, keep_corpus, run_of, write_origin
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
from thinwire.transport.base import all_gather_json
from thinwire.transport.connect import connect, wire_within
from thinwire.transport.loopback import LoopbackWorld
from thinwire.transport.recording import RecordingTransport
from thinwire.transport.replica_mesh import ReplicaMesh
from thinwire.workloads.workload import Data

if TYPE_CHECKING:
    from thinwire.training.publishing import PublishedSteps

_OPENING, _READY, _CLOSING, _PROBING = range(4)
_CLOSING_NOTES = 1000
# Known by other names on other hosts; what they stand for is compared by content.
_OUTPUTS = (
    "config.json", RUN_FILE, ORIGIN_FILE, "summary.json", "report.html", "metrics-replica-*", "transfers-replica-*",
    "records-rank-*", "findings.jsonl", "actions.jsonl", "path-limits.json", "downtime.json", "parts.jsonl",
    "checkpoint-cost.json", "samples.json",
)  # fmt: skip
_OUTPUT_FOLDERS = ("adapters", "checkpoints", "model", "logs", "tensorboard", "wandb", RANKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStart:
    """Circumstances in which a replica's process starts.

    Attributes:
        local_rank: Number of this process on its host; also its GPU.
        is_prepared: Whether the launcher has made the run's folder; else the first rank of each host does.
        is_resumed: Whether the run resumes from a checkpoint.
    """

    local_rank: int = 0
    is_prepared: bool = False
    is_resumed: bool = False


def run_replica(
    config: TrainConfig, *, place: ReplicaStart, loggers: Sequence[Logger] = (),
    warn: Callable[[str], None] = lambda text: None, on_start: Callable[[int], None] = lambda step: None,
    stop: AgreedStop | NetworkStop | None = None,
) -> dict[str, Any] | None:  # fmt: skip
    """Train one replica in this process, from joining the others to the end.

    Loggers receive metrics besides the files; `on_start` receives the step to begin after, once all replicas agree on
    it.

    Returns:
        The run's summary on replica 0, None on the others.

    Raises:
        ThinwireError: The run cannot go on.
        ValueError: The run's folder holds a run already, or an option is wrong.
    """
    torch.set_num_threads(config.model.threads or 1)
    data = config.workload.open_data(config)
    ranks = config.parallel.ranks
    is_returning = False
    if config.parallel.skip:
        from thinwire.transport.path_group import is_under_way

        is_returning = is_under_way(num_stages=ranks, deadline_s=config.run.join_deadline_s)
        place = replace(place, is_resumed=place.is_resumed or is_returning)
    # a stage that comes back joins the others before its first step
    transport = RecordingTransport(LoopbackWorld(1).transports[0]) if is_returning else connect(
        interface=config.run.interface, address=config.run.address, secret=config.run.secret,
        deadline_s=config.run.join_deadline_s, advertise=config.run.advertise, port_range=config.run.port_range,
        ranks_per_replica=ranks, solo=ranks > 1,
        traffic_plan=config.run.traffic_plan,
    )  # fmt: skip
    mesh: ReplicaMesh | None = None
    try:
        if ranks > 1:
            from thinwire.training.parallel_passes import make_mesh  # imports device meshes, which takes a second

            device = torch.device("cpu")
            if config.model.device == "cuda":
                warn_untested("gpu ranks")
                # connect() left this replica's GPUs visible alone
                device = torch.device("cuda", place.local_rank % ranks)
                torch.cuda.set_device(device)
            mesh = make_mesh(config, device=device, wire=wire_within(transport))
            config = config.replace(out=rank_folder(config.run_dir, mesh.rank))
        replica = _Replica(config, place=place, data=data, transport=transport, mesh=mesh, stop=stop)
        return replica.run(loggers, warn, on_start)
    finally:
        if mesh is not None:
            mesh.close()
        transport.close()


class _Replica:
    def __init__(
        self, config: TrainConfig, *, place: ReplicaStart, data: Data, transport: RecordingTransport,
        mesh: ReplicaMesh | None = None, stop: AgreedStop | NetworkStop | None = None,
    ) -> None:  # fmt: skip
        self._config = config
        self._stop = stop
        self._mesh = mesh
        self._num_notes = 0
        self._place = place
        self._data = data
        self._workload = config.workload
        self._companion = self._workload.companion(data)
        self._transport = transport
        is_begun = place.is_prepared or place.is_resumed
        # where hosts begin a run under torchrun, that of replica 0 is the run's
        self._run = run_of(config) if is_begun else new_identity(config_digest=config.digest())
        if not is_begun:
            self._run = identity_from_json(self._of_all_ranks({"run": self._run.to_json()})[0]["run"])
        self._checkpoints = self._checkpoints_of(self._run)
        self._published: PublishedSteps | None = None

    def run(
        self, loggers: Sequence[Logger], warn: Callable[[str], None], on_start: Callable[[int], None]
    ) -> dict[str, Any] | None:
        config = self._config
        step = self._open(warn)
        on_start(step)
        leads = self._leads
        own = open_loggers(
            config.run_dir, tensorboard=config.output.tensorboard and leads, wandb=config.output.wandb and leads,
            replica=self._transport.replica, after_step=step,
        )  # fmt: skip
        meter = Meter(
            config.run_dir, replica=self._transport.replica, log=self._transport.log, loggers=(*own, *loggers),
            measures=self._workload.card.measures, warn=warn, connections=self._transport.connections,
            border=None if self._mesh is None else self._mesh.border,
        )  # fmt: skip
        recorder = Recorder(config.run_dir, rank=self._transport.replica, warn=warn)
        training: Training | None = None
        why = ""
        try:
            training = self._assemble(meter, recorder, warn, step=step)
            complaint = ""
            if self._transport.num_replicas > 1:  # a codec may cost more time than it saves on this link
                complaint = complain(
                    self._optimizer, num_steps=config.run.steps, number=_PROBING,
                    deadline_s=config.run.join_deadline_s, device=next(self._model.parameters()).device,
                )  # fmt: skip
            if step:
                training.load(self._checkpoints.load(step))
                self._checkpoints.forget_after(step)
            elif self._place.is_resumed:
                meter.start_over()
            meter.start()
            recorder.follow(self._transport, self._optimizer.engine)
            if complaint and self._transport.replica == 0:
                meter.write_warning(step + 1, message=complaint)
            with self._optimizer:  # a run that fails waits for no replica, and warns of no missing steps
                training.run()
                if self._published is not None:
                    self._published.close(training.step)
                return self._close(training, warn)
        except Stopped:
            raise
        except ThinwireError as error:
            meter.write_error(training.step if training else step, message=str(error))
            why = own_fault(error)
            raise
        except Exception as error:
            why = own_fault(error)
            raise
        finally:
            recorder.close(error=why)
            meter.close()

    def _checkpoints_of(self, run: RunIdentity) -> ReplicaCheckpoints:
        return ReplicaCheckpoints(
            self._config.run_dir, run=run.run, replica=self._transport.replica,
            num_replicas=self._transport.num_replicas, config_digest=run.config_digest,
        )  # fmt: skip

    def _open(self, warn: Callable[[str], None]) -> int:
        """Compare options and data, choose the first step, and make the run's folder."""
        found = verify_all(self._checkpoints) if self._place.is_resumed else Found(good=(), bad={})
        of_ranks = self._of_all_ranks({"good": found.good[-32:]})
        common = set(found.good).intersection(*(one["good"] for one in of_ranks))
        found = Found(good=tuple(sorted(common)), bad=found.bad)
        note = {
            "options": {name: value for name, value in meaning(self._config).items() if name not in PLACES},
            "corpus": self._data.sha256, "run": self._run.to_json(),
            "has_run": has_run(self._config.run_dir), "is_resumed": self._place.is_resumed, "good": found.good[-32:],
            "bad": [[step, problem[:200]] for step, problem in sorted(found.bad.items())[-8:]],
            "data_problem": "",
        }  # fmt: skip
        if self._place.is_resumed:
            try:
                check_corpus(self._config, self._data.sha256)
            except DataError as error:
                note["data_problem"] = str(error)
        notes = self._all_gather(note, number=_OPENING, deadline_s=self._config.run.join_deadline_s)
        _check_same(notes)
        self._agree_on_run(notes)
        reports = [Found(good=tuple(n["good"]), bad={int(s): str(p) for s, p in n["bad"]}) for n in notes]
        step, warnings = choose_step(reports)
        if self._transport.replica == 0 and self._leads:
            for warning in warnings:
                warn(warning)
        makes = not self._place.is_prepared and self._place.local_rank < self._config.parallel.ranks
        for is_turn in (self._leads, not self._leads):  # the folder of the first rank holds those of the others
            if makes and is_turn:
                make_run_folder(self._config, run=self._run, is_resumed=self._place.is_resumed)
                keep_corpus(self._config, self._data.sha256)
            self._of_all_ranks({})
        self._all_gather({}, number=_READY, deadline_s=self._config.run.join_deadline_s)
        return step

    def _agree_on_run(self, notes: list[dict[str, Any]]) -> None:
        """Take replica 0's run id where the run begins here; else all hosts must hold the same one."""
        first = identity_from_json(notes[0]["run"])
        if not self._place.is_prepared and not self._place.is_resumed:
            holders = [replica for replica, note in enumerate(notes) if note["has_run"]]
            if holders and not self._config.output.overwrite:
                raise ValueError(f"{occupied(self._config.run_dir)} (seen by replica {holders[0]})")
            self._run = first
            self._checkpoints = self._checkpoints_of(first)
            return
        for replica, note in enumerate(notes):
            if note["run"]["run"] != first.run:
                raise DesyncError(
                    f"replica {replica} holds run {note['run']['run']}, replica 0 run {first.run}; give all hosts the "
                    f"folder of the same run"
                )

    def _assemble(self, meter: Meter, recorder: Recorder, warn: Callable[[str], None], *, step: int) -> Training:
        config, data, transport, workload = self._config, self._data, self._transport, self._workload
        mesh = self._mesh
        device = torch.device("cuda", self._place.local_rank) if config.model.device == "cuda" else torch.device("cpu")
        if mesh is not None:
            device = mesh.device
        torch.manual_seed(config.run.seed)
        model = workload.make_model(config, workload.sizes(self._companion), device)
        if self._place.local_rank == 0:
            save_companion(config.run_dir, files=self._companion.files())
        if transport.replica == 0 and self._leads and config.output.samples:
            begin_samples(config.run_dir, workload, model, data, warn=warn)
        passes: ParallelPasses | None = None
        batches = workload.batches(config, data, transport.replica)
        if mesh is not None:
            from thinwire.training.parallel_passes import ParallelPasses, cut_model

            model = cut_model(model, config, mesh)
            windows: Any = batches if config.parallel.activation_memory is not None else None
            passes = ParallelPasses(config, model, mesh, step=step, windows=windows)
        optimizer = DistributedOptimizer(
            model, make_inner_optimizer(config, model), method=make_method(config), transport=transport,
            seed=config.run.seed, pace=config.sync.pace,
        )  # fmt: skip
        self._model, self._optimizer = model, optimizer
        if isinstance(self._stop, NetworkStop):
            self._stop.join(transport, mesh=mesh)
        return Training(
            config=config, model=model, optimizer=optimizer, meter=meter, device=device, recorder=recorder,
            batches=batches,
            held_out=lambda num_batches: workload.held_out(config, data, num_batches),
            watch=step_monitor_of(config, optimizer, log=transport.log), checkpoints=self._checkpoints, passes=passes,
            memory=None if config.parallel.activation_memory is None else passes,
            stop=self._stop, policy=self._publishing(model, optimizer, warn),
        )  # fmt: skip

    def _publishing(
        self, model: nn.Module, optimizer: DistributedOptimizer, warn: Callable[[str], None]
    ) -> PublishedSteps | None:  # fmt: skip
        if self._config.output.publish is None or self._transport.replica:
            return None
        from thinwire.training.publishing import PublishedSteps

        self._published = PublishedSteps(
            optimizer, model, self._config, files=dict(self._companion.files()), warn=warn
        )  # fmt: skip
        return self._published

    @property
    def _leads(self) -> bool:
        """Whether this is the first rank of its replica."""
        return self._mesh is None or self._mesh.rank == 0

    def _of_all_ranks(self, note: dict[str, Any]) -> list[dict[str, Any]]:
        """Exchange a note with the other ranks of this replica."""
        if self._mesh is None or (self._mesh.stages is not None and self._mesh.stages.is_returning):
            return [note]
        self._num_notes += 1
        deadline_s = self._config.run.join_deadline_s
        return all_gather_json(note, transport=self._mesh.peers, number=self._num_notes, deadline_s=deadline_s)

    def _whole_model(self) -> nn.Module:
        """Return the model with the values that are in place now, uncut; all ranks of the replica call it."""
        if self._mesh is None:
            return self._model
        from thinwire.training.parallel_passes import whole_parameters

        values = whole_parameters(self._model, self._mesh)
        model = self._workload.make_model(self._config, self._workload.sizes(self._companion), "cpu")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(values[name])
        return model

    def _close(self, training: Training, warn: Callable[[str], None]) -> dict[str, Any] | None:
        """Compare the replicas' results; replica 0 evaluates and writes the run's."""
        if self._mesh is not None and self._mesh.stages is not None:
            self._mesh.stages.complete()
            self._num_notes = _CLOSING_NOTES  # a stage that came back has exchanged fewer
        reading = training.reading()
        with self._optimizer.global_parameters(may_lag=True):
            sha256 = parameters_sha256(self._whole_model())
        note = replica_note(reading, sha256=sha256)
        of_ranks = self._of_all_ranks(note)  # they differ in what they sent and received alone
        counted = ("payload_bytes", "wire_bytes_sent", "wire_bytes_received", "peak_bits_per_s")
        note |= {name: sum(one[name] for one in of_ranks) for name in counted}
        notes = self._all_gather(note, number=_CLOSING, deadline_s=training.deadline_s)
        if self._transport.replica != 0:
            return None
        shown = training.evaluate_at_end()
        with self._optimizer.global_parameters(may_lag=True):
            model = self._whole_model()
            if not self._leads:
                return None
            # before the model is saved, which merges adapters
            parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
            save_model(self._config.run_dir, model, files=self._companion.files())
            finish_samples(self._config.run_dir, self._workload, model, self._companion, warn=warn)
        summary = summarise(
            self._config, notes, shown=shown, parameters=parameters, num_fragments=self._optimizer.num_fragments
        )
        write_summary(self._config.run_dir, summary)
        return summary

    def _all_gather(self, note: dict[str, Any], *, number: int, deadline_s: float) -> list[dict[str, Any]]:
        return all_gather_json(note, transport=self._transport, number=number, deadline_s=deadline_s)


def occupied(run_dir: Path) -> str:
    """Return the refusal to write into a folder that holds a run."""
    return (
        f"{run_dir} holds a run already; go on with it: thinwire train --resume {run_dir}, replace it with "
        f"--overwrite, or choose another --out"
    )


def make_run_folder(config: TrainConfig, *, run: RunIdentity, is_resumed: bool) -> None:
    """Make the run's folder with its `config.json` and `run.json`; remove an earlier run that is to be replaced."""
    run_dir = config.run_dir
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if not is_resumed:
            for pattern in _OUTPUTS:
                for path in run_dir.glob(pattern):
                    path.unlink(missing_ok=True)
            for name in _OUTPUT_FOLDERS:
                shutil.rmtree(run_dir / name, ignore_errors=True)
        write_identity(run_dir, run)
        write_whole(run_dir / "config.json", config_text(config))
        if not is_resumed:
            write_origin(config)
    except OSError as error:
        raise ThinwireError(f"cannot write to {run_dir}: {error.strerror or error}; choose another --out") from error


def _check_same(notes: list[dict[str, Any]]) -> None:
    for replica, note in enumerate(notes):
        if note["is_resumed"] != notes[0]["is_resumed"]:
            raise DesyncError("some hosts resume the run and others start it; give --resume on all hosts, or on none")
        for name, value in notes[0]["options"].items():
            theirs = note["options"].get(name)
            if theirs != value:
                raise DesyncError(
                    f"replica {replica} runs with {name} {theirs!r}, replica 0 with {value!r}; start all hosts with "
                    f"the same options and the same thinwire"
                )
        if note["data_problem"]:
            raise DataError(f"replica {replica}: {note['data_problem']}")
        if note["corpus"] != notes[0]["corpus"]:
            raise DesyncError(
                f"replica {replica} reads another corpus than replica 0; give all hosts the same files (stdlib is "
                f"another one for another version of Python)"
            )
