"use strict";
// Numbers in words and places on a scale: pure functions, tested without a browser.

const NONE = "–";

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function prefixed(value, unit) {
  if (!isNumber(value)) return NONE;
  for (const [prefix, factor] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (Math.abs(value) >= factor) return `${(value / factor).toPrecision(3)} ${prefix}${unit}`.trim();
  }
  return `${Number(value.toPrecision(3))} ${unit}`.trim();
}

const inBytes = (value) => prefixed(value, "B");
const inRate = (value) => prefixed(value, "bit/s");
const inCount = (value) => prefixed(value, "");

function inSeconds(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (size < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
  if (size < 60) return `${Number(value.toPrecision(3))} s`;
  const whole = Math.round(size);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (part) => String(part).padStart(2, "0");
  return `${value < 0 ? "-" : ""}${hours ? `${hours}:${two(minutes)}:${two(rest)} h` : `${minutes}:${two(rest)} min`}`;
}

const inPercent = (share) => (isNumber(share) ? `${Math.round(100 * share)} %` : NONE);
const inLoss = (value) => (isNumber(value) ? value.toFixed(3) : NONE);
const inTimes = (value) => (isNumber(value) ? `${value < 10 ? value.toFixed(1) : Math.round(value)}×` : NONE);

function ago(seconds) {
  if (!isNumber(seconds)) return NONE;
  if (seconds < 1.5) return "just now";
  const [size, unit] = [[86400, "days"], [3600, "h"], [60, "min"], [1, "s"]].find(([one]) => seconds >= 2 * one || one === 1);
  return `${Math.round(seconds / size)} ${unit} ago`;
}

// When something was, on the reader's clock; with its date where that is not the reader's own day.
function moment(at, now) {
  if (!isNumber(at)) return NONE;
  const [then, today] = [new Date(at * 1000), new Date(now)];
  if (Number.isNaN(then.getTime())) return "an unknown time";
  return then.toDateString() === today.toDateString() ? then.toLocaleTimeString() : then.toLocaleString();
}

// How hot a cell of the delay matrix is, from its time beside its usual one.
const HEAT_BOUNDS = [1.25, 1.5, 3, 6];

function heatLevel(timesLonger) {
  if (!isNumber(timesLonger)) return 0;
  return HEAT_BOUNDS.filter((bound) => timesLonger >= bound).length;
}

// Round numbers from at most low to at least high.
function ticks(low, high, most) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-6; index += 1) found.push(index * step);
  return found;
}

function tickWords(value) {
  return Math.abs(value) >= 1000 ? inCount(value) : String(Number(value.toPrecision(6)));
}

// The finite values of all points along one of their two numbers.
function extent(series, index) {
  let [low, high] = [Infinity, -Infinity];
  for (const { points } of series) {
    for (const point of points) {
      if (!isNumber(point[0]) || !isNumber(point[1])) continue;
      low = Math.min(low, point[index]);
      high = Math.max(high, point[index]);
    }
  }
  return low <= high ? [low, high] : null;
}

// A path through points; a value that is no number makes a gap, so that nothing is drawn where nothing is known.
function pathThrough(points, x, y) {
  let [path, isDown] = ["", false];
  for (const [across, up] of points) {
    if (!isNumber(across) || !isNumber(up)) {
      isDown = false;
      continue;
    }
    path += `${isDown ? "L" : "M"}${x(across).toFixed(1)} ${y(up).toFixed(1)}`;
    isDown = true;
  }
  return path;
}

// At most so many of the points, the first and the last among them, for a table that people can read.
function sampled(points, most) {
  if (points.length <= most) return points;
  return Array.from({ length: most }, (_, index) => points[Math.round((index * (points.length - 1)) / (most - 1))]);
}

function chartWords(what, series, words) {
  const told = series.filter(({ points }) => points.length).slice(0, 6).map(({ replica, points }) => {
    const [first, last] = [points[0], points[points.length - 1]];
    return `replica ${replica} from ${words(first[1])} to ${words(last[1])}`;
  });
  const more = series.length > told.length ? ` and ${series.length - told.length} more` : "";
  return told.length ? `${what}: ${told.join(", ")}${more}. The table below holds the numbers.` : `${what}: nothing yet.`;
}

function linkName(from, to) {
  return `${from} → ${to}`;
}

// Which links and ranks standing findings name.
function namedBy(findings) {
  const [cells, ranks] = [new Set(), new Set()];
  for (const finding of findings.filter((one) => !one.is_over)) {
    finding.cells.forEach(([from, to]) => cells.add(linkName(from, to)));
    if (!finding.cells.length) finding.ranks.forEach((rank) => ranks.add(rank));
  }
  return { cells, ranks };
}

// Rounds in flight beside those that they overlap with: each with a row, 0 or 1.
function stacked(flights) {
  const ends = [-Infinity, -Infinity];
  return flights.map((flight) => {
    const row = flight[1] >= ends[0] - 1e-9 ? 0 : 1;
    ends[row] = Math.max(ends[row], flight[2]);
    return [flight, row];
  });
}

const DOWNTIME_ROWS = [
  ["post_checkpoint_s", "Work done again since the last checkpoint"],
  ["detection_s", "Until the fault was noticed"],
  ["diagnosis_s", "Until its place was known"],
  ["reinitialisation_s", "Until training went on"],
];
