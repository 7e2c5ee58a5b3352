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

// A part of the attention of a run's rows for one KV head.
struct Result {
    int rows;
    int members;
    int head;
    int rows_at;   // where the first part of the result goes
    int part;      // which of them this one is
    int parts;     // of how many; 0: `combine` will know
    int arrived;   // where parts that are done are counted

    __device__ __forceinline__ int first_row() const { return rows_at + part * rows; }
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

// Merges all parts of a run's KV head. `memory` is shared.
__device__ __forceinline__ void merge_parts(const Problem& p, const Result& about, float2* memory) {
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

// What the warps of a CTA tell each other at the end of a run.
struct Merging {
    float2 sums[WARPS][MMA_ROWS];  // maximum and sum
    int last;                      // whether this CTA is the last that worked on the run
};

// The end of a run of few rows: the warps' shares become one result. Their rows go through `stage`, the memory of the
// last tile; afterwards nobody reads it any more.
__device__ __forceinline__ void merge_warps(const Problem& p, char* stage, Merging& merging, const Result& result,
                                            Accumulator& acc, int warp, int lane) {
    acc.finish_sums();
    const int row = lane >> 2, column = (lane & 3) * 2, rows = result.rows;
    float* mine = reinterpret_cast<float*>(stage) + (warp * MMA_ROWS + row) * HEAD_DIM;
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
        if ((lane & 3) == 0) merging.sums[warp][r] = make_float2(acc.most[h], acc.sum[h]);
    }
    consumers_sync();
    const Result about = result;
    const float* all = reinterpret_cast<const float*>(stage);
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
                       *reinterpret_cast<const float4*>(all + (w * MMA_ROWS + r) * HEAD_DIM + (d ^ merge_flip(r))));
        }
        if (about.parts == 1) {
            const int sequence = p.members[about.members];
            write_out(out_rows(p, sequence, about.head), lse_rows(p, sequence, about.head), r, d, out, most, sum);
        } else {
            const i64 at = about.first_row() + r;
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
            merging.last = before == about.parts - 1;
            if (merging.last) p.arrived[about.arrived] = 0;  // for the next layer
            __threadfence();
        }
        consumers_sync();
        if (merging.last) merge_parts(p, about, reinterpret_cast<float2*>(stage));
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

__device__ __forceinline__ void combine_sequences(const Problem& p, const Chain& chain) {
    __shared__ int rows[COMBINE_PARTS];
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
