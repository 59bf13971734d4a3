"""The NumPy oracle against what implementations of other projects computed (t1.json, written by
tools/oracle/crosscheck.py --write-golden). Needs NumPy only."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tools" / "oracle")]

import golden  # noqa: E402
from tests.oracle import random_checkpoint  # noqa: E402
from tests.oracle.checkpoint import Checkpoint  # noqa: E402
from tests.oracle.model import ABLATIONS, forward  # noqa: E402

DOCUMENT = json.loads(Path(__file__).with_name("t1.json").read_text())
# FP32 through ten layers; the implementations differ from each other by 4e-6.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("t1")
    random_checkpoint.write(directory, random_checkpoint.T1, seed=golden.SEED)
    if golden.digest(directory) != DOCUMENT["sha256"]:
        pytest.fail("random_checkpoint writes another checkpoint now: write t1.json anew")
    return Checkpoint(directory)


def faults(checkpoint, prompt, expected, **options):
    """What differs between the oracle and a golden result."""
    tensors = forward(checkpoint, prompt["tokens"], "f32", **options).dump
    found = golden.result(tensors, prompt["tokens"], checkpoint.config)
    for i, (a, b) in enumerate(zip(found["logprobs"][1:], expected["logprobs"][1:], strict=True)):
        if not abs(a - b) <= TOLERANCE:
            yield f"log-probability of token {i + 1}: {a}, not {b}"
    for layer, (a, b) in enumerate(zip(found["layers"], expected["layers"], strict=True)):
        for name in ("rms", "sum"):
            if not abs(a[name] - b[name]) <= TOLERANCE * b["rms"]:
                yield f"layer {layer}, {name} of the streams: {a[name]}, not {b[name]}"
        for name in ("experts", "selected"):
            if a.get(name) != b.get(name):
                yield f"layer {layer}: other {name}"


@pytest.mark.parametrize("name", DOCUMENT["implementations"])
@pytest.mark.parametrize("number", range(len(DOCUMENT["prompts"])))
def test_oracle_agrees(checkpoint, name, number):
    expected = DOCUMENT["implementations"][name]["results"][number]
    assert list(faults(checkpoint, DOCUMENT["prompts"][number], expected)) == []


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_a_deliberate_fault_is_seen(checkpoint, ablation):
    results = next(iter(DOCUMENT["implementations"].values()))["results"]
    pairs = zip(DOCUMENT["prompts"], results)
    assert any(
        any(True for _ in faults(checkpoint, prompt, expected, ablate=[ablation]))
        for prompt, expected in reversed(list(pairs))
    )
