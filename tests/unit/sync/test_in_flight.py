"""A round that need not wait for all, in a thread of its own: when it closes, and what it still does afterwards."""

from __future__ import annotations

import threading

import pytest
import torch

from thinwire.averaging.quorum import Straggler
from thinwire.averaging.round_context import Average, Wait
from thinwire.errors import DeadlineExceeded, PayloadError, PeerLost
from thinwire.sync.in_flight import launch
from thinwire.sync.schedule import Round
from thinwire.transport.base import Received

ROUND = Round(id=0, fragment=0, launch_step=4, apply_step=5)


class Transfer:
    """A pending transfer that a test ends."""

    def __init__(self, payload=None, failure=None):
        self.ends = threading.Event()
        self.failure = failure
        self.payload = payload

    def done(self):
        return self.ends.is_set()

    def wait(self, *, deadline_s):
        assert self.done()
        if self.failure:
            raise self.failure
        return Received(payload=self.payload)


def there(**more):
    transfer = Transfer(**more)
    transfer.ends.set()
    return transfer


def in_background(wait, *, after=None, deadline_s=20.0):
    def steps():
        yield wait
        done = tuple(peer for peer, pending in wait.watched.items() if pending.done())
        return Average(mean=torch.zeros(1), reference_hashes={}, members=done, after=after or {})

    return launch(steps(), round=ROUND, deadline_s=deadline_s, in_background=True)


def test_in_the_background_a_round_closes_when_its_grace_is_over_and_not_before():
    flight = in_background(Wait(watched={1: there(), 2: Transfer()}, least=1, grace_steps=2))
    assert not flight.poll(5)
    threading.Event().wait(0.05)
    assert not flight.poll(5)
    flight.poll(6)
    flight._has_ended.wait(timeout=20)
    assert flight.poll(6) and flight.result().members == (1,)


def test_in_the_background_a_round_without_a_quorum_goes_on_waiting():
    second = Transfer()
    flight = in_background(Wait(watched={1: there(), 2: second, 3: Transfer()}, least=2))
    threading.Event().wait(0.05)
    assert not flight.poll(99)
    second.ends.set()
    assert flight.result().members == (1, 2)


def test_in_the_background_all_that_have_come_need_no_grace():
    flight = in_background(Wait(watched={1: there(), 2: there()}, least=1, grace_steps=10**9))
    assert flight.result(grace_s=1e9).members == (1, 2)


def test_whoever_needs_the_result_ends_the_grace():
    flight = in_background(Wait(watched={1: there(), 2: Transfer()}, least=1, grace_steps=10**9))
    assert flight.result(grace_s=0.02).members == (1,)


def test_in_the_background_a_quorum_that_never_comes_is_an_error_that_names_who_is_missing():
    flight = in_background(Wait(watched={1: Transfer(), 2: there(), 3: Transfer()}, least=2), deadline_s=0.05)
    with pytest.raises(DeadlineExceeded, match=r"replicas 1, 3 did not send round 0 \(fragment 0\) within 0.05 s"):
        flight.result()


def test_in_the_background_who_comes_later_is_seen_to_after_the_result():
    late = Transfer()
    flight = in_background(Wait(watched={1: there()}, least=1), after={2: late})
    assert flight.result().members == (1,)
    assert not flight.is_settled()
    late.ends.set()
    flight._thread.join(timeout=20)
    assert flight.is_settled()


@pytest.mark.parametrize("failure", [None, PeerLost("replica 2 closed its connection")])
def test_in_the_background_what_goes_wrong_with_a_late_one_is_told(failure):
    late = Transfer(failure=failure)
    flight = in_background(Wait(watched={1: there()}, least=1), after={2: late}, deadline_s=20.0 if failure else 0.2)
    assert flight.result().members == (1,)
    if failure:
        late.ends.set()
    flight._thread.join(timeout=30)
    with pytest.raises(type(failure) if failure else DeadlineExceeded, match="replica 2"):
        flight.is_settled()


def refuse(received):
    raise PayloadError("replica 4: nonsense")


def test_a_straggler_is_answered_once_and_only_when_it_has_come():
    asked, answers = Transfer(payload=torch.zeros(1, dtype=torch.uint8)), []

    def answer():
        answers.append(Transfer())
        return answers[-1]

    straggler = Straggler(asked, peer=4, check=lambda received: None, answer=answer)
    assert not straggler.done() and not answers
    with pytest.raises(DeadlineExceeded, match=r"replica 4 did not ask for a closed round within 0.02 s"):
        straggler.wait(deadline_s=0.02)
    asked.ends.set()
    assert not straggler.done() and not straggler.done() and len(answers) == 1
    answers[0].ends.set()
    assert straggler.done()
    straggler.wait(deadline_s=0)
    with pytest.raises(PayloadError, match="replica 4: nonsense"):
        Straggler(asked, peer=4, check=refuse, answer=answer).wait(deadline_s=1)
    assert len(answers) == 1
