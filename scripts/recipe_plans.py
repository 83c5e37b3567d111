"""Write the planned numbers into the recipes of `thinwire recipes`: python scripts/recipe_plans.py [NAME...].

The table `recipe` of each file names the command, `thinwire plan` or `thinwire simulate`. What it prints and the
figures of the list (time, memory, bytes, loss) are written below it.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from thinwire.cli.main import main as thinwire
from thinwire.cli.recipes import facts_of, names, path_of
from thinwire.planning.loss_penalty import loss_penalty
from thinwire.units import format_bytes

ALIKE = ("--hosts", "--rate", "--latency", "--flops", "--model", "--batch-size")
BEGIN, END = "# planned: begin", "# planned: end"
MEMORY = re.compile(r"^memory: .* = (\S+ \S+) a replica", re.MULTILINE)


def printed(words: list[str]) -> str:
    """Return what a command prints on stdout."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()) as err:
        code = thinwire(words)
    if code:
        raise SystemExit(f"thinwire {shlex.join(words)} ended with {code}: {err.getvalue()}")
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


def planned(command: str) -> dict[str, Any]:
    """Run the command of a recipe; return its numbers and, as `output`, what it prints."""
    words = shlex.split(command)[1:]
    if words[0] == "plan":
        return _planned(words)
    found = json.loads(printed([*words, "--json"]))
    given = dict(zip(words[1::2], words[2::2], strict=True))
    numbers = {
        "time_s": found["total_s"], "sent_bytes": found["sent_bytes_per_step"] * found["steps"],
        "output": printed(words),
    }  # fmt: skip
    if "--step-time" in given:  # the model stands for another one
        return numbers
    # the planner knows what the simulator does not: memory, and what is published of the loss
    alike = [word for name in ALIKE if name in given for word in (name, given[name])]
    plan = _planned(["plan", *alike, "--min-replicas", given["--hosts"], "--max-penalty", "1", "--explain"])
    loss = loss_penalty(
        given["--method"], num_parameters=plan["num_parameters"], num_replicas=int(given["--hosts"]),
        sync_interval=int(given["--sync-interval"]), overlap_steps=int(given["--overlap-steps"]),
        codec=given["--codec"],
    )  # fmt: skip
    return {**numbers, "memory": plan["memory"], "loss": None if loss is None else loss.share}


def _planned(words: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        text = printed([*words, "--out", str(path)])
        plan = json.loads(path.read_text())
    found, memory = plan["predicted"], MEMORY.search(text)
    return {
        "time_s": found["total_s"], "sent_bytes": found["sent_bytes_per_step"] * found["num_steps"],
        "loss": found["loss_penalty"], "memory": memory[1] if memory else None, "output": text,
        "num_parameters": plan["num_parameters"], "train": plan["train"],
    }  # fmt: skip


def figures(numbers: dict[str, Any]) -> dict[str, str]:
    """Return the figures of the list, as texts."""
    spent_h = numbers["time_s"] / 3600
    longer = f"{spent_h:.1f} h" if spent_h < 48 else f"{spent_h / 24:.1f} d"
    found = {
        "time": longer if spent_h >= 1 else f"{60 * spent_h:.0f} min",
        "sent": format_bytes(numbers["sent_bytes"]),
    }
    if numbers.get("memory") is not None:
        found["memory"] = numbers["memory"]
    if numbers.get("loss") is not None:
        found["loss"] = f"{numbers['loss']:+.2%} against data-parallel training (predicted)"
    return found


def rewrite(name: str) -> None:
    """Write the planned numbers of one recipe into its file."""
    command = facts_of(name).get("plan")
    if command is None:
        return
    numbers = planned(command)
    lines = [f'{key} = "{value}"' for key, value in figures(numbers).items()]
    block = "\n".join([BEGIN, *lines, f'output = """\n{numbers["output"]}\n"""', END])
    path = path_of(name)
    before, _, rest = path.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    path.write_text(before + block + after)


if __name__ == "__main__":
    for one in sys.argv[1:] or names():
        rewrite(one)
