"""The owner of texts and labels: a model whose middle layers lie at a `BodyServer`."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from thinwire.adaptive_timeout import AdaptiveTimeout
from thinwire.codecs.activation_code import ActivationCode
from thinwire.elastic.invitation import Invitation, read_invitation
from thinwire.errors import ConnectError, DeadlineExceeded, NonFiniteError, PayloadError, ThinwireError, refusal
from thinwire.split.messages import VERSION, Assembly, Message, frames, keys_of, set_split_options
from thinwire.transport.addresses import host_port, needs_ipv6
from thinwire.transport.secret import Secret, read_secret
from thinwire.transport.wire.zeromq import recv_monitor_message, zmq

_REDIAL_MS, _LONGEST_REDIAL_MS = 200, 2000
_POLL_MS, _SEND_MS = 50, 2
# An answer may take so many times the longest one so far, and at least this long.
_SLACK, _LEAST_ANSWER_S, _SLOWEST_BYTES_PER_S = 20.0, 60.0, 10_000.0
# Calls of one step whose gradients trained layers wait for.
_MOST_CALLS = 1024
# Times that a server may ask for the same pass again, as where many clients share its memory.
_MOST_REPEATS = 8


def connect(
    address: str, *, secret: Secret | Path | str | None = None, code: ActivationCode | None = None,
    patience_s: float = 600.0,
) -> RemoteBody:  # fmt: skip
    """Connect to the layers that `thinwire split serve` serves.

    Args:
        address: `HOST:PORT`, or `thinwire://HOST:PORT/SECRET`.
        secret: The secret that both owners have, or its file; not where the address holds it.
        code: What crosses the wire; by default 8 bits forward and 4 backward.
        patience_s: Seconds for which a server may be away, before the first answer and later.

    Returns:
        The layers, as a module; see `around`.

    Raises:
        ValueError: The address or the file is none, or both hold a secret, or neither.
        ConnectError: Nobody answered, or the server refused this client.
    """
    found = read_invitation(address)
    if (found.secret is None) == (secret is None):
        raise refusal(
            "the secret of both owners must come once", got="two" if secret is not None else "none",
            allowed="one in the address, or secret=", remedy="secret='job.secret', the file of thinwire secret",
        )  # fmt: skip
    own = secret if isinstance(secret, Secret) else read_secret(Path(secret)) if secret is not None else found.secret
    assert own is not None, "one of both is there"
    return RemoteBody(found, secret=own, code=code or ActivationCode(), patience_s=patience_s)


class RemoteBody(nn.Module):
    """Middle layers of a model at another host; a module without parameters.

    A forward pass sends its input and waits for the output; a backward pass likewise. Where the connection breaks, or
    the server was killed and comes back, what is not answered is sent again: the result is the same.

    Args:
        server: Where it is.
        secret: Of both owners.
        code: What crosses the wire.
        patience_s: Seconds for which a server may be away.

    Raises:
        ConnectError: Nobody answered, or the server refused this client.

    Attributes:
        width: Width of the hidden states.
        layers: Numbers of the layers that the server has.
        is_trained: Whether the server trains them, see `step`.
        sent_bytes: Payload bytes sent so far, of forward passes and of gradients, each counted once per sending.
        received_bytes: Payload bytes received so far.
    """

    def __init__(self, server: Invitation, *, secret: Secret, code: ActivationCode, patience_s: float) -> None:
        super().__init__()
        self._server, self._code, self._patience_s = server, code, patience_s
        # a compiled model leaves it as it is
        self._apply_remote: Any = torch.compiler.disable(_Remote.apply)  # type: ignore[no-untyped-call]
        self._session = secrets.token_hex(16)
        self._answers = AdaptiveTimeout()
        self._calls, self._step = 0, 1
        self._generation = ""
        # of trained layers: messages and payloads of the gradients of this step, to send again to a new server
        self._unapplied: dict[int, tuple[tuple[Message, Tensor], tuple[Message, Tensor]]] = {}
        self._lock = threading.RLock()
        self.sent_bytes = {"forward": 0, "gradient": 0}
        self.received_bytes = {"hidden": 0, "input_gradient": 0}
        self._expected: dict[str, int] = {}
        self._keys = keys_of(secret, side="client"), keys_of(secret, side="server")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._welcome: Message = {}
        self._open()
        try:
            self._ask({"kind": "hello"}, None)
        except BaseException:
            self.close()
            raise
        self.width = int(self._welcome["width"])
        self.layers = range(*map(int, self._welcome["layers"].split(":")))
        self.is_trained = bool(self._welcome["is_trained"])

    def forward(self, hidden: Tensor, real: Tensor | None = None) -> Tensor:
        """Return the layers' output.

        Args:
            hidden: (batch, seq, width), any floating dtype.
            real: (batch, seq) bool, which tokens are no padding; None where all are real.

        Returns:
            Same shape, dtype and device.

        Raises:
            ValueError: A shape or dtype is wrong, or the connection is closed.
            NonFiniteError: There is NaN or infinity on either side.
            ConnectError: The server was away for longer than `patience_s`, or came back with other layers.
            DeadlineExceeded: It is connected, and has not answered for far longer than ever before.
        """
        self._refuse_closed()
        most = int(self._welcome["most_tokens"])
        if hidden.ndim != 3 or hidden.shape[2] != self.width or not 1 <= hidden[..., 0].numel() <= most:
            raise refusal(
                "hidden states do not fit the server's layers", got=tuple(hidden.shape),
                allowed=f"(batch, seq, {self.width}) with 1 to {most} tokens",
                remedy="a smaller batch, or --most-tokens at the server",
            )  # fmt: skip
        if real is not None and (real.dtype != torch.bool or real.shape != hidden.shape[:2]):
            raise refusal(
                "the marks of real tokens do not fit the hidden states", got=f"{tuple(real.shape)} {real.dtype}",
                allowed=f"{tuple(hidden.shape[:2])} torch.bool", remedy="real=attention_mask.bool()",
            )  # fmt: skip
        # trained layers need the gradient also where the head is frozen
        has_grad = torch.is_grad_enabled()
        is_anchored = has_grad and self.is_trained and not hidden.requires_grad
        anchor = hidden.detach().requires_grad_() if is_anchored else hidden
        found: Tensor = self._apply_remote(anchor, real, self, has_grad)
        return found

    def step(self) -> None:
        """Let the server apply the gradients of the calls since the last step; for frozen layers, nothing happens.

        Call it after `optimizer.step()`.

        Raises:
            ConnectError: The server was away for too long.
        """
        self._refuse_closed()
        if not self.is_trained or not self._unapplied:
            return
        with self._lock:
            self._ask({"kind": "apply", "step": self._step, "calls": list(self._unapplied)}, None)
            self._step += 1
            self._unapplied.clear()

    def close(self) -> None:
        """Close the connection; may be called twice."""
        with self._lock:
            if not self._context.closed:
                self._close_socket()
                self._context.term()

    def __reduce__(self) -> Any:
        raise refusal(
            "layers at another host cannot be copied or pickled", got="their connection",
            allowed="one connection a client", remedy="model.state_dict(), or a second connect()",
        )  # fmt: skip

    def _refuse_closed(self) -> None:
        if self._context.closed:
            raise refusal("the connection to the layers is closed", got="a call after close()",
                          allowed="calls before it", remedy="connect() once more")  # fmt: skip

    def _open(self) -> None:
        """Open a socket; each connection has its own, so that it sees nothing of an earlier one."""
        (own, server), plug = self._keys, self._context.socket(zmq.DEALER)
        set_split_options(plug)
        # never the byte zero first: ZeroMQ keeps such names for itself
        plug.setsockopt(zmq.IDENTITY, b"c" + secrets.token_bytes(15))
        plug.setsockopt(zmq.CURVE_SERVERKEY, server.public)
        plug.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
        plug.setsockopt(zmq.CURVE_SECRETKEY, own.private)
        plug.setsockopt(zmq.RECONNECT_IVL, _REDIAL_MS)
        plug.setsockopt(zmq.RECONNECT_IVL_MAX, _LONGEST_REDIAL_MS)
        plug.setsockopt(zmq.IPV6, needs_ipv6(self._server.host))
        self._monitor = plug.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        plug.connect(f"tcp://{host_port(self._server.host, self._server.port)}")
        self._socket, self._is_connected, self._is_welcome, self._is_in_exchange = plug, False, False, False

    def _reopen(self, away_s: float) -> float:
        """Open another connection; return since when the server is away."""
        # a handshake that fails, as with another secret, is no sign of the server: patience goes on running
        if self._is_welcome:
            away_s = time.monotonic()
        else:
            self._check_time_away(away_s)
            time.sleep(_REDIAL_MS / 1000)
        self._close_socket()
        self._open()
        return away_s

    def _close_socket(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def send_forward(
        self, hidden: Tensor, real: Tensor | None, *, trains: bool
    ) -> tuple[Tensor, tuple[Message, Tensor]]:
        """Send one pass; return the output and what a new server needs to compute it again."""
        with self._lock:
            self._calls += 1
            payload = self._code.encode(hidden, is_forward=True, source=f"call {self._calls}, input of the body").cpu()
            if real is not None:
                bits = nn.functional.pad(real.reshape(-1).cpu().to(torch.uint8), (0, -real.numel() % 8)).reshape(-1, 8)
                weights = torch.tensor([1 << place for place in range(8)], dtype=torch.uint8)
                payload = torch.cat([payload, (bits * weights).sum(1, dtype=torch.uint8)])
            message: Message = {
                "kind": "forward", "call": self._calls, "batch": hidden.shape[0], "seq": hidden.shape[1],
                "masked": real is not None, "trains": trains, "bytes": payload.numel(),
            }  # fmt: skip
            _, answer = self._ask(message, payload)
            out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
            self._code.decode(answer.to(hidden.device), out, is_forward=True, source=f"call {self._calls}, output")
            return out, (message, payload)

    def send_gradient(self, forward: tuple[Message, Tensor], gradient: Tensor) -> Tensor:
        """Send the gradient of a pass's output; return that of its input."""
        with self._lock:
            number = forward[0]["call"]
            coded = self._code.encode(gradient, is_forward=False, source=f"call {number}, gradient of the output").cpu()
            message: Message = {"kind": "gradient", "call": number, "step": self._step, "bytes": coded.numel()}
            if self.is_trained:
                if len(self._unapplied) >= _MOST_CALLS:
                    raise refusal("the server's layers wait for a step", got=f"{_MOST_CALLS} backward passes",
                                  allowed="fewer between two steps", remedy="body.step()")  # fmt: skip
                self._unapplied[number] = forward, (message, coded)
            _, answer = self._ask(message, coded, before=forward)
            out = torch.empty_like(gradient, memory_format=torch.contiguous_format)
            self._code.decode(answer.to(gradient.device), out, is_forward=False, source=f"call {number}, input")
            return out

    def _ask(
        self, message: Message, payload: Tensor | None, *, before: tuple[Message, Tensor] | None = None
    ) -> tuple[Message, Tensor]:
        """Send a message until it is answered.

        Args:
            message: What to send.
            payload: Its payload.
            before: Of a gradient, the pass that a server which does not know it must compute first.
        """
        self._refuse_closed()
        if self._is_in_exchange:  # an interrupted one, whose answer may still come: a new connection never sees it
            self._close_socket()
            self._open()
        away_s = began_s = time.monotonic()
        num_missing = num_breaks = 0
        while True:
            try:
                self._watch()
                if not self._is_welcome:
                    self._introduce(away_s)
                if message["kind"] == "hello":
                    return self._welcome, torch.empty(0, dtype=torch.uint8)
                answer, found = self._exchange(message, payload, away_s=away_s)
                if answer["kind"] != "missing":
                    return answer, found
                num_missing += 1
                if num_missing > _MOST_REPEATS:
                    raise ThinwireError(
                        f"the owner of the layers lost calls {answer['calls'][:4]} {num_missing} times; they were sent "
                        f"again each time; raise --most-bytes there"
                    )
                self._send_missing(answer["calls"], message, before=before, away_s=away_s)
            except _Disconnected:
                num_breaks, tried_s = num_breaks + 1, time.monotonic() - began_s
                if num_breaks > _MOST_REPEATS and tried_s > self._patience_s:
                    raise ConnectError(
                        f"the owner of the layers broke the connection at each of {num_breaks} tries of a "
                        f"{message['kind']!r} in {tried_s:.0f} s; look at what it reports there"
                    ) from None
                away_s = self._reopen(away_s)

    def _send_missing(
        self, calls: list[int], message: Message, *, before: tuple[Message, Tensor] | None, away_s: float
    ) -> None:
        """Send again what the server did not keep."""
        for number in calls:
            pair = self._unapplied.get(number)
            if message["kind"] == "apply" and pair is not None:
                self._exchange(*pair[0], away_s=away_s)
                self._exchange(*pair[1], away_s=away_s)
            elif before is not None and before[0]["call"] == number:
                self._exchange(*before, away_s=away_s)
            else:
                raise PayloadError(f"the owner of the layers asks for call {number}, which is not in work")

    def _introduce(self, away_s: float) -> None:
        """Introduce this client to a server, and send again what a new one does not know."""
        hello: Message = {
            "kind": "hello", "version": VERSION, "session": self._session, "forward": self._code.forward,
            "backward": self._code.backward,
        }  # fmt: skip
        answer, _ = self._exchange(hello, None, away_s=away_s)
        if answer["kind"] == "refused":
            raise ConnectError(f"the owner of the layers refused this client: {answer['why']}")
        for name in ("width", "layers", "sha256", "is_trained"):
            if self._welcome.get(name, answer[name]) != answer[name]:
                raise ConnectError(
                    f"the server came back with other layers: {name} is {answer[name]}, it was {self._welcome[name]}; "
                    f"serve the same model, layers and --state again"
                )
        self._welcome, self._is_welcome = answer, True
        is_new = self._generation not in ("", answer["generation"])
        self._generation = answer["generation"]
        if is_new and answer["applied"] < self._step - 1:
            raise ConnectError(
                f"the server came back with the layers after step {answer['applied']}, this client has made "
                f"{self._step - 1}; serve with the --state file that was written last"
            )
        if is_new and answer["applied"] < self._step:
            for forward, gradient in list(self._unapplied.values()):  # in their order, so that the sum is the same
                self._exchange(*forward, away_s=away_s)
                self._exchange(*gradient, away_s=away_s)

    def _check_time_away(self, away_s: float) -> None:
        if time.monotonic() - away_s > self._patience_s:
            place = host_port(self._server.host, self._server.port)
            raise ConnectError(
                f"no owner of layers answered at {place} for {self._patience_s:g} s: it is not there, a firewall "
                f"drops it, or the secret is another one; look with: thinwire doctor {place}"
            )

    def _exchange(self, message: Message, payload: Tensor | None, *, away_s: float) -> tuple[Message, Tensor]:
        """Send a message once over the present connection, and wait for its answer.

        Raises:
            _Disconnected: The connection broke.
            ConnectError: There is none, for longer than `patience_s`.
            DeadlineExceeded: The server does not answer.
        """
        while not self._is_connected:
            self._watch()
            self._check_time_away(away_s)
        kind = message["kind"]
        self._expected = self._sizes(message)
        self._assembly = Assembly(to_server=False, most_bytes=self._expected_bytes)
        num_bytes = message.get("bytes", 0) + max(self._expected.values())
        limit_s = max(_LEAST_ANSWER_S, _SLACK * self._answers.largest_s) + num_bytes / _SLOWEST_BYTES_PER_S
        pieces = deque(frames(message, payload))
        began_s = time.monotonic()
        self._is_in_exchange = True
        whole = None
        while whole is None:
            with contextlib.suppress(zmq.Again):
                while pieces:
                    self._socket.send(pieces[0], zmq.DONTWAIT)
                    pieces.popleft()
            self._watch()
            whole = self._received(wait_ms=_SEND_MS if pieces else _POLL_MS)
            if whole is None and time.monotonic() - began_s > limit_s:
                raise DeadlineExceeded(
                    f"the owner of the layers is connected, and has not answered a {kind!r} of {num_bytes} bytes for "
                    f"{limit_s:.0f} s; its longest answer took {self._answers.largest_s:.1f} s; look at its process"
                )
        self._is_in_exchange = False
        answer, found = whole
        self._answers.observe(time.monotonic() - began_s)
        if kind in self.sent_bytes and payload is not None:
            self.sent_bytes[kind] += payload.numel()
        if answer["kind"] in self.received_bytes:
            self.received_bytes[answer["kind"]] += found.numel()
        if answer["kind"] == "failed":
            self._unapplied.pop(message.get("call", -1), None)  # the server has not added its gradient
            text = f"the owner of the layers could not compute call {answer['call']}: {answer['why']}"
            raise NonFiniteError(text) if answer["is_non_finite"] else ThinwireError(text)
        if answer["kind"] not in self._expected or answer.get("call", message.get("call")) != message.get("call"):
            raise PayloadError(f"the owner of the layers answered a {kind!r} with a {answer['kind']!r}")
        return answer, found

    def _received(self, *, wait_ms: int) -> tuple[Message, Tensor] | None:
        if not self._socket.poll(wait_ms):
            return None
        with contextlib.suppress(zmq.Again):
            while True:
                whole = self._assembly.add(memoryview(self._socket.recv(zmq.DONTWAIT)))
                if whole is not None:
                    return whole
        return None

    def _sizes(self, message: Message) -> dict[str, int]:
        """Return what may answer a message, and the size of its payload."""
        if message["kind"] == "hello":
            return {"welcome": 0, "refused": 0}
        if message["kind"] == "apply":
            return {"applied": 0, "missing": 0, "failed": 0}
        if message["kind"] == "forward":
            return {"hidden": self._code.payload_bytes(message["batch"] * message["seq"] * self.width), "failed": 0}
        return {"input_gradient": int(message["bytes"]), "missing": 0, "failed": 0}

    def _expected_bytes(self, message: Message) -> int:
        if message["kind"] not in self._expected:
            raise PayloadError(f"the owner of the layers sent a {message['kind']!r} where none was asked for")
        most, is_hidden = self._expected[message["kind"]], message["kind"] == "hidden"
        return min(most, int(message["bytes"])) if is_hidden and not self._code.has_fixed_size() else most

    def _watch(self) -> None:
        """Note whether the connection stands; wait a moment where there is none yet.

        Raises:
            _Disconnected: It broke.
        """
        if not self._is_connected:
            self._monitor.poll(_POLL_MS)
        with contextlib.suppress(zmq.Again):
            while True:
                if recv_monitor_message(self._monitor, zmq.DONTWAIT)["event"] == zmq.EVENT_DISCONNECTED:
                    raise _Disconnected
                self._is_connected = True


class _Disconnected(Exception):
    """The connection broke while an answer was awaited."""


class _Remote(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, real: Tensor | None, body: RemoteBody, has_grad: bool) -> Tensor:
        # an input may need a gradient under no_grad too: without one the server keeps nothing
        found, ctx.call = body.send_forward(hidden, real, trains=has_grad and ctx.needs_input_grad[0])
        ctx.body = body
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.call is None:
            raise refusal("a pass through layers at another host has one gradient", got="a second backward pass",
                          allowed="one", remedy="the forward pass once more")  # fmt: skip
        call, ctx.call = ctx.call, None
        return ctx.body.send_gradient(call, gradient), None, None, None
