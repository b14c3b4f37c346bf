// The simulated GPU's front end: streams, events and graphs of operations, run without Python.
//
// One worker thread per stream takes operations in FIFO order. A graph is a list of operations;
// running one follows the launches that its kernels make from the device (cudaGraphLaunch), for
// as long as there are any, and none of that needs the client or the Python interpreter. The
// interpreter is entered only by operations that are Python code.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace cupysim {

using Trampoline = void (*)(void** args, const unsigned* grid, const unsigned* block);
using PythonCall = int (*)(std::uint64_t id);      // 0, or 1 when it raised
using PythonRelease = void (*)(std::uint64_t id);  // the operation will not run again

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kPendingCountExceeded = 69;
constexpr int kNotSupported = 801;
constexpr std::uint64_t kTailLaunch = 0x0100000000000000ull;
constexpr std::uint64_t kFireAndForget = 0x0200000000000000ull;
constexpr std::size_t kMaxTailLaunches = 255;  // per graph run, as on a GPU
constexpr std::size_t kMaxGraphs = 1u << 14;
constexpr std::size_t kLargeFillBytes = std::size_t{2} << 20;

// ---- completion: anything that a thread may wait for changes, then calls announce() ---------

class Completion {
 public:
  template <class Ready>
  void wait(Ready ready) {
    if (ready()) return;
    waiters_.fetch_add(1);  // seq_cst: either the announcer sees us or we see its change
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, ready);
    }
    waiters_.fetch_sub(1);
  }
  template <class Ready>
  bool wait_for(Ready ready, std::chrono::milliseconds limit) {
    waiters_.fetch_add(1);
    bool done;
    {
      std::unique_lock lock(mutex_);
      done = changed_.wait_for(lock, limit, ready);
    }
    waiters_.fetch_sub(1);
    return done;
  }
  void announce() {
    if (waiters_.load() == 0) return;
    std::lock_guard lock(mutex_);
    changed_.notify_all();
  }

 private:
  std::atomic<int> waiters_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

extern Completion completion;

// ---- events, operations, graphs, streams --------------------------------------------------

struct Event {
  std::atomic<std::uint64_t> issued{0};
  std::atomic<std::uint64_t> done{0};
  std::atomic<std::int64_t> time_ns{0};
};
using EventRef = std::shared_ptr<Event>;

struct Graph;
struct Stream;

enum class Kind { kernel, copy, fill, data, python, record, wait_event, wait_stream, graph, notify };

struct alignas(16) Chunk {
  unsigned char bytes[16];
};

struct Operation {
  explicit Operation(Kind k) : kind(k) {}
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  Kind kind;
  std::string name;
  Trampoline run = nullptr;
  unsigned grid[3] = {1, 1, 1};
  unsigned block[3] = {1, 1, 1};
  std::vector<Chunk> arguments;  // each argument starts on 16 bytes
  std::vector<void*> pointers;
  void* target = nullptr;
  const void* source = nullptr;
  std::size_t num_bytes = 0;
  int value = 0;                 // fill byte, or socket
  std::uint64_t id = 0;          // Python call, request, ticket to wait for
  EventRef event;
  Stream* stream = nullptr;
  Graph* graph = nullptr;
};

struct Graph {
  std::vector<std::unique_ptr<Operation>> nodes;
  std::uint64_t handle = 0;
  std::atomic<int> queued{0};  // launches by the host and parents that hold this graph
};

struct Stream {
  std::mutex mutex;
  std::condition_variable added;
  std::deque<std::unique_ptr<Operation>> queue;
  std::atomic<std::uint64_t> pushed{0};
  std::atomic<std::uint64_t> completed{0};
  bool closing = false;
};

// ---- the one executor of the process ------------------------------------------------------

extern PythonCall python_call;
extern PythonRelease python_release;
extern thread_local std::string python_error;  // what the call that just returned 1 raised

// The sticky error: once `failed`, operations are skipped and replies carry the text.
extern std::atomic<bool> failed;
extern std::atomic<bool> fatal;  // a graph failed: the device process must end
extern std::mutex error_mutex;
extern std::string error_text;
void fail(const std::string& text, bool in_graph);

// Graphs by handle: index + 1 with a generation above, so a stale or invented one is refused.
extern std::array<std::atomic<Graph*>, kMaxGraphs> graph_table;
extern std::atomic<int> running_graphs;  // raised before a handle is looked up
Graph* find_graph(std::uint64_t handle);

extern Stream* forget_stream;  // runs the fire-and-forget launches
extern std::atomic<std::uint64_t> num_graph_runs;
extern std::atomic<std::uint64_t> num_device_launches;

struct Runtime {  // what a kernel library is given; same layout as in cuda_shim.h
  int (*graph_launch)(std::uint64_t exec, std::uint64_t mode);
  std::uint64_t (*current_graph)();
};
extern const Runtime runtime;

std::uint64_t push(Stream* stream, std::unique_ptr<Operation> operation);
void run_stream(Stream* stream);

}  // namespace cupysim
