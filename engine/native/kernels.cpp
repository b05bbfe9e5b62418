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

}  // extern "C"
