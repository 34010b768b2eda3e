// Attention over the paged cache, read where it lies.
//
// A query sees its sequence's keys in tiles of KEYS positions, aligned at absolute positions, with a running maximum.
// Within a tile a score is one chain of additions over the head's numbers, and a sum of values one chain over the
// positions that the query sees. So a query's result depends on its own sequence alone: not on the batch, nor on how a
// prompt was cut, nor on whether a token was drafted.
//
// QUERIES neighbouring tokens of a sequence go through a tile together, and with them the query heads of a KV head:
// they share the reading of keys and values. Keys are turned on their side first, so that a vector holds the scores of
// LANES keys and nothing is summed across lanes. One-byte caches are turned back into numbers a tile at a time.
//
// Where there is a tile unit and the cache is bfloat16, it multiplies keys, where they lie, by queries that are rounded
// to bfloat16, and values by weights that are rounded to it. Where there are many queries, a vector of scores is one
// key's, of LANES queries, as the tile unit stores them; the sums have the order that they have for a query alone.

#include "tiles.h"
#include "vectors.h"

namespace {

constexpr int KEYS = 64;
constexpr int QUERIES = 16;
#if MANY_REGISTERS
constexpr int ROWS = 6;
#else
constexpr int ROWS = 3;
#endif
constexpr int WIDTH = 4;  // vectors; ROWS · WIDTH sums stay in registers
constexpr int64_t MIN_WORK = 1 << 11;  // scores of all heads in a call: about 5 us, which is worth a second thread

struct Cache {
    const uint8_t *bytes;  // (blocks, 2, kv heads, page bytes)
    int64_t kv_heads, page, size;
    int kind;  // 0: float32, 3: bfloat16, else codes with a scale behind a page's codes: 1 int8, 2 float8_e4m3fn
    int64_t page_bytes() const { return page * (kind == 0 ? size * 4 : kind == 3 ? size * 2 : size + 4); }
};

float FLOAT8[256];

// The keys (kv 0) or values (1) of `count` positions: rows of `padded` numbers, in the cache itself where that will do.
INLINE void read_tile(const Cache &cache, const int64_t *table, int64_t first, int count, int64_t kv, int64_t head,
                      const float **rows, float *buffer, int64_t padded) {
    int64_t block = first / cache.page, place = first % cache.page;
    const uint8_t *of_head = nullptr;
    for (int j = 0; j < count; j++, place++) {
        if (place == cache.page) place = 0, block++, of_head = nullptr;
        if (!of_head)
            of_head = cache.bytes + ((table[block] * 2 + kv) * cache.kv_heads + head) * cache.page_bytes();
        const float *numbers = (const float *)of_head + place * cache.size;
        if (cache.kind == 0 && padded == cache.size) {
            rows[j] = numbers;
            continue;
        }
        float *row = buffer + j * padded;
        rows[j] = row;
        if (cache.kind == 3) {
            const uint16_t *halves_of = (const uint16_t *)of_head + place * cache.size;
            for (int64_t d = 0; d < padded; d += LANES) {
                int64_t room = cache.size - d;
                store(row + d, room >= LANES ? from_bf16(halves_of + d, LANES) : from_bf16(halves_of + d, room));
            }
            continue;
        }
        const uint8_t *codes = of_head + place * cache.size;
        float scale = 1;
        if (cache.kind) std::memcpy(&scale, of_head + cache.page * cache.size + 4 * place, 4);
        for (int64_t d = 0; d < cache.size; d++)
            row[d] = cache.kind == 0   ? numbers[d]
                     : cache.kind == 1 ? (float)(int8_t)codes[d] * scale
                                       : FLOAT8[codes[d]] * scale;
        for (int64_t d = cache.size; d < padded; d++) row[d] = 0;
    }
}

// Asks for the keys and values of `count` positions, which lie apart by blocks, so that no hardware foresees them.
INLINE void prefetch_tile(const Cache &cache, const int64_t *table, int64_t first, int64_t count, int64_t head) {
    int64_t row = cache.page_bytes() / cache.page;
    for (int64_t done = 0; done < count;) {
        int64_t block = (first + done) / cache.page, place = (first + done) % cache.page;
        int64_t here = cache.page - place < count - done ? cache.page - place : count - done;
        for (int kv = 0; kv < 2; kv++) {
            const uint8_t *from = cache.bytes + ((table[block] * 2 + kv) * cache.kv_heads + head) * cache.page_bytes();
            for (int64_t byte = place * row; byte < (place + here) * row; byte += 64)
                __builtin_prefetch(from + byte, 0, 2);
        }
        done += here;
    }
}

// LANES vectors become LANES others, rows for columns.
INLINE void transpose(vec *x) {
    ivec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
#pragma GCC unroll 4
    for (int step = LANES / 2; step > 0; step /= 2) {
        ivec upper = (lane & step) != 0;
        ivec first = upper ? lane - step + LANES : lane, second = upper ? lane + LANES : lane + step;
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & step)) {
                vec a = x[i], b = x[i + step];
                x[i] = __builtin_shuffle(a, b, first);
                x[i + step] = __builtin_shuffle(a, b, second);
            }
    }
}

// rows: `count` pointers to `padded` numbers -> turned: (padded, KEYS), zeros behind `count`.
INLINE void turn(const float **rows, int count, int64_t padded, float *turned) {
    for (int j = 0; j < count; j += LANES)
        for (int64_t d = 0; d < padded; d += LANES) {
            vec block[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) block[i] = j + i < count ? load(rows[j + i] + d) : vec{};
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) store(turned + (d + i) * KEYS + j, block[i]);
        }
}

// sums[r] += a[r][k] · row(k), for k from … to - 1 and `vectors` vectors of each.
template <int rows, int vectors, class Row>
INLINE void accumulate(float *const *sums, const float *const *a, Row row, int from, int to) {
    vec sum[rows][vectors];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[r][v] = load(sums[r] + v * LANES);
    for (int k = from; k < to; k++) {
        const float *own = row(k);
        vec w[vectors];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) w[v] = load(own + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vec factor = all(a[r][k]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sum[r][v] += factor * w[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store(sums[r] + v * LANES, sum[r][v]);
}

template <int rows, class Row>
void accumulate_rows(int vectors, float *const *sums, const float *const *a, Row row, int from, int to) {
    switch (vectors) {
        case 1: return accumulate<rows, 1>(sums, a, row, from, to);
        case 2: return accumulate<rows, 2>(sums, a, row, from, to);
        case 3: return accumulate<rows, 3>(sums, a, row, from, to);
        default: return accumulate<rows, 4>(sums, a, row, from, to);
    }
}

template <class Row>
INLINE void accumulate_any(int rows, int vectors, float *const *sums, const float *const *a, Row row, int from, int to) {
    switch (rows) {
        case 1: return accumulate_rows<1>(vectors, sums, a, row, from, to);
        case 2: return accumulate_rows<2>(vectors, sums, a, row, from, to);
        case 3: return accumulate_rows<3>(vectors, sums, a, row, from, to);
#if MANY_REGISTERS
        case 4: return accumulate_rows<4>(vectors, sums, a, row, from, to);
        case 5: return accumulate_rows<5>(vectors, sums, a, row, from, to);
        default: return accumulate_rows<6>(vectors, sums, a, row, from, to);
#endif
    }
}

#if defined(__AMX_TILE__)
constexpr int PAIRS = TILE_BYTES / 4;  // of a head's numbers, in a row of a tile
constexpr int KEYS_OF_TILE = TILE_BYTES / 2;  // whose weights are in a row of a tile
constexpr int FEW = 5;  // queries that are weighed one by one: a vector of queries would be mostly empty

INLINE bool multiplies_tiles(const Cache &cache) {
    return cache.kind == 3 && cache.page % TILE_ROWS == 0 && cache.size % (2 * PAIRS) == 0;
}

// q: (size) -> column `column` of the tiles (size / 32, PAIRS, TILE_OUTPUTS, 2) in bfloat16.
INLINE void pack_query(const float *q, int64_t size, uint16_t *packed, int column) {
    for (int64_t d = 0; d < size; d += LANES) {
        uint32_t pairs[LANES / 2];
        store_bf16((uint16_t *)pairs, load(q + d), LANES);
        for (int i = 0; i < LANES / 2; i++)
            std::memcpy(packed + ((d / 2 + i) * TILE_OUTPUTS + column) * 2, pairs + i, sizeof *pairs);
    }
}

// The scores of `count` keys from `first` on and of LANES queries: (KEYS, LANES).
INLINE void score_tile(const Cache &cache, const int64_t *table, int64_t first, int count, int64_t head,
                       const uint16_t *packed, float *scores) {
    for (int j = 0; j < count; j += TILE_ROWS) {
        int64_t block = (first + j) / cache.page, place = (first + j) % cache.page;
        const uint8_t *keys = cache.bytes + (table[block] * 2 * cache.kv_heads + head) * cache.page_bytes() +
                              place * cache.size * 2;
        asm volatile("" ::: "memory");
        _tile_zero(0);
        for (int64_t d = 0; d < cache.size; d += 2 * PAIRS) {
            _tile_loadd(4, keys + d * 2, cache.size * 2);
            _tile_loadd(6, packed + d * TILE_OUTPUTS, TILE_BYTES);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, scores + j * LANES, TILE_BYTES);
        asm volatile("" ::: "memory");
    }
}

// What LANES queries have seen so far.
struct Lanes {
    vec highest{}, total{};
    ivec from{}, to{};  // what they see of this tile
};

// Scores (KEYS, LANES) of `present` keys to weights, zeros behind them in whole tiles; what is summed so far is to be
// multiplied by the result.
INLINE vec weigh_lanes(Lanes &lanes, float *scores, int present, float scale, float softcap) {
    const vec nothing = all(-__builtin_inff());
    vec highest = lanes.highest;
    for (int j = 0; j < present; j++) {
        vec own = load(scores + j * LANES) * scale;
        if (softcap > 0) own = tangent(own / softcap) * softcap;
        own = choose((lanes.from <= j) & (lanes.to > j), own, nothing);
        store(scores + j * LANES, own);
        highest = larger(highest, own);
    }
    vec keep = exponential(lanes.highest - highest), weights[LANES]{};
    for (int j = 0; j < present; j++) {
        vec own = exponential(load(scores + j * LANES) - highest);
        store(scores + j * LANES, own);
        weights[j % LANES] += own;
    }
    for (int j = present; j % KEYS_OF_TILE; j++) store(scores + j * LANES, vec{});
    for (int half = LANES / 2; half; half /= 2)  // as `sum` does with the lanes of a vector
        for (int i = 0; i < half; i++) weights[i] += weights[i + half];
    lanes.total = lanes.total * keep + weights[0];
    lanes.highest = highest;
    return keep;
}

// Values of `count` positions -> packed: (tiles of keys, size / TILE_OUTPUTS, TILE_ROWS, TILE_OUTPUTS, 2): pairs of
// neighbouring positions side by side, zeros behind the last one and for values that are not finite. Whether all are.
INLINE bool pack_values(const Cache &cache, const int64_t *table, int64_t first, int count, int64_t head,
                        uint16_t *packed) {
    __m512i lower, upper;
    for (int i = 0; i < 32; i++)
        ((uint16_t *)&lower)[i] = i / 2 + i % 2 * 32, ((uint16_t *)&upper)[i] = 16 + i / 2 + i % 2 * 32;
    const int64_t outputs = cache.size / TILE_OUTPUTS;
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 endless = 0;
    auto values = [&](int j) {
        int64_t block = (first + j) / cache.page, place = (first + j) % cache.page;
        return cache.bytes + ((table[block] * 2 + 1) * cache.kv_heads + head) * cache.page_bytes() +
               place * cache.size * 2;
    };
    for (int j = 0; j < (count + KEYS_OF_TILE - 1) / KEYS_OF_TILE * KEYS_OF_TILE; j += 2) {
        const uint8_t *even = j < count ? values(j) : nullptr, *odd = j + 1 < count ? values(j + 1) : nullptr;
        uint16_t *to = packed + (j / KEYS_OF_TILE * outputs * TILE_ROWS + j % KEYS_OF_TILE / 2) * TILE_OUTPUTS * 2;
        for (int64_t d = 0; d < outputs; d += 2) {
            __m512i a = even ? _mm512_loadu_si512(even + d * 32) : _mm512_setzero_si512();
            __m512i b = odd ? _mm512_loadu_si512(odd + d * 32) : _mm512_setzero_si512();
            __mmask32 of_a = _mm512_cmpeq_epi16_mask(_mm512_and_si512(a, exponent), exponent),
                      of_b = _mm512_cmpeq_epi16_mask(_mm512_and_si512(b, exponent), exponent);
            a = _mm512_maskz_mov_epi16(~of_a, a), b = _mm512_maskz_mov_epi16(~of_b, b), endless |= of_a | of_b;
            _mm512_storeu_si512(to + d * TILE_ROWS * TILE_OUTPUTS * 2, _mm512_permutex2var_epi16(a, lower, b));
            _mm512_storeu_si512(to + (d + 1) * TILE_ROWS * TILE_OUTPUTS * 2, _mm512_permutex2var_epi16(a, upper, b));
        }
    }
    return !endless;
}

// (KEYS, LANES) -> (LANES, KEYS), for `count` keys, in whole tiles.
INLINE void turn_scores(const float *scores, float *rows, int count) {
    for (int j = 0; j < (count + KEYS_OF_TILE - 1) / KEYS_OF_TILE * KEYS_OF_TILE; j += LANES) {
        vec block[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) block[i] = load(scores + (j + i) * LANES);
        transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) store(rows + i * KEYS + j, block[i]);
    }
}

// sums (LANES, size) += the weights of `queries` queries, (LANES, KEYS), times the packed values of `count` positions.
INLINE void add_packed_values(const float *weights, int queries, const uint16_t *packed, int count, int64_t size,
                              float *sums) {
    alignas(64) uint16_t rounded[KEYS / KEYS_OF_TILE][TILE_ROWS][KEYS_OF_TILE];
    const int tiles = (count + KEYS_OF_TILE - 1) / KEYS_OF_TILE;
    for (int i = 0; i < queries; i++)
        for (int t = 0; t < tiles; t++) {
            const float *own = weights + i * KEYS + t * KEYS_OF_TILE;
            __m512bh row = _mm512_cvtne2ps_pbh((__m512)load(own + LANES), (__m512)load(own));
            std::memcpy(rounded[t][i], &row, sizeof row);
        }
    const int64_t stride = size * sizeof(float), step = TILE_ROWS * TILE_OUTPUTS * 2;
    asm volatile("" ::: "memory");
    for (int64_t d = 0; d < size; d += 2 * TILE_OUTPUTS) {
        _tile_loadd(0, sums + d, stride);
        _tile_loadd(1, sums + d + TILE_OUTPUTS, stride);
        for (int t = 0; t < tiles; t++) {
            const uint16_t *values = packed + (t * (size / TILE_OUTPUTS) + d / TILE_OUTPUTS) * step;
            _tile_loadd(4, rounded[t], TILE_BYTES);
            _tile_loadd(6, values, TILE_BYTES);
            _tile_loadd(7, values + step, TILE_BYTES);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, sums + d, stride);
        _tile_stored(1, sums + d + TILE_OUTPUTS, stride);
    }
    asm volatile("" ::: "memory");
}
#endif

// One query head of one token, and what it has seen so far.
struct Query {
    const float *q;
    float *scores;  // (KEYS) of this tile; then its weights
    float *sum;  // (padded) the values so far, weighted
    int64_t position;
    float highest, total;
    int from, to;  // what it sees of this tile
};

// Scores to weights, and what was summed so far to the new maximum.
INLINE void weigh(Query &query, float scale, float softcap, int64_t padded) {
    const vec nothing = all(-__builtin_inff());
    ivec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    vec most = nothing;
    for (int j = 0; j < KEYS; j += LANES) {
        ivec place = lane + j;
        vec scores = load(query.scores + j) * scale;
        if (softcap > 0) scores = tangent(scores / softcap) * softcap;
        scores = choose((place >= query.from) & (place < query.to), scores, nothing);
        store(query.scores + j, scores);
        most = larger(most, scores);
    }
    float highest = largest(most);
    highest = highest > query.highest ? highest : query.highest;
    vec weights{};
    for (int j = 0; j < KEYS; j += LANES) {
        vec own = exponential(load(query.scores + j) - highest);
        store(query.scores + j, own);
        weights += own;
    }
    float keep = exponential(all(query.highest - highest))[0];
    query.total = query.total * keep + sum(weights);
    query.highest = highest;
    for (int64_t d = 0; d < padded; d += LANES) store(query.sum + d, load(query.sum + d) * keep);
}

// The weights of `count` queries, at most ROWS, of one tile. turned: its keys.
INLINE void weigh_rows(Query **queries, int count, const float *turned, int64_t size, int64_t padded, float scale,
                       float softcap) {
    const float *a[ROWS];
    float *sums[ROWS];
    int needed = 0;
    for (int r = 0; r < count; r++) {
        needed = queries[r]->to > needed ? queries[r]->to : needed;
        for (int j = 0; j < KEYS; j += LANES) store(queries[r]->scores + j, vec{});
    }
    for (int j = 0; j < needed; j += WIDTH * LANES) {
        int vectors = (needed - j + LANES - 1) / LANES;
        for (int r = 0; r < count; r++) a[r] = queries[r]->q, sums[r] = queries[r]->scores + j;
        auto row = [=](int d) { return turned + d * KEYS + j; };
        accumulate_any(count, vectors < WIDTH ? vectors : WIDTH, sums, a, row, 0, (int)size);
    }
    for (int r = 0; r < count; r++) weigh(*queries[r], scale, softcap, padded);
}

// Adds a tile's values to the sums of `count` queries, at most ROWS.
INLINE void add_values(Query **queries, int count, const float *const *values, int64_t padded) {
    const float *a[ROWS];
    float *sums[ROWS];
    int all_from = 0, all_to = KEYS;
    for (int r = 0; r < count; r++) {
        all_from = queries[r]->from > all_from ? queries[r]->from : all_from;
        all_to = queries[r]->to < all_to ? queries[r]->to : all_to;
    }
    all_to = all_to > all_from ? all_to : all_from;
    for (int64_t d = 0; d < padded; d += WIDTH * LANES) {
        int64_t left = (padded - d) / LANES;
        int vectors = left < WIDTH ? left : WIDTH;
        auto row = [=](int j) { return values[j] + d; };
        for (int r = 0; r < count; r++) a[r] = queries[r]->scores, sums[r] = queries[r]->sum + d;
        // What they all see together, what comes before and behind it one by one: the order of each stays the same.
        for (int r = 0; r < count; r++) {
            int to = queries[r]->to < all_from ? queries[r]->to : all_from;
            accumulate_any(1, vectors, sums + r, a + r, row, queries[r]->from, to);
        }
        accumulate_any(count, vectors, sums, a, row, all_from, all_to);
        for (int r = 0; r < count; r++) {
            int from = queries[r]->from > all_to ? queries[r]->from : all_to;
            accumulate_any(1, vectors, sums + r, a + r, row, from, queries[r]->to);
        }
    }
}

#if defined(__AMX_TILE__)
// Adds the values of a tile that are not finite to a query that sees them. Another one must not get 0 · infinity, so
// they are no part of what tiles multiply.
void add_endless_values(Query &query, const float *const *values, int64_t size) {
    for (int j = query.from; j < query.to; j++)
        for (int64_t d = 0; d < size; d += LANES) {
            vec value = load(values[j] + d), zero = value * 0.0f;
            store(query.sum + d, load(query.sum + d) + choose(zero == 0.0f, zero, all(query.scores[j]) * value));
        }
}
#endif

struct Step {
    const float *q;  // (tokens, query heads, size), a token `q_stride` numbers after the other
    float *out;  // (tokens, query heads, size)
    Cache cache;
    const int64_t *tables;  // (rows, width)
    const int64_t *positions;  // (tokens) within their sequences
    int64_t q_stride, width, groups, window;
    float scale;
    float softcap;  // 0: scores are not squeezed
    const float *sinks;  // (query heads) a score with no value; null: there are none
};

// `count` neighbouring tokens of a row and one KV head.
void attend_tile(const Step &step, int64_t token, int count, int64_t row, int64_t head) {
    const Cache &cache = step.cache;
    int64_t size = cache.size, heads = step.groups * cache.kv_heads;
    int64_t padded = (size + LANES - 1) / LANES * LANES;
    bool in_place = cache.kind == 0 && padded == size;
    int num_queries = count * step.groups, blocks = (num_queries + LANES - 1) / LANES;
    Query queries[num_queries], *seeing[num_queries];
#if defined(__AMX_TILE__)
    bool by_tiles = multiplies_tiles(cache);
    alignas(64) uint16_t packed[by_tiles ? blocks * size * LANES : 1], packed_values[by_tiles ? KEYS * size : 1];
    Lanes lanes[blocks];
#else
    constexpr bool by_tiles = false;
#endif
    alignas(64) float scores[blocks * LANES * KEYS];
    alignas(64) float sums[blocks * LANES * padded];
    float turned[by_tiles ? 1 : padded * KEYS], buffer[in_place ? 1 : KEYS * padded];
    const float *rows[KEYS];
    std::memset(sums, 0, sizeof sums);
    if (!by_tiles) std::memset(turned, 0, sizeof(float) * padded * KEYS);
    for (int m = 0; m < num_queries; m++) {
        int64_t own = token + m / step.groups, of_head = head * step.groups + m % step.groups;
        queries[m] = {step.q + own * step.q_stride + of_head * size, scores + m * KEYS, sums + m * padded,
                      step.positions[own], step.sinks ? step.sinks[of_head] : -1e30f, step.sinks ? 1.0f : 0.0f, 0, 0};
#if defined(__AMX_TILE__)
        if (by_tiles) pack_query(queries[m].q, size, packed + m / LANES * size * LANES, m % LANES);
        lanes[m / LANES].highest[m % LANES] = queries[m].highest;
        lanes[m / LANES].total[m % LANES] = queries[m].total;
#endif
    }
    auto oldest = [&](int64_t position) {
        return step.window > 0 && position >= step.window ? position - step.window + 1 : 0;
    };
    const int64_t *table = step.tables + row * step.width;
    int64_t end = queries[num_queries - 1].position + 1;
    for (int64_t first = oldest(queries[0].position) / KEYS * KEYS; first < end; first += KEYS) {
        int present = end - first < KEYS ? end - first : KEYS, count_seeing = 0;
        if (first + KEYS < end)
            prefetch_tile(cache, table, first + KEYS, end - first - KEYS < KEYS ? end - first - KEYS : KEYS, head);
        for (int m = 0; m < num_queries; m++) {
            int64_t from = oldest(queries[m].position) - first, to = queries[m].position + 1 - first;
            queries[m].from = from > 0 ? from : 0;
            queries[m].to = to < KEYS ? to : KEYS;
            if (queries[m].from < queries[m].to) seeing[count_seeing++] = &queries[m];
        }
#if defined(__AMX_TILE__)
        bool finite = by_tiles && pack_values(cache, table, first, present, head, packed_values);
        if (by_tiles && !finite) read_tile(cache, table, first, present, 1, head, rows, buffer, padded);
        for (int block = 0; by_tiles && block < blocks; block++) {
            Query *own = queries + block * LANES;
            int inside = num_queries - block * LANES < LANES ? num_queries - block * LANES : LANES;
            alignas(64) float of_keys[KEYS * LANES];
            score_tile(cache, table, first, present, head, packed + block * size * LANES, of_keys);
            if (num_queries <= FEW) {
                turn_scores(of_keys, own->scores, present);
                for (int i = 0; i < inside; i++) weigh(own[i], step.scale, step.softcap, padded);
            } else {
                for (int i = 0; i < inside; i++) lanes[block].from[i] = own[i].from, lanes[block].to[i] = own[i].to;
                vec keep = weigh_lanes(lanes[block], of_keys, present, step.scale, step.softcap);
                turn_scores(of_keys, own->scores, present);
                for (int i = 0; i < inside; i++)
                    if (keep[i] != 1.0f)
                        for (int64_t d = 0; d < padded; d += LANES) store(own[i].sum + d, load(own[i].sum + d) * keep[i]);
            }
            add_packed_values(own->scores, inside, packed_values, present, size, own->sum);
            for (int i = 0; !finite && i < inside; i++) add_endless_values(own[i], rows, size);
        }
        if (by_tiles) continue;
#endif
        read_tile(cache, table, first, present, 0, head, rows, buffer, padded);
        turn(rows, present, padded, turned);
        read_tile(cache, table, first, present, 1, head, rows, buffer, padded);
        for (int m = 0; m < count_seeing; m += ROWS) {
            int together = count_seeing - m < ROWS ? count_seeing - m : ROWS;
            weigh_rows(seeing + m, together, turned, size, padded, step.scale, step.softcap);
            add_values(seeing + m, together, rows, padded);
        }
    }
    for (int m = 0; m < num_queries; m++) {
        int64_t own = token + m / step.groups, of_head = head * step.groups + m % step.groups;
        float *out = step.out + (own * heads + of_head) * size, total = queries[m].total;
#if defined(__AMX_TILE__)
        if (by_tiles && num_queries > FEW) total = lanes[m / LANES].total[m % LANES];
#endif
        for (int64_t d = 0; d < size; d++) out[d] = queries[m].sum[d] / total;
    }
}

struct FillFloat8 {
    FillFloat8() {
        for (int code = 0; code < 256; code++) {
            int exponent = code >> 3 & 15, fraction = code & 7;
            float size = exponent ? __builtin_ldexpf(8 + fraction, exponent - 10) : __builtin_ldexpf(fraction, -9);
            if (exponent == 15 && fraction == 7) size = __builtin_nanf("");
            FLOAT8[code] = code & 128 ? -size : size;
        }
    }
} fill_float8;

}  // namespace

// tiles: (number, 3) first token, tokens (at most QUERIES, neighbours of one row), row of `tables`.
EXPORT void attend_pages(const float *q, int64_t q_stride, const void *cache, int64_t kind, float *out,
                            const int64_t *tiles, int64_t num_tiles, const int64_t *tables, int64_t width,
                            const int64_t *positions, int64_t query_heads, int64_t kv_heads, int64_t size, int64_t page,
                            float scale, int64_t window, float softcap, const float *sinks, int64_t num_scores) {
    Step step{q, out, {(const uint8_t *)cache, kv_heads, page, size, (int)kind}, tables, positions, q_stride, width,
              query_heads / kv_heads, window, scale, softcap, sinks};
#pragma omp parallel num_threads(threads) if (threads > 1 && num_scores * query_heads > MIN_WORK)
    {
        START_TILES(INT64_MAX);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < num_tiles * kv_heads; item++) {
            const int64_t *tile = tiles + item / kv_heads * 3;
            attend_tile(step, tile[0], (int)tile[1], tile[2], item % kv_heads);
        }
        END_TILES();
    }
}
