"""Faults in the steps of an elastic replica, by environment variables.

CHAOS_STEP_S: seconds that each step takes longer, so that many replicas fit on a core.
CHAOS_NAN: a folder; as long as it holds a file named by a replica's process id, that one's gradients are NaN.
"""

import os
import sys
import time
from pathlib import Path

_REPLICAS = {"thinwire.cli.elastic_worker", "thinwire.cli.elastic_spare"}

if _REPLICAS.intersection(sys.orig_argv) and {"CHAOS_STEP_S", "CHAOS_NAN"} & set(os.environ):
    from thinwire.training.elastic.loop import ElasticTraining

    _plain_step, _clip = ElasticTraining._plain_step, ElasticTraining._clip

    def _slow_step(self: ElasticTraining, *arguments: object) -> object:
        time.sleep(float(os.environ.get("CHAOS_STEP_S", "0")))
        return _plain_step(self, *arguments)

    def _spoilt_clip(self: ElasticTraining) -> None:
        _clip(self)
        folder = os.environ.get("CHAOS_NAN")
        if folder and (Path(folder) / str(os.getpid())).exists():
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(float("nan"))

    ElasticTraining._plain_step, ElasticTraining._clip = _slow_step, _spoilt_clip
