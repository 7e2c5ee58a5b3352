// What the kernels of a decode step agree on; made by decode_plan.cu, read by decode_work.cuh.
#pragma once

#include "words.cuh"

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
    int weight;      // units of work of a tile
    int position;    // units of work before it
    int size;        // units of work
    int rows_at;     // where its partial results begin: [kv_heads][parts][rows]
    int rows;        // count * group
    int alone;       // its only sequence has no other run, and one share has all of it
    int share;       // the first that works on it
    int parts;       // how many do
    int unused;
};

// Where a share of the work begins.
struct __align__(16) Start {
    Run run, next;
    int index;   // of the run
    int column;
    int stop;    // the unit of work after the last
    int unused;
};

// How the work is divided: in shares for teams of CTAs, one CTA for every KV head. A team goes over the same blocks at
// the same time, so that neighbouring slices of a page are read together. There is a share for every team of each level,
// of large ones and of small ones. A team begins with that of the first level, and the others are taken by whoever is
// free, so that who waits for the bus takes fewer ("guided self-scheduling", Polychronopoulos and Kuck 1987).
// Boundaries depend on lengths and sharing only, and so do results.
constexpr int MOST_LEVELS = 6;

struct Shares {
    int total;   // units of work of one KV head
    int teams;
    int levels;  // of each there is a share for every team
    int begin[MOST_LEVELS + 1];  // units of work before a level
    int shared;  // whether sequences share runs
    int left;    // sequences that `combine` has to see to

    __device__ __forceinline__ int count() const { return teams * levels; }

    // One level where a team has fewer than `enough` units of work. Otherwise levels of half of what is left each, as
    // long as a share has `smallest` units, and one of the rest. The shares of all but the last are equal to the unit.
    __device__ __forceinline__ void divide(int enough, int smallest, int most_levels) {
        begin[0] = 0;
        int before = 0;
        if (total / teams < enough) most_levels = 1;
        for (levels = 1; levels < most_levels && (total - before) / 2 >= teams * smallest; ++levels)
            begin[levels] = before += (total - before) / 2 / teams * teams;
        for (int i = levels; i <= MOST_LEVELS; ++i) begin[i] = total;
    }

    __device__ __forceinline__ int first_unit(int share) const {
        if (share == count()) return total;
        const int level = share / teams, begins = begin[level];
        return begins + static_cast<int>(static_cast<i64>(begin[level + 1] - begins) * (share - level * teams) / teams);
    }

    // The share that a unit of work belongs to.
    __device__ __forceinline__ int owner(int unit) const {
        int level = 0, begins = 0, ends = begin[1];
#pragma unroll
        for (int i = 1; i < MOST_LEVELS; ++i)
            if (i < levels && unit >= begin[i]) {
                level = i;
                begins = begin[i];
                ends = begin[i + 1];
            }
        return level * teams + static_cast<int>((static_cast<i64>(unit - begins + 1) * teams - 1) / (ends - begins));
    }
};

// A sequence whose attention is made of several parts, which `combine` merges.
struct __align__(16) Left {
    int sequence;
    int parts;    // of its only run, and 0 where it has several
    int rows_at;  // where they begin: [kv_heads][parts][rows]
    int rows;
};

// Memory for these is allotted by decode_attention.py, which counts on their sizes.
static_assert(sizeof(Run) == 64 && sizeof(Start) == 144 && sizeof(Shares) == 12 * 4 && sizeof(Left) == 4 * 4);

// The first column of the first tile that begins at or after `unit`, of tiles of `weight` units from `base` on.
__device__ __forceinline__ int first_column(int base, int weight, int unit, int tile_columns) {
    return unit <= base ? 0 : (unit - base + weight - 1) / weight * tile_columns;
}
