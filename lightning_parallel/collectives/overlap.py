"""Products that overlap with the collective before or after them, by a pass of torch's compiler."""

from __future__ import annotations

import torch.distributed as dist


def overlap_compiled_products(group: dist.ProcessGroup) -> None:
    """Lets inductor split products of compiled graphs in parts that start as they arrive, or leave as they are made.

    On GPUs that reach each other's memory. Source: S. Wang et al., ASPLOS 2023; `torch.ops.symm_mem`.
    """
    if group.name() == "nccl":
        import torch._inductor.config
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(group.group_name)
        torch._inductor.config._micro_pipeline_tp = True
