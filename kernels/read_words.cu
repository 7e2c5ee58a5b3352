// Every 16 bytes of a region once, and the XOR of its words; see read_words.py.
//
// architectures: sm_80 sm_86 sm_89 sm_90a sm_100a
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 AT_ONCE = 4;  // loads of a thread that are in flight together
constexpr u32 ALL_LANES = 0xffffffffu;

__device__ __forceinline__ u32 folded(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }

// `count` units of 16 bytes; `out` is XORed with all of their words.
extern "C" __global__ void read_words(const uint4* __restrict__ from, u64 count, u32* out) {
    u64 i = blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x;
    u64 step = static_cast<u64>(gridDim.x) * blockDim.x;
    u32 all = 0;
    for (; i + (AT_ONCE - 1) * step < count; i += AT_ONCE * step) {
        uint4 v[AT_ONCE];
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; ++j) v[j] = __ldcs(from + i + j * step);
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; ++j) all ^= folded(v[j]);
    }
    for (; i < count; i += step) all ^= folded(__ldcs(from + i));
#pragma unroll
    for (u32 lane = 16; lane; lane /= 2) all ^= __shfl_xor_sync(ALL_LANES, all, lane);
    if (threadIdx.x % 32 == 0) atomicXor(out, all);
}
