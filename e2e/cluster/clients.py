"""Two small HTTP clients without retries: HTTP/1.1 with kept connections, and HTTP/2 over a few shared connections."""

import asyncio
import time
from typing import NamedTuple

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import hyperframe.frame

CONNECT_SECONDS_MAX = 5
# The idle time after which a client no longer uses a kept connection. A gateway announces its end for longer than this time, so that no
# client sends a request on a connection that the gateway is closing.
IDLE_SECONDS_MAX = 3
HTTP2_CONNECTIONS = 4
WINDOW_BYTES = 16 * 1024 * 1024
READ_BYTES = 65536


class Address(NamedTuple):
    host: str
    port: int


class Broken(Exception):
    """The connection or the stream ended before the reply did."""


class Reply:
    """What has arrived of a reply. The client fills it while the reply arrives, so that a test can also judge a broken reply."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()


def lower(pairs: list[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode().lower(): value.decode() for name, value in pairs}


class Http1Client:
    """Keeps idle connections, newest first."""

    def __init__(self, address: Address):
        self.address = address
        self.idle: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, path: str, headers: dict[str, str], body: bytes, reply: Reply) -> None:
        reader, writer = await self.connection()
        keep = False
        try:
            head = {"host": self.address.host, "content-length": str(len(body))} | headers
            lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
            writer.write(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body)
            await writer.drain()
            await self.read(reader, reply)
            keep = reply.headers.get("connection", "").lower() != "close"
        except asyncio.IncompleteReadError as error:
            raise Broken("connection closed within the reply" if reply.status else "connection closed before the reply") from error
        finally:
            if keep:
                self.idle.append((time.monotonic(), reader, writer))
            else:
                writer.close()

    async def connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self.idle:
            since, reader, writer = self.idle.pop()
            if time.monotonic() - since < IDLE_SECONDS_MAX and not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        return await asyncio.wait_for(asyncio.open_connection(*self.address), CONNECT_SECONDS_MAX)

    async def read(self, reader: asyncio.StreamReader, reply: Reply) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        pairs = (line.partition(":")[::2] for line in head[1:] if line)
        reply.headers = {name.strip().lower(): value.strip() for name, value in pairs}
        reply.status = int(head[0].split()[1])
        if reply.headers.get("transfer-encoding") == "chunked":
            while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
                reply.body += await reader.readexactly(size)
                await reader.readexactly(2)
            await reader.readuntil(b"\r\n")
        else:
            reply.body += await reader.readexactly(int(reply.headers.get("content-length", "0")))


class GracefulState(h2.connection.H2Connection):
    """Lets the streams up to a GOAWAY's id continue. The library alone takes a GOAWAY for the end of the connection, and refuses the
    frames that follow it."""

    def _receive_goaway_frame(self, frame: hyperframe.frame.GoAwayFrame) -> tuple[list, list[h2.events.Event]]:
        result = super()._receive_goaway_frame(frame)
        self.state_machine.state = h2.connection.ConnectionState.CLIENT_OPEN
        return result


class Http2Connection:
    """One connection with prior knowledge. After a GOAWAY the connection takes no new streams, and lets the running streams end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer
        self.closing = False
        self.replies: dict[int, tuple[Reply, asyncio.Future[None]]] = {}
        self.state = GracefulState(h2.config.H2Configuration(client_side=True, header_encoding=None))
        self.state.initiate_connection()
        self.state.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: WINDOW_BYTES, h2.settings.SettingCodes.ENABLE_PUSH: 0})
        self.state.increment_flow_control_window(WINDOW_BYTES)
        self.flush()
        self.task = asyncio.create_task(self.receive())

    def flush(self) -> None:
        self.writer.write(self.state.data_to_send())

    async def post(self, headers: list[tuple[str, str]], body: bytes, reply: Reply) -> None:
        stream = self.state.get_next_available_stream_id()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.replies[stream] = (reply, done)
        self.state.send_headers(stream, headers)
        self.state.send_data(stream, body, end_stream=True)
        self.flush()
        await done

    async def receive(self) -> None:
        why = "connection closed"
        try:
            while data := await self.reader.read(READ_BYTES):
                for event in self.state.receive_data(data):
                    self.handle(event)
                self.flush()
                if self.closing and not self.replies:
                    break
        except (OSError, h2.exceptions.ProtocolError) as error:
            why = f"connection broken: {error}"
        finally:
            self.closing = True
            for stream in list(self.replies):
                self.fail(stream, why)
            self.writer.close()

    def handle(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.ConnectionTerminated):
            self.go_away(event)
            return
        stream = getattr(event, "stream_id", None)
        if isinstance(event, h2.events.DataReceived):
            self.state.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        if stream not in self.replies:
            return
        reply, done = self.replies[stream]
        if isinstance(event, h2.events.ResponseReceived):
            reply.headers = lower(event.headers)
            reply.status = int(reply.headers[":status"])
        elif isinstance(event, h2.events.DataReceived):
            reply.body += event.data
        elif isinstance(event, h2.events.StreamReset):
            self.fail(stream, f"stream reset, code {int(event.error_code)}")
        elif isinstance(event, h2.events.StreamEnded):
            del self.replies[stream]
            if not done.done():
                done.set_result(None)

    def go_away(self, event: h2.events.ConnectionTerminated) -> None:
        self.closing = True
        for stream in list(self.replies):
            if event.last_stream_id is not None and stream > event.last_stream_id:
                self.fail(stream, "stream refused by GOAWAY")

    def fail(self, stream: int, why: str) -> None:
        reply, done = self.replies.pop(stream)
        if not done.done():
            done.set_exception(Broken(f"{why} {'within' if reply.status else 'before'} the reply"))


class Http2Client:
    """Spreads streams over a few connections, and opens a new connection for each connection that the server ends."""

    def __init__(self, address: Address):
        self.address = address
        self.connections: list[Http2Connection | None] = [None] * HTTP2_CONNECTIONS
        self.opening = [asyncio.Lock() for _ in range(HTTP2_CONNECTIONS)]
        self.next = 0

    async def post(self, path: str, headers: dict[str, str], body: bytes, reply: Reply) -> None:
        connection = await self.connection()
        pseudo = {":method": "POST", ":scheme": "http", ":authority": self.address.host, ":path": path}
        await connection.post(list((pseudo | headers).items()), body, reply)

    async def connection(self) -> Http2Connection:
        place = self.next = (self.next + 1) % HTTP2_CONNECTIONS
        async with self.opening[place]:
            current = self.connections[place]
            if current is None or current.closing:
                current = Http2Connection(*await asyncio.wait_for(asyncio.open_connection(*self.address), CONNECT_SECONDS_MAX))
                self.connections[place] = current
            return current
