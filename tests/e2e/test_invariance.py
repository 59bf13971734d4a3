"""Bit for bit: a request's result does not depend on chunking, company, order, threads, or on whether
a position was prefilled or decoded."""

import numpy as np
import pytest

from conftest import read_lines, write_lines
from test_parity import BACKENDS, CONFIGS, edge_lengths, score, tokens_of
from tests.oracle.checkpoint import Checkpoint

# Lists of ids are padded to the widest row of a step, so their width may differ between chunkings.
PADDED = ("selected", "candidates")


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        x, y = a[name], b[name]
        if name.endswith(PADDED):
            x, y = ([row[row >= 0].tolist() for row in rows] for rows in (x, y))
            assert x == y, name
        else:
            np.testing.assert_array_equal(x, y, err_msg=name)


@pytest.mark.parametrize("precision", ["official", "f32"])
@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_chunks(cachalot, checkpoint, tmp_path, name, precision):
    backend = BACKENDS[-1]
    directory = checkpoint("t1", *CONFIGS[name])
    lengths = edge_lengths(Checkpoint(directory).config)
    prompts = [tokens_of(n, 512, 100 + n) for n in lengths]
    runs = []
    for chunk in (1, 2, 3, 7, 16, 4096):
        work = tmp_path / str(chunk)
        work.mkdir()
        runs.append(
            score(
                cachalot,
                directory,
                prompts,
                work,
                *("--chunk", chunk, "--top", 5, "--precision", precision, "--backend", backend),
            )
        )
    lines, dumps = runs[-1]
    for other_lines, other_dumps in runs[:-1]:
        assert other_lines == lines
        for a, b in zip(other_dumps, dumps):
            assert_same(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads(cachalot, checkpoint, tmp_path, backend):
    directory = checkpoint("t1")
    prompts = [tokens_of(n, 512, n) for n in (5, 33, 70)]
    outputs = []
    for threads in (1, 2, 3):
        work = tmp_path / str(threads)
        work.mkdir()
        outputs.append(
            score(
                cachalot, directory, prompts, work, "--threads", threads, "--backend", backend, "--chunk", 32
            )
        )
    for lines, dumps in outputs[1:]:
        assert lines == outputs[0][0]
        for a, b in zip(dumps, outputs[0][1]):
            assert_same(a, b)


def generate(cachalot, directory, prompts, work, *flags):
    lines = write_lines(work / "prompts.jsonl", [{"tokens": p} for p in prompts])
    text = cachalot(
        "run", "-m", directory, "--input", lines, "--output", "-", "--ignore-eos", "--threads", 1,
        "--backend", BACKENDS[-1], *flags
    )
    keys = ("prompt_token_ids", "token_ids", "text", "logprobs")
    return [{key: line[key] for key in keys} for line in read_lines(text)]


def test_batch_composition_and_order(cachalot, checkpoint, tmp_path):
    directory = checkpoint("t1")
    prompts = [tokens_of(n, 512, 40 + n) for n in (1, 2, 9, 16, 17, 40)]
    flags = ("-n", 12, "--temperature", 0.8, "--seed", 5, "--chunk", 16)
    together = generate(cachalot, directory, prompts, tmp_path, *flags)
    backwards = generate(cachalot, directory, prompts[::-1], tmp_path, *flags)
    assert backwards[::-1] == together
    for prompt, expected in zip(prompts, together):
        assert generate(cachalot, directory, [prompt], tmp_path, *flags) == [expected]


@pytest.mark.parametrize("precision", ["official", "f32"])
def test_prefill_equals_decode(cachalot, checkpoint, tmp_path, precision):
    """Generated tokens, scored as a prompt, get the log-probabilities that generation reported."""
    directory = checkpoint("t1")
    prompts = [tokens_of(n, 512, 60 + n) for n in (1, 2, 3, 8, 15)]
    flags = ("--precision", precision)
    results = generate(
        cachalot, directory, prompts, tmp_path, "-n", 40, "--temperature", 1, "--top-p", 1, *flags
    )
    whole = [r["prompt_token_ids"] + r["token_ids"] for r in results]
    lines, _ = score(cachalot, directory, whole, tmp_path, *flags, "--backend", BACKENDS[-1])
    for result, line in zip(results, lines):
        assert line["logprobs"][len(result["prompt_token_ids"]) :] == result["logprobs"]
