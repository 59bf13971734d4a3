"""Prefixes that outlive the server: restarts, a kill and damaged files, through the HTTP interface."""

import http.client
import random
import signal
import subprocess
import threading
import time
import urllib.error

import pytest

from conftest import Server, wait_until

_random = random.Random(1)
PROMPT = [_random.randrange(3, 512) for _ in range(200)]


def complete(server):
    answer = server.openai.completions.create(
        model="model", prompt=PROMPT, max_tokens=8, temperature=0, logprobs=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    choice = answer.choices[0]
    return (choice.token_ids, choice.logprobs.token_logprobs), answer.usage.prompt_tokens_details.cached_tokens


def test_a_restarted_server_finds_its_prefixes(cachalot, checkpoint, tmp_path):
    plain = Server(cachalot, checkpoint())
    expected, cached = complete(plain)
    assert cached == 0
    plain.stop()

    disk = tmp_path / "disk"
    flags = ("--disk", disk, "--disk-bytes", 1 << 24)
    first = Server(cachalot, checkpoint(), *flags)
    assert complete(first) == (expected, 0)
    first.stop()

    second = Server(cachalot, checkpoint(), *flags)
    # Whole pages of 16 tokens, at least one token is left to run.
    assert complete(second) == (expected, 192)
    assert 'cachalot_tier_hits_total{tier="disk"} 12' in second.get("/metrics")[1]
    second.process.kill()
    second.process.communicate()

    third = Server(cachalot, checkpoint(), *flags)
    assert complete(third) == (expected, 192)
    third.stop()

    for path in disk.iterdir():
        content = bytearray(path.read_bytes())
        content[len(content) // 2 :: 53] = b"\x5a" * len(content[len(content) // 2 :: 53])
        path.write_bytes(content)
    fourth = Server(cachalot, checkpoint(), *flags)
    assert complete(fourth)[0] == expected
    assert complete(fourth)[0] == expected
    fourth.stop()


def test_a_server_killed_while_it_writes(cachalot, checkpoint, tmp_path):
    """Killed at a random moment under load, again and again: what a restarted server finds is right."""
    flags = ("--disk", tmp_path / "disk", "--disk-bytes", 1 << 22, "--host-pool", 100_000)
    server = Server(cachalot, checkpoint(), *flags)
    expected, _ = complete(server)
    rng = random.Random(2)
    for _ in range(4):
        killed = threading.Event()

        def load(seed):
            draw = random.Random(seed)
            while not killed.is_set():
                body = {"prompt": [draw.randrange(3, 512) for _ in range(200)], "max_tokens": 2, "ignore_eos": True}
                try:
                    server.post("/v1/completions", body)
                except (urllib.error.URLError, http.client.HTTPException, ConnectionError):
                    assert killed.is_set()

        clients = [threading.Thread(target=load, args=(rng.random(),)) for _ in range(3)]
        for client in clients:
            client.start()
        wait_until(lambda: server.metric("cachalot_finished_total") > 3)
        time.sleep(rng.uniform(0, 0.5))
        killed.set()
        server.process.kill()
        server.process.communicate()
        for client in clients:
            client.join()
        server = Server(cachalot, checkpoint(), *flags)
        assert complete(server)[0] == expected
        assert server.metric('cachalot_tier_faults_total{tier="disk"}') == 0
    server.stop()


def test_a_full_disk_costs_hits_alone(cachalot, checkpoint, tmp_path):
    """A file system of 8 MB, full from the start on: answers are right, and log and metrics say it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    in_small_disk = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c",
                     f'mount -t tmpfs -o size=8m tmpfs {disk} && head -c 7m /dev/zero > {disk}/filler; exec "$0" "$@"']
    if subprocess.run([*in_small_disk, "test", "-s", disk / "filler"]).returncode != 0:
        pytest.skip("no file system of a size of its own")
    plain = Server(cachalot, checkpoint())
    expected, _ = complete(plain)
    plain.stop()
    server = Server(cachalot, checkpoint(), "--disk", disk / "cache", within=in_small_disk)
    draw = random.Random(3)
    for _ in range(40):
        body = {"prompt": [draw.randrange(3, 512) for _ in range(2000)], "max_tokens": 1}
        server.post("/v1/completions", body)
        if server.metric('cachalot_tier_faults_total{tier="disk"}') > 0:
            break
    assert server.metric('cachalot_tier_faults_total{tier="disk"}') > 0
    assert complete(server)[0] == complete(server)[0] == expected
    assert "cache tier 'disk'" in server.stop()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_redis_server(cachalot, checkpoint, redis, how):
    """Gone, or there and silent: answers are right, soon, and log and metrics say it."""
    first = Server(cachalot, checkpoint())
    expected, _ = complete(first)
    first.stop()
    flags = ("--redis", redis.url)
    first, second = (Server(cachalot, checkpoint(), *flags) for _ in range(2))
    assert complete(first) == (expected, 0)
    wait_until(lambda: first.metric('cachalot_tier_stored_total{tier="redis"}') >= 13)
    # The other machine finds its pages and its window state.
    assert complete(second) == (expected, 192)
    assert second.metric("cachalot_replayed_tokens_total") == 0
    redis.process.send_signal(how)
    begin = time.monotonic()
    draw = random.Random(4)
    for _ in range(10):
        body = {"prompt": [draw.randrange(3, 512) for _ in range(40)], "max_tokens": 1}
        second.post("/v1/completions", body)
    # A silent server costs a timeout or two, not one per request.
    assert time.monotonic() - begin < 15
    assert complete(second)[0] == expected
    assert second.metric('cachalot_tier_faults_total{tier="redis"}') > 0
    assert "cache tier 'redis'" in second.stop()
    first.stop()
