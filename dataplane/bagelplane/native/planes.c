/* 8-bit RGB pixels to planes of floats, each value by a table. docs/adr/0010-where-the-time-goes.md says why.
 *
 * The tables come from the caller, who computes them as it would compute every pixel: 256 floats for each of red,
 * green and blue. There is no arithmetic here, so the bits are the caller's, whatever the compiler or the machine.
 *
 * No Python, no global state, no locks: any number of threads may call it.
 */
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define EXPORT __attribute__((visibility("default")))
#else
#define EXPORT
#endif

enum { OK = 0, BAD_ARGUMENTS = 1 };

#define SIDE_LIMIT 65535
#define VALUES 256

/* Reads `in`, height rows of width pixels of three bytes without gaps. Writes out[c * plane + y * row + x] for each
 * colour c: strides are in floats, rows do not overlap, and neither do planes (row >= width, plane >= height * row is
 * asked for, so that nothing is written twice). Returns 0, or 1 if the arguments do not fit together (nothing was
 * written). */
EXPORT int bagelplane_to_planes(const uint8_t *in, int64_t width, int64_t height, float *out, int64_t plane,
                                int64_t row, const float *tables)
{
    if (!in || !out || !tables || width < 1 || height < 1 || width > SIDE_LIMIT || height > SIDE_LIMIT)
        return BAD_ARGUMENTS;
    /* height * row fits: at most 65,535 times what plane / height allows. */
    if (row < width || plane / height < row)
        return BAD_ARGUMENTS;
    const float *reds = tables, *greens = tables + VALUES, *blues = tables + (ptrdiff_t)2 * VALUES;
    for (int64_t y = 0; y < height; y++) {
        const uint8_t *pixel = in + 3 * width * y;
        float *red = out + row * y, *green = red + plane, *blue = green + plane;
        for (int64_t x = 0; x < width; x++, pixel += 3) {
            red[x] = reds[pixel[0]];
            green[x] = greens[pixel[1]];
            blue[x] = blues[pixel[2]];
        }
    }
    return OK;
}
