// The reference kernels, one function per op.
#pragma once

#include "ops/ops.h"

namespace cachalot::ops::ref {

Status rope_table(OpContext& ctx, const RopeTableArgs& args);
Status embed(OpContext& ctx, const EmbedArgs& args);
Status hc_expand(OpContext& ctx, const HcExpandArgs& args);
Status hc_site(OpContext& ctx, const HcSiteArgs& args);
Status hc_collapse(OpContext& ctx, const HcCollapseArgs& args);
Status rms_norm(OpContext& ctx, const RmsNormArgs& args);
Status linear(OpContext& ctx, const LinearArgs& args);
Status qkv_finish(OpContext& ctx, const QkvFinishArgs& args);
Status compress_pool(OpContext& ctx, const CompressPoolArgs& args);
Status compress_store(OpContext& ctx, const CompressStoreArgs& args);
Status index_select(OpContext& ctx, const IndexSelectArgs& args);
Status attend(OpContext& ctx, const AttendArgs& args);
Status commit(OpContext& ctx, const CommitArgs& args);
Status gate(OpContext& ctx, const GateArgs& args);
Status experts(OpContext& ctx, const ExpertsArgs& args);
Status engram_hash(OpContext& ctx, const EngramHashArgs& args);
Status engram_gather(OpContext& ctx, const EngramGatherArgs& args);
Status engram_inject(OpContext& ctx, const EngramInjectArgs& args);
Status head(OpContext& ctx, const HeadArgs& args);
Status draft_head(OpContext& ctx, const DraftHeadArgs& args);
Status top_logits(OpContext& ctx, const TopLogitsArgs& args);
Status dense(OpContext& ctx, const DenseArgs& args);
Status dense_attend(OpContext& ctx, const DenseAttendArgs& args);

}  // namespace cachalot::ops::ref
