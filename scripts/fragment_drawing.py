"""Draw fragments on a time line, as SVG: `python scripts/fragment_drawing.py docs/assets/fragments.svg`.

The bars come from the schedule that the engine runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from thinwire.sync.schedule import Staggered

SYNC_INTERVAL, OVERLAP_STEPS, NUM_FRAGMENTS = 30, 5, 3
FIRST_STEP, LAST_STEP = 25, 85
# DiLoCo sends the same bytes at once and waits, so its exchange takes as long as all three fragments.
_WAIT_STEPS = NUM_FRAGMENTS * OVERLAP_STEPS
_LEFT, _STEP_PX, _BAR_PX, _LANE_PX, _WIDTH = 132, 9.6, 18, 26, 730

_STYLE = """
.time{--ink:#1c2430;--dim:#5b6573;--grid:#d5dae1;--work:#c9d3df;--f0:#0072b2;--f1:#b04a00;--f2:#00785a}
@media (prefers-color-scheme:dark){.time{--ink:#e8ecf1;--dim:#9aa6b5;--grid:#3a4452;--work:#46525f;
--f0:#4ba6e0;--f1:#ff8a3d;--f2:#2fc79b}}
.time text{font:13px system-ui,sans-serif;fill:var(--ink)}
.time .small{font-size:12px;fill:var(--dim)}
.time .title{font-weight:600}
.time .grid{stroke:var(--grid)}
.time .work{fill:var(--work)}
.time .wait{fill:none;stroke:var(--dim);stroke-dasharray:3 3}
.time .f0{fill:var(--f0)}.time .f1{fill:var(--f1)}.time .f2{fill:var(--f2)}
"""


def _x(step: float) -> float:
    return _LEFT + (step - FIRST_STEP) * _STEP_PX


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _bar(begin: float, end: float, y: float, kind: str, *, title: str) -> str:
    begin, end = max(begin, FIRST_STEP), min(end, LAST_STEP)
    shape = f'x="{_x(begin):.1f}" y="{y:.1f}" width="{_x(end) - _x(begin):.1f}" height="{_BAR_PX}" rx="2"'
    return f'<rect class="{kind}" {shape}><title>{title}</title></rect>'


def rounds() -> list[tuple[int, int, int]]:
    """Return fragment, launch step and apply step of every round in the drawing."""
    schedule = Staggered(sync_interval=SYNC_INTERVAL, overlap_steps=OVERLAP_STEPS)
    return [
        (one.fragment, one.launch_step, one.apply_step)
        for step in range(FIRST_STEP, LAST_STEP)
        for one in schedule.launches(step, num_fragments=NUM_FRAGMENTS)
    ]


def drawing() -> str:
    """Return the SVG."""
    parts = [_text(4, 20, "DiLoCo: the whole model every 30 steps, and everyone waits", "title")]
    y = 32
    parts.append(_text(4, y + 14, "computing"))
    begin = FIRST_STEP
    while begin < LAST_STEP:
        exchange = SYNC_INTERVAL if begin < SYNC_INTERVAL else begin + SYNC_INTERVAL
        parts.append(_bar(begin, exchange, y, "work", title="computing"))
        if exchange < LAST_STEP:
            parts.append(_bar(exchange, exchange + _WAIT_STEPS, y, "wait", title="waiting"))
            middle = (exchange + min(exchange + _WAIT_STEPS, LAST_STEP)) / 2
            parts.append(_text(_x(middle), y + 13, "waiting", "small", "middle"))
            parts.append(_bar(exchange, exchange + _WAIT_STEPS, y + _LANE_PX, "f0", title="whole model"))
        begin = exchange + _WAIT_STEPS
    parts.append(_text(4, y + _LANE_PX + 14, "whole model"))
    y += 2 * _LANE_PX + 34
    parts.append(_text(4, y, "Streaming DiLoCo: fragments take turns while the replica computes", "title"))
    y += 12
    parts += [_text(4, y + 14, "computing"), _bar(FIRST_STEP, LAST_STEP, y, "work", title="computing")]
    for fragment in range(NUM_FRAGMENTS):
        parts.append(_text(4, y + (fragment + 1) * _LANE_PX + 14, f"fragment {fragment}"))
    for fragment, launch, apply in rounds():
        title = f"fragment {fragment}: launched after step {launch}, applied after step {apply}"
        parts.append(_bar(launch, apply, y + (fragment + 1) * _LANE_PX, f"f{fragment}", title=title))
    _, launch, apply = next(one for one in rounds() if one[0] == 1)
    parts += [
        _text(_x(launch) - 4, y + 2 * _LANE_PX + 14, "launch", "small", "end"),
        _text(_x(apply) + 4, y + 2 * _LANE_PX + 14, "apply, tau = 5 steps later", "small"),
    ]
    bottom = y + (NUM_FRAGMENTS + 1) * _LANE_PX
    for step in range(SYNC_INTERVAL, LAST_STEP, 10):
        parts.append(f'<line class="grid" x1="{_x(step):.1f}" x2="{_x(step):.1f}" y1="{bottom}" y2="{bottom + 6}"/>')
        parts.append(_text(_x(step), bottom + 20, str(step), "small", "middle"))
    parts.append(_text(4, bottom + 20, "time, in steps", "small"))
    label = "Time lines of DiLoCo and Streaming DiLoCo: when a replica computes, and when each fragment is on the wire"
    return (
        f'<svg class="time" viewBox="0 0 {_WIDTH} {bottom + 30}" width="{_WIDTH}" role="img" aria-label="{label}" '
        f'xmlns="http://www.w3.org/2000/svg"><style>{_STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(drawing())
