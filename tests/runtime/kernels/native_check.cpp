// Checks a library of compiled kernels on the machine that it is for, or under an emulator of it: the functions of a
// layer against a plain computation in double precision, and rows alone against rows in company.
// Exit status 0: they agree.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

extern "C" {
void pack(const float *, float *, int64_t, int64_t);
void linear(const float *, const float *, float *, int64_t, int64_t, int64_t);
int64_t padded_outputs(int64_t);
int64_t padded_widened_inputs(int64_t);
void pack_widened(const uint16_t *, uint16_t *, int64_t, int64_t);
void linear_widened(const float *, const uint16_t *, float *, int64_t, int64_t, int64_t);
int64_t padded_bf16_outputs(int64_t);
int64_t padded_bf16_inputs(int64_t);
int64_t bf16_scratch(int64_t, int64_t);
void pack_bf16(const uint16_t *, uint16_t *, int64_t, int64_t);
void linear_bf16(const float *, const uint16_t *, float *, uint8_t *, int64_t, int64_t, int64_t);
#if defined(BYTES)
int64_t padded_byte_outputs(int64_t);
int64_t padded_byte_inputs(int64_t);
int64_t bytes_scratch(int64_t, int64_t);
void pack_bytes(const int8_t *, int8_t *, int32_t *, int64_t, int64_t);
void linear_bytes(const float *, const int8_t *, const float *, const int32_t *, float *, uint8_t *, int64_t, int64_t,
                  int64_t);
#endif
void add_rms_norm(const float *, float *, const float *, float *, int64_t, int64_t, float);
void swiglu(const float *, float *, int64_t, int64_t);
void geglu(const float *, float *, int64_t, int64_t);
void rope_and_store(float *, const float *, const float *, int64_t, void *, int64_t, const int64_t *, const float *,
                    const float *, float, int64_t, int64_t, int64_t, int64_t, int64_t);
void attend_pages(const float *, int64_t, const void *, int64_t, float *, const int64_t *, int64_t, const int64_t *,
                  int64_t, const int64_t *, int64_t, int64_t, int64_t, int64_t, float, int64_t, float, const float *,
                  int64_t);
}

using Floats = std::vector<float>;
static int failures = 0;

static Floats numbers(size_t count) {
    static std::mt19937 random(7);
    std::normal_distribution<float> normal;
    Floats made(count);
    for (float &number : made) number = normal(random);
    return made;
}

static void check(const char *what, double ours, double expected, double allowed) {
    if (std::fabs(ours - expected) <= allowed) return;
    if (failures++ < 20) std::printf("%s: %.9g instead of %.9g\n", what, ours, expected);
}

static uint16_t rounded(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

static float widened(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

// Calls `multiply(x, y, rows)` with all rows and with one, and compares with the plain product of `x` and `weight`.
template <class Multiply>
static void check_product(const char *what, const Floats &x, const Floats &weight, int64_t rows, int64_t in,
                          int64_t out, double step, Multiply multiply) {
    Floats y(rows * out), alone(out);
    multiply(x.data(), y.data(), rows);
    for (int64_t r = 0; r < rows; r++) {
        multiply(x.data() + r * in, alone.data(), 1);
        for (int64_t o = 0; o < out; o++) {
            double sum = 0, size = 0;
            for (int64_t k = 0; k < in; k++) {
                double term = (double)x[r * in + k] * weight[o * in + k];
                sum += term, size += std::fabs(term);
            }
            check(what, y[r * out + o], sum, (in + 1) * step * size);
            check("a row alone", alone[o], y[r * out + o], 0);
        }
    }
}

static void check_products() {
    const int64_t rows = 21, in = 75, out = 53;
    const double rounding = std::ldexp(1.01, -24);
    Floats x = numbers(rows * in), weight = numbers(out * in);
    Floats packed(padded_outputs(out) * in);
    pack(weight.data(), packed.data(), out, in);
    check_product("linear", x, weight, rows, in, out, rounding, [&](const float *from, float *to, int64_t count) {
        linear(from, packed.data(), to, count, in, out);
    });
    std::vector<uint16_t> half(out * in), packed_half(padded_bf16_outputs(out) * padded_bf16_inputs(in));
    Floats plain(out * in);
    for (int64_t i = 0; i < out * in; i++) half[i] = rounded(weight[i]), plain[i] = widened(half[i]);
    std::vector<uint16_t> packed_widened(padded_outputs(out) * padded_widened_inputs(in));
    pack_widened(half.data(), packed_widened.data(), out, in);
    check_product("linear_widened", x, plain, rows, in, out, rounding, [&](const float *from, float *to, int64_t count) {
        linear_widened(from, packed_widened.data(), to, count, in, out);
    });
    pack_bf16(half.data(), packed_half.data(), out, in);
    std::vector<uint8_t> scratch(bf16_scratch(rows, in) + 1);
    Floats inputs = x;
    if (bf16_scratch(rows, in))
        for (float &input : inputs) input = widened(rounded(input));
    check_product("linear_bf16", inputs, plain, rows, in, out, rounding, [&](const float *from, float *to, int64_t count) {
        linear_bf16(from, packed_half.data(), to, scratch.data(), count, in, out);
    });
#if defined(BYTES)
    std::vector<int8_t> codes(out * in), packed_codes(padded_byte_outputs(out) * padded_byte_inputs(in));
    std::vector<int32_t> offsets(padded_byte_outputs(out));
    Floats scales(padded_byte_outputs(out), 0.5f), coded(out * in);
    for (int64_t i = 0; i < out * in; i++) {
        codes[i] = (int8_t)std::lrint(std::fmin(127, std::fmax(-127, weight[i] * 60)));
        coded[i] = codes[i] * 0.5f;
    }
    pack_bytes(codes.data(), packed_codes.data(), offsets.data(), out, in);
    for (int64_t r = 0; r < rows; r++) {  // rows that are whole numbers after scaling
        for (int64_t k = 0; k < in; k++) x[r * in + k] = std::rint(x[r * in + k] * 20);
        x[r * in] = 127;
    }
    scratch.resize(bytes_scratch(rows, in));
    check_product("linear_bytes", x, coded, rows, in, out, rounding, [&](const float *from, float *to, int64_t count) {
        linear_bytes(from, packed_codes.data(), scales.data(), offsets.data(), to, scratch.data(), count, in, out);
    });
#endif
}

static void check_rows() {
    const int64_t rows = 3, size = 43;
    Floats x = numbers(rows * size), stream = numbers(rows * size), weight = numbers(size), out(rows * size);
    Floats sum = stream;
    add_rms_norm(x.data(), stream.data(), weight.data(), out.data(), rows, size, 1e-5f);
    for (int64_t r = 0; r < rows; r++) {
        double squares = 0;
        for (int64_t i = 0; i < size; i++) {
            check("residual", stream[r * size + i], sum[r * size + i] + x[r * size + i], 0);
            squares += (double)stream[r * size + i] * stream[r * size + i];
        }
        for (int64_t i = 0; i < size; i++)
            check("add_rms_norm", out[r * size + i],
                  stream[r * size + i] / std::sqrt(squares / size + 1e-5) * weight[i], 1e-5);
    }
    Floats both = numbers(rows * 2 * size), silu(rows * size), gelu(rows * size);
    swiglu(both.data(), silu.data(), rows, size);
    geglu(both.data(), gelu.data(), rows, size);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < size; i++) {
            double gate = both[2 * r * size + i], up = both[(2 * r + 1) * size + i];
            check("swiglu", silu[r * size + i], gate / (1 + std::exp(-gate)) * up, 1e-5);
            double inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate);
            check("geglu", gelu[r * size + i], 0.5 * gate * (1 + std::tanh(inner)) * up, 1e-5);
        }
}

// A prompt of 75 tokens, whose heads are rotated and stored, and attention of all of them and of the last one alone.
static void check_attention(int64_t kind) {
    const int64_t tokens = 75, query_heads = 4, kv_heads = 2, size = 24, page = 8, heads = query_heads + 2 * kv_heads;
    const int64_t blocks = (tokens + page - 1) / page, window = 40;
    Floats qkv = numbers(tokens * heads * size), before = qkv, angles = numbers(tokens * 2 * size);
    std::vector<uint8_t> cache((blocks + 1) * 2 * kv_heads * page * size * 4);
    std::vector<int64_t> table(blocks), slots(tokens), positions(tokens), tiles;
    for (int64_t b = 0; b < blocks; b++) table[b] = blocks - b;
    for (int64_t t = 0; t < tokens; t++) slots[t] = table[t / page] * page + t % page, positions[t] = t;
    for (int64_t t = 0; t < tokens; t += 8) tiles.insert(tiles.end(), {t, tokens - t < 8 ? tokens - t : 8, 0});
    rope_and_store(qkv.data(), angles.data(), angles.data() + size, 2 * size, cache.data(), kind, slots.data(), nullptr,
                   nullptr, 0, tokens, query_heads, kv_heads, size, page);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < query_heads + kv_heads; h++)
            for (int64_t d = 0; d < size; d++) {
                const float *own = before.data() + (t * heads + h) * size;
                double other = own[(d + size / 2) % size];
                check("rotation", qkv[(t * heads + h) * size + d],
                      own[d] * angles[2 * t * size + d] + other * angles[(2 * t + 1) * size + d], 1e-5);
            }
    auto stored = [&](int64_t t, int64_t kv, int64_t h, int64_t d) -> double {
        int64_t place = (((slots[t] / page * 2 + kv) * kv_heads + h) * page + t % page) * size + d;
        return kind == 0 ? ((float *)cache.data())[place] : widened(((uint16_t *)cache.data())[place]);
    };
    Floats out(tokens * query_heads * size), alone(query_heads * size);
    attend_pages(qkv.data(), heads * size, cache.data(), kind, out.data(), tiles.data(), tiles.size() / 3, table.data(),
                 blocks, positions.data(), query_heads, kv_heads, size, page, 0.2f, window, 0, nullptr, tokens);
    const int64_t one[] = {0, 1, 0}, last = tokens - 1;
    attend_pages(qkv.data() + last * heads * size, heads * size, cache.data(), kind, alone.data(), one, 1, table.data(),
                 blocks, &last, query_heads, kv_heads, size, page, 0.2f, window, 0, nullptr, 1);
    for (int64_t i = 0; i < query_heads * size; i++)
        check("a token alone", alone[i], out[last * query_heads * size + i], 0);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < query_heads; h++) {
            std::vector<double> weights(tokens);
            double total = 0;
            for (int64_t j = t >= window ? t - window + 1 : 0; j <= t; j++) {
                double score = 0;
                for (int64_t d = 0; d < size; d++) score += qkv[(t * heads + h) * size + d] * stored(j, 0, h / 2, d);
                total += weights[j] = std::exp(score * 0.2);
            }
            for (int64_t d = 0; d < size; d++) {
                double sum = 0;
                for (int64_t j = 0; j <= t; j++) sum += weights[j] * stored(j, 1, h / 2, d);
                check("attention", out[(t * query_heads + h) * size + d], sum / total, 1e-4);
            }
        }
}

int main() {
    check_products();
    check_rows();
    check_attention(0);
    check_attention(3);
    if (failures) std::printf("%d numbers differ\n", failures);
    return failures ? 1 : 0;
}
