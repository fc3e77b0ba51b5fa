#!/usr/bin/env python3
"""Request and answer over TCP, against an echo: stream.py rr|connect ADDRESS PORT --connections N --size B --seconds S

rr keeps its connections open; connect opens one for each exchange. Prints one JSON object. The first second does not
count. Latency is from the moment a request is sent: the loop is closed, so a stall hides the requests that it delayed.
"""

import argparse
import json
import selectors
import socket
import struct
import sys
import time

WARMUP = 1.0
# A reset instead of TIME_WAIT: 28,000 local ports would be gone within seconds.
LINGER = struct.pack("ii", 1, 0)

parser = argparse.ArgumentParser()
parser.add_argument("mode", choices=["rr", "connect"])
parser.add_argument("address")
parser.add_argument("port", type=int)
parser.add_argument("--connections", type=int, default=1)
parser.add_argument("--size", type=int, default=32)
parser.add_argument("--seconds", type=float, default=5.0)
options = parser.parse_args()

selector = selectors.DefaultSelector()
request = b"x" * options.size
took = []
errors = 0


class Client:
    def __init__(self):
        self.open()

    def open(self):
        self.began = time.monotonic()
        self.socket = socket.create_connection((options.address, options.port), timeout=5)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if options.mode == "connect":
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
        self.send()
        selector.register(self.socket, selectors.EVENT_READ, self)

    def send(self):
        self.missing = options.size
        self.socket.sendall(request)

    def close(self):
        selector.unregister(self.socket)
        self.socket.close()

    def readable(self):
        global errors
        try:
            data = self.socket.recv(65536)
        except OSError:
            data = b""
        if not data:
            errors += 1
            self.close()
            self.open()
            return
        self.missing -= len(data)
        if self.missing > 0:
            return
        now = time.monotonic()
        took.append((now, now - self.began))
        if options.mode == "connect":
            self.close()
            self.open()
        else:
            self.began = now
            self.send()


start = time.monotonic()
try:
    for _ in range(options.connections):
        Client()
    while time.monotonic() < start + options.seconds:
        for key, _ in selector.select(timeout=0.5):
            key.data.readable()
except OSError as error:
    sys.exit(f"{options.address}:{options.port}: {error}")
end = time.monotonic()

warm = min(WARMUP, (end - start) / 2)
counted = sorted(latency for done, latency in took if done >= start + warm)
if not counted:
    sys.exit("no exchange was answered")


def percentile(share):
    return counted[min(len(counted) - 1, int(len(counted) * share))] * 1e6


print(json.dumps({
    "per_second": len(counted) / (end - start - warm),
    "p50_us": percentile(0.5),
    "p99_us": percentile(0.99),
    "errors": errors,
}))
