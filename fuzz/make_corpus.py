#!/usr/bin/env python3
"""Writes the seed corpora: valid and nearly valid inputs of each fuzz target.

Usage: fuzz/make_corpus.py [path of the cachalot binary, for the tokenizer seed]
"""

import base64
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def write(target, name, data):
    folder = HERE / "corpus" / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())


def safetensors(header, data_bytes):
    text = header if isinstance(header, str) else json.dumps(header, separators=(",", ":"))
    return len(text).to_bytes(8, "little") + text.encode() + bytes(data_bytes)


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def safetensors_seeds():
    two = {"a": entry("F32", [2], 0, 8), "b": entry("BF16", [1, 3], 8, 14)}
    all_dtypes, at = {"__metadata__": {"format": "pt"}}, 0
    sizes = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8}
    for dtype, size in sizes.items():
        all_dtypes[dtype] = entry(dtype, [2, 1], at, at + 2 * size)
        at += 2 * size
    write("safetensors", "empty", safetensors({}, 0))
    write("safetensors", "two", safetensors(two, 14))
    write("safetensors", "dtypes", safetensors(all_dtypes, at))
    write("safetensors", "zero_size", safetensors({"z": entry("U8", [0, 4], 0, 0)}, 0))
    write("safetensors", "scalar", safetensors({"s": entry("F32", [], 0, 4)}, 4))
    write("safetensors", "gap", safetensors({"a": entry("U8", [1], 1, 2)}, 2))
    write("safetensors", "reversed", safetensors({"a": entry("U8", [1], 1, 0)}, 1))
    write("safetensors", "overflow", safetensors({"a": entry("F32", [2**62, 4], 0, 0)}, 0))
    write("safetensors", "twice", safetensors('{"a":' + json.dumps(two["a"]) + ',"a":{}}', 8))


def config_seeds():
    golden = HERE.parent / "tests" / "golden" / "config"
    for path in sorted(golden.glob("*.json")):
        write("config", path.stem, json.dumps(json.loads(path.read_text()), separators=(",", ":")))
    for i, text in enumerate(
        ["hidden_size=128", "swiglu_limit=1.5", "compress_ratios=[0,0,2,2,2,1,1,1,1,1,0]",
         "rope_scaling.factor=8", "vision_config.patch_size=14", "engram_vocab_size=1000"]
    ):
        write("config", f"set_{i}", text)


def object_seeds():
    # The target makes valid objects itself: these choose the kind and edit the header.
    for name, data in {"page": [0], "state": [1], "partial": [3], "cut": [60, 0, 0, 67],
                       "kind": [0, 56, 0, 2], "tokens": [1, 64, 0, 255]}.items():
        write("object", name, bytes(data))


def tokenizer_seeds(binary):
    with tempfile.TemporaryDirectory() as folder:
        for size in (259, 300):
            subprocess.run(
                [binary, "synth", "--preset", "t1", "--seed", "1", "--out", folder,
                 "--set", f"vocab_size={size}", "--set", f"engram_compressed_vocab_size={size}",
                 "--set", "dspark_noise_token_id=0"],
                check=True,
            )
            # Escaped, so that the seeds are ASCII like every source.
            tokenizer = json.loads((Path(folder) / "tokenizer.json").read_text(encoding="utf-8"))
            write("tokenizer", f"byte_level_{size}", json.dumps(tokenizer, separators=(",", ":")))


def request_seeds():
    user = {"role": "user", "content": "hi"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    chat = {"messages": [user], "stream": True, "stream_options": {"include_usage": True}, "stop": ["x"],
            "logprobs": True, "top_logprobs": 2, "seed": 1, "logit_bias": {"5": 1}, "max_tokens": 3}
    tools = {"messages": [user, {"role": "assistant", "content": None, "tool_calls": [call]},
                          {"role": "tool", "tool_call_id": "c", "content": "1"}],
             "tools": [tool], "tool_choice": "auto", "reasoning_effort": "max",
             "structured_outputs": {"choice": ["a"]}}
    anthropic = {"max_tokens": 5, "system": [{"type": "text", "text": "s"}], "thinking": {"type": "enabled"},
                 "messages": [user, {"role": "assistant", "content": [
                     {"type": "thinking", "thinking": "t"},
                     {"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}]}],
                 "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"}}
    responses = {"instructions": "i", "reasoning": {"effort": "low"}, "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]}, {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"}],
        "tools": [{"type": "custom", "name": "p"}, {"type": "function", "name": "f"}]}
    png = base64.b64encode((HERE.parent / "tests" / "image" / "golden" / "bits.png").read_bytes()).decode()
    shown = {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + png}},
        {"type": "file", "file": {"file_data": png}}, {"type": "text", "text": "x"}]}]}
    source = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": png}}
    for first, name, body in (
        ("\0", "images", shown),
        ("\2", "source", {"max_tokens": 5, "messages": [{"role": "user", "content": [source]}]}),
        ("\3", "input_image", {"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": "data:image/png;base64," + png}]}]}),
        ("\0", "chat", chat), ("\0", "tools", tools), ("\1", "text", {"prompt": "x", "echo": True, "logprobs": 1}),
        ("\1", "ids", {"prompt": [[5, 6], "x"], "n": 2}), ("\1", "middle", {"prompt": "a", "suffix": "b"}),
        ("\2", "messages", anthropic), ("\3", "responses", responses),
    ):
        write("requests", name, first + json.dumps(body))


def grammar_seeds():
    # The kind, the text, and behind a NUL byte the draws of tokens.
    schema = {"type": "object", "required": ["n", "s"], "additionalProperties": False, "properties": {
        "n": {"type": "integer", "minimum": 1, "maximum": 40}, "s": {"type": "string", "pattern": "^a+[0-9]$"},
        "o": {"anyOf": [{"enum": [1, "x", None]}, {"$ref": "#/$defs/d"}]}}, "$defs": {"d": {"type": "array", "items": {
            "type": "number"}, "minItems": 1, "maxItems": 3}}}
    for kind, name, text in (
        (0, "json", ""), (1, "schema", json.dumps(schema)), (1, "format", json.dumps({"type": "string", "format": "date"})),
        (2, "regex", "(a|b){2,5}[^x-z]+\\d?"), (3, "gbnf", 'root ::= "a" item* | [0-9]+\nitem ::= "," root'),
        (4, "choice", "krill\nkelp\nkr"), (5, "calls", f'f\n{json.dumps(schema)}\ng\n{{"type": "object"}}'),
        (5 | 0xC0, "open", 'f\n{"type": "object", "properties": {"a": {"type": "boolean"}}}'),
    ):
        write("grammar", name, bytes([kind]) + text.encode() + b"\0" + bytes(range(1, 240, 7)))


def http_seeds():
    head = "Host: x\r\n"
    write("http", "get", f"GET /a HTTP/1.1\r\n{head}\r\n")
    write("http", "stream", f"GET / HTTP/1.1\r\n{head}\r\n")
    write("http", "post", f"POST /a HTTP/1.1\r\n{head}Content-Length: 2\r\n\r\nhi")
    write("http", "chunked", f"POST /a HTTP/1.1\r\n{head}Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n")
    write("http", "expect", f"POST /a HTTP/1.0\r\n{head}Expect: 100-continue\r\nContent-Length: 1\r\n\r\nx")
    write("http", "pipelined", f"GET / HTTP/1.1\r\n{head}\r\nGET /a HTTP/1.1\r\n{head}Connection: close\r\n\r\n")


def chat_parser_seeds():
    # A byte above 0xF0 is a control token, see the target: 0xF9 ends reasoning, 0xFA is the DSML marker.
    end, dsml = b"\xf9", b"\xfa"
    call = (b"\n\n<%s calls>\n<%s invoke name=\"f\">\n<%s parameter name=\"a\" string=\"true\">x</%s parameter>\n"
            b"<%s parameter name=\"b\" string=\"false\">[1]</%s parameter>\n</%s invoke>\n</%s calls>" % ((dsml,) * 8))
    write("chat_parser", "calls", b"\x00think" + end + b"text" + call)
    write("chat_parser", "open", b"\x03" + call[10:])
    write("chat_parser", "json", b"\x09```json\n{\"a\": 1}\n```")
    write("chat_parser", "stop", b"\x21text stop more")


def image_seeds():
    golden = HERE.parent / "tests" / "image" / "golden"
    for path in sorted(golden.iterdir()):
        if path.suffix != ".json":
            write("image", path.name, path.read_bytes())


def main():
    safetensors_seeds()
    image_seeds()
    config_seeds()
    request_seeds()
    grammar_seeds()
    http_seeds()
    chat_parser_seeds()
    object_seeds()
    if len(sys.argv) > 1:
        tokenizer_seeds(sys.argv[1])


if __name__ == "__main__":
    main()
