"""The tool that compares arms of training: data, runs, table and plot."""

import json
import pathlib
import subprocess
import sys

from conftest import write_lines

TOOL = pathlib.Path(__file__).parents[2] / "tools" / "acceptance" / "acceptance.py"


def tool(*arguments):
    subprocess.run([sys.executable, TOOL, *map(str, arguments)], check=True)


def test_arms_are_run_and_reported(cachalot, tmp_path):
    for name in ("train", "heldout"):
        write_lines(tmp_path / f"{name}.jsonl", [{"text": "whales eat krill " * 20}])
    tool("data", "--corpus", tmp_path, "--out", tmp_path / "data", "--bytes", 1000, "--samples", 200)
    samples = [json.loads(line) for line in open(tmp_path / "data" / "needle-train.jsonl")]
    for sample in samples[:20]:
        learned = [i for i, mark in enumerate(sample["learn"]) if mark]
        assert len(learned) == 4
        for i in learned:
            pair = sample["tokens"][i - 1:i + 1]
            at = next(j for j in range(2, 18, 2) if sample["tokens"][j:j + 2] == pair)
            assert i - at > 64
    results = tmp_path / "results.jsonl"
    tool("run", "--cachalot", cachalot.path, "--folder", tmp_path, "--out", results, "--only",
         "needle,needle-window", "--steps", 1)
    records = [json.loads(line) for line in open(results)]
    assert sorted(r["seed"] for r in records if r.get("done")) == [1, 1, 2, 2]
    tool("report", "--results", results, "--table", tmp_path / "table.md", "--plot", tmp_path / "plot.svg")
    table = (tmp_path / "table.md").read_text()
    assert "right values with the window alone" in table and "not run" in table
    assert (tmp_path / "plot.svg").read_text().count("<polyline") == 4
