// What adapters add to a linear layer: y += (x Aᵀ) B with the A and B of each token's slot.
//
// Tokens of one slot go through together, at most TOKENS of them, so that a matrix is read once for all. A token's sums
// have the same order alone as in company.

#include "vectors.h"

namespace {

constexpr int TOKENS = 4;
constexpr int WIDTH = 4;  // vectors of outputs that stay in registers, for each token
constexpr int64_t MIN_WORK_PER_THREAD = 1 << 18;  // multiplications

// As reference_lora.LoraWeights has them: J parts, S slots, room for rank R.
struct Adapters {
    const float *a;  // (J, R, S, in)
    const float *b;  // (R, S, out)
    const int32_t *columns;  // (J + 1): part j has the outputs columns[j] … columns[j + 1] - 1
    const int32_t *ranks;  // (J, S), 0 where a slot leaves a part alone
    int64_t parts, max_rank, slots, in, out;
};

// shrunk[t][i] = x[t] · A[i]
template <int tokens>
INLINE void shrink(const float *const *x, const Adapters &adapters, const float *a, int rank, float *shrunk) {
    for (int i = 0; i < rank; i++, a += adapters.slots * adapters.in) {
        vec sums[tokens]{};
        for (int64_t k = 0; k < adapters.in; k += LANES) {
            int64_t room = adapters.in - k;
            vec w = room >= LANES ? load(a + k) : load_some(a + k, room);
#pragma GCC unroll 4
            for (int t = 0; t < tokens; t++) sums[t] += w * (room >= LANES ? load(x[t] + k) : load_some(x[t] + k, room));
        }
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) shrunk[i * TOKENS + t] = sum(sums[t]);
    }
}

// y[t] += shrunk[t] · B, for the outputs start … end - 1
template <int tokens>
INLINE void expand(float *const *y, const Adapters &adapters, const float *b, int rank, const float *shrunk,
                   int64_t start, int64_t end) {
    const int64_t stride = adapters.slots * adapters.out;
    int64_t o = start;
    for (; o + WIDTH * LANES <= end; o += WIDTH * LANES) {
        vec sums[tokens][WIDTH]{};
        for (int i = 0; i < rank; i++)
#pragma GCC unroll 4
            for (int v = 0; v < WIDTH; v++) {
                vec w = load(b + i * stride + o + v * LANES);
#pragma GCC unroll 4
                for (int t = 0; t < tokens; t++) sums[t][v] += shrunk[i * TOKENS + t] * w;
            }
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++)
#pragma GCC unroll 4
            for (int v = 0; v < WIDTH; v++) {
                float *to = y[t] + o + v * LANES;
                store(to, load(to) + sums[t][v]);
            }
    }
    for (; o < end; o += LANES) {
        int room = end - o < LANES ? end - o : LANES;
        vec sums[tokens]{};
        for (int i = 0; i < rank; i++) {
            vec w = load_some(b + i * stride + o, room);
            for (int t = 0; t < tokens; t++) sums[t] += shrunk[i * TOKENS + t] * w;
        }
        for (int t = 0; t < tokens; t++) store_some(y[t] + o, load_some(y[t] + o, room) + sums[t], room);
    }
}

template <int tokens>
void add(const float *const *x, float *const *y, const Adapters &adapters, int64_t slot) {
    float shrunk[adapters.max_rank * TOKENS];
    for (int64_t part = 0; part < adapters.parts; part++) {
        int rank = adapters.ranks[part * adapters.slots + slot];
        if (!rank) continue;
        const float *a = adapters.a + (part * adapters.max_rank * adapters.slots + slot) * adapters.in;
        shrink<tokens>(x, adapters, a, rank, shrunk);
        expand<tokens>(y, adapters, adapters.b + slot * adapters.out, rank, shrunk, adapters.columns[part],
                       adapters.columns[part + 1]);
    }
}

}  // namespace

// tiles: (number, 2 + TOKENS) slot, tokens, which ones. x: (T, in), y: (T, out), added to in place.
EXPORT void add_lora(const float *x, float *y, const float *a, const float *b, const int32_t *columns,
                     const int32_t *ranks, int64_t parts, int64_t max_rank, int64_t slots, int64_t in, int64_t out,
                     const int64_t *tiles, int64_t num_tiles) {
    Adapters adapters{a, b, columns, ranks, parts, max_rank, slots, in, out};
    bool many = threads > 1 && num_tiles * TOKENS * max_rank * (parts * in + out) > MIN_WORK_PER_THREAD;
#pragma omp parallel for schedule(static) num_threads(threads) if (many)
    for (int64_t number = 0; number < num_tiles; number++) {
        const int64_t *tile = tiles + number * (2 + TOKENS);
        const float *from[TOKENS];
        float *to[TOKENS];
        for (int t = 0; t < tile[1]; t++) from[t] = x + tile[2 + t] * in, to[t] = y + tile[2 + t] * out;
        switch (tile[1]) {
            case 1: add<1>(from, to, adapters, tile[0]); break;
            case 2: add<2>(from, to, adapters, tile[0]); break;
            case 3: add<3>(from, to, adapters, tile[0]); break;
            default: add<4>(from, to, adapters, tile[0]);
        }
    }
}
