"""Valid bodies of requests, and the errors of invalid ones."""

import base64
import io
import json
from dataclasses import replace

import pytest
from PIL import Image
from support.command_lines import parse
from support.served import Words

from megatron.tools.serving.protocol import RequestError, RequestLimits, read_chat, read_completion

LIMITS = RequestLimits(context=64, max_tokens=32, max_choices=4)


def read(body):
    return read_completion(body if isinstance(body, bytes) else json.dumps(body).encode(), "my", Words(), LIMITS)


def test_defaults_are_those_of_openai():
    asked = read({"model": "my", "prompt": "once upon"})
    assert (asked.prompts, asked.texts, asked.n, asked.max_tokens) == (((4, 4),), ("once upon",), 1, 16)
    assert (asked.temperature, asked.top_p, asked.stop, asked.echo, asked.stream) == (1, 1, (), False, False)
    assert asked.seed != read({"prompt": "once upon"}).seed  # drawn anew


@pytest.mark.parametrize(
    ("prompt", "prompts", "texts"),
    [
        (["a", "bb c"], ((1,), (2, 1)), ("a", "bb c")),
        ([3, 1], ((3, 1),), ("xxx x",)),
    ],
)
def test_prompts_are_texts_or_tokens(prompt, prompts, texts):
    asked = read({"prompt": prompt, "stop": "x"})
    assert (asked.prompts, asked.texts, asked.stop) == (prompts, texts, ("x",))


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b"{", None, "the body is not JSON: "),
        (b'{"prompt": "a", "user": NaN}', None, "the body is not JSON: NaN"),
        (b'{"prompt": "a\\ud800"}', "prompt", "prompt: character 1 of the text is U+D800"),
        (b'{"prompt": "a", "\\ud800": 1}', "\\ud800", "\\ud800 is not a field"),
        (b'{"prompt": "a", "prompt": "b"}', None, 'the body is not JSON: the key "prompt" occurs twice'),
        (b'{"prompt": "\xff"}', None, "the body is not JSON: "),
        (b"[" * 3000, None, "the body is not JSON: nested too deep"),
        ({}, "prompt", "prompt is missing"),
        ({"prompt": [1, "a"]}, "prompt", "prompt must be text"),
        ({"prompt": [77]}, "prompt", "prompt: token 77 is not in the vocabulary"),
        ({"prompt": "a", "max_token": 3}, "max_token", "max_token is not a field"),
        ({"prompt": "a", "n": "2"}, "n", "n: input should be a valid integer"),
        (
            {"prompt": "a", "temperature": 1e-45},
            "temperature",
            "temperature: input should be 0, which is greedy, or 1e-06",
        ),
        ({"prompt": "a", "max_tokens": 33}, "max_tokens", "max_tokens: 33 is more than this server's 32"),
        ({"prompt": ["a", "b"], "n": 3}, "n", "n: 2 prompts of 3 completions are more than this server's 4"),
        ({"prompt": "a " * 60}, "prompt", "the model takes 64 tokens, and 60 of the prompt and 16 of the completion"),
        ({"prompt": "a", "model": "other"}, "model", "no model 'other' here; the one served is 'my'"),
    ],
)
def test_a_mistake_is_named(body, param, message):
    with pytest.raises(RequestError) as caught:
        read(body)
    error = caught.value
    assert error.message.startswith(message) and error.param == param
    assert error.status == (404 if param == "model" else 400)


class Chat:
    """A chat whose template writes what is said; a token is a character."""

    stop = hidden = ()

    def text(self, messages):
        return "".join(
            part if isinstance(part, str) else part["text"]
            for message in messages
            for part in (message["content"] if isinstance(message["content"], list) else [message["content"]])
        )

    def tokenize(self, text):
        return [ord(character) for character in text]

    def tokens(self, messages):
        return self.tokenize(self.text(messages))


def test_a_limit_of_two_values_is_refused():
    body = {"messages": [{"role": "user", "content": "hm?"}], "max_tokens": 2}

    def read_with(limit):
        return read_chat(json.dumps(body | {"max_completion_tokens": limit}).encode(), "my", Chat(), LIMITS)

    assert read_with(2).max_tokens == read_with(None).max_tokens == 2
    with pytest.raises(RequestError, match="max_tokens 2 and max_completion_tokens 3 .*: give one") as caught:
        read_with(3)
    assert caught.value.status == 400


def read_images(*urls):
    model = parse("llava").model
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls] + [{"type": "text", "text": "hm?"}]
    body = json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 2}).encode()
    return read_chat(body, "my", Chat(), replace(LIMITS, context=16, reads_images=model)).prompts[0], model


def test_images_of_a_chat_become_placeholders():
    file = io.BytesIO()
    Image.new("RGB", (9, 9), "blue").save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    prompt, model = read_images(url)
    assert list(prompt) == [*[model.image_token_id] * model.image_tokens, *map(ord, "\nhm?")]
    assert (prompt.images == (0, 0, 255)).all() and prompt.images.shape == (1, 28, 28, 3)
    for urls, message in (
        *(([other], "nothing is fetched") for other in ("http://127.0.0.1:9/a.png", "file:///etc/passwd", None, 3)),
        (["data:text/plain;base64,AA"], "nothing is fetched"),
        ([url[:-4] + "?"], "not base64"),
        ([url[:60]], "image"),
        ([url] * 5, "more than 4 images"),
    ):
        with pytest.raises(RequestError, match=f"messages: .*{message}") as error:
            read_images(*urls)
        assert error.value.status == 400 and "\n" not in error.value.message
