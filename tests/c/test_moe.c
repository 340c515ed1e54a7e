/* moe of the CPU backend on every instruction set that this machine has, or of another: against
 * linear, row by row and expert by expert, with the routing written out again in double. The same
 * bits for any rows beside a row and any number of threads. */
#include <math.h>
#include <stdbool.h>

#include "base/half.h"
#include "linear_device.h"
#include "random_values.h"

enum { HIDDEN = 96, FFN = 40, SHARED_FFN = 72, EXPERTS = 12, ROWS = 37 };

static const double TOLERANCE = 1e-5;

struct block {
    struct qkv_device *dev;
    struct qkv_routing routing;
    enum qkv_act act;
    bool shared, shared_gate, biased, select_biased;
    struct qkv_expert experts[EXPERTS + 1];
    struct qkv_buffer *norm;
    struct qkv_buffer *select_bias;
    float select[EXPERTS];
    float logits[ROWS * (EXPERTS + 1)];
    float x[ROWS * HIDDEN];
};

static const struct qkv_routing PLAIN = {
    .router = QKV_ROUTER_SOFTMAX,
    .n_experts = EXPERTS,
    .top_k = 3,
    .n_groups = 1,
    .top_groups = 1,
    .group_best = 1,
    .normalize = true,
    .factor = 1.0f,
};

/* Values in bf16 on the CPU. In another backend values may take another kernel in moe than in
 * linear (test_moe_forms.c), which one step of bf16 in what goes into `down` would show: there
 * codes of 8 bits with a factor a row. */
static struct qkv_weight *random_weight(struct qkv_device *dev, int32_t n_out, int32_t k_in)
{
    size_t n = (size_t)n_out * (size_t)k_in;
    uint16_t *values = allocate(n * sizeof *values);
    float *factors = allocate((size_t)n_out * sizeof *factors);
    for (size_t i = 0; i < n; i++) {
        values[i] = qkv_bf16_from_f32(random_float());
    }
    struct qkv_matrix desc = {.name = "expert", .n_out = n_out, .k_in = k_in};
    if (on_cpu()) {
        desc.format = QKV_FORMAT_BF16;
        desc.blocks = (const uint8_t *)values;
    } else {
        for (int32_t i = 0; i < n_out; i++) {
            factors[i] = 0.01f * random_float();
        }
        desc.format = QKV_FORMAT_COUNT;
        desc.codes = (struct qkv_codes){.data = (const uint8_t *)values,
                                        .n_bytes = n,
                                        .order = QKV_ORDER_ROWS,
                                        .meaning = QKV_MEANING_SIGNED,
                                        .bits = 8,
                                        .row_bytes = k_in};
        desc.factor = (struct qkv_scales){.data = (const uint8_t *)factors,
                                          .n_bytes = (size_t)n_out * sizeof *factors,
                                          .format = QKV_FORMAT_F32,
                                          .row_stride = 1,
                                          .group_stride = 1,
                                          .rows_per = 1};
    }
    struct qkv_weight *weight = NULL;
    CHECK_OK(cpu->weights_create(&err, dev, &desc, 1, &weight), err);
    free(values);
    free(factors);
    return weight;
}

static struct qkv_buffer *random_buffer(struct qkv_device *dev, size_t n)
{
    float *values = random_floats(n);
    struct qkv_buffer *buffer = make_buffer(dev, values, n);
    free(values);
    return buffer;
}

/* The same numbers whatever the device. */
static void make_block(struct block *b, struct qkv_device *dev)
{
    rng_state = 5;
    b->dev = dev;
    b->norm = random_buffer(dev, HIDDEN);
    for (int32_t e = 0; e < EXPERTS + 1; e++) {
        struct qkv_expert *expert = &b->experts[e];
        int32_t ffn = e == EXPERTS ? SHARED_FFN : FFN;
        const int32_t sizes[3][2] = {{ffn, HIDDEN}, {ffn, HIDDEN}, {HIDDEN, ffn}};
        for (int32_t i = 0; i < 3; i++) {
            expert->weight[i] = random_weight(dev, sizes[i][0], sizes[i][1]);
            expert->bias[i] = b->biased ? random_buffer(dev, (size_t)sizes[i][0]) : NULL;
        }
    }
    for (size_t i = 0; i < sizeof b->logits / sizeof *b->logits; i++) {
        b->logits[i] = 3.0f * random_float();
    }
    for (size_t i = 0; i < sizeof b->x / sizeof *b->x; i++) {
        b->x[i] = random_float();
    }
    for (int32_t e = 0; e < EXPERTS; e++) {
        b->select[e] = 0.4f * random_float();
    }
    b->select_bias = b->select_biased ? make_buffer(dev, b->select, EXPERTS) : NULL;
}

static void free_block(struct block *b)
{
    for (int32_t e = 0; e < EXPERTS + 1; e++) {
        for (int32_t i = 0; i < 3; i++) {
            cpu->weight_destroy(b->dev, b->experts[e].weight[i]);
            cpu->buffer_destroy(b->dev, b->experts[e].bias[i]);
        }
    }
    cpu->buffer_destroy(b->dev, b->norm);
    cpu->buffer_destroy(b->dev, b->select_bias);
}

static int32_t n_logits(const struct block *b)
{
    return EXPERTS + b->shared_gate;
}

/* Rows [first, first + n) in place, x being y; into `out` [n, HIDDEN]. */
static enum qkv_status run(struct block *b, int32_t first, int32_t n, float *out)
{
    struct qkv_buffer *x = make_buffer(b->dev, b->x + first * HIDDEN, (size_t)(n * HIDDEN));
    struct qkv_buffer *logits =
        make_buffer(b->dev, b->logits + first * n_logits(b), (size_t)(n * n_logits(b)));
    const struct qkv_moe args = {
        .x = x,
        .n_rows = n,
        .norm = b->norm,
        .norm_eps = 1e-6f,
        .routing = &b->routing,
        .logits = logits,
        .select_bias = b->select_bias,
        .experts = b->experts,
        .n_shared = b->shared,
        .shared_gate = b->shared_gate,
        .act = b->act,
        .y = x,
    };
    enum qkv_status status = cpu->moe(&err, b->dev, &args);
    if (status == QKV_OK) {
        CHECK_OK(cpu->download(&err, b->dev, x, 0, out, (size_t)(n * HIDDEN) * sizeof *out), err);
    }
    cpu->buffer_destroy(b->dev, x);
    cpu->buffer_destroy(b->dev, logits);
    return status;
}

/* ---- the reference ---- */

static double sigmoid(double x)
{
    return 1.0 / (1.0 + exp(-x));
}

static int32_t best_of(const double *scores, const bool *taken, int32_t n)
{
    int32_t best = -1;
    for (int32_t i = 0; i < n; i++) {
        if (!taken[i] && (best < 0 || scores[i] > scores[best])) {
            best = i;
        }
    }
    return best;
}

static void softmax(double *x, int32_t n)
{
    double sum = 0.0;
    for (int32_t i = 0; i < n; i++) {
        x[i] = exp(x[i]);
        sum += x[i];
    }
    for (int32_t i = 0; i < n; i++) {
        x[i] /= sum;
    }
}

/* Experts of groups that cannot be chosen. */
static void leave_groups(const struct qkv_routing *r, const double *scores, bool *taken)
{
    int32_t size = EXPERTS / r->n_groups;
    double of_groups[EXPERTS];
    bool kept[EXPERTS] = {false};
    for (int32_t g = 0; g < r->n_groups; g++) {
        bool used[EXPERTS] = {false};
        of_groups[g] = 0.0;
        for (int32_t i = 0; i < r->group_best; i++) {
            int32_t best = best_of(scores + g * size, used, size);
            used[best] = true;
            of_groups[g] += scores[g * size + best];
        }
    }
    for (int32_t i = 0; i < r->top_groups; i++) {
        kept[best_of(of_groups, kept, r->n_groups)] = true;
    }
    for (int32_t e = 0; e < EXPERTS; e++) {
        taken[e] = !kept[e / size];
    }
}

/* A row's experts and their weights, the shared one last; how many they are. */
static int32_t choose(const struct block *b, int32_t row, int32_t *experts, double *weights)
{
    const struct qkv_routing *r = &b->routing;
    const float *logits = b->logits + row * n_logits(b);
    double scores[EXPERTS];
    double as_chosen[EXPERTS];
    bool taken[EXPERTS] = {false};
    for (int32_t e = 0; e < EXPERTS; e++) {
        scores[e] =
            r->router == QKV_ROUTER_SIGMOID ? sigmoid((double)logits[e]) : (double)logits[e];
    }
    if (r->router == QKV_ROUTER_SOFTMAX) {
        softmax(scores, EXPERTS);
    }
    for (int32_t e = 0; e < EXPERTS; e++) {
        as_chosen[e] = scores[e] + (b->select_biased ? (double)b->select[e] : 0.0);
    }
    if (r->n_groups > 1) {
        leave_groups(r, as_chosen, taken);
    }
    double sum = 1e-20;
    for (int32_t i = 0; i < r->top_k; i++) {
        experts[i] = best_of(as_chosen, taken, EXPERTS);
        taken[experts[i]] = true;
        weights[i] = scores[experts[i]];
        sum += weights[i];
    }
    if (r->router == QKV_ROUTER_SOFTMAX_CHOSEN) {
        softmax(weights, r->top_k);
    }
    for (int32_t i = 0; i < r->top_k; i++) {
        weights[i] = (r->normalize ? weights[i] / sum : weights[i]) * (double)r->factor;
    }
    experts[r->top_k] = EXPERTS;
    weights[r->top_k] = b->shared_gate ? sigmoid((double)logits[EXPERTS]) : 1.0;
    return r->top_k + b->shared;
}

/* down(act(gate(h)) * up(h)) of one row, by linear. */
static void expert_row(const struct block *b, int32_t row, int32_t e, float *out)
{
    const struct qkv_expert *expert = &b->experts[e];
    size_t ffn = e == EXPERTS ? SHARED_FFN : FFN;
    struct qkv_buffer *x = make_buffer(b->dev, b->x + row * HIDDEN, HIDDEN);
    struct qkv_buffer *inner = make_buffer(b->dev, NULL, 2 * ffn);
    struct qkv_buffer *y = make_buffer(b->dev, NULL, HIDDEN);
    const struct qkv_linear gate_up = {.x = x,
                                       .n_rows = 1,
                                       .prologue = QKV_PROLOGUE_RMSNORM,
                                       .norm = b->norm,
                                       .norm_eps = 1e-6f,
                                       .n_weights = 2,
                                       .weight = {expert->weight[0], expert->weight[1]},
                                       .bias = {expert->bias[0], expert->bias[1]},
                                       .y = inner};
    const struct qkv_linear down = {.x = inner,
                                    .n_rows = 1,
                                    .prologue = QKV_PROLOGUE_GATED,
                                    .act = b->act,
                                    .n_weights = 1,
                                    .weight = {expert->weight[2]},
                                    .bias = {expert->bias[2]},
                                    .y = y};
    CHECK_OK(cpu->linear(&err, b->dev, &gate_up), err);
    CHECK_OK(cpu->linear(&err, b->dev, &down), err);
    CHECK_OK(cpu->download(&err, b->dev, y, 0, out, HIDDEN * sizeof *out), err);
    cpu->buffer_destroy(b->dev, x);
    cpu->buffer_destroy(b->dev, inner);
    cpu->buffer_destroy(b->dev, y);
}

static void check_row(const struct block *b, int32_t row, const float *got)
{
    int32_t experts[EXPERTS + 1];
    double weights[EXPERTS + 1];
    double sum[HIDDEN] = {0};
    double size[HIDDEN] = {0};
    int32_t n = choose(b, row, experts, weights);
    for (int32_t i = 0; i < n; i++) {
        float y[HIDDEN];
        expert_row(b, row, experts[i], y);
        for (int32_t c = 0; c < HIDDEN; c++) {
            sum[c] += weights[i] * (double)y[c];
            size[c] += fabs(weights[i] * (double)y[c]);
        }
    }
    for (int32_t c = 0; c < HIDDEN; c++) {
        double x = (double)b->x[row * HIDDEN + c];
        CHECK(fabs((double)got[c] - x - sum[c]) <= TOLERANCE * (size[c] + fabs(x)));
    }
}

/* ---- tests ---- */

/* With the best instruction set. */
static struct qkv_device *open_best(enum qkv_compute compute, int n_threads)
{
    return open_device(NULL, compute, QKV_ACTIVATIONS_BF16, n_threads);
}

/* All rows at once against the reference, then cut in three and by other numbers of threads. */
static void check_block(struct block *b)
{
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        for (int n_threads = 1; isa->usable() && n_threads <= (on_cpu() ? 3 : 1); n_threads++) {
            static float together[ROWS * HIDDEN];
            static float again[ROWS * HIDDEN];
            make_block(b,
                       open_device(isa->name, QKV_COMPUTE_BF16, QKV_ACTIVATIONS_BF16, n_threads));
            CHECK_OK(run(b, 0, ROWS, n_threads == 1 ? together : again), err);
            for (int32_t r = 0; n_threads == 1 && r < ROWS; r++) {
                check_row(b, r, together + r * HIDDEN);
            }
            CHECK(n_threads == 1 || same_bits(together, again, ROWS * HIDDEN));
            static const int32_t starts[] = {0, 1, 9, ROWS};
            for (int32_t s = 0; s < 3; s++) {
                CHECK_OK(run(b, starts[s], starts[s + 1] - starts[s], again), err);
                CHECK(same_bits(together + starts[s] * HIDDEN, again,
                                (size_t)((starts[s + 1] - starts[s]) * HIDDEN)));
            }
            struct qkv_device *dev = b->dev;
            free_block(b);
            cpu->close(dev);
        }
    }
}

static void test_softmax(void)
{
    struct block b = {.routing = PLAIN};
    check_block(&b);
    b.routing.normalize = false;
    check_block(&b);
}

static void test_softmax_of_the_chosen(void)
{
    struct block b = {.routing = PLAIN, .biased = true, .act = QKV_ACT_SWIGLU_CLAMPED};
    b.routing.router = QKV_ROUTER_SOFTMAX_CHOSEN;
    b.routing.normalize = false;
    check_block(&b);
}

static void test_sigmoid_with_groups(void)
{
    struct block b = {.routing = PLAIN, .select_biased = true, .shared = true};
    b.routing.router = QKV_ROUTER_SIGMOID;
    b.routing.n_groups = 4;
    b.routing.top_groups = 2;
    b.routing.group_best = 2;
    b.routing.factor = 2.5f;
    check_block(&b);
    b.routing.group_best = 1;
    b.routing.normalize = false;
    check_block(&b);
}

static void test_shared_expert_with_a_gate(void)
{
    struct block b = {.routing = PLAIN, .shared = true, .shared_gate = true};
    check_block(&b);
}

static void test_all_experts(void)
{
    struct block b = {.routing = PLAIN};
    b.routing.top_k = EXPERTS;
    check_block(&b);
}

/* All rows to one expert, none to the others; equal logits go to the lowest index; NaN to anyone,
 * without a fault, and to no other row. */
static void test_ties_and_numbers_that_are_none(void)
{
    struct block b = {.routing = PLAIN};
    static float got[ROWS * HIDDEN];
    static float before[ROWS * HIDDEN];
    b.routing.top_k = 1;
    make_block(&b, open_best(QKV_COMPUTE_F32, 2));
    for (int32_t i = 0; i < ROWS * EXPERTS; i++) {
        b.logits[i] = i % EXPERTS == 7 ? 5.0f : -1.0f;
    }
    CHECK_OK(run(&b, 0, ROWS, got), err);
    check_row(&b, 3, got + 3 * HIDDEN);
    for (int32_t i = 0; i < ROWS * EXPERTS; i++) {
        b.logits[i] = i % EXPERTS >= 4 ? 1.0f : 0.0f;
    }
    b.routing.top_k = 2;
    CHECK_OK(run(&b, 0, ROWS, before), err);
    check_row(&b, 3, before + 3 * HIDDEN); /* experts 4 and 5 */
    for (int32_t e = 0; e < EXPERTS; e++) {
        b.logits[5 * EXPERTS + e] = NAN;
    }
    CHECK_OK(run(&b, 0, ROWS, got), err);
    for (int32_t r = 0; r < ROWS; r++) {
        CHECK((r == 5) != same_bits(got + r * HIDDEN, before + r * HIDDEN, HIDDEN));
    }
    struct qkv_device *dev = b.dev;
    free_block(&b);
    cpu->close(dev);
}

static void test_arguments(void)
{
    struct block b = {.routing = PLAIN};
    float got[HIDDEN];
    make_block(&b, open_best(QKV_COMPUTE_BF16, 1));
    b.routing.top_k = EXPERTS + 1;
    CHECK_ERROR(run(&b, 0, 1, got), err, QKV_ERR_ARGUMENT, "13 of 12 experts");
    b.routing.top_k = 5;
    b.routing.n_groups = 4;
    CHECK_ERROR(run(&b, 0, 1, got), err, QKV_ERR_ARGUMENT, "1 of 4 groups");
    b.routing = PLAIN;
    struct qkv_weight *down = b.experts[3].weight[2];
    b.experts[3].weight[2] = b.experts[3].weight[0];
    CHECK_ERROR(run(&b, 0, 1, got), err, QKV_ERR_ARGUMENT, "expert 3");
    b.experts[3].weight[2] = down;
    CHECK_OK(run(&b, 0, 1, got), err);
    struct qkv_device *dev = b.dev;
    free_block(&b);
    cpu->close(dev);
}

CHECK_MAIN(find_backend, test_softmax, test_softmax_of_the_chosen, test_sigmoid_with_groups,
           test_shared_expert_with_a_gate, test_all_experts, test_ties_and_numbers_that_are_none,
           test_arguments)
