"""Known text through every dialect and client: the openai and anthropic packages, and curl."""

import json
import subprocess

import pytest

from conftest import Server
from scripted import chain_of, write_scripted

# No byte twice; characters of two and four bytes, which arrive in pieces.
REASONING = "I dive"
CONTENT = "Kr\u00f8ls\U0001f40b!"
MESSAGES = [{"role": "user", "content": "go"}]
THINKING = {False: {"thinking": {"type": "disabled"}}, True: {"thinking": {"type": "enabled"}}}


@pytest.fixture(scope="module", params=["off", "dspark"])
def scripted(request, cachalot, checkpoint, tmp_path_factory):
    """A server whose model thinks REASONING and answers CONTENT, without drafts and with (wrong) ones."""
    directory = tmp_path_factory.mktemp("scripted") / "model"
    config = json.loads((checkpoint() / "config.json").read_text())
    vocabulary = json.loads((checkpoint() / "tokenizer.json").read_text())["added_tokens"]
    control = {token["content"]: token["id"] for token in vocabulary}
    chain = chain_of(control["<think>"], REASONING, control["</think>"], CONTENT, config["eos_token_id"])
    write_scripted(checkpoint(), directory, chain)
    server = Server(cachalot, directory, "--spec", request.param)
    yield server
    server.stop()


def expected(thinking):
    return (REASONING if thinking else "", CONTENT)


def curl(server, path, body, *flags):
    command = ["curl", "-sS", "--no-buffer", "-w", "\n%{http_code}", *flags, server.url + path, "-d", json.dumps(body)]
    text = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout.decode()
    answer, status = text.rsplit("\n", 1)
    return int(status), answer


def events(text):
    """The data of server-sent events, as a client without a library reads them."""
    return [piece.split("data: ", 1)[1] for piece in text.split("\n\n") if "data: " in piece]


@pytest.mark.parametrize("thinking", [False, True])
def test_openai_chat(scripted, thinking):
    body = dict(model="model", messages=MESSAGES, extra_body=THINKING[thinking])
    answer = scripted.openai.chat.completions.create(**body, n=3, logprobs=True)
    for choice in answer.choices:
        assert (getattr(choice.message, "reasoning_content", ""), choice.message.content) == expected(thinking)
        assert choice.finish_reason == "stop"
        assert all(token.logprob > -1e-3 for token in choice.logprobs.content)
        assert b"".join(bytes(token.bytes) for token in choice.logprobs.content) == CONTENT.encode()
    # One token per byte, the end of thinking among them.
    reasoning = len(REASONING) + 1 if thinking else 0
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3 * reasoning
    assert answer.usage.completion_tokens == 3 * (reasoning + len(CONTENT.encode()))

    pieces = {"content": [], "reasoning_content": []}
    for chunk in scripted.openai.chat.completions.create(**body, stream=True):
        for key, values in pieces.items():
            values += [getattr(c.delta, key, None) or "" for c in chunk.choices]
    assert ("".join(pieces["reasoning_content"]), "".join(pieces["content"])) == expected(thinking)
    assert any("\U0001f40b" in piece for piece in pieces["content"])  # a character is never cut


def test_stop_strings_and_lengths(scripted):
    for stop, text in (("\U0001f40b", "Kr\u00f8ls"), (["x", "ls"], "Kr\u00f8"), ("K", "")):
        choice = scripted.openai.chat.completions.create(
            model="model", messages=MESSAGES, stop=stop, extra_body=THINKING[False]
        ).choices[0]
        assert (choice.message.content, choice.finish_reason) == (text, "stop")
    # Cut off inside of a character.
    choice = scripted.openai.chat.completions.create(
        model="model", messages=MESSAGES, max_tokens=3, extra_body=THINKING[False]
    ).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Kr\ufffd", "length")


def test_completions_and_echo(scripted):
    answer = scripted.openai.completions.create(model="model", prompt="K", max_tokens=50, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == (CONTENT, "stop")
    assert all(logprob > -1e-3 for logprob in choice.logprobs.token_logprobs[1:])


@pytest.mark.parametrize("thinking", [False, True])
def test_anthropic(scripted, thinking):
    kind = {"type": "enabled", "budget_tokens": 1024} if thinking else {"type": "disabled"}
    body = dict(model="claude-any", max_tokens=64, messages=MESSAGES, thinking=kind)

    def read(message):
        blocks = {block.type: getattr(block, block.type) for block in message.content}
        return blocks.get("thinking", ""), blocks["text"], message.stop_reason

    assert read(scripted.anthropic.messages.create(**body)) == (*expected(thinking), "end_turn")
    with scripted.anthropic.messages.stream(**body) as stream:
        assert "".join(stream.text_stream) == CONTENT
        assert read(stream.get_final_message()) == (*expected(thinking), "end_turn")


def test_responses(scripted):
    body = dict(model="model", input="go", reasoning={"effort": "high"})
    whole = scripted.openai.responses.create(**body)
    assert (whole.status, whole.output_text) == ("completed", CONTENT)
    seen = {"response.reasoning_text.delta": "", "response.output_text.delta": ""}
    for event in scripted.openai.responses.create(**body, stream=True):
        if event.type in seen:
            seen[event.type] += event.delta
    assert tuple(seen.values()) == (REASONING, CONTENT)


def test_curl(scripted):
    status, text = curl(scripted, "/v1/chat/completions", {"messages": MESSAGES})
    message = json.loads(text)["choices"][0]["message"]
    assert (status, message["reasoning_content"], message["content"]) == (200, REASONING, CONTENT)
    status, text = curl(scripted, "/v1/chat/completions", {"messages": MESSAGES, "stream": True})
    *chunks, last = events(text)
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
    assert (status, last) == (200, "[DONE]")
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == REASONING
    assert "".join(delta.get("content") or "" for delta in deltas) == CONTENT
    status, text = curl(scripted, "/v1/messages", {"messages": MESSAGES, "max_tokens": 64}, "-H", "x-api-key: any")
    assert (status, json.loads(text)["content"][-1]["text"]) == (200, CONTENT)
    status, text = curl(scripted, "/v1/chat/completions", {"messages": MESSAGES, "temperature": 9})
    assert (status, json.loads(text)["error"]["param"]) == (400, "temperature")
    # HTTP/1.0, and a body that is announced first.
    for flag in ("--http1.0", "-HExpect: 100-continue"):
        status, text = curl(scripted, "/v1/completions", {"prompt": "K", "max_tokens": 3}, flag)
        assert (status, json.loads(text)["choices"][0]["text"]) == (200, "r\u00f8")
