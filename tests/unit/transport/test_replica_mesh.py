"""Order of a pipeline rank's messages: receives before their time, and matched to the sends of the other rank."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from thinwire import compat
from thinwire.site.pipeline import order_of
from thinwire.transport.replica_mesh import _RECEIVES_AHEAD, _gathered_once, _received_early


@pytest.mark.parametrize(("interleave", "eagerness"), [(1, 1), (1, 3), (1, 1000), (3, 1)])
def test_receives_come_early_in_the_order_of_the_sends(interleave: int, eagerness: int) -> None:
    pp, count = 4, 24
    _, action, kinds = compat.pipeline_runtime(schedules)
    order = order_of(num_stages=pp, num_micro_batches=count, interleave=interleave, eagerness=eagerness)
    table = {
        rank: [action(chunk * pp + rank, kinds.FORWARD if forward else kinds.FULL_BACKWARD, number)
               for forward, chunk, number in passes]
        for rank, passes in enumerate(order)
    }  # fmt: skip
    private: Any = schedules
    plain = private._add_send_recv(table, lambda stage: stage % pp, pp * interleave)
    sends: dict[tuple[int, int], deque[Any]] = {}
    early = {rank: _received_early(_gathered_once(actions, kinds), kinds) for rank, actions in plain.items()}
    for rank, actions in early.items():
        for one in actions:
            step = {kinds.SEND_F: 1, kinds.SEND_B: -1}.get(one.computation_type)
            if step:
                way = sends.setdefault((rank, (rank + step) % pp), deque())
                way.append((one.stage_index + step, one.computation_type, one.microbatch_index))
    pairs = {kinds.RECV_F: (kinds.SEND_F, -1, kinds.FORWARD), kinds.RECV_B: (kinds.SEND_B, 1, kinds.FULL_BACKWARD)}
    for rank, actions in early.items():
        assert sorted(map(str, actions)) == sorted(map(str, plain[rank]))
        waiting: set[Any] = set()
        most = 0
        for one in actions:
            if one.computation_type in pairs:
                send, step, consumer = pairs[one.computation_type]
                # messages of two ranks are matched by their order
                expected = sends[(rank + step) % pp, rank].popleft()
                assert expected == (one.stage_index, send, one.microbatch_index)
                waiting.add((one.stage_index, consumer, one.microbatch_index))
                most = max(most, len(waiting))
            waiting.discard((one.stage_index, one.computation_type, one.microbatch_index))
        assert not waiting, "each receive comes before its pass"
        assert most >= min(_RECEIVES_AHEAD, count)
    assert not any(sends.values())
