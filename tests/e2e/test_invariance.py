"""Bit for bit: a request's result does not depend on chunking, company, order, threads, or on whether
a position was prefilled or decoded."""

import numpy as np
import pytest

from conftest import BACKENDS, read_lines, write_lines
from test_parity import CONFIGS, edge_lengths, score, tokens_of
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


def test_drafts_do_not_depend_on_the_chunks(cachalot, checkpoint, tmp_path):
    """The drafter's context, and the drafts behind every chunk, from a prefill in any chunking."""
    directory = checkpoint("t1")
    tokens = tokens_of(37, 512, 137)
    dumps = {}
    for chunk in (1, 2, 3, 7, 16):
        work = tmp_path / str(chunk)
        work.mkdir()
        _, (dumps[chunk],) = score(
            cachalot, directory, [tokens], work, "--spec", "dspark", "--chunk", chunk
        )
    for chunk, dump in dumps.items():
        for name in ("mtp.taps", "mtp.features", "mtp.0.context_codes"):
            np.testing.assert_array_equal(dump[name], dumps[1][name], err_msg=name)
        # Chunk 1 drafts behind every position, the others behind some of them.
        every = slice(chunk - 1, None, chunk)
        np.testing.assert_array_equal(dump["mtp.tokens"], dumps[1]["mtp.tokens"][every])
        np.testing.assert_array_equal(dump["mtp.confidence"], dumps[1]["mtp.confidence"][every])


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


@pytest.mark.skipif("cuda" not in BACKENDS, reason="needs a device")
def test_engram_tables_on_the_host(cachalot, checkpoint, tmp_path):
    """The rows that the host sends step by step give the bits of tables on the device: prefill in chunks, steps
    that are run op by op, recorded and replayed, several requests at once."""
    prompts = [tokens_of(n, 512, 7 + n) for n in (150, 3, 40)]
    flags = ("-n", 24, "--temperature", 0, "--chunk", 32, "--engram-tables")
    device, host = (generate(cachalot, checkpoint(), prompts, tmp_path, *flags, place) for place in ("device", "host"))
    assert host == device


@pytest.mark.parametrize("precision", ["official", "f32"])
def test_a36_speculation_changes_no_greedy_token(cachalot, checkpoint, tmp_path, precision):
    """Tokens and log-probabilities, for every number of drafts; three tokens are made likely enough
    that target and drafter often agree."""
    directory = checkpoint("t1")
    prompts = [tokens_of(n, 512, 80 + n) for n in (1, 2, 9, 16, 40)]
    flags = ["-n", 24, "--temperature", 0, "--chunk", 16, "--precision", precision]
    for token in (40, 41, 42):
        flags += ["--logit-bias", f"{token}=30"]
    plain = generate(cachalot, directory, prompts, tmp_path, *flags)
    for length in (0, 1, 2, 3):
        flags_with = (*flags, "--spec", "dspark", "--spec-length", length)
        assert generate(cachalot, directory, prompts, tmp_path, *flags_with) == plain, length


def test_sampled_speculation_repeats_itself(cachalot, checkpoint, tmp_path):
    """With a fixed number of drafts, whatever the batch."""
    directory = checkpoint("t1")
    prompts = [tokens_of(n, 512, 90 + n) for n in (3, 9, 16, 33)]
    flags = ("-n", 16, "--temperature", 0.8, "--seed", 5, "--chunk", 16, "--logit-bias", "40=8",
             "--spec", "dspark", "--spec-length", 2)
    together = generate(cachalot, directory, prompts, tmp_path, *flags)
    assert generate(cachalot, directory, prompts[::-1], tmp_path, *flags)[::-1] == together
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
