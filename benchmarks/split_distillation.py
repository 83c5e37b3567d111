"""Accuracy of a small student beside what its teacher at another host sends: messages, logits or hidden states.

    python benchmarks/split_distillation.py     # prints the table, and writes results/split_distillation.jsonl

Images of digits (scikit-learn). The teacher, 64-128-128-128-10, has learned 1,337 of them. The student, 64-16-10, has
the labels of 100 others. Payloads are coded in block-int8 both ways as by a split session; bytes count a sample each
time that it is trained on, gradients included. Logits and hidden states of a sample are the same each time, so that a
student may keep them: then they cost once what is stated. `alone` is the student without the teacher when it is tested.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from activation_loss import RoundTrip
from sklearn import datasets
from torch import Tensor, nn
from torch.nn import functional

from thinwire.codecs.activation_code import ActivationCode
from thinwire.split import split_round_bytes

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from talking_models import TalkingStudent, TalkingTeacher

RESULTS = Path(__file__).parent / "results" / "split_distillation.jsonl"
CODE = ActivationCode("block-int8", "block-int8")
LABELLED, TESTED, HIDDEN, OWN, BATCH, STEPS, SEEDS = 100, 360, 128, 16, 64, 200, 3


class Coded(nn.Module):
    """What a split session does to what crosses."""

    def __init__(self, teacher: TalkingTeacher) -> None:
        super().__init__()
        self.teacher = teacher

    def forward(self, messages: Tensor) -> Tensor:
        """Return the answers, as the student gets them."""
        found: Tensor = RoundTrip.apply(self.teacher(RoundTrip.apply(messages, CODE)), CODE)
        return found


def train(model: nn.Module, loss: Any, images: Tensor, *, lr: float, seed: int, steps: int = STEPS) -> None:
    """Train by Adam on batches of numbers of samples."""
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=lr)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        loss(torch.randint(len(images), (BATCH,), generator=generator)).backward()
        optimizer.step()
        optimizer.zero_grad()


class Digits:
    """Images, a trained teacher, and what is measured with one seed."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        found, self.seed = datasets.load_digits(), seed
        order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(seed))
        images = torch.tensor(found.images, dtype=torch.float32).flatten(1)[order] / 16
        labels = torch.tensor(found.target)[order]
        self.tested, self.wanted = images[:TESTED], labels[:TESTED]
        self.x, self.y = images[TESTED : TESTED + LABELLED], labels[TESTED : TESTED + LABELLED]
        rest, of_rest = images[TESTED + LABELLED :], labels[TESTED + LABELLED :]
        low = nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU())
        self.middle = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU())
        teacher = nn.Sequential(low, self.middle, nn.Linear(HIDDEN, 10))
        train(teacher, lambda rows: functional.cross_entropy(teacher(rest[rows]), of_rest[rows]), rest,
              lr=1e-3, seed=seed)  # fmt: skip
        with torch.no_grad():
            self.note("teacher itself", 0, teacher(self.tested))
            self.states = self.middle(low(self.x))
            self.logits = teacher[-1](self.states)

    def note(self, way: str, num_bytes: float, alone: Tensor, asking: Tensor | None = None) -> None:
        """Write a line of results."""
        accuracy = [
            None if logits is None else 100 * float((logits.argmax(1) == self.wanted).float().mean())
            for logits in (alone, asking)
        ]
        line = {"way": way, "seed": self.seed, "bytes": num_bytes, "alone": accuracy[0], "asking": accuracy[1]}
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def student(self) -> nn.Sequential:
        """Return a new student."""
        torch.manual_seed(self.seed)
        return nn.Sequential(nn.Sequential(nn.Linear(64, OWN), nn.ReLU()), nn.Linear(OWN, 10))

    def by_logits(self, k: int, weight: float) -> None:
        """Learn labels, and the teacher's k largest logits at temperature 2."""
        student, kept = self.student(), self.logits.topk(max(1, k))

        def loss(rows: Tensor) -> Tensor:
            guess = student(self.x[rows])
            soft = (kept.values[rows] / 2).softmax(1) * (guess / 2).log_softmax(1).gather(1, kept.indices[rows])
            return functional.cross_entropy(guess, self.y[rows]) - weight * soft.sum(1).mean()

        train(student, loss, self.x, lr=1e-2, seed=self.seed)
        with torch.no_grad():
            self.note(f"logits, top {k}, weight {weight}" if k else "student itself", 3 * k, student(self.tested))

    def by_states(self, width: int, weight: float) -> None:
        """Learn labels, and the teacher's hidden states turned at random and cut to a width."""
        student, guess = self.student(), nn.Linear(OWN, width)
        turned = self.states @ torch.linalg.qr(torch.randn(HIDDEN, HIDDEN)).Q[:, :width]
        turned = turned / turned.std()

        def loss(rows: Tensor) -> Tensor:
            near = (guess(student[0](self.x[rows])) - turned[rows]).square().mean()
            return functional.cross_entropy(student(self.x[rows]), self.y[rows]) + weight * near

        train(nn.ModuleList([student, guess]), loss, self.x, lr=1e-2, seed=self.seed)
        with torch.no_grad():
            self.note(f"hidden, {width} numbers, weight {weight}", width * 65 / 64, student(self.tested))

    def by_messages(self, width: int, turns: int, weight: float) -> None:
        """Learn labels by the answers read, and without them too, so that the student can do alone."""
        student, answering = self.student(), TalkingTeacher(self.middle, hidden=HIDDEN, width=width, weight=weight)
        asking = TalkingStudent(Coded(answering), hidden=OWN, width=width, turns=turns, weight=weight)

        def loss(rows: Tensor) -> Tensor:
            own = student[0](self.x[rows])
            hidden, term = asking(own[:, None])
            both = torch.cat([student[1](hidden[:, 0]), student[1](own)])
            return 2 * functional.cross_entropy(both, self.y[rows].repeat(2)) + term

        train(nn.ModuleList([student, asking]), loss, self.x, lr=1e-2, seed=self.seed)
        num_bytes = turns * split_round_bytes(samples=1, positions=BATCH, width=width, code=CODE) / BATCH
        with torch.no_grad():
            read = asking(student[0](self.tested)[:, None])[0][:, 0]
            name = f"messages, {width} numbers, {turns} turns, weights {weight}"
            self.note(name, num_bytes, student(self.tested), student[1](read))


def main() -> None:
    """Run all seeds, and print the table."""
    torch.set_num_threads(1)
    RESULTS.unlink(missing_ok=True)
    for seed in range(SEEDS):
        digits = Digits(seed)
        for k, weight in ((0, 0.0), (3, 2.0), (10, 2.0)):
            digits.by_logits(k, weight)
        for width, weight in ((64, 0.1), (HIDDEN, 0.1), (HIDDEN, 1.0)):
            digits.by_states(width, weight)
        for width, turns, weight in (
            (16, 1, 0.0),
            (16, 1, 0.1),
            (16, 2, 0.1),
            (16, 3, 0.1),
            (24, 2, 0.1),
            (48, 1, 0.1),
        ):
            digits.by_messages(width, turns, weight)
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    for name in dict.fromkeys(line["way"] for line in lines):
        own = [line for line in lines if line["way"] == name]
        alone, asking = [one["alone"] for one in own], [one["asking"] for one in own if one["asking"] is not None]
        with_teacher = f"{statistics.fmean(asking):5.1f} %" if asking else "      -"
        each = " ".join(f"{one:.1f}" for one in asking or alone)
        print(f"{name:45} {own[0]['bytes']:6.1f} B  alone {statistics.fmean(alone):5.1f} %  {with_teacher}  ({each})")


if __name__ == "__main__":
    main()
