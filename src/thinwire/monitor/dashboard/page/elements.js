// Elements of the page. Text is only ever set as text: what files hold is never taken for markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, String(value));
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined) continue;
    element.append(typeof child === "object" ? child : document.createTextNode(String(child)));
  }
  return element;
}

const make = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const byId = (id) => document.getElementById(id);

function show(id, ...children) {
  byId(id).replaceChildren(...children.flat().filter((child) => child !== null));
}

function say(id, words) {
  const element = byId(id);
  if (element.textContent !== words) element.textContent = words; // else a reader would say it again
}

// A table: `head` holds [title, kind] and `rows` cells, which are text or elements; the first of a row is its header.
function table(caption, head, rows) {
  const kindOf = (index) => [index === 0 ? "first" : "", head[index][1] ?? ""].join(" ").trim() || null;
  return make("table", {},
    make("caption", {}, make("span", {}, caption)),
    make("thead", {}, make("tr", {}, head.map(([title], index) => make("th", { scope: "col", class: kindOf(index) }, title)))),
    make("tbody", {}, rows.map((row) => make("tr", {}, row.map((cell, index) => (
      index === 0 ? make("th", { scope: "row", class: kindOf(0) }, cell) : make("td", { class: kindOf(index) }, cell)))))));
}

function badge(state) {
  const marks = { training: "●", finished: "✓", failed: "✕", silent: "▲", gone: "○", paused: "‖", waiting: "…", elsewhere: "↗" };
  return make("span", { class: "badge", "data-state": state }, `${marks[state] ?? ""} ${state}`);
}

function legend(entries) {
  return make("ul", { class: "legend" }, entries.map(([picture, words]) => make("li", {}, picture, words)));
}

// Dashes besides colours: lines are told apart by people who see no colours, too.
const DASHES = [null, "7 3", "2 3", "9 3 2 3", "12 4", "4 2", "1 2", "6 2 1 2"];

function lineKey(index) {
  return draw("svg", { width: 26, height: 8, "aria-hidden": "true" },
    draw("line", { x1: 0, x2: 26, y1: 4, y2: 4, class: `line s${index % 8}`, "stroke-dasharray": DASHES[index % 8] }));
}

// A chart of lines with its own axes. `dots` are marked points, such as evaluations.
function lineChart(box, words, series, { xTitle, yWords, dots = [], fromZero = false }) {
  const all = [...series, { points: dots }];
  const [across, up] = [extent(all, 0), extent(all, 1)];
  if (!across) return make("p", { class: "missing" }, words);
  const [width, height, left, bottom] = [Math.max(260, box.clientWidth || 600), 230, 52, 34];
  const low = fromZero ? 0 : up[0];
  const marks = ticks(low, up[1] > low ? up[1] : low + 1, 5);
  const [base, top] = [Math.min(low, marks[0]), Math.max(up[1], marks[marks.length - 1])];
  const x = (value) => left + ((value - across[0]) / Math.max(across[1] - across[0], 1e-9)) * (width - left - 14);
  const y = (value) => height - bottom - ((value - base) / Math.max(top - base, 1e-9)) * (height - bottom - 10);
  return draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words },
    marks.map((value) => [
      draw("line", { class: "gridline", x1: left, x2: width - 14, y1: y(value), y2: y(value) }),
      draw("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, yWords(value))]).flat(),
    ticks(across[0], across[1], width < 420 ? 4 : 7).map((value) => (
      draw("text", { x: x(value), y: height - bottom + 18, "text-anchor": "middle" }, tickWords(value)))),
    draw("text", { x: width - 14, y: height - 2, "text-anchor": "end" }, xTitle),
    series.map(({ replica, points }, index) => (
      draw("path", { class: `line s${index % 8}`, "stroke-dasharray": DASHES[index % 8], d: pathThrough(points, x, y) },
        draw("title", {}, `replica ${replica}`)))),
    dots.filter((dot) => isNumber(dot[1])).map((dot) => (
      draw("circle", { class: "evaluation", cx: x(dot[0]), cy: y(dot[1]), r: 4 },
        draw("title", {}, `step ${dot[0]}: ${yWords(dot[1])}`)))));
}
