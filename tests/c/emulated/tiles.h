/* Of immintrin.h: AMX. The tiles belong to a thread, as on the processor, and to the file that
 * includes this. What is #UD or #GP there ends the program here. Intel SDM volume 1, chapter 18. */
#ifndef QKV_TESTS_EMULATED_TILES_H
#define QKV_TESTS_EMULATED_TILES_H

static _Thread_local struct {
    unsigned char palette; /* 0: no tile is there. From here what ldtilecfg reads */
    unsigned char start_row;
    unsigned char reserved[14];
    unsigned short row_bytes[16];
    unsigned char rows[16];
    __m256i row[8][16][2]; /* zeros beyond the rows and bytes of a tile */
} emu_tiles;

EMULATED void emu_require(int allowed)
{
    if (!allowed) {
        __builtin_trap();
    }
}
EMULATED void _tile_release(void)
{
    __builtin_memset(&emu_tiles, 0, sizeof emu_tiles);
}
EMULATED_CALL void _tile_loadconfig(const void *config)
{
    _tile_release();
    __builtin_memcpy(&emu_tiles, config, 64);
    emu_require(emu_tiles.palette <= 1 && emu_tiles.start_row == 0);
    for (int i = 0; i < 16; i++) {
        int rows = emu_tiles.rows[i];
        int bytes = emu_tiles.row_bytes[i];
        emu_require(rows <= (i < 8 ? 16 : 0) && bytes <= 64 && (rows == 0) == (bytes == 0));
    }
}
/* Makes a tile zeros, if it is there. */
EMULATED void _tile_zero(int tile)
{
    emu_require(emu_tiles.palette == 1 && emu_tiles.rows[tile] > 0);
    __builtin_memset(emu_tiles.row[tile], 0, sizeof emu_tiles.row[tile]);
}
EMULATED_CALL void _tile_loadd(int tile, const void *base, long stride)
{
    _tile_zero(tile);
    for (int m = 0; m < emu_tiles.rows[tile]; m++) {
        __builtin_memcpy(emu_tiles.row[tile][m], (const char *)base + m * stride,
                         emu_tiles.row_bytes[tile]);
    }
}
EMULATED_CALL void _tile_stored(int tile, void *base, long stride)
{
    emu_require(emu_tiles.palette == 1 && emu_tiles.rows[tile] > 0);
    for (int m = 0; m < emu_tiles.rows[tile]; m++) {
        __builtin_memcpy((char *)base + m * stride, emu_tiles.row[tile][m],
                         emu_tiles.row_bytes[tile]);
    }
}

/* Whether sums of that shape are products of these; the lanes that the result has. */
EMULATED __m512i emu_product_lanes(int sum, int a, int b)
{
    const unsigned short *bytes = emu_tiles.row_bytes;
    emu_require(emu_tiles.palette == 1 && sum != a && a != b && sum != b);
    emu_require(emu_tiles.rows[sum] > 0 && emu_tiles.rows[sum] == emu_tiles.rows[a]);
    emu_require(emu_tiles.rows[b] > 0 && 4 * emu_tiles.rows[b] == bytes[a]);
    emu_require(bytes[sum] == bytes[b] && bytes[b] % 4 == 0);
    return emu_lanes_32((__mmask16)((1u << bytes[b] / 4) - 1));
}
/* Lane k of a row, in all lanes. */
EMULATED __m256i emu_every(const __m256i *row, int k)
{
    return _mm256_set1_epi32(((const int *)row)[k]);
}

/* ---- tdpbf16ps: vec_amx.h has the order of additions ---- */

EMULATED_CALL void emu_add_tile_bf16(int sum, int a, int b, const __m256i *lanes)
{
    int pairs = emu_tiles.rows[b];
    for (int m = 0; m < emu_tiles.rows[sum]; m++) {
        for (int half = 0; half < 2; half++) {
            __m256 even = _mm256_setzero_ps();
            __m256 odd = even;
            for (int k = 0; k < pairs; k++) {
                __m256i x = emu_every(emu_tiles.row[a][m], k);
                __m256i y = emu_tiles.row[b][k][half];
                even = _mm256_fmadd_ps(emu_even_bf16(x), emu_even_bf16(y), even);
                odd = _mm256_fmadd_ps(emu_odd_bf16(x), emu_odd_bf16(y), odd);
            }
            __m256i *to = &emu_tiles.row[sum][m][half];
            __m256 out = _mm256_add_ps(_mm256_castsi256_ps(*to), _mm256_add_ps(even, odd));
            *to = _mm256_and_si256(_mm256_castps_si256(out), lanes[half]);
        }
    }
}
EMULATED_CALL void _tile_dpbf16ps(int sum, int a, int b)
{
    __m512i lanes = emu_product_lanes(sum, a, b);
    unsigned own = _mm_getcsr();
    _mm_setcsr(EMU_MXCSR);
    emu_add_tile_bf16(sum, a, b, &lanes.low);
    _mm_setcsr(own);
}

/* ---- tdpb*d: bytes of the left and of the right tile, four to a lane, without saturation ---- */

EMULATED __m256i emu_even_bytes(__m256i a, int is_signed)
{
    return is_signed ? _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8)
                     : _mm256_and_si256(a, _mm256_set1_epi16(0xff));
}
EMULATED __m256i emu_odd_bytes(__m256i a, int is_signed)
{
    return is_signed ? _mm256_srai_epi16(a, 8) : _mm256_srli_epi16(a, 8);
}
EMULATED void emu_add_tile_bytes(int sum, int a, int b, int a_signed, int b_signed)
{
    __m512i lanes = emu_product_lanes(sum, a, b);
    int quads = emu_tiles.rows[b];
    for (int m = 0; m < emu_tiles.rows[sum]; m++) {
        for (int half = 0; half < 2; half++) {
            __m256i out = emu_tiles.row[sum][m][half];
            for (int k = 0; k < quads; k++) {
                __m256i x = emu_every(emu_tiles.row[a][m], k);
                __m256i y = emu_tiles.row[b][k][half];
                __m256i even =
                    _mm256_madd_epi16(emu_even_bytes(x, a_signed), emu_even_bytes(y, b_signed));
                __m256i odd =
                    _mm256_madd_epi16(emu_odd_bytes(x, a_signed), emu_odd_bytes(y, b_signed));
                out = _mm256_add_epi32(out, _mm256_add_epi32(even, odd));
            }
            __m256i own = half == 0 ? lanes.low : lanes.high;
            emu_tiles.row[sum][m][half] = _mm256_and_si256(out, own);
        }
    }
}
#define TILE_BYTES(name, a_signed, b_signed)                                                       \
    EMULATED_CALL void name(int sum, int a, int b)                                                 \
    {                                                                                              \
        emu_add_tile_bytes(sum, a, b, a_signed, b_signed);                                         \
    }
TILE_BYTES(_tile_dpbssd, 1, 1)
TILE_BYTES(_tile_dpbsud, 1, 0)
TILE_BYTES(_tile_dpbusd, 0, 1)
TILE_BYTES(_tile_dpbuud, 0, 0)

#endif
