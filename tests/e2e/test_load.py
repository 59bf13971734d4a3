"""Load: `cachalot bench serve` finds nothing wrong with our server, and everything that is wrong with
one that loses, mixes or reorders what it streams."""

import http.server
import json
import threading

import pytest

from conftest import ENGINE, read_lines


def load(cachalot, *flags, status=0):
    return read_lines(cachalot("bench", "serve", *flags, status=status))


def test_a_thousand_streams(cachalot, checkpoint):
    line, = load(cachalot, "-m", checkpoint(), *ENGINE, "--concurrency", 1000, "--requests", 1000,
                 "--prompt", 3, "--output", 6, "--check", 50)
    assert line["complete"] == 1000 and line["checked_alone"] == 50
    assert line["refused"] == line["errors"] == line["wrong"] == 0
    assert line["first_token_s"]["p50"] <= line["first_token_s"]["p99"] <= line["max_s"]
    # What the engine alone made of the same requests just before.
    assert line["fraction"] == pytest.approx(line["output_tokens_per_s"] / line["ceiling"])
    assert 0 < line["fraction"]


def test_soak(cachalot, checkpoint, tmp_path):
    """Hang-ups, whole answers, shared prefixes, drafts, and eviction from pools, main memory and disk for
    half a minute. At its end the command itself checks that no page is held."""
    lines = load(
        cachalot, "-m", checkpoint(), *ENGINE, "--seconds", 20, "--concurrency", 24, "--requests", 200,
        "--vary", "--prompt", 80, "--output", 24, "--shared", 0.7, "--prefixes", 12, "--whole", 0.25,
        "--hang-up", 0.3, "--check", 20, "--sample", 0.5, "--max-running", 12, "--pool", 1200,
        "--window-pool", 24, "--spec", "dspark", "--spec-length", 2, "--host-pool", 100_000, "--disk", tmp_path / "disk",
        "--disk-bytes", 400_000,
    )
    states = [line for line in lines if line["name"] == "serve state"]
    line, = (line for line in lines if line["name"] == "serve")
    assert line["complete"] >= 20 and line["hung_up"] >= 5 and line["checked_alone"] > 0
    assert line["refused"] == line["errors"] == line["wrong"] == 0
    assert 0 < line["cached_share"] < 1
    assert states[-1]["stats"]["evictions"] > 0 and states[-1]["stats"]["draft_tokens"] > 0
    for tier, most in zip(states[-1]["stats"]["tiers"], (100_000, 400_000), strict=True):
        assert tier["hits"] > 0 and tier["faults"] == 0 and most / 2 < tier["bytes"] <= most, tier
    # Idle again: the descriptors of the idle server, but for one connection of the last question. The
    # files of the database, which come and go, are not among them.
    assert line["descriptors"] <= states[0]["descriptors"] + 1
    assert line["cache_files"] > 0
    # A pool that is full takes no more memory. The allocator keeps pieces of what streams and prompts
    # took at their peak: 24 clients of far less than 64 KiB each. The disk gathers objects in two pieces of
    # 1 MiB for each of its two families.
    half = [state["resident_bytes"] for state in states[len(states) // 2 :]]
    assert half[-1] - half[0] < 24 * (64 << 10) + (4 << 20)


# What a server might do to the events of a stream.
FAULTS = {
    "nothing": lambda events: events,
    "lost": lambda events: events[:1] + events[2:],
    "twice": lambda events: events[:2] + events[1:],
    "reordered": lambda events: [events[0], events[2], events[1], *events[3:]],
    "mixed": lambda events: [events[0], events[1].replace('"id": "', '"id": "other'), *events[2:]],
    "foreign token": lambda events: [*events[:2], events[2].replace('"token_ids": [', '"token_ids": [9'), *events[3:]],
    "foreign text": lambda events: [*events[:2], events[2].replace('"text": "', '"text": "x'), *events[3:]],
    "unended": lambda events: events[:-1],
    "cut": lambda events: events[:-2] + events[-1:],
    "late": lambda events: [*events, events[1]],
}


@pytest.fixture(scope="module")
def faulty():
    """A server whose answers are a function of the prompt; the first stream has the fault `break_it`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def reply(self, body, kind="application/json"):
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def do_GET(self):
            self.reply("{}")

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt, count = body["prompt"], body["max_tokens"]
            ids = [(sum(prompt) * 7 + i * 13) % 500 for i in range(count)]
            self.server.answers += 1
            name = f"cmpl-{self.server.answers}"
            usage = {"prompt_tokens": len(prompt), "completion_tokens": count,
                     "prompt_tokens_details": {"cached_tokens": 0}}
            first = {"prompt_token_ids": prompt}
            if not body["stream"]:
                choice = {"text": "".join(f"<{i}>" for i in ids), "token_ids": ids, "finish_reason": "length"}
                self.reply(json.dumps({"id": name, "choices": [choice | first], "usage": usage}))
                return
            events = []
            for i, token in enumerate(ids):
                last = i + 1 == count
                choice = {"text": f"<{token}>", "token_ids": [token], "finish_reason": "length" if last else None}
                piece = {"id": name, "choices": [choice | (first if i == 0 else {})]}
                events.append(json.dumps(piece | ({"usage": usage} if last else {})))
            events = self.server.break_it([*events, "[DONE]"])
            self.reply("".join(f"data: {event}\n\n" for event in events), "text/event-stream")

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.answers = 0
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_streams_are_found(cachalot, faulty, fault):
    broken = []

    def break_once(events):
        if broken:
            return events
        broken.append(True)
        return FAULTS[fault](events)

    faulty.break_it = break_once
    url = f"http://127.0.0.1:{faulty.server_address[1]}"
    line, = load(cachalot, "--url", url, "--concurrency", 3, "--requests", 12, "--prompt", 5, "--output", 6,
                 "--check", 12, status=0 if fault == "nothing" else 1)
    assert line["wrong"] == (fault != "nothing"), cachalot.errors
    assert line["errors"] == 0 and line["ceiling"] is None
    if fault != "nothing":
        assert "request " in cachalot.errors
