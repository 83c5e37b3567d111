"""Who takes part in an elastic run: joins, leaves, rounds that all or none apply, recovery, deadlines."""

"""Who takes part while replicas come and go, and how a new one gets what the others have."""
