/* Sources: transformers 5.24 modeling_rope_utils (order of operations and fp32 intermediates, so
 * that angles agree to the last bits), YaRN arXiv 2309.00071, Llama 3.1's reference code. */
#include "model/rope.h"

#include <math.h>

static const double TWO_PI = 6.283185307179586;

static void scale_llama3(const struct qkv_rope_config *config, int32_t n_pairs, float *inv_freq)
{
    const float original = (float)config->original_positions;
    const float factor = (float)config->factor;
    const float low = (float)config->low_freq_factor;
    const float high = (float)config->high_freq_factor;
    const float low_wavelength = original / low;
    const float high_wavelength = original / high;
    for (int32_t i = 0; i < n_pairs; i++) {
        const float wavelength = (float)TWO_PI / inv_freq[i];
        if (wavelength > low_wavelength) {
            inv_freq[i] /= factor;
        } else if (wavelength >= high_wavelength) {
            const float smooth = (original / wavelength - low) / (high - low);
            inv_freq[i] = (1.0f - smooth) * inv_freq[i] / factor + smooth * inv_freq[i];
        }
    }
}

/* The pair at which a wave makes `rotations` turns over the original context. */
static double yarn_correction(double rotations, double dim, double theta, double original)
{
    return dim * log(original / (rotations * TWO_PI)) / (2.0 * log(theta));
}

static void scale_yarn(const struct qkv_rope_config *config, int32_t n_pairs, float *inv_freq)
{
    const double dim = 2.0 * n_pairs;
    const double original = config->original_positions;
    double low = yarn_correction(config->beta_fast, dim, config->theta, original);
    double high = yarn_correction(config->beta_slow, dim, config->theta, original);
    if (config->truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = fmax(low, 0.0);
    high = fmin(high, dim - 1.0);
    if (low == high) {
        high += 0.001;
    }
    for (int32_t i = 0; i < n_pairs; i++) {
        const float ramp = fminf(fmaxf(((float)i - (float)low) / (float)(high - low), 0.0f), 1.0f);
        const float interpolated = inv_freq[i] / (float)config->factor;
        inv_freq[i] = interpolated * ramp + inv_freq[i] * (1.0f - ramp);
    }
}

double qkv_yarn_mscale(double factor, double by)
{
    return factor <= 1.0 ? 1.0 : 0.1 * by * log(factor) + 1.0;
}

static double yarn_attention_factor(const struct qkv_rope_config *config)
{
    if (config->attention_factor != 0.0) {
        return config->attention_factor;
    }
    if (config->mscale != 0.0 && config->mscale_all_dim != 0.0) {
        return qkv_yarn_mscale(config->factor, config->mscale) /
               qkv_yarn_mscale(config->factor, config->mscale_all_dim);
    }
    return qkv_yarn_mscale(config->factor, 1.0);
}

/* LongRoPE (arXiv 2402.13753), attention's factor as transformers derives it. */
static void scale_longrope(const float *factors, double theta, int32_t n_pairs, float *inv_freq)
{
    for (int32_t i = 0; i < n_pairs; i++) {
        const float exponent = (float)(2 * i) / (float)(2 * n_pairs);
        inv_freq[i] = 1.0f / (factors[i] * powf((float)theta, exponent));
    }
}

static double longrope_attention_factor(const struct qkv_rope_config *config)
{
    if (config->attention_factor != 0.0) {
        return config->attention_factor;
    }
    return config->factor <= 1.0
               ? 1.0
               : sqrt(1.0 + log(config->factor) / log((double)config->original_positions));
}

void qkv_rope_long_frequencies(const struct qkv_rope_config *config, int32_t n_pairs,
                               float *inv_freq)
{
    float mscale;
    if (config->scaling == QKV_SCALING_LONGROPE) {
        scale_longrope(config->long_factors, config->theta, n_pairs, inv_freq);
    } else {
        qkv_rope_frequencies(config, n_pairs, inv_freq, &mscale);
    }
}

void qkv_rope_frequencies(const struct qkv_rope_config *config, int32_t n_pairs, float *inv_freq,
                          float *mscale)
{
    for (int32_t i = 0; i < n_pairs; i++) {
        const float exponent = (float)(2 * i) / (float)(2 * n_pairs);
        inv_freq[i] = 1.0f / powf((float)config->theta, exponent);
    }
    *mscale = 1.0f;
    switch (config->scaling) {
    case QKV_SCALING_NONE:
        break;
    case QKV_SCALING_LINEAR:
        for (int32_t i = 0; i < n_pairs; i++) {
            inv_freq[i] /= (float)config->factor;
        }
        break;
    case QKV_SCALING_LLAMA3:
        scale_llama3(config, n_pairs, inv_freq);
        break;
    case QKV_SCALING_YARN:
        scale_yarn(config, n_pairs, inv_freq);
        *mscale = (float)yarn_attention_factor(config);
        break;
    case QKV_SCALING_LONGROPE:
        scale_longrope(config->short_factors, config->theta, n_pairs, inv_freq);
        *mscale = (float)longrope_attention_factor(config);
        break;
    }
}
