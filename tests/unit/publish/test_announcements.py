"""Announcements: any order of deliveries gives equal maps, tombstones stay, and a partition heals by two exchanges."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from thinwire.carriers.folder import FolderCarrier
from thinwire.errors import PayloadError
from thinwire.publish.announcements import FOLDER, MOST_STATEMENTS, Announcements

HASHES = [f"{number:064x}" for number in range(7)]
PERIOD_S, HEALED_S = 0.5, 2.0


def change(one: Announcements, name: str, rng: random.Random) -> None:
    one.announce(
        rng.choice(HASHES), address=f"file:///{name}", bytes_per_s=rng.random() * 1e6, is_gone=rng.random() < 0.3
    )


def test_a_thousand_random_deliveries_give_equal_roots() -> None:
    """Statements come late, twice, in any order and through others; in the end all maps and answers are equal."""
    rng = random.Random(1)
    names = [f"member-{number}" for number in range(5)]
    replicas = [Announcements(name) for name in names]
    sent = [replicas[0].encode()]
    for _ in range(1000):
        number = rng.randrange(len(names))
        change(replicas[number], names[number], rng)
        sent.append(replicas[number].encode())
        replicas[rng.randrange(len(names))].merge(rng.choice(sent))
    assert len({one.root for one in replicas}) > 1
    for one in replicas:
        rng.shuffle(sent)
        for payload in sent:
            one.merge(payload)
        assert one.merge(one.encode()) == 0
    assert len({one.root for one in replicas}) == 1 and len({one.encode() for one in replicas}) == 1
    for sha256 in HASHES:
        found = [[(source.member, source.address) for source in one.sources(sha256)] for one in replicas]
        assert found == [found[0]] * len(names)
    rates = [source.bytes_per_s for source in replicas[0].sources(HASHES[0])]
    assert rates == sorted(rates, reverse=True)
    # a single bit is seen in the root
    before = replicas[0].root
    replicas[0].announce(HASHES[0], address="file:///x", is_gone=True)
    assert replicas[0].root != before
    assert "member-0" not in {source.member for source in replicas[0].sources(HASHES[0])}


def test_a_partition_heals_by_two_exchanges_and_leaves_one_object(tmp_path: Path) -> None:
    """Two halves change apart on two stores, then all reach one; members exchange every half second."""
    rng = random.Random(2)
    carriers = [FolderCarrier(tmp_path / side) for side in ("left", "right")]
    names = [f"member-{number}" for number in range(6)]
    replicas = [Announcements(name) for name in names]
    for turn in range(20):
        for number, one in enumerate(replicas):
            change(one, names[number], rng)
            if turn % 3 == 0:
                one.exchange(carriers[number % 2])
    assert replicas[0].root != replicas[1].root
    turns = 0
    while len({one.root for one in replicas}) > 1:
        turns += 1
        for one in replicas:
            one.exchange(carriers[0])
    assert turns * PERIOD_S < HEALED_S, turns
    replicas[0].exchange(carriers[0])
    assert [entry.name for entry in carriers[0].listing(FOLDER)] == [f"{FOLDER}/{replicas[0].root}"]
    # what is not of this format is left alone
    carriers[0].put(f"{FOLDER}/other", b"[{}]", only_new=True)
    assert replicas[0].exchange(carriers[0]) == 0
    assert len(carriers[0].listing(FOLDER)) == 2
    late = Announcements("late")
    assert late.exchange(carriers[0]) == len(names) * len(HASHES) and late.root == replicas[0].root


def test_what_is_no_announcement_is_refused_whole() -> None:
    """Text, wrong hashes, numbers out of range and floods change nothing."""
    one = Announcements("a")
    good = f'{{"sha256":"{HASHES[0]}","member":"b","address":"file:///b"}}'
    deep = b"[" * 100_000
    other = good[1:].replace(HASHES[0], "HASH")
    flood = "[" + ",".join("{" + other.replace("HASH", f"{number:064x}") for number in range(MOST_STATEMENTS)) + "]"
    for bad in (
        b"", b"\xff", deep, f"[{good},1]".encode(), good.replace(HASHES[0], "0").encode(),
        f"[{good[:-1]},\"count\":0}}]".encode(), f"[{good[:-1]},\"bytes_per_s\":1e999}}]".encode(),
        f"[{good[:-1]},\"more\":1}}]".encode(), f"[{good}]".replace("file:///b", "a\\u001b[2J").encode(),
    ):  # fmt: skip
        with pytest.raises(PayloadError):
            one.merge(bad)
    assert one.sources(HASHES[0]) == [] and one.merge(f"[{good}]".encode()) == 1
    with pytest.raises(PayloadError, match="more than 4096"):
        Announcements("a").merge(flood.encode()) and one.merge(flood.replace('"b"', '"z"').encode())
    assert len(one.sources(HASHES[0])) == 1
