"""`thinwire plan`: which method and settings fit these machines and wires, and how long training will take."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from thinwire.cli.cluster_options import ClusterOptions, cluster_of
from thinwire.cli.words import read_words
from thinwire.errors import ThinwireError

if TYPE_CHECKING:
    from thinwire.planning.cluster import Cluster
    from thinwire.planning.plan import Plan
    from thinwire.planning.search import PlanConstraints
    from thinwire.planning.workload import Workload

USAGE, FAILED = 2, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(ClusterOptions):
    """Find the method and settings that train a model fastest on these machines and wires, by simulating them.

    The machines come from a cluster file, which thinwire probe writes, or are alike: --hosts 2 --rate 100mbit --latency
    20ms --flops 4e13. What is found is written to a plan file: thinwire train --plan plan.json.
    """

    model: str = "nano"
    """nano, 35m, 150m, 400m, 1b, hf:PATH, or a size such as 7b."""

    tokens: float = 1e9
    """Tokens to train on, all replicas together, such as 25e9."""

    seq_len: int | None = None
    """Tokens a sequence. Default: 128 for nano, else 1024."""

    batch_size: int | None = None
    """Sequences a step of one replica. Default: 8."""

    global_batch: float | None = None
    """Instead: tokens a step of all replicas together."""

    method: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A method to choose from; may be repeated. Default: all-reduce, diloco, streaming-diloco."""

    interval: tyro.conf.UseAppendAction[tuple[int, ...]] = ()
    """A sync interval to choose from; may be repeated. Default: 10, 20, 30, 50, 100, 200, 300, 500."""

    codec: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A code to choose from, such as bfloat16; may be repeated. Default: all that a method goes with."""

    min_utilisation: float = 0.0
    """The least share of the machines' time that they must compute, such as 0.95."""

    max_penalty: float = 0.05
    """The largest predicted loss above data-parallel training's, as a share of it."""

    min_replicas: int = 1
    """The fewest machines that take part."""

    explain: bool = False
    """Show the arithmetic."""

    out: Path = Path("plan.json")
    """Where the plan is written."""

    figure: Path | None = None
    """Write time against loss of all that was simulated, as SVG."""

    json: bool = False
    """Print the plan as JSON on stdout instead of tables."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; see `thinwire plan --help`.

    Returns:
        0, 1 where no plan keeps to what was wished or the file cannot be read or written, 2 for wrong options.
    """
    try:
        return _plan(read_words(PlanOptions, arguments, prog="thinwire plan"))
    except ValueError as error:
        return _fail(USAGE, error)
    except ThinwireError as error:
        return _fail(FAILED, error)
    except OSError as error:
        return _fail(FAILED, f"cannot write {error.filename}: {error.strerror}; give another file")


def _plan(options: PlanOptions) -> int:
    from thinwire.cli.plan_tables import show
    from thinwire.planning.plan import save_plan
    from thinwire.planning.search import make_plan

    cluster = cluster_of(options)
    workload, can_train = workload_of(options)
    plan = make_plan(workload, cluster, _wishes(options))
    if options.json:
        print(json.dumps(plan.to_json()))
    else:
        show(plan, _explained(plan, workload, cluster) if options.explain else ())
    if options.figure is not None:
        from thinwire.planning.plan_figure import write_plan_figure

        write_plan_figure(plan, options.figure)
        _say(f"figure written to {options.figure}")
    if not plan.is_met:
        best = plan.best.prediction.compute_utilisation
        wished = options.min_utilisation
        return _fail(
            FAILED, f"no plan computes {wished:.0%} of the time; the nearest does {best:.0%}. None was written"
        )
    save_plan(plan, options.out)
    words = f"thinwire train --plan {options.out}" if can_train else f"thinwire train does not know {options.model!r}"
    _say(f"written to {options.out}; {words}{'' if can_train else ': plan with hf:PATH to run it'}")
    return 0


def _explained(plan: Plan, workload: Workload, cluster: Cluster) -> list[str]:
    from thinwire.planning.explain import explain

    return explain(plan, workload, cluster)


def workload_of(options: PlanOptions) -> tuple[Workload, bool]:
    """Return what is to be trained, and whether `thinwire train` knows the model.

    Raises:
        ValueError: There is no such model, or a number is out of its range.
    """
    from thinwire.planning.workload import Workload
    from thinwire.training.config import BATCH_SIZE, default_seq_len
    from thinwire.training.models.presets import sketch_model

    if options.batch_size is not None and options.global_batch is not None:
        raise ValueError("give --batch-size (of one replica) or --global-batch (of all together), not both")
    seq_len = default_seq_len(options.model) if options.seq_len is None else options.seq_len
    batch_size = BATCH_SIZE if options.batch_size is None and options.global_batch is None else options.batch_size
    model, can_train = sketch_model(options.model, seq_len=seq_len)
    workload = Workload(
        name=options.model, model=model, tokens=options.tokens, seq_len=seq_len, batch_size=batch_size,
        global_batch=options.global_batch,
    )  # fmt: skip
    return workload, can_train


def _wishes(options: PlanOptions) -> PlanConstraints:
    from thinwire.planning.candidates import INTERVALS, PUBLISHED
    from thinwire.planning.search import PlanConstraints

    return PlanConstraints(
        methods=options.method or PUBLISHED, intervals=options.interval or INTERVALS, codecs=options.codec,
        min_utilisation=options.min_utilisation, max_penalty=options.max_penalty, min_replicas=options.min_replicas,
    )  # fmt: skip


def _fail(code: int, reason: object) -> int:
    _say(" ".join(str(reason).split()))
    return code


def _say(words: str) -> None:
    print(f"thinwire plan: {words}", file=sys.stderr, flush=True)
