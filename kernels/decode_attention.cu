// Attention of one query per sequence over blocks at raw addresses; see decode_attention.py.
//
// A persistent grid divides tiles of blocks evenly among teams of CTAs, one CTA of a team for each KV head. In each CTA
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
// variant: HEAD_DIM=256 BFLOAT16=0 SWIZZLED=1 TILE=64 STAGES=2 CTAS_PER_SM=1
constexpr int WARPS = 4;  // that attend, beside the one that copies

#include "attention.cuh"
#include "bulk.cuh"
#include "decode_plan.cuh"
#include "decode_work.cuh"

constexpr int QUERY_BYTES = MMA_ROWS * ROW_BYTES;
constexpr int MOST_BLOCKS = TILE / 16;  // blocks of a tile
// Tiles that are held while the rows of a large run go over them.
constexpr int CHUNK = STAGES;

// Tiles before the end of a share, when the next one is looked for: early enough to know its words in time, and late, so
// that whoever waits for slow memory takes nothing that others could do meanwhile.
constexpr int AHEAD = 3;

enum { FIRST = 1, LAST = 2, INSTALLS = 4, CHUNK_END = 8, STOP = 16 };

// What the consumers know about a tile.
struct __align__(16) Tile {
    int flags;
    int tokens;    // how many of the tile are to be attended to, and how many of these are skipped
    int skipped;
    Result result;
    int column;    // of its first block
    u64 targets[MOST_BLOCKS];  // where blocks are installed; 0: nowhere
};

// What decode_attention.py counts on for the size of shared memory.
static_assert(sizeof(Tile) == 48 + 8 * MOST_BLOCKS && sizeof(Result) == 20);

struct Shared {
    char stage[STAGES][STAGE_BYTES];
    char query[STAGES][QUERY_BYTES];
    Tile tile[STAGES];
    u64 full[STAGES], empty[STAGES];
    __align__(16) float rows[WARPS * MMA_ROWS * HEAD_DIM];  // of warps that merge
    Merging merging;
    Result result[WARPS];  // that each warp is at the end of
};

__device__ void produce(const Problem& p, Shared& shared, int lane) {
    int turn = 0;
    bool waits = true;
    // From its return on memory may be read that the kernels before have written.
    const auto wait_once = [&] {
        if (waits) wait_for_kernels_before();
        waits = false;
    };
    if (!p.settled) wait_once();
    const Shares& shares = *p.shares;
    const int head = blockIdx.x % p.kv_heads;
    const int blocks = TILE / p.block_tokens;
    const int plane = lane / blocks, block = lane % blocks;
    const bool copies = lane < 2 * blocks;
    const u32 slice = p.block_tokens * ROW_BYTES;
    const i64 offset = p.layer_offset + (plane * p.kv_heads + head) * p.slice_bytes;
    const auto take = [&] {
        int taken = 0;
        if (lane == 0) taken = atomicAdd(p.taken + head, 1);
        return shares.teams + __shfl_sync(~0u, taken, 0);
    };
    // The 32 words from a column on. They come ahead of use, by several tiles' time: those of the next run too.
    const auto words_from = [&](const Run& run, int from, int stop) {
        return run.position < stop && from + lane < run.end - run.begin
                   ? __ldg(p.table + run.leader * p.table_stride + run.begin + from + lane)
                   : 0;
    };
    // Of the rows that one accumulator holds, whose they are.
    const auto members_of = [&](const Run& run) {
        return run.rows <= MMA_ROWS && lane < run.count ? p.members[run.members + lane] : 0;
    };
    const auto load_queries = [&](const Run& run, int member, int stage) {
        const u32 full = shared_address(&shared.full[stage]), bytes = p.group * ROW_BYTES;
        if (lane == 0) barrier_expect(full, run.rows * ROW_BYTES);
        __syncwarp();
        if (lane >= run.count) return;
        const u16* q = p.q + member * p.q_stride + head * p.group * HEAD_DIM;
        bulk_load(shared_address(shared.query[stage]) + lane * bytes, reinterpret_cast<u64>(q), bytes, full);
    };
    int share = blockIdx.x / p.kv_heads;
    if (share >= shares.teams) {
        if (shares.levels > 1) wait_once();
        share = shares.levels > 1 ? take() : shares.count();
    }
    if (share < shares.count()) {
        const Start& start = p.starts[share];
        int index = start.index, column = start.column, stop = start.stop;
        Run run = start.run, next_run = start.next;
        u64 at_hand = words_from(run, column, stop);
        int member = members_of(run);
        while (true) {
            const int base = run.position;
            const bool last_run = base + run.size >= stop;  // of the share
            const int until = min(run.end - run.begin, first_column(base, run.weight, stop, blocks));
            int at = 0;  // of the words at hand, the first that was not used
            u64 ahead = words_from(run, column + 32, stop);
            u64 next_words = last_run ? 0 : words_from(next_run, 0, stop);
            int next_member = last_run ? 0 : members_of(next_run);
            Run run_after = p.runs[index + 2];
            // After the last run of a share comes the first of the next one, which is looked for step by step.
            int steps = 0, next_share = share, next_index = index + 1, next_column = 0, next_stop = stop;
            const auto look_ahead = [&] {
                if (steps == 0) {
                    next_share = shares.levels > 1 ? take() : shares.count();
                } else if (next_share < shares.count()) {
                    if (steps == 1) {
                        const Start& next = p.starts[next_share];
                        next_run = next.run;
                        run_after = next.next;
                        next_index = next.index;
                        next_column = next.column;
                        next_stop = next.stop;
                    } else {
                        next_words = words_from(next_run, next_column, next_stop);
                        next_member = members_of(next_run);
                    }
                }
                ++steps;
            };
            // Of a plan that was used before, only a sequence's last token was written since, so that the ring fills
            // with tiles before its last one while the kernels before still run. What else they write is waited for.
            int early = 0;
            const bool few = run.rows <= MMA_ROWS;
            const int first_row = run.rows_at + (head * run.parts + share - run.share) * run.rows;
            int held = 0;
            for (int first = column; column < until; column += blocks, ++turn) {
                const u64 word = __shfl_sync(~0u, at_hand, at + block);
                if ((at += blocks) == 32) {
                    at = 0;
                    at_hand = ahead;
                    ahead = words_from(run, column + blocks + 32, stop);
                }
                const int here = min(blocks, until - column);
                const bool copied = copies && block < here;
                const bool begins = column == first, ends = column + blocks >= until;
                if (waits && (ends || turn == STAGES)) {
                    wait_once();
                    if (early > 0 && few) load_queries(run, member, 0);
                    __syncwarp();
                    if (lane < ARRIVALS)
                        for (int i = 0; i < early; ++i) barrier_arrive(shared_address(&shared.full[i]));
                }
                early += waits;
                const u64 source = (word & ~TAG_MASK) + offset;
                const int stage = turn % STAGES;
                const u32 full = shared_address(&shared.full[stage]);
                const u32 memory = shared_address(shared.stage[stage]) + (plane * TILE + block * p.block_tokens) * ROW_BYTES;
                if (turn >= STAGES) barrier_wait(shared_address(&shared.empty[stage]), (turn / STAGES - 1) & 1);
                if (lane == 0) barrier_expect(full, here * 2 * slice);
                __syncwarp();
                if (copied) bulk_load(memory, source, slice, full);
                if (begins && few && !waits) load_queries(run, member, stage);
                Tile& about = shared.tile[stage];
                u64 target = 0;
                if (copied && (word & TAG_INSTALL) && p.install != nullptr)
                    target = p.install[run.leader * p.install_stride + run.begin + column + block];
                const bool installs = __any_sync(~0u, target != 0);
                if (installs)
                    for (int i = 0; i < MOST_BLOCKS; ++i) {
                        const u64 to = __shfl_sync(~0u, target, i);
                        if (lane == 0) about.targets[i] = to;
                    }
                const bool chunk_ends = ends || ++held == CHUNK;
                if (chunk_ends) held = 0;
                if (lane == 0) {
                    about.flags = (begins ? FIRST : 0) | (ends ? LAST : 0) | (installs ? INSTALLS : 0) |
                                  (chunk_ends ? CHUNK_END : 0);
                    about.tokens = min(here * p.block_tokens, run.tokens - column * p.block_tokens);
                    about.skipped = column == 0 ? run.skipped : 0;
                    about.result.rows = run.rows;
                    about.result.members = run.members;
                    about.result.head = head;
                    about.result.first_row = first_row;
                    about.result.alone = run.alone;
                    about.column = run.begin + column;
                }
                __syncwarp();
                if (waits) continue;  // it arrives when the wait is over
                if (lane < ARRIVALS) barrier_arrive(full);
                if (last_run && steps < 3 && until - column <= AHEAD * blocks) look_ahead();
            }
            wait_once();
            if (last_run) {
                while (steps < 3) look_ahead();
                if (next_share >= shares.count()) break;
            }
            share = next_share;
            index = next_index;
            column = next_column;
            stop = next_stop;
            run = next_run;
            next_run = run_after;
            at_hand = next_words;
            member = next_member;
            while (run.size == 0) {
                run = next_run;
                at_hand = words_from(run, 0, stop);
                member = members_of(run);
                next_run = p.runs[++index + 1];
            }
        }
    }
    wait_once();
    const int stage = turn % STAGES;
    if (turn >= STAGES) barrier_wait(shared_address(&shared.empty[stage]), (turn / STAGES - 1) & 1);
    if (lane == 0) shared.tile[stage].flags = STOP;
    __syncwarp();
    if (lane < ARRIVALS) barrier_arrive(shared_address(&shared.full[stage]));
}

// Write a tile's 16 tokens from `token` on to where their block is installed, once per different place.
__device__ void install_part(const Problem& p, const Tile& about, u32 stage, int token) {
    const int block = token / p.block_tokens;
    const u64 target = about.targets[block];
    if (target == 0) return;
    const i64 inside = p.layer_offset + about.result.head * p.slice_bytes + (token % p.block_tokens) * ROW_BYTES;
    const int sequences = about.result.rows / p.group;
    u64 last = 0;
    for (int m = 0; m < sequences; ++m) {
        const u64 to = m == 0 ? target
                              : p.install[p.members[about.result.members + m] * p.install_stride + about.column + block];
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
    if (lane < ARRIVALS) barrier_arrive(shared_address(&shared.empty[stage]));
}

// Where the 32-bit words of a row of the query are: in the stage of a run's first tile, or where they came from.
__device__ __forceinline__ const u32* query_row(const Problem& p, const Shared& shared, int stage, int row) {
    const Tile& about = shared.tile[stage];
    if (row >= about.result.rows) return nullptr;
    if (about.result.rows <= MMA_ROWS) return reinterpret_cast<const u32*>(shared.query[stage]) + row * (ROW_BYTES / 4);
    const int sequence = p.members[about.result.members + row / p.group];
    return reinterpret_cast<const u32*>(p.q + sequence * p.q_stride +
                                        (about.result.head * p.group + row % p.group) * HEAD_DIM);
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
        const int all_rows = about.result.rows;
        const bool many = all_rows > MMA_ROWS;
        const int passes = many ? (all_rows + WARPS * MMA_ROWS - 1) / (WARPS * MMA_ROWS) : 1;
        const i64 first_at = about.result.first_row;
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
                        attend_part(p, acc, query, offsets, tile.tokens, tile.skipped, memory, token, lane);
                }
                ++held;
                if (these & LAST) {
                    __syncwarp();  // nobody reads that of the run before any more
                    if (lane == 0) shared.result[warp] = tile.result;
                }
                if (pass == passes - 1) release(shared, now, these & INSTALLS, lane);
                if (these & CHUNK_END) break;
            }
            if (many && active && (passes > 1 || (these & LAST)))
                keep_rows(p, acc, first_at + row, all_rows - row, lane);
            __syncwarp();
        }
        turn += held;
        if ((these & LAST) && !many) {
            merge_warps(p, shared.rows, shared.merging, shared.result[warp], acc, warp, lane);
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
            barrier_init(shared_address(&shared.full[i]), ARRIVALS);
            barrier_init(shared_address(&shared.empty[i]), WARPS * ARRIVALS);
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

extern "C" __global__ void __launch_bounds__(COMBINE_THREADS, 4)
combine(const __grid_constant__ Problem p, const __grid_constant__ Chain chain) {
    let_dependents_launch();
    combine_sequences(p, chain, [] { wait_for_kernels_before(); });
}
