#!/usr/bin/env python3
"""Times FlashMLA and DeepGEMM at the shapes of cuda_ops_bench, with the method and the output of torch_peers.py.

Needs a Hopper GPU, torch, and the packages flash_mla and deep_gemm (docs/benchmarks.md: which versions, how they are
built); one that is absent is named and left out. Before a kernel is timed, some rows of its output are compared with
FP32 arithmetic on the values that its operands stand for.

What differs from our ops, in their favour: inputs of products are rounded already, and scales lie as the kernels read
them; FP8 weights have a scale per 128 x 128; experts are the two products alone (no gather, SwiGLU, rounding, weighted
sum or shared expert); prefill attention reads rows unpacked to BF16; index logits are not followed by a selection
(torch_peers.py times torch.topk), and their schedule is made beforehand. Against them: experts' weights of a byte, rows
of 584 and 132 bytes, where ours have half a byte, 288 or 528, and 68.
"""

import argparse
import importlib
import json

import torch

from torch_peers import DEVICE, LINEARS, measure, normal, report, rotating

# Relative error, as a norm over the compared rows, of a right call. Outputs and probabilities are rounded to BF16, each
# to 2^-9 at most, and FP8 tensor cores keep about 13 bits of a sum; a wrong layout or scale gives errors near 1.
ERROR_BOUND = 2**-7


def check(what, actual, expected):
    error = ((actual.float() - expected).norm() / expected.norm()).item()
    if not error < ERROR_BOUND:
        raise SystemExit(f"{what}: relative error {error:.3g} against FP32, at most {ERROR_BOUND:.3g} expected")


def e4m3(*shape):
    """Random codes, filled in parts: the BF16 numbers before the rounding need little memory."""
    codes = torch.empty(shape, device=DEVICE, dtype=torch.float8_e4m3fn)
    for part in codes.view(-1, shape[-1]).split(1 << 16):
        part.copy_(normal(*part.shape))
    return codes


def scales(*shape):
    return torch.rand(shape, device=DEVICE) + 0.5


def column_major(s):
    """The same scales with columns one after another, each padded to 16 bytes: what DeepGEMM makes of them first."""
    rows, columns = s.shape[-2:]
    padded = -(-rows // 4) * 4
    strides = (padded * columns, 1, padded)[3 - s.dim():]
    return torch.empty_strided(s.shape, strides, device=DEVICE).copy_(s)


def decoded(codes, s):
    """FP32 values of codes [rows, k] with scales [rows, k / 128] or [rows / 128, k / 128]."""
    s = s.repeat_interleave(128, dim=1)
    if s.shape[0] != codes.shape[0]:
        s = s.repeat_interleave(128, dim=0)
    return codes.float() * s


# FlashMLA: sparse attention -----------------------------------------------------------------------

MLA_PAGE = 64  # rows
MLA_VALUES, MLA_SCALES = 576, 8  # bytes of a row: 448 E4M3 and 64 BF16; UE8M0 per 64 of the 448, the last one unused


def mla_pages(count):
    """[count, 64, 1, 584] random bytes. A page holds the values of its rows, then their scales, padded to 576 bytes."""
    stride = -(-MLA_PAGE * (MLA_VALUES + MLA_SCALES) // 576) * 576
    pages = torch.empty(count, stride, device=DEVICE, dtype=torch.uint8)
    values, rest = pages.split((MLA_PAGE * MLA_VALUES, stride - MLA_PAGE * MLA_VALUES), dim=1)
    for part in values.view(count, MLA_PAGE, MLA_VALUES).split(4096):
        part[..., :448] = e4m3(*part.shape[:2], 448).view(torch.uint8)
        part[..., 448:] = normal(*part.shape[:2], 64).view(torch.uint8)
    rest.copy_(torch.randint(126, 129, rest.shape, device=DEVICE, dtype=torch.uint8))
    return pages[:, :MLA_PAGE * (MLA_VALUES + MLA_SCALES)].view(count, MLA_PAGE, 1, MLA_VALUES + MLA_SCALES)


def mla_rows(pages, index):
    """FP32 rows [n, 512] at index [n]."""
    count, page, row = pages.shape[0], index // MLA_PAGE, index % MLA_PAGE
    values, exponents = pages.view(count, -1).split((MLA_PAGE * MLA_VALUES, MLA_PAGE * MLA_SCALES), dim=1)
    values = values.view(count, MLA_PAGE, MLA_VALUES)[page, row]
    scale = torch.exp2(exponents.view(count, MLA_PAGE, MLA_SCALES)[page, row][:, :7].float() - 127)
    nope = values[:, :448].contiguous().view(torch.float8_e4m3fn).float() * scale.repeat_interleave(64, dim=1)
    rope = values[:, 448:].contiguous().view(torch.bfloat16).float()
    return torch.cat((nope, rope), dim=1)


def attended(q, keys, sink):
    """FP32 attention of q [heads, 512] to rows [n, 512]; the sink takes probability and gives no value."""
    scores = torch.cat((q.float() @ keys.t() * q.shape[1]**-0.5, sink[:, None]), dim=1)
    return scores.softmax(dim=1)[:, :-1] @ keys


def strided_picks(rows, width, length):
    """[rows, width] ascending positions below length, one random one per stretch."""
    step = length // width
    start = torch.arange(width, device=DEVICE, dtype=torch.int32) * step
    return start + torch.randint(step, (rows, width), device=DEVICE, dtype=torch.int32)


def decode_attention(flash_mla, name, batch, rows, with_main, heads=64, dim=512, width=512, window=128, context=32768):
    """`rows` query rows per sequence, each with a window that ends one row later."""
    shape = f"{batch}x{rows}" if rows > 1 else f"batch={batch}"
    sets, ring_pages = 4, -(-(window + rows - 1) // MLA_PAGE)
    sink = torch.randn(heads, device=DEVICE)
    q = [normal(batch, rows, heads, dim) for _ in range(sets)]
    rings = [mla_pages(batch * ring_pages) for _ in range(sets)]
    sequence, row, key = (torch.arange(n, device=DEVICE, dtype=torch.int32) for n in (batch, rows, window))
    ring_index = sequence[:, None, None] * ring_pages * MLA_PAGE + row[:, None] + key
    main, selected = None, [None] * sets
    if with_main:
        main = mla_pages(batch * context // MLA_PAGE)
        for i in range(sets):  # pages of the sequences interleave
            position = strided_picks(batch * rows, width, context - rows).view(batch, rows, width)
            page = position // MLA_PAGE * batch + sequence[:, None, None]
            selected[i] = page * MLA_PAGE + position % MLA_PAGE

    def run(i, schedule):
        s = i % sets
        return flash_mla.flash_mla_with_kvcache(
            q[s], rings[s], None, None, dim, schedule, is_fp8_kvcache=True, indices=ring_index, attn_sink=sink,
            extra_k_cache=main, extra_indices_in_kvcache=selected[s])[0]

    schedule = flash_mla.get_mla_metadata()[0]
    out = run(0, schedule)
    for at in {(0, 0), (batch - 1, rows - 1)}:
        keys = mla_rows(rings[0], ring_index[at])
        if with_main:
            keys = torch.cat((keys, mla_rows(main, selected[0][at])))
        check(f"{name} {shape}", out[at], attended(q[0][at], keys, sink))
    flops = 4.0 * batch * rows * heads * dim * (window + (width if with_main else 0))
    seconds = measure(20, lambda i: run(i, schedule))
    report(name, shape, "FlashMLA, schedule kept", seconds, flops)
    seconds = measure(20, lambda i: run(i, flash_mla.get_mla_metadata()[0]))
    report(name, shape, "FlashMLA, schedule made", seconds, flops)


def prefill_attention(flash_mla, name, with_main, tokens=4096, heads=64, dim=512, width=512, window=128, context=32768):
    sink = torch.randn(heads, device=DEVICE)
    q = normal(tokens, heads, dim)
    recent = tokens + window - 1  # rows of the window's cache, before those of the main cache
    rows = normal(recent + context - tokens, 1, dim)
    index = torch.arange(tokens, device=DEVICE, dtype=torch.int32)[:, None] + torch.arange(
        window, device=DEVICE, dtype=torch.int32)
    if with_main:
        index = torch.cat((index, recent + strided_picks(tokens, width, context - tokens)), dim=1)

    def run(_):
        return flash_mla.flash_mla_sparse_fwd(q, rows, index[:, None], dim**-0.5, attn_sink=sink)[0]

    out = run(0)
    for t in (0, tokens - 1):
        check(f"{name} 1x{tokens}", out[t], attended(q[t], rows[index[t], 0].float(), sink))
    flops = 4.0 * tokens * heads * dim * index.shape[1]
    report(name, f"1x{tokens}", "FlashMLA, unpacked BF16 rows", measure(4, run), flops)


def attention(flash_mla):
    for name, with_main in (("attend", True), ("attend.window_only", False)):
        for batch, rows in ((1, 1), (6, 1), (16, 1), (32, 1), (64, 1), (128, 1), (256, 1), (64, 6)):
            decode_attention(flash_mla, name, batch, rows, with_main)
            torch.cuda.empty_cache()
        prefill_attention(flash_mla, name, with_main)


# DeepGEMM: products of FP8 with block scales ------------------------------------------------------

def linears(deep_gemm):
    for name, k, n in LINEARS:
        if name == "head":  # BF16
            continue
        sets = rotating(n * k)
        weights = [(e4m3(n, k), scales(n // 128, k // 128)) for _ in range(sets)]
        for t in (1, 8, 64, 4096):
            x = (e4m3(t, k), column_major(scales(t, k // 128)))
            y = torch.empty(t, n, device=DEVICE, dtype=torch.bfloat16)

            def run(i):
                deep_gemm.fp8_gemm_nt(x, weights[i % sets], y)

            run(0)
            check(f"{name} T={t}", y[-1:], decoded(x[0][-1:], x[1][-1:]) @ decoded(*weights[0]).t())
            seconds = measure(4 if t > 1000 else max(20, sets), run)
            report(name, f"T={t}", "DeepGEMM, FP8 blocks of 128", seconds, 2.0 * t * n * k)
        del weights
        torch.cuda.empty_cache()


def check_product(what, given, weights, out, rows, expert):
    """Rows of a grouped product that belong to `expert`; `rows` indexes the groups too where they have a dimension."""
    expected = decoded(given[0][rows], given[1][rows]) @ decoded(weights[0][expert], weights[1][expert]).t()
    check(what, out[rows], expected)


def masked_experts(deep_gemm, t, w13, w2, k, most=256):
    """Every expert has room for `most` rows, of which its tokens fill the first."""
    (count, d, f), sets = w2[0].shape, 16 if t <= 16 else 4
    x = (e4m3(count, most, d), column_major(scales(count, most, d // 128)))
    h = (e4m3(count, most, f), column_major(scales(count, most, f // 128)))
    h13 = torch.empty(count, most, 2 * f, device=DEVICE, dtype=torch.bfloat16)
    y = torch.empty(count, most, d, device=DEVICE, dtype=torch.bfloat16)
    tokens = [torch.rand(t, count, device=DEVICE).topk(k, dim=1).indices.flatten().bincount(minlength=count).int()
              for _ in range(sets)]
    assert max(c.max().item() for c in tokens) <= most
    busy = sum((c > 0).sum().item() for c in tokens) / sets
    expected = -(-t * k // int(busy))

    def run(i):
        deep_gemm.m_grouped_fp8_gemm_nt_masked(x, w13, h13, tokens[i % sets], expected)
        deep_gemm.m_grouped_fp8_gemm_nt_masked(h, w2, y, tokens[i % sets], expected)

    run(0)
    expert = tokens[0].argmax().item()
    rows = expert, slice(0, tokens[0][expert].item())
    check_product(f"experts T={t}, w13", x, w13, h13, rows, expert)
    check_product(f"experts T={t}, w2", h, w2, y, rows, expert)
    seconds = measure(2 if t >= 512 else 4 if t >= 64 else 16, run)
    report("experts.routed_only", f"T={t} distinct={round(busy)}", "DeepGEMM masked, products alone", seconds,
           6.0 * t * f * d * k)


def contiguous_experts(deep_gemm, t, w13, w2, k, room=128, sets=16):
    """One token for each of t * k experts, whose rooms of 128 rows follow one another; other experts have none."""
    (count, d, f), m = w2[0].shape, t * k * room
    x = (e4m3(m, d), column_major(scales(m, d // 128)))
    h = (e4m3(m, f), column_major(scales(m, f // 128)))
    h13 = torch.empty(m, 2 * f, device=DEVICE, dtype=torch.bfloat16)
    y = torch.empty(m, d, device=DEVICE, dtype=torch.bfloat16)
    owners = torch.full((sets, m), -1, device=DEVICE, dtype=torch.int32)
    for i in range(sets):
        owners[i, ::room] = torch.randperm(count, device=DEVICE)[:t * k].sort().values.int()

    def run(i):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(x, w13, h13, owners[i % sets])
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(h, w2, y, owners[i % sets])

    run(0)
    row = slice(m - room, m - room + 1)
    expert = owners[0, m - room].item()
    check_product(f"experts T={t}, w13", x, w13, h13, row, expert)
    check_product(f"experts T={t}, w2", h, w2, y, row, expert)
    report("experts.routed_only", f"T={t} distinct={t * k}", "DeepGEMM contiguous, products alone", measure(16, run),
           6.0 * t * f * d * k)


def experts(deep_gemm, count=384, d=5120, f=2304, k=6):
    """The two products of the routed experts, FP8 weights."""
    w13 = (e4m3(count, 2 * f, d), scales(count, 2 * f // 128, d // 128))
    w2 = (e4m3(count, d, f), scales(count, d // 128, f // 128))
    contiguous_experts(deep_gemm, 1, w13, w2, k)
    for t in (1, 2, 8, 16, 64, 128, 512, 4096, 8192):
        masked_experts(deep_gemm, t, w13, w2, k)
    del w13, w2
    torch.cuda.empty_cache()


# DeepGEMM: index logits ---------------------------------------------------------------------------

INDEX_HEADS, INDEX_DIM, INDEX_PAGE = 32, 128, 64


def index_pages(count):
    """[count, 64, 1, 132] random bytes. A page holds 64 rows of 128 E4M3, then the F32 scales of the rows."""
    pages = torch.empty(count, INDEX_PAGE * (INDEX_DIM + 4), device=DEVICE, dtype=torch.uint8)
    codes, rest = pages.split((INDEX_PAGE * INDEX_DIM, INDEX_PAGE * 4), dim=1)
    for part in codes.split(4096):
        part.copy_(e4m3(*part.shape).view(torch.uint8))
    rest.copy_(scales(count, INDEX_PAGE).view(torch.uint8))
    return pages.view(count, INDEX_PAGE, 1, INDEX_DIM + 4)


def index_rows(pages):
    """FP32 keys [count * 64, 128]."""
    codes, rest = pages.view(pages.shape[0], -1).split((INDEX_PAGE * INDEX_DIM, INDEX_PAGE * 4), dim=1)
    codes = codes.contiguous().view(torch.float8_e4m3fn).view(-1, INDEX_DIM)
    return codes.float() * rest.contiguous().view(torch.float32).view(-1, 1)


def index_scores(q, weights, keys):
    """FP32 scores [n] of q [heads, 128], weights [heads] and keys [n, 128]."""
    return weights @ (q.float() @ keys.t()).relu()


def paged_logits(deep_gemm, batch, rows, context):
    """`rows` query rows per sequence; the kernel takes two at most, so that more read the keys several times."""
    shape = f"{batch}x{context}" if rows == 1 else f"{batch}x{rows}x{context}"
    together = min(rows, 2)
    parts = batch * rows // together
    q = e4m3(parts, together, INDEX_HEADS, INDEX_DIM)
    weights = torch.randn(parts * together, INDEX_HEADS, device=DEVICE)
    pages = index_pages(batch * context // INDEX_PAGE)
    sequence = torch.arange(batch, device=DEVICE, dtype=torch.int32).repeat_interleave(rows // together)
    page = torch.arange(context // INDEX_PAGE, device=DEVICE, dtype=torch.int32)
    table = page * batch + sequence[:, None]  # pages of the sequences interleave
    position = torch.arange(context - rows, context, device=DEVICE, dtype=torch.int32)
    lengths = (position + 1).repeat(batch).view(parts, together)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, INDEX_PAGE, deep_gemm.get_num_sms())

    def run(_):
        return deep_gemm.fp8_paged_mqa_logits(q, pages, weights, lengths, table, schedule, context, clean_logits=False)

    logits = run(0)
    for row in {0, parts * together - 1}:
        part, length = row // together, lengths.flatten()[row].item()
        keys = index_rows(pages[table[part]])[:length]
        expected = index_scores(q[part, row % together], weights[row], keys)
        check(f"index_select {shape}", logits[row, :length], expected)
    report("index_select", shape, "DeepGEMM, logits alone", measure(20 if parts == 1 else 4, run),
           2.0 * batch * rows * context * INDEX_HEADS * INDEX_DIM)


def contiguous_logits(deep_gemm, rows=4096, context=131072):
    q = e4m3(rows, INDEX_HEADS, INDEX_DIM)
    keys = (e4m3(context, INDEX_DIM), scales(context))
    weights = torch.randn(rows, INDEX_HEADS, device=DEVICE)
    begin = torch.zeros(rows, device=DEVICE, dtype=torch.int32)
    end = torch.arange(context - rows, context, device=DEVICE, dtype=torch.int32) + 1

    def run(_):
        return deep_gemm.fp8_mqa_logits(q, keys, weights, begin, end, clean_logits=False)

    logits = run(0)
    for row in (0, rows - 1):
        length = end[row].item()
        expected = index_scores(q[row], weights[row], keys[0][:length].float() * keys[1][:length, None])
        check(f"index_select 1x{rows}x{context}", logits[row, :length], expected)
    del logits
    report("index_select", f"1x{rows}x{context}", "DeepGEMM, logits alone", measure(4, run),
           2.0 * rows * context * INDEX_HEADS * INDEX_DIM)


def index_logits(deep_gemm):
    for batch, rows, context in ((1, 1, 131072), (1, 1, 524288), (64, 1, 131072), (64, 6, 131072), (64, 1, 8192)):
        paged_logits(deep_gemm, batch, rows, context)
        torch.cuda.empty_cache()
    contiguous_logits(deep_gemm)
    torch.cuda.empty_cache()


GROUPS = ((attention, "flash_mla"), (linears, "deep_gemm"), (experts, "deep_gemm"), (index_logits, "deep_gemm"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help=", ".join(g.__name__ for g, _ in GROUPS) + "; default: all")
    args = parser.parse_args()
    torch.manual_seed(1)
    print(json.dumps({"torch": torch.__version__, "device": torch.cuda.get_device_name()}), flush=True)
    for group, package in GROUPS:
        if args.what and group.__name__ not in args.what:
            continue
        try:
            module = importlib.import_module(package)
        except ImportError as error:
            print(json.dumps({"left_out": group.__name__, "absent": package, "why": str(error)}), flush=True)
            continue
        group(module)


if __name__ == "__main__":
    main()
