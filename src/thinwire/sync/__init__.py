"""Synchronisation: fragments, schedules, outer optimizers and the engine that drives them."""
