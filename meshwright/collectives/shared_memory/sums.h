// Sums and means over ranks. Numbers are added in the order of the ranks; for a mean, the sum is divided by the number
// of ranks. 16-bit types are added in fp32 and rounded once.

#include <stdint.h>
#include <string.h>

enum { FLOAT32, FLOAT64, BFLOAT16, FLOAT16, INT64 };
enum { BLOCK = 256 };

static inline float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

// Rounds to the nearest number, ties to even. A NaN that results from adding bf16 numbers has zeros in its lower half,
// like its operands and the NaNs that processors generate. So rounding cannot turn it into another number, and a test
// for NaN, which would take half of the time, is not needed.
static inline uint16_t to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#ifdef __FLT16_MANT_DIG__
typedef _Float16 half;
static inline float from_half(half x) { return (float)x; }
static inline half to_half(float f) { return (half)f; }
#else // compilers before gcc 12: the same bits, but slower
typedef uint16_t half;
static inline float from_half(half x) {
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = x & 0x7fff, bits = rest << 13;
    float f;
    memcpy(&f, &bits, 4);
    f *= 0x1p112f; // corrects the bias of the exponent; subnormal numbers become normal
    memcpy(&bits, &f, 4);
    if (rest >= 0x7c00) bits = 0x7f800000 | (rest & 0x3ff) << 13;
    bits |= sign;
    memcpy(&f, &bits, 4);
    return f;
}
static inline half to_half(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return sign | 0x7e00;
    if (rest >= 0x477ff000) return sign | 0x7c00; // rounds to infinity
    if (rest < 0x38800000) {                      // subnormal: the addition rounds
        float g;
        memcpy(&g, &rest, 4);
        g += 0.5f;
        memcpy(&rest, &g, 4);
        return sign | (rest - 0x3f000000);
    }
    return sign | ((rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13);
}
#endif

#define SAME(x) (x)

// ---- loops over one block, or over the memory of two, three or four ranks. Division by a power of two is
// multiplication by `share`, its reciprocal, which gives the same bits and is faster.

#define LOOPS(NAME, T, SUM, LOAD, STORE)                                                                               \
    static void set_##NAME(SUM *sum, const T *from, int64_t n) {                                                       \
        for (int64_t i = 0; i < n; i++) sum[i] = LOAD(from[i]);                                                        \
    }                                                                                                                  \
    static void add_##NAME(SUM *sum, const T *from, int64_t n) {                                                       \
        for (int64_t i = 0; i < n; i++) sum[i] += LOAD(from[i]);                                                       \
    }                                                                                                                  \
    static void put_##NAME(T *to, const SUM *sum, int64_t n) {                                                         \
        for (int64_t i = 0; i < n; i++) to[i] = STORE(sum[i]);                                                         \
    }                                                                                                                  \
    static void pairs_##NAME(T *restrict a, T *restrict b, int64_t n, SUM share) {                                     \
        for (int64_t i = 0; i < n; i++) a[i] = b[i] = STORE((LOAD(a[i]) + LOAD(b[i])) * share);                        \
    }                                                                                                                  \
    static void triples_##NAME(T *restrict a, T *restrict b, T *restrict c, int64_t n, SUM divisor) {                  \
        for (int64_t i = 0; i < n; i++) a[i] = b[i] = c[i] = STORE((LOAD(a[i]) + LOAD(b[i]) + LOAD(c[i])) / divisor);  \
    }                                                                                                                  \
    static void fours_##NAME(T *restrict a, T *restrict b, T *restrict c, T *restrict d, int64_t n, SUM share) {       \
        for (int64_t i = 0; i < n; i++)                                                                                \
            a[i] = b[i] = c[i] = d[i] = STORE((LOAD(a[i]) + LOAD(b[i]) + LOAD(c[i]) + LOAD(d[i])) * share);            \
    }

LOOPS(float32, float, float, SAME, SAME)
LOOPS(float64, double, double, SAME, SAME)
LOOPS(bfloat16, uint16_t, float, from_bf16, to_bf16)
LOOPS(int64, uint64_t, uint64_t, SAME, SAME) // sums wrap at overflow, like torch's; with signed numbers C leaves it open

#if defined(__aarch64__) && defined(__FLT16_MANT_DIG__)
// Written by hand, four numbers at a time: compilers convert one number after the other, which takes 2.5 times as long.
#include <arm_neon.h>

static inline float32x4_t load4(const half *from) { return vcvt_f32_f16(vld1_f16((const float16_t *)from)); }
static inline void store4(half *to, float32x4_t numbers) { vst1_f16((float16_t *)to, vcvt_f16_f32(numbers)); }

static void set_float16(float *sum, const half *from, int64_t n) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) vst1q_f32(sum + i, load4(from + i));
    for (; i < n; i++) sum[i] = from_half(from[i]);
}
static void add_float16(float *sum, const half *from, int64_t n) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) vst1q_f32(sum + i, vaddq_f32(vld1q_f32(sum + i), load4(from + i)));
    for (; i < n; i++) sum[i] += from_half(from[i]);
}
static void put_float16(half *to, const float *sum, int64_t n) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) store4(to + i, vld1q_f32(sum + i));
    for (; i < n; i++) to[i] = to_half(sum[i]);
}
static void pairs_float16(half *restrict a, half *restrict b, int64_t n, float share) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        const float32x4_t mean = vmulq_n_f32(vaddq_f32(load4(a + i), load4(b + i)), share);
        store4(a + i, mean);
        store4(b + i, mean);
    }
    for (; i < n; i++) a[i] = b[i] = to_half((from_half(a[i]) + from_half(b[i])) * share);
}
static void triples_float16(half *restrict a, half *restrict b, half *restrict c, int64_t n, float divisor) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        const float32x4_t sum = vaddq_f32(vaddq_f32(load4(a + i), load4(b + i)), load4(c + i));
        const float32x4_t mean = vdivq_f32(sum, vdupq_n_f32(divisor));
        store4(a + i, mean);
        store4(b + i, mean);
        store4(c + i, mean);
    }
    for (; i < n; i++) a[i] = b[i] = c[i] = to_half((from_half(a[i]) + from_half(b[i]) + from_half(c[i])) / divisor);
}
static void fours_float16(half *restrict a, half *restrict b, half *restrict c, half *restrict d, int64_t n,
                          float share) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        const float32x4_t three = vaddq_f32(vaddq_f32(load4(a + i), load4(b + i)), load4(c + i));
        const float32x4_t mean = vmulq_n_f32(vaddq_f32(three, load4(d + i)), share);
        store4(a + i, mean);
        store4(b + i, mean);
        store4(c + i, mean);
        store4(d + i, mean);
    }
    for (; i < n; i++) {
        const float sum = from_half(a[i]) + from_half(b[i]) + from_half(c[i]) + from_half(d[i]);
        a[i] = b[i] = c[i] = d[i] = to_half(sum * share);
    }
}
#else
LOOPS(float16, half, float, from_half, to_half)
#endif

// ---- whole slices

// Writes the result to all addresses in `out`. In place (`in == out`), up to four ranks are added in one pass over all
// their memory. That is twice as fast as summing blocks in the nearest cache, which has room for that many lines at the
// same distance. Stores that bypass the caches would save nothing, because every line is read just before it is
// written.
#define REDUCE(NAME, T, SUM)                                                                                           \
    static void reduce_##NAME(char **in, int64_t ins, char **out, int64_t outs, int64_t begin, int64_t end,            \
                              int64_t mean) {                                                                          \
        const SUM divisor = mean ? (SUM)ins : 1, share = (SUM)1 / divisor;                                             \
        const int exact = !mean || (ins & (ins - 1)) == 0;                                                             \
        const int64_t size = end - begin, together = in == out && ins == outs ? ins : 0;                               \
        T *first[4];                                                                                                   \
        for (int64_t r = 0; r < 4 && r < ins; r++) first[r] = (T *)in[r] + begin;                                      \
        if (together == 2) {                                                                                           \
            pairs_##NAME(first[0], first[1], size, share);                                                             \
            return;                                                                                                    \
        }                                                                                                              \
        if (together == 3) {                                                                                           \
            triples_##NAME(first[0], first[1], first[2], size, divisor);                                               \
            return;                                                                                                    \
        }                                                                                                              \
        if (together == 4) {                                                                                           \
            fours_##NAME(first[0], first[1], first[2], first[3], size, share);                                         \
            return;                                                                                                    \
        }                                                                                                              \
        SUM sum[BLOCK];                                                                                                \
        T result[BLOCK];                                                                                               \
        for (int64_t at = begin; at < end; at += BLOCK) {                                                              \
            const int64_t n = end - at < BLOCK ? end - at : BLOCK;                                                     \
            set_##NAME(sum, (T *)in[0] + at, n);                                                                       \
            for (int64_t r = 1; r < ins; r++) add_##NAME(sum, (T *)in[r] + at, n);                                     \
            if (!exact)                                                                                                \
                for (int64_t i = 0; i < n; i++) sum[i] /= divisor;                                                     \
            else if (mean)                                                                                             \
                for (int64_t i = 0; i < n; i++) sum[i] *= share;                                                       \
            put_##NAME(result, sum, n);                                                                                \
            for (int64_t o = 0; o < outs; o++) memcpy((T *)out[o] + at, result, n * sizeof(T));                        \
        }                                                                                                              \
    }

REDUCE(float32, float, float)
REDUCE(float64, double, double)
REDUCE(bfloat16, uint16_t, float)
REDUCE(float16, half, float)
REDUCE(int64, uint64_t, uint64_t)

static int64_t width_of(int64_t type) { return type == FLOAT64 || type == INT64 ? 8 : type == FLOAT32 ? 4 : 2; }

static void reduce(int64_t type, char **in, int64_t ins, char **out, int64_t outs, int64_t begin, int64_t end,
                   int64_t mean) {
    if (begin >= end) return;
    switch (type) {
    case FLOAT32: reduce_float32(in, ins, out, outs, begin, end, mean); break;
    case FLOAT64: reduce_float64(in, ins, out, outs, begin, end, mean); break;
    case BFLOAT16: reduce_bfloat16(in, ins, out, outs, begin, end, mean); break;
    case FLOAT16: reduce_float16(in, ins, out, outs, begin, end, mean); break;
    case INT64: reduce_int64(in, ins, out, outs, begin, end, mean); break;
    }
}
