// Vectors as wide as the processor's registers, in the compiler's own notation: no instruction is named here.
//
// Nothing is compiled with the freedom to reorder sums. What these functions return for a row depends on the row alone.
#pragma once

#include <cstdint>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__ARM_NEON)
constexpr int LANES = 4;
#else
constexpr int LANES = 8;
#endif

#if defined(__AVX512F__) || defined(__ARM_NEON)
#define MANY_REGISTERS 1  // 32, else 16
#else
#define MANY_REGISTERS 0
#endif

#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_DOTPROD)
#define MULTIPLIES_BYTES 1
#else
#define MULTIPLIES_BYTES 0
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));  // in memory, at any float's address

extern int threads;  // that a call may use

INLINE vec load(const float *from) { return *(const loose *)from; }
INLINE void store(float *to, vec x) { *(loose *)to = x; }
INLINE vec all(float x) { return x - vec{}; }
INLINE vec choose(ivec where, vec a, vec b) { return where ? a : b; }
INLINE vec larger(vec a, vec b) { return choose(a > b, a, b); }  // b where either is not a number
INLINE vec magnitude(vec x) { return (vec)((ivec)x & 0x7fffffff); }

// The first `count` numbers, zeros behind them.
INLINE vec load_some(const float *from, int count) {
    vec x{};
    std::memcpy(&x, from, sizeof(float) * count);
    return x;
}

INLINE void store_some(float *to, vec x, int count) { std::memcpy(to, &x, sizeof(float) * count); }

// bfloat16: the upper half of a float32. Rounds to the nearest, halves to even, as torch does.
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

INLINE vec from_bf16(const uint16_t *from, int count) {
    halves x{};
    std::memcpy(&x, from, sizeof(uint16_t) * count);
    return (vec)(__builtin_convertvector(x, ivec) << 16);
}

INLINE void store_bf16(uint16_t *to, vec x, int count) {
    ivec bits = (ivec)x, kept = (bits >> 16) & 1;
    ivec rounded = (ivec)choose(x == x, (vec)(bits + 0x7fff + kept), (vec)(ivec{} + 0x7fc00000));
    halves upper = __builtin_convertvector((rounded >> 16) & 0xffff, halves);
    std::memcpy(to, &upper, sizeof(uint16_t) * count);
}

// Halves on each other until one number is left: the order is the same for every vector.
#if defined(__AVX512F__)
typedef float half __attribute__((vector_size(32)));
INLINE half low(vec x) { return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7); }
INLINE half high(vec x) { return __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15); }
#elif !defined(__ARM_NEON)
typedef vec half;
#endif
#if !defined(__ARM_NEON)
typedef float quarter __attribute__((vector_size(16)));
INLINE quarter low_quarter(half x) { return __builtin_shufflevector(x, x, 0, 1, 2, 3); }
INLINE quarter high_quarter(half x) { return __builtin_shufflevector(x, x, 4, 5, 6, 7); }
#endif

#if defined(__ARM_NEON)
INLINE float sum(vec x) {
    x += __builtin_shufflevector(x, x, 2, 3, 0, 1);
    return x[0] + x[1];
}

INLINE float largest(vec x) {
    vec other = __builtin_shufflevector(x, x, 2, 3, 0, 1);
    x = x > other ? x : other;
    return x[0] > x[1] ? x[0] : x[1];
}
#else
INLINE float sum(vec x) {
#if defined(__AVX512F__)
    half h = low(x) + high(x);
#else
    half h = x;
#endif
    quarter q = low_quarter(h) + high_quarter(h);
    q += __builtin_shufflevector(q, q, 2, 3, 0, 1);
    return q[0] + q[1];
}

INLINE float largest(vec x) {
#if defined(__AVX512F__)
    half a = low(x), b = high(x), h = a > b ? a : b;
#else
    half h = x;
#endif
    quarter c = low_quarter(h), d = high_quarter(h), q = c > d ? c : d;
    quarter other = __builtin_shufflevector(q, q, 2, 3, 0, 1);
    q = q > other ? q : other;
    return q[0] > q[1] ? q[0] : q[1];
}
#endif

// e to the power of x, to two units in the last place; exactly 1 at 0, exactly 0 below -87, NaN stays NaN.
// Cody and Waite's reduction with the polynomial of Cephes' expf.
INLINE vec exponential(vec x) {
    const vec lowest = all(-87.0f), highest = all(88.0f), shift = all(12582912.0f);  // 1.5 · 2²³ rounds to an integer
    ivec vanishes = x < lowest;
    x = choose(vanishes, lowest, x);
    x = choose(x > highest, highest, x);
    vec shifted = x * 1.44269504088896341f + shift;
    vec n = shifted - shift;
    vec r = x - n * 0.693359375f - n * -2.12194440e-4f;
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vec power = (vec)(((ivec)shifted << 23) + 0x3f800000);
    return choose(vanishes, vec{}, p * power);
}

// Through the exponential; exactly ±1 beyond ±44, where that would no longer change.
INLINE vec tangent(vec x) { return 1.0f - 2.0f / (exponential(x * 2.0f) + 1.0f); }

INLINE vec silu(vec x) { return x / (exponential(-x) + 1.0f); }

// By tanh.
INLINE vec gelu(vec x) { return x * 0.5f * (tangent((x + x * x * x * 0.044715f) * 0.7978845608028654f) + 1.0f); }
