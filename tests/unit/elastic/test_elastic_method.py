"""The parts of elastic runs around the protocol: jobs, shards of data, means of agreed parts, processes of a host."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire import methods
from thinwire.averaging.exchange import AllGather, BoundExchange, TwoPhase, laid_out
from thinwire.averaging.quorum import PART_HEADER_BYTES, PartHeader, with_part_header
from thinwire.averaging.round_context import RoundContext
from thinwire.averaging.topology import Peers
from thinwire.cli.elastic_run import _new
from thinwire.codecs import NAMES, by_name, float32
from thinwire.codecs.error_feedback import ErrorFeedback
from thinwire.elastic.elastic_mean import ElasticMean, elastic_mean
from thinwire.elastic.elastic_method import elastic
from thinwire.errors import Refused, Stopped, WorkerFailed
from thinwire.runlog.run_identity import new_identity
from thinwire.training.build import check, make_method
from thinwire.training.config import OPTIONS, PATH_OPTIONS, TrainConfig, resolve
from thinwire.training.elastic.job import ElasticJob, LocalSettings
from thinwire.training.elastic.launch import REFUSED, UNANSWERED, Role, launch
from thinwire.transport.loopback import single
from thinwire.workloads.sampler import Sampler, ShardBatches


def config_of(tmp_path: Path, **more: object) -> TrainConfig:
    given = TrainConfig.of(elastic=True, replicas=3, steps=60, out=tmp_path, secret=tmp_path / "secret", **more)
    return resolve(given, world_size=None, cores=2, home=tmp_path)


def job_of(config: TrainConfig) -> ElasticJob:
    return ElasticJob.of(config, identity=new_identity(config_digest=config.digest()))


def test_a_job_goes_over_the_wire_without_what_is_one_hosts_own(tmp_path: Path) -> None:
    job = job_of(config_of(tmp_path, overlap_steps="2"))
    told = job.to_json()
    assert (job.sync_interval, job.overlap_steps, job.shard_windows) == (30, 2, 16 * 8)
    names = {name for section in told["config"].values() for name in section}
    assert not {"out", "secret", "cache_dir", "address"} & names, "a joiner has its own"
    again = ElasticJob.from_json(told)
    assert again.config.run.steps == 60 and again.config.run.secret is None and again.to_json() == told


@pytest.mark.parametrize("name", ["sync_interval", "config", "identity"])
def test_a_job_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    told = job_of(config_of(tmp_path)).to_json()
    for wrong in ({**told, name: -1}, {key: value for key, value in told.items() if key != name}):
        with pytest.raises(Refused, match="describes no job of this thinwire"):
            ElasticJob.from_json(wrong)


def test_a_job_with_options_that_cannot_be_is_refused(tmp_path: Path) -> None:
    told = job_of(config_of(tmp_path)).to_json()
    for name, value in (("steps", 0), ("replicas", None), ("lr", -1.0), ("batch_size", None)):
        with pytest.raises(Refused, match="describes no job of this thinwire"):
            section, field = OPTIONS[name]
            config = {**told["config"], section: {**told["config"][section], field: value}}
            ElasticJob.from_json({**told, "config": config})


def test_a_host_keeps_its_own_settings(tmp_path: Path) -> None:
    settings = LocalSettings(
        invitation="thinwire://h:1", secret="s", out=str(tmp_path), cache_dir="c", threads=3, batch_size=2, data="here"
    )
    settings.save()
    applied = LocalSettings.load(tmp_path).apply(job_of(config_of(tmp_path / "first")).config)
    assert (applied.data.batch_size, applied.data.source, applied.model.threads, applied.run_dir) == (
        2,
        "here",
        3,
        tmp_path,
    )
    assert applied.run.steps == 60 and applied.model.device == "cpu"


@pytest.mark.parametrize(
    ("name", "value"), [("model", "4000b"), ("batch_size", 1 << 40), ("seq_len", 1 << 40), ("vocab_size", 1 << 40)]
)
def test_a_model_or_batch_that_no_memory_here_holds_is_refused_once(
    name: str, value: str | int, tmp_path: Path
) -> None:
    told = job_of(config_of(tmp_path)).to_json()
    section, field = OPTIONS[name]
    told["config"][section][field] = value
    settings = LocalSettings(invitation="thinwire://h:1", secret="s", out=str(tmp_path), cache_dir="c", threads=1)
    with pytest.raises(
        ValueError, match="does not fit the memory of this machine"
    ):  # for which a launcher starts no other process
        check(settings.apply(ElasticJob.from_json(told).config), num_local=1)


@pytest.mark.parametrize(
    ("name", "value"), [("replicas", 1 << 40), ("sync_interval", 1 << 31), ("pace", True)], ids=str
)
def test_an_option_of_a_job_without_bound_is_refused(name: str, value: int, tmp_path: Path) -> None:
    told = job_of(config_of(tmp_path)).to_json()
    section, field = OPTIONS[name]
    told["config"][section][field] = value
    with pytest.raises(Refused, match=f"describes no job of this thinwire .*{name}"):
        ElasticJob.from_json(told)


def test_numbers_of_a_job_that_contradict_its_options_are_refused(tmp_path: Path) -> None:
    told = job_of(config_of(tmp_path)).to_json()
    wrong = {"sync_interval": 29, "overlap_steps": 29, "part_share": 3.5, "allows_overdue": not told["allows_overdue"]}
    for name, value in wrong.items():
        job = ElasticJob.from_json({**told, name: value})
        with pytest.raises(Refused, match=f"its numbers are .*'{name}': {value}"):
            job.check_method(make_method(job.config))
    job_of(config_of(tmp_path)).check_method(make_method(config_of(tmp_path)))


PLACES = {
    "data": "/home/other/diary.txt", "model": "hf:/home/other/model", "init_from": "/home/other/run",
    "checkpoint_to": "/home/other/kept",
}  # fmt: skip


def test_no_option_of_a_job_is_a_place_of_the_host_that_joins(tmp_path: Path) -> None:
    told = job_of(config_of(tmp_path / "first", data="texts")).to_json()
    for name in (*PATH_OPTIONS, "checkpoint_to"):
        section, field = OPTIONS[name]
        told["config"][section][field] = "/home/other/of-this-host"
    told["config"]["output"]["wandb"] = True
    own = {"data": "here", "init_from": "earlier", "checkpoint_to": "kept"}
    settings = LocalSettings(
        invitation="thinwire://h:1", secret="s", out=str(tmp_path), cache_dir="c", threads=1, **own
    )
    applied = settings.apply(ElasticJob.from_json(told).config)
    places = {name: str(value) for name in (*PATH_OPTIONS, "checkpoint_to") if (value := applied.option(name))}
    assert places == {"out": str(tmp_path), "cache_dir": "c", "init_from": "earlier", "checkpoint_to": "kept"}
    assert applied.data.source == "here" and not applied.output.wandb


@pytest.mark.parametrize("name", PLACES)
def test_what_a_job_reads_is_confirmed_by_each_host(name: str, tmp_path: Path) -> None:
    job = job_of(config_of(tmp_path / "first").replace(**{name: PLACES[name]}))
    settings = LocalSettings(invitation="thinwire://h:1", secret="s", out=str(tmp_path), cache_dir="c", threads=1)
    with pytest.raises(ValueError, match="a host uses no place that another one names") as error:
        settings.apply(job.config)
    remedy = shlex.split(str(error.value).partition("thinwire join with ")[2].partition(",")[0])
    assert remedy == [f"--{name.replace('_', '-')}", PLACES[name]]
    confirmed = dataclasses.replace(settings, **{name: remedy[1]}).apply(job.config)
    assert str(confirmed.option(name)) == PLACES[name]


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_two_replicas_read_each_window_of_an_epoch_once(batch_size: int) -> None:
    tokens = np.arange(4 * 24 + 1)  # 24 windows, in shards of 6
    shards = iter(range(100))
    readers = [
        ShardBatches(
            tokens, batch_size=batch_size, seq_len=4, seed=3, shard_windows=6, lend=lambda number: (next(shards), 0)
        )
        for _ in range(2)
    ]
    seen: list[int] = []
    for turn in range(24 // batch_size):
        inputs, targets = next(readers[turn % 2])
        assert torch.equal(targets, inputs + 1)
        seen += [int(first) for first in inputs[:, 0]]
    assert sorted(seen) == list(range(0, 96, 4))


def test_shards_have_the_order_of_the_sampler() -> None:
    tokens = np.arange(4 * 11 + 1)
    sampler = Sampler(tokens, replica=0, num_replicas=1, batch_size=1, seq_len=4, seed=5)
    batches = ShardBatches(tokens, batch_size=1, seq_len=4, seed=5, shard_windows=4, lend=lambda number: (number, 0))
    for _ in range(30):  # over the ends of epochs and of shards
        assert torch.equal(next(sampler)[0], next(batches)[0])


def test_a_shard_is_gone_on_with_where_another_replica_left_it() -> None:
    tokens = np.arange(4 * 11 + 1)
    whole = ShardBatches(tokens, batch_size=1, seq_len=4, seed=5, shard_windows=4, lend=lambda number: (2, 0))
    rest = ShardBatches(tokens, batch_size=1, seq_len=4, seed=5, shard_windows=4, lend=lambda number: (2, 3))
    last = [next(whole)[0] for _ in range(4)][3]
    assert torch.equal(next(rest)[0], last) and rest.used == {2: 4}


class FixedSeat:
    """Agrees on parts that the test gives."""

    def __init__(self, parts: dict[int, torch.Tensor], *, rejected: list[int] | None = None) -> None:
        self.agreed = self
        self.parts, self.step, self.closed_step = parts, 9, 9
        self.refused: dict[int, tuple[str, str]] = {}
        self.rejected = [] if rejected is None else rejected

    def active(self) -> tuple[int, ...]:
        return tuple(self.parts)

    def known_step(self) -> int:
        return 9

    def is_decided(self, round_id: int) -> bool:
        return True

    def propose(self, part: torch.Tensor | None, **rest: object) -> FixedSeat:
        assert part is None, "a decided round takes no part"
        return self

    def reject(self, member: int, **rest: object) -> None:
        self.rejected.append(member)

    def confirm(self, round_id: int, sound: object) -> None: ...

    def done(self) -> bool:
        return True

    def wait(self, *, deadline_s: float) -> None:
        """Done."""


def mean_of(
    vectors: dict[int, torch.Tensor],
    *,
    tokens: dict[int, tuple[int, int]] | None = None,
    rejected: list[int] | None = None,
    alter: Callable[[dict[int, torch.Tensor]], dict[int, torch.Tensor]] = lambda parts: parts,
    rounds: int = 1,
    me: int = 0,
    turns: list[dict[int, torch.Tensor]] | None = None,
) -> tuple[torch.Tensor, list[str]]:
    offers = tokens or dict.fromkeys(vectors, (10, 2))

    def coded(vectors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        parts = {}
        for member, vector in vectors.items():
            num_tokens, num_steps = offers[member]
            offer = PartHeader(num_tokens=num_tokens, num_steps=num_steps, has_part=True)
            parts[member] = with_part_header(offer, float32().encode(vector, seed=0))
        return alter(parts)

    parts = coded(vectors)
    found: list[str] = []
    numel = next(iter(vectors.values())).numel()
    seat = FixedSeat(parts, rejected=[] if rejected is None else rejected)
    exchange = ElasticMean(codec=float32(), session=seat, find=found.append)
    bound = exchange.bind([[torch.Size([numel])]], replica=0, num_replicas=3)
    for found_there in turns or [vectors] * rounds:
        seat.parts = coded(found_there)
        mean = completed(bound, numel=numel, me=me)
    return mean, found


def completed(bound: BoundExchange, *, numel: int, me: int = 0) -> torch.Tensor:
    """Return the mean of a round that a replica only applies."""
    context = RoundContext(peers=Peers(me=me, members=(0, 1, 2)), transport=single(), round_id=4, step=9)
    steps = bound.steps(torch.zeros(numel), context)
    next(steps)
    try:
        steps.send([])
    except StopIteration as stop:
        return stop.value.mean
    raise AssertionError("one wait is enough")


def test_parts_weigh_by_their_tokens_and_speed() -> None:
    vectors = {0: torch.tensor([1.0, 0.0]), 4: torch.tensor([0.0, 1.0])}
    mean, _ = mean_of(vectors, tokens={0: (30, 3), 4: (10, 1)})
    assert torch.equal(mean, torch.tensor([0.75, 0.25]))
    assert torch.equal(mean_of(vectors)[0], torch.tensor([0.5, 0.5]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_part_that_is_not_finite_is_left_out_and_rejected(value: float) -> None:
    vectors = {0: torch.tensor([1.0, 2.0]), 1: torch.tensor([value, 2.0]), 2: torch.tensor([3.0, 4.0])}
    rejected: list[int] = []
    mean, found = mean_of(vectors, rejected=rejected)
    assert torch.equal(mean, torch.tensor([2.0, 3.0]))
    assert rejected == [1] and not found, "the coordinator makes one finding of all rejections"
    nothing, _ = mean_of({1: vectors[1]}, rejected=rejected)
    assert torch.equal(nothing, torch.zeros(2)) and rejected == [1, 1]


MALFORMED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "8 bytes too short": lambda part: part[:-8],
    "8 bytes too long": lambda part: torch.cat([part, part[:8]]),
    "empty": lambda part: part[:0],
    "a part of a header": lambda part: part[:9],
    "a header alone": lambda part: part[:PART_HEADER_BYTES],
    "another kind": lambda part: torch.cat([torch.tensor([7], dtype=torch.uint8), part[1:]]),
    "no part, but tokens": lambda part: torch.cat([torch.tensor([0], dtype=torch.uint8), part[1:]]),
    "more steps than tokens": lambda part: torch.cat([part[:16], part[8:16], part[9:24], part[16:17], part[24:]]),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_part_that_cannot_be_read_is_left_out_and_rejected_and_fails_nobody(fault: str) -> None:
    vectors = {0: torch.tensor([1.0, 2.0]), 1: torch.tensor([8.0, 2.0]), 2: torch.tensor([3.0, 4.0])}
    rejected: list[int] = []
    mean, _ = mean_of(vectors, rejected=rejected, alter=lambda parts: parts | {1: MALFORMED[fault](parts[1])})
    assert torch.equal(mean, torch.tensor([2.0, 3.0])) and rejected == [1]


@pytest.mark.parametrize("name", NAMES)
def test_no_bytes_of_another_replica_fail_a_round(name: str) -> None:
    coding, numel = laid_out(by_name(name), [torch.Size([70])]), 70
    generator = torch.Generator().manual_seed(5)
    vector = torch.randn(numel, generator=generator)
    offer = PartHeader(num_tokens=10, num_steps=2, has_part=True)
    good = with_part_header(offer, coding.encode(vector, seed=0))
    for _ in range(60):
        bad, place = good.clone(), int(torch.randint(good.numel() - 8, (), generator=generator))
        bad[place : place + 8] = torch.randint(256, (8,), generator=generator, dtype=torch.uint8)
        end = int(torch.randint(good.numel() + 1, (), generator=generator))
        for part in (bad, good[:end], torch.cat([bad, bad[:end]])):
            bound = ElasticMean(codec=coding, session=FixedSeat({0: good, 1: part, 2: good})).bind(
                [[torch.Size([numel])]], replica=0, num_replicas=3
            )
            mean = completed(bound, numel=numel)
            assert bool(mean.isfinite().all())


def test_parts_much_longer_than_the_median_are_shortened_and_named_once_by_one_replica() -> None:
    vectors = {number: torch.tensor([1.0, 0.0]) for number in range(3)} | {3: torch.tensor([0.0, 8.0])}
    mean, found = mean_of(vectors, rounds=9)
    assert torch.allclose(mean, torch.tensor([0.75, 0.75]))
    assert len(found) == 1 and "replica 3 was 8.0 times as long as the median one, and the 4th" in found[0]
    assert not mean_of(vectors, rounds=3)[1], "as after a start with fresh moments"
    assert not mean_of(vectors, rounds=9, me=1)[1], "replica 0 has named it"
    usual = dict.fromkeys(range(4), vectors[0])
    for gap, num_found in ((5, 1), (40, 2)):
        turns = [*[vectors] * 6, *[usual] * gap, *[vectors] * 6]
        assert len(mean_of(vectors, turns=turns)[1]) == num_found, "one finding an episode"
    assert torch.equal(mean_of({0: vectors[0], 3: vectors[3]})[0], torch.tensor([0.5, 4.0])), "of two, none is odd"


@pytest.mark.parametrize("length", [11.0, 1e3, 1e18, 1e30, 3e38])
def test_a_part_far_longer_than_the_others_is_left_out_and_rejected(length: float) -> None:
    vectors = {0: torch.tensor([1.0, 2.0]), 1: torch.tensor([0.0, length * 2.3]), 2: torch.tensor([2.0, 1.0])}
    rejected: list[int] = []
    mean, found = mean_of(vectors, rejected=rejected)
    assert torch.equal(mean, torch.tensor([1.5, 1.5])) and rejected == [1] and not found
    if length >= 1e30:  # no two others are needed
        assert torch.equal(mean_of({0: vectors[0], 1: vectors[1]}, rejected=rejected)[0], vectors[0])


def test_of_a_replica_between_two_that_have_just_begun_nothing_is_left_out() -> None:
    vectors = {0: torch.tensor([40.0, 0.0]), 1: torch.tensor([0.1, 0.0]), 2: torch.tensor([0.1, 0.0])}
    rejected: list[int] = []
    mean_of(vectors, tokens={0: (90, 9), 1: (10, 1), 2: (10, 1)}, rejected=rejected)
    assert not rejected, "what they did in one step does not show how long a part of nine may be"
    mean_of(vectors, tokens={0: (90, 9), 1: (90, 9), 2: (90, 9)}, rejected=rejected)
    assert rejected == [0]


def test_a_replica_that_claims_far_more_tokens_than_the_others_counts_nothing() -> None:
    vectors = {0: torch.tensor([1.0]), 1: torch.tensor([3.0]), 2: torch.tensor([8.0])}
    rejected: list[int] = []
    tokens = {0: (64, 2), 1: (64, 2), 2: (1 << 62, 2)}
    assert torch.equal(mean_of(vectors, tokens=tokens, rejected=rejected)[0], torch.tensor([2.0]))
    assert rejected == [2]
    mean_of(vectors, tokens=tokens | {2: (64_000, 2)}, rejected=rejected)
    assert rejected == [2], "batches of a thousand times the others' size are possible"


def test_a_replica_that_has_trained_nothing_counts_nothing() -> None:
    vectors = {0: torch.tensor([1.0]), 1: torch.tensor([9.0])}
    assert torch.equal(mean_of(vectors, tokens={0: (5, 1), 1: (0, 0)})[0], torch.tensor([1.0]))


def test_exchanges_that_remember_are_refused() -> None:
    seat = FixedSeat({})
    assert elastic_mean(TwoPhase(codec=float32()), session=seat, find=print).codec == float32()
    with pytest.raises(ValueError, match="replicas cannot come and go"):
        elastic_mean(AllGather(codec=float32(), memory=ErrorFeedback()), session=seat, find=print)
    with pytest.raises(ValueError, match=r"most_length must be at least 1, got 0\.5"):
        ElasticMean(codec=float32(), most_length=0.5)


@pytest.mark.parametrize("name", ["iso_loco", "diloco", "streaming_diloco", "local_sgd", "slowmo"])
def test_methods_that_average_pseudo_gradients_have_elastic_variants(name: str) -> None:
    method = elastic(getattr(methods, name)(), session=FixedSeat({0: torch.zeros(1), 5: torch.zeros(1)}))
    assert method.topology.peers(round_id=0, me=5, alive=[0]).members == (0, 5)
    assert type(method.exchanges(3)[0]) is ElasticMean


@pytest.mark.parametrize("name", ["all_reduce", "noloco", "co2", "sparse_loco", "decoupled_diloco"])
def test_methods_that_depend_on_who_is_there_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="for elastic runs take iso-loco, streaming-diloco"):
        elastic(getattr(methods, name)(), session=FixedSeat({}))


def test_what_is_new_is_told_once() -> None:
    assert _new([], ["a", "b"]) == ["a", "b"]
    assert _new(["a", "b"], ["a", "b"]) == []
    assert _new(["a", "b", "c"], ["b", "c", "d"]) == ["d"], "the list moves on"
    assert _new(["a"], ["x", "y"]) == ["x", "y"]


def role_of(tmp_path: Path, name: str, program: str, *, is_needed: bool = True) -> Role:
    (tmp_path / f"{name}.py").write_text(program)
    return Role(name=name, module=name, is_needed=is_needed)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("thinwire.training.elastic.launch._AGAIN_S", 0.05)
    return tmp_path


COUNTING = """
import os, sys, time
from pathlib import Path
count = Path(sys.argv[1]) / "count"
with count.open("a") as file:
    file.write("x")
"""


def test_a_process_that_dies_is_started_again_until_it_ends_well(programs: Path) -> None:
    said: list[str] = []
    program = COUNTING + "sys.exit(0) if count.stat().st_size == 3 else os.kill(os.getpid(), 9)\n"
    launch([role_of(programs, "dying", program)], run_dir=programs, report=said.append, on_tick=lambda: None)
    assert (programs / "count").stat().st_size == 3
    assert [text for text in said if "dying was ended by SIGKILL; starting it again" in text] == said and len(said) == 2


def test_a_process_that_fails_is_started_again_with_its_reason_told(programs: Path) -> None:
    said: list[str] = []
    program = COUNTING + (
        "print('error: nobody answered', file=sys.stderr)\nsys.exit(0 if count.stat().st_size == 2 else 1)\n"
    )
    launch([role_of(programs, "failing", program)], run_dir=programs, report=said.append, on_tick=lambda: None)
    assert len(said) == 1 and "failing ended with code 1 (nobody answered); starting it again" in said[0]


def test_what_serves_others_is_told_when_its_own_host_has_ended(programs: Path) -> None:
    serving = COUNTING + "while not (Path(sys.argv[1]) / 'alone').exists():\n    time.sleep(0.02)\n"
    roles = [role_of(programs, "needed", "pass\n"), role_of(programs, "serving", serving, is_needed=False)]
    launch(roles, run_dir=programs, report=print, on_tick=lambda: None, part=(programs / "alone").touch)
    assert (programs / "count").exists() and (programs / "alone").exists()


def test_a_process_that_cannot_go_on_ends_the_host_with_its_words(programs: Path) -> None:
    program = f"import sys\nprint('error: no data here', file=sys.stderr)\nsys.exit({REFUSED})\n"
    with pytest.raises(WorkerFailed, match="no data here"):
        launch([role_of(programs, "refused", program)], run_dir=programs, report=print, on_tick=lambda: None)


def test_where_nobody_ever_answered_the_host_ends_and_else_it_tries_again(programs: Path) -> None:
    program = COUNTING + (
        f"print('error: nobody there', file=sys.stderr)\nsys.exit(0 if count.stat().st_size == 2 else {UNANSWERED})\n"
    )
    said: list[str] = []
    role = role_of(programs, "joining", program)
    with pytest.raises(WorkerFailed, match="nobody there"):
        launch([role], run_dir=programs, report=said.append, on_tick=lambda: None, is_answered=lambda: False)
    (programs / "count").unlink()
    assert not said
    launch([role], run_dir=programs, report=said.append, on_tick=lambda: None, is_answered=lambda: True)
    assert len(said) == 1 and "(nobody there); starting it again" in said[0]


def test_a_signal_stops_all_processes(programs: Path) -> None:
    import os
    import signal

    program = COUNTING + "time.sleep(600)\n"

    def look() -> None:
        if (programs / "count").exists():
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped) as stopped:
        launch([role_of(programs, "waiting", program)], run_dir=programs, report=print, on_tick=look)
    assert stopped.value.signal_number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
