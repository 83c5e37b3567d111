"""Recorders: flight records of ranks, connections and torch.distributed calls."""
