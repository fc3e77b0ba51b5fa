// Builds elements from values, and tables whose cells are updated in place, so that selection, focus and reading position are preserved.

const SVG = "http://www.w3.org/2000/svg";

// An element with attributes; those that begin with "on" are listeners. Children are elements or text.
export function h(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

// An SVG element.
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.replaceChildren(...unbroken(text));
}

// Text to keep on one line: an IPv4 address with its port or prefix length, or the last group and the port of an IPv6 address.
const TOGETHER = /(?:\d{1,3}\.){3}\d{1,3}(?:[:/]\d+)?|(?<=\[[0-9a-f:.]*[:[])[0-9a-f.]*(?:%\w+)?\](?::\d+)?/gi;

// Text without line breaks in addresses, except between the groups of IPv6.
function unbroken(text) {
  const nodes = [];
  let end = 0;
  for (const { 0: whole, index } of text.matchAll(TOGETHER)) {
    nodes.push(...grouped(text.slice(end, index)), h("span", { class: "together" }, whole));
    end = index + whole.length;
  }
  return [...nodes, ...grouped(text.slice(end))];
}

// Allows a line break after each group of an IPv6 address with which the text ends.
function grouped(text) {
  const groups = text.match(/\[[0-9a-f:.]*$/i)?.[0].split(/(?<=:)/) ?? [];
  const before = text.slice(0, text.length - groups.join("").length);
  return [before, ...groups.flatMap((group) => [group, h("wbr")])].filter((node) => node !== "");
}

export function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

// Announces text to screen readers.
export function announce(text) {
  setText(document.getElementById("announcement"), text);
}

// A table. A column has a title, and `cell` returns for a row: text, or {text, href, share, title, note, links}. `share` draws a bar below the text.
// Columns with `number` are right-aligned. `empty` is shown if there are no rows. On a phone each row is a card, whose styles remove the table roles, so
// they are set explicitly.
export function table(caption, columns, empty = "Nothing so far.") {
  const head = columns.map((column) => h("th", { scope: "col", role: "columnheader", class: column.number ? "number" : null }, column.title));
  const body = h("tbody", { role: "rowgroup" });
  const frame = h("div", { class: "scroll", role: "group", tabindex: "0", "aria-label": caption },
    h("table", { role: "table" }, h("caption", { class: "unseen" }, caption),
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, head)), body));
  const nothing = h("p", { class: "nothing" }, empty);
  const element = h("div", {}, frame, nothing);

  function update(rows) {
    frame.hidden = rows.length === 0;
    nothing.hidden = rows.length > 0;
    while (body.rows.length > rows.length) body.deleteRow(-1);
    while (body.rows.length < rows.length) {
      body.append(h("tr", { role: "row" }, columns.map((column) => h(column.heads ? "th" : "td", {
        scope: column.heads ? "row" : null,
        role: column.heads ? "rowheader" : "cell",
        class: column.number ? "number" : null,
        "data-title": column.title,
      }))));
    }
    rows.forEach((row, at) => columns.forEach((column, place) => show(body.rows[at].cells[place], column.cell(row))));
  }

  update([]);
  return { element, update };
}

function show(cell, value) {
  const wanted = typeof value === "object" && value !== null ? value : { text: value };
  showParts(cell, wanted.text ?? "", wanted);
  if (wanted.title !== undefined) setAttribute(cell, "title", wanted.title);
}

// A link or text, then a bar, a second line, and more links.
function showParts(cell, text, { href, share, note, links }) {
  const kinds = [[href === undefined ? "SPAN" : "A", true], ["I", share !== undefined], ["SMALL", note !== undefined], ["P", links?.length > 0]];
  const names = kinds.filter(([, wanted]) => wanted).map(([name]) => name);
  if ([...cell.children].map((child) => child.nodeName).join() !== names.join()) {
    cell.replaceChildren(...names.map((name) => (name === "I" ? h("i", { class: "bar", "aria-hidden": "true" }, h("b")) : h(name, { class: name === "P" ? "links" : null }))));
  }
  const [first] = cell.children;
  setText(first, text);
  if (href !== undefined) setAttribute(first, "href", href);
  if (share !== undefined) {
    const bar = cell.querySelector("i > b");
    bar.style.width = `${Math.round(Math.min(1, Math.max(0, share)) * 100)}%`;
  }
  if (note !== undefined) setText(cell.querySelector("small"), note);
  if (links?.length > 0) showLinks(cell.querySelector("p"), links);
}

function showLinks(element, links) {
  const same = [...element.children].map((link) => link.getAttribute("href")).join() === links.map((link) => link.href).join();
  if (!same) element.replaceChildren(...links.flatMap((link) => [h("a", { href: link.href }, link.text), " "]));
}

// A section of a page with a heading.
export function panel(title, note, ...children) {
  const id = `panel-${title.toLowerCase().replaceAll(/[^a-z]+/g, "-")}`;
  return h("section", { class: "panel", "aria-labelledby": id }, h("h2", { id }, title), note ? h("p", { class: "note" }, note) : null, ...children);
}
