// What the kernels that move rows share: accesses of UNIT_BYTES, and where a swizzled row keeps its chunks.
#pragma once

#include "words.cuh"

template <int BYTES> struct UnitOf;
template <> struct UnitOf<16> { typedef uint4 type; };
template <> struct UnitOf<8> { typedef uint2 type; };
template <> struct UnitOf<4> { typedef unsigned int type; };
template <> struct UnitOf<2> { typedef unsigned short type; };
template <> struct UnitOf<1> { typedef unsigned char type; };
typedef UnitOf<UNIT_BYTES>::type Unit;

// What is read once need not stay in the caches.
__device__ __forceinline__ Unit load_once(const void* from) { return __ldcs(static_cast<const Unit*>(from)); }
__device__ __forceinline__ Unit load_once(u64 from) { return load_once(reinterpret_cast<const void*>(from)); }

__device__ __forceinline__ void store(u64 to, Unit unit) { *reinterpret_cast<Unit*>(to) = unit; }

// Where byte `at` of token row `row` is stored in it, and which byte is stored there: it is its own inverse.
__device__ __forceinline__ u64 stored(u64 at, u64 row) {
#if SWIZZLED
    return at ^ ((row & 7) << 4);
#else
    return at;
#endif
}
