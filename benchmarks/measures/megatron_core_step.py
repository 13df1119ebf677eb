"""A training step of megatron-core's GPT on one GPU, in a process without this project: both packages have its name.

    python megatron_core_step.py '{"shape": {...}, "dtype": "bf16", "steps": 5, "port": 12345}'

Prints its peak memory, then for each line it reads the seconds of so many steps, each as JSON after ``measured: ``.
megatron-core's layers are those of Transformer Engine where it is installed, else its own; its optimizer keeps fp32
master weights and clips gradients.

b batch, s sequence
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path[:] = [folder for folder in sys.path[1:] if not (Path(folder or ".") / "megatron" / "config").is_dir()]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import gpt_layer_specs  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

CLIP, LEARNING_RATE, WEIGHT_DECAY = 1.0, 1e-4, 0.01


def main() -> None:
    """Build, warm up, and take steps whenever a line is read."""
    request = json.loads(sys.argv[1])
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{request['port']}", world_size=1, rank=0)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    step = build(request["shape"], request["dtype"])
    step(), step()
    torch.cuda.synchronize()
    report({"peak": torch.cuda.max_memory_allocated()})
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(request["steps"]):
            step()
        torch.cuda.synchronize()
        report({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu})
    os._exit(0)


def build(shape: dict, dtype: str):
    """What takes one step of a new model over the same micro-batch."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    precision = {dtype: True, "params_dtype": half}
    config = TransformerConfig(
        num_layers=shape["layers"], hidden_size=shape["hidden"], num_attention_heads=shape["heads"],
        hidden_dropout=0.0, attention_dropout=0.0, pipeline_dtype=half, **precision,
    )  # fmt: skip
    model = GPTModel(
        config, layer_spec(), vocab_size=shape["vocabulary"], max_sequence_length=shape["sequence"],
        share_embeddings_and_output_weights=True, position_embedding_type="learned_absolute",
    )  # fmt: skip
    plain_gradients = DistributedDataParallelConfig(grad_reduce_in_fp32=False, use_distributed_optimizer=False)
    model = DistributedDataParallel(config, plain_gradients, Float16Module(config, model.cuda()))
    settings = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "clip_grad": CLIP, "initial_loss_scale": 65536.0}
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", **settings, **precision), [model])
    size = shape["batch"], shape["sequence"]
    tokens, labels = (torch.randint(shape["vocabulary"], size, device="cuda") for _ in range(2))  # [b, s]
    positions = torch.arange(shape["sequence"], device="cuda").expand(size)

    def step() -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(tokens, positions, None, labels=labels).mean()
        optimizer.scale_loss(loss).backward()
        finalize_model_grads([model])
        optimizer.step()

    return step


def layer_spec():
    """Transformer Engine's layers where it is installed, else megatron-core's own."""
    try:
        import transformer_engine  # noqa: F401
    except Exception:  # a Transformer Engine that is broken is as good as none
        return gpt_layer_specs.get_gpt_layer_local_spec()
    return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()


def report(found: dict) -> None:
    """For the process that started this one."""
    print("measured: " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
