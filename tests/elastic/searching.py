"""Searches through the model of a run: all states near the beginning, and ways at random far from it."""

import pickle
import random
from dataclasses import dataclass

from model import Event, World


@dataclass
class Found:
    """What a search has seen."""

    states: int
    over: int
    is_complete: bool
    stuck: list[list[Event]]


class Search:
    """A search through all states that can be reached, nearest first.

    Args:
        start: The first state.
        most_states: It ends there.
    """

    def __init__(self, start: World, *, most_states: int) -> None:
        self._most_states = most_states
        self._is_complete = True
        self._frozen: list[bytes] = []
        self._numbers: dict[bytes, int] = {}
        self._came_from: list[tuple[int, Event]] = []
        self._before: list[list[int]] = []
        self._ends: list[int] = []
        self._number(start, -1, ("start",))

    def run(self) -> Found:
        """Check each state, and that from each an end can be reached without more faults."""
        at = 0
        while at < len(self._frozen):
            raw, self._frozen[at] = self._frozen[at], b""
            for event in list(pickle.loads(raw).events()):
                self._take(raw, at, event)
            at += 1
        stuck = sorted(set(range(at)) - self._ending()) if self._is_complete else []
        paths = [self._path(number) for number in stuck]
        return Found(states=at, over=len(self._ends), is_complete=self._is_complete, stuck=paths)

    def _take(self, raw: bytes, at: int, event: Event) -> None:
        world = pickle.loads(raw)
        faults = world.faults
        try:
            world.do(event)
            world.check()
        except AssertionError as error:
            raise AssertionError(f"{error}: {self._path(at)} then {event}") from error
        number = self._number(world, at, event)
        if number is not None and world.faults == faults:
            self._before[number].append(at)

    def _number(self, world: World, at: int, event: Event) -> int | None:
        key = world.key()
        if key not in self._numbers:
            if len(self._numbers) >= self._most_states:
                self._is_complete = False
                return None
            self._numbers[key] = len(self._frozen)
            self._frozen.append(pickle.dumps(world))
            self._came_from.append((at, event))
            self._before.append([])
            if world.is_over():
                self._ends.append(self._numbers[key])
        return self._numbers[key]

    def _ending(self) -> set[int]:
        """Return the states from which an end can be reached."""
        reached, todo = set(self._ends), list(self._ends)
        while todo:
            for number in self._before[todo.pop()]:
                if number not in reached:
                    reached.add(number)
                    todo.append(number)
        return reached

    def _path(self, number: int) -> list[Event]:
        path = []
        while number > 0:
            number, event = self._came_from[number]
            path.append(event)
        return path[::-1]


def finish(world: World, *, turns: int = 240) -> bool:
    """Let all go on in turn, without more faults; tell whether all that are here come to the end."""
    for turn in range(turns):
        if world.is_over():
            return True
        todo = [event for event in world.events() if event[0] in world.work]
        for event in todo:
            if event in set(world.events()):
                world.do(event)
                world.check()
        if not todo:
            world.do(("time", ("short", "short", "medium", "long")[turn % 4]))
            world.check()
    return world.is_over()


def wander(start: bytes, *, seed: int, steps: int) -> tuple[World, list[Event]]:
    """Take one way at random, and then let all go on; faults come as often as anything else.

    Raises:
        AssertionError: Something does not hold on the way, or those that are left do not come to the end.
    """
    chance, world, path = random.Random(seed), pickle.loads(start), []
    try:
        for _ in range(steps):
            events = list(world.events())
            if not events:
                break
            plain = [event for event in events if event[0] in world.plain]
            path.append(chance.choice(plain if plain and chance.random() < 0.7 else events))
            world.do(path[-1])
            world.check()
        assert finish(world), "those that are left do not come to the end"
    except AssertionError as error:
        raise AssertionError(f"{error}: seed {seed}, {path}") from error
    return world, path
