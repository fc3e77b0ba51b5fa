// Usage of users, API keys and customers, from the ledger.

import { ask } from "./api.js";
import { h, panel, setAttribute, setText, svg, table } from "./dom.js";
import { bits, bytes, count, dateTime, named, span, user } from "./format.js";

const DAY_MS = 86400000;
const WIDTH = 600;
const HEIGHT = 120;
const GROUPS = { user: "User", key: "API key", identifier: "Customer", realm: "Realm", node: "Node" };
const PERIODS = { 1: "Last 24 hours", 7: "Last 7 days", 30: "Last 30 days" };

const total = (entry) => entry.to_peer.bytes + entry.to_client.bytes;
const byHour = (days) => days === 1;

function name(by, entry) {
  const text = entry[by] ?? "";
  if (by === "user") return { text: user(text), note: named(entry.realm ?? "") };
  return { text: text === "" ? "(none)" : named(text) };
}

function choice(id, label, options, chosen) {
  const list = h("select", { id }, Object.entries(options).map(([value, text]) => h("option", { value, selected: value === chosen }, text)));
  return { list, element: h("p", {}, h("label", { for: id }, label), list) };
}

// Bars from oldest to newest; the tallest one is the full height.
function bars(entries, since, step) {
  const first = Math.floor(new Date(since).getTime() / step) * step;
  const slots = Math.max(1, Math.ceil((Date.now() - first) / step));
  const most = Math.max(1, ...entries.map(total));
  const width = WIDTH / slots;
  return entries.map((entry) => {
    const at = (new Date(entry.begins).getTime() - first) / step;
    const tall = (total(entry) / most) * HEIGHT;
    const label = `${dateTime(entry.begins)}: ${bytes(total(entry))}`;
    return svg("rect", { class: "column", x: at * width, y: HEIGHT - tall, width: Math.max(0.5, width * 0.9), height: tall }, svg("title", {}, label));
  });
}

export function usage(words) {
  const by = words.get("by") in GROUPS ? words.get("by") : "user";
  const days = words.get("days") in PERIODS ? words.get("days") : "30";
  const grouped = choice("by", "Group by", GROUPS, by);
  const period = choice("days", "Period", PERIODS, days);
  const change = () => {
    location.hash = `#/usage?${new URLSearchParams({ by: grouped.list.value, days: period.list.value })}`;
  };
  grouped.list.addEventListener("change", change);
  period.list.addEventListener("change", change);
  const found = h("p", { class: "note", role: "status" }, "Loading…");
  const problem = h("p", { class: "warning", hidden: true, role: "alert" });
  const gaps = h("p", { class: "warning", hidden: true });
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  let most = 1;
  const list = table("Usage", [
    { title: GROUPS[by], heads: true, cell: (row) => ({ ...name(by, row), share: total(row) / most }) },
    { title: "Total", number: true, cell: (row) => bytes(total(row)) },
    { title: "To peers", number: true, cell: (row) => bytes(row.to_peer.bytes) },
    { title: "To client", number: true, cell: (row) => bytes(row.to_client.bytes) },
    { title: "Peak", number: true, cell: (row) => bits(row.peak_bits_per_second) },
    { title: "Allocations", number: true, cell: (row) => count(row.allocations) },
    { title: "Time", number: true, cell: (row) => span(row.seconds) },
  ], "No usage in this period.");
  let current = true;

  async function load() {
    // Whole days are read fastest.
    const begins = Date.now() - Number(days) * DAY_MS;
    const since = new Date(byHour(Number(days)) ? begins : Math.floor(begins / DAY_MS) * DAY_MS).toISOString();
    const step = byHour(Number(days)) ? "hour" : "day";
    try {
      const [groups, times] = await Promise.all([
        ask(`/v1/usage?${new URLSearchParams({ by, since })}`),
        ask(`/v1/usage?${new URLSearchParams({ by: step, since, limit: 1000 })}`),
      ]);
      if (!current) return;
      most = Math.max(1, ...groups.usage.map(total));
      list.update(groups.usage);
      picture.replaceChildren(...bars(times.usage, times.since, step === "hour" ? 3600000 : DAY_MS));
      const sum = times.usage.reduce((bytesSoFar, entry) => bytesSoFar + total(entry), 0);
      setAttribute(picture, "aria-label", `Bytes per ${step}, ${bytes(sum)} in total`);
      setText(found, `${bytes(sum)} since ${dateTime(times.since)}${groups.next === null ? "" : "; the largest 100 are shown"}`);
      gaps.hidden = groups.gaps.length === 0;
      setText(gaps, groups.gaps.map((gap) => `Up to 10 s are missing after ${dateTime(gap.last)}: the server on ${named(gap.node)} was killed.`).join(" "));
    } catch (error) {
      if (!current) return;
      setText(problem, error.message);
      setText(found, "");
      problem.hidden = false;
    }
  }

  load();
  return {
    element: h("div", {}, h("h1", { tabindex: "-1" }, "Usage"), h("form", { class: "search" }, grouped.element, period.element),
      problem, found, gaps, panel(`Bytes per ${byHour(Number(days)) ? "hour" : "day"}`, "", h("div", { class: "plot" }, picture)), list.element),
    title: "Usage",
    close: () => {
      current = false;
    },
  };
}
