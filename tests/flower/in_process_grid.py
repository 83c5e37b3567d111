"""A Flower grid that calls the client app in this process, with one kept context for each node."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity


class InProcessGrid(Grid):
    """Nodes 1000, 1001 and so on; each message is serialised and read again, as a wire would do.

    Attributes:
        app: What the nodes run.
        contexts: State of each node.
        away: Nodes that do not answer.
        between: Replaces the replies of a round, as a hostile client would; each gets and returns a list.
        sent_bytes: Of all messages and replies that crossed, by node.
    """

    def __init__(self, app: ClientApp, nodes: int, node_config: Callable[[int], dict[str, Any]] = lambda _: {}) -> None:
        # private in Flower 1.42: messages take their sender from here
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.app = app
        self.contexts = {
            1000 + node: Context(1, 1000 + node, {"partition-id": node, **node_config(node)}, RecordDict(), {})
            for node in range(nodes)
        }
        self.away: set[int] = set()
        self.between: Callable[[list[Message]], list[Message]] = lambda replies: replies
        self.received: list[Message] = []

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            if node in self.away:
                continue
            arrived = again(message)
            kept = again(arrived)  # a mod changes what arrives
            self.received.append(kept)
            try:
                reply = self.app(arrived, self.contexts[node])
            except Exception as error:
                reply = Message(Error(code=1, reason=str(error)), reply_to=kept)
            self.contexts[node].state = _through_bytes(self.contexts[node].state)
            replies.append(again(reply))
        return self.between(replies)


def again(message: Message) -> Message:
    """Return what another process would read of a message."""
    if message.has_error():
        return message
    copy = Message(RecordDict(), dst_node_id=1, message_type="train")
    copy.__dict__["_metadata"] = message.metadata
    copy.__dict__["_content"] = _through_bytes(message.content)
    return copy


def _through_bytes(record: RecordDict) -> RecordDict:
    contents = {name: one.deflate() for name, one in get_all_nested_objects(record).items()}
    return inflate_object_from_contents(record.object_id, contents)


def walking_app(mods: list[Any], step: Callable[[int, int, dict[str, Any]], dict[str, Any]]) -> ClientApp:
    """Return an app whose node returns `step(node, round, arrays)`; node n has n + 1 examples."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        node = int(context.node_config["partition-id"])
        arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
        round = int(message.content["config"]["server-round"])
        new = step(node, round, arrays)
        record = ArrayRecord({name: Array(np.asarray(array)) for name, array in new.items()})
        metrics = MetricRecord({"num-examples": node + 1, "loss": 0.5 * node})
        return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        total = float(sum(array.numpy().sum() for array in message.content["arrays"].values()))
        metrics = MetricRecord({"num-examples": 1, "total": total})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app
