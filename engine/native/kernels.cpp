// What torch needs many small operators for, in one pass each: float32, on a CPU.
//
// Compiled for the machine it runs on, into plain C functions. Threads are those of the OpenMP runtime that torch uses.
// A layer's slice of the pool is [pages, 2, kv_heads, page_tokens, head_dim] with `page_stride` floats between pages.
// NaN goes in, NaN comes out: nothing here may be compiled with -ffinite-math-only.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
constexpr int64_t kParallelWork = 1 << 14;  // floats to touch below which a second thread costs more than it saves

// e^x: 2^n with n = round(x / ln 2), times a polynomial for the rest (minimax on [-ln2/2, ln2/2]); relative error below
// 2e-7. Vectorises. A NaN passes both comparisons and stays.
inline float exponential(float x) {
  x = x < -87.3f ? -87.3f : x;
  x = x > 88.3f ? 88.3f : x;
  const float n = std::nearbyint(x * 1.44269504088896f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

inline float hyperbolic_tangent(float x) { return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f); }

void normalise(const float* in, const float* weight, float* out, int64_t size, float eps, float offset) {
  float squares = 0.0f;
  for (int64_t i = 0; i < size; ++i) squares += in[i] * in[i];
  const float scale = 1.0f / std::sqrt(squares / size + eps);
  for (int64_t i = 0; i < size; ++i) out[i] = in[i] * scale * (offset + weight[i]);
}

// One head of one token: pairs (i, i + half).
inline void rotate(const float* in, const float* cosine, const float* sine, float* out, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = in[i], second = in[i + half];
    out[i] = first * cosine[i] - second * sine[i];
    out[i + half] = second * cosine[i] + first * sine[i];
  }
}

struct Pages {
  const float* base;  // keys of page 0
  int64_t page_stride;
  int64_t kv_heads;
  int64_t page_tokens;

  const float* head(int64_t page, int64_t half, int64_t kv_head, int64_t head_dim) const {
    return base + page * page_stride + (half * kv_heads + kv_head) * page_tokens * head_dim;
  }
};

// One query group (the heads that share a key head) against positions [begin, end): running maximum, sum of weights and
// weighted values of each head, as in online softmax (Milakov and Gimelshein, 2018).
template <int64_t kHeadDim>
void attend_segment(const float* query, const Pages& pages, const int64_t* table, int64_t kv_head, int64_t group,
                    int64_t begin, int64_t end, int64_t any_head_dim, float scale, float cap, float* scores,
                    float* maxima, float* sums, float* weighted) {
  const int64_t head_dim = kHeadDim ? kHeadDim : any_head_dim;
  const int64_t page_tokens = pages.page_tokens;
  for (int64_t h = 0; h < group; ++h) maxima[h] = kNegativeInfinity;
  const int64_t width = end - begin;
  for (int64_t position = begin; position < end;) {
    const int64_t offset = position % page_tokens;
    const int64_t count = std::min(page_tokens - offset, end - position);
    const float* keys = pages.head(table[position / page_tokens], 0, kv_head, head_dim) + offset * head_dim;
    for (int64_t t = 0; t < count; ++t) {
      const float* key = keys + t * head_dim;
      for (int64_t h = 0; h < group; ++h) {
        const float* q = query + h * head_dim;
        float product = 0.0f;
        for (int64_t d = 0; d < head_dim; ++d) product += q[d] * key[d];
        product *= scale;
        if (cap > 0.0f) product = cap * hyperbolic_tangent(product / cap);
        scores[h * width + position - begin + t] = product;
      }
    }
    position += count;
  }
  for (int64_t h = 0; h < group; ++h) {
    float* row = scores + h * width;
    float maximum = kNegativeInfinity;
    for (int64_t t = 0; t < width; ++t) maximum = row[t] > maximum ? row[t] : maximum;
    float sum = 0.0f;
    for (int64_t t = 0; t < width; ++t) {
      row[t] = exponential(row[t] - maximum);
      sum += row[t];
    }
    maxima[h] = maximum;
    sums[h] = sum;
  }
  std::memset(weighted, 0, sizeof(float) * group * head_dim);
  for (int64_t position = begin; position < end;) {
    const int64_t offset = position % page_tokens;
    const int64_t count = std::min(page_tokens - offset, end - position);
    const float* values = pages.head(table[position / page_tokens], 1, kv_head, head_dim) + offset * head_dim;
    for (int64_t h = 0; h < group; ++h) {
      float* out = weighted + h * head_dim;
      const float* row = scores + h * width + position - begin;
      for (int64_t t = 0; t < count; ++t) {
        const float weight = row[t];
        const float* value = values + t * head_dim;
        for (int64_t d = 0; d < head_dim; ++d) out[d] += weight * value[d];
      }
    }
    position += count;
  }
}

// Prefill works on tiles of kRows queries of one head and kKeys keys: scores and weighted values are both products of a
// few rows with columns in groups of 16, kept in registers.
constexpr int64_t kRows = 6;
constexpr int64_t kKeys = 128;
constexpr int64_t kColumns = 16;
typedef float Eight __attribute__((vector_size(32), aligned(4)));

// out [kRows, 16] (+)= a [kRows, depth] * b [depth, 16]; rows of b have b_stride floats between them.
inline void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth, bool add,
                     float* out, int64_t out_stride) {
  Eight sums[kRows][2] = {};
  for (int64_t k = 0; k < depth; ++k) {
    const Eight left = *reinterpret_cast<const Eight*>(b + k * b_stride);
    const Eight right = *reinterpret_cast<const Eight*>(b + k * b_stride + 8);
#pragma GCC unroll 6
    for (int64_t r = 0; r < kRows; ++r) {
      const float factor = a[r * a_stride + k];
      sums[r][0] += factor * left;
      sums[r][1] += factor * right;
    }
  }
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t half = 0; half < 2; ++half) {
      Eight* to = reinterpret_cast<Eight*>(out + r * out_stride + 8 * half);
      *to = add ? *to + sums[r][half] : sums[r][half];
    }
  }
}

// Keys of one head by groups of 16 positions, [groups, head_dim, 16], and its values as [positions, head_dim]; what is
// behind `end` is zero.
void gather_context(const Pages& pages, const int64_t* table, int64_t kv_head, int64_t begin, int64_t end,
                    int64_t head_dim, float* keys, float* values) {
  const int64_t padded = (end - begin + kColumns - 1) / kColumns * kColumns;
  for (int64_t i = 0; i < padded; ++i) {
    const int64_t position = begin + i;
    float* group = keys + i / kColumns * head_dim * kColumns + i % kColumns;
    float* value = values + i * head_dim;
    if (position >= end) {
      for (int64_t d = 0; d < head_dim; ++d) group[d * kColumns] = value[d] = 0.0f;
      continue;
    }
    const int64_t page = table[position / pages.page_tokens], offset = position % pages.page_tokens * head_dim;
    const float* key = pages.head(page, 0, kv_head, head_dim) + offset;
    for (int64_t d = 0; d < head_dim; ++d) group[d * kColumns] = key[d];
    std::memcpy(value, pages.head(page, 1, kv_head, head_dim) + offset, sizeof(float) * head_dim);
  }
}

struct Prefill {
  int64_t begin;  // first position that is gathered
  int64_t head_dim;
  float scale;
  int64_t window;  // 0: none
  float cap;       // 0: none
};

// kRows queries of one head, [kRows, head_dim], the first at position `first`; `count` of them are real. Online softmax
// over tiles of keys, as in attend_segment.
void attend_rows(const float* query, int64_t first, int64_t count, const Prefill& prefill, const float* keys,
                 const float* values, float* scores, float* weighted) {
  const int64_t head_dim = prefill.head_dim;
  float maxima[kRows], sums[kRows];
  std::fill(maxima, maxima + kRows, kNegativeInfinity);
  std::fill(sums, sums + kRows, 0.0f);
  std::fill(weighted, weighted + kRows * head_dim, 0.0f);
  const int64_t seen_from = prefill.window ? std::max(prefill.begin, first - prefill.window + 1) : prefill.begin;
  const int64_t last = first + count - 1;
  for (int64_t tile = (seen_from - prefill.begin) / kColumns * kColumns + prefill.begin; tile <= last; tile += kKeys) {
    const int64_t width = std::min(kKeys, (last - tile) / kColumns * kColumns + kColumns);
    for (int64_t t = 0; t < width; t += kColumns) {
      multiply(query, head_dim, keys + (tile - prefill.begin + t) * head_dim, kColumns, head_dim, false, scores + t,
               kKeys);
    }
    for (int64_t r = 0; r < kRows; ++r) {
      float* row = scores + r * kKeys;
      const int64_t position = std::min(first + r, last);
      const int64_t from = prefill.window ? std::max<int64_t>(0, position - prefill.window + 1 - tile) : 0;
      const int64_t to = std::min(width, position - tile + 1);
      if (from >= to) {
        std::fill(row, row + width, 0.0f);
        continue;
      }
      float maximum = maxima[r];
      for (int64_t t = from; t < to; ++t) {
        float score = row[t] * prefill.scale;
        if (prefill.cap > 0.0f) score = prefill.cap * hyperbolic_tangent(score / prefill.cap);
        row[t] = score;
        maximum = score > maximum ? score : maximum;
      }
      const float shrink = exponential(maxima[r] - maximum);
      float sum = 0.0f;
      for (int64_t t = from; t < to; ++t) {
        row[t] = exponential(row[t] - maximum);
        sum += row[t];
      }
      std::fill(row, row + from, 0.0f);
      std::fill(row + to, row + width, 0.0f);
      if (maximum != maxima[r]) {
        for (int64_t d = 0; d < head_dim; ++d) weighted[r * head_dim + d] *= shrink;
        sums[r] *= shrink;
        maxima[r] = maximum;
      }
      sums[r] += sum;
    }
    for (int64_t d = 0; d < head_dim; d += kColumns) {
      multiply(scores, kKeys, values + (tile - prefill.begin) * head_dim + d, head_dim, width, true, weighted + d,
               head_dim);
    }
  }
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t d = 0; d < head_dim; ++d) weighted[r * head_dim + d] /= sums[r];
  }
}

}  // namespace

extern "C" {

// in [rows, size] -> out [rows, size] = in / rms(in) * (offset + weight). With `residual`, that is added to `in` first
// and takes the sum.
void splitserve_rms_norm(const float* in, float* residual, const float* weight, float* out, int64_t rows, int64_t size,
                         float eps, float offset) {
#pragma omp parallel for if (rows * size > kParallelWork) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const float* from = in + row * size;
    if (residual != nullptr) {
      float* sum = residual + row * size;
      for (int64_t i = 0; i < size; ++i) sum[i] += from[i];
      from = sum;
    }
    normalise(from, weight, out + row * size, size, eps, offset);
  }
}

// gate_up [rows, 2 * size], gate first -> out [rows, size] = silu(gate) * up
void splitserve_silu_mul(const float* gate_up, float* out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > kParallelWork) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const float* gate = gate_up + 2 * row * size;
    const float* up = gate + size;
    float* to = out + row * size;
    for (int64_t i = 0; i < size; ++i) to[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
  }
}

// The same with gelu(gate) = gate / 2 * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 * gate^3)))
void splitserve_gelu_mul(const float* gate_up, float* out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > kParallelWork) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const float* gate = gate_up + 2 * row * size;
    const float* up = gate + size;
    float* to = out + row * size;
    for (int64_t i = 0; i < size; ++i) {
      const float g = gate[i];
      to[i] = 0.5f * g * (1.0f + hyperbolic_tangent(0.7978845608f * (g + 0.044715f * g * g * g))) * up[i];
    }
  }
}

// Rotate queries and keys, write keys and values into their pages. The three inputs have `row_stride` floats between
// tokens (they may be parts of one projection); rotated_query is [tokens, heads, head_dim], rotated_key [tokens,
// kv_heads, head_dim]. cosine and sine: [tokens, head_dim / 2].
void splitserve_rotate_and_write(const float* query, int64_t query_stride, const float* key, int64_t key_stride,
                                 const float* value, int64_t value_stride, const float* cosine, const float* sine,
                                 float* pages, int64_t page_stride, const int64_t* write_pages,
                                 const int64_t* write_offsets, float* rotated_query, float* rotated_key, int64_t tokens,
                                 int64_t heads, int64_t kv_heads, int64_t page_tokens, int64_t head_dim) {
  const int64_t half = head_dim / 2;
#pragma omp parallel for if (tokens * (heads + 2 * kv_heads) * head_dim > kParallelWork) schedule(static)
  for (int64_t token = 0; token < tokens; ++token) {
    const float* c = cosine + token * half;
    const float* s = sine + token * half;
    for (int64_t h = 0; h < heads; ++h) {
      rotate(query + token * query_stride + h * head_dim, c, s, rotated_query + (token * heads + h) * head_dim, half);
    }
    float* page = pages + write_pages[token] * page_stride + write_offsets[token] * head_dim;
    for (int64_t h = 0; h < kv_heads; ++h) {
      float* rotated = rotated_key + (token * kv_heads + h) * head_dim;
      rotate(key + token * key_stride + h * head_dim, c, s, rotated, half);
      std::memcpy(page + h * page_tokens * head_dim, rotated, sizeof(float) * head_dim);
      std::memcpy(page + (kv_heads + h) * page_tokens * head_dim, value + token * value_stride + h * head_dim,
                  sizeof(float) * head_dim);
    }
  }
}

// Decode attention. query and out: [*, heads, head_dim], of which sequence i has row rows[i]; tables [sequences,
// table_width]; ends[i] positions are attended to, of these the last `window` if that is not 0; `cap` 0: no soft cap.
void splitserve_decode_attention(const float* query, float* out, const int64_t* rows, const float* pages,
                                 int64_t page_stride, const int64_t* tables, int64_t table_width, const int64_t* ends,
                                 int64_t sequences, int64_t heads, int64_t kv_heads, int64_t page_tokens,
                                 int64_t head_dim, float scale, int64_t window, float cap) {
  const int64_t group = heads / kv_heads;
  const Pages paged{pages, page_stride, kv_heads, page_tokens};
  int64_t longest = 0, work = 0;
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t seen = window ? std::min(ends[i], window) : ends[i];
    longest = std::max(longest, seen);
    work += seen;
  }
#pragma omp parallel if (work * heads * head_dim > kParallelWork)
  {
    std::vector<float> scores(group * longest), maxima(group), sums(group), weighted(group * head_dim);
#pragma omp for collapse(2) schedule(dynamic, 1)
    for (int64_t i = 0; i < sequences; ++i) {
      for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
        const int64_t end = ends[i], begin = window ? std::max<int64_t>(0, end - window) : 0;
        const int64_t first = (rows[i] * heads + kv_head * group) * head_dim;
        const auto attend = head_dim == 64    ? attend_segment<64>
                            : head_dim == 128 ? attend_segment<128>
                                              : attend_segment<0>;
        attend(query + first, paged, tables + i * table_width, kv_head, group, begin, end, head_dim, scale, cap,
               scores.data(), maxima.data(), sums.data(), weighted.data());
        for (int64_t h = 0; h < group; ++h) {
          const float inverse = 1.0f / sums[h];
          for (int64_t d = 0; d < head_dim; ++d) out[first + h * head_dim + d] = weighted[h * head_dim + d] * inverse;
        }
      }
    }
  }
}

// Prefill attention of one chunk: `tokens` queries [tokens, heads, head_dim] at positions [start, start + tokens) of a
// sequence, whose keys and values up to there are in the pages of `table`. head_dim is a multiple of 16.
void splitserve_prefill_attention(const float* query, float* out, const float* pages, int64_t page_stride,
                                  const int64_t* table, int64_t start, int64_t tokens, int64_t heads, int64_t kv_heads,
                                  int64_t page_tokens, int64_t head_dim, float scale, int64_t window, float cap) {
  const Pages paged{pages, page_stride, kv_heads, page_tokens};
  const int64_t end = start + tokens, group = heads / kv_heads;
  const int64_t begin = window ? std::max<int64_t>(0, start - window + 1) : 0;
  const int64_t padded = (end - begin + kColumns - 1) / kColumns * kColumns;
  const Prefill prefill{begin, head_dim, scale, window, cap};
  std::vector<float> keys(kv_heads * padded * head_dim), values(kv_heads * padded * head_dim);
  const int64_t blocks = (tokens + kRows - 1) / kRows;
#pragma omp parallel
  {
    std::vector<float> rows(kRows * head_dim), scores(kRows * kKeys), weighted(kRows * head_dim);
#pragma omp for schedule(static)
    for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
      gather_context(paged, table, kv_head, begin, end, head_dim, keys.data() + kv_head * padded * head_dim,
                     values.data() + kv_head * padded * head_dim);
    }
#pragma omp for collapse(2) schedule(dynamic, 4)
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = block * kRows, count = std::min(kRows, tokens - first);
        for (int64_t r = 0; r < kRows; ++r) {
          std::memcpy(rows.data() + r * head_dim, query + ((first + std::min(r, count - 1)) * heads + head) * head_dim,
                      sizeof(float) * head_dim);
        }
        const int64_t context = head / group * padded * head_dim;
        attend_rows(rows.data(), start + first, count, prefill, keys.data() + context, values.data() + context,
                    scores.data(), weighted.data());
        for (int64_t r = 0; r < count; ++r) {
          std::memcpy(out + ((first + r) * heads + head) * head_dim, weighted.data() + r * head_dim,
                      sizeof(float) * head_dim);
        }
      }
    }
  }
}

}  // extern "C"
