"""The command line as a contract: exit statuses, JSON fields, clear refusals."""

import json
import os
import shutil
import signal
import subprocess
import threading

import pytest

from conftest import read_lines, write_lines


def test_wrong_usage_exits_with_2(cachalot):
    for arguments in ((), ("fly",), ("run",), ("run", "-m"), ("score", "--input", "x"), ("bench",)):
        cachalot(*arguments, status=2)
    cachalot("fly", status=2)
    assert "'fly'" in cachalot.errors
    for arguments in (("--help",), ("run", "--help"), ("synth", "--help"), ("--version",)):
        assert cachalot(*arguments)


def test_failures_exit_with_1_and_name_the_file(cachalot, tmp_path, checkpoint):
    missing = tmp_path / "missing"
    for command in (("inspect", missing), ("verify", missing), ("run", "-m", missing, "-p", "x")):
        cachalot(*command, status=1)
        assert str(missing) in cachalot.errors
    cachalot("score", "-m", checkpoint(), "--input", missing, "--output", "-", status=1)
    assert str(missing) in cachalot.errors


@pytest.mark.parametrize(
    "line, field",
    [
        ("[1, 2]", "object"),
        ("{", "object"),
        ('{"tokens": "x"}', "tokens"),
        ('{"tokens": [1.5]}', "tokens"),
        ('{"text": 3}', "text"),
        ('{"tokens": []}', "tokens"),
    ],
)
def test_bad_input_lines_name_line_and_field(cachalot, tmp_path, checkpoint, line, field):
    path = tmp_path / "in.jsonl"
    path.write_text('{"tokens": [5]}\n\n' + line + "\n")
    cachalot("score", "-m", checkpoint(), "--input", path, "--output", "-", status=1)
    assert field in cachalot.errors and str(path) in cachalot.errors


def test_inspect_json(cachalot, checkpoint):
    document = json.loads(cachalot("inspect", checkpoint(), "--json"))
    assert document["tensors"] > 0 and document["total_bytes"] > 0
    names = {"backbone", "engram", "draft", "vision", "total", "active_prefill", "active_decode"}
    assert names <= document["parameters"].keys()
    assert document["cache_bytes_per_token"] == 79.5
    assert document["window_bytes_per_request"] == 10 * 8 * 66
    modes = [layer["mode"] for layer in document["layers"]]
    assert modes == ["window"] * 2 + ["full"] + ["reuse"] * 2 + [
        "full", "reuse", "reindex", "reuse", "reindex",
    ]
    keys = {"index", "ratio", "mode", "kv_source", "index_source", "candidate_source", "engram"}
    assert all(keys <= layer.keys() for layer in document["layers"])


def test_run_json(cachalot, checkpoint):
    text = cachalot(
        "run", "-m", checkpoint(), "-p", "whale", "-n", 5, "--ignore-eos", "--json", "--seed", 3
    )
    document = json.loads(text)
    assert len(document["token_ids"]) == len(document["logprobs"]) == 5
    assert document["finish_reason"] == "length"
    assert document["timing"].keys() >= {"load_s", "prefill_s", "decode_s"}
    assert document["prompt_token_ids"][0] == 0


def test_tokenize(cachalot, checkpoint, tmp_path):
    document = json.loads(cachalot("tokenize", "-m", checkpoint(), "--text", "a whale \U0001f40b", "--json"))
    assert document["text"] == "a whale \U0001f40b"
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    assert json.loads(cachalot("tokenize", "-m", checkpoint(), "--chat", chat, "--json"))["token_ids"]
    chat.write_text(json.dumps({"messages": [{"role": "pirate", "content": "hi"}]}))
    cachalot("tokenize", "-m", checkpoint(), "--chat", chat, status=1)
    assert "role" in cachalot.errors


def test_doctor_json(cachalot):
    document = json.loads(cachalot("doctor", "--json"))
    assert 0 < document["memory_available_bytes"] <= document["memory_bytes"]
    backends = {backend["name"]: backend for backend in document["backends"]}
    assert backends["ref"]["built_in"] and backends["cpu"]["built_in"]
    assert "attend" in backends["cpu"]["kernels"]


def test_synth_is_deterministic_and_verifies(cachalot, tmp_path):
    for name, threads in (("a", 1), ("b", 2)):
        cachalot("synth", "--preset", "t1", "--seed", 9, "--out", tmp_path / name)
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert files == sorted(p.name for p in (tmp_path / "b").iterdir())
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    cachalot("verify", tmp_path / "a")


def test_damaged_checkpoints_are_refused(cachalot, tmp_path, checkpoint):
    for damage in ("truncate", "rename", "config"):
        directory = tmp_path / damage
        shutil.copytree(checkpoint(), directory)
        shard = sorted(directory.glob("*.safetensors"))[0]
        if damage == "truncate":
            shard.write_bytes(shard.read_bytes()[:-10])
        elif damage == "rename":
            shard.write_bytes(shard.read_bytes().replace(b"embed.weight", b"embed.weighs"))
        else:
            config = json.loads((directory / "config.json").read_text())
            config["text_config"]["hidden_size"] = 96
            (directory / "config.json").write_text(json.dumps(config))
        cachalot("run", "-m", directory, "-p", "x", "-n", 1, status=1)
        assert str(directory) in cachalot.errors


def test_chat_over_a_pipe(cachalot, checkpoint, tmp_path):
    saved = tmp_path / "saved.json"
    commands = f"hello\n/effort 40\n/effort banana\n/think on\n/save {saved}\n/reset\n/quit\n"
    cachalot("chat", "-m", checkpoint(), "-n", 5, stdin=commands.encode())
    assert "banana" in cachalot.errors
    document = json.loads(saved.read_text())
    assert document["messages"][0] == {"role": "user", "content": "hello"}
    assert document["reasoning_effort"] == 40


def test_unavailable_modes_say_so(cachalot, checkpoint):
    for flags in (("--backend", "cuda"),):
        cachalot("run", "-m", checkpoint(), "-p", "x", "-n", 1, *flags, status=1)
        assert flags[1] in cachalot.errors


def test_modes_agree_on_short_prompts(cachalot, checkpoint):
    # No longer than the window: a replay leaves nothing out.
    runs = [
        cachalot("run", "-m", checkpoint(), "-p", "abcdef", "-n", 8, "--mode", mode, "--json")
        for mode in ("exact", "replay", "halo")
    ]
    answers = [json.loads(run) for run in runs]
    for answer in answers[1:]:
        assert answer["token_ids"] == answers[0]["token_ids"]
        assert answer["logprobs"] == answers[0]["logprobs"]


def test_speculation(cachalot, checkpoint):
    flags = ("-p", "x", "-n", 12, "--ignore-eos", "--json", "--logit-bias", "40=60", "--temperature", 0)
    plain = json.loads(cachalot("run", "-m", checkpoint(), *flags))
    assert plain["speculation"] == {"draft_tokens": 0, "accepted_tokens": 0}
    drafted = json.loads(
        cachalot("run", "-m", checkpoint(), *flags, "--spec", "dspark", "--spec-length", 3)
    )
    assert drafted["token_ids"] == plain["token_ids"]
    # The bias leaves one token: every draft is kept. 12 tokens: 1 of the prefill, then 4, 4, 3.
    assert drafted["speculation"] == {"draft_tokens": 8, "accepted_tokens": 8}
    bare = checkpoint(
        "t1", "num_nextn_predict_layers=0", "compress_ratios=[0, 0, 2, 2, 2, 1, 1, 1, 1, 1]"
    )
    cachalot("run", "-m", bare, "-p", "x", "-n", 1, "--spec", "dspark", status=1)
    assert "num_nextn_predict_layers" in cachalot.errors


def test_stop_strings_and_batches(cachalot, checkpoint, tmp_path):
    lines = write_lines(tmp_path / "p.jsonl", [{"tokens": [0, 5, 9]}, {"text": "abc"}])
    text = cachalot("run", "-m", checkpoint(), "--input", lines, "--output", "-", "-n", 4, "--ignore-eos")
    assert [len(line["token_ids"]) for line in read_lines(text)] == [4, 4]


@pytest.mark.parametrize(
    "bias, fault",
    [
        ("5", "'5' is not ID=VALUE"),
        ("=1", "'=1'"),
        ("5=x", "'5=x'"),
        ("5=1e39", "'5=1e39'"),
        ("4294967296=1", "'4294967296=1'"),
        ("5=101", "token 5 is 101, must be in [-100, 100]"),
        ("5=-100.5", "token 5 is -100.5"),
        ("5=nan", "token 5 is nan"),
        ("512=1", "token 512, the vocabulary has 512"),
        ("-1=1", "token -1"),
    ],
)
def test_logit_biases_out_of_range(cachalot, checkpoint, bias, fault):
    cachalot("run", "-m", checkpoint(), "-p", "x", "-n", 1, "--logit-bias", bias, status=1)
    assert fault in cachalot.errors


def test_the_ends_of_ranges(cachalot, checkpoint):
    run = ("run", "-m", checkpoint(), "-p", "x", "-n", 1, "--json")
    for flag in ("--logit-bias=5=100", "--logit-bias=511=-100", "--seed=0", "--seed=18446744073709551615"):
        cachalot(*run, flag)
    for flag in ("--threads=-1", "--threads=1025", "--threads=1.5", "--threads=x", "--seed=-1", "--seed=1.5",
                 "--seed=18446744073709551616", "--chunk=0", "--spec-length=65"):
        cachalot(*run, flag, status=2)
        assert flag.split("=")[0] in cachalot.errors
    for flag in ("--step=-1", "--step=9223372036854775808", "--step=x", "--sequence=1", "--sequence=1048577",
                 "--tokens=0", "--tokens=-5"):
        cachalot("eval", "run", "--data", "x", flag, status=2)
        assert flag.split("=")[0] in cachalot.errors
    cachalot("export", "run", "--out", "x", "--step=9223372036854775808", status=2)


@pytest.mark.parametrize("command", ["inspect", "verify", "doctor", "tokenize", "score", "run"])
def test_output_that_cannot_be_written_is_a_failure(cachalot, checkpoint, tmp_path, command):
    lines = write_lines(tmp_path / "in.jsonl", [{"tokens": [5, 6]}])
    arguments = {
        "inspect": [checkpoint()], "verify": [checkpoint()], "doctor": [],
        "tokenize": ["-m", checkpoint(), "--text", "x"],
        "score": ["-m", checkpoint(), "--input", lines, "--output", "-"],
        "run": ["-m", checkpoint(), "-p", "x", "-n", "4"],
    }[command]
    call = [cachalot.path, command, *map(str, arguments)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(call, stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 1 and b"standard output" in done.stderr
    done = subprocess.run(call, stderr=subprocess.PIPE, timeout=60, preexec_fn=lambda: os.close(1))
    assert done.returncode == 1 and b"standard output" in done.stderr
    # A reader that is gone ends it as it ends every program of a pipeline.
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(call, stdout=writing, stderr=subprocess.PIPE, timeout=60)
    os.close(writing)
    assert done.returncode == -signal.SIGPIPE


def test_output_goes_where_its_path_leads(cachalot, checkpoint, tmp_path):
    lines = write_lines(tmp_path / "in.jsonl", [{"tokens": [5, 6, 7]}])
    score = ("score", "-m", checkpoint(), "--input", lines, "--output")
    text = cachalot(*score, "-")
    target, link, fifo, stdout = (tmp_path / name for name in ("target", "link", "fifo", "stdout"))
    # What /dev/stdout is; a binary that replaces links does no harm here.
    stdout.symlink_to("/proc/self/fd/1")
    assert cachalot(*score, stdout) == text
    target.write_text("old")
    link.symlink_to(target)
    cachalot(*score, link)
    assert link.is_symlink() and target.read_text() == text
    os.mkfifo(fifo)
    received = []
    reader = threading.Thread(target=lambda: received.append(fifo.read_text()))
    reader.start()
    cachalot(*score, fifo)
    reader.join(60)
    assert received == [text] and fifo.is_fifo()
    # What stands in an appended file before stays.
    target.write_text("before\n")
    with target.open("ab") as file:
        subprocess.run([cachalot.path, *map(str, score), str(stdout)], stdout=file, check=True, timeout=60)
    assert stdout.is_symlink()
    assert target.read_text() == "before\n" + text
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    cachalot(*score, full, status=1)
    assert str(full) in cachalot.errors and full.is_symlink()
    cachalot(*score, tmp_path, status=1)
    assert str(tmp_path) in cachalot.errors


def test_verify_names_every_fault(cachalot, checkpoint, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(checkpoint(), directory)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["n_routed_experts"] += 1
    (directory / "config.json").write_text(json.dumps(config))
    cachalot("verify", directory, status=1)
    named = cachalot.errors.count(".experts.8.")
    assert named > 20 and "more" not in cachalot.errors
    cachalot("run", "-m", directory, "-p", "x", "-n", 1, status=1)
    assert "more" in cachalot.errors
