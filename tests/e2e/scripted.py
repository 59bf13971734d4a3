"""Checkpoints that emit known text: the next token is a function of the newest one alone."""

import shutil

import numpy as np

from tests.oracle.checkpoint import Checkpoint, read_safetensors, write_safetensors

FIRST_BYTE = 3  # of the byte-level tokenizer
LOGIT = 40      # of the token that follows


def bfloat16(values):
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_scripted(source, target, chain):
    """Copies a synthetic checkpoint to `target` and makes it answer token t with chain[t].

    No sublayer adds anything, so that the last state of a token is its embedding, and the head's row of
    chain[t] is the embedding of t. Every other sublayer weight stays: all of the model runs.
    """
    shutil.copytree(source, target)
    checkpoint = Checkpoint(target)
    vocab, hidden = checkpoint.raw("embed.weight")[1].shape
    embed = np.random.default_rng(1).normal(size=(vocab, hidden))
    embed /= np.linalg.norm(embed, axis=1, keepdims=True)
    head = np.zeros((vocab, hidden))
    for token, following in chain.items():
        # The norm makes of a row of length 1 one of length sqrt(hidden).
        head[following] += LOGIT / np.sqrt(hidden) * embed[token]
    known = {"embed.weight": bfloat16(embed), "head.weight": bfloat16(head),
             "norm.weight": bfloat16(np.ones(hidden))}
    silent = (".attn.wo_b.weight", ".w2.weight", ".engram.wkv.weight")
    for file in set(checkpoint.files.values()):
        tensors = {name: (dtype, np.array(array)) for name, (dtype, array) in read_safetensors(target / file).items()}
        for name, (dtype, array) in tensors.items():
            if name in known:
                tensors[name] = (dtype, known[name])
            elif name.endswith(silent):
                tensors[name] = (dtype, np.zeros_like(array))
        write_safetensors(target / file, tensors)


def chain_of(*pieces):
    """The chain of a sequence of strings, one token per byte, and ids. No token may occur twice."""
    ids = []
    for piece in pieces:
        ids += [piece] if isinstance(piece, int) else [FIRST_BYTE + byte for byte in piece.encode()]
    assert len(set(ids)) == len(ids)
    return dict(zip(ids, ids[1:]))
