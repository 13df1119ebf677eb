"""Command lines: every classic argument, every alias, every flag with its effect."""

import re
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from support.command_lines import CPU, CUDA, SMALL, complaints, parse, read

from megatron.config import flag_fields
from megatron.config.command_line import parse_run, read_run
from megatron.config.command_line.classic_flags import outcome_of
from megatron.config.command_line.flags import read_flags
from megatron.config.command_line.parser import build_parser
from megatron.config.command_line.values import REFUSED_VALUES
from megatron.config.data import Part
from megatron.config.errors import ConfigError
from megatron.config.fields import flag_name
from megatron.config.presets import PRESETS
from megatron.model.architectures import ARCHITECTURES, BERT, GPT2
from megatron.model.spec import ArchitectureSpec
from megatron.parallel.pipeline.partition import layers_per_chunk

CLASSIC = """
num-layers num-unique-layers param-sharing-style hidden-size num-attention-heads max-position-embeddings
make-vocab-size-divisible-by layernorm-epsilon apply-residual-connection-post-layernorm openai-gelu onnx-safe
attention-dropout hidden-dropout weight-decay clip-grad adam-beta1 adam-beta2 adam-eps
batch-size gas checkpoint-activations distribute-checkpointed-activations checkpoint-num-layers train-iters
log-interval exit-interval tensorboard-dir scaled-upper-triang-masked-softmax-fusion scaled-masked-softmax-fusion
bias-gelu-fusion bias-dropout-fusion cpu-optimizer cpu_torch_adam
seed init-method-std
lr lr-decay-style lr-decay-iters min-lr warmup override-lr-scheduler use-checkpoint-lr-scheduler
save save-interval no-save-optim no-save-rng load no-load-optim no-load-rng finetune
fp16 apply-query-key-layer-scaling attention-softmax-in-fp32 fp32-allreduce hysteresis loss-scale loss-scale-window
min-scale fp16-lm-cross-entropy
model-parallel-size pipe-parallel-size distributed-backend DDP-impl local_rank lazy-mpu-init use-cpu-initialization
eval-iters eval-interval
data-path split vocab-file merge-file seq-length mask-prob short-seq-prob mmap-warmup num-workers tokenizer-type
data-impl reset-position-ids reset-attention-mask eod-mask-loss
adlr-autoresume adlr-autoresume-interval
ict-head-size ict-load bert-load titles-data-path query-in-block-prob use-one-sent-docs report-topk-accuracies
faiss-use-gpu block-data-path indexer-batch-size indexer-log-interval
zero-stage zero-reduce-scatter zero-contigious-gradients zero-reduce-bucket-size zero-allgather-bucket-size
deepspeed-activation-checkpointing partition-activations contigious-checkpointing checkpoint-in-cpu
synchronize-each-layer profile-backward
""".split()

YARN = "--position-embedding-type yarn --yarn-rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16"

# A flag with its value, and the flags it needs.
EFFECTS: dict[str, tuple[str, str]] = {
    "num_layers": ("--num-layers 8", ""),
    "hidden_size": ("--hidden-size 128", ""),
    "num_attention_heads": ("--num-attention-heads 8", ""),
    "ffn_hidden_size": ("--ffn-hidden-size 64", ""),
    "max_position_embeddings": ("--max-position-embeddings 64", ""),
    "make_vocab_size_divisible_by": ("--make-vocab-size-divisible-by 8", ""),
    "layernorm_epsilon": ("--layernorm-epsilon 1e-6", ""),
    "compile": ("--compile", ""),
    "gradient_accumulation_fusion": ("--gradient-accumulation-fusion", "--gas 2"),
    "fused_kernels": ("--fused-kernels torch", ""),
    "attention_dropout": ("--attention-dropout 0", ""),
    "hidden_dropout": ("--hidden-dropout 0", ""),
    "init_method_std": ("--init-method-std 0.01", ""),
    "shape_order": ("--shape-order SBH", ""),
    "pre_tokens": ("--pre-tokens 8", ""),
    "watchdog_minutes": ("--watchdog-minutes 5", ""),
    "exit_duration_in_mins": ("--exit-duration-in-mins 5", ""),
    "max_consecutive_bad_steps": ("--max-consecutive-bad-steps 5", ""),
    "rewind_on_spike": ("--rewind-on-spike", "--save out --save-interval 5"),
    "spike_factor": ("--spike-factor 3", "--rewind-on-spike --save out --save-interval 5"),
    "next_tokens": ("--next-tokens 0", ""),
    "fp32_residual_connection": ("--fp32-residual-connection", "--bf16"),
    "fp16_lm_cross_entropy": ("--fp16-lm-cross-entropy", "--bf16"),
    "model_parallel_size": ("--model-parallel-size 2", ""),
    "pipe_parallel_size": ("--pipe-parallel-size 2", ""),
    "world_size": ("--world-size 2", "--explain"),
    "ds_sequence_parallel_size": ("--ds-sequence-parallel-size 2", ""),
    "context_parallel_size": ("--context-parallel-size 2", ""),
    "cp_comm_type": ("--cp-comm-type all_gather", "--context-parallel-size 2"),
    "hierarchical_context_parallel_sizes": (
        "--hierarchical-context-parallel-sizes 2 1",
        "--context-parallel-size 2 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 1 2",
    ),
    "sequence_parallel": ("--sequence-parallel", "--model-parallel-size 2"),
    "pipeline_partition": ("--pipeline-partition 1,3", "--pipe-parallel-size 2"),
    "pipeline_schedule": ("--pipeline-schedule dualpipev", "--pipe-parallel-size 2 --gas 4"),
    "num_layers_per_virtual_pipeline_stage": (
        "--num-layers-per-virtual-pipeline-stage 1",
        "--pipe-parallel-size 2 --gas 4",
    ),
    "num_virtual_stages_per_pipeline_rank": (
        "--num-virtual-stages-per-pipeline-rank 2",
        "--pipe-parallel-size 2 --gas 4",
    ),
    "distributed_backend": ("--distributed-backend gloo", "gpu"),
    "distributed_timeout_minutes": ("--distributed-timeout-minutes 5", ""),
    "local_rank": ("--local_rank=1", ""),
    "fp16": ("--fp16", "gpu"),
    "loss_scale": ("--loss-scale 128", "gpu --fp16"),
    "initial_loss_scale": ("--initial-loss-scale 4096", "gpu --fp16"),
    "loss_scale_window": ("--loss-scale-window 10", "gpu --fp16"),
    "hysteresis": ("--hysteresis 1", "gpu --fp16"),
    "min_scale": ("--min-scale 2", "gpu --fp16"),
    "zero_stage": ("--zero-stage 1", ""),
    "zero_reduce_scatter": ("--no-zero-reduce-scatter", "--zero-stage 1"),
    "zero_contiguous_gradients": ("--no-zero-contigious-gradients", "--zero-stage 1"),
    "zero_reduce_bucket_size": ("--zero-reduce-bucket-size 5e6", "--zero-stage 1"),
    "zero_allgather_bucket_size": ("--zero-allgather-bucket-size 5000000", "--zero-stage 1"),
    "zero_overlap_comm": ("--zero-overlap-comm", "--zero-stage 1"),
    "zero_round_robin_gradients": ("--zero-round-robin-gradients", "--zero-stage 1"),
    "zero_coalesce_grad_reduction": ("--zero-coalesce-grad-reduction", "--zero-stage 2"),
    "grad_accum_dtype": ("--grad-accum-dtype fp32", "--bf16"),
    "offload_optimizer": ("--offload-optimizer cpu", "--zero-stage 1"),
    "offload_param": ("--offload-param cpu", "--zero-stage 3"),
    "nvme_path": ("--nvme-path b", "--nvme-path a --zero-stage 3 --offload-param nvme"),
    "offload_pin_memory": ("--no-offload-pin-memory", "--zero-stage 3 --offload-param cpu"),
    "cpu_torch_adam": ("--cpu_torch_adam", "--zero-stage 1 --cpu-optimizer"),
    "recompute_granularity": ("--recompute-granularity selective", "--checkpoint-activations"),
    "checkpoint_num_layers": ("--checkpoint-num-layers 2", "--checkpoint-activations"),
    "partition_activations": ("--partition-activations", "--checkpoint-activations"),
    "contiguous_checkpointing": ("--contigious-checkpointing", "--checkpoint-activations --partition-activations"),
    "checkpoint_in_cpu": ("--checkpoint-in-cpu", "--checkpoint-activations --partition-activations"),
    "synchronize_each_layer": ("--synchronize-each-layer", "--checkpoint-activations"),
    "profile_backward": ("--profile-backward", "--checkpoint-activations"),
    "model_preset": ("--model-preset gpt2", ""),
    "num_query_groups": ("--num-query-groups 2", ""),
    "group_query_attention": ("--group-query-attention", "--num-query-groups 2"),
    "kv_channels": ("--kv-channels 8", ""),
    "normalization": ("--normalization RMSNorm", ""),
    "position_embedding_type": ("--position-embedding-type rope", ""),
    "rotary_base": ("--rotary-base 500000", "--position-embedding-type rope"),
    "rotary_percent": ("--rotary-percent 0.5", "--position-embedding-type rope"),
    "use_rope_scaling": ("--use-rope-scaling", "--position-embedding-type rope"),
    "rope_scaling_factor": ("--rope-scaling-factor 4", "--position-embedding-type rope --use-rope-scaling"),
    "rotary_seq_len_interpolation_factor": (
        "--rotary-seq-len-interpolation-factor 2",
        "--position-embedding-type rope",
    ),
    "yarn_rotary_scaling_factor": ("--yarn-rotary-scaling-factor 8", YARN),
    "yarn_original_max_position_embeddings": ("--yarn-original-max-position-embeddings 32", YARN),
    "yarn_beta_fast": ("--yarn-beta-fast 16", YARN),
    "yarn_beta_slow": ("--yarn-beta-slow 2", YARN),
    "yarn_mscale": ("--yarn-mscale 0.7", YARN),
    "yarn_mscale_all_dim": ("--yarn-mscale-all-dim 1", YARN),
    "yarn_correction_range_round_to_int": ("--no-yarn-correction-range-round-to-int", YARN),
    "flex_attention": ("--flex-attention", "gpu--attention-dropout 0"),
    "tiled_mlp": ("--tiled-mlp", ""),
    "tiled_mlp_num_shards": ("--tiled-mlp-num-shards 3", "--tiled-mlp"),
    "optimizer": ("--optimizer lion", ""),
    "sgd_momentum": ("--sgd-momentum 0.8", "--optimizer sgd"),
    "muon_momentum": ("--muon-momentum 0.9", "--optimizer muon"),
    "muon_nesterov": ("--muon-no-use-nesterov", "--optimizer muon"),
    "muon_num_ns_steps": ("--muon-num-ns-steps 6", "--optimizer muon"),
    "muon_coefficient_type": ("--muon-coefficient-type simple", "--optimizer muon"),
    "muon_scale_mode": ("--muon-scale-mode shape_scaling", "--optimizer muon"),
    "muon_extra_scale_factor": ("--muon-extra-scale-factor 0.2", "--optimizer muon"),
    "muon_split_qkv": ("--muon-no-split-qkv", "--optimizer muon"),
    "lr": ("--lr 0.1", ""),
    "min_lr": ("--min-lr 1e-4", ""),
    "lr_decay_style": ("--lr-decay-style cosine", ""),
    "lr_decay_iters": ("--lr-decay-iters 50", ""),
    "lr_decay_samples": ("--lr-decay-samples 50", ""),
    "lr_warmup_fraction": ("--warmup 0.1", ""),
    "lr_warmup_iters": ("--lr-warmup-iters 7", ""),
    "lr_warmup_samples": ("--lr-warmup-samples 8", ""),
    "lr_wsd_decay_style": ("--lr-wsd-decay-style linear", "--lr-decay-style WSD --lr-wsd-decay-iters 10"),
    "lr_wsd_decay_iters": ("--lr-wsd-decay-iters 20", "--lr-decay-style WSD --lr-wsd-decay-iters 10"),
    "weight_decay": ("--weight-decay 0", ""),
    "clip_grad": ("--clip-grad 0", ""),
    "adam_beta1": ("--adam-beta1 0.8", ""),
    "adam_beta2": ("--adam-beta2 0.95", ""),
    "adam_eps": ("--adam-eps 1e-6", ""),
    "micro_batch_size": ("--batch-size 4", ""),
    "gradient_accumulation_steps": ("--gas 2", ""),
    "global_batch_size": ("--global-batch-size 8", ""),
    "train_iters": ("--train-iters 50", ""),
    "sft": ("--sft", ""),
    "lora_rank": ("--lora-rank 8", ""),
    "lora_alpha": ("--lora-alpha 32", "--lora-rank 8"),
    "lora_dropout": ("--lora-dropout 0.1", "--lora-rank 8"),
    "lora_target": ("--lora-target q_proj k_proj v_proj", "--lora-rank 8"),
    "loss_normalization": ("--loss-normalization micro-batch", "--eod-mask-loss"),
    "exit_interval": ("--exit-interval 5", ""),
    "eval_iters": ("--eval-iters 5", ""),
    "skip_train": ("--skip-train", ""),
    "eval_interval": ("--eval-interval 5", ""),
    "seed": ("--seed 1", ""),
    "data_path": ("--data-path other", ""),
    "split": ("--split 949,50,1", ""),
    "no_shared_disk": ("--no-shared-disk", ""),
    "data_cache_path": ("--data-cache-path maps", ""),
    "data_impl": ("--data-impl mmap", ""),
    "num_workers": ("--num-workers 0", ""),
    "seq_length": ("--seq-length 64", ""),
    "tokenizer_type": ("--tokenizer-type WhitespaceTokenizer", ""),
    "vocab_file": ("--vocab-file other.json", ""),
    "mask_prob": ("--mask-prob 0.2", "bert"),
    "decoder_num_layers": ("--decoder-num-layers 2", "t5"),
    "decoder_seq_length": ("--decoder-seq-length 8", "t5"),
    "geglu": ("--no-geglu", "t5"),
    "pipeline_model_parallel_split_rank": ("--pipeline-model-parallel-split-rank 1", "t5 --pipe-parallel-size 2"),
    "relative_attention_max_distance": ("--relative-attention-max-distance 64", "t5"),
    "relative_attention_num_buckets": ("--relative-attention-num-buckets 16", "t5"),
    "vocab_extra_ids": ("--vocab-extra-ids 50", "t5"),
    "short_seq_prob": ("--short-seq-prob 0", "bert"),
    "eod_text": ("--eod-token </s>", "--tokenizer-type HuggingFaceTokenizer"),
    "merge_file": ("--merge-file other.txt", ""),
    "save": ("--save out", ""),
    "save_interval": ("--save-interval 5", "--save out"),
    "async_save": ("--async-save", "--save out"),
    "snapshot_interval": ("--snapshot-interval 5", "--save out --auto-resume"),
    "snapshot_dir": ("--snapshot-dir /mnt", "--snapshot-interval 5 --save out --auto-resume"),
    "keep_last": ("--keep-last 2", "--save out"),
    "keep_every": ("--keep-every 2", "--save out --keep-last 2"),
    "on_save_error": ("--on-save-error continue", "--save out"),
    "load": ("--load out", ""),
    "load_strict": ("--load-strict", "--load out"),
    "auto_resume": ("--auto-resume", "--save out"),
    "finetune": ("--finetune", "--load out"),
    "override": ("--override", "--load out"),
    "log_interval": ("--log-interval 5", ""),
    "tensorboard_dir": ("--tensorboard-dir board", ""),
    "metrics_file": ("--metrics-file metrics.jsonl", ""),
    "timing_log_level": ("--timing-log-level 2", "--timing-log-level 1"),
    "log_timers_to_tensorboard": ("--log-timers-to-tensorboard", "--timing-log-level 1 --tensorboard-dir board"),
    "straggler_report": ("--straggler-report 0.3", ""),
    "straggler_window": ("--straggler-window 9", "--straggler-report 0.3"),
    "trace": ("--trace out", ""),
    "trace_steps": ("--trace-steps 3:3", "--trace out"),
    "profile_steps": ("--profile-steps 3:4", "--trace out"),
    "flops_profile_step": ("--flops-profile-step 3", "--trace out"),
    "profile_dir": ("--profile-dir out", "--trace other --profile-steps 3:4"),
    "run_dir": ("--run-dir out", ""),
    "rank": ("--rank 0", "--dry-run"),
    "num_experts": ("--num-experts 4", ""),
    **{
        flag.split()[0][2:].replace("-", "_"): (flag, "--num-experts 4")
        for flag in (
            "--moe-layer-freq 2",
            "--moe-ffn-hidden-size 32",
            "--moe-router-topk 3",
            "--moe-router-pre-softmax",
            "--moe-router-load-balancing-type none",
            "--moe-aux-loss-coeff 0.1",
            "--moe-z-loss-coeff 0.1",
            "--moe-router-dtype fp64",
            "--moe-expert-capacity-factor 1.5",
            "--moe-shared-expert-intermediate-size 32",
            "--moe-grouped-gemm",
            "--moe-per-layer-logging",
            "--expert-model-parallel-size 2",
            "--expert-tensor-parallel-size 1",
        )
    },
}


@pytest.mark.parametrize("name", sorted(flag_fields()))
def test_every_flag_changes_the_run(name: str) -> None:
    of_splits = ("train_data_path", "valid_data_path", "test_data_path")
    batches = ("train_samples", "rampup_batch_size", "step_batch_size_schedule", "lr_wsd_decay_samples")
    if name in ("mock_data", "vocab_size", "repartition_from", "tokenizer_model", "load_hf", *of_splits, *batches):
        return  # they stand in the place of others, or need a file, so they have tests of their own
    words, company = EFFECTS.get(name, (flag_name(flag_fields()[name]), ""))
    environ = CUDA if company.startswith("gpu") else CPU
    company = company.removeprefix("gpu")
    ranks = 2 if "parallel-size 2" in f"{company} {words}" else 1
    assert parse(f"{company} {words}", ranks=ranks, environ=environ) != parse(company, ranks=ranks, environ=environ)


def test_train_samples_are_counted_in_whole_iterations() -> None:
    words = SMALL.replace("--train-iters 100", "--train-samples 41").split()
    run = parse_run(words, CPU)
    assert (run.train.train_samples, run.train.train_iters) == (41, 20)
    assert "exclude each other" in complaints("--train-samples 41")[0]
    with pytest.raises(ConfigError, match="--train-samples 1 is less than one global batch of 2"):
        parse_run(SMALL.replace("--train-iters 100", "--train-samples 1").split(), CPU)


def test_each_split_may_have_data_of_its_own() -> None:
    own = SMALL.replace("--data-path corpus", "--train-data-path 1 a 3 b --test-data-path c").split()
    data = parse_run(own, CPU).data
    assert data.blends == {
        "train": (Part(Fraction(1, 4), "a"), Part(Fraction(3, 4), "b")),
        "valid": (),
        "test": (Part(Fraction(1), "c"),),
    }
    assert data.prefixes == ("a", "b", "c") and data.proportions == "1/4 3/4; ; 1"
    assert parse_run([*own, "--valid-data-path", "d"], CPU).data.contents == (("a", "b"), ("d",), ("c",))
    assert complaints("--train-data-path other") == [
        "--data-path corpus and --train-data-path other exclude each other: give one"
    ]
    with pytest.raises(ConfigError, match="--split 1 and --train-data-path 1 a 3 b exclude each other"):
        parse_run([*own, "--split", "1"], CPU)


WITHOUT_DATA = SMALL.partition("--data-path")[0]


@pytest.mark.parametrize(
    "architecture, words, expected",
    [
        (GPT2, "--mock-data", ("NullTokenizer", 50257)),
        (BERT, "--mock-data", ("NullTokenizer", 30522)),
        (BERT, "--mock-data --vocab-size 100", ("NullTokenizer", 100)),
        (GPT2, "--mock-data --vocab-file v --merge-file m", ("GPT2BPETokenizer", None)),
        (GPT2, "--data-path d --tokenizer-type NullTokenizer --vocab-size 100", ("NullTokenizer", 100)),
    ],
)
def test_mock_data_and_their_tokenizer(
    architecture: ArchitectureSpec, words: str, expected: tuple[str, int | None]
) -> None:
    data = parse_run([*WITHOUT_DATA.split(), *words.split()], CPU, architecture).data
    assert (data.tokenizer_type, data.vocab_size) == expected


def test_the_size_of_another_vocabulary_has_no_effect() -> None:
    (warning,) = read("--vocab-size 9").warnings
    assert warning.startswith(
        "--vocab-size 9 has no effect with GPT2BPETokenizer, which counts the tokens of its files"
    )


@pytest.mark.parametrize(
    "architecture, words, message",
    [
        (GPT2, "--mock-data --data-path d", "--mock-data and --data-path d exclude each other: give one"),
        (GPT2, "--mock-data --train-data-path d", "--mock-data and --train-data-path d exclude each other: give one"),
        (GPT2, "--mock-data --vocab-size 7", "--vocab-size 7 must be 8 or more"),
        (
            GPT2,
            "--mock-data --merge-file m",
            "--merge-file m has no effect with NullTokenizer: remove it, or give another --tokenizer-type",
        ),
        (
            GPT2,
            "--data-path d --tokenizer-type NullTokenizer",
            "--tokenizer-type NullTokenizer needs --vocab-size, the number of tokens",
        ),
        (
            BERT,
            "--data-path d --tokenizer-type NullTokenizer --vocab-size 100",
            "--tokenizer-type NullTokenizer does not suit BERT: use BertWordPieceLowerCase or BertWordPieceCase, or "
            "add --mock-data",
        ),
        (BERT, "--data-path d --tokenizer-type BertWordPieceCase", "--vocab-file is required"),
        (
            GPT2,
            "--mock-data --vocab-file v",
            "--merge-file is required with --tokenizer-type GPT2BPETokenizer; for a vocabulary of whole words use "
            "--tokenizer-type WhitespaceTokenizer",
        ),
        (GPT2, "--vocab-file v --merge-file m", "--data-path is required (or --train-data-path, or --mock-data)"),
    ],
)
def test_wrong_mock_data_are_refused(architecture: ArchitectureSpec, words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run([*WITHOUT_DATA.split(), *words.split()], CPU, architecture)
    assert caught.value.messages == [message]


def test_a_blend_is_split_as_one_data_set_is() -> None:
    data = parse("--data-path 0.3 a 0.60 b 0.1 c").data
    assert {name: [str(part.share) for part in parts] for name, parts in data.blends.items()} == dict.fromkeys(
        ("train", "valid", "test"), ["3/10", "3/5", "1/10"]
    )
    assert data.contents == (("a", "b", "c"),) and data.proportions == "3/10 3/5 1/10"


def test_provided_values_are_command_line_arguments_again() -> None:
    words = "--data-path 0.3 a 0.7 b --split 1,1 --bf16 --lr 0.1".split()
    assert [word for provided in read_flags(words).values.values() for word in provided.words] == words


@pytest.mark.parametrize(
    "words, message",
    [
        ("a b", "a is not a number: give a weight before b"),
        ("1 a b", "3 words: give one prefix, or WEIGHT PREFIX for each data set"),
        ("0 a 1 b", "0 before a must be from 1e-12 to 1e18: remove data sets that are not used"),
        ("-1 a 1 b", "-1 before a must be from 1e-12 to 1e18: remove data sets that are not used"),
        ("nan a 1 b", "nan before a must be from 1e-12 to 1e18: remove data sets that are not used"),
        (
            "1e999999999 a 1 b",
            "1e999999999 before a must be from 1e-12 to 1e18: remove data sets that are not used",
        ),
        ("1 x/a 2 b 1 x//a", "x/a is given twice: give it once, with the sum of its weights"),
    ],
)
def test_a_wrong_blend_is_refused(words: str, message: str) -> None:
    assert complaints(f"--data-path {words}") == [f"--data-path {words}: {message}"]


def test_a_repeated_data_path_replaces_the_earlier_one() -> None:
    result = read_flags("--data-path 1 a --lr 1 --data-path 2 b".split())
    assert result.values["data_path"] == (("2", "b"), "--data-path 2 b")
    assert result.warnings == ["--data-path 1 a has no effect: --data-path 2 b follows it"]


def test_a_replaced_value_is_announced() -> None:
    parsed = read_run(f"{SMALL} --local_rank 3 --local_rank 3 --lr 0.2".split(), CPU)
    assert parsed.run.optim.lr == 0.2
    assert parsed.warnings == ["--lr 0.001 has no effect: --lr 0.2 follows it"]


REFUSED = {
    name: outcome.text
    for name in (classic.replace("_", "-") for classic in CLASSIC)
    if (outcome := outcome_of(name, [])) and outcome.kind == "refused"
}


def test_classic_arguments_are_flags_or_have_an_outcome() -> None:
    assert len(CLASSIC) == len(set(CLASSIC)) == 106
    programs = [build_parser(architecture) for architecture in ARCHITECTURES.values()]
    flags = {name for parser in programs for action in parser._actions for name in action.option_strings}
    for name in CLASSIC:
        name = name.replace("_", "-")
        assert ("--" + name in flags) != (outcome_of(name, ["local"]) is not None), name


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_arguments_give_their_reason(name: str) -> None:
    assert complaints(f"--{name} value") == complaints(f"--{name.replace('-', '_')}") == [f"--{name}: {REFUSED[name]}"]


@pytest.mark.parametrize("field, value", sorted(REFUSED_VALUES))
def test_refused_values_give_their_reason(field: str, value: str) -> None:
    flag = f"{flag_name(flag_fields()[field])} {value}"
    assert complaints(flag) == [f"{flag}: {REFUSED_VALUES[field, value]}"]


@pytest.mark.parametrize(
    "classic, other",
    [
        ("--model-parallel-size 2", "--tensor-model-parallel-size 2"),
        ("--pipe-parallel-size 2", "--pipeline-model-parallel-size 2"),
        ("--pipe-parallel-size 0", "--no-pipeline-parallel"),
        ("--gas 3", "--gradient-accumulation-steps 3"),
        ("--gas 3", "--global-batch-size 6"),
        ("--batch-size 2", "--micro-batch-size 2"),
        ("--warmup 0.2", "--lr-warmup-fraction 0.2"),
        ("--override-lr-scheduler", "--override-opt_param-scheduler"),
        ("--use-checkpoint-lr-scheduler", "--use-checkpoint-opt_param-scheduler"),
        ("--vocab-file vocab.json", "--vocab vocab.json"),
        ("--local_rank 1", "--local-rank=1"),
        ("--zero-stage 1", "--zero_stage 1.0"),
        ("--zero-contigious-gradients", "--zero-contiguous-gradients"),
        ("--zero-stage 1 --cpu-optimizer", "--zero-stage 1 --offload-optimizer cpu"),
        ("--checkpoint-activations", "--deepspeed-activation-checkpointing"),
        ("--checkpoint-activations", "--recompute-granularity full"),
        ("--checkpoint-activations --recompute-granularity selective", "--recompute-activations"),
        (
            "--checkpoint-activations --partition-activations --contigious-checkpointing",
            "--checkpoint_activations --distribute-checkpointed-activations --contiguous-checkpointing",
        ),
        ("", "--deepspeed --deepscale"),
    ],
)
def test_other_names_mean_the_same(classic: str, other: str) -> None:
    ranks = 2 if "size 2" in classic and "batch" not in classic else 1
    assert parse(classic, ranks=ranks) == parse(other, ranks=ranks)


def test_classic_script_parses_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(
        '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "steps_per_print": 10, "gradient_clipping": 1.0,'
        ' "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},'
        ' "wall_clock_breakdown": true, "zero_allow_untested_optimizer": false}'
    )
    words = f"""
        --local_rank=1 --model-parallel-size 2 --num-layers 24 --hidden-size 1024 --num-attention-heads 16
        --seq-length 1024 --max-position-embeddings 1024 --batch-size 8 --train-iters 320000 --lr-decay-iters 320000
        --save checkpoints/gpt2_345m_ds --load checkpoints/gpt2_345m_ds --data-path X --vocab-file V --merge-file M
        --data-impl mmap --split 949,50,1 --distributed-backend nccl --lr 1.5e-4 --lr-decay-style cosine
        --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0 --warmup 0.01 --checkpoint-activations --log-interval 100
        --save-interval 10000 --eval-interval 1000 --eval-iters 10 --fp16 --deepspeed --deepspeed_config {file}
        --zero-stage 2 --zero-reduce-bucket-size 50000000 --zero-allgather-bucket-size 5000000000
        --zero-contigious-gradients --zero-reduce-scatter --deepspeed-activation-checkpointing
        --checkpoint-num-layers 1 --partition-activations --contigious-checkpointing --synchronize-each-layer
    """
    run = parse_run(words.split(), {**CUDA, "WORLD_SIZE": "2"})
    assert run.optim.warmup_steps(run.train) == 3200
    assert run.ds_config["zero_optimization"] == {
        "stage": 2,
        "reduce_scatter": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 50_000_000,
        "allgather_bucket_size": 5_000_000_000,
    }
    assert run.ds_config["activation_checkpointing"]["number_checkpoints"] == 24

    flags = "--zero-stage 0 --zero-reduce-scatter --zero-contigious-gradients --zero-reduce-bucket-size 50000000"
    assert parse(flags).ds_config["zero_optimization"]["reduce_bucket_size"] == 50_000_000


@pytest.mark.parametrize(
    "words, message",
    [
        ("--hiden-size 64", "unknown flag --hiden-size: did you mean --hidden-size?"),
        ("--zzzzzzzzzz 1", "unknown flag --zzzzzzzzzz: see --help"),
        ("--lr", "--lr: needs a value"),
        ("--data-path", "--data-path: needs a value"),
        ("--num-layers four", "--num-layers four: must be a number"),
        ("--num-layers 4.5", "--num-layers 4.5: must be a whole number"),
        ("--lr nan", "--lr nan: must be a finite number"),
        ("--lr-decay-style cosin", "--lr-decay-style cosin: did you mean cosine?"),
        ("--data-impl zip", "--data-impl zip: choose from mmap, infer"),
        ("--mask-prob 0.1", "--mask-prob: pretrain_gpt2.py has no such flag: it is BERT's, for pretrain_bert.py"),
        (
            "bert --reset-position-ids",
            "--reset-position-ids: pretrain_bert.py has no such flag: it is GPT-2's, for pretrain_gpt2.py",
        ),
        ("bert --top-k 3", "--top-k: it is for text generation: use tools/generate.py"),
        ("--fp16 --bf16 yes", "unexpected argument 'yes': every value follows its flag"),
        (
            "--batch-size 2 --micro-batch-size 3",
            "--batch-size 2 and --micro-batch-size 3 set the same thing: remove one",
        ),
    ],
)
def test_mistakes_are_reported(words: str, message: str) -> None:
    assert message in complaints(words)


def test_the_last_value_of_a_repeated_flag_counts() -> None:
    assert parse("--lr 0.5 --lr 0.25").optim.lr == 0.25


def test_a_misspelt_flag_hides_no_error_and_is_not_read_as_another() -> None:
    assert complaints("--zero-stag 1 --cpu-optimizer --min-lr 1") == [
        "unknown flag --zero-stag: did you mean --zero-stage?",
        "--offload-optimizer cpu needs ZeRO, which partitions what is offloaded: add --zero-stage 1",
        "--min-lr 1 is more than --lr 0.001: lower it",
    ]


def test_help_lists_every_flag_with_its_section() -> None:
    text = build_parser().format_help()
    flags = {flag_name(field): field.metadata["flag"] for field in flag_fields().values()}
    every = {name: flag["masked_lm"] for name, flag in flags.items() if flag["encoder_decoder"] != "only"}
    assert {name for name in every if name in re.findall(r"--[\w-]+", text)} == {
        name for name in every if every[name] in (None, False)
    }
    assert "--model-parallel-size, --tensor-model-parallel-size N" in text
    assert "(default: 128)" in text


def test_parsing_imports_no_torch() -> None:
    program = (
        "import sys; from megatron.config.command_line import parse_run; import megatron.training.preflight; "
        "parse_run(sys.argv[1:], {}); print([m for m in ('torch', 'deepspeed') if m in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    words = [sys.executable, "-c", program, *SMALL.split()]
    assert subprocess.run(words, cwd=root, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_preset_gives_what_is_not_given() -> None:
    words = "--model-preset llama3.1-8b --num-layers 4 --mock-data --lr 1e-4 --train-iters 10 --batch-size 1".split()
    run = parse_run(words, CPU)
    assert (run.model.num_layers, run.model.hidden_size, run.model.query_groups) == (4, 4096, 8)
    assert (run.model.ffn_hidden_size, run.model.rotary_base, run.data.seq_length) == (14336, 500000.0, 8192)
    assert run.model.swiglu and not run.model.linear_bias and run.model.attention_dropout == 0
    assert not parse_run([*words, "--no-swiglu"], CPU).model.swiglu
    with pytest.raises(ConfigError, match="--model-preset bert-base is a model of pretrain_bert.py, and this is"):
        parse_run([*words, "--model-preset", "bert-base"], CPU)
    with pytest.raises(ConfigError, match="--model-preset llama3-8b: did you mean llama3.1-8b"):
        parse_run([*words, "--model-preset", "llama3-8b"], CPU)


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.parameters])
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    preset = PRESETS[name]
    words = f"--model-preset {name} --mock-data --lr 1e-4 --train-iters 10 --batch-size 1".split()
    model = replace(parse_run(words, CPU).model, vocab_size=preset.vocab_size, padded_vocab_size=preset.vocab_size)
    assert sum(spec.numel for spec in GPT2.named_parameters(model).values()) == preset.parameters


@pytest.mark.parametrize(
    "words, chunks",
    [
        ("--num-layers-per-virtual-pipeline-stage 1", (1, 1, 1, 1)),
        ("--num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule interleaved", (1, 1, 1, 1)),
        ("--pipeline-schedule interleaved --pipeline-partition 1,1,2,0", (1, 1, 2, 0)),
        ("--enable-zbh1-pipeline", (2, 2)),
        ("--pipeline-schedule zbv", (1, 1, 1, 1)),
    ],
)
def test_a_schedule_has_model_chunks(words: str, chunks: tuple[int, ...]) -> None:
    """The flags of Megatron-LM for virtual stages select the interleaved schedule."""
    run = parse(f"--pipe-parallel-size 2 --gas 4 {words}", ranks=2)
    assert layers_per_chunk(run) == chunks and run.parallel.model_chunks == len(chunks)


@pytest.mark.parametrize(
    "words, message",
    [
        ("--pipeline-schedule interleaved", "--pipeline-schedule interleaved needs model chunks: give --num-layers-"),
        ("--num-layers-per-virtual-pipeline-stage 3", "--num-layers 4 is not two or more times --num-layers-per-"),
        ("--num-layers-per-virtual-pipeline-stage 2", "--num-layers 4 is not two or more times --num-layers-per-"),
        (
            "--num-layers-per-virtual-pipeline-stage 1 --pipeline-schedule zbv",
            "--num-layers-per-virtual-pipeline-stage 1 is for --pipeline-schedule interleaved, and --pipeline-schedule",
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 1 --num-virtual-stages-per-pipeline-rank 2",
            "--num-layers-per-virtual-pipeline-stage 1 and --num-virtual-stages-per-pipeline-rank 2 exclude each other",
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 1 --pipeline-partition 2,2",
            "--num-layers-per-virtual-pipeline-stage 1 and --pipeline-partition 2,2 exclude each other: give one",
        ),
    ],
)  # fmt: skip
def test_virtual_stages_that_cannot_be(words: str, message: str) -> None:
    (found,) = complaints(f"--pipe-parallel-size 2 --gas 4 {words}", ranks=2)
    assert found.startswith(message)
