// Two peer connections of node-datachannel that may only meet through a TURN server talk over a data channel.
//
// usage: call.mjs TRANSPORT HOST PORT USERNAME PASSWORD SECONDS, where the library is installed
// It prints `version NAMES`, then each 250 ms `MS SENT RECEIVED SENT RECEIVED`: the time since the call began, and the messages of
// either end so far.

import { createRequire } from "node:module";

const [transport, host, port, ...rest] = process.argv.slice(2);
const seconds = rest.pop();
// They are put into a URI as they are, where a colon ends the name.
const [username, credential] = rest.map(encodeURIComponent);
const INTERVAL_MS = 60;

// Not from where this file lies: ./test installs nothing there.
const require = createRequire(`${process.cwd()}/`);
const { RTCPeerConnection } = require("node-datachannel/polyfill");
const { version } = require("./node_modules/node-datachannel/package.json");
console.log(`version node-datachannel ${version} with libdatachannel ${require("node-datachannel").getLibraryVersion()}`);

const [scheme, over] = transport === "tls" ? ["turns", "tcp"] : ["turn", transport];
const urls = `${scheme}:${host}:${port}?transport=${over}`;

class End {
  constructor() {
    this.pc = new RTCPeerConnection({ iceServers: [{ urls, username, credential }], iceTransportPolicy: "relay" });
    this.sent = this.received = 0;
    // Candidates that come before the description that they belong to wait for it.
    this.described = new Promise((resolve) => this.isDescribed = resolve);
  }

  use(channel) {
    channel.onmessage = () => this.received++;
    setInterval(() => {
      if (channel.readyState !== "open") return;
      channel.send("message");
      this.sent++;
    }, INTERVAL_MS);
  }

  async take(description) {
    await this.pc.setRemoteDescription(description);
    this.isDescribed();
  }
}

const [a, b] = [new End(), new End()];
for (const [from, to] of [[a, b], [b, a]]) {
  from.pc.onicecandidate = ({ candidate }) => {
    if (candidate?.candidate) to.described.then(() => to.pc.addIceCandidate(candidate));
  };
}
b.pc.ondatachannel = ({ channel }) => b.use(channel);
a.use(a.pc.createDataChannel("call"));
await a.pc.setLocalDescription(await a.pc.createOffer());
await b.take(a.pc.localDescription);
await b.pc.setLocalDescription(await b.pc.createAnswer());
await a.take(b.pc.localDescription);

let began;
setInterval(() => {
  if (began === undefined) {
    if (!a.received || !b.received) return;
    began = performance.now();
  }
  const elapsed = performance.now() - began;
  console.log(Math.round(elapsed), a.sent, a.received, b.sent, b.received);
  if (elapsed >= seconds * 1000) process.exit();
}, 250);
