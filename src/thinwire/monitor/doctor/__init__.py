"""Checks before a run: `thinwire doctor`."""
