"""Server's side of compressed updates: any Flower strategy, fed with decoded arrays, with every byte counted.

A client's message is untrusted. One that cannot be read is refused by the node's number and the reason, and the round
goes on with the others; the strategy itself sees only plain, finite arrays of the right names and shapes.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from thinwire.averaging.aggregation_rules import Aggregate
from thinwire.errors import MissingExtra, NonFiniteError, PayloadError, refusal
from thinwire.integrations.flower.mod import RECORD, ROW, arrays_of, only_arrays, record_of
from thinwire.integrations.flower.orthogonal import OrthogonalTasks
from thinwire.integrations.flower.updates import (
    ArrayLayout,
    Arrays,
    Broadcast,
    Downlink,
    UpdateCode,
    Uplink,
    check_finite,
    read_row,
    signs_of,
)
from thinwire.runlog.writer import JsonlWriter
from thinwire.transport.message import HEADER_BYTES

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
    from flwr.serverapp.strategy import Strategy
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
except ImportError as error:
    raise MissingExtra.of("flwr", extra="flower") from error

_log = logging.getLogger(__name__)
_MOST_NAMED = 20  # refusals of a round that are kept as text: a hostile client must not fill the memory
_MOST_WEIGHT = 2.0**53  # of a client: sums of weights stay finite


class UpdateRule(Protocol):
    """A change of the global step, after the strategy and before clients get it."""

    def project(self, before: Arrays, after: Arrays) -> Arrays:
        """Return the arrays to use in the place of `after`."""


@dataclass(kw_only=True)
class RoundBytes:
    """Bytes that a round sent, of messages as Flower serialises them, and whom it refused."""

    round: int
    clients: int = 0  # whose update counted
    asked: int = 0
    up_bytes: int = 0  # of all replies that counted
    down_bytes: int = 0  # of all messages to clients, evaluation included
    dense_up_bytes: int = 0  # of the same replies without a code
    dense_down_bytes: int = 0
    wait_s: float = 0.0  # from the messages to the replies
    rejected: dict[int, str] = field(default_factory=dict)  # first reason for each of the first nodes
    num_rejected: int = 0  # refused replies
    num_stale: int = 0  # clients that lacked the version that differences were for; they get a whole model next
    num_dropped: int = 0  # old residuals that clients dropped

    @property
    def ratio(self) -> float:
        """Bytes without a code over bytes sent, both directions."""
        sent = self.up_bytes + self.down_bytes
        return (self.dense_up_bytes + self.dense_down_bytes) / sent if sent else math.nan


@dataclass(kw_only=True)
class _Node:
    """A client, as its replies show it."""

    has_mod: bool | None = None  # None before its first reply to training
    tier: int | None = None  # number of its tier; None as long as it is unknown
    sent_tier: int = 0  # tier of the model that it was sent last
    held: int | None = None  # version that it holds; None if that is unknown
    counted: int = 0  # the last round whose update of it counted


class CompressedStrategy(Strategy):  # type: ignore[misc]
    """A strategy that decodes what clients with `client_mod(uplink)` send, and delegates all else.

    Args:
        strategy: Of Flower: FedAvg, FedAdam, Krum or another; the attribute `inner`.
        uplink: What clients send; the same as theirs.
        down: Code of the global model; None sends whole models.
        rules: Applied in order to the arrays that the strategy returns.
        aggregate: Robust rule of thinwire, such as `FlagAggregator()`, that joins the clients in the strategy's place;
            the strategy gets its result as one reply, so that FedAdam and the like work on it.
        log: File of the run log that gets one JSON line a round; None writes none.

    Attributes:
        rounds: What each round sent.
    """

    def __init__(
        self, strategy: Any, uplink: Uplink, *, down: Downlink | None = None, rules: Sequence[UpdateRule] = (),
        aggregate: Aggregate | None = None, log: Path | str | None = None,
    ) -> None:  # fmt: skip
        if isinstance(strategy, CompressedStrategy):
            raise refusal("the strategy is wrapped already", got="two wraps", allowed="one",
                          remedy="wrap(FedAvg(), uplink)")  # fmt: skip
        self.inner, self.rounds = strategy, list[RoundBytes]()
        self._uplink, self._rules, self._aggregate = uplink, tuple(rules), aggregate
        self._broadcast, self._nodes = Broadcast(down=down), defaultdict[int, _Node](_Node)
        self._asked, self._stale = set[int](), set[int]()
        self._code: UpdateCode | None = None
        self._sent_at, self._warned_dense = 0.0, False
        self._run_log = None if log is None else JsonlWriter(Path(log), warn=_log.warning)

    def summary(self) -> None:
        """Log the settings of the strategy that was wrapped."""
        self.inner.summary()

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterable[Any]:
        """Return the wrapped strategy's messages, coded."""
        self.rounds.append(RoundBytes(round=server_round))
        messages = self._coded(list(self.inner.configure_train(server_round, arrays, config, grid)), arrays)
        self.rounds[-1].asked = len(messages)
        return messages

    def configure_evaluate(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterable[Any]:
        """Return the wrapped strategy's messages, coded: clients evaluate what they will train."""
        return self._coded(list(self.inner.configure_evaluate(server_round, arrays, config, grid)), arrays)

    def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> tuple[Any, Any]:
        """Decode the replies, refuse what cannot be read, and return what the wrapped strategy makes of the rest."""
        row = self.rounds[-1]
        row.wait_s = time.monotonic() - self._sent_at
        failed, read, sizes = [], [], dict[int, tuple[int, int]]()
        for reply in self._admitted(replies):
            node = reply.metadata.src_node_id
            if reply.has_error():
                if self._nodes[node].has_mod is None:  # without the mod an app cannot read coded arrays
                    self._nodes[node].has_mod = False
                failed.append(reply)
                continue
            try:
                content, sizes[node] = self._read(reply, server_round)
            except (PayloadError, NonFiniteError) as error:
                self._refuse(node, str(error))
                continue
            read.append((reply, content))
        accepted = self._with_metrics(read)
        row.clients = len(accepted)
        for reply in accepted:
            own, dense = sizes[reply.metadata.src_node_id]
            row.up_bytes, row.dense_up_bytes = row.up_bytes + own, row.dense_up_bytes + dense
            self._nodes[reply.metadata.src_node_id].counted = server_round
        new, metrics = self._joined(server_round, accepted, failed)
        if new is not None and self._rules:
            after = arrays_of(new)
            for rule in self._rules:
                after = rule.project(self._broadcast.own, after)
            new = record_of(after)
        return new, metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Any]) -> Any:
        """Return what the wrapped strategy makes of the replies."""
        admitted = [*self._admitted(replies)]
        for reply in admitted:
            if not reply.has_error():
                self._keep(reply.metadata.src_node_id)
        found = self.inner.aggregate_evaluate(server_round, [
            *self._with_metrics([(reply, reply.content) for reply in admitted if not reply.has_error()]),
            *(reply for reply in admitted if reply.has_error()),
        ])  # fmt: skip
        self._write()
        return found

    def end_task(self, grid: Any, arrays: Any, *, timeout: float = 3600) -> dict[str, int]:
        """Ask every node for sketches of its task, by `query.sketch`, and extend the bases of `OrthogonalTasks`.

        The arrays are the model at the end of the task; answers are waited for `timeout` seconds.

        Returns:
            The rank of each basis.

        Raises:
            ValueError: The strategy has no such rule.
        """
        rule = next((one for one in self._rules if isinstance(one, OrthogonalTasks)), None)
        if rule is None:
            raise refusal("the strategy learns no basis", got="no OrthogonalTasks", allowed="one in rules",
                          remedy="wrap(strategy, uplink, rules=[OrthogonalTasks()])")  # fmt: skip
        row = RoundBytes(round=0 if not self.rounds else self.rounds[-1].round)
        self.rounds.append(row)
        settings = ConfigRecord({"seed": row.round, "columns": rule.columns or 0})
        content = RecordDict({"arrays": arrays, "bases": record_of(rule.settings()), "sketch": settings})
        shapes = {name: array.shape for name, array in arrays_of(arrays).items() if array.ndim == 2}
        most, sketches, nodes = 8 * max(one[1] for one in shapes.values()) ** 2, [], set(grid.get_node_ids())
        row.asked = len(nodes)
        for _ in range(2):  # once more to those that lacked the version that differences are for
            messages = [Message(content, dst_node_id=node, message_type="query.sketch") for node in sorted(nodes)]
            for reply in self._admitted(grid.send_and_receive(self._coded(messages, arrays), timeout=timeout)):
                node = reply.metadata.src_node_id
                if reply.has_error():
                    _log.warning("node %d sent no sketch: %s", node, reply.error.reason)
                    continue
                try:
                    found = arrays_of(reply.content["sketch"], most_bytes=most)
                    count = float(reply.content["metrics"]["num-examples"])
                    rule.check(found, shapes, count)
                except (PayloadError, KeyError, TypeError, AttributeError, OverflowError) as error:
                    self._refuse(node, str(error))
                    continue
                row.up_bytes += serialised_bytes(reply.content)
                sketches.append((found, count))
            nodes = self._stale
        row.clients = len(sketches)
        self._write()
        return rule.extend(sketches)

    def report(self) -> str:
        """Return a table of the rounds: kB a client, as Flower serialises messages, and whom a round refused."""
        lines = ["round  clients  kB up  kB down  ratio  wait s  rejected"]
        for row in self.rounds:
            up, down = row.up_bytes / max(1, row.clients) / 1000, row.down_bytes / max(1, row.asked) / 1000
            numbers = f"{up:5.2f}  {down:7.2f}  {row.ratio:5.1f}  {row.wait_s:6.1f}  {row.num_rejected:8}"
            lines.append(f"{row.round:5}  {row.clients:7}  {numbers}")
            if row.num_dropped:
                lines.append(f"       {row.num_dropped} clients dropped an old residual")
            lines += [f"       node {node}: {reason}" for node, reason in row.rejected.items()]
        return "\n".join(lines)

    def _write(self) -> None:
        if self._run_log is not None:
            row = self.rounds[-1]
            ratio = row.ratio if math.isfinite(row.ratio) else None
            self._run_log.write(json.dumps({"kind": "round", **asdict(row), "ratio": ratio}), is_last=True)

    def _admitted(self, replies: Iterable[Any]) -> Iterator[Any]:
        """Yield the first reply of each node that was asked and holds the version; refuse or note all others."""
        seen = set[int]()
        for reply in replies:
            node = reply.metadata.src_node_id
            if node not in self._asked or node in seen:
                why = "it has replied before in this round" if node in seen else "it was not asked in this round"
                self._refuse(node, why)
                continue
            seen.add(node)
            if not reply.has_error() and RECORD in reply.content:
                self._nodes[node].held = None
                self._stale.add(node)
                self.rounds[-1].num_stale += 1
            else:
                yield reply

    def _keep(self, node: int, *, tier: int | None = None) -> None:
        """Keep that a node holds the current version: only a reply proves it, and without the mod it holds none."""
        own = self._nodes[node]
        own.held = self._broadcast.version if own.has_mod else None
        if tier is not None and tier < len(self._broadcast.codes):
            own.tier = tier
        if own.tier is not None and own.tier != own.sent_tier:
            own.held = None

    def _coded(self, messages: list[Any], arrays: Any) -> list[Any]:
        """Put into each message what leads its client to the current version."""
        self._asked, self._stale = {message.metadata.dst_node_id for message in messages}, set()
        if not messages:
            return []
        broadcast, row = self._broadcast, self.rounds[-1]
        layout = broadcast.advance(arrays_of(arrays))
        if self._code is None or self._code.layout != layout:
            self._code = UpdateCode(self._uplink.of_tier(), layout, self._uplink.tag)
            for one in self._nodes.values():
                one.held = None
        wholes = [record_of(held) for held in broadcast.held] if broadcast.down is not None else []
        sizes: dict[tuple[Any, ...], tuple[int, int]] = {}
        for message in messages:
            key, record = only_arrays(message.content, beside="bases")
            if record is not arrays and dict(record) != dict(arrays):
                raise refusal("the strategy sends a client other arrays than the global ones",
                              got=type(self.inner).__name__, allowed="one model for all", remedy="FedAvg")  # fmt: skip
            node, plain = self._nodes[message.metadata.dst_node_id], message.content
            node.sent_tier = tier = broadcast.smallest if node.tier is None else node.tier
            patch = None if node.has_mod is False else broadcast.patch_from(node.held, tier=tier)
            settings = {
                "up": self._uplink.text(), "down": broadcast.codes[tier].text() if wholes else "",
                "version": broadcast.version, "round": row.round, "counted": node.counted,
                "from": -1 if patch is None else node.held or 0,
            }  # fmt: skip
            if patch is not None and node.held is None:
                settings["layout"] = layout.text()  # values alone lead there, and this client knows no names yet
            if patch is not None:
                record = ArrayRecord({ROW: Array(patch)})
            elif wholes:
                record = wholes[tier]
            message.content = RecordDict({**plain, key: record, RECORD: ConfigRecord(settings)})
            place = (id(plain), tier, settings["from"], node.counted)
            if place not in sizes:  # most clients get the same bytes, and hashing them takes its time
                sizes[place] = serialised_bytes(message.content), serialised_bytes(plain)
            row.down_bytes += sizes[place][0]
            row.dense_down_bytes += sizes[place][1]
        self._sent_at = time.monotonic()
        return messages

    def _read(self, reply: Any, server_round: int) -> tuple[Any, tuple[int, int]]:
        """Return a reply's content with plain arrays, its bytes, and those that it would have without a code."""
        number, content, code, broadcast = reply.metadata.src_node_id, reply.content, self._code, self._broadcast
        assert code is not None, "replies come after messages"
        key, record = only_arrays(content)
        size, node, layout = serialised_bytes(content), self._nodes[number], code.layout
        node.has_mod = list(record) == [ROW]
        held = None if broadcast.down is None else broadcast.vectors[node.sent_tier]
        if node.has_mod:
            # room for another codec's message too, so that its header can name the codec
            most = HEADER_BYTES + max(code.most_bytes, 8 * layout.numel + layout.raw_bytes)
            arrays, flags = code.decode(
                read_row(record[ROW].data, most_bytes=most), broadcast.exact, held=held, sender=number % 2**32,
                version=server_round, base_version=broadcast.version,
            )  # fmt: skip
            self.rounds[-1].num_dropped += flags & 1
            self._keep(number, tier=flags >> 1)
        else:
            arrays = self._dense(code, record, held)
        plain = RecordDict({**content, key: record_of(arrays)})
        return plain, (size, serialised_bytes(plain))

    def _dense(self, code: UpdateCode, record: Any, held: torch.Tensor | None) -> Arrays:
        """Accept plain arrays, of a client without the mod, as if it had coded them without loss."""
        layout = code.layout
        arrays = arrays_of(record, most_bytes=8 * max([*layout.sizes, 1]))
        layout.check(ArrayLayout.of(arrays), what="an update without a code")
        check_finite(arrays)
        if not self._warned_dense:
            _log.warning("a client sends its arrays without a code; add client_mod(uplink) to the mods of its app")
            self._warned_dense = True
        vector, types = layout.flat(arrays), [arrays[layout.names[place]].dtype for place in layout.coded]
        if code.code.sends == "signs":
            return layout.arrays(signs_of(vector), types, arrays)
        if held is None or code.code.sends != "differences":
            return arrays
        return layout.arrays(self._broadcast.exact + (vector - held), types, arrays)

    def _with_metrics(self, read: list[tuple[Any, Any]]) -> list[Any]:
        """Return the replies whose metrics the strategy can use: one odd set of keys would end its round for all."""
        forms = [self._form(content) for _, content in read]
        [(usual, _)] = Counter(forms).most_common(1) or [(None, 0)]
        name, accepted = getattr(self.inner, "weighted_by_key", None), list[tuple[Any, float]]()
        for (reply, content), found in zip(read, forms, strict=True):
            weight = self._weight(content) if found is not None else 1
            if found is None or found != usual:
                self._refuse(reply.metadata.src_node_id, "its metrics have other names than those of most clients")
            elif not isinstance(weight, int | float) or not 0 <= weight <= _MOST_WEIGHT:
                self._refuse(reply.metadata.src_node_id, f"its {name} is {str(weight)[:50]}, which is no weight")
            else:
                reply.content = content
                accepted.append((reply, weight))
        if any(weight for _, weight in accepted):
            return [reply for reply, _ in accepted]
        for reply, _ in accepted:
            self._refuse(reply.metadata.src_node_id, f"its {name} is 0, as of all clients")
        return []

    def _weight(self, content: Any) -> Any:
        return next(iter(content.metric_records.values())).get(getattr(self.inner, "weighted_by_key", None), 1)

    @staticmethod
    def _form(content: Any) -> tuple[Any, ...] | None:
        """Return what must be the same of all replies: keys of the records, names of metrics, and lengths of lists."""
        if len(content.metric_records) != 1:
            return None
        [(key, metrics)] = content.metric_records.items()
        lengths = ((name, len(one) if isinstance(one, list) else -1) for name, one in metrics.items())
        return (*content.array_records, key, *sorted(lengths))

    def _joined(self, server_round: int, accepted: list[Any], failed: list[Any]) -> tuple[Any, Any]:
        """Let the strategy join the replies, or the robust rule in its place."""
        if self._aggregate is None or not accepted:
            found: tuple[Any, Any] = self.inner.aggregate_train(server_round, [*accepted, *failed])
            return found
        assert self._code is not None, "replies come after messages"
        try:
            self._aggregate.check(len(accepted))
        except ValueError as error:
            _log.warning("round %d keeps the model: %s", server_round, error)
            return None, None
        layout, contents = self._code.layout, [reply.content for reply in accepted]
        all_arrays = [arrays_of(only_arrays(content)[1]) for content in contents]
        joined = self._aggregate(torch.stack([layout.flat(arrays).float() for arrays in all_arrays]))
        arrays = layout.arrays(joined, ["float32"] * len(layout.coded), all_arrays[0])
        metrics = self.inner.train_metrics_aggr_fn(contents, self.inner.weighted_by_key)
        first = max(accepted, key=lambda reply: self._weight(reply.content))  # one with a weight: it is divided by it
        key, _ = only_arrays(first.content)
        first.content = RecordDict({**first.content, key: record_of(arrays)})
        return self.inner.aggregate_train(server_round, [first, *failed])[0], metrics

    def _refuse(self, node: int, reason: str) -> None:
        row = self.rounds[-1]
        row.num_rejected += 1
        if node in self._nodes:
            self._nodes[node].held = None
        if node not in row.rejected and len(row.rejected) < _MOST_NAMED:
            row.rejected[node] = reason[:300]
            _log.warning("round %d: the update of node %d is refused: %s", row.round, node, reason[:300])


wrap = CompressedStrategy


def serialised_bytes(content: Any) -> int:
    """Return the bytes of a message's content as Flower serialises it, object by object."""
    return sum(len(one.deflate()) for one in get_all_nested_objects(content).values())
