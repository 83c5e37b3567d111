"""The board on which ranks of an active test meet: who is late, lies or has another secret is told in one line."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from thinwire.errors import ConnectError
from thinwire.transport import lossy_rendezvous as boards
from thinwire.transport.addresses import RankEndpoint
from thinwire.transport.lossy_rendezvous import Board
from thinwire.transport.rendezvous import MOST_NOTE_BYTES, Meeting


def board_of(store: HashStore, rank: int, *, count: int = 2) -> Board:
    return Board(store, rank=rank, world_size=count, place="here")


def station(rank: int, **changes: str) -> RankEndpoint:
    fields = {"hostname": f"h{rank}", "host": "x", "address": "127.0.0.1", "secret": "", **changes}
    return RankEndpoint(rank=rank, replica=rank, port=1, **fields)  # type: ignore[arg-type]


def meet(store: HashStore, *stations: RankEndpoint, count: int) -> list[dict[int, RankEndpoint]]:
    with ThreadPoolExecutor() as threads:
        runs = [
            threads.submit(boards._introduce, one, board_of(store, one.rank, count=count), deadline_s=0.3)
            for one in stations
        ]
        return [one.result() for one in runs]


def test_who_does_not_come_in_time_is_left_out_by_all() -> None:
    found = meet(HashStore(), station(0), station(2), count=3)
    assert [sorted(one) for one in found] == [[0, 2], [0, 2]] and found[0] == found[1]


def test_another_secret_is_refused_by_the_names_of_both_hosts() -> None:
    with pytest.raises(ConnectError, match=r"rank 1 on host h1 and rank 0 on host h0 do not have the same secret"):
        meet(HashStore(), station(0), station(1, secret="other"), count=2)


def test_a_rank_that_comes_after_the_others_began_says_so() -> None:
    store = HashStore()
    meet(store, station(0), count=2)
    with pytest.raises(ConnectError, match="rank 1 came after the others had begun"):
        meet(store, station(1), count=2)


@pytest.mark.parametrize("present", ["0 7", "all", "0 -1", "0 1.5", "1", "0 \u0661", "9" * 5000])
def test_a_list_of_ranks_that_is_none_is_refused(present: str) -> None:
    store = HashStore()
    board_of(store, 0).leave("station/0", station(0).to_json())
    board_of(store, 0).leave("present", present)
    with pytest.raises(ConnectError, match="rank 0 left a list of ranks that is none"):
        meet(store, station(1), count=2)


@pytest.mark.parametrize("key", ["", "xy", "00"])
def test_a_key_that_is_none_is_refused_and_rank_0_is_waited_for_no_longer_than_the_deadline(key: str) -> None:
    store = HashStore()
    with pytest.raises(ConnectError, match=r"rank 0 did not begin within 0.1 s"):
        boards._shared_key(board_of(store, 1), deadline_s=0.1)
    board_of(store, 0).leave("key", key)
    with pytest.raises(ConnectError, match="rank 0 left a key that is none"):
        boards._shared_key(board_of(store, 1), deadline_s=0.1)


def test_a_note_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boards, "MOST_NOTE_BYTES", 10)
    board = board_of(HashStore(), 0)
    board.leave("said/1/1", "x" * 11)
    with pytest.raises(ConnectError, match="a note at here has 11 bytes, more than 10"):
        board.read("said/1/1")


@pytest.mark.parametrize(
    ("text", "seconds"), [("1 5.5", 5.5), ("", 0), ("1", 0), ("1 x", 0), ("1 -3", 0), ("1 1e9", 3600)]
)
def test_a_promise_is_read_as_seconds_and_never_believed_for_long(text: str, seconds: float) -> None:
    assert boards._promised_s(text) == seconds


def test_a_failure_that_another_rank_tells_is_shown_without_what_a_terminal_obeys() -> None:
    store = HashStore()
    store.set("failure", "no\x1b[2J")
    meeting = Meeting(store, rank=0, world_size=2, ranks_per_replica=1, deadline_s=0.1, place="here")
    with pytest.raises(ConnectError, match=r"^no\?\[2J$"):
        meeting.collect("station")


def test_a_note_of_a_rank_that_is_too_long_is_refused_before_it_is_read() -> None:
    store = HashStore()
    store.set("station/0", "x" * (MOST_NOTE_BYTES + 1))
    meeting = Meeting(store, rank=0, world_size=1, ranks_per_replica=1, deadline_s=0.1, place="here")
    with pytest.raises(
        ConnectError, match=f"a note at here has {MOST_NOTE_BYTES + 1} bytes, at most {MOST_NOTE_BYTES}"
    ):
        meeting.collect("station")
