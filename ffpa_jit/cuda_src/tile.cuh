// The shape of one instantiation, from the macros that `ffpa_jit/cuda/instantiate.py` defines, and where everything
// lies in shared memory.
#pragma once

#include "ptx.cuh"

namespace ffpa {

constexpr int kHeadDim = FFPA_HEAD_DIM;       // columns that are computed; the tensors' head dim may be up to 56 less
constexpr bool kBf16 = FFPA_BF16;             // else fp16
constexpr bool kScoresF16 = FFPA_SCORES_F16;  // accumulate Q K^T in fp16
constexpr bool kOutputF16 = FFPA_OUTPUT_F16;  // accumulate P V in fp16 within a chunk
constexpr int kStages = FFPA_STAGES;          // chunks in the ring
constexpr int kRowWarps = FFPA_ROW_WARPS;     // warps along the rows...
constexpr int kColWarps = FFPA_COL_WARPS;     // ...and along the keys (scores) or the columns (output)
constexpr int kRowTiles = FFPA_ROW_TILES;     // 16-row mma tiles of a warp
constexpr int kKeys = FFPA_KEYS;              // keys of a tile
constexpr int kKeyChunk = FFPA_KEY_CHUNK;     // a K chunk is kKeys x kKeyChunk
constexpr bool kTma = FFPA_TMA;               // K and V through the tensor copy engine (sm_90 and later), else cp.async
constexpr int kValueRows = FFPA_VALUE_ROWS;   // a V chunk is kValueRows x kValueCols
constexpr int kValueCols = FFPA_VALUE_COLS;

constexpr int kRows = kRowWarps * kRowTiles * 16;  // rows of a tile: (query, head of the group) pairs
constexpr int kGroupThreads = kColWarps * 32;      // a row group: the warps that share rows
constexpr int kWarps = kRowWarps * kColWarps;
constexpr int kThreads = kWarps * 32;

constexpr int kKeyTiles = kKeys / kColWarps / 8;                      // 8-key mma tiles of a warp's scores
constexpr int kBlocks = (kHeadDim / 16 + kColWarps - 1) / kColWarps;  // 16-column blocks of a warp's output
constexpr bool kRaggedBlocks = (kHeadDim / 16) % kColWarps != 0;      // some warps have one block less
constexpr int kChunkBlocks = kBlocks / (kHeadDim / kValueCols);       // of which in one V chunk
constexpr int kKeyChunks = (kHeadDim + kKeyChunk - 1) / kKeyChunk;    // the last one may be narrower
constexpr int kValueChunks = kKeys / kValueRows;

static_assert(kKeyTiles == 2 || kKeyTiles == 4, "a warp takes 16 or 32 keys of a tile");
static_assert(kHeadDim % 64 == 0 && kKeyChunk % 64 == 0 && kKeys % 64 == 0);
static_assert(kHeadDim % kValueCols == 0 && kValueCols % 64 == 0 && kKeys % kValueRows == 0 && kValueRows % 16 == 0);
static_assert(kValueCols == kHeadDim || (kValueCols / 16) % kColWarps == 0);
static_assert(!(kBf16 && (kScoresF16 || kOutputF16)), "an fp16 accumulator needs fp16 inputs");

// Matrices lie in shared memory as panels of 64 columns: 128 bytes a row, whose 16-byte pieces are permuted by the row
// (piece ^ row % 8), so that copies, ldmatrix and the stores of P meet every bank once.
constexpr int kPanelRow = 128;
__device__ __forceinline__ constexpr u32 panel_bytes(int rows) { return rows * kPanelRow; }

constexpr int kQueryBytes = kRows * kHeadDim * 2;
constexpr int kProbBytes = kRows * kKeys * 2;
constexpr int kKeyChunkBytes = kKeys * kKeyChunk * 2;
constexpr int kValueChunkBytes = kValueRows * kValueCols * 2;
constexpr int kSlotBytes = kKeyChunkBytes > kValueChunkBytes ? kKeyChunkBytes : kValueChunkBytes;

// What the score epilogue needs of a row; in shared memory because registers are what this kernel is short of.
struct RowInfo {
  i64 mask_offset;  // of (batch, head, query) in the mask
  u32 query;
  u32 batch_head;  // batch * Hq + head
  int limit;       // the last key the row may see
};

constexpr int kProbAt = kQueryBytes;
constexpr int kRingAt = kProbAt + kProbBytes;
constexpr int kStatsAt = kRingAt + kStages * kSlotBytes;  // [rows][column warps] floats
constexpr int kRowInfoAt = kStatsAt + kRows * kColWarps * 4;
constexpr int kBarriersAt = kRowInfoAt + kRows * 24;  // full[stages], empty[stages], query
constexpr int kSharedBytes = kBarriersAt + (2 * kStages + 1) * 8;
static_assert(sizeof(RowInfo) == 24);
static_assert(!kTma || (kRingAt % 1024 == 0 && kSlotBytes % 1024 == 0), "its swizzle is one of address bits");
static_assert(kSharedBytes == FFPA_SHARED_BYTES, "instantiate.py computes the same sum");

// Chunks in flight before the first one is used. With three stages and more, the slot that is filled next is the one
// that all warps should have left a chunk ago, so that a warp rarely waits for those that lag.
constexpr int kAhead = kStages == 1 ? 1 : kStages - 1;

// Position in the ring and the parity of its barriers.
struct RingPosition {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

}  // namespace ffpa
