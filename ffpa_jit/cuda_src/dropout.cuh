// The project's dropout stream: which elements of the probability matrix are dropped, as a function of
// (seed, offset, batch, head, query, key) and of nothing else, so that every backend and both directions agree.
//
//   counter = ((key / 32) * 4 + (key / 2) % 4,  query,  batch * Hq + head,  low 32 bits of offset)
//   cipher key = (low 32 bits of seed,  high 32 bits of seed XOR high 32 bits of offset)
//   four words = Philox4x32-10(counter, cipher key)
//   bits = 16 bits of word (key / 8) % 4: the low ones if the key is even, else the high ones
//   dropped if bits < round(p * 65536), else multiplied by 65536 / (65536 - round(p * 65536))
//
// One cipher call serves eight keys, and which eight is chosen so that a thread of an m16n8k16 tile owns all of them.
// Philox: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include "ptx.cuh"

namespace ffpa {

struct Philox {
  u32 key0, key1, offset;

  __device__ __forceinline__ explicit Philox(const u64* rng)
      : key0(static_cast<u32>(rng[0])),
        key1(static_cast<u32>(rng[0] >> 32) ^ static_cast<u32>(rng[1] >> 32)),
        offset(static_cast<u32>(rng[1])) {}

  // The words of the keys whose index is `key` up to bits 0, 3 and 4.
  __device__ __forceinline__ void draw(u32 (&words)[4], u32 key, u32 query, u32 batch_head) const {
    u32 c0 = (key >> 5) * 4 + ((key >> 1) & 3), c1 = query, c2 = batch_head, c3 = offset;
    u32 k0 = key0, k1 = key1;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      const u64 left = static_cast<u64>(c0) * 0xD2511F53u, right = static_cast<u64>(c2) * 0xCD9E8D57u;
      c0 = static_cast<u32>(right >> 32) ^ c1 ^ k0;
      c1 = static_cast<u32>(right);
      c2 = static_cast<u32>(left >> 32) ^ c3 ^ k1;
      c3 = static_cast<u32>(left);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
  }
};

}  // namespace ffpa
