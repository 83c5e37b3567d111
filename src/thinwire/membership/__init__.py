"""Who takes part in an elastic run: joins, leaves, rounds that all or none apply, recovery, deadlines."""
