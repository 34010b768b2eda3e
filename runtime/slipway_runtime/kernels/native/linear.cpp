// y = x Wᵀ in float32, for weights that were packed once: as float32, or as bfloat16 that becomes float32 in registers.
//
// The latter reads half the bytes, and gives the same bits where the weights are bfloat16 numbers, as those of most
// published checkpoints are: both add the same products in the same order.
//
// A panel holds PANEL outputs, one input (bfloat16: a pair of inputs) after another, so that a step of the inner loop
// reads one run of memory. ROWS rows go through a panel together and stay in registers. An output is one chain of
// additions from the first input to the last whatever the number of rows, so a row's result depends on the row alone.
//
// Floor: the bytes of the weights over the memory's bandwidth up to about eight rows (bfloat16: four), then 2 · LANES
// multiplications a cycle.

#include "vectors.h"

int threads = 1;

EXPORT void set_threads(int count) { threads = count; }

namespace {

#if MANY_REGISTERS
constexpr int ROWS = 8, WIDTH = 3;  // 24 sums, three weights and one input in 32 registers
#else
constexpr int ROWS = 4, WIDTH = 3;  // 12, three and one in 16
#endif
constexpr int PANEL = WIDTH * LANES;
constexpr int PAIR = 2;  // bfloat16 inputs side by side
constexpr int DEPTH = 1024;  // inputs of a panel that are used by all rows before the next: they fit the second cache
constexpr int64_t MIN_WORK_PER_THREAD = 1 << 20;  // multiplications

// The sums of `rows` rows after one more input; w: its weights, for PANEL outputs.
template <int rows>
INLINE void add_products(vec (&sums)[rows][WIDTH], const vec (&w)[WIDTH], const float *x, int64_t stride) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        vec input = all(x[r * stride]);
#pragma GCC unroll 3
        for (int v = 0; v < WIDTH; v++) sums[r][v] += input * w[v];
    }
}

template <int rows>
INLINE void add_inputs(vec (&sums)[rows][WIDTH], const float *x, int64_t stride, const float *panel, int depth) {
    for (int k = 0; k < depth; k++, panel += PANEL) {
        vec w[WIDTH];
#pragma GCC unroll 3
        for (int v = 0; v < WIDTH; v++) w[v] = load(panel + v * LANES);
        add_products(sums, w, x + k, stride);
    }
}

// A pair is one 32-bit word for each output, the first input in its lower half.
template <int rows>
INLINE void add_inputs(vec (&sums)[rows][WIDTH], const float *x, int64_t stride, const uint16_t *panel, int depth) {
    for (int k = 0; k < depth; k += PAIR, panel += PANEL * PAIR) {
        vec w[WIDTH];
#pragma GCC unroll 3
        for (int v = 0; v < WIDTH; v++) w[v] = (vec)((ivec)load((const float *)(panel + v * LANES * PAIR)) << 16);
        add_products(sums, w, x + k, stride);
        if (k + 1 == depth) return;  // an odd number of inputs
#pragma GCC unroll 3
        for (int v = 0; v < WIDTH; v++)
            w[v] = (vec)((ivec)load((const float *)(panel + v * LANES * PAIR)) & (int32_t)0xffff0000);
        add_products(sums, w, x + k + 1, stride);
    }
}

template <int rows, class Weight>
void multiply_rows(const float *x, const Weight *panel, int depth, float *y, int64_t in, int64_t out, int outputs,
                   bool first) {
    vec sums[rows][WIDTH];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < WIDTH; v++) {
            int room = outputs - v * LANES;
            const float *from = y + r * out + v * LANES;
            sums[r][v] = first || room <= 0 ? vec{} : room >= LANES ? load(from) : load_some(from, room);
        }
    add_inputs(sums, x, in, panel, depth);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < WIDTH; v++) {
            int room = outputs - v * LANES;
            float *to = y + r * out + v * LANES;
            if (room >= LANES) store(to, sums[r][v]);
            else if (room > 0) store_some(to, sums[r][v], room);
        }
}

template <class Weight>
using MultiplyRows = void (*)(const float *, const Weight *, int, float *, int64_t, int64_t, int, bool);
template <class Weight>
constexpr MultiplyRows<Weight> multiply_some[] = {
    nullptr, multiply_rows<1>, multiply_rows<2>, multiply_rows<3>, multiply_rows<4>,
#if MANY_REGISTERS
    multiply_rows<5>, multiply_rows<6>, multiply_rows<7>, multiply_rows<8>,
#endif
};

// The rows of a panel's worth of outputs.
template <class Weight>
void multiply_panel(const float *x, const Weight *panel, float *y, int64_t rows, int64_t in, int64_t out, int outputs) {
    for (int64_t k = 0; k < in; k += DEPTH) {
        int depth = in - k < DEPTH ? in - k : DEPTH;
        for (int64_t row = 0; row < rows; row += ROWS) {
            int together = rows - row < ROWS ? rows - row : ROWS;
            multiply_some<Weight>[together](x + row * in + k, panel + k * PANEL, depth, y + row * out, in, out, outputs,
                                            k == 0);
        }
    }
}

// padded: inputs of a panel.
template <class Weight>
void multiply_all(const float *x, const Weight *packed, float *y, int64_t rows, int64_t in, int64_t padded,
                  int64_t out) {
    int64_t panels = (out + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * in * out > MIN_WORK_PER_THREAD)
    for (int64_t panel = 0; panel < panels; panel++) {
        int outputs = out - panel * PANEL < PANEL ? out - panel * PANEL : PANEL;
        multiply_panel(x, packed + panel * padded * PANEL, y + panel * PANEL, rows, in, out, outputs);
    }
}

int64_t in_pairs(int64_t in) { return (in + PAIR - 1) / PAIR * PAIR; }

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
    multiply_all(x, packed, y, rows, in, in, out);
}

EXPORT int64_t padded_widened_inputs(int64_t in) { return in_pairs(in); }

// weight: (out, in) bfloat16 -> packed: (panels, pairs of inputs, PANEL, PAIR), zeros behind the last of both.
EXPORT void pack_widened(const uint16_t *weight, uint16_t *packed, int64_t out, int64_t in) {
    const int64_t padded = in_pairs(in);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t panel = 0; panel < (out + PANEL - 1) / PANEL; panel++)
        for (int64_t k = 0; k < padded; k++)
            for (int o = 0; o < PANEL; o++) {
                int64_t output = panel * PANEL + o;
                packed[panel * padded * PANEL + (k / PAIR * PANEL + o) * PAIR + k % PAIR] =
                    output < out && k < in ? weight[output * in + k] : 0;
            }
}

// As `linear`, for weights of `pack_widened`.
EXPORT void linear_widened(const float *x, const uint16_t *packed, float *y, int64_t rows, int64_t in, int64_t out) {
    multiply_all(x, packed, y, rows, in, in_pairs(in), out);
}
