"""Which samples a file gives, and what their scores come to."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from megatron.common.errors import NumericsError
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tools.evaluation.tasks import Request, Scores, Task, detokenize_wikitext, make_task


@pytest.fixture(scope="module")
def tokenizer(place: Path) -> Tokenizer:
    return build_tokenizer("GPT2BPETokenizer", f"{place}/hf/vocab.json", f"{place}/hf/merges.txt")


def lambada(folder: Path, tokenizer: Tokenizer, text: str, *, strict: bool, seq_length: int = 48) -> Task:
    (folder / "passages.jsonl").write_text(json.dumps({"text": text}) + "\n")
    return make_task("LAMBADA", Request(folder / "passages.jsonl", seq_length, 32, strict), tokenizer)


def test_the_whole_last_word_or_its_last_token(tmp_path: Path, tokenizer: Tokenizer):
    text = "the sailorqq and the  sailorqq"
    (sample,) = lambada(tmp_path, tokenizer, text + " ", strict=True).samples
    assert sample.predicted > 1
    assert tokenizer.detokenize(sample.tokens[-sample.predicted :]) == " sailorqq"
    assert tokenizer.detokenize(sample.tokens) == "the sailorqq and the sailorqq", "without blanks at the cut"
    (sample,) = lambada(tmp_path, tokenizer, text, strict=False).samples
    assert sample.predicted == 1
    assert tokenizer.detokenize(sample.tokens) == text


def test_the_last_word_has_one_blank_in_front(tmp_path: Path):
    """With a tokenizer that puts a blank in front of every text, as that of Llama 2."""
    pieces = ["</s>", *"\N{LOWER ONE EIGHTH BLOCK}ab.\n", 2 * "\N{LOWER ONE EIGHTH BLOCK}"]
    encoder = tokenizers.Tokenizer(tokenizers.models.BPE(dict(zip(pieces, range(7), strict=True)), [(pieces[1],) * 2]))
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    encoder.normalizer = tokenizers.normalizers.Prepend(pieces[1])
    encoder.save(str(tmp_path / "tokenizer.json"))
    llama2 = build_tokenizer("HuggingFaceTokenizer", str(tmp_path / "tokenizer.json"), None, None, "</s>")
    (sample,) = lambada(tmp_path, llama2, "ab ba", strict=True).samples
    assert (sample.tokens.tolist(), sample.predicted) == (llama2.tokenize("ab ba"), 3)


def test_metrics_of_a_text(tmp_path: Path, tokenizer: Tokenizer):
    (tmp_path / "a.txt").write_text("qqq qq\n")
    task = make_task("PPL", Request(tmp_path / "a.txt", 48, 32), tokenizer)
    metrics = task.metrics(Scores(np.array([8.0]), np.array([False])))
    assert (metrics["words"], metrics["bytes"]) == (2, 7)
    assert metrics["loss"] == 8 / metrics["tokens"]
    assert metrics["word_perplexity"] == pytest.approx(np.exp(4.0))
    assert metrics["byte_perplexity"] == pytest.approx(np.exp(8 / 7))


def test_documents_have_their_own_words_and_bytes(tmp_path: Path, tokenizer: Tokenizer):
    """The end-of-document tokens between them are none."""
    (tmp_path / "a.jsonl").write_text('{"text": "qqq qq"}\n{"text": "q"}\n')
    task = make_task("PPL", Request(tmp_path / "a.jsonl", 48, 32), tokenizer)
    metrics = task.metrics(Scores(np.array([8.0]), np.array([False])))
    assert (metrics["words"], metrics["bytes"]) == (3, 7)


def test_non_finite_loss_is_an_error(tmp_path: Path, tokenizer: Tokenizer):
    task = lambada(tmp_path, tokenizer, "the sea", strict=True)
    with pytest.raises(NumericsError, match="sample 1 has the loss nan"):
        task.metrics(Scores(np.array([1.0, np.nan]), np.array([True, False])))


RAW = (
    " \n = = Early life = = \n \n She was ( 25 @,@ 000 at 4 @.@ 5 ) a well @-@ known [ sic ] \" star \" : it 's N , '"
    " no ' ; the ships ' 90 ° C ! ? { x } end . \n"
)


def test_detokenizer_equals_that_of_the_harness():
    """The EleutherAI harness applies the same published rules."""
    spec = importlib.util.find_spec("lm_eval")
    file = Path(spec.submodule_search_locations[0], "tasks", "wikitext", "preprocess_wikitext.py")
    module_spec = importlib.util.spec_from_file_location("preprocess_wikitext", file)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    for page in (RAW, RAW + ' ( ( [ ] ) open ( " " and \'  \' ) " ( \n', " [ \x1c a ] ) "):
        assert detokenize_wikitext(page) == module.wikitext_detokenizer({"page": page})


def test_brackets_without_an_end_take_no_quadratic_time():
    text = "(" + " " * 100_000 + "(" * 100_000
    assert detokenize_wikitext(text) == text
