"""Summary card of a method, for lists and pages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """A method's card. M is the number of replicas, H the sync interval.

    Attributes:
        paper: Where it comes from, such as `"arXiv 2311.08105"`.
        exchanged: What is sent, and when.
        bits: Payload bits that a replica sends a parameter and inner step.
        memory: Copies of the parameters that it keeps beside the model and the inner optimizer's state.
        restrictions: What it does not go with.
    """

    paper: str
    exchanged: str
    bits: str
    memory: str
    restrictions: str = "none"
