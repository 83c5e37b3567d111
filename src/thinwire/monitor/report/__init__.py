"""Reports of runs: figures, and self-contained pages of one run or of a comparison."""
