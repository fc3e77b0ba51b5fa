// The effective configuration with the origin of each value. The server masks secrets.

import { text } from "./api.js";
import { h, setText, table } from "./dom.js";
import { count } from "./format.js";

// Parses TOML as written by the server: [section], [[table]] # origin, key = value # origin.
export function parse(toml) {
  const rows = [];
  let section = "";
  let place = "";
  for (const line of toml.split("\n")) {
    const [, opened, behind] = line.match(/^(\[\[?[^\]]+\]\]?)(?: # (.*))?$/) ?? [];
    const cut = line.lastIndexOf(" # ");
    if (opened !== undefined) {
      section = opened.replaceAll(/[[\]]/g, "");
      place = behind ?? "";
    } else if (line.includes(" = ")) {
      const end = cut > 0 && place === "" ? cut : line.length;
      const [key, ...value] = line.slice(0, end).split(" = ");
      rows.push({ key: `${section}.${key}`, value: value.join(" = "), origin: place === "" ? line.slice(cut + 3) : place });
    }
  }
  return rows;
}

// `words` is the query string of the page's address; it may contain a key to search for.
export function configuration(words) {
  const wanted = h("input", { id: "wanted", type: "search", autocomplete: "off", spellcheck: "false" });
  wanted.value = words.get("key") ?? "";
  const changed = h("input", { id: "changed", type: "checkbox" });
  const found = h("p", { class: "note", role: "status" }, "Loading…");
  const problem = h("p", { class: "warning", hidden: true, role: "alert" });
  const file = h("pre", { tabindex: "0", "aria-label": "Configuration as a file" });
  const list = table("Configuration", [
    { title: "Key", heads: true, cell: (row) => row.key },
    { title: "Value", cell: (row) => row.value },
    { title: "From", cell: (row) => row.origin },
  ], "No matching keys.");
  let rows = [];
  let current = true;

  function show() {
    const part = wanted.value.trim().toLowerCase();
    const fits = ({ key, value, origin }) => `${key} ${value} ${origin}`.toLowerCase().includes(part) && (!changed.checked || origin !== "default");
    const some = rows.filter(fits);
    list.update(some);
    setText(found, `${count(some.length)} of ${count(rows.length)} keys.`);
  }

  wanted.addEventListener("input", show);
  changed.addEventListener("change", show);
  text("/v1/config").then((toml) => {
    if (!current) return;
    rows = parse(toml);
    setText(file, toml);
    show();
  }, (error) => {
    setText(problem, error.message);
    setText(found, "");
    problem.hidden = false;
  });
  return {
    element: h("div", {}, h("h1", { tabindex: "-1" }, "Configuration"),
      h("div", { class: "search", role: "search" },
        h("p", {}, h("label", { for: "wanted" }, "Search"), wanted),
        h("p", { class: "check" }, changed, h("label", { for: "changed" }, "Only changed values"))),
      problem, found, list.element, h("details", {}, h("summary", {}, "As a file"), file)),
    title: "Configuration",
    close: () => {
      current = false;
    },
  };
}
