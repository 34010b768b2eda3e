// y = x Wᵀ for weights in bfloat16 that were packed once, and float32 rows.
//
// Processors that multiply bfloat16 get the rows rounded to it; the tile unit where there is one, else the instruction
// that multiplies and adds pairs. On others the weights become float32 in registers (`linear_widened`), and the rows
// are not rounded.
//
// Sums are float32, one chain from the first input to the last whatever the number of rows, so a row's result depends
// on the row alone.
//
// Floor: two bytes a weight over the memory's bandwidth up to some 30 rows, then the processor's products a cycle:
// LANES · 2 (pairs), 512 (tiles).

#include "tiles.h"
#include "vectors.h"

#if !defined(__AVX512BF16__)

extern "C" {
int64_t padded_outputs(int64_t);
int64_t padded_widened_inputs(int64_t);
void pack_widened(const uint16_t *, uint16_t *, int64_t, int64_t);
void linear_widened(const float *, const uint16_t *, float *, int64_t, int64_t, int64_t);
}

EXPORT int64_t padded_bf16_outputs(int64_t out) { return padded_outputs(out); }
EXPORT int64_t padded_bf16_inputs(int64_t in) { return padded_widened_inputs(in); }
EXPORT int64_t bf16_scratch(int64_t, int64_t) { return 0; }
EXPORT void pack_bf16(const uint16_t *weight, uint16_t *packed, int64_t out, int64_t in) {
    pack_widened(weight, packed, out, in);
}
EXPORT void linear_bf16(const float *x, const uint16_t *packed, float *y, uint8_t *, int64_t rows, int64_t in,
                        int64_t out) {
    linear_widened(x, packed, y, rows, in, out);
}

#else
#include <immintrin.h>

namespace {

constexpr int WIDTH = 2, PANEL = WIDTH * LANES, PAIR = 2;
constexpr int64_t DEPTH = 32;  // inputs are padded to a multiple, which is what a row of a tile holds
constexpr int64_t MIN_WORK_PER_THREAD = 1 << 20;  // multiplications

int64_t padded_inputs(int64_t in) { return (in + DEPTH - 1) / DEPTH * DEPTH; }

typedef uint16_t Input;  // a row of x is rounded first

// Of the rounded rows, in whole tiles.
int64_t rounded_bytes(int64_t rows, int64_t in) { return (rows + 31) / 32 * 32 * padded_inputs(in) * sizeof(Input); }

void round_row(const float *x, uint16_t *rounded, int64_t row, int64_t in, int64_t padded) {
    for (int64_t k = 0; k < padded; k += LANES) {
        int64_t room = in - k;
        vec part = room >= LANES ? load(x + k) : room > 0 ? load_some(x + k, room) : vec{};
        __m256bh half = _mm512_cvtneps_pbh((__m512)part);
#if defined(__AMX_TILE__)
        uint8_t *to = place_in_tiles((uint8_t *)rounded, row, k / DEPTH, padded / DEPTH) + k % DEPTH * sizeof(Input);
#else
        uint16_t *to = rounded + row * padded + k;
#endif
        std::memcpy(to, &half, sizeof half);
    }
}

#if !defined(__AMX_TILE__)
constexpr int ROWS = 12;  // 24 sums, two vectors of weights and an input in 32 registers

// x: rows `stride` numbers apart.
template <int rows>
void multiply_rows(const Input *x, int64_t stride, const uint16_t *panel, int64_t in, float *y, int64_t out,
                   int outputs) {
    vec sums[rows][WIDTH]{};
    int64_t pairs = in / PAIR;
    for (int64_t k = 0; k < pairs; k++, panel += PANEL * PAIR) {
        __m512bh w[WIDTH];
#pragma GCC unroll 2
        for (int v = 0; v < WIDTH; v++) w[v] = (__m512bh)_mm512_loadu_si512(panel + v * LANES * PAIR);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            int32_t both;
            std::memcpy(&both, x + r * stride + k * PAIR, sizeof both);
            __m512bh input = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 2
            for (int v = 0; v < WIDTH; v++) sums[r][v] = (vec)_mm512_dpbf16_ps((__m512)sums[r][v], input, w[v]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < WIDTH; v++) {
            int room = outputs - v * LANES;
            float *to = y + r * out + v * LANES;
            if (room >= LANES) store(to, sums[r][v]);
            else if (room > 0) store_some(to, sums[r][v], room);
        }
}

using MultiplyRows = void (*)(const Input *, int64_t, const uint16_t *, int64_t, float *, int64_t, int);
constexpr MultiplyRows multiply_some[] = {
    nullptr, multiply_rows<1>, multiply_rows<2>, multiply_rows<3>, multiply_rows<4>,
    multiply_rows<5>, multiply_rows<6>, multiply_rows<7>, multiply_rows<8>,
    multiply_rows<9>, multiply_rows<10>, multiply_rows<11>, multiply_rows<12>,
};

void multiply_panel(const Input *x, int64_t stride, const uint16_t *panel, float *y, int64_t rows, int64_t in,
                    int64_t out, int outputs) {
    for (int64_t row = 0; row < rows; row += ROWS) {
        int together = rows - row < ROWS ? rows - row : ROWS;
        multiply_some[together](x + row * stride, stride, panel, in, y + row * out, out, outputs);
    }
}
#else

// x: laid out as tiles.
void multiply_panel(const Input *x, int64_t stride, const uint16_t *panel, float *y, int64_t rows, int64_t in,
                    int64_t out, int outputs) {
    alignas(64) float sums[2 * TILE_ROWS * PANEL];
    for (int64_t row = 0; row < rows; row += 2 * TILE_ROWS) {
        int64_t left = rows - row, steps = in / DEPTH;
        const uint8_t *own = (const uint8_t *)(x + row * stride), *weights = (const uint8_t *)panel;
        if (left > TILE_ROWS) multiply_tiles<Numbers::bfloat16, true>(own, weights, steps, sums);
        else multiply_tiles<Numbers::bfloat16, false>(own, weights, steps, sums);
        int together = left < 2 * TILE_ROWS ? left : 2 * TILE_ROWS;
        for (int r = 0; r < together; r++) {
            float *to = y + (row + r) * out;
            const float *from = sums + r * PANEL;
            if (outputs == PANEL) store(to, load(from)), store(to + LANES, load(from + LANES));
            else std::memcpy(to, from, sizeof(float) * outputs);
        }
    }
}
#endif

// All rows by all panels, shared by the threads that call it. depth: inputs of a row that are multiplied.
void multiply_all(const Input *x, int64_t stride, const uint16_t *packed, float *y, int64_t rows, int64_t depth,
                  int64_t padded, int64_t out) {
    START_TILES(rows);
    const int64_t most = rows_together(stride * sizeof(Input));
    for (int64_t row = 0; row < rows; row += most) {
        int64_t together = rows - row < most ? rows - row : most;
#pragma omp for schedule(static) nowait
        for (int64_t panel = 0; panel < (out + PANEL - 1) / PANEL; panel++) {
            int outputs = out - panel * PANEL < PANEL ? out - panel * PANEL : PANEL;
            multiply_panel(x + row * stride, stride, packed + panel * PANEL * padded, y + row * out + panel * PANEL,
                           together, depth, out, outputs);
        }
    }
    END_TILES();
}

#if defined(__AMX_TILE__)
// One panel of the gate and the panel of the same outputs of up: silu(gate) · up, rounded, as step `panel` of the rows
// of `active`, which are laid out as tiles.
template <bool is_silu>
void multiply_gate_up(const uint16_t *x, int64_t padded, const uint16_t *gate, const uint16_t *up, uint8_t *active,
                      int64_t rows, int64_t panel, int64_t panels) {
    alignas(64) float gates[2 * TILE_ROWS * PANEL], ups[2 * TILE_ROWS * PANEL];
    const int64_t steps = padded / DEPTH;
    for (int64_t row = 0; row < rows; row += 2 * TILE_ROWS) {
        const uint8_t *own = (const uint8_t *)(x + row * padded);
        if (rows - row > TILE_ROWS) {
            multiply_tiles<Numbers::bfloat16, true>(own, (const uint8_t *)gate, steps, gates);
            multiply_tiles<Numbers::bfloat16, true>(own, (const uint8_t *)up, steps, ups);
        } else {
            multiply_tiles<Numbers::bfloat16, false>(own, (const uint8_t *)gate, steps, gates);
            multiply_tiles<Numbers::bfloat16, false>(own, (const uint8_t *)up, steps, ups);
        }
        int64_t together = rows - row < 2 * TILE_ROWS ? rows - row : 2 * TILE_ROWS;
        for (int64_t r = 0; r < together; r++) {
            uint8_t *to = place_in_tiles(active, row + r, panel, panels);
            for (int v = 0; v < WIDTH; v++) {
                vec g = load(gates + r * PANEL + v * LANES), u = load(ups + r * PANEL + v * LANES);
                __m256bh half = _mm512_cvtneps_pbh((__m512)((is_silu ? silu(g) : gelu(g)) * u));
                std::memcpy(to + v * sizeof half, &half, sizeof half);
            }
        }
    }
}
#endif

}  // namespace

#if defined(__AMX_TILE__)
// A gated MLP: x (rows, in) -> y (rows, in). gate_up and down are packed, of `inner` features, a multiple of 32.
// What lies between them is written as the inputs of `down`, so the outputs of gate and up are never in memory, and
// weights are read once for as many rows as stay in the second cache. The numbers are those of the parts one by one.
EXPORT void mlp_bf16(const float *x, const uint16_t *gate_up, const uint16_t *down, float *y, uint8_t *scratch,
                     int64_t rows, int64_t in, int64_t inner, int64_t is_silu) {
    const int64_t padded = padded_inputs(in), panels = inner / PANEL;
    uint16_t *rounded = (uint16_t *)scratch;
    uint8_t *active = scratch + rounded_bytes(rows, in);
#pragma omp parallel num_threads(threads) if (threads > 1 && rows * in * inner > MIN_WORK_PER_THREAD)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) round_row(x + row * in, rounded, row, in, padded);
        START_TILES(rows);
        const int64_t most = rows_together(padded * sizeof(Input));
        for (int64_t row = 0; row < rows; row += most) {
            int64_t together = rows - row < most ? rows - row : most;
#pragma omp for schedule(static)
            for (int64_t panel = 0; panel < panels; panel++) {
                const uint16_t *gate = gate_up + panel * PANEL * padded, *up = gate + inner * padded;
                auto multiply = is_silu ? multiply_gate_up<true> : multiply_gate_up<false>;
                multiply(rounded + row * padded, padded, gate, up, active + row * inner * sizeof(Input), together,
                         panel, panels);
            }
        }
        END_TILES();
        multiply_all((const Input *)active, inner, down, y, rows, inner, inner, in);
    }
}

EXPORT int64_t mlp_bf16_scratch(int64_t rows, int64_t in, int64_t inner) {
    return rounded_bytes(rows, in) + rounded_bytes(rows, inner);
}
#endif

EXPORT int64_t padded_bf16_outputs(int64_t out) { return (out + PANEL - 1) / PANEL * PANEL; }
EXPORT int64_t padded_bf16_inputs(int64_t in) { return padded_inputs(in); }

// Bytes of `scratch` for that many rows.
EXPORT int64_t bf16_scratch(int64_t rows, int64_t in) { return rounded_bytes(rows, in); }

// weight: (out, in) bfloat16 -> packed: (panels, padded inputs / PAIR, PANEL, PAIR), zeros behind the last of both.
EXPORT void pack_bf16(const uint16_t *weight, uint16_t *packed, int64_t out, int64_t in) {
    int64_t padded = padded_inputs(in);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t panel = 0; panel < (out + PANEL - 1) / PANEL; panel++)
        for (int o = 0; o < PANEL; o++) {
            int64_t output = panel * PANEL + o;
            for (int64_t k = 0; k < padded; k++)
                packed[panel * PANEL * padded + (k / PAIR * PANEL + o) * PAIR + k % PAIR] =
                    output < out && k < in ? weight[output * in + k] : 0;
        }
}

// x: (rows, in) -> y: (rows, out).
EXPORT void linear_bf16(const float *x, const uint16_t *packed, float *y, uint8_t *scratch, int64_t rows, int64_t in,
                        int64_t out) {
    const int64_t padded = padded_inputs(in);
#pragma omp parallel num_threads(threads) if (threads > 1 && rows * in * out > MIN_WORK_PER_THREAD)
    {
        Input *rounded = (Input *)scratch;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) round_row(x + row * in, rounded, row, in, padded);
        multiply_all(rounded, padded, packed, y, rows, padded, padded, out);
    }
}

#endif
