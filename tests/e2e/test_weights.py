"""Swapping the weights of a running server: what clients see before, during and after."""

import json
import random
import shutil
import threading

import pytest

from conftest import ENGINE, Server, read_lines, wait_until, write_lines

_random = random.Random(2)
PROMPT = [_random.randrange(3, 512) for _ in range(200)]
LONG = 1500


def generate(cachalot, directory, tmp_path, count):
    """What the command line gives for PROMPT, greedily."""
    lines = write_lines(tmp_path / "prompt.jsonl", [{"tokens": PROMPT}])
    text = cachalot(
        "run", "-m", directory, "--input", lines, "--output", "-", "-n", count, "--temperature", 0,
        "--ignore-eos", *ENGINE,
    )
    return read_lines(text)[0]["token_ids"]


def complete(server, **fields):
    answer = server.openai.completions.create(
        model="model", prompt=PROMPT, max_tokens=8, temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True}, **fields,
    )
    cached = answer.usage.prompt_tokens_details.cached_tokens
    return [choice.token_ids for choice in answer.choices], cached, answer.system_fingerprint


def swap(server, directory, key="admin", allow=(200,)):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    status, text, _ = server.request(
        "POST", "/update_weights_from_disk", {"model_path": str(directory)}, headers, allow
    )
    return status, json.loads(text)


def test_a27_weights_are_swapped_while_requests_run(cachalot, checkpoint, tmp_path):
    old, new = checkpoint(), checkpoint(seed=2)
    old_ids, new_ids = (generate(cachalot, d, tmp_path, LONG) for d in (old, new))
    assert old_ids[:8] != new_ids[:8]
    server = Server(cachalot, old, "--admin-key", "admin", "--api-key", "key", "--disk", tmp_path / "disk")
    ids, cached, old_print = complete(server)
    assert (ids, cached) == ([old_ids[:8]], 0)

    streamed, begun = [], threading.Event()

    def stream():
        for chunk in server.openai.completions.create(
            model="model", prompt=PROMPT, max_tokens=LONG, temperature=0, stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        ):
            assert chunk.system_fingerprint == old_print
            for choice in chunk.choices:
                streamed.extend(choice.token_ids or [])
            begun.set()

    reader = threading.Thread(target=stream)
    reader.start()
    assert begun.wait(60)
    status, body = swap(server, new)
    assert status == 200 and body["success"]
    # The stream still runs, on its weights, beside requests on the new ones.
    assert server.metric("cachalot_weight_versions") == 2
    ids, cached, new_print = complete(server, n=2)
    assert (ids, cached) == ([new_ids[:8]] * 2, 0)
    assert new_print == "cachalot-" + body["weight_version"] != old_print
    reader.join()
    assert streamed == old_ids
    wait_until(lambda: server.metric("cachalot_weight_versions") == 1)
    assert server.metric("cachalot_weight_swaps_total") == 1

    # Back again: the old prefix is still on the disk, and the new one afterwards.
    swap(server, old)
    assert complete(server) == ([old_ids[:8]], 192, old_print)
    swap(server, new)
    assert complete(server) == ([new_ids[:8]], 192, new_print)
    assert "are in use" in server.stop()


def test_a_checkpoint_that_does_not_fit_changes_nothing(cachalot, checkpoint, tmp_path):
    old = checkpoint()
    expected = generate(cachalot, old, tmp_path, 8)
    server = Server(cachalot, old, "--admin-key", "admin", "--api-key", "key")
    before = complete(server)
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint(seed=2), damaged)
    shard = next(damaged.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1000])
    foreign = checkpoint("t1", "index_topk=5")
    for directory, what in (
        (tmp_path / "missing", "missing"), (tmp_path, "config.json"), (damaged, shard.name),
        (foreign, "text_config.index_topk is 5, not 4"),
    ):
        status, body = swap(server, directory, allow=(400,))
        assert body["error"]["code"] == "weights_refused" and what in body["error"]["message"]
        assert complete(server)[0] == [expected] and complete(server)[2] == before[2]
    assert server.metric("cachalot_weight_swaps_total") == 0
    for key in (None, "key", "wrong"):
        assert swap(server, checkpoint(seed=2), key, allow=(401,))[0] == 401
    for body in ({}, {"model_path": 3}, {"model_path": str(old), "abort_all_requests": True}):
        headers = {"authorization": "Bearer admin"}
        server.request("POST", "/update_weights_from_disk", body, headers, allow=(400,))
    assert complete(server)[2] == before[2]
    server.stop()


@pytest.mark.parametrize("flags, status", [((), 403), (("--api-key", "key"), 200)])
def test_who_may_swap(cachalot, checkpoint, flags, status):
    server = Server(cachalot, checkpoint(), *flags)
    assert swap(server, checkpoint(seed=2), "key", allow=(status,))[0] == status
    server.stop()
