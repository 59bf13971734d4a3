#include "ops/cpu/kernels.h"

#include "ops/registry.h"

namespace cachalot::ops {

const KernelSet& cpu_kernels() {
  static const KernelSet set = {
      .rope_table = {{"cpu", cpu::rope_table}},
      .embed = {{"cpu", cpu::embed}},
      .hc_expand = {{"simd", cpu::hc_expand}},
      .hc_site = {{"simd", cpu::hc_site}},
      .hc_collapse = {{"simd", cpu::hc_collapse}},
      .rms_norm = {{"simd", cpu::rms_norm}},
      .linear = {{"simd", cpu::linear}},
      .qkv_finish = {{"simd", cpu::qkv_finish}},
      .compress_pool = {{"simd", cpu::compress_pool}},
      .compress_store = {{"simd", cpu::compress_store}},
      .index_select = {{"simd", cpu::index_select}},
      .attend = {{"simd", cpu::attend}},
      .commit = {{"cpu", cpu::commit}},
      .gate = {{"simd", cpu::gate}},
      .experts = {{"simd", cpu::experts}},
      .engram_hash = {{"cpu", cpu::engram_hash}},
      .engram_gather = {{"simd", cpu::engram_gather}},
      .engram_inject = {{"simd", cpu::engram_inject}},
      .head = {{"simd", cpu::head}},
      .draft_head = {{"simd", cpu::draft_head}},
      .top_logits = {{"simd", cpu::top_logits}},
      .dense = {{"simd", cpu::dense}},
      .dense_attend = {{"simd", cpu::dense_attend}},
  };
  return set;
}

}  // namespace cachalot::ops
