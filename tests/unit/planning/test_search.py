"""The plan is the best of all that could be run, keeps to what was wished, and says what it left out."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import nn

from thinwire import simulate
from thinwire.methods import iso_loco
from thinwire.planning import candidates as candidates_module
from thinwire.planning.candidates import Candidate, candidates, machine_sets, step_times
from thinwire.planning.cluster import Cluster, Machine, Wire
from thinwire.planning.loss_penalty import compute_worth, loss_penalty
from thinwire.planning.predict import Prediction, alone, interval_coding_s, interval_outer_s, predict
from thinwire.planning.search import PlanConstraints, make_plan
from thinwire.planning.simulator_adapter import Traffic, simulated_cluster, traffic_of
from thinwire.planning.training_task import TrainingTask


def workload(**changes: Any) -> TrainingTask:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(6)))
    return TrainingTask(**{"name": "six", "model": model, "tokens": 1e7, "seq_len": 64, "batch_size": 8, **changes})


# 98,304 parameters and 512 tokens a step: 302 million operations.
STEP = 6 * 98_304 * 512
FEW = PlanConstraints(intervals=(10, 100), overlaps=(1, 5), layers=(1,))


def machines(*steps: float, rate: float | None = 1e6, **changes: Any) -> tuple[Machine, ...]:
    """Return machines that compute a step in so many seconds, and have the same access."""
    return tuple(
        Machine(name=name, flops_per_s=STEP / step_s, up_bits_per_s=rate, down_bits_per_s=rate, **changes)
        for name, step_s in zip("abcdefgh", steps, strict=False)
    )


SMALL = PlanConstraints(intervals=(10, 100), overlaps=(1, 5), layers=(1, 3), max_penalty=0.2, min_replicas=2)


def random_cluster(seed: int) -> Cluster:
    draw = random.Random(seed)
    names = "abc"[: draw.choice((2, 3))]
    found = tuple(
        Machine(
            name=name, flops_per_s=STEP / draw.choice((0.1, 0.11, 0.2)), encode_bytes_per_s=draw.choice((None, 1e8)),
            up_bits_per_s=10 ** draw.uniform(4, 8), down_bits_per_s=10 ** draw.uniform(4, 8),
            latency_s=draw.choice((0.0, 0.01, 0.05)),
        )
        for name in names
    )  # fmt: skip
    wires = tuple(
        Wire(source=a, destination=b, bandwidth_bits_per_s=10 ** draw.uniform(4, 8), latency_s=draw.uniform(0, 0.1))
        for a in names for b in names if a != b and draw.random() < 0.5
    )  # fmt: skip
    return Cluster(machines=found, wires=wires)


def every_candidate(work: TrainingTask, cluster: Cluster, wishes: PlanConstraints) -> list[Candidate]:
    names = [machine.name for machine in cluster.machines]
    sets = machine_sets(cluster, names, step_s=step_times(cluster, work, names, num_replicas=len(names)))
    sets = [chosen for chosen in sets if len(chosen) >= wishes.min_replicas]
    return list(
        candidates(
            work, sets, names=wishes.methods, intervals=wishes.intervals, overlaps=wishes.overlaps, layers=wishes.layers
        )
    )


def equal_loss_s(candidate: Candidate, work: TrainingTask, cluster: Cluster) -> float | None:
    """Simulate a candidate on all links and with all replicas, and return its time; None without a published loss."""
    penalty = loss_penalty(
        candidate.method, num_parameters=work.num_parameters, num_replicas=candidate.num_replicas,
        sync_interval=candidate.sync_interval or 1, overlap_steps=candidate.overlap_steps or 0, codec=candidate.codec,
    )  # fmt: skip
    if penalty is None:
        return None
    names, count = candidate.replicas, candidate.num_replicas
    times, num_steps = step_times(cluster, work, names, num_replicas=count), work.num_steps(count)
    if count == 1:
        return alone(num_steps, step_s=times[0]).total_s * compute_worth(penalty.share)
    method = candidate.make()
    sent = traffic_of(method, work.model, num_replicas=count)
    interval = method.schedule.sync_interval
    machines = [cluster.machine(name) for name in names]
    rounds_s = [(interval_coding_s(one, sent) + interval_outer_s(one, sent)) / interval for one in machines]
    replicas = [simulate.SimReplica(step_s=sum(both)) for both in zip(times, rounds_s, strict=True)]
    links = simulated_cluster(cluster, names=names)
    found = predict(method.schedule, sent, links=links, replicas=replicas, num_steps=num_steps)
    return found.total_s * compute_worth(penalty.share)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_the_plan_is_as_fast_to_equal_loss_as_the_best_of_all_candidates(seed: int) -> None:
    work, cluster = workload(), random_cluster(seed)
    times = [equal_loss_s(candidate, work, cluster) for candidate in every_candidate(work, cluster, SMALL)]
    least = min(time_s for time_s in times if time_s is not None)
    assert least * 0.999 <= make_plan(work, cluster, SMALL).best.equal_loss_s <= 1.005 * least


def test_the_same_question_has_the_same_answer() -> None:
    found = [make_plan(workload(), random_cluster(3), SMALL) for _ in range(2)]
    assert found[0].to_json() == found[1].to_json()


def test_all_that_was_simulated_is_there_best_first_and_each_once() -> None:
    plan = make_plan(workload(), Cluster(machines=machines(0.1, 0.1, 0.1)))
    assert len({outlook.candidate for outlook in plan.outlooks}) == len(plan.outlooks) >= 8
    least = min(outlook.equal_loss_s for outlook in plan.outlooks)
    assert plan.best.equal_loss_s <= 1.005 * least
    rest = [outlook.equal_loss_s for outlook in plan.outlooks if outlook is not plan.best]
    assert rest == sorted(rest)


def test_of_plans_that_are_as_fast_the_one_that_sends_least_comes_first() -> None:
    """On wires this fast nobody waits, whatever is sent and however often."""
    plan = make_plan(workload(), Cluster(machines=machines(0.1, 0.1, rate=1e12)), FEW)
    alike = [one for one in plan.outlooks if one.equal_loss_s <= 1.005 * min(o.equal_loss_s for o in plan.outlooks)]
    assert len(alike) > 1
    assert plan.best.prediction.sent_bytes_per_step == min(one.prediction.sent_bytes_per_step for one in alike)


def test_one_machine_needs_no_wires_and_no_method() -> None:
    plan = make_plan(workload(), Cluster(machines=machines(0.1)))
    assert [outlook.candidate.replicas for outlook in plan.outlooks] == [("a",)]
    assert plan.best is plan.alone and plan.needs is None and plan.is_met
    assert plan.best.prediction.total_s == pytest.approx(0.1 * workload().num_steps(1))
    assert plan.settings()["replicas"] == 1


def test_machines_that_are_too_slow_or_on_too_thin_wires_are_left_out() -> None:
    slow = make_plan(workload(), Cluster(machines=machines(0.1, 0.1, 2.0, rate=1e8)), FEW)
    assert slow.best.candidate.replicas == ("a", "b")
    thin = (*machines(0.1, 0.1, rate=1e8), Machine(name="far", flops_per_s=10 * STEP, up_bits_per_s=1e3))
    far = dataclasses.replace(thin[2], down_bits_per_s=1e3)
    assert make_plan(workload(), Cluster(machines=(*thin[:2], far)), FEW).best.candidate.replicas == ("a", "b")
    all_three = make_plan(
        workload(), Cluster(machines=machines(0.1, 0.1, 2.0)), dataclasses.replace(FEW, min_replicas=3)
    )
    assert all_three.best.candidate.replicas == ("a", "b", "c")


def test_a_machine_without_the_memory_is_named_with_what_it_has_and_what_it_would_need() -> None:
    small = dataclasses.replace(machines(0.01)[0], name="attic", memory_bytes=2e6)
    plan = make_plan(workload(), Cluster(machines=(*machines(0.1, 0.1), small)), FEW)
    rejection = next(one for one in plan.rejections if one.what == "attic")
    assert "needs about" in rejection.reason and "has 2.00 MB" in rejection.reason
    assert all("attic" not in outlook.candidate.replicas for outlook in plan.outlooks)
    with pytest.raises(ValueError, match="no machine has the memory for six: attic: needs about"):
        make_plan(workload(), Cluster(machines=(small,)), FEW)


def test_a_share_of_a_global_batch_that_does_not_fit_is_computed_in_micro_batches() -> None:
    work = workload(batch_size=None, global_batch=64 * 1024)
    shares = {count: work.sequences(count) for count in (1, 4)}
    memory_bytes = work.memory_bytes(micro_batch=shares[4])
    assert work.memory_bytes(micro_batch=1) < memory_bytes < work.memory_bytes(micro_batch=shares[1])
    plan = make_plan(work, Cluster(machines=machines(*[0.1] * 4, memory_bytes=memory_bytes)), FEW)
    found = {outlook.candidate.num_replicas: outlook.candidate for outlook in plan.outlooks}
    assert found[4].micro_batch is None and found[4].batch_size == shares[4]
    assert found[1].micro_batch == shares[4] and found[1].batch_size == shares[1]
    assert work.memory_bytes(micro_batch=found[1].micro_batch) <= memory_bytes


def test_activations_are_computed_again_only_where_one_sequence_does_not_fit_otherwise() -> None:
    work = workload(batch_size=2)
    kept, again = (work.memory_bytes(micro_batch=1, recompute=recompute) for recompute in (False, True))
    plans = {has: make_plan(work, Cluster(machines=machines(0.1, 0.1, memory_bytes=has)), FEW) for has in (kept, again)}
    assert plans[kept].best.candidate.micro_batch == 1 and "recompute" not in plans[kept].settings()
    assert plans[again].settings()["recompute"] is True and plans[again].settings()["micro_batch"] == 1
    slower = plans[again].best.prediction.compute_s / plans[kept].best.prediction.compute_s
    assert slower == pytest.approx(4 / 3, rel=1e-3)
    with pytest.raises(ValueError, match="no machine has the memory"):
        make_plan(work, Cluster(machines=machines(0.1, memory_bytes=again - 1)), FEW)


def test_what_costs_too_much_loss_is_left_out_with_the_limit_and_how_many_there_were() -> None:
    wishes = dataclasses.replace(FEW, max_penalty=0.0)
    plan = make_plan(workload(), Cluster(machines=machines(0.1, 0.1)), wishes)
    assert all(outlook.penalty is None or outlook.penalty.share <= 0.0 for outlook in plan.outlooks)
    (rejection,) = [one for one in plan.rejections if "its loss would be more than 0.0% higher" in one.reason]
    assert "2 replicas" in rejection.what and rejection.count > 1


def test_a_utilisation_that_nothing_reaches_is_told_with_what_it_would_take() -> None:
    wishes = dataclasses.replace(FEW, min_utilisation=0.95, min_replicas=2)
    cluster = Cluster(machines=machines(0.1, 0.1, rate=3e4))
    plan = make_plan(workload(), cluster, wishes)
    assert not plan.is_met and plan.needs is not None and plan.needs.rate_factor > 1
    assert plan.needs.limit == pytest.approx(1.0, abs=1e-3)
    faster = [
        Cluster(machines=machines(0.1, 0.1, rate=3e4 * plan.needs.rate_factor * factor)) for factor in (0.95, 1.001)
    ]
    same = dataclasses.replace(
        wishes, methods=(plan.best.candidate.method,), intervals=(plan.best.candidate.sync_interval or 1,),
        overlaps=(plan.best.candidate.overlap_steps or 1,), codecs=(plan.best.candidate.codec or "e3m0",),
        min_utilisation=0.95 * plan.needs.limit,
    )  # fmt: skip
    assert [make_plan(workload(), one, same).is_met for one in faster] == [False, True]


@pytest.mark.slow
def test_the_least_interval_that_keeps_machines_busy_is_the_least_one() -> None:
    cluster = Cluster(machines=machines(0.1, 0.1, rate=1e6))
    wishes = PlanConstraints(methods=("diloco",), intervals=(10, 20, 50, 100, 200), codecs=("e3m0",), min_replicas=2)
    plan = make_plan(workload(), cluster, wishes)
    assert plan.needs is not None and plan.needs.sync_interval is not None and plan.needs.penalty is not None
    by_interval = {}
    for interval in (*wishes.intervals, 1000, 2000):
        found = make_plan(workload(), cluster, dataclasses.replace(wishes, intervals=(interval,), max_penalty=1.0))
        by_interval[interval] = found.best.prediction.compute_utilisation
    enough = [interval for interval, found in by_interval.items() if found >= 0.95]
    assert plan.needs.sync_interval == min(enough)


@pytest.mark.parametrize(("least", "codec"), [(0.0, "e3m0"), (0.945, "e3m0"), (0.95, "float32"), (0.96, "e3m0")])
def test_what_sends_less_is_not_taken_where_it_computes_less_than_was_wished(
    least: float, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(schedule: Any, sent: Traffic, **named: Any) -> Prediction:
        is_float32 = sent.payload_bytes[0][0] > 4 * 98_304
        return dataclasses.replace(
            alone(named["num_steps"], step_s=1.0), compute_s=0.951 if is_float32 else 0.947,
            sent_bytes_per_step=sent.payload_bytes[0][0],
        )  # fmt: skip

    monkeypatch.setattr(candidates_module, "predict", told)
    wishes = PlanConstraints(
        methods=("diloco",), intervals=(30,), codecs=("float32", "e3m0"), min_replicas=2, min_utilisation=least
    )  # fmt: skip
    plan = make_plan(workload(), Cluster(machines=machines(0.1, 0.1)), wishes)
    assert plan.best.candidate.codec == codec and plan.is_met == (least <= 0.951)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 23))
def test_a_utilisation_that_anything_reaches_is_kept_to(seed: int) -> None:
    cluster = random_cluster(seed)
    free = make_plan(workload(), cluster, SMALL)
    reached = sorted(outlook.prediction.compute_utilisation for outlook in free.outlooks)
    for least in (reached[-1] - 1e-6, reached[len(reached) // 2]):
        plan = make_plan(workload(), cluster, dataclasses.replace(SMALL, min_utilisation=min(least, 0.999)))
        reaching = [one for one in plan.outlooks if one.prediction.compute_utilisation >= plan.min_utilisation]
        assert plan.is_met == bool(reaching)
        assert not reaching or plan.best in reaching


def test_a_method_whose_loss_nobody_has_published_comes_last_but_comes() -> None:
    wishes = dataclasses.replace(FEW, methods=("noloco", "dgc", "all-reduce"))
    plan = make_plan(workload(), Cluster(machines=machines(0.1, 0.1, rate=1e9)), wishes)
    kinds = [outlook.penalty is None for outlook in plan.outlooks]
    assert kinds == sorted(kinds)
    assert {"noloco", "dgc"} <= {outlook.candidate.method for outlook in plan.outlooks if outlook.penalty is None}
    alone = make_plan(
        workload(), Cluster(machines=machines(0.1, 0.1)), PlanConstraints(methods=("dgc",), min_replicas=2)
    )
    assert alone.best.candidate.method == "dgc" and alone.best.equal_loss_s == float("inf")


def test_coding_counts_as_computing_where_it_was_measured() -> None:
    slow = [dataclasses.replace(machine, encode_bytes_per_s=1e6) for machine in machines(0.1, 0.1, rate=1e9)]
    wishes = PlanConstraints(methods=("diloco",), intervals=(10,), codecs=("e3m0",), min_replicas=2)
    plan = make_plan(workload(), Cluster(machines=tuple(slow)), wishes)
    # encoded once and decoded twice: one and a half times 4 bytes of each of 98,304 elements, in ten steps
    assert plan.best.prediction.compute_s == pytest.approx(0.1 + 1.5 * 4 * 98_304 / 1e6 / 10, rel=1e-3)


def test_an_outer_step_counts_as_computing() -> None:
    some = Cluster(machines=machines(0.1, 0.1, rate=1e9))
    wishes = PlanConstraints(methods=("iso-loco",), intervals=(10,), codecs=("e3m0",), min_replicas=2)
    plan = make_plan(workload(), some, wishes)
    operations = traffic_of(iso_loco(), workload().model, num_replicas=2).outer_operations
    assert operations > 0 and some.machines[0].flops_per_s is not None
    extra_s = operations / (some.machines[0].flops_per_s / 6) / 10
    assert plan.best.prediction.compute_s == pytest.approx(0.1 + extra_s, rel=1e-6)


def test_unequal_machines_get_uneven_batches_by_their_speed() -> None:
    work = workload(batch_size=32)
    plan = make_plan(work, Cluster(machines=machines(0.1, 0.1, 0.4, rate=1e9)), FEW)
    assert plan.uneven is not None and plan.best.candidate.num_replicas == 2
    assert plan.uneven.sequences == {"a": 43, "b": 43, "c": 11}
    # 97 sequences in the time of the slowest, 11 on a machine of a quarter of the speed, against twice the full speed
    assert plan.uneven.speedup == pytest.approx(97 / (4 * 11) / 2)
    assert make_plan(work, Cluster(machines=machines(0.1, 0.1, 0.105, rate=1e9)), FEW).uneven is None
    assert make_plan(work, Cluster(machines=machines(0.1)), FEW).uneven is None


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[int]:
    calls: list[int] = []
    real = getattr(module, name)

    def counting(*arguments: Any, **named: Any) -> Any:
        calls.append(len(named["links"].links) if "links" in named else 0)
        return real(*arguments, **named)

    monkeypatch.setattr(module, name, counting)
    return calls


def test_of_thousands_of_candidates_on_many_machines_few_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    many = tuple(
        Machine(name=f"m{number}", flops_per_s=STEP / draw.uniform(0.1, 0.3), up_bits_per_s=1e7, down_bits_per_s=1e8)
        for number in range(64)
    )
    wires = tuple(
        Wire(source=a.name, destination=b.name, bandwidth_bits_per_s=draw.uniform(1e6, 1e8))
        for a in many for b in many if a is not b
    )  # fmt: skip
    looks = counted(monkeypatch, candidates_module, "quick_step_s")
    simulated = counted(monkeypatch, candidates_module, "predict")
    runs = counted(monkeypatch, simulate, "simulate_training")
    plan = make_plan(workload(tokens=1e9), Cluster(machines=many, wires=wires), PlanConstraints(max_penalty=1.0))
    assert len(looks) > 1000
    assert len(simulated) <= 60 and len(runs) <= 2 * len(simulated)
    assert len(plan.outlooks) <= 24


def test_names_of_methods_may_be_written_as_in_python_and_are_checked_whoever_takes_part() -> None:
    wishes = dataclasses.replace(FEW, methods=("Streaming_DiLoCo", "streaming-diloco"), min_replicas=2)
    plan = make_plan(workload(), Cluster(machines=machines(0.1, 0.1)), wishes)
    assert {outlook.candidate.method for outlook in plan.outlooks} == {"streaming-diloco"}
    assert {outlook.candidate.codec for outlook in plan.outlooks} >= {"e3m0"}
    for changes in ({"methods": ("dilco",)}, {"codecs": ("e3m9",)}):
        with pytest.raises(ValueError, match=r"; try (diloco|e3m0)"):
            make_plan(workload(), Cluster(machines=machines(0.1)), dataclasses.replace(FEW, **changes))


@pytest.mark.parametrize(
    ("changes", "cluster", "said"),
    [
        ({"min_replicas": 3}, Cluster(machines=machines(0.1, 0.1)), "min_replicas is 3, and there are 2 machines"),
        (
            {"methods": ("streaming-diloco",), "codecs": ("float32",), "min_replicas": 2},
            Cluster(machines=machines(0.1, 0.1)),
            "no method goes with these intervals, overlaps and codecs",
        ),
        ({"max_penalty": -0.5}, Cluster(machines=machines(0.1, 0.1)), "its loss would be more than -50.0% higher"),
        ({}, Cluster(machines=(Machine(name="a", up_bits_per_s=1e6),)), "how fast 'a' computes"),
    ],
)
def test_where_nothing_is_left_the_reason_is_told(changes: dict[str, Any], cluster: Cluster, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_plan(workload(), cluster, dataclasses.replace(FEW, **changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"min_utilisation": 1.0}, r"must be in \[0, 1\), got 1.0"),
        ({"min_utilisation": float("nan")}, "got nan"),
        ({"max_penalty": float("inf")}, "must be a share of the loss, got inf"),
        ({"intervals": ()}, "intervals must name at least one"),
        ({"methods": ()}, "methods must name at least one"),
        ({"overlaps": (1, 0)}, r"at least 1, got .*\[1, 0\]"),
        ({"min_replicas": 0}, "and 0$"),
    ],
)
def test_a_wish_out_of_its_range_is_refused_with_its_value(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PlanConstraints(**changes)
