// Linears and the router.
#include <array>
#include <vector>

#include "ops/cpu/kernels.h"
#include "ops/cpu/product.h"

namespace cachalot::ops::cpu {
namespace {

// The best k of scores + bias (ties: the lower index), ascending.
void choose(const float* scores, const float* bias, int64_t n, int64_t k, int32_t* chosen) {
  // Insertion into a short descending list; an equal later value stays behind an earlier one.
  std::vector<float> best(static_cast<size_t>(k));
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float value = scores[i] + bias[i];
    int64_t at = count;
    while (at > 0 && best[static_cast<size_t>(at - 1)] < value) {
      --at;
    }
    if (at == k) {
      continue;
    }
    count = std::min(count + 1, k);
    for (int64_t j = count - 1; j > at; --j) {
      best[static_cast<size_t>(j)] = best[static_cast<size_t>(j - 1)];
      chosen[j] = chosen[j - 1];
    }
    best[static_cast<size_t>(at)] = value;
    chosen[at] = static_cast<int32_t>(i);
  }
  std::sort(chosen, chosen + k);
}

}  // namespace

Status linear(OpContext& ctx, const LinearArgs& args) {
  Scratch scratch(ctx);
  InputRows inputs(ctx, scratch, args.x, args.groups, args.quantize_input);
  std::vector<Product> products;
  for (const LinearTarget& target : args.targets) {
    products.push_back({target.weight, inputs.get(*target.weight), target.y, args.groups});
  }
  run_products(ctx, products);
  return {};
}

Status gate(OpContext& ctx, const GateArgs& args) {
  const int64_t t = args.x.dim(0), e = args.weight.out, k = args.experts.dim(1);
  Scratch scratch(ctx);
  InputRows inputs(ctx, scratch, args.x, 1, false);
  float* scores = scratch.array<float>(t * e);
  const std::array<Product, 1> product = {
      Product{&args.weight, inputs.get(args.weight), {scores, DType::kF32, {t, e}}}};
  run_products(ctx, product);
  parallel_for(ctx, t, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* score = scores + row * e;
      router_scores(score, e, args.temperature);
      int32_t* chosen = args.experts.as<int32_t>() + row * k;
      if (args.forced.empty()) {
        const bool image = args.rows.is_image.as<uint8_t>()[row] != 0;
        choose(score, (image ? args.bias_vl : args.bias).as<float>(), e, k, chosen);
      } else {
        std::copy_n(args.forced.as<int32_t>() + row * k, k, chosen);
      }
      float sum = 0;
      for (int64_t i = 0; i < k; ++i) {
        sum += score[chosen[i]];
      }
      // The addend keeps a row whose scores all underflow at zero weights instead of NaN.
      const float divisor = k > 1 ? sum + 1e-20f : 1.0f;
      for (int64_t i = 0; i < k; ++i) {
        args.weights.as<float>()[row * k + i] = score[chosen[i]] / divisor * args.scale;
      }
    }
  });
  return {};
}

}  // namespace cachalot::ops::cpu
