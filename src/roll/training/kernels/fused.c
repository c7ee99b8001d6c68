/* Element-wise parts of a decoder layer and of the softmax over the vocabulary, in bfloat16, one pass over memory each.

   On a CPU, PyTorch computes each of them as five to fifteen operations, each of which reads and writes all of the
   data. Rows are independent. The only sum over rows (the gradient of a norm's weight) is computed per thread and then
   over threads in order, so the same number of threads gives the same bits. Arithmetic is float32; values are rounded
   to bfloat16 where PyTorch rounds them. */

#include "numbers.h"

/* Compute y = bf16(x / rms(x)) w for [rows, width]; also store 1 / rms [rows]. */
void rms_norm(const bf16 *x, const bf16 *w, float epsilon, bf16 *y, float *inverse, i64 rows, i64 width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (i64 i = 0; i < rows; i++) {
        const bf16 *xi = x + i * width;
        bf16 *yi = y + i * width;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (i64 j = 0; j < width; j++) sum += wide(xi[j]) * wide(xi[j]);
        float scale = 1.0f / sqrtf(sum / (float)width + epsilon);
        inverse[i] = scale;
#pragma omp simd
        for (i64 j = 0; j < width; j++) yi[j] = narrow(wide(narrow(wide(xi[j]) * scale)) * wide(w[j]));
    }
}

/* Compute dx [rows, width]; each thread adds its part of dw to shares [threads, width], initially 0. */
void rms_norm_backward(const bf16 *dy, const bf16 *x, const bf16 *w, const float *inverse, bf16 *dx, float *shares,
                       i64 rows, i64 width, int threads) {
#pragma omp parallel for schedule(static, 1) num_threads(threads)
    for (int t = 0; t < threads; t++) {
        float *share = shares + t * width;
        for (i64 i = rows * t / threads; i < rows * (t + 1) / threads; i++) {
            const bf16 *dyi = dy + i * width, *xi = x + i * width;
            bf16 *dxi = dx + i * width;
            float scale = inverse[i], dot = 0.0f;
#pragma omp simd reduction(+ : dot)
            for (i64 j = 0; j < width; j++) {
                float normal = wide(xi[j]) * scale, gradient = wide(dyi[j]);
                share[j] += gradient * normal;
                dot += gradient * wide(w[j]) * normal;
            }
            dot /= (float)width;
#pragma omp simd
            for (i64 j = 0; j < width; j++)
                dxi[j] = narrow(scale * (wide(dyi[j]) * wide(w[j]) - wide(xi[j]) * scale * dot));
        }
    }
}

/* Compute y = bf16(silu(gate)) up, element by element. */
void swiglu(const bf16 *gate, const bf16 *up, bf16 *y, i64 count, int threads) {
#pragma omp parallel for simd schedule(static) num_threads(threads)
    for (i64 i = 0; i < count; i++) {
        float g = wide(gate[i]);
        y[i] = narrow(wide(narrow(g / (1.0f + exponential(-g)))) * wide(up[i]));
    }
}

void swiglu_backward(const bf16 *dy, const bf16 *gate, const bf16 *up, bf16 *dgate, bf16 *dup, i64 count, int threads) {
#pragma omp parallel for simd schedule(static) num_threads(threads)
    for (i64 i = 0; i < count; i++) {
        float g = wide(gate[i]), d = wide(dy[i]), s = 1.0f / (1.0f + exponential(-g));
        dup[i] = narrow(d * g * s);
        dgate[i] = narrow(d * wide(up[i]) * s * (1.0f + g * (1.0f - s)));
    }
}

/* Update each row's largest value and sum of exponentials with logits [rows, width] times `scale`. */
void softmax_sums(const bf16 *logits, float scale, float *largest, float *total, i64 rows, i64 width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (i64 i = 0; i < rows; i++) {
        const bf16 *z = logits + i * width;
        float top = largest[i], sum = 0.0f;
#pragma omp simd reduction(max : top)
        for (i64 j = 0; j < width; j++) top = wide(z[j]) * scale > top ? wide(z[j]) * scale : top;
#pragma omp simd reduction(+ : sum)
        for (i64 j = 0; j < width; j++) sum += exponential(wide(z[j]) * scale - top);
        total[i] = total[i] * expf(largest[i] - top) + sum;
        largest[i] = top;
    }
}

/* Replace logits z with exp(scale z - largest) factor, plus `extra` at the column `target` if this slice has it. */
void softmax_gradient(bf16 *logits, float scale, const float *largest, const float *factor, const float *extra,
                      const i64 *target, i64 rows, i64 width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (i64 i = 0; i < rows; i++) {
        bf16 *z = logits + i * width;
        float top = largest[i], share = factor[i];
        i64 t = target[i];
        float at_target = t >= 0 && t < width ? exponential(wide(z[t]) * scale - top) * share + extra[i] : 0.0f;
#pragma omp simd
        for (i64 j = 0; j < width; j++) z[j] = narrow(exponential(wide(z[j]) * scale - top) * share);
        if (t >= 0 && t < width) z[t] = narrow(at_target);
    }
}

/* Return the index of the value nearest to x >= 0, of ascending values from 0 to 1. `first` has the index of the
   nearest value at the start of each of 256 parts of a power of two, from 2^-24 on. No part contains more than one
   midpoint between neighboring values. */
static inline int nearest(const int32_t *first, const float *middles, float x) {
    uint32_t bits;
    x = x < 1.0f ? x : 1.0f;
    memcpy(&bits, &x, 4);
    int part = (int)(bits >> 15) - (103 << 8);
    int found = first[part > 0 ? part : 0];
    return found + (x > middles[found]);
}

/* AdamW on w [rows, width] with both moments in 8 bits: codes c [rows, width], scales s [rows, blocks of 256]. The step
   uses the moments before they are rounded. `size` and `root` include the bias corrections. */
void adamw_8bit(float *w, const float *gradient, uint8_t *c1, float *s1, uint8_t *c2, float *s2, const float *values1,
                const int32_t *first1, const float *middles1, const float *values2, const int32_t *first2,
                const float *middles2, float decay, float beta1,
                float rest1, float beta2, float rest2, float size, float root, float epsilon, i64 rows, i64 width,
                int threads) {
    i64 blocks = (width + 255) / 256;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (i64 i = 0; i < rows * blocks; i++) {
        i64 from = i / blocks * width + i % blocks * 256, count = width - i % blocks * 256;
        if (count > 256) count = 256;
        float first[256], second[256], largest1 = 0.0f, largest2 = 0.0f, old1 = s1[i], old2 = s2[i];
#pragma omp simd reduction(max : largest1, largest2)
        for (i64 j = 0; j < count; j++) {
            float g = gradient[from + j];
            float m = beta1 * (values1[c1[from + j]] * old1) + rest1 * g;
            float v = beta2 * (values2[c2[from + j]] * old2) + rest2 * g * g;
            w[from + j] = w[from + j] * decay - size * m / (sqrtf(v) * root + epsilon);
            first[j] = m;
            second[j] = v;
            largest1 = fabsf(m) > largest1 ? fabsf(m) : largest1;
            largest2 = v > largest2 ? v : largest2;
        }
        float inverse1 = largest1 > 0.0f ? 1.0f / largest1 : 0.0f, inverse2 = largest2 > 0.0f ? 1.0f / largest2 : 0.0f;
#pragma omp simd
        for (i64 j = 0; j < count; j++) {
            int size1 = nearest(first1, middles1, fabsf(first[j]) * inverse1), least = second[j] > 0.0f;
            int code = nearest(first2, middles2, second[j] * inverse2);
            size1 = first[j] < 0.0f && size1 > 127 ? 127 : size1; /* there is no -1 */
            c1[from + j] = (uint8_t)(first[j] < 0.0f ? 127 - size1 : 127 + size1);
            c2[from + j] = (uint8_t)(code > least ? code : least);
        }
        s1[i] = largest1;
        s2[i] = largest2;
    }
}

/* Dequantize blocks of 64 weights, 32 bytes each: the first half is in the low bits, the second in the high bits. */
void nf4_dequantize(const uint8_t *codes, const float *scales, const float *values, bf16 *w, i64 blocks, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (i64 i = 0; i < blocks; i++) {
        const uint8_t *c = codes + i * 32;
        bf16 *wi = w + i * 64, known[16];
        for (int j = 0; j < 16; j++) known[j] = narrow(values[j] * scales[i]);
#pragma omp simd
        for (int j = 0; j < 32; j++) wi[j] = known[c[j] & 15];
#pragma omp simd
        for (int j = 0; j < 32; j++) wi[j + 32] = known[c[j] >> 4];
    }
}
