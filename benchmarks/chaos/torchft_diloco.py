"""One replica of torchft's DiLoCo, on thinwire's model, data and inner optimizer; it writes what chaos_checks reads.

python -m torchft_diloco FOLDER REPLICA HOST HOSTS ADDRESS LIGHTHOUSE_URL OUTER_STEPS SETTING

SETTING is a key of SETTINGS. A line of `rounds-replica-N.jsonl` is an outer step that this replica committed; a line of
`metrics-replica-N.jsonl` what it has trained; `events-replica-N.jsonl` tells the rest. CHAOS_STEP_S is slept each step,
CHAOS_SYNC_INTERVAL is H.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from thinwire.sync.fragments import Pattern, find_blocks
from thinwire.training.build import lr_factor, make_inner_optimizer
from thinwire.training.config import TrainConfig, resolve
from thinwire.workloads.language import Sampler
from thinwire.workloads.language.workload import make_model, open_data

BATCH, SEQ = 1, 64
# default: torchft's own time-outs and no retry, and the state that its examples hand over (model, inner optimizer).
# tuned: see docs/benchmarks/elastic.md. A lean state is all that the others' next step depends on; each committed
# outer step is also kept on the replica's own disk, with the manager's count.
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"limit_s": 60, "quorum_s": 60, "retries": 0, "is_lean": False, "keeps": False},
    "tuned": {"limit_s": 30, "quorum_s": 180, "retries": 6, "is_lean": True, "keeps": True},
}
OVERLAP_STEPS, BLEND, OUTER_LR, OUTER_MOMENTUM = 5, 0.5, 0.6, 0.9


class Log:
    """Lines of JSON, whole ones also where the process is killed."""

    def __init__(self, folder: Path, *, replica: int) -> None:
        names = ("rounds", "metrics", "events")
        self._files = {
            name: (folder / f"{name}-replica-{replica}.jsonl").open("a", buffering=1, encoding="utf-8")
            for name in names
        }

    def write(self, name: str, **fields: Any) -> None:
        self._files[name].write(json.dumps(fields) + "\n")

    def tell(self, event: str, **fields: Any) -> None:
        self.write("events", at_s=time.time(), event=event, **fields)


class NotedGroup(ProcessGroupGloo):
    """Remembers who is in it: `configure` is told, and keeps it to itself."""

    members: tuple[int, ...] = ()

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int, *more: Any, **named: Any) -> None:
        ranks = named.get("global_ranks", more[-1] if more else None)
        self.members = tuple(sorted(ranks or ()))
        super().configure(store_addr, replica_id, rank, world_size, *more, **named)


def fragments_of(model: nn.Module) -> list[nn.Module]:
    """Return the same fragments as thinwire's Streaming DiLoCo makes, as torchft wants them: each a module."""
    found = []
    for names in Pattern().partition(find_blocks(model)):
        fragment = nn.Module()
        for name in names:
            fragment.register_parameter(name.replace(".", "_"), model.get_parameter(name))
        found.append(fragment)
    return found


def config_of(*, steps: int) -> TrainConfig:
    config = TrainConfig.of(
        model="nano", steps=steps, batch_size=BATCH, seq_len=SEQ, replicas=1, threads=1, sync_interval=sync_interval()
    )
    return resolve(config, world_size=None, cores=1, home=Path.home())


def sync_interval() -> int:
    return int(os.environ["CHAOS_SYNC_INTERVAL"])


class Replica:
    """A model in torchft's DiLoCo, and what is noted of it."""

    def __init__(
        self, folder: Path, *, replica: int, host: int, hosts: int, address: str, lighthouse: str, outer_steps: int,
        setting: str,
    ) -> None:  # fmt: skip
        self._setting = SETTINGS[setting]
        self._replica, self._outer_steps = replica, outer_steps
        self.log = Log(folder, replica=replica)
        self._kept = folder / "kept.pt"
        torch.set_num_threads(1)
        self._steps_each = sync_interval() // 3
        self._config = config_of(steps=outer_steps * self._steps_each)
        corpus = open_data(self._config)
        self._model = make_model(self._config, vocab_size=corpus.tokenizer.vocab_size, device="cpu")
        self._inner = make_inner_optimizer(self._config, self._model)
        self._base_lrs = [group["lr"] for group in self._inner.param_groups]
        # a life of its own sees an order of its own
        self._batches = Sampler(
            corpus.train, replica=host, num_replicas=hosts, batch_size=BATCH, seq_len=SEQ, seed=replica
        )
        self._steps = self._own_steps = 0
        self._slept_s, self._began_s = 0.0, time.monotonic()
        self.log.tell("assembled")
        self._join(address=address, lighthouse=lighthouse)

    def _join(self, *, address: str, lighthouse: str) -> None:
        limit, quorum = timedelta(seconds=self._setting["limit_s"]), timedelta(seconds=self._setting["quorum_s"])
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self._group = NotedGroup(timeout=limit)
        is_lean = self._setting["is_lean"]
        self._manager = Manager(
            pg=self._group, timeout=limit, quorum_timeout=quorum, connect_timeout=limit,
            load_state_dict=self._note_load if is_lean else self._load, state_dict=dict if is_lean else self._state,
            min_replica_size=2, use_async_quorum=False, rank=0, world_size=1, store_addr=address,
            store_port=self._store.port, lighthouse_addr=lighthouse, hostname=address,
            replica_id=f"replica_{self._replica}", quorum_retries=self._setting["retries"],
            init_sync=False,  # all start from the same seed
        )  # fmt: skip
        fragments = fragments_of(self._model)
        outer = [
            torch.optim.SGD(part.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
            for part in fragments
        ]
        self._diloco = DiLoCo(
            self._manager, fragments, self._inner, outer, sync_every=sync_interval(),
            fragment_sync_delay=OVERLAP_STEPS, fragment_update_alpha=BLEND,
        )  # fmt: skip
        self._fragments, self._outer = self._diloco._fragments, outer
        if is_lean:  # after the fragments' own: they are loaded in the order of this registration
            self._manager.register_state_dict_fn("begin_at_global", lambda _: self._diloco._restore_parameters(), dict)
        if self._setting["keeps"]:
            self._read_kept()
        self._watch_quorum()
        self.log.tell("joined", step=self._manager.current_step())

    def _watch_quorum(self) -> None:
        plain: Callable[..., None] = self._manager.start_quorum

        def watched(*arguments: Any, **named: Any) -> None:
            began_s, step = time.monotonic(), self._manager.current_step()
            plain(*arguments, **named)
            self.log.tell(
                "quorum", took_s=time.monotonic() - began_s, step=step, now_step=self._manager.current_step(),
                members=self._group.members, error=_short(self._manager),
            )  # fmt: skip

        self._manager.start_quorum = watched  # type: ignore[method-assign]

    def _state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "inner": self._inner.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        self._inner.load_state_dict(state["inner"])
        self._note_load(state)

    def _note_load(self, _: dict[str, Any]) -> None:
        self._own_steps = 0  # what was trained before is given up
        self.log.tell("loaded")

    def _keep(self) -> None:
        state = {
            "manager": self._manager.state_dict(),
            "values": [part.original_parameters for part in self._fragments],
            "outer": [optimizer.state_dict() for optimizer in self._outer],
        }
        torch.save(state, self._kept.with_suffix(".new"))
        self._kept.with_suffix(".new").replace(self._kept)

    def _read_kept(self) -> None:
        if not self._kept.exists():
            return
        state = torch.load(self._kept, weights_only=True)
        self._manager.load_state_dict(state["manager"])
        for part, values in zip(self._fragments, state["values"], strict=True):
            for name, value in values.items():
                part.original_parameters[name].copy_(value)
        for optimizer, saved in zip(self._outer, state["outer"], strict=True):
            optimizer.load_state_dict(saved)
        self._diloco._restore_parameters()

    def run(self) -> None:
        sleep_s = float(os.environ["CHAOS_STEP_S"])
        with self._diloco:
            while self._manager.current_step() < self._outer_steps:
                time.sleep(sleep_s)
                before = self._manager.current_step()
                self._step()
                self._own_steps += 1
                self._steps += 1
                if self._diloco._local_step == 0:
                    self._note_sync(before)
                self.log.write(
                    "metrics", kind="step", time_s=time.monotonic() - self._began_s, tokens=self._steps * BATCH * SEQ,
                    compute_fraction=1.0, step=self._manager.current_step(),
                )  # fmt: skip
        self.log.tell("done")

    def _step(self) -> None:
        step = self._manager.current_step() * self._steps_each + self._diloco._local_step + 1
        for group, lr in zip(self._inner.param_groups, self._base_lrs, strict=True):
            group["lr"] = lr * lr_factor(step, config=self._config)
        tokens, targets = next(self._batches)
        loss: Callable[..., tuple[torch.Tensor, torch.Tensor]] = self._model.loss  # type: ignore[assignment]
        loss(tokens, targets)[0].backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), self._config.optimizer.clip_norm)
        self._inner.step()  # torchft's hooks on it exchange
        self._inner.zero_grad(set_to_none=True)

    def _note_sync(self, before: int) -> None:
        step = self._manager.current_step()
        own, self._own_steps = min(self._own_steps, self._steps_each), 0
        if step == before or self._manager._commit_failures:
            self.log.tell("discarded", step=step, members=self._group.members, error=_short(self._manager))
            return
        crc = 0
        for part in self._fragments:
            for value in part.original_parameters.values():
                crc = zlib.crc32(value.numpy().tobytes(), crc)
        self.log.write(
            "rounds", round=step - 1, crc=crc, members=self._group.members, at_s=time.time(),
            tokens=own * BATCH * SEQ, quorum=self._manager._quorum_id,
        )  # fmt: skip
        if self._setting["keeps"]:
            self._keep()


def _short(manager: Manager) -> str | None:
    error = manager.errored()
    if error is None:
        return None
    text = str(error.original_exception)  # gloo begins with the place in its source
    return (text.partition("] ")[2] if text.startswith("[") else text)[:160]


def main(words: list[str]) -> None:
    folder = Path(words[0])
    replica = Replica(
        folder, replica=int(words[1]), host=int(words[2]), hosts=int(words[3]), address=words[4], lighthouse=words[5],
        outer_steps=int(words[6]), setting=words[7],
    )  # fmt: skip
    try:
        replica.run()
    except Exception as error:
        replica.log.tell("raised", error=f"{type(error).__name__}: {str(error)[:300]}")
        raise
    (folder / "summary.json").write_text("{}\n")
    os._exit(0)  # its servers' threads would keep it


if __name__ == "__main__":
    main(sys.argv[1:])
