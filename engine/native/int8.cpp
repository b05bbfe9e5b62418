// Products of float32 rows with 8-bit weights: rows are rounded to integers of up to 12 bits with a scale each, so that
// pairs of products add up in 32 bits without loss, and what is lost is the rounding of the weights.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kColumns = 16;  // outputs of a panel
constexpr int64_t kBlock = 6;     // rows multiplied at once
constexpr int32_t kMostLevels = 2047;
constexpr int32_t kWeightLevels = 127;

// sums [kRows, 16] = rows [kRows, 2 * pairs] times a panel [pairs, 16, 2].
template <int64_t kRows>
void multiply(const int16_t* rows, int64_t row_stride, const int8_t* panel, int64_t pairs, int32_t* sums) {
#ifdef __AVX2__
  __m256i left[kRows], right[kRows];
  for (int64_t r = 0; r < kRows; ++r) left[r] = right[r] = _mm256_setzero_si256();
  for (int64_t p = 0; p < pairs; ++p) {
    const __m128i* weights = reinterpret_cast<const __m128i*>(panel + p * 2 * kColumns);
    const __m256i first = _mm256_cvtepi8_epi16(_mm_loadu_si128(weights));
    const __m256i second = _mm256_cvtepi8_epi16(_mm_loadu_si128(weights + 1));
#pragma GCC unroll 6
    for (int64_t r = 0; r < kRows; ++r) {
      int32_t pair;
      std::memcpy(&pair, rows + r * row_stride + 2 * p, sizeof pair);
      const __m256i both = _mm256_set1_epi32(pair);
      left[r] = _mm256_add_epi32(left[r], _mm256_madd_epi16(both, first));
      right[r] = _mm256_add_epi32(right[r], _mm256_madd_epi16(both, second));
    }
  }
  for (int64_t r = 0; r < kRows; ++r) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + r * kColumns), left[r]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + r * kColumns + 8), right[r]);
  }
#else
  std::fill(sums, sums + kRows * kColumns, 0);
  for (int64_t p = 0; p < pairs; ++p) {
    for (int64_t r = 0; r < kRows; ++r) {
      const int32_t first = rows[r * row_stride + 2 * p], second = rows[r * row_stride + 2 * p + 1];
      for (int64_t c = 0; c < kColumns; ++c) {
        const int8_t* weights = panel + (p * kColumns + c) * 2;
        sums[r * kColumns + c] += first * weights[0] + second * weights[1];
      }
    }
  }
#endif
}

void multiply_any(int64_t count, const int16_t* rows, int64_t row_stride, const int8_t* panel, int64_t pairs,
                  int32_t* sums) {
  switch (count) {
    case 1: return multiply<1>(rows, row_stride, panel, pairs, sums);
    case 2: return multiply<2>(rows, row_stride, panel, pairs, sums);
    case 3: return multiply<3>(rows, row_stride, panel, pairs, sums);
    case 4: return multiply<4>(rows, row_stride, panel, pairs, sums);
    case 5: return multiply<5>(rows, row_stride, panel, pairs, sums);
    default: return multiply<kBlock>(rows, row_stride, panel, pairs, sums);
  }
}

// Integers in [-levels, levels] and the scale that makes floats of them again; NaN for a row that is not finite.
float round_row(const float* row, int64_t size, int32_t levels, int16_t* out, int64_t padded) {
  float largest = 0.0f;
  int32_t not_finite = 0;
  for (int64_t i = 0; i < size; ++i) {
    const float magnitude = std::fabs(row[i]);
    largest = magnitude > largest ? magnitude : largest;
    not_finite |= !(magnitude <= std::numeric_limits<float>::max());  // a NaN compares as false
  }
  std::fill(out + size, out + padded, 0);
  if (not_finite || largest == 0.0f) {
    std::fill(out, out + size, 0);
    return not_finite ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
  }
  const float inverse = levels / largest;
  for (int64_t i = 0; i < size; ++i) out[i] = static_cast<int16_t>(std::nearbyint(row[i] * inverse));
  return largest / levels;
}

}  // namespace

extern "C" {

// out [rows, outputs] = in [rows, inputs] times weights, plus bias [outputs] if there is one. Weights are panels of 16
// outputs, [panels, (inputs + 1) / 2, 16, 2], with scales [panels * 16]; what is beyond `outputs` and `inputs` is zero.
void splitserve_int8_linear(const float* in, const int8_t* weights, const float* scales, const float* bias, float* out,
                            int64_t rows, int64_t inputs, int64_t outputs) {
  const int64_t pairs = (inputs + 1) / 2, padded = 2 * pairs;
  const int64_t panels = (outputs + kColumns - 1) / kColumns;
  // The largest sum there can be has to stay below 2^31.
  const int64_t safe = std::numeric_limits<int32_t>::max() / (static_cast<int64_t>(kWeightLevels) * padded);
  const int32_t levels = static_cast<int32_t>(std::min<int64_t>(kMostLevels, safe));
  std::vector<int16_t> rounded(rows * padded);
  std::vector<float> row_scales(rows);
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      row_scales[row] = round_row(in + row * inputs, inputs, levels, rounded.data() + row * padded, padded);
    }
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t first_column = panel * kColumns, columns = std::min(kColumns, outputs - first_column);
      int32_t sums[kBlock * kColumns];
      for (int64_t row = 0; row < rows; row += kBlock) {
        const int64_t count = std::min(kBlock, rows - row);
        multiply_any(count, rounded.data() + row * padded, padded, weights + panel * pairs * 2 * kColumns, pairs, sums);
        for (int64_t r = 0; r < count; ++r) {
          float* to = out + (row + r) * outputs + first_column;
          for (int64_t c = 0; c < columns; ++c) {
            const float value = sums[r * kColumns + c] * row_scales[row + r] * scales[first_column + c];
            to[c] = bias == nullptr ? value : value + bias[first_column + c];
          }
        }
      }
    }
  }
}

}  // extern "C"
