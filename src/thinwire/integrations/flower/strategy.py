"""Server's side of compressed updates: any Flower strategy, fed with decoded arrays, with every byte counted.

A client's message is untrusted. One that cannot be read is refused by the node's number and the reason, and the round
goes on with the others; the strategy itself sees only plain, finite arrays of the right names and shapes.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from thinwire.averaging.aggregation_rules import Aggregate
from thinwire.errors import MissingExtra, NonFiniteError, PayloadError, refusal
from thinwire.integrations.flower.mod import RECORD, ROW, arrays_of, only_arrays, record_of
from thinwire.integrations.flower.orthogonal import OrthogonalTasks
from thinwire.integrations.flower.updates import ArrayLayout, Arrays, Broadcast, Downlink, UpdateCode, Uplink, read_row
from thinwire.transport.message import HEADER_BYTES

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
    from flwr.serverapp.strategy import Strategy
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
except ImportError as error:
    raise MissingExtra.of("flwr", extra="flower") from error

_log = logging.getLogger(__name__)
_MOST_NAMED = 20  # refusals of a round that are kept as text: a hostile client must not fill the memory


class UpdateRule(Protocol):
    """A change of the global step, after the strategy and before clients get it."""

    def project(self, before: Arrays, after: Arrays) -> Arrays:
        """Return the arrays to use in the place of `after`."""


@dataclass(kw_only=True)
class RoundBytes:
    """Bytes that a round sent, of messages as Flower serialises them, and whom it refused.

    Attributes:
        round: Number of the round.
        clients: Clients whose update counted.
        asked: Clients that were asked to train.
        up_bytes: Of all replies to training that counted.
        down_bytes: Of all messages to clients, evaluation included.
        dense_up_bytes: What the same replies would have been without a code.
        dense_down_bytes: What the same messages would have been.
        wait_s: Seconds from the messages to the replies.
        rejected: First reason for which a node was refused, of the first nodes.
        num_rejected: Number of refused replies.
        num_stale: Clients that did not hold the version that differences were for; they get a whole model next.
        num_dropped: Residuals that clients dropped.
    """

    round: int
    clients: int = 0
    asked: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    dense_up_bytes: int = 0
    dense_down_bytes: int = 0
    wait_s: float = 0.0
    rejected: dict[int, str] = field(default_factory=dict)
    num_rejected: int = 0
    num_stale: int = 0
    num_dropped: int = 0

    @property
    def ratio(self) -> float:
        """Bytes without a code over bytes sent, both directions."""
        sent = self.up_bytes + self.down_bytes
        return (self.dense_up_bytes + self.dense_down_bytes) / sent if sent else math.nan


def wrap(
    strategy: Any, uplink: Uplink, *, down: Downlink | None = None, rules: Sequence[UpdateRule] = (),
    aggregate: Aggregate | None = None,
) -> CompressedStrategy:  # fmt: skip
    """Return a strategy that decodes what clients with `client_mod(uplink)` send, and delegates all else.

    Args:
        strategy: Of Flower: FedAvg, FedAdam, Krum or another.
        uplink: What clients send; the same as theirs.
        down: Code of the global model; None sends whole models.
        rules: Applied in order to the arrays that the strategy returns.
        aggregate: Robust rule of thinwire, such as `FlagAggregator()`, that joins the clients in the strategy's place;
            the strategy gets its result as one reply, so that FedAdam and the like work on it.
    """
    return CompressedStrategy(strategy, uplink, down=down, rules=rules, aggregate=aggregate)


class CompressedStrategy(Strategy):  # type: ignore[misc]
    """A strategy over coded messages; use `wrap`.

    Attributes:
        inner: The strategy that was wrapped.
        rounds: What each round sent.
    """

    def __init__(
        self,
        inner: Any,
        uplink: Uplink,
        *,
        down: Downlink | None,
        rules: Sequence[UpdateRule],
        aggregate: Aggregate | None,
    ) -> None:
        if isinstance(inner, CompressedStrategy):
            raise refusal(
                "the strategy is wrapped already", got="two wraps", allowed="one", remedy="wrap(FedAvg(), uplink)"
            )
        self.inner, self.rounds = inner, list[RoundBytes]()
        self._uplink, self._rules, self._aggregate = uplink, tuple(rules), aggregate
        self._broadcast = Broadcast(down=down)
        self._held: dict[int, int] = {}
        self._has_mod: dict[int, bool] = {}  # of nodes that have replied to training
        self._asked: set[int] = set()
        self._code: UpdateCode | None = None
        self._sent_at, self._warned_dense = 0.0, False

    def summary(self) -> None:
        """Log the settings of the strategy that was wrapped."""
        self.inner.summary()

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterable[Any]:
        """Return the wrapped strategy's messages, coded."""
        self.rounds.append(RoundBytes(round=server_round))
        messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        self._asked = {message.metadata.dst_node_id for message in messages}
        self.rounds[-1].asked = len(messages)
        return self._coded(messages, arrays)

    def configure_evaluate(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterable[Any]:
        """Return the wrapped strategy's messages, coded: clients evaluate what they will train."""
        return self._coded(list(self.inner.configure_evaluate(server_round, arrays, config, grid)), arrays)

    def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> tuple[Any, Any]:
        """Decode the replies, refuse what cannot be read, and return what the wrapped strategy makes of the rest."""
        row = self.rounds[-1]
        row.wait_s = time.monotonic() - self._sent_at
        failed, read, sizes = [], [], dict[int, tuple[int, int]]()
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                failed.append(reply)
                continue
            try:
                if node not in self._asked:
                    raise PayloadError("it was not asked in this round")
                if node in sizes:
                    raise PayloadError("it has replied before in this round")
                content, sizes[node] = self._read(reply, server_round)
            except (PayloadError, NonFiniteError) as error:
                self._refuse(node, str(error))
                continue
            if content is not None:
                self._keep(node)
                read.append((reply, content))
        accepted = [*self._with_metrics(read)]
        row.clients = len(accepted)
        for own, dense in (sizes[reply.metadata.src_node_id] for reply in accepted):
            row.up_bytes += own
            row.dense_up_bytes += dense
        new, metrics = self._joined(server_round, accepted, failed)
        return self._ruled(new), metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Any]) -> Any:
        """Return what the wrapped strategy makes of the replies."""
        kept = []
        for reply in replies:
            if reply.has_error():
                kept.append(reply)
            elif RECORD in reply.content:
                self._note_stale(reply.metadata.src_node_id)
            else:
                self._keep(reply.metadata.src_node_id)
                kept.append(reply)
        return self.inner.aggregate_evaluate(server_round, kept)

    def end_task(self, grid: Any, arrays: Any, *, timeout: float = 3600) -> dict[str, int]:
        """Ask every node for sketches of its task, by `query.sketch`, and extend the bases of `OrthogonalTasks`.

        Args:
            grid: Of the server app.
            arrays: Model at the end of the task.
            timeout: Seconds to wait for the answers.

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
        settings = ConfigRecord({"seed": row.round, "columns": rule.columns or 0})
        content = RecordDict({"arrays": arrays, "bases": record_of(rule.settings()), "sketch": settings})
        nodes = set(grid.get_node_ids())
        messages = [Message(content, dst_node_id=node, message_type="query.sketch") for node in nodes]
        row.asked, row.down_bytes = len(messages), len(messages) * serialised_bytes(content)
        self.rounds.append(row)
        shapes = {name: array.shape for name, array in arrays_of(arrays).items() if array.ndim == 2}
        sketches = []
        for reply in grid.send_and_receive(messages, timeout=timeout):
            node = reply.metadata.src_node_id
            if reply.has_error():
                _log.warning("node %d sent no sketch: %s", node, reply.error.reason)
                continue
            try:
                if node not in nodes:
                    raise PayloadError("it was not asked, or has replied before")
                nodes.discard(node)
                found = arrays_of(reply.content["sketch"], most_bytes=8 * max(one[1] for one in shapes.values()) ** 2)
                rule.check(found, shapes)
                sketches.append((found, float(reply.content["metrics"]["num-examples"])))
            except (PayloadError, KeyError, TypeError) as error:
                self._refuse(node, str(error))
                continue
            row.up_bytes += serialised_bytes(reply.content)
        row.clients = len(sketches)
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

    def _keep(self, node: int) -> None:
        """Keep that a node holds the current version: only a reply proves it, and without the mod it holds none."""
        if self._has_mod.get(node):
            self._held[node] = self._broadcast.version

    def _coded(self, messages: list[Any], arrays: Any) -> list[Any]:
        """Put into each message what leads its client to the current version."""
        if not messages:
            return []
        own, row = arrays_of(arrays), self.rounds[-1]
        layout, broadcast = self._broadcast.advance(own), self._broadcast
        if self._code is None or self._code.layout != layout:
            self._code, self._held = UpdateCode(self._uplink.of_tier(), layout, self._uplink.tag), {}
        whole = record_of(broadcast.held) if broadcast.down is not None else None
        sizes: dict[tuple[int, int | None], tuple[int, int]] = {}
        for message in messages:
            key, record = only_arrays(message.content)
            if record is not arrays and dict(record) != dict(arrays):
                raise refusal("the strategy sends a client other arrays than the global ones",
                              got=type(self.inner).__name__, allowed="one model for all", remedy="FedAvg")  # fmt: skip
            node = message.metadata.dst_node_id
            held = self._held.get(node) if broadcast.down is not None else None
            patch = broadcast.patch_from(held) if self._has_mod.get(node, True) else None
            plain = message.content
            settings = {
                "up": self._uplink.text(), "down": "" if broadcast.down is None else broadcast.down.text(),
                "version": broadcast.version, "round": row.round, "is_whole": patch is None, "from": held or 0,
            }  # fmt: skip
            if patch is not None and held is None:
                settings["layout"] = layout.text()  # values alone lead there, and this client knows no names yet
            if patch is not None:
                record = ArrayRecord({ROW: Array(patch)})
            elif whole is not None:
                record = whole
            others = {name: one for name, one in plain.items() if name != key}
            message.content = RecordDict({key: record, **others, RECORD: ConfigRecord(settings)})
            place = (id(plain), None if patch is None else held)
            if place not in sizes:  # most clients get the same bytes, and hashing them takes its time
                sizes[place] = serialised_bytes(message.content), serialised_bytes(plain)
            row.down_bytes += sizes[place][0]
            row.dense_down_bytes += sizes[place][1]
        self._sent_at = time.monotonic()
        return messages

    def _read(self, reply: Any, server_round: int) -> tuple[Any | None, tuple[int, int]]:
        """Return a reply's content with plain arrays, its bytes, and those without a code.

        The content is None of a client that could not decode the model.
        """
        node, content, code, row = reply.metadata.src_node_id, reply.content, self._code, self.rounds[-1]
        assert code is not None, "replies come after messages"
        if RECORD in content:
            self._note_stale(node)
            return None, (0, 0)
        key, record = only_arrays(content)
        self._has_mod[node] = list(record) == [ROW]
        if not self._has_mod[node]:
            self._held.pop(node, None)
            return self._dense(content, record)
        size = serialised_bytes(content)
        # room for another codec's message too, so that its header can name the codec
        most = HEADER_BYTES + max(code.most_bytes, 8 * code.layout.numel + code.layout.raw_bytes)
        message = read_row(record[ROW].data, most_bytes=most)
        broadcast = self._broadcast
        decoded = code.decode(message, sender=node % 2**32, version=server_round, base_version=broadcast.version)
        held = None if broadcast.down is None else broadcast.vector
        arrays = record_of(decoded.arrays(broadcast.exact, held=held))
        plain = RecordDict({key: arrays, **{name: one for name, one in content.items() if name != key}})
        row.num_dropped += decoded.has_dropped
        return plain, (size, serialised_bytes(plain))

    def _dense(self, content: Any, record: Any) -> tuple[Any, tuple[int, int]]:
        """Accept plain arrays, of a client without the mod."""
        code = self._code
        assert code is not None, "replies come after messages"
        most = 8 * max([*code.layout.sizes, 1])
        arrays = arrays_of(record, most_bytes=most)
        code.layout.check(ArrayLayout.of(arrays), what="an update without a code")
        if not all(bool(torch.from_numpy(array.copy()).isfinite().all()) for array in arrays.values()):
            raise NonFiniteError("an update without a code holds NaN or infinity")
        if not self._warned_dense:
            _log.warning("a client sends its arrays without a code; add client_mod(uplink) to the mods of its app")
            self._warned_dense = True
        size = serialised_bytes(content)
        return content, (size, size)

    def _with_metrics(self, read: list[tuple[Any, Any]]) -> Iterable[Any]:
        """Yield the replies whose metrics the strategy can use: one odd set of keys would end its round for all."""
        keys = [self._metric_keys(content) for _, content in read]
        [(usual, _)] = Counter(keys).most_common(1) or [(None, 0)]
        weight = getattr(self.inner, "weighted_by_key", None)
        for (reply, content), found in zip(read, keys, strict=True):
            value = next(iter(content.metric_records.values())).get(weight, 1) if found is not None else 1
            if found is None or found != usual:
                self._refuse(reply.metadata.src_node_id, "its metrics have other names than those of most clients")
            elif not isinstance(value, int | float) or not 0 <= value < math.inf:
                self._refuse(reply.metadata.src_node_id, f"its {weight} is {str(value)[:50]}, which is no weight")
            else:
                reply.content = content
                yield reply

    @staticmethod
    def _metric_keys(content: Any) -> tuple[str, ...] | None:
        records = list(content.metric_records.values())
        return tuple(sorted(records[0])) if len(records) == 1 else None

    def _joined(self, server_round: int, accepted: list[Any], failed: list[Any]) -> tuple[Any, Any]:
        """Let the strategy join the replies, or the robust rule in its place."""
        if self._aggregate is None or not accepted:
            found: tuple[Any, Any] = self.inner.aggregate_train(server_round, [*accepted, *failed])
            return found
        assert self._code is not None, "replies come after messages"
        layout = self._code.layout
        all_arrays = [arrays_of(only_arrays(reply.content)[1]) for reply in accepted]
        stack = torch.stack([layout.flat(arrays).float() for arrays in all_arrays])
        contents = [reply.content for reply in accepted]
        joined = self._aggregate(stack)
        parts = iter(torch.split(joined, [layout.sizes[place] for place in layout.coded]))
        arrays = {
            name: next(parts).numpy().reshape(shape) if kind == "float" else all_arrays[0][name]
            for name, shape, kind in zip(layout.names, layout.shapes, layout.kinds, strict=True)
        }  # fmt: skip
        key, _ = only_arrays(contents[0])
        metrics = self.inner.train_metrics_aggr_fn(contents, self.inner.weighted_by_key)
        kept = {name: one for name, one in contents[0].items() if name != key}
        accepted[0].content = RecordDict({key: record_of(arrays), **kept})
        return self.inner.aggregate_train(server_round, [accepted[0], *failed])[0], metrics

    def _ruled(self, new: Any) -> Any:
        if new is None or not self._rules:
            return new
        before, after = self._broadcast.own, arrays_of(new)
        for rule in self._rules:
            after = rule.project(before, after)
        return record_of(after)

    def _note_stale(self, node: int) -> None:
        self._held.pop(node, None)
        self.rounds[-1].num_stale += 1

    def _refuse(self, node: int, reason: str) -> None:
        row = self.rounds[-1]
        row.num_rejected += 1
        self._held.pop(node, None)
        if node not in row.rejected and len(row.rejected) < _MOST_NAMED:
            row.rejected[node] = reason[:300]
            _log.warning("round %d: the update of node %d is refused: %s", row.round, node, reason[:300])


def serialised_bytes(content: Any) -> int:
    """Return the bytes of a message's content as Flower serialises it, object by object."""
    return sum(len(one.deflate()) for one in get_all_nested_objects(content).values())
