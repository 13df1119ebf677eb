"""The rules about ZeRO and offload."""

from megatron.config import RunConfig


def zero_with_pipeline(run: RunConfig) -> str | None:
    stage, stages = run.zero.zero_stage, run.parallel.pipe_parallel_size
    if run.parallel.uses_pipeline and stage >= 2:
        return (
            f"--zero-stage {stage} cannot go with --pipe-parallel-size {stages}: the pipeline accumulates gradients "
            "over micro-batches, and would have to reduce its shards for each of them; use --zero-stage 1 or "
            "--pipe-parallel-size 0"
        )
    return None


def offloaded_optimizer(run: RunConfig) -> str | None:
    device = run.zero.offload_optimizer
    if device == "cpu" and run.zero.zero_stage == 0:
        return f"--offload-optimizer {device} needs ZeRO, which partitions what is offloaded: add --zero-stage 1"
    return None


def optimizer_on_nvme(run: RunConfig) -> str | None:
    if run.zero.offload_optimizer == "nvme" and run.zero.zero_stage < 3:
        return "--offload-optimizer nvme works at ZeRO 3 only: use --zero-stage 3, or --offload-optimizer cpu"
    return None


def offloaded_param(run: RunConfig) -> str | None:
    device = run.zero.offload_param
    if device != "none" and run.zero.zero_stage < 3:
        return f"--offload-param {device} works at ZeRO 3 only: use --zero-stage 3, or remove it"
    return None


def nvme_path(run: RunConfig) -> str | None:
    if run.zero.uses_nvme and run.zero.nvme_path is None:
        return "what is offloaded to nvme needs a folder on that device: add --nvme-path"
    if run.zero.nvme_path is not None and not run.zero.uses_nvme:
        return (
            "--nvme-path has no effect without --offload-optimizer nvme or --offload-param nvme: add one, or remove it"
        )
    return None


def offload_settings(run: RunConfig) -> str | None:
    zero = run.zero
    if zero.cpu_torch_adam and not zero.offloads_optimizer:
        return "--cpu-torch-adam has no effect without --offload-optimizer: add it, or remove the former"
    if not zero.offload_pin_memory and not zero.offloads_optimizer and zero.offload_param == "none":
        return "--no-offload-pin-memory has no effect without --offload-optimizer or --offload-param: remove it"
    return None


def overlap_comm(run: RunConfig) -> str | None:
    if run.zero.zero_overlap_comm and run.parallel.uses_pipeline:
        return (
            "--zero-overlap-comm does not work in a pipeline, which reduces gradients behind its last micro-batch: "
            "remove it, or use --pipe-parallel-size 0"
        )
    if run.zero.zero_overlap_comm and run.zero.zero_stage == 0:
        return "--zero-overlap-comm has no effect without ZeRO: add --zero-stage 1, or remove it"
    return None


def round_robin_gradients(run: RunConfig) -> str | None:
    if run.zero.zero_round_robin_gradients and run.zero.zero_stage not in (1, 2):
        return (
            f"--zero-round-robin-gradients has no effect at --zero-stage {run.zero.zero_stage}: use --zero-stage 1 or "
            "2, or remove it"
        )
    return None
