// A decoder layer of dense models in one call: norm, heads, rotation and cache write, attention, output, norm, MLP.
//
// It calls the functions of the other files one after another, with the numbers that they get when they are called one
// by one, so its result is theirs bit for bit. `kernels/cpu_layer.py` has the same structures.

#include "vectors.h"

extern "C" {
void linear(const float *, const float *, float *, int64_t, int64_t, int64_t);
void linear_widened(const float *, const uint16_t *, float *, int64_t, int64_t, int64_t);
int64_t bf16_scratch(int64_t, int64_t);
void linear_bf16(const float *, const uint16_t *, float *, uint8_t *, int64_t, int64_t, int64_t);
#if defined(__AMX_TILE__)
int64_t mlp_bf16_scratch(int64_t, int64_t, int64_t);
void mlp_bf16(const float *, const uint16_t *, const uint16_t *, float *, uint8_t *, int64_t, int64_t, int64_t,
              int64_t);
#endif
#if MULTIPLIES_BYTES
int64_t bytes_scratch(int64_t, int64_t);
void linear_bytes(const float *, const int8_t *, const float *, const int32_t *, float *, uint8_t *, int64_t, int64_t,
                  int64_t);
#endif
void rms_norm(const float *, const float *, float *, int64_t, int64_t, float);
void add_rms_norm(const float *, float *, const float *, float *, int64_t, int64_t, float);
void swiglu(const float *, float *, int64_t, int64_t);
void geglu(const float *, float *, int64_t, int64_t);
void rope_and_store(float *, const float *, const float *, int64_t, void *, int64_t, const int64_t *, const float *,
                    const float *, float, int64_t, int64_t, int64_t, int64_t, int64_t);
void attend_pages(const float *, int64_t, const void *, int64_t, float *, const int64_t *, int64_t, const int64_t *,
                  int64_t, const int64_t *, int64_t, int64_t, int64_t, int64_t, float, int64_t, float, const float *,
                  int64_t);
}

namespace {

struct Matrix {
    int64_t form;  // 0: float32, 1: bfloat16, 2: bytes, 3: bfloat16 that is widened to float32
    int64_t in, out;
    const void *packed;
    const float *scales;  // of bytes, as `linear_bytes` takes them
    const int32_t *offsets;
    const float *bias;  // null: there is none
};

struct Layer {
    Matrix heads, output, gate_up, down;
    const float *attention_norm, *mlp_norm, *query_norm, *key_norm, *sinks;
    int64_t query_heads, kv_heads, size, window;
    int64_t silu;  // else GELU by tanh
    float attention_eps, mlp_eps, head_eps, scale, softcap;
};

struct Step {
    const float *cos, *sin;
    int64_t angles_stride;
    const int64_t *slots, *tiles, *tables, *positions;
    int64_t num_tiles, width, num_scores, page, rows;
};

int64_t scratch_of(const Matrix &matrix, int64_t rows) {
    if (matrix.form == 1) return bf16_scratch(rows, matrix.in);
#if MULTIPLIES_BYTES
    if (matrix.form == 2) return bytes_scratch(rows, matrix.in);
#endif
    return 0;
}

constexpr int64_t MIN_WORK = 1 << 14;  // additions of a bias in a call: a few us, which are worth a second thread

int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

void multiply(const Matrix &matrix, const float *x, float *y, uint8_t *scratch, int64_t rows) {
    if (matrix.form == 0) linear(x, (const float *)matrix.packed, y, rows, matrix.in, matrix.out);
    if (matrix.form == 3) linear_widened(x, (const uint16_t *)matrix.packed, y, rows, matrix.in, matrix.out);
    if (matrix.form == 1) linear_bf16(x, (const uint16_t *)matrix.packed, y, scratch, rows, matrix.in, matrix.out);
#if MULTIPLIES_BYTES
    if (matrix.form == 2)
        linear_bytes(x, (const int8_t *)matrix.packed, matrix.scales, matrix.offsets, y, scratch, rows, matrix.in,
                     matrix.out);
#endif
    if (!matrix.bias) return;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * matrix.out > MIN_WORK)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < matrix.out; i++) y[row * matrix.out + i] += matrix.bias[i];
}

// Bytes of scratch of the one call that computes the MLP, where there is one; 0: gate, up and down are computed apart.
int64_t scratch_of_mlp(const Layer &layer, int64_t rows) {
#if defined(__AMX_TILE__)
    if (layer.gate_up.form == 1 && layer.down.form == 1 && !layer.gate_up.bias && !layer.down.bias &&
        layer.down.in % 32 == 0)
        return mlp_bf16_scratch(rows, layer.gate_up.in, layer.down.in);
#endif
    (void)layer, (void)rows;
    return 0;
}

// Rows that go through the MLP before the next: what it keeps of them fits the second cache, as long as reading its
// weights again costs less, which holds while the third cache has them.
int64_t rows_of_mlp(const Layer &layer, int64_t rows) {
    const int64_t together = 128, third_cache = 16 << 20;
    int64_t size = layer.gate_up.form == 0 ? 4 : layer.gate_up.form == 2 ? 1 : 2;
    return rows <= together || layer.gate_up.in * layer.gate_up.out * size > third_cache ? rows : together;
}

// The numbers that a layer keeps between its parts: one run of memory, in this order.
struct Buffers {
    int64_t normed, heads, attended, output, gate_up, active, products, end;

    Buffers(const Layer &layer, int64_t rows) {
        auto after = [](int64_t start, int64_t numbers) { return start + (numbers * 4 + 63) / 64 * 64; };
        normed = 0;
        heads = after(normed, rows * layer.heads.in);
        attended = after(heads, rows * layer.heads.out);
        output = after(attended, rows * layer.output.in);
        gate_up = after(output, rows * layer.output.out);
        int64_t together = rows_of_mlp(layer, rows), of_mlp = scratch_of_mlp(layer, rows);
        active = of_mlp ? gate_up : after(gate_up, together * layer.gate_up.out);
        products = of_mlp ? gate_up : after(active, together * layer.down.in);
        if (!of_mlp) of_mlp = larger_of(scratch_of(layer.gate_up, together), scratch_of(layer.down, together));
        end = products + larger_of(of_mlp, larger_of(scratch_of(layer.heads, rows), scratch_of(layer.output, rows)));
    }
};

}  // namespace

// Bytes of `scratch` for that many rows.
EXPORT int64_t layer_scratch(const Layer *layer, int64_t rows) { return Buffers(*layer, rows).end; }

// stream: (rows, hidden), the residual, changed in place; x: (rows, hidden), what is added to it first, null: nothing.
// added: (rows, hidden), the output of the MLP, which may lie where x lies. cache, kind: as `attend_pages` takes them,
// float32 or bfloat16.
EXPORT void decoder_layer(const Layer *layer, const Step *step, const float *x, float *stream, float *added,
                          void *cache, int64_t kind, uint8_t *scratch) {
    const Layer &of = *layer;
    const int64_t rows = step->rows, hidden = of.heads.in, stride = (of.query_heads + 2 * of.kv_heads) * of.size;
    const Buffers at(of, rows);
    auto buffer = [=](int64_t offset) { return (float *)(scratch + offset); };
    float *normed = buffer(at.normed), *heads = buffer(at.heads), *attended = buffer(at.attended),
          *output = buffer(at.output), *gate_up = buffer(at.gate_up), *active = buffer(at.active);
    uint8_t *products = scratch + at.products;

    if (x) add_rms_norm(x, stream, of.attention_norm, normed, rows, hidden, of.attention_eps);
    else rms_norm(stream, of.attention_norm, normed, rows, hidden, of.attention_eps);
    multiply(of.heads, normed, heads, products, rows);
    rope_and_store(heads, step->cos, step->sin, step->angles_stride, cache, kind, step->slots, of.query_norm,
                   of.key_norm, of.head_eps, rows, of.query_heads, of.kv_heads, of.size, step->page);
    attend_pages(heads, stride, cache, kind, attended, step->tiles, step->num_tiles, step->tables, step->width,
                 step->positions, of.query_heads, of.kv_heads, of.size, step->page, of.scale, of.window, of.softcap,
                 of.sinks, step->num_scores);
    multiply(of.output, attended, output, products, rows);
    add_rms_norm(output, stream, of.mlp_norm, normed, rows, hidden, of.mlp_eps);
#if defined(__AMX_TILE__)
    if (scratch_of_mlp(of, rows))
        return mlp_bf16(normed, (const uint16_t *)of.gate_up.packed, (const uint16_t *)of.down.packed, added, products,
                        rows, hidden, of.down.in, of.silu);
#endif
    const int64_t together = rows_of_mlp(of, rows);
    for (int64_t row = 0; row < rows; row += together) {
        int64_t count = rows - row < together ? rows - row : together;
        multiply(of.gate_up, normed + row * hidden, gate_up, products, count);
        if (of.silu) swiglu(gate_up, active, count, of.down.in);
        else geglu(gate_up, active, count, of.down.in);
        multiply(of.down, active, added + row * of.down.out, products, count);
    }
}
