/* Taking apart blocks of the IQ1, IQ2 and IQ3 types, for qkv_codec_unpack: codes, scale_f16 and
 * scale_sub. */
#ifndef QKV_QUANT_CODEC_IQ_H
#define QKV_QUANT_CODEC_IQ_H

#include <stdint.h>

#include "quant/codec.h"

void qkv_unpack_iq1_s(const uint8_t *block, struct qkv_unpacked *out);
void qkv_unpack_iq1_m(const uint8_t *block, struct qkv_unpacked *out);
void qkv_unpack_iq2_xxs(const uint8_t *block, struct qkv_unpacked *out);
void qkv_unpack_iq2_xs(const uint8_t *block, struct qkv_unpacked *out);
void qkv_unpack_iq2_s(const uint8_t *block, struct qkv_unpacked *out);
void qkv_unpack_iq3_xxs(const uint8_t *block, struct qkv_unpacked *out);
void qkv_unpack_iq3_s(const uint8_t *block, struct qkv_unpacked *out);

#endif
