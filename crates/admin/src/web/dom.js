// Elements made of values, and tables whose cells change in place: what is selected, focused or being read aloud stays where it is.

const SVG = "http://www.w3.org/2000/svg";

// An element with attributes; those that begin with "on" are listeners. Children are elements or text.
export function h(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

// The same for drawings.
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
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

// Says something to screen readers, once.
export function announce(text) {
  setText(document.getElementById("announcement"), text);
}

// A table. A column has a title, and `cell` makes of a row: text, or {text, href, share, title, note}. `share` draws a bar below the text.
// Columns with `number` are right-aligned. Where there are no rows stands `empty`.
export function table(caption, columns, empty = "Nothing so far.") {
  const head = columns.map((column) => h("th", { scope: "col", class: column.number ? "number" : null }, column.title));
  const body = h("tbody");
  const frame = h("div", { class: "scroll", role: "group", tabindex: "0", "aria-label": caption },
    h("table", {}, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, head)), body));
  const nothing = h("p", { class: "nothing" }, empty);
  const element = h("div", {}, frame, nothing);

  function update(rows) {
    frame.hidden = rows.length === 0;
    nothing.hidden = rows.length > 0;
    while (body.rows.length > rows.length) body.deleteRow(-1);
    while (body.rows.length < rows.length) {
      body.append(h("tr", {}, columns.map((column) => h(column.heads ? "th" : "td", {
        scope: column.heads ? "row" : null, class: column.number ? "number" : null,
      }))));
    }
    rows.forEach((row, at) => columns.forEach((column, place) => show(body.rows[at].cells[place], column.cell(row))));
  }

  update([]);
  return { element, update };
}

function show(cell, value) {
  const wanted = typeof value === "object" && value !== null ? value : { text: value };
  const text = wanted.text ?? "";
  if (wanted.href === undefined && wanted.share === undefined && wanted.note === undefined) {
    if (cell.childElementCount > 0) cell.replaceChildren();
    setText(cell, text);
  } else {
    showParts(cell, text, wanted);
  }
  if (wanted.title !== undefined) setAttribute(cell, "title", wanted.title);
}

// A link or text, then a bar, then a second line.
function showParts(cell, text, { href, share, note }) {
  const kinds = [href === undefined ? "SPAN" : "A", share === undefined ? null : "I", note === undefined ? null : "SMALL"];
  const names = kinds.filter((kind) => kind !== null);
  if ([...cell.children].map((child) => child.nodeName).join() !== names.join()) {
    cell.replaceChildren(...names.map((name) => (name === "I" ? h("i", { class: "bar", "aria-hidden": "true" }, h("b")) : h(name))));
  }
  const [first] = cell.children;
  setText(first, text);
  if (href !== undefined) setAttribute(first, "href", href);
  if (share !== undefined) {
    const bar = cell.querySelector("i > b");
    bar.style.width = `${Math.round(Math.min(1, Math.max(0, share)) * 100)}%`;
  }
  if (note !== undefined) setText(cell.querySelector("small"), note);
}

// A part of a page with a heading of its own.
export function panel(title, note, ...children) {
  const id = `panel-${title.toLowerCase().replaceAll(/[^a-z]+/g, "-")}`;
  return h("section", { class: "panel", "aria-labelledby": id }, h("h2", { id }, title), note ? h("p", { class: "note" }, note) : null, ...children);
}
