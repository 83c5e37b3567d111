"""Recorders of a rank while it runs: its rounds, calls, connections, threads and metrics, into the run log."""
