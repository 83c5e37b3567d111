#!/bin/bash
# Two ranks on this host. On several hosts, add: --hostfile HOSTS -x MASTER_ADDR=10.0.0.1 -x MASTER_PORT=29500
# where 10.0.0.1 is an address of the first host, which runs rank 0.
exec mpirun --np "${RANKS:-2}" --bind-to none -x OMP_NUM_THREADS=1 python examples/launch/train.py "$@"
