// Router: scores = sqrt(softplus(x Wg^T / temperature)); the k best of scores + bias, ascending;
// weight = score / (sum of the chosen + 1e-20) * scale, for a single expert score * scale.
//
// in   x [T, D] act, weight [E, D], bias, bias_vl [E] f32, is_image [T] u8, forced [T, k] or none
//
// out  experts [T, k] i32 ascending, weights [T, k] f32
//
// Few tokens (gate_kernel): a block multiplies 16 experts by 8 or 16 tokens, a warp per chunk of
// columns or for several, with weights in rings (device/weights.cuh). The last of a token tile's
// blocks to end has all its logits and selects.
//
//   warp   fill stages 0 .. 2 | wait for x | fill 3 . mma 0 | ...
//   block  chunk sums -> shared, added in order -> logits | count | the last: select
//
// More tokens: the product runs in linear_mma.cu, and select_kernel takes four tokens per block.
//
// Selection: all threads make the scores, then one warp per token takes the maximum k times. Ties
// go to the lower id.
//
// Shared: 8 KiB per warp, 640 B per chunk and 8 tokens; E scores and k ids and scores per token.
// Bound by latencies at decode: weights, x, the count and k rounds of maxima one after the other.
#include "ops/cuda/device/few_tokens.cuh"
#include "ops/cuda/device/reduce.cuh"
#include "ops/cuda/device/top_k.cuh"
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/linear.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kSelectWarps = 4;  // of a block of select_kernel
constexpr int kMostWarps = 20;   // of a block of gate_kernel
constexpr int kStages = 4;
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
  float* logits;  // [T, E]
  int32_t* experts;
  float* weights;
};

// Blocks of gate_kernel that have ended, of every token tile: zero between calls, which follow each
// other on the device.
__device__ unsigned ended[kTokenTiles];

__device__ __forceinline__ float router_score(float logit) {
  return sqrtf(logit > 20.0f ? logit : log1pf(expf(logit)));
}

// Selects for `count` tokens from `token0` on, whose logits are in memory. All threads of a block
// of at least `count` warps; `shared`: (E + 2 k) count floats. bias[1] is that of image tokens.
// Lane l of a token's warp has experts l, l + 32, ..
template <int kPerLane>
__device__ __forceinline__ void select(
    const GateProblem& p, const float* const (&bias)[2], int64_t token0, int count, float* shared) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int e = p.e, k = p.k;
  const int64_t token = token0 + warp;
  const float* offset = warp < count && p.is_image[token] != 0 ? bias[1] : bias[0];
  float* scores = shared;
  for (int i = static_cast<int>(threadIdx.x); i < count * e; i += static_cast<int>(blockDim.x)) {
    scores[i] = router_score(__ldcg(p.logits + token0 * e + i) / p.temperature);
  }
  __syncthreads();
  if (warp >= count) {
    return;
  }
  // Chosen ids, ascending, and their scores.
  auto* ids = reinterpret_cast<int32_t*>(scores + count * e) + warp * 2 * k;
  auto* chosen = reinterpret_cast<float*>(ids + k);
  scores += warp * e;
  if (p.forced != nullptr) {
    for (int i = lane; i < k; i += kWarp) {
      const int32_t id = p.forced[token * k + i];
      ids[i] = id;
      // Ids outside the table occur in padding rows only; they get no weight.
      chosen[i] = id >= 0 && id < e ? scores[id] : 0;
    }
  } else {
    uint32_t order[kPerLane];  // of the biased scores (ordered_bits()); 0: taken, or no expert
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int id = lane + i * kWarp;
      order[i] = 0;
      if (id < e) {
        const float b = scores[id] + offset[id];
        // A NaN must neither win nor vanish: k distinct ids are needed in any case.
        order[i] = b == b ? ordered_bits(b) : 1u;
      }
    }
    uint32_t taken = 0;  // bit i: lane's expert i
    for (int round = 0; round < k; ++round) {
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
        chosen[place] = scores[lane + i * kWarp];
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

// Floats that select() needs, and those of a block of gate_kernel: the chunk sums, then select().
__host__ __device__ constexpr int64_t select_floats(const GateProblem& p, int64_t tokens) {
  return tokens * (p.e + 2 * p.k);
}
template <int kTiles>
__host__ __device__ constexpr int64_t sums_floats(const GateProblem& p) {
  constexpr int64_t kTokens = kTiles * kTokenTile;
  const int64_t tokens = p.tokens < kTokens ? p.tokens : kTokens;
  const int64_t sums = p.d / kChunk * tokens * kTokenPad, select = select_floats(p, tokens);
  return sums > select ? sums : select;
}

template <int kPerLane>
__global__ void __launch_bounds__(kSelectWarps* kWarp)
    select_kernel(const __grid_constant__ GateProblem p) {
  wait_for_previous_kernels();
  allow_next_kernel();
  const int64_t token0 = static_cast<int64_t>(blockIdx.x) * kSelectWarps;
  select<kPerLane>(p,
                   {p.bias, p.bias_vl},
                   token0,
                   static_cast<int>(min(p.tokens - token0, int64_t{kSelectWarps})),
                   reinterpret_cast<float*>(dynamic_shared()));
}

template <class W, int kTiles, int kPerLane>
__global__ void __launch_bounds__(kMostWarps* kWarp, 1)
    gate_kernel(const __grid_constant__ GateProblem p) {
  constexpr int kTokens = kTiles * kTokenTile;
  using Ring = TileRing<W, kStages>;
  __shared__ bool last_block;
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
      p.logits[(token0 + n) * p.e + row + r] = sum;
    }
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last_block = atomicInc(&ended[blockIdx.y], gridDim.x - 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (last_block) {
    select<kPerLane>(p, {biases, biases + p.e}, token0, tokens, sums);
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
  return gate_warps<kTiles>(p) * TileRing<W, kStages>::kBytes +
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
                  4 * select_floats(p, kSelectWarps),
                  p);
  });
}

}  // namespace cachalot::ops::cuda
