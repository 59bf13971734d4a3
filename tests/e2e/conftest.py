"""Fixtures of the end-to-end tests: the binary, and synthetic checkpoints made by it."""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# A machine with a GPU proves that backend with CACHALOT_BACKENDS=cuda.
BACKENDS = os.environ.get("CACHALOT_BACKENDS", "ref,cpu").split(",")
# How the server runs, and the command line that its answers are compared with.
ENGINE = ("--threads", "1", "--backend", BACKENDS[-1])


def pytest_configure(config):
    # What a client thread raises would be a warning, and what it was to find out would not be known.
    config.addinivalue_line("filterwarnings", "error::pytest.PytestUnhandledThreadExceptionWarning")


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


class Server:
    """A running `cachalot serve` on a free port, started by the command `within` if there is one."""

    def __init__(self, cachalot, directory, *flags, within=()):
        self.process = subprocess.Popen(
            [*within, cachalot.path, "serve", "-m", str(directory), "--port", "0", *ENGINE, *map(str, flags)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http://127.0.0.1:"), self.process.stderr.read()
        self.port = int(self.url.rsplit(":", 1)[1])
        deadline = time.monotonic() + 60
        while self.get("/ready", allow=(200, 503))[0] != 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        # Only tests of the server need these packages: the others also run on hosts without them.
        import anthropic
        import openai

        self.openai = openai.OpenAI(base_url=self.url + "/v1", api_key="key", max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=self.url, api_key="key", max_retries=0)

    def request(self, method, path, body=None, headers=None, allow=(200,)):
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers or {}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, text, out = answer.status, answer.read().decode(), dict(answer.headers)
        except urllib.error.HTTPError as error:
            status, text, out = error.code, error.read().decode(), dict(error.headers)
        assert status in allow, (status, text)
        return status, text, out

    def get(self, path, allow=(200,)):
        return self.request("GET", path, allow=allow)

    def post(self, path, body, allow=(200,)):
        return json.loads(self.request("POST", path, body, allow=allow)[1])

    def metric(self, name):
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith(name + " "):
                return float(line.split()[-1])
        raise KeyError(name)

    def stop(self, expect=0):
        self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=60)
        assert self.process.returncode == expect, errors
        return errors


@pytest.fixture(scope="module")
def server(cachalot, checkpoint):
    running = Server(cachalot, checkpoint())
    yield running
    running.stop()


@pytest.fixture(scope="module")
def seeing(cachalot, checkpoint):
    running = Server(cachalot, checkpoint("t1-vision"))
    yield running
    running.stop()


class Redis:
    """A redis-server on a free port, with nothing on disk."""

    def __init__(self, directory):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory)],
            stdout=subprocess.DEVNULL,
        )
        wait_until(self.answers)

    def answers(self):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@pytest.fixture
def redis(tmp_path):
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    running = Redis(tmp_path)
    yield running
    running.process.kill()
    running.process.wait()


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def write_lines(path, documents):
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def read_lines(text):
    return [json.loads(line) for line in text.splitlines()]
