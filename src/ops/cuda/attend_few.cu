// Attention of few tokens over at most 640 keys: attend_mma.cu in one pass over a cluster of eight
// blocks, with the same bits.
//
// in   as attend_mma.cu: q [T, H, 512] bf16, window rows (528 B) and main rows (288 B), 16-byte
//      aligned; selected [T, k]; sink [H] f32
// out  o [T, H, 512] bf16, rotated back
//
// A cluster takes 16 or 32 heads of a token. Its blocks split the keys for the scores, 32 or 80
// each, and the columns for the values, 64 each; a block unpacks its keys whole and its columns of
// all keys. What follows, once per token:
//
//   all warps         rows found; Q rotated; own keys unpacked
//   warpgroup 0       S = Q K^T -> maxima to all blocks -> P, rounded against the running maximum
//                     of blocks of 64 keys, and its sums to all blocks -> O = O * rescale + P V
//   the other warps   columns of all keys unpacked meanwhile
//
// All sums have the order of attend_mma.cu: two of 256 columns per score, of 16 keys in the sums of
// probabilities, and along the keys in the values.
//
// Bound: latency. Of the 21,200 cycles (12 us) of a block with 128 + 512 keys, 3,100 found the rows
// (three loads, each of which needs the one before; the first now runs behind the kernels in
// front), 5,400 unpack the own keys, 1,700 score them, 1,000 exchange maxima, 1,100 make and send
// P, 6,500 sum the values (the tensor cores take 1,300 of them) and 2,400 store them.
// Measured on an H200: 14.2 us for one token, 16.3 for six (32 heads per cluster); window only, 6.4
// and 7.1.
#include "ops/cuda/attend_rows.cuh"
#include "ops/cuda/attend_tiles.cuh"
#include "ops/cuda/device/cluster.cuh"

namespace cachalot::ops::cuda {
namespace attention {
namespace {

constexpr int kRanks = 8;  // blocks of a cluster
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kScorers = 4;  // warps, of warpgroup 0
constexpr int kColumns = kDim / kRanks;
static_assert(kColumns == 64);
// Clusters that run at once. Their blocks share a GPC; wherever 132 multiprocessors lie in GPCs of
// at most 18, in pairs, 12 and one more fit.
constexpr int64_t kClusters = 12;

// Barriers of all threads, of which only the first warpgroup waits, and of the first warpgroup.
constexpr int kKeysUnpacked = 1, kValuesUnpacked = 2, kScoresStored = 3;

// Of kGroups groups of 16 keys per block.
template <int kHeadRows, int kGroups>
struct Shared {
  static constexpr int kOwnKeys = 16 * kGroups, kKeys = kRanks * kOwnKeys;
  static constexpr int kBlocks = kKeys / kKeyBlock;
  struct Factors {
    uint8_t q[kTiles][kHeadRows * 128];  // [512 / 64][heads][64] bf16, swizzled
    uint8_t k[kTiles][kOwnKeys * 128];   // [512 / 64][keys][64] bf16, swizzled
  };
  struct alignas(16) Scores {            // of a block
    uint8_t p[kGroups][kHeadRows * 32];  // [heads][16 keys] bf16, as wgmma_operand_narrow() says
    float sum[kGroups][kHeadRows];
  };
  union {
    Factors factors;  // until all blocks have their scores
    Scores scores[kRanks];
  };
  uint8_t v[kKeys * 128];  // [keys][64] bf16, swizzled
  const uint8_t* rows[kKeys];
  uint8_t output[kHeadRows / 16][kOutputBuffer];
  // Of the scores of a block's keys that lie in the first and in the second block of 64 keys which
  // they touch.
  float2 best[kRanks][kHeadRows];
  float rescale[kBlocks][64];  // of the sums so far before a block of 64 keys
  uint64_t best_known, scored[kRanks];
};

// 16 columns of a row, as stored.
struct RawColumns {
  uint4 codes;  // x and y alone in a main row
  uint32_t scale;
};

struct Keys {
  int window_keys, keys;
};

// Where a lane's columns come from.
struct Source {
  const uint8_t* row;
  bool is_window;
  bool is_absent;  // past the last key: zeros

  template <int kKeys>
  __device__ __forceinline__ Source(const Keys& keys, const uint8_t* const (&rows)[kKeys], int key)
      : row(rows[key]), is_window(key < keys.window_keys), is_absent(key >= keys.keys) {}
};

// Not as read-only data: the kernel before this one may write rows after this one has started.
__device__ __forceinline__ RawColumns load_columns(const Source& from, int index) {
  RawColumns raw{make_uint4(0, 0, 0, 0), 0};
  if (from.is_window) {
    raw.codes = __ldca(reinterpret_cast<const uint4*>(from.row + 16 * index));
    raw.scale = __ldca(from.row + kDim + index / 2);
  } else if (!from.is_absent) {
    const uint2 codes = __ldca(reinterpret_cast<const uint2*>(from.row + 8 * index));
    raw.codes = make_uint4(codes.x, codes.y, 0, 0);
    raw.scale = __ldca(from.row + kDim / 2 + index);
  }
  return raw;
}
// Two 16-byte pieces from byte `at` of a tile on. A row that is absent becomes zeros.
__device__ __forceinline__ void store_columns(const RawColumns& raw,
                                              bool is_window,
                                              uint8_t* tile,
                                              int at) {
  if (is_window) {
    const uint32_t multiplier =
        raw.scale == 255u ? 0x7FC07FC0u : ((raw.scale + 113u) << 7) * 0x00010001u;
    store_piece_at(tile, at, 0, unpack_window(raw.codes.x, raw.codes.y, multiplier));
    store_piece_at(tile, at, 1, unpack_window(raw.codes.z, raw.codes.w, multiplier));
  } else {
    const uint32_t multiplier = __byte_perm(main_multipliers(raw.scale), 0, 0x1010);
    store_piece_at(tile, at, 0, unpack_main(raw.codes.x, multiplier));
    store_piece_at(tile, at, 1, unpack_main(raw.codes.y, multiplier));
  }
}

// Writes where the selected keys of a token lie; all keys. All threads. `entry` is that of the
// thread.
template <int kKeys>
__device__ __forceinline__ int find_selected(const AttendProblem& a,
                                             int64_t token,
                                             const Places& places,
                                             int32_t entry,
                                             const uint8_t* (&rows)[kKeys]) {
  const int thread = static_cast<int>(threadIdx.x), width = static_cast<int>(a.width);
  // Ids are ascending with -1 behind them.
  int keys = places.window_keys, i = thread;
  do {
    if (entry >= 0) {
      rows[places.window_keys + i] = places.main_row(static_cast<uint32_t>(entry));
    }
    keys += __syncthreads_count(entry >= 0);
    i += kThreads;
    entry = i < width ? a.selected[token * width + i] : -1;
  } while (i - thread < width);
  return keys;
}

// Scores of the block's keys, in units of log2, minus infinity from key `count` of them on.
template <int kHeadRows, int kGroups>
__device__ __forceinline__ void score_keys(
    const typename Shared<kHeadRows, kGroups>::Factors& factors,
    int count,
    float (&s)[2 * kGroups][4]) {
  constexpr float kScale = kCacheScale * kLog2e * 0.04419417382415922f;  // 512^-1/2
  constexpr int kSteps = kTiles * 4;
  const Lane place;
  const uint64_t q = wgmma_operand(factors.q), k = wgmma_operand(factors.k);
  const auto q_at = [&](int c) { return q + operand_bytes(c / 4 * kHeadRows * 128 + c % 4 * 32); };
  const auto k_at = [&](int c) {
    return k + operand_bytes(c / 4 * kGroups * 16 * 128 + c % 4 * 32);
  };
  float upper[2 * kGroups][4];
  wgmma_fence();
  wgmma_bf16<false>(s, q_at(0), k_at(0));
#pragma unroll
  for (int c = 1; c < kSteps / 2; ++c) {
    wgmma_bf16<true>(s, q_at(c), k_at(c));
  }
  wgmma_bf16<false>(upper, q_at(kSteps / 2), k_at(kSteps / 2));
#pragma unroll
  for (int c = kSteps / 2 + 1; c < kSteps; ++c) {
    wgmma_bf16<true>(upper, q_at(c), k_at(c));
  }
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int n = 0; n < 2 * kGroups; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = 8 * n + 2 * place.t + i % 2;
      s[n][i] = key < count ? (s[n][i] + upper[n][i]) * kScale : -INFINITY;
    }
  }
}

// Maxima of a thread's heads, g and g + 8 of its warp: up to the blocks of 64 keys that the block's
// own keys touch, and of all keys.
struct Maxima {
  float own[2][2] = {};
  float all[2] = {-1e30f, -1e30f};
};

// Tells all blocks the maxima of the own keys, waits for theirs.
template <int kHeadRows, int kGroups>
__device__ __forceinline__ void find_maxima(Shared<kHeadRows, kGroups>& shared,
                                            int rank,
                                            int head,
                                            const float (&s)[2 * kGroups][4],
                                            Maxima& maxima) {
  constexpr int kBlocks = Shared<kHeadRows, kGroups>::kBlocks;
  const Lane place;
  const int first_group = kGroups * rank % 4;                           // in its block of 64 keys
  float mine[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};  // [heads][parts]
#pragma unroll
  for (int n = 0; n < 2 * kGroups; ++n) {
    const bool second = first_group + n / 2 >= 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mine[i / 2][0] = second ? mine[i / 2][0] : fmaxf(mine[i / 2][0], s[n][i]);
      mine[i / 2][1] = second ? fmaxf(mine[i / 2][1], s[n][i]) : mine[i / 2][1];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float& value = mine[i / 2][i % 2];
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 1));
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 2));
  }
#pragma unroll
  for (int i = 0; i < 2 * kRanks / 4; ++i) {
    const int h = i % 2, to = place.t + i / 2 * 4;
    remote_store_counted(
        &shared.best[rank][head + 8 * h], mine[h][0], mine[h][1], &shared.best_known, to);
  }
  cluster_barrier_wait(&shared.best_known, 0);
  // Lanes t follow the maxima of head g + 8 (t % 2) through the blocks of 64 keys.
  const int h = place.t % 2;
  float of_block[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    of_block[b] = -1e30f;
  }
#pragma unroll
  for (int j = 0; j < kRanks; ++j) {
    const float2 other = shared.best[j][head + 8 * h];
    const int first = kGroups * j / 4, last = (kGroups * j + kGroups - 1) / 4;
    of_block[first] = fmaxf(of_block[first], other.x);
    of_block[last] = first == last ? of_block[last] : fmaxf(of_block[last], other.y);
  }
  float best = -1e30f, own[2] = {best, best};
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const float next = fmaxf(best, of_block[b]);
    if (place.t < 2) {
      shared.rescale[b][head + 8 * h] = exp2_flushed(best - next);
    }
    best = next;
    own[0] = b == kGroups * rank / 4 ? best : own[0];
    own[1] = b == kGroups * rank / 4 + 1 ? best : own[1];
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int from = static_cast<int>(threadIdx.x) % 32 / 4 * 4 + i;
    maxima.own[0][i] = __shfl_sync(kAllLanes, own[0], from);
    maxima.own[1][i] = __shfl_sync(kAllLanes, own[1], from);
    maxima.all[i] = __shfl_sync(kAllLanes, best, from);
  }
}

// Probabilities of the own keys and their sums of 16 keys.
template <int kHeadRows, int kGroups>
__device__ __forceinline__ void exponentiate(typename Shared<kHeadRows, kGroups>::Scores& to,
                                             int rank,
                                             int head,
                                             const float (&s)[2 * kGroups][4],
                                             const Maxima& maxima) {
  const Lane place;
  const int first_group = kGroups * rank % 4;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float best = first_group + g >= 4 ? maxima.own[1][h] : maxima.own[0][h];
      float total = 0;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float p0 = exp2_flushed(s[2 * g + n][2 * h] - best);
        const float p1 = exp2_flushed(s[2 * g + n][2 * h + 1] - best);
        total += p0;
        total += p1;
        *reinterpret_cast<uint32_t*>(to.p[g] + (head / 8 + h) * 256 + n * 128 + head % 8 * 16 +
                                     4 * place.t) = bf16_pair(p0, p1);
      }
      total += __shfl_xor_sync(kAllLanes, total, 1);
      total += __shfl_xor_sync(kAllLanes, total, 2);
      if (place.t == 0) {
        to.sum[g][head + 8 * h] = total;
      }
    }
  }
}

// acc = acc * rescale + P V over all keys; the sums of the probabilities.
template <int kHeadRows, int kGroups>
__device__ __forceinline__ void sum_values(Shared<kHeadRows, kGroups>& shared,
                                           int rank,
                                           int head,
                                           int keys,
                                           float (&acc)[8][4],
                                           float (&sum)[2]) {
  const uint64_t v = wgmma_operand_transposed(shared.v, 0);
  const int blocks = (keys + kKeyBlock - 1) / kKeyBlock;
  int known = -1;  // the last block whose scores are here
  float rescale[2];
  // Waits for the scores of a block of 64 keys.
  const auto receive = [&](int b) {
#pragma unroll 1
    for (; known < (4 * b + 3) / kGroups; ++known) {
      if (known + 1 != rank) {
        barrier_wait(&shared.scored[known + 1], 0);
      }
    }
    float total[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int g = 4 * b + i;
      total[0] += shared.scores[g / kGroups].sum[g % kGroups][head % kHeadRows];
      total[1] += shared.scores[g / kGroups].sum[g % kGroups][head % kHeadRows + 8];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rescale[h] = shared.rescale[b][head + 8 * h];
      sum[h] = fmaf(sum[h], rescale[h], total[h]);
    }
  };
  const auto multiply = [&](int b) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int g = 4 * b + i;
      wgmma_bf16_transposed(acc,
                            wgmma_operand_narrow(shared.scores[g / kGroups].p[g % kGroups]),
                            v + static_cast<uint64_t>(g) * operand_bytes(16 * 128));
    }
    wgmma_commit();
  };
  if (blocks == 0) {
    return;
  }
  receive(0);
#pragma unroll 1
  for (int b = 0; b < blocks - 1; ++b) {
    multiply(b);
    receive(b + 1);
    wgmma_wait<0>();
    rescale_sums(acc, rescale[0], rescale[1]);
  }
  multiply(blocks - 1);
  wgmma_wait<0>();
}

template <int kHeadRows, int kGroups>
__global__ void __cluster_dims__(kRanks, 1, 1) __launch_bounds__(kThreads, 1)
    attend_few_kernel(const __grid_constant__ AttendProblem a) {
  using Memory = Shared<kHeadRows, kGroups>;
  auto& shared = *reinterpret_cast<Memory*>(dynamic_shared());
  allow_next_kernel();
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    barrier_init(&shared.best_known, 1);
    for (int j = 0; j < kRanks; ++j) {
      barrier_init(&shared.scored[j], 1);
    }
    cluster_barriers_fence();
    barrier_arrive_expect(&shared.best_known, sizeof(shared.best));
    for (int j = 0; j < kRanks; ++j) {
      if (j != rank) {
        barrier_arrive_expect(&shared.scored[j], sizeof(typename Memory::Scores));
      }
    }
  }
  __syncwarp();
  cluster_arrive();  // the barriers stand

  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int quarter = lane / 8;
  const int head_groups = (a.heads + kHeadRows - 1) / kHeadRows;
  const int item = static_cast<int>(blockIdx.x) / kRanks;
  const int64_t token = item / head_groups;
  const int head0 = item % head_groups * kHeadRows;
  const Places places(a, token);
  for (int key = thread; key < places.window_keys; key += kThreads) {
    shared.rows[key] = places.window_row(key);
  }
  wait_for_previous_kernels();
  const int32_t entry = thread < a.width ? a.selected[token * a.width + thread] : -1;

  constexpr int kPieces = kDim / 8, kRowStep = kThreads / kPieces;
  const int piece = thread % kPieces;
  uint4 q[kHeadRows / kRowStep];
#pragma unroll
  for (int i = 0; i < kHeadRows / kRowStep; ++i) {
    const int head = head0 + thread / kPieces + i * kRowStep;
    q[i] = head < a.heads
               ? *reinterpret_cast<const uint4*>(static_cast<const Bf16*>(a.q) +
                                                 (token * a.heads + head) * kDim + 8 * piece)
               : make_uint4(0, 0, 0, 0);
  }
  const Turn turn(a, token, piece);
  const Keys keys{places.window_keys, find_selected(a, token, places, entry, shared.rows)};

  // A unit of a warp is 64 columns of eight keys; a lane has a quarter of a key's.
  constexpr int kKeyUnits = 2 * kGroups * kTiles, kOwnUnits = (kKeyUnits + kWarps - 1) / kWarps;
  constexpr int kValueUnits = Memory::kKeys / 8;
  constexpr int kOtherUnits = (kValueUnits + kWarps - kScorers - 1) / (kWarps - kScorers);
  RawColumns raw[kOwnUnits], other[kOtherUnits];
#pragma unroll
  for (int i = 0; i < kOwnUnits; ++i) {
    const int unit = warp + i * kWarps;
    if (unit < kKeyUnits) {
      const int key = rank * Memory::kOwnKeys + unit / kTiles * 8 + lane % 8;
      raw[i] = load_columns(Source(keys, shared.rows, key), unit % kTiles * 4 + quarter);
    }
  }
#pragma unroll
  for (int i = 0; i < kHeadRows / kRowStep; ++i) {
    // Rows eight apart are swizzled alike.
    *reinterpret_cast<uint4*>(shared.factors.q[piece / 8] + i * kRowStep * 128 +
                              tile_place(thread / kPieces, piece % 8)) = turned_piece(q[i], turn);
  }
  const int first_unit = warp - kScorers;
  const int value_units = (keys.keys + kKeyBlock - 1) / kKeyBlock * (kKeyBlock / 8);
  if (warp >= kScorers) {
#pragma unroll
    for (int i = 0; i < kOtherUnits; ++i) {
      const int unit = first_unit + i * (kWarps - kScorers);
      if (unit < value_units) {
        const int key = unit * 8 + lane % 8;
        other[i] = load_columns(Source(keys, shared.rows, key), rank * 4 + quarter);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kOwnUnits; ++i) {
    const int unit = warp + i * kWarps;
    if (unit < kKeyUnits) {
      const int own = unit / kTiles * 8 + lane % 8;
      store_columns(raw[i],
                    rank * Memory::kOwnKeys + own < keys.window_keys,
                    shared.factors.k[unit % kTiles],
                    tile_place(own, 2 * quarter));
    }
  }
  async_proxy_fence();

  if (warp >= kScorers) {
    group_arrive(kKeysUnpacked, kThreads);
#pragma unroll
    for (int i = 0; i < kOtherUnits; ++i) {
      const int unit = first_unit + i * (kWarps - kScorers);
      if (unit < value_units) {
        const int key = unit * 8 + lane % 8;
        store_columns(other[i], key < keys.window_keys, shared.v, tile_place(key, 2 * quarter));
      }
    }
    async_proxy_fence();
    group_arrive(kValuesUnpacked, kThreads);
    cluster_wait();
    cluster_arrive();
  } else {
    const int head = warp * 16 + lane / 4;
    float sink[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = head0 + head + 8 * h;
      sink[h] = row < a.heads ? a.sink[row] : 0.0f;
    }
    group_barrier(kKeysUnpacked, kThreads);
    float s[2 * kGroups][4];
    score_keys<kHeadRows, kGroups>(shared.factors, keys.keys - rank * Memory::kOwnKeys, s);
    cluster_wait();
    Maxima maxima;
    if (head < kHeadRows) {
      find_maxima(shared, rank, head, s, maxima);
      exponentiate<kHeadRows, kGroups>(shared.scores[rank], rank, head, s, maxima);
    }
    async_proxy_fence();
    group_barrier(kScoresStored, kGroup);
    if (thread < kRanks && thread != rank) {
      remote_copy_bulk(
          &shared.scores[rank], sizeof(typename Memory::Scores), &shared.scored[rank], thread);
    }
    __syncwarp();
    group_barrier(kValuesUnpacked, kThreads);
    float acc[kColumns / 8][4] = {};
    float sum[2] = {0, 0};
    sum_values(shared, rank, head, keys.keys, acc, sum);
    // Nothing more comes: the copies from and to this block are done.
#pragma unroll 1
    for (int j = 0; j < kRanks; ++j) {
      if (j != rank) {
        barrier_wait(&shared.scored[j], 0);
      }
    }
    cluster_arrive();
    if (head < kHeadRows) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float denominator = sum[h] + exp2f(fmaf(sink[h], kLog2e, -maxima.all[h]));
        // No key at all: the sums are zero, and so is the row.
        sum[h] = keys.keys > 0 ? kCacheScale / denominator : 0.0f;
      }
      store_output<kColumns>(
          a, token, head0 + warp * 16, rank * (kColumns / 8), acc, sum, shared.output[warp]);
    }
  }
  cluster_wait();
}

template <int kHeadRows, int kGroups>
Status run(const OpContext& ctx, const AttendProblem& a) {
  static_assert(sizeof(Shared<kHeadRows, kGroups>) <= kSharedCapacity);
  return launch(ctx,
                "attend",
                attend_few_kernel<kHeadRows, kGroups>,
                dim3(extent(a.tokens * ceil_div(a.heads, kHeadRows) * kRanks)),
                kThreads,
                static_cast<int64_t>(sizeof(Shared<kHeadRows, kGroups>)),
                a);
}

template <int kHeadRows>
Status run(const OpContext& ctx, const AttendProblem& a) {
  return most_keys(a) <= Shared<kHeadRows, 2>::kKeys ? run<kHeadRows, 2>(ctx, a)
                                                     : run<kHeadRows, 5>(ctx, a);
}

}  // namespace
}  // namespace attention

bool attend_few_fits(const AttendProblem& a) {
  return attention::most_keys(a) <= attention::Shared<32, 5>::kKeys &&
         a.tokens * ceil_div(a.heads, 32) <= attention::kClusters;
}

Status attend_few(const OpContext& ctx, const AttendProblem& a) {
  return a.tokens * ceil_div(a.heads, 16) <= attention::kClusters ? attention::run<16>(ctx, a)
                                                                  : attention::run<32>(ctx, a);
}

}  // namespace cachalot::ops::cuda
