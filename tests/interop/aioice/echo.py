"""Relays an echo through a TURN server with aioice's client, and prints one JSON object about it.

usage: echo.py HOST PORT USERNAME PASSWORD COUNT udp|tcp|tls

The peer is a plain UDP socket of this program, on IPv4, because aioice does not request any other address family. Every payload must
come back unchanged, once, from the peer's own address. aioice binds a channel to each peer, so the data is relayed as ChannelData. If
STALE is set in the environment, the nonce is replaced with that of another server halfway through, and the second half goes to another
peer, for which aioice binds another channel. Over TLS the certificate must be trusted (SSL_CERT_FILE) and valid for HOST. Exit status:
0, all were echoed; 1, not all were echoed; 4, the server refused (the JSON then contains the error code in `refused`); 5, its certificate
is not trusted (the reason is in `untrusted`).
"""

import asyncio
import json
import os
import ssl
import sys

from aioice import stun, turn

# Odd, word-aligned and near-MTU payloads: ChannelData padding must not appear in the data.
SIZES = (1, 3, 4, 120, 121, 1200)


class Peer(asyncio.DatagramProtocol):
    """Sends back what it receives, and records the sources."""

    def __init__(self):
        self.heard_from = set()

    def connection_made(self, transport):
        self.transport = transport

    def datagram_received(self, data, addr):
        self.heard_from.add(addr)
        self.transport.sendto(data, addr)


class Client(asyncio.DatagramProtocol):
    def __init__(self):
        self.arrived = asyncio.Queue()

    def datagram_received(self, data, addr):
        self.arrived.put_nowait((data, addr))


async def run(host, port, username, password, count, over):
    loop = asyncio.get_running_loop()
    stale = "STALE" in os.environ
    peers = [
        await loop.create_datagram_endpoint(Peer, local_addr=(os.environ.get("PEER", "127.0.0.1"), 0))
        for _ in range(2 if stale else 1)
    ]
    transport, client = await turn.create_turn_endpoint(
        Client,
        server_addr=(host, port),
        username=username,
        password=password,
        transport="udp" if over == "udp" else "tcp",
        ssl=True if over == "tls" else None,
    )
    relayed = transport.get_extra_info("sockname")
    echoed = 0
    for number in range(count):
        if stale and number == count // 2:
            # The server cannot distinguish it from an expired nonce.
            transport._TurnTransport__inner_protocol.nonce = b"obMatJos2gAAAAAAAAAAAAAA"
        peer_transport, _ = peers[number * len(peers) // count]
        peer_address = peer_transport.get_extra_info("sockname")[:2]
        payload = bytes((number + i) % 256 for i in range(SIZES[number % len(SIZES)]))
        transport.sendto(payload, peer_address)
        try:
            data, source = await asyncio.wait_for(client.arrived.get(), 5)
        except asyncio.TimeoutError:
            break
        if data != payload or tuple(source[:2]) != peer_address:
            break
        echoed += 1
    heard_from = sorted({address[:2] for _, peer in peers for address in peer.heard_from})
    transport.close()
    for peer_transport, _ in peers:
        peer_transport.close()
    print(json.dumps({"sent": count, "echoed": echoed, "relayed": list(relayed), "heard_from": heard_from}))
    return 0 if echoed == count else 1


def main():
    host, port, username, password, count, over = sys.argv[1:]
    try:
        return asyncio.run(run(host, int(port), username, password, int(count), over))
    except stun.TransactionFailed as refusal:
        code = refusal.response.attributes["ERROR-CODE"][0]
        print(json.dumps({"refused": code}))
        return 4
    except ssl.SSLCertVerificationError as error:
        print(json.dumps({"untrusted": error.verify_message}))
        return 5


if __name__ == "__main__":
    sys.exit(main())
