// The kernel table: per op, the kernels of every backend, in order of preference.
//
// Backends export their kernels as one struct of entry lists; nothing registers itself. An op runs
// the first entry of the context's backend whose `supports` accepts the args.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ops/ops.h"

namespace cachalot::ops {

template <class Args>
struct Kernel {
  std::string_view name;
  Status (*run)(OpContext&, const Args&);
  bool (*supports)(const Args&) = nullptr;  // null: everything that the op accepts
};

// All kernels of one backend.
struct KernelSet {
  std::vector<Kernel<RopeTableArgs>> rope_table;
  std::vector<Kernel<EmbedArgs>> embed;
  std::vector<Kernel<HcExpandArgs>> hc_expand;
  std::vector<Kernel<HcSiteArgs>> hc_site;
  std::vector<Kernel<HcCollapseArgs>> hc_collapse;
  std::vector<Kernel<RmsNormArgs>> rms_norm;
  std::vector<Kernel<LinearArgs>> linear;
  std::vector<Kernel<QkvFinishArgs>> qkv_finish;
  std::vector<Kernel<CompressPoolArgs>> compress_pool;
  std::vector<Kernel<CompressStoreArgs>> compress_store;
  std::vector<Kernel<IndexSelectArgs>> index_select;
  std::vector<Kernel<AttendArgs>> attend;
  std::vector<Kernel<CommitArgs>> commit;
  std::vector<Kernel<GateArgs>> gate;
  std::vector<Kernel<ExpertsArgs>> experts;
  std::vector<Kernel<EngramHashArgs>> engram_hash;
  std::vector<Kernel<EngramGatherArgs>> engram_gather;
  std::vector<Kernel<EngramInjectArgs>> engram_inject;
  std::vector<Kernel<HeadArgs>> head;
  std::vector<Kernel<DraftHeadArgs>> draft_head;
  std::vector<Kernel<TopLogitsArgs>> top_logits;
  std::vector<Kernel<DenseArgs>> dense;
  std::vector<Kernel<DenseAttendArgs>> dense_attend;
};

const KernelSet& ref_kernels();
const KernelSet& cpu_kernels();
const KernelSet& cuda_kernels();  // empty in builds without CUDA

const KernelSet& kernels(Backend backend);

// One line per op for `cachalot doctor`: the op and the kernels of a backend in order.
struct KernelName {
  std::string_view op;
  std::vector<std::string_view> kernels;
};
std::vector<KernelName> kernel_names(Backend backend);

std::string_view backend_name(Backend backend);

}  // namespace cachalot::ops
