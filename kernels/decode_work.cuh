// What the decode kernels of all architectures have in common: the problem, attention to a warp's part of a tile, and
// what becomes of partial results.
//
// The including file says before, beside what attention.cuh and decode_plan.cuh need: TILE, tokens of a tile, and
// WARPS, which attend to it.
#pragma once

#include "attention.cuh"
#include "decode_plan.cuh"

constexpr int STAGE_BYTES = TILE * 2 * ROW_BYTES;  // a tile's keys, then its values

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
    int* taken;  // [kv_heads]: shares that were taken, beside those that teams begin with
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

// A part of the attention of a run's rows for one KV head.
struct Result {
    int rows;
    int members;
    int head;
    int first_row;  // of the partial result
    int alone;      // there is no other part: this is the result
};

__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory"); }

__device__ __forceinline__ u16* out_rows(const Problem& p, int sequence, int head) {
    return p.out + sequence * p.out_stride + head * p.group * HEAD_DIM;
}

__device__ __forceinline__ float* lse_rows(const Problem& p, int sequence, int head) {
    return p.lse == nullptr ? nullptr : p.lse + (static_cast<i64>(sequence) * p.kv_heads + head) * p.group;
}

// Attend to a tile's 16 tokens from `token` on. Hidden are the tile's first `skipped`, and those from `tokens` on.
__device__ __forceinline__ void attend_part(const Problem& p, Accumulator& acc, const Query& query,
                                            const Offsets& offsets, int tokens, int skipped, u32 stage, int token,
                                            int lane) {
    const int stop = tokens - token, first = skipped - token;
    if (stop <= 0 || first >= MMA_TOKENS) return;
    const u32 keys = stage + token * ROW_BYTES, values = keys + TILE * ROW_BYTES;
    if (stop >= MMA_TOKENS && first <= 0)
        attend<1, false>(acc, query, offsets, keys, values, p.scale, lane, {0, 0}, {16, 16}, 0, 16);
    else
        attend<1, true>(acc, query, offsets, keys, values, p.scale, lane, {first, first}, {stop, stop}, first, stop);
}

// Spreads the rows of accumulators over the banks of shared memory, where their width allows it.
__device__ __forceinline__ int merge_flip(int row) { return HEAD_DIM % 32 == 0 ? (row & 3) * 8 : 0; }

// What the warps of a CTA tell each other at the end of a run.
struct Merging {
    float2 sums[WARPS][MMA_ROWS];  // maximum and sum
};

// The end of a run of few rows: the warps' shares become one result. Their rows go through `memory`, which is shared:
// [WARPS][MMA_ROWS][HEAD_DIM]. When a warp returns, others may still read it.
__device__ __forceinline__ void merge_warps(const Problem& p, float* memory, Merging& merging, const Result& result,
                                            Accumulator& acc, int warp, int lane) {
    acc.finish_sums();
    const int row = lane >> 2, column = (lane & 3) * 2, rows = result.rows;
    float* mine = memory + (warp * MMA_ROWS + row) * HEAD_DIM;
    float* places[4];  // of every fourth eight columns
#pragma unroll
    for (int i = 0; i < 4; ++i) places[i] = mine + ((i * 8 + column) ^ merge_flip(row));
    consumers_sync();  // nobody reads the memory any more
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int r = row + 8 * h;
        if (r >= rows) continue;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; ++i)
            *reinterpret_cast<float2*>(places[i & 3] + h * 8 * HEAD_DIM + (i >> 2) * 32) =
                make_float2(acc.out[i][2 * h], acc.out[i][2 * h + 1]);
        if ((lane & 3) == 0) merging.sums[warp][r] = make_float2(acc.most[h], acc.sum[h]);
    }
    consumers_sync();
    const Result about = result;
    for (int e = threadIdx.x; e < rows * (HEAD_DIM / 4); e += 32 * WARPS) {
        const int r = e / (HEAD_DIM / 4), d = (e % (HEAD_DIM / 4)) * 4;
        float most = LOWEST, sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) most = fmaxf(most, merging.sums[w][r].x);
        float4 out = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float2 part = merging.sums[w][r];
            const float factor = exp2_fast(part.x - most);
            sum += factor * part.y;
            add_scaled(out, factor,
                       *reinterpret_cast<const float4*>(memory + (w * MMA_ROWS + r) * HEAD_DIM + (d ^ merge_flip(r))));
        }
        if (about.alone) {
            const int sequence = p.members[about.members];
            write_out(out_rows(p, sequence, about.head), lse_rows(p, sequence, about.head), r, d, out, most, sum);
        } else {
            const i64 at = about.first_row + r;
            *reinterpret_cast<float4*>(p.partial_out + at * HEAD_DIM + d) = out;
            if (d == 0) p.partial_sum[at] = make_float2(most, sum);
        }
    }
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

// Merges what was found for the sequences that have several runs, in the order of their columns; see
// decode_plan.cu for how these are found. Sequences of no tokens get zeros.
struct Chain {
    const Left* left;         // [LEFT]
    const int* shared_with;   // [ROUNDS][sequences]: the leader, or -1
    const int* shared_until;  // [ROUNDS][sequences]: a column
    const int* rank;          // [ROUNDS][sequences]: the sequence's place in its leader's list
    const int* first_run;     // [sequences + 1]: of a leader
    const int* lengths;       // [sequences]
    int sequences;
};

constexpr int COMBINE_THREADS = 256;

// A warp for every 32 words, of four columns each, of a sequence's KV head. What the plan says is read before `wait`
// returns, which it does when the partial results are there.
template <typename Wait>
__device__ __forceinline__ void combine_sequences(const Problem& p, const Chain& chain, Wait wait) {
    bool waits = true;
    const auto wait_once = [&] {
        if (waits) wait();
        waits = false;
    };
    if (!p.settled) wait_once();
    const Shares& shares = *p.shares;
    const int words = p.group * (HEAD_DIM / 4), slices = (words + 31) / 32;
    const int tasks = shares.left * p.kv_heads * slices;
#pragma unroll 1
    for (int task = (blockIdx.x * COMBINE_THREADS + threadIdx.x) / 32; task < tasks;
         task += gridDim.x * (COMBINE_THREADS / 32)) {
        const Left left = chain.left[task / slices / p.kv_heads];
        const int word = task % slices * 32 + (threadIdx.x & 31), head = task / slices % p.kv_heads;
        const int r = word / (HEAD_DIM / 4), d = word % (HEAD_DIM / 4) * 4;
        Merged merged;
        const auto add = [&](int rows_at, int rows, int parts, int member) {
            const i64 at = rows_at + head * parts * rows + member * p.group + r;
            wait_once();
            if (word < words)
#pragma unroll 1
                for (int first = 0; first < parts; first += Merged::AT_ONCE)
                    merged.add(min(Merged::AT_ONCE, parts - first), [&](int i) { return at + (first + i) * rows; },
                               p.partial_sum, p.partial_out + d);
        };
        if (left.parts > 0) {
            add(left.rows_at, left.rows, left.parts, 0);
        } else if (chain.lengths[left.sequence] > 0) {
            const auto add_run = [&](const Run& run, int member) {
                if (run.size > 0) add(run.rows_at, run.rows, run.parts, member);
            };
            const int rounds = shares.shared ? ROUNDS : 0;
#pragma unroll 1
            for (int round = 0; round < rounds; ++round) {
                const int at = round * chain.sequences + left.sequence;
                const int leader = chain.shared_with[at];
                if (leader < 0) break;
                const int until = chain.shared_until[at], member = chain.rank[at];
#pragma unroll 1
                for (int i = chain.first_run[leader]; i < chain.first_run[leader + 1]; ++i) {
                    const Run& run = p.runs[i];
                    if (run.end > until) break;
                    add_run(run, member);
                }
            }
#pragma unroll 1
            for (int i = chain.first_run[left.sequence]; i < chain.first_run[left.sequence + 1]; ++i)
                add_run(p.runs[i], 0);
        }
        wait_once();
        if (word < words)
            write_out(out_rows(p, left.sequence, head), lse_rows(p, left.sequence, head), r, d, merged.out, merged.most,
                      merged.sum);
    }
    wait_once();
    if (blockIdx.x == 0)
        for (int i = threadIdx.x; i < p.kv_heads; i += COMBINE_THREADS) p.taken[i] = 0;  // for the next layer
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
