// softmax(scale * Q K^T) V for head dims 257 to 1024 in one pass and without workspace (FlashAttention-2: Dao 2023), on
// mma.sync, for sm_80 to sm_121.
//
// Schedule. A block owns kRows rows of one (batch, key head): the queries of all heads of the group, (query, head)
// pairs with the head running fastest, so that grouped heads read K and V once. Its warps form a grid, kRowWarps x
// kColWarps. Split-D: K arrives in chunks of some columns, V in chunks of some rows, through a ring of kStages slots;
// shared memory grows with D by Q and by what one wants a chunk to hold, not by K and V. mbarriers hand slots over, so
// that no warp waits for all the others. From sm_90 on the tensor copy engine fills the ring, before that cp.async.
//
//   ring       | K0 K1 .. | V0 V1 .. | K0 K1 ..            a slot is filled again when every warp has released it
//   row group  | S += Q Kc^T | max exchange, P = exp2 | O += P Vc | ...
//   the other  |      (its own named barriers)  S += .. | ...     one group's exponentials under the other's products
//
// A row group (the kColWarps warps that share rows) splits the keys of a tile for S and the columns of D for O: each
// warp holds kRows/kRowWarps x D/kColWarps of O. So P goes through shared memory once and row maxima through 4 bytes a
// row and warp, which two named barriers of the group cover.
//
// Budget (D = 512 on sm_90: 64 rows, 2 x 4 warps, 128 keys, two slots of 64 KB, 255 registers a thread)
//   registers  O 32 x 128 a warp = 128, S 32 x 32 = 32, the rest fragments and addresses; no spill up to D = 512
//   shared     Q 64 KB + P 16 KB + ring 128 KB + 3 KB of statistics, row descriptions and barriers
//   port       128 B a clock: S reads 1 B for 8 products, O 1 B for 12.8, the fill writes 1 B for 32: 964 products
//              a clock or 433 TFLOP/s at 1.7 GHz; the tensor pipe alone would do 1270
// Measured on an H200: 356 TFLOP/s (D = 512), and about 250 clocks lost at every chunk, in which the pipes run empty;
// so two large chunks beat four small ones. bench/NOTES.md has the other shapes, and what failed: a producer warp (it
// costs the registers of four), fragments loaded ahead across chunks (slower).
#include "consumer.cuh"

extern "C" __global__ void __launch_bounds__(ffpa::kThreads, 1) ffpa_forward(const __grid_constant__ ForwardParams p) {
  using namespace ffpa;
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  const u32 full = shared + kBarriersAt, empty = full + kStages * 8, queries_full = empty + kStages * 8;
  RowInfo* rows = reinterpret_cast<RowInfo*>(memory + kRowInfoAt);

  // The longest causal tiles first, so that the last blocks to run are short.
  const u32 pair = blockIdx.x / p.row_tiles;
  const int tile = p.row_tiles - 1 - static_cast<int>(blockIdx.x % p.row_tiles);
  const int batch = pair / p.heads_kv, head_kv = pair % p.heads_kv;
  const int group = p.heads_q / p.heads_kv;
  const i64 rows_total = static_cast<i64>(p.len_q) * group, first_row = static_cast<i64>(tile) * kRows;

  const i64 end_row = first_row + kRows < rows_total ? first_row + kRows : rows_total;
  const int last_query = static_cast<int>((end_row - 1) / group);
  const int keys = p.causal ? last_query + p.len_kv - p.len_q + 1 : p.len_kv;
  const i64 tiles = (keys + kKeys - 1) / kKeys;
  const int first = static_cast<int>(tiles * blockIdx.y / p.splits);
  const int end = static_cast<int>(tiles * (blockIdx.y + 1) / p.splits);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x < kRows) {
    const i64 row = first_row + threadIdx.x;
    RowInfo info{};
    info.limit = -1;  // a row beyond the last sees no key
    if (row < rows_total) {
      const int head = head_kv * group + static_cast<int>(row % group);
      info.query = static_cast<u32>(row / group);
      info.batch_head = batch * p.heads_q + head;
      info.limit = p.causal ? static_cast<int>(info.query) + p.len_kv - p.len_q : p.len_kv - 1;
      info.mask_offset = batch * p.mask_stride[0] + head * p.mask_stride[1] + info.query * p.mask_stride[2];
    }
    rows[threadIdx.x] = info;
  }
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(full + stage * 8, kTma ? 1 : kThreads);
      barrier_init(empty + stage * 8, kWarps);
    }
    barrier_init(queries_full, kThreads);
    barrier_init_fence();
  }
  __syncthreads();

  copy_queries(shared, p, batch, head_kv, group, first_row, rows_total, warp, lane);
  barrier_arrive_after_copies(queries_full);
  Loader loader(p, shared, batch, head_kv, first, end, warp, lane);
  for (int chunk = 0; chunk < kAhead; ++chunk) loader.issue();
  Consumer consumer(p, loader, memory, shared, warp, lane);
  // A tile needs its bounds checked if its last key is beyond what the block's first row may see.
  const int free_keys = p.causal ? static_cast<int>(first_row / group) + p.len_kv - p.len_q + 1 : p.len_kv;
  barrier_wait(queries_full, 0);
  for (int at = end - 1; at >= first; --at) consumer.step(at * kKeys, (at + 1) * kKeys > free_keys);
  consumer.finish(rows_total, first_row, blockIdx.y);
}

// Joins the splits, one warp a row: out = sum_s w_s out_s / sum_s w_s with w_s = exp(lse_s - max).
extern "C" __global__ void __launch_bounds__(256) ffpa_combine(const __grid_constant__ ForwardParams p) {
  using namespace ffpa;
  const i64 rows = static_cast<i64>(p.batch) * p.heads_q * p.len_q;
  const i64 row = static_cast<i64>(blockIdx.x) * 8 + threadIdx.x / 32;
  if (row >= rows) return;
  const int lane = threadIdx.x % 32;
  const int query = static_cast<int>(row % p.len_q);
  const int batch = static_cast<int>(row / p.len_q / p.heads_q), head = static_cast<int>(row / p.len_q % p.heads_q);

  float top = -kInfinity;
  for (int split = lane; split < p.splits; split += 32) top = fmaxf(top, p.partial_lse[split * rows + row]);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  const float reference = top == -kInfinity ? 0.0f : top;  // no key at all, or NaN everywhere, which must come through
  float total = 0.0f;
  for (int split = lane; split < p.splits; split += 32)
    total += exp2_fast((p.partial_lse[split * rows + row] - reference) * kLog2e);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
  if (lane == 0) p.lse[row] = total == 0.0f ? -kInfinity : reference + log2_fast(total) * kLn2;

  u16* out = static_cast<u16*>(p.out) + batch * p.out_stride[0] + head * p.out_stride[1] + query * p.out_stride[2];
  for (int col = lane * 4; col < p.head_dim; col += 128) {
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int split = 0; split < p.splits; ++split) {
      const float lse = p.partial_lse[split * rows + row];
      if (lse == -kInfinity) continue;  // nothing was written for it
      const float weight = exp2_fast((lse - reference) * kLog2e) / total;
      const float4 part = *reinterpret_cast<const float4*>(p.partial_out + (split * rows + row) * p.head_dim + col);
      sum.x += weight * part.x, sum.y += weight * part.y, sum.z += weight * part.z, sum.w += weight * part.w;
    }
    *reinterpret_cast<uint2*>(out + col) = uint2{pack<kBf16>(sum.x, sum.y), pack<kBf16>(sum.z, sum.w)};
  }
}

#ifndef __CUDACC_RTC__
// What a compiled library exports; the functions return the CUDA error, 0 for none.

// Once a device, before the first launch there: loads the kernels and allows the forward its shared memory.
extern "C" int ffpa_prepare() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, ffpa_combine);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(ffpa_forward, cudaFuncAttributeMaxDynamicSharedMemorySize, ffpa::kSharedBytes);
}

// `which`: 0 for ffpa_forward, 1 for ffpa_combine. `params` need not be aligned as the struct is: it is only copied.
extern "C" int ffpa_launch(const void* params, int which, unsigned grid_x, unsigned grid_y, void* stream) {
  void* arguments[] = {const_cast<void*>(params)};
  const bool forward = which == 0;
  return cudaLaunchKernel(
      forward ? reinterpret_cast<const void*>(ffpa_forward) : reinterpret_cast<const void*>(ffpa_combine),
      dim3(grid_x, grid_y), dim3(forward ? ffpa::kThreads : 256), arguments, forward ? ffpa::kSharedBytes : 0,
      static_cast<cudaStream_t>(stream));
}

extern "C" const char* ffpa_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
#endif
