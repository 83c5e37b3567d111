"""Group of a pipeline's stages that goes on without those that are lost, and takes them back.

Stages are numbered; stage 0 leads. Those that are present share a gloo group, and each waits for a message of each
other that never comes: it fails when a process ends. Whoever notices posts in the job's store that it is there, then
closes its connections, so that all others notice too. Stage 0 waits until they have posted, and posts whom the next
group has. A stage that comes back posts the same, and stage 0 finds it before its next piece of work.

All do the same pieces of work in the same order. One counts as done where stage 0 has the parts of all, and is done
again without the lost ones until then. A stage that was away leaves out what the others have done without it. So does
one that was still waiting for their sum when another was lost just then.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from thinwire.adaptive_timeout import Deadlines
from thinwire.errors import ConnectError, DeadlineExceeded, PayloadError, PeerLost, TransportError
from thinwire.transport.addresses import interface_of
from thinwire.transport.base import Envelope, Pending
from thinwire.transport.connect import address_at, gloo_on, job_store
from thinwire.transport.process_group import ProcessGroupTransport
from thinwire.transport.rendezvous import POLL_S
from thinwire.transport.streams import ACTIVATIONS, CONTROL

# Parts of a control message's key; notes have part 0.
_SUM, _WATCH = 1, 2
# A stage whose connections closed posts that it is there before it closes them, unless its process has ended.
_GRACE_S = 2.0
_MOST_TEXT_BYTES = 1 << 16
_NUMBER = "number"
# Groups that this process has made, by its rank: they do not read each other's texts.
_num_made: Counter[int] = Counter()


class PathGroup:
    """One stage's end of the group; a transport whose replicas are the stages.

    Args:
        num_stages: Of each replica of the job; a rank is `replica * num_stages + stage`.
        deadline_s: Seconds that stages may come one after another, at the beginning and at the end.
        interface: Network interface whose address the others shall use.
        address: Or that address.

    Attributes:
        replica: This stage.
        present: Stages of the present group.
        number: Of this group, counted from 0.
        is_returning: Whether the others began before; until it joins them with its first piece of work.
    """

    runs_in_background = True

    def __init__(
        self, *, num_stages: int, deadline_s: float = 300.0, interface: str | None = None, address: str | None = None
    ) -> None:  # fmt: skip
        place, store = job_store(deadline_s=deadline_s)
        name = f"{place.prefix}/stages/{place.rank // num_stages}"
        self._store: Any = PrefixStore(f"{name}/{_num_made[place.rank]}", store)
        _num_made[place.rank] += 1
        self._interface = interface_of(address_at(place, interface=interface, address=address))
        self.replica, self.num_replicas = place.rank % num_stages, num_stages
        self.present = tuple(range(num_stages))
        self._deadline_s, self._deadlines = deadline_s, Deadlines(minimum_s=ACTIVATIONS.least_deadline_s)
        self.number, self._num_sums, self._needs_all = -1, 0, True
        # how many steps are done, and pieces of work since; what the present group begins with
        self._place, self._begins = (0, 0), (0, 0)
        self._inner: ProcessGroupTransport | None = None
        self._is_broken, self._is_quiet, self._lock = True, False, threading.Lock()
        self.is_returning = bool(self._store.check([_NUMBER]))
        if self.is_returning:
            self.number, self._needs_all = int(self._read(_NUMBER)), False
        else:
            self._meet()
            self._needs_all = False

    @property
    def step(self) -> int:
        """Number of the step that is computed or was computed last."""
        return self._place[0]

    def begin_after(self, step: int) -> None:
        """Begin after a step that this stage has done."""
        self._place = step, 0

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> Pending:
        """Start to send a payload to a stage that is present."""
        assert self._inner is not None, "it joined the others"
        return self._inner.send(payload, to=self.present.index(to), envelope=envelope)

    def receive(self, *, source: int, envelope: Envelope) -> Pending:
        """Start to receive the message that a stage that is present sends under the same envelope."""
        assert self._inner is not None, "it joined the others"
        return self._inner.receive(source=self.present.index(source), envelope=envelope)

    def together(
        self, compute: Callable[[], torch.Tensor], *, undo: Callable[[], None] = lambda: None, is_step: bool = False
    ) -> torch.Tensor | None:  # fmt: skip
        """Do a piece of work that all stages do, again without those that are lost meanwhile.

        Args:
            compute: This stage's part, (n,), which it sends messages to stages in `present` for.
            undo: Called before it is done again.
            is_step: Whether it is the main part of a step.

        Returns:
            Sum over the parts, float64 on the CPU; None where the others have done without this stage.

        Raises:
            TransportError: A message is not what was expected, or stage 0 is lost.
        """
        steps, pieces = self._place
        self._place = (steps + 1, 0) if is_step else (steps, pieces + 1)
        while True:
            if self._is_broken or self._has_returned():
                self._break()
                self._meet()
            if self._place < self._begins:
                return None
            began_s = time.monotonic()
            try:
                total = self._sum(compute().double().cpu())
            except TransportError as error:
                is_loss = self._is_broken or isinstance(error, PeerLost | DeadlineExceeded)
                if not is_loss or isinstance(error, PayloadError):
                    raise
                undo()
                self._break()
            else:
                self._deadlines.observe_step(time.monotonic() - began_s)
                return total

    def complete(self) -> None:
        """Wait until all stages are there and have done the same; then each may close by itself.

        Raises:
            ConnectError: A stage did not come back in time.
        """
        self._needs_all = True
        while self.together(lambda: torch.zeros(1)) is None or len(self.present) < self.num_replicas:
            if len(self.present) < self.num_replicas:
                self._break()
        self._is_quiet = True
        self._sum(torch.zeros(1, dtype=torch.float64))

    def close(self) -> None:
        """Leave the group; the others go on without this stage unless they have come to the end."""
        self._is_quiet = True
        if self._inner is not None:
            self._inner.close()

    def _meet(self) -> None:
        """Join the stages that are there in the next group that has this one."""
        while True:
            self.number += 1
            self._store.set(self._key("here", self.replica), "")
            if self.replica == 0:
                self._choose()
            members, begins = self._chosen()
            if self.replica in members and self._join(members):
                self._begins, self.is_returning = begins, False
                return

    def _choose(self) -> None:
        """Post whom the next group has, at stage 0."""
        expected = set(range(self.num_replicas)) if self._needs_all else set(self.present)
        most_s = self._deadline_s if self._needs_all else self._deadlines.deadline_s(steps=1)
        began_s = time.monotonic()
        while missing := {stage for stage in expected if not self._is_here(stage)}:
            waited_s = time.monotonic() - began_s
            is_lost = all(self._is_posted(self._key("lost", stage)) for stage in missing)
            if waited_s > most_s or (not self._needs_all and is_lost and waited_s > _GRACE_S):
                break
            time.sleep(POLL_S)
        if missing and self._needs_all:
            raise ConnectError(
                f"stage {min(missing)} did not come within {most_s:g} s; see its log, and resume from the last "
                f"checkpoint"
            )
        members = [stage for stage in range(self.num_replicas) if self._is_here(stage)]
        self._store.set(self._key("members"), json.dumps([members, self._place]))
        self._store.set(_NUMBER, str(self.number))

    def _chosen(self) -> tuple[tuple[int, ...], tuple[int, int]]:
        """Wait for what stage 0 posts: whom this group has, and what it begins with."""
        most_s = self._deadline_s + self._deadlines.deadline_s(steps=1)
        end_s = time.monotonic() + most_s
        while not self._is_posted(self._key("members")):
            if time.monotonic() > end_s:
                raise PeerLost(f"stage 0 began no new group within {most_s:g} s; see its log, and resume from the last "
                               f"checkpoint")  # fmt: skip
            time.sleep(POLL_S)
        try:
            members, begins = json.loads(self._read(self._key("members")))
            found, place = tuple(map(int, members)), (int(begins[0]), int(begins[1]))
        except (ValueError, TypeError, IndexError) as error:
            raise PayloadError("stage 0 posted no group; run the same thinwire on all hosts") from error
        if list(found) != sorted({0, *found}) or found[-1] >= self.num_replicas:
            raise PayloadError(f"stage 0 posted a group that is none: {found}; run the same thinwire on all hosts")
        return found, place

    def _join(self, members: tuple[int, ...]) -> bool:
        """Join a new group; return whether it came about, which it does not where another is lost meanwhile."""
        timeout = timedelta(seconds=self._deadlines.deadline_s(steps=1))
        try:
            with gloo_on(self._interface):
                store = PrefixStore(self._key("group"), self._store)
                group = dist.ProcessGroupGloo(store, members.index(self.replica), len(members), timeout)
        except RuntimeError:
            return False
        self._inner, self.present, self._num_sums = ProcessGroupTransport(group), members, 0
        self._is_broken = False
        for stage in members:
            if stage != self.replica:
                self._watch(stage, self._inner)
        return True

    def _watch(self, stage: int, inner: ProcessGroupTransport) -> None:
        """Break the group when another stage closes its connection."""
        pending: Any = self.receive(source=stage, envelope=Envelope(stream=CONTROL, key=(0, _WATCH)))
        number = self.number + 1

        def on_finish() -> None:
            if inner is not self._inner or self._is_quiet:
                return
            try:
                pending.wait(deadline_s=0)
            except PeerLost:
                with contextlib.suppress(RuntimeError):
                    self._store.set(self._key("lost", stage, number=number), "")
            except TransportError:  # closed here
                return
            self._break()

        pending.on_finish(on_finish)

    def _break(self) -> None:
        """Leave the group, once; from any thread."""
        with self._lock:
            if self._is_broken:
                return
            self._is_broken, inner, number = True, self._inner, self.number + 1
        # a store that stage 0 serves may be gone: waiting for the next group finds that
        with contextlib.suppress(RuntimeError):
            self._store.set(self._key("here", self.replica, number=number), "")
        assert inner is not None, "a group broke"
        inner.close()

    def _has_returned(self) -> bool:
        """Return whether an absent stage has posted that it is there, at stage 0."""
        absent = () if self.replica else set(range(self.num_replicas)).difference(self.present)
        return any(self._is_here(stage, number=self.number + 1) for stage in absent)

    def _sum(self, own: torch.Tensor) -> torch.Tensor:
        """Return the sum over the present stages, which stage 0 computes."""
        self._num_sums += 1
        envelope = Envelope(stream=CONTROL, key=(self._num_sums, _SUM), payload_bytes=own.nbytes)
        deadline_s = self._deadlines.deadline_s(steps=1)

        def take(pending: Pending) -> torch.Tensor:
            received = pending.wait(deadline_s=deadline_s)
            assert received is not None, "a receive returns its message"
            return received.payload.clone().view(torch.float64)

        if self.replica:
            awaited = self.receive(source=0, envelope=envelope)
            self.send(own.contiguous().view(torch.uint8), to=0, envelope=envelope).wait(deadline_s=deadline_s)
            return take(awaited)
        receives = [self.receive(source=stage, envelope=envelope) for stage in self.present[1:]]
        total = own.clone()
        for part in receives:
            total += take(part)
        for pending in [self.send(total.view(torch.uint8), to=stage, envelope=envelope) for stage in self.present[1:]]:
            pending.wait(deadline_s=deadline_s)
        return total

    def _key(self, what: str, stage: int | None = None, *, number: int | None = None) -> str:
        own = f"{what}/{self.number if number is None else number}"
        return own if stage is None else f"{own}/{stage}"

    def _is_here(self, stage: int, *, number: int | None = None) -> bool:
        return self._is_posted(self._key("here", stage, number=number))

    def _is_posted(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError as error:  # stage 0 may serve the store
            raise PeerLost("stage 0 has ended; see its log, and resume from the last checkpoint") from error

    def _read(self, key: str) -> str:
        raw: bytes = self._store.get(key)
        if len(raw) > _MOST_TEXT_BYTES:
            raise PayloadError(f"the store has a text of {len(raw)} bytes, allowed {_MOST_TEXT_BYTES}")
        return raw.decode(errors="replace")


def is_under_way(*, num_stages: int, deadline_s: float) -> bool:
    """Return whether the other stages of this job began before, so that this process takes the place of a lost one."""
    place, store = job_store(deadline_s=deadline_s)
    first = PrefixStore(f"{place.prefix}/stages/{place.rank // num_stages}/0", store)
    return bool(first.check([_NUMBER]))
