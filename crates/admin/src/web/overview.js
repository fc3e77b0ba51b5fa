// Overview page: current activity and the last ten minutes.

import { chart } from "./chart.js";
import { ask } from "./api.js";
import { h, panel, setAttribute, setText, table } from "./dom.js";
import { both, bits, clock, count, decimal, many, micros, named, network, NONE, percent, perSecond, span, dateTime, user } from "./format.js";
import { dropWords, keyLinks, refusalWords } from "./words.js";

const SECONDS = 600;
const SOMETIMES_MS = 10000;

const sum = (list, of) => list.reduce((total, one) => total + of(one), 0);
const most = (list, of) => list.reduce((found, one) => (of(one) ?? -1) > (found ?? -1) ? of(one) : found, null);

// A box with one large figure.
function tile(title, help) {
  const value = h("dd");
  const note = h("dd", { class: "note" });
  const element = h("div", { class: "tile", title: help }, h("dt", {}, title), value, note);
  return {
    element,
    show(text, more = "", level = "") {
      setText(value, text);
      setText(note, more);
      setAttribute(element, "class", `tile ${level}`.trim());
    },
  };
}

// Moment whose values all graphs show, with a slider for use without a pointer.
function timeCursor(changed) {
  let back = 0;
  const slider = h("input", { type: "range", id: "back", min: 0, max: SECONDS - 1, value: 0, step: 1 });
  const shown = h("output", { for: "back" }, "now");
  const element = h("p", { class: "cursor" }, h("label", { for: "back" }, "Look back"), slider, shown);
  function set(seconds) {
    back = Math.max(0, Math.min(SECONDS - 1, Math.round(seconds)));
    const words = back === 0 ? "now" : `${clock(new Date(Date.now() - back * 1000))}, ${span(back)} ago`;
    setText(shown, words);
    setAttribute(slider, "aria-valuetext", words);
    changed();
  }
  slider.addEventListener("input", () => set(Number(slider.value)));
  return {
    element,
    seconds: SECONDS,
    back: () => back,
    // Position of the pointer as a fraction of the time span, counted back from now; null if it is elsewhere.
    point: (share) => set(share === null ? Number(slider.value) : share * (SECONDS - 1)),
  };
}

const SERVER_CHARTS = [
  { title: "Relayed", series: [{ name: "to peers", key: "to_peer_bps" }, { name: "to clients", key: "to_client_bps" }], format: bits, least: 1000 },
  { title: "Datagrams", series: [{ name: "to peers", key: "to_peer_pps" }, { name: "to clients", key: "to_client_pps" }], format: perSecond, least: 10 },
  { title: "Allocations", series: [{ name: "Allocations", key: "open" }], format: count, least: 10 },
  { title: "Lost and refused", series: [{ name: "lost or dropped", key: "dropped" }, { name: "refused", key: "refused" }], format: perSecond, least: 10 },
  { title: "Busiest worker", series: [{ name: "Busiest worker", key: "load" }], format: percent, least: 1 },
  { title: "Event loop", series: [{ name: "Event loop", key: "event_loop_us" }], format: micros, least: 100 },
];

const FORWARDER_CHARTS = [
  { title: "Forwarded", series: [{ name: "to targets", key: "to_peer_bps" }, { name: "to clients", key: "to_client_bps" }], format: bits, least: 1000 },
  { title: "Connections", series: [{ name: "Connections", key: "open" }], format: count, least: 10 },
];

export function overview(job) {
  const parts = job === "forward" ? forwarder() : server();
  let shown = null;
  const cursor = timeCursor(() => shown && charts.forEach((one) => one.update(shown)));
  const charts = (job === "forward" ? FORWARDER_CHARTS : SERVER_CHARTS).map((settings) => chart(settings, cursor));
  const element = h("div", {}, h("h1", { tabindex: "-1", class: "unseen" }, "Overview"),
    h("dl", { class: "tiles", "aria-label": "Now" }, parts.tiles),
    h("section", { "aria-labelledby": "history" }, h("h2", { id: "history" }, "The last ten minutes"), cursor.element,
      h("div", { class: "charts" }, charts.map((one) => one.element))),
    h("div", { class: "panels" }, parts.panels));
  const timer = setInterval(parts.sometimes, SOMETIMES_MS);
  parts.sometimes();
  return {
    element,
    title: "Overview",
    update(live, history) {
      shown = history;
      parts.update(live);
      charts.forEach((one) => one.update(history));
    },
    close: () => clearInterval(timer),
  };
}

const reasonColumns = (words) => [
  { title: "Reason", heads: true, cell: (row) => ({ text: words(row), note: `${row.kind} · ${row.reason}`, links: keyLinks(row.keys ?? []) }) },
  { title: "Now", number: true, cell: (row) => perSecond(row.rate) },
  { title: "Since startup", number: true, cell: (row) => count(row.total) },
];

// Sorted by total, so that rows rarely change places.
const byTotal = (reasons) => [...reasons].sort((one, other) => other.total - one.total);

function server() {
  const allocations = tile("Allocations", "Current allocations.");
  const toPeers = tile("To peers", "Payload relayed from clients to peers.");
  const toClients = tile("To clients", "Payload relayed from peers to clients.");
  const lost = tile("Lost or dropped", "Datagrams that were not relayed, for any reason.");
  const refused = tile("Refused", "Requests, connections and handshakes that were refused.");
  const load = tile("Busiest worker", "CPU use of the busiest worker as a share of its core.");
  const loop = tile("Event loop", "Time that a datagram currently waits for the slowest worker.");
  const opening = tile("Allocation time", "Time from the request to the open relay socket: 99th percentile over the last minute.");

  const workers = table("Workers", [
    { title: "Worker", heads: true, cell: (row) => String(row.number) },
    { title: "Load", number: true, cell: (row) => ({ text: percent(row.load), share: row.load ?? 0 }) },
    { title: "Waits for its core", number: true, cell: (row) => percent(row.waiting) },
    { title: "Event loop", number: true, cell: (row) => micros(row.event_loop_us) },
    { title: "Allocations", number: true, cell: (row) => count(row.allocations) },
    { title: "Received", number: true, cell: (row) => perSecond(row.received) },
    { title: "Per call", number: true, cell: (row) => decimal(row.receive_batch) },
    { title: "Sent", number: true, cell: (row) => perSecond(row.sent) },
    { title: "Per call", number: true, cell: (row) => decimal(row.send_batch) },
    { title: "Lost", number: true, cell: (row) => perSecond(row.dropped) },
  ]);
  const datapath = h("p");
  const across = h("p", { class: "note" });
  const batches = table("Datagrams per receive call", [
    { title: "Datagrams", heads: true, cell: (row) => (row.to === null ? `${row.from} or more` : row.from === row.to ? `${row.from}` : `${row.from} to ${row.to}`) },
    { title: "Calls", number: true, cell: (row) => perSecond(row.rate) },
    { title: "Share", number: true, cell: (row) => ({ text: percent(row.part), share: row.part }) },
  ], "No receive calls in the last second.");
  const drops = table("Lost and dropped datagrams by reason", reasonColumns(dropWords), "Nothing lost or dropped so far.");
  const refusals = table("Refusals by reason", reasonColumns(refusalWords), "Nothing refused so far.");
  const talkers = table("Allocations that relay the most", [
    { title: "User", heads: true, cell: (row) => ({ text: user(row.user), href: `#/allocations/${row.id}`, note: named(row.realm) }) },
    { title: "Client", cell: (row) => ({ text: row.client, note: both(network(row.network), row.transport) }) },
    { title: "To peers", number: true, cell: (row) => bits(row.to_peer.bytes * 8) },
    { title: "To client", number: true, cell: (row) => bits(row.to_client.bytes * 8) },
    { title: "Datagrams", number: true, cell: (row) => perSecond(row.to_peer.datagrams + row.to_client.datagrams) },
  ], "No allocation is relaying data.");
  const talking = h("p", { class: "note" });
  const transports = table("Allocations by transport", [
    { title: "Transport", heads: true, cell: (row) => row.transport.toUpperCase() },
    { title: "Allocations", number: true, cell: (row) => count(row.allocations) },
    { title: "Share", number: true, cell: (row) => ({ text: percent(row.part), share: row.part }) },
  ]);
  const listeners = table("Allocations by listener", [
    { title: "Listener", heads: true, cell: (row) => (row.server_name ? { text: row.address, note: row.server_name } : row.address) },
    { title: "Transport", cell: (row) => row.transport.toUpperCase() },
    { title: "Allocations", number: true, cell: (row) => count(row.allocations) },
  ]);
  const relays = table("Relay addresses", [
    { title: "Relay address", heads: true, cell: (row) => (row.external ? { text: row.address, note: row.external } : row.address) },
    { title: "State", cell: (row) => (row.up ? "up" : "absent") },
    { title: "Since", cell: (row) => dateTime(row.since) },
  ]);
  const realms = table("Allocations by realm", [
    { title: "Realm", heads: true, cell: (row) => named(row.name) },
    { title: "Allocations", number: true, cell: (row) => count(row.allocations) },
  ], "No realm has allocations.");
  const certificates = table("Certificates", [
    { title: "Names", heads: true, cell: (row) => ({ text: row.names.map(named).join(", ") || NONE, note: named(row.file) }) },
    { title: "Expires", cell: (row) => dateTime(row.not_after) },
    { title: "Left", cell: (row) => (row.expires_in_s < 0 ? `expired ${span(-row.expires_in_s)} ago` : span(row.expires_in_s)) },
    { title: "DTLS", cell: (row) => (row.dtls ? "yes" : "no") },
  ], "No certificate is configured.");
  const expiry = h("p", { class: "warning", hidden: true });
  const failed = h("p", { class: "warning", hidden: true });
  const limits = table("Limits", [
    { title: "Limit", heads: true, cell: (row) => keyLinks([row.key])[0] },
    { title: "In use", number: true, cell: (row) => ({ text: `${count(row.used)} of ${count(row.most)}`, share: row.used / row.most }) },
  ]);

  const nodes = table("Nodes of the fleet", [
    { title: "Node", heads: true, cell: (row) => ({ text: named(row.name), note: [row.zone, row.version].filter(Boolean).join(", ") }) },
    { title: "State", cell: (row) => (row.state === "silent" ? `silent for ${span(row.silent_s)}` : row.state) },
    { title: "Busy", number: true, cell: (row) => ({ text: percent(row.busy), share: row.busy }) },
    { title: "Allocations", number: true, cell: (row) => `${count(row.allocations)} of ${count(row.max_allocations)}` },
    { title: "Traffic", number: true, cell: (row) => bits(row.bits_per_second) },
    { title: "Busiest worker", number: true, cell: (row) => percent(row.cpu) },
  ], "No known nodes.");
  const alone = h("p", { class: "warning", hidden: true });
  const recovering = h("p", { class: "warning", hidden: true },
    "The store does not know the quota use of all nodes yet; until it does, each node may use an equal share of every quota.");
  const fleet = wide(panel("Fleet", "Servers that form one service, as seen by this one.", alone, recovering, nodes.element));
  fleet.hidden = true;
  let node = null;

  async function lookAtFleet() {
    const told = await ask("/v1/fleet");
    nodes.update(told.nodes);
    alone.hidden = !told.alone;
    recovering.hidden = !told.recovering;
    setText(alone, told.alone ? `This node has no contact with the others, and the data below is outdated: ${told.alone}` : "");
    fleet.hidden = false;
  }

  function update(live) {
    if (live.status.node && node === null) {
      node = live.status.node;
      sometimes();
    }
    const now = live.server;
    if (!now) return;
    const loss = sum(now.drops, (reason) => reason.rate);
    const once = new Set(["answer", "credentials", "connection", "tls", "dtls"]);
    const refusedNow = sum(now.refusals.filter((reason) => once.has(reason.kind)), (reason) => reason.rate);
    const busiest = most(now.workers, (worker) => worker.load);
    const slowest = most(now.workers, (worker) => worker.event_loop_us);
    allocations.show(count(live.status.open), `${perSecond(now.opened)} opened, ${perSecond(now.closed)} ended`);
    toPeers.show(bits(now.to_peer.bytes * 8), `${perSecond(now.to_peer.datagrams)} datagrams`);
    toClients.show(bits(now.to_client.bytes * 8), `${perSecond(now.to_client.datagrams)} datagrams`);
    const handled = now.received + now.across.datagrams;
    lost.show(perSecond(loss), handled > 0 ? `${percent(loss / (handled + loss))} of the traffic` : "", loss > 0.01 * handled && loss > 1 ? "bad" : "");
    refused.show(perSecond(refusedNow), `${perSecond(now.requests)} requests`);
    load.show(percent(busiest), `${decimal(live.cores)} cores in total`, busiest > 0.95 ? "bad" : busiest > 0.8 ? "warn" : "");
    loop.show(micros(slowest), many(now.workers.length, "worker"), slowest > 50000 ? "bad" : slowest > 5000 ? "warn" : "");
    const { p50_s: half, p99_s: nearly, count: recent } = now.opening ?? { count: 0 };
    opening.show(recent ? atMost(nearly) : NONE, recent ? `median of ${count(recent)}: ${atMost(half)}` : "none in the last minute");

    workers.update(now.workers);
    const { step, why } = live.status.datapath ?? { step: NONE, why: "" };
    setText(datapath, `${step}: ${why}`);
    setText(across, now.across.datagrams > 0
      ? `The kernel relays ${perSecond(now.across.datagrams)} datagrams (${bits(now.across.bytes * 8)}) without waking a worker.`
      : "All datagrams go through the workers.");
    const calls = sum(now.batches, (batch) => batch.rate);
    const last = now.batches.findLastIndex((batch) => batch.rate > 0);
    batches.update(now.batches.slice(0, last + 1).map((batch) => ({ ...batch, part: calls > 0 ? batch.rate / calls : 0 })));
    drops.update(byTotal(now.drops));
    refusals.update(byTotal(now.refusals));
    talkers.update(now.talkers?.talkers ?? []);
    setText(talking, now.talkers
      ? `${many(now.talkers.active, "allocation")} relayed data in the last ${span(now.talkers.interval_s)}.`
      : "Measuring which allocations relay the most…");
    const byTransport = ["udp", "tcp", "tls", "dtls"].map((transport) => ({
      transport, allocations: sum(now.listeners.filter((one) => one.transport === transport), (one) => one.allocations),
    }));
    const all = sum(byTransport, (one) => one.allocations);
    transports.update(byTransport.map((one) => ({ ...one, part: all > 0 ? one.allocations / all : 0 })));
    relays.update(live.status.relays ?? []);
    listeners.update([...now.listeners].sort((one, other) => other.allocations - one.allocations).filter((one, at) => one.allocations > 0 || at < 8));
    realms.update(now.realms);
  }

  async function sometimes() {
    try {
      const { certificates: told, orders } = await ask("/v1/certificates");
      certificates.update(told);
      const soon = told.filter((one) => one.ends_soon);
      setText(expiry, soon.map((one) => `${one.file} ${one.expires_in_s < 0 ? "has expired" : `expires in ${span(one.expires_in_s)}`}.`).join(" "));
      expiry.hidden = soon.length === 0;
      const failing = orders.filter((one) => one.failures > 0);
      setText(failed, failing.map((one) => `No new certificate for ${named(one.name)} (next attempt ${dateTime(one.next)}): ${named(one.error)}.`).join(" "));
      failed.hidden = failing.length === 0;
      limits.update((await ask("/v1/limits")).limits.filter((limit) => limit.used !== null));
      if (node !== null) await lookAtFleet();
    } catch {
      // The event stream reports the error.
    }
  }

  return {
    tiles: [allocations, toPeers, toClients, lost, refused, load, loop, opening].map((one) => one.element),
    panels: [
      fleet,
      wide(panel("Workers", null, workers.element)),
      panel("Loss and drops", "Datagrams that were not relayed.", drops.element),
      panel("Refusals", "Refused requests, connections and handshakes. An error response is listed twice, by code and by reason.", refusals.element),
      panel("Data path", null, datapath, across, h("h3", {}, "Datagrams per receive call"), batches.element),
      wide(panel("Top talkers", null, talking, talkers.element)),
      panel("Transports", null, transports.element, h("h3", {}, "Listeners"), listeners.element,
        h("h3", {}, "Relay addresses"), relays.element),
      panel("Realms", null, realms.element),
      panel("Limits", null, limits.element),
      wide(panel("Certificates", null, expiry, failed, certificates.element)),
    ],
    update,
    sometimes,
  };
}

const atMost = (seconds) => (seconds === null || seconds === undefined ? "over 2 s" : `≤\u00a0${micros(seconds * 1e6)}`);

function wide(element) {
  element.classList.add("wide");
  return element;
}

function forwarder() {
  const open = tile("Connections", "Open connections and UDP sessions.");
  const toTargets = tile("To targets", "Payload forwarded from clients to targets.");
  const toClients = tile("To clients", "Payload forwarded from targets to clients.");
  const cores = tile("Cores", "CPU use of the program; 1.0 is one core.");
  const rules = table("Rules", [
    { title: "Rule", heads: true, cell: (row) => named(row.name) },
    { title: "State", cell: (row) => row.waits_for ?? row.state },
    { title: "Open", number: true, cell: (row) => count(row.open) },
    { title: "New", number: true, cell: (row) => perSecond(row.accepted) },
    { title: "To targets", number: true, cell: (row) => bits(row.to_target.bytes * 8) },
    { title: "To clients", number: true, cell: (row) => bits(row.to_client.bytes * 8) },
    { title: "Datagrams", number: true, cell: (row) => perSecond(row.to_target.datagrams + row.to_client.datagrams) },
  ], "There are no rules.");
  const ends = table("Ended connections and dropped datagrams by reason", [
    { title: "Rule", heads: true, cell: (row) => named(row.rule) },
    { title: "Reason", cell: (row) => row.reason.replaceAll("_", " ") },
    { title: "Now", number: true, cell: (row) => perSecond(row.rate) },
    { title: "Since startup", number: true, cell: (row) => count(row.total) },
  ]);
  function update(live) {
    open.show(count(live.status.open), `${perSecond(sum(live.rules, (rule) => rule.accepted))} opened`);
    toTargets.show(bits(sum(live.rules, (rule) => rule.to_target.bytes) * 8), "");
    toClients.show(bits(sum(live.rules, (rule) => rule.to_client.bytes) * 8), "");
    cores.show(decimal(live.cores), "");
    rules.update(live.rules);
    ends.update(byTotal(live.rules.flatMap((rule) => rule.ends.map((end) => ({ rule: rule.name, ...end })))));
  }
  return {
    tiles: [open, toTargets, toClients, cores].map((one) => one.element),
    panels: [wide(panel("Rules", null, rules.element)), wide(panel("Ended connections", null, ends.element))],
    update,
    sometimes: () => {},
  };
}
