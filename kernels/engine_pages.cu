// Between an engine's own paged tensors and blocks, all layers and blocks in one launch; see engine_pages.py.
//
// architectures: sm_80 sm_86 sm_89 sm_90a sm_100a
// variant: UNIT_BYTES=16 SWIZZLED=1 ROW_BYTES=256 ROWS=16 PAGE_ROWS=16
// variant: UNIT_BYTES=16 SWIZZLED=1 ROW_BYTES=128 ROWS=32 PAGE_ROWS=1
// variant: UNIT_BYTES=16 SWIZZLED=0 ROW_BYTES=32768 ROWS=1 PAGE_ROWS=1
// variant: UNIT_BYTES=8 SWIZZLED=0 ROW_BYTES=40 ROWS=5 PAGE_ROWS=5
//
// A slice of a block are ROWS rows; what a row is, the caller decides: a token of one head, or an engine's page
// of all heads where its bytes stay as they are. A warp takes one piece of a slice after the other, in the order
// of the block's bytes, so that it is the block's side, beyond a bus, that is read and written in long runs.
//
// Compiled with: UNIT_BYTES, what one access moves; ROW_BYTES; ROWS of a slice; PAGE_ROWS, how many of them lie in
// one page of the engine; SWIZZLED, 1 where the block keeps the 16-byte chunk c of row t at chunk c XOR (t mod 8).
#include "units.cuh"

constexpr u32 LANES = 32;
constexpr u32 AT_ONCE = 4;  // units of a lane that are in flight together
constexpr u32 PIECE_UNITS = AT_ONCE * LANES;
constexpr u32 ROW_UNITS = ROW_BYTES / UNIT_BYTES;
constexpr u32 SLICE_UNITS = ROWS * ROW_UNITS;
constexpr u32 PIECES = (SLICE_UNITS + PIECE_UNITS - 1) / PIECE_UNITS;  // of a slice
constexpr u32 PAGES = ROWS / PAGE_ROWS;                                // of the engine, in a block

// One plane of one layer of the engine: where it begins, and the bytes between pages, rows and heads.
struct Plane {
    i64 base, page, row, head;
};

template <bool TO_BLOCKS>
__device__ __forceinline__ void move(
    const Plane* table, const void* slots, int wide, const u64* blocks, u32 count, u32 first_layer, u32 layers,
    u32 planes, u32 heads, u64 page_bytes, u64 slice_bytes
) {
    u32 lane = threadIdx.x % LANES, warps = blockDim.x / LANES;
    u32 slices = planes * heads;
    u32 last = count * layers * slices * PIECES;
    for (u32 item = threadIdx.x / LANES * gridDim.x + blockIdx.x; item < last; item += gridDim.x * warps) {
        u32 piece = item % PIECES, rest = item / PIECES;
        u32 slice = rest % slices;
        rest /= slices;
        u32 layer = first_layer + rest % layers, block = rest / layers;
        u64 word = blocks[block] & ~TAG_MASK;
        if (word == 0) continue;  // padding
        u64 kept = word + layer * page_bytes + slice * slice_bytes;
        const Plane& plane = table[layer * planes + slice / heads];
        i64 base = plane.base + static_cast<i64>(slice % heads) * plane.head;
        i64 page_stride = plane.page, row_stride = plane.row;

        Unit units[AT_ONCE];
        u64 there[AT_ONCE];  // on the engine's side; 0: nowhere
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            u32 unit = piece * PIECE_UNITS + i * LANES + lane;
            there[i] = 0;
            if (unit >= SLICE_UNITS) continue;
            u32 row = unit / ROW_UNITS, page = row / PAGE_ROWS, at = block * PAGES + page;
            i64 slot = wide ? static_cast<const i64*>(slots)[at] : static_cast<const int*>(slots)[at];
            if (slot < 0) continue;  // the engine has no such page
            u64 in_row = stored(static_cast<u64>(unit % ROW_UNITS) * UNIT_BYTES, row);
            there[i] = base + slot * page_stride + static_cast<i64>(row % PAGE_ROWS) * row_stride + in_row;
        }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            u64 here = kept + static_cast<u64>(piece * PIECE_UNITS + i * LANES + lane) * UNIT_BYTES;
            if (there[i]) units[i] = load_once(TO_BLOCKS ? there[i] : here);
        }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            u64 here = kept + static_cast<u64>(piece * PIECE_UNITS + i * LANES + lane) * UNIT_BYTES;
            if (there[i]) store(TO_BLOCKS ? here : there[i], units[i]);
        }
    }
}

#define PARAMETERS                                                                                              \
    const Plane *table, const void *slots, int wide, const u64 *blocks, u32 count, u32 first_layer, u32 layers, \
        u32 planes, u32 heads, u64 page_bytes, u64 slice_bytes
#define ARGUMENTS table, slots, wide, blocks, count, first_layer, layers, planes, heads, page_bytes, slice_bytes

extern "C" __global__ void __launch_bounds__(512, 2) gather(PARAMETERS) { move<true>(ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(512, 2) scatter(PARAMETERS) { move<false>(ARGUMENTS); }
