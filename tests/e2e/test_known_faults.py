"""Faults that other implementations of this model family have had, each under its id.

The ids are those of the table in docs/verification.md, which names the source of each and the tests of
those that are proven elsewhere.
"""

import numpy as np
import pytest

from conftest import read_lines
from test_invariance import assert_same, generate
from test_parity import faults, score, tokens_of
from tests.oracle import model
from tests.oracle.checkpoint import Checkpoint


def test_a01_an_entry_is_visible_once_its_last_token_is_reached(cachalot, checkpoint, tmp_path):
    """Entry e of ratio m is seen by query q iff (e + 1) m - 1 <= q, whatever the chunk."""
    # More entries selectable than exist: the selection is then the visible set itself.
    directory = checkpoint("t1", "index_topk=64", "candidate_topk_blocks=64")
    tokens = tokens_of(2 * 8 + 3, 512, 1)
    for chunk in (1, 2, 3, 7, 4096):
        work = tmp_path / str(chunk)
        work.mkdir()
        _, dumps = score(cachalot, directory, [tokens], work, "--chunk", chunk)
        for layer, m in ((2, 2), (5, 1)):
            for q, row in enumerate(dumps[0][f"layers.{layer}.selected"]):
                expected = [e for e in range(len(tokens)) if (e + 1) * m - 1 <= q]
                assert row[row >= 0].tolist() == expected, (chunk, layer, q)


def test_a02_queries_of_one_call_do_not_share_their_picks(cachalot, checkpoint, tmp_path):
    """Queries with disjoint selections, in one call and one by one."""
    directory = checkpoint("t1", "index_topk=1")
    tokens = tokens_of(40, 512, 2)
    results = []
    for chunk in (1, 4096):
        work = tmp_path / str(chunk)
        work.mkdir()
        results.append(score(cachalot, directory, [tokens], work, "--chunk", chunk))
    picks = {row[0] for row in results[0][1][0]["layers.2.selected"] if row[0] >= 0}
    assert len(picks) > 3
    assert_same(results[0][1][0], results[1][1][0])
    assert not faults(Checkpoint(directory), tokens, results[0][1][0], "official")


def test_a03_the_index_keeps_every_row_across_chunks(cachalot, checkpoint, tmp_path):
    """Index rows = attention rows = floor(tokens / m), and early entries stay selectable."""
    directory = checkpoint("t1")
    tokens = tokens_of(6 * 16, 512, 3)
    _, dumps = score(cachalot, directory, [tokens], tmp_path, "--chunk", 16)
    for layer, m in ((2, 2), (5, 1)):
        rows = len(tokens) // m
        assert len(dumps[0][f"layers.{layer}.index_codes"]) == rows
        assert len(dumps[0][f"layers.{layer}.main_codes"]) == rows
        assert dumps[0][f"layers.{layer}.selected"][-16:].min() < 16 // m


@pytest.mark.parametrize("length", [4, 8, 16, 48])
def test_a04_each_layer_kind_has_its_own_rotation(cachalot, checkpoint, tmp_path, length):
    directory = checkpoint("t1", "rope_theta=100", "compress_rope_theta=1000000")
    loaded = Checkpoint(directory)
    tokens = tokens_of(length, 512, 4)
    _, dumps = score(cachalot, directory, [tokens], tmp_path, "--precision", "f32")
    assert not faults(loaded, tokens, dumps[0], "f32")
    assert faults(loaded, tokens, dumps[0], "f32", ablate={"swap-theta"})


def test_a05_no_query_head_norm_and_delayed_mixes(cachalot, checkpoint, tmp_path):
    """Every residual dump agrees, the final collapse uses the last FFN's mix, and no tensor of the
    checkpoint is an output mix."""
    directory = checkpoint("t1")
    loaded = Checkpoint(directory)
    assert not [name for name in loaded.files if "hc_head" in name]
    tokens = tokens_of(20, 512, 5)
    _, dumps = score(cachalot, directory, [tokens], tmp_path, "--precision", "f32")
    assert not faults(loaded, tokens, dumps[0], "f32")
    assert faults(loaded, tokens, dumps[0], "f32", ablate={"no-pre-shift"})


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_a06_group_completion(cachalot, checkpoint, tmp_path, length):
    directory = checkpoint("t1")
    tokens = tokens_of(length, 512, 6)
    lines, dumps = score(cachalot, directory, [tokens], tmp_path, "--precision", "f32")
    assert all(np.isfinite(value).all() for value in dumps[0].values())
    assert len(dumps[0]["layers.2.main_codes"]) == length // 2
    assert not faults(Checkpoint(directory), tokens, dumps[0], "f32")


def test_a11_every_expert_clamps(cachalot, checkpoint, tmp_path):
    """With a limit that values exceed, routed and shared experts agree in prefill and decode."""
    directory = checkpoint("t1", "swiglu_limit=0.05")
    loaded = Checkpoint(directory)
    tokens = tokens_of(12, 512, 7)
    for backend in ("ref", "cpu"):
        for chunk in (1, 4096):
            work = tmp_path / f"{backend}{chunk}"
            work.mkdir()
            _, dumps = score(
                cachalot, directory, [tokens], work, "--precision", "f32", "--backend", backend, "--chunk", chunk
            )
            assert not faults(loaded, tokens, dumps[0], "f32")
    assert faults(loaded, tokens, dumps[0], "f32", ablate={"clamp-gate-both"})


def test_a13_a15_uneven_batches_have_no_padding(cachalot, checkpoint, tmp_path):
    """Batches of very different lengths, around group ends, equal their members run alone."""
    directory = checkpoint("t1")
    for lengths in ([5, 8], [8, 5], [1, 1, 17], [12, 23], [3] * 33):
        prompts = [tokens_of(n, 512, 70 + i) for i, n in enumerate(lengths)]
        together = generate(cachalot, directory, prompts, tmp_path, "-n", 3, "--temperature", 0)
        for prompt, expected in list(zip(prompts, together))[:3]:
            alone = generate(cachalot, directory, [prompt], tmp_path, "-n", 3, "--temperature", 0)
            assert alone == [expected]


def test_a34_ids_out_of_range_are_refused(cachalot, checkpoint, tmp_path):
    directory = checkpoint("t1")
    for bad in (-1, 512, 517, 2**31 - 1, 2**40):
        (tmp_path / "in.jsonl").write_text('{"tokens": [3, %d]}\n' % bad)
        cachalot(
            "score", "-m", directory, "--input", tmp_path / "in.jsonl", "--output", "-", status=1
        )
        assert str(bad) in cachalot.errors


def test_a35_first_forward_with_one_and_three_engram_layers(cachalot, checkpoint, tmp_path):
    for layers in ("[1]", "[1, 3, 6]"):
        directory = checkpoint("t1", f"engram_layer_ids={layers}")
        for length in (1, 13):
            tokens = tokens_of(length, 512, 8)
            work = tmp_path / f"{layers}{length}"
            work.mkdir()
            lines, dumps = score(cachalot, directory, [tokens, tokens], work, "--precision", "f32")
            assert lines[0] == lines[1]
            assert not faults(Checkpoint(directory), tokens, dumps[0], "f32")


def test_engram_rows_matter(cachalot, checkpoint, tmp_path):
    """A model that ignores its Engram tables must be noticed (a quality gate once passed without)."""
    directory = checkpoint("t1")
    tokens = tokens_of(20, 512, 9)
    lines, _ = score(cachalot, directory, [tokens], tmp_path, "--precision", "f32", "--top", 512)
    loaded = Checkpoint(directory)
    zeroed = model.forward(loaded, np.array(tokens), "f32", ablate={"engram-zero"}).log_probs()
    differences = [
        abs(line - zeroed[i][tokens[i + 1]]) for i, line in enumerate(lines[0]["logprobs"][1:])
    ]
    assert max(differences) > 1e-3
