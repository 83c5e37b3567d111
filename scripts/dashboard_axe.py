"""Check the dashboard's page with axe-core and by keyboard in headless Chromium, light and dark, wide and narrow.

    npm pack axe-core && tar xzf axe-core-*.tgz
    python scripts/dashboard_axe.py --axe package/axe.min.js runs/demo heat.html --out pictures

Folders are runs, each served as `thinwire dashboard` does; files are pages. Without either a run is rehearsed. The exit
code is 1 where anything is found that axe calls a violation, that keys do not reach, or whose focus cannot be seen.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from browser import Page, page
from dashboard_pictures import keep_alive, write_rehearsed_run

from thinwire.monitor.dashboard.server import DashboardServer, Feed
from thinwire.monitor.dashboard.snapshot import RunFollower

# Width and height of the window, in CSS pixels; 320 is what WCAG 2.2 asks of pages (1.4.10, reflow).
SIZES = {"wide": (1400, 900), "half": (500, 900), "narrow": (320, 640)}
LOOKS = {"light": ("light", False), "dark": ("dark", False), "forced colours": ("dark", True)}
_SETTLED_S = 1.5
_MOST_TABS = 200
_TOLD = """axe.run(document, {rules: {"target-size": {enabled: true}}}).then((found) => ({
  passes: found.passes.length,
  violations: found.violations.map(brief), incomplete: found.incomplete.map(brief)}))"""
_BRIEF = """var brief = (one) => ({id: one.id, impact: one.impact, nodes: one.nodes.map((node) => ({
  at: node.target.join(" "), why: node.any.concat(node.all, node.none).map((check) => check.message).join("; ")}))})"""
# axe judges no text that is scrolled out of sight, or that lies on a gradient.
_SPREAD = """(() => { const style = document.createElement("style"); style.id = "spread";
  style.textContent = "* { max-height: none !important; overflow: visible !important; position: static !important; "
    + "background-image: none !important; } "
    + "body { width: 3000px; }";
  document.head.append(style); })()"""
# What keys must reach: what can be worked or scrolled, and is shown.
_TABBABLE = """[...document.querySelectorAll("a[href], summary, select, button, input, [tabindex='0']")]
  .filter(shown).map(nameOf)"""
_NAME = """var shown = (one) => one.checkVisibility({visibilityProperty: true});
var nameOf = (one) => one.id ? "#" + one.id
  : one.tagName.toLowerCase() + " " + [...document.querySelectorAll(one.tagName)].indexOf(one)"""
_FOCUS = """(() => {
  const one = document.activeElement, style = getComputedStyle(one), box = one.getBoundingClientRect();
  return one === document.body ? null : {name: nameOf(one),
    isSeen: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2,
    isInWindow: box.bottom > 0 && box.top < innerHeight && box.right > 0};
})()"""


@contextlib.contextmanager
def served(run: Path) -> Iterator[str]:
    """Serve a run's page, and give its address."""
    feed = Feed(RunFollower(run))
    server = DashboardServer(feed, host="127.0.0.1", port=0)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    serving.start()
    feed.after(0, wait_s=60.0)
    try:
        yield server.url
    finally:
        feed.close()
        server.shutdown()
        serving.join(timeout=5)
        server.server_close()


def check(tab: Page, url: str, *, name: str, axe: str, out: Path | None) -> int:
    """Check one page in all looks and sizes, and return how many faults were found."""
    num_faults = 0
    for look, (scheme, is_forced) in LOOKS.items():
        for size, (width, height) in SIZES.items():
            tab.open(url, width=width, height=height, scheme=scheme, is_forced=is_forced)
            time.sleep(_SETTLED_S)
            title = f"{name}, {look}, {size}"
            sys.stderr.write(f"{title}:\n")
            if out is not None:
                tab.picture(out / f"{title.replace(', ', '-').replace(' ', '-')}.png")
            tab.value(_NAME)
            tab.value("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
            num_faults += _told(title, _judged(tab, axe)) + _told(title, _keys(tab)) + _told(title, _wide(tab))
    return num_faults


def _judged(tab: Page, axe: str) -> list[str]:
    """Return what axe finds, on the page as it is and once more with all that scrolls spread out, for its colours."""
    tab.value(axe)
    tab.value(_BRIEF)
    told = _asked(tab)
    tab.value(_SPREAD)
    told += [f"spread out: {fault}" for fault in _asked(tab)]
    tab.value("document.getElementById('spread').remove()")
    return told


def _asked(tab: Page) -> list[str]:
    found: dict[str, Any] = tab.value(_TOLD)
    told = [f"axe, {one['impact']}: {one['id']} at {node['at']}: {node['why']}"
            for one in found["violations"] for node in one["nodes"]]  # fmt: skip
    unsure = Counter(f"{one['id']}: {node['why']}" for one in found["incomplete"] for node in one["nodes"])
    sys.stderr.write(f"axe: {found['passes']} rules passed, {len(told)} violations, {unsure.total()} not sure\n")
    sys.stderr.write("".join(f"  not sure of {count}: {words}\n" for words, count in unsure.items()))
    return told


def _keys(tab: Page) -> list[str]:
    """Walk through the page by Tab, work what is found, and return what is wrong."""
    expected: list[str] = tab.value(_TABBABLE)
    told, met = [], []
    tab.value("document.activeElement.blur(), scrollTo(0, 0)")
    for _ in range(_MOST_TABS):
        tab.press("Tab")
        focus = tab.value(_FOCUS)
        if focus is None or focus["name"] in met[:1]:
            break
        met.append(focus["name"])
        told += [f"keys: the focus at {focus['name']} cannot be seen"] * (not focus["isSeen"])
        told += [f"keys: {focus['name']} is outside of the window when it has the focus"] * (not focus["isInWindow"])
    if met != expected:
        told.append(f"keys: Tab met {met}, and not {expected}")
    sys.stderr.write(f"keys: {len(met)} stops\n")
    return told + _worked(tab, met)


def _worked(tab: Page, names: list[str]) -> list[str]:
    """Work by keys what the focus met, and return what does not do what it should."""
    told = []
    for number in tab.value("[...document.querySelectorAll('summary')].flatMap((one, at) => shown(one) ? [at] : [])"):
        tab.value(f"document.querySelectorAll('summary')[{number}].focus()")
        was = tab.value("document.activeElement.parentElement.open")
        tab.press("Enter")
        if tab.value("document.activeElement.parentElement.open") == was:
            told.append(f"keys: Enter does not work summary {number}")
    if "#heat-kind" in names:
        tab.value("document.getElementById('heat-kind').focus()")
        was = tab.value("document.getElementById('heat-note').textContent")
        tab.press("ArrowDown")
        now, where = tab.value("[document.getElementById('heat-note').textContent, document.activeElement.id]")
        if now == was or where != "heat-kind":
            told.append(f"keys: the choice of a heat map shows {now!r} after {was!r}, with the focus at {where}")
    if "a 0" in names and tab.value("document.querySelector('.skip') !== null"):  # pages of runs have a skip link
        tab.value("document.querySelector('.skip').focus()")
        tab.press("Enter")
        told += ["keys: the skip link does not lead to the run"] * (tab.value("document.activeElement.id") != "main")
    return told


def _wide(tab: Page) -> list[str]:
    over = tab.value("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return [f"the page is {over} pixels wider than its window"] * (over > 0)


def _told(title: str, faults: list[str]) -> int:
    sys.stdout.write("".join(f"{title}: {fault}\n" for fault in faults))
    return len(faults)


def main() -> int:
    """Read the command line and check the pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("pages", type=Path, nargs="*", help="folders of runs, and pages; a run is rehearsed if none")
    parser.add_argument("--axe", type=Path, required=True, help="axe.min.js of axe-core")
    parser.add_argument("--out", type=Path, help="where pictures go")
    options = parser.parse_args()
    axe = options.axe.read_text(encoding="utf-8")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    num_faults, stop = 0, threading.Event()
    with contextlib.ExitStack() as stack:
        stack.callback(stop.set)
        tab, pages = stack.enter_context(page()), list(options.pages)
        if not pages:
            pages = [Path(stack.enter_context(tempfile.TemporaryDirectory())) / "rehearsed"]
            write_rehearsed_run(pages[0])
            threading.Thread(target=keep_alive, args=(pages[0], stop), daemon=True).start()
        for path in pages:
            url = stack.enter_context(served(path)) if path.is_dir() else path.resolve().as_uri()
            num_faults += check(tab, url, name=path.stem, axe=axe, out=options.out)
    sys.stdout.write(f"{num_faults} faults\n")
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
