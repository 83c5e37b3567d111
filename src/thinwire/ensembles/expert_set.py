"""Sets of experts: a folder with `set.json` and one finished checkpoint an expert. Imports torch only to compute.

```
experts/set.json              names, domains, sizes, tokens, tokenizer, cached prior
experts/python/config.json    as `thinwire train` leaves it
experts/python/model/         weights and tokenizer
```

The folder holds all that it names, so that it can be copied as it is. Shapes of experts may differ. Their tokenizers
may not: an ensemble adds probabilities of the same tokens.

Reference:
    Branch-Train-Merge, arXiv 2208.03306.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from thinwire.ensembles.finished_run import (
    check_finished,
    copy_checkpoint,
    count_weights,
    tokenizer_hash,
    trained_tokens,
)
from thinwire.errors import CheckpointError, DataError, ThinwireError, refusal, unknown_name
from thinwire.files import MOST_PLAN_BYTES, read_json, wait_for_lock, write_json

if TYPE_CHECKING:
    from torch import nn

    from thinwire.ensembles.ensemble import Ensemble

SET_FILE = "set.json"
PRIORS = ("uniform", "updating", "cached", "average")
_ADD = "thinwire experts add"
# Seconds for another command to copy its checkpoint into the set.
_CHANGE_S = 600.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_Short = Annotated[str, Meta(max_length=200)]
_Count = Annotated[int, Meta(ge=0, le=1 << 53)]
_Share = Annotated[float, Meta(ge=0, le=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """One member of a set.

    Attributes:
        name: Letters, digits, `.`, `_` and `-`; unique in the set.
        checkpoint: Folder of its finished run, relative to the set's.
        domain: Its training text, in the user's words.
        parameters: Weights in its checkpoint.
        tokens: Tokens that its own run trained on; 0 where the run does not say.
        tokenizer_sha256: Hash of its tokenizer, equal in all members.
    """

    name: Annotated[str, Meta(pattern=rf"^{_NAME.pattern}\Z")]
    checkpoint: Annotated[str, Meta(max_length=200, pattern=r"^[^\0\ud800-\udfff]*\Z")]
    domain: _Short
    parameters: _Count
    tokens: _Count
    tokenizer_sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrior:
    """Probability of each expert before a text begins, computed on development text.

    Attributes:
        weights: One an expert, in the set's order; their sum is 1.
        documents: Hashes of the whole development documents, which may not be evaluated on.
    """

    weights: Annotated[tuple[_Share, ...], Meta(max_length=1024)]
    documents: Annotated[tuple[_Short, ...], Meta(max_length=1 << 18)]

    def check(self, text: str) -> None:
        """Refuse a whole document to evaluate on that the prior was computed on."""
        if document_hash(text) in self.documents:
            raise DataError(
                f"the cached prior was computed on a text of --data, which begins {text[:40]!r}: a prior may not know "
                f"what it is evaluated on; give --development of other text, or --prior uniform"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    experts: Annotated[tuple[Expert, ...], Meta(max_length=1024)]
    prior: CachedPrior | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSet:
    """Experts in a folder; changes return a new set, which `save` writes.

    Attributes:
        folder: Holds `set.json` and the checkpoints.
        experts: Its members, in the order in which they were added.
        prior: Cached prior of these members; adding one drops it.
        open_model: Loads the model of a checkpoint's folder; `thinwire.inference.open_experts` gives one.
    """

    folder: Path
    experts: tuple[Expert, ...] = ()
    prior: CachedPrior | None = None
    open_model: Callable[[Path], nn.Module] | None = None

    @classmethod
    def load(cls, path: Path | str, *, open_model: Callable[[Path], nn.Module] | None = None) -> ExpertSet:
        """Read a set: its folder, or the `set.json` in it.

        Raises:
            DataError: The file is missing, malformed, or names what is outside the folder.
            CheckpointError: A checkpoint is missing.
        """
        file = Path(path) if Path(path).name == SET_FILE else Path(path) / SET_FILE
        found = read_json(file, most_bytes=MOST_PLAN_BYTES, command=_ADD)
        try:
            content = msgspec.convert(found, _Content)
        except msgspec.ValidationError as error:
            raise DataError(f"{file} is no set of experts: {error}; make it again with `{_ADD}`") from error
        experts = cls(folder=file.parent, experts=content.experts, prior=content.prior, open_model=open_model)
        for problem in experts._problems():
            raise DataError(f"{file} is no set of experts: {problem}; make it again with `{_ADD}`")
        for expert in experts.experts:
            experts.checkpoint(expert)
        return experts

    @classmethod
    @contextlib.contextmanager
    def changing(cls, folder: Path) -> Iterator[ExpertSet]:
        """Yield the set as it is now, empty where there is none; another command that changes it waits meanwhile.

        Raises:
            ThinwireError: Another command did not end in time.
        """
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            if not wait_for_lock(descriptor, deadline_s=_CHANGE_S):
                raise ThinwireError(
                    f"another command has changed {folder} for {_CHANGE_S:g} s; end or continue it, and try again"
                )
            yield cls.load(folder) if (folder / SET_FILE).exists() else cls(folder=folder)
        finally:
            os.close(descriptor)

    def _problems(self) -> Iterator[str]:
        if len(set(self.names)) < len(self.names):
            yield "two experts have the same name"
        for expert in self.experts:
            # resolved, so that neither `..`, an absolute path nor a link leads out
            place = (self.folder / expert.checkpoint).resolve()
            if self.folder.resolve() not in place.parents:
                yield f"the checkpoint {expert.checkpoint!r} of {expert.name} is outside the set's folder"
        if len({expert.tokenizer_sha256 for expert in self.experts}) > 1:
            yield "its experts have different tokenizers"
        weights = (1.0,) if self.prior is None else self.prior.weights
        if not math.isclose(sum(weights), 1, abs_tol=1e-6) or (self.prior and len(weights) != len(self.names)):
            yield f"its prior has {len(weights)} weights of the sum {sum(weights):g} for {len(self.names)} experts"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(expert.name for expert in self.experts)

    def save(self) -> None:
        """Write `set.json`, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / SET_FILE, msgspec.to_builtins(_Content(experts=self.experts, prior=self.prior)))

    def checkpoint(self, expert: Expert) -> Path:
        """Return the folder of a member's checkpoint; refuse one that holds no finished model."""
        folder = self.folder / expert.checkpoint
        check_finished(folder, remedy=f"copy it again, or make the set again with `{_ADD}`")
        return folder

    def add(self, run: Path, *, name: str, domain: str = "") -> ExpertSet:
        """Copy the finished model of a run into the set's folder, and return the set with it.

        Raises:
            ValueError: The name is taken or malformed, or the tokenizer is another one than the set's.
            CheckpointError: The run has not finished.
        """
        is_name = _NAME.fullmatch(name) is not None and name.lower() != SET_FILE
        if not is_name or name in self.names or (self.folder / name).exists():
            raise refusal("--name is no new name of an expert", got=repr(name[:80]),
                          allowed="1 to 64 letters, digits, '.', '_' and '-' that are not taken",
                          remedy=f"--name {name[:62]}-2" if is_name else "--name python")  # fmt: skip
        check_finished(
            run, remedy=f"thinwire train --resume {run}" if run.exists() else f"no such folder; try ls {run.parent}"
        )
        tokenizer = tokenizer_hash(run)
        for other in self.experts[:1]:
            if tokenizer != other.tokenizer_sha256:
                raise refusal(
                    f"{run} has another tokenizer than the set, so their probabilities are of different tokens",
                    got=f"tokenizer {tokenizer[:12]}", allowed=f"tokenizer {other.tokenizer_sha256[:12]}",
                    remedy=f"thinwire train --init-from {self.folder / other.checkpoint}",
                )  # fmt: skip
        made = Expert(
            name=name, checkpoint=name, domain=(domain or name)[:200], parameters=count_weights(run),
            tokens=trained_tokens(run), tokenizer_sha256=tokenizer,
        )  # fmt: skip
        copy_checkpoint(run, self.folder / name)
        return replace(self, experts=(*self.experts, made), prior=None)

    def weights(self, given: Mapping[str, float] | None = None) -> tuple[float, ...]:
        """Return one weight a member, from those of some by name; all alike by default.

        Raises:
            ValueError: The set is empty, a name is unknown, or a weight is negative, or their sum is not 1.
        """
        if not self.experts:
            raise refusal(f"{self.folder} has no experts", got="an empty set", allowed="one or more",
                          remedy=f"{_ADD} {self.folder} RUN --name NAME")  # fmt: skip
        given = dict.fromkeys(self.names, 1 / len(self.names)) if given is None else given
        for name in given.keys() - set(self.names):
            raise unknown_name("expert", name, self.names)
        total = sum(given.values())
        if not math.isclose(total, 1, abs_tol=1e-6) or min(given.values()) < 0:
            raise refusal("the weights are no shares", got=f"{dict(given)}", allowed="0 or more, with the sum 1",
                          remedy=",".join(f"{name}={1 / len(given):.9g}" for name in given))  # fmt: skip
        return tuple(given.get(name, 0.0) for name in self.names)

    def merge(self, out: Path, *, weights: Sequence[float]) -> None:
        """Write the weighted average of members of one shape as a finished run.

        Args:
            out: New or empty folder; `thinwire train --init-from`, `eval`, `generate` and `export` take it.
            weights: One a member, with the sum 1; members of weight 0 are not read.

        Raises:
            ValueError: The shapes differ, or `out` is not empty.
        """
        from thinwire.ensembles.merge import merge_checkpoints

        chosen = {self.checkpoint(one): weight for one, weight in zip(self.experts, weights, strict=True) if weight}
        merge_checkpoints(chosen, out)

    # A branch is a merge that is trained on: of one member, or by the posterior of the new domain.
    branch = merge

    def ensemble(self, prior: str = "uniform", *, most_members: int | None = None) -> Ensemble:
        """Load the members and combine their probabilities.

        Args:
            prior: `uniform`; `updating`, from the texts so far; `cached`, from development text; or `average`, which is
                uniform and never learns from a text.
            most_members: With a cached prior, load and compute only so many of the most probable members.

        Raises:
            ValueError: No prior has the name, none is cached, or `most_members` does not go with it.
            CheckpointError: A checkpoint cannot be read, or has another tokenizer than the set says.
        """
        if prior not in PRIORS:
            raise unknown_name("--prior", prior, PRIORS)
        if prior == "cached" and self.prior is None:
            raise refusal("no prior is cached for these experts", got="--prior cached",
                          allowed="--development with text that is not evaluated on",
                          remedy="--prior cached --development FILE, or --prior uniform")  # fmt: skip
        weights = self.prior.weights if prior == "cached" and self.prior is not None else self.weights()
        if most_members is not None and (prior != "cached" or not 1 <= most_members <= len(weights)):
            raise refusal("--most-members chooses by a cached prior", got=f"{most_members} with --prior {prior}",
                          allowed=f"1 to {len(weights)}, with --prior cached",
                          remedy="to leave --most-members out")  # fmt: skip
        if self.open_model is None:
            raise refusal("the set cannot load models", got="no open_model", allowed="a function that loads one",
                          remedy="thinwire.inference.open_experts(folder)")  # fmt: skip
        from thinwire.ensembles.ensemble import Ensemble

        kept = sorted(sorted(range(len(weights)), key=lambda index: -weights[index])[:most_members])
        models = {}
        for expert in (self.experts[index] for index in kept):
            folder = self.checkpoint(expert)
            if tokenizer_hash(folder) != expert.tokenizer_sha256:
                raise CheckpointError(
                    f"{folder} has another tokenizer than {SET_FILE} says; make it again with `{_ADD}`"
                )
            models[expert.name] = self.open_model(folder)
        return Ensemble(
            models, prior=[weights[index] for index in kept], is_updating=prior == "updating",
            has_posterior=prior != "average",
        )  # fmt: skip


def document_hash(text: str) -> str:
    """Return what tells documents apart."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
