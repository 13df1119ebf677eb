"""WikiText's text as it was."""

import importlib.util
from pathlib import Path

from megatron.tools.evaluation.tasks import count_words, detokenize_wikitext

RAW = (
    " \n = = Early life = = \n \n She was ( 25 @,@ 000 at 4 @.@ 5 ) a well @-@ known [ sic ] \" star \" : it 's N , '"
    " no ' ; the ships ' 90 ° C ! ? { x } end . \n"
)


def test_words_are_those_of_the_original():
    """As Megatron counts: 245,566 in the test set of WikiText-103, where each end of a line stands for one."""
    assert count_words(" = A b = \n \n c d . \n") == 9


def test_detokenizer_equals_that_of_the_harness():
    """The EleutherAI harness applies the same published rules."""
    spec = importlib.util.find_spec("lm_eval")
    file = Path(spec.submodule_search_locations[0], "tasks", "wikitext", "preprocess_wikitext.py")
    module_spec = importlib.util.spec_from_file_location("preprocess_wikitext", file)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    assert detokenize_wikitext(RAW) == module.wikitext_detokenizer({"page": RAW})
