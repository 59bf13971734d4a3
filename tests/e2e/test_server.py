"""The server as a black box, driven by the clients that people use: the openai and anthropic Python
packages, and sockets where no client would do such a thing."""

import json
import signal
import socket
import subprocess
import threading
import urllib.request

import anthropic
import openai
import pytest

from conftest import ENGINE, Server, read_lines, wait_until, write_lines


def tokens(count, seed=1):
    return [3 + (seed * 7919 + i * 104729) % 256 for i in range(count)]


def test_models_and_state(server):
    models = server.openai.models.list().data
    assert models[0].id == "model"
    assert "deepseek-flash" in [model.id for model in models]
    assert server.openai.models.retrieve("model").id == "model"
    assert json.loads(server.get("/health")[1])["status"] == "ok"
    page = server.get("/")[1]
    assert "<!DOCTYPE html>" in page and "http" not in page.split("<style>")[0]


def test_a_prompt_of_the_whole_context_is_scored(cachalot, checkpoint):
    """No token has to be generated, so there need be no room for one."""
    running = Server(cachalot, checkpoint(), "--max-context", 48)
    prompt = [0, *tokens(47)]
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
    choice = running.post("/v1/completions", body)["choices"][0]
    scores = choice["logprobs"]["token_logprobs"]
    assert len(scores) == 48 and scores[0] is None and all(score < 0 for score in scores[1:])
    echoed = running.post("/v1/completions", {**body, "logprobs": None})
    assert echoed["usage"]["prompt_tokens"] == 48 and echoed["choices"][0]["logprobs"] is None
    error = running.post("/v1/completions", {**body, "max_tokens": 1}, allow=(400,))["error"]
    assert error["code"] == "context_length_exceeded"
    running.stop()


def test_flags_that_do_nothing_are_refused(cachalot, checkpoint, tmp_path):
    for flag in ("--dump", "--force"):
        cachalot("serve", "-m", checkpoint(), "--port", 0, flag, tmp_path, status=2)
        assert flag in cachalot.errors


def test_addresses_with_colons_are_printed_in_brackets(cachalot, checkpoint):
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6")
    process = subprocess.Popen(
        [cachalot.path, "serve", "-m", checkpoint(), "--host", "::1", "--port", "0", *ENGINE],
        stdout=subprocess.PIPE, text=True,
    )
    url = process.stdout.readline().strip()
    assert url.startswith("http://[::1]:")
    assert json.load(urllib.request.urlopen(url + "/health")) == {"status": "ok"}
    process.kill()
    process.communicate()


def test_a_completion_equals_the_command_line(server, cachalot, checkpoint, tmp_path):
    prompt = [0, *tokens(20)]
    lines = write_lines(tmp_path / "p.jsonl", [{"tokens": prompt}])
    flags = ("-n", 8, "--ignore-eos", "--seed", 5, "--temperature", 0.8, "--top-p", 0.9, *ENGINE)
    text = cachalot("run", "-m", checkpoint(), "--input", lines, "--output", "-", *flags)
    expected = read_lines(text)[0]
    answer = server.openai.completions.create(
        model="model", prompt=prompt, max_tokens=8, seed=5, temperature=0.8, top_p=0.9, logprobs=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    choice = answer.choices[0]
    assert choice.token_ids == expected["token_ids"]
    assert choice.logprobs.token_logprobs == expected["logprobs"]
    assert choice.text == expected["text"]
    assert choice.finish_reason == "length"
    assert answer.usage.prompt_tokens == 21 and answer.usage.completion_tokens == 8


def test_echo_scores_as_the_command_line(server, cachalot, checkpoint, tmp_path):
    prompt = [0, *tokens(30, 2)]
    lines = write_lines(tmp_path / "s.jsonl", [{"tokens": prompt}])
    text = cachalot("score", "-m", checkpoint(), "--input", lines, "--output", "-", "--top", 3, *ENGINE)
    expected = read_lines(text)[0]
    answer = server.openai.completions.create(
        model="model", prompt=prompt, max_tokens=0, echo=True, logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx(expected["logprobs"][1:], abs=0)
    for got, best in zip(logprobs.top_logprobs[1:], expected["top"][1:]):
        assert max(got.values()) == best[0][1]


def test_streams_equal_whole_answers(server):
    for thinking in ("enabled", "disabled"):
        body = dict(
            model="model", messages=[{"role": "user", "content": "hello"}], max_tokens=24, seed=3,
            extra_body={"thinking": {"type": thinking}, "return_token_ids": True},
        )
        whole = server.openai.chat.completions.create(**body)
        content = reasoning = ""
        ids, finish, usage = [], None, None
        for chunk in server.openai.chat.completions.create(
            **body, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                content += choice.delta.content or ""
                reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                ids += getattr(choice, "token_ids", None) or []
                finish = choice.finish_reason or finish
        message = whole.choices[0].message
        assert content == message.content
        assert reasoning == (getattr(message, "reasoning_content", None) or "")
        assert ids == whole.choices[0].token_ids
        assert finish == whole.choices[0].finish_reason
        assert usage.completion_tokens == whole.usage.completion_tokens == len(ids)


def test_anthropic_client(server):
    body = dict(
        model="claude-any", max_tokens=24, messages=[{"role": "user", "content": "hello"}],
        system="Be brief.", thinking={"type": "enabled", "budget_tokens": 1024},
    )
    whole = server.anthropic.messages.create(**body)
    assert whole.stop_reason in ("max_tokens", "end_turn")
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens > 5
    with server.anthropic.messages.stream(**body) as stream:
        names = [event.type for event in stream]
        message = stream.get_final_message()
    assert names[0] == "message_start" and names[-1] == "message_stop"
    assert message.usage.output_tokens > 0
    # A repeated prompt is read from the cache, and says so.
    long = dict(body, system="Be brief. " * 40)
    server.anthropic.messages.create(**long)
    assert server.anthropic.messages.create(**long).usage.cache_read_input_tokens > 0
    counted = server.anthropic.messages.count_tokens(
        model=body["model"], messages=body["messages"], system=body["system"], thinking=body["thinking"]
    )
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_responses_client(server):
    body = dict(model="model", input="hello", max_output_tokens=16, reasoning={"effort": "none"})
    whole = server.openai.responses.create(**body)
    assert whole.status in ("completed", "incomplete")
    assert whole.usage.output_tokens <= 16
    events = list(server.openai.responses.create(**body, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")


def test_structured_output_is_valid(server):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "b": {"type": "boolean"}},
              "required": ["n", "b"], "additionalProperties": False}
    for seed in range(3):
        answer = server.openai.chat.completions.create(
            model="model", messages=[{"role": "user", "content": "go"}], max_tokens=200, seed=seed,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            extra_body={"thinking": {"type": "disabled"}},
        )
        if answer.choices[0].finish_reason == "stop":
            value = json.loads(answer.choices[0].message.content)
            assert isinstance(value["n"], int) and isinstance(value["b"], bool)
    answer = server.openai.completions.create(
        model="model", prompt="x", max_tokens=20, extra_body={"structured_outputs": {"choice": ["krill", "kelp"]}}
    )
    assert answer.choices[0].text in ("krill", "kelp")


@pytest.mark.parametrize("thinking", [False, True])
def test_a52_forced_calls(server, thinking):
    tool = {"type": "function", "function": {"name": "pick", "parameters": {
        "type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}}}
    answer = server.openai.chat.completions.create(
        model="model", messages=[{"role": "user", "content": "go"}], tools=[tool], seed=1, max_tokens=120,
        tool_choice={"type": "function", "function": {"name": "pick"}}, parallel_tool_calls=False,
        # The reasoning of a random model would not end by itself.
        logit_bias={} if not thinking else {str(end_of_thinking(server)): 100},
        extra_body={"thinking": {"type": "enabled" if thinking else "disabled"}},
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.name == "pick"
    assert json.loads(choice.message.tool_calls[0].function.arguments)["n"] in (1, 2)


def end_of_thinking(server):
    ids = server.post("/tokenize", {"messages": [{"role": "user", "content": "x"}], "thinking": {"type": "disabled"}})
    return ids["token_ids"][-1]


def test_a50_choices_with_a_seed(server):
    def texts():
        answer = server.openai.completions.create(
            model="model", prompt=tokens(5), n=4, seed=7, temperature=1, max_tokens=12,
            extra_body={"ignore_eos": True},
        )
        return [choice.text for choice in answer.choices]

    first = texts()
    assert len(set(first)) > 1 and texts() == first


def test_a51_bad_ids_leave_neighbours_alone(server):
    prompt = tokens(12, 9)

    def good():
        answer = server.openai.completions.create(
            model="model", prompt=prompt, max_tokens=16, temperature=0, extra_body={"return_token_ids": True}
        )
        return answer.choices[0].token_ids

    alone = good()
    results = []
    thread = threading.Thread(target=lambda: results.append(good()))
    thread.start()
    for bad in (512, -1, 2**40):
        with pytest.raises(openai.BadRequestError):
            server.openai.completions.create(
                model="model", prompt=prompt, max_tokens=4, extra_body={"stop_token_ids": [bad]}
            )
    thread.join()
    assert results == [alone]


@pytest.mark.parametrize("stream", [False, True])
def test_a31_disconnecting_frees_everything(server, stream):
    wait_until(lambda: server.metric("cachalot_running") == 0)
    body = json.dumps({"prompt": tokens(40), "max_tokens": 8000, "ignore_eos": True, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: server.metric("cachalot_running") == 1)
    wait_until(lambda: server.metric("cachalot_running") == 0)


def test_errors_name_the_field(server):
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.chat.completions.create(model="model", messages=[{"role": "user", "content": "x"}], temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        server.openai.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(anthropic.BadRequestError) as caught:
        server.anthropic.messages.create(model="claude-x", max_tokens=0, messages=[])
    assert "messages" in str(caught.value)
    context = server.openai.models.list().data[0].context_length
    answer = server.post("/v1/completions", {"prompt": [5] * (context + 1)}, allow=(400,))
    assert answer["error"]["code"] == "context_length_exceeded"


def test_a71_nested_bodies(server):
    for depth in (64, 1000, 100000):
        body = b'{"prompt": "x", "unknown": ' + b"[" * depth + b"]" * depth + b"}"
        assert "nested" in server.request("POST", "/v1/completions", body, allow=(400,))[1]
    assert server.get("/health")


def test_tokenize_equals_the_command_line(server, cachalot, checkpoint, tmp_path):
    text = "a whale \U0001f40b"
    expected = json.loads(cachalot("tokenize", "-m", checkpoint(), "--text", text, "--json"))
    assert server.post("/tokenize", {"text": text})["token_ids"] == expected["token_ids"]
    body = {"messages": [{"role": "user", "content": text}], "reasoning_effort": "max"}
    (tmp_path / "c.json").write_text(json.dumps(body))
    expected = json.loads(cachalot("tokenize", "-m", checkpoint(), "--chat", tmp_path / "c.json", "--json"))
    got = server.post("/tokenize", body)
    assert got["token_ids"] == expected["token_ids"]
    assert server.post("/detokenize", {"token_ids": got["token_ids"]})["text"] == got["text"]


def test_many_streams_at_once(server):
    def one(seed, results):
        pieces = []
        for chunk in server.openai.completions.create(
            model="model", prompt=tokens(6, seed), max_tokens=8, temperature=0, stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        ):
            for choice in chunk.choices:
                pieces += getattr(choice, "token_ids", None) or []
        results[seed] = pieces

    results = {}
    threads = [threading.Thread(target=one, args=(seed, results)) for seed in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = {}
    for seed in (0, 11, 23):
        one(seed, alone)
    assert all(results[seed] == alone[seed] for seed in alone)
    assert len(results) == 24 and all(len(ids) == 8 for ids in results.values())


def test_keys_limits_and_drain(cachalot, checkpoint):
    server = Server(
        cachalot, checkpoint(), "--api-key", "secret", "--max-body", 2000, "--max-running", 1,
        "--max-waiting", 1, "--drain-timeout", 60, "--model-name", "krill",
    )
    body = {"prompt": tokens(4), "max_tokens": 4}
    server.request("POST", "/v1/completions", body, allow=(401,))
    key = {"Authorization": "Bearer secret"}
    assert json.loads(server.request("POST", "/v1/completions", body, key)[1])["model"] == "krill"
    server.request("POST", "/v1/completions", b"x" * 3000, key, allow=(413,))

    # One runs, one waits, the third is refused with a hint.
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: {}\r\n\r\n"
    body = {"prompt": tokens(4), "max_tokens": 8000, "ignore_eos": True}
    data = json.dumps(body)
    with socket.create_connection(("127.0.0.1", server.port)) as first, \
         socket.create_connection(("127.0.0.1", server.port)) as second:
        for client, state in ((first, "cachalot_running"), (second, "cachalot_waiting")):
            client.sendall((head.format(len(data)) + data).encode())
            wait_until(lambda: server.metric(state) == 1)
        _, _, headers = server.request("POST", "/v1/completions", body, key, allow=(429,))
        assert int(headers["retry-after"]) > 0
    wait_until(lambda: server.metric("cachalot_running") + server.metric("cachalot_waiting") == 0)

    # One in progress ends, new ones are refused.
    body["max_tokens"] = 1500
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(server.request("POST", "/v1/completions", body, key)[0])
    )
    thread.start()
    wait_until(lambda: server.metric("cachalot_running") == 1)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.get("/ready", allow=(200, 503))[0] == 503)
    server.request("POST", "/v1/completions", body, key, allow=(503,))
    thread.join()
    assert answers == [200]
    assert server.process.wait(60) == 0


def test_deadlines(cachalot, checkpoint):
    server = Server(cachalot, checkpoint(), "--request-timeout", 60, "--max-running", 1)
    long = {"prompt": tokens(4), "max_tokens": 16000, "ignore_eos": True}
    answer = server.post("/v1/completions", long | {"timeout": 0.3}, allow=(504,))
    assert answer["error"]["code"] == "deadline_exceeded"
    # In a stream it is the last event; one that waits in the queue has a deadline, too.
    waiting = []
    thread = threading.Thread(
        target=lambda: waiting.append(server.post("/v1/completions", long | {"timeout": 0.3}, allow=(504,)))
    )
    with pytest.raises(openai.APIError) as caught:
        for chunk in server.openai.completions.create(model="model", **long_fields(long, 1.5), stream=True):
            if not thread.ident:
                thread.start()
    assert "out of time" in str(caught.value)
    thread.join()
    assert waiting[0]["error"]["code"] == "deadline_exceeded"
    assert server.metric("cachalot_running") + server.metric("cachalot_waiting") == 0
    assert server.metric("cachalot_failed_total") == 3
    assert server.metric('cachalot_cache_pages_in_use{pool="main"}') == 0
    server.stop()


def long_fields(body, timeout):
    known = {key: body[key] for key in ("prompt", "max_tokens")}
    return known | {"extra_body": {"ignore_eos": body["ignore_eos"], "timeout": timeout}}


@pytest.mark.parametrize("spec", ["off", "dspark"])
def test_a32_urgent_requests_run_first_and_change_nothing(cachalot, checkpoint, spec):
    """A request that is preempted again and again, between drafts too, says what it says alone."""
    server = Server(cachalot, checkpoint(), "--max-running", 1, "--spec", spec, "--spec-length", 3 if spec != "off" else 0)
    body = {"prompt": tokens(20), "max_tokens": 400, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    alone = server.post("/v1/completions", body)["choices"][0]["token_ids"]
    results = []
    thread = threading.Thread(
        target=lambda: results.append(server.post("/v1/completions", body | {"priority": -1})["choices"][0]["token_ids"])
    )
    thread.start()
    wait_until(lambda: server.metric("cachalot_running") == 1)
    urgent = 0
    while thread.is_alive() and urgent < 20:
        server.post("/v1/completions", {"prompt": tokens(9, 2 + urgent), "max_tokens": 2, "ignore_eos": True})
        urgent += 1
    thread.join()
    assert results == [alone]
    assert server.metric("cachalot_preemptions_total") > 1
    if spec != "off":
        assert server.metric("cachalot_draft_tokens_total") > 100
    server.stop()


def test_prefixes_survive_a_restart(cachalot, checkpoint, tmp_path):
    body = {"prompt": [0, *tokens(100, 4)], "max_tokens": 6, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True}
    answers = []
    for _ in range(2):
        server = Server(cachalot, checkpoint(), "--disk", tmp_path / "cache")
        answers.append(server.post("/v1/completions", body))
        server.stop()
    cold, warm = answers
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < warm["usage"]["prompt_tokens_details"]["cached_tokens"] < 101
    assert warm["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]


def test_wrong_flags(cachalot, checkpoint):
    cachalot("serve", "--port", "banana", status=2)
    cachalot("serve", "-m", checkpoint(), "--host", "nowhere.example", "--port", 0, status=1)
    assert "nowhere.example" in cachalot.errors
