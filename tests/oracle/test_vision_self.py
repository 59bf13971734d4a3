"""Tests of the oracle's image encoder: its symmetries and its layout. Its values are compared with
another implementation's in tests/golden/peers."""

import numpy as np
import pytest

from . import random_checkpoint, vision
from .checkpoint import Checkpoint
from .model import IMAGE_ABLATIONS, forward
from .random_checkpoint import IMAGE_TOKEN, T1, VISION, random_patches
from .test_oracle_self import random_tokens


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("t1_vision")
    random_checkpoint.write(directory, T1, seed=1, vision=VISION)
    return Checkpoint(directory)


def test_layout(checkpoint):
    rows = vision.encode(checkpoint, random_patches((4, 7), 1), (4, 7))
    start, newline, end = (checkpoint.weight(f"image_{n}") for n in ("start", "newline", "end"))
    cells = vision.Tower(checkpoint).aligned(random_patches((4, 7), 1), (4, 7))
    assert len(rows) == vision.slots(VISION, (4, 7)) == 10
    expected = [start, *cells[:3], newline, *cells[3:], newline, end]
    assert np.array_equal(rows, np.array(expected))


def test_slots_of_the_released_model():
    sizes = {(39, 39): 184, (35, 46): 206, (93, 93): 994, (69, 122): 968, (1533, 3): 1024}
    for grid, expected in sizes.items():
        assert vision.slots({"downsample_ratio": 3}, grid) == expected


def test_every_patch_sees_every_patch(checkpoint):
    grid, patches = (5, 4), random_patches((5, 4), 2)
    base = vision.encode(checkpoint, patches, grid)
    cells = [i for i in range(len(base)) if i not in (0, 3, 6, 7)]
    for patch in range(20):
        other = patches.copy()
        other[patch] = -other[patch]
        changed = np.any(vision.encode(checkpoint, other, grid) != base, axis=1)
        assert np.flatnonzero(changed).tolist() == cells


@pytest.mark.parametrize("precision", ["f32", "official"])
def test_patches_of_one_colour_differ_by_their_edges_alone(checkpoint, precision):
    """Attention averages equal values, whatever the angles; zeros pad the last cells."""
    rows = vision.encode(checkpoint, random_patches((7, 7), 0), (7, 7), precision)
    assert np.allclose(rows[1], rows[2], atol=1e-12) and np.allclose(rows[1], rows[5], atol=1e-12)
    assert np.abs(rows[3] - rows[1]).max() > 0.05
    assert np.abs(rows[9] - rows[3]).max() > 0.05


def test_angles_are_relative(checkpoint):
    """q and k that turn by the row and the column of their patches meet at their distance."""
    tower, random = vision.Tower(checkpoint), np.random.default_rng(1)
    angle = tower.angles((6, 5), 16).reshape(6, 5, 8)
    q, k = random.standard_normal((2, 1, 1, 16))
    places = [((1, 1), (3, 2)), ((2, 3), (4, 4)), ((0, 0), (2, 1))]
    scores = [
        np.sum(tower.rotate(q, angle[a][None]) * tower.rotate(k, angle[b][None])) for a, b in places
    ]
    turned = np.sum(tower.rotate(q, angle[1, 1][None]) * tower.rotate(k, angle[2, 3][None]))
    assert np.allclose(scores, scores[0], atol=1e-6) and abs(turned - scores[0]) > 1e-3


def test_rounding_is_small_and_everywhere(checkpoint):
    grid, patches = (6, 7), random_patches((6, 7), 3)
    exact = vision.encode(checkpoint, patches, grid)
    official = vision.encode(checkpoint, patches, grid, "official")
    error = np.abs(official - exact) / np.sqrt(np.mean(exact**2, axis=1, keepdims=True))
    assert 1e-3 < error.max() < 0.1
    for ablation in vision.ROUNDING_ABLATIONS:
        other = vision.encode(checkpoint, patches, grid, "official", {ablation})
        assert not np.array_equal(other, official), ablation
        assert np.array_equal(vision.encode(checkpoint, patches, grid, "f32", {ablation}), exact)


@pytest.mark.parametrize("ablation", vision.ABLATIONS)
def test_every_ablation_changes_the_rows(checkpoint, ablation):
    images = [((7, 4), 0), ((7, 4), 1)]
    assert any(
        not np.allclose(
            vision.encode(checkpoint, random_patches(grid, seed), grid, "f32", {ablation}),
            vision.encode(checkpoint, random_patches(grid, seed), grid),
            atol=1e-5,
        )
        for grid, seed in images
    )


def test_images_are_embedded_as_their_rows(checkpoint):
    """Text after an image depends on it, text before does not."""
    rows = vision.encode(checkpoint, random_patches((3, 3), 1), (3, 3))
    tokens = random_tokens(14)
    dead = np.isin(np.arange(14), np.arange(5, 5 + len(rows)))
    tokens = np.where(dead, IMAGE_TOKEN, tokens)
    dump = forward(checkpoint, tokens, dead=dead, images=rows).dump
    assert np.array_equal(dump["embed"][dead], np.repeat(rows[:, None], 4, axis=1))
    other = forward(checkpoint, tokens, dead=dead, images=-rows).dump
    changed = np.abs(dump["logits"] - other["logits"]).max(axis=1) > 1e-6
    assert np.array_equal(changed, np.arange(14) >= 5)
    for ablation in IMAGE_ABLATIONS:
        faulty = forward(checkpoint, tokens, dead=dead, images=rows, ablate=[ablation]).dump
        assert not np.array_equal(faulty["logits"], dump["logits"]), ablation
