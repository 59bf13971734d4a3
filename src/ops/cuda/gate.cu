// Router: scores = sqrt(softplus(x Wg^T / temperature)); the k best of scores + bias, ascending;
// weight = score / (sum of the chosen + 1e-20) * scale, for a single expert score * scale.
//
// in   x [T, D] act, weight [E, D], bias, bias_vl [E] f32, is_image [T] u8, forced [T, k] or none
//
// out  experts [T, k] i32 ascending, weights [T, k] f32
//
// The product runs in linear_mma.cu (FP32 logits in scratch). Then a block of 4 warps makes the
// scores of 4 tokens, all threads on all of them, and one warp per token takes the maximum k times.
// Ties go to the lower id.
//
// Shared: E scores and k ids and scores per token. Bound by launches and latency at decode; 4 E
// bytes per token otherwise.
#include "ops/cuda/device/reduce.cuh"
#include "ops/cuda/device/top_k.cuh"
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/linear.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kWarps = 4;  // of a block
constexpr int64_t kMostExperts = 1024;

__device__ __forceinline__ float router_score(float logit) {
  return sqrtf(logit > 20.0f ? logit : log1pf(expf(logit)));
}

// Lane l of a token's warp has experts l, l + 32, ..
template <int kPerLane>
__global__ void __launch_bounds__(kWarps* kWarp) select_kernel(const float* logits,
                                                               const float* bias,
                                                               const float* bias_vl,
                                                               const uint8_t* is_image,
                                                               const int32_t* forced,
                                                               int64_t tokens,
                                                               int e,
                                                               int k,
                                                               float temperature,
                                                               float scale,
                                                               int32_t* experts,
                                                               float* weights) {
  wait_for_previous_kernels();
  allow_next_kernel();
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t token0 = static_cast<int64_t>(blockIdx.x) * kWarps, token = token0 + warp;
  auto* scores = reinterpret_cast<float*>(dynamic_shared());
  const int count = static_cast<int>(min(tokens - token0, int64_t{kWarps})) * e;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kWarps * kWarp) {
    scores[i] = router_score(logits[token0 * e + i] / temperature);
  }
  __syncthreads();
  if (token >= tokens) {
    return;
  }
  // Chosen ids, ascending, and their scores.
  auto* ids = reinterpret_cast<int32_t*>(scores + kWarps * e) + warp * 2 * k;
  auto* chosen = reinterpret_cast<float*>(ids + k);
  scores += warp * e;
  if (forced != nullptr) {
    for (int i = lane; i < k; i += kWarp) {
      const int32_t id = forced[token * k + i];
      ids[i] = id;
      // Ids outside the table occur in padding rows only; they get no weight.
      chosen[i] = id >= 0 && id < e ? scores[id] : 0;
    }
  } else {
    uint32_t order[kPerLane];  // of the biased scores (ordered_bits()); 0: taken, or no expert
    const float* offset = is_image[token] != 0 ? bias_vl : bias;
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
    experts[token * k + i] = ids[i];
    weights[token * k + i] = chosen[i] / divisor * scale;
  }
}

auto select_kernel_for(int64_t experts) {
  return experts <= 4 * kWarp    ? select_kernel<4>
         : experts <= 12 * kWarp ? select_kernel<12>
                                 : select_kernel<32>;
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
  const LinearTarget target{&args.weight, {logits, DType::kF32, {t, e}, Device::kCuda}};
  CACHALOT_RETURN_IF_ERROR(
      linear_any(ctx, {.x = args.x, .targets = {&target, 1}, .quantize_input = false}));
  return launch(ctx,
                "gate_select",
                select_kernel_for(e),
                extent(ceil_div(t, int64_t{kWarps})),
                kWarps * kWarp,
                kWarps * (e + 2 * k) * static_cast<int64_t>(sizeof(float)),
                logits,
                args.bias.as<float>(),
                args.bias_vl.as<float>(),
                args.rows.is_image.as<uint8_t>(),
                static_cast<const int32_t*>(args.forced.data),
                t,
                static_cast<int>(e),
                static_cast<int>(k),
                args.temperature,
                args.scale,
                args.experts.as<int32_t>(),
                args.weights.as<float>());
}

}  // namespace cachalot::ops::cuda
