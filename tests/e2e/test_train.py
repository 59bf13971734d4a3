"""A training run from the outside: killed and resumed, evaluated, exported, scored."""

import json
import math
import resource
import signal
import subprocess
import time

from conftest import read_lines, write_lines


def run_file(folder, steps):
    words = ["krill", "swim", "deep", "whales", "dive", "and", "eat"]
    texts = [" ".join(words[(i * j + i) % 7] for j in range(20)) for i in range(40)]
    data = write_lines(folder / "data.jsonl", [{"text": text} for text in texts])
    path = folder / "run.toml"
    path.write_text(f"""
[model]
preset = "t1"
[data]
train = ["{data}"]
heldout = ["{data}"]
sequence = 32
batch_tokens = 64
micro_tokens = 64
[schedule]
steps = {steps}
peak = 5e-3
[objective]
indexer_queries = 8
[run]
out = "{folder}/run"
threads = 1
checkpoint_every = 2
evaluate_tokens = 200
""")
    return path


def curve(folder):
    """The log without what depends on the clock."""
    lines = read_lines((folder / "run" / "log.jsonl").read_text())
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in lines]


def test_a_killed_run_resumes_with_the_same_curve(cachalot, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    cachalot("train", run_file(whole, 8))
    process = subprocess.Popen([cachalot.path, "train", run_file(killed, 8)], stderr=subprocess.DEVNULL)
    deadline = time.time() + 120
    while not list(killed.glob("run/state-*.safetensors")) and process.poll() is None:
        assert time.time() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    cachalot("train", run_file(killed, 8), "--resume")
    assert curve(killed) == curve(whole)


def test_export_scores_as_the_run_evaluates(cachalot, tmp_path):
    cachalot("train", run_file(tmp_path, 4))
    data = tmp_path / "data.jsonl"
    result = json.loads(cachalot("eval", tmp_path / "run", "--data", data, "--exported", "--json"))
    cachalot("export", tmp_path / "run", "--out", tmp_path / "model")
    documents = []
    for line in read_lines(data.read_text()):
        ids = json.loads(cachalot("tokenize", "-m", tmp_path / "model", "--text", line["text"], "--json"))
        documents.append({"tokens": [0, *ids["token_ids"], 1]})
    tokens = write_lines(tmp_path / "tokens.jsonl", documents)
    scores = read_lines(cachalot("score", "-m", tmp_path / "model", "--input", tokens, "--output", "-",
                                 "--precision", "f32", "--threads", 1))
    losses = [-p for score in scores for p in score["logprobs"][1:]]
    assert len(losses) == result["targets"]
    # The mean over some thousand tokens; single ones may differ where a code lies at a boundary.
    assert math.isclose(sum(losses) / len(losses), result["loss"], rel_tol=1e-3)


def test_an_interrupted_export_is_no_checkpoint(cachalot, tmp_path):
    cachalot("train", run_file(tmp_path, 4))
    model = tmp_path / "model"
    cachalot("export", tmp_path / "run", "--step", 2, "--out", model)
    largest = max(path.stat().st_size for path in model.iterdir())
    for limit in (0, 4096, largest // 2, largest - 1):
        # The kernel kills whoever writes a file beyond the limit: in the middle of a file.
        killed = subprocess.run(
            [cachalot.path, "export", tmp_path / "run", "--out", model], stderr=subprocess.DEVNULL, timeout=60,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
        assert killed.returncode == -signal.SIGXFSZ
        for command in (("verify", model), ("run", "-m", model, "-p", "x", "-n", 1)):
            cachalot(*command, status=1)
            assert str(model) in cachalot.errors
    assert list(model.glob("*.tmp"))
    cachalot("export", tmp_path / "run", "--out", model)
    cachalot("verify", model)
    assert not list(model.glob("*.tmp"))
    whole = tmp_path / "whole"
    cachalot("export", tmp_path / "run", "--out", whole)
    assert {p.name: p.read_bytes() for p in model.iterdir()} == {p.name: p.read_bytes() for p in whole.iterdir()}


def test_a_drafter_is_trained_measured_and_exported(cachalot, tmp_path):
    path = run_file(tmp_path, 4)
    cachalot("train", path)
    text = path.read_text().replace('preset = "t1"', f'from = "{tmp_path}/run"\nstage = "drafter"')
    path.write_text(text.replace(f"{tmp_path}/run\"\nthreads", f"{tmp_path}/drafter\"\nthreads"))
    cachalot("train", path)
    data = tmp_path / "data.jsonl"
    result = json.loads(cachalot("eval", tmp_path / "drafter", "--drafter", "--data", data, "--json"))
    expected = 1 + sum(math.prod(result["acceptance"][:k + 1]) for k in range(len(result["acceptance"])))
    # The mean of products over blocks, not the product of means.
    assert math.isclose(result["acceptance_length"], expected, rel_tol=0.1)
    cachalot("export", tmp_path / "drafter", "--out", tmp_path / "model")
    calibration = json.loads((tmp_path / "model" / "draft_calibration.json").read_text())
    assert calibration["step"] == 4 and len(calibration["temperatures"]) == len(result["acceptance"])
    plain, drafted = (cachalot("run", "-m", tmp_path / "model", "-p", "krill swim", "-n", 12, "--temperature", 0,
                               "--threads", 1, *spec) for spec in ([], ["--spec", "dspark"]))
    assert plain == drafted


def test_faults_are_named(cachalot, tmp_path):
    path = run_file(tmp_path, 2)
    cachalot("train", path, "--set", 'model.stage="drafter"', status=1)
    assert "model.stage" in cachalot.errors
    cachalot("train", path, "--set", "schedule.pace=1", status=1)
    assert "schedule.pace" in cachalot.errors
    cachalot("train", path, "--resume", status=1)
    assert "no state" in cachalot.errors
    cachalot("train", path)
    cachalot("train", path, "--resume", "--set", "optimizer.clip=2.0", status=1)
    assert "optimizer.clip is 2; the run so far had 1" in cachalot.errors
    cachalot("export", tmp_path, "--out", tmp_path / "x", status=1)
    assert str(tmp_path) in cachalot.errors
    cachalot("train", status=2)
