// The scheduler: one source for the GPU's scheduling node, the simulator, and the host-driven paths.
// No heap, no exceptions, no STL. engine/reference.py is its readable twin; equal traces, equal plans.
//
// A step: publish what the last forward pass sampled, poll the ring, admit, plan the next pass.
//
// Rules that keep it right
// - A sequence ends once: finish_reason is set once, its terminal entry is written once, and only then is
//   its slot FREE. Pages go back when no planned pass may still write to them (pending == 0).
// - Order of service: (priority, arrival). A preempted sequence keeps its arrival, so the oldest of the
//   most urgent always advances, and every sequence fits the pool alone: no livelock.
// - Room in the token ring is claimed when a sample is planned, so publishing never waits; a full ring
//   pauses the sequences of its port and no others: they use none of the budget, are not admitted, and
//   give up place and pages to whoever waits for them.
#pragma once
#include "admit.cuh"
#include "plan.cuh"
#include "poll.cuh"
#include "publish.cuh"
