// Keys and values of tokens into one layer of their blocks; see write_kv.py.
//
// architectures: sm_80 sm_86 sm_89 sm_90a sm_100a
// variant: UNIT_BYTES=16 SWIZZLED=1
// variant: UNIT_BYTES=16 SWIZZLED=0
// variant: UNIT_BYTES=2 SWIZZLED=1
// variant: UNIT_BYTES=4 SWIZZLED=0
//
// Compiled with: UNIT_BYTES, what one access moves; SWIZZLED, 1 where the 16-byte chunk c of token row t is
// stored at chunk c XOR (t mod 8).
#include "units.cuh"

// A block address of zero marks a token of padding, for which nothing is written.
extern "C" __global__ void __launch_bounds__(256) write_kv(
    const char* k, const char* v,      // of token 0, head 0
    i64 k_token, i64 k_head,           // bytes from one to the next
    i64 v_token, i64 v_head,
    const u64* addresses,              // [tokens]
    const void* offsets, int wide,     // [tokens], of 64 bits where wide, else of 32
    u32 count,                         // tokens * heads * units of a row
    u32 heads, u32 row_units,
    u64 layer_bytes, u64 plane_bytes, u64 slice_bytes  // from a block to its layer, from keys to values, from head to head
) {
#if __CUDA_ARCH__ >= 900
    // Attention that comes next may fetch what is not written here meanwhile, and waits for the rest.
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
    u32 item = blockIdx.x * blockDim.x + threadIdx.x;
    if (item >= count) return;
    u32 unit = item % row_units;
    u32 row = item / row_units;
    u32 head = row % heads;
    u32 token = row / heads;

    u64 block = addresses[token] & ~TAG_MASK;
    if (block == 0) return;
    u64 at = wide ? static_cast<const u64*>(offsets)[token] : static_cast<const u32*>(offsets)[token];
    u64 from = static_cast<u64>(unit) * UNIT_BYTES;
    Unit key = load_once(k + token * k_token + head * k_head + from);
    Unit value = load_once(v + token * v_token + head * v_head + from);
    u64 to = block + layer_bytes + head * slice_bytes + at * row_units * UNIT_BYTES + stored(from, at);
    store(to, key);
    store(to + plane_bytes, value);
}
