// Recent refusals of clients, as remembered by the server.

import { ask } from "./api.js";
import { h, setText, table } from "./dom.js";
import { both, count, dateTime, named, network, user } from "./format.js";
import { keyLinks } from "./words.js";

const AGAIN_MS = 5000;
const V4 = /^\d+(\.\d+){3}([:/]\d+)?$/;
const V6 = /^\[?[0-9a-f]*:[0-9a-f]*:[0-9a-f:.]*\]?([:/]\d+)?$/i;

// An address with an optional port, or a prefix; anything else is part of a username.
export const isAddress = (text) => V4.test(text) || V6.test(text);

const also = (names) => (names.length === 0 ? "" : `also ${names.map(named).join(", ")}`);

export function refusals(words) {
  const wanted = h("input", { id: "wanted", type: "search", autocomplete: "off", spellcheck: "false", "aria-describedby": "wanted-help" });
  wanted.value = words.get("of") ?? "";
  const form = h("form", {
    class: "search",
    role: "search",
    onsubmit: (event) => {
      event.preventDefault();
      const text = wanted.value.trim();
      location.hash = text === "" ? "#/refusals" : `#/refusals?${new URLSearchParams({ of: text })}`;
    },
  },
  h("p", {}, h("label", { for: "wanted" }, "Client or user"), wanted),
  h("p", {}, h("button", { class: "main" }, "Find")));
  const found = h("p", { class: "note", role: "status" }, "Loading…");
  const problem = h("p", { class: "warning", hidden: true, role: "alert" });
  const list = table("Refusals", [
    { title: "Last refused", heads: true, cell: (row) => ({ text: dateTime(row.last_at), note: row.count > 1 ? `${count(row.count)} times since ${dateTime(row.first_at)}` : "once" }) },
    { title: "Client", cell: (row) => ({ text: row.client, note: network(row.network) }) },
    { title: "User", cell: (row) => ({ text: row.realm === null ? named(row.user ?? "") : user(row.user ?? ""), note: both(named(row.realm ?? ""), also(row.other_users)) }) },
    { title: "Request", cell: (row) => ({ text: row.asked.replaceAll("_", " "), note: row.code === null ? "" : `error ${row.code}` }) },
    { title: "Why", cell: (row) => ({
      text: row.reason,
      note: both(also(row.other_peers), row.remedy),
      links: keyLinks(row.keys),
    }) },
  ], "No matching refusals. The server keeps the most recent refusals until it restarts.");
  let current = true;
  let timer = null;

  async function load() {
    const text = (words.get("of") ?? "").trim();
    const query = new URLSearchParams();
    if (text !== "") query.set(isAddress(text) ? "client" : "user", text);
    try {
      const answer = await ask(`/v1/refusals?${query}`);
      if (!current) return;
      list.update(answer.refusals);
      problem.hidden = true;
      setText(found, answer.refusals.length === 100 ? "Only the last 100 are shown." : `${count(answer.refusals.length)} found.`);
    } catch (error) {
      if (!current) return;
      setText(problem, error.message);
      setText(found, "");
      problem.hidden = false;
    }
    timer = setTimeout(load, AGAIN_MS);
  }

  load();
  return {
    element: h("div", {}, h("h1", { tabindex: "-1" }, "Why was this client refused?"), form,
      h("p", { class: "note", id: "wanted-help" }, "Address, prefix or part of a username. Leave empty to list all."),
      problem, found, list.element),
    title: "Why refused?",
    close: () => {
      current = false;
      clearTimeout(timer);
    },
  };
}
