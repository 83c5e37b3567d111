"""Membership of elastic runs: joins, leaves, rounds applied by all or none, recovery and deadlines."""

"""Who takes part while replicas come and go, and how a new one gets what the others have."""
