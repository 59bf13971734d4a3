"""Records what another implementation computes, under the names of `cachalot --dump`.

An adapter hands every tensor that has a name in a dump to `Tap.point` and goes on with what comes
back: the adapter's own tensor, or the dump's if the tap feeds that name. Feeding everything judges
each sublayer on identical inputs; feeding only the decisions (cache codes, selections, routing)
judges the whole network without the jumps that a single flipped decision causes.
"""

import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.oracle import compare  # noqa: E402
from tests.oracle.checkpoint import Checkpoint  # noqa: E402

DECISIONS = tuple(compare.QUANTIZERS) + tuple(compare.SETS)


def kind(name):
    return name.rpartition(".")[2]


def decode(config, name, codes):
    """The values that a dump's cache rows stand for."""
    quantizer, width = compare.QUANTIZERS[kind(name)]
    return quantizer.row_values(codes, getattr(config, width))


def tidy(ids):
    """Ids of each row in ascending order, -1 at its end."""
    ids = np.sort(np.where(ids < 0, np.iinfo(np.int64).max, ids.astype(np.int64)), axis=-1)
    return np.where(ids == np.iinfo(np.int64).max, -1, ids)


def blocks_of(mask, size):
    """Block ids [T, blocks] of a mask over entries [T, N], ascending, -1 at the end."""
    tokens, count = mask.shape
    blocks = -(-count // size)
    padded = np.zeros((tokens, blocks * size), bool)
    padded[:, :count] = mask
    chosen = padded.reshape(tokens, blocks, size).any(axis=2)
    return tidy(np.where(chosen, np.arange(blocks), -1))


def mask_of(blocks, size, count):
    """Mask over entries [T, N] of block ids [T, blocks]."""
    mask = np.zeros((len(blocks), -(-count // size) + 1), bool)
    np.put_along_axis(mask, blocks.astype(np.int64), True, axis=1)
    return np.repeat(mask[:, :-1], size, axis=1)[:, :count]


def token_classes(directory):
    """Class of every token if the configuration fixes it (as many classes as tokens: the identity),
    else None: the implementation has to derive it from tokenizer.json by its own rule."""
    config = Checkpoint(directory).config
    if config.engram_compressed_vocab_size == config.vocab_size:
        return tuple(range(config.vocab_size))
    return None


def weight_files(directory):
    index = json.loads((Path(directory) / "model.safetensors.index.json").read_text())
    return [Path(directory) / name for name in sorted(set(index["weight_map"].values()))]


class Tap:
    """feed: dump tensors to go on with; decisions_only: feed no continuous tensor."""

    def __init__(self, config, feed=None, decisions_only=False):
        self.config, self.seen, self.feed = config, {}, {}
        for name, value in (feed or {}).items():
            if kind(name) in compare.QUANTIZERS:
                self.feed[name] = decode(config, name, value)
            elif kind(name) in compare.SETS:
                self.feed[name] = value.astype(np.int64)
            elif not decisions_only:
                self.feed[name] = value

    def point(self, name, value):
        """Notes a tensor; returns the fed one, or None."""
        self.seen[name] = value
        return self.feed.get(name)
