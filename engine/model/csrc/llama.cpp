// The forward pass of the Llama family over paged KV, float32; engine/model/torch_forward.py is
// its readable twin, and engine/model/native_forward.py declares the structs again for ctypes.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "thread_pool.h"
#include "vector.h"

namespace blinkbed {

struct Layer {  // a null pointer: the model has no such weight
  const float* attn_norm;
  const float* qkv;
  const float* qkv_bias;
  const float* q_norm;
  const float* k_norm;
  const float* o;
  const float* mlp_norm;
  const float* gate_up;
  const float* down;
};

struct Model {
  std::int32_t hidden_size, num_layers, num_heads, num_kv_heads, head_dim, mlp_size, vocab_size;
  std::int32_t page_size;
  float norm_eps;
  std::int32_t num_threads;
  const float* embed;
  const float* norm;
  const float* head;
  const float* cos_sin;  // [max_context][2][head_dim / 2]
  const Layer* layers;
};

struct Batch {
  std::int32_t num_tokens, num_rows, num_sampled, max_pages_per_seq;
  const std::int64_t* token_ids;       // [num_tokens]
  const std::int64_t* positions;       // [num_tokens]
  const std::int64_t* kv_index;        // [num_tokens]
  const std::int64_t* query_start;     // [num_rows]
  const std::int64_t* query_length;    // [num_rows]
  const std::int64_t* context_length;  // [num_rows]
  const std::int64_t* seq;             // [num_rows]
  const std::int64_t* last_token;      // [num_sampled]
  const std::int32_t* block_tables;    // [num_seqs][max_pages_per_seq]
  float* kv_cache;                     // [layers][2][pages][page_size][kv_heads][head_dim]
  std::int64_t num_pages;
  float* logits;  // [num_sampled][vocab_size]
  std::uint64_t* beats;  // signs of life, one per port; beat_stride words apart
  std::int64_t num_beats, beat_stride;

  void beat() const {
    for (std::int64_t i = 0; i < num_beats; ++i)
      __atomic_fetch_add(beats + i * beat_stride, 1, __ATOMIC_RELEASE);
  }
};

// Grows, never shrinks; aligned to a cache line so that no vector load crosses one.
class Scratch {
 public:
  float* take(std::size_t count) {
    if (count > capacity_) {
      const std::size_t bytes = (count * sizeof(float) + 63) / 64 * 64;
      data_.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
      capacity_ = data_ ? count : 0;
      if (!data_) throw std::bad_alloc();
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(float* data) const { std::free(data); }
  };
  std::unique_ptr<float, Free> data_;
  std::size_t capacity_ = 0;
};

// Consecutive query tokens of one row and the query heads that share one KV head.
struct AttentionTask {
  int row, kv_head, first_token, num_tokens, first_position;
};

class Llama {
 public:
  explicit Llama(const Model& model)
      : model_(model),
        layers_(model.layers, model.layers + model.num_layers),
        q_size_(model.num_heads * model.head_dim),
        kv_size_(model.num_kv_heads * model.head_dim),
        pool_(model.num_threads) {}

  void forward(const Batch& batch) {
    const int tokens = batch.num_tokens, hidden = model_.hidden_size;
    prepare(batch);
    for (int t = 0; t < tokens; ++t)
      std::copy_n(model_.embed + offset(batch.token_ids[t], hidden), hidden,
                  hidden_ + offset(t, hidden));
    for (int i = 0; i < model_.num_layers; ++i) {
      run_layer(batch, layers_[i], i);
      batch.beat();
    }
    for (int s = 0; s < batch.num_sampled; ++s)
      norm(hidden_ + offset(batch.last_token[s], hidden), model_.norm, hidden,
           normed_ + offset(s, hidden));
    if (batch.num_sampled > 0)
      product({normed_, batch.num_sampled, hidden}, {model_.head, model_.vocab_size, hidden},
              {batch.logits, model_.vocab_size, nullptr, false});
  }

 private:
  static std::size_t offset(std::int64_t index, std::int64_t size) {
    return static_cast<std::size_t>(index * size);
  }

  void prepare(const Batch& batch) {
    const int tokens = batch.num_tokens;
    hidden_ = hidden_space_.take(offset(tokens, model_.hidden_size));
    normed_ = normed_space_.take(offset(tokens, model_.hidden_size));
    qkv_ = qkv_space_.take(offset(tokens, q_size_ + 2 * kv_size_));
    mixed_ = mixed_space_.take(offset(tokens, q_size_));
    gate_up_ = gate_up_space_.take(offset(tokens, 2 * model_.mlp_size));
    gated_ = gated_space_.take(offset(tokens, model_.mlp_size));
    const int group = model_.num_heads / model_.num_kv_heads;
    const int block = std::max(1, 12 / group);  // tokens whose queries share a pass over the keys
    tasks_.clear();
    context_.clear();
    context_start_.clear();
    for (int row = 0; row < batch.num_rows; ++row) {
      context_start_.push_back(context_.size());
      const std::int32_t* pages =
          batch.block_tables + offset(batch.seq[row], batch.max_pages_per_seq);
      const int length = static_cast<int>(batch.context_length[row]);
      for (int p = 0; p < length; ++p)
        context_.push_back(
            static_cast<std::int64_t>(pages[p / model_.page_size]) * model_.page_size +
            p % model_.page_size);
      const int count = static_cast<int>(batch.query_length[row]);
      for (int t = 0; t < count; t += block)
        for (int head = 0; head < model_.num_kv_heads; ++head)
          tasks_.push_back({row, head, static_cast<int>(batch.query_start[row]) + t,
                            std::min(block, count - t), length - count + t});
    }
  }

  void run_layer(const Batch& batch, const Layer& layer, int index) {
    const int tokens = batch.num_tokens, hidden = model_.hidden_size, mlp = model_.mlp_size;
    const int qkv = q_size_ + 2 * kv_size_;
    const std::size_t half = offset(batch.num_pages * model_.page_size, kv_size_);
    float* keys = batch.kv_cache + 2 * half * static_cast<std::size_t>(index);
    norm_tokens(tokens, layer.attn_norm);
    product({normed_, tokens, hidden}, {layer.qkv, qkv, hidden},
            {qkv_, qkv, layer.qkv_bias, false});
    each_token(tokens, [&](int t) { rotate_and_store(batch, layer, t, keys, keys + half); });
    pool_.run(static_cast<int>(tasks_.size()), [&](int task) {
      attention(tasks_[static_cast<std::size_t>(task)], keys, keys + half);
    });
    product({mixed_, tokens, q_size_}, {layer.o, hidden, q_size_},
            {hidden_, hidden, nullptr, true});
    norm_tokens(tokens, layer.mlp_norm);
    gate(tokens, layer.gate_up);
    product({gated_, tokens, mlp}, {layer.down, hidden, mlp}, {hidden_, hidden, nullptr, true});
  }

  // Rows of w that one task takes: several tasks for each thread, whole tiles.
  int chunk_of(int rows) const {
    const int fair = rows / (4 * pool_.size());
    return std::clamp(fair / kTileColumns * kTileColumns, kTileColumns * 4, 64);
  }

  void product(Matrix x, Matrix w, Output y) {
    const int chunk = chunk_of(w.rows);
    pool_.run((w.rows + chunk - 1) / chunk, [&](int task) {
      multiply(x, w, task * chunk, std::min(w.rows, (task + 1) * chunk), y);
    });
  }

  // gated = silu(x gate^T) * (x up^T)
  void gate(int tokens, const float* gate_up) {
    const int mlp = model_.mlp_size, chunk = chunk_of(mlp);
    const Matrix x{normed_, tokens, model_.hidden_size};
    const Matrix gate{gate_up, mlp, model_.hidden_size};
    const Matrix up{gate.row(mlp), mlp, model_.hidden_size};
    pool_.run((mlp + chunk - 1) / chunk, [&](int task) {
      const int begin = task * chunk, end = std::min(mlp, begin + chunk);
      multiply(x, gate, begin, end, {gate_up_, 2 * mlp, nullptr, false});
      multiply(x, up, begin, end, {gate_up_ + mlp, 2 * mlp, nullptr, false});
      for (int t = 0; t < tokens; ++t) {
        const float* row = gate_up_ + offset(t, 2 * mlp);
        for (int n = begin; n < end; n += kLanes) {
          const int count = std::min(kLanes, end - n);
          const Vector g = load_part(row + n, count);
          const Vector y = g / (1.0f + exp(-g)) * load_part(row + mlp + n, count);
          store_part(gated_ + offset(t, mlp) + n, y, count);
        }
      }
    });
  }

  void norm(const float* x, const float* weight, int size, float* y) const {
    Vector squares = {};
    const int whole = size / kLanes * kLanes;
    for (int i = 0; i < whole; i += kLanes) squares += load(x + i) * load(x + i);
    const Vector rest = load_part(x + whole, size - whole);
    squares += rest * rest;
    const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + model_.norm_eps);
    for (int i = 0; i < size; ++i) y[i] = x[i] * scale * weight[i];
  }

  void norm_tokens(int tokens, const float* weight) {
    const int size = model_.hidden_size;
    each_token(tokens, [&](int t) {
      norm(hidden_ + offset(t, size), weight, size, normed_ + offset(t, size));
    });
  }

  // Few tokens are not worth waking the other threads.
  template <typename Body>
  void each_token(int tokens, const Body& body) {
    constexpr int kTokens = 8;
    pool_.run((tokens + kTokens - 1) / kTokens, [&](int task) {
      for (int t = task * kTokens; t < std::min(tokens, (task + 1) * kTokens); ++t) body(t);
    });
  }

  void rotate_and_store(const Batch& batch, const Layer& layer, int token, float* keys,
                        float* values) {
    const int dim = model_.head_dim, half = dim / 2;
    float* row = qkv_ + offset(token, q_size_ + 2 * kv_size_);
    const float* cos = model_.cos_sin + offset(batch.positions[token], dim);
    const float* sin = cos + half;
    for (int head = 0; head < model_.num_heads + model_.num_kv_heads; ++head) {
      float* x = row + offset(head, dim);
      if (layer.q_norm != nullptr)
        norm(x, head < model_.num_heads ? layer.q_norm : layer.k_norm, dim, x);
      for (int i = 0; i < half; ++i) {
        const float low = x[i], high = x[half + i];
        x[i] = low * cos[i] - high * sin[i];
        x[half + i] = high * cos[i] + low * sin[i];
      }
    }
    const std::size_t to = offset(batch.kv_index[token], kv_size_);
    std::copy_n(row + q_size_, kv_size_, keys + to);
    std::copy_n(row + q_size_ + kv_size_, kv_size_, values + to);
  }

  void attention(const AttentionTask& task, const float* keys, const float* values) {
    static thread_local std::vector<Query> queries;
    static thread_local Scratch scratch;
    const int dim = model_.head_dim, group = model_.num_heads / model_.num_kv_heads;
    const int longest = task.first_position + task.num_tokens;
    const std::size_t padded = offset((longest + kLanes - 1) / kLanes, kLanes);
    float* weights = scratch.take(padded * static_cast<std::size_t>(task.num_tokens * group));
    queries.clear();
    for (int t = 0; t < task.num_tokens; ++t) {
      for (int i = 0; i < group; ++i) {
        const std::size_t head = offset(task.kv_head * group + i, dim);
        const int token = task.first_token + t;
        queries.push_back({qkv_ + offset(token, q_size_ + 2 * kv_size_) + head,
                           mixed_ + offset(token, q_size_) + head, task.first_position + t + 1,
                           weights + padded * queries.size(), 0.0f});
      }
    }
    const std::int64_t* index =
        context_.data() + context_start_[static_cast<std::size_t>(task.row)];
    const std::size_t stride = static_cast<std::size_t>(kv_size_), head = offset(task.kv_head, dim);
    attend(queries, {keys + head, stride, index}, {values + head, stride, index}, dim);
  }

  const Model model_;
  const std::vector<Layer> layers_;
  const int q_size_, kv_size_;
  ThreadPool pool_;
  std::vector<AttentionTask> tasks_;
  std::vector<std::int64_t> context_;  // KV index of each position, row after row
  std::vector<std::size_t> context_start_;
  Scratch hidden_space_, normed_space_, qkv_space_, mixed_space_, gate_up_space_, gated_space_;
  float *hidden_ = nullptr, *normed_ = nullptr, *qkv_ = nullptr, *mixed_ = nullptr;
  float *gate_up_ = nullptr, *gated_ = nullptr;
};

}  // namespace blinkbed

extern "C" {

// Null if there is not enough memory.
void* blinkbed_llama_open(const blinkbed::Model* model) {
  try {
    return new blinkbed::Llama(*model);
  } catch (...) {
    return nullptr;
  }
}

void blinkbed_llama_close(void* llama) { delete static_cast<blinkbed::Llama*>(llama); }

// 0, or -1 if there is not enough memory.
int blinkbed_llama_forward(void* llama, const blinkbed::Batch* batch) {
  try {
    static_cast<blinkbed::Llama*>(llama)->forward(*batch);
    return 0;
  } catch (...) {
    return -1;
  }
}

int blinkbed_llama_lanes() { return blinkbed::kLanes; }

}  // extern "C"
