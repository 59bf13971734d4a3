#!/usr/bin/env python3
"""Bits per byte of a general compressor (PPMd) on a held-out split, to hold a model against.

    ppmd.py --train build/corpus/train.jsonl --heldout build/corpus/heldout.jsonl

Two figures: the held-out texts alone, and what they add behind the training texts, which is what a model
that has seen those is compared with. Texts are joined by a zero byte. The second needs the memory to
remember all of the training texts.
"""
import argparse
import json

import pyppmd


def texts(path):
    with open(path) as lines:
        return b"\0".join(json.loads(line)["text"].encode() for line in lines)


def compressed(data, order, memory):
    encoder = pyppmd.Ppmd7Encoder(order, memory)
    return len(encoder.encode(data)) + len(encoder.flush())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--train", required=True)
    parser.add_argument("--heldout", required=True)
    parser.add_argument("--order", type=int, default=16)
    parser.add_argument("--memory", type=int, default=1 << 30, help="bytes of the compressor's model")
    args = parser.parse_args()
    train, heldout = texts(args.train), texts(args.heldout)
    alone = compressed(heldout, args.order, args.memory)
    seen = compressed(train, args.order, args.memory)
    behind = compressed(train + heldout, args.order, args.memory) - seen
    print(f"training texts: {len(train)} bytes, {8 * seen / len(train):.4f} bits per byte")
    print(f"held-out texts: {len(heldout)} bytes, {8 * alone / len(heldout):.4f} alone, "
          f"{8 * behind / len(heldout):.4f} behind the training texts")


if __name__ == "__main__":
    main()
