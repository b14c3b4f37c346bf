// Causal attention of a few consecutive queries of one sequence over its paged keys and values.
//
// Softmax in two passes (the largest score first), each sum in an order that only the number of
// keys decides; so a query's result does not depend on how prompts are chunked or batched.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "vector.h"

namespace blinkbed {

struct Pages {  // one layer's keys (or values), of one head
  const float* data;
  std::size_t stride;           // floats from one KV index to the next
  const std::int64_t* kv_index;  // of each position of the sequence
  const float* at(int position) const {
    return data + static_cast<std::size_t>(kv_index[position]) * stride;
  }
};

// One query head of one token.
struct Query {
  const float* vector;
  float* out;
  int num_keys;    // positions 0..num_keys-1 are visible
  float* weights;  // scratch, [keys rounded up to kLanes]
  float total;     // of the weights
};

// Scores of one query with the kLanes keys at `keys`.
inline Vector score_tile(const float* query, const float* const (&keys)[kLanes], int head_dim) {
  Vector total[kLanes] = {};
  for (int d = 0; d < head_dim; d += kLanes) {
    const Vector q = load(query + d);
    for (int i = 0; i < kLanes; ++i) total[i] += q * load(keys[i] + d);
  }
  return sums(total);
}

inline void normalize_weights(Query& query, int padded_keys) {
  Vector most = splat(-std::numeric_limits<float>::infinity());
  for (int p = query.num_keys; p < padded_keys; ++p)
    query.weights[p] = -std::numeric_limits<float>::infinity();
  for (int p = 0; p < padded_keys; p += kLanes) {
    const Vector score = load(query.weights + p);
    most = score > most ? score : most;
  }
  const Vector top = splat(largest(most));
  Vector total = {};
  for (int p = 0; p < padded_keys; p += kLanes) {
    const Vector weight = exp(load(query.weights + p) - top);
    store(query.weights + p, weight);
    total += weight;
  }
  query.total = sum(total);
}

// out = weights * values / total of kQueries queries. Keys beyond a query's have weight 0.
template <int kQueries>
inline void mix_values(Query* queries, const Pages& values, int num_keys, int head_dim) {
  for (int d = 0; d < head_dim; d += kLanes) {
    Vector mixed[kQueries] = {};
    for (int p = 0; p < num_keys; ++p) {
      const Vector value = load(values.at(p) + d);
      for (int i = 0; i < kQueries; ++i) mixed[i] += value * queries[i].weights[p];
    }
    for (int i = 0; i < kQueries; ++i) store(queries[i].out + d, mixed[i] / queries[i].total);
  }
}

// All queries share their keys and values; the last one sees the most keys.
inline void attend(std::vector<Query>& queries, const Pages& keys, const Pages& values,
                   int head_dim) {
  const int num_keys = queries.back().num_keys;
  const int padded_keys = (num_keys + kLanes - 1) / kLanes * kLanes;
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  for (int p = 0; p < padded_keys; p += kLanes) {
    const float* tile[kLanes];
    for (int i = 0; i < kLanes; ++i) tile[i] = keys.at(std::min(p + i, num_keys - 1));
    for (Query& query : queries)
      if (p < query.num_keys)
        store(query.weights + p, score_tile(query.vector, tile, head_dim) * scale);
  }
  for (Query& query : queries) normalize_weights(query, padded_keys);
  std::size_t i = 0;
  for (; queries.size() - i >= 4; i += 4) mix_values<4>(&queries[i], values, num_keys, head_dim);
  switch (queries.size() - i) {
    case 3: mix_values<3>(&queries[i], values, num_keys, head_dim); break;
    case 2: mix_values<2>(&queries[i], values, num_keys, head_dim); break;
    case 1: mix_values<1>(&queries[i], values, num_keys, head_dim); break;
    default: break;
  }
}

}  // namespace blinkbed
