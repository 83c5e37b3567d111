"""Detectors: from records of a job to findings."""
