#!/bin/bash
# Two ranks on this host. On several hosts, run on each: --nnodes 2 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29500
exec torchrun --nproc-per-node "${RANKS:-2}" examples/launch/train.py "$@"
