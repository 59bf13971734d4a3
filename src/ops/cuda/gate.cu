// Router: scores = sqrt(softplus(x Wg^T / temperature)); the k best of scores + bias, ascending;
// weight = score / (sum of the chosen + 1e-20) * scale.
//
// in   x [T, D] act, weight [E, D], bias, bias_vl [E] f32, is_image [T] u8, forced [T, k] or none
// out  experts [T, k] i32 ascending, weights [T, k] f32
// The product runs in linear_mma.cu (FP32 logits in scratch). Then one warp per token holds scores
// and biased scores in shared memory (2 E floats) and takes the maximum k times; ties go to the
// lower id. Bound by launches at decode; 4 E bytes per token of logits otherwise.
#include <cfloat>

#include "ops/cuda/device/reduce.cuh"
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/linear.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;

struct Choice {
  float score;
  int32_t id;  // -1: none
};

__device__ __forceinline__ Choice better(const Choice& a, const Choice& b) {
  if (a.id < 0 || b.id < 0) {
    return a.id < 0 ? b : a;
  }
  return b.score > a.score || (b.score == a.score && b.id < a.id) ? b : a;
}

__device__ __forceinline__ float router_score(float logit) {
  return sqrtf(logit > 20.0f ? logit : log1pf(expf(logit)));
}

__global__ void __launch_bounds__(kThreads) select_kernel(const float* logits,
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
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float* score = reinterpret_cast<float*>(dynamic_shared()) + warp * (2 * e + k);  // [E]
  float* biased = score + e;                                                       // [E]
  auto* chosen = reinterpret_cast<int32_t*>(biased + e);                           // [k]
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  if (token >= tokens) {
    return;
  }
  const float* offset = is_image[token] != 0 ? bias_vl : bias;
  for (int i = lane; i < e; i += kWarp) {
    const float s = router_score(logits[token * e + i] / temperature);
    score[i] = s;
    // A NaN would win or lose every comparison; it must still leave k distinct ids.
    const float b = s + offset[i];
    biased[i] = b == b ? b : -FLT_MAX;
  }
  __syncwarp();
  if (forced != nullptr) {
    for (int i = lane; i < k; i += kWarp) {
      chosen[i] = forced[token * k + i];
    }
  } else {
    for (int round = 0; round < k; ++round) {
      Choice best{0.0f, -1};
      for (int i = lane; i < e; i += kWarp) {
        if (biased[i] == biased[i]) {  // NaN marks the chosen
          best = better(best, {biased[i], i});
        }
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        const Choice other{__shfl_xor_sync(kAllLanes, best.score, step),
                           __shfl_xor_sync(kAllLanes, best.id, step)};
        best = better(best, other);
      }
      if (lane == 0) {
        biased[best.id] = NAN;
        // Insertion keeps the list ascending.
        int place = round;
        while (place > 0 && chosen[place - 1] > best.id) {
          chosen[place] = chosen[place - 1];
          --place;
        }
        chosen[place] = best.id;
      }
      __syncwarp();
    }
  }
  __syncwarp();
  // Ids outside the table occur in padding rows only; they get no weight.
  const auto chosen_score = [&](int i) {
    return chosen[i] >= 0 && chosen[i] < e ? score[chosen[i]] : 0.0f;
  };
  float sum = 0;
  for (int i = 0; i < k; ++i) {
    sum += chosen_score(i);
  }
  for (int i = lane; i < k; i += kWarp) {
    experts[token * k + i] = chosen[i];
    weights[token * k + i] = chosen_score(i) / (sum + 1e-20f) * scale;
  }
}

}  // namespace

Status gate(OpContext& ctx, const GateArgs& args) {
  const int64_t t = args.x.dim(0), e = args.weight.out, k = args.experts.dim(1);
  Scratch scratch(ctx);
  auto* logits = scratch.array<float>(t * e);
  CACHALOT_RETURN_IF_ERROR(scratch.status("gate"));
  const LinearTarget target{&args.weight, {logits, DType::kF32, {t, e}, Device::kCuda}};
  CACHALOT_RETURN_IF_ERROR(
      linear_any(ctx, {.x = args.x, .targets = {&target, 1}, .quantize_input = false}));
  return launch(ctx,
                "gate_select",
                select_kernel,
                extent(ceil_div(t, kWarps)),
                kThreads,
                kWarps * (2 * e + k) * static_cast<int64_t>(sizeof(float)),
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
