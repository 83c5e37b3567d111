"""Run log: the files in a run's folder, their schema, writers and readers.

- `records`: the schema, one dataclass a kind of record of a rank.
- `writer`: appends whole lines; rotation, bounds and behaviour on a full disk.
- `tailer`: reads what was appended to a growing file, in bounded pieces.
- `reader`: untrusted lines to checked records; refused lines are counted.
- `run_folder`: a whole folder, as a run with its metrics or as records for diagnosis.
- `flight_recorder`, `nccl_inspector`, `nccl_ras`: readers of what torch and NCCL write.
- `plain_pickle`: a reader of pickles that hold data alone, which runs nothing.
- `forwarding`: records of one host, sent to another in bounded pieces.
- `attempts`, `downtime`: starts of a resumed run, and what faults cost it.
- `run_numbers`: what a run's tables show, and how it is counted.
- `path_limits`: limits that findings set, for the ranks to follow.
- `run_identity`: which run a folder holds.
"""
