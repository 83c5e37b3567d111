"""A relay in this process behind a port that records all that passes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from thinwire.transport.addresses import Address, RelayPlace, free_port
from thinwire.transport.relay.server import RelayServer
from thinwire.transport.secret import Secret

TOKEN = Secret(key=bytes(range(64, 96)))
HOST, SOON_S = "127.0.0.1", 120.0


class Tap:
    """A relay behind a port that records all that passes, and which can be started again."""

    def __init__(self) -> None:
        self.captured: list[bytes] = []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.inner, self.port = free_port(HOST), 0
        self.start()
        self.port = self._do(self._listen())

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(SOON_S)

    def start(self) -> None:
        self.server = RelayServer([TOKEN], say=lambda text: None)
        self._do(self.server.start(address=HOST, port=self.inner))

    def stop(self) -> None:
        self._do(self.server.close())

    async def _listen(self) -> int:
        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while data := await reader.read(1 << 16):
                    self.captured.append(data)
                    writer.write(data)
                    await writer.drain()
            finally:
                writer.close()

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                back, on = await asyncio.open_connection(HOST, self.inner)
            except OSError:
                writer.close()
                return
            await asyncio.gather(pump(reader, on), pump(back, writer), return_exceptions=True)

        self.listener = await asyncio.start_server(forward, HOST, 0)
        return int(self.listener.sockets[0].getsockname()[1])

    @property
    def place(self) -> RelayPlace:
        return RelayPlace(address=Address(host=HOST, port=self.port), token=TOKEN)

    def close(self) -> None:
        self.stop()
        self.loop.call_soon_threadsafe(self.listener.close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(SOON_S)
