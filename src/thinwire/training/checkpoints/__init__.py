"""Checkpoints: static and elastic states, where they are kept and when they are written."""
