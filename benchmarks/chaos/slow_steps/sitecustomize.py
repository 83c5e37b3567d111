"""Makes each step of an elastic replica take CHAOS_STEP_S longer, so that many fit on a core."""

import os
import sys
import time

_REPLICAS = {"thinwire.cli.elastic_worker", "thinwire.cli.elastic_spare"}

if _REPLICAS.intersection(sys.orig_argv) and "CHAOS_STEP_S" in os.environ:
    from thinwire.training.elastic.loop import ElasticTraining

    _plain_step = ElasticTraining._plain_step

    def _slow_step(self: ElasticTraining, *arguments: object) -> object:
        time.sleep(float(os.environ["CHAOS_STEP_S"]))
        return _plain_step(self, *arguments)

    ElasticTraining._plain_step = _slow_step
