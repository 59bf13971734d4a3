// What an op must do at least: the numerators of step budgets.
#pragma once

#include <string>
#include <string_view>

#include "ops/ops.h"

namespace cachalot::ops {

// Bytes that move once: inputs, weights, cache rows and outputs. Flops of the products, a multiply
// and an add counted apart.
struct OpCost {
  double bytes = 0;
  double flops = 0;
};

// From the args alone: what only the tensors' contents tell is taken at its bound (entries, window,
// selected rows), and the number of distinct experts at its mean for uniform routing.
OpCost cost(const RopeTableArgs& args);
OpCost cost(const EmbedArgs& args);
OpCost cost(const HcExpandArgs& args);
OpCost cost(const HcSiteArgs& args);
OpCost cost(const HcCollapseArgs& args);
OpCost cost(const RmsNormArgs& args);
OpCost cost(const LinearArgs& args);
OpCost cost(const QkvFinishArgs& args);
OpCost cost(const CompressPoolArgs& args);
OpCost cost(const CompressStoreArgs& args);
OpCost cost(const IndexSelectArgs& args);
OpCost cost(const AttendArgs& args);
OpCost cost(const CommitArgs& args);
OpCost cost(const GateArgs& args);
OpCost cost(const ExpertsArgs& args);
OpCost cost(const EngramHashArgs& args);
OpCost cost(const EngramGatherArgs& args);
OpCost cost(const EngramInjectArgs& args);
OpCost cost(const HeadArgs& args);
OpCost cost(const DraftHeadArgs& args);
OpCost cost(const TopLogitsArgs& args);
OpCost cost(const DenseArgs& args);
OpCost cost(const DenseAttendArgs& args);

// Values and scales.
int64_t weight_bytes(const Weight& weight);

// The op's name in a budget; linears are told apart by their widths: "linear 5120>1280+512".
template <class Args>
std::string budget_name(std::string_view op, const Args&) {
  return std::string(op);
}
std::string budget_name(std::string_view op, const LinearArgs& args);

}  // namespace cachalot::ops
