"""The server over the trained model of this repository: what it says is what the command line says."""

import json
import subprocess

import pytest

from conftest import ENGINE, ROOT, Server, read_lines, write_lines

KRILL = ROOT / "models" / "krill"
LM_EVAL = ROOT / ".venv-tools" / "bin" / "python"  # requirements-tools.txt
TEXTS = ["The sperm whale", "def main(", "2 + 3 ="]


@pytest.fixture(scope="module", params=["off", "dspark"])
def krill(request, cachalot):
    server = Server(cachalot, KRILL, "--spec", request.param)
    yield server
    server.stop()


def test_completions_equal_the_command_line(krill, cachalot, tmp_path):
    # The server puts a BOS before text.
    prompts = [[0, *krill.post("/tokenize", {"text": text})["token_ids"]] for text in TEXTS]
    lines = write_lines(tmp_path / "p.jsonl", [{"tokens": prompt} for prompt in prompts])
    text = cachalot("run", "-m", KRILL, "--input", lines, "--output", "-", "-n", 48, "--temperature", 0, *ENGINE)
    for prompt, expected in zip(TEXTS, read_lines(text), strict=True):
        for _ in range(2):  # cold, and from the cache
            choice = krill.openai.completions.create(
                model="krill", prompt=prompt, max_tokens=48, temperature=0, logprobs=0,
                extra_body={"return_token_ids": True},
            ).choices[0]
            assert (choice.token_ids, choice.text) == (expected["token_ids"], expected["text"])
            assert choice.logprobs.token_logprobs == expected["logprobs"]


def test_chat_equals_the_command_line_in_every_dialect(krill, cachalot, tmp_path):
    messages = [{"role": "user", "content": "What is 17 + 25?"}]
    (tmp_path / "chat.json").write_text(json.dumps({"messages": messages}))
    expected = json.loads(cachalot(
        "run", "-m", KRILL, "--chat", tmp_path / "chat.json", "-n", 96, "--temperature", 0, *ENGINE, "--json"
    ))
    body = dict(model="krill", messages=messages, max_tokens=96, temperature=0)
    whole = krill.openai.chat.completions.create(**body, extra_body={"return_token_ids": True}).choices[0]
    assert whole.token_ids == expected["token_ids"]
    reasoning = content = ""
    for chunk in krill.openai.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
    assert (reasoning, content) == (whole.message.reasoning_content, whole.message.content)
    message = krill.anthropic.messages.create(
        model="claude-any", messages=messages, max_tokens=96, thinking={"type": "enabled", "budget_tokens": 1024},
        extra_body={"temperature": 0},
    )
    assert "".join(b.text for b in message.content if b.type == "text") == content
    answer = krill.openai.responses.create(
        model="krill", input=messages[0]["content"], max_output_tokens=96, temperature=0
    )
    assert answer.output_text == content


@pytest.mark.skipif(not LM_EVAL.exists(), reason="no .venv-tools with lm-eval")
def test_lm_eval_scores_as_the_command_line(cachalot):
    subprocess.run(
        [LM_EVAL, ROOT / "tools" / "lm_eval_check.py", "--binary", cachalot.path, "--texts", "10"], check=True, timeout=600
    )
