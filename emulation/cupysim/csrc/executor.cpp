#include "executor.h"

#include <linux/prctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <ctime>
#include <exception>

namespace cupysim {

Completion completion;

std::atomic<bool> failed{false};
std::atomic<bool> fatal{false};  // a graph failed: the device process must end
std::mutex error_mutex;
std::string error_text;

void fail(const std::string& text, bool in_graph) {
  {
    std::lock_guard lock(error_mutex);
    if (!failed.load()) {
      error_text = text;
      std::fprintf(stderr, "cupysim device: %s\n", text.c_str());
      std::fflush(stderr);
    }
  }
  failed.store(true);
  if (in_graph) fatal.store(true);
  completion.announce();
}

PythonCall python_call = nullptr;
PythonRelease python_release = nullptr;

Operation::~Operation() {
  if (kind == Kind::python && python_release) python_release(id);
  if (graph) graph->queued.fetch_sub(1);
  if (kind == Kind::notify) close(value);
}

std::array<std::atomic<Graph*>, kMaxGraphs> graph_table;
std::atomic<int> running_graphs{0};

Graph* find_graph(std::uint64_t handle) {
  const std::uint64_t index = (handle & 0xffffffffull) - 1;
  if (index >= kMaxGraphs) return nullptr;
  Graph* graph = graph_table[index].load();
  return graph && graph->handle == handle ? graph : nullptr;
}

// ---- running graphs -----------------------------------------------------------------------

namespace {
struct GraphRun {
  Graph* current = nullptr;
  std::vector<Graph*> tails;
  std::atomic<int> children{0};  // fire-and-forget launches that have not ended
};
}  // namespace
static thread_local GraphRun* graph_run = nullptr;

Stream* forget_stream = nullptr;
std::atomic<std::uint64_t> num_graph_runs{0};
std::atomic<std::uint64_t> num_device_launches{0};

std::uint64_t push(Stream* stream, std::unique_ptr<Operation> operation) {
  std::uint64_t ticket;
  {
    std::lock_guard lock(stream->mutex);
    stream->queue.push_back(std::move(operation));
    ticket = stream->pushed.fetch_add(1) + 1;
  }
  stream->added.notify_one();
  return ticket;
}

static int device_graph_launch(std::uint64_t handle, std::uint64_t mode) {
  GraphRun* run = graph_run;
  if (!run) return kNotSupported;  // only a kernel of a graph may launch from the device
  Graph* graph = find_graph(handle);
  if (!graph) return kInvalidValue;
  if (mode == kTailLaunch) {
    if (run->tails.size() >= kMaxTailLaunches) return kPendingCountExceeded;
    run->tails.push_back(graph);
  } else if (mode == kFireAndForget) {
    auto operation = std::make_unique<Operation>(Kind::graph);
    operation->graph = graph;
    operation->source = run;
    graph->queued.fetch_add(1);
    run->children.fetch_add(1);
    push(forget_stream, std::move(operation));
  } else {
    return kInvalidValue;
  }
  num_device_launches.fetch_add(1, std::memory_order_relaxed);
  return kSuccess;
}

static std::uint64_t current_graph_handle() {
  return graph_run && graph_run->current ? graph_run->current->handle : 0;
}

const Runtime runtime = {&device_graph_launch, &current_graph_handle};

static void run_kernel(Operation& operation) {
  try {
    operation.run(operation.pointers.data(), operation.grid, operation.block);
  } catch (const std::exception& error) {
    fail("kernel " + operation.name + " failed: " + error.what(), graph_run != nullptr);
  } catch (...) {
    fail("kernel " + operation.name + " failed with an unknown exception", graph_run != nullptr);
  }
}

thread_local std::string python_error;

static void run_python(Operation& operation) {
  if (python_call(operation.id) != 0) {
    fail(operation.name + " raised " + python_error, graph_run != nullptr);
  }
}

// Zeroing much memory gives its pages back instead, so that a large zeroed pool costs what is
// used of it. Not in a graph, which would fault the same pages in again at every run.
static void fill(Operation& operation) {
  auto* begin = static_cast<unsigned char*>(operation.target);
  unsigned char* end = begin + operation.num_bytes;
  if (operation.value == 0 && operation.num_bytes >= kLargeFillBytes && !graph_run) {
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto address = reinterpret_cast<std::uintptr_t>(begin);
    unsigned char* first = begin + (page - address % page) % page;
    unsigned char* last = end - reinterpret_cast<std::uintptr_t>(end) % page;
    if (madvise(first, static_cast<std::size_t>(last - first), MADV_REMOVE) == 0) {
      std::memset(begin, 0, static_cast<std::size_t>(first - begin));
      begin = last;
    }
  }
  std::memset(begin, operation.value, static_cast<std::size_t>(end - begin));
}

// What a graph's node may be; the rest of an operation's kinds belong to streams.
static void run_node(Operation& operation) {
  switch (operation.kind) {
    case Kind::kernel: run_kernel(operation); break;
    case Kind::copy: std::memmove(operation.target, operation.source, operation.num_bytes); break;
    case Kind::fill: fill(operation); break;
    case Kind::data:
      std::memcpy(operation.target, operation.arguments.data(), operation.num_bytes);
      break;
    case Kind::python: run_python(operation); break;
    case Kind::graph:  // a child graph
      for (auto& node : operation.graph->nodes) {
        if (!failed.load(std::memory_order_relaxed)) run_node(*node);
      }
      break;
    default: break;
  }
}

// Order of tail launches as on a GPU: a graph's own tail launches run before those that an
// earlier graph had already asked for.
static void run_graph(Graph* first) {
  running_graphs.fetch_add(1);
  GraphRun run;
  std::vector<Graph*> pending = {first};
  graph_run = &run;
  while (!pending.empty() && !failed.load(std::memory_order_relaxed)) {
    run.current = pending.back();
    pending.pop_back();
    for (auto& node : run.current->nodes) {
      run_node(*node);
      if (failed.load(std::memory_order_relaxed)) break;
    }
    completion.wait([&] { return run.children.load() == 0; });
    num_graph_runs.fetch_add(1, std::memory_order_relaxed);
    pending.insert(pending.end(), run.tails.rbegin(), run.tails.rend());
    run.tails.clear();
  }
  graph_run = nullptr;
  running_graphs.fetch_sub(1);
}

// ---- running streams ----------------------------------------------------------------------

static std::int64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
}

// One reply frame: request id, status (0 done, 1 the device's error with its text).
static void notify(Operation& operation) {
  std::string frame(12, '\0');
  const std::uint32_t status = failed.load() ? 1 : 0;
  std::memcpy(&frame[0], &operation.id, 8);
  std::memcpy(&frame[8], &status, 4);
  if (status) {
    std::lock_guard lock(error_mutex);
    frame += error_text;
  }
  // A client that is gone does not matter here: its work goes on without it.
  (void)!send(operation.value, frame.data(), frame.size(), MSG_NOSIGNAL);
}

static void run_operation(Operation& operation) {
  switch (operation.kind) {
    case Kind::record:
      operation.event->time_ns.store(monotonic_ns());
      operation.event->done.store(operation.id);
      return;  // announced with the stream's own progress
    case Kind::wait_event:
      completion.wait(
          [&] { return operation.event->done.load() >= operation.id || failed.load(); });
      return;
    case Kind::wait_stream:
      completion.wait(
          [&] { return operation.stream->completed.load() >= operation.id || failed.load(); });
      return;
    case Kind::graph:
      if (!failed.load()) run_graph(operation.graph);
      if (operation.source) {
        auto* parent = static_cast<GraphRun*>(const_cast<void*>(operation.source));
        parent->children.fetch_sub(1);
        completion.announce();
      }
      return;
    default:
      if (!failed.load()) run_node(operation);
  }
}

void run_stream(Stream* stream) {
  prctl(PR_SET_TIMERSLACK, 1UL);  // __nanosleep means nanoseconds, not the default 50 us more
  for (;;) {
    std::unique_ptr<Operation> operation;
    {
      std::unique_lock lock(stream->mutex);
      stream->added.wait(lock, [&] { return !stream->queue.empty() || stream->closing; });
      if (stream->queue.empty()) break;
      operation = std::move(stream->queue.front());
      stream->queue.pop_front();
    }
    // A reply counts as done before it is sent: who has it must find the stream idle.
    const bool reply = operation->kind == Kind::notify;
    if (!reply) run_operation(*operation);
    stream->completed.fetch_add(1);
    completion.announce();
    if (reply) notify(*operation);
  }
}

}  // namespace cupysim
