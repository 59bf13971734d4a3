#!/usr/bin/env python3
"""Times other implementations on a checkpoint: load, prefill and decode, one JSON line each.

    python3 tools/oracle/speed_check.py -m DIR --implementation mlx-vlm --threads 2

A line stands beside the `timing` of `cachalot run --json` on the same machine, checkpoint and token
counts. Fields: medians of --repeat runs after one that is not counted; decode_tokens_per_s is null
where the implementation has no cache (nemo). mlx-vlm runs in FP32, because mlx has no BF16
gather_mm on a CPU; nemo in --dtype.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time


def clock(function):
    begin = time.perf_counter()
    result = function()
    return time.perf_counter() - begin, result


def mlx_vlm(args):
    import mlx.core as mx
    import peer_mlx_vlm

    def load():
        model, _ = peer_mlx_vlm.build(args.model, "f32")
        mx.eval(model.parameters())
        return model

    load_s, model = clock(load)

    def prefill(tokens):
        cache = model.make_cache()
        logits = model(mx.array([tokens]), cache=cache).logits[:, -1]
        mx.eval(logits, cache[0].state)
        return logits, cache

    def decode(state, count):
        logits, cache = state
        for _ in range(count):
            token = mx.argmax(logits, axis=-1)[None].astype(mx.int32)
            logits = model(token, cache=cache).logits[:, -1]
            mx.eval(logits, cache[0].state)

    return peer_mlx_vlm, "float32", load_s, prefill, decode


def nemo(args):
    import peer_nemo
    import torch

    torch.set_num_threads(args.threads)
    load_s, model = clock(lambda: peer_nemo.build(args.model, args.dtype))

    @torch.no_grad()
    def prefill(tokens):
        return model(torch.tensor([tokens]), logits_to_keep=1).logits

    return peer_nemo, args.dtype, load_s, prefill, None


def measure(args):
    module, dtype, load_s, prefill, decode = {"mlx-vlm": mlx_vlm, "nemo": nemo}[
        args.implementation
    ](args)
    vocabulary = json.load(open(os.path.join(args.model, "config.json")))["text_config"]["vocab_size"]
    # Any text will do: the cost depends on the tokens only through the routing.
    tokens = [(i * 7919 + 13) % vocabulary for i in range(args.prompt)]
    prefills, decodes = [], []
    for _ in range(args.repeat + 1):
        seconds, state = clock(lambda: prefill(tokens))
        prefills.append(seconds)
        if decode:
            decodes.append(clock(lambda: decode(state, args.generate))[0])
    prefill_s = statistics.median(prefills[1:])
    decode_s = statistics.median(decodes[1:]) if decode else None
    return {
        "name": "other_implementation",
        "implementation": module.NAME,
        "versions": module.versions(),
        "checkpoint": args.model,
        "machine": platform.machine(),
        "dtype": dtype,
        "threads": args.threads,
        "load_s": load_s,
        "prompt_tokens": args.prompt,
        "prefill_s": prefill_s,
        "prefill_tokens_per_s": args.prompt / prefill_s,
        "decode_tokens": args.generate if decode else None,
        "decode_s": decode_s,
        "decode_tokens_per_s": args.generate / decode_s if decode else None,
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "repeat": args.repeat,
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", dest="model", metavar="DIR", required=True)
    parser.add_argument("--implementation", choices=("mlx-vlm", "nemo"), default="mlx-vlm")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--generate", type=int, default=32, help="tokens decoded")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    # Read by the BLAS libraries when they are loaded, so before any of the imports above.
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(args.threads)
    print(json.dumps(measure(args)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
