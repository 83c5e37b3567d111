"""Use of a trained model: loading it from its run, evaluation, and export to transformers."""
