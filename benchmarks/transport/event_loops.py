"""Round trips of small messages over CURVE: `zmq.Poller` against `zmq.asyncio`; see decision 11.

Run: `python benchmarks/transport/event_loops.py [BYTES]`.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import Any

import zmq
import zmq.asyncio

TRIPS = 3000
END = b"end"


def server_socket(context: Any) -> tuple[Any, int, bytes]:
    """Return a bound ROUTER, its port and its public key."""
    public, private = zmq.curve_keypair()
    socket = context.socket(zmq.ROUTER)
    socket.curve_server, socket.curve_publickey, socket.curve_secretkey = 1, public, private
    return socket, socket.bind_to_random_port("tcp://127.0.0.1"), public


def client_socket(context: Any, port: int, public: bytes) -> Any:
    """Return a DEALER that is connected to the server."""
    socket = context.socket(zmq.DEALER)
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = public
    socket.connect(f"tcp://127.0.0.1:{port}")
    return socket


def report(name: str, trips_s: list[float], processor_s: float) -> None:
    """Print the median, the 99th percentile and the processor time a message."""
    ordered = [1e6 * trip_s for trip_s in sorted(trips_s)]
    print(
        f"{name}: median {ordered[TRIPS // 2]:.0f} us, p99 {ordered[99 * TRIPS // 100]:.0f} us, "
        f"processor {1e6 * processor_s / TRIPS:.0f} us/message"
    )


def by_poller(message: bytes) -> None:
    """Measure two poll loops in two threads."""
    context = zmq.Context()
    server, port, public = server_socket(context)

    def serve() -> None:
        poller = zmq.Poller()
        poller.register(server, zmq.POLLIN)
        while True:
            poller.poll()
            try:
                while True:
                    identity, received = server.recv_multipart(zmq.DONTWAIT)
                    if received == END:
                        return
                    server.send_multipart([identity, received])
            except zmq.Again:
                continue

    thread = threading.Thread(target=serve)
    thread.start()
    client = client_socket(context, port, public)
    client.send(message)  # the handshake is not measured
    client.recv()
    poller = zmq.Poller()
    poller.register(client, zmq.POLLIN)
    trips_s, began_s = [], time.process_time()
    for _ in range(TRIPS):
        start_s = time.perf_counter()
        client.send(message)
        poller.poll()
        client.recv(zmq.DONTWAIT)
        trips_s.append(time.perf_counter() - start_s)
    report("zmq.Poller", trips_s, time.process_time() - began_s)
    client.send(END)
    thread.join()
    context.destroy(linger=0)


def by_asyncio(message: bytes) -> None:
    """Measure two asyncio loops in two threads."""
    bound: dict[str, Any] = {}
    is_bound = threading.Event()

    async def serve() -> None:
        context = zmq.asyncio.Context()
        server, bound["port"], bound["public"] = server_socket(context)
        is_bound.set()
        while True:
            identity, received = await server.recv_multipart()
            if received == END:
                break
            await server.send_multipart([identity, received])
        context.destroy(linger=0)

    async def measure() -> None:
        context = zmq.asyncio.Context()
        client = client_socket(context, bound["port"], bound["public"])
        await client.send(message)
        await client.recv()
        trips_s, began_s = [], time.process_time()
        for _ in range(TRIPS):
            start_s = time.perf_counter()
            await client.send(message)
            await client.recv()
            trips_s.append(time.perf_counter() - start_s)
        report("zmq.asyncio", trips_s, time.process_time() - began_s)
        await client.send(END)
        await asyncio.sleep(0.1)
        context.destroy(linger=0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    is_bound.wait()
    asyncio.run(measure())
    thread.join()


if __name__ == "__main__":
    body = bytes(int(sys.argv[1]) if len(sys.argv) > 1 else 64)
    for _ in range(2):
        by_poller(body)
        by_asyncio(body)
