"""The oracle's image encoder against mlx-vlm's (vision.json, written by
tools/oracle/golden_vision.py). Needs NumPy only."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tools" / "oracle")]

import golden  # noqa: E402
from tests.oracle import random_checkpoint, vision  # noqa: E402
from tests.oracle.checkpoint import Checkpoint  # noqa: E402

DOCUMENT = json.loads(Path(__file__).with_name("vision.json").read_text())
# FP32 through three blocks, in units of the RMS: that of the engine is at most 3e-6.
TOLERANCE = 1e-5
LAYOUT = ("newline-first", "swap-start-end")  # what a peer's cells do not show


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("t1-vision")
    random_checkpoint.write(
        directory, random_checkpoint.T1, golden.SEED, vision=random_checkpoint.VISION
    )
    if golden.digest(directory) != DOCUMENT["sha256"]:
        pytest.fail("random_checkpoint writes another checkpoint now: write vision.json anew")
    return Checkpoint(directory)


def error(checkpoint, image, ablate=()):
    """The largest difference of the cells, in units of their RMS."""
    patches = random_checkpoint.random_patches(image["grid"], image["seed"])
    want = np.array(image["cells"])
    got = vision.Tower(checkpoint, "f32", ablate).aligned(patches, tuple(image["grid"]))
    return np.abs(got - want).max() / np.sqrt(np.mean(want**2))


@pytest.mark.parametrize("image", DOCUMENT["images"], ids=lambda image: "{}x{}".format(*image["grid"]))
def test_oracle_agrees(checkpoint, image):
    assert error(checkpoint, image) <= TOLERANCE


@pytest.mark.parametrize("ablation", [a for a in vision.ABLATIONS if a not in LAYOUT])
def test_a_deliberate_fault_is_seen(checkpoint, ablation):
    assert any(error(checkpoint, image, {ablation}) > TOLERANCE for image in DOCUMENT["images"])
