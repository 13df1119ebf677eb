"""Models to be used."""

from pathlib import Path

import pytest
from support.programs import Programs
from support.training import RankTraining

TEXT = "def naïve(x):\n    return '日本語 🙂' + x  # the value that is asked for, and nothing else\n"


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a BPE of 300 tokens; every weight is drawn at random, wide enough to be decided."""
    from support.whole_models import write_gpt2

    from megatron.tools.convert.vocabulary import Vocabulary
    from megatron.tools.preprocess.tokenizer_training import train_gpt2_bpe

    vocabulary, merges = train_gpt2_bpe([TEXT] * 3, 300, 2)
    ends = {"bos_token_id": len(vocabulary) - 1, "eos_token_id": len(vocabulary) - 1}
    folder = tmp_path_factory.mktemp("foreign")
    write_gpt2(folder, 0.3, vocab_size=len(vocabulary), n_positions=128, n_layer=3, **ends)
    Vocabulary("GPT2BPETokenizer", vocabulary, merges).write(folder, positions=128)
    return folder


@pytest.fixture(scope="session")
def cut(train_in_ranks: RankTraining, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint from tensor parallel 2 x pipeline 2, which has learned little from its wide beginning."""
    folder = tmp_path_factory.mktemp("cut")
    settings = "--train-iters 2 --batch-size 4 --gas 1 --eval-iters 0 --init-method-std 0.2 --openai-gelu".split()
    lengths = "--seq-length 128 --max-position-embeddings 128".split()
    layout = "--model-parallel-size 2 --pipe-parallel-size 2".split()
    train_in_ranks(4, *settings, *lengths, *layout, "--save", folder)
    return folder


@pytest.fixture(scope="session")
def llama(train_in_ranks: RankTraining, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of a model of the Llama family with grouped queries."""
    folder = tmp_path_factory.mktemp("llama")
    settings = "--train-iters 2 --batch-size 4 --gas 1 --eval-iters 0 --init-method-std 0.2".split()
    lengths = "--seq-length 64 --max-position-embeddings 128".split()
    layers = "--num-query-groups 2 --normalization RMSNorm --swiglu --ffn-hidden-size 48 --disable-bias-linear"
    ends = "--position-embedding-type rope --untie-embeddings-and-output-weights"
    layout = "--model-parallel-size 2 --pipe-parallel-size 2".split()
    train_in_ranks(4, *settings, *lengths, *layers.split(), *ends.split(), *layout, "--save", folder)
    return folder


@pytest.fixture(scope="session")
def exported_llama(programs: Programs, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for Hugging Face."""
    folder = tmp_path_factory.mktemp("exported-llama") / "hf"
    programs.warm(1, "tools/convert_checkpoint.py", "to-hf", llama, "--output", folder).ok()
    return folder


@pytest.fixture(scope="session")
def exported(programs: Programs, cut: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for Hugging Face."""
    folder = tmp_path_factory.mktemp("exported") / "hf"
    programs.warm(1, "tools/convert_checkpoint.py", "to-hf", cut, "--output", folder).ok()
    return folder
