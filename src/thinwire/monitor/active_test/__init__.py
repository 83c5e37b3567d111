"""Active tests of the links of a job: `thinwire diagnose test`."""
