"""Wrong arguments are refused before torch is imported, in one form that says what to try."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

from live_processes import DEADLINE_S

# Tries command lines in one process: torch, once it is imported, stays.
TRY = """
import contextlib, io, json, sys
from thinwire.cli.main import main
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    print(json.dumps([code, out.getvalue(), err.getvalue(), "torch" in sys.modules]))
"""
FORM = re.compile(r"^thinwire( [a-z]+){1,2}: error: .+; got .+; allowed .+; try .+\n$")
PLAN = ["plan", "--hosts", "2", "--rate", "20mbit", "--flops", "1e12"]
SIMULATE = ["simulate", "--hosts", "2", "--rate", "20mbit", "--step-time", "1s"]
LAB = ["--", "true"]
CASES: dict[str, list[str]] = {
    # of the parser
    "train --lr 0.1x": ["--lr is no number; got '0.1x'; allowed a number; try --lr 0.1"],
    "train --steps ten": ["--steps is no whole number; got 'ten'; allowed a whole number; try --steps 300"],
    "train --steps 1.5": ["--steps is no whole number; got '1.5'", "try --steps 1\n"],
    "train --lr": ["--lr has no value; got nothing; allowed a number"],
    "train --replcas 2": ["unknown option; got --replcas", "try --replicas"],
    "train --densty 2 --method dgc": ["unknown option; got --densty"],
    "train stdlib": ["an argument without an option; got 'stdlib'"],
    # of the validator
    "train --steps 0": ["--steps is too small; got 0; allowed 1 or more; try --steps 300"],
    "train --lr nan": ["--lr is not above 0; got nan"],
    "train --workload digts": [
        "unknown --workload; got 'digts'; allowed language, digits, MODULE:NAME",
        "try digits\n",
    ],
    "train --workload digits --data stdlib": ["--data does not go with --workload digits", "try to leave --data out"],
    "train --workload digits --model 35m": ["--model does not go with --workload digits", "try to leave --model out"],
    "train --workload digits --seq-len 64": ["--seq-len does not go with", "try to leave --seq-len out"],
    "train --workload digits --tp 2": ["--tp does not go with --workload digits: its model is not divided"],
    "train --workload digits --method auto": [
        "--method does not go with --workload digits: auto plans for language models"
    ],
    "train --tokenizer words": ["unknown --tokenizer; got 'words'; allowed auto, bpe, bytes"],
    "train --method pier": [
        "the method was removed",
        "docs/experiments/candidates.md",
        "try streaming-diloco or all-reduce",
    ],
    "train --method streming": ["unknown method; got 'streming'", "try streaming-diloco"],
    "train --model nan": [
        "unknown --model; got 'nan'; allowed nano, 35m, 150m, 400m, 1b, linear-nano, linear-35m, moe-nano, moe-35m,",
        "tiny, moe-tiny, a size such as 125m, hf:PATH; try nano",
    ],
    "train --model hf:/nowhere": ["--model names no folder; got 'hf:/nowhere'"],
    "train --codec e3m1": ["unknown --codec; got 'e3m1'", "try e3m0"],
    "train --overlap-steps 40 --sync-interval 30": [
        "--overlap-steps is not below --sync-interval, which is 30; got 40; allowed 0 to 29"
    ],
    "train --traffic-plan plan.json": ["--traffic-plan needs connections of thinwire's own", "got no --secret"],
    "train --traffic-plan plan.json --elastic": ["--traffic-plan does not go with --elastic"],
    "train --overlap-steps 30": ["--overlap-steps is not below --sync-interval, which is 30; got 30"],
    "train --overlap-steps 1;2": ["--overlap-steps is no number; got '1;2'"],
    "train --cp 2 --seq-len 90": [
        "--cp cuts each sequence into 4 equal parts; got 90 tokens",
        "allowed multiples of 4; try --seq-len 92",
    ],
    "train --cp 3 --cp-policy ring --seq-len 1": ["allowed multiples of 3; try --seq-len 3"],
    "train --cp-policy ring": ["--cp-policy is for ranks that share sequences; got ring", "try --cp 2"],
    "train --cp 2 --cp-policy sparse": ["unknown --cp-policy; got 'sparse'"],
    "train --cp 2 --cp-sites 0": ["--cp-sites must number the site of each rank of --cp", "try --cp-sites 0,0"],
    "train --cp 4 --cp-sites 0,1,0,1 --cp-policy two-level": ["two-level needs sites of equally many ranks"],
    "train --interleave 2": ["--interleave is for pipelines; got 2; allowed 1 where --pp is 1"],
    "train --eagerness 2": ["--eagerness is for pipelines; got 2; allowed 2 or more --pp; try --pp 2"],
    "train --activation-code bfloat16": ["--activation-code is for pipelines; got bfloat16"],
    "train --pp 2 --micro-batch 1 --activation-code e3m0": ["e3m0 carries no forward activations: cost 0.141 nats"],
    "train --pp 2 --micro-batch 1 --activation-code block-int8/top-k": ["top-k carries no backward activations"],
    "train --pp 2 --micro-batch 1 --activation-code block-int8/": ["unknown codec; got ''"],
    "train --pp 2 --micro-batch 1 --activation-memory 2GB": [
        "--activation-memory is what a code needs; got no --activation-code",
        "try --activation-code block-int8/block-int4",
    ],
    "train --pp 2 --micro-batch 1 --activation-code bfloat16 --activation-memory lots": ["the size cannot be read"],
    "train --pp 2 --micro-batch 3 --batch-size 8 --activation-code bfloat16 --activation-memory 2GB": [
        "--activation-memory needs whole micro-batches; got --batch-size 8; allowed multiples of 3; try --micro-batch 1"
    ],
    "train --activation-memory 2GB": ["--activation-memory is for pipelines"],
    "train --pp 3 --micro-batch 1 --skip 0.33 --activation-code bfloat16 --activation-memory 2GB": [
        "--skip does not go with --activation-memory"
    ],
    "train --pp 2 --micro-batch 1 --stage-sites 0,1": ["--stage-sites says where messages are coded"],
    "train --pp 2 --micro-batch 1 --activation-code bfloat16 --stage-sites 0,a": [
        "--stage-sites must number the site of each pipeline stage; got '0,a'; allowed 2 whole numbers"
    ],
    "train --pp 2 --micro-batch 1 --interleave 2 --eagerness 2": ["--eagerness does not go with --interleave"],
    "train --pp 2 --micro-batch 1 --secret job.secret": [
        "--secret with --pp encrypts what a code carries",
        "got no --activation-code",
        "try --activation-code float32",
    ],
    "train --tp 2 --secret job.secret --port-range 29500-29600": ["--port-range does not go with --tp"],
    "train --skip 0.33": ["--skip is for pipelines; got 0.33; allowed 2 or more --pp"],
    "train --pp 2 --micro-batch 1 --skip 0.33": [
        "--skip must leave two stages or more, and skip one; got 0.33 of 2; allowed paths of 2 to 2 of 3 stages; "
        "try --pp 3 --skip 0.33"
    ],
    "train --pp 4 --micro-batch 1 --skip 0.05": ["got 0.05 of 4; allowed paths of 2 to 3 of 4 stages", "--skip 0.25"],
    "train --pp 3 --micro-batch 1 --skip 0.33 --eagerness 2": ["--skip does not go with --eagerness"],
    "train --pp 3 --micro-batch 1 --batch-size 12 --skip 0.33 --dp-shard 2": ["--skip does not go with --dp-shard"],
    "train --pp 3 --micro-batch 1 --skip 0.33 --activation-code float32 --secret job.secret": ["take gloo, which does"],
    "train --pp 3 --micro-batch 1 --skip 0.33 --elastic": ["with one replica, a lost stage is skipped"],
    "train --pp 2 --autocast bf16 --micro-batch 1": ["--autocast", "--pp", "try"],
    "train --pp 2 --interleave 3 --batch-size 3 --micro-batch 1": [
        "--interleave needs as many micro-batches as --pp, or a multiple; got 3; allowed multiples of 2"
    ],
    "train --zero-stage 3 --pp 2 --micro-batch 1": ["--zero-stage 3 does not go with --pp", "try --zero-stage 1"],
    "train --unsharded-layers 2 --zero-stage 3": ["--unsharded-layers has no use without shards; got --dp-shard 1"],
    "train --unsharded-layers 2 --dp-shard 2": ["--unsharded-layers is for --zero-stage 3", "got 2; allowed 0"],
    "train --zero-stage 4 --dp-shard 2": ["--zero-stage is too large; got 4; allowed 1 to 3; try --zero-stage 3"],
    "train --dp-shard 9": ["--batch-size has no sequence for some", "got 8; allowed 9 or more; try --batch-size 9"],
    "train --pp 4": ["--pp needs as many micro-batches as stages; got 1; allowed 4 or more; try --micro-batch 1"],
    "train --pp 16": ["got 1; allowed 16 or more; try --micro-batch 1 and --batch-size 16"],
    "train --tp 2 --elastic": ["--elastic", "--tp", "try"],
    "train --tp 2 --model hf:gpt2": ["--tp", "--model hf:gpt2", "a preset or a size"],
    "train --dp-shard 2 --inner-optimizer muon": ["--inner-optimizer muon", "it needs whole matrices"],
    "train --blend 1.5": ["--blend is out of its range; got 1.5; allowed at least 0, below 1; try --blend 0.5"],
    "train --method dgc --method-option density=some": ["--method-option density is of another kind; got 'some'"],
    "train --data nowhere": ["--data names no file or folder; got 'nowhere'"],
    "train --data image.png": ["image.png has an unknown suffix; got '.png'"],
    "join --replicas 0 here:1": ["--replicas is too small; got 0; allowed 1 or more; try --replicas 1"],
    "join --device tpu here:1": ["unknown --device; got 'tpu'; allowed cpu, cuda"],
    "join here": ["got 'here'", "HOST:PORT"],
    "lab --rate 100": ["the rate has no unit; got '100'; allowed a number with bit, kbit, mbit or gbit; try 100mbit"],
    "lab --hosts two": ["--hosts is no whole number; got 'two'; allowed a whole number; try --hosts 2"],
    "lab --latency 20": ["the duration has no unit; got '20'", "try 20s"],
    "plan --model 7q": ["unknown --model; got '7q'", "a size such as 125m"],
    "plan --method dilco": ["unknown method; got 'dilco'", "try diloco"],
    "plan --activation-code bfloat16": ["--activation-code is for one replica over several sites; got no --inside"],
    "plan --interval 0": ["--interval is too small; got 0"],
    "plan --min-utilisation 1.5": ["--min-utilisation is no share; got 1.5"],
    "plan --tokens many": ["--tokens is no number; got 'many'"],
    "simulate --codec e3m1": ["unknown --codec; got 'e3m1'"],
    "simulate --overlap-steps 30": ["--overlap-steps is not below --sync-interval, which is 30; got 30"],
    "bench wire --contender dilco": ["unknown contender; got 'dilco'", "try diloco"],
    "bench wire --rate 5": ["the rate has no unit; got '5'"],
    "methods dilco": ["unknown method; got 'dilco'"],
    "watch": ["RUN is missing; got nothing"],
    "watch runs/none --period-s x": ["--period-s is no number; got 'x'"],
    "diagnose --heat-of al x": ["unknown --heat-of; got 'al'; allowed all, compute, forward, backward; try all"],
}


def _words(line: str) -> list[str]:
    name, *rest = line.split(" ")
    head = {"plan": PLAN, "simulate": SIMULATE}.get(name, [name])
    return [*head, *rest, *(LAB if name == "lab" else ())]


def test_wrong_arguments_are_refused_in_one_form_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"\0")
    done = subprocess.run(
        [sys.executable, "-c", TRY, json.dumps([_words(line) for line in CASES])],
        capture_output=True, text=True, timeout=DEADLINE_S, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    for (line, parts), (code, out, err, has_torch) in zip(CASES.items(), outcomes, strict=True):
        assert (code, out) == (2, ""), (line, err)
        assert not has_torch, line
        assert all(part in err for part in parts), (line, err)
        assert FORM.match(err), (line, err)
    assert [path.name for path in tmp_path.iterdir()] == ["image.png"]


def _cpu_s(*words: str) -> float:
    """Return the lesser CPU time of two runs of a process, which a busy machine lengthens little."""
    found = []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            timeout=DEADLINE_S,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


def test_a_refusal_takes_less_cpu_time_than_to_import_torch() -> None:
    """Two commands in processes of their own; that no other refusal imports torch is tested above."""
    bound_s = 0.7 * _cpu_s("-c", "import torch")
    for line in ("train --method streming", "plan --model 7q"):
        assert _cpu_s("-m", "thinwire.cli.main", *_words(line)) < bound_s, line
