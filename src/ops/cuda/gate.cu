// Router: scores = sqrt(softplus(x Wg^T / temperature)); the k best of scores + bias, ascending;
// weight = score / (sum of the chosen + 1e-20) * scale, for a single expert score * scale.
//
// in   x [T, D] act, weight [E, D], bias, bias_vl [E] f32, is_image [T] u8, forced [T, k] or none
//
// out  experts [T, k] i32 ascending, weights [T, k] f32
//
// Few tokens (gate_kernel): a block multiplies 16 experts by 8 or 16 tokens, a warp per chunk of
// columns or for several, with weights in rings (device/weights.cuh). The last of a token tile's
// blocks to end has all its scores and selects.
//
//   warp   fill all stages but one | wait for x | fill the last . mma 0 | ...
//   block  chunk sums -> shared, added in order -> scores | count | the last: select
//
// More tokens: the product runs in linear_mma.cu, and select_kernel takes four tokens per block,
// whose logits it makes scores of.
//
// Selection: one warp per token finds the k-th of the biased scores by k rounds of maxima below the
// one before, and takes what reaches it; where some are equal, it takes the maximum k times
// instead. Ties go to the lower id.
//
// Shared: 8 or 10 KiB per warp, 640 B per chunk and 8 tokens; k ids and scores per token. Bound by
// latencies at decode: x, the count, and the selection's some 700 instructions of a warp.
#include "ops/cuda/device/few_tokens.cuh"
#include "ops/cuda/device/last_block.cuh"
#include "ops/cuda/device/reduce.cuh"
#include "ops/cuda/device/top_k.cuh"
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/linear.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kSelectWarps = 4;  // of a block of select_kernel
constexpr int kMostWarps = 20;   // of a block of gate_kernel
// Of the weights' rings; with one more than the steps of a chunk they are all under way before x is
// waited for.
template <int kTiles>
constexpr int kStages = kTiles == 1 ? 5 : 4;
constexpr int64_t kMostExperts = 1024;
constexpr int64_t kFewTokens = 64;  // of gate_kernel
constexpr int64_t kTokenTiles = kFewTokens / kTokenTile;

struct GateProblem {
  const Bf16* x;
  const uint8_t* weight;
  const float* bias;
  const float* bias_vl;
  const uint8_t* is_image;
  const int32_t* forced;
  int64_t tokens;
  int64_t d;
  int e;
  int k;
  float temperature;
  float scale;
  float* logits;  // [T, E]; gate_kernel leaves scores there
  int32_t* experts;
  float* weights;
};

// Blocks of gate_kernel that have ended, of every token tile: zero between calls, which follow each
// other on the device.
__device__ unsigned ended[kTokenTiles];

__device__ __forceinline__ float router_score(float logit) {
  return sqrtf(logit > 20.0f ? logit : log1pf(expf(logit)));
}

// A warp selects for `token`, whose scores are in memory, or its logits unless kScored. `shared`
// has room for 2 k words of the warp's. bias[1] is that of image tokens. Lane l has experts
// l, l + 32, ..
template <bool kScored, int kPerLane>
__device__ __forceinline__ void select(const GateProblem& p,
                                       const float* const (&bias)[2],
                                       int64_t token,
                                       float* shared) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int e = p.e, k = p.k;
  const float* row = p.logits + token * e;
  const auto score_of = [&](int id) {
    const float v = __ldcg(row + id);
    return kScored ? v : router_score(v / p.temperature);
  };
  // Chosen ids, ascending, and their scores.
  auto* ids = reinterpret_cast<int32_t*>(shared);
  float* chosen = shared + k;
  if (p.forced != nullptr) {
    for (int i = lane; i < k; i += kWarp) {
      const int32_t id = p.forced[token * k + i];
      ids[i] = id;
      // Ids outside the table occur in padding rows only; they get no weight.
      chosen[i] = id >= 0 && id < e ? score_of(id) : 0;
    }
  } else {
    const float* offset = p.is_image[token] != 0 ? bias[1] : bias[0];
    float score[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      score[i] = score_of(min(lane + i * kWarp, e - 1));
    }
    uint32_t order[kPerLane];  // of the biased scores (ordered_bits()); 0: taken, or no expert
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int id = lane + i * kWarp;
      const float b = score[i] + offset[min(id, e - 1)];
      // A NaN must neither win nor vanish: k distinct ids are needed in any case.
      order[i] = id >= e ? 0u : b == b ? ordered_bits(b) : 1u;
    }
    // The k-th of the values that occur.
    uint32_t least = 0xFFFFFFFFu;
#pragma unroll 1
    for (int round = 0; round < k; ++round) {
      uint32_t best = 1;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        best = max(best, order[i] < least ? order[i] : 0u);
      }
      least = __reduce_max_sync(kAllLanes, best);
    }
    uint32_t taken = 0;  // bit i: lane's expert i
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      taken |= order[i] >= least ? 1u << i : 0u;
    }
    const bool ties = __reduce_add_sync(kAllLanes, __popc(taken)) != static_cast<unsigned>(k);
    taken = ties ? 0 : taken;
#pragma unroll 1
    for (int round = ties ? 0 : k; round < k; ++round) {
      uint32_t best = 0;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        best = max(best, order[i]);
      }
      best = __reduce_max_sync(kAllLanes, best);
      auto lowest = static_cast<uint32_t>(kMostExperts);
#pragma unroll
      for (int i = kPerLane - 1; i >= 0; --i) {
        lowest = order[i] == best ? static_cast<uint32_t>(lane + i * kWarp) : lowest;
      }
      const auto id = static_cast<int>(__reduce_min_sync(kAllLanes, lowest));
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (lane + i * kWarp == id) {
          order[i] = 0;
          taken |= 1u << i;
        }
      }
    }
    int before = 0;  // chosen experts of lower ids
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const uint32_t lanes = __ballot_sync(kAllLanes, (taken >> i & 1u) != 0);
      if ((taken >> i & 1u) != 0) {
        const int place = before + __popc(lanes & ((1u << lane) - 1));
        ids[place] = lane + i * kWarp;
        chosen[place] = score[i];
      }
      before += __popc(lanes);
    }
  }
  __syncwarp();
  float sum = 0;
  for (int i = 0; i < k; ++i) {
    sum += chosen[i];
  }
  const float divisor = k > 1 ? sum + 1e-20f : 1.0f;
  for (int i = lane; i < k; i += kWarp) {
    p.experts[token * k + i] = ids[i];
    p.weights[token * k + i] = chosen[i] / divisor * p.scale;
  }
}

// Floats of a block of gate_kernel: the chunk sums, then what select() needs.
template <int kTiles>
__host__ __device__ constexpr int64_t sums_floats(const GateProblem& p) {
  constexpr int64_t kTokens = kTiles * kTokenTile;
  const int64_t tokens = p.tokens < kTokens ? p.tokens : kTokens;
  const int64_t sums = p.d / kChunk * tokens * kTokenPad, select = tokens * 2 * p.k;
  return sums > select ? sums : select;
}

template <int kPerLane>
__global__ void __launch_bounds__(kSelectWarps* kWarp)
    select_kernel(const __grid_constant__ GateProblem p) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kSelectWarps + warp;
  if (token < p.tokens) {
    auto* shared = reinterpret_cast<float*>(dynamic_shared()) + warp * 2 * p.k;
    select<false, kPerLane>(p, {p.bias, p.bias_vl}, token, shared);
  }
}

template <class W, int kTiles, int kPerLane>
__global__ void __launch_bounds__(kMostWarps* kWarp, 1)
    gate_kernel(const __grid_constant__ GateProblem p) {
  constexpr int kTokens = kTiles * kTokenTile;
  using Ring = TileRing<W, kStages<kTiles>>;
  const Lane lane;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int chunks = static_cast<int>(p.d / kChunk);
  const int first = warp * chunks / warps, last = (warp + 1) * chunks / warps;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kTileRows;
  auto* sums = reinterpret_cast<float*>(dynamic_shared() + warps * Ring::kBytes);
  TileRows rows = tile_rows<W>(p.weight, nullptr, row, p.e, p.d, lane);
  seek<W>(rows, first * kChunk);
  Ring ring(dynamic_shared() + warp * Ring::kBytes, rows, (last - first) * (kChunk / W::kStep));
  auto* biases = sums + sums_floats<kTiles>(p);  // [2, E]
  for (int i = static_cast<int>(threadIdx.x); i < p.e; i += static_cast<int>(blockDim.x)) {
    biases[i] = p.bias[i];
    biases[p.e + i] = p.bias_vl[i];
  }
  wait_for_previous_kernels();
  allow_next_kernel();
  const int64_t token0 = static_cast<int64_t>(blockIdx.y) * kTokens;
  const int tokens = static_cast<int>(min(p.tokens - token0, int64_t{kTokens}));
  const uint16_t* input[kTiles];
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    const int n = m * kTokenTile + lane.g;
    input[m] = n < tokens ? reinterpret_cast<const uint16_t*>(p.x + (token0 + n) * p.d +
                                                              first * kChunk + 8 * lane.t)
                          : nullptr;
  }
  run_chunks(ring, input, last - first, lane, [&](int c, const float (&part)[kTiles][4]) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = m * kTokenTile + 2 * lane.t + i % 2;
        if (n < tokens) {
          sums[((first + c) * tokens + n) * kTokenPad + lane.g + 8 * (i / 2)] = part[m][i];
        }
      }
    }
  });
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < tokens * kTileRows;
       i += static_cast<int>(blockDim.x)) {
    const int n = i / kTileRows, r = i % kTileRows;
    const float sum = sum_of_chunks(sums, chunks, tokens, n, r);
    if (row + r < p.e) {
      p.logits[(token0 + n) * p.e + row + r] = router_score(sum / p.temperature);
    }
  }
  if (last_block(&ended[blockIdx.y], gridDim.x) && warp < tokens) {
    select<true, kPerLane>(p, {biases, biases + p.e}, token0 + warp, sums + warp * 2 * p.k);
  }
}

// Calls body.operator()<experts per lane>().
template <class Body>
Status with_experts(int64_t experts, const Body& body) {
  return experts <= 4 * kWarp    ? body.template operator()<4>()
         : experts <= 12 * kWarp ? body.template operator()<12>()
                                 : body.template operator()<32>();
}

// The blocks of gate_kernel: a warp per chunk or for several, and at least one per token.
template <int kTiles>
int gate_warps(const GateProblem& p) {
  return static_cast<int>(std::clamp<int64_t>(p.d / kChunk, kTiles * kTokenTile, kMostWarps));
}
template <class W, int kTiles>
int64_t gate_bytes(const GateProblem& p) {
  return gate_warps<kTiles>(p) * TileRing<W, kStages<kTiles>>::kBytes +
         (sums_floats<kTiles>(p) + 2 * p.e) * static_cast<int64_t>(sizeof(float));
}

template <class W, int kTiles>
Status launch_gate(const OpContext& ctx, const GateProblem& p) {
  return with_experts(p.e, [&]<int kPerLane>() {
    return launch(
        ctx,
        "gate",
        gate_kernel<W, kTiles, kPerLane>,
        dim3(extent(ceil_div(p.e, kTileRows)), extent(ceil_div(p.tokens, kTiles * kTokenTile))),
        gate_warps<kTiles>(p) * kWarp,
        gate_bytes<W, kTiles>(p),
        p);
  });
}

}  // namespace

Status gate(OpContext& ctx, const GateArgs& args) {
  const int64_t t = args.x.dim(0), e = args.weight.out, k = args.experts.dim(1);
  if (e > kMostExperts) {
    return {Code::kUnimplemented, "op gate: more than 1024 experts"};
  }
  Scratch scratch(ctx);
  auto* logits = scratch.array<float>(t * e);
  CACHALOT_RETURN_IF_ERROR(scratch.status("gate"));
  const GateProblem p{.x = static_cast<const Bf16*>(args.x.data),
                      .weight = static_cast<const uint8_t*>(args.weight.values.data),
                      .bias = args.bias.as<float>(),
                      .bias_vl = args.bias_vl.as<float>(),
                      .is_image = args.rows.is_image.as<uint8_t>(),
                      .forced = static_cast<const int32_t*>(args.forced.data),
                      .tokens = t,
                      .d = args.x.dim(1),
                      .e = static_cast<int>(e),
                      .k = static_cast<int>(k),
                      .temperature = args.temperature,
                      .scale = args.scale,
                      .logits = logits,
                      .experts = args.experts.as<int32_t>(),
                      .weights = args.weights.as<float>()};
  const LinearTarget target{&args.weight, {logits, DType::kF32, {t, e}, Device::kCuda}};
  const LinearArgs product{.x = args.x, .targets = {&target, 1}, .quantize_input = false};
  if (args.weight.format == WeightFormat::kBF16 && t <= kFewTokens &&
      gate_bytes<Bf16Weights, 2>(p) <= kSharedCapacity && linear_mma_supports(product)) {
    return t <= kTokenTile ? launch_gate<Bf16Weights, 1>(ctx, p)
                           : launch_gate<Bf16Weights, 2>(ctx, p);
  }
  CACHALOT_RETURN_IF_ERROR(linear_any(ctx, product));
  return with_experts(e, [&]<int kPerLane>() {
    return launch(ctx,
                  "gate_select",
                  select_kernel<kPerLane>,
                  extent(ceil_div(t, kSelectWarps)),
                  kSelectWarps * kWarp,
                  int64_t{kSelectWarps} * 2 * k * static_cast<int64_t>(sizeof(float)),
                  p);
  });
}

}  // namespace cachalot::ops::cuda
