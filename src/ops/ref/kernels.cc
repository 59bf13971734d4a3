#include "ops/ref/kernels.h"

#include "ops/registry.h"

namespace cachalot::ops {

const KernelSet& ref_kernels() {
  static const KernelSet set = {
      .rope_table = {{"loops", ref::rope_table}},
      .embed = {{"loops", ref::embed}},
      .hc_expand = {{"loops", ref::hc_expand}},
      .hc_site = {{"loops", ref::hc_site}},
      .hc_collapse = {{"loops", ref::hc_collapse}},
      .rms_norm = {{"loops", ref::rms_norm}},
      .linear = {{"loops", ref::linear}},
      .qkv_finish = {{"loops", ref::qkv_finish}},
      .compress_pool = {{"loops", ref::compress_pool}},
      .compress_store = {{"loops", ref::compress_store}},
      .index_select = {{"loops", ref::index_select}},
      .attend = {{"loops", ref::attend}},
      .commit = {{"loops", ref::commit}},
      .gate = {{"loops", ref::gate}},
      .experts = {{"loops", ref::experts}},
      .engram_hash = {{"loops", ref::engram_hash}},
      .engram_gather = {{"loops", ref::engram_gather}},
      .engram_inject = {{"loops", ref::engram_inject}},
      .head = {{"loops", ref::head}},
      .draft_head = {{"loops", ref::draft_head}},
      .top_logits = {{"loops", ref::top_logits}},
      .dense = {{"loops", ref::dense}},
      .dense_attend = {{"loops", ref::dense_attend}},
  };
  return set;
}

}  // namespace cachalot::ops
