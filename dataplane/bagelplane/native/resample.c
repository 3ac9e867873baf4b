/* Pillow's BICUBIC resize of 8-bit RGB pictures, bit for bit. docs/adr/0009-native-resampler.md says why.
 *
 * An output pixel is a weighted sum of a window of input pixels: along each row ("horizontal"), rounded to 8 bits,
 * then along each column ("vertical"), rounded again; or the other way round, which gives other bits: the caller
 * says which pass is first. Weights are int32 in units of 2^-22 and come from the caller too (axis_weights in
 * __init__.py). One rounding is
 *
 *     clamp((2^21 + sum(pixel * weight)) >> 22, 0, 255)
 *
 * all in int32. `axis_is_sound` refuses weights for which 2^21 + 255 * sum(|weight|) does not fit, so no partial
 * sum, in whatever order, leaves the range. It also refuses windows outside of the input: all that is read and
 * written below follows from what it checked and from the sizes.
 *
 * Only rows that an output row is being made of are kept between the passes, so that they stay in the cache: in a
 * ring of rows of three bytes a pixel, or, with the vertical pass first, a block of rows of four.
 *
 * No Python, no global state, no locks: any number of threads may call it.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_AVX2_CODE 1
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#else
#define HAS_AVX2_CODE 0
#endif

#if defined(__GNUC__)
#define EXPORT __attribute__((visibility("default")))
#else
#define EXPORT
#endif

enum { OK = 0, BAD_ARGUMENTS = 1, NO_MEMORY = 2 };

#define INTERFACE_VERSION 2
#define PRECISION_BITS 22
#define HALF (1 << (PRECISION_BITS - 1))
#define SIDE_LIMIT 65535
#define BLOCK 4   /* rows that go through the horizontal pass together, so that they share loaded weights */
#define STRIP 256 /* bytes of a row that the portable vertical pass sums at a time */

/* How one side is resized: output i is made of inputs start[i] .. start[i] + count[i] - 1, with the weights
 * weights[i * taps] onwards. No weights: this side is as it was, and no pass is made. */
typedef struct {
    const int32_t *start, *count, *weights;
    size_t taps, inputs, outputs;
} axis;

static uint8_t rounded(int32_t sum)
{
    if (sum < 0) /* Shifting a negative number is the compiler's choice, and the result would be clamped to 0. */
        return 0;
    sum >>= PRECISION_BITS;
    return sum > 255 ? 255 : (uint8_t)sum;
}

static int axis_is_sound(const axis *a)
{
    if (a->inputs < 1 || a->inputs > SIDE_LIMIT || a->outputs < 1 || a->outputs > SIDE_LIMIT)
        return 0;
    if (!a->weights)
        return a->inputs == a->outputs;
    if (!a->start || !a->count || a->taps < 1 || a->taps > a->inputs)
        return 0;
    int32_t previous_start = 0, previous_end = 0;
    for (size_t i = 0; i < a->outputs; i++) {
        const int32_t start = a->start[i], count = a->count[i];
        if (start < 0 || count < 1 || (size_t)count > a->taps || (size_t)start + (size_t)count > a->inputs)
            return 0;
        /* Windows only move forward: the ring of rows relies on it. */
        if (start < previous_start || start + count < previous_end)
            return 0;
        previous_start = start;
        previous_end = start + count;
        int64_t sum = 0; /* at most 65,535 times 2^31: fits */
        for (int32_t k = 0; k < count; k++) {
            const int64_t weight = a->weights[i * a->taps + (size_t)k];
            sum += weight < 0 ? -weight : weight;
        }
        if (sum > (INT32_MAX - HALF) / 255)
            return 0;
    }
    return 1;
}

/* The horizontal pass in plain C. Input rows have `inputs` pixels of four bytes, outputs `outputs` of three. */

static void narrow_row(const uint8_t *in, uint8_t *out, const axis *a)
{
    for (size_t x = 0; x < a->outputs; x++) {
        const int32_t *weights = a->weights + x * a->taps;
        const uint8_t *pixel = in + 4 * (size_t)a->start[x];
        int32_t red = HALF, green = HALF, blue = HALF;
        for (int32_t k = 0; k < a->count[x]; k++, pixel += 4) {
            red += pixel[0] * weights[k];
            green += pixel[1] * weights[k];
            blue += pixel[2] * weights[k];
        }
        out[3 * x] = rounded(red);
        out[3 * x + 1] = rounded(green);
        out[3 * x + 2] = rounded(blue);
    }
}

static void pack_row(const uint8_t *in, uint8_t *out, size_t pixels)
{
    for (size_t x = 0; x < pixels; x++) {
        out[3 * x] = in[4 * x];
        out[3 * x + 1] = in[4 * x + 1];
        out[3 * x + 2] = in[4 * x + 2];
    }
}

/* The vertical pass in plain C: `bytes` sums over `count` rows. */
static void join_rows(const uint8_t *const *rows, const int32_t *weights, size_t count, uint8_t *out, size_t bytes)
{
    int32_t sums[STRIP];
    for (size_t at = 0; at < bytes; at += STRIP) {
        const size_t n = bytes - at < STRIP ? bytes - at : STRIP;
        for (size_t i = 0; i < n; i++)
            sums[i] = HALF;
        for (size_t k = 0; k < count; k++) {
            const uint8_t *row = rows[k] + at;
            const int32_t weight = weights[k];
            for (size_t i = 0; i < n; i++)
                sums[i] += row[i] * weight;
        }
        for (size_t i = 0; i < n; i++)
            out[at + i] = rounded(sums[i]);
    }
}

#if HAS_AVX2_CODE
/* AVX2 multiplies and adds pairs of int16 in one instruction. A weight is therefore split: weight = high * 2^15 +
 * low with low in 0 .. 2^15 - 1, and high in -2^8 .. 2^8, since |weight| < 2^23 (axis_is_sound). The sums of lows
 * and of highs are put together at the end. Vector additions and shifts wrap around, so the two may leave int32
 * (they do with hundreds of inputs): what they add up to, modulo 2^32, is the sum that fits. */

static int16_t low_part(int32_t weight) { return (int16_t)(weight & 0x7fff); }
static int16_t high_part(int32_t weight) { return (int16_t)((weight - (weight & 0x7fff)) / 32768); }

AVX2 static inline __m256i put_together(__m256i low, __m256i high)
{
    return _mm256_add_epi32(low, _mm256_slli_epi32(high, 15));
}

/* Weights of the horizontal pass in groups of four inputs, which are the 16 bytes of one load: four lows, four
 * highs. A window is filled up to whole groups with weights of zero; it moves left where that would lead beyond
 * the row, so that exactly the row is read. */
typedef struct {
    int16_t *groups;
    uint32_t *start, *count; /* first input, number of groups */
    size_t group_limit;
} split_axis;

static size_t groups_of(size_t taps) { return (taps + 3) / 4; }

static void free_split(split_axis *split)
{
    free(split->groups);
    free(split->start);
    free(split->count);
}

/* Needs 4 * groups_of(taps) <= inputs. */
static int make_split(split_axis *split, const axis *a)
{
    split->group_limit = groups_of(a->taps);
    split->groups = calloc(a->outputs, split->group_limit * 8 * sizeof *split->groups);
    split->start = calloc(a->outputs, sizeof *split->start);
    split->count = calloc(a->outputs, sizeof *split->count);
    if (!split->groups || !split->start || !split->count) {
        free_split(split);
        return 0;
    }
    for (size_t x = 0; x < a->outputs; x++) {
        const size_t count = (size_t)a->count[x], groups = groups_of(count), last = a->inputs - 4 * groups;
        const size_t start = (size_t)a->start[x] < last ? (size_t)a->start[x] : last;
        const size_t moved = (size_t)a->start[x] - start; /* moved + count <= 4 * groups: both end in the row */
        for (size_t k = 0; k < count; k++) {
            const size_t place = k + moved;
            int16_t *group = split->groups + (x * split->group_limit + place / 4) * 8;
            group[place % 4] = low_part(a->weights[x * a->taps + k]);
            group[place % 4 + 4] = high_part(a->weights[x * a->taps + k]);
        }
        split->start[x] = (uint32_t)start;
        split->count[x] = (uint32_t)groups;
    }
    return 1;
}

/* Four rows at once. Writes one byte more than 3 * outputs: rows of the ring have room for it. */
AVX2 static void narrow_block_avx2(const uint8_t *const in[BLOCK], uint8_t *const out[BLOCK], size_t outputs,
                                   const split_axis *split)
{
    /* Four pixels, in both halves: the lower half takes pixels 0 and 1, the upper 2 and 3, channel by channel,
     * each byte widened to 16 bits. */
    const __m256i in_pairs = _mm256_setr_epi8(0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, 3, -1, 7, -1, /* */
                                              8, -1, 12, -1, 9, -1, 13, -1, 10, -1, 14, -1, 11, -1, 15, -1);
    const __m256i lows = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    const __m256i highs = _mm256_setr_epi32(2, 2, 2, 2, 3, 3, 3, 3);
    const __m256i half = _mm256_set1_epi32(HALF);
    for (size_t x = 0; x < outputs; x++) {
        const int16_t *group = split->groups + x * split->group_limit * 8;
        const size_t end = 4 * (size_t)split->start[x] + 16 * (size_t)split->count[x];
        __m256i low[BLOCK], high[BLOCK];
        for (int r = 0; r < BLOCK; r++)
            low[r] = high[r] = _mm256_setzero_si256();
        for (size_t at = 4 * (size_t)split->start[x]; at < end; at += 16, group += 8) {
            const __m256i weights = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)group));
            const __m256i low_weights = _mm256_permutevar8x32_epi32(weights, lows);
            const __m256i high_weights = _mm256_permutevar8x32_epi32(weights, highs);
            for (int r = 0; r < BLOCK; r++) {
                const __m128i loaded = _mm_loadu_si128((const __m128i *)(in[r] + at));
                const __m256i pixels = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(loaded), in_pairs);
                low[r] = _mm256_add_epi32(low[r], _mm256_madd_epi16(pixels, low_weights));
                high[r] = _mm256_add_epi32(high[r], _mm256_madd_epi16(pixels, high_weights));
            }
        }
        /* The two halves of a row are added for two rows at once: rows 0 and 1 in sums[0], 2 and 3 in sums[1]. */
        __m256i sums[2];
        for (int q = 0; q < 2; q++) {
            const __m256i a = put_together(low[2 * q], high[2 * q]), b = put_together(low[2 * q + 1], high[2 * q + 1]);
            const __m256i firsts = _mm256_permute2x128_si256(a, b, 0x20), seconds = _mm256_permute2x128_si256(a, b, 0x31);
            const __m256i sum = _mm256_add_epi32(firsts, seconds);
            sums[q] = _mm256_srai_epi32(_mm256_add_epi32(sum, half), PRECISION_BITS);
        }
        /* Packing saturates, first to int16, then to uint8: the clamp. It stays in the halves: rows 0 and 2, 1 and 3. */
        const __m256i words16 = _mm256_packs_epi32(sums[0], sums[1]);
        const __m256i pixels = _mm256_packus_epi16(words16, words16);
        const int32_t words[BLOCK] = {_mm256_extract_epi32(pixels, 0), _mm256_extract_epi32(pixels, 4),
                                      _mm256_extract_epi32(pixels, 1), _mm256_extract_epi32(pixels, 5)};
        for (int r = 0; r < BLOCK; r++)
            memcpy(out[r] + 3 * x, &words[r], 4); /* the fourth byte is the next pixel's first, written next */
    }
}

/* Writes up to four bytes more than 3 * pixels: rows of the ring have room for them. */
AVX2 static void pack_row_avx2(const uint8_t *in, uint8_t *out, size_t pixels)
{
    const __m128i three = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    size_t x = 0;
    for (; x + 4 <= pixels; x += 4) {
        const __m128i four = _mm_loadu_si128((const __m128i *)(in + 4 * x));
        _mm_storeu_si128((__m128i *)(out + 3 * x), _mm_shuffle_epi8(four, three));
    }
    pack_row(in + 4 * x, out + 3 * x, pixels - x);
}

/* Like join_rows, for the first bytes / 32 * 32 bytes. There is an even number of rows: `pairs` twice. lows[j] and
 * highs[j] hold the weights of rows 2j and 2j + 1. */
AVX2 static void join_rows_avx2(const uint8_t *const *rows, const int32_t *lows, const int32_t *highs, size_t pairs,
                                uint8_t *out, size_t bytes)
{
    const __m256i zero = _mm256_setzero_si256(), half = _mm256_set1_epi32(HALF);
    for (size_t at = 0; at + 32 <= bytes; at += 32) {
        __m256i low[4], high[4];
        for (int q = 0; q < 4; q++) {
            low[q] = half;
            high[q] = zero;
        }
        for (size_t j = 0; j < pairs; j++) {
            const __m256i a = _mm256_loadu_si256((const __m256i *)(rows[2 * j] + at));
            const __m256i b = _mm256_loadu_si256((const __m256i *)(rows[2 * j + 1] + at));
            const __m256i low_weights = _mm256_set1_epi32(lows[j]), high_weights = _mm256_set1_epi32(highs[j]);
            const __m256i first = _mm256_unpacklo_epi8(a, b), second = _mm256_unpackhi_epi8(a, b);
            const __m256i pixels[4] = {_mm256_unpacklo_epi8(first, zero), _mm256_unpackhi_epi8(first, zero),
                                       _mm256_unpacklo_epi8(second, zero), _mm256_unpackhi_epi8(second, zero)};
            for (int q = 0; q < 4; q++) {
                low[q] = _mm256_add_epi32(low[q], _mm256_madd_epi16(pixels[q], low_weights));
                high[q] = _mm256_add_epi32(high[q], _mm256_madd_epi16(pixels[q], high_weights));
            }
        }
        __m256i sums[4];
        for (int q = 0; q < 4; q++)
            sums[q] = _mm256_srai_epi32(put_together(low[q], high[q]), PRECISION_BITS);
        /* Packing undoes the unpacking, half by half, and saturates: the clamp. */
        const __m256i done =
            _mm256_packus_epi16(_mm256_packs_epi32(sums[0], sums[1]), _mm256_packs_epi32(sums[2], sums[3]));
        _mm256_storeu_si256((__m256i *)(out + at), done);
    }
}

static int32_t pair_of(int16_t first, int16_t second)
{
    const int16_t both[2] = {first, second};
    int32_t pair;
    memcpy(&pair, both, sizeof pair);
    return pair;
}
#endif

/* What one call works with. `kept` are the rows between the passes or before they are copied out, with room for
 * four bytes more than their pixels. */
typedef struct {
    axis horizontal, vertical;
    const uint8_t *in;
    uint8_t *out, *kept;
    size_t kept_rows, kept_stride;
    uint8_t *joined;      /* BLOCK rows of input width, with the vertical pass first */
    const uint8_t **rows; /* of one output row's window, and one place more */
    int32_t *lows, *highs;
    int use_avx2, use_avx2_horizontally;
#if HAS_AVX2_CODE
    split_axis split;
#endif
} job;

/* The horizontal pass for BLOCK rows at once. */
static void narrow_rows(const job *j, const uint8_t *const in[BLOCK], uint8_t *const out[BLOCK])
{
    const size_t outputs = j->horizontal.outputs;
#if HAS_AVX2_CODE
    if (j->use_avx2_horizontally) {
        narrow_block_avx2(in, out, outputs, &j->split);
        return;
    }
#endif
    for (size_t r = 0; r < BLOCK; r++) {
        if (j->horizontal.weights)
            narrow_row(in[r], out[r], &j->horizontal);
#if HAS_AVX2_CODE
        else if (j->use_avx2)
            pack_row_avx2(in[r], out[r], outputs);
#endif
        else
            pack_row(in[r], out[r], outputs);
    }
}

/* The vertical pass for output row y. The rows of its window are in j->rows, of `bytes` bytes each. */
static void join_window(const job *j, size_t y, uint8_t *out, size_t bytes)
{
    const size_t count = (size_t)j->vertical.count[y];
    const int32_t *weights = j->vertical.weights + y * j->vertical.taps;
    size_t done = 0;
#if HAS_AVX2_CODE
    if (j->use_avx2) {
        const size_t pairs = (count + 1) / 2;
        j->rows[count] = j->rows[count - 1]; /* with a weight of zero, should the number be odd */
        for (size_t i = 0; i < pairs; i++) {
            const int32_t first = weights[2 * i], second = 2 * i + 1 < count ? weights[2 * i + 1] : 0;
            j->lows[i] = pair_of(low_part(first), low_part(second));
            j->highs[i] = pair_of(high_part(first), high_part(second));
        }
        join_rows_avx2(j->rows, j->lows, j->highs, pairs, out, bytes);
        done = bytes / 32 * 32;
        for (size_t k = 0; k < count; k++)
            j->rows[k] += done;
    }
#endif
    join_rows(j->rows, weights, count, out + done, bytes - done);
}

/* Input row r, after the horizontal pass, is kept at place r % kept_rows. */
static void run_horizontal_first(const job *j)
{
    const size_t bytes = 3 * j->horizontal.outputs, last = j->vertical.inputs - 1;
    size_t next = j->vertical.weights ? (size_t)j->vertical.start[0] : 0; /* first row that has not been narrowed */
    for (size_t y = 0; y < j->vertical.outputs; y++) {
        const size_t start = j->vertical.weights ? (size_t)j->vertical.start[y] : y;
        const size_t count = j->vertical.weights ? (size_t)j->vertical.count[y] : 1;
        /* A block is begun when its first row is needed, so it ends at start + count + BLOCK - 1 at most. There are
         * taps + BLOCK places, so nothing from `start` on is overwritten. In a block that goes beyond the last row
         * that one takes part again, and the result goes to places that nothing needs. */
        for (; next < start + count; next += BLOCK) {
            const uint8_t *in[BLOCK];
            uint8_t *kept[BLOCK];
            for (size_t r = 0; r < BLOCK; r++) {
                in[r] = j->in + 4 * j->horizontal.inputs * (next + r < last ? next + r : last);
                kept[r] = j->kept + j->kept_stride * ((next + r) % j->kept_rows);
            }
            narrow_rows(j, in, kept);
        }
        for (size_t k = 0; k < count; k++)
            j->rows[k] = j->kept + j->kept_stride * ((start + k) % j->kept_rows);
        if (j->vertical.weights)
            join_window(j, y, j->out + bytes * y, bytes);
        else
            memcpy(j->out + bytes * y, j->rows[0], bytes);
    }
}

/* Both axes have weights. */
static void run_vertical_first(const job *j)
{
    const size_t bytes = 3 * j->horizontal.outputs, in_bytes = 4 * j->horizontal.inputs;
    const uint8_t *in[BLOCK];
    uint8_t *kept[BLOCK];
    for (size_t r = 0; r < BLOCK; r++) {
        in[r] = j->joined + in_bytes * r;
        kept[r] = j->kept + j->kept_stride * r;
    }
    for (size_t y = 0; y < j->vertical.outputs; y += BLOCK) {
        const size_t rest = j->vertical.outputs - y, rows = rest < BLOCK ? rest : BLOCK;
        for (size_t r = 0; r < rows; r++) {
            for (size_t k = 0; k < (size_t)j->vertical.count[y + r]; k++)
                j->rows[k] = j->in + in_bytes * ((size_t)j->vertical.start[y + r] + k);
            join_window(j, y + r, j->joined + in_bytes * r, in_bytes);
        }
        narrow_rows(j, in, kept); /* of a last block all rows, of which some are left over and not used */
        for (size_t r = 0; r < rows; r++)
            memcpy(j->out + bytes * (y + r), kept[r], bytes);
    }
}

/* 1 if this machine has what the AVX2 path needs. */
EXPORT int bagelplane_has_avx2(void)
{
#if HAS_AVX2_CODE
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") != 0;
#else
    return 0;
#endif
}

EXPORT int bagelplane_interface_version(void) { return INTERFACE_VERSION; }

/* Resizes `in`, in_height rows of in_width pixels of four bytes (the fourth is not looked at), to `out`,
 * out_height rows of out_width pixels of three bytes, both without gaps. An axis without weights (NULL) is kept.
 * use_avx2 = 0 asks for plain C. Returns 0, or 1 if the arguments do not fit together (nothing was written), or 2
 * if there is no memory. */
EXPORT int bagelplane_resample(const uint8_t *in, int64_t in_width, int64_t in_height, uint8_t *out,
                               int64_t out_width, int64_t out_height, /* */
                               const int32_t *x_start, const int32_t *x_count, const int32_t *x_weights,
                               int64_t x_taps, /* */
                               const int32_t *y_start, const int32_t *y_count, const int32_t *y_weights,
                               int64_t y_taps, /* */
                               int vertical_first, int use_avx2)
{
    if (!in || !out || in_width < 1 || in_height < 1 || out_width < 1 || out_height < 1 || x_taps < 0 || y_taps < 0)
        return BAD_ARGUMENTS;
    if (in_width > SIDE_LIMIT || in_height > SIDE_LIMIT || out_width > SIDE_LIMIT || out_height > SIDE_LIMIT)
        return BAD_ARGUMENTS;
    job j = {
        .horizontal = {x_start, x_count, x_weights, (size_t)x_taps, (size_t)in_width, (size_t)out_width},
        .vertical = {y_start, y_count, y_weights, (size_t)y_taps, (size_t)in_height, (size_t)out_height},
        .in = in,
        .out = out,
        .use_avx2 = use_avx2 && bagelplane_has_avx2(),
    };
    if (!axis_is_sound(&j.horizontal) || !axis_is_sound(&j.vertical))
        return BAD_ARGUMENTS;
    if (!x_weights || !y_weights)
        vertical_first = 0; /* With one pass alone there is no order. */

    /* calloc refuses products that do not fit. Sizes here are at most 4 * 65,535, or the number of taps, which is
     * at most the number of rows. */
    const size_t taps = j.vertical.weights ? j.vertical.taps : 1;
    j.kept_rows = vertical_first ? BLOCK : taps + BLOCK;
    j.kept_stride = 3 * j.horizontal.outputs + 4;
    j.kept = calloc(j.kept_rows, j.kept_stride);
    j.joined = calloc(BLOCK, vertical_first ? 4 * j.horizontal.inputs : 1);
    j.rows = calloc(taps + 1, sizeof *j.rows);
    j.lows = calloc(taps + 1, sizeof *j.lows);
    j.highs = calloc(taps + 1, sizeof *j.highs);
    int result = j.kept && j.joined && j.rows && j.lows && j.highs ? OK : NO_MEMORY;
#if HAS_AVX2_CODE
    if (result == OK && j.use_avx2 && j.horizontal.weights &&
        4 * groups_of(j.horizontal.taps) <= j.horizontal.inputs) {
        j.use_avx2_horizontally = make_split(&j.split, &j.horizontal);
        if (!j.use_avx2_horizontally)
            result = NO_MEMORY;
    }
#endif
    if (result == OK) {
        if (vertical_first)
            run_vertical_first(&j);
        else
            run_horizontal_first(&j);
    }
#if HAS_AVX2_CODE
    if (j.use_avx2_horizontally)
        free_split(&j.split);
#endif
    free(j.kept);
    free(j.joined);
    free(j.rows);
    free(j.lows);
    free(j.highs);
    return result;
}
