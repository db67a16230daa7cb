// A warp's part of the tile: scores, softmax and output.
#pragma once

#include "loader.cuh"
#include "scores.cuh"

namespace ffpa {

class Consumer {
 public:
  __device__ __forceinline__ Consumer(const ForwardParams& p, Loader& loader, unsigned char* memory, u32 shared,
                                      int warp, int lane)
      : p_(p),
        loader_(loader),
        memory_(memory),
        shared_(shared),
        lane_(lane),
        row_warp_(warp / kColWarps),
        col_warp_(warp % kColWarps) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) top_[m][half] = -kInfinity, sum_[m][half] = 0.0f;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) out_[m][b][n][i] = 0.0f;
    }
  }

  // One tile of keys: `bounded` if some row of the block may not see all of them.
  __device__ __forceinline__ void step(int key0, bool bounded) {
    Scores s;
    multiply_keys(s);
    const int row = first_row() + lane_ / 4, key = key0 + col_warp_ * kKeyTiles * 8 + lane_ % 4 * 2;
    const RowInfo* rows = reinterpret_cast<const RowInfo*>(memory_ + kRowInfoAt);
    const ScoreUnits units(p_);
    finish_scores(s, p_, rows, row, key, units.from_products, bounded);
    exponentiate(s, units.to_log2);
    if (p_.dropout_threshold != 0) drop(s, p_, rows, row, key);
    store_probabilities(s);
    group_barrier();  // P is complete; the statistics may be written again
    multiply_values();
  }

  // Divides, and writes out and lse, or this split's own.
  __device__ __forceinline__ void finish(i64 rows_total, i64 first_of_tile, int split) {
    float* stats = reinterpret_cast<float*>(memory_ + kStatsAt);
    const RowInfo* rows = reinterpret_cast<const RowInfo*>(memory_ + kRowInfoAt);
    const ScoreUnits units(p_);
    const i64 all_rows = static_cast<i64>(p_.batch) * p_.heads_q * p_.len_q;
    share(sum_, [](float a, float b) { return a + b; });
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row() + m * 16 + half * 8 + lane_ / 4;
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < kColWarps; ++w) total += stats[row * kColWarps + w];
        const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
          for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = half * 2; i < half * 2 + 2; ++i)
              out_[m][b][n][i] = total == 0.0f ? 0.0f : out_[m][b][n][i] * inverse;  // 0 even if V holds a NaN
        const RowInfo& info = rows[row];
        const i64 at = static_cast<i64>(info.batch_head) * p_.len_q + info.query;
        const bool inside = first_of_tile + row < rows_total;
        if (col_warp_ == 0 && lane_ % 4 == 0 && inside) {
          const float lse = total == 0.0f ? -kInfinity : top_[m][half] * units.to_natural + log2_fast(total) * kLn2;
          (p_.splits > 1 ? p_.partial_lse + split * all_rows : p_.lse)[at] = lse;
        }
        if (p_.splits > 1 && inside && total != 0.0f) {
          float* partial = p_.partial_out + (split * all_rows + at) * p_.head_dim;
#pragma unroll
          for (int b = 0; b < kBlocks; ++b)
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              const int col = column(b) + n * 8 + lane_ % 4 * 2;
              if (col < p_.head_dim)
                *reinterpret_cast<float2*>(partial + col) = {out_[m][b][n][half * 2], out_[m][b][n][half * 2 + 1]};
            }
        }
      }
    if (p_.splits == 1) write_out(rows, rows_total - first_of_tile);
  }

 private:
  __device__ __forceinline__ int first_row() const { return row_warp_ * kRowTiles * 16; }
  __device__ __forceinline__ void group_barrier() const { named_barrier(1 + row_warp_, kGroupThreads); }

  // First column of the warp's block `b`: blocks are dealt to the column warps in turn, so that all of them have work
  // in every chunk and a block's place in its 64-column panel does not depend on b.
  __device__ __forceinline__ int column(int b) const { return (b * kColWarps + col_warp_) * 16; }

  // Address of this lane's row of a 16 x 16 tile at (row, column 0) of a matrix in panels of any height; column c, a
  // multiple of 16, is in panel c / 64 at address ^ (c % 64 * 2).
  __device__ __forceinline__ u32 lane_row(u32 matrix, int row) const {
    return matrix + (row + lane_ % 16) * kPanelRow + ((lane_ / 16) ^ (lane_ % 8)) * 16;
  }

  // The slot of the next chunk, when it is full. With two stages the chunk after it is asked for now; with more, when
  // this one is done with, which lets a warp be a chunk behind before anybody waits for it.
  __device__ __forceinline__ u32 acquire() {
    if constexpr (kStages == 2) loader_.issue();
    barrier_wait(shared_ + kBarriersAt + ring_.stage * 8, ring_.parity);
    return shared_ + kRingAt + ring_.stage * kSlotBytes;
  }

  __device__ __forceinline__ void release() {
    __syncwarp();
    if (lane_ == 0) barrier_arrive(shared_ + kBarriersAt + (kStages + ring_.stage) * 8);
    ring_.advance();
    if constexpr (kStages != 2) loader_.issue();
  }

  // S = Q K^T over all chunks of the columns.
  __device__ __forceinline__ void multiply_keys(Scores& s) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[m][n][i] = 0.0f;
    u32 narrow[kRowTiles][kKeyTiles][2] = {};  // the sums with an fp16 accumulator
    u32 q = lane_row(shared_, first_row());
#pragma unroll 1
    for (int chunk = 0; chunk < kKeyChunks; ++chunk) {
      multiply_key_chunk(acquire(), q, kHeadDim - chunk * kKeyChunk,
                         [&](int m, int n, const u32(&a)[4], u32 b0, u32 b1) {
                           if constexpr (kScoresF16) {
                             multiply_f16(narrow[m][n], a, b0, b1);
                           } else {
                             multiply_f32<kBf16>(s[m][n], a, b0, b1);
                           }
                         });
      release();
      q += kKeyChunk / 64 * panel_bytes(kRows);
    }
    if constexpr (kScoresF16) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) add_f16(s[m][n], narrow[m][n]);
    }
  }

  template <typename Multiply>
  __device__ __forceinline__ void multiply_key_chunk(u32 slot, u32 q, int cols, Multiply multiply) const {
    const int key = col_warp_ * kKeyTiles * 8 + lane_ % 8 + lane_ / 16 * 8;
    const u32 k = slot + key * kPanelRow + ((lane_ / 8 % 2) ^ (lane_ % 8)) * 16;
#pragma unroll
    for (int step = 0; step < kKeyChunk / 16; ++step) {
      if (kHeadDim % kKeyChunk != 0 && step % 4 == 0 && step * 16 >= cols) break;
      u32 a[kRowTiles][4], b[kKeyTiles / 2][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
        load_matrices(a[m], (q ^ (step % 4 * 32)) + step / 4 * panel_bytes(kRows) + m * 16 * kPanelRow);
#pragma unroll
      for (int n = 0; n < kKeyTiles / 2; ++n)
        load_matrices(b[n], (k ^ (step % 4 * 32)) + step / 4 * panel_bytes(kKeys) + n * 16 * kPanelRow);
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) multiply(m, n, a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
  }

  // Every warp's value of a row into the group's statistics, reduced over the four lanes that share the row.
  template <typename Reduce>
  __device__ __forceinline__ void share(const float (&values)[kRowTiles][2], Reduce reduce) {
    float* stats = reinterpret_cast<float*>(memory_ + kStatsAt);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float value = values[m][half];
        value = reduce(value, __shfl_xor_sync(~0u, value, 1));
        value = reduce(value, __shfl_xor_sync(~0u, value, 2));
        const int row = first_row() + m * 16 + half * 8 + lane_ / 4;
        if (lane_ % 4 == 0) stats[row * kColWarps + col_warp_] = value;
      }
    group_barrier();
  }

  // S becomes P = exp2(S - row maximum), the output and the row sums are brought to the new maximum.
  __device__ __forceinline__ void exponentiate(Scores& s, float to_log2) {
    const float* stats = reinterpret_cast<const float*>(memory_ + kStatsAt);
    float top[kRowTiles][2];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        top[m][half] = -kInfinity;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n)
          top[m][half] = fmaxf(top[m][half], fmaxf(s[m][n][half * 2], s[m][n][half * 2 + 1]));
      }
    share(top, [](float a, float b) { return fmaxf(a, b); });
    float factor[kRowTiles][2];
    bool changed = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row() + m * 16 + half * 8 + lane_ / 4;
        float now = top_[m][half];
#pragma unroll
        for (int w = 0; w < kColWarps; ++w) now = fmaxf(now, stats[row * kColWarps + w]);
        const float reference = now == -kInfinity ? 0.0f : now;  // a row without keys so far: every exponential is 0
        factor[m][half] = exp2_fast((top_[m][half] - reference) * to_log2);
        changed |= now != top_[m][half];
        top_[m][half] = now;
        float total = 0.0f;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
          for (int i = half * 2; i < half * 2 + 2; ++i) {
            s[m][n][i] = exp2_fast((s[m][n][i] - reference) * to_log2);
            total += s[m][n][i];
          }
        sum_[m][half] = sum_[m][half] * factor[m][half] + total;
      }
    if (!__any_sync(~0u, changed)) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) out_[m][b][n][i] *= factor[m][i / 2];
  }

  __device__ __forceinline__ void store_probabilities(const Scores& s) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row() + m * 16 + half * 8 + lane_ / 4;
        const u32 line = shared_ + kProbAt + row * kPanelRow + lane_ % 4 * 4;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          const int piece = col_warp_ * kKeyTiles + n;
          store_shared(line + piece / 8 * panel_bytes(kRows) + ((piece ^ row) % 8) * 16,
                       pack<kBf16>(s[m][n][half * 2], s[m][n][half * 2 + 1]));
        }
      }
  }

  // O += P V over all chunks of the tile.
  __device__ __forceinline__ void multiply_values() {
#pragma unroll 1
    for (int chunk = 0; chunk < kValueChunks; ++chunk) {
      const int key = chunk * kValueRows;
#pragma unroll
      for (int part = 0; part < kHeadDim / kValueCols; ++part) {
        const u32 slot = acquire();
        if constexpr (kOutputF16) {
          u32 sum[kRowTiles][kChunkBlocks][2][2] = {};
          multiply_value_chunk(slot, key, part, [&](int m, int b, int n, const u32(&a)[4], u32 b0, u32 b1) {
            multiply_f16(sum[m][b][n], a, b0, b1);
          });
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
            for (int b = 0; b < kChunkBlocks; ++b)
#pragma unroll
              for (int n = 0; n < 2; ++n) add_f16(out_[m][part * kChunkBlocks + b][n], sum[m][b][n]);
        } else {
          multiply_value_chunk(slot, key, part, [&](int m, int b, int n, const u32(&a)[4], u32 b0, u32 b1) {
            multiply_f32<kBf16>(out_[m][part * kChunkBlocks + b][n], a, b0, b1);
          });
        }
        release();
      }
    }
  }

  template <typename Multiply>
  __device__ __forceinline__ void multiply_value_chunk(u32 slot, int key, int part, Multiply multiply) const {
    const u32 probs = lane_row(shared_ + kProbAt + key / 64 * panel_bytes(kRows), first_row());
    const u32 values = lane_row(slot, 0);
#pragma unroll
    for (int step = 0; step < kValueRows / 16; ++step) {
      u32 a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const u32 at = kValueRows % 64 == 0 ? (probs ^ (step % 4 * 32)) + step / 4 * panel_bytes(kRows)
                                            : probs ^ ((key + step * 16) % 64 * 2);
        load_matrices(a[m], at + m * 16 * kPanelRow);
      }
#pragma unroll
      for (int b = 0; b < kChunkBlocks; ++b) {
        if (kRaggedBlocks && b == kBlocks - 1 && column(b) >= kHeadDim) continue;
        const int place = b * kColWarps + col_warp_;  // of the block in the chunk
        u32 fragment[4];
        load_matrices_transposed(
            fragment, (values ^ (place % 4 * 32)) + place / 4 * panel_bytes(kValueRows) + step * 16 * kPanelRow);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) multiply(m, b, n, a[m], fragment[n * 2], fragment[n * 2 + 1]);
      }
    }
  }

  // O in the 16-bit type, through the shared memory of Q so that rows are written whole.
  __device__ __forceinline__ void write_out(const RowInfo* rows, i64 rows_left) const {
    group_barrier();  // nobody of the group reads Q any more
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row() + m * 16 + half * 8 + lane_ / 4;
        const u32 line = shared_ + row * kPanelRow + lane_ % 4 * 4;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          if (kRaggedBlocks && b == kBlocks - 1 && column(b) >= kHeadDim) continue;
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const int piece = column(b) / 8 + n;
            store_shared(line + piece / 8 * panel_bytes(kRows) + ((piece ^ row) % 8) * 16,
                         pack<kBf16>(out_[m][b][n][half * 2], out_[m][b][n][half * 2 + 1]));
          }
        }
      }
    group_barrier();
    for (int r = col_warp_; r < kRowTiles * 16; r += kColWarps) {
      const int row = first_row() + r;
      if (row >= rows_left) break;
      const int head = static_cast<int>(rows[row].batch_head);
      u16* out = static_cast<u16*>(p_.out) + head / p_.heads_q * p_.out_stride[0] +
                 head % p_.heads_q * p_.out_stride[1] + rows[row].query * p_.out_stride[2];
      for (int piece = lane_; piece * 8 < p_.head_dim; piece += 32) {
        const u32 from = shared_ + piece / 8 * panel_bytes(kRows) + row * kPanelRow + ((piece ^ row) % 8) * 16;
        *reinterpret_cast<uint4*>(out + piece * 8) = load_shared_16(from);
      }
    }
  }

  const ForwardParams& p_;
  Loader& loader_;
  unsigned char* memory_;
  u32 shared_;
  int lane_, row_warp_, col_warp_;
  RingPosition ring_;
  float top_[kRowTiles][2];  // row maxima so far, in score units
  float sum_[kRowTiles][2];  // this thread's part of the row sums
  float out_[kRowTiles][kBlocks][2][4];
};

}  // namespace ffpa
