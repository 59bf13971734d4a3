"""Prefixes that outlive the server: restarts, a kill and damaged files, through the HTTP interface."""

import random

from conftest import Server

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
