"""Which words of a sample are hidden, and what stands in their place (Devlin et al., 2018, section 3.1).

Words are hidden whole: all of their pieces, or none. Of the pieces eight in ten become [MASK], one in ten becomes any
token of the vocabulary, and one in ten stays what it is.
"""

import numpy as np

from megatron.tokenizer.wordpiece import WordPieceTokenizer


def hide(
    tokens: np.ndarray, known: WordPieceTokenizer, mask_prob: float, random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """tokens int64 [n] -> the same with a fraction of ``mask_prob`` hidden, and labels: those tokens, -1 elsewhere."""
    places = choose(tokens, known, max(1, round(len(tokens) * mask_prob)), random)
    labels = np.full_like(tokens, -1)
    labels[places] = tokens[places]
    fate = random.random_sample(len(places))
    anything = random.randint(0, known.vocab_size, len(places))
    shown = tokens.copy()
    shown[places] = np.where(fate < 0.8, known.mask, np.where(fate < 0.9, tokens[places], anything))
    return shown, labels


def choose(tokens: np.ndarray, known: WordPieceTokenizer, most: int, random: np.random.RandomState) -> np.ndarray:
    """Places of the pieces of some words of ``tokens``, ``most`` of them or as near below as whole words come."""
    candidates = np.flatnonzero((tokens != known.cls) & (tokens != known.sep))
    # A word whose first pieces were cut off begins behind [CLS] or [SEP].
    goes_on = known.continues[tokens[candidates]] & (np.diff(candidates, prepend=-1) == 1)
    words = np.split(candidates, np.flatnonzero(~goes_on)[1:])
    chosen: list[np.ndarray] = []
    left = most
    for number in random.permutation(len(words)):
        if len(words[number]) <= left:
            chosen.append(words[number])
            left -= len(words[number])
        if not left:
            break
    return np.concatenate([np.empty(0, np.int64), *chosen])
