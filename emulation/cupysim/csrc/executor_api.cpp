// The executor as the device process's Python calls it, through ctypes (executor.py).
#include "executor.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <utility>

using namespace cupysim;

static std::mutex graph_mutex;  // of the table's writers
static std::uint64_t graph_generation = 0;
static std::vector<std::unique_ptr<Graph>> destroyed_graphs;

#define API extern "C" __attribute__((visibility("default")))

API void cupysim_init(PythonCall call, PythonRelease release) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a kernel's printf survives the process's end
  python_call = call;
  python_release = release;
}
API void cupysim_describe(const char* text) { python_error = text; }
API const void* cupysim_runtime() { return &runtime; }

// ---- streams ------------------------------------------------------------------------------

API Stream* cupysim_stream_create() { return new Stream; }
API void cupysim_set_forget_stream(Stream* stream) { forget_stream = stream; }

// The worker's body; returns once the stream is closed and empty. The struct stays: other streams
// may still hold tickets of it.
API void cupysim_stream_run(Stream* stream) { run_stream(stream); }
API void cupysim_stream_close(Stream* stream) {
  {
    std::lock_guard lock(stream->mutex);
    stream->closing = true;
  }
  stream->added.notify_one();
}
API std::uint64_t cupysim_stream_pushed(Stream* stream) { return stream->pushed.load(); }
API std::uint64_t cupysim_stream_completed(Stream* stream) { return stream->completed.load(); }
API std::uint64_t cupysim_stream_push(Stream* stream, Operation* operation) {
  std::unique_ptr<Operation> owned(operation);
  return push(stream, std::move(owned));
}

// ---- operations ---------------------------------------------------------------------------

API Operation* cupysim_op_kernel(Trampoline run, const char* name, const unsigned* grid,
                                 const unsigned* block, const unsigned char* blob,
                                 std::size_t num_bytes, unsigned num_args) {
  auto operation = std::make_unique<Operation>(Kind::kernel);
  operation->run = run;
  operation->name = name;
  std::memcpy(operation->grid, grid, sizeof operation->grid);
  std::memcpy(operation->block, block, sizeof operation->block);
  // The blob: num_args offsets (u32, multiples of 16), padding to 16 bytes, the arguments.
  operation->arguments.resize((num_bytes + sizeof(Chunk) - 1) / sizeof(Chunk));
  if (num_bytes) std::memcpy(operation->arguments.data(), blob, num_bytes);
  auto* base = reinterpret_cast<unsigned char*>(operation->arguments.data());
  for (unsigned i = 0; i < num_args; ++i) {
    std::uint32_t offset;
    std::memcpy(&offset, base + std::size_t{i} * 4, 4);
    operation->pointers.push_back(base + offset);
  }
  return operation.release();
}
API Operation* cupysim_op_copy(void* target, const void* source, std::size_t num_bytes) {
  auto* operation = new Operation(Kind::copy);
  operation->target = target;
  operation->source = source;
  operation->num_bytes = num_bytes;
  return operation;
}
API Operation* cupysim_op_fill(void* target, int value, std::size_t num_bytes) {
  auto* operation = new Operation(Kind::fill);
  operation->target = target;
  operation->value = value;
  operation->num_bytes = num_bytes;
  return operation;
}
API Operation* cupysim_op_data(void* target, const void* data, std::size_t num_bytes) {
  auto* operation = new Operation(Kind::data);
  operation->target = target;
  operation->num_bytes = num_bytes;
  operation->arguments.resize((num_bytes + sizeof(Chunk) - 1) / sizeof(Chunk));
  if (num_bytes) std::memcpy(operation->arguments.data(), data, num_bytes);
  return operation;
}
API Operation* cupysim_op_python(std::uint64_t id, const char* name) {
  auto* operation = new Operation(Kind::python);
  operation->id = id;
  operation->name = name;
  return operation;
}
API Operation* cupysim_op_record(EventRef* event) {
  auto* operation = new Operation(Kind::record);
  operation->event = *event;
  operation->id = (*event)->issued.fetch_add(1) + 1;
  return operation;
}
API Operation* cupysim_op_wait_event(EventRef* event) {
  auto* operation = new Operation(Kind::wait_event);
  operation->event = *event;
  operation->id = (*event)->issued.load();
  return operation;
}
API Operation* cupysim_op_wait_stream(Stream* stream) {
  auto* operation = new Operation(Kind::wait_stream);
  operation->stream = stream;
  operation->id = stream->pushed.load();
  return operation;
}
API Operation* cupysim_op_notify(int socket, std::uint64_t request) {
  auto* operation = new Operation(Kind::notify);
  operation->value = dup(socket);  // outlives the connection's own descriptor
  operation->id = request;
  return operation;
}
API Operation* cupysim_op_graph(std::uint64_t handle) {  // null: no such graph
  std::lock_guard lock(graph_mutex);
  Graph* graph = find_graph(handle);
  if (!graph) return nullptr;
  auto* operation = new Operation(Kind::graph);
  operation->graph = graph;
  graph->queued.fetch_add(1);
  return operation;
}

// ---- events -------------------------------------------------------------------------------

API EventRef* cupysim_event_create() { return new EventRef(std::make_shared<Event>()); }
API void cupysim_event_destroy(EventRef* event) { delete event; }
API int cupysim_event_done(EventRef* event) {
  return (*event)->done.load() >= (*event)->issued.load() ? 1 : 0;
}
API std::int64_t cupysim_event_time_ns(EventRef* event) {
  const bool recorded = (*event)->issued.load() > 0;
  return recorded && cupysim_event_done(event) ? (*event)->time_ns.load() : -1;
}

API void cupysim_event_wait(EventRef* event) {
  const EventRef held = *event;
  const std::uint64_t ticket = held->issued.load();
  completion.wait([&] { return held->done.load() >= ticket || failed.load(); });
}

// ---- graphs -------------------------------------------------------------------------------

API Graph* cupysim_graph_create() { return new Graph; }
API void cupysim_graph_discard(Graph* graph) { delete graph; }  // one never instantiated
API void cupysim_graph_append(Graph* graph, Operation* node) { graph->nodes.emplace_back(node); }

API std::uint64_t cupysim_graph_instantiate(Graph* graph) {  // 0: the table is full
  std::lock_guard lock(graph_mutex);
  for (std::size_t index = 0; index < kMaxGraphs; ++index) {
    if (graph_table[index].load()) continue;
    graph->handle = (++graph_generation << 32) | (index + 1);
    graph_table[index].store(graph);
    return graph->handle;
  }
  return 0;
}
API int cupysim_graph_destroy(std::uint64_t handle) {
  std::vector<std::unique_ptr<Graph>> unused;  // freed after the lock: nodes call Python
  {
    std::lock_guard lock(graph_mutex);
    if (Graph* graph = find_graph(handle)) {
      graph_table[(handle & 0xffffffffull) - 1].store(nullptr);
      destroyed_graphs.emplace_back(graph);
    }
    // A device-side launch may hold any graph that it found before; wait for a quiet moment.
    if (running_graphs.load() != 0) return 0;
    auto keep = destroyed_graphs.begin();
    for (auto& graph : destroyed_graphs) {
      if (graph->queued.load() == 0) {
        unused.push_back(std::move(graph));
      } else {
        std::swap(*keep++, graph);
      }
    }
    destroyed_graphs.erase(keep, destroyed_graphs.end());
  }
  return static_cast<int>(unused.size());
}
API void cupysim_counters(std::uint64_t* out) {
  out[0] = num_graph_runs.load();
  out[1] = num_device_launches.load();
}

// ---- the device's error -------------------------------------------------------------------

API std::size_t cupysim_error(char* out, std::size_t capacity) {  // length; 0: none
  if (!failed.load() || capacity == 0) return 0;
  std::lock_guard lock(error_mutex);
  const std::size_t length = error_text.copy(out, capacity - 1);
  out[length] = '\0';
  return length;
}
API void cupysim_fail(const char* text) { fail(text, false); }
API void cupysim_wait_fatal() {
  completion.wait([] { return fatal.load(); });
}
// Waits until what is in the streams now has run: 1, or 0 after limit_ms (-1: no limit).
API int cupysim_streams_wait(Stream** streams, std::size_t count, int limit_ms) {
  std::vector<std::uint64_t> tickets;
  for (std::size_t i = 0; i < count; ++i) tickets.push_back(streams[i]->pushed.load());
  const auto drained = [&] {
    for (std::size_t i = 0; i < count; ++i) {
      if (streams[i]->completed.load() < tickets[i]) return false;
    }
    return true;
  };
  if (limit_ms >= 0) return completion.wait_for(drained, std::chrono::milliseconds(limit_ms));
  completion.wait(drained);
  return 1;
}
