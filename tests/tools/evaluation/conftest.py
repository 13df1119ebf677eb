"""A fixed random model with texts it is tried on, all in one folder."""

import json
import random
from pathlib import Path

import pytest

WORDS = "the sea ship sailor morning harbour was of and saw three unlikely she said, 'tis storms.".split()
LIKELY = "sea"


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``hf``, a GPT-2 of Hugging Face with a tokenizer, and ``lambada.jsonl``, ``wiki.txt`` and ``plain.txt``."""
    folder = tmp_path_factory.mktemp("evaluation")
    chance = random.Random(5)
    passages = [" ".join(chance.choices(WORDS, k=chance.randint(4, 60))) + " " + _last(chance) for _ in range(21)]
    (folder / "lambada.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
    (folder / "wiki.txt").write_text("".join(_wikitext_line(chance) for _ in range(40)))
    (folder / "plain.txt").write_text(" ".join(chance.choices(WORDS, k=300)) + "\nnaïve\n")
    _make_model(folder / "hf", passages)
    return folder


def _last(chance: random.Random) -> str:
    return chance.choice([LIKELY, LIKELY, "harbour", "sailors", "unlikely"])


def _wikitext_line(chance: random.Random) -> str:
    words = " ".join(chance.choices([*WORDS, ",", ".", "@-@", "(", ")", '"', "<unk>"], k=chance.randint(3, 30)))
    return f" = {words} = \n \n" if chance.random() < 0.2 else f" {words} . \n"


def _make_model(folder: Path, texts: list[str]) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer
    from megatron.tools.convert.vocabulary import Vocabulary
    from megatron.tools.preprocess.tokenizer_training import train_gpt2_bpe

    folder.mkdir()
    Vocabulary("GPT2BPETokenizer", *train_gpt2_bpe(texts, 301, 2)).write(folder)
    likely = GPT2BPETokenizer(f"{folder}/vocab.json", f"{folder}/merges.txt").tokenize(f" {LIKELY}")
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=301, n_positions=48, n_embd=32, n_layer=3, n_head=4, initializer_range=0.3, bos_token_id=300,
        eos_token_id=300,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        # Something that is right now and then, so that accuracy says something.
        model.transformer.ln_f.bias += 1.5 * model.transformer.wte.weight[likely[0]]
    model.save_pretrained(folder)
