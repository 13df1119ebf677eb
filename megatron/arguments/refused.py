"""Arguments of Megatron-LM v1.1.5-3D_parallelism that have no meaning here, each with the reason."""

_BERT = "not supported by pretrain_gpt2.py (BERT)"
_RETRIEVAL = "not supported by pretrain_gpt2.py (retrieval models)"
_SHARING = "weight sharing between layers is not supported"
_AUTORESUME = "not supported (a service of NVIDIA's own cluster): give --save and --load the same folder to resume"
_GENERATION = "not supported by pretrain_gpt2.py (text generation)"
_TASKS = "not supported by pretrain_gpt2.py (evaluation tasks)"

REFUSED: dict[str, str] = {
    "num-unique-layers": _SHARING,
    "param-sharing-style": _SHARING,
    "onnx-safe": "export to ONNX is not supported",
    "scaled-masked-softmax-fusion": "not supported by pretrain_gpt2.py (BERT's padding mask); "
    "use --scaled-upper-triang-masked-softmax-fusion",
    "DDP-impl": "DeepSpeed reduces the gradients: remove it",
    "lazy-mpu-init": "not supported: the process groups are made once, at the start",
    "mask-prob": _BERT,
    "short-seq-prob": _BERT,
    "adlr-autoresume": _AUTORESUME,
    "adlr-autoresume-interval": _AUTORESUME,
    "ict-head-size": _RETRIEVAL,
    "ict-load": _RETRIEVAL,
    "bert-load": _RETRIEVAL,
    "titles-data-path": _RETRIEVAL,
    "query-in-block-prob": _RETRIEVAL,
    "use-one-sent-docs": _RETRIEVAL,
    "report-topk-accuracies": _RETRIEVAL,
    "faiss-use-gpu": _RETRIEVAL,
    "block-data-path": _RETRIEVAL,
    "indexer-batch-size": _RETRIEVAL,
    "indexer-log-interval": _RETRIEVAL,
    "temperature": _GENERATION,
    "greedy": _GENERATION,
    "top-p": _GENERATION,
    "top-k": _GENERATION,
    "out-seq-length": _GENERATION,
    "sample-input-file": _GENERATION,
    "sample-output-file": _GENERATION,
    "num-samples": _GENERATION,
    "genfile": _GENERATION,
    "recompute": _GENERATION,
    "task": _TASKS,
    "epochs": _TASKS,
    "pretrained-checkpoint": _TASKS,
    "train-data": _TASKS,
    "valid-data": _TASKS,
    "overlapping-eval": _TASKS,
    "strict-lambada": _TASKS,
}
"""Flag (without dashes, with hyphens for underscores) to the reason why it is refused."""

REFUSED_VALUES: dict[tuple[str, str], str] = {
    ("data_impl", "lazy"): "convert the data with tools/preprocess_data.py",
    ("data_impl", "cached"): "convert the data with tools/preprocess_data.py",
    ("tokenizer_type", "BertWordPieceLowerCase"): _BERT,
    ("tokenizer_type", "BertWordPieceCase"): _BERT,
}
"""Field and value to the reason why that value of an accepted flag is refused."""
