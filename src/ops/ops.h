// The ops of the text forward: one op is about one kernel of the paper.
//
// Each op is an args struct of views plus a function. The function checks device, dtypes and
// extents once, returns early on empty work, chooses a kernel of the context's backend (registry.h)
// and runs it. Errors: kInvalidArgument for args that contradict each other, kUnimplemented if the
// backend has no kernel for them.
//
// Activations ("act") are BF16 in precision `official` and F32 in `f32`; the dtype decides where
// values are rounded: a BF16 output is rounded once, when it is stored, and a linear over FP8 or
// FP4 weights quantizes a BF16 input to FP8 blocks but takes an F32 input as it is. Cache rows are
// quantized in both. Accumulation is FP32 (double in ref) in an order that depends on the row
// alone: never on the other rows of the step, their number, or the number of threads.
//
// Letters: T rows, S sequences, D hidden, M streams, H heads, K head dim, R rotary dims (the last R
// of a head), C = K compressed dim, HI/DI index heads and their dim, E experts, F expert width, V
// vocab.
#pragma once

#include <span>
#include <vector>

#include "base/status.h"
#include "ops/context.h"
#include "ops/kv.h"
#include "ops/weight.h"

namespace cachalot::ops {

// cos and sin of FP32(position * frequency), the product rounded to FP32. -------------------------
struct RopeTableArgs {
  TensorView position;   // [N] i32
  TensorView frequency;  // [R/2] f32
  TensorView table;      // out [N, R/2, 2] f32: cos, sin
};
[[nodiscard]] Status rope_table(OpContext& ctx, const RopeTableArgs& args);

// Token rows, copied into M identical streams. ----------------------------------------------------
struct EmbedArgs {
  TensorView token;   // [T] i32, each in [0, V), or -1 - i for row i of `images`
  Weight weight;      // [V, D]
  TensorView images;  // [I, D] act; empty: no row is of an image
  TensorView x;       // out [T, M, D] act
};
[[nodiscard]] Status embed(OpContext& ctx, const EmbedArgs& args);

// What a sublayer left to be added to the streams: X'_k = post_k y + sum_j comb_jk X_j. -----------
struct Pending {
  TensorView y;     // [T, D] act; empty: nothing pending
  TensorView post;  // [T, M] f32
  TensorView comb;  // [T, M, M] f32: row = source stream, column = destination
  bool empty() const { return y.empty(); }
};

struct HcExpandArgs {
  TensorView x;     // [T, M, D] act
  Pending pending;  // not empty
  TensorView out;   // out [T, M, D] act; must not alias x
};
[[nodiscard]] Status hc_expand(OpContext& ctx, const HcExpandArgs& args);

// One hyper-connection site: expands the pending output, predicts this site's coefficients from the
// expanded streams, collapses them with the *previous* site's `pre`, and normalizes. --------------
struct HcSiteArgs {
  TensorView x;       // [T, M, D] act
  Pending pending;    // may be empty
  TensorView pre;     // [T, M] f32: predicted by the previous site
  TensorView fn;      // [(2 + M) M, M D] f32
  TensorView base;    // [(2 + M) M] f32
  TensorView scale;   // [3] f32: pre, post, comb
  TensorView norm;    // [D] bf16|f32
  float rms_eps = 0;  // of both RMS statistics
  float hc_eps = 0;   // of the coefficients
  int sinkhorn_iters = 0;
  TensorView x_out;     // out [T, M, D] act: the expanded streams; equals x if nothing is pending
  TensorView pre_out;   // out [T, M] f32
  TensorView post_out;  // out [T, M] f32
  TensorView comb_out;  // out [T, M, M] f32
  TensorView u;         // out [T, D] act: norm(collapse(x_out, pre))
};
[[nodiscard]] Status hc_site(OpContext& ctx, const HcSiteArgs& args);

// Columns [column, column + D) of out = sum_j pre_j X_j, over the streams with the pending output
// applied. ---------------------------------------------------------------------------------------
struct HcCollapseArgs {
  TensorView x;        // [T, M, D] act
  Pending pending;     // may be empty
  TensorView pre;      // [T, M] f32
  int64_t column = 0;  // of out
  TensorView out;      // out [T, N] act; other columns are left alone
};
[[nodiscard]] Status hc_collapse(OpContext& ctx, const HcCollapseArgs& args);

// y = x rsqrt(mean(x^2) + eps) norm. --------------------------------------------------------------
struct RmsNormArgs {
  TensorView x;     // [T, D] act
  TensorView norm;  // [D] bf16|f32
  float rms_eps = 0;
  TensorView y;  // out [T, D] act; may alias x
};
[[nodiscard]] Status rms_norm(OpContext& ctx, const RmsNormArgs& args);

// y = x W^T for one or several weights that share their input. -----------------------------------
struct LinearTarget {
  const Weight* weight = nullptr;
  TensorView y;  // out [T, out] act or f32
};
struct LinearArgs {
  TensorView x;  // [T, groups * in] act
  std::span<const LinearTarget> targets;
  // Block-diagonal: rows [g out/groups, (g+1) out/groups) of the weight see only group g of x.
  int64_t groups = 1;
  // False keeps a BF16 input unquantized even for FP8 weights (wo_a of the official reference).
  bool quantize_input = true;
};
[[nodiscard]] Status linear(OpContext& ctx, const LinearArgs& args);

// r = q_norm(t); window row = FP8(RoPE(kv_norm(kv))). ---------------------------------------------
struct QkvFinishArgs {
  TensorView t;        // [T, q_lora] act; empty, with q_norm and r: rows that have no query
  TensorView q_norm;   // [q_lora]
  TensorView kv;       // [T, K] act
  TensorView kv_norm;  // [K]
  TensorView rope;     // [T, R/2, 2] f32
  float rms_eps = 0;
  TensorView r;      // out [T, q_lora] act
  TensorView fresh;  // out [T, window_row_bytes(K)] u8
};
[[nodiscard]] Status qkv_finish(OpContext& ctx, const QkvFinishArgs& args);

// Pools each closing group to its latent: softmax over the group's gates per channel (ratio 2) or
// the row itself (ratio 1), then RMSNorm. Rows before the step come from the open group.
// --------------
struct CompressPoolArgs {
  GroupRows groups;
  StepRows rows;
  TensorView kv;                       // [T, C] f32 (ratio 2), act (ratio 1)
  TensorView gate;                     // [T, C] f32 (ratio 2); empty (ratio 1)
  const float* const* open = nullptr;  // ratio 2: [S] -> [2, C]: kv and gate of the unpaired token
  TensorView norm;                     // [C]
  float rms_eps = 0;
  TensorView latent;  // out [G, C] act
};
[[nodiscard]] Status compress_pool(OpContext& ctx, const CompressPoolArgs& args);

// Appends the closing groups to the caches: the rotated latent as a main row, the normalized and
// rotated index key as an index row. --------------------------------------------------------------
struct CompressStoreArgs {
  GroupRows groups;
  TensorView latent;  // [G, C] act, not rotated
  TensorView key;     // [G, DI] act, not normalized
  TensorView k_norm;  // [DI]
  TensorView rope;    // [G, R/2, 2] f32: at the group's first position
  float rms_eps = 0;
  const PagedRows* main = nullptr;   // [S]
  const PagedRows* index = nullptr;  // [S]
};
[[nodiscard]] Status compress_store(OpContext& ctx, const CompressStoreArgs& args);

// Index scores S[p, j] = sum_h w_h relu(q_h . k_j) * DI^-1/2 HI^-1/2 in FP32 over the visible
// entries (those with (j + 1) ratio <= p + 1), then the best k. Ties: the lower entry wins; -0
// equals +0. --
struct IndexSelectArgs {
  StepRows rows;
  int64_t ratio = 1;
  TensorView q;                      // [T, HI * DI] act, not rotated
  TensorView w;                      // [T, HI] act
  TensorView rope;                   // [T, R/2, 2] f32
  const PagedRows* index = nullptr;  // [S]
  // Consumer: only entries of these blocks (ascending ids, -1 behind them) compete. Empty: all do.
  TensorView candidates;  // [T, B] i32
  // Source: publishes the best B blocks by their best score; the newest visible entry's block is
  // always among them. Empty: none are published. A source is not itself restricted.
  TensorView candidates_out;  // out [T, B] i32, ascending, -1 behind
  int64_t candidate_block = 0;
  TensorView selected;  // out [T, k] i32, ascending, -1 behind
  // An upper bound of every row's visible entries, where the caller has one: it sizes grids and
  // scratch. A larger bound does not change the result. 0: unknown, for which a device may have
  // another kernel, with its own order of sums.
  int64_t entries_bound = 0;
};
[[nodiscard]] Status index_select(OpContext& ctx, const IndexSelectArgs& args);

// Attention of every head over the window and the selected entries, with RoPE on q, a sink in the
// denominator, and the inverse rotation on the output. K = V = the cached row.
// --------------------- Official rounding (act = BF16): keys in blocks of 64 (window ascending,
// then entries ascending), the unnormalized probabilities rounded to BF16 against the running
// maximum, the denominator in FP32.
struct AttendArgs {
  StepRows rows;
  TensorView q;     // [T, H * K] act, not rotated
  TensorView rope;  // [T, R/2, 2] f32
  WindowView window;
  const PagedRows* main = nullptr;  // [S]; null in window-only layers
  TensorView selected;              // [T, k] i32 ascending, -1 behind; empty in window-only layers
  TensorView sink;                  // [H] f32
  TensorView o;                     // out [T, H * K] act
};
[[nodiscard]] Status attend(OpContext& ctx, const AttendArgs& args);

// Keeps what the first accepted[s] rows of every sequence leave behind: their fresh rows move into
// the rings, and the kv and gate of the last one, if its position is even, open the next group of
// two.
// --------------------------
struct OpenGroupView {
  TensorView kv, gate;           // [T, C] f32
  float* const* open = nullptr;  // [S] -> [2, C]: kv, gate
};
struct CommitArgs {
  StepRows rows;
  std::span<const WindowView> windows;  // of layers with these rows; all of one size
  std::span<const OpenGroupView> groups;
  TensorView accepted;  // [S] i32, each in [0, rows of s]
};
[[nodiscard]] Status commit(OpContext& ctx, const CommitArgs& args);

// Router: scores = sqrt(softplus(x Wg^T / temp)); the best k of scores + bias (bias_vl for image
// rows; ties: the lower id), ascending; weights = score / (sum of the chosen + 1e-20) * scale. A
// single expert (k = 1) is not normalized, which would make its weight constant: score * scale.
// -----------
struct GateArgs {
  StepRows rows;       // is_image
  TensorView x;        // [T, D] act
  Weight weight;       // [E, D] bf16|f32
  TensorView bias;     // [E] f32
  TensorView bias_vl;  // [E] f32
  float temperature = 1;
  float scale = 1;
  TensorView forced;   // [T, k] i32 to use instead of the best; empty: choose
  TensorView experts;  // out [T, k] i32 ascending
  TensorView weights;  // out [T, k] f32
};
[[nodiscard]] Status gate(OpContext& ctx, const GateArgs& args);

// Routed and shared experts: SwiGLU with up clamped to +-limit and gate clamped from above; a
// routed expert multiplies by its weight before w2. Routed outputs (rounded to act) are summed in
// FP32 in ascending expert order, the shared output is added, one rounding at the end.
// ---------------------
struct ExpertView {
  Weight w1;  // gate [F, D]
  Weight w3;  // up [F, D]
  Weight w2;  // down [D, F]
};
struct ExpertsArgs {
  TensorView x;                        // [T, D] act
  TensorView experts;                  // [T, k] i32 ascending
  TensorView weights;                  // [T, k] f32
  std::span<const ExpertView> routed;  // E
  std::span<const ExpertView> shared;  // 0 or 1
  float limit = 0;
  TensorView y;  // out [T, D] act
};
[[nodiscard]] Status experts(OpContext& ctx, const ExpertsArgs& args);

// Engram rows: hashes of the last n-grams of class ids.
// -------------------------------------------- classes holds, for each sequence, N - 1 look-back
// classes and then its rows' classes; a blocked position (before the start, or in an image span)
// has class -1 and blocks everything behind it.
struct EngramHashArgs {
  StepRows rows;
  TensorView classes;     // [T + S (N - 1)] i32: sequence s starts at row_begin[s] + s (N - 1)
  TensorView multiplier;  // [N] i64
  TensorView prime;       // [N - 1, heads] i64
  TensorView offset;      // [N - 1, heads] i64
  int32_t blocked_class = 0;
  TensorView ids;  // out [T, (N - 1) heads] i32
};
[[nodiscard]] Status engram_hash(OpContext& ctx, const EngramHashArgs& args);

struct EngramGatherArgs {
  TensorView ids;  // [T, columns] i32; empty: the table's rows in their order
  Weight table;    // [rows, width] kFp8Row or f32
  TensorView e;    // out [T, columns * width] act
};
[[nodiscard]] Status engram_gather(OpContext& ctx, const EngramGatherArgs& args);

// x_i += gate_i value; gate_i = sigmoid(signed_sqrt(rms(x_i) . rms(key_i))), 0 in image spans.
// ------
struct EngramInjectArgs {
  StepRows rows;
  TensorView x;         // [T, M, D] act
  TensorView kv;        // [T, (M + 1) D] act: M keys, then the value
  TensorView q_weight;  // [M, D]
  TensorView k_weight;  // [M, D]
  float rms_eps = 0;
  TensorView out;  // out [T, M, D] act; may alias x
};
[[nodiscard]] Status engram_inject(OpContext& ctx, const EngramInjectArgs& args);

// Logits of chosen rows: expand, collapse with `pre`, norm, x W^T in FP32.
// -------------------------
struct HeadArgs {
  TensorView select;  // [N] i32 rows of x
  TensorView x;       // [T, M, D] act
  Pending pending;    // may be empty
  TensorView pre;     // [T, M] f32
  TensorView norm;    // [D]
  float rms_eps = 0;
  Weight weight;      // [V, D] bf16|f32
  TensorView logits;  // out [N, V] f32
};
[[nodiscard]] Status head(OpContext& ctx, const HeadArgs& args);

// One step of a draft's sequential part for N rows: logits = base + Wh We[previous] in FP32, and
// how likely the token drawn from them survives: confidence = Wc [x; We[previous]], before a
// sigmoid. -
struct DraftHeadArgs {
  TensorView select;      // [N] i32 rows of x and base
  TensorView previous;    // [N] i32: the token before, each in [0, V)
  TensorView x;           // [T, D] act: collapsed streams, not normalized
  TensorView base;        // [T, V] f32
  Weight embed;           // We [V, R] bf16|f32
  Weight head;            // Wh [V, R] bf16|f32
  Weight proj;            // Wc [1, D + R] bf16|f32
  TensorView logits;      // out [N, V] f32
  TensorView confidence;  // out [N] f32
};
[[nodiscard]] Status draft_head(OpContext& ctx, const DraftHeadArgs& args);

// What sampling needs of rows of logits: the best k tokens, and the mass of all of them at
// temperature 1 and at the row's own. mass = sum_i exp((x_i - best) / temperature), where a logit
// equal to the best counts 1, even an infinite one. A NaN counts as -inf and -0 as +0, in the
// outputs too.
struct TopLogitsArgs {
  TensorView logits;       // [N, V] f32
  TensorView temperature;  // [N] f32, each above 0
  TensorView value;        // out [N, k] f32, descending; 1 <= k <= kMostTopLogits
  TensorView id;           // out [N, k] i32; ties: the lower id first. Behind V: -inf and -1
  TensorView mass;         // out [N, 2] f32: at 1, at temperature
};
constexpr int64_t kMostTopLogits = 1024;
[[nodiscard]] Status top_logits(OpContext& ctx, const TopLogitsArgs& args);

// The image encoder. ------------------------------------------------------------------------------

// y = residual + f(x W^T + bias). BF16 rounds the biased product, f of it, and the sum.
enum class DenseFunction : uint8_t {
  kIdentity,
  kGelu,    // x Phi(x), with the error function
  kSwiglu,  // of gates (the first half of the outputs) and ups: silu(gate), rounded, times up
};
struct DenseArgs {
  TensorView x;     // [N, in] act
  Weight weight;    // [out, in] bf16|f32
  TensorView bias;  // [out] bf16|f32; empty: none
  DenseFunction function = DenseFunction::kIdentity;
  TensorView residual;  // [N, width] act; empty: none
  TensorView y;  // out [N, width] act, width = out or, of kSwiglu, out / 2; may alias residual
};
[[nodiscard]] Status dense(OpContext& ctx, const DenseArgs& args);

// Attention of every row to all rows, per head of K: softmax(q k^T K^-1/2) v, where q and k are
// rotated in pairs (i, i + K/2) and rounded. Official rounding as in attend(): blocks of 64 rows,
// their probabilities rounded.
struct DenseAttendArgs {
  TensorView qkv;     // [N, 3 H K] act: q of all heads, k, v
  TensorView rope;    // [N, K/2, 2] f32: cos, sin
  int64_t heads = 0;  // H
  TensorView o;       // out [N, H K] act
};
[[nodiscard]] Status dense_attend(OpContext& ctx, const DenseAttendArgs& args);

}  // namespace cachalot::ops
