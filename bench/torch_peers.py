#!/usr/bin/env python3
"""Times PyTorch (cuBLAS, cuBLASLt, its fused attention, grouped products, top-k) at the shapes of cuda_ops_bench.

Needs a Python with torch and a Hopper GPU; run it in the same call as cuda_ops_bench, on the same GPU. One JSON
line per measurement: name and shape as there, implementation, median_s, tflops. Method as there: random data,
arguments that rotate over more than 200 MB, replays of a CUDA graph, median of 9.

What differs from our ops, in PyTorch's favour: BF16 weights are unpacked already, FP8 products take one scale per
tensor and inputs that are rounded already, attention reads unpacked BF16 rows in order.
"""

import argparse
import json
import statistics

import torch

ROTATE_BYTES = 256 << 20
REPLAYS = 9
DEVICE = "cuda"


def measure(calls, run):
    """Median seconds of one run(i)."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(2):
            run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            run(i)
    times = []
    for i in range(REPLAYS + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(begin.elapsed_time(end) * 1e-3 / calls)
    return statistics.median(times)


def report(name, shape, implementation, seconds, flops=0.0):
    print(json.dumps({"name": name, "shape": shape, "implementation": implementation, "median_s": seconds,
                      "tflops": round(flops / seconds * 1e-12, 2)}), flush=True)


def rotating(bytes_each, most=64):
    return min(most, max(1, -(-ROTATE_BYTES // bytes_each)))


def normal(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


LINEARS = [  # name, in, out
    ("linear.wq_a+wkv", 5120, 1792),
    ("linear.wq_b", 1280, 32768),
    ("linear.wo_b", 8192, 5120),
    ("linear.shared_w13", 5120, 4608),
    ("linear.shared_w2", 2304, 5120),
    ("linear.index_wq_b", 1280, 4096),
    ("linear.engram_wkv", 6144, 25600),
    ("head", 5120, 129280),
]


def linears():
    one = torch.ones((), device=DEVICE)
    for name, k, n in LINEARS:
        for t in (1, 8, 64, 4096):
            if name == "head" and t not in (1, 64):
                continue
            shape = f"N={t}" if name == "head" else f"T={t}"
            flops, x = 2.0 * t * n * k, normal(t, k)
            sets = rotating(2 * n * k)
            weights = [normal(n, k) for _ in range(sets)]
            calls = 4 if t > 1000 else max(20, sets)
            seconds = measure(calls, lambda i: torch.mm(x, weights[i % sets].t()))
            report(name, shape, "torch.mm, BF16 weights", seconds, flops)
            if name == "head":
                continue
            sets = rotating(n * k)
            x8 = x.to(torch.float8_e4m3fn)
            codes = [normal(n, k).to(torch.float8_e4m3fn) for _ in range(sets)]
            calls = 4 if t > 1000 else max(20, sets)
            seconds = measure(calls, lambda i: torch._scaled_mm(
                x8, codes[i % sets].t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16))
            report(name, shape, "torch._scaled_mm, one FP8 scale", seconds, flops)
        torch.cuda.empty_cache()


def experts(count=384, d=5120, f=2304, k=6):
    """Routed experts as two grouped products over BF16 weights, with gather, SwiGLU and weighted sum."""
    w13 = torch.empty(count, 2 * f, d, device=DEVICE, dtype=torch.bfloat16)
    w2 = torch.empty(count, d, f, device=DEVICE, dtype=torch.bfloat16)
    for e in range(count):
        w13[e].normal_(0, 0.02)
        w2[e].normal_(0, 0.02)
    for t in (8, 64, 512, 4096):
        x = normal(t, d)
        ids = torch.rand(t, count, device=DEVICE).topk(k, dim=1).indices
        weights = torch.rand(t, k, device=DEVICE)

        def run(_):
            order = torch.argsort(ids.flatten())
            token = order // k
            # Token counts per expert, without a size that the graph cannot know.
            counts = (ids.flatten()[None, :] == torch.arange(count, device=DEVICE)[:, None]).sum(1)
            offsets = counts.cumsum(0).to(torch.int32)
            h = torch._grouped_mm(x[token], w13.transpose(1, 2), offs=offsets)
            gate, up = h.chunk(2, dim=1)
            h = torch.nn.functional.silu(gate) * up * weights.flatten()[order, None].to(h.dtype)
            out = torch._grouped_mm(h, w2.transpose(1, 2), offs=offsets)
            return torch.zeros(t, d, device=DEVICE).index_add_(0, token, out.float())

        seconds = measure(2 if t > 100 else 4, run)
        report("experts.routed_only", f"T={t}", "torch._grouped_mm, BF16 weights", seconds, 6.0 * t * f * d * k)
    del w13, w2
    torch.cuda.empty_cache()


def attention(heads=64, dim=512, rows=640):
    for batch in (1, 16, 64, 128, 256):
        sets = rotating(batch * rows * dim * 2)
        q = normal(batch, 1, heads, dim)  # the heads share their keys: they are the queries of one head
        keys = [normal(batch, 1, rows, dim) for _ in range(sets)]
        seconds = measure(max(20, sets), lambda i: torch.nn.functional.scaled_dot_product_attention(
            q, keys[i % sets], keys[i % sets]))
        report("attend", f"batch={batch}", "torch SDPA, unpacked BF16 rows", seconds, 4.0 * batch * heads * dim * rows)
    torch.cuda.empty_cache()


def top_k():
    for rows, columns, k in ((1, 131072, 512), (1, 524288, 512), (1, 1 << 20, 512), (64, 8192, 512), (64, 131072, 512),
                             (384, 131072, 512), (4096, 65536, 512), (4096, 131072, 512), (64, 129280, 256)):
        sets = rotating(rows * columns * 4)
        scores = [torch.randn(rows, columns, device=DEVICE) for _ in range(sets)]
        seconds = measure(4 if rows > 1000 else max(8, sets), lambda i: torch.topk(scores[i % sets], k, dim=1))
        report("top_k", f"{rows}x{columns} k={k}", "torch.topk, F32 scores", seconds)
    torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="linears, experts, attention, top_k; default: all")
    args = parser.parse_args()
    torch.manual_seed(1)
    print(json.dumps({"torch": torch.__version__, "device": torch.cuda.get_device_name()}), flush=True)
    for group in (linears, experts, attention, top_k):
        if not args.what or group.__name__ in args.what:
            group()


if __name__ == "__main__":
    main()
