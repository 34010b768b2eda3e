// y = x Wᵀ for weights that were packed once: float32, and bytes times rows that are rounded to bytes here.
//
// A panel holds PANEL outputs, one input after another (bytes: four inputs), so that a step of the inner loop reads one
// run of memory. ROWS rows go through a panel together and stay in registers. An output is one chain of additions from
// the first input to the last whatever the number of rows, so a row's result depends on the row alone; sums of bytes
// are exact anyway.
//
// Floor: the bytes of the weights over the memory's bandwidth up to about eight rows, then 2 · LANES multiplications a
// cycle in float32, 8 · LANES in bytes.

#include "vectors.h"

int threads = 1;

EXPORT void set_threads(int count) { threads = count; }

namespace {

#if defined(__AVX512F__)
constexpr int ROWS = 8, WIDTH = 3;  // 24 sums, three weights and one input in 32 registers
#else
constexpr int ROWS = 4, WIDTH = 3;  // 12, three and one in 16
#endif
constexpr int PANEL = WIDTH * LANES;
constexpr int DEPTH = 1024;  // inputs of a panel that are used by all rows before the next: they fit the second cache
constexpr int64_t WORTH_A_THREAD = 1 << 20;  // multiplications

template <int rows>
INLINE void multiply_tile(const float *x, int64_t x_stride, const float *panel, int depth, float *y, int64_t y_stride,
                          int outputs, bool first) {
    vec sums[rows][WIDTH];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < WIDTH; v++) {
            int room = outputs - v * LANES;
            const float *from = y + r * y_stride + v * LANES;
            sums[r][v] = first || room <= 0 ? vec{} : room >= LANES ? load(from) : load_some(from, room);
        }
    for (int k = 0; k < depth; k++, panel += PANEL) {
        vec w[WIDTH];
#pragma GCC unroll 3
        for (int v = 0; v < WIDTH; v++) w[v] = load(panel + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vec input = all(x[r * x_stride + k]);
#pragma GCC unroll 3
            for (int v = 0; v < WIDTH; v++) sums[r][v] += input * w[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < WIDTH; v++) {
            int room = outputs - v * LANES;
            float *to = y + r * y_stride + v * LANES;
            if (room >= LANES) store(to, sums[r][v]);
            else if (room > 0) store_some(to, sums[r][v], room);
        }
}

template <int rows>
void multiply_rows(const float *x, const float *panel, int depth, float *y, int64_t in, int64_t out, int outputs,
                   bool first) {
    multiply_tile<rows>(x, in, panel, depth, y, out, outputs, first);
}

using MultiplyRows = void (*)(const float *, const float *, int, float *, int64_t, int64_t, int, bool);
constexpr MultiplyRows multiply_some[] = {
    nullptr, multiply_rows<1>, multiply_rows<2>, multiply_rows<3>, multiply_rows<4>,
#if defined(__AVX512F__)
    multiply_rows<5>, multiply_rows<6>, multiply_rows<7>, multiply_rows<8>,
#endif
};

// The rows of a panel's worth of outputs.
void multiply_panel(const float *x, const float *panel, float *y, int64_t rows, int64_t in, int64_t out, int outputs) {
    for (int64_t k = 0; k < in; k += DEPTH) {
        int depth = in - k < DEPTH ? in - k : DEPTH;
        for (int64_t row = 0; row < rows; row += ROWS) {
            int together = rows - row < ROWS ? rows - row : ROWS;
            multiply_some[together](x + row * in + k, panel + k * PANEL, depth, y + row * out, in, out, outputs, k == 0);
        }
    }
}

}  // namespace

EXPORT int64_t padded_outputs(int64_t out) { return (out + PANEL - 1) / PANEL * PANEL; }

// weight: (out, in) -> packed: (panels, in, PANEL), zeros behind the last output.
EXPORT void pack(const float *weight, float *packed, int64_t out, int64_t in) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t panel = 0; panel < (out + PANEL - 1) / PANEL; panel++)
        for (int64_t k = 0; k < in; k++)
            for (int o = 0; o < PANEL; o++) {
                int64_t output = panel * PANEL + o;
                packed[(panel * in + k) * PANEL + o] = output < out ? weight[output * in + k] : 0.0f;
            }
}

// x: (rows, in), packed -> y: (rows, out).
EXPORT void linear(const float *x, const float *packed, float *y, int64_t rows, int64_t in, int64_t out) {
    int64_t panels = (out + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * in * out > WORTH_A_THREAD)
    for (int64_t panel = 0; panel < panels; panel++) {
        int outputs = out - panel * PANEL < PANEL ? out - panel * PANEL : PANEL;
        multiply_panel(x, packed + panel * in * PANEL, y + panel * PANEL, rows, in, out, outputs);
    }
}

#if defined(__AVX512VNNI__)
#include <immintrin.h>

namespace {

constexpr int STEP = 4;  // inputs that one instruction multiplies and adds
constexpr int ZERO = 128;  // what zero becomes in unsigned bytes

// An int8 matrix: codes (panels, in / STEP, PANEL, STEP), scales and ZERO times the sum of each output's codes.
template <int rows>
INLINE void multiply_bytes(const uint8_t *x, int64_t x_stride, const int8_t *panel, int steps, const float *scales,
                           const int32_t *offsets, const float *row_scales, float *y, int64_t y_stride, int outputs) {
    __m512i sums[rows][WIDTH];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < WIDTH; v++) sums[r][v] = _mm512_setzero_si512();
    for (int k = 0; k < steps; k++, panel += PANEL * STEP) {
        __m512i w[WIDTH];
#pragma GCC unroll 3
        for (int v = 0; v < WIDTH; v++) w[v] = _mm512_loadu_si512(panel + v * LANES * STEP);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            int32_t four;
            std::memcpy(&four, x + r * x_stride + k * STEP, STEP);
            __m512i input = _mm512_set1_epi32(four);
#pragma GCC unroll 3
            for (int v = 0; v < WIDTH; v++) sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], input, w[v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < WIDTH; v++) {
            int room = outputs - v * LANES;
            if (room <= 0) continue;
            __m512i exact = _mm512_sub_epi32(sums[r][v], _mm512_loadu_si512(offsets + v * LANES));
            vec result = (vec)_mm512_cvtepi32_ps(exact) * load(scales + v * LANES) * row_scales[r];
            float *to = y + r * y_stride + v * LANES;
            if (room >= LANES) store(to, result);
            else store_some(to, result, room);
        }
}

template <int rows>
void multiply_byte_rows(const uint8_t *x, int64_t x_stride, const int8_t *panel, int steps, const float *scales,
                        const int32_t *offsets, const float *row_scales, float *y, int64_t out, int outputs) {
    multiply_bytes<rows>(x, x_stride, panel, steps, scales, offsets, row_scales, y, out, outputs);
}

using MultiplyByteRows = void (*)(const uint8_t *, int64_t, const int8_t *, int, const float *, const int32_t *,
                                  const float *, float *, int64_t, int);
constexpr MultiplyByteRows multiply_some_bytes[] = {
    nullptr,
    multiply_byte_rows<1>, multiply_byte_rows<2>, multiply_byte_rows<3>, multiply_byte_rows<4>,
    multiply_byte_rows<5>, multiply_byte_rows<6>, multiply_byte_rows<7>, multiply_byte_rows<8>,
};

// x: (in) -> codes (padded) around ZERO; returns the scale, which is not a number where x has one that is not finite.
float round_row(const float *x, uint8_t *codes, int64_t in, int64_t padded) {
    vec most{}, odd{};
    for (int64_t k = 0; k < in; k += LANES) {
        vec part = in - k >= LANES ? load(x + k) : load_some(x + k, in - k);
        most = larger(magnitude(part), most);
        odd += part * 0.0f;
    }
    float scale = largest(most) / 127.0f;
    scale = scale > 1e-12f ? scale : 1e-12f;
    vec inverse = all(1.0f / scale);
    for (int64_t k = 0; k < padded; k += LANES) {
        int64_t room = in - k;
        vec part = room >= LANES ? load(x + k) : room > 0 ? load_some(x + k, room) : vec{};
        __m512i rounded = _mm512_add_epi32(_mm512_cvtps_epi32((__m512)(part * inverse)), _mm512_set1_epi32(ZERO));
        __m128i bytes = _mm512_cvtepi32_epi8(rounded);
        std::memcpy(codes + k, &bytes, padded - k < LANES ? padded - k : LANES);
    }
    return scale + sum(odd);
}

int64_t padded_inputs(int64_t in) { return (in + STEP - 1) / STEP * STEP; }

}  // namespace

// codes: (out, in) -> packed, and offsets (padded outputs): ZERO times the sum of each output's codes.
EXPORT void pack_bytes(const int8_t *codes, int8_t *packed, int32_t *offsets, int64_t out, int64_t in) {
    int64_t padded = padded_inputs(in);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t panel = 0; panel < (out + PANEL - 1) / PANEL; panel++)
        for (int o = 0; o < PANEL; o++) {
            int64_t output = panel * PANEL + o;
            int32_t total = 0;
            for (int64_t k = 0; k < padded; k++) {
                int8_t code = output < out && k < in ? codes[output * in + k] : 0;
                packed[panel * PANEL * padded + (k / STEP * PANEL + o) * STEP + k % STEP] = code;
                total += code;
            }
            offsets[output] = ZERO * total;
        }
}

// x: (rows, in) -> y: (rows, out). scratch: rows * (padded inputs + 4) bytes for the rounded rows and their scales.
EXPORT void linear_bytes(const float *x, const int8_t *packed, const float *scales, const int32_t *offsets, float *y,
                         uint8_t *scratch, int64_t rows, int64_t in, int64_t out) {
    int64_t padded = padded_inputs(in), panels = (out + PANEL - 1) / PANEL;
    float *row_scales = (float *)scratch;
    uint8_t *codes = scratch + rows * sizeof(float);
    bool many = threads > 1 && rows * in * out > WORTH_A_THREAD;
#pragma omp parallel num_threads(threads) if (many)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++)
            row_scales[row] = round_row(x + row * in, codes + row * padded, in, padded);
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < panels; panel++) {
            int outputs = out - panel * PANEL < PANEL ? out - panel * PANEL : PANEL;
            const int8_t *weights = packed + panel * PANEL * padded;
            for (int64_t row = 0; row < rows; row += ROWS) {
                int together = rows - row < ROWS ? rows - row : ROWS;
                multiply_some_bytes[together](codes + row * padded, padded, weights, padded / STEP,
                                              scales + panel * PANEL, offsets + panel * PANEL, row_scales + row,
                                              y + row * out + panel * PANEL, out, outputs);
            }
        }
    }
}
#endif
