"""Conversations as tokens with a loss mask: templates as transformers renders them, and what counts in the loss."""

import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.checkpoint.run_file import _contradictions
from megatron.common.errors import ConfigError, DataError, UserError
from megatron.config.data import loss_mask_prefix
from megatron.data.fingerprint import chat_template_file, common_chat_template
from megatron.data.indexed_dataset import IndexedDataset
from megatron.tokenizer import build_tokenizer
from megatron.tools.chat import sandbox
from megatron.tools.chat.files import chat_template, find_chat_template, record_of, recorded_template
from megatron.tools.chat.template import ChatPrompts, ChatTemplate
from megatron.tools.chat.tokens import tokenize_texts
from megatron.tools.convert.huggingface_files import carried_files, copy_carried, keep_chat_template
from megatron.tools.preprocess.corpus import Chunk
from megatron.tools.preprocess.job import TOKENS, Job
from megatron.tools.preprocess.preprocess import preprocess
from megatron.tools.preprocess.tokenize_chunk import tokenize_chunk

CHATML = """{{ bos_token }}{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + eos_token + '\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
MARKED = """{% for message in messages -%}
{{ message.role }}: {% if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}
{% endgeneration %}{% else %}{{ message.content }}
{% endif %}{% endfor %}"""
PLUS = """{{ documents is none }}{# {% generation %} #}
{%- for message in messages %}{% if message.role == 'assistant' %}{%+ generation %}{{ message.content }}
{%- endgeneration %}{% else %}{{ message | tojson(true, 1, (',', ':'), true) }}{% endif %}{% endfor %}"""
LAST_ALONE = "{{ messages | length }} {% for message in messages %}{{ message.content }} {% endfor %}"
MESSAGES = [
    {"role": "system", "content": "be kind "},
    {"role": "user", "content": "a é"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d\ne"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("source", [CHATML, MARKED, PLUS])
def test_text_and_answers_are_those_of_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    text, spans = ChatTemplate(source, SPECIAL).conversation(MESSAGES)
    rendered, answers = render_jinja_template(
        [MESSAGES], chat_template=source, return_assistant_tokens_mask=source != CHATML, **SPECIAL
    )
    assert text == rendered[0]
    counted = [text[begin:end] for begin, end in spans]
    if source != CHATML:
        assert counted == [rendered[0][begin:end] for begin, end in answers[0]]
    else:
        assert counted == ["b</s>\n", "d\ne</s>\n"]


def test_a_template_that_rewrites_earlier_turns_is_an_error() -> None:
    with pytest.raises(DataError, match="writes message 3 in another way"):
        ChatTemplate(LAST_ALONE, SPECIAL).conversation(MESSAGES)
    critic = ChatTemplate("{% if messages[0].role == 'critic' %}{% endif %}", SPECIAL)
    critic.conversation([{"role": "critic", "content": "a"}])
    with pytest.raises(DataError, match="the chat template: roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", SPECIAL).conversation(MESSAGES)


@pytest.mark.parametrize(
    "source, message",
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "took more than 1 s"),
        ("{% set x = namespace(t='a') %}{% for a in range(40) %}{% set x.t = x.t + x.t %}{% endfor %}", "1024 MiB"),
        ("{{ '%*d' % (1999999999, 1) }}", "1024 MiB"),
        ("{% macro f(a) %}{{ f(a) }}{% endmacro %}{{ f(1) }}", "calls itself without end"),
        ("a" * (1 << 20 | 1), "has 1,048,577 characters, and may have 1,048,576"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to attribute"),
        ("{{ messages[0].items }}", "writes a builtin_function_or_method, which is no text"),
        ("{{ messages | map(attribute='content') }}", "writes a generator, which is no text"),
        ("{{ [1, 2] | random }}", "random"),
        ("{{ lipsum() }}", "lipsum"),
    ],
)
def test_a_template_that_does_harm_ends_in_one_line(monkeypatch, source: str, message: str) -> None:
    if message.startswith("took"):  # else memory must run out first, also on a busy machine
        monkeypatch.setattr(sandbox, "MOST_SECONDS", 1.0)
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        ChatTemplate(source, SPECIAL).conversation(MESSAGES)
    assert len(caught.value.messages) == 1


def said(content: object, role: str = "user", **more: object) -> list[dict]:
    return [{"role": role, "content": content, **more}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    "messages, message",
    [
        (said("a", weight=0), "message 1 has a weight other than 1"),
        (said("a", train=False), "message 1 has a train other than 1"),
        (said("a", function_call={"name": "f"}), "message 1 has function_call, which the chat template does not write"),
        (said("a\ud83d") + said("\ude00b"), r"message 1: character 1 of the text is U\+D83D, half of a surrogate pair"),
        (said("</s>"), "message 1 contains '</s>', which only the chat template may write"),
        (said("a", name="</s>"), "message 1 contains '</s>'"),
        (said([{"type": "text", "text": part} for part in ("a</", "s>")]), "message 1 contains '</s>'"),
        (said("a\ufdd0b\ufdd1"), r"message 1 contains '\\ufdd0'"),
        (
            [{"role": "user", "content": "a</ "}, {"role": "assistant", "content": " s>"}],
            "one after the other contains '</s>'",
        ),
        (said("<|im_start|>"), r"message 1 contains '<\|im_start\|>'"),
        (said(None, "assistant"), "the content of message 1 is null"),
        (said({"type": "text", "text": "a"}), 'the content of message 1 is "text": it must be text'),
        (said({"text": "a"}), 'the content of message 1 is {"text": "a"}: it must be text'),
        (said([{"type": "image_url", "image_url": "a"}]), 'the content of message 1 is "image_url"'),
    ],
)
def test_content_is_text_and_no_special_token(messages: list[dict], message: str) -> None:
    template = ChatTemplate(CHATML, SPECIAL, reserved=["</s>", "<s>"])
    with pytest.raises(DataError, match=message):
        template.conversation(messages)
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "é"}]
    assert template.conversation(said(parts)) == template.conversation(said("a é"))
    for tools in ("x", ["x"], {"name": "f"}):
        with pytest.raises(DataError, match="tools must be a list of objects"):
            template.conversation(said("a"), tools)
    calls = said(None, "assistant", tool_calls=[{"function": {"name": "f"}}])
    with pytest.raises(DataError, match="message 1 has tool_calls, which the chat template does not write"):
        template.conversation(calls)
    with pytest.raises(DataError, match="there are tools, which the chat template does not write"):
        template.conversation(said("a"), [{"name": "f"}])
    writes = ChatTemplate(f"{CHATML}{{# tool_calls #}}", SPECIAL)
    assert "None" not in writes.conversation(calls).text


@pytest.mark.parametrize(
    "written, message",
    [
        ("message.content | lower", said("<|IM_END|>")),
        ("message.content | replace('#', '')", said("<|im_#end|>")),
        ("message.content | striptags", said("&lt;|im_end|&gt;")),
        ("message.name ~ message.content", said("end|>", name="<|im_")),
        ("'<' ~ message.content ~ '|>'", said("|im_end")),
    ],
)
def test_texts_that_become_a_special_token_are_an_error(written: str, message: list[dict]) -> None:
    template = ChatTemplate(f"{{% for message in messages %}}{{{{ {written} }}}}<|im_end|>{{% endfor %}}", {})
    for render in (template.conversation, template.prompt):
        render(said("a <b> | _c", name="a_b"))
        with pytest.raises(DataError, match=r"makes '<\|im_end\|>' of the texts of the messages"):
            render(message)


def test_what_cannot_be_checked_for_special_tokens_is_an_error() -> None:
    source = (
        "{% for message in messages %}{{ message.content | lower }}{{ 'a#'.index(message.content[0]) }}{% endfor %}"
    )
    template = ChatTemplate(source, {}, reserved=["<|im_end|>"])
    with pytest.raises(DataError, match="cannot write the messages without their punctuation"):
        template.prompt([{"role": "user", "content": "#<|IM_END|>"}])
    tools: list = []
    for _ in range(400):
        tools = [{"a": tools}]
    with pytest.raises(DataError, match="nested too deep"):
        ChatTemplate(f"{CHATML}{{# tools #}}", SPECIAL).conversation(said("a"), tools)


@pytest.mark.parametrize(
    "written", ["answer(message)[1:-1]", "answer(message) | tojson(true)", "answer(message) | length"]
)
def test_a_template_that_loses_marks_is_an_error(written: str) -> None:
    """The others would be counted, and this answer not."""
    macro = "{% macro answer(message) %}{% generation %}{{ message.content }}{% endgeneration %}{% endmacro %}"
    source = (
        f"{macro}{{% for message in messages %}}{{{{ {written} if loop.last else answer(message) }}}}{{% endfor %}}"
    )
    with pytest.raises(DataError, match="blocks are nested, or cut by the template"):
        ChatTemplate(source, SPECIAL).conversation(MESSAGES)


def test_arguments_of_a_call_may_be_json_in_a_prompt() -> None:
    """Clients of OpenAI's API send them so, and templates expect objects."""
    template = ChatTemplate(
        "{% for call in messages[0].tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}", {}
    )
    for arguments, text in [('{"a": 1}', '{"a": 1}'), ({"a": 1}, '{"a": 1}'), ("", "{}")]:
        calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
        assert template.prompt([{"role": "assistant", "tool_calls": calls}]) == text
    calls[0]["function"]["arguments"] = '{"a'
    with pytest.raises(DataError, match="the arguments of a tool call are not JSON"):
        template.prompt([{"role": "assistant", "tool_calls": calls}])
    calls[0]["function"]["arguments"] = r'{"a": "<\u002fs>"}'
    with pytest.raises(DataError, match="message 1 contains '</s>'"):
        ChatTemplate(template.source, {}, reserved=["</s>"]).prompt([{"role": "assistant", "tool_calls": calls}])


@pytest.mark.parametrize("special", [False, True])
def test_another_spelling_of_a_special_token_is_an_error(chat_folder: Path, special: bool) -> None:
    from tokenizers import AddedToken, Tokenizer, normalizers

    encoder = Tokenizer.from_file(file := str(chat_folder / "tokenizer.json"))
    encoder.normalizer = normalizers.NFKC()
    token = AddedToken("<|im_start|>", normalized=True, special=special)
    (encoder.add_special_tokens if special else encoder.add_tokens)([token])
    encoder.save(file)
    tokenizer = build_tokenizer("HuggingFaceTokenizer", file, None)
    (chat_folder / "chatml.jinja").write_text(CHATML.replace("| trim", "| replace('#', '')"))
    template = chat_template(str(chat_folder / "chatml.jinja"), tokenizer)
    for render in (template.conversation, template.prompt):
        render(said("a # \uff1c#|\uff1e"))
        with pytest.raises(DataError, match=r"message 1 contains '<\|im_start\|>'"):
            render(said("a\uff1c|im_start|\uff1e"))
        with pytest.raises(DataError, match=r"makes '<\|im_start\|>' of the texts of the messages"):
            render(said("a\uff1c|im#_start|\uff1e"))


INST = """{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system') }}{% elif
message.role == 'user' %}[INST] {{ message.content }} [/INST]{% else %} {{ message.content }}</s>{% endif %}{%
endfor %}"""
TURNS = """{% for message in messages %}{{ '<' ~ 'turn>' ~ message.role }}
{% if message.role == 'assistant' and '<think>' not in message.content %}<think></think>{% endif
%}{{ message.content }}</turn><<END>>
{% endfor %}{% if add_generation_prompt %}<turn>assistant
{% endif %}"""


@pytest.mark.parametrize(
    "source, turns, end",
    [(INST, ["[INST]", "[/INST]"], "</s>"), (TURNS, ["<turn>", "</turn>", "<<END>>"], "</turn>")],
    ids=["inst", "turns"],
)
def test_tokens_between_messages_are_reserved_also_if_they_are_not_special(
    chat_folder: Path, source: str, turns: list[str], end: str
) -> None:
    """Others of the template are not: answers may think, and a system may say how."""
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(file := str(chat_folder / "tokenizer.json"))
    encoder.add_tokens([*turns, "<think>", "</think>", "a", "\n", "#"])
    encoder.save(file)
    (chat_folder / "turns.jinja").write_text(source)
    tokenizer = build_tokenizer("HuggingFaceTokenizer", file, None)
    template = chat_template(str(chat_folder / "turns.jinja"), tokenizer)
    assert {*turns} <= {*template.marks} and "<think>" not in template.marks
    template.conversation(
        [*said("a # <think>\n"), *said("b")[:1], {"role": "assistant", "content": "<think>a</think> b"}]
    )
    for turn in turns:
        for role in ("user", "assistant"):
            with pytest.raises(DataError, match=f"message 1 contains {turn!r}".replace("[", r"\[")):
                template.prompt([{"role": role, "content": f"a {turn} b"}])
    chat = ChatPrompts(template, tokenizer)
    assert chat.end == tokenizer.pieces[end] and {*turns} <= {*chat.hidden}


@pytest.mark.parametrize("prefix", ["", "\N{LOWER ONE EIGHTH BLOCK}"])
def test_another_spelling_of_a_word_that_is_special_is_an_error(chat_folder: Path, prefix: str) -> None:
    """The library does not look for the token in normalized texts, but the model of the tokenizer has it as a word."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers

    words = [("<unk>", 0.0), ("</s>", -1.0), *((letter, -5.0) for letter in "abusertin: \N{LOWER ONE EIGHTH BLOCK}")]
    encoder = Tokenizer(models.Unigram(words, 0))
    encoder.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Prepend(prefix)])
    encoder.add_special_tokens([AddedToken(text, normalized=False) for text in ("<s>", "</s>")])
    encoder.save(file := str(chat_folder / "tokenizer.json"))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", file, None)
    template = chat_template(find_chat_template(None, chat_folder, "a test"), tokenizer)
    [(ids, _)] = tokenize_texts(tokenizer, [template.conversation(said("a"))])
    assert ids.count(tokenizer.eod) == 1
    with pytest.raises(DataError, match="message 1 contains '</s>'"):
        template.conversation(said("a\uff1c/s\uff1e"))


def test_tokens_and_mask_are_those_of_transformers(chat_folder: Path) -> None:
    """A tokenizer whose tokens go beyond the ends of answers, and that adds a blank in front of a text only."""
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(chat_folder)
    theirs.backend_tokenizer.model.dropout = None
    found = theirs.apply_chat_template(MESSAGES, return_dict=True, return_assistant_tokens_mask=True)
    ours = build_tokenizer("HuggingFaceTokenizer", str(chat_folder / "tokenizer.json"), None)
    template = chat_template(find_chat_template(None, chat_folder, "a test"), ours)
    [(ids, mask)] = tokenize_texts(ours, [template.conversation(MESSAGES)])
    assert (ids, mask) == (found["input_ids"], found["assistant_masks"]) and 0 < sum(mask) < len(mask)
    assert ours.has_dropout and ours.tokenize("kind kind") == ours.tokenize("kind kind")


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"bos_token": None}, "config.json": {"bos_token_id": 2}},
        {"special_tokens_map.json": {"bos_token": "<s>", "pad_token": {"content": "</s>", "lstrip": True}}},
        {"tokenizer_config.json": {"extra_special_tokens": {"note_token": "</s>", "other": "<s>"}}},
    ],
)
def test_special_tokens_of_a_template_are_those_of_transformers(chat_folder: Path, files: dict, is_apart: bool) -> None:
    """Also of a template in another folder than the tokenizer."""
    from transformers import PreTrainedTokenizerFast

    (chat_folder / "chat_template.jinja").unlink()
    base = {"tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}}
    for name in {**base, **files}:
        (chat_folder / name).write_text(json.dumps(base.get(name, {}) | files.get(name, {})))
    names = ("bos_token", "eos_token", "pad_token", "unk_token", "note_token", "other")
    source = "".join(f"{{{{ {name} }}}};" for name in names) + MARKED
    file = (chat_folder.parent if is_apart else chat_folder) / "chat_template.jinja"
    file.write_text(source)
    ours = build_tokenizer("HuggingFaceTokenizer", str(chat_folder / "tokenizer.json"), None)
    theirs = PreTrainedTokenizerFast.from_pretrained(chat_folder)
    expected = theirs.apply_chat_template(MESSAGES, chat_template=source, tokenize=False)
    assert chat_template(str(file), ours).conversation(MESSAGES).text == expected


@pytest.mark.parametrize("in_files", [False, True])
def test_tools_are_for_the_template_of_that_name_as_in_transformers(chat_folder: Path, in_files: bool) -> None:
    from transformers import PreTrainedTokenizerFast

    sources = {"default": MARKED, "tool_use": f"{{{{ tools | length }}}}{MARKED}", "rag": "kind"}
    theirs = PreTrainedTokenizerFast.from_pretrained(chat_folder)
    theirs.chat_template = {name: source.replace("user", "us") for name, source in sources.items()}
    (chat_folder / "chat_template.jinja").unlink()
    theirs.save_pretrained(chat_folder, save_jinja_files=in_files)
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(chat_folder / "tokenizer.json"), None)
    template = chat_template(find_chat_template(None, chat_folder, "a test"), tokenizer)
    kept = chat_folder / "kept"
    copy_carried(carried_files(chat_folder), kept)
    copies = [template, recorded_template(record_of(template), tokenizer)]
    copies += [chat_template(find_chat_template(None, kept, "a test"), tokenizer)]
    keep_chat_template(kept, {"config": {"data": {"chat_template": record_of(template)}}})
    copies += [chat_template(find_chat_template(None, kept, "a test"), tokenizer)]
    assert PreTrainedTokenizerFast.from_pretrained(kept).chat_template == theirs.chat_template
    assert not list(_contradictions({"data": {"chat_template": record_of(template)}}))
    for tools in (None, [], [{"name": "kind"}]):
        text = theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
        assert [copy.conversation(MESSAGES, tools).text for copy in copies] == [text] * 4


@pytest.mark.parametrize(("eos_token", "ends"), [("</s>", [2, 4]), ("<|im_end|>", [4, 2])])
def test_transformers_ends_a_text_where_an_answer_ends(tmp_path: Path, eos_token: str, ends: list[int]) -> None:
    """As after the fine-tuning of a Qwen that was no chat model before; its tokenizer may already name the end."""
    import tokenizers
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    special = ["</s>", "<|im_start|>", "<|im_end|>"]
    encoder = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "assistant": 1}, unk_token="a"))
    encoder.add_special_tokens(special)
    PreTrainedTokenizerFast(tokenizer_object=encoder, eos_token=eos_token).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2, "top_k": 7}')
    template = ChatTemplate(CHATML.replace("eos_token", "'<|im_end|>'").replace("bos_token", "''"), {})
    for _ in range(2):
        keep_chat_template(tmp_path, {"config": {"data": {"chat_template": record_of(template)}}})
        settings = GenerationConfig.from_pretrained(tmp_path)
        assert (settings.eos_token_id, settings.top_k) == (ends, 7)


PHI = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
STYLES = {
    "{{ '<|im_start|>' + message.role + message.content + '<|im_end|>' }}": ["<|im_start|>", "<|im_end|>"],
    "{{ '<|' + message['role'] + '|>' + '\n' + message['content'] + '<|end|>\n' }}": PHI,
    "<|{{ message.role }}|>\n{{ message.content }}<|end|>\n": PHI,
    "{{ '<|begin|>' + message.role + '<|then|>' + message.content + '<|eot_id|>' }}": ["<|begin|>", "<|then|>"],
    "{{ '<|user|>' if message.role == 'user' else '<|assistant|>' }}{{ message.content + eos_token }}": PHI[:2],
    "{% if message.role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ '<start_of_' + message.role + '>'"
    " + message.content + '<end_of_turn>' }}": ["<start_of_user>", "<start_of_assistant>", "<end_of_turn>"],
}


@pytest.mark.parametrize("written, tokens", STYLES.items(), ids=["chatml", "phi", "text", "llama", "zephyr", "gemma"])
def test_marks_of_a_template_are_tokens_of_the_tokenizer(chat_folder: Path, written: str, tokens: list[str]) -> None:
    """Also those that it makes of roles."""
    from tokenizers import Tokenizer

    content = (file := chat_folder / "tokenizer.json").read_text()
    (chosen := chat_folder / "style.jinja").write_text(f"{{% for message in messages %}}{written}{{% endfor %}}")

    def template_without(token: str | None) -> ChatTemplate:
        encoder = Tokenizer.from_str(content)
        encoder.add_tokens([other for other in (*tokens, "<|eot_id|>") if other != token])
        encoder.save(str(file))
        return chat_template(str(chosen), build_tokenizer("HuggingFaceTokenizer", str(file), None))

    template = template_without(None)
    template.conversation(said("a | < b"))
    for token in tokens:
        with pytest.raises(DataError, match="message 1 contains"):
            template.conversation(said(token))
        with pytest.raises(ConfigError, match=f"writes {re.escape(token)}, which is not a token of the tokenizer"):
            template_without(token)


@pytest.fixture
def chat_folder(tmp_path: Path) -> Path:
    """A tokenizer of Hugging Face with merges, BPE dropout and a template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted({*"\N{LOWER ONE EIGHTH BLOCK}:\nbekindusratacysoém"})
    merges = [("\n", "\n"), ("k", "i"), ("ki", "n"), ("kin", "d"), ("b", "\n")]
    vocabulary = {token: id for id, token in enumerate([*letters, *("".join(merge) for merge in merges)])}
    encoder = Tokenizer(models.BPE(vocabulary, merges, dropout=0.5))
    encoder.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    PreTrainedTokenizerFast(
        tokenizer_object=encoder, eos_token="</s>", bos_token="<s>", chat_template=MARKED.replace("user", "us")
    ).save_pretrained(tmp_path / "chat")
    return tmp_path / "chat"


WORDS = "be kind a b c user: assistant: <unk> <|endoftext|>".split()
UNK, EOD = 7, 8
WORD_TEMPLATE = """{% for message in messages %}{{ message.role }}: {{ message.content }} {% if
message.role == 'assistant' %}{{ eos_token }} {% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif
%}"""


def job_of(folder: Path, line: dict, kind: str, template: str = WORD_TEMPLATE, **settings) -> Job:
    """A job for this line, twice."""
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(WORDS)}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (folder / "lines.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(line) + "\n")
    return Job(
        inputs=(folder / "lines.jsonl",),
        output_prefix=str(folder / "out"),
        tokenizer_type="WhitespaceTokenizer",
        vocab_file=str(folder / "vocab.json"),
        conversations=kind,
        chat_template=find_chat_template(None, folder, "a test") if kind == "messages" else None,
        **settings,
    )


def written(job: Job) -> list[tuple[list[int], list[int]]]:
    """Tokens and loss mask of each document of the data set."""
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
    assert written(job_of(tmp_path, line, "messages")) == [document, document]


def test_a_template_with_half_of_a_surrogate_pair_is_kept(tmp_path: Path) -> None:
    source = f"{WORD_TEMPLATE}{{# \ud800 é #}}"  # JSON may have it, and UTF-8 has not
    job = job_of(tmp_path, {"messages": MESSAGES[1:3]}, "messages", source)
    assert len(written(job)) == 2
    record = common_chat_template([job.prefixes[TOKENS]])
    keep_chat_template(tmp_path, {"config": {"data": {"chat_template": record}}})
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"] == source
    for damaged in (b"[]", b"\xff", b'{"chat_template": 1, "special_tokens": {}}'):
        (file := chat_template_file(job.prefixes[TOKENS])).write_bytes(damaged)
        with pytest.raises(DataError, match=f"{file}: not the chat template of a data set"):
            common_chat_template([job.prefixes[TOKENS]])


def test_a_job_that_is_terminated_leaves_no_files(tmp_path: Path) -> None:
    job = job_of(tmp_path, {"prompt": "user: a ", "completion": "b c"}, "prompt-completion")
    with pytest.raises(SystemExit, match="143"):
        preprocess(job, lambda summary: signal.raise_signal(signal.SIGTERM), lambda error: None)
    assert not [*tmp_path.glob("out*")]


def test_a_completion_counts_and_the_end_after_it(tmp_path: Path) -> None:
    line = {"prompt": "user: a ", "completion": "b c"}
    document = ([5, 2, 3, 4, EOD], [0, 0, 1, 1, 1])
    assert written(job_of(tmp_path, line, "prompt-completion", append_eod=True, workers=2)) == [document] * 2


@pytest.mark.parametrize("completion", ["kind", " kind", "\nkind", "</s>kind"])
@pytest.mark.parametrize("prompt", ["be", ""])
def test_a_completion_continues_its_prompt(chat_folder: Path, tmp_path: Path, prompt: str, completion: str) -> None:
    """With a tokenizer that puts a blank in front of a text, as that of Llama 2."""
    file = str(chat_folder / "tokenizer.json")
    job = job_of(tmp_path, {"prompt": prompt, "completion": completion}, "prompt-completion")
    [(ids, mask), _] = written(replace(job, tokenizer_type="HuggingFaceTokenizer", vocab_file=file))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", file, None)
    pieces = {id: piece for piece, id in tokenizer.pieces.items()}
    text = "".join(map(pieces.__getitem__, ids)).replace("\N{LOWER ONE EIGHTH BLOCK}", " ")
    assert text.lstrip(" ") == (prompt + completion).lstrip(" ")
    assert sum(mask) == len(ids) - (len(tokenizer.tokenize(prompt)) or 1)


@pytest.mark.parametrize(
    "line, kind, message",
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "messages", "1: no message of the assistant"),
        ({"messages": [{"role": "asistant", "content": "a"}]}, "messages", "'asistant' .* did you mean assistant"),
        ({"prompt": "a", "completion": "b"}, "messages", '1: no key "messages", which --format messages reads'),
        ({"messages": "a"}, "messages", '1: "messages" must be a list of objects'),
        (
            {"messages": MESSAGES, "chat_template_kwargs": {"a": 1}},
            "messages",
            '1: "chat_template_kwargs" would change',
        ),
        ({"prompt": "a", "completion": " "}, "prompt-completion", "1: no token to train on"),
    ],
)
def test_a_line_without_anything_to_learn_is_an_error(tmp_path: Path, line: dict, kind: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        written(job_of(tmp_path, line, kind))


def test_the_lines_after_a_wrong_one_are_not_rendered(tmp_path: Path) -> None:
    """A template that takes long for each would be waited for as often as a chunk has lines."""
    job = job_of(tmp_path, line := {"messages": said("a")}, "messages", "{{ raise_exception('no') }}")
    chunk = Chunk(job.inputs[0], 1, [json.dumps(line).encode()] * 3, 0)
    assert [error.line for error in tokenize_chunk(job, chunk).errors] == [1]
    assert [error.line for error in tokenize_chunk(replace(job, skip_errors=True), chunk).errors] == [1, 2, 3]


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_device_in_place_of_a_template_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(UserError, match=f"{tmp_path / name}: .*a device, not a file"):
        chat_template(
            find_chat_template(None, tmp_path, "a test"), build_tokenizer("NullTokenizer", None, None, vocab_size=9)
        )


def test_no_template_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --chat-template"):
        find_chat_template(None, tmp_path, "a test")
    (empty := tmp_path / "empty.jinja").write_text("\n")
    with pytest.raises(ConfigError, match=f"{empty}: the chat template is empty"):
        chat_template(str(empty), build_tokenizer("NullTokenizer", None, None, vocab_size=9))
