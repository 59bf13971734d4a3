"""Image input against the independent definition (tests/oracle): the encoder's rows, and every tensor
of a forward pass that reads them."""

import os
import subprocess

import numpy as np
import pytest

from conftest import BACKENDS, ROOT
from tests.oracle import compare, model, vision
from tests.oracle.checkpoint import Checkpoint, read_dump, write_dump
from tests.oracle.random_checkpoint import random_patches

TOOL = os.environ.get("CACHALOT_VISION_DUMP", str(ROOT / "build" / "tests" / "vision_dump"))
PRECISIONS = ("f32", "official")

# Patches (rows, columns): whole cells; a row and a column to pad; two of each; one patch; more
# patches than a block of keys; lines.
GRIDS = ((6, 6), (7, 4), (5, 11), (1, 1), (9, 12), (1, 40), (20, 2))

# FP32 through three blocks: a few times what one attention or product may be off by (2e-5 of the
# RMS, tests/support/tolerance.h).
F32_ERROR = 1e-4
# BF16: values on the other side of a rounding boundary are one ulp off (2^-8), about 20 rounding
# points lie one behind the other: sqrt(20) 2^-8 of a row's RMS for the worst of a row, 3 times
# that for the worst of all. On average a point moves a value by half an ulp at most.
BF16_ERROR, BF16_MEAN = 3 * 20**0.5 / 2**8, 20**0.5 / 2**9


@pytest.fixture(scope="module", params=["official", "f32"])
def loaded(checkpoint, request):
    return Checkpoint(checkpoint("t1-vision", weights=request.param))


def prompt(loaded, grids, seed, gap=5):
    """Tokens with images between them, and which are slots."""
    random, config = np.random.default_rng(seed), loaded.config
    image = loaded.config.document["image_token_id"]
    tokens, mask = [], []
    for grid in (*grids, None):
        text = random.integers(3, 259, gap).tolist()
        count = 0 if grid is None else vision.slots(config.document["vision_config"], grid)
        tokens += text + [image] * count
        mask += [0] * len(text) + [1] * count
    return np.array(tokens), np.array(mask, np.uint8)


def run(loaded, work, grids, seeds, precision="f32", backend="cpu", tokens=(), mask=(), chunk=4096):
    """The engine's dump of images and of a pass over `tokens`."""
    job = {"tokens": np.array(tokens, np.int32), "image": np.array(mask, np.uint8)}
    for i, (grid, seed) in enumerate(zip(grids, seeds, strict=True)):
        job |= {f"patches.{i}": random_patches(grid, seed), f"grid.{i}": np.array(grid, np.int32)}
    write_dump(work / "job.safetensors", {name: a for name, a in job.items() if a.size})
    command = [TOOL, loaded.directory, work / "job.safetensors", work, backend, precision, chunk]
    subprocess.run([str(part) for part in command], check=True, timeout=600)
    return read_dump(work / "0.safetensors")


def differs(got, want, precision):
    """Whether rows of an image are further apart than the precision allows."""
    size = np.sqrt(np.mean(want**2, axis=1, keepdims=True))
    error = np.abs(got - want) / np.maximum(size, 1e-9)
    if precision == "f32":
        return not error.max() <= F32_ERROR
    return not (error.max() <= BF16_ERROR and error.mean() <= BF16_MEAN)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_agree(loaded, tmp_path, precision, backend):
    seeds = range(len(GRIDS))
    dump = run(loaded, tmp_path, GRIDS, seeds, precision, backend)
    for i, grid in enumerate(GRIDS):
        want = vision.encode(loaded, random_patches(grid, i), grid, precision)
        assert dump[f"images.{i}"].shape == want.shape
        assert not differs(dump[f"images.{i}"], want, precision), grid


# Faults smaller than the rounding of BF16.
FINE = ("tanh-gelu", "text-eps")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_ablation_is_noticed(loaded, tmp_path, precision):
    grids, seeds = ((7, 5), (7, 5)), (0, 1)
    dump = run(loaded, tmp_path, grids, seeds, precision)
    for ablation in vision.ABLATIONS:
        if precision == "f32" or ablation not in FINE:
            assert any(
                differs(
                    dump[f"images.{i}"],
                    vision.encode(loaded, random_patches(grid, seed), grid, precision, {ablation}),
                    precision,
                )
                for i, (grid, seed) in enumerate(zip(grids, seeds))
            ), ablation


def equal_images(loaded, dump, grids, ablate=()):
    """The share of images whose rows are the definition's, bit for bit."""
    same = [
        np.array_equal(
            dump[f"images.{i}"],
            vision.encode(loaded, random_patches(grid, i), grid, "official", ablate),
        )
        for i, grid in enumerate(grids)
    ]
    return np.mean(same)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rounding_points(loaded, tmp_path, backend):
    """Small images seldom have a value so near a rounding boundary that the noise of FP32 sums moves
    it, and then agree in every bit; where a value is not rounded, hardly any does. FP32 noise of 1e-7
    against a spacing of 2^-8 moves one value of 40,000, and such an image has up to 7,000: four of five
    agree at least, 0.6 is 2.5 standard deviations below for 24 of them, and half of that is far from both."""
    grids = [(1 + i % 3, 1 + i // 3 % 4) for i in range(24)]
    dump = run(loaded, tmp_path, grids, range(24), "official", backend)
    assert equal_images(loaded, dump, grids) >= 0.6
    for ablation in vision.ROUNDING_ABLATIONS:
        assert equal_images(loaded, dump, grids, {ablation}) <= 0.3, ablation


def faults(loaded, tokens, mask, dump, precision, ablate=()):
    images = [dump[f"images.{i}"] for i in range(100) if f"images.{i}" in dump]
    reference = model.forward(
        loaded,
        tokens,
        precision,
        dead=mask != 0,
        images=np.concatenate(images).astype(np.float64),
        feed=dump,
        margins=True,
        ablate=ablate,
    )
    return [f for f in compare.compare(reference, dump, loaded.config, precision) if not f.ok]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_sublayer_agrees(loaded, tmp_path, precision, backend):
    """Spans behind one another and at both ends of the look-back, cut by chunks anywhere."""
    grids = ((7, 4), (1, 1), (3, 3))
    tokens, mask = prompt(loaded, grids, 1, gap=2)
    for chunk in (4096, 7, 1):
        dump = run(
            loaded, tmp_path, grids, (1, 2, 3), precision, backend, tokens, mask, chunk
        )
        bad = faults(loaded, tokens, mask, dump, precision)
        assert not bad, f"chunks of {chunk}: {bad[:5]}"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_fault_of_image_rows_is_noticed(loaded, tmp_path, precision):
    grids = ((7, 4), (3, 3))
    tokens, mask = prompt(loaded, grids, 2)
    dump = run(loaded, tmp_path, grids, (1, 2), precision, tokens=tokens, mask=mask)
    for ablation in model.IMAGE_ABLATIONS:
        assert faults(loaded, tokens, mask, dump, precision, {ablation}), ablation
