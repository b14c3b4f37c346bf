// y = x W^T for few or many rows of x, bound by the memory's bandwidth where rows are few.
//
// Each number of y is one dot product, summed in an order that depends on its length alone: lane l
// takes elements l, l + kLanes, ..; then the lanes are added in a tree. So a row's result is the
// same, bit for bit, whatever else is computed with it.
#pragma once

#include <algorithm>
#include <cstddef>

#include "vector.h"

namespace blinkbed {

struct Matrix {  // [rows][columns], row-major
  const float* data;
  int rows;
  int columns;
  const float* row(int i) const { return data + static_cast<std::size_t>(i) * columns; }
};

// What becomes of a dot product: y = sum (+ bias), or y += sum.
struct Output {
  float* data;
  int stride;
  const float* bias;
  bool add;
  void put(int m, int n, float value) const {
    float* to = data + static_cast<std::size_t>(m) * stride + n;
    if (add) value += *to;
    if (bias != nullptr) value += bias[n];
    *to = value;
  }
};

constexpr int kTileRows = 4;
constexpr int kTileColumns = kLanes / kTileRows;
constexpr int kBlockRows = 64;  // rows of x that stay in the cache while w goes by

// Up to kLanes products at once: kRows rows of x (from m) with kTileColumns rows of w (from n).
// Columns past n_end repeat the last one and are not put. `ahead`: fetch the w of the next tile.
template <int kRows, bool kAhead>
inline void multiply_tile(Matrix x, int m, Matrix w, int n, int n_end, Output y) {
  const float* xs[kRows];
  const float* ws[kTileColumns];
  for (int i = 0; i < kRows; ++i) xs[i] = x.row(m + i);
  for (int j = 0; j < kTileColumns; ++j) ws[j] = w.row(std::min(n + j, n_end - 1));
  const std::size_t ahead = static_cast<std::size_t>(kTileColumns) * w.columns;
  Vector total[kLanes] = {};
  const int whole = x.columns / kLanes * kLanes;
  for (int k = 0; k < whole; k += kLanes) {
    Vector wk[kTileColumns];
    for (int j = 0; j < kTileColumns; ++j) wk[j] = in_register(load(ws[j] + k));
    if constexpr (kAhead)
      for (int j = 0; j < kTileColumns; ++j) __builtin_prefetch(ws[j] + k + ahead, 0, 2);
    for (int i = 0; i < kRows; ++i) {
      const Vector xk = in_register(load(xs[i] + k));
      for (int j = 0; j < kTileColumns; ++j) total[i * kTileColumns + j] += xk * wk[j];
    }
  }
  if (const int rest = x.columns - whole; rest > 0) {
    for (int i = 0; i < kRows; ++i) {
      const Vector xk = load_part(xs[i] + whole, rest);
      for (int j = 0; j < kTileColumns; ++j)
        total[i * kTileColumns + j] += xk * load_part(ws[j] + whole, rest);
    }
  }
  float product[kLanes];
  store(product, sums(total));
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kTileColumns && n + j < n_end; ++j)
      y.put(m + i, n + j, product[i * kTileColumns + j]);
}

// All rows of x with rows n_begin..n_end of w.
inline void multiply(Matrix x, Matrix w, int n_begin, int n_end, Output y) {
  static_assert(kTileRows == 4);
  for (int first = 0; first < x.rows; first += kBlockRows) {
    const int last = std::min(first + kBlockRows, x.rows);
    for (int n = n_begin; n < n_end; n += kTileColumns) {
      int m = first;
      if (last - m >= 4) { multiply_tile<4, true>(x, m, w, n, n_end, y); m += 4; }
      for (; last - m >= 4; m += 4) multiply_tile<4, false>(x, m, w, n, n_end, y);
      switch (last - m) {
        case 3: multiply_tile<3, true>(x, m, w, n, n_end, y); break;
        case 2: multiply_tile<2, true>(x, m, w, n, n_end, y); break;
        case 1: multiply_tile<1, true>(x, m, w, n, n_end, y); break;
        default: break;
      }
    }
  }
}

}  // namespace blinkbed
