"""Images through the command line and the server: every dialect, with the clients that people use."""

import base64
import json
import threading

import anthropic
import openai
import pytest

from conftest import ENGINE, ROOT, Server, wait_until

GOLDEN = ROOT / "tests" / "image" / "golden"


def data(name):
    return base64.b64encode((GOLDEN / name).read_bytes()).decode()


def url(name):
    return f"data:image/png;base64,{data(name)}"


def content(*names, text="What is this?"):
    images = [{"type": "image_url", "image_url": {"url": url(name)}} for name in names]
    return [*images, {"type": "text", "text": text}]


def body(*names, text="What is this?"):
    return {
        "messages": [{"role": "user", "content": content(*names, text=text)}],
        "thinking": {"type": "disabled"},
    }


def ask(server, *names, text="What is this?", client=None):
    """Text, prompt tokens and cached tokens of a greedy answer."""
    answer = (client or server.openai).chat.completions.create(
        model="model", messages=body(*names, text=text)["messages"], max_tokens=12, temperature=0,
        extra_body={"thinking": {"type": "disabled"}, "ignore_eos": True, "return_token_ids": True},
    )
    usage = answer.usage
    return answer.choices[0].token_ids, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens


def test_the_server_answers_as_the_command_line(seeing, cachalot, checkpoint, tmp_path):
    (tmp_path / "body.json").write_text(json.dumps(body("rgb.png", "420.jpg")))
    directory = checkpoint("t1-vision")
    flags = ("-n", 12, "--temperature", 0, "--ignore-eos", "--json", *ENGINE)
    expected = json.loads(cachalot("run", "-m", directory, "--chat", tmp_path / "body.json", *flags))
    ids, prompt, _ = ask(seeing, "rgb.png", "420.jpg")
    assert ids == expected["token_ids"]
    assert prompt == len(expected["prompt_token_ids"])
    tokens = seeing.post("/tokenize", body("rgb.png", "420.jpg"))
    assert tokens["token_ids"] == expected["prompt_token_ids"]
    text = cachalot("tokenize", "-m", directory, "--chat", tmp_path / "body.json", "--json")
    assert json.loads(text)["token_ids"] == expected["prompt_token_ids"]
    # Another way to prefill and to decode gives the same.
    for more in (("--chunk", 5), ("--mode", "halo"), ("--spec", "dspark", "--spec-length", 2)):
        run = cachalot("run", "-m", directory, "--chat", tmp_path / "body.json", *flags, *more)
        assert json.loads(run)["token_ids"] == expected["token_ids"], more


def test_chat_keeps_images_for_the_next_answer(cachalot, checkpoint, tmp_path):
    """A message that fails leaves its images to the next one; a reset forgets them."""

    def users(commands):
        saved = tmp_path / "saved.json"
        commands = f"/image {GOLDEN / 'rgb.png'}\n{commands}\n/save {saved}\n/quit\n"
        cachalot("chat", "-m", checkpoint("t1-vision"), "-n", 3, *ENGINE, stdin=commands.encode())
        return [m["content"] for m in json.loads(saved.read_text())["messages"] if m["role"] == "user"]

    (shown,) = users("x" * 20000 + "\nhello")
    assert "context" in cachalot.errors or "tokens" in cachalot.errors
    assert [part["type"] for part in shown] == ["image_url", "text"]
    assert shown[1]["text"] == "hello"
    assert users("/reset\nhello") == ["hello"]


def test_run_takes_image_files(cachalot, checkpoint):
    directory = checkpoint("t1-vision")
    flags = ("-n", 4, "--temperature", 0, "--json", *ENGINE)

    def run(*names):
        images = [part for name in names for part in ("--image", GOLDEN / name)]
        return json.loads(cachalot("run", "-m", directory, *images, "-p", "It shows", *flags))

    one, other = run("rgb.png"), run("gray.png")
    assert one["prompt_token_ids"] == other["prompt_token_ids"]
    assert one["logprobs"] != other["logprobs"]
    # The same pixels in another file.
    assert run("lossless.webp")["logprobs"] == one["logprobs"]
    assert len(run("rgb.png", "420.jpg")["prompt_token_ids"]) > len(one["prompt_token_ids"])
    cachalot("run", "-m", directory, "--image", GOLDEN / "expected.json", "-p", "x", status=1)
    assert "expected.json': not a JPEG, PNG, WebP or GIF image" in cachalot.errors
    cachalot("run", "-m", checkpoint(), "--image", GOLDEN / "rgb.png", "-p", "x", status=1)
    assert "takes no images" in cachalot.errors


def test_a26_another_image_finds_nothing(seeing):
    first = ask(seeing, "palette.png", text="x" * 60)
    before = first[2]
    other = ask(seeing, "gray_alpha.png", text="x" * 60)
    again = ask(seeing, "palette.png", text="x" * 60)
    assert first[1] == other[1] == again[1]
    assert again[0] == first[0]
    assert other[2] <= before + 16  # what stands before the image
    assert again[2] > first[1] - 32
    assert seeing.metric("cachalot_image_seconds_count") >= 2


@pytest.mark.parametrize("tier", ["disk", "redis"])
def test_a26_tiers_tell_images_apart(cachalot, checkpoint, redis, tmp_path, tier):
    """A second server on the same store finds the prompt with its image, and nothing for another image."""
    flags = ("--disk", tmp_path / "disk") if tier == "disk" else ("--redis", redis.url)
    text = "x" * 200  # more than is replayed where the store has no window states
    first = Server(cachalot, checkpoint("t1-vision"), *flags)
    ids, prompt, cached = ask(first, "palette.png", text=text)
    assert cached == 0
    pages = (prompt - 1) // 16
    wait_until(lambda: first.metric(f'cachalot_tier_stored_total{{tier="{tier}"}}') >= pages)
    first.stop()
    second = Server(cachalot, checkpoint("t1-vision"), *flags)
    other = ask(second, "gray_alpha.png", text=text)
    assert other[1] == prompt
    assert other[2] <= 16  # what stands before the image
    assert ask(second, "palette.png", text=text) == (ids, prompt, 16 * pages)
    assert second.metric(f'cachalot_tier_hits_total{{tier="{tier}"}}') >= pages
    assert second.metric(f'cachalot_tier_faults_total{{tier="{tier}"}}') == 0
    second.stop()


def test_the_dialects_agree(seeing):
    chat = seeing.openai.chat.completions.create(
        model="model", messages=body("rgb.png")["messages"], max_tokens=12, temperature=0,
        extra_body={"thinking": {"type": "disabled"}, "ignore_eos": True},
    )
    text, prompt = chat.choices[0].message.content, chat.usage.prompt_tokens
    messages = [{"role": "user", "content": [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data("rgb.png")}},
        {"type": "text", "text": "What is this?"},
    ]}]
    asked = dict(model="claude-sonnet-4-5", thinking={"type": "disabled"}, messages=messages)
    message = seeing.anthropic.messages.create(
        **asked, max_tokens=12, extra_body={"ignore_eos": True, "temperature": 0})
    assert message.content[0].text.strip() == text.strip()
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == prompt
    assert seeing.anthropic.messages.count_tokens(**asked).input_tokens == prompt
    response = seeing.openai.responses.create(
        model="model", max_output_tokens=12, temperature=0, reasoning={"effort": "none"},
        input=[{"role": "user", "content": [
            {"type": "input_image", "image_url": url("rgb.png"), "detail": "auto"},
            {"type": "input_text", "text": "What is this?"},
        ]}],
        extra_body={"ignore_eos": True},
    )
    assert response.output_text.strip() == text.strip()
    assert response.usage.input_tokens == prompt


def test_streams_and_tool_results(seeing):
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "camera", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": content("420.jpg", text="done")},
    ]
    request = dict(
        model="model", messages=messages, max_tokens=12, seed=4,
        tools=[{"type": "function", "function": {"name": "camera", "parameters": {"type": "object"}}}],
        extra_body={"thinking": {"type": "disabled"}},
    )
    whole = seeing.openai.chat.completions.create(**request)
    pieces = seeing.openai.chat.completions.create(**request, stream=True)
    text = "".join(c.delta.content or "" for chunk in pieces for c in chunk.choices)
    assert text == (whole.choices[0].message.content or "")
    plain = [*messages[:2], {"role": "tool", "tool_call_id": "c1", "content": "done"}]
    without = seeing.post("/tokenize", {"messages": plain, "tools": request["tools"],
                                        "thinking": {"type": "disabled"}})
    assert whole.usage.prompt_tokens > without["count"] + 4


def test_many_clients_at_once_get_what_they_get_alone(seeing):
    names = ["rgb.png", "gray.png", "420.jpg", "lossy.webp", "plain.gif", "bits.png"]
    expected = {name: ask(seeing, name, text=f"{name}?")[0] for name in names}
    wrong = []

    def client(i):
        for k in range(4):
            name = names[(i + k) % len(names)]
            if ask(seeing, name, text=f"{name}?")[0] != expected[name]:
                wrong.append(name)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_errors_name_the_field(seeing, server):
    for image, message in (
        ("https://example.com/a.png", "fetches nothing from the network"),
        ("data:image/png;base64,AAAA", "not a JPEG, PNG, WebP or GIF image"),
        (url("420.jpg")[:400], "JPEG: "),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            seeing.openai.chat.completions.create(model="model", messages=[
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": image}}]}])
        assert error.value.param == "messages[0].content[0].image_url.url"
        assert message in error.value.message
    with pytest.raises(anthropic.BadRequestError, match="source.url"):
        seeing.anthropic.messages.create(
            model="claude-sonnet-4-5", max_tokens=4, messages=[{"role": "user", "content": [
                {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}]}])
    with pytest.raises(openai.BadRequestError, match="takes no images"):
        server.openai.chat.completions.create(model="model", messages=[
            {"role": "user", "content": content("rgb.png")}])
