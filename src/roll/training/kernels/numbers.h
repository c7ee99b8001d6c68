/* Common arithmetic of the kernels: conversion between bfloat16 and float32, and an exponential that vectorizes. */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;
typedef int64_t i64;

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline float wide(bf16 x) { return as_float((uint32_t)x << 16); }

/* Round to the nearest, ties to even; NaN stays NaN. */
static inline bf16 narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bf16)rounded;
}

/* exp in float32 to about 2 units in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]. */
static inline float exponential(float given) {
    float x = given < -87.0f ? -87.0f : given;
    x = x > 88.0f ? 88.0f : x;
    float shifted = x * 1.44269504f + 12582912.0f; /* rounds to an integer in the low bits */
    uint32_t bits;
    memcpy(&bits, &shifted, 4);
    float n = shifted - 12582912.0f;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t power = (bits + 127u) << 23;
    float scale;
    memcpy(&scale, &power, 4);
    return given > 88.0f ? INFINITY : p * scale;
}
