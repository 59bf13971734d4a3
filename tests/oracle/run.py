"""Scores token sequences with the oracle: the counterpart of `cachalot score`.

    python3 -m tests.oracle.run -m DIR --input F.jsonl --output G.jsonl --precision f32
"""

import argparse
import json
from pathlib import Path

import numpy as np

from .checkpoint import Checkpoint, read_dump, write_dump
from .model import ABLATIONS, forward


def report(result, layers):
    """Margins as JSON. null: nothing to decide."""

    def numbers(array):
        return [float(x) if np.isfinite(x) else None for x in array]

    rows = []
    for layer in layers:
        prefix = f"layers.{layer}."
        kinds = ("index", "candidate", "router", "quant")
        found = [kind for kind in kinds if prefix + kind in result.margins]
        rows.append(
            {"layer": layer, **{kind: numbers(result.margins[prefix + kind]) for kind in found}}
        )
    return {"layers": rows, "logits": numbers(result.margins["logits"])}


def line(tokens, result, count):
    log_probs = result.log_probs()
    scored, best = [None], [[]]
    for i in range(1, len(tokens)):
        row = log_probs[i - 1]
        order = np.argsort(-row, kind="stable")[:count]
        scored.append(float(row[tokens[i]]))
        best.append([[int(token), float(row[token])] for token in order])
    return {"tokens": tokens, "logprobs": scored, "top": best}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", dest="model", required=True, help="checkpoint directory")
    parser.add_argument("--input", required=True, help='lines {"tokens":[...]}')
    parser.add_argument("--output", required=True)
    parser.add_argument("--precision", choices=("f32", "official"), default="official")
    parser.add_argument("--top", type=int, default=0, metavar="N")
    parser.add_argument("--dump", metavar="DIR", help="write one safetensors file per request")
    parser.add_argument("--force", metavar="DIR", help="selections and routing of these dumps")
    parser.add_argument("--feed", metavar="DIR", help="compute every sublayer from these dumps")
    parser.add_argument("--ablate", default="", metavar="NAME,...", help=", ".join(ABLATIONS))
    parser.add_argument("--layers-report", action="store_true", help="add margins to each line")
    args = parser.parse_args()

    checkpoint = Checkpoint(args.model)
    if args.dump:
        Path(args.dump).mkdir(parents=True, exist_ok=True)
    with open(args.input) as source, open(args.output, "w") as target:
        requests = [json.loads(text)["tokens"] for text in source if text.strip()]
        for request, tokens in enumerate(requests):
            file = f"{request}.safetensors"
            force = read_dump(Path(args.force) / file) if args.force else {}
            feed = read_dump(Path(args.feed) / file) if args.feed else {}
            result = forward(
                checkpoint,
                tokens,
                args.precision,
                ablate=[name for name in args.ablate.split(",") if name],
                force={k: v for k, v in force.items() if k.endswith((".selected", ".experts"))},
                feed=feed,
                margins=args.layers_report,
            )
            scored = line(tokens, result, args.top)
            if args.layers_report:
                scored["margins"] = report(result, checkpoint.config.layers)
            target.write(json.dumps(scored) + "\n")
            if args.dump:
                write_dump(Path(args.dump) / file, result.dump)


if __name__ == "__main__":
    main()
