"""Planner: measured machines and wires, and what can be trained on them, before training."""
