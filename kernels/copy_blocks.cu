// Blocks, or parts of them, from any memory to any memory that the GPU reaches; see copy_blocks.py.
//
// architectures: sm_80 sm_86 sm_89 sm_90a sm_100a
// variant: BULK=1 PAIRS=250
// variant: BULK=1 PAIRS=2000
// variant: BULK=0 PAIRS=250
//
// A warp takes one piece after the other. With BULK, from sm_90 on, its first lane has each copied into a ring in
// shared memory and from there on by the copy engine: no byte passes a register, and loads and stores are in
// flight together. Else all lanes load a piece and store it.
//
// Compiled with: BULK; PAIRS, how many pairs of addresses fit the table that is part of a launch.
#define UNIT_BYTES 16
#define SWIZZLED 0
#include "units.cuh"
#include "bulk.cuh"

[[maybe_unused]] constexpr u32 STAGES = 4;  // of the ring of a warp
constexpr u32 LANES = 32;
[[maybe_unused]] constexpr u32 AT_ONCE = 8;  // units of a lane that are in flight together, without BULK

struct Piece {
    u64 from, to;
    u32 bytes;
};

// What one warp copies: every so many-th piece, so that warps work side by side.
template <class Pairs> struct Walk {
    const Pairs& pairs;
    u64 from_skipped, to_skipped;  // of each block, left out at its beginning
    u64 bytes;                     // copied
    u32 piece_bytes, pieces, last, step, next;

    __device__ bool take(Piece& piece) {
        for (; next < last; next += step) {
            u32 block = next / pieces;
            u64 from = pairs.from(block) & ~TAG_MASK, to = pairs.to(block) & ~TAG_MASK;
            if (from == 0 || to == 0) continue;  // padding
            u64 at = static_cast<u64>(next % pieces) * piece_bytes;
            u64 left = bytes - at;
            piece.from = from + from_skipped + at;
            piece.to = to + to_skipped + at;
            piece.bytes = left < piece_bytes ? left : piece_bytes;
            next += step;
            return true;
        }
        return false;
    }
};

#if BULK && __CUDA_ARCH__ >= 900

struct __align__(16) Ring {
    u64 barrier[STAGES];
    u64 to[STAGES];
    u32 bytes[STAGES];
};

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// The one arrival of a phase, which ends when so many bytes have been copied.
__device__ __forceinline__ void arrive_expecting(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

template <class Pairs> __device__ void copy(Walk<Pairs> walk) {
    extern __shared__ __align__(128) char memory[];
    if (threadIdx.x % LANES) return;
    u32 warps = blockDim.x / LANES, warp = threadIdx.x / LANES;
    u32 stages = shared_address(memory) + warp * STAGES * walk.piece_bytes;
    Ring& ring = reinterpret_cast<Ring*>(memory + warps * STAGES * walk.piece_bytes)[warp];
    u32 barriers = shared_address(ring.barrier);
    for (u32 stage = 0; stage < STAGES; ++stage) barrier_init(barriers + 8 * stage, 1);
    barrier_init_done();
    fence_for_copies();

    u32 loaded = 0, stored = 0;
    auto load = [&]() {
        Piece piece;
        if (!walk.take(piece)) return false;
        u32 stage = loaded % STAGES;
        ring.to[stage] = piece.to;
        ring.bytes[stage] = piece.bytes;
        arrive_expecting(barriers + 8 * stage, piece.bytes);
        bulk_load(stages + stage * walk.piece_bytes, piece.from, piece.bytes, barriers + 8 * stage);
        ++loaded;
        return true;
    };
    bool more = true;
    while (more && loaded < STAGES) more = load();
    while (stored < loaded) {
        u32 stage = stored % STAGES;
        barrier_wait(barriers + 8 * stage, stored / STAGES & 1);
        bulk_store(ring.to[stage], stages + stage * walk.piece_bytes, ring.bytes[stage]);
        bulk_commit();
        ++stored;
        if (more && stored > 1) {
            // The stage of the store before this one is filled anew, once that has read it.
            asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
            more = load();
        }
    }
    bulk_wait();
}

#else

template <class Pairs> __device__ void copy(Walk<Pairs> walk) {
    u32 lane = threadIdx.x % LANES;
    Piece piece;
    while (walk.take(piece)) {
        for (u32 at = lane * UNIT_BYTES; at < piece.bytes; at += AT_ONCE * LANES * UNIT_BYTES) {
            Unit units[AT_ONCE];
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; ++i) {
                u32 here = at + i * LANES * UNIT_BYTES;
                if (here < piece.bytes) units[i] = load_once(piece.from + here);
            }
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; ++i) {
                u32 here = at + i * LANES * UNIT_BYTES;
                if (here < piece.bytes) store(piece.to + here, units[i]);
            }
        }
    }
}

#endif

template <class Pairs>
__device__ __forceinline__ Walk<Pairs> walk_of(const Pairs& pairs, u32 count, u64 from_skipped, u64 to_skipped, u64 bytes,
                                               u32 piece_bytes) {
    u32 warps = blockDim.x / LANES;
    u32 pieces = (bytes + piece_bytes - 1) / piece_bytes;
    return {pairs, from_skipped, to_skipped, bytes, piece_bytes, pieces, count * pieces, gridDim.x * warps,
            threadIdx.x / LANES * gridDim.x + blockIdx.x};
}

struct InMemory {
    const u64 *sources, *targets;
    __device__ u64 from(u32 block) const { return sources[block]; }
    __device__ u64 to(u32 block) const { return targets[block]; }
};

// Pairs of addresses that travel with the launch, so that they need no memory that outlives it.
struct InLaunch {
    u64 pair[PAIRS][2];
    __device__ u64 from(u32 block) const { return pair[block][0]; }
    __device__ u64 to(u32 block) const { return pair[block][1]; }
};

extern "C" __global__ void __launch_bounds__(512) copy_blocks(
    const u64* from, const u64* to, u32 count, u64 skipped, u64 bytes, u32 piece_bytes
) {
    InMemory pairs{from, to};
    copy(walk_of(pairs, count, skipped, skipped, bytes, piece_bytes));
}

// The same of as many pairs as a word of memory says.
extern "C" __global__ void __launch_bounds__(512) copy_counted(
    const u64* from, const u64* to, const u32* count, u64 from_skipped, u64 to_skipped, u64 bytes, u32 piece_bytes
) {
    InMemory pairs{from, to};
    copy(walk_of(pairs, *count, from_skipped, to_skipped, bytes, piece_bytes));
}

extern "C" __global__ void __launch_bounds__(512) copy_listed(
    const __grid_constant__ InLaunch pairs, u32 count, u64 bytes, u32 piece_bytes
) {
    copy(walk_of(pairs, count, 0, 0, bytes, piece_bytes));
}
