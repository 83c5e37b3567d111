"use strict";
// Numbers as text and values on a scale: pure functions, tested without a browser.

const NONE = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

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
const inPercent = (share) => (isNumber(share) ? `${Math.round(100 * share)} %` : NONE);
const inLoss = (value) => (isNumber(value) ? value.toFixed(3) : NONE);
const inTimes = (value) => (isNumber(value) ? `${value < 10 ? value.toFixed(1) : Math.round(value)}×` : NONE);

function inSeconds(value) {
  if (!isNumber(value)) return NONE;
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
  if (value < 59.5) return `${Number(value.toPrecision(3))} s`;
  const whole = Math.round(value);
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  const two = (part) => String(part).padStart(2, "0");
  return `${hours ? `${hours}:${two(minutes)}` : minutes}:${two(whole % 60)} ${hours ? "h" : "min"}`;
}

const timeLeft = (seconds) => (!isNumber(seconds) ? NONE : seconds < 1 ? "any moment" : inSeconds(Math.round(seconds)));

function ago(seconds) {
  if (!isNumber(seconds)) return NONE;
  if (seconds < 1.5) return "just now";
  const [size, unit] = [[86400, "days"], [3600, "h"], [60, "min"], [1, "s"]].find(([one]) => seconds >= 2 * one || one === 1);
  return `${Math.round(seconds / size)} ${unit} ago`;
}

// A time on the reader's clock, with its date unless that is today.
function moment(at, now) {
  if (!isNumber(at)) return NONE;
  const [then, today] = [new Date(at * 1000), new Date(now)];
  if (Number.isNaN(then.getTime())) return "an unknown time";
  return then.toDateString() === today.toDateString() ? then.toLocaleTimeString() : then.toLocaleString();
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

const tickWords = (value) => (Math.abs(value) >= 10000 ? inCount(value) : String(Number(value.toPrecision(6))));

// Lowest and highest finite value of all points along one of their two numbers.
function extent(series, index) {
  const values = series.flatMap(({ points }) => points.filter((point) => isNumber(point[0]) && isNumber(point[1])).map((point) => point[index]));
  return values.length ? [Math.min(...values), Math.max(...values)] : null;
}

// A path through points. A value that is no number makes a gap; a point alone becomes a dot (h0 with a round cap).
function pathThrough(points, x, y) {
  let [path, isDown] = ["", false];
  for (const [across, up] of points) {
    if (isNumber(across) && isNumber(up)) path += `${isDown ? "L" : "M"}${x(across).toFixed(1)} ${y(up).toFixed(1)}${isDown ? "" : "h0"}`;
    isDown = isNumber(up);
  }
  return path;
}

// Exponential moving average, corrected for its start; gaps stay gaps.
function averaged(points, weight) {
  let [sum, mass] = [0, 0];
  return points.map(([x, y]) => {
    if (isNumber(y)) [sum, mass] = [weight * sum + (1 - weight) * y, weight * mass + (1 - weight)];
    return [x, isNumber(y) ? sum / mass : null];
  });
}

// Mean of the averages from both sides, so that the line lags behind neither; a weight of 0 changes nothing.
function smoothed(points, weight) {
  const back = averaged([...points].reverse(), weight).reverse();
  return averaged(points, weight).map(([x, y], index) => [x, isNumber(y) ? (y + back[index][1]) / 2 : null]);
}

const nearest = (points, at) => points.reduce((best, point) => (Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best), points[0]);

// At most so many of the points, first and last included, for a table that people can read.
function sampled(points, most) {
  if (points.length <= most) return points;
  return Array.from({ length: most }, (_, index) => points[Math.round((index * (points.length - 1)) / (most - 1))]);
}

// The open findings' links, as [from, to] with null for any rank, and the ranks of those that name no link.
function namedBy(findings) {
  const open = (findings ?? []).filter((one) => !one.is_over);
  const cells = open.flatMap((one) => one.cells);
  const ranks = new Set(open.filter((one) => !one.cells.length).flatMap((one) => one.ranks));
  return { ranks, isLink: (from, to) => cells.some(([one, other]) => (one ?? from) === from && (other ?? to) === to) };
}

// Rounds in flight on two rows, so that those that overlap stay apart.
function stacked(flights) {
  const ends = [-Infinity, -Infinity];
  return flights.map((flight) => {
    const row = flight[1] >= ends[0] - 1e-9 ? 0 : 1;
    ends[row] = Math.max(ends[row], flight[2]);
    return [flight, row];
  });
}
