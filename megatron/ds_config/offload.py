"""Rules about what a DeepSpeed config may move off the device."""

from megatron.config import RunConfig
from megatron.ds_config.file import ConfigFile


def offload_problems(run: RunConfig, file: ConfigFile) -> list[str]:
    """A message for each offload in a config file that DeepSpeed would pass over in silence, or stumble over."""
    problems = []
    for name in ("offload_param", "offload_optimizer"):
        offload = file.tree.get("zero_optimization", {}).get(name, {})
        device = offload.get("device", "none")
        where = f'zero_optimization.{name}.device "{device}" in {file.path}'
        if run.zero.zero_stage < 3 and (device == "nvme" or name == "offload_param" and device != "none"):
            problems.append(f"{where} works at ZeRO 3 only: use --zero-stage 3, or remove it")
        if device == "nvme" and not offload.get("nvme_path"):
            problems.append(f'{where} needs "nvme_path", a folder on the NVMe device: add it')
    return problems
