// Attention of one query per sequence over blocks at raw addresses, for GPUs before sm_90; see decode_attention.py.
//
// The work is that of decode_attention.cu: its plan, its runs, its partial results. A tile has 16 tokens for each warp
// of a CTA. Every warp copies its own 16 with cp.async (sm_80 on), STAGES tiles ahead, also beyond the end of a run:
// - of a run whose rows fit one accumulator a warp attends to what it copied, waiting for no other warp, and the
//   warps merge at the end;
// - of a run of more rows a warp attends to the whole tile with its share of the rows.
//
// Compiled with, beside those of attention.cuh: TILE, tokens of a tile, 16 for each warp; STAGES of the ring.
//
// architectures: sm_80 sm_86 sm_89 sm_90a
// variant: HEAD_DIM=64 BFLOAT16=0 SWIZZLED=1 TILE=64 STAGES=2
// variant: HEAD_DIM=80 BFLOAT16=0 SWIZZLED=0 TILE=64 STAGES=2
// variant: HEAD_DIM=96 BFLOAT16=1 SWIZZLED=0 TILE=64 STAGES=2
// variant: HEAD_DIM=128 BFLOAT16=0 SWIZZLED=1 TILE=64 STAGES=2
// variant: HEAD_DIM=128 BFLOAT16=1 SWIZZLED=1 TILE=64 STAGES=2
// variant: HEAD_DIM=256 BFLOAT16=0 SWIZZLED=1 TILE=32 STAGES=2
constexpr int WARPS = TILE / 16;

#include "attention.cuh"
#include "decode_plan.cuh"
#include "decode_work.cuh"

constexpr int PART_BYTES = MMA_TOKENS * ROW_BYTES;  // a warp's keys of a tile, or its values

enum { LAST = 1, STOP = 2 };

// What a warp knows about a tile.
struct Tile {
    int flags;
    int run;      // which one
    int tokens;   // how many of the tile are to be attended to, and how many of these are skipped
    int skipped;
    int column;   // of this warp's block
    int inside;   // where in the block its 16 tokens begin
    u64 target;   // where that block is installed; 0: nowhere
};

struct Shared {
    char stage[STAGES][STAGE_BYTES];
    Merging merging;
    Tile tile[STAGES][WARPS];
};

// PTX ISA, cp.async: 16 bytes from global memory (of this GPU, of a peer, or mapped host memory) to shared, past L1.
__device__ __forceinline__ void copy_chunk(u32 target, u64 source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until no more than PENDING of this thread's groups of copies are under way, the last ones.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Where a share of the work ends in a run, in tokens from the run's first column on; whole blocks.
__device__ __forceinline__ int end_of_part(const Problem& p, const Run& run, int stop) {
    const int tile_columns = max(1, TILE / p.block_tokens);
    return min(run.end - run.begin, first_column(run.position, run.weight, stop, tile_columns)) * p.block_tokens;
}

// Copies one warp's tokens of tile after tile, one run after the other. Of what it knows little stays in registers:
// runs are read anew for each tile, from L1 mostly.
struct Loader {
    int run, token;  // of the next tile
    int stop;        // the unit of work after the last
    bool over;
    u64 word;        // this warp's block of the next tile

    __device__ __forceinline__ Loader(const Problem& p, int share, int warp) {
        const Start& start = p.starts[share];
        run = start.index;
        token = start.column * p.block_tokens;
        stop = start.stop;
        over = false;
        find(p, warp);
    }

    // The next tile, from `token` on or in a later run, and its word ahead of use.
    __device__ __forceinline__ void find(const Problem& p, int warp) {
        while (true) {
            const Run& of = p.runs[run];
            const int end = end_of_part(p, of, stop), mine = token + warp * MMA_TOKENS;
            if (token < end) {
                word = mine < end ? __ldg(p.table + of.leader * p.table_stride + of.begin + mine / p.block_tokens) : 0;
                return;
            }
            if (of.position + of.size >= stop) {
                over = true;
                return;
            }
            ++run;
            token = 0;
        }
    }

    // Begin to copy the next tile into a stage that this warp's lanes, and of many rows all warps, are done with. Each
    // call is one group of copies.
    __device__ __forceinline__ void load(const Problem& p, Shared& shared, int stage, int head, int warp, int lane) {
        Tile& about = shared.tile[stage][warp];
        if (over) {
            if (lane == 0) about.flags = STOP;
        } else {
            const Run& of = p.runs[run];
            const int end = end_of_part(p, of, stop), mine = token + warp * MMA_TOKENS;
            const int column = of.begin + mine / p.block_tokens, inside = mine % p.block_tokens;
            u64 target = 0;
            if (mine < end) {
                if ((word & TAG_INSTALL) && p.install != nullptr)
                    target = p.install[of.leader * p.install_stride + column];
                if (target != 0 || (mine < of.tokens && mine + MMA_TOKENS > of.skipped)) {
                    const u64 keys = (word & ~TAG_MASK) + p.layer_offset + head * p.slice_bytes + inside * ROW_BYTES;
                    const u64 values = keys + p.kv_heads * p.slice_bytes;
                    const u32 memory = shared_address(shared.stage[stage]) + warp * PART_BYTES + lane * 16;
#pragma unroll
                    for (int i = 0; i < PART_BYTES; i += 32 * 16) {
                        copy_chunk(memory + i, keys + lane * 16 + i);
                        copy_chunk(memory + TILE * ROW_BYTES + i, values + lane * 16 + i);
                    }
                }
            }
            if (lane == 0) {
                about.flags = token + TILE >= end ? LAST : 0;
                about.run = run;
                about.tokens = min(TILE, min(end, of.tokens) - token);
                about.skipped = of.skipped - token;
                about.column = column;
                about.inside = inside;
                about.target = target;
            }
            token += TILE;
            find(p, warp);
        }
        commit_copies();
        __syncwarp();
    }
};

// A share's part of a run.
__device__ __forceinline__ Result result_of(const Problem& p, int run, int share, int head) {
    const Run& of = p.runs[run];
    return {of.rows, of.members, head, of.rows_at + (head * of.parts + share - of.share) * of.rows, of.alone};
}

// The lanes of a warp, or all warps of the CTA, wait for each other.
__device__ __forceinline__ void sync(bool all) {
    if (all)
        consumers_sync();
    else
        __syncwarp();
}

// The 32-bit words of a row of the query, or null where the run has fewer rows.
__device__ __forceinline__ const u32* query_row(const Problem& p, const Run& run, int head, int row) {
    if (row >= run.rows) return nullptr;
    const int sequence = p.members[run.members + row / p.group];
    return reinterpret_cast<const u32*>(p.q + sequence * p.q_stride + (head * p.group + row % p.group) * HEAD_DIM);
}

__device__ __forceinline__ void load_rows(const Problem& p, Query& query, const Run& run, int head, int row, int lane) {
    const int mine = row + (lane >> 2);
    load_query(query, query_row(p, run, head, mine), query_row(p, run, head, mine + 8), lane);
}

// Write a warp's 16 tokens of a tile to where their block is installed, once per different place.
__device__ __forceinline__ void install_part(const Problem& p, const Tile& about, const char* stage, int head,
                                             int warp, int lane) {
    if (about.target == 0) return;
    const Run& run = p.runs[about.run];
    const i64 offset = p.layer_offset + head * p.slice_bytes + about.inside * ROW_BYTES;
    u64 last = 0;
    for (int m = 0; m < run.count; ++m) {
        const u64 to = m == 0 ? about.target : p.install[p.members[run.members + m] * p.install_stride + about.column];
        if (to == last || (m > 0 && to == about.target)) continue;
        last = to;
        for (int plane = 0; plane < 2; ++plane) {
            const char* from = stage + plane * TILE * ROW_BYTES + warp * PART_BYTES;
            char* into = reinterpret_cast<char*>(to + offset + plane * p.kv_heads * p.slice_bytes);
            for (int i = lane * 16; i < PART_BYTES; i += 32 * 16)
                *reinterpret_cast<uint4*>(into + i) = *reinterpret_cast<const uint4*>(from + i);
        }
    }
}

// A share's part of a run. Of few rows, each warp attends to the tokens that it copied. Of many, each warp takes 16
// rows and attends to all tokens; more rows than the warps hold take several passes over as many tiles as there are
// stages, with the rows kept as partial results in between.
__device__ __forceinline__ void attend_run(const Problem& p, Shared& shared, Loader& loader, const Offsets& offsets,
                                           int& turn, int run, int share, int head, int warp, int lane) {
    const int rows = p.runs[run].rows;
    const bool many = rows > MMA_ROWS;
    const int passes = many ? (rows + WARPS * MMA_ROWS - 1) / (WARPS * MMA_ROWS) : 1;
    Query query;
    Accumulator acc;
    bool begins = true, ends = false;
#pragma unroll 1
    while (!ends) {
        int held = 0;
#pragma unroll 1
        for (int pass = 0; pass < passes; ++pass) {
            const int row = many ? (pass * WARPS + warp) * MMA_ROWS : 0;
            const bool active = row < rows;
            if (active && (passes > 1 || begins)) {
                load_rows(p, query, p.runs[run], head, row, lane);
                if (begins)
                    acc.clear();
                else
                    resume_rows(p, acc, result_of(p, run, share, head).first_row + row, rows - row, lane);
            }
#pragma unroll 1
            for (held = 0;;) {
                const int stage = (turn + held) % STAGES;
                if (pass == 0) {
                    if (passes > 1)
                        wait_for_copies<0>();
                    else
                        wait_for_copies<STAGES - 1>();
                    sync(many);
                }
                const Tile& about = shared.tile[stage][warp];
                ends = about.flags & LAST;
                if (pass == 0) install_part(p, about, shared.stage[stage], head, warp, lane);
                if (active)
#pragma unroll 1
                    for (int token = many ? 0 : warp * MMA_TOKENS; token < TILE; token += many ? MMA_TOKENS : TILE)
                        attend_part(p, acc, query, offsets, about.tokens, about.skipped,
                                    shared_address(shared.stage[stage]), token, lane);
                ++held;
                if (ends && !many) break;  // the stage is needed still
                if (pass == passes - 1) {
                    sync(many);
                    loader.load(p, shared, stage, head, warp, lane);
                }
                if (ends || (passes > 1 && held == STAGES)) break;
            }
            if (many && active && (passes > 1 || ends))
                keep_rows(p, acc, result_of(p, run, share, head).first_row + row, rows - row, lane);
            __syncwarp();
        }
        turn += held;
        begins = false;
    }
    if (!many) {
        const int stage = (turn - 1) % STAGES;
        float* memory = reinterpret_cast<float*>(shared.stage[stage]);
        merge_warps(p, memory, shared.merging, result_of(p, run, share, head), acc, warp, lane);
        consumers_sync();
        loader.load(p, shared, stage, head, warp, lane);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) decode(const __grid_constant__ Problem p) {
    extern __shared__ __align__(128) char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    // The same in all lanes, which the compiler sees by the shuffles, and spares registers.
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    const int share = __shfl_sync(~0u, blockIdx.x / p.kv_heads, 0), head = blockIdx.x % p.kv_heads;
    if (share >= p.shares->count()) return;
    const Offsets offsets(lane);
    Loader loader(p, share, warp);
    int turn = 0;
    for (int stage = 0; stage < STAGES; ++stage) loader.load(p, shared, stage, head, warp, lane);
#pragma unroll 1
    while (true) {
        const Tile& about = shared.tile[turn % STAGES][warp];
        if (about.flags & STOP) break;
        attend_run(p, shared, loader, offsets, turn, about.run, share, head, warp, lane);
    }
}

extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)
combine(const __grid_constant__ Problem p, const __grid_constant__ Chain chain) {
    combine_sequences(p, chain, [] {});
}
