"""Everything that `thinwire train` runs: models, corpora, the loop, checkpoints and the report."""
