// What the server sends, as it comes; sections that depend on another one are drawn again with it.

const SHOWN = { notes: showNotes, run: showRun, findings: showFindings, headline: showHeadline, replicas: showReplicas, matrix: showMatrix, heat: showHeat,
  timeline: showTimeline, curves: showCurves, links: showLinks, actions: showActions, downtime: showDowntime, elastic: showElastic };
const ALSO = { findings: ["headline", "replicas", "matrix", "heat"], run: ["headline"], notes: Object.keys(SHOWN) };

function take(told) {
  clockAhead = told.now - Date.now() / 1000; // ages in a saved copy stay those of the moment it was saved
  Object.assign(known, told.sections);
  const due = new Set(Object.keys(told.sections).flatMap((name) => [name, ...(ALSO[name] ?? [])]));
  for (const [name, showSection] of Object.entries(SHOWN)) {
    if (due.has(name) && name in known) showSection(known[name]);
  }
  tick();
}

const LOST = "No connection to thinwire dashboard; what is shown is old. Trying again.";
let lostAt = null;

function tick() {
  const element = byId("connection");
  const isLost = lostAt !== null && Date.now() - lostAt > 2000;
  if (isLost || known.fault) element.setAttribute("data-lost", "");
  else element.removeAttribute("data-lost");
  const run = known.run;
  if (known.fault || isLost) {
    say("connection", known.fault || LOST);
    say("announcement", known.fault || LOST);
  }
  else if (location.protocol === "file:") say("connection", "A saved copy: as the run was when it was saved.");
  else if (run && isNumber(run.changed_at)) say("connection", run.state === "finished" ? "The run has finished." : `Live; ${run.steps ? `step ${run.step} of ${run.steps}` : `step ${run.step}`}.`);
  for (const span of document.querySelectorAll("[data-since]")) {
    const words = ago(serverNow() - Number(span.getAttribute("data-since")));
    if (Number(span.getAttribute("data-since")) > 0 && span.textContent !== words) span.textContent = words;
  }
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
  let width = 0;
  new ResizeObserver(() => {
    if (byId("main").clientWidth === width) return;
    width = byId("main").clientWidth;
    for (const name of ["timeline", "curves"]) if (name in known) SHOWN[name](known[name]);
  }).observe(byId("main"));
}

const first = JSON.parse(byId("state").textContent);
if (first) take(first);
if (location.protocol !== "file:") live();
