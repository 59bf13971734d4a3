#!/usr/bin/env python3
"""Writes what mlx-vlm's image encoder computes for a fixed checkpoint and pictures.

    python3 tools/oracle/golden_vision.py [tests/golden/peers/vision.json]

Like golden.py: the checkpoint is made from its seed and known by a digest. In FP32: in BF16 mlx's
norms, softmax and GELU round at other points than the reference. One thing is replaced: the aligner
has nn.GELU(approx="precise"), which in MLX is the approximation by a hyperbolic tangent (up to 5e-4
away); the reference takes the error function.
"""

import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools" / "oracle")]

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import numpy as np  # noqa: E402
from golden import SEED, digest  # noqa: E402
from mlx_vlm.models.deepseek_v41.config import ModelConfig  # noqa: E402
from mlx_vlm.models.deepseek_v41.deepseek_v41 import Model  # noqa: E402
from tap import weight_files  # noqa: E402
from tests.oracle import random_checkpoint  # noqa: E402

GRIDS = ((3, 3), (4, 7), (6, 5))


def encoder(directory):
    """The model with the weights of its tower and aligner, in FP32."""
    config = ModelConfig.from_dict(json.loads((Path(directory) / "config.json").read_text()))
    model = Model(config)  # the language model stays unevaluated
    weights = {}
    for file in weight_files(Path(directory)):
        weights.update(mx.load(str(file)))
    wanted = ("vision.", "aligner.")
    weights = {n: w.astype(mx.float32) for n, w in weights.items() if n.startswith(wanted)}
    model.load_weights(list(weights.items()), strict=False)
    model.aligner.act = nn.GELU()
    return model, len(weights)


def main():
    path = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "tests/golden/peers/vision.json")
    with tempfile.TemporaryDirectory() as directory:
        random_checkpoint.write(
            directory, random_checkpoint.T1, SEED, vision=random_checkpoint.VISION
        )
        model, count = encoder(directory)
        images = []
        for seed, grid in enumerate(GRIDS):
            patches = mx.array(random_checkpoint.random_patches(grid, seed))
            cells = np.array(model.encode_image(patches, *grid), np.float64)
            images.append({"grid": grid, "seed": seed, "cells": cells.round(8).tolist()})
        document = {
            "checkpoint": "python3 -m tests.oracle.random_checkpoint --preset t1 --vision "
            f"--seed {SEED}",
            "sha256": digest(directory),
            "implementation": "mlx-vlm",
            "versions": {name: importlib.metadata.version(name) for name in ("mlx-vlm", "mlx")},
            "images": images,
        }
    path.write_text(json.dumps(document) + "\n")
    print(f"{path}: {len(images)} images, {count} tensors")


if __name__ == "__main__":
    main()
