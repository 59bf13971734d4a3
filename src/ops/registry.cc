#include "ops/registry.h"

namespace cachalot::ops {
namespace {

template <class Args>
void add_names(std::vector<KernelName>& names,
               std::string_view op,
               const std::vector<Kernel<Args>>& entries) {
  KernelName name{op, {}};
  for (const Kernel<Args>& entry : entries) {
    name.kernels.push_back(entry.name);
  }
  names.push_back(std::move(name));
}

}  // namespace

const KernelSet& kernels(Backend backend) {
  switch (backend) {
    case Backend::kRef:
      return ref_kernels();
    case Backend::kCpu:
      return cpu_kernels();
    case Backend::kCuda:
      return cuda_kernels();
  }
  return ref_kernels();
}

std::vector<KernelName> kernel_names(Backend backend) {
  const KernelSet& set = kernels(backend);
  std::vector<KernelName> names;
  add_names(names, "rope_table", set.rope_table);
  add_names(names, "embed", set.embed);
  add_names(names, "hc_expand", set.hc_expand);
  add_names(names, "hc_site", set.hc_site);
  add_names(names, "hc_collapse", set.hc_collapse);
  add_names(names, "rms_norm", set.rms_norm);
  add_names(names, "linear", set.linear);
  add_names(names, "qkv_finish", set.qkv_finish);
  add_names(names, "compress_pool", set.compress_pool);
  add_names(names, "compress_store", set.compress_store);
  add_names(names, "index_select", set.index_select);
  add_names(names, "attend", set.attend);
  add_names(names, "commit", set.commit);
  add_names(names, "gate", set.gate);
  add_names(names, "experts", set.experts);
  add_names(names, "engram_hash", set.engram_hash);
  add_names(names, "engram_gather", set.engram_gather);
  add_names(names, "engram_inject", set.engram_inject);
  add_names(names, "head", set.head);
  add_names(names, "draft_head", set.draft_head);
  add_names(names, "top_logits", set.top_logits);
  add_names(names, "dense", set.dense);
  add_names(names, "dense_attend", set.dense_attend);
  return names;
}

std::string_view backend_name(Backend backend) {
  switch (backend) {
    case Backend::kRef:
      return "ref";
    case Backend::kCpu:
      return "cpu";
    case Backend::kCuda:
      return "cuda";
  }
  return "unknown";
}

}  // namespace cachalot::ops
