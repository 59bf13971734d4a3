"""Tests of the oracle's drafter: what its drafts depend on, and that a comparison can fail."""

import numpy as np
import pytest

from . import compare, model, random_checkpoint
from .checkpoint import Checkpoint
from .drafter import DRAFT_ABLATIONS, Draft, draft
from .model import CONTEXT_ABLATIONS, Forward, forward
from .test_oracle_self import as_written, noise_of_sums, random_tokens

BLOCK, WINDOW = 3, 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("t1_draft")
    random_checkpoint.write(directory, random_checkpoint.T1_DRAFT, seed=1)
    return Checkpoint(directory)


def anchors_of(tokens):
    """Every position but the first one as an anchor."""
    return [(p, tokens[p]) for p in range(1, len(tokens))]


def run(checkpoint, tokens, precision="f32", ablate=(), feed=None, **options):
    """The dumps of the target with its taps, and of a draft behind every position."""
    target = forward(
        checkpoint,
        tokens,
        precision,
        draft=True,
        ablate=set(ablate) - set(DRAFT_ABLATIONS),
        feed=feed,
        **options,
    )
    drafts = draft(
        checkpoint, target.context, anchors_of(tokens), precision, ablate=ablate, feed=feed, **options
    )
    return target, drafts


def gate(checkpoint, dump, tokens, precision):
    config, faults = checkpoint.config, []
    for result in run(checkpoint, tokens, precision, feed=dump, margins=True):
        findings = compare.compare(result, dump, config, precision)
        faults += [finding for finding in findings if not finding.ok]
    return faults


def dump_of(results):
    target, drafts = results
    return as_written(target.dump | drafts.dump)


def test_taps_are_the_streams_before_attention(checkpoint):
    dump = forward(checkpoint, random_tokens(20), draft=True).dump
    taps = dump["mtp.taps"].reshape(20, 3, 64)
    for i, layer in enumerate((6, 7, 8)):
        assert np.allclose(taps[:, i], dump[f"layers.{layer}.ffn"].mean(axis=1), atol=1e-12)


def test_the_target_does_not_see_the_drafter(checkpoint):
    tokens = random_tokens(20)
    plain, with_taps = forward(checkpoint, tokens).dump, forward(checkpoint, tokens, draft=True).dump
    assert all(np.array_equal(plain[name], with_taps[name]) for name in plain)


@pytest.mark.parametrize("precision", ["f32", "official"])
def test_a_draft_depends_on_its_window_alone(checkpoint, precision):
    tokens = random_tokens(30)
    context = forward(checkpoint, tokens, precision, draft=True).context
    anchor = [(20, tokens[20])]
    base = draft(checkpoint, context, anchor, precision).dump["mtp.logits"]
    for position in range(30):
        other = {stage: rows.copy() for stage, rows in context.items()}
        for rows in other.values():
            rows[position] = -rows[position]
        changed = draft(checkpoint, other, anchor, precision).dump["mtp.logits"]
        inside = 20 - WINDOW <= position < 20
        assert np.array_equal(base, changed) != inside, position
        if inside:
            # The same positions are seen by every row of the block.
            assert np.all(np.any(base != changed, axis=1))


def test_rows_of_a_block_see_each_other(checkpoint):
    """Another anchor token changes every row, and the first row reads the noise behind it."""
    tokens = random_tokens(20)
    context = forward(checkpoint, tokens, draft=True).context
    base = draft(checkpoint, context, [(12, 5)]).dump["mtp.hidden"]
    assert np.all(np.any(base != draft(checkpoint, context, [(12, 6)]).dump["mtp.hidden"], axis=1))
    causal = draft(checkpoint, context, [(12, 5)], ablate=["causal-block"]).dump["mtp.hidden"]
    assert np.all(np.any(base != causal, axis=1)[:-1])


@pytest.mark.parametrize("precision", ["f32", "official"])
def test_blocks_are_independent(checkpoint, precision):
    tokens = random_tokens(25)
    context = forward(checkpoint, tokens, precision, draft=True).context
    together = draft(checkpoint, context, anchors_of(tokens), precision).dump
    for i in (0, 5, WINDOW - 1, WINDOW, 23):
        position, token = anchors_of(tokens)[i]
        # Nothing behind the anchor exists yet.
        before = {stage: rows[:position] for stage, rows in context.items()}
        alone = draft(checkpoint, before, [(position, token)], precision).dump
        rows = slice(i * BLOCK, (i + 1) * BLOCK)
        assert np.allclose(alone["mtp.hidden"], together["mtp.hidden"][rows], rtol=0, atol=1e-9)
        assert np.array_equal(alone["mtp.tokens"][0], together["mtp.tokens"][i])


def test_heads(checkpoint):
    """Bias and confidence of each row follow from the token proposed before it."""
    tokens = random_tokens(20)
    _, drafts = run(checkpoint, tokens)
    dump, last = drafts.dump, "mtp.1."
    embed = checkpoint.weight(last + "markov_head.embed.weight")
    head = checkpoint.weight(last + "markov_head.head.weight")
    proj = checkpoint.weight(last + "confidence_head.proj.weight")[0]
    for i, (_, previous) in enumerate(anchors_of(tokens)):
        for k in range(BLOCK):
            row = i * BLOCK + k
            bias = dump["mtp.logits"][row] - dump["mtp.base_logits"][row]
            assert np.allclose(bias, head @ embed[previous])
            expected = proj[:64] @ dump["mtp.hidden"][row] + proj[64:] @ embed[previous]
            assert dump["mtp.confidence"][i, k] == pytest.approx(expected)
            previous = dump["mtp.tokens"][i, k]
            assert previous == dump["mtp.logits"][row].argmax()


@pytest.mark.parametrize("layer,count", [(0, 2), (10, 1)])
def test_a_single_expert_keeps_its_score(checkpoint, layer, count):
    """The weights of several experts sum to the scaling factor; one expert's is its score times it."""
    x = np.random.default_rng(0).standard_normal((5, 64)) * 0.2
    factors = []

    class Spy(Forward):
        def expert(self, name, x, factor, rows):
            if "shared" not in name:
                factors.append((rows, factor))
            return super().expert(name, x, factor, rows)

    Spy(checkpoint, [1] * 5, "f32").moe(layer, x)
    sums = np.zeros(5)
    for rows, factor in factors:
        sums[rows] += factor[:, 0]
    scaling = checkpoint.config.routed_scaling_factor
    if count > 1:
        assert np.allclose(sums, scaling)
        return
    name = "mtp.0.ffn.gate."
    scores = np.sqrt(np.log1p(np.exp(x @ checkpoint.weight(name + "weight").T)))
    best = np.argmax(scores + checkpoint.weight(name + "bias"), axis=1)
    assert np.allclose(sums, scores[np.arange(5), best] * scaling)


@pytest.mark.parametrize("precision", ["f32", "official"])
def test_a_correct_implementation_passes(checkpoint, precision, monkeypatch):
    tokens = random_tokens(30)
    assert gate(checkpoint, dump_of(run(checkpoint, tokens, precision)), tokens, precision) == []
    with noise_of_sums(monkeypatch):
        dump = dump_of(run(checkpoint, tokens, precision))
    assert gate(checkpoint, dump, tokens, precision) == []


@pytest.mark.parametrize("precision", ["f32", "official"])
@pytest.mark.parametrize("ablation", DRAFT_ABLATIONS + CONTEXT_ABLATIONS)
def test_every_ablation_fails_the_gate(checkpoint, ablation, precision):
    tokens = random_tokens(25)
    dump = dump_of(run(checkpoint, tokens, precision, ablate={ablation}))
    assert gate(checkpoint, dump, tokens, precision) != []


def test_unknown_ablations_are_refused(checkpoint):
    context = forward(checkpoint, [1, 2], draft=True).context
    with pytest.raises(ValueError, match="unknown ablation nonsense"):
        Draft(checkpoint, context, [(1, 5)], "f32", ablate=["nonsense"])
    assert not set(DRAFT_ABLATIONS) & set(model.ABLATIONS)
