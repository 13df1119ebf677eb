"""A backend of torch.distributed for processes of one host on the CPU: gloo, with collectives through shared memory.

gloo sends through sockets. Here each rank of a group writes into memory that all of them have mapped, and reads what
the others have written. All-reduce, reduce-scatter and all-gather of a tensor do so; everything else is left to gloo,
as is a group whose ranks do not all see each other's processes.
"""

from megatron.parallel.shared_memory.memory import NAME, SWITCH
from megatron.parallel.shared_memory.process_group import SharedMemoryGroup, backend_of_groups

__all__ = ["NAME", "SWITCH", "SharedMemoryGroup", "backend_of_groups"]
