"""Tables of `thinwire plan`: the plan, the alternatives, the rejected candidates and the predicted cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from thinwire.cli.tables import plain, print_wide
from thinwire.planning.plan import Needs, Outlook, Plan, pareto
from thinwire.units import format_bytes, format_count, format_rate, format_seconds

_HEAD = (
    "method", "H", "tau", "layers", "codec", "exchange", "machines", "time", "computing", "loss", "to equal loss",
    "sent a step", "peak rate",
)  # fmt: skip
_WORDS = ("method", "codec", "exchange")
_TOP, _NAMED = 3, 8


def show(plan: Plan, explained: Sequence[str]) -> None:
    """Print a plan."""
    console = Console(highlight=False, soft_wrap=True)

    def say(words: str) -> None:
        console.print(plain(words))

    say(
        f"{plan.model}, {format_count(plan.num_parameters)} parameters, {format_count(plan.tokens)} tokens, sequences "
        f"of {plan.seq_len}"
    )
    say("")
    print_wide(_table(plan))
    notes = dict.fromkeys(note for one in plan.outlooks if one.penalty for note in one.penalty.notes)
    if notes:
        say("")
        for note in notes:
            say(f"~ {note}")
    say("")
    say(_verdict(plan))
    for line in [*_alone(plan), *_needs(plan.needs, plan.best)]:
        say(line)
    for rejection in plan.rejections:
        more = f" and {rejection.count - 1} more" if rejection.count > 1 else ""
        say(f"left out: {rejection.what}{more}: {rejection.reason}")
    if explained:
        say("")
        for line in explained:
            say(line)


def _table(plan: Plan) -> Table:
    """Return the first few, what nothing beats in time and loss, and the best of each method; the file has all."""
    shown = {id(one) for one in (*plan.outlooks[:_TOP], *pareto(plan.outlooks))}
    methods: set[tuple[str, bool]] = set()
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in _HEAD:
        table.add_column(name, justify="left" if name in _WORDS else "right", no_wrap=True)
    for outlook in plan.outlooks:
        kind = outlook.candidate.method, outlook.candidate.num_replicas == 1
        if id(outlook) in shown or kind not in methods:
            table.add_row(*map(plain, _cells(outlook)))
        methods.add(kind)
    return table


def _cells(outlook: Outlook) -> tuple[str, ...]:
    found, penalty, what = outlook.prediction, outlook.penalty, outlook.candidate
    loss = "unknown" if penalty is None else f"{'~' if penalty.notes else ''}{penalty.share:+.2%}"
    equal = "-" if math.isinf(outlook.equal_loss_s) else format_long(outlook.equal_loss_s)
    settings = (what.sync_interval, what.overlap_steps, what.layers_per_fragment, what.codec, what.exchange)
    name = f"{what.replicas[0]} alone" if what.num_replicas == 1 else what.method
    return (
        name, *("" if value is None else str(value) for value in settings), str(what.num_replicas),
        format_long(found.total_s), f"{found.compute_utilisation:.1%}", loss, equal,
        format_bytes(found.sent_bytes_per_step), format_rate(found.peak_bits_per_s),
    )  # fmt: skip


def _verdict(plan: Plan) -> str:
    best = plan.best
    names = best.candidate.replicas
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"{'best' if plan.is_met else 'nearest'}: {best.candidate.describe()} ({', '.join(names[:_NAMED])}{more}): "
        f"{format_long(best.prediction.total_s)}, {best.prediction.compute_utilisation:.1%} of it computing"
    )


def _alone(plan: Plan) -> list[str]:
    if plan.alone is None or plan.alone is plan.best:
        return []
    times = plan.alone.equal_loss_s / plan.best.equal_loss_s
    name = plan.alone.candidate.replicas[0]
    alone = f"{name} alone takes {format_long(plan.alone.prediction.total_s)}"
    if math.isinf(plan.best.equal_loss_s):
        return [alone]
    return [f"{alone}; all together are {times:.3g} times as fast to equal loss"]


def _needs(needs: Needs | None, best: Outlook) -> list[str]:
    if needs is None:
        return []
    wanted = f"{needs.compute_utilisation:.0%}"
    if needs.limit < 0.995:
        wanted += f" of the {needs.limit:.0%} that speeds and latencies allow on any wires"
    factor = needs.rate_factor
    wires = f"wires {factor:.3g} times as fast" if factor > 1 else f"wires of {factor:.1%} of these rates"
    lines = [f"what it takes to compute {wanted}: {wires} with these settings"]
    if needs.sync_interval is not None and best.candidate.sync_interval is not None:
        loss = "" if needs.penalty is None else f", at a loss of {needs.penalty:+.2%}"
        lines.append(f"or on these wires an exchange every {needs.sync_interval} steps{loss}")
    elif best.candidate.sync_interval is not None:
        lines.append("and on these wires no sync interval is long enough")
    return lines


def format_long(seconds: float) -> str:
    """Write a duration in days from two days on.

    Example:
        >>> format_long(86400 * 12.34), format_long(7300)
        ('12.3 d', '2:01:40')
    """
    days = seconds / 86400
    return f"{days:,.1f} d" if days >= 2 else format_seconds(seconds)
