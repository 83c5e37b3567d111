"""`thinwire bench wire` with other programs than thinwire among the contenders.

    sudo python benchmarks/wire/bench.py --rate 5mbit     # all; options are those of `thinwire bench wire`
    sudo python benchmarks/wire/bench.py --contender ddp --contender diloco

`ddp` and `ddp-powersgd` are PyTorch's DistributedDataParallel, `torchft-diloco` is torchft's DiLoCo, which must be
installed. `references.py` says how they are matched to thinwire's methods.
"""

from __future__ import annotations

import importlib.util
import sys

from references import REFERENCES

from thinwire.cli import bench, processes
from thinwire.wire_benchmark.contenders import CONTENDERS

if __name__ == "__main__":
    has_torchft = importlib.util.find_spec("torchft") is not None
    CONTENDERS.update({name: one for name, one in REFERENCES.items() if has_torchft or name != "torchft-diloco"})
    if sys.argv[1:2] == ["bench-host"]:
        processes.main("bench-host", sys.argv[2:])
    sys.exit(bench.main(["wire", *sys.argv[1:]]))
