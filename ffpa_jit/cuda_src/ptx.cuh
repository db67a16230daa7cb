// The instructions the kernels are made of, one function each, for sm_80 and later. No header is included anywhere in
// this directory: the sources compile under nvcc and NVRTC alike, in seconds, with nothing but the compiler installed.
#pragma once

namespace ffpa {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- global -> shared copies -------------------------------------------------------------------------------------

// 16 bytes past L1. The 256-byte prefetch hint pays because every row of a chunk is read to its end.
__device__ __forceinline__ void copy_16(u32 destination, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(destination), "l"(source));
}

// The same, or 16 zero bytes (the source is not read) where `valid` is false.
__device__ __forceinline__ void copy_16_or_zero(u32 destination, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(valid ? 16 : 0));
}

// A box of 64 columns by the tensor map's rows, at (column, row, head, batch), by the tensor copy engine (sm_90). What
// lies outside the tensor arrives as zeros. `barrier` counts the bytes.
__device__ __forceinline__ void copy_box(u32 destination, const void* map, int column, int row, int head, int batch,
                                         u32 barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(destination),
      "l"(map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(barrier)
      : "memory");
#endif
}

// ---- mbarriers ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the barriers that were initialised visible to the tensor copy engine.
__device__ __forceinline__ void barrier_init_fence() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}

// One arrival, and `bytes` more to come from the tensor copy engine.
__device__ __forceinline__ void barrier_arrive_expecting(u32 barrier, u32 bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n}" ::"r"(barrier),
               "r"(bytes)
               : "memory");
#endif
}

// One arrival, made when all copies that this thread has started are complete.
__device__ __forceinline__ void barrier_arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n .reg .pred done;\n"
      "again:\n mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n @!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n .reg .pred done;\n"
      "again:\n mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n @!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// A barrier of `threads` threads under number 1 to 15; 0 is __syncthreads.
__device__ __forceinline__ void named_barrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// ---- shared -> registers -------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_matrices(u32 (&fragment)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address));
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&fragment)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address));
}

__device__ __forceinline__ void store_shared(u32 address, u32 value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(u32 address) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address));
  return value;
}

// ---- matrix products: c += a * b on tiles of 16 x 8 x 16 ------------------------------------------------------------

template <bool kBf16>
__device__ __forceinline__ void multiply_f32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (kBf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// With an fp16 accumulator: two registers of two values, rows as in the fp32 one.
__device__ __forceinline__ void multiply_f16(u32 (&c)[2], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
               : "+r"(c[0]), "+r"(c[1])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- arithmetic
// ------------------------------------------------------------------------------------------------------

// 2 ** x; exactly 0 for -inf.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats rounded to the 16-bit type, `low` in the low half.
template <bool kBf16>
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 packed;
  if constexpr (kBf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// c += the two pairs of fp16 values of a `multiply_f16` result.
__device__ __forceinline__ void add_f16(float (&c)[4], const u32 (&pairs)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<u16>(pairs[i / 2] >> (i % 2 * 16))));
    c[i] += value;
  }
}

template <bool kBf16>
__device__ __forceinline__ float widen(u16 bits) {
  float value;
  if constexpr (kBf16) {
    value = __uint_as_float(static_cast<u32>(bits) << 16);
  } else {
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  }
  return value;
}

}  // namespace ffpa
