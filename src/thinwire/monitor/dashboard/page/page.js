// The page: from what the server sends to what is shown. Text is only ever set as text, never taken for markup.

const known = {}; // the latest of each section
let clockAhead = 0; // seconds that the server's clock is ahead of this one
const serverNow = () => Date.now() / 1000 + clockAhead;
const byId = (id) => document.getElementById(id);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined) element.append(typeof child === "object" ? child : document.createTextNode(String(child)));
  }
  return element;
}

const make = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const show = (id, ...children) => byId(id).replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));

function setText(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text; // else a screen reader would read it again
}

// Show a section with its note, or hide it; the reasons of hidden ones stand in the last card.
function showSection(name, isShown) {
  byId(`${name}-section`).hidden = !isShown;
  setText(`${name}-note`, known.notes?.missing?.[name] ?? "");
  return isShown;
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

const legend = (entries) => make("ul", { class: "legend" }, entries.map((parts) => make("li", {}, parts)));
const svg = (width, height, attributes, ...children) => draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, ...attributes }, children);
const picture = (width, height, ...children) => svg(width, height, { "aria-hidden": "true" }, children);
const flag = (text) => make("span", { class: "flag" }, `▲ ${text}`);
const since = (at) => make("span", { "data-since": at }, isNumber(at) ? ago(serverNow() - at) : NONE);

// ---- headline and numbers

const MARKS = { starting: "…", healthy: "✓", trouble: "▲" };

function showHeadline({ level, text, detail }) {
  byId("headline").setAttribute("data-level", level);
  setText("headline-mark", MARKS[level]);
  const words = text.charAt(0).toUpperCase() + text.slice(1);
  if (byId("headline-text").textContent !== words) setText("announcement", words);
  setText("headline-text", words);
  setText("headline-detail", detail);
  document.title = `${MARKS[level]} ${words} · ${known.run?.name ?? "thinwire"}`;
}

function showRun(run) {
  setText("run-name", run.name);
  const parts = [run.method, run.model, run.data && `on ${run.data}`, run.is_elastic ? "elastic" : run.num_replicas && `${run.num_replicas} replica${run.num_replicas === 1 ? "" : "s"}`];
  setText("run-settings", parts.filter(Boolean).join(" · "));
  byId("numbers-section").hidden = !run.step;
  const isOver = run.state === "finished";
  const timesFewer = run.numbers.find(({ name, value }) => name === "times_fewer_bytes" && isNumber(value));
  show("progress", run.steps && !isOver ? make("progress", { max: run.steps, value: Math.min(run.step, run.steps), "aria-label": `step ${run.step} of ${run.steps}` }) : null);
  const tiles = [["step", run.step, run.steps ? `of ${run.steps}` : ""],
    isOver ? ["fewer bytes", timesFewer ? `${timesFewer.text}×` : NONE, "than an all-reduce each step"] : ["time left", timeLeft(run.time_left_s), "at the mean speed"],
    ["training loss", inLoss(run.loss), "mean of the replicas"], ["validation loss", inLoss(run.val_loss), "global parameters"],
    ...(run.metric ? [[`validation ${run.metric.name}`, run.metric.text, "global parameters"]] : [])];
  show("tiles", tiles.map(([name, value, note]) => make("div", {}, make("dt", {}, name), make("dd", {}, value, make("small", {}, ` ${note}`)))));
  const numbers = run.numbers.filter(({ name, value }) => isNumber(value) && name !== "times_fewer_bytes");
  show("numbers", numbers.map(({ label, text }) => make("div", {}, make("dt", {}, label), make("dd", {}, text))));
}

// ---- charts

const charts = {}; // what each chart shows, and the x below the pointer
// Dashes besides colours: lines are told apart without seeing colours, too.
const DASHES = [null, "8 6", "2 5", "10 5 2 5", "14 6", "5 5", "1 4", "7 4 1 4 1 4"];
const ring = (x, y) => draw("circle", { class: "evaluation", cx: x, cy: y, r: 4 });
const curve = (replica, kind, d) => draw("path", { class: `line ${kind} s${replica % 8}`, "stroke-dasharray": kind ? null : DASHES[replica % 8], d });

function showChart(id, chart) {
  charts[id] = { dots: [], weight: 0, ...chart, at: charts[id]?.at };
  drawChart(id);
  const { series, dots, what, xTitle, xWords, yTitle, yWords } = charts[id];
  const rows = series.flatMap(({ replica, points }) => sampled(points, 12).map(([at, value]) => [replica, xWords(at), yWords(value)]));
  rows.push(...dots.map(([at, value]) => ["validation", xWords(at), yWords(value)]));
  show(`${id}-table`, table(`${what}, at most 12 points of each replica.`, [["Replica"], [xTitle, "number"], [yTitle, "number"]], rows));
}

function drawChart(id) {
  const { what, series, dots, weight, fromZero, xTitle, xWords, yTitle, yWords, at } = charts[id];
  const [across, up] = [0, 1].map((index) => extent([...series, { points: dots }], index));
  if (!across) return;
  const box = byId(id);
  const [width, height, left, right, bottom] = [Math.max(260, box.clientWidth), id === "loss" ? 300 : 220, 56, 12, 26];
  const marks = ticks(fromZero ? 0 : up[0], up[1] > up[0] ? up[1] : up[0] + 1, 5);
  const [base, top] = [Math.min(fromZero ? 0 : up[0], marks[0]), Math.max(up[1], marks[marks.length - 1])];
  const x = (value) => left + ((value - across[0]) / Math.max(across[1] - across[0], 1e-9)) * (width - left - right);
  const y = (value) => height - bottom - ((value - base) / Math.max(top - base, 1e-9)) * (height - bottom - 10);
  const lines = series.filter(({ points }) => points.length);
  const picked = lines.map(({ points }) => (isNumber(at) ? nearest(points, at) : points[points.length - 1]));
  const isHeld = isNumber(at) && picked.length > 0;
  const ends = lines.slice(0, 6).map(({ replica, points }) => `replica ${replica} from ${yWords(points[0][1])} to ${yWords(points[points.length - 1][1])}`);
  show(id, svg(width, height, { role: "img", "aria-label": `${what}: ${ends.join(", ")}${lines.length > 6 ? ` and ${lines.length - 6} more` : ""}. The table below holds the numbers.` },
    marks.map((value) => [draw("line", { class: "gridline", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      draw("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, tickWords(value))]),
    ticks(...across, Math.min(8, Math.floor(width / 85))).map((value) => draw("text", { x: x(value), y: height - bottom + 18, "text-anchor": x(value) > width - 30 ? "end" : "middle" }, xWords(value))),
    draw("text", { x: left - 8, y: height - bottom + 18, "text-anchor": "end" }, xTitle),
    isHeld ? draw("line", { class: "pointer", x1: x(picked[0][0]), x2: x(picked[0][0]), y1: 6, y2: height - bottom }) : null,
    weight ? lines.map(({ replica, points }) => curve(replica, "raw", pathThrough(points, x, y))) : null,
    lines.map(({ replica, points }) => curve(replica, "", pathThrough(smoothed(points, weight), x, y))),
    dots.filter((dot) => isNumber(dot[1])).map((dot) => ring(x(dot[0]), y(dot[1]))),
    isHeld ? picked.map((point, index) => (isNumber(point[1]) ? draw("circle", { class: `picked s${lines[index].replica % 8}`, cx: x(point[0]), cy: y(point[1]), r: 4 }) : null)) : null));
  const entries = lines.map(({ replica }, index) => [picture(30, 8, curve(replica, "", "M2 4h26")), `replica ${replica} `, make("strong", {}, yWords(picked[index][1]))]);
  if (dots.length) {
    const dot = isHeld ? nearest(dots, at) : dots[dots.length - 1];
    entries.push([picture(12, 12, ring(6, 6)), "validation ", make("strong", {}, yWords(dot[1])), ` at ${xTitle} ${xWords(dot[0])}`]);
  }
  const where = isHeld ? `${xTitle} ${xWords(picked[0][0])}` : `latest, ${xTitle} ${xWords(across[1])}`;
  show(`${id}-legend`, legend([[make("strong", {}, `${yTitle} `), where], ...entries]));
  const moveTo = (value) => {
    charts[id].at = value;
    drawChart(id);
  };
  box.onpointermove = (event) => moveTo(across[0] + ((event.clientX - box.getBoundingClientRect().left - left) / (width - left - right)) * (across[1] - across[0]));
  box.onpointerleave = () => moveTo(null);
}

function showCurves({ loss, speed, evaluations }) {
  const hasPoints = (series) => series.some(({ points }) => points.length);
  const isThere = hasPoints(loss) || evaluations.length > 0;
  byId("smoothing-choice").hidden = byId("loss-details").hidden = !isThere;
  setText("loss-note", known.notes?.missing?.loss ?? "");
  if (isThere) {
    showChart("loss", { what: "Training loss by step", series: loss, dots: evaluations, xTitle: "step", yTitle: "Loss", xWords: tickWords, yWords: inLoss,
      weight: Number(byId("smoothing").value) / 100 });
  } else show("loss"), show("loss-legend");
  if (showSection("speed", hasPoints(speed))) {
    showChart("speed", { what: `${inUnit()} per second by time`, series: speed, xTitle: "time", yTitle: `${inUnit()}/s`, xWords: inSeconds, yWords: inCount, fromZero: true });
  }
}

// ---- findings and replicas

function showFindings({ findings }) {
  showSection("findings", findings.length > 0);
  const [open, over] = [findings.filter((one) => !one.is_over), findings.filter((one) => one.is_over)];
  show("findings", open.length ? open.map(findingElement) : make("p", {}, "Nothing is wrong now."));
  byId("over-details").hidden = !over.length;
  setText("over-title", `${over.length} resolved`);
  show("findings-over", over.map(findingElement));
}

function findingElement(finding) {
  const when = [isNumber(finding.at) ? `found ${moment(finding.at, Date.now())}` : "", finding.since_round >= 0 ? `since round ${finding.since_round}` : "",
    isNumber(finding.over_at) ? `resolved ${moment(finding.over_at, Date.now())}` : "", `${inPercent(finding.confidence)} sure`];
  const evidence = finding.evidence.map(([name, value]) => make("div", {}, make("dt", {}, name.replace(/_s$/, " (s)").replaceAll("_", " ")), make("dd", {}, value)));
  return make("article", { class: finding.is_over ? "finding is-over" : "finding" },
    make("h3", {}, `${finding.kind}: ${finding.where}`),
    make("p", { class: "when" }, when.filter(Boolean).join(" · ")),
    make("p", {}, finding.text),
    evidence.length ? make("dl", { class: "evidence", "aria-label": "Evidence" }, evidence) : null,
    finding.remedy ? make("p", {}, make("strong", {}, "Remedy: "), finding.remedy) : null,
    finding.probe ? make("p", {}, make("strong", {}, "Probe: "), finding.probe) : null);
}

const BADGES = { training: "●", finished: "✓", failed: "✕", silent: "▲", gone: "○", paused: "‖", waiting: "…", elsewhere: "↗" };

// What the run counts: tokens, images.
function inUnit() {
  const unit = known.run?.unit ?? "tokens";
  return unit[0].toUpperCase() + unit.slice(1);
}

function showReplicas(replicas) {
  if (!showSection("replicas", replicas.length > 0)) return;
  const { ranks } = namedBy(known.findings?.findings);
  const hasHosts = replicas.some((one) => one.host);
  const columns = [["Replica"], ...(hasHosts ? [["Host"]] : []), ["State"], ["Step", "number"], ["Loss", "number"], [`${inUnit()}/s`, "number"], ["Computing", "number"],
    ["In flight", "number"], ["Sent", "number"], ["Received", "number"], ["Rate now", "number"], ["Peak rate", "number"], ["Last data", "number"]];
  show("replicas", table("Each row is the replica's latest line. Computing is the share of the time since training began.", columns, replicas.map((one) => [
    ranks.has(one.replica) ? [one.replica, " ", flag("finding")] : one.replica, ...(hasHosts ? [one.host ?? NONE] : []),
    [make("span", { class: "badge", "data-state": one.state }, `${BADGES[one.state] ?? ""} ${one.state}`), one.error ? make("div", { class: "words flag" }, one.error) : null],
    one.step ?? NONE, inLoss(one.loss), inCount(one[`${one.unit}_per_s`]), inPercent(one.computing), one.rounds_in_flight ?? NONE,
    inBytes(one.sent_bytes), inBytes(one.received_bytes), inRate(one.sent_bits_per_s), inRate(one.peak_bits_per_s), since(one.changed_at)])));
}

// ---- links, rounds, work

function showMatrix(matrix) {
  if (!showSection("matrix", matrix)) return;
  const { isLink } = namedBy(known.findings?.findings);
  const cellOf = (from, to) => {
    const cell = matrix.cells.find((one) => one.from === from && one.to === to);
    if (from === to || !cell) return make("td", { class: "none" }, from === to ? "" : NONE);
    const isNamed = isLink(from, to);
    return make("td", { class: isNamed ? "hot" : null }, isNamed ? "▲ " : null, inTimes(cell.times_longer), make("small", {}, inSeconds(cell.now_s)),
      cell.retries ? make("small", {}, `${cell.retries} retries`) : null);
  };
  const who = (rank) => [rank, /^((replica|rank)-[0-9]+)?$/.test(matrix.hosts[rank] ?? "") ? null : make("small", {}, matrix.hosts[rank])];
  const left = matrix.num_left_out ? ` ${matrix.num_left_out} ranks with shorter times are left out.` : "";
  const clocks = matrix.clock_error_s ? ` Clocks may be off by ${inSeconds(matrix.clock_error_s)}.` : "";
  setText("matrix-note", `The time of a ${matrix.is_of_wires ? "megabyte" : "message"}, and how many times its usual time that is. A finding colours a cell.${clocks}${left}`);
  show("matrix", make("table", { class: "heat", "aria-labelledby": "matrix-title" },
    make("thead", {}, make("tr", {}, make("td", {}), matrix.ranks.map((rank) => make("th", { scope: "col" }, "to ", who(rank))))),
    make("tbody", {}, matrix.ranks.map((from) => make("tr", {}, make("th", { scope: "row", class: "first" }, "from ", who(from)), matrix.ranks.map((to) => cellOf(from, to)))))));
}

const KINDS = { compute: "the whole work of a step", forward: "the forward passes", backward: "the backward passes" };
const HOT = 1.25;

// Ranks down, windows of steps across; coloured are the longer times of a rank that a finding names.
function showHeat(maps) {
  if (!showSection("heat", maps.length > 0)) return;
  const choice = byId("heat-kind");
  const kinds = maps.map(({ kind }) => kind);
  byId("heat-choice").hidden = maps.length < 2;
  if (choice.kinds !== kinds.join()) { // drawn again only when it changes, so that a choice keeps the focus
    choice.kinds = kinds.join();
    show("heat-kind", kinds.map((kind) => make("option", { value: kind }, KINDS[kind] ?? kind)));
    choice.onchange = () => showHeat(known.heat);
  }
  const map = maps.find(({ kind }) => kind === choice.value) ?? maps[0];
  const { ranks } = namedBy(known.findings?.findings);
  const left = map.num_left_out ? ` ${map.num_left_out} ranks that stand out less are left out.` : "";
  setText("heat-note", `Time of each rank's ${map.kind} over the median of all ranks, from the step of the column on. A finding colours longer times.${left}`);
  show("heat", make("table", { class: "heat small", "aria-labelledby": "heat-title" },
    make("thead", {}, make("tr", {}, make("th", { scope: "col", class: "first" }, "step"), map.windows.map(([first]) => make("th", { scope: "col" }, first)))),
    make("tbody", {}, map.rows.map((row) => make("tr", {}, make("th", { scope: "row", class: "first" }, ranks.has(row.rank) ? "▲ " : null, `rank ${row.rank}`),
      row.times_longer.map((times, index) => make("td", { class: ranks.has(row.rank) && times >= HOT ? "hot" : null, title: inSeconds(row.times_s[index]) }, inTimes(times))))))));
}

// A block for computing, a thin line for waiting, and rounds in flight below.
function laneDrawing({ rank, work, flights }, x, top, tall) {
  const bar = (kind, from, to, y, height, title) => draw("rect", { class: kind, x: x(from), y: top + y, width: Math.max(0.75, x(to) - x(from)), height }, draw("title", {}, `${title} ${inSeconds(to - from)}`));
  return [draw("text", { x: 0, y: top + tall / 2 + 4, class: "ink" }, `rank ${rank}`),
    work.map(([kind, from, to]) => (kind === "computing" ? bar("compute", from, to, 0, tall, `rank ${rank} computes`) : bar("wait", from, to, tall / 2 - 2, 4, `rank ${rank} waits`))),
    stacked(flights).map(([[round, from, to, isOpen], row]) => bar(isOpen ? "flight-open" : "flight", from, to, tall + 4 + row * 6, 4, `round ${round} ${isOpen ? "is open since" : "took"}`))];
}

function showTimeline(timeline) {
  if (!showSection("timeline", timeline && timeline.lanes.length)) return;
  const { lanes, shown_s: shownS, num_left_out: numLeftOut } = timeline;
  const [width, left, each] = [Math.max(260, byId("timeline").clientWidth), 62, Math.max(46, Math.min(90, 194 / lanes.length))];
  const height = lanes.length * each + 26;
  const x = (at) => left + ((at + shownS) / Math.max(shownS, 1e-9)) * (width - left - 8);
  const words = lanes.map((lane) => `rank ${lane.rank} ${inPercent(lane.computing)} computing and ${inPercent(lane.waiting)} waiting${lane.num_open ? `, ${lane.num_open} rounds open` : ""}`);
  show("timeline", svg(width, height, { role: "img", "aria-label": `The latest ${inSeconds(shownS)}: ${words.join("; ")}. The table below holds the numbers.` },
    ticks(-shownS, 0, width < 520 ? 3 : 6).map((at) => [draw("line", { class: "gridline", x1: x(at), x2: x(at), y1: 0, y2: height - 22 }),
      draw("text", { x: x(at), y: height - 6, "text-anchor": at ? "middle" : "end" }, at ? `${tickWords(at)} s` : "latest")]),
    lanes.map((lane, index) => laneDrawing(lane, x, index * each + 2, each - 26))));
  const key = (kind, y, tall) => picture(18, 12, draw("rect", { class: kind, x: 1, y, width: 16, height: tall }));
  show("timeline-legend", legend([[key("compute", 1, 10), "computing"], [key("wait", 4, 4), "waiting"], [key("flight", 4, 4), "round in flight"], [key("flight-open", 4, 4), "round not finished"]]));
  show("timeline-table", table(`Shares of the latest ${inSeconds(shownS)} only.${numLeftOut ? ` ${numLeftOut} ranks that waited more are left out.` : ""}`,
    [["Rank"], ["Computing", "number"], ["Waiting", "number"], ["Rounds", "number"], ["Not finished", "number"]],
    lanes.map((lane) => [lane.rank, inPercent(lane.computing), inPercent(lane.waiting), lane.num_rounds, lane.num_open])));
}

function showLinks({ links, streams, num_left_out: numLeftOut, recent_s: recentS }) {
  if (!showSection("links", links.length > 0)) return;
  show("links", table(`“Now” is the latest ${inSeconds(recentS)} of the sender's data.${numLeftOut ? ` ${numLeftOut} links with fewer bytes are left out.` : ""}`,
    [["Link"], ["Bytes", "number"], ["Messages", "number"], ["Rate now", "number"], ["Mean rate", "number"], ["Failed", "number"]],
    links.map((link) => [`${link.from} → ${link.to}`, inBytes(link.bytes), link.messages, inRate(link.now_bits_per_s), inRate(link.mean_bits_per_s), link.failed ? flag(link.failed) : 0])));
  show("streams", table("What all replicas sent, by stream. The peak is the fullest second of one replica.",
    [["Stream"], ["Bytes", "number"], ["Messages", "number"], ["Largest message", "number"], ["Peak", "number"]],
    streams.map((one) => [one.stream, inBytes(one.bytes), one.messages, inBytes(one.most_bytes), inRate(one.peak_bits_per_s)])));
}

function showPaths({ paths, num_left_out: numLeftOut, recent_s: recentS }) {
  if (!showSection("paths", paths.length > 0)) return;
  show("paths", table(`Bytes that arrived. “Now” is the latest ${inSeconds(recentS)}; “in use” is the part of it with bytes under way.${numLeftOut ? ` ${numLeftOut} paths with fewer bytes are left out.` : ""}`,
    [["Path"], ["Source port", "number"], ["Bytes", "number"], ["Rate now", "number"], ["In use", "number"], ["Share", "number"], ["Limited by", "words"]],
    paths.map((one) => [`${one.from} → ${one.to}, path ${one.path}`, one.source_port || NONE, inBytes(one.bytes), inRate(one.now_bits_per_s), inPercent(one.busy), inPercent(one.share),
      one.is_up && one.limit === 1 ? one.limited_by : flag(one.limited_by)])));
}

// ---- faults and members

function showActions({ actions }) {
  if (!showSection("actions", actions.length > 0)) return;
  show("actions", table("Actions on findings, the latest first.", [["When"], ["Action"], ["Target"], ["Why", "words"], ["Result", "words"]], actions.map((one) => (
    [moment(one.at, Date.now()), one.is_dry_run ? `${one.action} (dry run: not done)` : one.action, one.target || NONE, one.why || NONE, one.result || NONE]))));
}

const DOWNTIME = { post_checkpoint_s: "Repeated work since the last checkpoint", detection_s: "Until the fault was noticed", diagnosis_s: "Until its place was known", reinitialisation_s: "Until training went on" };

function showDowntime(downtime) {
  const rows = Object.entries(DOWNTIME).map(([name, words]) => [words, downtime?.[name] ?? 0]);
  const total = downtime?.total_s ?? rows.reduce((sum, [, seconds]) => sum + seconds, 0);
  if (!showSection("downtime", total > 0)) return;
  const whole = Math.max(downtime.run_s ?? total, total, 1e-9);
  show("downtime", table(`${inSeconds(total)} of ${inSeconds(whole)} lost${isNumber(downtime.num_incidents) ? ` to ${downtime.num_incidents} faults` : ""}.`, [["What", "words"], ["Time", "number"], ["Of the run", "number"]],
    rows.map(([words, seconds]) => [words, inSeconds(seconds), inPercent(seconds / whole)])));
}

function showElastic(elastic) {
  if (!showSection("elastic", elastic)) return;
  show("elastic-rounds", table("The latest rounds that this host's replicas applied.", [["Round"], ["Fragment", "number"], ["Launched at step", "number"], ["Replicas"], ["Own part counted"], ["Applied"]],
    elastic.rounds.map((one) => [one.round, one.fragment, one.launch_step, one.members.join(", "), one.is_counted ? "yes" : "no", moment(one.at, Date.now())])));
  show("elastic-messages", elastic.messages.map((message) => make("li", {}, message)));
}

function showNotes({ warnings, refused }) {
  const lines = [...warnings.map(([replica, step, words]) => `Replica ${replica}, after step ${step}: ${words}`), ...refused.map((words) => `Not read: ${words}`)];
  byId("notes-section").hidden = !lines.length;
  show("notes", lines.map((words) => make("li", {}, words)));
}

// ---- live

const SHOWN = { notes: showNotes, run: showRun, findings: showFindings, headline: showHeadline, replicas: showReplicas, curves: showCurves, links: showLinks, paths: showPaths,
  timeline: showTimeline, matrix: showMatrix, heat: showHeat, actions: showActions, downtime: showDowntime, elastic: showElastic };
// Sections that are drawn again with another one.
const ALSO = { findings: ["replicas", "matrix", "heat"], run: ["headline"], notes: Object.keys(SHOWN) };

function take(message) {
  clockAhead = message.now - Date.now() / 1000; // ages in a saved copy stay those of the moment it was saved
  Object.assign(known, message.sections);
  const due = new Set(Object.keys(message.sections).flatMap((name) => [name, ...(ALSO[name] ?? [])]));
  for (const [name, showOne] of Object.entries(SHOWN)) if (due.has(name) && name in known) showOne(known[name]);
  const absent = Object.entries(known.notes?.missing ?? {}).filter(([name]) => byId(`${name}-section`).hidden);
  byId("absent-section").hidden = !absent.length;
  show("absent", absent.map(([name, words]) => make("div", {}, make("dt", {}, byId(`${name}-title`).textContent), make("dd", {}, words))));
  tick();
}

let lostAt = null;

function tick() {
  const isLost = lostAt !== null && Date.now() - lostAt > 2000;
  const trouble = known.fault || (isLost ? "No connection to thinwire dashboard: this page is old. Trying again." : "");
  if (trouble) byId("connection").setAttribute("data-lost", "");
  else byId("connection").removeAttribute("data-lost");
  if (trouble) setText("announcement", trouble);
  setText("connection", trouble || (location.protocol === "file:" ? "A saved copy" : known.run?.state === "finished" ? "Finished" : isNumber(known.run?.changed_at) ? `Last data ${ago(serverNow() - known.run.changed_at)}` : "Live"));
  for (const one of document.querySelectorAll("[data-since]")) one.textContent = ago(serverNow() - one.getAttribute("data-since"));
}

function live() {
  const source = new EventSource("events");
  source.onmessage = (event) => {
    lostAt = null;
    take(JSON.parse(event.data));
  };
  source.onopen = () => { lostAt = null; };
  source.onerror = () => { lostAt ??= Date.now(); };
  setInterval(tick, 1000);
}

byId("smoothing").oninput = () => showCurves(known.curves);
let width = 0;
new ResizeObserver(() => {
  if (byId("main").clientWidth === width) return;
  width = byId("main").clientWidth;
  for (const name of ["timeline", "curves"]) if (name in known) SHOWN[name](known[name]);
}).observe(byId("main"));
const first = JSON.parse(byId("state").textContent);
if (first) take(first);
if (location.protocol !== "file:") live();
