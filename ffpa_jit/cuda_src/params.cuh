// What a launch is told. `ffpa_jit/cuda/params.py` mirrors this struct field by field.
#pragma once

#include "ptx.cuh"

struct alignas(64) TensorMap {  // a CUtensorMap
  unsigned char bytes[128];
};

struct ForwardParams {
  TensorMap k_map;  // of K and V as (D, Nkv, Hkv, B), in boxes of 64 columns by the rows of a chunk; sm_90 and later
  TensorMap v_map;
  const void* q;          // [B, Hq, Nq, D]; all strides in elements, that of D is 1, the others multiples of 8
  const void* k;          // [B, Hkv, Nkv, D]
  const void* v;          // [B, Hkv, Nkv, D]
  const void* mask;       // [B, Hq, Nq, Nkv], any strides
  const ffpa::u64* rng;   // (seed, offset) of the dropout stream, on the device; null without dropout
  void* out;              // [B, Hq, Nq, D]
  float* lse;             // [B, Hq, Nq] contiguous, natural logarithm
  float* partial_out;     // splits > 1: [splits, B * Hq * Nq, D] contiguous, each split's own softmax
  float* partial_lse;     // splits > 1: [splits, B * Hq * Nq]
  ffpa::i64 q_stride[3];  // batch, head, row
  ffpa::i64 k_stride[3];
  ffpa::i64 v_stride[3];
  ffpa::i64 out_stride[3];
  ffpa::i64 mask_stride[4];  // batch, head, query, key
  int batch;
  int heads_q;
  int heads_kv;
  int len_q;
  int len_kv;
  int head_dim;
  int row_tiles;          // tiles of (query, head of the group) rows of one (batch, key head)
  int splits;             // parts of the keys, each a thread block of its own (grid y)
  int causal;             // row r sees the keys k <= r + len_kv - len_q
  int mask_kind;          // 0 none, 1 bool, 2 additive in the query's type, 3 additive in fp32
  int dropout_threshold;  // an element is dropped if its 16 random bits are below this; 0: no dropout
  int k_head_step;        // 0 if the heads of K share their memory (stride 0), which its map shows as one head; else 1
  int k_batch_step;
  int v_head_step;
  int v_batch_step;
  float dropout_scale;  // 1 / the probability to stay
  float scale;
};
static_assert(sizeof(ForwardParams) == FFPA_PARAMS_BYTES, "params.py mirrors this struct");
#ifndef __CUDACC_RTC__  // NVRTC has no offsetof without headers
static_assert(__builtin_offsetof(ForwardParams, scale) == FFPA_PARAMS_LAST);
#endif
