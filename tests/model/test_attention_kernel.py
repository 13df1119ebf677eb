"""Which kernel attention gets: devices and configurations in, name and reason out."""

from dataclasses import replace

import pytest
import torch
from torch.torch_version import TorchVersion

from megatron.config import ModelConfig
from megatron.model.architectures import BERT, GPT2, architecture_of
from megatron.ops.choices import DeviceFacts, attention_kernel, computed_scores
from megatron.ops.packed_attention import attend_in_blocks

MODEL = ModelConfig(
    num_layers=2, hidden_size=1024, num_attention_heads=16, attention_dropout=0.0, dtype="bf16", architecture=GPT2.name
)
CPU, V100, A100, H100, NEW = (
    DeviceFacts("cpu"), DeviceFacts("cuda", (7, 0)), DeviceFacts("cuda", (8, 0)), DeviceFacts("cuda", (9, 0)),
    DeviceFacts("cuda"),
)  # fmt: skip
OLD_TORCH = H100._replace(has_varlen=False)
EMULATED = DeviceFacts("cuda", (9, 0), has_fused_kernels=False)
S = 4096
FP32, DROPOUT, DOCUMENTS = {"dtype": "fp32"}, {"attention_dropout": 0.1}, {"reset_attention_mask": True}
CHOICES = [
    ({}, H100, "flash", "none", "flash (bf16, head dim 64, causal)"),
    ({}, A100, "flash", "none", "flash (bf16, head dim 64, causal)"),
    ({}, NEW, "flash", "none", "flash (bf16, head dim 64, causal): on compute capability 8.0 or later"),
    ({"dtype": "fp16"}, V100, "memory-efficient", "none", "needs compute capability 8.0, and this is 7.0"),
    ({}, V100, "plain", "none", "the memory-efficient kernel has no bf16 there"),
    (FP32, H100, "memory-efficient", "none", "fp32 has no flash kernel on CUDA"),
    ({**FP32, "num_attention_heads": 512, "hidden_size": 1536}, H100, "plain", "none", "a multiple of 4"),
    ({"num_attention_heads": 4, "hidden_size": 2048}, H100, "memory-efficient", "none", "no head dim 512"),
    ({"num_attention_heads": 4}, DeviceFacts("cuda", (8, 9)), "memory-efficient", "none", "capability 8.9"),
    (DROPOUT, H100, "flash", "none", "flash (bf16, head dim 64, causal)"),
    ({}, EMULATED, "plain", "none", "this torch has no fused kernels for this device"),
    ({"attention_softmax_in_fp32": True}, H100, "plain", "none", "--attention-softmax-in-fp32 needs the scores"),
    ({"apply_query_key_layer_scaling": True}, CPU, "plain", "none", "--apply-query-key-layer-scaling needs"),
    (FP32, CPU, "flash", "none", "flash (fp32, head dim 64, causal)"),
    (DROPOUT, CPU, "plain", "none", "torch's fused kernel for CPUs has no dropout"),
    ({}, DeviceFacts("xpu"), "torch's", "none", "torch chooses it on xpu"),
    (DOCUMENTS, H100, "flash", "varlen", "flash (bf16, head dim 64, causal, separate documents, by varlen)"),
    ({"pre_tokens": 99}, A100, "flash", "varlen", "flash (bf16, head dim 64, causal, window of 99 tokens, by varlen)"),
    ({"pre_tokens": S - 1}, A100, "flash", "none", "flash (bf16, head dim 64, causal)"),
    (DOCUMENTS | DROPOUT, H100, "flash", "blocks", "varlen_attn has no dropout"),
    (DOCUMENTS | {"hidden_size": 16 * 36}, H100, "flash", "blocks", "varlen_attn needs a head dim"),
    (DOCUMENTS, OLD_TORCH, "flash", "blocks", "separate documents, by blocks): varlen_attn needs torch 2.11"),
    ({"architecture": BERT.name}, OLD_TORCH, "flash", "mask", "by mask): varlen_attn needs torch 2.11"),
    (DOCUMENTS | {"dtype": "fp16"}, V100, "memory-efficient", "blocks", "separate documents, by blocks"),
    (DOCUMENTS | FP32, CPU, "flash", "blocks", "separate documents, by blocks"),
    (DOCUMENTS, EMULATED, "plain", "blocks", "this torch has no fused kernels"),
    ({"architecture": BERT.name}, H100, "flash", "varlen", "flash (bf16, head dim 64, padding masked, by varlen)"),
    ({"architecture": BERT.name} | DROPOUT, H100, "flash", "mask", "by mask): varlen_attn has no dropout"),
    ({"architecture": BERT.name} | DROPOUT, CPU, "plain", "blocks", "padding masked, by blocks"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "device", "name", "limits", "text"), CHOICES)
def test_the_kernel_follows_from_model_and_device(changes, device, name, limits, text) -> None:
    model = replace(MODEL, **changes)
    kernel = attention_kernel(model, device, causal=architecture_of(model).is_causal, seq_length=S)
    assert (kernel.name, kernel.limits) == (name, limits)
    assert text in kernel.summary and kernel.summary.startswith(name)
    assert kernel.keeps_scores == (name == "plain")


def test_scores_of_a_window_are_those_of_its_chunks() -> None:
    """As ``attend_in_blocks`` computes them, and of the whole sequence without a window."""
    for s, window in ((100, 9), (700, 0), (700, 200), (700, 600), (1300, 600), (700, 699)):
        model = replace(MODEL, pre_tokens=window, attention_softmax_in_fp32=True)
        heads = [torch.zeros(1, 1, s, 8)] * 3
        products = []

        def core(query, key, value, mask, products=products):
            products.append(query.size(2) * key.size(2))
            return query

        attend_in_blocks(*heads, None, window, core)
        assert computed_scores(model, attention_kernel(model, CPU, causal=True, seq_length=s), s) == sum(products)
    assert sum(products) == s * s
    long = replace(MODEL, pre_tokens=1000, attention_softmax_in_fp32=True)
    scores = computed_scores(long, attention_kernel(long, CPU, causal=True, seq_length=10**12), 10**12)
    assert scores == 512 * (512 + 512 + 1512 * (10**12 // 512 - 2) + 512)


def test_the_facts_of_a_device(monkeypatch) -> None:
    from megatron.ops.attention import device_facts

    assert device_facts(torch.device("cpu")) == CPU
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    facts = device_facts.__wrapped__
    assert facts(torch.device("cuda", 0)) == EMULATED, "this torch was built without CUDA"
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert facts(torch.device("cuda", 0)) == H100
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.8.0a0+5228986c39.nv25.06"))  # as in docker/Dockerfile
    assert facts(torch.device("cuda", 0)) == OLD_TORCH
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert facts(torch.device("cuda", 0)) == DeviceFacts("rocm")
