// Where a score becomes a probability: scale, mask, bounds, and the dropout of what came out. The one place in this
// backend that knows of masks and dropout.
#pragma once

#include "dropout.cuh"
#include "params.cuh"
#include "tile.cuh"

namespace ffpa {

constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;
constexpr float kInfinity =
    __builtin_bit_cast(float, 0x7f800000u);  // the one spelling that NVRTC knows without headers

// A thread holds of each 16-row mma tile rows lane / 4 and lane / 4 + 8, here "halves" 0 and 1, and of each 8-key one
// keys 2 * (lane % 4) and the next.
using Scores = float[kRowTiles][kKeyTiles][4];

// Scores are kept in units of log2, but in natural ones under an additive mask: multiplied by log2(e), the "minimum"
// masks of fp32 and bf16 would overflow to -inf.
struct ScoreUnits {
  float from_products;  // factor on Q K^T
  float to_log2;        // factor on differences of scores
  float to_natural;     // factor on a score
  __device__ __forceinline__ explicit ScoreUnits(const ForwardParams& p)
      : from_products(p.mask_kind >= 2 ? p.scale : p.scale * kLog2e),
        to_log2(p.mask_kind >= 2 ? kLog2e : 1.0f),
        to_natural(p.mask_kind >= 2 ? 1.0f : kLn2) {}
};

__device__ __forceinline__ float mask_score(float score, const ForwardParams& p, i64 at) {
  if (p.mask_kind == 1) return static_cast<const unsigned char*>(p.mask)[at] ? score : -kInfinity;
  if (p.mask_kind == 2) return score + widen<kBf16>(static_cast<const u16*>(p.mask)[at]);
  return score + static_cast<const float*>(p.mask)[at];
}

// Scales the products and applies mask and bounds. `rows` is the thread's first row in the tile, `key0` its first key.
__device__ __forceinline__ void finish_scores(Scores& s, const ForwardParams& p, const RowInfo* rows, int row, int key0,
                                              float factor, bool bounded) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[m][n][i] *= factor;
  if (p.mask_kind == 0 && !bounded) return;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const volatile RowInfo& info = rows[row + m * 16 + half * 8];
      const int limit = info.limit;
      const i64 offset = info.mask_offset;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = key0 + n * 8 + i;
          float& score = s[m][n][half * 2 + i];
          if (key > limit) {
            score = -kInfinity;
          } else if (p.mask_kind != 0) {
            score = mask_score(score, p, offset + key * p.mask_stride[3]);
          }
        }
    }
}

// Drops elements of P, scaling those that stay.
__device__ __forceinline__ void drop(Scores& s, const ForwardParams& p, const RowInfo* rows, int row, int key0) {
  const Philox philox(p.rng);
  const u32 threshold = p.dropout_threshold;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const volatile RowInfo& info = rows[row + m * 16 + half * 8];
      u32 words[4];
      philox.draw(words, key0, info.query, info.batch_head);
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        u32 word = words[n];
        if constexpr (kKeyTiles == 2) word = key0 & 16 ? words[n + 2] : words[n];
        float &first = s[m][n][half * 2], &second = s[m][n][half * 2 + 1];
        first = (word & 0xffff) < threshold ? 0.0f : first * p.dropout_scale;
        second = (word >> 16) < threshold ? 0.0f : second * p.dropout_scale;
      }
    }
}

}  // namespace ffpa
