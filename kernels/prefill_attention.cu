// Causal attention of a chunk of queries over blocks at raw addresses; see prefill_attention.py.
//
// A CTA takes the queries of a few tokens, all heads of one KV head, and goes over their keys and values: one warp has
// tiles copied from raw addresses into a ring in shared memory, and each of the others attends for 16 rows. Where few
// queries have long prefixes, the keys are divided among CTAs, and partial results merged by `merge`.
//
// `resolve` and `follow` find, once a step, where attention will read: pages that lie far are brought to VRAM before,
// to their place in the install table or to a staging ring, by kernels beside (copy_blocks.cu).
//
// Compiled with, beside those of attention.cuh: TILE, tokens of a tile; STAGES of the ring; WARPS that attend.
//
// architectures: sm_90a sm_100a
// variant: HEAD_DIM=64 BFLOAT16=0 SWIZZLED=1 TILE=128 STAGES=4 WARPS=8
// variant: HEAD_DIM=128 BFLOAT16=0 SWIZZLED=1 TILE=64 STAGES=4 WARPS=8
// variant: HEAD_DIM=128 BFLOAT16=1 SWIZZLED=1 TILE=64 STAGES=4 WARPS=8
// variant: HEAD_DIM=80 BFLOAT16=0 SWIZZLED=0 TILE=64 STAGES=4 WARPS=8
// variant: HEAD_DIM=256 BFLOAT16=0 SWIZZLED=1 TILE=64 STAGES=3 WARPS=4
#include "attention.cuh"
#include "bulk.cuh"

constexpr int STAGE_BYTES = TILE * 2 * ROW_BYTES;
constexpr int ROWS = WARPS * MMA_ROWS;  // of a CTA
constexpr int SPAN = 2 * MMA_TOKENS;    // tokens that a warp attends to at once
// A resolved word is the address of a block, or one of these beside a number in the bits above the tags.
constexpr u64 STAGED = 1;   // a page of the staging ring
constexpr u64 FOLLOWS = 2;  // what a sequence before has in this column
constexpr int NUMBER_SHIFT = 7;

struct Shared {
    char stage[STAGES][STAGE_BYTES];
    u64 full[STAGES], empty[STAGES];
};

struct Problem {
    const u16* q;
    i64 q_stride;  // elements from one token to the next
    const int* bounds;  // [sequences + 1]: the first query of each
    const int* lengths;
    int sequences;
    const u64* words;  // resolved
    i64 words_stride;
    u64 staging;  // where this layer's staged pages are
    u64 page_bytes;
    float* partial_out;   // [tiles][kv_heads][splits][ROWS][HEAD_DIM]
    float2* partial_sum;  // [tiles][kv_heads][splits][ROWS]: maximum and sum
    u16* out;
    i64 out_stride;
    i64 layer_offset;
    i64 slice_bytes;
    int group;  // query heads of a KV head
    int kv_heads;
    int block_tokens;
    int window;  // tokens that a query sees; 0 for all before it
    int tile_queries;  // tokens of a CTA's queries
    int tiles;
    int splits;
    float scale;  // of scores, times log2(e)
};

// The queries that a CTA attends for.
struct Task {
    int sequence, head;
    int first_query;     // of all queries
    int tokens;          // 0: nothing to do
    int first_position;  // of the first query in its sequence
    int begin, end;      // columns

    __device__ Task(const Problem& p, int tile, int split, int lane) {
        tokens = 0;
        int before = 0;  // tiles of the sequences before
        for (int from = 0; from < p.sequences; from += 32) {
            const int s = from + lane;
            const int queries = s < p.sequences ? p.bounds[s + 1] - p.bounds[s] : 0;
            int sum = (queries + p.tile_queries - 1) / p.tile_queries;
            const int mine = sum;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(~0u, sum, step);
                if (lane >= step) sum += other;
            }
            const int start = before + sum - mine;
            const u32 found = __ballot_sync(~0u, tile >= start && tile < start + mine);
            if (found != 0) {
                const int which = __ffs(found) - 1;
                sequence = from + which;
                const int first = (tile - __shfl_sync(~0u, start, which)) * p.tile_queries;
                const int all = __shfl_sync(~0u, queries, which), length = p.lengths[sequence];
                first_query = p.bounds[sequence] + first;
                tokens = min(p.tile_queries, all - first);
                first_position = length - all + first;
                begin = end = 0;
                if (length > 0) {
                    const int seen = p.window > 0 ? max(0, first_position - p.window + 1) : 0;
                    begin = seen / p.block_tokens;
                    end = (first_position + tokens + p.block_tokens - 1) / p.block_tokens;
                    const int columns = end - begin;
                    end = begin + columns * (split + 1) / p.splits;
                    begin = begin + columns * split / p.splits;
                }
                return;
            }
            before += __shfl_sync(~0u, sum, 31);
        }
    }
};

__device__ __forceinline__ void produce(const Problem& p, Shared& shared, const Task& task, int head, int lane) {
    const int blocks = TILE / p.block_tokens;
    const int plane = lane / blocks, block = lane % blocks;
    const bool copies = lane < 2 * blocks;
    const u32 slice = p.block_tokens * ROW_BYTES;
    const i64 inside = (plane * p.kv_heads + head) * p.slice_bytes;
    const u64* words = p.words + task.sequence * p.words_stride;
    // Words come 32 at a time, and 32 ahead of use: one load's time is that of several tiles.
    const auto words_from = [&](int column) { return column + lane < task.end ? __ldg(words + column + lane) : 0; };
    u64 at_hand = words_from(task.begin), ahead = words_from(task.begin + 32);
    int at = 0, turn = 0;
    for (int column = task.begin; column < task.end; column += blocks, ++turn) {
        const u64 word = __shfl_sync(~0u, at_hand, at + block);
        if ((at += blocks) == 32) {
            at = 0;
            at_hand = ahead;
            ahead = words_from(column + blocks + 32);
        }
        const int here = min(blocks, task.end - column), stage = turn % STAGES;
        const u64 page = word & STAGED ? p.staging + (word >> NUMBER_SHIFT) * p.page_bytes : word + p.layer_offset;
        const u32 full = shared_address(&shared.full[stage]);
        if (turn >= STAGES) barrier_wait(shared_address(&shared.empty[stage]), (turn / STAGES - 1) & 1);
        if (lane == 0) barrier_expect(full, here * 2 * slice);
        __syncwarp();
        if (copies && block < here)
            bulk_load(shared_address(shared.stage[stage]) + (plane * TILE + block * p.block_tokens) * ROW_BYTES,
                      page + inside, slice, full);
        if (lane < ARRIVALS) barrier_arrive(full);
    }
}

__device__ __forceinline__ void consume(const Problem& p, Shared& shared, const Task& task, int tile, int split,
                                        int head, int warp, int lane) {
    const int rows = task.tokens * p.group, first_row = warp * MMA_ROWS;
    const bool active = first_row < rows;
    const Offsets offsets(lane);
    Accumulator acc;
    Query query;
    acc.clear();
    int row[2], position[2];
    const u32* from[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        row[h] = first_row + (lane >> 2) + 8 * h;
        const int token = row[h] / p.group;
        position[h] = row[h] < rows ? task.first_position + token : -1;
        from[h] = row[h] < rows ? reinterpret_cast<const u32*>(p.q + (task.first_query + token) * p.q_stride +
                                                               (head * p.group + row[h] % p.group) * HEAD_DIM)
                                : nullptr;
    }
    load_query(query, from[0], from[1], lane);
    // Positions of the warp's first and last row; between them they ascend.
    const int earliest = task.first_position + first_row / p.group;
    const int latest = task.first_position + (min(first_row + MMA_ROWS, rows) - 1) / p.group;
    const int seen_from = p.window > 0 ? earliest - p.window + 1 : 0;    // by any row
    const int all_see_from = p.window > 0 ? latest - p.window + 1 : 0;
    int turn = 0;
    const int blocks = TILE / p.block_tokens;
    for (int column = task.begin; column < task.end; column += blocks, ++turn) {
        const int stage = turn % STAGES;
        barrier_wait(shared_address(&shared.full[stage]), (turn / STAGES) & 1);
        const u32 keys = shared_address(shared.stage[stage]), values = keys + TILE * ROW_BYTES;
        const int base = column * p.block_tokens, stop_here = task.end * p.block_tokens;
        if (active)
#pragma unroll 1
            for (int token = 0; token < TILE; token += SPAN) {
                const int first = base + token;
                if (first > latest || first >= stop_here || first + SPAN <= seen_from) continue;
                const u32 k = keys + token * ROW_BYTES, v = values + token * ROW_BYTES;
                if (first + SPAN - 1 <= earliest && first >= all_see_from && first + SPAN <= stop_here) {
                    attend<2, false>(acc, query, offsets, k, v, p.scale, lane, {0, 0}, {0, 0}, 0, 0);
                } else {
                    int low[2], high[2];
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        low[h] = p.window > 0 ? position[h] - p.window + 1 - first : 0;
                        high[h] = min(position[h] + 1, stop_here) - first;
                    }
                    attend<2, true>(acc, query, offsets, k, v, p.scale, lane, low, high, seen_from - first,
                                    min(latest + 1, stop_here) - first);
                }
            }
        fence_for_copies();
        __syncwarp();
        if (lane < ARRIVALS) barrier_arrive(shared_address(&shared.empty[stage]));
    }
    if (!active) return;
    acc.finish_sums();
    const int column = (lane & 3) * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (row[h] >= rows) continue;
        if (p.splits == 1) {
            const float inverse = acc.sum[h] > 0.f ? 1.f / acc.sum[h] : 0.f;
            u16* to = p.out + (task.first_query + row[h] / p.group) * p.out_stride +
                      (head * p.group + row[h] % p.group) * HEAD_DIM + column;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; ++i)
                *reinterpret_cast<u32*>(to + i * 8) = pack(acc.out[i][2 * h] * inverse, acc.out[i][2 * h + 1] * inverse);
        } else {
            const i64 at = ((static_cast<i64>(tile) * p.kv_heads + head) * p.splits + split) * ROWS + row[h];
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; ++i)
                *reinterpret_cast<float2*>(p.partial_out + at * HEAD_DIM + i * 8 + column) =
                    make_float2(acc.out[i][2 * h], acc.out[i][2 * h + 1]);
            if ((lane & 3) == 0) p.partial_sum[at] = make_float2(acc.most[h], acc.sum[h]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1), 1) prefill(const __grid_constant__ Problem p) {
    extern __shared__ __align__(128) char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&shared.full[i]), ARRIVALS);
            barrier_init(shared_address(&shared.empty[i]), WARPS * ARRIVALS);
        }
        barrier_init_done();
    }
    __syncthreads();
    // The last tiles have the most keys: they begin first.
    const int head = blockIdx.x % p.kv_heads, tile = p.tiles - 1 - blockIdx.x / p.kv_heads, split = blockIdx.y;
    const Task task(p, tile, split, lane);
    if (task.tokens == 0) return;
    if (warp == WARPS)
        produce(p, shared, task, head, lane);
    else
        consume(p, shared, task, tile, split, head, warp, lane);
}

constexpr int MERGE_THREADS = 128;

extern "C" __global__ void __launch_bounds__(MERGE_THREADS) merge(const __grid_constant__ Problem p) {
    const int head = blockIdx.x % p.kv_heads, tile = blockIdx.x / p.kv_heads;
    const Task task(p, tile, 0, threadIdx.x & 31);
    const int rows = task.tokens * p.group;
    const i64 first = (static_cast<i64>(tile) * p.kv_heads + head) * p.splits * ROWS;
    for (int e = threadIdx.x; e < rows * (HEAD_DIM / 4); e += MERGE_THREADS) {
        const int r = e / (HEAD_DIM / 4), d = (e % (HEAD_DIM / 4)) * 4;
        Merged merged;
        for (int from = 0; from < p.splits; from += Merged::AT_ONCE)
            merged.add(min(Merged::AT_ONCE, p.splits - from), [&](int i) { return first + (from + i) * ROWS + r; },
                       p.partial_sum, p.partial_out + d);
        u16* to = p.out + (task.first_query + r / p.group) * p.out_stride + (head * p.group + r % p.group) * HEAD_DIM;
        write_out(to, nullptr, 0, d, merged.out, merged.most, merged.sum);
    }
}

struct Resolution {
    const u64* table;
    i64 table_stride;
    const u64* install;  // null: nothing is installed
    i64 install_stride;
    const int* lengths;
    int sequences;
    int block_tokens;
    int columns;
    int staging_pages;  // that the staging ring has for a layer
    u64* words;  // [sequences][columns]
    // What is to be brought: pages to install, and pages to stage
    u64 *install_from, *install_to, *stage_from, *stage_to;
    u32* counts;  // of the two
    u64 staging;
    u64 page_bytes;
};

constexpr int RESOLVE_THREADS = 256;

extern "C" __global__ void __launch_bounds__(RESOLVE_THREADS) resolve(const __grid_constant__ Resolution r) {
    const int column = blockIdx.x * RESOLVE_THREADS + threadIdx.x, sequence = blockIdx.y;
    if (column >= (r.lengths[sequence] + r.block_tokens - 1) / r.block_tokens) return;
    const u64 word = r.table[sequence * r.table_stride + column];
    u64& resolved = r.words[static_cast<i64>(sequence) * r.columns + column];
    const u64 address = word & ~TAG_MASK;
    const u64 place = (word & TAG_INSTALL) && r.install != nullptr
                          ? r.install[sequence * r.install_stride + column] & ~TAG_MASK
                          : 0;
    if (place == 0 && !(word & TAG_FAR)) {
        resolved = address;
        return;
    }
    // Of sequences that share a page, the first brings it.
    int before = 0;
    for (; before < sequence; ++before)
        if (column < (r.lengths[before] + r.block_tokens - 1) / r.block_tokens &&
            r.table[before * r.table_stride + column] == word)
            break;
    const bool first = before == sequence;
    if (place != 0) {
        resolved = place;
        if (first || (r.install[before * r.install_stride + column] & ~TAG_MASK) != place) {
            const u32 at = atomicAdd(r.counts, 1);
            r.install_from[at] = address;
            r.install_to[at] = place;
        }
    } else if (!first) {
        resolved = static_cast<u64>(before) << NUMBER_SHIFT | FOLLOWS;
    } else {
        const u32 at = atomicAdd(r.counts + 1, 1);
        if (at < static_cast<u32>(r.staging_pages)) {
            r.stage_from[at] = address;
            r.stage_to[at] = r.staging + at * r.page_bytes;
            resolved = static_cast<u64>(at) << NUMBER_SHIFT | STAGED;
        } else {
            resolved = address;  // read in place, by every CTA that needs it
        }
    }
}

extern "C" __global__ void __launch_bounds__(RESOLVE_THREADS) follow(const __grid_constant__ Resolution r) {
    const int column = blockIdx.x * RESOLVE_THREADS + threadIdx.x, sequence = blockIdx.y;
    if (column == 0 && sequence == 0) r.counts[1] = min(r.counts[1], static_cast<u32>(r.staging_pages));
    if (column >= (r.lengths[sequence] + r.block_tokens - 1) / r.block_tokens) return;
    u64& resolved = r.words[static_cast<i64>(sequence) * r.columns + column];
    if (resolved & FOLLOWS) resolved = r.words[static_cast<i64>(resolved >> NUMBER_SHIFT) * r.columns + column];
}
