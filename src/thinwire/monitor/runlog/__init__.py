"""Run log: record schema, writers, tailers and readers of the files in a run folder."""
