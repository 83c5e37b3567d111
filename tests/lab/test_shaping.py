"""What was set is what is measured: rates, delays, jitter and losses, on real sockets, counted by the kernel."""

from __future__ import annotations

import math
import statistics
import time

import pytest
from traffic_flow import assert_measured, flowing, is_heard

from thinwire.lab import Access, Lab, LabSettings, Link
from thinwire.lab.doctor import DelayMeasurement, measure_delays, measure_rate
from thinwire.units import parse_rate

WITHIN = 0.05


def assert_rate(lab: Lab, source: int, destination: int, rate: str, *, seconds: float = 0.6) -> None:
    assert_measured(
        lambda: measure_rate(lab, source, destination, seconds=seconds), wanted=parse_rate(rate), within=WITHIN
    )


def assert_delay(found: DelayMeasurement, latency_s: float) -> None:
    # other work on the machine can only lengthen a delay, and lengthens most of them now and then
    quick_s = sorted(found.delays_s)[len(found.delays_s) // 10]
    assert abs(quick_s - latency_s) <= max(WITHIN * latency_s, 0.001), (quick_s, found.median_s)


@pytest.mark.parametrize(("rate", "seconds"), [("1mbit", 2.0), ("5mbit", 0.8), ("20mbit", 0.6), ("100mbit", 0.6)])
def test_the_measured_rate_is_within_5_percent_of_the_setting(rate: str, seconds: float) -> None:
    with Lab(hosts=2, rate=rate) as lab:
        assert_rate(lab, 0, 1, rate, seconds=seconds)


def test_a_host_receives_faster_than_it_sends_where_its_access_says_so() -> None:
    with Lab(hosts=2, rates={0: "20mbit/5mbit"}) as lab:
        assert_rate(lab, 0, 1, "5mbit")
        assert_rate(lab, 1, 0, "20mbit")


def test_an_access_may_limit_one_direction_alone() -> None:
    accesses = (Access(), Access(down_bits_per_s=5e6))
    with Lab.of(LabSettings(accesses=accesses)) as lab:
        assert_rate(lab, 0, 1, "5mbit")
        assert measure_rate(lab, 1, 0, seconds=0.5) > 50e6


def test_a_link_has_a_rate_of_its_own_beside_the_access() -> None:
    with Lab(hosts=3, rate="20mbit", links={(0, 1): Link(rate_bits_per_s=5e6)}) as lab:
        assert_rate(lab, 0, 1, "5mbit")
        assert_rate(lab, 1, 0, "20mbit")


@pytest.mark.parametrize("pairs", [[(0, 1), (0, 2)], [(0, 1)]])
def test_links_share_the_access_also_where_some_have_rates_of_their_own(pairs: list[tuple[int, int]]) -> None:
    links = dict.fromkeys(pairs, Link(rate_bits_per_s=6e6))
    with (
        Lab(hosts=3, rates={0: "8mbit"}, links=links) as lab,
        flowing(lab, 0, 1) as one,
        flowing(lab, 0, 2, port="9997") as other,
    ):

        def both() -> float:
            before, began_s = lab.counters(), time.monotonic()
            time.sleep(1.0)
            after, seconds = lab.counters(), time.monotonic() - began_s
            rates = [(after[host].received_bytes - before[host].received_bytes) * 8 / seconds for host in (1, 2)]
            assert rates[0] < 6.3e6
            assert min(rates) > 1e6, "neither starves"
            return sum(rates)

        one.wait_for_bytes()
        other.wait_for_bytes()
        assert_measured(both, wanted=8e6, within=WITHIN)


def test_a_rate_changes_while_traffic_runs() -> None:
    with Lab(hosts=2, rates={0: "20mbit"}) as lab, flowing(lab, 0, 1) as flow:
        for rate in ("5mbit", "50mbit"):
            lab.set_rate(0, rate)
            time.sleep(0.3)  # TCP finds the new rate
            assert_measured(lambda: flow.rate(seconds=0.6), wanted=parse_rate(rate), within=WITHIN)
        lab.set_rate(0, None)
        # half more than the latest setting: how much more depends on what else the machine does
        assert_measured(lambda: min(flow.rate(seconds=0.5), 75e6), wanted=75e6, within=0)
        assert flow.sender.exit_code is None, "the connection outlived every change"


def test_a_links_rate_changes_while_traffic_runs_and_goes_away_again() -> None:
    with Lab(hosts=3, rate="20mbit") as lab, flowing(lab, 0, 1) as flow:
        for rate, wanted in (("5mbit", 5e6), (None, 20e6)):
            lab.set_link(0, 1, rate=rate)
            time.sleep(0.3)
            assert_measured(lambda: flow.rate(seconds=0.6), wanted=wanted, within=WITHIN)


def test_a_rate_holds_in_a_lab_with_delays() -> None:
    with Lab(hosts=2, rate="5mbit", link=Link(latency_s=0.02)) as lab:
        assert_rate(lab, 0, 1, "5mbit", seconds=1.0)


@pytest.mark.parametrize("latency_s", [0.005, 0.04])
def test_the_median_delay_is_within_5_percent_or_a_millisecond_of_the_latency(latency_s: float) -> None:
    with Lab(hosts=2, link=Link(latency_s=latency_s)) as lab:
        found = measure_delays(lab, 0, 1, packets=200)
    assert_delay(found, latency_s)
    assert found.loss == 0
    assert found.num_late == 0
    assert min(found.delays_s) >= latency_s - 0.0005, "no packet arrives before its latency is over"


def test_jitter_stays_in_its_range_fills_it_and_keeps_the_order() -> None:
    link = Link(latency_s=0.03, jitter_s=0.01)
    with Lab(hosts=2, link=link, seed=1) as lab:
        for _ in range(4):  # busy cores delay packets further: measured again, at most four times
            found = measure_delays(lab, 0, 1, packets=800, interval_s=0.002)
            if statistics.quantiles(found.delays_s, n=10)[-1] <= link.latency_s + link.jitter_s + 0.001:
                break
    assert found.loss == 0
    assert found.num_late == 0
    assert found.median_s == pytest.approx(link.latency_s, abs=0.6 * link.jitter_s)
    assert min(found.delays_s) >= link.latency_s - link.jitter_s - 0.0005
    tenths = statistics.quantiles(found.delays_s, n=10)
    assert tenths[-1] <= link.latency_s + link.jitter_s + 0.001
    assert tenths[0] < link.latency_s - 0.3 * link.jitter_s
    assert tenths[-1] > link.latency_s + 0.3 * link.jitter_s


def test_as_many_packets_are_lost_as_chance_allows() -> None:
    loss, packets = 0.05, 1500
    with Lab(hosts=2, link=Link(loss=loss)) as lab:
        found = measure_delays(lab, 0, 1, packets=packets, interval_s=0.001)
    five_sigma = 5 * math.sqrt(loss * (1 - loss) / packets)
    assert abs(found.loss - loss) <= five_sigma
    assert found.num_late == 0


def test_a_link_may_have_another_latency_and_loss_than_the_others_and_than_its_way_back() -> None:
    links = {(0, 1): Link(latency_s=0.03), (1, 0): Link(latency_s=0.02, loss=0.3)}
    with Lab(hosts=3, link=Link(latency_s=0.01), links=links) as lab:
        for (source, destination), latency_s in {(0, 1): 0.03, (1, 0): 0.02, (0, 2): 0.01}.items():
            found = measure_delays(lab, source, destination, packets=60)
            assert_delay(found, latency_s)
            assert (found.loss > 0.05) is ((source, destination) == (1, 0))


def test_a_latency_changes_while_the_lab_runs_where_it_was_asked_for() -> None:
    with Lab(hosts=2, can_delay=True) as lab:
        assert_delay(measure_delays(lab, 0, 1, packets=50), 0.0)
        lab.set_link(0, 1, latency_s=0.02)
        assert_delay(measure_delays(lab, 1, 0, packets=50), 0.02)
        lab.set_link(0, 1, latency_s=0.0)
        assert_delay(measure_delays(lab, 0, 1, packets=50), 0.0)


def test_a_lab_without_delays_refuses_one_later_and_names_the_remedy() -> None:
    with Lab(hosts=2) as lab:
        if lab.delays_by == "netem":
            lab.set_link(0, 1, latency_s=0.02)
            assert_delay(measure_delays(lab, 0, 1, packets=50), 0.02)
        else:
            with pytest.raises(ValueError, match=r"can_delay=True"):
                lab.set_link(0, 1, latency_s=0.02)
            assert lab.settings.between(0, 1) == Link()


@pytest.mark.parametrize(("other", "is_relayed"), [(None, False), (None, True), (1, False)])
def test_packets_of_a_cut_link_vanish_and_the_connection_goes_on_after_mending(
    other: int | None, is_relayed: bool
) -> None:
    with Lab(hosts=3, rate="20mbit", can_delay=is_relayed) as lab, flowing(lab, 0, 1) as flow:
        lab.cut(0, other)
        time.sleep(0.1)  # what is on the way arrives
        before = lab.counters()
        time.sleep(0.7)
        after = lab.counters()
        assert after[1].received_bytes == before[1].received_bytes
        assert after[0].received_bytes == before[0].received_bytes, "nobody is told"
        assert lab.settings.accesses[0].is_cut is (other is None)
        assert flow.sender.exit_code is None and flow.receiver.exit_code is None
        lab.mend(0, other)
        flow.wait_for_bytes(more=500_000)
        assert flow.sender.exit_code is None and flow.receiver.exit_code is None


def test_a_cut_link_leaves_the_other_links_alone() -> None:
    with Lab(hosts=3, rate="20mbit") as lab:
        lab.cut(0, 1)
        assert not is_heard(lab, 0, 1) and not is_heard(lab, 1, 0)
        assert is_heard(lab, 0, 2) and is_heard(lab, 1, 2)
        assert_rate(lab, 0, 2, "20mbit", seconds=0.5)


def test_links_that_are_cut_from_the_start_carry_nothing_until_one_is_mended() -> None:
    with Lab(hosts=3, link=Link(is_cut=True)) as lab:
        assert not is_heard(lab, 0, 1)
        lab.mend(0, 1)
        assert is_heard(lab, 0, 1) and is_heard(lab, 1, 0)
        assert not is_heard(lab, 0, 2)


def test_a_setting_that_is_refused_changes_nothing() -> None:
    with Lab(hosts=2, rate="20mbit") as lab:
        settings = lab.settings
        for change in (
            lambda: lab.set_rate(2, "1mbit"),
            lambda: lab.set_rate(0, "1bit"),
            lambda: lab.set_link(0, 0, rate="1mbit"),
            lambda: lab.set_link(0, 5, rate="1mbit"),
            lambda: lab.cut(7),
            lambda: lab.mend(0, 7),
        ):
            with pytest.raises(ValueError, match=r"\d"):
                change()
        assert lab.settings == settings
        assert_rate(lab, 0, 1, "20mbit", seconds=0.5)
