// Products of 16-bit and 8-bit matrices on the tile unit of a processor (AMX): 32 rows by 32 outputs at a time.
//
// A tile is 16 rows of 64 bytes. Packed weights of a panel are read as two tiles of 16 outputs each, side by side: a
// row of such a tile has the inputs that one instruction multiplies and adds, for 16 outputs.
//
// A result is one chain of instructions from the first input to the last, whatever the number of rows: the unit computes
// each row of a tile alone, so a row's result depends on the row alone.
#pragma once

#include "vectors.h"

// Rows of that many bytes that go through all panels before the next: they stay in the second cache. A multiple of 32.
INLINE int64_t rows_together(int64_t row_bytes) {
    int64_t fitting = (1 << 20) / row_bytes / 32 * 32;
    return fitting > 128 ? fitting : 128;
}

#if !defined(__AMX_TILE__)
#define START_TILES(rows) (void)0
#define END_TILES() (void)0
#else
#include <immintrin.h>

constexpr int TILE_ROWS = 16, TILE_BYTES = 64, TILE_OUTPUTS = 16;

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0 … 3: sums (rows by outputs), 4 and 5: rows of x, 6 and 7: weights. `second` may be 0.
INLINE void shape_tiles(int first, int second) {
    TileShapes shapes;
    const int rows[8] = {first, first, second ? second : 1, second ? second : 1, first, second ? second : 1,
                         TILE_ROWS, TILE_ROWS};
    for (int tile = 0; tile < 8; tile++) shapes.rows[tile] = rows[tile], shapes.row_bytes[tile] = TILE_BYTES;
    asm volatile("" ::: "memory");
    _tile_loadconfig(&shapes);
}

// For a call of that many rows: more than two tiles' worth are computed in whole tiles, whatever is in the last rows.
INLINE void shape_tiles_for(int64_t rows) {
    if (rows > 2 * TILE_ROWS) shape_tiles(TILE_ROWS, TILE_ROWS);
    else if (rows > TILE_ROWS) shape_tiles(TILE_ROWS, rows - TILE_ROWS);
    else shape_tiles(rows, 0);
}

#define START_TILES(rows) shape_tiles_for(rows)
#define END_TILES() _tile_release()

enum class Numbers { bfloat16, bytes };

#define MULTIPLY_TILES(sums, rows, weights)                                    \
    if constexpr (numbers == Numbers::bfloat16) _tile_dpbf16ps(sums, rows, weights); \
    else _tile_dpbusd(sums, rows, weights)

// Where the bytes of step `step` of a row begin, among rows that are laid out as tiles.
INLINE uint8_t *place_in_tiles(uint8_t *rows, int64_t row, int64_t step, int64_t steps) {
    return rows + ((row / TILE_ROWS * steps + step) * TILE_ROWS + row % TILE_ROWS) * TILE_BYTES;
}

// x: one or two blocks of TILE_ROWS rows, laid out as tiles; panel: `steps` of 16 groups of inputs by 32 outputs, each
// TILE_BYTES for 16 outputs. sums: (32, 32) float or int32. The compiler does not know that tiles are read from and
// written to memory.
template <Numbers numbers, bool second>
INLINE void multiply_tiles(const uint8_t *x, const uint8_t *panel, int64_t steps, void *sums) {
    constexpr int64_t OUTPUTS = 2 * TILE_OUTPUTS * 4, GROUP = 2 * TILE_BYTES, STEP = TILE_ROWS * GROUP;
    constexpr int64_t TILE = TILE_ROWS * TILE_BYTES;
    const uint8_t *other = x + steps * TILE;
    asm volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (second) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t step = 0; step < steps; step++, x += TILE, other += TILE, panel += STEP) {
        _tile_loadd(4, x, TILE_BYTES);
        _tile_loadd(6, panel, GROUP);
        _tile_loadd(7, panel + TILE_BYTES, GROUP);
        MULTIPLY_TILES(0, 4, 6);
        MULTIPLY_TILES(1, 4, 7);
        if constexpr (second) {
            _tile_loadd(5, other, TILE_BYTES);
            MULTIPLY_TILES(2, 5, 6);
            MULTIPLY_TILES(3, 5, 7);
        }
    }
    uint8_t *to = (uint8_t *)sums;
    _tile_stored(0, to, OUTPUTS);
    _tile_stored(1, to + TILE_BYTES, OUTPUTS);
    if constexpr (second) {
        _tile_stored(2, to + TILE_ROWS * OUTPUTS, OUTPUTS);
        _tile_stored(3, to + TILE_ROWS * OUTPUTS + TILE_BYTES, OUTPUTS);
    }
    asm volatile("" ::: "memory");
}
#endif
