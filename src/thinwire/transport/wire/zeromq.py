"""ZeroMQ for the modules of the wire: the one place that imports pyzmq, and says how to install it."""

from __future__ import annotations

from thinwire.errors import MissingExtra

try:
    import zmq
    from zmq.utils import z85
    from zmq.utils.monitor import recv_monitor_message
except ModuleNotFoundError as error:
    raise MissingExtra.of("pyzmq", extra="wire") from error

__all__ = ["recv_monitor_message", "z85", "zmq"]
