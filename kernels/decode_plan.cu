// Finds, on the GPU, who shares which blocks in a decode step, and divides the work; see decode_attention.py.
//
// Sharing is found from the words of the block table themselves. In round after round each sequence looks for the
// first sequence that came the same way so far and has the same word next, its *leader*, and for how long their
// words stay equal. The columns that a sequence follows no one in are its own; leaders read theirs for their
// followers too. Only whole blocks are shared.
//
// Kernels of one step, in this order: `share` once per round, `rank`, `place`, `divide`.
//
// architectures: sm_80 sm_90a sm_100a
#include "decode_plan.cuh"

constexpr int NOBODY = -1;

struct Sharing {
    const u64* table;
    i64 table_stride;
    const int* lengths;
    int sequences;
    int block_tokens;
    int* with;     // [ROUNDS][sequences]: the leader, or NOBODY
    int* until;    // [ROUNDS][sequences]: the column after the last that is shared
    int* rank;     // [ROUNDS][sequences]: place in the leader's list, from 1 on; the leader itself is at 0
    int* above;    // [ROUNDS][sequences]: followers that share as much or more, the sequence itself included
    int* piece;    // [ROUNDS][sequences]: which of the leader's runs ends there, or NOBODY if another follower tells
    int* followers;  // [sequences]
    int* ends;       // [sequences]: different columns at which followers leave
};

// How far a sequence came before a round, and behind whom. False where it stopped looking.
__device__ __forceinline__ bool state_before(const Sharing& s, int round, int sequence, int& behind, int& column) {
    behind = NOBODY;
    column = 0;
    if (round > 0) {
        const int at = (round - 1) * s.sequences + sequence;
        behind = s.with[at];
        column = s.until[at];
        if (behind == NOBODY) return false;
    }
    return column < s.lengths[sequence] / s.block_tokens;
}

constexpr int SHARE_THREADS = 256;

extern "C" __global__ void __launch_bounds__(SHARE_THREADS) share(const __grid_constant__ Sharing s, int round) {
    __shared__ int best;
    const int me = blockIdx.x, at = round * s.sequences + me;
    int behind, column;
    const bool looking = state_before(s, round, me, behind, column);
    if (threadIdx.x == 0) {
        best = s.sequences;
        s.with[at] = NOBODY;
        s.until[at] = 0;
        if (round == 0) s.followers[me] = s.ends[me] = 0;
    }
    __syncthreads();
    const u64* mine = s.table + me * s.table_stride;
    if (!looking) return;
    const u64 word = mine[column];
    for (int from = 0; from < me; from += SHARE_THREADS) {
        const int other = from + threadIdx.x;
        if (other < me) {
            int theirs, their_column;
            if (state_before(s, round, other, theirs, their_column) && theirs == behind && their_column == column &&
                s.table[other * s.table_stride + column] == word)
                atomicMin(&best, other);
        }
        __syncthreads();
        const bool found = best < s.sequences;
        __syncthreads();
        if (found) break;
    }
    const int leader = best;
    if (leader == s.sequences) return;
    const int stop = min(s.lengths[me], s.lengths[leader]) / s.block_tokens;
    const u64* lead = s.table + leader * s.table_stride;
    __shared__ int differs;
    if (threadIdx.x == 0) differs = stop;
    __syncthreads();
    constexpr int STEP = 4;
    for (int from = column; from < stop; from += STEP * SHARE_THREADS) {
#pragma unroll
        for (int i = 0; i < STEP; ++i) {
            const int c = from + i * SHARE_THREADS + threadIdx.x;
            if (c < stop && mine[c] != lead[c]) atomicMin(&differs, c);
        }
        __syncthreads();
        const bool over = differs < stop;
        __syncthreads();
        if (over) break;
    }
    if (threadIdx.x == 0) {
        s.with[at] = leader;
        s.until[at] = differs;
    }
}

// Order the followers of each leader by how much they share, the most first.
extern "C" __global__ void __launch_bounds__(SHARE_THREADS) rank(const __grid_constant__ Sharing s) {
    __shared__ int before, as_much, same_before;
    const int me = blockIdx.x;
    for (int round = 0; round < ROUNDS; ++round) {
        const int at = round * s.sequences + me, leader = s.with[at], until = s.until[at];
        if (leader == NOBODY) return;
        if (threadIdx.x == 0) before = as_much = same_before = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < ROUNDS * s.sequences; i += SHARE_THREADS) {
            if (s.with[i] != leader) continue;
            const int theirs = s.until[i], other = i % s.sequences;
            if (theirs > until) atomicAdd(&before, 1);
            if (theirs == until) atomicAdd(other < me ? &same_before : &as_much, 1);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            s.rank[at] = 1 + before + same_before;
            s.above[at] = before + as_much + same_before;
            s.piece[at] = same_before > 0 ? NOBODY : 0;
            atomicAdd(&s.followers[leader], 1);
            if (same_before == 0) atomicAdd(&s.ends[leader], 1);
        }
        __syncthreads();
    }
}

// Number the columns at which a leader's followers leave.
extern "C" __global__ void __launch_bounds__(SHARE_THREADS) place(const __grid_constant__ Sharing s) {
    __shared__ int earlier;
    const int me = blockIdx.x;
    for (int round = 0; round < ROUNDS; ++round) {
        const int at = round * s.sequences + me, leader = s.with[at], until = s.until[at];
        if (leader == NOBODY) return;
        if (s.piece[at] == NOBODY) continue;
        if (threadIdx.x == 0) earlier = 0;
        __syncthreads();
        // Which entries are NOBODY does not change here; what others write is above it.
        for (int i = threadIdx.x; i < ROUNDS * s.sequences; i += SHARE_THREADS)
            if (s.with[i] == leader && s.until[i] < until && *(volatile int*)&s.piece[i] != NOBODY)
                atomicAdd(&earlier, 1);
        __syncthreads();
        if (threadIdx.x == 0) s.piece[at] = earlier;
        __syncthreads();
    }
}

struct Division {
    int group;        // query heads of a KV head
    int kv_heads;
    int tile_columns; // of a tile, which is never divided among shares
    int warp_rows;    // rows that the warps of a CTA take at a time
    int few_rows;     // rows up to which they share the tokens instead
    int window;       // tokens that a query sees, 0 for all; nothing is shared then
    int most_teams;
    int most_levels;
    int enough;       // units of work of a team from which on there are small shares too
    int smallest;     // units of work of these
    i64 partial_rows; // room for partial results
    int* first_run;   // [sequences + 1]
    int* members;     // [(ROUNDS + 1) * sequences]
    Shares* shares;
    Left* left;       // [sequences]: those that `combine` has to see to
    int* taken;       // [kv_heads]: shares that were taken, beside those that teams begin with
    Run* runs;        // [(ROUNDS + 1) * sequences + 2]
    Start* starts;    // [most_teams * most_levels]
};

constexpr int DIVIDE_THREADS = 1024;

// The sum of the values of all threads before this one; `total` becomes that of all.
__device__ i64 sum_before(i64 value, i64& total, i64* scratch) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    i64 sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const i64 other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        i64 part = scratch[lane];
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const i64 other = __shfl_up_sync(~0u, part, step);
            if (lane >= step) part += other;
        }
        scratch[lane] = part;
    }
    __syncthreads();
    total = scratch[31];
    const i64 result = sum - value + (warp > 0 ? scratch[warp - 1] : 0);
    __syncthreads();
    return result;
}

// Lists the runs, and gives each its place among the work. False where there is no room for partial results.
__device__ bool try_divide(const Sharing& s, const Division& d, bool shared, i64* scratch, int& runs_found,
                           Shares& shares) {
    __shared__ int heaviest;
    const int n = s.sequences, me = threadIdx.x;
    if (me == 0) heaviest = 1;
    // Where each leader's runs and its list of sequences begin.
    i64 runs = 0, listed = 0;
    for (int from = 0; from < n; from += DIVIDE_THREADS) {
        const int q = from + me;
        int mine = 0, list = 0, begin = 0;
        if (q < n && s.lengths[q] > 0) {
            if (shared)
                for (int round = 0; round < ROUNDS && s.with[round * n + q] != NOBODY; ++round)
                    begin = s.until[round * n + q];
            const int columns = (s.lengths[q] + s.block_tokens - 1) / s.block_tokens;
            if (begin < columns) {
                mine = 1 + (shared ? s.ends[q] : 0);
                list = 1 + (shared ? s.followers[q] : 0);
            }
        }
        i64 total_runs, total_list;
        const i64 run = runs + sum_before(mine, total_runs, scratch);
        const i64 at = listed + sum_before(list, total_list, scratch);
        if (q < n) {
            d.first_run[q] = static_cast<int>(run);
            if (mine > 0) {
                for (i64 i = run; i < run + mine; ++i) {
                    d.runs[i].leader = q;
                    d.runs[i].members = static_cast<int>(at);
                    d.runs[i].begin = begin;
                }
                Run& last = d.runs[run + mine - 1];
                last.end = (s.lengths[q] + s.block_tokens - 1) / s.block_tokens;
                last.count = 1;
                d.members[at] = q;
            }
        }
        runs += total_runs;
        listed += total_list;
    }
    if (me == 0) d.first_run[n] = static_cast<int>(runs);
    __syncthreads();
    if (shared)
        for (int i = me; i < ROUNDS * n; i += DIVIDE_THREADS) {
            const int leader = s.with[i];
            if (leader == NOBODY) continue;
            const int run = d.first_run[leader];
            d.members[d.runs[run].members + s.rank[i]] = i % n;
            if (s.piece[i] != NOBODY) {
                d.runs[run + s.piece[i]].end = s.until[i];
                d.runs[run + s.piece[i]].count = 1 + s.above[i];
            }
        }
    __syncthreads();
    // A leader's later runs begin where the one before ends. The first one's beginning stands.
    for (int i = me; i < runs; i += DIVIDE_THREADS)
        if (i > d.first_run[d.runs[i].leader]) d.runs[i].begin = d.runs[i - 1].end;
    __syncthreads();
    i64 position = 0;
    for (int from = 0; from < runs; from += DIVIDE_THREADS) {
        const int i = from + me;
        int size = 0;
        if (i < runs) {
            Run& run = d.runs[i];
            const int length = s.lengths[run.leader], first = d.first_run[run.leader];
            const bool last = i + 1 == d.first_run[run.leader + 1];
            run.skipped = 0;
            if (d.window > 0 && length > d.window) {
                run.begin = (length - d.window) / s.block_tokens;
                run.skipped = length - d.window - run.begin * s.block_tokens;
            }
            run.tokens = (last ? length : run.end * s.block_tokens) - run.begin * s.block_tokens;
            run.rows = run.count * d.group;
            run.weight = run.rows <= d.few_rows ? 1 : (run.rows + d.warp_rows - 1) / d.warp_rows;
            run.size = size = (run.end - run.begin + d.tile_columns - 1) / d.tile_columns * run.weight;
            run.alone = first + 1 == d.first_run[run.leader + 1] && (!shared || s.with[run.leader] == NOBODY);
            if (size > 0) atomicMax(&heaviest, run.weight);
        }
        i64 all;
        const i64 before = sum_before(size, all, scratch);
        if (i < runs) d.runs[i].position = static_cast<int>(position + before);
        position += all;
    }
    runs_found = static_cast<int>(runs);
    const int total = static_cast<int>(position);
    shares.total = total;
    shares.shared = shared;
    // A share is no less than one tile. Partial results take room for each share that has a part of a run; fewer
    // shares take less.
    int levels = d.most_levels;
    shares.teams = min(d.most_teams, total / heaviest);
    while (shares.teams > 0) {
        shares.divide(d.enough, max(d.smallest, heaviest), levels);
        i64 rows = 0;
        for (int from = 0; from < runs; from += DIVIDE_THREADS) {
            const int i = from + me;
            i64 mine = 0;
            if (i < runs && d.runs[i].size > 0) {
                Run& run = d.runs[i];
                run.share = shares.owner(run.position);
                run.parts = shares.owner(run.position + run.size - run.weight) - run.share + 1;
                mine = static_cast<i64>(run.rows) * run.parts * d.kv_heads;
            }
            i64 all;
            const i64 before = sum_before(mine, all, scratch);
            if (i < runs) d.runs[i].rows_at = static_cast<int>(rows + before);
            rows += all;
        }
        if (rows <= d.partial_rows) return true;
        if (shares.levels == 1) shares.teams /= 2;
        levels = 1;
    }
    return total == 0;
}

extern "C" __global__ void __launch_bounds__(DIVIDE_THREADS)
divide(const __grid_constant__ Sharing s, const __grid_constant__ Division d) {
    __shared__ i64 scratch[32];
    const int me = threadIdx.x;
    int runs;
    Shares shares{};
    // Very many sequences that leave one prefix at very many places: the partial results would not fit.
    if (!try_divide(s, d, d.window == 0, scratch, runs, shares)) {
        __syncthreads();
        try_divide(s, d, false, scratch, runs, shares);
    }
    __shared__ int left;
    if (me == 0) left = 0;
    __syncthreads();
    // Whoever has one run, and that in one share, is finished by the CTAs that work on it.
    for (int q = me; q < s.sequences; q += DIVIDE_THREADS) {
        const int first = d.first_run[q];
        const bool empty = first == d.first_run[q + 1];
        if (!empty && d.runs[first].alone) {
            Run& run = d.runs[first];
            run.alone = run.parts == 1;
            if (run.parts > 1) d.left[atomicAdd(&left, 1)] = {q, run.parts, run.rows_at, run.rows};
        } else {
            d.left[atomicAdd(&left, 1)] = {q, 0, 0, 0};
        }
    }
    for (int i = me; i < d.kv_heads; i += DIVIDE_THREADS) d.taken[i] = 0;
    __syncthreads();
    if (me == 0) {
        shares.left = left;
        *d.shares = shares;
        // No run of no size follows the last, and no words are asked for beyond it.
        d.runs[runs].position = d.runs[runs + 1].position = shares.total;
        d.runs[runs].size = d.runs[runs + 1].size = 1;
    }
    __syncthreads();
    for (int share = me; share < shares.count(); share += DIVIDE_THREADS) {
        const int unit = shares.first_unit(share);
        int low = 0, high = runs - 1;  // the last run that begins at or before `unit`; it has a size
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (d.runs[middle].position <= unit)
                low = middle;
            else
                high = middle - 1;
        }
        Start& start = d.starts[share];
        start.run = d.runs[low];
        start.next = d.runs[low + 1];
        start.index = low;
        start.column = first_column(start.run.position, start.run.weight, unit, d.tile_columns);
        start.stop = shares.first_unit(share + 1);
    }
}
