// The CUDA sampler on the CPU, with fibers for threads (cuda_fibers.h). Whatever is PTX is left out: caches
// and clocks, which no result depends on.
#include <initializer_list>

#include "cuda_fibers.h"

#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define __CUDACC__
#define asm
#define volatile(...)
#include "step_kernels.cu"
#undef volatile
#undef asm

// logits: [rows][vocab], changed; raw, seen: as sample_step wants them.
extern "C" void bb_sample(Scheduler* s, int rows, float* logits, float* raw, uint32_t* seen) {
  std::vector<Peak> peaks(size_t(rows) * kPeakParts);
  fibers::launch({unsigned(rows), kPeakParts}, kPeakThreads,
                 [&] { peak_step(s, logits, peaks.data()); });
  fibers::launch({unsigned(rows), 1}, kThreads,
                 [&] { sample_step(s, logits, raw, seen, peaks.data()); });
}
