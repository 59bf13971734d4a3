#!/usr/bin/env python3
"""Trains a byte-level BPE on JSONL texts with the layout of `cachalot synth`'s tokenizer.

    tokenizer.py --binary build/cachalot --vocab 4096 --out tokenizer.json corpus/train.jsonl tasks.jsonl

The expressions that cut text and the control tokens are those of the tokenizer that the binary writes:
they are defined there, once. Ids: BOS, EOS, pad, the bytes, the merges, the control tokens.
"""
import argparse
import json
import pathlib
import subprocess
import tempfile

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def base_tokenizer(binary):
    """The tokenizer.json of a synthetic model: its rules and control tokens."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([binary, "synth", "--preset", "t1", "--out", folder], check=True, capture_output=True)
        return json.loads((pathlib.Path(folder) / "tokenizer.json").read_text())


def texts(paths, limit):
    """The texts of JSONL files, an equal share of characters of each."""
    for path in paths:
        read = 0
        with open(path) as lines:
            for line in lines:
                record = json.loads(line)
                for text in [record["text"]] if "text" in record else [m.get("content") or ""
                                                                       for m in record["messages"]]:
                    yield text
                    read += len(text)
                if read > limit / len(paths):
                    break


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--binary", default="build/cachalot")
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--characters", type=int, default=20_000_000)
    parser.add_argument("files", nargs="+")
    args = parser.parse_args()

    base = base_tokenizer(args.binary)
    first = [t["content"] for t in base["added_tokens"] if t["id"] < 3]
    placeholder = "place\u2581holder"
    controls = [t["content"] for t in base["added_tokens"] if t["id"] >= 3 and placeholder not in t["content"]]
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = Tokenizer.from_str(json.dumps(base)).pre_tokenizer
    learner.decoder = decoders.ByteLevel()
    merges = args.vocab - len(controls)
    trainer = trainers.BpeTrainer(vocab_size=merges, special_tokens=first, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    learner.train_from_iterator(texts(args.files, args.characters), trainer)

    learned = json.loads(learner.to_str())
    vocabulary = learned["model"]["vocab"]
    if len(vocabulary) != merges:
        raise SystemExit(f"the texts give {len(vocabulary)} tokens, not {merges}")
    example = base["added_tokens"][0]
    base["added_tokens"] = [dict(example, id=i, content=t) for i, t in enumerate(first)]
    base["added_tokens"] += [dict(example, id=merges + i, content=t) for i, t in enumerate(controls)]
    base["model"]["vocab"] = vocabulary
    base["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in learned["model"]["merges"]]
    pathlib.Path(args.out).write_text(json.dumps(base, ensure_ascii=False))


if __name__ == "__main__":
    main()
