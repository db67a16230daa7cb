// Copies of Q, K and V into shared memory. From sm_90 on, one warp hands K and V to the tensor copy engine; before,
// every warp copies its part of every chunk with cp.async. There is no producer warp: it would cost the registers of
// four (they are allocated by fours), and registers are what O needs.
#pragma once

#include "params.cuh"
#include "tile.cuh"

namespace ffpa {

// This warp's part of a chunk. Eight lanes copy the 128 bytes of a panel's row, a warp four rows at a time. `source` is
// the chunk's first element; rows from `rows` on and columns from `cols` on are zeros. kWhole: the caller knows of
// none.
template <int kChunkRows, int kChunkCols, bool kWhole>
__device__ __forceinline__ void copy_part(u32 slot, const u16* source, i64 stride, int rows, int cols, int warp,
                                          int lane) {
  constexpr int kQuads = kChunkRows / 4, kPanels = kChunkCols / 64;
  constexpr int kWarpsDown = kQuads < kWarps ? kQuads : kWarps;  // the warps share the rows, and what is left of
  constexpr int kWarpsAcross = kWarps / kWarpsDown;              // them the panels
  static_assert(kQuads % kWarpsDown == 0 && kWarps % kWarpsDown == 0 && kWarpsDown % 2 == 0);
  const int row = warp % kWarpsDown * 4 + lane / 8, across = warp / kWarpsDown, piece = lane % 8;
  const u32 to = slot + row * kPanelRow + ((piece ^ row) % 8) * 16 + across * panel_bytes(kChunkRows);
  const u16* from = source + row * stride + across * 64 + piece * 8;
#pragma unroll
  for (int r = 0; r < kQuads / kWarpsDown; ++r) {
#pragma unroll
    for (int i = 0; i < (kPanels + kWarpsAcross - 1) / kWarpsAcross; ++i) {
      const int panel = i * kWarpsAcross;
      if (kPanels % kWarpsAcross != 0 && panel + across >= kPanels) continue;
      const u32 target = to + panel * panel_bytes(kChunkRows) + r * kWarpsDown * 4 * kPanelRow;
      if constexpr (kWhole) {
        copy_16(target, from + panel * 64);
      } else {
        const bool valid = row + r * kWarpsDown * 4 < rows && (panel + across) * 64 + piece * 8 < cols;
        copy_16_or_zero(target, valid ? from + panel * 64 : source, valid);
      }
    }
    from += kWarpsDown * 4 * stride;
  }
}

template <int kChunkRows, int kChunkCols>
__device__ __forceinline__ void copy_chunk(u32 slot, const u16* source, i64 stride, int rows, int cols, int warp,
                                           int lane) {
  if (rows >= kChunkRows && cols >= kChunkCols) {
    copy_part<kChunkRows, kChunkCols, true>(slot, source, stride, rows, cols, warp, lane);
  } else {
    copy_part<kChunkRows, kChunkCols, false>(slot, source, stride, rows, cols, warp, lane);
  }
}

// The rows of the block: (query, head of the group) pairs from `first_row` on.
__device__ __forceinline__ void copy_queries(u32 shared, const ForwardParams& p, int batch, int head_kv, int group,
                                             i64 first_row, i64 rows_total, int warp, int lane) {
  const u16* q = static_cast<const u16*>(p.q) + batch * p.q_stride[0];
  for (int r = warp; r < kRows; r += kWarps) {
    const i64 row = first_row + r;
    const bool inside = row < rows_total;
    const int query = inside ? static_cast<int>(row / group) : 0;
    const int head = head_kv * group + (inside ? static_cast<int>(row % group) : 0);
    const u16* from = q + head * p.q_stride[1] + query * p.q_stride[2];
    for (int piece = lane; piece < kHeadDim / 8; piece += 32) {
      const u32 to = shared + (piece / 8) * panel_bytes(kRows) + r * kPanelRow + ((piece ^ r) % 8) * 16;
      const bool valid = inside && piece * 8 < p.head_dim;
      copy_16_or_zero(to, valid ? from + piece * 8 : q, valid);
    }
  }
}

// Fills the ring with the chunks of tiles [first, end), the last tile first: K in column chunks, then V.
class Loader {
 public:
  __device__ __forceinline__ Loader(const ForwardParams& p, u32 shared, int batch, int head_kv, int first, int end,
                                    int warp, int lane)
      : p_(p),
        shared_(shared),
        warp_(warp),
        lane_(lane),
        batch_(batch),
        head_(head_kv),
        key0_((end - 1) * kKeys),
        first_key_(first * kKeys),
        k_(static_cast<const u16*>(p.k) + batch * p.k_stride[0] + head_kv * p.k_stride[1]),
        v_(static_cast<const u16*>(p.v) + batch * p.v_stride[0] + head_kv * p.v_stride[1]) {}

  // Starts (this warp's part of) the next chunk, once every warp has released the slot; nothing after the last.
  __device__ __forceinline__ void issue() {
    if ((kTma && warp_ != 0) || key0_ < first_key_) return;
    const u32 full = shared_ + kBarriersAt + ring_.stage * 8, slot = shared_ + kRingAt + ring_.stage * kSlotBytes;
    barrier_wait(full + kStages * 8, ring_.parity ^ 1);
    if (chunk_ < kKeyChunks) {
      const int col0 = chunk_ * kKeyChunk;
      if constexpr (kTma) {
        boxes<kKeys>(full, slot, &p_.k_map, key0_, col0, kKeyChunk, head_ * p_.k_head_step, batch_ * p_.k_batch_step);
      } else {
        copy_chunk<kKeys, kKeyChunk>(slot, k_ + key0_ * p_.k_stride[2] + col0, p_.k_stride[2], p_.len_kv - key0_,
                                     p_.head_dim - col0, warp_, lane_);
      }
    } else {
      constexpr int kParts = kHeadDim / kValueCols;
      const int row0 = key0_ + (chunk_ - kKeyChunks) / kParts * kValueRows;
      const int col0 = (chunk_ - kKeyChunks) % kParts * kValueCols;
      if constexpr (kTma) {
        boxes<kValueRows>(full, slot, &p_.v_map, row0, col0, kValueCols, head_ * p_.v_head_step,
                          batch_ * p_.v_batch_step);
      } else {
        copy_chunk<kValueRows, kValueCols>(slot, v_ + row0 * p_.v_stride[2] + col0, p_.v_stride[2], p_.len_kv - row0,
                                           p_.head_dim - col0, warp_, lane_);
      }
    }
    if constexpr (!kTma) barrier_arrive_after_copies(full);
    ring_.advance();
    if (++chunk_ == kKeyChunks + kValueChunks * (kHeadDim / kValueCols)) chunk_ = 0, key0_ -= kKeys;
  }

 private:
  // Up to `cols` columns of a chunk, one lane a panel.
  template <int kChunkRows>
  __device__ __forceinline__ void boxes(u32 full, u32 slot, const TensorMap* map, int row, int col, int cols, int head,
                                        int batch) const {
    const int panels = (kHeadDim - col < cols ? kHeadDim - col : cols) / 64;
    if (lane_ == 0) barrier_arrive_expecting(full, panels * panel_bytes(kChunkRows));
    __syncwarp();
    if (lane_ < panels) copy_box(slot + lane_ * panel_bytes(kChunkRows), map, col + lane_ * 64, row, head, batch, full);
  }

  const ForwardParams& p_;
  u32 shared_;
  int warp_, lane_, batch_, head_;
  int key0_, first_key_;
  int chunk_ = 0;  // of the tile: kKeyChunks of K, then those of V
  RingPosition ring_;
  const u16 *k_, *v_;
};

}  // namespace ffpa
