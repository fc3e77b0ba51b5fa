// Graphs of the last ten minutes as SVG, with the values as text: the current ones, or those at the cursor, which all graphs share.

import { h, setAttribute, setText, svg } from "./dom.js";

const WIDTH = 600;
const HEIGHT = 120;

// Rounds up to 1, 2 or 5 times a power of ten.
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

// `series` are {name, key}, with a column of the history as key. `format` formats a value, `least` is the minimum of the scale.
export function chart({ title, series, format, least = 0 }, cursor) {
  const lines = series.map((_, at) => svg("path", { class: `line line-${at}`, "vector-effect": "non-scaling-stroke" }));
  const areas = series.map((_, at) => svg("path", { class: `area area-${at}` }));
  const mark = svg("line", { class: "mark", y1: 0, y2: HEIGHT, "vector-effect": "non-scaling-stroke" });
  const grid = [0, 0.5, 1].map((part) => svg("line", {
    class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT * part, y2: HEIGHT * part, "vector-effect": "non-scaling-stroke",
  }));
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true", focusable: "false" },
    grid, areas, lines, mark);
  const values = series.map(() => h("b"));
  const legend = h("ul", { class: "legend" }, series.map(({ name }, at) => h("li", {},
    h("i", { class: `key key-${at}`, "aria-hidden": "true" }), series.length > 1 || name !== title ? `${name} ` : "", values[at])));
  const top = h("span", { class: "top", "aria-hidden": "true" });
  const plot = h("div", {
    class: "plot",
    onpointermove: (event) => {
      const box = plot.getBoundingClientRect();
      cursor.point(1 - (event.clientX - box.left) / box.width);
    },
    onpointerleave: () => cursor.point(null),
  }, drawing, top);
  const element = h("figure", { class: "chart" }, h("figcaption", {}, h("h3", {}, title), legend), plot);

  function update(history) {
    const columns = series.map(({ key }) => history[key]);
    const length = columns[0].length;
    const all = columns.flat().filter((value) => value !== null);
    const scale = ceiling(Math.max(least, ...all));
    const x = (at) => WIDTH - ((length - 1 - at) * WIDTH) / (cursor.seconds - 1);
    const y = (value) => HEIGHT - (value / scale) * (HEIGHT - 2) - 1;
    columns.forEach((column, at) => {
      const runs = runsOf(column);
      const path = runs.map(([from, to]) => column.slice(from, to).map((value, step) =>
        `${step === 0 ? "M" : "L"}${x(from + step).toFixed(1)} ${y(value).toFixed(1)}`).join("")).join("");
      const closed = runs.map(([from, to]) => `M${x(from).toFixed(1)} ${HEIGHT}${column.slice(from, to).map((value, step) =>
        `L${x(from + step).toFixed(1)} ${y(value).toFixed(1)}`).join("")}L${x(to - 1).toFixed(1)} ${HEIGHT}Z`).join("");
      setAttribute(lines[at], "d", path);
      setAttribute(areas[at], "d", closed);
    });
    const index = length - 1 - cursor.back();
    columns.forEach((column, at) => setText(values[at], format(column[index])));
    setAttribute(mark, "visibility", cursor.back() > 0 ? "visible" : "hidden");
    setAttribute(mark, "x1", String(x(index)));
    setAttribute(mark, "x2", String(x(index)));
    setText(top, format(scale));
  }

  return { element, update };
}

// Ranges [from, to) of known values.
function runsOf(column) {
  const runs = [];
  column.forEach((value, at) => {
    if (value === null) return;
    const last = runs.at(-1);
    if (last !== undefined && last[1] === at) last[1] = at + 1;
    else runs.push([at, at + 1]);
  });
  return runs;
}
