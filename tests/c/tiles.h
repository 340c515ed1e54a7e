/* The tiles of AMX as a table of functions, compiled twice: those that stand in for it (emulated/)
 * and the processor's own. */
#ifndef QKV_TESTS_TILES_H
#define QKV_TESTS_TILES_H

#include <stdint.h>

/* What ldtilecfg reads. */
struct tile_config {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

union tile {
    uint8_t u8[16][64];
    int8_t i8[16][64];
    uint16_t u16[16][32];
    uint32_t u32[16][16];
};

enum tile_product { DPBF16PS, DPBSSD, DPBSUD, DPBUSD, DPBUUD, N_TILE_PRODUCTS };

/* Of tiles 0 (sums), 1 (left) and 2 (right); memory has rows of 64 bytes. */
struct tile_set {
    void (*configure)(const struct tile_config *config);
    void (*release)(void);
    void (*load)(const union tile *sum, const union tile *left, const union tile *right);
    void (*zero)(void); /* tile 0 */
    void (*multiply)(enum tile_product product);
    void (*store)(union tile *sum);
};

extern const struct tile_set tiles_emulated;
extern const struct tile_set tiles_real;

#endif
