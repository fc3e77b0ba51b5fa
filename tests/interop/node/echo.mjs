// Relays the echo of a data channel through a TURN server with a WebRTC library for Node, and prints one JSON object about it.
//
// usage: echo.mjs werift|node-datachannel URI USERNAME PASSWORD COUNT, where the libraries are installed
//
// Two peer connections of this program use only relayed candidates. Every message must come back unchanged, once. Exit
// status: 0, all were echoed; 1, not all were echoed; 4, no connection in time (the JSON then has `states`).

import { createRequire } from "node:module";

const [library, uri, username, credential, count] = process.argv.slice(2);
const LENGTHS = [1, 3, 4, 120, 121, 1200, 16384];
const DEADLINE_MS = 15000;

// Resolved from the working directory: ./test installs nothing next to this file.
const require = createRequire(`${process.cwd()}/`);
const { RTCPeerConnection } = require(library === "werift" ? "werift" : "node-datachannel/polyfill");

function connection() {
  return new RTCPeerConnection({ iceServers: [{ urls: uri, username, credential }], iceTransportPolicy: "relay" });
}

// The value of `promise`, or undefined after a timeout.
function inTime(promise) {
  let timer;
  const late = new Promise((resolve) => timer = setTimeout(resolve, DEADLINE_MS));
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

async function run() {
  const a = connection(), b = connection();
  const kinds = new Set();
  // Candidates that arrive before their description wait for it.
  const described = new Map([a, b].map((pc) => {
    const gate = {};
    gate.open = new Promise((resolve) => gate.resolve = resolve);
    return [pc, gate];
  }));
  for (const [from, to] of [[a, b], [b, a]]) {
    from.onicecandidate = ({ candidate }) => {
      if (!candidate?.candidate) return;
      kinds.add(/ typ (\w+)/.exec(candidate.candidate)?.[1]);
      described.get(to).open.then(() => to.addIceCandidate(candidate));
    };
  }
  b.ondatachannel = ({ channel }) => {
    channel.binaryType = "arraybuffer";
    channel.onmessage = ({ data }) => channel.send(new Uint8Array(data));
  };
  const channel = a.createDataChannel("echo");
  channel.binaryType = "arraybuffer";
  const opened = new Promise((resolve) => channel.onopen = () => resolve(true));

  await a.setLocalDescription(await a.createOffer());
  await b.setRemoteDescription(a.localDescription);
  described.get(b).resolve();
  await b.setLocalDescription(await b.createAnswer());
  await a.setRemoteDescription(b.localDescription);
  described.get(a).resolve();

  if (!await inTime(opened)) {
    return { status: 4, candidates: [...kinds], states: [a.iceConnectionState, b.iceConnectionState] };
  }
  let echoed = 0;
  for (let number = 0; number < Number(count); number++) {
    const message = Uint8Array.from({ length: LENGTHS[number % LENGTHS.length] }, (_, i) => number + i);
    const arrived = new Promise((resolve) => channel.onmessage = ({ data }) => resolve(new Uint8Array(data)));
    channel.send(message);
    const back = await inTime(arrived);
    if (!back || Buffer.compare(back, message) !== 0) break;
    echoed++;
  }
  await Promise.all([a.close(), b.close()]);
  return { status: echoed === Number(count) ? 0 : 1, sent: Number(count), echoed, candidates: [...kinds] };
}

const report = await run();
console.log(JSON.stringify(report));
// Leaves a moment for the final Refresh to be sent, without waiting for other handles that keep the program alive.
setTimeout(() => process.exit(report.status), 500);
