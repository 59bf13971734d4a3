"""Tests of the oracle itself: published vectors, formats, and that its comparisons can fail."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from . import compare, engram, formats, model, random_checkpoint
from .checkpoint import Checkpoint, Config, read_dump, write_safetensors
from .model import ABLATIONS, Forward, forward

ROOT = Path(__file__).resolve().parents[2]
# The released configuration, as far as the functions tested here read it.
RELEASED = Config(
    {
        "text_config": {
            "num_hidden_layers": 40,
            "qk_rope_head_dim": 64,
            "rope_theta": 10000,
            "compress_rope_theta": 160000,
            "rope_scaling": {
                "factor": 16,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 65536,
            },
            "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
            "kv_source_layer_ids": [2, 8, 14, 20],
            "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
            "candidate_source_layer_id": 20,
        }
    }
)


def ids(text):
    return [int(word) for word in text.split()]


def random_tokens(count, seed=0):
    return np.random.default_rng(seed).integers(0, 512, count).tolist()


@pytest.fixture(scope="module")
def t1(tmp_path_factory):
    directory = tmp_path_factory.mktemp("t1")
    random_checkpoint.write(directory, random_checkpoint.T1, seed=1)
    return Checkpoint(directory)


@pytest.fixture(scope="module")
def t1_f32(tmp_path_factory):
    directory = tmp_path_factory.mktemp("t1_f32")
    random_checkpoint.write(directory, random_checkpoint.T1, seed=1, weights="f32")
    return Checkpoint(directory)


# ---- Formats -------------------------------------------------------------------------------------


def test_e4m3_codes():
    for code in range(256):
        exponent, fraction = code >> 3 & 15, code & 7
        value = (8 + fraction) * 2.0 ** (exponent - 10) if exponent else fraction * 2.0**-9
        decoded = formats.E4M3.decode(code)
        if code & 127 == 127:
            assert np.isnan(decoded)
            continue
        assert decoded == (-value if code & 128 else value)
        assert formats.E4M3.encode(decoded) == code
    assert formats.E4M3.decode(0x7E) == 448


def test_e2m1_codes():
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert formats.E2M1.decode(np.arange(16)).tolist() == values + [-v for v in values]
    assert formats.E2M1.encode(formats.E2M1.decode(np.arange(16))).tolist() == list(range(16))
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]
    assert formats.E2M1.encode(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert formats.E2M1.encode([-0.25, -0.75, -7]).tolist() == [8, 10, 15]


def test_ties_go_to_even_and_large_values_saturate():
    for fmt, count in ((formats.E4M3, 126), (formats.E2M1, 7)):
        low = np.arange(count)
        values = fmt.decode(np.arange(count + 1))
        middle = (values[:-1] + values[1:]) / 2
        assert np.array_equal(fmt.encode(middle), low + low % 2)
        assert np.array_equal(fmt.encode(np.nextafter(middle, 0)), low)
        assert np.array_equal(fmt.encode(np.nextafter(middle, np.inf)), low + 1)
        assert fmt.encode(1e30) == count and fmt.decode(count) == fmt.largest
        assert np.array_equal(fmt.distance(middle), np.zeros(count))
        assert np.allclose(fmt.distance(middle * 1.001), middle * 0.001)


def test_e8m0_codes():
    codes = np.arange(255)
    values = formats.e8m0_decode(codes)
    assert np.array_equal(values, 2.0 ** (codes - 127.0))
    assert np.array_equal(formats.e8m0_encode(values), codes)
    assert np.isnan(formats.e8m0_decode(255))


def test_bf16():
    x = np.random.default_rng(0).standard_normal(10000) * 10.0 ** np.arange(-25, 25).repeat(200)
    x = x.astype(np.float32)
    bits = x.view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
    assert np.array_equal(formats.bf16(x), rounded)
    assert formats.bf16(1 + 2.0**-8) == 1 and formats.bf16(1 + 3 * 2.0**-8) == 1 + 2.0**-6
    assert formats.bf16(0.0) == 0 and formats.bf16(3.4e38) == np.inf


def test_scale_is_the_smallest_power_of_two_that_does_not_clip():
    t = np.array([1.0, 1.0000001, 1.9999999, 2.0, 2.0**-22])
    assert formats.ceil_pow2(t).tolist() == [1, 2, 2, 2, 2.0**-22]
    assert formats.floor_pow2(t).tolist() == [1, 1, 1, 2, 2.0**-22]


def test_quantizer_hand_vectors():
    x = (np.arange(16) - 8 + 0.25) * 0.375
    rows, _ = formats.FP4_MAIN.rows(x)
    assert rows.tobytes().hex() == "ffeecd9b20436576" + "30"  # E4M3 0x30 is 0.5
    x = (np.arange(32) - 16 + 0.25) * 0.375
    rows, _ = formats.FP4_INDEX.rows(x)
    assert rows.tobytes().hex() == "ffefeededdccab99102243545566" + "6677" + "7f"


@pytest.mark.parametrize("quantizer", [formats.FP8, formats.FP4_INDEX, formats.FP4_MAIN])
def test_quantizers(quantizer):
    random = np.random.default_rng(0)
    for peak in (5.0, 6.0, 6.01, 448.0, 448.1, 2688.0, 1e-30, 0.0):
        x = random.uniform(-1, 1, (20, 64)) * peak
        x[:, 7] = peak
        codes, scales, values = quantizer.quantize(x)
        assert np.all(np.isfinite(quantizer.scale_values(scales)))
        assert np.array_equal(quantizer.quantize(values)[2], values)  # lossless the second time
        rows, from_rows = quantizer.rows(x)
        assert np.array_equal(from_rows, values)
        assert np.array_equal(quantizer.row_values(rows, 64), values)
        assert np.array_equal(quantizer.row_parts(rows, 64)[0], codes)
        # At most half a step of the grid that the block's maximum needs.
        half_step = quantizer.scale_values(scales).max() * (16 if quantizer is formats.FP8 else 1)
        assert np.abs(values - x).max() <= half_step
        if peak == 0:
            assert not values.any()


def test_quantizer_floors_and_short_blocks():
    assert formats.FP8.scales(np.zeros((1, 32))) == 127 - 22
    assert formats.FP4_INDEX.scales(np.zeros((1, 32))) == 1
    assert formats.FP4_MAIN.scales(np.zeros((1, 16))) == 1
    x = np.concatenate([np.full(32, 1.0), np.full(8, 100.0)])
    assert np.array_equal(formats.FP8.scales(x), formats.e8m0_encode([2.0**-8, 2.0**-2]))


def test_cache_row_sizes():
    assert formats.FP8.rows(np.ones((3, 512)))[0].shape == (3, 528)
    assert formats.FP4_MAIN.rows(np.ones((3, 512)))[0].shape == (3, 288)
    assert formats.FP4_INDEX.rows(np.ones((3, 128)))[0].shape == (3, 68)
    assert formats.pack(np.array([1, 2, 3, 15])).tolist() == [0x21, 0xF3]


def test_stored_weights():
    w = np.random.default_rng(0).standard_normal((80, 96)) * 10.0 ** np.linspace(-8, 2, 80)[:, None]
    row_peak = np.abs(w).max(axis=1, keepdims=True)
    codes, scales = formats.quantize_fp8(w)
    assert scales.shape == (3, 3)
    error = np.abs(formats.dequantize_fp8(codes, scales) - w)
    assert error[:32, :32].max() <= np.abs(w[:32, :32]).max() / 16
    codes, scales = formats.quantize_rows(w)
    assert scales.shape == (80, 3)
    assert np.all(np.abs(formats.dequantize_rows(codes, scales) - w) <= row_peak / 16)
    packed, scales = formats.quantize_fp4(w)
    assert packed.shape == (80, 48) and scales.shape == (80, 3)
    assert np.all(np.abs(formats.dequantize_fp4(packed, scales) - w) <= row_peak / 3)
    two = formats.dequantize_fp4(np.array([[0x21]], np.uint8), np.array([[128]]))
    assert two.tolist() == [[1, 2]]


def test_nan_weights_are_refused_by_name(tmp_path):
    random_checkpoint.write(tmp_path, random_checkpoint.T1)
    checkpoint = Checkpoint(tmp_path)
    name = "layers.0.attn.wkv.weight"
    for tensor, code in ((name, 0x7F), (name.replace("weight", "scale"), 255)):
        kind, array = checkpoint.raw(tensor)
        spoiled = array.copy()
        spoiled[1, 1] = code
        checkpoint.open_files[tmp_path / checkpoint.files[name]][tensor] = (kind, spoiled)
        with pytest.raises(ValueError, match=name):
            checkpoint.rows(name)
        checkpoint.open_files[tmp_path / checkpoint.files[name]][tensor] = (kind, array)


# ---- Engram --------------------------------------------------------------------------------------

RELEASED_PRIMES = {
    1: ids(
        "16000057 16000079 16000081 16000097 16000121 16000129 16000133 16000183 "
        "16000189 16000207 16000211 16000253 16000277 16000289 16000307 16000321 "
        "16000339 16000381 16000393 16000399 16000403 16000409 16000447 16000463"
    ),
    14: ids(
        "16000477 16000487 16000499 16000507 16000511 16000573 16000609 16000627 "
        "16000667 16000669 16000693 16000697 16000711 16000729 16000759 16000769 "
        "16000781 16000799 16000813 16000819 16000841 16000877 16000879 16000889"
    ),
}
GOLDEN_ROWS = [  # layer, classes, dead positions, position, rows
    (
        1,
        [0, 10, 20, 30, 40],
        [],
        0,
        "5702652 24393184 39183301 61503783 78984481 90144770 103724983 121476532 131476717 "
        "152385926 164143652 191599181 198145581 217419202 238329687 247482304 257520185 "
        "283540304 288689443 315264704 322314652 348890037 367865216 380066193",
    ),
    (
        1,
        [0, 10, 20, 30, 40],
        [],
        4,
        "1326936 22120929 40011923 55142539 77849479 85421395 105208034 120570043 142088989 "
        "151706440 164511320 186980067 199834903 222266846 231919637 244765195 270969918 "
        "287524568 292261800 310632033 322879311 341250912 361620893 378628807",
    ),
    (
        1,
        [0, 10, 20, 30, 40],
        [3],
        4,
        "7957620 22328225 38180748 53003837 67249966 82668503 98378416 126783432 138481726 "
        "153107076 170580596 178072915 202944594 223385660 238053324 251244583 261093168 "
        "279040233 291032532 305030090 325029180 339028090 353038012 369052152",
    ),
    (
        14,
        [0, 10, 20, 30, 40],
        [],
        0,
        "14361964 29977809 32716444 61209771 67456205 84275051 108494439 120604547 132225184 "
        "150270452 174805952 178895254 193207923 211610196 226280582 252505246 261362261 "
        "279862797 301364059 312864848 328367036 349372619 363873742 372375971",
    ),
    (
        14,
        [0, 10, 20, 30, 40],
        [],
        4,
        "5403109 26519290 42262171 52759697 74009651 83431750 98759453 114437397 136663117 "
        "159466275 161102974 190712189 206344738 219595678 225703309 243746465 258079010 "
        "283475728 290789713 309926711 321434350 340293184 357342800 378588994",
    ),
    (
        1,
        [0, 98611, 53, 98615, 55, 98616, 98634],
        [],
        6,
        "6145177 29200083 42970516 50089365 66620613 80091853 104320258 115133545 132651277 "
        "149184828 175151555 179882643 195276059 216407811 232898627 247212710 260269356 "
        "279058264 297904679 315669639 332972916 351117386 353983692 380660419",
    ),
    (
        14,
        [0, 98611, 53, 98615, 55, 98616, 98634],
        [],
        6,
        "13564020 18908159 36913214 50123736 73091652 91955249 103202138 124159213 138474143 "
        "159185806 172419367 183469547 192043317 216551797 225585103 247612084 261735569 "
        "284067292 302589936 314170686 327328955 346781366 358169378 370749241",
    ),
]


def test_engram_primes():
    tables = engram.table_primes([1, 14], 4, 8, 16000000)
    for layer, total in ((1, 384006168), (14, 384016682)):
        assert tables[layer].ravel().tolist() == RELEASED_PRIMES[layer]
        assert tables[layer].sum() == total
    small = engram.table_primes([1, 3], 4, 2, 100)
    assert small[1].ravel().tolist() == [101, 103, 107, 109, 113, 127]
    assert small[3].ravel().tolist() == [131, 137, 139, 149, 151, 157]


def test_engram_multipliers():
    expected = {
        (1, 99092): "76632096046245 4839876093313 35959672319349 73987337458391",
        (14, 99092): "67716810739261 51510806800915 30921347202721 82619226485591",
        (1, 512): "14831304026200453 936705081716061 6959601268494069 14319439928568407",
        (3, 512): "5327545137947969 15804252993068197 2105304604748359 13605204602324401",
    }
    for (layer, classes), values in expected.items():
        assert engram.multipliers(layer, classes, 4).tolist() == ids(values)


@pytest.mark.parametrize("layer,classes,dead,position,rows", GOLDEN_ROWS)
def test_engram_golden_rows(layer, classes, dead, position, rows):
    primes = engram.table_primes([1, 14], 4, 8, 16000000)[layer]
    mult = engram.multipliers(layer, 99092, 4)
    mask = np.isin(np.arange(len(classes)), dead)
    found = engram.hash_rows(np.array(classes, np.int64), mask, 2, mult, primes)
    assert found[position].tolist() == ids(rows)


def test_engram_token_map():
    # In the byte-level alphabet U+0120 is a space, U+010A a newline, U+0109 a tab.
    raw = ["the", "\u0120The", "THE", "\u010a", "\u0120\u0120", "\u0109"]
    raw += ["\u00c3\u00a9", "e", "\u00e9"]  # e with an accent in UTF-8, e, a lone byte
    raw += ["<\uff5cx\uff5c>", "!", "\u0120!\u010a", "\u00ef\u00bc\u00a1", "a"]
    expected = [0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 5, 5, 6, 6]
    assert engram.token_map(raw).tolist() == expected


# ---- Positions, layers, selection ----------------------------------------------------------------


def test_rope_frequencies():
    yarn = model.rope_frequencies(RELEASED, True)
    expected = {
        0: 1,
        1: 0.687656,
        15: 0.003635539,
        16: 0.002265625,
        20: 2.969778e-4,
        24: 1.953125e-5,
        25: 5.372313e-6,
        31: 5.680529e-7,
    }
    for pair, value in expected.items():
        assert yarn[pair] == pytest.approx(value, rel=1e-6)
    plain = model.rope_frequencies(RELEASED, False)
    assert plain[1] == pytest.approx(0.7498942, rel=1e-6)
    assert plain[31] == pytest.approx(1.333521e-4, rel=1e-6)


def test_rope_rotates_interleaved_pairs_of_the_last_dims():
    position = np.array([3])
    table = model.rope_table(RELEASED, False, position)
    x = np.arange(1.0, 101)[None]
    y = model.rotate(x, table)
    assert np.array_equal(y[0, :36], x[0, :36])
    angle = 3 * float(np.float32(10000 ** (-2 / 64)))
    a, b = x[0, 38:40]
    expected = [a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)]
    assert np.allclose(y[0, 38:40], expected, rtol=1e-6)
    assert np.allclose(model.rotate(y, table.conj()), x, rtol=1e-6)
    # The angle is an FP32 product.
    far = np.array([1000003])
    f = model.rope_frequencies(RELEASED, False)[1]
    product = np.float64(np.float32(1000003) * f)
    assert model.rope_table(RELEASED, False, far)[0, 1].real == np.float32(np.cos(product))


def test_layer_schedule(t1):
    assert [t1.config.mode(layer) for layer in t1.config.layers] == (
        ["window"] * 2 + ["full"] + ["reuse"] * 2 + ["full", "reuse", "reindex", "reuse", "reindex"]
    )
    assert [t1.config.kv_source(layer) for layer in range(2, 10)] == [2] * 3 + [5] * 5
    assert [t1.config.index_source(layer) for layer in range(2, 10)] == [2, 2, 2, 5, 5, 7, 7, 9]
    assert [layer for layer in range(10) if t1.config.uses_candidates(layer)] == [7, 9]
    modes = [RELEASED.mode(layer) for layer in RELEASED.layers]
    assert [layer for layer in range(40) if modes[layer] == "full"] == [2, 8, 14, 20]
    assert [layer for layer in range(40) if modes[layer] == "reindex"] == [24, 28, 32, 36]
    assert modes.count("window") == 2 and modes.count("reuse") == 30


def test_visible_entries(t1):
    tokens = 19
    run = Forward(t1, random_tokens(tokens), "f32")
    for layer, ratio in ((2, 2), (5, 1)):
        count = tokens // ratio
        visible = run.visible(layer, count)
        for q in range(tokens):
            for e in range(count):
                assert (e < visible[q]) == ((e + 1) * ratio - 1 <= q)
    assert run.visible(2, 9)[:4].tolist() == [0, 1, 1, 2]


def test_top_prefers_the_lower_id():
    inf = np.inf
    scores = np.array(
        [[1, 2, 2, 2, 0], [0.0, -0.0, 0.0, -1, 5], [-inf, 3, -inf, -inf, -inf], [-inf] * 5]
    )
    expected = [[1, 2], [0, 4], [1, -1], [-1, -1]]
    assert model.top(scores, 2).tolist() == expected
    assert model.top(np.zeros((2, 0)), 0).shape == (2, 0)
    gaps = model.gap(np.array([[4.0, 1, 2], [0, 0, 1], [1, -inf, 1]]), 2)
    assert gaps.tolist() == [0.25, inf, inf]


@pytest.mark.parametrize("tokens", [1, 2, 3, 31])
def test_entry_counts(t1, tokens):
    dump = forward(t1, random_tokens(tokens)).dump
    assert dump["layers.2.main_codes"].shape == (tokens // 2, 32 + 4)
    assert dump["layers.2.index_codes"].shape == (tokens // 2, 16 + 1)
    assert dump["layers.5.main_codes"].shape == (tokens, 32 + 4)
    assert dump["layers.9.window_codes"].shape == (tokens, 64 + 2)
    assert dump["layers.2.selected"].shape == (tokens, min(4, tokens // 2))
    assert dump["layers.5.candidates"].shape == (tokens, min(3, -(-tokens // 4)))


def test_selection(t1):
    tokens = 60
    result = forward(t1, random_tokens(tokens), margins=True)
    dump = result.dump
    for q in range(tokens):
        for layer, ratio in ((2, 2), (5, 1)):
            row = dump[f"layers.{layer}.selected"][q]
            row = row[row >= 0]
            assert len(row) == min(4, (q + 1) // ratio) and np.all(np.diff(row) > 0)
            assert np.all(row < (q + 1) // ratio)
            scores = result.scores[f"layers.{layer}.selected"][q]
            left = np.setdiff1d(np.arange(len(scores)), row)
            assert not len(left) or not len(row) or scores[left].max() <= scores[row].min()
        blocks = dump["layers.5.candidates"][q]
        assert q // 4 in blocks  # the newest block, full or not
        for layer in (7, 9):
            row = dump[f"layers.{layer}.selected"][q]
            assert np.all(np.isin(row[row >= 0] // 4, blocks))
        for layer, source in ((3, 2), (4, 2), (6, 5), (8, 7)):
            source, reuse = (dump[f"layers.{i}.selected"][q] for i in (source, layer))
            assert np.array_equal(source, reuse)


# ---- The forward pass ----------------------------------------------------------------------------


def test_dump_names_and_types(t1, tmp_path):
    model_dir, source = t1.directory, tmp_path / "in.jsonl"
    tokens = random_tokens(20)
    source.write_text(json.dumps({"tokens": tokens}) + "\n" + json.dumps({"tokens": [7]}) + "\n")

    def run(*extra):
        command = [sys.executable, "-m", "tests.oracle.run", "-m", model_dir, "--input", source]
        command += ["--output", tmp_path / "out.jsonl", "--precision", "f32", *extra]
        subprocess.run(command, cwd=ROOT, check=True)
        return [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]

    lines = run("--dump", tmp_path / "dump", "--top", "3", "--layers-report")
    dump = read_dump(tmp_path / "dump" / "0.safetensors")
    expected = {"embed", "logits"}
    for layer in range(10):
        names = "attn attn_in attn_out ffn ffn_in ffn_out experts window_codes".split()
        names += ["engram"] if layer in (1, 3) else []
        names += ["selected"] if layer >= 2 else []
        names += ["main_codes", "index_codes"] if layer in (2, 5) else []
        names += ["candidates"] if layer == 5 else []
        expected |= {f"layers.{layer}.{name}" for name in names}
    assert set(dump) == expected
    for name, array in dump.items():
        kind = name.rpartition(".")[2]
        integer = kind in ("selected", "candidates", "experts")
        want = np.uint8 if kind.endswith("_codes") else np.int32 if integer else np.float32
        assert array.dtype == want, name
        if kind in ("embed", "engram", "attn", "ffn"):
            assert array.shape == (20, 4, 64)
        elif kind in ("attn_in", "attn_out", "ffn_in", "ffn_out"):
            assert array.shape == (20, 64)
    assert dump["logits"].shape == (20, 512)

    log_probs = forward(t1, tokens).log_probs()
    assert lines[0]["tokens"] == tokens and lines[0]["logprobs"][0] is None
    assert lines[0]["logprobs"][5] == pytest.approx(log_probs[4, tokens[5]], abs=1e-12)
    assert lines[0]["top"][0] == [] and lines[0]["top"][5][0][0] == log_probs[4].argmax()
    assert len(lines[0]["top"][19]) == 3 and lines[1]["logprobs"] == [None]
    margins = lines[0]["margins"]
    assert len(margins["logits"]) == 20 and len(margins["layers"]) == 10
    assert set(margins["layers"][5]) == {"layer", "index", "candidate", "router", "quant"}

    # A forced run with its own choices, and a fed run of its own dump, change nothing.
    for option in ("--force", "--feed"):
        again = run(option, tmp_path / "dump")
        assert np.allclose(again[0]["logprobs"][1:], lines[0]["logprobs"][1:], atol=1e-4)
    assert run("--ablate", "no-sink,engram-zero")[0]["logprobs"][1:] != lines[0]["logprobs"][1:]


@pytest.mark.parametrize("precision", ["f32", "official"])
def test_later_tokens_change_nothing_before_them(t1, precision):
    tokens = random_tokens(45)
    base = forward(t1, tokens, precision).dump["logits"]
    for cut in (1, 7, 8, 9, 30, 44):
        other = tokens[:cut] + [(token + 1) % 512 for token in tokens[cut:]]
        changed = forward(t1, other, precision).dump["logits"]
        # Equal up to the order of float64 sums.
        assert np.allclose(base[:cut], changed[:cut], rtol=0, atol=1e-9)
        assert np.all(np.abs(base[cut:] - changed[cut:]).max(axis=1) > 1e-3)
        short = forward(t1, tokens[:cut], precision).dump["logits"]
        assert np.allclose(short, base[:cut], rtol=0, atol=1e-9)


def test_precisions_are_close(t1):
    tokens = random_tokens(100)
    f32 = forward(t1, tokens, "f32").dump
    choices = {k: v for k, v in f32.items() if k.endswith((".selected", ".experts"))}
    official = forward(t1, tokens, "official", force=choices).dump
    for name, array in f32.items():
        if array.dtype == np.float64 and not name.endswith("_codes"):
            difference = np.sqrt(np.mean((official[name] - array) ** 2) / np.mean(array**2))
            assert difference < 0.2, name
    difference = official["layers.0.attn"] - f32["layers.0.attn"]
    assert 1e-4 < np.abs(difference).max() / np.abs(f32["layers.0.attn"]).max() < 0.05
    # Everything that the reference keeps in BF16 is a BF16 value.
    for name, array in official.items():
        if array.dtype == np.float64 and name != "logits":
            assert np.array_equal(formats.bf16(array), array), name


def test_unquantized_weights_take_unquantized_inputs(t1_f32):
    assert t1_f32.config.stored_f32 and not t1_f32.quantized("layers.0.attn.wq_a.weight")
    x = np.random.default_rng(0).standard_normal((3, 64))
    run = Forward(t1_f32, [1, 2, 3], "official")
    name = "layers.0.attn.wq_a.weight"
    assert np.array_equal(run.linear(name, x), x @ t1_f32.weight(name).T)
    result = forward(t1_f32, random_tokens(20), "official")
    assert np.all(np.isfinite(result.dump["logits"]))


def test_quantized_linears_quantize_their_inputs_only_in_official(t1):
    x = np.random.default_rng(0).standard_normal((3, 64))
    for name in ("layers.0.attn.wq_a.weight", "layers.0.ffn.experts.0.w1.weight"):
        w = t1.weight(name)
        assert np.array_equal(Forward(t1, [1, 2, 3], "f32").linear(name, x), x @ w.T)
        official = Forward(t1, [1, 2, 3], "official").linear(name, x)
        assert np.array_equal(official, formats.FP8.quantize(x)[2] @ w.T)


def test_mix(t1):
    run = Forward(t1, [1, 2, 3], "f32")
    x = np.random.default_rng(0).standard_normal((3, 4, 64))
    pre, post, comb = run.mix(0, "attn", x)
    assert np.all((pre > 1e-6) & (pre < 1 + 1e-6)) and np.all((post > 0) & (post < 2))
    assert np.allclose(comb.sum(axis=1), 1, atol=2e-6)  # the last step normalizes columns
    assert np.abs(comb - comb.transpose(0, 2, 1)).max() > 1e-3
    y = np.zeros((3, 64))
    moved = run.expand(y, x, post, comb)
    assert np.allclose(moved[1, 2], sum(comb[1, j, 2] * x[1, j] for j in range(4)))


@pytest.mark.parametrize("keys", [1, 12, 64, 65, 200])
def test_blocked_softmax(t1, keys):
    random = np.random.default_rng(keys)
    run, official = Forward(t1, [1], "f32"), Forward(t1, [1], "official")
    q, kv = random.standard_normal((3, 4, 64)), random.standard_normal((3, keys, 64))
    sink = random.standard_normal(4)
    valid = random.random((3, keys)) < 0.5
    valid[0, :64] = False  # a first block without any key
    scores = np.einsum("thk,tsk->ths", q, kv) / 8
    weights = np.exp(scores) * valid[:, None]
    dense = weights @ kv / (weights.sum(axis=2) + np.exp(sink))[:, :, None]
    assert np.allclose(run.attend_rows(q, kv, valid, sink), dense, atol=1e-12)
    assert np.allclose(official.attend_rows(q, kv, valid, sink), dense, atol=2e-2)


@pytest.mark.parametrize("level", [-50, -200])
def test_router_scores_far_below_zero(t1, level):
    """Tiny scores are renormalized; those below the FP32 range give zero routed weight, not NaN."""
    x = np.abs(np.random.default_rng(0).standard_normal((3, 64))) + 0.5

    class Shifted(Forward):
        def weight(self, name):
            value = super().weight(name)
            if name == "layers.0.ffn.gate.weight":
                value = np.full(value.shape, 1.0) * np.linspace(1, 1.001, 8)[:, None] * level / 64
            return value

    x = x / x.mean(axis=1, keepdims=True)
    y = Shifted(t1, [1, 2, 3], "f32").moe(0, x)
    shared = Forward(t1, [1, 2, 3], "f32").expert(
        "layers.0.ffn.shared_experts.", x, 1, np.arange(3)
    )
    assert np.all(np.isfinite(y))
    assert np.array_equal(y, shared) == (level == -200)


def test_image_positions(t1):
    """They keep the Engram away and take the second router bias."""
    tokens = random_tokens(12)
    dead = np.isin(np.arange(12), [4, 5])
    plain = forward(t1, tokens).dump
    dump = forward(t1, tokens, dead=dead, feed=plain).dump
    before = plain["layers.0.ffn"]
    assert np.array_equal(dump["layers.1.engram"][dead], before[dead])
    changed = np.any(dump["layers.1.engram"] != plain["layers.1.engram"], axis=(1, 2))
    assert changed.tolist() == [4 <= p <= 8 for p in range(12)]
    scores = forward(t1, tokens, dead=dead, feed=plain, margins=True).scores["layers.0.experts"]
    other = forward(t1, tokens, feed=plain, margins=True).scores["layers.0.experts"]
    shift = t1.weight("layers.0.ffn.gate.bias_vl") - t1.weight("layers.0.ffn.gate.bias")
    assert np.allclose((scores - other)[dead], shift)
    assert np.array_equal(scores[~dead], other[~dead])


def test_random_network_is_calm(t1):
    dump = forward(t1, random_tokens(100)).dump

    def rms(name):
        return np.sqrt(np.mean(dump[name] ** 2))

    for layer in t1.config.layers:
        for site in ("attn", "ffn"):
            share = rms(f"layers.{layer}.{site}_out") / rms(f"layers.{layer}.{site}")
            assert 0.08 < share < 0.35
    assert 1 < dump["logits"].std() < 4


# ---- Comparisons ---------------------------------------------------------------------------------


def gate(checkpoint, dump, tokens, precision):
    reference = forward(checkpoint, tokens, precision, feed=dump, margins=True)
    findings = compare.compare(reference, dump, checkpoint.config, precision)
    return [finding for finding in findings if not finding.ok]


def as_written(dump):
    return {k: v.astype(np.float32) if v.dtype == np.float64 else v for k, v in dump.items()}


@contextlib.contextmanager
def noise_of_sums(monkeypatch):
    """Linears that are off as sums in FP32 are."""
    exact, random = Forward.linear, np.random.default_rng(0)

    def noisy(self, name, x, rows=slice(None)):
        y = exact(self, name, x, rows)
        return y * (1 + 1e-7 * random.standard_normal(y.shape))

    with monkeypatch.context() as patch:
        patch.setattr(Forward, "linear", noisy)
        yield


@pytest.mark.parametrize("precision", ["f32", "official"])
def test_a_correct_implementation_passes(t1, precision, monkeypatch):
    """The oracle itself, and the oracle with the noise of FP32 sums."""
    tokens = random_tokens(100)
    assert gate(t1, as_written(forward(t1, tokens, precision).dump), tokens, precision) == []
    with noise_of_sums(monkeypatch):
        dump = as_written(forward(t1, tokens, precision).dump)
    assert gate(t1, dump, tokens, precision) == []


def unquantized_wo_b(run, plain, name, x, *rest):
    return x @ run.weight(name).T if name.endswith("wo_b.weight") else plain(run, name, x, *rest)


def norm_rounded_twice(run, plain, name, x):
    return run.bf16(run.bf16(x * model.rms_factor(x, 1e-20)) * run.weight(name))


def unrounded_probabilities(run, plain, *args):
    run.official = False
    out = plain(run, *args)
    run.official = True
    return out


def routing_weight_after_w2(run, plain, name, x, factor, rows):
    return run.bf16(plain(run, name, x, 1, rows) * factor)


@pytest.mark.parametrize(
    "method,fault",
    [
        ("linear", unquantized_wo_b),
        ("norm", norm_rounded_twice),
        ("attend_rows", unrounded_probabilities),
        ("expert", routing_weight_after_w2),
    ],
)
def test_misplaced_rounding_fails_the_official_gate(t1, method, fault, monkeypatch):
    tokens, plain = random_tokens(100), getattr(Forward, method)
    with monkeypatch.context() as patch:
        patch.setattr(Forward, method, lambda run, *args: fault(run, plain, *args))
        dump = as_written(forward(t1, tokens, "official").dump)
    assert len(gate(t1, dump, tokens, "official")) >= 8


@pytest.mark.parametrize("precision", ["f32", "official"])
@pytest.mark.parametrize("ablation", ABLATIONS)
def test_every_ablation_fails_the_gate(t1, ablation, precision):
    tokens = random_tokens(40)
    dump = as_written(forward(t1, tokens, precision, ablate=[ablation]).dump)
    assert gate(t1, dump, tokens, precision) != []


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_every_ablation_changes_a_sublayer(t1, ablation):
    """Judged on un-ablated inputs."""
    tokens = random_tokens(40)
    base = forward(t1, tokens).dump
    changed = forward(t1, tokens, ablate=[ablation], feed=base).dump
    assert any(not np.array_equal(changed[name], base[name]) for name in base)


def test_compare_finds_small_faults(t1):
    tokens = random_tokens(40)
    clean = as_written(forward(t1, tokens).dump)

    def faults(name, change):
        dump = {k: v.copy() for k, v in clean.items()}
        change(dump[name])
        reference = forward(t1, tokens, feed=clean, margins=True)
        findings = compare.compare(reference, dump, t1.config, "f32")
        return [finding.name for finding in findings if not finding.ok]

    def set_at(index, value):
        return lambda array: array.__setitem__(index, value)

    for name in ("layers.3.attn_out", "logits"):
        moved = clean[name][7, 3] + 5e-5 * np.abs(clean[name][7]).max()
        assert faults(name, set_at((7, 3), moved)) == [name]
        assert faults(name, set_at((7, 3), np.nan)) == [name]
    for name in ("layers.4.window_codes", "layers.5.main_codes", "layers.2.index_codes"):
        far = int(clean[name][5, 0]) ^ 0x44
        assert faults(name, set_at((5, 0), far)) == [name]
        scale = int(clean[name][5, -1]) + 2
        assert faults(name, set_at((5, -1), scale)) == [name]
    for name in ("layers.7.selected", "layers.5.candidates", "layers.6.experts"):
        assert faults(name, set_at(30, clean[name][30][::-1])) == [name]
    row = clean["layers.9.selected"][30]
    outside = next(e for e in range(31) if e // 4 not in clean["layers.5.candidates"][30])
    swapped = np.sort(np.append(row[1:], outside))
    assert faults("layers.9.selected", set_at(30, swapped)) == ["layers.9.selected"]
    missing = {k: v for k, v in clean.items() if k != "embed"}
    findings = compare.compare(forward(t1, tokens, margins=True), missing, t1.config, "f32")
    assert [finding.name for finding in findings if not finding.ok] == ["embed"]


def test_compare_allows_flips_only_at_a_boundary():
    quantizer, x = formats.FP8, np.linspace(1, 2, 32)[None].copy()
    x[0, 10] = 1.3125 * (1 + 1e-7)  # next to the middle of the E4M3 values 1.25 and 1.375
    rows, _ = quantizer.rows(x)
    distances = quantizer.distance(x)
    for element, allowed in ((10, True), (11, False)):
        flipped = rows.copy()
        flipped[0, element] ^= 1
        found = compare.compare_codes("c", flipped, rows, distances, quantizer, 32, 1e-5)
        assert found.differing == 1 and found.ok == allowed
    scores = np.array([[5.0, 3, 3 + 1e-6, 1]])
    near = compare.compare_sets("s", np.array([[0, 1]]), np.array([[0, 2]]), 2, scores, 1e-5)
    wrong = compare.compare_sets("s", np.array([[0, 3]]), np.array([[0, 2]]), 2, scores, 1e-5)
    assert near.ok and near.differing == 1 and not wrong.ok


def test_prescreen(t1):
    """Prompts without any near decision are rare, but short ones exist."""
    found = None
    for seed in range(60):
        tokens = random_tokens(6, seed)
        result = forward(t1, tokens, margins=True)
        if compare.prescreen(result):
            found = tokens
            break
    assert found is not None
    assert not compare.prescreen(result, decision=10)


def test_safetensors_of_any_alignment(tmp_path):
    values = np.arange(5, dtype=np.float32)
    odd = {"a": ("U8", np.arange(3, dtype=np.uint8)), "b": ("F32", values)}
    write_safetensors(tmp_path / "x.safetensors", odd)
    assert np.array_equal(read_dump(tmp_path / "x.safetensors")["b"], values)
