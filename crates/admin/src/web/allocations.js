// Allocations: search, paged list, details, and the button that ends one.

import { ask } from "./api.js";
import { announce, h, panel, setText, table } from "./dom.js";
import { both, bits, bytes, count, many, named, network, perSecond, span, trouble, user } from "./format.js";

const PAGE = 100;
const AGAIN_MS = 2000;
const FIELDS = { user: "User", client: "Client address", relayed: "Relayed address", realm: "Realm", id: "Allocation" };

const millis = (ms) => `${ms.toFixed(1)} ms`;

// Figures of a leg since the allocation began; "" without any.
function legQuality(leg) {
  const texts = leg.round_trip_ms === null ? [] : [`round trip ${millis(leg.round_trip_ms)}`];
  for (const direction of ["uplink", "downlink"]) {
    const flow = leg[direction];
    if (flow === null) continue;
    texts.push(`${direction}: ${count(flow.lost)} of ${many(flow.expected, "datagram")} lost, jitter ${millis(flow.jitter_ms)}`);
  }
  return texts.join("; ");
}

// `words` is the query string of the page's address: the search, and the cursor and number of the page.
export function allocations(words) {
  const by = h("select", { id: "by" }, Object.entries(FIELDS).map(([value, name]) => h("option", { value }, name)));
  const wanted = h("input", { id: "wanted", type: "search", autocomplete: "off", spellcheck: "false" });
  const transport = h("select", { id: "transport" }, ["", "udp", "tcp", "tls", "dtls"].map((value) =>
    h("option", { value }, value === "" ? "any" : value.toUpperCase())));
  by.value = Object.keys(FIELDS).find((field) => words.has(field)) ?? "user";
  wanted.value = words.get(by.value) ?? "";
  transport.value = words.get("transport") ?? "";

  const form = h("form", {
    class: "search",
    role: "search",
    onsubmit: (event) => {
      event.preventDefault();
      const text = wanted.value.trim();
      if (by.value === "id" && text !== "") {
        location.hash = `#/allocations/${text}`;
        return;
      }
      const query = new URLSearchParams();
      if (text !== "") query.set(by.value, text);
      if (transport.value !== "") query.set("transport", transport.value);
      if (!go(query)) load();
    },
  },
  h("p", {}, h("label", { for: "by" }, "Find by"), by),
  h("p", {}, h("label", { for: "wanted" }, "Value"), wanted),
  h("p", {}, h("label", { for: "transport" }, "Transport"), transport),
  h("p", {}, h("button", { class: "main" }, "Find")));

  const found = h("p", { class: "note", role: "status" }, "Loading…");
  const problem = h("p", { class: "warning", hidden: true, role: "alert" });
  const list = table("Allocations", [
    { title: "User", heads: true, cell: (row) => ({ text: user(row.user), href: `#/allocations/${row.id}`, note: named(row.realm) }) },
    { title: "Client", cell: (row) => ({ text: row.client, note: both(network(row.network), row.away ? `${row.transport}, disconnected` : row.transport) }) },
    { title: "Relayed", cell: (row) => row.relayed.map((one) => one.address).join(", ") },
    { title: "Age", number: true, cell: (row) => span(row.age_s) },
    { title: "To peers", number: true, cell: (row) => bytes(row.to_peer.bytes) },
    { title: "To client", number: true, cell: (row) => bytes(row.to_client.bytes) },
    { title: "Quality", cell: (row) => trouble(row.quality_problem) },
    { title: "Worker", number: true, cell: (row) => ({ text: String(row.worker), note: place(row) || undefined }) },
  ], "No matching allocations.");
  const back = h("button", { type: "button", onclick: () => history.back() }, "Previous page");
  const onward = h("button", { type: "button" }, "Next page");
  const pages = h("nav", { "aria-label": "Pages of allocations", class: "pages" }, back, onward);
  const page = Number(words.get("page") ?? 1);
  let current = true;
  let next = null;
  onward.addEventListener("click", () => {
    const query = new URLSearchParams(words);
    query.set("cursor", next);
    query.set("page", page + 1);
    go(query);
  });

  async function load() {
    const query = new URLSearchParams(words);
    query.delete("page");
    query.set("limit", PAGE);
    try {
      // In a fleet, lists the allocations of all nodes.
      const { node } = await ask("/v1/status");
      const answer = await ask(`/v1/${node ? "fleet/" : ""}allocations?${query}`);
      if (!current) return;
      next = answer.next;
      list.update(answer.allocations);
      const silent = answer.silent ?? [];
      setText(problem, `Some allocations are missing. ${silent.join("; ")}`);
      problem.hidden = silent.length === 0;
      const allocations = many(answer.allocations.length, "allocation");
      setText(found, page === 1 && next === null ? allocations : `${allocations}, page ${page}${next === null ? " (the last)" : ""}`);
    } catch (error) {
      if (!current) return;
      list.update([]);
      setText(found, "");
      setText(problem, error.message);
      problem.hidden = false;
    }
    back.hidden = page === 1;
    onward.hidden = next === null;
  }

  back.hidden = true;
  onward.hidden = true;
  load();
  return {
    element: h("div", {}, h("h1", { tabindex: "-1" }, "Allocations"), form, problem, found, list.element, pages),
    title: "Allocations",
    close: () => {
      current = false;
    },
  };
}

function place(row) {
  return [row.process && `process ${row.process}`, row.node && `node ${named(row.node)}`].filter(Boolean).join(", ");
}

// Opens the page for this query. Returns false if it is already open.
function go(query) {
  const text = query.toString();
  const wanted = text === "" ? "#/allocations" : `#/allocations?${text}`;
  if (location.hash === wanted) return false;
  location.hash = wanted;
  return true;
}

// One allocation, refreshed every two seconds. `mayChange` returns true if it may be ended.
export function allocation(id, mayChange) {
  const about = h("dl", { class: "facts" });
  const problem = h("p", { class: "warning", hidden: true, role: "alert" });
  const permissions = table("Permissions", [
    { title: "Peer", heads: true, cell: (row) => row.peer },
    { title: "Left", number: true, cell: (row) => span(row.expires_in_s) },
  ], "No permissions.");
  const channels = table("Channels", [
    { title: "Channel", heads: true, cell: (row) => `0x${row.number.toString(16)}` },
    { title: "Peer", cell: (row) => row.peer },
    { title: "Left", number: true, cell: (row) => span(row.expires_in_s) },
  ], "No bound channels.");
  const end = h("button", { type: "button", class: "danger", disabled: true, onclick: () => dialog.showModal() }, "End allocation…");
  const why = h("p", { class: "note", id: "why-not" });
  const question = h("p");
  const dialog = h("dialog", { "aria-labelledby": "end-title" },
    h("h2", { id: "end-title" }, "End this allocation?"), question,
    h("p", { class: "actions" },
      h("button", { type: "button", autofocus: true, onclick: () => dialog.close() }, "Cancel"),
      h("button", { type: "button", class: "danger", onclick: finish }, "End allocation")));
  const facts = new Map();
  let before = null;
  let current = true;
  let timer = null;

  function fact(name, text) {
    if (!facts.has(name)) {
      const value = h("dd");
      facts.set(name, value);
      about.append(h("div", {}, h("dt", {}, name), value));
    }
    setText(facts.get(name), text);
  }

  async function load() {
    try {
      const found = await ask(`/v1/allocations/${encodeURIComponent(id)}`);
      if (!current) return;
      show(found);
      problem.hidden = true;
      timer = setTimeout(load, AGAIN_MS);
    } catch (error) {
      if (!current) return;
      setText(problem, error.message);
      problem.hidden = false;
      end.disabled = true;
      // Stops polling: an ended allocation cannot reappear.
      if (error.status !== 404 && error.status !== 400) timer = setTimeout(load, AGAIN_MS);
    }
  }

  function show(found) {
    const seconds = before === null ? 0 : found.age_s - before.age_s;
    const traffic = (name) => {
      const total = `${many(found[name].datagrams, "datagram")}, ${bytes(found[name].bytes)}`;
      if (!(seconds > 0)) return total;
      const more = (what) => Math.max(0, found[name][what] - before[name][what]) / seconds;
      return `${total}; now ${bits(more("bytes") * 8)}, ${perSecond(more("datagrams"))} datagrams`;
    };
    fact("User", user(found.user));
    if (found.identity !== null) fact("Quotas apply to", named(found.identity));
    fact("Realm", named(found.realm));
    fact("Client", `${found.client} over ${found.transport.toUpperCase()} to ${found.server}${found.away ? " (disconnected)" : ""}`);
    if (found.network) fact("Network", network(found.network));
    fact("Relayed", found.relayed.map((one) => `${one.address} (${found.relayed_transport.toUpperCase()}), ${span(one.expires_in_s)} left`).join("; "));
    fact("Age", span(found.age_s));
    fact("To peers", traffic("to_peer"));
    fact("To client", traffic("to_client"));
    if (found.quality_problem) fact("Quality", found.quality_problem.sentence);
    for (const leg of ["client", "peer"]) {
      const figures = found.quality ? legQuality(found.quality[leg]) : "";
      if (figures !== "") fact(`Leg of the ${leg}`, figures);
    }
    if (found.peer_connections > 0) fact("Connections to peers", count(found.peer_connections));
    if (found.mobile) fact("Mobile", "Follows its client to another address.");
    if (found.process) fact("Process", `${found.process}, the previous process: its clients stay there after an upgrade.`);
    if (found.node) fact("Node", named(found.node));
    fact("Worker", String(found.worker));
    permissions.update(found.permissions ?? []);
    channels.update(found.channels ?? []);
    setText(question, `The client ${found.client} of ${user(found.user)} loses its relayed traffic. The client may immediately create another allocation.`);
    before = found;
    const allowed = mayChange();
    end.disabled = !allowed;
    setText(why, allowed ? "" : "Ending an allocation needs a token with full access.");
  }

  async function finish() {
    dialog.close();
    try {
      const ended = await ask(`/v1/allocations/${encodeURIComponent(id)}`, { method: "DELETE" });
      announce(`The allocation of ${user(ended.user)} has ended.`);
      location.hash = "#/allocations";
    } catch (error) {
      setText(problem, error.message);
      problem.hidden = false;
    }
  }

  end.setAttribute("aria-describedby", "why-not");
  load();
  return {
    element: h("div", {}, h("p", {}, h("a", { href: "#/allocations" }, "All allocations")),
      h("h1", { tabindex: "-1", class: "id" }, `Allocation ${id}`), problem, about, h("p", {}, end), why, dialog,
      h("div", { class: "panels" }, panel("Permissions", null, permissions.element), panel("Channels", null, channels.element))),
    title: "Allocation",
    close: () => {
      current = false;
      clearTimeout(timer);
    },
  };
}
