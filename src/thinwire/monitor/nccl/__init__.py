"""Readers and detectors for NCCL Inspector files and RAS answers."""
