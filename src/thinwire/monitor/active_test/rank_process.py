"""One rank of an active test: follows the plans of rank 0, sends, and stores the results."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from thinwire.errors import DeadlineExceeded, PayloadError, PeerLost, TransportError
from thinwire.monitor.active_test.plans import cells_of, pair_note, read_object, seconds_of
from thinwire.monitor.active_test.results import PairTest
from thinwire.monitor.active_test.wire_tests import (
    PATIENCE_S,
    Line,
    follow,
    lead,
    loopback_times,
    ring_all_reduce,
    together,
)
from thinwire.transport.addresses import Address, clock_name
from thinwire.transport.connect import PartialJob
from thinwire.transport.secret import SECRET_BYTES, Secret

_NUMBERS = 1 << 16
_ALL_REDUCES = 3


class ActiveRank:
    """Does what the plans say, and says what came out."""

    def __init__(self, gathering: PartialJob) -> None:
        self._own, self._board, self._transport = gathering.rank, gathering.rendezvous, gathering.transport
        self._gathering = gathering

    def obey(self) -> int:
        """Follow the plans of rank 0 to their end; return how many findings there are."""
        number = 0
        while True:
            number += 1
            plan = read_object(self._board.wait_for(f"plan/{number}", whom=0), whose="what rank 0 plans")
            if plan.get("do") == "end":
                return int(seconds_of(plan, "num_findings"))
            self.do(plan, number)

    def do(self, plan: Mapping[str, Any], number: int) -> None:
        """Do one plan and leave what came out."""
        does = {
            "hello": self._hello, "loopback": self._loopback, "pairs": self._pairs, "flows": self._flows,
            "all-reduce": self._all_reduce,
        }.get(str(plan.get("do")))  # fmt: skip
        if does is None:
            raise PayloadError(
                f"rank 0 plans {str(plan.get('do'))!r:.40}, which is unknown here; run the same thinwire on all hosts"
            )
        self._board.promise(PATIENCE_S)
        note = does(plan, number * _NUMBERS)
        self._board.post(f"said/{number}/{self._own}", json.dumps(note))

    def _hello(self, plan: Mapping[str, Any], number: int) -> dict[str, Any]:
        return {"clock": clock_name(), "connected": list(self._gathering.connected)}

    def _loopback(self, plan: Mapping[str, Any], number: int) -> dict[str, Any]:
        if [self._own] not in plan.get("ranks", ()):
            return {}
        from thinwire.transport.wire.wire_transport import WireTransport

        key = Secret(key=secrets.token_bytes(SECRET_BYTES))
        pair = [
            WireTransport(replica=side, num_replicas=2, secret=key, address="127.0.0.1") for side in range(2)
        ]  # fmt: skip
        try:
            pair[1].dial({0: Address(host="127.0.0.1", port=pair[0].port)}, deadline_s=PATIENCE_S)
            seconds = seconds_of(plan, "seconds")
            times = loopback_times((pair[0], pair[1]), seconds=seconds, promise=self._board.promise)
        except TransportError as error:
            return {"rate": 0.0, "detail": str(error)[:300]}
        finally:
            for transport in pair:
                transport.close()
        return {"rate": times.rate[0]}

    def _pairs(self, plan: Mapping[str, Any], number: int) -> dict[str, Any]:
        mine = [cell for cell in cells_of(plan, world_size=self._gathering.world_size) if self._own in cell]
        if not mine:
            return {}
        (source, destination), seconds = mine[0], seconds_of(plan, "seconds", most=60.0)
        peer = destination if self._own == source else source
        line = Line(self._transport, peer, number=number, promise=self._board.promise)
        try:
            if self._own != source:
                follow(line, seed=number)
                return {"fault": ""}
            times = lead(line, seconds=seconds, seed=number)
        except PayloadError as error:
            return pair_note(PairTest(fault="corrupt", detail=str(error)))
        except TransportError as error:
            return pair_note(PairTest(fault="dead", detail=_why(error, line)))
        rate, overhead_s = times.rate
        return pair_note(PairTest(rate_bits_per_s=rate, overhead_s=overhead_s, latency_s=times.latency_s))

    def _flows(self, plan: Mapping[str, Any], number: int) -> dict[str, Any]:
        rows = cells_of(plan, world_size=self._gathering.world_size, parts=3)
        flows = {(source, destination): num_bytes for source, destination, num_bytes in rows}
        limit_s = seconds_of(plan, "limit_s")
        done = together(self._transport, flows, number=number, limit_s=limit_s, promise=self._board.promise)
        return {"seconds": {str(peer): flow.seconds for peer, flow in done.items()}}

    def _all_reduce(self, plan: Mapping[str, Any], number: int) -> dict[str, Any]:
        rows = list(cells_of(plan, world_size=self._gathering.world_size, parts=3))
        order, numel = [row[0] for row in rows], rows[0][2] if rows else 0
        if self._own not in order:
            return {}
        limit_s = seconds_of(plan, "limit_s")
        best_s, wrong = float("inf"), None
        for again in range(_ALL_REDUCES):
            try:
                seconds, step = ring_all_reduce(
                    self._transport, order, numel, number=number + again * 4096, limit_s=limit_s,
                    promise=self._board.promise,
                )  # fmt: skip
            except TransportError as error:
                return {"detail": str(error)[:300]}
            best_s, wrong = min(best_s, seconds), step if wrong is None else wrong
        return {"seconds": best_s, "wrong": wrong}


def _why(error: TransportError, line: Line) -> str:
    """Say why a pair is dead, without the number of a message that nobody knows."""
    if isinstance(error, DeadlineExceeded):
        return f"no answer within {line.patience_s:.3g} s, the deadline that follows from measured times"
    return "the connection broke" if isinstance(error, PeerLost) else str(error)
