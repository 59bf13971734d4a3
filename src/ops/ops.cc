#include "ops/ops.h"

#include "ops/check_args.h"
#include "ops/op_timer.h"
#include "ops/registry.h"
#include "quant/block.h"

namespace cachalot::ops {
namespace {

using internal::ArgCheck;
using internal::is_act;

constexpr auto kParam = {DType::kBF16, DType::kF32};

template <class Args>
Status dispatch(OpContext& ctx,
                std::string_view op,
                const std::vector<Kernel<Args>> KernelSet::* member,
                const Args& args) {
  for (const Kernel<Args>& kernel : kernels(ctx.backend).*member) {
    if (kernel.supports == nullptr || kernel.supports(args)) {
      if (ctx.timer == nullptr) {
        return kernel.run(ctx, args);
      }
      ctx.timer->begin(budget_name(op, args), cost(args));
      const Status status = kernel.run(ctx, args);
      ctx.timer->end();
      return status;
    }
  }
  return error(Code::kUnimplemented,
               "op {}: backend {} has no kernel for these arguments",
               op,
               backend_name(ctx.backend));
}

void check_rows(ArgCheck& check, const StepRows& rows) {
  const int64_t t = rows.rows, s = rows.sequences;
  check.tensor("position", rows.position, {DType::kI32}, {t})
      .tensor("sequence", rows.sequence, {DType::kI32}, {t})
      .tensor("row_begin", rows.row_begin, {DType::kI32}, {s + 1})
      .tensor("start", rows.start, {DType::kI32}, {s})
      .tensor("is_image", rows.is_image, {DType::kU8}, {t});
}

void check_groups(ArgCheck& check, const GroupRows& groups) {
  check.tensor("groups.row", groups.row, {DType::kI32}, {groups.groups})
      .tensor("groups.sequence", groups.sequence, {DType::kI32}, {groups.groups})
      .tensor("groups.entry", groups.entry, {DType::kI32}, {groups.groups})
      .that(groups.ratio == 1 || groups.ratio == 2, "ratio 1 or 2");
}

void check_pending(ArgCheck& check, const Pending& pending, const TensorView& x) {
  const int64_t t = x.dim(0), m = x.dim(1), d = x.dim(2);
  check.act("pending.y", pending.y, x.dtype, {t, d})
      .tensor("pending.post", pending.post, {DType::kF32}, {t, m})
      .tensor("pending.comb", pending.comb, {DType::kF32}, {t, m, m});
}

void check_streams(ArgCheck& check, std::string_view name, const TensorView& x) {
  check.that(x.shape.rank == 3 && is_act(x.dtype), "streams of rank 3, BF16 or F32")
      .that(!x.empty() || x.shape.elements() == 0, name);
}

}  // namespace

Status rope_table(OpContext& ctx, const RopeTableArgs& args) {
  ArgCheck check("rope_table");
  const int64_t n = args.position.dim(0), half = args.frequency.dim(0);
  check.tensor("position", args.position, {DType::kI32}, {n})
      .tensor("frequency", args.frequency, {DType::kF32}, {half})
      .tensor("table", args.table, {DType::kF32}, {n, half, 2});
  CACHALOT_RETURN_IF_ERROR(check.status());
  return n == 0 ? Status() : dispatch(ctx, "rope_table", &KernelSet::rope_table, args);
}

Status embed(OpContext& ctx, const EmbedArgs& args) {
  ArgCheck check("embed");
  check_streams(check, "x", args.x);
  CACHALOT_RETURN_IF_ERROR(check.status());
  const int64_t t = args.x.dim(0), d = args.x.dim(2);
  check.tensor("token", args.token, {DType::kI32}, {t})
      .weight("weight", args.weight, args.weight.out, d)
      .that(args.weight.format == WeightFormat::kBF16 || args.weight.format == WeightFormat::kF32,
            "a BF16 or F32 embedding");
  if (!args.images.empty()) {
    check.act("images", args.images, args.x.dtype, {args.images.dim(0), d});
  }
  CACHALOT_RETURN_IF_ERROR(check.status());
  return t == 0 ? Status() : dispatch(ctx, "embed", &KernelSet::embed, args);
}

Status hc_expand(OpContext& ctx, const HcExpandArgs& args) {
  ArgCheck check("hc_expand");
  check_streams(check, "x", args.x);
  CACHALOT_RETURN_IF_ERROR(check.status());
  check_pending(check, args.pending, args.x);
  check.act("out", args.out, args.x.dtype, args.x.shape)
      .that(args.out.data != args.x.data || args.x.dim(0) == 0, "out apart from x");
  CACHALOT_RETURN_IF_ERROR(check.status());
  return args.x.dim(0) == 0 ? Status() : dispatch(ctx, "hc_expand", &KernelSet::hc_expand, args);
}

Status hc_site(OpContext& ctx, const HcSiteArgs& args) {
  ArgCheck check("hc_site");
  check_streams(check, "x", args.x);
  CACHALOT_RETURN_IF_ERROR(check.status());
  const int64_t t = args.x.dim(0), m = args.x.dim(1), d = args.x.dim(2);
  if (!args.pending.empty()) {
    check_pending(check, args.pending, args.x);
    check.that(args.x_out.data != args.x.data || t == 0, "x_out apart from x");
  }
  check.tensor("pre", args.pre, {DType::kF32}, {t, m})
      .tensor("fn", args.fn, {DType::kF32}, {(2 + m) * m, m * d})
      .tensor("base", args.base, {DType::kF32}, {(2 + m) * m})
      .tensor("scale", args.scale, {DType::kF32}, {3})
      .tensor("norm", args.norm, kParam, {d})
      .act("x_out", args.x_out, args.x.dtype, args.x.shape)
      .tensor("pre_out", args.pre_out, {DType::kF32}, {t, m})
      .tensor("post_out", args.post_out, {DType::kF32}, {t, m})
      .tensor("comb_out", args.comb_out, {DType::kF32}, {t, m, m})
      .act("u", args.u, args.x.dtype, {t, d})
      .that(args.sinkhorn_iters >= 1, "sinkhorn_iters >= 1")
      .that(m <= 8, "at most 8 streams");
  CACHALOT_RETURN_IF_ERROR(check.status());
  return t == 0 ? Status() : dispatch(ctx, "hc_site", &KernelSet::hc_site, args);
}

Status hc_collapse(OpContext& ctx, const HcCollapseArgs& args) {
  ArgCheck check("hc_collapse");
  check_streams(check, "x", args.x);
  check.that(args.out.shape.rank == 2, "out of rank 2");
  CACHALOT_RETURN_IF_ERROR(check.status());
  const int64_t t = args.x.dim(0), m = args.x.dim(1), d = args.x.dim(2), n = args.out.dim(1);
  if (!args.pending.empty()) {
    check_pending(check, args.pending, args.x);
  }
  check.tensor("pre", args.pre, {DType::kF32}, {t, m})
      .act("out", args.out, args.x.dtype, {t, n})
      .that(args.column >= 0 && args.column + d <= n, "columns inside of out")
      .that(m <= 8, "at most 8 streams");
  CACHALOT_RETURN_IF_ERROR(check.status());
  return t == 0 ? Status() : dispatch(ctx, "hc_collapse", &KernelSet::hc_collapse, args);
}

Status rms_norm(OpContext& ctx, const RmsNormArgs& args) {
  ArgCheck check("rms_norm");
  check.that(args.x.shape.rank == 2 && is_act(args.x.dtype), "x of rank 2, BF16 or F32");
  CACHALOT_RETURN_IF_ERROR(check.status());
  check.tensor("x", args.x, kParam, args.x.shape)
      .tensor("norm", args.norm, kParam, {args.x.dim(1)})
      .act("y", args.y, args.x.dtype, args.x.shape);
  CACHALOT_RETURN_IF_ERROR(check.status());
  return args.x.dim(0) == 0 ? Status() : dispatch(ctx, "rms_norm", &KernelSet::rms_norm, args);
}

Status linear(OpContext& ctx, const LinearArgs& args) {
  ArgCheck check("linear");
  check.that(args.x.shape.rank == 2 && is_act(args.x.dtype), "x of rank 2, BF16 or F32")
      .that(args.groups >= 1 && !args.targets.empty(), "at least one group and target");
  CACHALOT_RETURN_IF_ERROR(check.status());
  const int64_t t = args.x.dim(0);
  for (const LinearTarget& target : args.targets) {
    const Weight& w = *target.weight;
    check.weight("weight", w, w.out, args.x.dim(1) / args.groups)
        .tensor("y", target.y, kParam, {t, w.out})
        .that(args.x.dim(1) % args.groups == 0 && w.out % args.groups == 0, "whole groups")
        .that(w.format != WeightFormat::kFp8Block || args.groups == 1 ||
                  (w.out / args.groups) % quant::kFp8Block == 0,
              "groups of whole 32-row tiles")
        .that(w.format != WeightFormat::kFp8Row, "a matrix, not an Engram table");
  }
  CACHALOT_RETURN_IF_ERROR(check.status());
  return t == 0 ? Status() : dispatch(ctx, "linear", &KernelSet::linear, args);
}

Status qkv_finish(OpContext& ctx, const QkvFinishArgs& args) {
  ArgCheck check("qkv_finish");
  check.that(args.kv.shape.rank == 2 && args.rope.shape.rank == 3 && is_act(args.kv.dtype),
             "kv of rank 2, rope of rank 3");
  CACHALOT_RETURN_IF_ERROR(check.status());
  const int64_t t = args.kv.dim(0), k = args.kv.dim(1), half = args.rope.dim(1);
  if (args.t.shape.rank != 0) {
    const int64_t q = args.t.dim(1);
    check.act("t", args.t, args.kv.dtype, {t, q})
        .tensor("q_norm", args.q_norm, kParam, {q})
        .act("r", args.r, args.kv.dtype, {t, q});
  }
  check.act("kv", args.kv, args.kv.dtype, {t, k})
      .tensor("kv_norm", args.kv_norm, kParam, {k})
      .tensor("rope", args.rope, {DType::kF32}, {t, half, 2})
      .that(2 * half <= k, "2 half <= K")
      .tensor("fresh", args.fresh, {DType::kU8}, {t, quant::window_row_bytes(k)});
  CACHALOT_RETURN_IF_ERROR(check.status());
  return t == 0 ? Status() : dispatch(ctx, "qkv_finish", &KernelSet::qkv_finish, args);
}

Status compress_pool(OpContext& ctx, const CompressPoolArgs& args) {
  ArgCheck check("compress_pool");
  check_groups(check, args.groups);
  check_rows(check, args.rows);
  const int64_t t = args.rows.rows, c = args.norm.dim(0), g = args.groups.groups;
  if (args.groups.ratio == 2) {
    check.tensor("kv", args.kv, {DType::kF32}, {t, c})
        .tensor("gate", args.gate, {DType::kF32}, {t, c})
        .that(args.open != nullptr, "the open groups");
  } else {
    check.tensor("kv", args.kv, {args.latent.dtype}, {t, c});
  }
  check.tensor("norm", args.norm, kParam, {c}).tensor("latent", args.latent, kParam, {g, c});
  CACHALOT_RETURN_IF_ERROR(check.status());
  return g == 0 ? Status() : dispatch(ctx, "compress_pool", &KernelSet::compress_pool, args);
}

Status compress_store(OpContext& ctx, const CompressStoreArgs& args) {
  ArgCheck check("compress_store");
  check_groups(check, args.groups);
  const int64_t g = args.groups.groups, c = args.latent.dim(1), di = args.k_norm.dim(0);
  const int64_t half = args.rope.dim(1);
  check.tensor("latent", args.latent, kParam, {g, c})
      .act("key", args.key, args.latent.dtype, {g, di})
      .tensor("k_norm", args.k_norm, kParam, {di})
      .tensor("rope", args.rope, {DType::kF32}, {g, half, 2})
      .that(2 * half <= c && 2 * half <= di, "2 half <= C and DI")
      .that(args.main != nullptr && args.index != nullptr, "main and index pages");
  CACHALOT_RETURN_IF_ERROR(check.status());
  return g == 0 ? Status() : dispatch(ctx, "compress_store", &KernelSet::compress_store, args);
}

Status index_select(OpContext& ctx, const IndexSelectArgs& args) {
  ArgCheck check("index_select");
  check_rows(check, args.rows);
  const int64_t t = args.rows.rows;
  check.that(args.q.shape.rank == 2 && args.w.shape.rank == 2 && is_act(args.q.dtype),
             "q and w of rank 2");
  CACHALOT_RETURN_IF_ERROR(check.status());
  const int64_t hi = args.w.dim(1);
  check.act("q", args.q, args.w.dtype, {t, args.q.dim(1)})
      .act("w", args.w, args.q.dtype, {t, hi})
      .that(hi > 0 && args.q.dim(1) % hi == 0, "q of HI heads")
      .tensor("rope", args.rope, {DType::kF32}, {t, args.rope.dim(1), 2})
      .that(args.index != nullptr, "index pages")
      .that(args.ratio >= 1, "ratio >= 1")
      .tensor("selected", args.selected, {DType::kI32}, {t, args.selected.dim(1)});
  if (!args.candidates.empty() || !args.candidates_out.empty()) {
    check.that(args.candidates.empty() || args.candidates_out.empty(), "a source or a consumer")
        .that(args.candidate_block >= 1, "candidate_block >= 1");
  }
  CACHALOT_RETURN_IF_ERROR(check.status());
  return t == 0 ? Status() : dispatch(ctx, "index_select", &KernelSet::index_select, args);
}

Status attend(OpContext& ctx, const AttendArgs& args) {
  ArgCheck check("attend");
  check_rows(check, args.rows);
  const int64_t t = args.rows.rows, h = args.sink.dim(0), s = args.rows.sequences;
  check.that(args.q.shape.rank == 2 && is_act(args.q.dtype) && h > 0 && args.q.dim(1) % h == 0,
             "q [T, H K]");
  CACHALOT_RETURN_IF_ERROR(check.status());
  const int64_t k = args.q.dim(1) / h;
  check.act("q", args.q, args.q.dtype, {t, h * k})
      .act("o", args.o, args.q.dtype, {t, h * k})
      .tensor("rope", args.rope, {DType::kF32}, {t, args.rope.dim(1), 2})
      .tensor("sink", args.sink, {DType::kF32}, {h})
      .tensor("fresh", args.window.fresh, {DType::kU8}, {t, quant::window_row_bytes(k)})
      .tensor("floor", args.window.floor, {DType::kI32}, {s})
      .that(args.window.window >= 1 && args.window.rings != nullptr, "a window")
      .that(args.window.block == 0 || args.window.block * s == t, "sequences of whole blocks");
  if (args.main != nullptr) {
    check.tensor("selected", args.selected, {DType::kI32}, {t, args.selected.dim(1)});
  }
  CACHALOT_RETURN_IF_ERROR(check.status());
  return t == 0 ? Status() : dispatch(ctx, "attend", &KernelSet::attend, args);
}

Status commit(OpContext& ctx, const CommitArgs& args) {
  ArgCheck check("commit");
  check_rows(check, args.rows);
  const int64_t t = args.rows.rows;
  check.tensor("accepted", args.accepted, {DType::kI32}, {args.rows.sequences});
  for (const WindowView& window : args.windows) {
    check.tensor("fresh", window.fresh, {DType::kU8}, {t, args.windows[0].fresh.dim(1)})
        .that(window.window >= 1 && window.rings != nullptr, "a window")
        .that(window.window == args.windows[0].window, "windows of one size");
  }
  for (const OpenGroupView& group : args.groups) {
    check.tensor("kv", group.kv, {DType::kF32}, {t, group.kv.dim(1)})
        .tensor("gate", group.gate, {DType::kF32}, {t, group.kv.dim(1)})
        .that(group.open != nullptr, "open groups");
  }
  CACHALOT_RETURN_IF_ERROR(check.status());
  return t == 0 ? Status() : dispatch(ctx, "commit", &KernelSet::commit, args);
}

Status gate(OpContext& ctx, const GateArgs& args) {
  ArgCheck check("gate");
  const int64_t t = args.x.dim(0), e = args.weight.out, k = args.experts.dim(1);
  check.that(args.x.shape.rank == 2 && is_act(args.x.dtype), "x of rank 2")
      .weight("weight", args.weight, e, args.x.dim(1))
      .tensor("bias", args.bias, {DType::kF32}, {e})
      .tensor("bias_vl", args.bias_vl, {DType::kF32}, {e})
      .tensor("is_image", args.rows.is_image, {DType::kU8}, {t})
      .tensor("experts", args.experts, {DType::kI32}, {t, k})
      .tensor("weights", args.weights, {DType::kF32}, {t, k})
      .that(k >= 1 && k <= e, "1 <= k <= E")
      .that(args.temperature > 0, "temperature > 0");
  if (!args.forced.empty()) {
    check.tensor("forced", args.forced, {DType::kI32}, {t, k});
  }
  CACHALOT_RETURN_IF_ERROR(check.status());
  return t == 0 ? Status() : dispatch(ctx, "gate", &KernelSet::gate, args);
}

Status experts(OpContext& ctx, const ExpertsArgs& args) {
  ArgCheck check("experts");
  const int64_t t = args.x.dim(0), d = args.x.dim(1), k = args.experts.dim(1);
  check.that(args.x.shape.rank == 2 && is_act(args.x.dtype), "x of rank 2")
      .tensor("experts", args.experts, {DType::kI32}, {t, k})
      .tensor("weights", args.weights, {DType::kF32}, {t, k})
      .act("y", args.y, args.x.dtype, {t, d})
      .that(!args.routed.empty() && args.shared.size() <= 1, "routed experts, at most one shared");
  CACHALOT_RETURN_IF_ERROR(check.status());
  for (const std::span<const ExpertView> group : {args.routed, args.shared}) {
    for (const ExpertView& expert : group) {
      const int64_t f = expert.w1.out;
      check.weight("w1", expert.w1, f, d)
          .weight("w3", expert.w3, f, d)
          .weight("w2", expert.w2, d, f);
    }
  }
  CACHALOT_RETURN_IF_ERROR(check.status());
  return t == 0 ? Status() : dispatch(ctx, "experts", &KernelSet::experts, args);
}

Status engram_hash(OpContext& ctx, const EngramHashArgs& args) {
  ArgCheck check("engram_hash");
  check_rows(check, args.rows);
  const int64_t t = args.rows.rows, s = args.rows.sequences;
  const int64_t n = args.multiplier.dim(0), heads = args.prime.dim(1);
  check.tensor("classes", args.classes, {DType::kI32}, {t + s * (n - 1)})
      .tensor("multiplier", args.multiplier, {DType::kI64}, {n})
      .tensor("prime", args.prime, {DType::kI64}, {n - 1, heads})
      .tensor("offset", args.offset, {DType::kI64}, {n - 1, heads})
      .tensor("ids", args.ids, {DType::kI32}, {t, (n - 1) * heads});
  CACHALOT_RETURN_IF_ERROR(check.status());
  return t == 0 ? Status() : dispatch(ctx, "engram_hash", &KernelSet::engram_hash, args);
}

Status engram_gather(OpContext& ctx, const EngramGatherArgs& args) {
  ArgCheck check("engram_gather");
  const bool in_order = args.ids.empty();
  const int64_t t = in_order ? args.e.dim(0) : args.ids.dim(0);
  const int64_t columns = in_order ? args.table.out / std::max<int64_t>(t, 1) : args.ids.dim(1);
  if (!in_order) {
    check.tensor("ids", args.ids, {DType::kI32}, {t, columns});
  }
  check.tensor("e", args.e, kParam, {t, columns * args.table.in})
      .that(!in_order || t * columns == args.table.out, "as many table rows for every token")
      .that(args.table.format == WeightFormat::kFp8Row || args.table.format == WeightFormat::kF32,
            "an FP8 row or F32 table");
  CACHALOT_RETURN_IF_ERROR(check.status());
  return t == 0 ? Status() : dispatch(ctx, "engram_gather", &KernelSet::engram_gather, args);
}

Status engram_inject(OpContext& ctx, const EngramInjectArgs& args) {
  ArgCheck check("engram_inject");
  check_streams(check, "x", args.x);
  CACHALOT_RETURN_IF_ERROR(check.status());
  const int64_t t = args.x.dim(0), m = args.x.dim(1), d = args.x.dim(2);
  check.act("kv", args.kv, args.x.dtype, {t, (m + 1) * d})
      .tensor("q_weight", args.q_weight, kParam, {m, d})
      .tensor("k_weight", args.k_weight, kParam, {m, d})
      .tensor("is_image", args.rows.is_image, {DType::kU8}, {t})
      .act("out", args.out, args.x.dtype, args.x.shape);
  CACHALOT_RETURN_IF_ERROR(check.status());
  return t == 0 ? Status() : dispatch(ctx, "engram_inject", &KernelSet::engram_inject, args);
}

Status head(OpContext& ctx, const HeadArgs& args) {
  ArgCheck check("head");
  check_streams(check, "x", args.x);
  CACHALOT_RETURN_IF_ERROR(check.status());
  const int64_t n = args.select.dim(0), d = args.x.dim(2);
  if (!args.pending.empty()) {
    check_pending(check, args.pending, args.x);
  }
  check.tensor("select", args.select, {DType::kI32}, {n})
      .tensor("pre", args.pre, {DType::kF32}, {args.x.dim(0), args.x.dim(1)})
      .tensor("norm", args.norm, kParam, {d})
      .weight("weight", args.weight, args.weight.out, d)
      .tensor("logits", args.logits, {DType::kF32}, {n, args.weight.out});
  CACHALOT_RETURN_IF_ERROR(check.status());
  return n == 0 ? Status() : dispatch(ctx, "head", &KernelSet::head, args);
}

Status draft_head(OpContext& ctx, const DraftHeadArgs& args) {
  ArgCheck check("draft_head");
  check.that(args.x.shape.rank == 2 && is_act(args.x.dtype) && args.base.shape.rank == 2,
             "x and base of rank 2");
  CACHALOT_RETURN_IF_ERROR(check.status());
  const int64_t n = args.select.dim(0), t = args.x.dim(0), d = args.x.dim(1);
  const int64_t v = args.base.dim(1), r = args.embed.in;
  check.tensor("select", args.select, {DType::kI32}, {n})
      .tensor("previous", args.previous, {DType::kI32}, {n})
      .act("x", args.x, args.x.dtype, {t, d})
      .tensor("base", args.base, {DType::kF32}, {t, v})
      .weight("embed", args.embed, v, r)
      .weight("head", args.head, v, r)
      .weight("proj", args.proj, 1, d + r)
      .tensor("logits", args.logits, {DType::kF32}, {n, v})
      .tensor("confidence", args.confidence, {DType::kF32}, {n});
  for (const Weight* w : {&args.embed, &args.head, &args.proj}) {
    check.that(w->format == WeightFormat::kBF16 || w->format == WeightFormat::kF32,
               "BF16 or F32 weights");
  }
  CACHALOT_RETURN_IF_ERROR(check.status());
  return n == 0 ? Status() : dispatch(ctx, "draft_head", &KernelSet::draft_head, args);
}

Status top_logits(OpContext& ctx, const TopLogitsArgs& args) {
  ArgCheck check("top_logits");
  check.that(args.logits.shape.rank == 2 && args.value.shape.rank == 2, "logits, value of rank 2");
  CACHALOT_RETURN_IF_ERROR(check.status());
  const int64_t n = args.logits.dim(0), v = args.logits.dim(1), k = args.value.dim(1);
  check.tensor("logits", args.logits, {DType::kF32}, {n, v})
      .tensor("temperature", args.temperature, {DType::kF32}, {n})
      .tensor("value", args.value, {DType::kF32}, {n, k})
      .tensor("id", args.id, {DType::kI32}, {n, k})
      .tensor("mass", args.mass, {DType::kF32}, {n, 2})
      .that(v >= 1, "V >= 1")
      .that(k >= 1 && k <= kMostTopLogits, "1 <= k <= 1024");
  CACHALOT_RETURN_IF_ERROR(check.status());
  return n == 0 ? Status() : dispatch(ctx, "top_logits", &KernelSet::top_logits, args);
}

Status dense(OpContext& ctx, const DenseArgs& args) {
  ArgCheck check("dense");
  check.that(args.x.shape.rank == 2 && is_act(args.x.dtype), "x of rank 2, BF16 or F32");
  CACHALOT_RETURN_IF_ERROR(check.status());
  const int64_t n = args.x.dim(0), out = args.weight.out;
  const bool pairs = args.function == DenseFunction::kSwiglu;
  const Shape shape{n, pairs ? out / 2 : out};
  check.weight("weight", args.weight, out, args.x.dim(1))
      .that(args.weight.format == WeightFormat::kBF16 || args.weight.format == WeightFormat::kF32,
            "a BF16 or F32 weight")
      .that(!pairs || out % 2 == 0, "gates and ups")
      .act("y", args.y, args.x.dtype, shape);
  if (!args.bias.empty()) {
    check.tensor("bias", args.bias, kParam, {out});
  }
  if (!args.residual.empty()) {
    check.act("residual", args.residual, args.x.dtype, shape);
  }
  CACHALOT_RETURN_IF_ERROR(check.status());
  return n == 0 ? Status() : dispatch(ctx, "dense", &KernelSet::dense, args);
}

Status dense_attend(OpContext& ctx, const DenseAttendArgs& args) {
  ArgCheck check("dense_attend");
  check.that(args.o.shape.rank == 2 && is_act(args.o.dtype), "o of rank 2, BF16 or F32")
      .that(args.heads >= 1, "at least one head");
  CACHALOT_RETURN_IF_ERROR(check.status());
  const int64_t n = args.o.dim(0), width = args.o.dim(1);
  check.that(width % (2 * args.heads) == 0, "heads of an even width")
      .act("o", args.o, args.o.dtype, args.o.shape)
      .act("qkv", args.qkv, args.o.dtype, {n, 3 * width})
      .tensor("rope", args.rope, {DType::kF32}, {n, width / args.heads / 2, 2});
  CACHALOT_RETURN_IF_ERROR(check.status());
  return n == 0 ? Status() : dispatch(ctx, "dense_attend", &KernelSet::dense_attend, args);
}

}  // namespace cachalot::ops
