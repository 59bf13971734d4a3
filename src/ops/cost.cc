#include "ops/cost.h"

#include <cmath>
#include <initializer_list>

#include "base/format.h"
#include "quant/block.h"

namespace cachalot::ops {
namespace {

double sum_bytes(std::initializer_list<const TensorView*> views) {
  int64_t bytes = 0;
  for (const TensorView* view : views) {
    bytes += view->empty() ? 0 : view->bytes();
  }
  return static_cast<double>(bytes);
}

double pending_bytes(const Pending& pending) {
  return sum_bytes({&pending.y, &pending.post, &pending.comb});
}

double expert_weights(const ExpertView& expert) {
  return static_cast<double>(weight_bytes(expert.w1) + weight_bytes(expert.w2) +
                             weight_bytes(expert.w3));
}

double expert_flops(const ExpertView& expert) {
  return 6.0 * static_cast<double>(expert.w1.out * expert.w1.in);
}

}  // namespace

int64_t weight_bytes(const Weight& weight) {
  return weight.empty()
             ? 0
             : weight.values.bytes() + (weight.scales.empty() ? 0 : weight.scales.bytes());
}

OpCost cost(const RopeTableArgs& args) {
  return {sum_bytes({&args.position, &args.frequency, &args.table}), 0};
}

OpCost cost(const EmbedArgs& args) {
  return {sum_bytes({&args.token, &args.x}) * (1 + 1.0 / static_cast<double>(args.x.dim(1))), 0};
}

OpCost cost(const HcExpandArgs& args) {
  return {sum_bytes({&args.x, &args.out}) + pending_bytes(args.pending), 0};
}

OpCost cost(const HcSiteArgs& args) {
  const bool expands = !args.pending.empty();
  return {sum_bytes({&args.x, &args.pre, &args.fn, &args.norm, &args.comb_out, &args.u}) +
              (expands ? pending_bytes(args.pending) + sum_bytes({&args.x_out}) : 0),
          2.0 * static_cast<double>(args.x.dim(0) * args.fn.shape.elements())};
}

OpCost cost(const HcCollapseArgs& args) {
  return {sum_bytes({&args.x, &args.pre}) + pending_bytes(args.pending) +
              static_cast<double>(args.x.dim(0) * args.x.dim(2) * dtype_bytes(args.out.dtype)),
          0};
}

OpCost cost(const RmsNormArgs& args) {
  return {sum_bytes({&args.x, &args.norm, &args.y}), 0};
}

OpCost cost(const LinearArgs& args) {
  OpCost total{sum_bytes({&args.x}), 0};
  for (const LinearTarget& target : args.targets) {
    total.bytes += static_cast<double>(weight_bytes(*target.weight)) + sum_bytes({&target.y});
    total.flops +=
        2.0 * static_cast<double>(args.x.dim(0) * target.weight->out * target.weight->in);
  }
  return total;
}

OpCost cost(const QkvFinishArgs& args) {
  return {sum_bytes({&args.t, &args.kv, &args.rope, &args.r, &args.fresh}), 0};
}

OpCost cost(const CompressPoolArgs& args) {
  return {sum_bytes({&args.kv, &args.gate, &args.latent}), 0};
}

OpCost cost(const CompressStoreArgs& args) {
  const int64_t rows =
      quant::main_row_bytes(args.latent.dim(1)) + quant::index_row_bytes(args.key.dim(1));
  return {sum_bytes({&args.latent, &args.key, &args.rope}) +
              static_cast<double>(args.groups.groups * rows),
          0};
}

OpCost cost(const IndexSelectArgs& args) {
  const int64_t t = args.q.dim(0), dim = args.q.dim(1) / args.w.dim(1);
  // Rows of one sequence share its entries; candidates are a row's own.
  const bool restricted = !args.candidates.empty();
  const int64_t of_row =
      restricted ? std::min(args.entries_bound, args.candidates.dim(1) * args.candidate_block)
                 : args.entries_bound;
  const int64_t read = of_row * (restricted ? t : args.rows.sequences);
  return {sum_bytes({&args.q, &args.w, &args.candidates, &args.candidates_out, &args.selected}) +
              static_cast<double>(read * quant::index_row_bytes(dim)),
          2.0 * static_cast<double>(t * of_row * args.q.dim(1))};
}

OpCost cost(const AttendArgs& args) {
  const int64_t t = args.q.dim(0), k = args.q.dim(1) / args.sink.dim(0);
  const int64_t selected = args.main == nullptr ? 0 : args.selected.dim(1);
  const int64_t window = args.window.window;
  return {sum_bytes({&args.q, &args.rope, &args.o}) +
              static_cast<double>(
                  t * (window * quant::window_row_bytes(k) + selected * quant::main_row_bytes(k))),
          4.0 * static_cast<double>(t * args.q.dim(1) * (window + selected))};
}

OpCost cost(const CommitArgs& args) {
  OpCost total;
  for (const WindowView& window : args.windows) {
    total.bytes += 2 * sum_bytes({&window.fresh});
  }
  // One row of each sequence.
  for (const OpenGroupView& group : args.groups) {
    total.bytes += 4.0 * static_cast<double>(args.rows.sequences * group.kv.dim(1) * 4);
  }
  return total;
}

OpCost cost(const GateArgs& args) {
  return {sum_bytes({&args.x, &args.experts, &args.weights}) +
              static_cast<double>(weight_bytes(args.weight)),
          2.0 * static_cast<double>(args.x.dim(0) * args.weight.out * args.weight.in)};
}

OpCost cost(const ExpertsArgs& args) {
  const auto t = static_cast<double>(args.x.dim(0));
  const auto k = static_cast<double>(args.experts.dim(1));
  const auto e = static_cast<double>(args.routed.size());
  OpCost total{sum_bytes({&args.x, &args.y}), t * k * expert_flops(args.routed[0])};
  total.bytes += e * (1 - std::pow(1 - k / e, t)) * expert_weights(args.routed[0]);
  for (const ExpertView& shared : args.shared) {
    total.bytes += expert_weights(shared);
    total.flops += t * expert_flops(shared);
  }
  return total;
}

OpCost cost(const EngramHashArgs& args) {
  return {sum_bytes({&args.classes, &args.ids}), 0};
}

OpCost cost(const EngramGatherArgs& args) {
  const int64_t rows = args.e.shape.elements() / args.table.in;
  const int64_t row = weight_bytes(args.table) / std::max<int64_t>(args.table.out, 1);
  return {sum_bytes({&args.ids, &args.e}) + static_cast<double>(rows * row), 0};
}

OpCost cost(const EngramInjectArgs& args) {
  return {sum_bytes({&args.x, &args.kv, &args.q_weight, &args.k_weight, &args.out}), 0};
}

OpCost cost(const HeadArgs& args) {
  return {sum_bytes({&args.logits}) + static_cast<double>(weight_bytes(args.weight)),
          2.0 * static_cast<double>(args.select.dim(0) * args.weight.out * args.weight.in)};
}

OpCost cost(const DraftHeadArgs& args) {
  const int64_t n = args.select.dim(0);
  return {sum_bytes({&args.previous, &args.logits, &args.confidence}) +
              static_cast<double>(n * args.base.dim(1) * 4 + weight_bytes(args.head)),
          2.0 * static_cast<double>(n * args.head.out * args.head.in)};
}

OpCost cost(const TopLogitsArgs& args) {
  return {sum_bytes({&args.logits, &args.value, &args.id, &args.mass}), 0};
}

OpCost cost(const DenseArgs& args) {
  return {sum_bytes({&args.x, &args.bias, &args.residual, &args.y}) +
              static_cast<double>(weight_bytes(args.weight)),
          2.0 * static_cast<double>(args.x.dim(0) * args.weight.out * args.weight.in)};
}

OpCost cost(const DenseAttendArgs& args) {
  return {sum_bytes({&args.qkv, &args.rope, &args.o}),
          4.0 * static_cast<double>(args.o.dim(0) * args.o.shape.elements())};
}

std::string budget_name(std::string_view op, const LinearArgs& args) {
  std::string name = fmt::format("{} {}", op, args.x.dim(1));
  for (size_t i = 0; i < args.targets.size(); ++i) {
    name += fmt::format("{}{}", i == 0 ? '>' : '+', args.targets[i].weight->out);
  }
  return name;
}

}  // namespace cachalot::ops
