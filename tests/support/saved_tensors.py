"""What autograd keeps for the backward pass, and the largest tensor that is made."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


def saved_bytes(forward: Callable[[], Any], module: nn.Module) -> int:
    """Bytes of the storages that ``forward()`` keeps for its backward pass, each once, without the module's parameters.

    Its inputs count as well, where they are kept.
    """
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()  # held on to, so that no address is given away again
    for parameter in module.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    del output
    return sum(kept.values())


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operation has made."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = (t.untyped_storage().nbytes() for t in tree_iter(result) if isinstance(t, Tensor))
        self.size = max(self.size, *sizes, 0)
        return result
