"""Two aioice connections exchange messages, through a TURN server only.

aioice refreshes its channels and never sends CreatePermission.
Usage: call.py TRANSPORT HOST PORT USERNAME PASSWORD SECONDS
It prints `version NAMES`, then every 250 ms `MS SENT RECEIVED SENT RECEIVED`: the time since the call began, and the messages of each end so far.
"""

import asyncio
import importlib.metadata
import sys
import time

import aioice

INTERVAL = 0.06


class End:
    def __init__(self, controlling, transport, server, username, password):
        self.ice = aioice.Connection(
            ice_controlling=controlling,
            turn_server=server,
            turn_transport="udp" if transport == "udp" else "tcp",
            turn_ssl=transport == "tls",
            turn_username=username,
            turn_password=password,
            transport_policy=aioice.TransportPolicy.RELAY,
        )
        self.sent = self.received = 0

    async def talk(self):
        while True:
            await self.ice.send(b"message %d" % self.sent)
            self.sent += 1
            await asyncio.sleep(INTERVAL)

    async def listen(self):
        while True:
            await self.ice.recv()
            self.received += 1


async def introduce(a, b):
    for candidate in a.ice.local_candidates:
        await b.ice.add_remote_candidate(candidate)
    await b.ice.add_remote_candidate(None)
    b.ice.remote_username = a.ice.local_username
    b.ice.remote_password = a.ice.local_password


async def run(transport, host, port, username, password, seconds):
    ends = [End(controlling, transport, (host, port), username, password) for controlling in (True, False)]
    for end in ends:
        await end.ice.gather_candidates()
        assert {candidate.type for candidate in end.ice.local_candidates} == {"relay"}
    await introduce(*ends)
    await introduce(*reversed(ends))
    await asyncio.gather(*(end.ice.connect() for end in ends))
    tasks = [asyncio.create_task(work) for end in ends for work in (end.talk(), end.listen())]
    began = time.monotonic()
    while (elapsed := time.monotonic() - began) < seconds:
        print(int(elapsed * 1000), *(n for end in ends for n in (end.sent, end.received)), flush=True)
        # A failed task means a lost connection.
        done, _ = await asyncio.wait(tasks, timeout=0.25, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


def main():
    transport, host, port, username, password, seconds = sys.argv[1:]
    print("version aioice", importlib.metadata.version("aioice"), flush=True)
    asyncio.run(run(transport, host, int(port), username, password, float(seconds)))


if __name__ == "__main__":
    main()
