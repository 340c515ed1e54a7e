/* moe of a backend over experts of every format that a weight can have, against the products of
 * linear.
 *
 * Inputs are of 1 and -1 and the norm's weights are 1, so the normed rows are those signs exactly
 * and the sums of gate and up, of values in bf16 that are small integers, exact in any order. Then
 * what goes into `down` has the same bits in both, and the last sum alone may have another order:
 * 2^-18 of the magnitudes that it adds up, which for 256 random signs are about 16 times the largest
 * element of the row. */
#include <math.h>
#include <stdbool.h>

#include "linear_device.h"
#include "random_blocks.h"
#include "random_values.h"

enum { SIZE = 256, EXPERTS = 3, ROWS = 15, TOP = 2 };

static const double CLASS_SUM = 0x1p-18;

static struct qkv_expert experts[EXPERTS];

/* [SIZE, SIZE] of a format: small integers of one without groups. */
static struct qkv_weight *make_weight(struct qkv_device *dev, enum qkv_format format)
{
    const struct qkv_format_traits *traits = qkv_format_traits(format);
    size_t n = (size_t)SIZE * SIZE;
    size_t n_bytes = n / (size_t)traits->block_elems * (size_t)traits->block_bytes;
    uint8_t *blocks = allocate(n_bytes);
    for (size_t i = 0; traits->group == 0 && i < n; i++) {
        float value = rintf(3.0f * random_float());
        uint16_t half =
            format == QKV_FORMAT_F16 ? qkv_f16_from_f32(value) : qkv_bf16_from_f32(value);
        memcpy(blocks + i * (size_t)traits->block_bytes,
               format == QKV_FORMAT_F32 ? (const void *)&value : &half,
               (size_t)traits->block_bytes);
    }
    if (traits->group > 0) {
        random_blocks(format, n_bytes, blocks);
    }
    const struct qkv_matrix desc = {
        .name = traits->name, .format = format, .n_out = SIZE, .k_in = SIZE, .blocks = blocks};
    struct qkv_weight *weight = NULL;
    CHECK_OK(cpu->weights_create(&err, dev, &desc, 1, &weight), err);
    free(blocks);
    return weight;
}

/* down(silu(gate(x)) * up(x)) of all rows of x, by linear. */
static void expert_rows(struct qkv_device *dev, const struct qkv_expert *expert,
                        const struct qkv_buffer *x, const struct qkv_buffer *norm, float *out)
{
    struct qkv_buffer *inner = make_buffer(dev, NULL, (size_t)ROWS * 2 * SIZE);
    struct qkv_buffer *y = make_buffer(dev, NULL, (size_t)ROWS * SIZE);
    const struct qkv_linear gate_up = {.x = x,
                                       .n_rows = ROWS,
                                       .prologue = QKV_PROLOGUE_RMSNORM,
                                       .norm = norm,
                                       .n_weights = 2,
                                       .weight = {expert->weight[0], expert->weight[1]},
                                       .y = inner};
    const struct qkv_linear down = {.x = inner,
                                    .n_rows = ROWS,
                                    .prologue = QKV_PROLOGUE_GATED,
                                    .n_weights = 1,
                                    .weight = {expert->weight[2]},
                                    .y = y};
    CHECK_OK(cpu->linear(&err, dev, &gate_up), err);
    CHECK_OK(cpu->linear(&err, dev, &down), err);
    CHECK_OK(cpu->download(&err, dev, y, 0, out, (size_t)ROWS * SIZE * sizeof *out), err);
    cpu->buffer_destroy(dev, inner);
    cpu->buffer_destroy(dev, y);
}

/* Rows take experts r % 3 and (r + 1) % 3, with equal weights. */
static void check_rows(const float *x, const float *got, float outs[EXPERTS][ROWS * SIZE])
{
    for (int32_t r = 0; r < ROWS; r++) {
        const float *first = outs[r % EXPERTS] + r * SIZE;
        const float *second = outs[(r + 1) % EXPERTS] + r * SIZE;
        double most = 0.0;
        for (int32_t c = 0; c < SIZE; c++) {
            most = fmax(most, fabs((double)first[c]) + fabs((double)second[c]));
        }
        for (int32_t c = 0; c < SIZE; c++) {
            double expected = 0.5 * ((double)first[c] + (double)second[c]);
            double error = fabs((double)got[r * SIZE + c] - (double)x[r * SIZE + c] - expected);
            CHECK(error <= 16 * CLASS_SUM * (most + 1));
        }
    }
}

static void check_format(struct qkv_device *dev, enum qkv_format format, struct qkv_buffer *norm)
{
    static float outs[EXPERTS][ROWS * SIZE];
    static float x[ROWS * SIZE];
    static float got[ROWS * SIZE];
    float logits[ROWS * EXPERTS] = {0};
    for (int32_t i = 0; i < ROWS * SIZE; i++) {
        x[i] = random_float() < 0 ? -1.0f : 1.0f;
    }
    for (int32_t r = 0; r < ROWS; r++) {
        logits[r * EXPERTS + (r + 2) % EXPERTS] = -5.0f;
    }
    struct qkv_buffer *rows = make_buffer(dev, x, ROWS * SIZE);
    struct qkv_buffer *scores = make_buffer(dev, logits, ROWS * EXPERTS);
    for (int32_t e = 0; e < EXPERTS; e++) {
        for (int32_t i = 0; i < 3; i++) {
            experts[e].weight[i] = make_weight(dev, format);
        }
        expert_rows(dev, &experts[e], rows, norm, outs[e]);
    }
    const struct qkv_routing routing = {.router = QKV_ROUTER_SOFTMAX,
                                        .n_experts = EXPERTS,
                                        .top_k = TOP,
                                        .n_groups = 1,
                                        .top_groups = 1,
                                        .group_best = 1,
                                        .normalize = true,
                                        .factor = 1.0f};
    const struct qkv_moe args = {.x = rows,
                                 .n_rows = ROWS,
                                 .norm = norm,
                                 .routing = &routing,
                                 .logits = scores,
                                 .experts = experts,
                                 .y = rows};
    CHECK_OK(cpu->moe(&err, dev, &args), err);
    CHECK_OK(cpu->download(&err, dev, rows, 0, got, sizeof got), err);
    check_rows(x, got, outs);
    for (int32_t i = 0; i < 3 * EXPERTS; i++) {
        cpu->weight_destroy(dev, experts[i / 3].weight[i % 3]);
    }
    cpu->buffer_destroy(dev, rows);
    cpu->buffer_destroy(dev, scores);
}

static void check_every_format(enum qkv_activations activations)
{
    struct qkv_device *dev = open_device(NULL, QKV_COMPUTE_BF16, activations, 1);
    float ones[SIZE];
    for (int32_t i = 0; i < SIZE; i++) {
        ones[i] = 1.0f;
    }
    struct qkv_buffer *norm = make_buffer(dev, ones, SIZE);
    rng_state = 11;
    for (int f = 0; f < QKV_FORMAT_COUNT; f++) {
        if (qkv_format_traits((enum qkv_format)f)->code != QKV_CODE_NONE) {
            check_format(dev, (enum qkv_format)f, norm);
        }
    }
    cpu->buffer_destroy(dev, norm);
    cpu->close(dev);
}

static void test_every_format(void)
{
    check_every_format(QKV_ACTIVATIONS_BF16);
    check_every_format(QKV_ACTIVATIONS_INT8);
}

CHECK_MAIN(find_backend, test_every_format)
