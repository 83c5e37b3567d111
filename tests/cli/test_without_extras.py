"""What needs an extra names the command that installs it, in an environment that lacks the extra's packages."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALL = "every extra at once"
URI = "thinwire://192.0.2.1:4711#" + 64 * "0"

# What is tried without each extra: a command, or Python after ">>>". `trl` is imported by the user's own script only.
TRIED: dict[str, list[str]] = {
    "elastic": ["train --elastic", ">>> thinwire.join", ">>> thinwire.ElasticOptimizer"],
    "wire": [
        "train --secret secret", f"join {URI}", f"status {URI}", f"pause {URI}", f"resume {URI}",
        f"leave {URI} --replica 1", ">>> thinwire.connect(replica=0, num_replicas=2, secret='secret')",
    ],
    "bucket": [
        ">>> importlib.import_module('thinwire.carriers.bucket').BucketCarrier('s3://bucket/run')",
        ">>> importlib.import_module('thinwire.carriers.open').open_carrier('memory://m#' + 52 * 'a', may_create=True)",
    ],
    "ray": [">>> importlib.import_module('thinwire.integrations.ray')._ray()"],
    "flower": [
        "recipes flower-digits",
        ">>> importlib.import_module('thinwire.integrations.flower').client_mod",
        ">>> importlib.import_module('thinwire.integrations.flower.strategy')",
    ],
    "hf": [
        "train --data hf:some/text", "train --model hf:pretrained", "plan --hosts 2 --rate 20mbit --flops 1e12 --model "
        "hf:pretrained", ">>> importlib.import_module('thinwire.integrations.hf')",
        ">>> importlib.import_module('thinwire.integrations.data').split_dataset([], transport=thinwire.connect())",
    ],
    "peft": ["train --model hf:pretrained --lora 4"],
    "lightning": [">>> importlib.import_module('thinwire.integrations.lightning')"],
    "trl": [],
    "titan": [">>> importlib.import_module('thinwire.integrations.titan')"],
    "parquet": ["train --data text.parquet"],
    "match": [">>> importlib.import_module('thinwire.methods.dimat.matching').assign(torch.zeros(1, 1))"],
    "digits": ["train --workload digits"],
    "report": ["train --tensorboard", "train --wandb"],
}  # fmt: skip

# Forks a child for each extra, in which its packages cannot be found.
TRY = """
import contextlib, faulthandler, importlib, io, json, os, pkgutil, sys
import torch
import thinwire, thinwire.cli.train, thinwire.training.build
from thinwire.cli.main import main
from thinwire.errors import MissingExtra

blocked = set()
finders = list(sys.meta_path)

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            return None
        return next((spec for finder in finders if (spec := finder.find_spec(name, path, target))), None)

sys.meta_path[:] = [Finder]

def outcome(tried):
    err = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            eval(tried[4:]) if tried.startswith(">>> ") else main(tried.split())
    except MissingExtra as error:
        return str(error)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return err.getvalue()

def every_module():
    names = [found.name for found in pkgutil.walk_packages(thinwire.__path__, "thinwire.", onerror=lambda name: None)]
    return {name: text for name in names if (text := outcome(f">>> importlib.import_module({name!r})"))}

for extra, (packages, tried) in json.loads(sys.stdin.read()).items():
    read, write = os.pipe()
    if child := os.fork():
        os.close(write)
        with os.fdopen(read) as answer:
            print(answer.read(), flush=True)
        os.waitpid(child, 0)
        continue
    faulthandler.dump_traceback_later(60, exit=True, file=sys.__stderr__)  # what is not refused runs for long
    blocked |= set(packages)
    for name in [name for name in sys.modules if name.partition(".")[0] in blocked]:
        del sys.modules[name]
    found = {one: outcome(one) for one in tried} if tried is not None else every_module()
    with os.fdopen(write, "w") as answer:
        answer.write(json.dumps([extra, found]))
    os._exit(0)
"""


def _packages() -> dict[str, dict[str, str]]:
    """Return the packages of each extra, by the name that they are imported by."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    imported = {"pyzmq": "zmq", "scikit-learn": "sklearn", "pynacl": "nacl"}
    names = {
        extra: [line.partition(">=")[0].partition("[")[0] for line in lines]
        for extra, lines in extras.items() if extra not in ("dev", "docs")
    }  # fmt: skip
    return {extra: {imported.get(name, name): name for name in packages} for extra, packages in names.items()}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Return what was printed or raised without each extra."""
    folder = tmp_path_factory.mktemp("without")
    (folder / "text.parquet").write_bytes(b"PAR1")
    (folder / "secret").write_text(f"thinwire-secret {64 * '0'}\n")
    (folder / "secret").chmod(0o600)
    (folder / "pretrained").mkdir()
    (folder / "pretrained/config.json").write_text('{"model_type": "gpt2"}')
    (folder / "pretrained/model.safetensors").touch()
    packages = _packages()
    jobs: dict[str, Any] = {extra: [list(packages[extra]), tried] for extra, tried in TRIED.items()}
    jobs[ALL] = [sorted({name for names in packages.values() for name in names}), None]
    done = subprocess.run(
        [sys.executable, "-c", TRY], input=json.dumps(jobs), capture_output=True, text=True, timeout=600, cwd=folder
    )
    found = dict(json.loads(line) for line in done.stdout.splitlines() if line)
    assert found.keys() == jobs.keys(), done.stderr
    return found


@pytest.mark.parametrize("extra", _packages())
def test_without_an_extra_what_needs_it_says_how_to_install_it(extra: str, outcomes: dict[str, dict[str, str]]) -> None:
    for tried in TRIED[extra]:
        text = outcomes[extra][tried]
        package, _, rest = text.rstrip().rpartition("error: ")[2].partition(" is not installed; install it with: ")
        assert package in _packages()[extra].values(), (tried, text)
        assert any(rest == f"pip install 'thinwire[{name}]'" for name in _packages() if package in
                   _packages()[name].values()), (tried, text)  # fmt: skip


def test_without_any_extra_each_module_is_imported_or_names_the_extra_that_it_needs(
    outcomes: dict[str, dict[str, str]],
) -> None:
    found = outcomes[ALL]
    assert found["thinwire.elastic.coordinator_client"]
    other = {name: text for name, text in found.items() if "is not installed; install it with: pip install" not in text}
    assert other == {}
