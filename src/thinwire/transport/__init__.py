"""Transports: point-to-point messages between replicas.

`connect()` joins real processes: over a process group where hosts trust each other, or over authenticated and encrypted
connections (`wire`) where a secret says who belongs together. `LoopbackWorld` holds several replicas in one process,
deterministically; `RecordingTransport` counts every byte; `FaultyTransport` breaks things on purpose.
"""
