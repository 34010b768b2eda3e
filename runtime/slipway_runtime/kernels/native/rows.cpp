// What is done to each row on its own: norms, the activation, the rotation of heads.

#include "vectors.h"

namespace {

constexpr int64_t MIN_WORK = 1 << 12;  // numbers in a call: a few us, which are worth a second thread

// 1 / sqrt(mean(x²) + eps)
INLINE float scale_of(const float *x, int64_t size, float eps) {
    vec squares{};
    for (int64_t i = 0; i < size; i += LANES) {
        vec part = size - i >= LANES ? load(x + i) : load_some(x + i, size - i);
        squares += part * part;
    }
    return 1.0f / __builtin_sqrtf(sum(squares) / size + eps);
}

INLINE void norm(const float *x, const float *weight, float *out, int64_t size, float eps) {
    float scale = scale_of(x, size, eps);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(out + i, load(x + i) * scale * load(weight + i));
    for (; i < size; i++) out[i] = x[i] * scale * weight[i];
}

// x · cos + (x, its halves exchanged) · sin; the first half of `sin` is negated.
INLINE void rotate(float *x, const float *cos, const float *sin, int64_t size) {
    int64_t half = size / 2, i = 0;
    for (; i + LANES <= half; i += LANES) {
        vec a = load(x + i), b = load(x + half + i);
        store(x + i, a * load(cos + i) + b * load(sin + i));
        store(x + half + i, b * load(cos + half + i) + a * load(sin + half + i));
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cos[i] + b * sin[i];
        x[half + i] = b * cos[half + i] + a * sin[half + i];
    }
}

// x: (size) -> numbers `first` … of a cache in float32 (kind 0) or bfloat16.
INLINE void copy_head(const float *x, void *cache, int64_t first, int64_t size, int64_t kind) {
    if (kind == 0) {
        std::memcpy((float *)cache + first, x, sizeof(float) * size);
        return;
    }
    for (int64_t i = 0; i < size; i += LANES) {
        uint16_t *to = (uint16_t *)cache + first + i;
        int64_t room = size - i;
        if (room >= LANES) store_bf16(to, load(x + i), LANES);
        else store_bf16(to, load_some(x + i, room), room);
    }
}

}  // namespace

// x: (rows, size), weight: (size) -> out: (rows, size).
EXPORT void rms_norm(const float *x, const float *weight, float *out, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * size > MIN_WORK)
    for (int64_t row = 0; row < rows; row++) norm(x + row * size, weight, out + row * size, size, eps);
}

// The same of residual + x, which the residual becomes.
EXPORT void add_rms_norm(const float *x, float *residual, const float *weight, float *out, int64_t rows, int64_t size,
                         float eps) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * size > MIN_WORK)
    for (int64_t row = 0; row < rows; row++) {
        const float *added = x + row * size;
        float *stream = residual + row * size;
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) store(stream + i, load(stream + i) + load(added + i));
        for (; i < size; i++) stream[i] += added[i];
        norm(stream, weight, out + row * size, size, eps);
    }
}

// gate_up: (rows, 2 · size) -> silu(gate) · up: (rows, size).
EXPORT void swiglu(const float *gate_up, float *out, int64_t rows, int64_t size) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * size > MIN_WORK)
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = gate_up + 2 * row * size, *up = gate + size;
        for (int64_t i = 0; i < size; i += LANES) {
            int64_t room = size - i;
            vec g = room >= LANES ? load(gate + i) : load_some(gate + i, room);
            vec u = room >= LANES ? load(up + i) : load_some(up + i, room);
            vec y = silu(g) * u;
            if (room >= LANES) store(out + row * size + i, y);
            else store_some(out + row * size + i, y, room);
        }
    }
}

// gate_up: (rows, 2 · size) -> gelu(gate) · up: (rows, size), by tanh.
EXPORT void geglu(const float *gate_up, float *out, int64_t rows, int64_t size) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * size > MIN_WORK)
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = gate_up + 2 * row * size, *up = gate + size;
        for (int64_t i = 0; i < size; i += LANES) {
            int64_t room = size - i;
            vec g = room >= LANES ? load(gate + i) : load_some(gate + i, room);
            vec u = room >= LANES ? load(up + i) : load_some(up + i, room);
            vec y = gelu(g) * u;
            if (room >= LANES) store(out + row * size + i, y);
            else store_some(out + row * size + i, y, room);
        }
    }
}

// qkv: (tokens, query heads + 2 · kv heads, size). Queries and keys are normed where there are weights, and rotated in
// place; keys and values go to their slots of a cache (blocks, 2, kv heads, page, size), where there is one: float32
// (kind 0) or bfloat16.
EXPORT void rope_and_store(float *qkv, const float *cos, const float *sin, int64_t angles_stride, void *cache,
                           int64_t kind, const int64_t *slots, const float *query_norm, const float *key_norm, float eps,
                           int64_t tokens, int64_t query_heads, int64_t kv_heads, int64_t size, int64_t page) {
    int64_t heads = query_heads + 2 * kv_heads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && tokens * heads * size > MIN_WORK)
    for (int64_t token = 0; token < tokens; token++) {
        float *own = qkv + token * heads * size;
        for (int64_t head = 0; head < query_heads + kv_heads; head++) {
            const float *weight = head < query_heads ? query_norm : key_norm;
            if (weight) norm(own + head * size, weight, own + head * size, size, eps);
            rotate(own + head * size, cos + token * angles_stride, sin + token * angles_stride, size);
        }
        if (!cache) continue;
        int64_t block = slots[token] / page, place = slots[token] % page;
        for (int64_t head = 0; head < 2 * kv_heads; head++)
            copy_head(own + (query_heads + head) * size, cache, ((block * 2 * kv_heads + head) * page + place) * size,
                      size, kind);
    }
}
