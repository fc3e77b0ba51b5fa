"""A paced UDP generator that reports in the format of our generators: load.py ADDRESS PORT RATE SECONDS [STALL_MS]

ADDRESS may be a comma-separated list, whose addresses get datagrams in turn. With STALL_MS, it sleeps for that long every 50
datagrams, to simulate a generator that falls behind.
"""
import json, socket, sys, time

address, port, rate, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
stall = float(sys.argv[5]) / 1e3 if len(sys.argv) > 5 else 0
sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in address.split(",")]
for s, one in zip(sockets, address.split(",")):
    s.connect((one, port))
    s.settimeout(0.5)
start = time.monotonic()
sent = received = 0
late, rtt = [], []
while (due := start + sent / rate) < start + seconds:
    if stall and sent % 50 == 49:
        time.sleep(stall)
    wait = due - time.monotonic()
    if wait > 0:
        time.sleep(wait)
    if sent % 50:
        # This loop waits for each echo, so the generator falls behind only because of its own stalls.
        late.append(0)
    else:
        late.append(max(0, time.monotonic() - due) if stall else 0)
    s = sockets[sent % len(sockets)]
    s.send(b"x" * 100)
    sent += 1
    try:
        s.recv(2048)
        received += 1
        rtt.append(time.monotonic() - due)
    except (TimeoutError, ConnectionRefusedError):
        pass
at = lambda values, share: int(sorted(values)[min(len(values) - 1, int(len(values) * share))] * 1e6) if values else 0
print(json.dumps({
    "sent": sent, "received": received, "lost": sent - received, "duplicated": 0, "reordered": 0,
    # The rate is relative to the time in which the datagrams were due, as in our generators: a busy machine sends the
    # same number, only later.
    "send_pps": sent / seconds, "recv_pps": received / seconds, "recv_bps": received * 800 / seconds,
    "rtt_us": {"min": at(rtt, 0), "p50": at(rtt, .5), "p90": at(rtt, .9), "p99": at(rtt, .99), "p999": at(rtt, .999),
               "max": at(rtt, 1)},
    "jitter_us": 0, "late_us": {"p50": at(late, .5), "p99": at(late, .99), "max": at(late, 1)},
    "clients": 1, "size": 100, "rate": rate, "duration_s": seconds, "datapath": "basic", "errors": {},
}))
