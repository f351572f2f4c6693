# SPDX-License-Identifier: Apache-2.0
"""Visits a server of HTTP/3 with aioquic.

Arguments: address, port, number of connections. Each ClientHello is longer than a datagram. In each
connection, the client makes a request, changes its port, and makes another request. It prints a line
with the servers that have answered both: their header X-Segue-Server.
"""

import asyncio
import ssl
import sys

from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.h3.connection import H3Connection
from aioquic.h3.events import HeadersReceived
from aioquic.quic.configuration import QuicConfiguration

PATIENCE = 60  # seconds


class Client(QuicConnectionProtocol):
    """A connection, which makes one request at a time."""

    http = None
    answer = None

    async def visit(self, host):
        self.http = self.http or H3Connection(self._quic)
        self.answer = asyncio.get_running_loop().create_future()
        request = {":method": "GET", ":scheme": "https", ":authority": host, ":path": "/"}
        headers = [(name.encode(), value.encode()) for name, value in request.items()]
        self.http.send_headers(self._quic.get_next_available_stream_id(), headers, end_stream=True)
        self.transmit()
        return await asyncio.wait_for(self.answer, PATIENCE)

    def quic_event_received(self, event):
        self.http = self.http or H3Connection(self._quic)
        for answer in self.http.handle_event(event):
            if isinstance(answer, HeadersReceived) and not self.answer.done():
                self.answer.set_result(dict(answer.headers)[b"x-segue-server"].decode())

    async def move(self):
        self.change_connection_id()
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(lambda: self, local_addr=("::", 0))


async def main(host, port, count):
    unused = [f"unused-{i:05}" for i in range(100)]
    for _ in range(count):
        configuration = QuicConfiguration(
            is_client=True, alpn_protocols=["h3"] + unused, verify_mode=ssl.CERT_NONE
        )
        async with connect(host, port, configuration=configuration, create_protocol=Client) as client:
            first = await client.visit(host)
            await client.move()
            print(first, await client.visit(host), flush=True)


asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
