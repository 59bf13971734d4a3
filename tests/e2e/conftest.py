"""Fixtures of the end-to-end tests: the binary, and synthetic checkpoints made by it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


class Binary:
    """Runs build/cachalot (or $CACHALOT_BINARY)."""

    def __init__(self):
        self.path = os.environ.get("CACHALOT_BINARY", str(ROOT / "build" / "cachalot"))

    def __call__(self, *args, status=0, stdin=None):
        command = [self.path, *map(str, args)]
        done = subprocess.run(command, capture_output=True, input=stdin, timeout=600)
        text = done.stderr.decode(errors="replace")
        assert done.returncode == status, f"{command}: exit {done.returncode}\n{text}"
        self.errors = text
        return done.stdout.decode()


@pytest.fixture(scope="session")
def cachalot():
    return Binary()


@pytest.fixture(scope="session")
def checkpoint(cachalot, tmp_path_factory):
    """checkpoint(preset, "key=value", ..., weights=, seed=): a directory, made once per session."""
    made = {}

    def make(preset="t1", *settings, weights="official", seed=1):
        key = (preset, settings, weights, seed)
        if key not in made:
            path = tmp_path_factory.mktemp("checkpoint") / "model"
            sets = [arg for setting in settings for arg in ("--set", setting)]
            cachalot(
                "synth", "--preset", preset, "--seed", seed, "--weights", weights, "--out", path, *sets
            )
            made[key] = path
        return made[key]

    return make


def write_lines(path, documents):
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def read_lines(text):
    return [json.loads(line) for line in text.splitlines()]
