// Pool and spread for a batch, shared out among PyTorch's threads. Included after kernels.h, once for each instruction
// set.

// Memory of the calling thread, kept from call to call: two pieces, for who calls and who is called.
enum { OUTER, INNER };
template <int PIECE>
inline float* room_for(long count) {
  thread_local std::vector<float> memory;
  if (static_cast<long>(memory.size()) < count) memory.resize(count);
  return memory.data();
}

// Run `each(sample, part)` for all parts of all samples, each of which takes so many multiply-adds. A thread has at
// least 2^19 of them to do: to wake one takes nearly as long.
template <class Each>
inline void for_all(long samples, long parts, long multiply_adds, Each each) {
  const long items = samples * parts, least = (1L << 19) / std::max(multiply_adds, 1L);
  parallel_for(0, items, std::max(least, 1L), [=](int64_t first, int64_t last) {
    for (long item = first; item < last; ++item) each(item / parts, item % parts);
  });
}

inline long parts_of(long count, long each) { return (count + each - 1) / each; }

// What is bound by memory takes as long for a number as so many multiply-adds.
constexpr long A_NUMBER = 8, CHANNELS_AT_ONCE = 64;

inline void pool(const float* x, float* averages, Shape shape) {
  const long size = shape.height * shape.width, at_once = std::min(shape.channels, CHANNELS_AT_ONCE);
  const long parts = parts_of(shape.channels, at_once);
  for_all(shape.batch, parts, size * at_once * A_NUMBER, [=](long sample, long part) {
    const long from = part * at_once, to = std::min(from + at_once, shape.channels);
    const float* at = x + sample * shape.channels * size;
    float* found = averages + sample * shape.channels * (shape.width + shape.height);
    if (shape.rows)
      pool_rows(at, shape.height, shape.width, shape.channels, from, to, found);
    else
      pool_planes(at, shape.height, shape.width, shape.channels, from, to, found, room_for<INNER>(shape.width));
  });
}

// y = the attention of queries of `shape` to `count` keys times `scale` and their values of `out` channels, plus
// `added`.
inline void attend(const float* query, const float* keys, const float* values, const float* added, float* y,
                   Shape shape, long count, long out, float scale) {
  const long channels = shape.channels, size = shape.height * shape.width;
  const long own_keys = channels * (shape.rows ? padded(count) : count), own_values = count * padded(out);
  float* packed = room_for<OUTER>(shape.batch * (own_keys + own_values));
  float* packed_values = packed + shape.batch * own_keys;
  for (long sample = 0; sample < shape.batch; ++sample) {
    const float* from = keys + sample * count * channels;
    float* to = packed + sample * own_keys;
    if (shape.rows) {
      transpose(from, count, channels, scale, to);
      pad(values + sample * count * out, count, out, packed_values + sample * own_values);
    } else {
      for (long k = 0; k < count * channels; ++k) to[k] = from[k] * scale;
    }
  }
  const long block = shape.rows ? BLOCK_ROWS : BLOCK_POSITIONS;
  for_all(shape.batch, parts_of(size, block), block * count * (channels + out), [=](long sample, long part) {
    const long from = part * block, positions = std::min(block, size - from), first = sample * out * size;
    const float *own_query = query + sample * channels * size, *at = packed + sample * own_keys;
    if (shape.rows) {
      const long here = first + from * out;
      attend_rows(own_query + from * channels, at, packed_values + sample * own_values, added ? added + here : nullptr,
                  y + here, positions, channels, count, out, room_for<INNER>(room_of_rows(count)));
    } else {
      attend_planes(own_query, at, values + sample * count * out, added ? added + first : nullptr, y + first, from,
                    positions, size, channels, count, out, room_for<INNER>(room_of_planes(channels, count, out)));
    }
  });
}

// y of `shape` = the outer sum of tokens (batch, width + height, channels), with their mean counted once or not, plus
// `added`.
inline void outer(const float* tokens, const float* added, float* y, Shape shape, bool mean_once) {
  const long channels = shape.channels, size = shape.height * shape.width, count = shape.width + shape.height;
  float* drops = room_for<OUTER>(shape.batch * channels);
  for (long sample = 0; sample < shape.batch; ++sample)
    mean_to_drop(tokens + sample * count * channels, shape.height, shape.width, channels, mean_once,
                 drops + sample * channels);
  const auto sum = shape.rows ? outer_rows : outer_planes;
  const long parts = shape.rows ? shape.height : channels;
  for_all(shape.batch, parts, size * channels / parts * A_NUMBER, [=](long sample, long part) {
    const long first = sample * channels * size;
    sum(tokens + sample * count * channels, drops + sample * channels, added ? added + first : nullptr, y + first,
        shape.height, shape.width, channels, part, room_for<INNER>(std::max(channels, shape.width)));
  });
}

// y = y + the attention of one sample x to its own averages + x · direct, where that is given. The values are the
// averages times `weight`. All in rows; `weight` and `direct` are (channels, padded out).
inline void fused_sample(const float* x, const float* weight, const float* direct, float* y, Shape shape, long out,
                         float scale, bool qkv, bool mean_once) {
  const long channels = shape.channels, size = shape.height * shape.width, count = shape.width + shape.height;
  const long width = padded(count), padded_out = padded(out);
  float* averages = room_for<OUTER>(count * channels + channels * width + count * (padded_out + out) + out);
  float *keys = averages + count * channels, *values = keys + channels * width, *tokens = values + count * padded_out;
  float* drop = tokens + count * out;
  pool_rows(x, shape.height, shape.width, channels, 0, channels, averages);
  transpose(averages, count, channels, scale, keys);
  product({averages, channels, 1}, weight, padded_out, nullptr, values, padded_out, count, padded_out, channels);
  if (qkv) {
    float* room = room_for<INNER>(room_of_rows(count));
    for (long i = 0; i < count; i += BLOCK_ROWS)
      attend_rows(averages + i * channels, keys, values, nullptr, tokens + i * out, std::min(BLOCK_ROWS, count - i),
                  channels, count, out, room);
    mean_to_drop(tokens, shape.height, shape.width, out, mean_once, drop);
  }
  const long multiply_adds = BLOCK_ROWS * (qkv ? A_NUMBER * out : count * (channels + out)) +
                             (direct ? BLOCK_ROWS * channels * out : 0);
  for_all(1, parts_of(size, BLOCK_ROWS), multiply_adds, [=](long, long part) {
    const long from = part * BLOCK_ROWS, rows = std::min(BLOCK_ROWS, size - from);
    float *room = room_for<INNER>(room_of_rows(count)), *here = y + from * out;
    const float* query = x + from * channels;
    if (direct)
      product_of_any_width({query, channels, 1}, direct, padded_out, here, here, rows, out, channels, room);
    if (!qkv) {
      attend_rows(query, keys, values, here, here, rows, channels, count, out, room);
      return;
    }
    for (long i = 0; i < rows; ++i) {
      const float* column = tokens + (from + i) % shape.width * out;
      const float* line = tokens + (shape.width + (from + i) / shape.width) * out;
      for (long k = 0; k < out; ++k) here[i * out + k] += column[k] + line[k] - drop[k];
    }
  });
}

inline void fused(const float* x, const float* weight, const float* direct, float* y, Shape shape, long out, float scale,
                  bool qkv, bool mean_once) {
  const long size = shape.height * shape.width, matrix = shape.channels * padded(out);
  std::vector<float> padded_matrices;
  if (padded(out) != out) {
    padded_matrices.resize(2 * matrix);
    pad(weight, shape.channels, out, padded_matrices.data());
    if (direct) pad(direct, shape.channels, out, padded_matrices.data() + matrix);
    weight = padded_matrices.data();
    direct = direct ? weight + matrix : nullptr;
  }
  for_all(shape.batch, 1, size * shape.channels * out, [=](long sample, long) {
    fused_sample(x + sample * size * shape.channels, weight, direct, y + sample * size * out, shape, out, scale, qkv,
                 mean_once);
  });
}
