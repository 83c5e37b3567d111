"""Run an elastic job of real processes on thin links, let faults fall on it, and say what became of it.

sudo python benchmarks/chaos/drive.py --minutes 20 --seed 0 --hosts 4 --events-every 8 --out FOLDER

Every few seconds one of these falls on the run, chosen by the seed: a replica's process is killed (SIGKILL), or stopped
for 2 to 15 seconds (SIGSTOP), a host's link is cut for 2 to 15 seconds, or has a tenth of its rate for 5 to 20, a host
joins, a replica is told to leave, the coordinator is killed. At least two replicas that nothing has happened to lately
stay. Links have 5 to 50 Mbit/s. A step sleeps, so that the processes do not fight for the cores.

The result says: *hangs*, times of more than `hang_limit_s` without a round; *desyncs*, rounds after which two replicas
held other bits; the final loss beside that of an undisturbed run of as many counted tokens (--calm); *goodput*, counted
tokens over those that replicas taking part could have trained at the speed of the undisturbed run; *rejoins*, from the
start of a process, or from being let go, to the first round that counts it, beside what the state's bytes take;
*accounts*, of each replica, where the time went in which it took part.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

from chaos_checks import accounts, applied, desyncs, gaps, live_s, rejoins, trained
from chaos_events import KINDS, Chaos
from chaos_job import ChaosJob

from thinwire.lab import Lab

RATES = ("50mbit", "20mbit", "20mbit", "10mbit", "5mbit", "20mbit")
SPARE = 2
BATCH, SEQ = 1, 64
HANG_S = 30.0
_LOOK_S = 0.25
CALM = (
    "val_loss", "tokens_counted", "tokens_trained", "live_s", "loop_s", "waited_s", "wall_s", "longest_gap_s",
)  # fmt: skip
_END_S = 240.0


def words(steps: int, *, hosts: int, sync_interval: int) -> list[str]:
    return [
        "--replicas", "1", "--begin-with", str(hosts), "--model", "nano", "--steps", str(steps),
        "--batch-size", str(BATCH), "--seq-len", str(SEQ), "--sync-interval", str(sync_interval),
        "--overlap-steps", "5", "--threads", "1", "--eval-every", "0", "--log-every", "5",
    ]  # fmt: skip


def run(
    folder: Path, *, steps: int, hosts: int, step_s: float, seed: int, every_s: float, kinds: tuple[str, ...],
    limit_s: float, sync_interval: int,
) -> dict[str, Any]:  # fmt: skip
    spare = SPARE if "join" in kinds else 0
    rates = [RATES[host % len(RATES)] for host in range(hosts + spare)]
    with Lab(hosts=hosts + spare, rates=dict(enumerate(rates))) as lab:
        job = ChaosJob(lab, folder, step_s=step_s, words=words(steps, hosts=hosts, sync_interval=sync_interval))
        job.start_first()
        for host in range(1, hosts):
            job.join(host)
        chaos = Chaos(job, seed=seed, rates=rates, kinds=kinds)
        began_s = time.time()
        ended = _until_the_end(job, chaos, every_s=every_s, limit_s=limit_s, hosts=hosts)
        end_s = time.time()
        rows = _report(job, folder, rates=rates, end_s=end_s)
        running = [host.number for host in job.hosts if host.is_running]
        sent_bytes = sum(counters.sent_bytes for counters in lab.counters())
    return {"wall_s": end_s - began_s, "has_ended": ended, "still_running": running, "steps": steps, **rows} | {
        "events": chaos.events,
        "rates": rates,
        "sent_bytes": sent_bytes,
    }


def _until_the_end(job: ChaosJob, chaos: Chaos, *, every_s: float, limit_s: float, hosts: int) -> bool:
    began_s = time.monotonic()
    next_s = over_s = None
    summary = "summary.json"
    while time.monotonic() - began_s < limit_s + _END_S:
        job.look()
        chaos.turn()
        now_s = time.monotonic()
        live = sum(bool(host.lives) and host.lives[-1].live_s is not None for host in job.hosts)
        if next_s is None and live >= hosts:
            next_s = now_s + every_s
        # a host that joins what is over would wait for it forever
        is_over = any((host.folder / summary).exists() for host in job.hosts)
        if is_over:
            over_s = now_s if over_s is None else over_s
            job.end_late(since_s=over_s, now_s=now_s)
        is_time = next_s is not None and now_s >= next_s and now_s - began_s < limit_s
        if is_time and not is_over and chaos.has_kinds:
            next_s = now_s + every_s
            chaos.strike()
        if now_s - began_s >= limit_s:
            chaos.calm()
        if not any(host.is_running for host in job.hosts):
            return any((host.folder / summary).exists() for host in job.hosts)
        time.sleep(_LOOK_S)
    return False


def _report(job: ChaosJob, folder: Path, *, rates: list[str], end_s: float) -> dict[str, Any]:
    lives = [life for host in job.hosts for life in host.lives]
    rounds = applied(folder)
    compared, odd = desyncs(rounds)
    last_s = max((line["at_s"] for lines in rounds.values() for line in lines), default=end_s)
    longest = gaps(rounds)
    summaries = [json.loads(path.read_text()) for path in sorted(folder.glob("host-*/summary.json"))]
    counted = summaries[-1]["elastic"]["tokens_counted"] if summaries else None
    back = rejoins(lives, rounds, rates=rates)
    return {
        "hang_limit_s": HANG_S,
        "hangs": [{"at_s": at, "for_s": round(gap, 2)} for at, gap in longest if gap > HANG_S],
        "longest_gap_s": round(longest[0][1], 2) if longest else None,
        "rounds": len({line["round"] for lines in rounds.values() for line in lines}),
        "rounds_compared": compared,
        "desyncs": odd,
        "val_loss": summaries[-1]["val_loss"] if summaries else None,
        "num_summaries": len(summaries),
        "tokens_counted": counted,
        "tokens_repeated": summaries[-1]["elastic"]["tokens_repeated"] if summaries else None,
        "live_s": live_s(lives, end_s=last_s),
        **trained(folder),
        "accounts": accounts(folder, lives, rounds, end_s=last_s),
        "rejoins": back,
        "rejoins_in_time": sum(row["is_in_time"] for row in back),
        "rejoin_excess_s": [round(r["took_s"] - r["transfer_s"], 2) for r in back if r["took_s"] is not None],
        "lives": [dataclasses.asdict(life) for life in lives],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--events-every", type=float, default=8.0)
    parser.add_argument("--step-s", type=float, default=0.5)
    parser.add_argument("--sync-interval", type=int, default=60)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--calm", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"))
    options = parser.parse_args()
    steps = round(options.minutes * 60 / (options.step_s + 0.05))
    kinds = tuple(filter(None, options.kinds.split(",")))
    shared = {"hosts": options.hosts, "step_s": options.step_s, "seed": options.seed}
    shared["sync_interval"] = options.sync_interval
    found = run(
        options.out / "chaos", steps=steps, every_s=options.events_every, kinds=kinds,
        limit_s=90 + 60 * options.minutes, **shared,
    )  # fmt: skip
    if options.calm and found["tokens_counted"]:
        same = round(found["tokens_counted"] / (options.hosts * BATCH * SEQ))
        calm = run(
            options.out / "calm", steps=same, every_s=1e9, kinds=(), limit_s=120 + 120 * options.minutes, **shared
        )
        found["calm"] = {key: calm[key] for key in CALM}
        speed = calm["tokens_counted"] / calm["live_s"]
        found["goodput"] = round(found["tokens_counted"] / (speed * found["live_s"]), 4)
        found["loss_over_calm"] = round(found["val_loss"] / calm["val_loss"] - 1, 5)
    (options.out / "result.json").write_text(json.dumps(found, indent=1) + "\n")
    short = {key: value for key, value in found.items() if key not in ("lives", "events", "rejoins", "accounts")}
    took = [row["took_s"] for row in found["rejoins"] if row["took_s"] is not None]
    print(json.dumps(short | {"num_events": len(found["events"]), "rejoin_median_s": statistics.median(took or [0])}))


if __name__ == "__main__":
    main()
