"""The engine against the independent definition (tests/oracle), sublayer by sublayer.

Every dump of the engine is fed to the oracle, which recomputes each tensor from the engine's own
inputs (see tests/oracle/compare.py for the rules).
"""

import numpy as np
import pytest

from conftest import BACKENDS, read_lines, write_lines
from tests.oracle import compare, drafter, model
from tests.oracle.checkpoint import Checkpoint, read_dump

# t1 and four configs that move every threshold: windows, ratios, top-k, candidate blocks, the number
# of sources, Engram layers.
CONFIGS = {
    "t1": (),
    "wide-window": ("sliding_window=12", "index_topk=7", "candidate_topk_blocks=2"),
    "one-source": (
        "num_hidden_layers=5",
        "compress_ratios=[0, 1, 1, 1, 1, 0]",
        "kv_source_layer_ids=[1]",
        "index_source_layer_ids=[1, 3]",
        "candidate_source_layer_id=1",
        "candidate_block_size=2",
        "engram_layer_ids=[2]",
        "dspark_target_layer_ids=[2, 3, 4]",
    ),
    "many-sources": (
        "compress_ratios=[0, 2, 2, 2, 2, 2, 1, 1, 1, 1, 0]",
        "kv_source_layer_ids=[1, 3, 5, 6]",
        "index_source_layer_ids=[1, 3, 5, 6, 7, 9]",
        "candidate_source_layer_id=6",
        "sliding_window=3",
        "index_topk=2",
    ),
    "no-engram-no-candidates": (
        "engram_layer_ids=[]",
        "candidate_source_layer_id=-1",
        "index_topk=5",
        "num_experts_per_tok=3",
        "hc_sinkhorn_iters=3",
    ),
}


def edge_lengths(config, page=16):
    """The EDGE set: lengths around every threshold of a config."""
    w, k = config.sliding_window, config.index_topk
    lengths = {1, 2, 3, w - 1, w, w + 1, w + 2, 2 * w - 1, 2 * w, 2 * w + 1}
    lengths |= {page - 1, page, page + 1, 2 * page + 1}
    for m in {r for r in config.compress_ratios if r}:
        lengths |= {m, m + 1, k * m - 1, k * m, k * m + 1}
    if config.candidate_source_layer_id >= 0:
        b, c = config.candidate_block_size, config.candidate_topk_blocks
        lengths |= {b * c - 1, b * c, b * c + 1, b * c + b - 1, b * c + b}
    return sorted(n for n in lengths if n >= 1)


def tokens_of(length, vocab, seed):
    return np.random.default_rng(seed).integers(3, vocab, length).tolist()


def score(cachalot, directory, prompts, work, *flags):
    """Scores prompts with a dump each; returns the output lines and the dumps."""
    lines = write_lines(work / "input.jsonl", [{"tokens": p} for p in prompts])
    output = work / "output.jsonl"
    dumps = work / "dump"
    threads = () if "--threads" in flags else ("--threads", 1)  # t1 is too small to share
    cachalot(
        "score", "-m", directory, "--input", lines, "--output", output, "--dump", dumps, *flags, *threads
    )
    return (
        read_lines(output.read_text()),
        [read_dump(dumps / f"{i}.safetensors") for i in range(len(prompts))],
    )


def faults(loaded, tokens, dump, precision, ablate=()):
    reference = model.forward(
        loaded, np.array(tokens), precision, feed=dump, margins=True, ablate=ablate
    )
    return [f for f in compare.compare(reference, dump, loaded.config, precision) if not f.ok]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["f32", "official"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_sublayer_agrees(cachalot, checkpoint, tmp_path, name, precision, backend):
    directory = checkpoint("t1", *CONFIGS[name])
    loaded = Checkpoint(directory)
    lengths = edge_lengths(loaded.config)
    prompts = [tokens_of(n, loaded.config.vocab_size, n) for n in lengths]
    _, dumps = score(
        cachalot, directory, prompts, tmp_path, "--precision", precision, "--backend", backend
    )
    for tokens, dump in zip(prompts, dumps):
        bad = faults(loaded, tokens, dump, precision)
        assert not bad, f"length {len(tokens)}: {bad[:5]}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_unquantized_weights_agree(cachalot, checkpoint, tmp_path, backend):
    directory = checkpoint("t1", weights="f32")
    loaded = Checkpoint(directory)
    tokens = tokens_of(40, loaded.config.vocab_size, 5)
    for precision in ("f32", "official"):
        _, dumps = score(
            cachalot, directory, [tokens], tmp_path, "--precision", precision, "--backend", backend
        )
        bad = faults(loaded, tokens, dumps[0], precision)
        assert not bad, f"{precision}: {bad[:5]}"


@pytest.mark.parametrize("precision", ["f32", "official"])
@pytest.mark.parametrize("ablation", model.ABLATIONS)
def test_every_ablation_is_noticed(cachalot, checkpoint, tmp_path, ablation, precision):
    """A comparison that cannot fail proves nothing: an oracle with one rule changed must disagree."""
    directory = checkpoint("t1")
    loaded = Checkpoint(directory)
    tokens = tokens_of(40, loaded.config.vocab_size, 11)
    _, dumps = score(cachalot, directory, [tokens], tmp_path, "--precision", precision)
    assert faults(loaded, tokens, dumps[0], precision, ablate={ablation})


# Configs that move what a draft depends on: stages, block, window, experts, taps.
DRAFTERS = {
    "t1": (),
    "two-stages": (
        "num_nextn_predict_layers=2",
        "compress_ratios=[0, 0, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0]",
        "dspark_block_size=5",
        "dspark_num_experts_per_tok=2",
        "dspark_target_layer_ids=[1, 4]",
        "dspark_noise_token_id=7",
        "sliding_window=3",
    ),
}


def draft_faults(loaded, tokens, dump, precision, ablate=()):
    """Faults of the drafter's tensors in a dump with a draft behind every position."""
    options = {"feed": dump, "margins": True, "ablate": set(ablate)}
    context = {**options, "ablate": options["ablate"] - set(drafter.DRAFT_ABLATIONS)}
    target = model.forward(loaded, np.array(tokens), precision, draft=True, **context)
    anchors = [(p, tokens[p]) for p in range(1, len(tokens))]
    drafts = drafter.draft(loaded, target.context, anchors, precision, **options)
    return [
        finding
        for result in (target, drafts)
        for finding in compare.compare(result, dump, loaded.config, precision)
        if finding.name.startswith("mtp.") and not finding.ok
    ]


def draft_dump(cachalot, directory, tokens, work, *flags):
    """A dump with a draft behind every position."""
    return score(cachalot, directory, [tokens], work, "--spec", "dspark", "--chunk", 1, *flags)[1][0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["f32", "official"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_draft_tensor_agrees(cachalot, checkpoint, tmp_path, name, precision, backend):
    directory = checkpoint("t1", *DRAFTERS[name])
    loaded = Checkpoint(directory)
    tokens = tokens_of(30, loaded.config.vocab_size, 21)
    dump = draft_dump(
        cachalot, directory, tokens, tmp_path, "--precision", precision, "--backend", backend
    )
    assert dump["mtp.tokens"].shape == (29, loaded.config.dspark_block_size)
    bad = draft_faults(loaded, tokens, dump, precision)
    assert not bad, bad[:5]


@pytest.mark.parametrize("precision", ["f32", "official"])
def test_every_draft_ablation_is_noticed(cachalot, checkpoint, tmp_path, precision):
    directory = checkpoint("t1")
    loaded = Checkpoint(directory)
    tokens = tokens_of(30, loaded.config.vocab_size, 22)
    dump = draft_dump(cachalot, directory, tokens, tmp_path, "--precision", precision)
    for ablation in drafter.DRAFT_ABLATIONS + model.CONTEXT_ABLATIONS:
        assert draft_faults(loaded, tokens, dump, precision, ablate={ablation}), ablation


def test_free_running_log_probabilities(cachalot, checkpoint, tmp_path):
    """On prompts where no decision is near a boundary both must agree without any help."""
    directory = checkpoint("t1")
    loaded = Checkpoint(directory)
    prompts, expected = [], []
    for seed in range(200):
        tokens = tokens_of(2 + seed % 11, loaded.config.vocab_size, 1000 + seed)
        result = model.forward(loaded, np.array(tokens), "f32", margins=True)
        if compare.prescreen(result):
            prompts.append(tokens)
            expected.append(result.log_probs())
    assert len(prompts) >= 10, "too few prompts passed the screen"
    lines, _ = score(
        cachalot, directory, prompts, tmp_path, "--precision", "f32", "--top", loaded.config.vocab_size
    )
    for tokens, line, reference in zip(prompts, lines, expected):
        for i in range(1, len(tokens)):
            assert line["logprobs"][i] == pytest.approx(reference[i - 1][tokens[i]], abs=1e-4)
            for token, logprob in line["top"][i][:20]:
                assert logprob == pytest.approx(reference[i - 1][token], abs=1e-4)


def test_forced_choices_are_used(cachalot, checkpoint, tmp_path):
    """--force replays a dump's choices: feeding back other choices changes the result, its own do not."""
    directory = checkpoint("t1")
    tokens = tokens_of(30, 512, 3)
    (tmp_path / "a").mkdir()
    lines, dumps = score(cachalot, directory, [tokens], tmp_path / "a")
    (tmp_path / "b").mkdir()
    same, _ = score(
        cachalot, directory, [tokens], tmp_path / "b", "--force", tmp_path / "a" / "dump"
    )
    assert same == lines
    other = dict(dumps[0])
    other["layers.3.experts"] = (other["layers.3.experts"] + 1) % 8
    other["layers.3.experts"].sort(axis=1)
    from tests.oracle.checkpoint import write_dump

    (tmp_path / "forced").mkdir()
    write_dump(tmp_path / "forced" / "0.safetensors", other)
    (tmp_path / "c").mkdir()
    changed, changed_dumps = score(
        cachalot, directory, [tokens], tmp_path / "c", "--force", tmp_path / "forced"
    )
    assert changed != lines
    np.testing.assert_array_equal(
        changed_dumps[0]["layers.2.ffn_out"], dumps[0]["layers.2.ffn_out"]
    )
