/* Attention over a packed row in bfloat16: every segment of every tree attends to its ancestors and, causally, to
   itself.

   A task is one tree and one key head. It gathers the keys and values of that head once and computes one panel of
   queries (tiles of 16 queries of one segment and one head) at a time. Scores are stored transposed, [keys, queries]:
   the queries of a tile are the lanes of a vector register. So the softmax needs no sum over lanes, and the weights
   have the layout of the next product. The backward pass recomputes the weights. Tasks share no data, so results do not
   depend on the thread that computes them.

   Products take A [M, k], rows in bfloat16, and B in tiles of 16 columns, [k / 2][16][2], as both AMX and AVX-512 read
   it; M and k are multiples of 32. Sums and the softmax are float32. */

#include <stdlib.h>

#include "numbers.h"

#if defined(__AMX_BF16__) || defined(__AVX512BF16__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { LANES = 16, BLOCK = 32, PANEL = 8, KEYS = 128 };
enum { PLAIN, VECTORS, TILES };

static i64 up(i64 count) { return (count + BLOCK - 1) / BLOCK * BLOCK; }

/* Return the fastest instructions for products on this machine. */
int attention_kind(void) {
#if defined(__AMX_BF16__)
    if (syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0) return TILES;
#endif
#if defined(__AVX512BF16__)
    return VECTORS;
#else
    return PLAIN;
#endif
}

#if defined(__AMX_BF16__)
static void tiles_begin(void) {
    struct { uint8_t palette, start, reserved[14]; uint16_t width[16]; uint8_t rows[16]; } config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.width[i] = 64, config.rows[i] = 16;
    _tile_loadconfig(&config);
}

static void product_tiles(float *c, i64 ldc, const bf16 *a, i64 lda, const bf16 *b, i64 ldb, i64 m, i64 k, i64 tiles,
                          int fresh) {
    i64 down = ldc * 4, over = lda * 2;
    for (i64 i = 0; i < m; i += 32)
        for (i64 j = 0; j < tiles; j += 2) {
            int two = j + 1 < tiles;
            float *c0 = c + i * ldc + j * 16, *c1 = c0 + 16 * ldc;
            if (fresh) {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            } else {
                _tile_loadd(0, c0, down);
                _tile_loadd(1, c1, down);
                if (two) {
                    _tile_loadd(2, c0 + 16, down);
                    _tile_loadd(3, c1 + 16, down);
                }
            }
            for (i64 p = 0; p < k; p += 32) {
                const bf16 *b0 = b + j * ldb + p * 16;
                _tile_loadd(4, a + i * lda + p, over);
                _tile_loadd(5, a + (i + 16) * lda + p, over);
                _tile_loadd(6, b0, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 5, 6);
                if (two) {
                    _tile_loadd(7, b0 + ldb, 64);
                    _tile_dpbf16ps(2, 4, 7);
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
            _tile_stored(0, c0, down);
            _tile_stored(1, c1, down);
            if (two) {
                _tile_stored(2, c0 + 16, down);
                _tile_stored(3, c1 + 16, down);
            }
        }
}
#endif

#if defined(__AVX512BF16__)
static void product_vectors(float *c, i64 ldc, const bf16 *a, i64 lda, const bf16 *b, i64 ldb, i64 m, i64 k, i64 tiles,
                          int fresh) {
    for (i64 j = 0; j < tiles; j += 2) {
        i64 two = j + 1 < tiles ? 1 : 0;
        const bf16 *b0 = b + j * ldb, *b1 = b0 + two * ldb;
        for (i64 i = 0; i < m; i += 8) {
            __m512 sums[8][2];
            for (int r = 0; r < 8; r++) {
                const float *from = c + (i + r) * ldc + j * 16;
                sums[r][0] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(from);
                sums[r][1] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(from + two * 16);
            }
            for (i64 p = 0; p < k; p += 2) {
                __m512bh x0 = (__m512bh)_mm512_loadu_si512(b0 + p * 16), x1 = (__m512bh)_mm512_loadu_si512(b1 + p * 16);
#pragma GCC unroll 8
                for (int r = 0; r < 8; r++) {
                    int32_t pair;
                    memcpy(&pair, a + (i + r) * lda + p, 4);
                    __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
                    sums[r][0] = _mm512_dpbf16_ps(sums[r][0], both, x0);
                    sums[r][1] = _mm512_dpbf16_ps(sums[r][1], both, x1);
                }
            }
            for (int r = 0; r < 8; r++) {
                _mm512_storeu_ps(c + (i + r) * ldc + j * 16, sums[r][0]);
                if (two) _mm512_storeu_ps(c + (i + r) * ldc + j * 16 + 16, sums[r][1]);
            }
        }
    }
}
#endif

static void product_plain(float *c, i64 ldc, const bf16 *a, i64 lda, const bf16 *b, i64 ldb, i64 m, i64 k, i64 tiles,
                          int fresh) {
    for (i64 j = 0; j < tiles; j++)
        for (i64 i = 0; i < m; i += 4) {
            float sums[4][16];
            memset(sums, 0, sizeof sums);
            for (int r = 0; r < 4 && !fresh; r++) memcpy(sums[r], c + (i + r) * ldc + j * 16, 64);
            for (i64 p = 0; p < k; p += 2) {
                uint32_t pairs[16];
                memcpy(pairs, b + j * ldb + p * 16, 64);
                for (int r = 0; r < 4; r++) {
                    float even = wide(a[(i + r) * lda + p]), odd = wide(a[(i + r) * lda + p + 1]);
#pragma omp simd
                    for (int l = 0; l < 16; l++)
                        sums[r][l] += even * as_float(pairs[l] << 16) + odd * as_float(pairs[l] & 0xffff0000u);
                }
            }
            for (int r = 0; r < 4; r++) memcpy(c + (i + r) * ldc + j * 16, sums[r], 64);
        }
}

/* C [m, 16 tiles] = A [m, k] B, or += unless it is fresh. */
static void product(int kind, float *c, i64 ldc, const bf16 *a, i64 lda, const bf16 *b, i64 ldb, i64 m, i64 k,
                    i64 tiles, int fresh) {
#if defined(__AMX_BF16__)
    if (kind == TILES) {
        product_tiles(c, ldc, a, lda, b, ldb, m, k, tiles, fresh);
        return;
    }
#endif
#if defined(__AVX512BF16__)
    if (kind >= VECTORS) {
        product_vectors(c, ldc, a, lda, b, ldb, m, k, tiles, fresh);
        return;
    }
#endif
    product_plain(c, ldc, a, lda, b, ldb, m, k, tiles, fresh);
}

/* A packed row and its attention: q, out [N, H, d], k [N, K, d], v [N, K, w], lse [N, H]; RoPE cosines and sines [N,
   turned], or none. Trees are (first token, tokens, first segment, segments); segments are (first token in the tree,
   length, first range, ranges); ranges (first token in the tree, length) cover the ancestors of a segment. */
typedef struct {
    const bf16 *q, *k, *v, *cosine, *sine;
    const i64 *trees, *segments, *ranges;
    i64 num_trees, heads, groups, d, w, turned, kind, most_tokens, most_keys;
    float scale;
} Row;

/* The work for one tree and one key head. */
typedef struct {
    const Row *row;
    const i64 *tree;
    i64 group, n, d, w; /* n, d, w: padded */
} Task;

/* Up to 16 queries of one segment and one head. */
typedef struct {
    i64 head, first, count;
} Tile;

/* Return a buffer of at least `size` bytes that the thread keeps and reuses. */
static char *space(i64 size) {
    static _Thread_local char *kept;
    static _Thread_local i64 known;
    if (size > known) {
        free(kept);
        kept = aligned_alloc(64, (size_t)(size + 63) / 64 * 64);
        known = kept ? size : 0;
    }
    return kept;
}

static void *take(char **from, i64 size) {
    char *found = *from;
    *from += (size + 63) / 64 * 64;
    return found;
}

/* Copy a vector of `width` with RoPE applied, followed by zeros up to `padded`. */
static void load_turned(const Row *row, const bf16 *x, i64 token, i64 width, i64 padded, bf16 *y) {
    i64 turned = row->cosine ? row->turned : 0, half = turned / 2;
    const bf16 *c = row->cosine + token * turned, *s = row->sine + token * turned;
#pragma omp simd
    for (i64 i = 0; i < half; i++) {
        float a = wide(x[i]), b = wide(x[i + half]);
        y[i] = narrow(a * wide(c[i]) - b * wide(s[i]));
        y[i + half] = narrow(b * wide(c[i + half]) + a * wide(s[i + half]));
    }
    memcpy(y + turned, x + turned, (size_t)(width - turned) * 2);
    memset(y + width, 0, (size_t)(padded - width) * 2);
}

/* Compute the gradient of a query or key vector from the gradient of the scaled vector after RoPE. */
static void store_unturned(const Row *row, const float *g, i64 token, bf16 *y) {
    i64 turned = row->cosine ? row->turned : 0, half = turned / 2;
    const bf16 *c = row->cosine + token * turned, *s = row->sine + token * turned;
    float scale = row->scale;
#pragma omp simd
    for (i64 i = 0; i < half; i++) {
        float a = g[i] * scale, b = g[i + half] * scale;
        y[i] = narrow(a * wide(c[i]) + b * wide(s[i + half]));
        y[i + half] = narrow(b * wide(c[i + half]) - a * wide(s[i]));
    }
#pragma omp simd
    for (i64 i = turned; i < row->d; i++) y[i] = narrow(g[i] * scale);
}

/* Transpose 16 rows of 16 32-bit values; steps between rows are in bytes. */
static void turn(const void *from, i64 step, void *to, i64 to_step) {
#if defined(__AVX512F__)
    __m512i x[16], y[16];
    for (int i = 0; i < 16; i++) x[i] = _mm512_loadu_si512((const char *)from + i * step);
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + 2 + j]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + 2 + j]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + 4 + j], 0x88);
            y[i + 4 + j] = _mm512_shuffle_i32x4(x[i + j], x[i + 4 + j], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        _mm512_storeu_si512((char *)to + j * to_step, _mm512_shuffle_i32x4(y[j], y[8 + j], 0x88));
        _mm512_storeu_si512((char *)to + (8 + j) * to_step, _mm512_shuffle_i32x4(y[j], y[8 + j], 0xdd));
    }
#else
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++)
            memcpy((char *)to + j * to_step + i * 4, (const char *)from + i * step + j * 4, 4);
#endif
}

/* Pack rows [16, width] as B of a product with their transpose: [width / 2][16][2]. */
static void across(const bf16 *rows, i64 width, bf16 *b) {
    for (i64 x = 0; x < width; x += 32) turn(rows + x, width * 2, b + x * LANES, 64);
}

/* Pack rows [count, width] as B of a product with themselves: [width / 16][count / 2][16][2]. */
static void down(const bf16 *rows, i64 count, i64 width, bf16 *b) {
    for (i64 r = 0; r < count; r += 2)
        for (i64 x = 0; x < width; x += LANES) {
            uint32_t *to = (uint32_t *)(b + x * count + r * LANES);
            const bf16 *even = rows + r * width + x, *odd = even + width;
#pragma omp simd
            for (int l = 0; l < LANES; l++) to[l] = even[l] | (uint32_t)odd[l] << 16;
        }
}

/* Transpose [n, width] to [width, n]. */
static void transpose(const bf16 *x, i64 n, i64 width, bf16 *y) {
    for (i64 i = 0; i < n; i += LANES)
        for (i64 j = 0; j < width; j += BLOCK) {
            uint32_t pairs[LANES][LANES];
            turn(x + i * width + j, width * 2, pairs, 64);
            for (int p = 0; p < LANES; p++) {
                bf16 *even = y + (j + 2 * p) * n + i, *odd = even + n;
#pragma omp simd
                for (int l = 0; l < LANES; l++) {
                    even[l] = (bf16)pairs[p][l];
                    odd[l] = (bf16)(pairs[p][l] >> 16);
                }
            }
        }
}

/* Store a tile's columns of sums [width, step] as rows [16, width]. */
static void columns_of(const float *sums, i64 step, i64 width, float *rows) {
    for (i64 x = 0; x < width; x += LANES) turn(sums + x * step, step * 4, rows + x, width * 4);
}

static void gather(const Task *task, const bf16 *x, i64 width, i64 padded, int turned, bf16 *rows) {
    const Row *row = task->row;
    i64 start = task->tree[0], count = task->tree[1];
    for (i64 i = 0; i < count; i++) {
        const bf16 *from = x + ((start + i) * row->groups + task->group) * width;
        if (turned) {
            load_turned(row, from, start + i, width, padded, rows + i * padded);
        } else {
            memcpy(rows + i * padded, from, (size_t)width * 2);
            memset(rows + i * padded + width, 0, (size_t)(padded - width) * 2);
        }
    }
    memset(rows + count * padded, 0, (size_t)((task->n - count) * padded) * 2);
}

/* Collect the next tiles of a segment, at most `most`: later queries last, the heads of a group adjacent. */
static i64 next_tiles(const Task *task, const i64 *segment, i64 *done, i64 most, Tile *tiles) {
    i64 share = task->row->heads / task->row->groups, count = 0;
    i64 all = (segment[1] + LANES - 1) / LANES * share;
    for (; count < most && *done < all; count++, ++*done) {
        i64 first = *done / share * LANES, left = segment[1] - first;
        tiles[count] = (Tile){task->group * share + *done % share, first, left < LANES ? left : LANES};
    }
    return count;
}

/* Collect the key ranges of a segment that these tiles attend to; the segment's own range is last. */
static i64 range_of(const Task *task, const i64 *segment, i64 i, const Tile *last, i64 *start) {
    const i64 *range = task->row->ranges + (segment[2] + i) * 2;
    int own = i == segment[3];
    *start = own ? segment[0] : range[0];
    return own ? last->first + last->count : range[1];
}

static Task task_of(const Row *row, i64 number) {
    const i64 *tree = row->trees + number / row->groups * 4;
    return (Task){row, tree, number % row->groups, up(tree[1] + BLOCK - 1), up(row->d), up(row->w)};
}

/* Turn the scores [keys, 32] of a tile, at its column, into weights for the next product, with their sums and the lse.
   */
static void softmax(const Task *task, const i64 *segment, const Tile *tile, const Tile *last, float *scores, bf16 *weights,
                    float *total, float *lse) {
    float scale = task->row->scale, top[LANES];
    for (int l = 0; l < LANES; l++) top[l] = -INFINITY, total[l] = 0.0f;
    i64 row = 0;
    for (i64 r = 0; r <= segment[3]; r++) {
        i64 start, count = range_of(task, segment, r, last, &start), from = r == segment[3] ? tile->first : count;
        for (i64 i = 0; i < count; i++) {
            float *s = scores + (row + i) * BLOCK;
            for (int l = 0; i > from && l < LANES; l++) s[l] = from + l < i ? -INFINITY : s[l];
#pragma omp simd
            for (int l = 0; l < LANES; l++) top[l] = s[l] > top[l] ? s[l] : top[l];
        }
        for (i64 i = count; i < up(count); i++)
            for (int l = 0; l < LANES; l++) scores[(row + i) * BLOCK + l] = -INFINITY;
        row += up(count);
    }
    for (i64 i = 0; i < row; i += 2) {
        const float *even = scores + i * BLOCK, *odd = even + BLOCK;
        uint32_t *to = (uint32_t *)(weights + i * LANES);
#pragma omp simd
        for (int l = 0; l < LANES; l++) {
            float a = exponential((even[l] - top[l]) * scale), b = exponential((odd[l] - top[l]) * scale);
            a = even[l] == -INFINITY ? 0.0f : a;
            b = odd[l] == -INFINITY ? 0.0f : b;
            total[l] += a + b;
            to[l] = narrow(a) | (uint32_t)narrow(b) << 16;
        }
    }
    for (int l = 0; l < LANES; l++) lse[l] = top[l] * scale + logf(total[l]);
}

static void forward_task(const Task *task, char *memory, bf16 *out, float *lse) {
    const Row *row = task->row;
    i64 n = task->n, d = task->d, w = task->w, most = row->most_keys;
    bf16 *keys = take(&memory, n * d * 2), *values = take(&memory, n * w * 2), *turned = take(&memory, n * w * 2);
    bf16 *queries = take(&memory, LANES * d * 2), *packed = take(&memory, 2 * LANES * d * 2);
    bf16 *weights = take(&memory, most * BLOCK * 2);
    float *scores = take(&memory, most * BLOCK * 4), *sums = take(&memory, w * BLOCK * 4), *lines = take(&memory, w * LANES * 4);
    gather(task, row->k, row->d, d, 1, keys);
    gather(task, row->v, row->w, w, 0, values);
    transpose(values, n, w, turned);
    for (i64 s = 0; s < task->tree[3]; s++) {
        const i64 *segment = row->segments + (task->tree[2] + s) * 4;
        Tile tiles[2];
        for (i64 done = 0, count; (count = next_tiles(task, segment, &done, 2, tiles)) > 0;) {
            const Tile *last = tiles + count - 1;
            i64 first = task->tree[0] + segment[0], place = 0, start, size;
            for (i64 j = 0; j < count; j++) {
                for (i64 l = 0; l < tiles[j].count; l++) {
                    i64 token = first + tiles[j].first + l;
                    load_turned(row, row->q + (token * row->heads + tiles[j].head) * row->d, token, row->d, d,
                                queries + l * d);
                }
                memset(queries + tiles[j].count * d, 0, (size_t)((LANES - tiles[j].count) * d) * 2);
                across(queries, d, packed + j * LANES * d);
            }
            for (i64 r = 0; r <= segment[3]; r++, place += up(size)) {
                size = range_of(task, segment, r, last, &start);
                product((int)row->kind, scores + place * BLOCK, BLOCK, keys + start * d, d, packed, LANES * d, up(size), d,
                        count, 1);
            }
            float total[2][LANES], logs[2][LANES];
            for (i64 j = 0; j < count; j++)
                softmax(task, segment, tiles + j, last, scores + j * LANES, weights + j * place * LANES, total[j], logs[j]);
            i64 seen = 0;
            for (i64 r = 0; r <= segment[3]; r++, seen += up(size)) {
                size = range_of(task, segment, r, last, &start);
                product((int)row->kind, sums, BLOCK, turned + start, n, weights + seen * LANES, place * LANES, w, up(size),
                        count, r == 0);
            }
            for (i64 j = 0; j < count; j++) {
                columns_of(sums + j * LANES, BLOCK, w, lines);
                for (i64 l = 0; l < tiles[j].count; l++) {
                    i64 whose = (first + tiles[j].first + l) * row->heads + tiles[j].head;
                    float share = 1.0f / total[j][l];
#pragma omp simd
                    for (i64 x = 0; x < row->w; x++) out[whose * row->w + x] = narrow(lines[l * w + x] * share);
                    lse[whose] = logs[j][l];
                }
            }
        }
    }
}

/* Compute weights and score gradients from scores and weight gradients [keys, columns], in a block of keys of one
   range. Score gradients are stored twice, once in the layout of the next product. In the own range, keys count from
   `first`. */
static void slopes(const Row *row, const Tile *tiles, i64 count, i64 columns, i64 first, i64 size, int own, const float *lse,
                   const float *delta, const float *scores, const float *grads, bf16 *weights, bf16 *slope, bf16 *packed) {
    i64 rows = up(size);
    for (i64 j = 0; j < columns / LANES; j++) {
        i64 live = j < count ? tiles[j].count : 0;
        const float *log = lse + j * LANES, *less = delta + j * LANES;
        for (i64 i = 0; i < rows; i += 2) {
            uint32_t pairs[LANES] = {0};
            for (i64 r = 0; r < 2; r++) {
                i64 at = (i + r) * columns + j * LANES, hidden = own && live ? first + i + r - tiles[j].first : 0;
                int unseen = i + r < size ? (int)hidden : LANES;
                uint32_t shift = (uint32_t)r * 16;
#pragma omp simd
                for (int l = 0; l < LANES; l++) {
                    float p = exponential(scores[at + l] * row->scale - log[l]);
                    p = (l >= unseen) & (l < (int)live) ? p : 0.0f;
                    bf16 found = narrow(p * (grads[at + l] - less[l]));
                    weights[at + l] = narrow(p);
                    slope[at + l] = found;
                    pairs[l] |= (uint32_t)found << shift;
                }
            }
            memcpy(packed + (j * rows + i) * LANES, pairs, sizeof pairs);
        }
    }
}

static void backward_task(const Task *task, char *memory, const bf16 *out, const float *lse, const bf16 *grad, bf16 *grad_q,
                          bf16 *grad_k, bf16 *grad_v) {
    const Row *row = task->row;
    int kind = (int)row->kind;
    i64 n = task->n, d = task->d, w = task->w, widest = PANEL * LANES;
    bf16 *keys = take(&memory, n * d * 2), *turned = take(&memory, n * d * 2), *values = take(&memory, n * w * 2);
    bf16 *queries = take(&memory, widest * d * 2), *grads = take(&memory, widest * w * 2);
    bf16 *queries_across = take(&memory, widest * d * 2), *queries_down = take(&memory, widest * d * 2);
    bf16 *grads_across = take(&memory, widest * w * 2), *grads_down = take(&memory, widest * w * 2);
    bf16 *weights = take(&memory, KEYS * widest * 2), *slope = take(&memory, KEYS * widest * 2);
    bf16 *packed = take(&memory, KEYS * widest * 2);
    float *scores = take(&memory, KEYS * widest * 4), *steps = take(&memory, KEYS * widest * 4);
    float *sum_q = take(&memory, d * widest * 4), *lines = take(&memory, d * LANES * 4);
    float *sum_k = take(&memory, n * d * 4), *sum_v = take(&memory, n * w * 4);
    float logs[PANEL * LANES], delta[PANEL * LANES];
    gather(task, row->k, row->d, d, 1, keys);
    transpose(keys, n, d, turned);
    gather(task, row->v, row->w, w, 0, values);
    memset(sum_k, 0, (size_t)(n * d) * 4);
    memset(sum_v, 0, (size_t)(n * w) * 4);
    for (i64 s = 0; s < task->tree[3]; s++) {
        const i64 *segment = row->segments + (task->tree[2] + s) * 4;
        i64 first = task->tree[0] + segment[0];
        Tile tiles[PANEL];
        for (i64 done = 0, count; (count = next_tiles(task, segment, &done, PANEL, tiles)) > 0;) {
            i64 columns = (count + 1) / 2 * 2 * LANES;
            for (i64 j = 0; j < columns / LANES; j++)
                for (i64 l = 0; l < LANES; l++) {
                    i64 c = j * LANES + l;
                    logs[c] = delta[c] = 0.0f;
                    if (j >= count || l >= tiles[j].count) {
                        memset(queries + c * d, 0, (size_t)d * 2);
                        memset(grads + c * w, 0, (size_t)w * 2);
                        continue;
                    }
                    i64 token = first + tiles[j].first + l, place = token * row->heads + tiles[j].head;
                    load_turned(row, row->q + place * row->d, token, row->d, d, queries + c * d);
                    memcpy(grads + c * w, grad + place * row->w, (size_t)row->w * 2);
                    memset(grads + c * w + row->w, 0, (size_t)(w - row->w) * 2);
                    float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
                    for (i64 x = 0; x < row->w; x++) dot += wide(grad[place * row->w + x]) * wide(out[place * row->w + x]);
                    logs[c] = lse[place];
                    delta[c] = dot;
                }
            for (i64 j = 0; j < columns / LANES; j++) {
                across(queries + j * LANES * d, d, queries_across + j * LANES * d);
                across(grads + j * LANES * w, w, grads_across + j * LANES * w);
            }
            down(queries, columns, d, queries_down);
            down(grads, columns, w, grads_down);
            memset(sum_q, 0, (size_t)(d * columns) * 4);
            for (i64 r = 0; r <= segment[3]; r++) {
                i64 start, all = range_of(task, segment, r, tiles + count - 1, &start);
                for (i64 b = 0; b < all; b += KEYS) {
                    i64 size = all - b < KEYS ? all - b : KEYS, rows = up(size), at = start + b;
                    product(kind, scores, columns, keys + at * d, d, queries_across, LANES * d, rows, d, columns / LANES, 1);
                    product(kind, steps, columns, values + at * w, w, grads_across, LANES * w, rows, w, columns / LANES, 1);
                    slopes(row, tiles, count, columns, b, size, r == segment[3], logs, delta, scores, steps, weights, slope,
                           packed);
                    product(kind, sum_v + at * w, w, weights, columns, grads_down, columns * LANES, rows, columns,
                            w / LANES, 0);
                    product(kind, sum_k + at * d, d, slope, columns, queries_down, columns * LANES, rows, columns,
                            d / LANES, 0);
                    product(kind, sum_q, columns, turned + at, n, packed, rows * LANES, d, rows, columns / LANES, 0);
                }
            }
            for (i64 j = 0; j < count; j++) {
                columns_of(sum_q + j * LANES, columns, d, lines);
                for (i64 l = 0; l < tiles[j].count; l++) {
                    i64 token = first + tiles[j].first + l;
                    store_unturned(row, lines + l * d, token, grad_q + (token * row->heads + tiles[j].head) * row->d);
                }
            }
        }
    }
    for (i64 i = 0; i < task->tree[1]; i++) {
        i64 token = task->tree[0] + i, place = token * row->groups + task->group;
        store_unturned(row, sum_k + i * d, token, grad_k + place * row->d);
#pragma omp simd
        for (i64 x = 0; x < row->w; x++) grad_v[place * row->w + x] = narrow(sum_v[i * w + x]);
    }
}

static Row row_of(const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *cosine, const bf16 *sine, const i64 *trees,
                  const i64 *segments, const i64 *ranges, const i64 *sizes, float scale) {
    Row row = {q, k, v, cosine, sine, trees, segments, ranges, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5],
               sizes[6], 0, 0, scale};
    for (i64 t = 0; t < row.num_trees; t++) {
        i64 tokens = up(trees[t * 4 + 1] + BLOCK - 1);
        row.most_tokens = tokens > row.most_tokens ? tokens : row.most_tokens;
        for (i64 s = 0; s < trees[t * 4 + 3]; s++) {
            const i64 *segment = segments + (trees[t * 4 + 2] + s) * 4;
            i64 keys = up(segment[1]);
            for (i64 r = 0; r < segment[3]; r++) keys += up(ranges[(segment[2] + r) * 2 + 1]);
            row.most_keys = keys > row.most_keys ? keys : row.most_keys;
        }
    }
    return row;
}

/* sizes: trees, query heads, key heads, d, w, RoPE dimensions, kind. */
void attention_forward(const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *cosine, const bf16 *sine, const i64 *trees,
                       const i64 *segments, const i64 *ranges, const i64 *sizes, float scale, bf16 *out, float *lse,
                       int threads) {
    Row row = row_of(q, k, v, cosine, sine, trees, segments, ranges, sizes, scale);
    i64 n = row.most_tokens, most = row.most_keys, d = up(row.d), w = up(row.w);
    i64 size = n * (d + 2 * w) * 2 + LANES * d * 6 + most * BLOCK * 6 + w * (BLOCK + LANES) * 4 + 1024;
#pragma omp parallel num_threads(threads)
    {
#if defined(__AMX_BF16__)
        if (row.kind == TILES) tiles_begin();
#endif
        char *memory = space(size);
#pragma omp for schedule(dynamic, 1)
        for (i64 i = 0; i < row.num_trees * row.groups; i++) {
            Task task = task_of(&row, i);
            forward_task(&task, memory, out, lse);
        }
#if defined(__AMX_BF16__)
        if (row.kind == TILES) _tile_release();
#endif
    }
}

void attention_backward(const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *cosine, const bf16 *sine,
                        const i64 *trees, const i64 *segments, const i64 *ranges, const i64 *sizes, float scale,
                        const bf16 *out, const float *lse, const bf16 *grad, bf16 *grad_q, bf16 *grad_k, bf16 *grad_v,
                        int threads) {
    Row row = row_of(q, k, v, cosine, sine, trees, segments, ranges, sizes, scale);
    i64 n = row.most_tokens, d = up(row.d), w = up(row.w), widest = PANEL * LANES;
    i64 size = n * (2 * d + w) * 2 + widest * (3 * d + 3 * w) * 2 + KEYS * widest * 14 + d * (widest + LANES) * 4 +
               n * (d + w) * 4 + 2048;
#pragma omp parallel num_threads(threads)
    {
#if defined(__AMX_BF16__)
        if (row.kind == TILES) tiles_begin();
#endif
        char *memory = space(size);
#pragma omp for schedule(dynamic, 1)
        for (i64 i = 0; i < row.num_trees * row.groups; i++) {
            Task task = task_of(&row, i);
            backward_task(&task, memory, out, lse, grad, grad_q, grad_k, grad_v);
        }
#if defined(__AMX_BF16__)
        if (row.kind == TILES) _tile_release();
#endif
    }
}
