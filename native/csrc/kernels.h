// The arithmetic of pool and spread for one sample, in vectors of VECTOR_BYTES.
//
// Included once for each instruction set, inside a namespace of its own: see library.cpp. Tensors come in two layouts:
// "rows", where the channels of a position lie side by side, and "planes", where the positions of a channel do.

#define INLINE inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef int IntVec __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));

constexpr long LANES = VECTOR_BYTES / 4;
// A tile of products lives in registers: so many rows of two vectors take half of them.
constexpr int TILE_ROWS = VECTOR_BYTES == 64 ? 8 : 4, TILE_VECTORS = 2;
// Positions whose coefficients are computed, normed and used before the next ones.
constexpr long BLOCK_ROWS = 16, BLOCK_POSITIONS = TILE_VECTORS * LANES;

INLINE Vec splat(float value) { return Vec{} + value; }
INLINE Vec load(const float* from) { return *reinterpret_cast<const Vec*>(from); }
INLINE void store(float* to, Vec value) { *reinterpret_cast<Vec*>(to) = value; }
INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }
INLINE long padded(long count) { return (count + LANES - 1) / LANES * LANES; }

// The lanes of a vector made one, half onto half.
template <class Merge>
INLINE float merged(Vec value, Merge merge) {
  float lanes[LANES];
  store(lanes, value);
#pragma GCC unroll 4
  for (long half = LANES / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (long lane = 0; lane < half; ++lane) lanes[lane] = merge(lanes[lane], lanes[lane + half]);
  return lanes[0];
}

INLINE float sum_of(Vec value) {
  return merged(value, [](float a, float b) { return a + b; });
}
INLINE float largest_of(Vec value) {
  return merged(value, [](float a, float b) { return a > b ? a : b; });
}

// e^x for x ≤ 0 to 1e-7 of itself; 0 below −80, since denormal numbers cost more than they are worth.
// e^x = 2^n·e^r with n the integer nearest to x/ln 2; adding `magic` rounds, and leaves n in the last bits.
INLINE Vec exponential(Vec x) {
  const Vec magic = splat(12582912.0f);
  const Vec shifted = x * splat(1.44269504f) + magic, n = shifted - magic;
  // ln 2 in two parts, the first of which has few enough bits for n times it to be exact.
  const Vec r = x - n * splat(0.693359375f) + n * splat(2.12194440e-4f);
  Vec p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * r * r + r + splat(1.0f);
  const Vec power = (Vec)(((IntVec)shifted - (0x4B400000 - 127)) << 23);
  return x < splat(-80.0f) ? Vec{} : p * power;
}

// A matrix that is read number by number: rows and columns may be any distance apart.
struct Matrix {
  const float* at;
  long row, column;
};

// One tile of product().
template <int ROWS, int VECTORS>
INLINE void tile(Matrix a, const float* b, long b_row, const float* added, float* c, long c_row, long inner) {
  Vec sums[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) sums[i][v] = added ? load(added + i * c_row + v * LANES) : Vec{};
  for (long k = 0; k < inner; ++k) {
    Vec row[VECTORS];
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) row[v] = load(b + k * b_row + v * LANES);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      const Vec factor = splat(a.at[i * a.row + k * a.column]);
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v) sums[i][v] += factor * row[v];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) store(c + i * c_row + v * LANES, sums[i][v]);
}

template <int ROWS, int VECTORS>
INLINE void tiles(long& i, Matrix a, const float* b, long b_row, const float* added, float* c, long c_row, long rows,
                  long inner) {
  for (; i + ROWS <= rows; i += ROWS)
    tile<ROWS, VECTORS>({a.at + i * a.row, a.row, a.column}, b, b_row, added ? added + i * c_row : nullptr,
                        c + i * c_row, c_row, inner);
}

template <int VECTORS>
inline void panel(Matrix a, const float* b, long b_row, const float* added, float* c, long c_row, long rows,
                  long inner) {
  long i = 0;
  tiles<TILE_ROWS, VECTORS>(i, a, b, b_row, added, c, c_row, rows, inner);
  tiles<TILE_ROWS / 2, VECTORS>(i, a, b, b_row, added, c, c_row, rows, inner);
  tiles<1, VECTORS>(i, a, b, b_row, added, c, c_row, rows, inner);
}

// c (rows, columns) = a (rows, inner) · b (inner, columns), plus `added` where that is given: as far apart as c's rows.
// `columns` is a multiple of LANES.
inline void product(Matrix a, const float* b, long b_row, const float* added, float* c, long c_row, long rows,
                    long columns, long inner) {
  long j = 0;
  for (; j + TILE_VECTORS * LANES <= columns; j += TILE_VECTORS * LANES)
    panel<TILE_VECTORS>(a, b + j, b_row, added ? added + j : nullptr, c + j, c_row, rows, inner);
  for (; j < columns; j += LANES)
    panel<1>(a, b + j, b_row, added ? added + j : nullptr, c + j, c_row, rows, inner);
}

// The softmax of each of `rows` rows of `count` numbers, padded to whole vectors; the padding becomes 0.
inline void softmax_rows(float* matrix, long rows, long count) {
  const long width = padded(count);
  float past[LANES];
  for (long lane = 0; lane < LANES; ++lane) past[lane] = width - LANES + lane < count ? 0.0f : -1e30f;
  const Vec padding = load(past);
  for (float* row = matrix; row < matrix + rows * width; row += width) {
    Vec last = load(row + width - LANES) + padding, top = last;
    for (long j = 0; j < width - LANES; j += LANES) top = larger(top, load(row + j));
    top = splat(largest_of(top));
    last = exponential(last - top);
    Vec total = last;
    for (long j = 0; j < width - LANES; j += LANES) {
      const Vec weight = exponential(load(row + j) - top);
      store(row + j, weight);
      total += weight;
    }
    const Vec factor = splat(1.0f / sum_of(total));
    for (long j = 0; j < width - LANES; j += LANES) store(row + j, load(row + j) * factor);
    store(row + width - LANES, last * factor);
  }
}

// The same along columns, of which there are BLOCK_POSITIONS.
inline void softmax_columns(float* matrix, long count) {
  for (long j = 0; j < BLOCK_POSITIONS; j += LANES) {
    Vec top = load(matrix + j), total{};
    for (long i = 1; i < count; ++i) top = larger(top, load(matrix + i * BLOCK_POSITIONS + j));
    for (long i = 0; i < count; ++i) {
      float* at = matrix + i * BLOCK_POSITIONS + j;
      const Vec weight = exponential(load(at) - top);
      store(at, weight);
      total += weight;
    }
    const Vec factor = splat(1.0f) / total;
    for (long i = 0; i < count; ++i) {
      float* at = matrix + i * BLOCK_POSITIONS + j;
      store(at, load(at) * factor);
    }
  }
}

// (count, channels) vectors times `scale` as (channels, padded count).
inline void transpose(const float* from, long count, long channels, float scale, float* to) {
  const long width = padded(count);
  for (long k = 0; k < channels; ++k) {
    for (long j = 0; j < count; ++j) to[k * width + j] = from[j * channels + k] * scale;
    for (long j = count; j < width; ++j) to[k * width + j] = 0;
  }
}

// (count, channels) vectors as (count, padded channels).
inline void pad(const float* from, long count, long channels, float* to) {
  const long width = padded(channels);
  for (long j = 0; j < count; ++j) {
    for (long k = 0; k < channels; ++k) to[j * width + k] = from[j * channels + k];
    for (long k = channels; k < width; ++k) to[j * width + k] = 0;
  }
}

// y (rows, out) = a (rows, inner) · b (inner, at least padded out), plus `added`, which may be y; with `room` for
// `rows` vectors.
inline void product_of_any_width(Matrix a, const float* b, long b_row, const float* added, float* y, long rows,
                                 long out, long inner, float* room) {
  const long whole = out / LANES * LANES;
  product(a, b, b_row, added, y, out, rows, whole, inner);
  if (whole == out) return;
  product(a, b + whole, b_row, nullptr, room, LANES, rows, LANES, inner);
  for (long i = 0; i < rows; ++i)
    for (long k = whole; k < out; ++k)
      y[i * out + k] = room[i * LANES + k - whole] + (added ? added[i * out + k] : 0.0f);
}

inline long room_of_rows(long count) { return BLOCK_ROWS * (padded(count) + LANES); }

// y (rows, out) = the attention of query (rows, channels), plus `added`, which may be y, for at most BLOCK_ROWS rows.
// Keys are (channels, padded count), values (count, padded out).
inline void attend_rows(const float* query, const float* keys, const float* values, const float* added, float* y,
                        long rows, long channels, long count, long out, float* room) {
  const long width = padded(count);
  product({query, channels, 1}, keys, width, nullptr, room, width, rows, width, channels);
  softmax_rows(room, rows, count);
  product_of_any_width({room, width, 1}, values, padded(out), added, y, rows, out, count, room + BLOCK_ROWS * width);
}

inline long room_of_planes(long channels, long count, long out) { return BLOCK_POSITIONS * (channels + count + out); }

// The same for planes: `positions` from `from` on, at most BLOCK_POSITIONS, of query (channels, size) and y (out, size).
// Keys are (count, channels), values (count, out).
inline void attend_planes(const float* query, const float* keys, const float* values, const float* added, float* y,
                          long from, long positions, long size, long channels, long count, long out, float* room) {
  float *logits = room, *some = logits + count * BLOCK_POSITIONS, *rest = some + channels * BLOCK_POSITIONS;
  const Matrix own_keys{keys, channels, 1}, columns{values, 1, out};
  if (positions == BLOCK_POSITIONS) {
    product(own_keys, query + from, size, nullptr, logits, BLOCK_POSITIONS, count, BLOCK_POSITIONS, channels);
    softmax_columns(logits, count);
    product(columns, logits, BLOCK_POSITIONS, added ? added + from : nullptr, y + from, size, out, BLOCK_POSITIONS,
            count);
    return;
  }
  for (long k = 0; k < channels; ++k)
    for (long j = 0; j < BLOCK_POSITIONS; ++j)
      some[k * BLOCK_POSITIONS + j] = j < positions ? query[k * size + from + j] : 0.0f;
  product(own_keys, some, BLOCK_POSITIONS, nullptr, logits, BLOCK_POSITIONS, count, BLOCK_POSITIONS, channels);
  softmax_columns(logits, count);
  product(columns, logits, BLOCK_POSITIONS, nullptr, rest, BLOCK_POSITIONS, out, BLOCK_POSITIONS, count);
  for (long k = 0; k < out; ++k)
    for (long j = 0; j < positions; ++j) {
      const long at = k * size + from + j;
      y[at] = rest[k * BLOCK_POSITIONS + j] + (added ? added[at] : 0.0f);
    }
}

// Averages (width + height, channels) of channels `from` to `to`: those over the height first.
inline void pool_rows(const float* x, long height, long width, long channels, long from, long to, float* averages) {
  float* lines = averages + width * channels;
  for (long j = 0; j < width; ++j)
    for (long k = from; k < to; ++k) averages[j * channels + k] = 0;
  for (long i = 0; i < height; ++i) {
    float* line = lines + i * channels;
    for (long k = from; k < to; ++k) line[k] = 0;
    for (long j = 0; j < width; ++j) {
      const float* at = x + (i * width + j) * channels;
      float* column = averages + j * channels;
#pragma GCC ivdep
      for (long k = from; k < to; ++k) {
        column[k] += at[k];
        line[k] += at[k];
      }
    }
    for (long k = from; k < to; ++k) line[k] *= 1.0f / width;
  }
  for (long j = 0; j < width; ++j)
    for (long k = from; k < to; ++k) averages[j * channels + k] *= 1.0f / height;
}

// The same for planes, with room for `width` numbers.
inline void pool_planes(const float* x, long height, long width, long channels, long from, long to, float* averages,
                        float* columns) {
  float* lines = averages + width * channels;
  const long whole = width / LANES * LANES;
  for (long k = from; k < to; ++k) {
    for (long j = 0; j < width; ++j) columns[j] = 0;
    for (long i = 0; i < height; ++i) {
      const float* line = x + (k * height + i) * width;
      Vec total{};
      for (long j = 0; j < whole; j += LANES) {
        const Vec value = load(line + j);
        store(columns + j, load(columns + j) + value);
        total += value;
      }
      float sum = sum_of(total);
      for (long j = whole; j < width; ++j) {
        columns[j] += line[j];
        sum += line[j];
      }
      lines[i * channels + k] = sum / width;
    }
    for (long j = 0; j < width; ++j) averages[j * channels + k] = columns[j] / height;
  }
}

// What counting the tokens' mean once takes off those of the rows: half of both axes' means, for each channel.
inline void mean_to_drop(const float* tokens, long height, long width, long channels, bool mean_once, float* drop) {
  for (long k = 0; k < channels; ++k) drop[k] = 0;
  for (long j = 0; mean_once && j < width + height; ++j) {
    const float share = 0.5f / (j < width ? width : height);
    for (long k = 0; k < channels; ++k) drop[k] += share * tokens[j * channels + k];
  }
}

// y (height, width, channels): one line of the outer sum of tokens (width + height, channels), less `drop`, plus
// `added`. `room` holds as many numbers as there are channels.
inline void outer_rows(const float* tokens, const float* drop, const float* added, float* y, long, long width,
                       long channels, long line, float* room) {
  for (long k = 0; k < channels; ++k) room[k] = tokens[(width + line) * channels + k] - drop[k];
  for (long j = 0; j < width; ++j) {
    const long at = (line * width + j) * channels;
    for (long k = 0; k < channels; ++k) y[at + k] = (added ? added[at + k] : 0.0f) + tokens[j * channels + k] + room[k];
  }
}

// The same for planes: one channel, with room for `width` numbers.
inline void outer_planes(const float* tokens, const float* drop, const float* added, float* y, long height, long width,
                         long channels, long channel, float* room) {
  for (long j = 0; j < width; ++j) room[j] = tokens[j * channels + channel] - drop[channel];
  for (long i = 0; i < height; ++i) {
    const float line = tokens[(width + i) * channels + channel];
    const long at = (channel * height + i) * width;
    for (long j = 0; j < width; ++j) y[at + j] = (added ? added[at + j] : 0.0f) + room[j] + line;
  }
}

#undef INLINE
