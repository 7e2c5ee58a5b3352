// What the attention kernels share: PTX primitives, and one warp's attention of 16 rows to 16 tokens.
//
// Instructions are those of the PTX ISA (https://docs.nvidia.com/cuda/parallel-thread-execution/), named beside each.
//
// Compiled with: HEAD_DIM, a multiple of 16; BFLOAT16, 0 for fp16; SWIZZLED, 1 where the 16-byte chunk c of
// token row t is stored at chunk c XOR (t mod 8), which spares ldmatrix its bank conflicts.
#pragma once

#include "words.cuh"

constexpr int ROW_BYTES = HEAD_DIM * 2;
constexpr int MMA_ROWS = 16;    // rows of an accumulator: query heads, of one sequence or of several
constexpr int MMA_TOKENS = 16;  // tokens that a warp attends to at once
constexpr float LOWEST = -1e30f;  // a finite stand-in for minus infinity, so that differences are numbers

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two floats as two 16-bit elements, the first in the low half.
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 packed;
#if BFLOAT16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
    return packed;
}

__device__ __forceinline__ void load_matrices(u32 (&m)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&m)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

// c[16 x 8] += a[16 x 16] b[16 x 8]; c in float32.
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if BFLOAT16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// One warp's running attention of 16 rows. A thread holds rows lane / 4 and lane / 4 + 8, and of each eight
// columns of an accumulator 2 * (lane % 4) and the next. Scores and maxima are in units of log2.
struct Accumulator {
    float out[HEAD_DIM / 8][4];
    float most[2];  // running maximum of the two rows
    float sum[2];   // this thread's share of the sum of exponentials

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; ++i) out[i][0] = out[i][1] = out[i][2] = out[i][3] = 0.f;
        most[0] = most[1] = LOWEST;
        sum[0] = sum[1] = 0.f;
    }

    // The sums of whole rows, in every thread that holds a part of them.
    __device__ __forceinline__ void finish_sums() {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
            sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
        }
    }
};

struct Query {
    u32 part[HEAD_DIM / 16][4];
};

// A row of the query in 32-bit words, or null where the accumulator has fewer rows.
__device__ __forceinline__ void load_query(Query& query, const u32* low, const u32* high, int lane) {
    const int column = lane & 3;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; ++i) {
        query.part[i][0] = low ? low[i * 8 + column] : 0;
        query.part[i][1] = high ? high[i * 8 + column] : 0;
        query.part[i][2] = low ? low[i * 8 + 4 + column] : 0;
        query.part[i][3] = high ? high[i * 8 + 4 + column] : 0;
    }
}

// Where a thread's rows of the four 8 x 8 matrices of a load begin, from the first of 16 tokens on. Of two chunks
// that differ by a multiple of 8 the flip is the same, so four offsets and a constant give them all.
struct Offsets {
    u32 keys[4], values[4];

    __device__ __forceinline__ explicit Offsets(int lane) {
        const int matrix = lane >> 3, flip = SWIZZLED ? lane & 7 : 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            keys[i] = (((matrix >> 1) << 3) + (lane & 7)) * ROW_BYTES + (((i * 2 + (matrix & 1)) ^ flip) << 4);
            values[i] = (((matrix & 1) << 3) + (lane & 7)) * ROW_BYTES + (((i * 2 + (matrix >> 1)) ^ flip) << 4);
        }
    }
};

// The softmax of FlashAttention (https://arxiv.org/abs/2205.14135) over SPANS times 16 tokens more, whose keys and
// values lie in shared memory: rows of ROW_BYTES from `keys` and from `values`, the first row's index a multiple of 8.
// Two spans at once wait for each other's results half as often as one after the other.
// Where MASKED, each of the two rows sees the tokens from its `first` up to its `stop` only. A value that no row sees,
// outside `any_first` to `any_stop`, is taken for zero, whatever its memory holds.
template <int SPANS, bool MASKED>
__device__ __forceinline__ void attend(Accumulator& acc, const Query& query, const Offsets& offsets, u32 keys,
                                       u32 values, float scale, int lane, const int (&first)[2], const int (&stop)[2],
                                       int any_first, int any_stop) {
    constexpr int SPAN_BYTES = MMA_TOKENS * ROW_BYTES;
    float score[SPANS * 2][4] = {};
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; ++i)
#pragma unroll
        for (int n = 0; n < SPANS; ++n) {
            u32 k[4];
            load_matrices(k, keys + offsets.keys[i & 3] + (i >> 2) * 128 + n * SPAN_BYTES);
            multiply(score[2 * n], query.part[i], k[0], k[1]);
            multiply(score[2 * n + 1], query.part[i], k[2], k[3]);
        }
    const int column = (lane & 3) * 2;
    if (MASKED) {
#pragma unroll
        for (int n = 0; n < 2 * SPANS; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = n * 8 + column + (i & 1), h = i >> 1;
                if (token < first[h] || token >= stop[h]) score[n][i] = LOWEST;
            }
    }
    float most[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float x = score[0][2 * h];
#pragma unroll
        for (int n = 0; n < 2 * SPANS; ++n) x = fmaxf(x, fmaxf(score[n][2 * h], score[n][2 * h + 1]));
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
        most[h] = fmaxf(acc.most[h], x * scale);
    }
    if (__any_sync(~0u, most[0] > acc.most[0] || most[1] > acc.most[1])) {
        const float shrink[2] = {exp2_fast(acc.most[0] - most[0]), exp2_fast(acc.most[1] - most[1])};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            acc.sum[h] *= shrink[h];
            acc.most[h] = most[h];
        }
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; ++i) {
            acc.out[i][0] *= shrink[0];
            acc.out[i][1] *= shrink[0];
            acc.out[i][2] *= shrink[1];
            acc.out[i][3] *= shrink[1];
        }
    }
    u32 weights[SPANS][4];
#pragma unroll
    for (int n = 0; n < 2 * SPANS; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float p = exp2_fast(score[n][i] * scale - acc.most[i >> 1]);
            // Of a row that sees none of the tokens, the maximum is LOWEST still, and p would be 1.
            if (MASKED && score[n][i] == LOWEST) p = 0.f;
            acc.sum[i >> 1] += p;
            score[n][i] = p;
        }
        weights[n >> 1][(n & 1) * 2] = pack(score[n][0], score[n][1]);
        weights[n >> 1][(n & 1) * 2 + 1] = pack(score[n][2], score[n][3]);
    }
#pragma unroll
    for (int n = 0; n < SPANS; ++n) {
        u32 keep[2] = {~0u, ~0u};
        if (MASKED) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int token = n * 16 + half * 8 + column;
                keep[half] = (token >= any_first && token < any_stop ? 0xffffu : 0u) |
                             (token + 1 >= any_first && token + 1 < any_stop ? 0xffff0000u : 0u);
            }
        }
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; ++i) {
            u32 v[4];
            load_matrices_transposed(v, values + offsets.values[i & 3] + (i >> 2) * 128 + n * SPAN_BYTES);
            if (MASKED) {
                v[0] &= keep[0];
                v[1] &= keep[1];
                v[2] &= keep[0];
                v[3] &= keep[1];
            }
            multiply(acc.out[i * 2], weights[n], v[0], v[1]);
            multiply(acc.out[i * 2 + 1], weights[n], v[2], v[3]);
        }
    }
}

// Four columns of a row of the output, and its log-sum-exp; of no tokens, zeros.
__device__ __forceinline__ void write_out(u16* out, float* lse, int row, int column, float4 x, float most, float sum) {
    const float inverse = sum > 0.f ? 1.f / sum : 0.f;
    *reinterpret_cast<uint2*>(out + row * HEAD_DIM + column) =
        make_uint2(pack(x.x * inverse, x.y * inverse), pack(x.z * inverse, x.w * inverse));
    if (column == 0 && lse != nullptr)
        lse[row] = sum > 0.f ? (most + __log2f(sum)) * 0.6931471805599453f : __int_as_float(0xff800000);
}

__device__ __forceinline__ void add_scaled(float4& out, float factor, float4 x) {
    out.x += factor * x.x;
    out.y += factor * x.y;
    out.z += factor * x.z;
    out.w += factor * x.w;
}

// Four columns of a row, merged from partial results; several are loaded at once, to wait for memory once.
struct Merged {
    static constexpr int AT_ONCE = 4;
    float4 out = make_float4(0.f, 0.f, 0.f, 0.f);
    float most = LOWEST, sum = 0.f;

    template <typename Row>
    __device__ __forceinline__ void add(int count, Row row, const float2* sums, const float* outs) {
        float2 part[AT_ONCE];
        float4 x[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (i < count) {
                const i64 at = row(i);
                part[i] = __ldcg(sums + at);
                x[i] = __ldcg(reinterpret_cast<const float4*>(outs + at * HEAD_DIM));
            }
        float top = most;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (i < count) top = fmaxf(top, part[i].x);
        const float shrink = exp2_fast(most - top);
        most = top;
        sum *= shrink;
        const float4 before = out;
        out = make_float4(0.f, 0.f, 0.f, 0.f);
        add_scaled(out, shrink, before);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (i < count) {
                const float factor = exp2_fast(part[i].x - top);
                sum += factor * part[i].y;
                add_scaled(out, factor, x[i]);
            }
    }
};
