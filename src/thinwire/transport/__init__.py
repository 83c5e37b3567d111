"""How bytes move: point-to-point messages between replicas.

`connect()` joins real processes; `LoopbackWorld` holds several replicas in one process, deterministically;
`RecordingTransport` counts every byte; `FaultyTransport` breaks things on purpose.
"""
