# ruff: noqa
"""python -m tests.zz_ep layouts columns"""

import sys
import time
from functools import partial

from lightning_parallel import *
from tests.ranks import POOL
from tests.techniques.tensor_layouts import check, hybrid

L = {
    "ep2": (2, partial(ExpertParallelStrategy, 2), 2),
    "ep2pairs": (2, partial(ExpertParallelStrategy, 2, send_once=False), 2),
    "ep4": (4, partial(ExpertParallelStrategy, 4), 4),
    "ep2dp4": (4, hybrid(DataParallel(4), ExpertParallel(2)), 4),
    "z1": (2, hybrid(Zero(2, stage=1), ExpertParallel(2)), 2),
    "z2": (4, hybrid(Zero(4, stage=2), ExpertParallel(2)), 4),
    "z3": (2, hybrid(Zero(2, stage=3), ExpertParallel(2)), 2),
    "z34": (4, hybrid(Zero(4, stage=3), ExpertParallel(2)), 4),
    "hsdp": (4, hybrid(Zero(2, stage=3, replicate=2), ExpertParallel(2)), 4),
    "hsdp1": (4, hybrid(Zero(2, stage=1, replicate=2), ExpertParallel(2)), 4),
    "hsdp4": (4, hybrid(Zero(2, stage=3, replicate=2), ExpertParallel(4)), 4),
    "tp": (4, hybrid(DataParallel(2), TensorParallel(2), ExpertParallel(2)), 2),
    "tpw": (4, hybrid(DataParallel(2), TensorParallel(2, sequence_parallel=False), ExpertParallel(2)), 2),
    "pp": (4, hybrid(DataParallel(2), PipelineParallel(2, microbatches=2), ExpertParallel(2)), 2),
    "ppzb": (4, hybrid(DataParallel(2), PipelineParallel(2, microbatches=2, schedule="zbv"), ExpertParallel(2)), 2),
    "ppz3": (4, hybrid(Zero(2), PipelineParallel(2, microbatches=2), ExpertParallel(2)), 2),
    "cp": (4, hybrid(DataParallel(2), ContextParallel(2), ExpertParallel(2)), 2),
    "cpz": (2, hybrid(Zero(1), ContextParallel(2), ExpertParallel(2)), 1),
    "cp4": (4, hybrid(Zero(2), ContextParallel(2), ExpertParallel(4)), 2),
    "all": (8, hybrid(DataParallel(2), PipelineParallel(2, microbatches=2), TensorParallel(2), ExpertParallel(2)), 2),
    "ac": (2, hybrid(DataParallel(2), ActivationCheckpoint(), ExpertParallel(2)), 2),
    "co": (2, hybrid(DataParallel(2), Compile(backend="aot_eager"), ExpertParallel(2)), 2),
    "acz": (2, hybrid(Zero(2), ActivationCheckpoint(), ExpertParallel(2)), 2),
}
if __name__ == "__main__":
    POOL.warm_up()
    cols = sys.argv[2].split(",")
    for l in sys.argv[1].split(","):
        for c in cols:
            t = time.time()
            c, *o = c.split(":")
            try:
                check(
                    c,
                    *L[l],
                    max_epochs=1,
                    precision="64-true",
                    rtol=1e-6 if "_experts" not in c and "moe" not in c else 1e-9,
                    model={} if "_experts" in c or c.startswith("moe") else {"num_hidden_layers": 2, "experts_implementation": "eager"},
                )
                print(l, c, "OK", round(time.time() - t, 1), flush=True)
            except BaseException as e:
                lines = str(e).splitlines()
                print(*lines[-25:], sep="\n") if not any("Error" in x for x in lines) else 0
                k = [i for i, x in enumerate(lines) if "Error" in x][:3]
                print(l, c, "FAIL", *["\n".join(lines[max(0, i - 8) : i + 2]) for i in k], flush=True)
