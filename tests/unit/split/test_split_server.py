"""What clients may ask of a server, and what one that breaks the protocol does to the others: nothing."""

from __future__ import annotations

import contextlib
import copy
import pickle
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from split_servers import EXACT, SECRET, VOCABULARY, WIDTH, connected, cut, llama, served

from thinwire.codecs.activation_code import ActivationCode
from thinwire.codecs.channel_bits import AdaptiveBits, ChannelBits, channel_payload_bytes
from thinwire.errors import CheckpointError, ConnectError, NonFiniteError, PayloadError
from thinwire.split import BodyServer, connect, middle_layers
from thinwire.split import server as server_module
from thinwire.split.messages import PIECE_BYTES, VERSION, Assembly, frames, keys_of
from thinwire.transport.secret import Secret, write_secret

TOKENS = torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(1))
LAYERS = range(1, 4)
SESSION = "0" * 32


@contextlib.contextmanager
def raw_client(port: int) -> Iterator[Any]:
    """Connect with the secret, to send frames that no honest client sends."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    plug = context.socket(zmq.DEALER)
    keys = keys_of(SECRET, side="client")
    plug.curve_serverkey, plug.curve_publickey, plug.curve_secretkey = (
        keys_of(SECRET, side="server").public, keys.public, keys.private,
    )  # fmt: skip
    plug.linger = 0
    plug.connect(f"tcp://127.0.0.1:{port}")
    try:
        yield plug
    finally:
        context.destroy(linger=0)


def head(**message: Any) -> bytes:
    return b"h" + msgspec.json.encode(message)


HELLO = {"kind": "hello", "version": VERSION, "session": SESSION, "forward": "float32", "backward": "float32"}
FORWARD = {"kind": "forward", "call": 1, "batch": 1, "seq": 2, "masked": False, "trains": True, "bytes": 8 * WIDTH}


def test_messages_of_random_sizes_arrive_whole_and_in_their_order() -> None:
    assembly = Assembly(to_server=True, most_bytes=lambda message: message.get("bytes", 0))
    for size in (0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 7):
        payload = torch.randint(256, (size,), dtype=torch.uint8)
        whole = [
            found for frame in frames({**FORWARD, "bytes": size}, payload)
            if (found := assembly.add(memoryview(frame))) is not None
        ]  # fmt: skip
        assert len(whole) == 1 and torch.equal(whole[0][1], payload) and whole[0][0]["bytes"] == size


@pytest.mark.parametrize(
    "sent",
    [
        [b""], [b"x"], [b"p"], [b"h"], [b"h{"], [b"h" + b"[" * 9000], [head(kind="welcome")],
        [head(**{**HELLO, "session": "../x"})], [head(**{**HELLO, "version": -1})], [head(**HELLO, more=1)],
        [head(**{**FORWARD, "bytes": 1 << 47})], [head(**FORWARD), b"p" + bytes(8 * WIDTH + 1)],
        [head(**FORWARD), b"p"], [head(**FORWARD), b"p" + bytes(8 * WIDTH), b"pxx"],
    ],
)  # fmt: skip
def test_frames_of_no_message_are_refused_before_memory_is_asked_for(sent: list[bytes]) -> None:
    assembly = Assembly(to_server=True, most_bytes=lambda message: 8 * WIDTH if "bytes" in message else 0)
    with pytest.raises(PayloadError):
        for frame in sent:
            assembly.add(memoryview(frame))


def test_a_client_that_breaks_the_protocol_is_turned_away_and_an_honest_one_goes_on() -> None:
    said: list[str] = []
    whole = llama()
    with served(whole, LAYERS, say=said.append, most_tokens=64) as server, connected(server) as body:
        model = cut(whole, body)
        expected = whole(input_ids=TOKENS, labels=TOKENS).loss
        attacks: list[list[bytes]] = [
            [head(**FORWARD)],  # before its hello
            [head(**HELLO), head(**{**FORWARD, "seq": 65, "bytes": 65 * 4 * WIDTH})],
            [head(**HELLO), head(**{**FORWARD, "batch": 1 << 40, "seq": 1 << 40})],
            [head(**HELLO), head(**{**FORWARD, "batch": 0, "bytes": 0})],
            [head(**HELLO), head(**{**FORWARD, "bytes": 1})],
            [head(**HELLO), head(kind="gradient", call=9, step=1, bytes=1 << 40)],
            [head(kind="apply", step=1, calls=[1])],
            [head(**HELLO), head(**FORWARD), b"p" + bytes(8 * WIDTH)] * 9,  # reads no answer
            [b"p" * 40],
            [head(**HELLO), head(**{**HELLO, "session": "1" * 32})],
            [head(**HELLO), head(**{**HELLO, "forward": "bfloat16"})],
            # of changing size, beyond its bound
            [head(**{**HELLO, "session": "2" * 32, "forward": "channel-bits"}),
             head(**{**FORWARD, "bytes": ChannelBits().payload_bytes(2 * WIDTH) + 1})],
        ]  # fmt: skip
        for number, attack in enumerate(attacks):
            with raw_client(server.port) as plug:
                for frame in attack:
                    plug.send(frame)
                while len([text for text in said if "a client sent" in text]) <= number:
                    plug.poll(20)
                assert torch.equal(model(input_ids=TOKENS, labels=TOKENS).loss, expected), attack


def test_half_messages_take_no_memory_and_a_session_has_one_connection() -> None:
    assembly = Assembly(to_server=True, most_bytes=lambda message: message.get("bytes", 0))
    tracemalloc.start()
    assembly.add(memoryview(head(**{**FORWARD, "bytes": 1 << 30})))
    assembly.add(memoryview(b"p" + bytes(PIECE_BYTES)))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    with served(llama(), LAYERS) as server, raw_client(server.port) as first, raw_client(server.port) as second:
        ended = first.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        for plug in (first, second):
            plug.send(head(**HELLO))
            assert msgspec.json.decode(plug.recv()[1:])["kind"] == "welcome"
        assert ended.poll(60_000)
        assert len(server._connections) == 1


def test_a_client_cannot_spoil_layers_that_others_train_too(tmp_path: Path) -> None:
    layers = middle_layers(llama(), LAYERS)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.mul_(30)  # so that gradients grow on their way
    signs = torch.randn(1, 2, WIDTH, generator=torch.Generator().manual_seed(2)).sign()
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-9)
    before, state = copy.deepcopy(layers.state_dict()), tmp_path / "body.pt"
    said: list[str] = []
    with (
        served(llama(), LAYERS, body=layers, optimizer=optimizer, state=state, say=said.append) as server,
        connected(server) as body,
    ):  # fmt: skip
        with pytest.raises(NonFiniteError, match="could not compute call 1"):
            body(torch.ones(1, 2, WIDTH)).backward(3e38 * signs)
        body.step()  # nothing is left of it
        with raw_client(server.port) as plug:
            plug.send(head(**HELLO))
            plug.recv()
            plug.send(head(kind="apply", step=1, calls=[]))
            while not any("an apply without calls" in text for text in said):
                plug.poll(20)
        assert not state.exists()
        assert all(torch.equal(value, before[name]) for name, value in layers.state_dict().items())
        body(torch.ones(1, 2, WIDTH)).backward(torch.ones(1, 2, WIDTH))
        body.step()
        assert all(value.isfinite().all() for value in layers.state_dict().values())
        assert state.exists()
        with torch.no_grad():
            body(torch.ones(1, 2, WIDTH, requires_grad=True))
        assert not any(session.calls for session in server._sessions.values())


def test_an_interrupted_pass_leaves_no_answer_to_the_next_one() -> None:
    with served(llama(), LAYERS) as server, connected(server) as body:
        expected, answer = body(torch.ones(1, 2, WIDTH)), server._answer
        is_free = threading.Event()

        def slow(*message: Any) -> Any:
            is_free.wait(60)
            return answer(*message)

        def interrupt(**_: Any) -> None:
            raise KeyboardInterrupt

        server._answer = slow  # type: ignore[method-assign]
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(body, "_received", interrupt)
            body(torch.zeros(1, 2, WIDTH))
        is_free.set()
        for _ in range(3):
            assert torch.equal(body(torch.ones(1, 2, WIDTH)), expected)


def test_a_server_that_breaks_each_connection_ends_in_one_error() -> None:
    with served(llama(), LAYERS) as server, connected(server, patience_s=0.1) as body:

        def break_off(*_: Any) -> Any:
            raise PayloadError("nothing that it likes")

        server._forward = break_off  # type: ignore[method-assign]
        server._expected_bytes = break_off  # type: ignore[method-assign]
        with pytest.raises(
            ConnectError, match=r"broke the connection at each of 9 tries of a 'forward'|no owner of layers answered"
        ):
            body(torch.ones(1, 2, WIDTH))


def test_what_a_lying_server_says_of_itself_is_checked() -> None:
    welcome = {
        "kind": "welcome", "width": 4, "layers": "1:3", "sha256": "", "is_trained": False, "applied": 0,
        "most_tokens": 9, "generation": "0" * 16,
    }  # fmt: skip
    for lie in ({"layers": "1"}, {"layers": "1:2:0"}, {"layers": "a:b"}, {"width": 0}, {"width": 1 << 47}):
        assembly = Assembly(to_server=False, most_bytes=lambda message: 0)
        with pytest.raises(PayloadError):
            assembly.add(memoryview(head(**{**welcome, **lie})))


def test_wrong_use_of_a_connection_is_one_error() -> None:
    with served(llama(), LAYERS) as server, connected(server) as body:
        hidden = torch.ones(2, 3, WIDTH)
        for real in (torch.ones(2, 2, dtype=torch.bool), torch.full((2, 3), 0.5), torch.full((2, 3), 5)):
            with pytest.raises(ValueError, match=r"marks of real tokens.*try real=attention_mask.bool\(\)"):
                body(hidden, real)
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(ValueError, match=r"cannot be copied or pickled.*try model.state_dict\(\)"):
                copied(body)
        body.close()
        for use in (lambda: body(hidden), body.step):
            with pytest.raises(ValueError, match=r"is closed.*try connect\(\) once more"):
                use()


def test_answers_to_strange_but_whole_messages_name_what_is_wrong() -> None:
    with served(llama(), LAYERS) as server, raw_client(server.port) as plug:

        def asked(*sent: bytes) -> Any:
            for frame in sent:
                plug.send(frame)
            return msgspec.json.decode(plug.recv()[1:])

        assert "speaks version" in asked(head(**{**HELLO, "version": VERSION + 1}))["why"]
        assert "e3m0" in asked(head(**{**HELLO, "forward": "e3m0"}))["why"]
        assert asked(head(**HELLO))["layers"] == "1:4"
        assert asked(head(kind="gradient", call=9, step=1, bytes=4), b"p" + bytes(4)) == {
            "kind": "missing",
            "calls": [9],
        }
        nan = torch.full((2 * WIDTH,), torch.nan).view(torch.uint8).numpy().tobytes()
        found = asked(head(**FORWARD), b"p" + nan)
        assert found["kind"] == "failed" and found["is_non_finite"]
        assert asked(head(kind="apply", step=5, calls=[])) == {"kind": "applied", "step": 5}  # frozen: nothing to do


def test_with_little_memory_passes_are_computed_again_or_sent_again_to_the_same_result() -> None:
    whole = llama()
    rows = [TOKENS[row : row + 1] for row in (0, 1, 0)]
    for row in rows:
        whole(input_ids=row, labels=row).loss.backward()
    payload_bytes = EXACT.payload_bytes(rows[0].numel() * WIDTH)
    one_input = payload_bytes + server_module._CALL_BYTES
    for most_bytes in (1 << 30, 3 * one_input, 1):
        with served(whole, LAYERS, most_bytes=most_bytes) as server, connected(server) as body:
            model = cut(whole, body)
            for loss in [model(input_ids=row, labels=row).loss for row in rows]:
                loss.backward()
            assert torch.equal(model.lm_head.weight.grad, whole.lm_head.weight.grad)
            sent = body.sent_bytes["forward"]
            assert sent == (6 if most_bytes == 1 else 3) * payload_bytes


def test_places_are_limited_and_one_whose_client_is_long_gone_is_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(llama(), LAYERS, most_clients=1) as server:
        with connected(server) as body, pytest.raises(ConnectError, match="--most-clients 2"):
            assert body.width == WIDTH
            connect(f"127.0.0.1:{server.port}", secret=SECRET)
        with pytest.raises(ConnectError, match="has its 1 clients"):
            connect(f"127.0.0.1:{server.port}", secret=SECRET)
        monkeypatch.setattr(server_module, "_KEPT_S", 0.0)
        while True:
            with contextlib.suppress(ConnectError), connected(server) as body:  # its end may not be noticed yet
                assert body(torch.zeros(1, 1, WIDTH)).shape == (1, 1, WIDTH)
                break


def test_nan_on_either_side_is_named_and_the_next_pass_works() -> None:
    for code in (EXACT, ActivationCode()):
        with served(llama(), LAYERS) as server, connected(server, code=code) as body:
            with pytest.raises(NonFiniteError, match="call 1, input of the body"):
                body(torch.full((1, 2, WIDTH), torch.nan))
            hidden = torch.zeros(1, 2, WIDTH, requires_grad=True)
            with pytest.raises(NonFiniteError, match="call 2, gradient of the output"):
                body(hidden).backward(torch.full((1, 2, WIDTH), torch.inf))
            assert body(hidden).isfinite().all()
    bad = llama()
    bad.model.layers[2].mlp.down_proj.weight.data.fill_(torch.inf)
    with (
        served(bad, LAYERS, body=_uncut(bad)) as server, connected(server) as body,
        pytest.raises(NonFiniteError, match="could not compute call 1"),
    ):  # fmt: skip
        body(torch.ones(1, 2, WIDTH))


def _uncut(model: Any) -> Any:
    """Return layers that were damaged after they were cut out."""
    whole = llama()
    body = middle_layers(whole, LAYERS)
    body.load_state_dict(middle_state(model))
    return body


def middle_state(model: Any) -> dict[str, torch.Tensor]:
    names = middle_layers(llama(), LAYERS).state_dict()
    return {
        name: model.model.layers[int(name.split(".")[2]) + LAYERS.start].state_dict()[".".join(name.split(".")[3:])]
        if ".layers." in name else value
        for name, value in names.items()
    }  # fmt: skip


def test_another_secret_or_nobody_there_is_one_error() -> None:
    with served(llama(), LAYERS) as server:
        with pytest.raises(ConnectError, match=r"the secret is another one; look with: thinwire doctor 127\.0\.0\.1:"):
            connect(f"127.0.0.1:{server.port}", secret=Secret(key=bytes(32)), patience_s=1)
        port = server.port
    with pytest.raises(ConnectError, match="it is not there"):
        connect(f"127.0.0.1:{port}", secret=SECRET, patience_s=0.5)


def test_patience_also_ends_where_each_handshake_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def hang_up() -> None:
            with contextlib.suppress(OSError):  # the listener was closed
                while True:
                    listener.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(ConnectError, match="the secret is another one"):
            connect(f"127.0.0.1:{port}", secret=SECRET, patience_s=0.5)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_the_secret_comes_once_in_the_address_or_beside_it(tmp_path: Path) -> None:
    write_secret(tmp_path / "job.secret", SECRET)
    with served(llama(), LAYERS) as server:
        place = f"127.0.0.1:{server.port}"
        with pytest.raises(ValueError, match=r"must come once; got none.*try secret='job.secret'"):
            connect(place)
        connect(place, secret=tmp_path / "job.secret").close()


def test_trained_layers_follow_one_process_and_go_on_from_their_file(tmp_path: Path) -> None:
    whole, state = llama(), tmp_path / "body.pt"
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    expected = []
    for _ in range(6):
        for row in range(2):
            loss = whole(input_ids=TOKENS[row : row + 1], labels=TOKENS[row : row + 1]).loss
            loss.backward()
        expected.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()

    def body_and_optimizer() -> dict[str, Any]:
        body = middle_layers(llama(), LAYERS)
        return {"body": body, "optimizer": torch.optim.AdamW(body.parameters(), lr=1e-2), "state": state}

    found, model, own = [], None, None
    with contextlib.ExitStack() as stack:
        first = served(llama(), LAYERS, **body_and_optimizer())
        server = first.__enter__()
        body = stack.enter_context(connected(server))
        model = cut(llama(), body)
        own = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(6):
            for row in range(2):
                loss = model(input_ids=TOKENS[row : row + 1], labels=TOKENS[row : row + 1]).loss
                loss.backward()
                if (step, row) in ((2, 0), (3, 1)):  # in mid-step: its gradients are gone with it
                    first.__exit__(None, None, None)
                    first = served(llama(), LAYERS, port=server.port, **body_and_optimizer())
                    server = first.__enter__()
            found.append(loss.item())
            own.step()
            own.zero_grad()
            body.step()
        first.__exit__(None, None, None)
    assert found == expected
    with pytest.raises(CheckpointError, match="does not hold the state of these layers"):
        BodyServer(
            body := middle_layers(llama(), range(1, 3)), layers=range(1, 3), secret=SECRET, state=state,
            optimizer=torch.optim.AdamW(body.parameters()),
        )  # fmt: skip


def test_a_server_that_comes_back_with_other_layers_or_an_older_state_is_refused(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        first = served(llama(), LAYERS)
        server = first.__enter__()
        body = stack.enter_context(connected(server))
        body(torch.zeros(1, 2, WIDTH))
        first.__exit__(None, None, None)
        other = llama()
        other.model.layers[2].mlp.down_proj.weight.data.mul_(2)
        stack.enter_context(served(other, LAYERS, port=server.port))
        with pytest.raises(ConnectError, match="came back with other layers: sha256"):
            body(torch.zeros(1, 2, WIDTH))


def test_wrong_arguments_of_a_server_are_refused() -> None:
    body = middle_layers(llama(), LAYERS)
    for name in ("most_clients", "most_bytes", "most_tokens"):
        with pytest.raises(ValueError, match=f"{name} is too small; got 0; allowed 1 or more; try {name}=1"):
            BodyServer(body, layers=LAYERS, secret=SECRET, **{name: 0})
    with pytest.raises(ValueError, match="kept in a file"):
        BodyServer(body, layers=LAYERS, secret=SECRET, optimizer=torch.optim.SGD(body.parameters(), lr=1))
    noisy = copy.deepcopy(body)
    noisy.noise = torch.nn.Dropout(0.1)
    noisy.train()
    with pytest.raises(ValueError, match=r"drop values at random.*got noise.*try body.eval\(\)"):
        BodyServer(noisy, layers=LAYERS, secret=SECRET)
    BodyServer(noisy.eval(), layers=LAYERS, secret=SECRET).close()


def test_learned_bits_train_a_split_model_as_a_whole_one_by_their_byte_law() -> None:
    """Padding too, whose marks lie behind a payload of changing size; the server answers in 8 bits a channel."""
    whole, bits = llama(), AdaptiveBits(WIDTH, least=1, most=6)
    with torch.no_grad():
        bits.scores.copy_(torch.linspace(-2, 2, WIDTH))
    mask = torch.ones_like(TOKENS)
    mask[0, 4:] = 0
    code = ActivationCode("channel-bits", "float32", bits=bits)
    with served(whole, LAYERS) as server, connected(server, code=code) as body:
        body.register_forward_pre_hook(lambda body, given: (bits(given[0]), *given[1:]))
        model = cut(whole, body)
        loss = model(input_ids=TOKENS, attention_mask=mask, labels=TOKENS).loss
        loss.backward()
        found = bits.scores.grad
        law = channel_payload_bytes(bits.widths(), rows=12), channel_payload_bytes(torch.full((WIDTH,), 8), rows=12)
        assert body.sent_bytes["forward"] == law[0] + 2 and body.received_bytes["hidden"] == law[1]

    bits.scores.grad, answer = None, AdaptiveBits(WIDTH, least=8, most=8)
    whole.model.layers[1].register_forward_pre_hook(lambda layer, given: (bits(given[0]), *given[1:]))
    whole.model.layers[3].register_forward_hook(lambda layer, given, output: answer(output))
    expected = whole(input_ids=TOKENS, attention_mask=mask, labels=TOKENS).loss
    expected.backward()
    assert found is not None and bits.scores.grad is not None
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, bits.scores.grad)
