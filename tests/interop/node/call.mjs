// Two peer connections of node-datachannel exchange messages over a data channel, through a TURN server only.
//
// usage: call.mjs TRANSPORT HOST PORT USERNAME PASSWORD SECONDS, where the library is installed
// It prints `version NAMES`, then every 250 ms `MS SENT RECEIVED SENT RECEIVED`: the time since the call began, and the messages of
// each end so far.

import { createRequire } from "node:module";

const [transport, host, port, ...rest] = process.argv.slice(2);
const seconds = rest.pop();
// The library puts username and password into a URI without escaping, so a colon would end the username.
const [username, credential] = rest.map(encodeURIComponent);
const INTERVAL_MS = 60;

// Resolved from the working directory: ./test installs nothing next to this file.
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
    // Candidates that arrive before their description wait for it.
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
