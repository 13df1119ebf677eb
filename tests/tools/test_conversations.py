"""Conversations as tokens with a loss mask: templates as transformers renders them, and what counts in the loss."""

import json
from pathlib import Path

import pytest

from megatron.common.errors import ConfigError, DataError
from megatron.config.data import loss_mask_prefix
from megatron.data.indexed_dataset import IndexedDataset
from megatron.tools.preprocess.conversations import ChatTemplate, find_chat_template
from megatron.tools.preprocess.job import Job
from megatron.tools.preprocess.preprocess import preprocess

CHATML = """{{ bos_token }}{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + eos_token + '\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
MARKED = """{% for message in messages -%}
{{ message.role }}: {% if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}
{% endgeneration %}{% else %}{{ message.content }}
{% endif %}{% endfor %}"""
LAST_ALONE = "{{ messages | length }} {% for message in messages %}{{ message.content }} {% endfor %}"
MESSAGES = [
    {"role": "system", "content": "be kind "},
    {"role": "user", "content": "a é"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d\ne"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("source", [CHATML, MARKED])
def test_text_and_answers_are_those_of_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    parts = ChatTemplate(source, SPECIAL).parts(MESSAGES)
    rendered, answers = render_jinja_template(
        [MESSAGES], chat_template=source, return_assistant_tokens_mask=source == MARKED, **SPECIAL
    )
    assert "".join(part.text for part in parts) == rendered[0]
    counted = [part.text for part in parts if part.counts]
    if source == MARKED:
        assert counted == [rendered[0][begin:end] for begin, end in answers[0]]
    else:
        assert counted == ["b</s>\n", "d\ne</s>\n"]


def test_a_template_that_rewrites_earlier_turns_is_an_error() -> None:
    with pytest.raises(DataError, match="writes message 3 in another way"):
        ChatTemplate(LAST_ALONE, SPECIAL).parts(MESSAGES)
    ChatTemplate("{% if messages[0].role == 'critic' %}{% endif %}", SPECIAL).parts([{"role": "critic"}])
    with pytest.raises(DataError, match="the chat template: roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", SPECIAL).parts(MESSAGES)


WORDS = "be kind a b c user: assistant: <unk> <|endoftext|>".split()
UNK, EOD = 7, 8
WORD_TEMPLATE = """{% for message in messages %}{{ message.role }}: {{ message.content }} {% if
message.role == 'assistant' %}{{ eos_token }} {% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif
%}"""


def written(folder: Path, line: dict, kind: str, **settings) -> list[tuple[list[int], list[int]]]:
    """Tokens and loss mask of each document of the data set of this line, and a blank one."""
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(WORDS)}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": WORD_TEMPLATE}))
    (folder / "lines.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(line) + "\n")
    job = Job(
        inputs=(folder / "lines.jsonl",),
        output_prefix=str(folder / "out"),
        tokenizer_type="WhitespaceTokenizer",
        vocab_file=str(folder / "vocab.json"),
        conversations=kind,
        chat_template=find_chat_template(None, str(folder / "vocab.json")) if kind == "messages" else None,
        **settings,
    )
    summary = preprocess(job, lambda summary: None, lambda error: None)
    tokens, mask = (IndexedDataset(prefix) for prefix in job.prefixes.values())
    assert mask.prefix == loss_mask_prefix(tokens.prefix) and mask.dtype.name == "uint8"
    assert (summary.documents, summary.tokens) == (len(tokens), tokens.num_tokens)
    assert summary.counted == sum(mask.get(n).sum() for n in range(len(mask)))
    return [(tokens.get(n).tolist(), mask.get(n).tolist()) for n in range(len(tokens))]


def test_messages_end_by_the_special_token_of_the_template(tmp_path: Path) -> None:
    turns = [("user", "a <|endofte"), ("assistant", "be kind"), ("user", "b"), ("assistant", "c")]
    line = {"messages": [{"role": role, "content": content} for role, content in turns]}
    document = ([5, 2, UNK, 6, 0, 1, EOD, 5, 3, 6, 4, EOD], [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1])
    assert written(tmp_path, line, "messages") == [document, document]


def test_a_completion_counts_and_the_end_after_it(tmp_path: Path) -> None:
    line = {"prompt": "user: a ", "completion": "b c"}
    document = ([5, 2, 3, 4, EOD], [0, 0, 1, 1, 1])
    assert written(tmp_path, line, "prompt-completion", append_eod=True, workers=2) == [document] * 2


@pytest.mark.parametrize(
    "line, kind, message",
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "messages", "1: no message of the assistant"),
        ({"messages": [{"role": "asistant", "content": "a"}]}, "messages", "'asistant' .* did you mean assistant"),
        ({"messages": [{"role": "gpt", "content": "a"}]}, "messages", "'gpt' of message 1 is unknown: use system, "),
        ({"prompt": "a", "completion": "b"}, "messages", '1: no key "messages", which --format messages reads'),
        ({"messages": "a"}, "messages", '1: "messages" must be a list of objects'),
        ({"prompt": "a"}, "prompt-completion", '1: no key "completion"'),
        ({"prompt": "a", "completion": " "}, "prompt-completion", "1: no token to train on"),
    ],
)
def test_a_line_without_anything_to_learn_is_an_error(tmp_path: Path, line: dict, kind: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        written(tmp_path, line, kind)


def test_no_template_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --chat-template"):
        find_chat_template(None, str(tmp_path / "vocab.json"))
