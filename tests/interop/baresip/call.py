"""Two baresip instances call each other; their RTP may only go through a TURN server.

Usage: call.py TRANSPORT HOST PORT USERNAME PASSWORD SECONDS
It prints `version NAMES`, then every 250 ms `MS SENT RECEIVED SENT RECEIVED`: the time since the call began, and the RTP packets of each
end so far.
"""

import json
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time

DEADLINE = 20

CONFIG = """
poll_method epoll
sip_listen 127.0.0.1:{sip}
audio_source aubridge,echo
audio_player aubridge,echo
audio_alert aubridge,none
ringback_disabled yes
statmode_default off
module_path {modules}
module g711.so
module aubridge.so
module turn.so
module_tmp account.so
module_app menu.so
module_app ctrl_tcp.so
ctrl_tcp_listen 127.0.0.1:{control}
"""

ACCOUNT = (
    "<sip:{name}@127.0.0.1>;regint=0;answermode=auto;audio_codecs=pcmu;medianat=turn"
    ';stunserver="turn:{host}:{port}?transport={transport}";stunuser={username};stunpass={password}\n'
)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class End:
    def __init__(self, home, **account):
        self.sip, control = free_port(), free_port()
        home.mkdir()
        modules = next(pathlib.Path("/usr/lib").glob("**/baresip/modules"))
        (home / "config").write_text(CONFIG.format(sip=self.sip, control=control, modules=modules))
        (home / "accounts").write_text(ACCOUNT.format(**account))
        (home / "contacts").write_text("")
        self.program = subprocess.Popen(
            ["baresip", "-4", "-f", home], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.control = connected(control)
        self.unread = b""

    def command(self, name, parameters=""):
        """baresip's response to a command."""
        text = json.dumps({"command": name, "params": parameters, "token": "t"}).encode()
        self.control.sendall(b"%d:%s," % (len(text), text))
        while True:
            message = self.message()
            if message.get("response"):
                return message["data"]

    def message(self):
        """The next netstring: its length, a colon, JSON, a comma."""
        while True:
            length, colon, rest = self.unread.partition(b":")
            if colon and len(rest) > int(length):
                self.unread = rest[int(length) + 1 :]
                return json.loads(rest[: int(length)], strict=False)
            data = self.control.recv(65536)
            if not data:
                sys.exit("baresip has exited")
            self.unread += data

    def counts(self):
        """RTP packets sent and received, or None before there are any."""
        said = self.command("audio_debug")
        found = re.search(r"TX: packets=(\d+)", said), re.search(r"rcvd=(\d+)", said)
        return all(found) and tuple(int(number.group(1)) for number in found)


def connected(port):
    deadline = time.monotonic() + DEADLINE
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), DEADLINE)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def version():
    said = subprocess.run(["baresip", "-h"], capture_output=True, text=True).stdout
    return re.search(r"baresip v(\S+)", said).group(1)


def main():
    transport, host, port, username, password, seconds = sys.argv[1:]
    print("version baresip", version(), flush=True)
    server = dict(transport=transport, host=host, port=port, username=username, password=password)
    with tempfile.TemporaryDirectory() as home:
        ends = [End(pathlib.Path(home) / name, name=name, **server) for name in ("caller", "callee")]
        try:
            talk(*ends, float(seconds))
        finally:
            for end in ends:
                end.program.kill()
                end.program.wait()


def talk(caller, callee, seconds):
    caller.command("dial", f"sip:callee@127.0.0.1:{callee.sip}")
    began = None
    while began is None or time.monotonic() - began < seconds:
        ends = [caller.counts(), callee.counts()]
        if began is None and all(ends) and all(end[1] for end in ends):
            began = time.monotonic()
        if began is not None:
            print(int((time.monotonic() - began) * 1000), *ends[0], *ends[1], flush=True)
        time.sleep(0.25)


if __name__ == "__main__":
    main()
