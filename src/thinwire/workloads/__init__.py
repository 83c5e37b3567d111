"""Workloads of `thinwire train`: model, data, loss and numbers of a subject as one value; language is the first."""
