"""Adapter of a model to lm-eval, EleutherAI's evaluation harness, which is an optional dependency."""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows

from megatron.tokenizer import Tokenizer
from megatron.tools.chat.tokens import tokenize_marked
from megatron.tools.command_line import progress_bar
from megatron.tools.evaluation.scoring import ForwardModel, UnsupportedTask, score
from megatron.tools.evaluation.tasks import Sample, Scores, last_inputs
from megatron.tools.inference.decoding import Sampling
from megatron.tools.inference.generator import TextGenerator
from megatron.tools.inference.prompts import StoppingCriteria


class HarnessModel(TemplateLM):
    """A model for lm-eval. All ranks get the same requests, share the work, and return the same results.

    Texts are preceded by an end-of-document token, or by the bos_token if the model's texts begin with one. Texts
    longer than the context are truncated at the beginning.
    """

    def __init__(self, model: ForwardModel, tokenizer: Tokenizer, *, batch_size: int, seq_length: int):
        super().__init__()
        self._model, self._tokenizer = model, tokenizer
        self._batch_size, self._seq_length = batch_size, seq_length

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self._tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        return next(iter(self._tokenizer.opening), self.eot_token_id)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The tokens of a text, after the bos_token if the model's texts begin with one, and this one does not."""
        ids, opening = tokenize_marked(self._tokenizer, string), self._tokenizer.opening
        begins = add_special_tokens is False or not ids or tuple(ids[: len(opening)]) == opening
        return ids if begins else [*opening, *ids]

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """For each (context, continuation): its log-likelihood, and whether greedy decoding returns it."""
        return super().loglikelihood(requests, disable_tqdm=True)  # its progress bar only shows tokenization

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        scores = self._score([self._sample(context, target) for _, context, target in requests])
        return [(-float(nll), bool(right)) for nll, right in zip(scores.nll, scores.right, strict=True)]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, computed in windows; only the last one overlaps the previous."""
        windows = [self._windows(*request.args) for request in requests]
        scores = iter(self._score([sample for samples in windows for sample in samples]).nll)
        return [-sum(float(next(scores)) for _ in samples) for samples in windows]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context, up to one of its ``until`` strings or ``max_gen_toks`` tokens.

        Raises UnsupportedTask for a model with pipeline stages.
        """
        generator = self._model.generator(self._tokenizer)
        # All requests of a batch have the same settings.
        settings = [json.dumps(request.args[1], sort_keys=True) for request in requests]
        order = sorted(range(len(requests)), key=lambda number: settings[number])
        batches = [
            rows[begin : begin + self._batch_size]
            for _, group in groupby(order, key=lambda number: settings[number])
            for rows in [list(group)]
            for begin in range(0, len(rows), self._batch_size)
        ]
        with self._progress(len(requests), "generating") as bar:
            return self._model.texts(batches, lambda batch: self._generate(generator, batch, requests), bar.update)

    def _progress(self, total: int, what: str) -> Any:
        return progress_bar(total=total, desc=what, shown=self._model.layout.rank == 0)

    def _score(self, samples: Sequence[Sample]) -> Scores:
        with self._progress(len(samples), "scoring") as bar:
            return score(self._model, samples, batch_size=self._batch_size, report=bar.update)

    def _sample(self, context: list[int], target: list[int]) -> Sample:
        if len(target) > self._seq_length:
            raise UnsupportedTask(
                f"a task asks for a continuation of {len(target)} tokens, and the context has {self._seq_length}"
            )
        return last_inputs([*context, *target], len(target), self._seq_length)

    def _windows(self, text: str) -> list[Sample]:
        windows = get_rolling_token_windows(
            tokenize_marked(self._tokenizer, text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self._seq_length,
            context_len=1,
        )
        return [last_inputs([*seen, target[-1]], len(target), self._seq_length) for seen, target in windows]

    def _generate(self, generator: TextGenerator, batch: Sequence[int], requests: Sequence[Instance]) -> list[str]:
        """Generate the texts of a batch of requests with the same settings."""
        settings = normalize_gen_kwargs(requests[batch[0]].args[1])
        new, temperature = settings["max_gen_toks"], settings.get("temperature", 1.0)
        sampling = Sampling(
            greedy=not settings["do_sample"] or temperature == 0,
            temperature=temperature or 1.0,
            top_k=settings.get("top_k", 0),
            top_p=settings.get("top_p", 0.0),
        )
        criteria = StoppingCriteria(
            context=self._seq_length, new_tokens=new, slides=True, stop=tuple(filter(None, settings["until"]))
        )
        most = self._seq_length - new if new < self._seq_length else self._seq_length
        prompts = [(self.tok_encode(requests[number].args[0]) or [self.eot_token_id])[-most:] for number in batch]
        return [completion.text for (completion,) in generator.complete(prompts, sampling, criteria)]
