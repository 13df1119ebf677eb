"""The device that this process computes on, once torch is there to ask."""

from deepspeed.accelerator import get_accelerator

from megatron.errors import ResourceError


def check_device(device: str, local_rank: int) -> None:
    """See that torch finds a ``device`` for the process ``local_rank`` of this host.

    Raises:
        ResourceError: it does not.
    """
    accelerator = get_accelerator()
    found = accelerator.device_count() if accelerator.is_available() else 0
    if device != "cpu" and local_rank >= found:
        raise ResourceError(
            f"process {local_rank} of this host has no device: torch finds {found} of {device}; start fewer "
            "processes, install a torch that knows the device, or set DS_ACCELERATOR=cpu to train on the CPU"
        )
