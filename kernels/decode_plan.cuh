// What the kernels of a decode step agree on; made by decode_plan.cu, read by decode_work.cuh.
#pragma once

constexpr int ROUNDS = 3;  // depths of prefix sharing that are looked for

// Columns of the block table that one set of sequences shares: of the sequence `leader`, and of others whose
// words there are equal. Their query heads of one KV head are the rows of one attention.
struct __align__(16) Run {
    int leader;
    int begin, end;  // columns
    int tokens;      // from the first token of column `begin` on
    int skipped;     // tokens at the front that a window hides
    int count;       // sequences
    int members;     // where their list begins
    int weight;      // units of work of a column
    int position;    // units of work before it
    int size;        // units of work
    int rows_at;     // where its partial results begin: [kv_heads][parts][rows]
    int rows;        // count * group
    int alone;       // its only sequence has no other run
    int unused[3];
};

// Where a share of the work begins.
struct __align__(16) Start {
    Run run;
    int index;   // of the run
    int column;
    int stop;    // the unit of work after the last
    int unused;
};

// How the work is divided: in equal shares, each for a team of CTAs, one for every KV head. A team goes over the same
// blocks at the same time, so that neighbouring slices of a page are read together. Boundaries depend on lengths and
// sharing only.
struct Shares {
    int total;   // units of work of one KV head
    int count;
    int shared;  // whether sequences share runs
    int left;    // sequences that `combine` has to see to

    __device__ __forceinline__ int first_unit(int share) const {
        return static_cast<int>(static_cast<i64>(total) * share / count);
    }

    // The share that a unit of work belongs to.
    __device__ __forceinline__ int owner(int unit) const {
        return static_cast<int>((static_cast<i64>(unit + 1) * count - 1) / total);
    }

    // How many shares work on a run.
    __device__ __forceinline__ int parts(const Run& run) const {
        return owner(run.position + run.size - run.weight) - owner(run.position) + 1;
    }
};

// The first column that begins at or after `unit`, of columns of `weight` units from `base` on.
__device__ __forceinline__ int first_column(int base, int weight, int unit) {
    return unit <= base ? 0 : (unit - base + weight - 1) / weight;
}
