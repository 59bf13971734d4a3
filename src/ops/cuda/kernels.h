// The kernels of the CUDA backend, one function per entry of the kernel table. All tensors of the
// args lie in device memory; see ops.h for what each op computes.
//
// Scratch comes from OpContext::scratch, an Arena over a block of device memory; a call that finds
// too little of it returns kResourceExhausted before it launches anything.
#pragma once

#include "ops/ops.h"

namespace cachalot::ops::cuda {

Status rope_table(OpContext& ctx, const RopeTableArgs& args);
Status embed(OpContext& ctx, const EmbedArgs& args);
Status hc_expand(OpContext& ctx, const HcExpandArgs& args);
Status hc_collapse(OpContext& ctx, const HcCollapseArgs& args);
Status rms_norm(OpContext& ctx, const RmsNormArgs& args);

// Four BF16 streams of whole 128-column chunks, at most 8192; tensor cores.
Status hc_site_mma(OpContext& ctx, const HcSiteArgs& args);
bool hc_site_mma_supports(const HcSiteArgs& args);
Status hc_site_simt(OpContext& ctx, const HcSiteArgs& args);

// BF16 input, every weight of whole 256-column chunks; tensor cores.
Status linear_mma(OpContext& ctx, const LinearArgs& args);
bool linear_mma_supports(const LinearArgs& args);
Status linear_simt(OpContext& ctx, const LinearArgs& args);

Status qkv_finish(OpContext& ctx, const QkvFinishArgs& args);
Status compress_pool(OpContext& ctx, const CompressPoolArgs& args);
Status compress_store(OpContext& ctx, const CompressStoreArgs& args);
Status index_select(OpContext& ctx, const IndexSelectArgs& args);

// BF16, 512-dim heads; tensor cores.
Status attend_mma(OpContext& ctx, const AttendArgs& args);
bool attend_mma_supports(const AttendArgs& args);
Status attend_simt(OpContext& ctx, const AttendArgs& args);

Status commit(OpContext& ctx, const CommitArgs& args);
Status gate(OpContext& ctx, const GateArgs& args);

// BF16 input, FP4 routed and FP8 shared experts of whole 256-column chunks; tensor cores.
Status experts_mma(OpContext& ctx, const ExpertsArgs& args);
bool experts_mma_supports(const ExpertsArgs& args);
Status experts_simt(OpContext& ctx, const ExpertsArgs& args);

Status engram_hash(OpContext& ctx, const EngramHashArgs& args);
Status engram_gather(OpContext& ctx, const EngramGatherArgs& args);
Status engram_inject(OpContext& ctx, const EngramInjectArgs& args);
Status head(OpContext& ctx, const HeadArgs& args);
Status draft_head(OpContext& ctx, const DraftHeadArgs& args);

// Vocabularies of which a fourth fits, in bytes, into a block's shared memory: 700,000 tokens.
Status top_logits(OpContext& ctx, const TopLogitsArgs& args);
bool top_logits_supports(const TopLogitsArgs& args);

// Scratch: 64 MiB, and a weight of K that is no multiple of 256 once more.
Status dense(OpContext& ctx, const DenseArgs& args);
// Scratch: q and k.
Status dense_attend(OpContext& ctx, const DenseAttendArgs& args);

}  // namespace cachalot::ops::cuda
