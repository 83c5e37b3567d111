"""Message patterns of exchanges: which messages a round sends, stage by stage, and how large they are.

Nothing here imports torch. An exchange states its traffic by these values, and the simulator puts the same values on
its links. Sizes are parts of a replica's payload, so that one pattern serves every model and codec.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageStage:
    """Messages that may be sent at the same time; the next stage starts when all of them have arrived.

    Attributes:
        senders: Replicas that send.
        receivers: Replicas that receive; a sender among them sends nothing to itself.
        num_shards: A message is this part of a replica's payload: 1 for all of it, 4 for a quarter.
        is_ring: Each sender sends to the next receiver only, `num_in_row` messages one after another. Otherwise each
            sender sends one message to every receiver.
        num_in_row: Messages that each sender sends one after another; of an upload, the messages of each sender.
        way: "direct" from sender to receiver; "upload": each sender sends its own to a store, once for all receivers;
            "download": every receiver reads what the other senders have uploaded.
    """

    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    num_shards: int = 1
    is_ring: bool = False
    num_in_row: int = 1
    way: Literal["direct", "upload", "download"] = "direct"

    @property
    def is_all_to_all(self) -> bool:
        """Whether every member sends to every other member."""
        return not self.is_ring and self.way == "direct" and self.senders == self.receivers

    def messages(self) -> Iterator[tuple[int, int]]:
        """Yield the sender and the receiver of every message.

        Example:
            >>> list(MessageStage(senders=(0, 1), receivers=(0, 1, 2)).messages())
            [(0, 1), (0, 2), (1, 0), (1, 2)]
        """
        for place, sender in enumerate(self.senders):
            if self.is_ring:
                yield from ((sender, self.receivers[(place + 1) % len(self.receivers)]),) * self.num_in_row
            else:
                yield from ((sender, receiver) for receiver in self.receivers if receiver != sender)


class MessagePattern(Protocol):
    """Stages of an exchange, for any members."""

    @property
    def name(self) -> str: ...

    def stages(self, *, senders: Sequence[int], members: Sequence[int]) -> tuple[MessageStage, ...]:
        """Return the stages of one round, one after another.

        Args:
            senders: Members that send a payload.
            members: Members that receive the mean, the senders among them.

        Raises:
            ValueError: The pattern needs a payload from every member, and one sends none.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class AllGatherMessages:
    """Every sender sends its whole payload to every member: `M - 1` payloads out and in.

    Example:
        >>> [stage.num_shards for stage in AllGatherMessages().stages(senders=[0, 1], members=[0, 1])]
        [1]
    """

    name: ClassVar[str] = "all-gather"

    def stages(self, *, senders: Sequence[int], members: Sequence[int]) -> tuple[MessageStage, ...]:
        return (MessageStage(senders=tuple(senders), receivers=tuple(members)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoPhaseMessages:
    """Every member receives one shard of every payload, sums it, and sends the sum to all.

    `2 (M - 1) / M` payloads go out and in, in two messages in a row.
    """

    name: ClassVar[str] = "two-phase"

    def stages(self, *, senders: Sequence[int], members: Sequence[int]) -> tuple[MessageStage, ...]:
        _require_all(self, senders, members)
        everyone = tuple(members)
        return (MessageStage(senders=everyone, receivers=everyone, num_shards=len(everyone)),) * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StarMessages:
    """Every sender sends its payload to a server, which sends the mean to all: M payloads in and M out.

    Two messages in a row. In a simulation the server may be a host that does not train.

    Attributes:
        server: The server's number.
    """

    name: ClassVar[str] = "star"

    server: int = 0

    def stages(self, *, senders: Sequence[int], members: Sequence[int]) -> tuple[MessageStage, ...]:
        return (
            MessageStage(senders=tuple(senders), receivers=(self.server,)),
            MessageStage(senders=(self.server,), receivers=tuple(members)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RingMessages:
    """Ring all-reduce: every member sends shards to the next one, `2 (M - 1)` messages in a row.

    `2 (M - 1) / M` payloads go out and in. No exchange of thinwire works so; NCCL does.
    """

    name: ClassVar[str] = "ring"

    def stages(self, *, senders: Sequence[int], members: Sequence[int]) -> tuple[MessageStage, ...]:
        _require_all(self, senders, members)
        ring, num_members = tuple(members), len(members)
        stage = MessageStage(
            senders=ring, receivers=ring, num_shards=num_members, is_ring=True, num_in_row=2 * (num_members - 1)
        )
        return (stage,)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreMessages:
    """All-gather or two-phase exchange through a store: what many read is uploaded once.

    A whole upload comes before its downloads, as of objects. One payload goes out; `M - 1` come in, or
    `2 (M - 1) / M` in two phases.

    Example:
        >>> [stage.way for stage in StoreMessages().stages(senders=[0, 1], members=[0, 1])]
        ['upload', 'download']
    """

    name: ClassVar[str] = "store"

    is_two_phase: bool = False

    def stages(self, *, senders: Sequence[int], members: Sequence[int]) -> tuple[MessageStage, ...]:
        sending, everyone, count = tuple(senders), tuple(members), len(members)
        if not self.is_two_phase:
            up = MessageStage(senders=sending, receivers=everyone, way="upload")
            return up, replace(up, way="download")
        _require_all(self, senders, members)
        # a shard for each other member first, then the sum of the own shards, which all read
        parts = MessageStage(senders=everyone, receivers=everyone, num_shards=count, way="upload", num_in_row=count - 1)
        sums = replace(parts, num_in_row=1)
        return parts, replace(sums, way="download"), sums, replace(sums, way="download")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTraffic:
    """Traffic and coding of one round, once every warm-up has ended.

    Attributes:
        pattern: Its messages; None where nothing is sent.
        sent_bytes: Payload bytes of the replica that sends most.
        num_messages: Messages of the replica that sends most.
        coding_passes: How often a replica encodes and decodes each element, in pairs of one each; 0 for dense codes,
            which are casts.
        quorum: The round starts when so many payloads are there; None for all.
    """

    pattern: MessagePattern | None
    sent_bytes: int
    num_messages: int
    coding_passes: float = 0.0
    quorum: int | None = None


def sent_payloads(pattern: MessagePattern, *, num_members: int) -> float:
    """Return how many payloads the replica that sends most sends in a round.

    Example:
        >>> sent_payloads(AllGatherMessages(), num_members=4), sent_payloads(TwoPhaseMessages(), num_members=4)
        (3.0, 1.5)
        >>> [sent_payloads(StoreMessages(is_two_phase=both), num_members=4) for both in (False, True)]
        [1.0, 1.0]
    """
    members = range(num_members)
    sent: dict[int, float] = {}
    for stage in pattern.stages(senders=members, members=members):
        receivers = set(stage.receivers)
        if stage.way == "download":
            continue
        is_counted = stage.is_ring or stage.way == "upload"
        for sender in stage.senders:
            num_messages = stage.num_in_row if is_counted else len(receivers) - (sender in receivers)
            sent[sender] = sent.get(sender, 0.0) + num_messages / stage.num_shards
    return max(sent.values())


def _require_all(pattern: MessagePattern, senders: Sequence[int], members: Sequence[int]) -> None:
    if len(senders) != len(members):
        raise ValueError(
            f"{type(pattern).__name__}() needs a payload from each of the {len(members)} members, got {len(senders)}; "
            f"take AllGatherMessages() or StarMessages() where some send nothing"
        )
