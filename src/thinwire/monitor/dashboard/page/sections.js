// One function a section: from what the server tells to what the page shows.

const known = {}; // the latest of each section
let clockAhead = 0; // what the server's clock is ahead of this one, in seconds
const serverNow = () => Date.now() / 1000 + clockAhead;

function missing(name) {
  const words = known.notes?.missing?.[name];
  const element = byId(`${name}-missing`);
  element.hidden = !words;
  say(`${name}-missing`, words ?? "");
}

function showRun(run) {
  say("run-name", run.name);
  show("run-state", badge(run.state));
  const parts = [run.method, run.model, run.data && `on ${run.data}`];
  if (run.num_replicas && !run.is_elastic) parts.push(`${run.num_replicas} replicas`);
  if (run.is_elastic) parts.push("elastic");
  if (isNumber(run.val_loss)) parts.push(`validation loss ${inLoss(run.val_loss)}`);
  if (isNumber(run.times_fewer_bytes)) parts.push(`${inTimes(run.times_fewer_bytes)} fewer bytes than an all-reduce a step`);
  say("run-settings", parts.filter(Boolean).join(" · "));
  const words = run.steps ? `step ${run.step} of ${run.steps}` : `step ${run.step}`;
  show("progress", run.steps ? make("progress", { max: run.steps, value: Math.min(run.step, run.steps), "aria-label": words }) : null);
}

function showHeadline(headline) {
  byId("headline").setAttribute("data-level", headline.level);
  say("headline-mark", { trouble: "▲", good: "✓", unknown: "?" }[headline.level] ?? "?");
  const text = headline.text.charAt(0).toUpperCase() + headline.text.slice(1);
  const isNew = byId("headline-text").textContent !== text;
  say("headline-text", text);
  if (isNew) say("announcement", text);
  const first = (known.findings?.findings ?? []).find((finding) => !finding.is_over);
  say("headline-more", headline.level === "trouble" && first ? `${first.text} Remedy: ${first.remedy}.` : "");
  document.title = `${headline.level === "trouble" ? "▲ " : ""}${text} · ${known.run?.name ?? "thinwire"}`;
}

function findingElement(finding) {
  const when = [];
  if (isNumber(finding.at)) when.push(`told ${moment(finding.at, Date.now())}`);
  if (finding.since_round >= 0) when.push(`since round ${finding.since_round}`);
  if (isNumber(finding.over_at)) when.push(`over ${moment(finding.over_at, Date.now())}`);
  when.push(`${inPercent(finding.confidence)} sure`);
  return make("article", { class: finding.is_over ? "finding is-over" : "finding" },
    make("h3", {}, make("span", { "aria-hidden": "true" }, finding.is_over ? "✓ " : "▲ "), `${finding.kind}: ${finding.where}`),
    make("p", { class: "when" }, when.join(" · ")),
    make("p", {}, finding.text),
    finding.evidence.length ? make("dl", { class: "evidence", "aria-label": "Evidence" }, finding.evidence.map(([name, value]) => (
      make("div", {}, make("dt", {}, evidenceName(name)), make("dd", {}, value))))) : null,
    finding.remedy ? make("p", {}, make("strong", {}, "Remedy: "), finding.remedy) : null,
    finding.probe ? make("p", {}, make("strong", {}, "Probe: "), finding.probe) : null);
}

function evidenceName(name) {
  return name.endsWith("_s") ? `${name.slice(0, -2).replaceAll("_", " ")} (s)` : name.replaceAll("_", " ");
}

function showFindings({ findings }) {
  missing("findings");
  const [standing, over] = [findings.filter((one) => !one.is_over), findings.filter((one) => one.is_over)];
  show("findings", standing.length ? standing.map(findingElement) : make("p", {}, over.length ? "Nothing is wrong now." : "None."));
  byId("over-details").hidden = !over.length;
  say("over-title", over.length === 1 ? "1 that is over" : `${over.length} that are over`);
  show("findings-over", over.map(findingElement));
}

function showReplicas(replicas) {
  missing("replicas");
  const named = namedBy(known.findings?.findings ?? []).ranks;
  const hasHosts = replicas.some((one) => one.host);
  const head = [["Replica"], ["State"], ["Step", "number"], ["Loss", "number"], ["Tokens/s", "number"], ["Computing", "number"],
    ["In flight", "number"], ["Sent", "number"], ["Rate now", "number"], ["Peak", "number"], ["Last word", "number"]];
  if (hasHosts) head.splice(1, 0, ["Host"]);
  const rows = replicas.map((one) => {
    const row = [
      named.has(one.replica) ? [String(one.replica), make("span", { class: "flag" }, " ▲ named in a finding")] : one.replica,
      [badge(one.state), one.error ? make("div", { class: "words flag" }, one.error) : null],
      one.step ?? NONE, inLoss(one.loss), inCount(one.tokens_per_s), inPercent(one.compute_fraction),
      one.rounds_in_flight ?? NONE, inBytes(one.sent_bytes), inRate(one.sent_bits_per_s), inRate(one.peak_bits_per_s),
      make("span", { "data-since": one.changed_at }, isNumber(one.changed_at) ? ago(serverNow() - one.changed_at) : NONE)];
    if (hasHosts) row.splice(1, 0, one.host ?? NONE);
    return row;
  });
  show("replicas", rows.length ? table("Where each replica is and how it does; the rate is that of its latest line.", head, rows)
    : make("p", {}, "No replica has written anything yet."));
}

function showMatrix(matrix) {
  missing("matrix");
  if (!matrix) return show("matrix"), show("matrix-legend");
  const named = namedBy(known.findings?.findings ?? []).cells;
  const cells = new Map(matrix.cells.map((cell) => [linkName(cell.from, cell.to), cell]));
  const cellOf = (from, to) => {
    if (from === to) return make("td", { class: "self" }, make("span", { class: "unseen" }, "itself"));
    const cell = cells.get(linkName(from, to));
    if (!cell) return make("td", {}, make("span", { class: "unseen" }, "nothing known"), make("span", { "aria-hidden": "true" }, NONE));
    const isNamed = named.has(linkName(from, to));
    return make("td", { "data-level": heatLevel(cell.times_longer), class: isNamed ? "named" : null },
      isNamed ? "▲ " : null, inTimes(cell.times_longer), make("small", {}, inSeconds(cell.now_s)),
      cell.retries ? make("small", {}, `${cell.retries} retries`) : null);
  };
  const who = (rank) => (matrix.hosts[rank] && !/^(replica|rank)-[0-9]+$/.test(matrix.hosts[rank]) ? [String(rank), make("small", {}, matrix.hosts[rank])] : [String(rank)]);
  const left = matrix.num_left_out ? ` ${matrix.num_left_out} ranks with shorter times are left out.` : "";
  const clocks = matrix.clock_error_s ? `Clocks may be wrong by ${inSeconds(matrix.clock_error_s)}.` : "All have one clock.";
  const cellWords = matrix.is_of_wires
    ? "how many times its usual time a byte takes now, and the time of a megabyte, by the kernels' counters and by probes."
    : `how many times its usual time a message takes now, and the time itself, from when both ends are ready. ${clocks}`;
  show("matrix", make("table", { class: "heat" },
    make("caption", {}, make("span", {}, `Rows send, columns receive. Each cell: ${cellWords}${left}`)),
    make("thead", {}, make("tr", {}, make("td", { class: "self" }), matrix.ranks.map((rank) => make("th", { scope: "col" }, "to ", who(rank))))),
    make("tbody", {}, matrix.ranks.map((from) => make("tr", {}, make("th", { scope: "row" }, "from ", who(from)),
      matrix.ranks.map((to) => cellOf(from, to)))))));
  show("matrix-legend", legend([...heatKeys("as usual"), ["▲ ", "outlined: named by a finding"], [`${NONE} `, "no history yet"]]));
}

function heatKeys(coolWords) {
  const swatch = (level) => make("span", { class: "swatch", "data-level": level, "aria-hidden": "true" });
  return [[swatch(0), coolWords], ...HEAT_BOUNDS.map((bound, index) => [swatch(index + 1), `${bound}× and more`])];
}

const KINDS = { compute: "the whole work of a step", forward: "the forward passes", backward: "the backward passes" };
let heatKinds = ""; // what there is to choose from; drawn anew only when it changes, so that a choice keeps the focus
let heatKind = "";

function showHeatChoice(maps) {
  const choice = byId("heat-kind");
  byId("heat-choice").hidden = maps.length < 2;
  if (!maps.some((map) => map.kind === heatKind)) heatKind = maps[0]?.kind ?? "";
  const kinds = JSON.stringify(maps.map((map) => map.kind));
  if (kinds === heatKinds) return;
  heatKinds = kinds;
  show("heat-kind", maps.map(({ kind }) => make("option", { value: kind, selected: kind === heatKind ? "" : null }, KINDS[kind] ?? kind)));
  choice.onchange = () => {
    heatKind = choice.value;
    showHeat(known.heat);
  };
}

// Ranks down, windows of steps across: the rank that computes ever slower is a row that grows hot.
function showHeat(maps) {
  missing("heat");
  showHeatChoice(maps);
  const named = namedBy(known.findings?.findings ?? []).ranks;
  show("heat", maps.filter((map) => map.kind === heatKind).map((map) => make("table", { class: "heat small" },
    make("caption", {}, make("span", {}, `${map.kind}: how many times the median of all ranks each rank takes. Columns begin with the step `
      + `above them.${map.num_left_out ? ` ${map.num_left_out} ranks that stand out less are left out.` : ""}`)),
    make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "step"), map.windows.map(([first]) => make("th", { scope: "col" }, first)))),
    make("tbody", {}, map.rows.map((row) => make("tr", {},
      make("th", { scope: "row" }, named.has(row.rank) ? "▲ " : null, `rank ${row.rank}`),
      row.times_longer.map((times, index) => make("td", { "data-level": heatLevel(times), title: inSeconds(row.times_s[index]) }, inTimes(times)))))))));
  show("heat-legend", maps.length ? legend([...heatKeys("as the others"), ["▲ ", "named by a finding"]]) : null);
}

function timelineWords(timeline) {
  const lanes = timeline.lanes.map((lane) => (
    `rank ${lane.rank} ${inPercent(lane.computing)} computing and ${inPercent(lane.waiting)} waiting`
      + (lane.num_open ? `, ${lane.num_open} rounds open` : "")));
  return `The latest ${inSeconds(timeline.shown_s)}: ${lanes.join("; ")}. The table below holds the numbers.`;
}

function laneDrawing(lane, x, top) {
  const wide = (from, to) => Math.max(0.75, x(to) - x(from));
  return [
    draw("text", { x: 0, y: top + 15, class: "ink" }, `rank ${lane.rank}`),
    lane.work.map(([kind, from, to, step]) => (
      draw("rect", { class: kind === "computing" ? "compute" : "wait-back", x: x(from), y: top, width: wide(from, to), height: 20,
        fill: kind === "computing" ? null : "url(#hatching)" },
      draw("title", {}, `rank ${lane.rank} ${kind} ${inSeconds(to - from)}${step >= 0 ? `, ${step}` : ""}`)))),
    lane.work.filter(([kind]) => kind === "waiting").map(([, from, to]) => (
      draw("rect", { x: x(from), y: top, width: wide(from, to), height: 20, fill: "url(#hatching)" }))),
    stacked(lane.flights).map(([[round, from, to, isOpen], row]) => (
      draw("rect", { class: isOpen ? "flight-open" : "flight", x: x(from), y: top + 24 + row * 6, width: wide(from, isOpen ? 0 : to), height: 4, rx: 2 },
        draw("title", {}, `round ${round} ${isOpen ? "has not come after" : "took"} ${inSeconds(to - from)}`)))),
  ].flat();
}

function showTimeline(timeline) {
  missing("timeline");
  if (!timeline || !timeline.lanes.length) return show("timeline"), show("timeline-table"), show("timeline-legend");
  const box = byId("timeline");
  const [width, left, each] = [Math.max(260, box.clientWidth || 600), 62, 46];
  const height = timeline.lanes.length * each + 30;
  const x = (at) => left + ((at + timeline.shown_s) / Math.max(timeline.shown_s, 1e-9)) * (width - left - 8);
  const key = (kind, isThin) => draw("svg", { width: 18, height: 12, "aria-hidden": "true" },
    draw("rect", { class: kind, x: 1, y: isThin ? 4 : 1, width: 16, height: isThin ? 4 : 10 }),
    kind === "wait-back" ? draw("rect", { x: 1, y: 1, width: 16, height: 10, fill: "url(#hatching)" }) : null);
  show("timeline", draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": timelineWords(timeline) },
    draw("defs", {}, draw("pattern", { id: "hatching", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      draw("line", { class: "hatch", x1: 0, y1: 0, x2: 0, y2: 6 }))),
    ticks(-timeline.shown_s, 0, width < 420 ? 4 : 6).map((at) => [
      draw("line", { class: "gridline", x1: x(at), x2: x(at), y1: 0, y2: height - 24 }),
      draw("text", { x: x(at), y: height - 8, "text-anchor": at ? "middle" : "end" }, at ? `${tickWords(at)} s` : "last")]).flat(),
    timeline.lanes.map((lane, index) => laneDrawing(lane, x, index * each + 2)).flat()));
  show("timeline-legend", legend([[key("compute"), "computing"], [key("wait-back"), "waiting"], [key("flight", true), "a round in flight"],
    [key("flight-open", true), "a round that has not come"]]));
  const rows = timeline.lanes.map((lane) => [lane.rank, inPercent(lane.computing), inPercent(lane.waiting), lane.num_rounds, lane.num_open]);
  const left_out = timeline.num_left_out ? ` ${timeline.num_left_out} ranks that waited more are left out.` : "";
  show("timeline-table", table(`Shares of the latest ${inSeconds(timeline.shown_s)}.${left_out}`,
    [["Rank"], ["Computing", "number"], ["Waiting", "number"], ["Rounds", "number"], ["Not come", "number"]], rows));
}

function showCurve(id, what, series, options) {
  const words = chartWords(what, series, options.yWords);
  show(id, lineChart(byId(id), words, series, options));
  const keys = series.map(({ replica }, index) => [lineKey(index), `replica ${replica}`]);
  if (options.dots?.length) keys.push([draw("svg", { width: 12, height: 12, "aria-hidden": "true" }, draw("circle", { class: "evaluation", cx: 6, cy: 6, r: 4 })), "validation, global parameters"]);
  show(`${id}-legend`, keys.length ? legend(keys) : null);
  const rows = series.flatMap(({ replica, points }) => sampled(points, 12).map(([at, value]) => [replica, tickWords(Number(at.toPrecision(4))), options.yWords(value)]));
  (options.dots ?? []).forEach(([at, value]) => rows.push(["validation", at, options.yWords(value)]));
  show(`${id}-table`, !rows.length ? make("p", {}, "Nothing yet.") : table(`${what}, at most 12 points a replica.`, [["Replica"], [options.xTitle, "number"], [options.yTitle, "number"]], rows));
}

function showCurves(curves) {
  missing("curves");
  showCurve("loss", "Training loss by step", curves.loss, { xTitle: "step", yTitle: "Loss", yWords: (value) => (isNumber(value) ? String(Number(value.toPrecision(4))) : "no number"), dots: curves.evaluations });
  showCurve("speed", "Tokens per second by seconds of training", curves.speed, { xTitle: "seconds", yTitle: "Tokens/s", yWords: inCount, fromZero: true });
}

function showLinks({ links, num_left_out: numLeftOut, recent_s: recentS }) {
  missing("links");
  const most = Math.max(1, ...links.map((link) => link.now_bits_per_s));
  const left = numLeftOut ? ` ${numLeftOut} links with fewer bytes are left out.` : "";
  const bar = (share) => {
    const element = make("span", { class: "bar", "aria-hidden": "true" });
    element.style.width = `${Math.max(1, 100 * share)}%`;
    return element;
  };
  const rows = links.map((link) => [linkName(link.from, link.to), inBytes(link.bytes), link.messages,
    [inRate(link.now_bits_per_s), bar(link.now_bits_per_s / most)], inRate(link.mean_bits_per_s),
    link.failed ? make("span", { class: "flag" }, `▲ ${link.failed}`) : 0]);
  show("links", rows.length ? table(`“Now” is the latest ${inSeconds(recentS)} that the link's sender wrote of.${left}`,
    [["Link"], ["Bytes", "number"], ["Messages", "number"], ["Rate now", "number"], ["Mean", "number"], ["Failed", "number"]], rows) : null);
}

function showActions({ actions }) {
  missing("actions");
  const rows = actions.map((one) => [moment(one.at, Date.now()), one.is_dry_run ? `${one.action} (dry run: not done)` : one.action,
    one.target || NONE, one.why || NONE, one.result || NONE]);
  show("actions", rows.length ? table("What was done about findings, the latest first.", [["When"], ["Action"], ["Target"], ["Why", "words"], ["Result", "words"]], rows) : null);
}

function showDowntime(downtime) {
  missing("downtime");
  if (!downtime) return show("downtime");
  const parts = DOWNTIME_ROWS.map(([name, words], index) => ({ words, index, seconds: downtime[name] ?? 0 }));
  const total = downtime.total_s ?? parts.reduce((sum, part) => sum + part.seconds, 0);
  const whole = Math.max(downtime.run_s ?? total, total, 1e-9);
  const bars = parts.map(({ index, seconds }) => {
    const element = make("span", { class: `d${index}` });
    element.style.width = `${(100 * seconds) / whole}%`;
    return element;
  });
  const faults = isNumber(downtime.num_incidents) ? ` to ${downtime.num_incidents} fault${downtime.num_incidents === 1 ? "" : "s"}` : "";
  const words = `${inSeconds(total)} of ${inSeconds(whole)} lost${faults}, ${inPercent(total / whole)}`;
  const rows = parts.map(({ words: name, index, seconds }) => [[make("span", { class: `key d${index}`, "aria-hidden": "true" }), name], inSeconds(seconds), inPercent(seconds / whole)]);
  show("downtime", make("p", {}, make("strong", {}, words)), make("div", { class: "lost", role: "img", "aria-label": words }, bars),
    table("Where the time went.", [["What", "words"], ["Time", "number"], ["Of the run", "number"]], rows));
}

function showElastic(elastic) {
  byId("elastic-section").hidden = !elastic;
  if (!elastic) return;
  const rows = elastic.rounds.map((one) => [one.round, one.fragment, one.launch_step, one.members.join(", "), one.is_counted ? "yes" : "no",
    moment(one.at, Date.now())]);
  show("elastic-rounds", table("The latest rounds that replicas of this host applied.",
    [["Round"], ["Fragment", "number"], ["Launched at step", "number"], ["Made by replicas"], ["Own part counted"], ["Applied"]], rows));
  show("elastic-messages", elastic.messages.map((message) => make("li", {}, message)));
}

function showNotes(notes) {
  const warned = notes.warnings.map(([replica, step, words]) => `Replica ${replica}, after step ${step}: ${words}`);
  const refused = notes.refused.map((words) => `Not read: ${words}`);
  byId("notes-section").hidden = !warned.length && !refused.length;
  show("notes", make("ul", {}, [...warned, ...refused].map((words) => make("li", {}, words))));
}
