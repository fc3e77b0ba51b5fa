// Frame of the pages: navigation, state of the server, and access rights.

import { ask, hasToken, setToken, watch } from "./api.js";
import { announce, setAttribute, setText } from "./dom.js";
import { span } from "./format.js";
import { configuration } from "./configuration.js";
import { overview } from "./overview.js";
import { refusals } from "./refusals.js";
import { allocation, allocations } from "./allocations.js";
import { usage } from "./usage.js";

const POINTS = 600;
const part = (id) => document.getElementById(id);

let shown = null;
let live = null;
let columns = null;
let mayChange = false;
let job = null;

// ------------------------------------------------------------------------------------------------------------- pages

function page(path, words) {
  if (path.startsWith("/allocations/")) return allocation(path.slice("/allocations/".length), () => mayChange);
  switch (path) {
    case "/allocations": return allocations(words);
    case "/refusals": return refusals(words);
    case "/usage": return usage(words);
    case "/configuration": return configuration(words);
    default: return overview(job ?? "serve");
  }
}

function show(first) {
  // Bookmarks from version 0.1 contain /sessions.
  const [path, query = ""] = location.hash.replace(/^#/, "").replace(/^\/sessions\b/, "/allocations").split("?");
  shown?.close?.();
  shown = page(path, new URLSearchParams(query));
  part("main").replaceChildren(shown.element);
  document.title = `${shown.title} · turnpike`;
  for (const link of part("pages").querySelectorAll("a")) {
    const [, of] = link.getAttribute("href").split("#");
    const is = of === "/" ? path === "" || path === "/" : path.startsWith(of);
    if (is) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (live !== null && columns !== null) shown.update?.(live, columns);
  // Moves the focus to the new page, for keyboards and screen readers; not on the first load.
  if (!first) part("main").querySelector("h1")?.focus();
}

// ------------------------------------------------------------------------------------------------------------- stream

// Appends a reading to the history, as the server does.
function add(reading) {
  const server = reading.server;
  const total = (list, of) => list.reduce((sum, one) => sum + of(one), 0);
  const greatest = (list, of) => list.reduce((found, one) => Math.max(found ?? 0, of(one) ?? 0), null);
  const once = new Set(["answer", "credentials", "connection", "tls", "dtls"]);
  const rules = reading.rules ?? [];
  const point = server ? {
    open: reading.status.open,
    to_peer_bps: server.to_peer.bytes * 8,
    to_client_bps: server.to_client.bytes * 8,
    to_peer_pps: server.to_peer.datagrams,
    to_client_pps: server.to_client.datagrams,
    dropped: total(server.drops, (reason) => reason.rate),
    refused: total(server.refusals.filter((reason) => once.has(reason.kind)), (reason) => reason.rate),
    load: greatest(server.workers, (worker) => worker.load),
    event_loop_us: greatest(server.workers, (worker) => worker.event_loop_us),
  } : {
    open: reading.status.open,
    to_peer_bps: total(rules, (rule) => rule.to_target.bytes * 8),
    to_client_bps: total(rules, (rule) => rule.to_client.bytes * 8),
    to_peer_pps: total(rules, (rule) => rule.to_target.datagrams),
    to_client_pps: total(rules, (rule) => rule.to_client.datagrams),
  };
  // The first reading may repeat the last point of the history.
  if (columns.ends_at !== null && new Date(reading.at) <= new Date(columns.ends_at)) return;
  const missed = columns.ends_at === null ? 0 : Math.round((new Date(reading.at) - new Date(columns.ends_at)) / 1000) - 1;
  for (const [name, column] of Object.entries(columns)) {
    if (!Array.isArray(column)) continue;
    for (let gap = 0; gap < Math.min(missed, POINTS); gap += 1) column.push(null);
    column.push(point[name] ?? null);
    column.splice(0, Math.max(0, column.length - POINTS));
  }
  columns.ends_at = reading.at;
}

function about(reading) {
  const { status } = reading;
  const whose = status.job === "forward" ? "forward" : "serve";
  if (job !== whose) {
    const assumed = job ?? "serve";
    job = whose;
    setText(part("job"), whose);
    for (const item of part("pages").querySelectorAll(".of-server")) item.hidden = whose === "forward";
    if (whose !== assumed) show(true);
  }
  const node = status.node ? `, node ${status.node} of its fleet` : "";
  setText(part("about"), `turnpike ${status.version}${node}, process ${status.pid} on ${location.host}, up ${span(status.uptime_s)}`);
}

const STATES = {
  live: "Live",
  polling: "Every 5 s",
  lost: "No connection",
  token: "Token needed",
  hidden: "Paused",
};

function state(word, why = "") {
  const draining = live?.status.draining && (word === "live" || word === "polling");
  setText(part("state"), draining ? "Draining" : STATES[word]);
  setAttribute(part("state"), "class", `pill ${draining ? "draining" : word}`);
  setAttribute(part("state"), "title", why);
  if (word === "token") openTokens(why);
}

// ------------------------------------------------------------------------------------------------------------- tokens

// Returns the error message if the token is wrong.
async function look() {
  let wrong = null;
  try {
    mayChange = (await ask("/v1/access")).may_change;
    setText(part("access"), mayChange ? "Full access" : "Read only");
  } catch (problem) {
    mayChange = false;
    setText(part("access"), problem.needsToken ? "No access" : "");
    if (problem.code === "wrong_token") wrong = problem.message;
  }
  part("token-forget").hidden = !hasToken();
  return wrong;
}

function openTokens(why) {
  if (why) setText(part("token-why"), why);
  if (!part("token-dialog").open) part("token-dialog").showModal();
  part("token").focus();
}

async function use(token) {
  part("token-dialog").close();
  setToken(token);
  const wrong = await look();
  if (wrong !== null) {
    // Read access may be possible without a token.
    setToken("");
    await look();
    openTokens(wrong);
    return;
  }
  announce(mayChange ? "You now have full access." : part("access").textContent);
  dispatchEvent(new Event("token"));
  show(true);
}

part("token-open").addEventListener("click", () => openTokens());
part("token-use").addEventListener("click", () => use(part("token").value.trim()));
part("token").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  // Without this, Enter would press the focused button after the dialog has closed.
  event.preventDefault();
  use(part("token").value.trim());
});
part("token-dialog").addEventListener("close", () => {
  part("token").value = "";
});
part("token-cancel").addEventListener("click", () => part("token-dialog").close());
part("token-forget").addEventListener("click", () => use(""));
part("skip").addEventListener("click", (event) => {
  event.preventDefault();
  part("main").focus();
});
addEventListener("hashchange", () => show(false));

look();
show(true);
watch({
  history(told) {
    columns = told;
  },
  live(reading) {
    live = reading;
    if (columns !== null) add(reading);
    about(reading);
    shown?.update?.(reading, columns);
  },
  state,
});
