"""Expert parallelism in DeepSpeed's engines: which parameters are of experts."""

from collections.abc import Iterator
from contextlib import contextmanager

import deepspeed.runtime.engine
from deepspeed.utils import groups
from torch import nn

from megatron.engines.engine import replaced
from megatron.parallel.expert import group_name
from megatron.parallel.layout import ParallelLayout


@contextmanager
def experts_recognized(layer: type[nn.Module], layout: ParallelLayout) -> Iterator[None]:
    """While inside, engines that are made treat modules of the class ``layer`` as mixtures of experts.

    The gradients of marked parameters are then reduced, and partitioned by ZeRO, over the ranks that hold the same
    experts, and are divided by the whole data-parallel size, as all gradients are.

    DeepSpeed: runtime/engine.py recognizes its own class alone, which drops tokens by the batch of each rank and fails
    with tensor parallelism on gloo; utils/groups.py forms groups that know no pipeline stages.
    Test: tests/training/test_moe_layouts_agree.py. Remove when groups can be passed, and layers can be marked.
    """
    if layout.expert_group is None or layout.expert_data_group is None:
        yield
        return
    name = group_name(layout.expert_group.size())
    for known, group in (
        (groups._EXPERT_PARALLEL_GROUP, layout.expert_group),
        (groups._EXPERT_DATA_PARALLEL_GROUP, layout.expert_data_group),
    ):
        known.clear()
        known[name] = group
    with replaced(deepspeed.runtime.engine, MoE=layer):
        yield
