"""Everything that `thinwire train` runs: options, launch, the loop, checkpoints and elastic replicas."""
