"""Train one model over thin wires."""
