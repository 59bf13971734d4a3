#include "ops/cuda/kernels.h"

#include "ops/registry.h"

namespace cachalot::ops {

const KernelSet& cuda_kernels() {
  static const KernelSet kSet{
      .rope_table = {{"cuda", cuda::rope_table}},
      .embed = {{"cuda", cuda::embed}},
      .hc_expand = {{"cuda", cuda::hc_expand}},
      .hc_site = {{"cuda_mma", cuda::hc_site_mma, cuda::hc_site_mma_supports},
                  {"cuda_simt", cuda::hc_site_simt}},
      .hc_collapse = {{"cuda", cuda::hc_collapse}},
      .rms_norm = {{"cuda", cuda::rms_norm}},
      .linear = {{"cuda_mma", cuda::linear_mma, cuda::linear_mma_supports},
                 {"cuda_simt", cuda::linear_simt}},
      .qkv_finish = {{"cuda", cuda::qkv_finish}},
      .compress_pool = {{"cuda", cuda::compress_pool}},
      .compress_store = {{"cuda", cuda::compress_store}},
      .index_select = {{"cuda", cuda::index_select}},
      .attend = {{"cuda_mma", cuda::attend_mma, cuda::attend_mma_supports},
                 {"cuda_simt", cuda::attend_simt}},
      .commit = {{"cuda", cuda::commit}},
      .gate = {{"cuda", cuda::gate}},
      .experts = {{"cuda_mma", cuda::experts_mma, cuda::experts_mma_supports},
                  {"cuda_simt", cuda::experts_simt}},
      .engram_hash = {{"cuda", cuda::engram_hash}},
      .engram_gather = {{"cuda", cuda::engram_gather}},
      .engram_inject = {{"cuda", cuda::engram_inject}},
      .head = {{"cuda", cuda::head}},
      .draft_head = {{"cuda", cuda::draft_head}},
      .top_logits = {{"cuda", cuda::top_logits, cuda::top_logits_supports}},
      .dense = {{"cuda", cuda::dense}},
      .dense_attend = {{"cuda", cuda::dense_attend}},
  };
  return kSet;
}

}  // namespace cachalot::ops
