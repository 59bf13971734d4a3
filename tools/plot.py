#!/usr/bin/env python3
"""Draws fields of JSON lines against each other, as an SVG file. Needs requirements-tools.txt.

  tools/plot.py serve.jsonl --name serve -x concurrency -y output_tokens_per_s --log-x -o docs/plots/x.svg

A field is a path ("first_token_s.p50", "stats.pools.0.in_use"); several -y are several lines. Lines of
another --name are left out. "resident_bytes/1e6" divides.
"""

import argparse
import json
import pathlib

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update({
    "svg.hashsalt": "cachalot", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
})
import matplotlib.pyplot as plt  # noqa: E402


def value(line, field):
    path, _, divisor = field.partition("/")
    for key in path.split("."):
        line = line[int(key)] if isinstance(line, list) else line[key]
    return line / float(divisor or 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=pathlib.Path)
    parser.add_argument("-o", "--output", type=pathlib.Path, required=True)
    parser.add_argument("--name", help="of the lines to draw")
    parser.add_argument("-x", required=True)
    parser.add_argument("-y", action="append", required=True)
    parser.add_argument("--label", action="append", default=[], help="of each -y")
    parser.add_argument("--title", default="")
    parser.add_argument("--x-label", default="")
    parser.add_argument("--y-label", default="")
    parser.add_argument("--log-x", action="store_true")
    parser.add_argument("--log-y", action="store_true")
    parser.add_argument("--dots", action="store_true", help="mark the measured points")
    args = parser.parse_args()

    lines = [json.loads(text) for text in args.input.read_text().splitlines()]
    lines = [line for line in lines if args.name in (None, line["name"])]
    figure, axes = plt.subplots(figsize=(6, 3.4))
    for i, field in enumerate(args.y):
        label = args.label[i] if i < len(args.label) else field
        axes.plot([value(line, args.x) for line in lines], [value(line, field) for line in lines],
                  marker="o" if args.dots else None, linewidth=1.4, markersize=3.5, label=label)
    if args.log_x:
        axes.set_xscale("log")
    if args.log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set(title=args.title, xlabel=args.x_label or args.x, ylabel=args.y_label or args.y[0])
    if len(args.y) > 1:
        axes.legend(frameon=False)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
