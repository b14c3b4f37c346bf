// One turn of the scheduler by a block of GPU threads, under the usual name: all of its memory goes to the
// device and comes back, so that the host's side of a test sees no difference.
#include <stdio.h>
#include <stdlib.h>

#include "step.cuh"

using namespace blinkbed;

namespace {

constexpr int kThreads = 256;

__global__ void turn(Scheduler* s) {
  scheduler_step(Team{int(threadIdx.x), int(blockDim.x)}, *s, *s->plan, s->rows, s->results);
}

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "%s: %s\n", call, cudaGetErrorString(error));
  abort();
}

struct Span {
  void* host;
  void** field;  // in the device's copy of the state
  size_t bytes;
};

template <class T>
Span span(T*& field, size_t count) {
  return {const_cast<void*>(static_cast<const void*>(field)), reinterpret_cast<void**>(&field),
          count * sizeof(T)};
}

}  // namespace

extern "C" void bb_scheduler_step(Scheduler* s) {
  Scheduler copy = *s;
  const size_t seqs = size_t(s->num_seqs), rows = size_t(s->max_running), pages = size_t(s->num_pages);
  Span spans[] = {
      span(copy.window, s->port_bytes * size_t(s->num_ports)),
      span(copy.records, s->slot_bytes * seqs),
      span(copy.sequences, seqs),
      span(copy.ports, size_t(s->num_ports)),
      span(copy.history, seqs * size_t(s->max_context)),
      span(copy.block_tables, seqs * size_t(s->max_pages_per_seq)),
      span(copy.free_pages, pages),
      span(copy.running, rows),
      span(copy.waiting, seqs + 1),
      span(copy.ended, seqs),
      span(copy.suspects, seqs),
      span(copy.marks, 2 * rows > pages ? 2 * rows : pages),
      span(copy.plan, 1),
      span(copy.rows, rows),
      span(copy.results, rows),
      span(copy.alternatives, rows * kMaxLogprobs),
  };
  size_t total = 256;
  for (const Span& x : spans) total += (x.bytes + 255) / 256 * 256;
  static uint8_t* memory = nullptr;
  static size_t capacity = 0;
  if (total + 1024 > capacity) {
    check(cudaFree(memory), "cudaFree");
    capacity = 2 * total + 1024;
    check(cudaMalloc(&memory, capacity), "cudaMalloc");
  }
  uint8_t* at = memory + 1024;
  for (const Span& x : spans) {
    check(cudaMemcpy(at, x.host, x.bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
    *x.field = at;
    at += (x.bytes + 255) / 256 * 256;
  }
  check(cudaMemcpy(memory, &copy, sizeof copy, cudaMemcpyHostToDevice), "cudaMemcpy");
  turn<<<1, kThreads>>>(reinterpret_cast<Scheduler*>(memory));
  check(cudaGetLastError(), "turn<<<>>>");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  check(cudaMemcpy(&copy, memory, sizeof copy, cudaMemcpyDeviceToHost), "cudaMemcpy");
  for (const Span& x : spans) {
    check(cudaMemcpy(x.host, *x.field, x.bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
    *x.field = x.host;
  }
  *s = copy;
}
