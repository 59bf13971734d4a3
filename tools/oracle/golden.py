"""Writes what another implementation computes for a fixed checkpoint and prompts.

The file holds no weights: `tests.oracle.random_checkpoint` makes the same checkpoint from its seed,
and a digest tells whether it did. Every prompt is one where, by the oracle, no decision is near its
boundary, so every correct implementation in FP32 or better must agree to the stated tolerance.
"""

import hashlib
import json
import tempfile
import zlib
from pathlib import Path

import numpy as np

from tap import tidy, weight_files
from tests.oracle import compare, random_checkpoint
from tests.oracle.checkpoint import Checkpoint
from tests.oracle.model import forward

SEED = 1
LENGTHS = (1, 2, 3, 5, 8, 11, 14, 17, 20, 24)
TRIES = 150  # prompts searched per length


def digest(directory):
    total = hashlib.sha256()
    for file in weight_files(directory):
        total.update(file.read_bytes())
    return total.hexdigest()


def checksums(tensors, config):
    """Per layer: RMS and a weighted sum of the streams after the FFN, and CRC-32 of the routing
    and of the selection. The weights are fixed, of both signs and of the size of 1."""
    rows = []
    for layer in config.layers:
        x = np.asarray(tensors[f"layers.{layer}.ffn"], np.float64).ravel()
        weights = (np.arange(x.size) * 7919 % 2003) / 1001 - 1
        row = {"rms": float(np.sqrt(np.mean(x * x))), "sum": float(weights @ x / x.size**0.5)}
        for name in ("experts", "selected"):
            ids = tensors.get(f"layers.{layer}.{name}")
            if ids is not None and ids.size:
                row[name] = zlib.crc32(tidy(ids).astype("<i4").tobytes())
        rows.append(row)
    return rows


def log_probabilities(logits, tokens):
    """Of each token from those before it; null for the first."""
    rows = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    return [None] + [float(rows[i - 1, token]) for i, token in enumerate(tokens) if i]


def result(tensors, tokens, config):
    return {
        "logprobs": log_probabilities(tensors["logits"], tokens),
        "layers": checksums(tensors, config),
    }


def prompts(checkpoint):
    """One prompt per length: the best of TRIES by the distance of its nearest decision."""
    chosen = []
    for length in LENGTHS:
        random, best = np.random.default_rng((SEED, length)), (-1, None)
        for _ in range(TRIES):
            tokens = random.integers(0, checkpoint.config.vocab_size, length).tolist()
            margins = forward(checkpoint, tokens, margins=True)
            nearest = min(v.min() for n, v in margins.margins.items() if n.endswith(".quant"))
            if nearest > best[0] and compare.prescreen(margins, quant=0, logits=0):
                best = (float(nearest), tokens)
            if nearest > 4e-6:
                break
        chosen.append({"tokens": best[1], "nearest": best[0]})
    return chosen


def write(path, module):
    path = Path(path)
    with tempfile.TemporaryDirectory() as directory:
        random_checkpoint.write(directory, random_checkpoint.T1, seed=SEED)
        checkpoint = Checkpoint(directory)
        if path.exists():
            document = json.loads(path.read_text())
        else:
            document = {
                "checkpoint": f"python3 -m tests.oracle.random_checkpoint --preset t1 --seed {SEED}",
                "sha256": digest(directory),
                "config": checkpoint.config.document,
                "precision": "f32",
                "prompts": prompts(checkpoint),
                "implementations": {},
            }
        if document["sha256"] != digest(directory):
            raise SystemExit(f"{path} belongs to another checkpoint; delete it to start anew")
        peer = module.Peer(directory, "f32")
        results = [
            result(peer.run(p["tokens"]), p["tokens"], checkpoint.config)
            for p in document["prompts"]
        ]
    document["implementations"][module.NAME] = {"versions": module.versions(), "results": results}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{path}: {module.NAME}, {len(results)} prompts")
    return 0
