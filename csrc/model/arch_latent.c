/* Multi-head latent attention, as DeepSeek-V2 and all that follow it describe it. Keys and
 * defaults: the config classes of transformers 4.55 and 5.24, gguf-py 0.19's constants. */
#include <math.h>

#include "model/arch.h"
#include "model/rope.h"

enum { HEADS_MAX = 4096, RANK_MAX = 1 << 16, RANK_STEP = 16 };

/* A GGUF file's key_length and value_length are the latent's, as attention sees it; files from
 * before llama.cpp did so have a head's there, and no *_mla. */
static enum qkv_status read_dims(struct qkv_error *err, const struct qkv_source *source,
                                 struct qkv_model_config *out)
{
    struct qkv_mla_config *mla = &out->mla;
    const struct qkv_key kv_rank = QKV_KEY("kv_lora_rank", "attention.kv_lora_rank");
    const struct qkv_key rope = QKV_KEY("qk_rope_head_dim", "rope.dimension_count");
    const bool absorbed = qkv_source_has(source, QKV_KEY(NULL, "attention.key_length_mla"));
    const struct qkv_key key =
        QKV_KEY("qk_nope_head_dim", absorbed ? "attention.key_length_mla" : "attention.key_length");
    const struct qkv_key value =
        QKV_KEY("v_head_dim", absorbed ? "attention.value_length_mla" : "attention.value_length");
    QKV_TRY(qkv_source_need(err, source, kv_rank));
    QKV_TRY(qkv_source_need(err, source, rope));
    QKV_TRY(qkv_source_need(err, source, key));
    QKV_TRY(qkv_source_need(err, source, value));
    QKV_TRY(qkv_source_int(err, source, kv_rank, 1, QKV_HEAD_DIM_MAX, &mla->kv_rank));
    QKV_TRY(qkv_source_int(err, source, rope, 2, QKV_HEAD_DIM_MAX, &out->rope_dim));
    QKV_TRY(qkv_source_int(err, source, key, 1, QKV_HEAD_DIM_MAX, &mla->nope_dim));
    QKV_TRY(qkv_source_int(err, source, value, 1, QKV_HEAD_DIM_MAX, &mla->v_dim));
    QKV_TRY(qkv_source_int(err, source, QKV_KEY("q_lora_rank", "attention.q_lora_rank"), 1,
                           RANK_MAX, &mla->q_rank));
    mla->nope_dim -= source->gguf != NULL ? out->rope_dim : 0;
    if (mla->nope_dim < 1 || out->rope_dim % 2 != 0) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "%s: heads of %d channels and %d rotated ones, must be at least 1 and even",
                        source->object_name, (int)mla->nope_dim, (int)out->rope_dim);
    }
    return QKV_OK;
}

enum qkv_status qkv_arch_latent_heads(struct qkv_error *err, const struct qkv_source *source,
                                      struct qkv_model_config *out)
{
    const struct qkv_key heads = QKV_KEY("num_attention_heads", "attention.head_count");
    QKV_TRY(qkv_source_need(err, source, heads));
    QKV_TRY(qkv_source_int(err, source, heads, 1, HEADS_MAX, &out->n_heads));
    QKV_TRY(read_dims(err, source, out));
    out->head_dim = out->mla.kv_rank + out->rope_dim;
    if (out->mla.kv_rank % RANK_STEP != 0 || out->head_dim > QKV_HEAD_DIM_MAX) {
        return qkv_fail(
            err, QKV_ERR_UNSUPPORTED,
            "%s: kv_lora_rank %d and %d rotated channels: must be a multiple of %d, and "
            "at most %d together",
            source->object_name, (int)out->mla.kv_rank, (int)out->rope_dim, (int)RANK_STEP,
            (int)QKV_HEAD_DIM_MAX);
    }
    out->n_kv_heads = 1;
    out->mla.norm_eps = 1e-6; /* of the class, whatever rms_norm_eps says */
    bool biases = false;
    QKV_TRY(qkv_source_bool(err, source, QKV_KEY("attention_bias", NULL), &biases));
    if (biases) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "%s: attention_bias: latent attention with biases is not supported",
                        source->object_name);
    }
    return QKV_OK;
}

enum qkv_status qkv_arch_latent_rope(struct qkv_error *err, const struct qkv_source *source,
                                     struct qkv_model_config *out)
{
    bool interleaved = true;
    QKV_TRY(qkv_source_bool(err, source, QKV_KEY("rope_interleave", NULL), &interleaved));
    out->rope_style = interleaved ? QKV_ROPE_INTERLEAVED : QKV_ROPE_HALVES;
    QKV_TRY(
        qkv_arch_rope(err, source, NULL, QKV_KEY("rope_theta", "rope.freq_base"), 1e4, true, out));
    struct qkv_rope_config *rope = &out->ropes[0];
    double log_factor = 0.0; /* a tenth of mscale_all_dim, which mscale then equals */
    QKV_TRY(qkv_source_real(err, source, QKV_KEY(NULL, "rope.scaling.yarn_log_multiplier"), 0.0,
                            1e3, &log_factor));
    if (log_factor != 0.0) {
        rope->mscale = 10.0 * log_factor;
        rope->mscale_all_dim = rope->mscale;
    }
    out->attn_scale = 1.0 / sqrt(out->mla.nope_dim + out->rope_dim);
    if (rope->scaling == QKV_SCALING_YARN && rope->mscale_all_dim != 0.0) {
        const double mscale = qkv_yarn_mscale(rope->factor, rope->mscale_all_dim);
        out->attn_scale *= mscale * mscale;
    }
    return QKV_OK;
}
