"""Topologies (with whom a replica averages) and the exchanges that run on them."""
