"""Let the faults of `drive.py` fall on torchft's own DiLoCo, and say the same of it.

sudo python benchmarks/chaos/torchft_drive.py --minutes 3 --seed 0 --hosts 4 --events-every 10 --setting tuned

Model, data, batch, inner optimizer, H, fragments, overlap, outer optimizer, links, sleep per step, and the choice of
faults are those of `drive.py`; pseudo-gradients are float32 over gloo (torchft's quantised all-reduce needs CUDA). A
supervisor starts again what was killed; the Lighthouse stands in the place of the coordinator, on the first host.
Compare with `drive.py --kinds kill,stop,cut,slow,coordinator --no-calm` and the same other options. The run ends when a
replica has committed as many outer steps as fit into the steps of `drive.py`, or after --most-s seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from chaos_checks import desyncs, gaps, live_s, rejoins, trained
from chaos_events import Chaos
from drive import HANG_S, RATES
from torchft_chaos_job import TorchftJob
from torchft_checks import committed, in_eras, said

from thinwire.lab import Lab

KINDS = ("kill", "stop", "cut", "slow", "coordinator")
STATE_BYTES = {"default": 60_987_360, "tuned": 24_394_944}
FRAGMENTS = 3
_LOOK_S = 0.25


def run(options: argparse.Namespace, *, kinds: tuple[str, ...]) -> dict[str, Any]:
    rates = [RATES[host % len(RATES)] for host in range(options.hosts)]
    steps = round(options.minutes * 60 / (options.step_s + 0.05))
    outer_steps = steps // (options.sync_interval // FRAGMENTS)
    with Lab(hosts=options.hosts, rates=dict(enumerate(rates))) as lab:
        job = TorchftJob(
            lab, options.out / options.setting, step_s=options.step_s, setting=options.setting,
            outer_steps=outer_steps, sync_interval=options.sync_interval,
        )  # fmt: skip
        chaos = Chaos(job, seed=options.seed, rates=rates, kinds=kinds)  # type: ignore[arg-type]
        began_s = time.time()
        job.start()
        ended = _until_the_end(job, chaos, options)
        end_s = time.time()
        sent = [counters.sent_bytes for counters in lab.counters()]
    found = report(job.folder, [life for host in job.hosts for life in host.lives], rates=rates, end_s=end_s,
                   setting=options.setting)  # fmt: skip
    return {
        "what": "torchft_drive", "setting": options.setting, "seed": options.seed, "minutes": options.minutes,
        "wall_s": round(end_s - began_s, 1), "has_ended": ended, "steps": steps, "outer_steps": outer_steps,
        "sync_interval": options.sync_interval, "starts": job.starts, **found, "sent_bytes": sum(sent),
        "events": chaos.events, "rates": rates,
    }  # fmt: skip


def _until_the_end(job: TorchftJob, chaos: Chaos, options: argparse.Namespace) -> bool:
    began_s = time.monotonic()
    next_s = None
    while (now_s := time.monotonic()) - began_s < options.most_s:
        job.look()
        chaos.turn()
        if next_s is None and sum(host.lives[-1].live_s is not None for host in job.hosts) >= options.hosts:
            next_s = now_s + options.events_every
        if next_s is not None and now_s >= next_s and chaos.has_kinds:
            next_s = now_s + options.events_every
            chaos.strike()
        if any((host.folder / "summary.json").exists() for host in job.hosts):
            return True
        time.sleep(_LOOK_S)
    return False


def report(folder: Path, lives: list[Any], *, rates: list[str], end_s: float, setting: str) -> dict[str, Any]:
    """Return what the files of a run say; lives that healed are held against the bytes of the setting's state."""
    rounds, num_eras = in_eras(committed(folder))
    events = said(folder)
    healed = {replica for replica, lines in events.items() if any(line["event"] == "loaded" for line in lines)}
    for life in lives:
        life.state_bytes = STATE_BYTES[setting] if life.replica in healed else 0
    compared, odd = desyncs(rounds)
    longest = gaps(rounds)
    times = sorted({line["at_s"] for lines in rounds.values() for line in lines})
    spans = [*longest, *([(times[-1], end_s - times[-1])] if times else [])]
    back = rejoins(lives, rounds, rates=rates)
    kinds = [line for lines in events.values() for line in lines]
    return {
        "hang_limit_s": HANG_S,
        "hangs": [{"at_s": at, "for_s": round(gap, 2)} for at, gap in sorted(spans) if gap > HANG_S],
        "longest_gap_s": round(longest[0][1], 2) if longest else None,
        "after_last_s": round(end_s - times[-1], 2) if times else None,
        "rounds": len({line["round"] for lines in rounds.values() for line in lines}),
        "begun_anew": num_eras - 1,
        "rounds_compared": compared,
        "desyncs": odd,
        "tokens_counted": sum(line["tokens"] for lines in rounds.values() for line in lines),
        "live_s": live_s(lives, end_s=end_s),
        **trained(folder),
        "discarded": sum(line["event"] == "discarded" for line in kinds),
        "raised": sorted(line["error"][:160] for line in kinds if line["event"] == "raised"),
        "rejoins": back,
        "lives": [dataclasses.asdict(life) for life in lives],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--most-s", type=float, default=330.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--events-every", type=float, default=10.0)
    parser.add_argument("--step-s", type=float, default=0.5)
    parser.add_argument("--sync-interval", type=int, default=60)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--setting", choices=sorted(STATE_BYTES), default="default")
    parser.add_argument("--out", type=Path, default=Path("runs/torchft-chaos"))
    options = parser.parse_args()
    found = run(options, kinds=tuple(filter(None, options.kinds.split(","))))
    (options.out / f"{options.setting}.json").write_text(json.dumps(found, indent=1) + "\n")
    short = {key: value for key, value in found.items() if key not in ("lives", "events", "rejoins")}
    took = [row["took_s"] for row in found["rejoins"]]
    print(json.dumps(short | {"num_events": len(found["events"]), "rejoin_s": took}))


if __name__ == "__main__":
    main()
