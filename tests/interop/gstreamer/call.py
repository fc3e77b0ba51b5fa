"""Two GStreamer webrtcbin elements, whose ICE agent is libnice, exchange messages over a data channel, through a TURN server only.

Usage: call.py TRANSPORT HOST PORT USERNAME PASSWORD SECONDS
It prints `version NAMES`, then every 250 ms `MS SENT RECEIVED SENT RECEIVED`: the time since the call began, and the messages of each end so far.
"""

import sys
import time
from urllib.parse import quote

import gi

gi.require_version("Gst", "1.0")
gi.require_version("GstSdp", "1.0")
gi.require_version("GstWebRTC", "1.0")
from gi.repository import GLib, Gst, GstSdp, GstWebRTC  # noqa: E402

INTERVAL_MS = 60


class End:
    def __init__(self, pipeline, name, uri):
        self.bin = Gst.ElementFactory.make("webrtcbin", name)
        self.bin.set_property("turn-server", uri)
        self.bin.set_property("ice-transport-policy", GstWebRTC.WebRTCICETransportPolicy.RELAY)
        # libnice skips loopback by default. The agent is destroyed with its last reference.
        self.agent = self.bin.get_property("ice-agent")
        self.agent.emit("add-local-ip-address", "127.0.0.1")
        pipeline.add(self.bin)
        self.channel = None
        self.sent = self.received = 0

    def use(self, channel):
        self.channel = channel
        channel.connect("on-message-string", self.hear)

    def hear(self, _channel, _text):
        self.received += 1

    def talk(self):
        if self.channel and self.channel.get_property("ready-state") == GstWebRTC.WebRTCDataChannelState.OPEN:
            self.channel.emit("send-string", f"message {self.sent}")
            self.sent += 1

    def describe(self, kind, then):
        """Creates an offer or an answer, sets it and passes it on."""

        def created(promise, _):
            # The reply contains the description.
            reply = promise.get_reply()
            description = reply.get_value(kind)
            self.bin.emit("set-local-description", description, Gst.Promise.new())
            then(description)

        self.bin.emit(f"create-{kind}", None, Gst.Promise.new_with_change_func(created, None))

    def take(self, description, then=lambda: None):
        promise = Gst.Promise.new_with_change_func(lambda *_: then(), None)
        self.bin.emit("set-remote-description", description, promise)


def copied(description, kind):
    _, sdp = GstSdp.sdp_message_new_from_text(description.sdp.as_text())
    return GstWebRTC.WebRTCSessionDescription.new(kind, sdp)


def main():
    transport, host, port, username, password, seconds = sys.argv[1:]
    Gst.init(None)
    # The plugin belongs to libnice and has its version.
    libnice = Gst.Registry.get().find_plugin("nice").get_version()
    print("version", Gst.version_string(), f"with libnice {libnice}", flush=True)
    scheme, over = ("turns", "tcp") if transport == "tls" else ("turn", transport)
    uri = f"{scheme}://{quote(username, safe='')}:{quote(password, safe='')}@{host}:{port}?transport={over}"
    pipeline = Gst.Pipeline.new("call")
    a, b = (End(pipeline, name, uri) for name in "ab")
    for one, other in ((a, b), (b, a)):
        # libnice keeps candidates that arrive before their description.
        one.bin.connect("on-ice-candidate", lambda _, line, text, to: to.bin.emit("add-ice-candidate", line, text), other)
    pipeline.set_state(Gst.State.PLAYING)
    a.use(a.bin.emit("create-data-channel", "call", None))
    b.bin.connect("on-data-channel", lambda _, channel: b.use(channel))
    kinds = GstWebRTC.WebRTCSDPType

    def answered(answer):
        a.take(copied(answer, kinds.ANSWER))

    a.describe("offer", lambda offer: b.take(copied(offer, kinds.OFFER), lambda: b.describe("answer", answered)))

    loop = GLib.MainLoop()
    began = None

    def talk():
        a.talk()
        b.talk()
        return True

    def report():
        nonlocal began
        if began is None:
            if not (a.received and b.received):
                return True
            began = time.monotonic()
        elapsed = time.monotonic() - began
        print(int(elapsed * 1000), a.sent, a.received, b.sent, b.received, flush=True)
        if elapsed >= float(seconds):
            loop.quit()
        return True

    GLib.timeout_add(INTERVAL_MS, talk)
    GLib.timeout_add(250, report)
    loop.run()
    pipeline.set_state(Gst.State.NULL)


if __name__ == "__main__":
    main()
