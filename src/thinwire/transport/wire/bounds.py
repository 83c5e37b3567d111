"""Bounds on what a peer may cost: numbers that both ends of a connection know."""

from __future__ import annotations

# What a receiver keeps of messages that it has posted no receive for yet, for each peer.
EARLY_MESSAGES = 1024
EARLY_BYTES = 1 << 25
# Asks of one peer that wait for their answers.
MOST_WANTS = 4096
