// y = x Wᵀ for int8 weights with a scale per output, and rows that are rounded to bytes here, each by its own scale.
//
// Sums of bytes are exact, so a row's result depends on the row alone, whichever instruction multiplies: the tile unit
// where there is one, else VNNI, or the dot products of ARM.
//
// Floor: a byte a weight over the memory's bandwidth, then 8 · LANES multiplications a cycle, 1,024 with tiles.

#include "tiles.h"
#include "vectors.h"

#if MULTIPLIES_BYTES
#if defined(__AVX512VNNI__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

namespace {

constexpr int STEP = 4;  // inputs that one instruction multiplies and adds
#if defined(__AVX512VNNI__)
constexpr int ZERO = 128;  // what zero becomes in unsigned bytes
#else
constexpr int ZERO = 0;
#endif
constexpr int64_t MIN_WORK_PER_THREAD = 1 << 20;  // multiplications
#if defined(__AMX_TILE__)
constexpr int WIDTH = 2, DEPTH = TILE_BYTES;  // inputs are padded to a multiple of DEPTH
#else
constexpr int ROWS = 8, WIDTH = 3, DEPTH = STEP;  // 24 sums, three weights and one input in 32 registers
#endif
constexpr int PANEL = WIDTH * LANES;

typedef int8_t bytes __attribute__((vector_size(LANES)));

#if defined(__AVX512VNNI__)
INLINE ivec nearest(vec x) { return (ivec)_mm512_cvtps_epi32((__m512)x); }
INLINE ivec multiply_add(ivec sums, ivec input, const int8_t *weights) {
    return (ivec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)input, _mm512_loadu_si512(weights));
}
#else
INLINE ivec nearest(vec x) { return (ivec)vcvtnq_s32_f32((float32x4_t)x); }
INLINE ivec multiply_add(ivec sums, ivec input, const int8_t *weights) {
    return (ivec)vdotq_s32((int32x4_t)sums, vld1q_s8(weights), (int8x16_t)input);
}
#endif

int64_t padded_inputs(int64_t in) { return (in + DEPTH - 1) / DEPTH * DEPTH; }

// The sums of a row and LANES outputs -> y.
INLINE void finish(ivec sums, const float *scales, const int32_t *offsets, float row_scale, float *y, int room) {
    ivec exact = sums - (ivec)load((const float *)offsets);
    vec result = __builtin_convertvector(exact, vec) * load(scales) * row_scale;
    if (room >= LANES) store(y, result);
    else if (room > 0) store_some(y, result, room);
}

// An int8 matrix: codes (panels, in / STEP, PANEL, STEP), scales and ZERO times the sum of each output's codes.
#if !defined(__AMX_TILE__)
template <int rows>
INLINE void multiply_bytes(const uint8_t *x, int64_t x_stride, const int8_t *panel, int steps, const float *scales,
                           const int32_t *offsets, const float *row_scales, float *y, int64_t y_stride, int outputs) {
    ivec sums[rows][WIDTH];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < WIDTH; v++) sums[r][v] = ivec{};
    for (int k = 0; k < steps; k++, panel += PANEL * STEP) {
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            int32_t four;
            std::memcpy(&four, x + r * x_stride + k * STEP, STEP);
            ivec input = ivec{} + four;
#pragma GCC unroll 3
            for (int v = 0; v < WIDTH; v++) sums[r][v] = multiply_add(sums[r][v], input, panel + v * LANES * STEP);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < WIDTH; v++)
            finish(sums[r][v], scales + v * LANES, offsets + v * LANES, row_scales[r], y + r * y_stride + v * LANES,
                   outputs - v * LANES);
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

void multiply_panel(const uint8_t *codes, int64_t padded, const int8_t *panel, const float *scales,
                    const int32_t *offsets, const float *row_scales, float *y, int64_t rows, int64_t out,
                    int outputs) {
    for (int64_t row = 0; row < rows; row += ROWS) {
        int together = rows - row < ROWS ? rows - row : ROWS;
        multiply_some_bytes[together](codes + row * padded, padded, panel, padded / STEP, scales, offsets,
                                      row_scales + row, y + row * out, out, outputs);
    }
}
#else

// codes: laid out as tiles.
void multiply_panel(const uint8_t *codes, int64_t padded, const int8_t *panel, const float *scales,
                    const int32_t *offsets, const float *row_scales, float *y, int64_t rows, int64_t out,
                    int outputs) {
    alignas(64) int32_t sums[2 * TILE_ROWS * PANEL];
    for (int64_t row = 0; row < rows; row += 2 * TILE_ROWS) {
        int64_t left = rows - row, steps = padded / DEPTH;
        const uint8_t *own = codes + row * padded, *weights = (const uint8_t *)panel;
        if (left > TILE_ROWS) multiply_tiles<Numbers::bytes, true>(own, weights, steps, sums);
        else multiply_tiles<Numbers::bytes, false>(own, weights, steps, sums);
        int together = left < 2 * TILE_ROWS ? left : 2 * TILE_ROWS;
        for (int r = 0; r < together; r++)
#pragma GCC unroll 2
            for (int v = 0; v < WIDTH; v++)
                finish((ivec)load((const float *)sums + r * PANEL + v * LANES), scales + v * LANES, offsets + v * LANES,
                       row_scales[row + r], y + (row + r) * out + v * LANES, outputs - v * LANES);
    }
}
#endif

// x: (in) -> codes (padded) around ZERO; returns the scale, which is not a number where x has one that is not finite.
float round_row(const float *x, uint8_t *codes, int64_t row, int64_t in, int64_t padded) {
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
        bytes rounded = __builtin_convertvector(nearest(part * inverse) + ZERO, bytes);
#if defined(__AMX_TILE__)
        std::memcpy(place_in_tiles(codes, row, k / DEPTH, padded / DEPTH) + k % DEPTH, &rounded, LANES);
#else
        std::memcpy(codes + row * padded + k, &rounded, padded - k < LANES ? padded - k : LANES);
#endif
    }
    return scale + sum(odd);
}

}  // namespace

EXPORT int64_t padded_byte_outputs(int64_t out) { return (out + PANEL - 1) / PANEL * PANEL; }
EXPORT int64_t padded_byte_inputs(int64_t in) { return padded_inputs(in); }

// Bytes of `scratch` for that many rows: the rounded rows and their scales.
EXPORT int64_t bytes_scratch(int64_t rows, int64_t in) {
    return (rows + 31) / 32 * 32 * (padded_inputs(in) + (int64_t)sizeof(float));
}

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

// x: (rows, in) -> y: (rows, out).
EXPORT void linear_bytes(const float *x, const int8_t *packed, const float *scales, const int32_t *offsets, float *y,
                         uint8_t *scratch, int64_t rows, int64_t in, int64_t out) {
    int64_t padded = padded_inputs(in), panels = (out + PANEL - 1) / PANEL;
    float *row_scales = (float *)(scratch + (rows + 31) / 32 * 32 * padded);
    uint8_t *codes = scratch;
    bool many = threads > 1 && rows * in * out > MIN_WORK_PER_THREAD;
#pragma omp parallel num_threads(threads) if (many)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) row_scales[row] = round_row(x + row * in, codes, row, in, padded);
        START_TILES(rows);
        const int64_t most = rows_together(padded);
        for (int64_t row = 0; row < rows; row += most) {
            int64_t together = rows - row < most ? rows - row : most;
#pragma omp for schedule(static) nowait
            for (int64_t panel = 0; panel < panels; panel++) {
                int outputs = out - panel * PANEL < PANEL ? out - panel * PANEL : PANEL;
                multiply_panel(codes + row * padded, padded, packed + panel * PANEL * padded, scales + panel * PANEL,
                               offsets + panel * PANEL, row_scales + row, y + row * out + panel * PANEL, together, out,
                               outputs);
            }
        }
        END_TILES();
    }
}
#endif
