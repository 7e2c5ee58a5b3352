// Attention of one query per sequence over blocks at raw addresses; see decode_attention.py.
//
// A persistent grid divides the blocks evenly among teams of CTAs, one CTA of a team for each KV head. In each CTA
// one warp has tiles copied from raw addresses into a ring in shared memory, whatever memory they lie in, and the
// other warps consume them:
// - a run whose rows fit one accumulator: the warps share the tokens of a tile, and merge at the end;
// - a run of more rows (many sequences on one prefix): the warps share the rows, and every tile is read once and
//   used for all of them.
// Where a KV head's work is divided among CTAs, or a sequence has several runs, partial results are merged by
// log-sum-exp in `combine`, in an order that depends on lengths and sharing only, never on where blocks lie.
//
// Compiled with, beside those of attention.cuh: TILE, tokens of a tile; STAGES of the ring; CTAS_PER_SM.
//
// architectures: sm_90a sm_100a
// variant: HEAD_DIM=64 BFLOAT16=0 SWIZZLED=1 TILE=128 STAGES=2 CTAS_PER_SM=2
// variant: HEAD_DIM=128 BFLOAT16=0 SWIZZLED=1 TILE=64 STAGES=2 CTAS_PER_SM=2
// variant: HEAD_DIM=128 BFLOAT16=1 SWIZZLED=1 TILE=64 STAGES=3 CTAS_PER_SM=1
// variant: HEAD_DIM=80 BFLOAT16=0 SWIZZLED=0 TILE=64 STAGES=3 CTAS_PER_SM=2
// variant: HEAD_DIM=256 BFLOAT16=0 SWIZZLED=1 TILE=64 STAGES=3 CTAS_PER_SM=1
#include "attention.cuh"
#include "bulk.cuh"
#include "decode_plan.cuh"

constexpr int WARPS = 4;
constexpr int STAGE_BYTES = TILE * 2 * ROW_BYTES;
constexpr int QUERY_BYTES = MMA_ROWS * ROW_BYTES;
constexpr int MOST_BLOCKS = TILE / 16;  // blocks of a tile
// Tiles that are held while the rows of a large run go over them.
constexpr int CHUNK = STAGES;

enum { FIRST = 1, LAST = 2, INSTALLS = 4, CHUNK_END = 8, STOP = 16 };

// What the consumers know about a tile.
struct __align__(16) Tile {
    int flags;
    int tokens;    // how many of the tile are to be attended to, and how many of these are skipped
    int skipped;
    int rows;
    int members;
    int head;
    int rows_at;   // where the first part of the result goes
    int part;      // which of them this one is
    int parts;     // of how many; 0: `combine` will know
    int arrived;   // where parts that are done are counted
    int column;    // of its first block
    int unused;
    u64 targets[MOST_BLOCKS];  // where blocks are installed; 0: nowhere
};

struct Shared {
    char stage[STAGES][STAGE_BYTES];
    char query[STAGES][QUERY_BYTES];
    float2 merge[WARPS][MMA_ROWS];  // maximum and sum
    Tile tile[STAGES];
    u64 full[STAGES], empty[STAGES];
    int last;  // whether this CTA is the last that worked on a run
};

struct Problem {
    const u16* q;
    i64 q_stride;  // elements from one sequence to the next
    const u64* table;
    i64 table_stride;
    const u64* install;  // null: nothing is installed
    i64 install_stride;
    const Shares* shares;
    const Run* runs;
    const Start* starts;
    const int* members;
    int* arrived;
    float* partial_out;  // [rows][HEAD_DIM]
    float2* partial_sum; // [rows]: maximum and sum
    u16* out;
    i64 out_stride;
    float* lse;  // [sequences][query heads], or null
    i64 layer_offset;
    i64 slice_bytes;
    int settled;  // the plan was used by a kernel before: it may be read without waiting
    int group;  // query heads of a KV head
    int kv_heads;
    int block_tokens;
    float scale;  // of scores, times log2(e)
};

__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory"); }

__device__ __forceinline__ u16* out_rows(const Problem& p, int sequence, int head) {
    return p.out + sequence * p.out_stride + head * p.group * HEAD_DIM;
}

__device__ __forceinline__ float* lse_rows(const Problem& p, int sequence, int head) {
    return p.lse == nullptr ? nullptr : p.lse + (static_cast<i64>(sequence) * p.kv_heads + head) * p.group;
}

__device__ void produce(const Problem& p, Shared& shared, int lane) {
    int turn = 0;
    bool waits = p.settled;
    if (!waits) wait_for_kernels_before();
    const Shares shares = *p.shares;
    const int share = blockIdx.x / p.kv_heads, head = blockIdx.x % p.kv_heads;
    if (share < shares.count) {
        const int blocks = TILE / p.block_tokens;
        const int plane = lane / blocks, block = lane % blocks;
        const bool copies = lane < 2 * blocks;
        const u32 slice = p.block_tokens * ROW_BYTES;
        const i64 offset = p.layer_offset + (plane * p.kv_heads + head) * p.slice_bytes;
        const Start& start = p.starts[share];
        const int stop = start.stop;
        int index = start.index, column = start.column;
        Run run = start.run, next_run = p.runs[index + 1];
        // The 32 words from a column on. They come ahead of use, by several tiles' time: those of the next run too.
        const auto words_from = [&](const Run& of, int from) {
            return of.position < stop && from + lane < of.end - of.begin
                       ? __ldg(p.table + of.leader * p.table_stride + of.begin + from + lane)
                       : 0;
        };
        u64 at_hand = words_from(run, column);
        while (true) {
            const int base = run.position;
            const int until = min(run.end - run.begin, first_column(base, run.weight, stop));
            int at = 0;  // of the words at hand, the first that was not used
            u64 ahead = words_from(run, column + 32);
            const u64 next_words = words_from(next_run, 0);
            const Run run_after = p.runs[index + 2];
            // From here on memory is read that the kernels before may have written.
            if (waits) wait_for_kernels_before();
            waits = false;
            const bool few = run.rows <= MMA_ROWS;
            const int part = share - shares.owner(base), parts = shares.parts(run);
            const int rows_at = run.rows_at + head * parts * run.rows;
            int held = 0;
            for (int first = column; column < until; column += blocks, ++turn) {
                const u64 word = __shfl_sync(~0u, at_hand, at + block);
                if ((at += blocks) == 32) {
                    at = 0;
                    at_hand = ahead;
                    ahead = words_from(run, column + blocks + 32);
                }
                const int here = min(blocks, until - column);
                const bool copied = copies && block < here;
                const bool begins = column == first, ends = column + blocks >= until;
                const bool queries = begins && few;
                const u64 source = (word & ~TAG_MASK) + offset;
                const int stage = turn % STAGES;
                const u32 full = shared_address(&shared.full[stage]);
                const u32 memory = shared_address(shared.stage[stage]) + (plane * TILE + block * p.block_tokens) * ROW_BYTES;
                if (turn >= STAGES) barrier_wait(shared_address(&shared.empty[stage]), (turn / STAGES - 1) & 1);
                if (lane == 0) barrier_expect(full, here * 2 * slice + (queries ? run.rows * ROW_BYTES : 0));
                __syncwarp();
                if (copied) bulk_load(memory, source, slice, full);
                if (queries && lane < run.count) {
                    const u32 bytes = p.group * ROW_BYTES;
                    const u16* q = p.q + p.members[run.members + lane] * p.q_stride + head * p.group * HEAD_DIM;
                    bulk_load(shared_address(shared.query[stage]) + lane * bytes, reinterpret_cast<u64>(q), bytes, full);
                }
                Tile& about = shared.tile[stage];
                u64 target = 0;
                if (copied && (word & TAG_INSTALL) && p.install != nullptr)
                    target = p.install[run.leader * p.install_stride + run.begin + column + block];
                const bool installs = __any_sync(~0u, target != 0);
                if (installs && copies && plane == 0) about.targets[block] = target;
                const bool chunk_ends = ends || ++held == CHUNK;
                if (chunk_ends) held = 0;
                if (lane == 0) {
                    about.flags = (begins ? FIRST : 0) | (ends ? LAST : 0) | (installs ? INSTALLS : 0) |
                                  (chunk_ends ? CHUNK_END : 0);
                    about.tokens = min(here * p.block_tokens, run.tokens - column * p.block_tokens);
                    about.skipped = column == 0 ? run.skipped : 0;
                    about.rows = run.rows;
                    about.members = run.members;
                    about.head = head;
                    about.rows_at = rows_at;
                    about.part = part;
                    about.parts = run.alone ? parts : 0;
                    about.arrived = index * p.kv_heads + head;
                    about.column = run.begin + column;
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(full);
            }
            if (base + run.size >= stop) break;
            column = 0;
            ++index;
            run = next_run;
            next_run = run_after;
            at_hand = next_words;
            while (run.size == 0) {
                run = next_run;
                at_hand = words_from(run, 0);
                next_run = p.runs[++index + 1];
            }
        }
    }
    if (waits) wait_for_kernels_before();
    const int stage = turn % STAGES;
    if (turn >= STAGES) barrier_wait(shared_address(&shared.empty[stage]), (turn / STAGES - 1) & 1);
    if (lane == 0) {
        shared.tile[stage].flags = STOP;
        barrier_arrive(shared_address(&shared.full[stage]));
    }
}

// Attend to a tile's 16 tokens from `token` on.
__device__ __forceinline__ void attend_part(const Problem& p, Accumulator& acc, const Query& query,
                                            const Offsets& offsets, const Tile& about, u32 stage, int token, int lane) {
    const int stop = about.tokens - token, first = about.skipped - token;
    if (stop <= 0 || first >= MMA_TOKENS) return;
    const u32 keys = stage + token * ROW_BYTES, values = keys + TILE * ROW_BYTES;
    if (stop >= MMA_TOKENS && first <= 0)
        attend<1, false>(acc, query, offsets, keys, values, p.scale, lane, {0, 0}, {16, 16}, 0, 16);
    else
        attend<1, true>(acc, query, offsets, keys, values, p.scale, lane, {first, first}, {stop, stop}, first, stop);
}

// Write a tile's 16 tokens from `token` on to where their block is installed, once per different place.
__device__ void install_part(const Problem& p, const Tile& about, u32 stage, int token) {
    const int block = token / p.block_tokens;
    const u64 target = about.targets[block];
    if (target == 0) return;
    const i64 inside = p.layer_offset + about.head * p.slice_bytes + (token % p.block_tokens) * ROW_BYTES;
    const int sequences = about.rows / p.group;
    u64 last = 0;
    for (int m = 0; m < sequences; ++m) {
        const u64 to = m == 0 ? target
                              : p.install[p.members[about.members + m] * p.install_stride + about.column + block];
        if (to == last || (m > 0 && to == target)) continue;
        last = to;
        for (int plane = 0; plane < 2; ++plane)
            bulk_store(to + inside + plane * p.kv_heads * p.slice_bytes,
                       stage + (plane * TILE + token) * ROW_BYTES, MMA_TOKENS * ROW_BYTES);
    }
    bulk_commit();
}

// Give a stage back to the producer: this warp will not touch it any more.
__device__ __forceinline__ void release(Shared& shared, int stage, bool installed, int lane) {
    fence_for_copies();
    if (installed && lane == 0) bulk_wait_read();
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&shared.empty[stage]));
}

// Spreads the rows of accumulators over the banks of shared memory, where their width allows it.
__device__ __forceinline__ int merge_flip(int row) { return HEAD_DIM % 32 == 0 ? (row & 3) * 8 : 0; }

// Merges all parts of a run's KV head. `memory` is shared.
__device__ __forceinline__ void merge_parts(const Problem& p, const Tile& about, float2* memory) {
    constexpr int AT_ONCE = STAGE_BYTES / sizeof(float2) / MMA_ROWS;
    const int rows = about.rows, sequence = p.members[about.members];
    const float2* sums = p.partial_sum + about.rows_at;
    const float* outs = p.partial_out + static_cast<i64>(about.rows_at) * HEAD_DIM;
    u16* to = out_rows(p, sequence, about.head);
    float* lse = lse_rows(p, sequence, about.head);
#pragma unroll 1
    for (int first_word = 0; first_word < rows * (HEAD_DIM / 4); first_word += 32 * WARPS) {
        const int e = first_word + threadIdx.x;
        const int r = min(e / (HEAD_DIM / 4), rows - 1), d = (e % (HEAD_DIM / 4)) * 4;
        float most = LOWEST, sum = 0.f;
        float4 out = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
        for (int first = 0; first < about.parts; first += AT_ONCE) {
            const int count = min(AT_ONCE, about.parts - first);
            consumers_sync();
            for (int i = threadIdx.x; i < count * rows; i += 32 * WARPS) memory[i] = __ldcg(sums + first * rows + i);
            consumers_sync();
            float top = most;
            for (int i = 0; i < count; ++i) top = fmaxf(top, memory[i * rows + r].x);
            const float shrink = exp2_fast(most - top);
            most = top;
            sum *= shrink;
            const float4 before = out;
            out = make_float4(0.f, 0.f, 0.f, 0.f);
            add_scaled(out, shrink, before);
            const float* from = outs + (first * rows + r) * HEAD_DIM + d;
#pragma unroll 16
            for (int i = 0; i < count; ++i) {
                const float2 part = memory[i * rows + r];
                const float factor = exp2_fast(part.x - top);
                sum += factor * part.y;
                add_scaled(out, factor, __ldcg(reinterpret_cast<const float4*>(from + i * rows * HEAD_DIM)));
            }
        }
        if (e < rows * (HEAD_DIM / 4)) write_out(to, lse, r, d, out, most, sum);
    }
    consumers_sync();
}

// The end of a run of few rows: the four warps' shares become one result. Their rows go through the stage of the
// last tile, which is given back.
__device__ void merge_warps(const Problem& p, Shared& shared, Accumulator& acc, int stage, int warp, int lane) {
    acc.finish_sums();
    const int row = lane >> 2, column = (lane & 3) * 2, rows = shared.tile[stage].rows;
    float* mine = reinterpret_cast<float*>(shared.stage[stage]) + (warp * MMA_ROWS + row) * HEAD_DIM;
    float* places[4];  // of every fourth eight columns
#pragma unroll
    for (int i = 0; i < 4; ++i) places[i] = mine + ((i * 8 + column) ^ merge_flip(row));
    consumers_sync();  // everybody is done with the tile
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int r = row + 8 * h;
        if (r >= rows) continue;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; ++i)
            *reinterpret_cast<float2*>(places[i & 3] + h * 8 * HEAD_DIM + (i >> 2) * 32) =
                make_float2(acc.out[i][2 * h], acc.out[i][2 * h + 1]);
        if ((lane & 3) == 0) shared.merge[warp][r] = make_float2(acc.most[h], acc.sum[h]);
    }
    consumers_sync();
    const Tile about = shared.tile[stage];
    const float* all = reinterpret_cast<const float*>(shared.stage[stage]);
    for (int e = threadIdx.x; e < rows * (HEAD_DIM / 4); e += 32 * WARPS) {
        const int r = e / (HEAD_DIM / 4), d = (e % (HEAD_DIM / 4)) * 4;
        float most = LOWEST, sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) most = fmaxf(most, shared.merge[w][r].x);
        float4 out = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float2 part = shared.merge[w][r];
            const float factor = exp2_fast(part.x - most);
            sum += factor * part.y;
            add_scaled(out, factor,
                       *reinterpret_cast<const float4*>(all + (w * MMA_ROWS + r) * HEAD_DIM + (d ^ merge_flip(r))));
        }
        if (about.parts == 1) {
            const int sequence = p.members[about.members];
            write_out(out_rows(p, sequence, about.head), lse_rows(p, sequence, about.head), r, d, out, most, sum);
        } else {
            const i64 at = about.rows_at + about.part * rows + r;
            *reinterpret_cast<float4*>(p.partial_out + at * HEAD_DIM + d) = out;
            if (d == 0) p.partial_sum[at] = make_float2(most, sum);
        }
    }
    if (about.parts > 1) __threadfence();
    consumers_sync();  // nobody reads the stage any more, and everybody's part is written
    if (about.parts > 1) {
        // Whoever comes last merges all parts. Every part is there, so the order is that of the columns.
        if (threadIdx.x == 0) {
            const int before = atomicAdd(p.arrived + about.arrived, 1);
            shared.last = before == about.parts - 1;
            if (shared.last) p.arrived[about.arrived] = 0;  // for the next layer
            __threadfence();
        }
        consumers_sync();
        if (shared.last) merge_parts(p, about, reinterpret_cast<float2*>(shared.stage[stage]));
    }
    release(shared, stage, false, lane);
}

// A warp's 16 rows of a large run, between the passes over its tiles.
__device__ __forceinline__ void keep_rows(const Problem& p, Accumulator& acc, i64 at, int rows, int lane) {
    const int row = lane >> 2, column = (lane & 3) * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int r = row + 8 * h;
        float sum = acc.sum[h];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (r >= rows) continue;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; ++i)
            *reinterpret_cast<float2*>(p.partial_out + (at + r) * HEAD_DIM + i * 8 + column) =
                make_float2(acc.out[i][2 * h], acc.out[i][2 * h + 1]);
        if ((lane & 3) == 0) p.partial_sum[at + r] = make_float2(acc.most[h], sum);
    }
}

__device__ __forceinline__ void resume_rows(const Problem& p, Accumulator& acc, i64 at, int rows, int lane) {
    const int row = lane >> 2, column = (lane & 3) * 2;
    acc.clear();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int r = row + 8 * h;
        if (r >= rows) continue;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; ++i) {
            const float2 x = *reinterpret_cast<const float2*>(p.partial_out + (at + r) * HEAD_DIM + i * 8 + column);
            acc.out[i][2 * h] = x.x;
            acc.out[i][2 * h + 1] = x.y;
        }
        const float2 part = p.partial_sum[at + r];
        acc.most[h] = part.x;
        acc.sum[h] = (lane & 3) == 0 ? part.y : 0.f;
    }
}

// Where the 32-bit words of a row of the query are: in the stage of a run's first tile, or where they came from.
__device__ __forceinline__ const u32* query_row(const Problem& p, const Shared& shared, int stage, int row) {
    const Tile& about = shared.tile[stage];
    if (row >= about.rows) return nullptr;
    if (about.rows <= MMA_ROWS) return reinterpret_cast<const u32*>(shared.query[stage]) + row * (ROW_BYTES / 4);
    const int sequence = p.members[about.members + row / p.group];
    return reinterpret_cast<const u32*>(p.q + sequence * p.q_stride +
                                        (about.head * p.group + row % p.group) * HEAD_DIM);
}

// Tiles, one run after the other. Of few rows, each warp takes its share of every tile's tokens. Of many, each warp
// takes 16 rows and goes over all tokens; more than the warps hold take several passes over tiles that are held
// meanwhile, with the rows kept as partial results in between.
__device__ __forceinline__ void consume(const Problem& p, Shared& shared, int warp, int lane) {
    const Offsets offsets(lane);
    Accumulator acc;
    Query query;
    bool stored = false;
    int turn = 0;
#pragma unroll 1
    while (true) {
        const int stage = turn % STAGES;
        barrier_wait(shared_address(&shared.full[stage]), (turn / STAGES) & 1);
        const Tile& about = shared.tile[stage];
        const int flags = about.flags;
        if (flags & STOP) break;
        const int all_rows = about.rows;
        const bool many = all_rows > MMA_ROWS;
        const int passes = many ? (all_rows + WARPS * MMA_ROWS - 1) / (WARPS * MMA_ROWS) : 1;
        const i64 first_at = about.rows_at + about.part * all_rows;
        int held = 0, these = 0;
#pragma unroll 1
        for (int pass = 0; pass < passes; ++pass) {
            const int row = many ? (pass * WARPS + warp) * MMA_ROWS : 0;
            const bool active = row < all_rows;
            if (active && (passes > 1 || (flags & FIRST))) {
                const int mine = row + (lane >> 2);
                load_query(query, query_row(p, shared, stage, mine), query_row(p, shared, stage, mine + 8), lane);
                if (flags & FIRST)
                    acc.clear();
                else
                    resume_rows(p, acc, first_at + row, all_rows - row, lane);
            }
#pragma unroll 1
            for (held = 0;;) {
                const int now = (turn + held) % STAGES;
                if (pass == 0 && held > 0) barrier_wait(shared_address(&shared.full[now]), ((turn + held) / STAGES) & 1);
                const Tile& tile = shared.tile[now];
                these = tile.flags;
                const u32 memory = shared_address(shared.stage[now]);
                const bool installs = pass == 0 && (these & INSTALLS);
                if (installs && lane == 0)
                    for (int token = warp * MMA_TOKENS; token < TILE; token += WARPS * MMA_TOKENS)
                        install_part(p, tile, memory, token);
                stored |= installs;
                if (active) {
                    int token = many ? 0 : warp * MMA_TOKENS;
                    const int step = many ? MMA_TOKENS : WARPS * MMA_TOKENS;
                    if (many)
#pragma unroll 1
                        for (; token + 2 * MMA_TOKENS <= tile.tokens; token += 2 * MMA_TOKENS)
                            attend<2, false>(acc, query, offsets, memory + token * ROW_BYTES,
                                             memory + (TILE + token) * ROW_BYTES, p.scale, lane, {0, 0}, {0, 0}, 0, 0);
#pragma unroll 1
                    for (; token < TILE; token += step)
                        attend_part(p, acc, query, offsets, tile, memory, token, lane);
                }
                ++held;
                if ((these & LAST) && !many) break;  // the stage is needed still
                if (pass == passes - 1) release(shared, now, these & INSTALLS, lane);
                if (these & CHUNK_END) break;
            }
            if (many && active && (passes > 1 || (these & LAST)))
                keep_rows(p, acc, first_at + row, all_rows - row, lane);
            __syncwarp();
        }
        turn += held;
        if ((these & LAST) && !many) {
            if (stored && lane == 0) bulk_wait_read();
            merge_warps(p, shared, acc, (turn - 1) % STAGES, warp, lane);
            // The next run begins anew: told to the compiler, so that it keeps nothing during the merge.
            acc.clear();
            query = Query{};
        }
    }
    if (stored && lane == 0) bulk_wait();
}

extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1), CTAS_PER_SM) decode(const __grid_constant__ Problem p) {
    extern __shared__ __align__(128) char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&shared.full[i]), 1);
            barrier_init(shared_address(&shared.empty[i]), WARPS);
        }
        barrier_init_done();
    }
    __syncthreads();
    let_dependents_launch();
    // What consumers touch comes after what the producer waits for.
    if (warp == WARPS)
        produce(p, shared, lane);
    else
        consume(p, shared, warp, lane);
}

// Merges what was found for the sequences that have several runs, in the order of their columns; see
// decode_plan.cu for how these are found. Sequences of no tokens get zeros.
struct Chain {
    const int* left;          // [LEFT]: the sequences
    const int* shared_with;   // [ROUNDS][sequences]: the leader, or -1
    const int* shared_until;  // [ROUNDS][sequences]: a column
    const int* rank;          // [ROUNDS][sequences]: the sequence's place in its leader's list
    const int* first_run;     // [sequences + 1]: of a leader
    const int* lengths;       // [sequences]
    int sequences;
};

constexpr int COMBINE_THREADS = 128;
constexpr int COMBINE_PARTS = 512;  // that are merged at a time
constexpr int COMBINE_WORDS = (MMA_ROWS * (HEAD_DIM / 4) + COMBINE_THREADS - 1) / COMBINE_THREADS;

// The partial results of one sequence's KV head, and what they add up to so far.
struct Combination {
    const Problem& p;
    int* rows;  // shared memory: where each part's rows begin
    int count = 0;
    Merged merged[COMBINE_WORDS];

    __device__ Combination(const Problem& problem, int* memory) : p(problem), rows(memory) {}

    __device__ void flush() {
        __syncthreads();
#pragma unroll
        for (int k = 0; k < COMBINE_WORDS; ++k) {
            const int e = threadIdx.x + k * COMBINE_THREADS;
            const int r = e / (HEAD_DIM / 4), d = (e % (HEAD_DIM / 4)) * 4;
            if (r < p.group)
                for (int first = 0; first < count; first += Merged::AT_ONCE)
                    merged[k].add(min(Merged::AT_ONCE, count - first), [&](int i) { return rows[first + i] + r; },
                                  p.partial_sum, p.partial_out + d);
        }
        count = 0;
        __syncthreads();
    }

    // The parts of one run, for the member of a place in its list.
    __device__ void add(const Run& run, int head, int member) {
        if (run.size == 0) return;
        const int parts = p.shares->parts(run);
        const int at = run.rows_at + head * parts * run.rows + member * p.group;
        for (int done = 0; done < parts;) {
            const int some = min(parts - done, COMBINE_PARTS - count);
            for (int i = threadIdx.x; i < some; i += COMBINE_THREADS) rows[count + i] = at + (done + i) * run.rows;
            count += some;
            done += some;
            if (count == COMBINE_PARTS) flush();
        }
    }

    __device__ void write(int sequence, int head) {
        flush();
#pragma unroll
        for (int k = 0; k < COMBINE_WORDS; ++k) {
            const int e = threadIdx.x + k * COMBINE_THREADS;
            const int r = e / (HEAD_DIM / 4), d = (e % (HEAD_DIM / 4)) * 4;
            if (r >= p.group) continue;
            write_out(out_rows(p, sequence, head), lse_rows(p, sequence, head), r, d, merged[k].out, merged[k].most,
                      merged[k].sum);
        }
    }
};

extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)
combine(const __grid_constant__ Problem p, const __grid_constant__ Chain chain) {
    __shared__ int rows[COMBINE_PARTS];
    let_dependents_launch();
    wait_for_kernels_before();
    const int tasks = p.shares->left * p.kv_heads;
    for (int task = blockIdx.x; task < tasks; task += gridDim.x) {
        const int sequence = chain.left[task / p.kv_heads], head = task % p.kv_heads;
        Combination merged(p, rows);
        if (chain.lengths[sequence] > 0) {
            const int rounds = p.shares->shared ? ROUNDS : 0;
            for (int round = 0; round < rounds; ++round) {
                const int at = round * chain.sequences + sequence;
                const int leader = chain.shared_with[at];
                if (leader < 0) break;
                const int until = chain.shared_until[at], member = chain.rank[at];
                for (int i = chain.first_run[leader]; i < chain.first_run[leader + 1]; ++i) {
                    const Run run = p.runs[i];
                    if (run.end > until) break;
                    merged.add(run, head, member);
                }
            }
            for (int i = chain.first_run[sequence]; i < chain.first_run[sequence + 1]; ++i)
                merged.add(p.runs[i], head, 0);
        }
        merged.write(sequence, head);
    }
}

// Installs what a window hides: the pages of blocks tagged *install* that attention does not read.
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)
install_hidden(const __grid_constant__ Problem p, const int* lengths, int window) {
    const int sequence = blockIdx.y, length = lengths[sequence];
    if (length <= window) return;
    const int hidden = (length - window) / p.block_tokens;
    const u64 page = 2 * p.kv_heads * p.slice_bytes;
    for (int column = blockIdx.x; column < hidden; column += gridDim.x) {
        const u64 word = p.table[sequence * p.table_stride + column];
        if (!(word & TAG_INSTALL)) continue;
        const u64 target = p.install[sequence * p.install_stride + column];
        if (target == 0) continue;
        const uint4* from = reinterpret_cast<const uint4*>((word & ~TAG_MASK) + p.layer_offset);
        uint4* to = reinterpret_cast<uint4*>(target + p.layer_offset);
        for (u64 i = threadIdx.x; i < page / 16; i += COMBINE_THREADS) to[i] = from[i];
    }
}
